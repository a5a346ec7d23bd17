"""What is imported when it is first asked for, and what an installation may lack: extras and features.

What a user installs for an extra is worded here, for every error.

A feature such as `bridge.recording` may be called by users, and yet has to serve an environment with a page, which it
knows nothing of; and an environment tells by properties what features know of it. So the composition root,
`bridge/__init__.py`, says by `provide` where such things are, and who needs them asks by `provided`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

__all__ = [
    "feature",
    "has_feature",
    "imported_from",
    "install_command",
    "is_installed",
    "lazy_names",
    "needed",
    "provide",
    "provided",
    "says_what_to_install",
]


_OURS = "gymnasium-bridge["
"""What the `name` of an error of `imported_from` begins with; Python's own have that of a module."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra, in a clone of the repository: no package index has the package yet."""
    return f"pip install -e '.[{extra}]' (in the folder of your clone of the repository)"


@contextlib.contextmanager
def needed(problem: str, extra: str) -> Iterator[None]:
    """Say which extra to install where a package that is imported within is missing.

    The error stands alone: that of the import says nothing more, unless the package is there and broken.

    Args:
        problem: What is missing, and for what: "films need PyAV".
        extra: The extra that brings it.

    Raises:
        SettingError: An import failed.
    """
    try:
        yield
    except ImportError as error:
        from bridge.errors import SettingError  # here: it imports Gymnasium, and packages are to be imported quickly

        raise SettingError(_remedy(error, problem, extra)) from _cause(error)


@contextlib.contextmanager
def imported_from(problem: str, extra: str) -> Iterator[None]:
    """Say which extra to install where a module of ours imports a package that is missing.

    Args:
        problem: What is missing, and for what: "recordings need pyarrow".
        extra: The extra that brings it.

    Raises:
        ImportError: An import failed.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(_remedy(error, problem, extra), name=f"{_OURS}{extra}]") from _cause(error)


def says_what_to_install(error: ImportError) -> bool:
    """True for an error of `imported_from`, whose text is a whole remedy."""
    return (error.name or "").startswith(_OURS)


def _remedy(error: ImportError, problem: str, extra: str) -> str:
    """Return what to do about an import that failed."""
    if says_what_to_install(error):  # of a module of ours, deeper inside
        return str(error)
    remedy = f"{problem}: {install_command(extra)}"
    return remedy if _is_absent(error) else f"{remedy}; what is installed cannot be imported: {error}"


def _cause(error: ImportError) -> ImportError | None:
    """Return the error that a reader needs beside the remedy; None: none, since a package is just not there."""
    return None if says_what_to_install(error) or _is_absent(error) else error


def _is_absent(error: ImportError) -> bool:
    """True if a module was not found; a package that is there and broken raises other errors."""
    return isinstance(error, ModuleNotFoundError)


@contextlib.contextmanager
def feature(name: str, purpose: str) -> Iterator[None]:
    """Say which feature of this package is missing where a module of it is imported within.

    The features are folders of `bridge` that an installation may lack, such as `bridge.perlert`.

    Args:
        name: The folder: `perlert`.
        purpose: What needs it: "a URL of perlert://".

    Raises:
        SettingError: The installation lacks it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not f"{error.name}.".startswith(f"bridge.{name}."):
            raise
        from bridge.errors import SettingError  # as above

        raise SettingError(f"this installation lacks bridge.{name}, which {purpose} needs") from None


def has_feature(name: str) -> bool:
    """True if this installation has a feature, such as `perlert`; imports nothing of it."""
    return is_installed(f"bridge.{name}")


def is_installed(package: str) -> bool:
    """True if a package can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # an import hook hides it
        return False


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
    features; `reseed` the function that seeds the random generators of an environment anew in the middle of an episode,
    by `reseed(env, seed)`; `as_policy` the function that returns the policy that a user names by a function, `"random"`
    or a URL.

    Raises:
        LookupError: There is nothing of this name.
    """
    if name not in _places:
        raise LookupError(f"expected one of {', '.join(_places)}, which the package provides, got {name!r}")
    module, _, attribute = _places[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
