"""The rewards of an environment: numbers, or arrays where it has a `reward_space`, as MO-Gymnasium's have."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AsyncVectorEnv

from bridge.encoding import values
from bridge.encoding.spaces import Layout
from bridge.encoding.tensors import Array, Spec
from bridge.errors import Code, RequestError, SettingError, TensorError
from bridge.worlds.kinds import Lanes

__all__ = ["Rewards", "as_number", "refuse_array_rewards"]

_REMEDY = (
    "an environment of several agents is served with serve_parallel; a reward of several objectives needs a "
    "reward_space, or a wrapper on the server that makes it a number, such as mo_gymnasium.wrappers.LinearReward"
)


class Rewards:
    """Reads what environments give as rewards.

    Args:
        space: That of array rewards; None: they are numbers.
        lanes: How many there are at a time; None: those of a single environment.
    """

    def __init__(self, space: Space[object] | None, lanes: int | None) -> None:
        number = Spec.number("reward", () if lanes is None else (lanes,), np.float64)
        self._layout = None if space is None else Layout(space, "reward", lanes)
        self.spec = number if self._layout is None else self._layout.specs[0]
        self._lanes = lanes
        self.plain_type = float if space is None and lanes is None else None
        """The type of rewards that need not be read, as nearly all are; None: all need it."""

    def read(self, reward: object, notes: values.Notes) -> object:
        """Return a reward: a float, or an array of the reward space; of lanes an array `(lanes, …)`.

        Raises:
            RequestError: It is no number, or not of the reward space.
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


def as_number(reward: Any) -> float:
    """Return a reward as a float, also that of an array of one element; raises RequestError where it is no number."""
    try:
        # `item` raises ValueError where there are more than one.
        return float(reward.item() if isinstance(reward, np.ndarray) else reward)
    except (TypeError, ValueError):
        size = f" of {len(reward)}" if hasattr(reward, "__len__") else ""
        raise RequestError(
            Code.INTERNAL,
            f"expected a number as the environment's reward, got a {type(reward).__name__}{size}: {reward!r:.80}; "
            f"{_REMEDY}",
        ) from None


def refuse_array_rewards(env: Lanes, space: Space[object] | None) -> None:
    """Raise SettingError where a vector environment of Gymnasium cannot hold array rewards of its lanes."""
    vector = env.unwrapped
    of_gymnasium = isinstance(vector, AsyncVectorEnv) or type(vector).__module__.startswith("gymnasium.")
    if space is not None and of_gymnasium:
        text = f"expected vectorization_mode='sync' for rewards of {space}, which {type(vector).__name__} does not take"
        raise SettingError(text)
