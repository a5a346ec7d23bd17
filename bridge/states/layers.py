"""The *layers* of an environment: its wrappers and itself."""

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
    """Return an environment's wrappers, outermost first, the environment, and environments in its attributes."""
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
    """Yield the environments in a layer's attributes; for a vector environment also those in lists."""
    of_lanes = isinstance(layer, VectorEnv)
    for name, value in fields_of(layer):
        if type(value) in IMMUTABLE:  # a fast path: most fields are
            continue
        # The `env` of our own vector environment may be of any class.
        if is_env(value) or (name == "env" and of_lanes):
            yield value
        elif of_lanes and type(value) in (list, tuple):
            yield from filter(is_env, value)


def make_generators(layers: Iterable[Any]) -> None:
    """Make the environments' generators now, which otherwise are made at their first use with a random seed."""
    for layer in layers:
        is_wrapper = isinstance(layer, (gymnasium.Wrapper, VectorWrapper))
        draws = isinstance(layer, (gymnasium.Env, VectorEnv)) and not is_wrapper
        if draws and getattr(layer, "_np_random", layer) is None:
            _ = layer.np_random


def titles(kinds: Iterable[type]) -> str:
    """Return the class names of layers, for a message."""
    return " of ".join(kind.__name__ for kind in kinds)
