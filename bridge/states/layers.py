"""The *layers* of an environment: its wrappers, and itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv, VectorWrapper

from bridge.states.constants import IMMUTABLE
from bridge.states.fields import fields_of, is_env

__all__ = ["layers_of", "make_generators", "titles"]


def layers_of(env: Any) -> list[Any]:
    """Return an environment's wrappers, the outermost first, the environment, and those that it holds as attributes."""
    found: list[Any] = []
    waiting: deque[Any] = deque([env])
    while waiting:
        layer = waiting.popleft()
        if any(layer is other for other in found):
            continue
        found.append(layer)
        waiting.extend(_within(layer))
    return found


def _within(layer: Any) -> Iterator[Any]:
    """Give the environments that one holds as attributes; one of lanes also those in a list."""
    of_lanes = isinstance(layer, VectorEnv)
    for name, value in fields_of(layer):
        if type(value) in IMMUTABLE:  # most are
            continue
        # What one of ours stands for may be of any class.
        if is_env(value) or (name == "env" and of_lanes):
            yield value
        elif of_lanes and type(value) in (list, tuple):
            yield from filter(is_env, value)


def make_generators(layers: Iterable[Any]) -> None:
    """Have environments make their generators, which they do at the first use, by chance: so the chance is known."""
    for layer in layers:
        is_wrapper = isinstance(layer, (gymnasium.Wrapper, VectorWrapper))
        draws = isinstance(layer, (gymnasium.Env, VectorEnv)) and not is_wrapper
        if draws and getattr(layer, "_np_random", layer) is None:
            _ = layer.np_random


def titles(kinds: Iterable[type]) -> str:
    """Return the names of layers' classes, for a message."""
    return " of ".join(kind.__name__ for kind in kinds)
