"""Worlds of a user's own: what the keyword `world` takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from bridge.core.plugins import found, load, loading, package_of
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.turns import TurnPacer, Turns, refuse_lanes
from bridge.core.worlds.world import WorldKind, paced_by
from bridge.errors import SettingError

__all__ = ["GROUP", "OwnWorld", "own_world"]

GROUP = "gymnasium_bridge.worlds"
"""The group of entry points of other packages' worlds."""
OwnWorld: TypeAlias = "Callable[[], TurnPacer | Pacer] | WorldKind"
"""A class of pacers, what else makes them without arguments, or what makes worlds."""


def own_world(given: str | OwnWorld, lanes: int = 1) -> WorldKind:
    """Return what makes a server's worlds.

    Args:
        given: A class derived from `TurnPacer`, or another callable that returns such a pacer, and takes no argument;
            a callable that makes a world of its name, its environment and its scheduler; or the name of one of these
            among the entry points of installed packages.
        lanes: How many lanes its worlds have.

    Raises:
        SettingError: It is none of these.
    """
    if isinstance(given, str):
        made = load(GROUP, given, "world")
        with loading(f"the world {given}", package_of(found(GROUP)[given])):
            return _own_world(f"world={given!r}", made, lanes)
    return _own_world("world", given, lanes)


def _own_world(what: str, given: OwnWorld, lanes: int) -> WorldKind:
    is_pacer = isinstance(given, type) and issubclass(given, (TurnPacer, Pacer))
    if not callable(given):
        raise SettingError(
            f"expected {what} to be a class derived from bridge.TurnPacer, or a callable that makes a world of its "
            f"name, its environment and its scheduler, got {given!r:.80}"
        )
    if _takes_nothing(given):
        made: Any = given
        # One to look at: the operator hears of a mistake as the server starts, and no client has to.
        if isinstance(_pacer(what, made()), Turns):
            refuse_lanes(made, lanes)
        return paced_by(lambda: _pacer(what, made()))
    if is_pacer:
        raise SettingError(
            f"expected {what} to be made without arguments, which {given.__name__} needs: give "
            f"functools.partial({given.__name__}, …)"
        )
    return given  # type: ignore[return-value]


def _takes_nothing(given: Callable[..., object]) -> bool:
    try:
        inspect.signature(given).bind()
    except (TypeError, ValueError):
        return False
    return True


def _pacer(what: str, made: object) -> Pacer:
    if isinstance(made, TurnPacer):
        return Turns(made)
    if not isinstance(made, Pacer):
        raise SettingError(f"expected {what} to make a bridge.TurnPacer, got {made!r:.80}")
    return made
