"""The actions that stand in where no agent gives one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from bridge.errors import SettingError

__all__ = [
    "DEFAULT",
    "allowed_choices",
    "check_default_action",
    "default_action",
    "is_allowed",
    "name_of_function",
    "neutral_action",
]


class _Default:
    """Stands for the default action of an agent."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT = _Default()
"""In the actions of several agents: this one has none, a default one is to be found."""


def neutral_action(space: spaces.Space[object]) -> Any:
    """Return the element of a space that is nearest to doing nothing: zeros, the first choice, the shortest text."""
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return np.array(space.start, dtype=space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape, dtype=space.dtype)
    if isinstance(space, spaces.Dict):
        return {key: neutral_action(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(neutral_action(part) for part in space.spaces)
    if isinstance(space, spaces.Text):
        return space.character_list[0] * space.min_length if space.min_length else ""
    if isinstance(space, spaces.OneOf):
        return np.int64(0), neutral_action(space.spaces[0])
    # A copy with a seed: the same action each time, and the user's random generator does not move.
    same = copy.deepcopy(space)
    same.seed(0)
    return same.sample()


def default_action(agent: object, observation: object, space: spaces.Space[Any]) -> Any:
    """Return an action that does little: the first that is allowed, or the neutral one.

    Args:
        agent: The agent's id.
        observation: What it saw last; of a dict with `action_mask` the mask is obeyed.
        space: Its action space.
    """
    mask = allowed_choices(observation, space)
    if mask is None or not isinstance(space, spaces.Discrete):
        return neutral_action(space)
    return space.dtype.type(int(space.start) + int(np.argmax(mask)))


def check_default_action(function: object) -> None:
    """Raise SettingError for what gives no default actions."""
    if function is not None and not callable(function):
        raise SettingError(f"expected default_action to be a callable (agent, observation, space), got {function!r}")


def is_allowed(action: Any, observation: object, space: spaces.Space[Any]) -> bool:
    """Return whether the `action_mask` of an agent's last observation allows an action; True where there is none."""
    mask = allowed_choices(observation, space)
    return mask is None or not isinstance(space, spaces.Discrete) or bool(mask[int(action) - int(space.start)])


def allowed_choices(observation: object, space: spaces.Space[Any]) -> Any:
    """Return an `action_mask` that allows anything, an array with an element for each choice; None: there is none."""
    mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
    # A mask that forbids everything, as of an agent whose turn it is not, says nothing.
    return mask if isinstance(space, spaces.Discrete) and mask is not None and np.any(mask) else None


def name_of_function(given: object) -> str:
    """Return what a person is told that a function is called which chooses actions; `policy` where it has no name."""
    named = given.func if isinstance(given, partial) else given
    if not (inspect.isroutine(named) or inspect.isclass(named)):
        named = type(named)
    name = str(getattr(named, "__name__", ""))
    return name if name.isidentifier() else "policy"
