"""The rewards of an environment: numbers, or arrays if it has a `reward_space`, as in MO-Gymnasium."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AsyncVectorEnv

from bridge.core.encoding import values
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Array, Spec
from bridge.core.worlds.kinds import Lanes
from bridge.errors import Code, RequestError, SettingError, TensorError

__all__ = [
    "HELD_BY_FLOAT64",
    "Rewards",
    "as_number",
    "as_typed",
    "is_held_by_float64",
    "refuse_array_rewards",
    "reward_type",
]

_REMEDY = (
    "an environment of several agents is served with serve_parallel; a reward of several objectives needs a "
    "reward_space, or a wrapper on the server that makes it a number, such as mo_gymnasium.wrappers.LinearReward"
)

_HELD_INTEGERS = (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32)
HELD_BY_FLOAT64 = frozenset((float, np.float64, np.float32, np.float16, bool, np.bool_, *_HELD_INTEGERS))
"""Types of numbers that a float64 represents exactly."""
# The values codec cannot send larger ones.
_LARGEST_INT = 10 ** (values.MAX_DIGITS - 1)


class Rewards:
    """Reads the rewards of environments.

    Args:
        space: The space of array rewards; None: they are numbers.
        lanes: The number of lanes; None: a single environment.
    """

    def __init__(self, space: Space[object] | None, lanes: int | None) -> None:
        number = Spec.number("reward", () if lanes is None else (lanes,), np.float64)
        self._layout = None if space is None else Layout(space, "reward", lanes)
        self.spec = number if self._layout is None else self._layout.specs[0]
        self._lanes = lanes
        self.plain_type = float if space is None and lanes is None else None
        """The type of rewards that need not be read, as in nearly all environments; None: all must be read."""

    def read(self, reward: object, notes: values.Notes) -> object:
        """Return a reward: a float, or an array of the reward space; for lanes an array `(lanes, …)`.

        Raises:
            RequestError: The reward is no number, or not in the reward space.
        """
        if type(reward) is self.plain_type:
            return reward
        if self._layout is not None:
            return self._pack(reward, notes)
        if self._lanes is None:
            return as_number(reward)
        try:
            array: Array = np.asarray(reward, np.float64)
        except (TypeError, ValueError):  # texts, or arrays of different lengths
            array = np.zeros(())
        if array.shape != (self._lanes,):
            raise RequestError(
                Code.INTERNAL,
                f"expected a number as the reward of each lane, got {reward!r:.80}; rewards of a reward_space need "
                f"vectorization_mode='sync'; {_REMEDY}",
            )
        return array

    def sum(self, one: Any, other: Any) -> Any:
        """Return the sum of two rewards that `as_typed` returned: a float, or an array if there is a reward space."""
        return as_number(one) + as_number(other) if self._layout is None else one + other

    def typed(self, reward: object, notes: values.Notes) -> Any:
        """Return a reward of a single environment in the environment's own type, as `as_typed`; raises as `read`.

        With a reward space, it is an array of that space.
        """
        return as_typed(reward) if self._layout is None else self._pack(reward, notes)

    def _pack(self, reward: object, notes: values.Notes) -> Array:
        assert self._layout is not None
        try:
            array = self._layout.pack(reward, rounding=True)[0]
        except TensorError as error:
            raise RequestError(
                Code.INTERNAL,
                f"the environment's reward is not of its reward_space: {error}; a wrapper that makes it a number says "
                "so by reward_space = None",
            ) from error
        wanted = self._layout.space.dtype
        if getattr(reward, "dtype", None) != wanted:
            got = getattr(reward, "dtype", type(reward).__name__)
            notes.add("reward", f"the environment's reward is {got}, and comes as {wanted}, as its reward_space says")
        return array


def as_typed(reward: Any) -> Any:
    """Return a reward of a single environment in its own type if that can be sent, as a local caller would get it.

    Returns:
        A Python float, int or bool, a NumPy bool, integer or float of at most 64 bits, or an array of one of these; any
        other number, such as a Fraction, a longdouble or a tensor, as a float.

    Raises:
        RequestError: It is no number.
    """
    if type(reward) in HELD_BY_FLOAT64:
        return reward
    # A mask cannot be sent, and the bytes of a longdouble have another meaning on another processor.
    if isinstance(reward, (np.ndarray, np.generic)) and not isinstance(reward, np.ma.MaskedArray):
        if reward.dtype.kind in "biuf" and reward.dtype.itemsize <= 8 and reward.size == 1:
            return reward
    elif isinstance(reward, int) and -_LARGEST_INT < reward < _LARGEST_INT:
        return int(reward)
    return as_number(reward)


def reward_type(reward: Any) -> object:
    """Return the type of a reward that `as_typed` returned; for an array its dtype and shape."""
    return (reward.dtype, reward.shape) if isinstance(reward, np.ndarray) else type(reward)


def is_held_by_float64(reward: Any) -> bool:
    """True if a float64 represents a reward that `as_typed` returned exactly: only large integers do not fit."""
    # Compared as Python's own numbers: NumPy compares its integers with floats as floats.
    own = reward.item() if isinstance(reward, (np.ndarray, np.generic)) else reward
    return not isinstance(own, int) or as_number(own) == own


def as_number(reward: Any) -> float:
    """Return a reward as a float, also from an array of one element; infinite if it is beyond all floats.

    Raises:
        RequestError: It is no number.
    """
    try:
        # `item` raises ValueError for more than one element.
        return float(reward.item() if isinstance(reward, np.ndarray) else reward)
    except OverflowError:
        return math.inf if reward > 0 else -math.inf
    except (TypeError, ValueError):
        size = f" of {len(reward)}" if hasattr(reward, "__len__") else ""
        raise RequestError(
            Code.INTERNAL,
            f"expected a number as the environment's reward, got a {type(reward).__name__}{size}: {reward!r:.80}; "
            f"{_REMEDY}",
        ) from None


def refuse_array_rewards(env: Lanes, space: Space[object] | None) -> None:
    """Raise SettingError if a vector environment of Gymnasium cannot return array rewards of its lanes."""
    vector = env.unwrapped
    of_gymnasium = isinstance(vector, AsyncVectorEnv) or type(vector).__module__.startswith("gymnasium.")
    if space is not None and of_gymnasium:
        text = f"expected vectorization_mode='sync' for rewards of {space}, which {type(vector).__name__} does not take"
        raise SettingError(text)
