"""Methods that features add to the environments that users get, without the core knowing any of them.

The composition root says which there are (`provide(client_methods=…)`): a name, and the function that is called with
the environment as its first argument. It is imported when it is called first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from bridge.core.provided import provided

__all__ = ["added_method"]


def added_method(env: object, name: str) -> Callable[..., Any] | None:
    """Return a method that a feature adds, bound to an environment; None: there is none of this name."""
    try:
        methods: Mapping[str, str] = provided("client_methods")
    except LookupError:  # the package is used without its composition root
        return None
    place = methods.get(name)
    if place is None:
        return None
    module, _, function = place.partition(":")

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), function)(env, *args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call
