"""The rewards of an environment: numbers, or arrays where it has a `reward_space`, as MO-Gymnasium's have."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector import sync_vector_env as sync_module

from bridge.encoding import values
from bridge.encoding.spaces import Layout
from bridge.encoding.tensors import Array, Spec
from bridge.errors import Code, RequestError, SettingError, TensorError
from bridge.worlds.kinds import Lanes

__all__ = ["Rewards", "as_number", "explain_lane_failure", "prepare_lanes"]

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

    def read(self, reward: object, notes: values.Notes) -> object:
        """Return a reward: a float, or an array of the reward space; of lanes an array `(lanes, …)`.

        Raises:
            RequestError: It is no number, or not of the reward space.
        """
        # Nearly all rewards are floats: in each step they take the shortest way.
        if type(reward) is float and self._lanes is None:
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


class _LaneRewards(list[object]):
    """Where a SyncVectorEnv leaves the array rewards of its lanes; a number is refused but for 0.0 at a reset."""

    def __init__(self, space: Space[object], lanes: int) -> None:
        self._zero = np.zeros(space.shape or (), space.dtype)
        super().__init__([self._zero] * lanes)

    def __setitem__(self, lane: Any, reward: Any) -> None:
        # `SyncVectorEnv.step` writes 0.0 for a lane that it resets.
        if np.ndim(reward) == 0 and reward == 0:
            reward = self._zero
        # A copy: an environment may write its next reward into the same array.
        array = np.array(reward, self._zero.dtype)
        if array.shape != self._zero.shape:
            raise RequestError(
                Code.INTERNAL,
                f"the environment's reward is not of its reward_space: expected the shape {self._zero.shape}, got "
                f"{array.shape}",
            )
        super().__setitem__(lane, array)


def prepare_lanes(env: Lanes, space: Space[object] | None) -> None:
    """Let a vector environment of Gymnasium step environments whose rewards are arrays, as MO-Gymnasium's own does.

    Raises:
        SettingError: Its lanes live in other processes.
    """
    if space is None:
        return
    vector = env.unwrapped
    if type(vector) is SyncVectorEnv:
        # As MO-Gymnasium's own MOSyncVectorEnv does.
        vector._rewards = _LaneRewards(space, vector.num_envs)  # type: ignore[assignment]  # noqa: SLF001
    elif isinstance(vector, AsyncVectorEnv) or type(vector).__module__.startswith("gymnasium."):
        text = f"expected vectorization_mode='sync' for rewards of {space}, which {type(vector).__name__} does not take"
        raise SettingError(text)


def explain_lane_failure(error: BaseException, vector: Lanes) -> BaseException:
    """Return what to tell of an error in a vector environment's `step`: where it could not store a reward, that."""
    trace = error.__traceback__
    if not isinstance(error, (TypeError, ValueError)) or trace is None:
        return error
    while trace.tb_next is not None:
        trace = trace.tb_next
    # The innermost frame is in the environment's code where that raised, and in Gymnasium's where it could not write a
    # reward or a flag into its arrays, or got too few of them.
    frame = trace.tb_frame
    # An environment may step a SyncVectorEnv of its own, of which nothing is known.
    if frame.f_code.co_filename != sync_module.__file__ or frame.f_locals.get("self") is not vector:
        return error
    if "unpack" in str(error):
        return error
    return RequestError(Code.INTERNAL, f"expected a number as reward and truth values as flags: {error}; {_REMEDY}")
