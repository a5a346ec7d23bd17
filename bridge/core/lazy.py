"""What is imported when it is first asked for: public names of packages, and what features are handed from above.

A feature such as `bridge.recording` may be called by users, and yet has to serve an environment with a page, which it
knows nothing of; and an environment tells by properties what features know of it. So the composition root,
`bridge/__init__.py`, says by `provide` where such things are, and who needs them asks by `provided`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from bridge.core.extras import feature

__all__ = ["lazy_names", "provide", "provided"]


def lazy_names(
    package: str,
    places: Mapping[str, str],
    modules: Mapping[str, str] = MappingProxyType({}),
    absent: Iterable[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    Args:
        package: Its name, such as `bridge.testing`.
        places: The module of each public name.
        modules: Its public modules, each with what is imported when it is first asked for: itself or a module in it.
        absent: Names that cannot be imported here; `dir` leaves them out.
    """

    def get(name: str) -> Any:
        if name not in places and name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places.get(name) or modules[name]
        with feature(place.split(".")[1], f"{package}.{name}" if name in places else "this program"):
            module = importlib.import_module(place)
        return getattr(module, name) if name in places else sys.modules[f"{package}.{name}"]

    return get, lambda: sorted({*places, *modules}.difference(absent))


_places: dict[str, str] = {}


def provide(**places: str) -> None:
    """Say where things are.

    Args:
        places: `MODULE:NAME` of each, by the name that features ask for.
    """
    _places.update(places)


def provided(name: str) -> Any:
    """Return what the composition root provides by this name.

    `serve_gym` and `make_vec_remote` are the functions of these names, `server` is the class of servers;
    `other_schemes` says for errors which URL schemes there are beside those of servers; `client_methods` is a dict of
    what `added_method` of the client finds; `groups` the dataclasses that
    its keywords take, by keyword; `gateway_schemes` the `bridge.web.gateway.schemes.GatewayScheme` objects of this
    package; `environment_properties` the `bridge.core.worlds.environment.EnvironmentProperty` objects of its
    features; `as_policy` the function that returns the policy that a user names by a function, `"random"` or a URL.

    Raises:
        LookupError: There is nothing of this name.
    """
    if name not in _places:
        raise LookupError(f"expected one of {', '.join(_places)}, which the package provides, got {name!r}")
    module, _, attribute = _places[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
