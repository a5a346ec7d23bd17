"""What features are handed from above: a way to serve with all that this package has, and the like.

A feature such as `bridge.recording` may be called by users, and yet has to serve an environment with a page, which it
knows nothing of; and an environment tells by properties what features know of it. So the composition root,
`bridge/__init__.py`, says by `provide` where such things are, and who needs them asks by `provided`. They are imported
when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["provide", "provided"]

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
    package; `environment_properties` the `bridge.core.worlds.env_properties.EnvironmentProperty` objects of its
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
