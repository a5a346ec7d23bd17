"""The agent's latest actions as part of its observation, which restores the Markov property under delay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space, iterate

from bridge.core.client.attributes import OwnAttributes
from bridge.core.client.envs.vector_env import RemoteVectorEnv
from bridge.core.encoding.tensors import Array
from bridge.core.gymnasium_versions import BatchWrapper
from bridge.errors import SettingError

from .blocking_reset import BlockingReset

__all__ = ["ActionHistory"]

_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class ActionHistory(OwnAttributes, BatchWrapper):
    """A wrapper that appends the latest actions to observations.

    With a delay of k frames an observation does not show the effect of the latest k actions; an agent that sees these
    actions can take it into account. Works on remote vector environments, with or without `BlockingReset` (slots whose
    observation is None keep it), and on any other vector environment, such as a local one for training.

    Args:
        env: The vector environment.
        length: The number of actions, at least 1; the newest comes last. At the beginning of an episode they are
            neutral: zeros, or the first choice.
        flatten: True: the observation is one float32 vector, the flat observation and then the flat actions (a
            Discrete one as one-hot). False: a dict of `observation` and `actions`, the latter of shape
            `(length, *action shape)`.

    Raises:
        SettingError: The action space is not Box, Discrete, MultiDiscrete or MultiBinary, or `length` is below 1.
    """

    def __init__(self, env: VectorEnv[Any, Any, Array], length: int = 1, *, flatten: bool = False) -> None:
        super().__init__(env)
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise SettingError(f"expected length to be a number of actions, 1 or more, got {length!r}")
        action = env.single_action_space
        if not isinstance(action, _ARRAYS):
            raise SettingError(
                f"expected an action space that is Box, Discrete, MultiDiscrete or MultiBinary, got {action}"
            )
        self.length = length
        layer: Any = env
        while isinstance(layer, VectorWrapper) and not isinstance(layer, BlockingReset):
            layer = layer.env
        # A bare remote environment returns a tuple with one entry per slot. All others return a batch, which is also a
        # tuple if the space is a Tuple.
        self._is_rows = isinstance(layer, RemoteVectorEnv)
        self._action_space_of_one: Space[Any] = action
        self._flatten = flatten
        self._base = env.single_observation_space
        single: Space[Any] = spaces.Dict({"observation": self._base, "actions": batch_space(action, length)})
        if flatten:
            flat = spaces.flatten_space(spaces.Tuple((self._base, *[action] * length)))
            if not isinstance(flat, spaces.Box):
                raise SettingError(f"expected an observation space that can be flattened, got {self._base}")
            single = spaces.Box(flat.low.astype(np.float32), flat.high.astype(np.float32), dtype=np.float32)
        self.single_observation_space = single
        self.observation_space = batch_space(single, env.num_envs)
        self._neutral = self._find_neutral()
        self._history = np.stack([self._neutral] * env.num_envs)
        self._begins = np.ones(env.num_envs, np.bool_)

    def _find_neutral(self) -> Array:
        action = self._action_space_of_one
        if isinstance(action, spaces.Box):
            one: Any = np.clip(np.zeros(action.shape), action.low, action.high)
        else:
            # A Discrete space begins at `start`.
            one = np.asarray(getattr(action, "start", 0)) + np.zeros(action.shape or (), np.int64)
        return np.stack([np.asarray(one, dtype=action.dtype)] * self.length)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes, and clear the histories of the slots that are reset."""
        mask = (options or {}).get("reset_mask")
        chosen = np.ones(self.num_envs, np.bool_) if mask is None else np.asarray(mask, np.bool_)
        observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        self._history[chosen] = self._neutral
        # U-5: while a slot has no observation, the action that it is given is not applied.
        self._begins[chosen] = self._missing(observations)[chosen]
        return self._joined(observations), infos

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Apply actions, and append them to the histories of the slots that play an episode."""
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        newest = np.asarray(actions, dtype=self._history.dtype)
        self._history = np.concatenate([self._history[:, 1:], newest[:, None]], axis=1)
        self._history[self._begins] = self._neutral  # the action for a slot that begins is not applied
        # With `on_lost="continue"`, steps until the first observation of the next episode were not made by an action.
        # An environment's own info of this name has a second key, like all of Gymnasium's infos.
        if "valid" in infos and "_valid" not in infos:
            self._history[np.logical_not(infos["valid"])] = self._neutral
        ended = np.asarray(terminations) | np.asarray(truncations)
        missing = self._missing(observations)
        # In this mode the observation of a slot that ended is the next episode's first, and its next action is applied.
        if self.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP:
            self._history[ended] = self._neutral
            self._begins = missing
        else:
            self._begins = ended | missing
        return self._joined(observations), rewards, terminations, truncations, infos

    def _missing(self, observations: Any) -> Array:
        """Return which slots of a bare remote environment returned None, bool, shape `(num_envs,)`."""
        if self._is_rows:
            return np.array([row is None for row in observations])
        return np.zeros(self.num_envs, np.bool_)

    def _joined(self, observations: Any) -> Any:
        if self._is_rows:
            return tuple(
                None if row is None else self._join_one(row, self._history[slot].copy())
                for slot, row in enumerate(observations)
            )
        if not self._flatten:
            # A copy, because `reset` writes into the history and callers keep observations.
            return {"observation": observations, "actions": self._history.copy()}
        rows = self._rows_of(observations)
        return np.stack([self._join_one(row, self._history[slot]) for slot, row in enumerate(rows)])

    def _rows_of(self, observations: Any) -> list[Any]:
        if isinstance(observations, np.ndarray):
            return list(observations)
        return list(iterate(self.env.observation_space, observations))

    def _join_one(self, row: Any, history: Array) -> Any:
        if not self._flatten:
            return {"observation": row, "actions": history}
        parts = [spaces.flatten(self._base, row)]
        parts += [spaces.flatten(self._action_space_of_one, action) for action in history]
        return np.concatenate([np.asarray(part, np.float32).reshape(-1) for part in parts])
