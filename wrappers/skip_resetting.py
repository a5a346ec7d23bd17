"""Step only the slots that have an observation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from bridge.core.client.envs.vector_env import RemoteVectorEnv
from bridge.core.encoding.tensors import Array
from bridge.errors import InvalidActionError, ResetNeededError, SettingError

from .transparent import Transparent

__all__ = ["Ready", "SkipResetting"]


@dataclasses.dataclass(frozen=True)
class Ready:
    """The results of one step, for the `k` slots that have an observation; k may be 0."""

    slots: Array
    """The numbers of these slots, ascending, int64 `(k,)`."""
    observations: Any
    """Their observations, a batch of k elements of `single_observation_space`."""
    rewards: Array
    """The rewards of all slots, float64 `(num_envs,)`."""
    terminations: Array
    """The terminations of all slots, bool `(num_envs,)`."""
    truncations: Array
    """The truncations of all slots, bool `(num_envs,)`: a lost slot has no observation, and is truncated once."""
    infos: dict[str, Any]
    """The infos of all slots."""


class SkipResetting:
    """A wrapper that returns batched observations of the ready slots, and takes actions only for them.

    No slot waits for another, and batches contain no placeholders. This is not a `VectorEnv`, because the number of
    ready slots changes from step to step.

    Examples:
        >>> from bridge import make_vec_remote, serve_gym
        >>> from bridge.wrappers import SkipResetting
        >>> with serve_gym("CartPole-v1", fps=30) as server:
        ...     envs = SkipResetting(make_vec_remote(server.url, num_envs=2))
        ...     ready = envs.reset(seed=0)
        ...     for _ in range(3):
        ...         ready = envs.step(envs.sample(len(ready.slots)))
        ...     envs.close()
        >>> ready.rewards.shape
        (2,)

    Args:
        env: The result of `make_vec_remote`, or a `Throttle` around it.

    Raises:
        SettingError: `env` is another kind of environment.
    """

    def __init__(self, env: VectorEnv[Any, Any, Array]) -> None:
        if not isinstance(env, (RemoteVectorEnv, Transparent)):
            raise SettingError(f"expected what make_vec_remote returns, got {env!r} of type {type(env).__name__}")
        self.env = env
        self.num_envs: int = env.num_envs
        self.single_observation_space: Space[Any] = env.single_observation_space
        self.single_action_space: Space[Any] = env.single_action_space
        # The remote environment takes an action for each slot, and ignores it for slots without an observation (U-5).
        self._filler = env.action_space.sample()
        self._slots: Array | None = None

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None) -> Ready:
        """Request a new episode in every slot, and return at once; often no slot is ready then."""
        observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        none = np.zeros(self.num_envs, np.bool_)
        return self._ready(observations, np.zeros(self.num_envs), none, none.copy(), infos)

    def step(self, actions: Any) -> Ready:
        """Apply actions to the slots that were ready.

        Args:
            actions: One action for each of the last `slots`, in their order.

        Raises:
            InvalidActionError: The number of actions is wrong.
            ResetNeededError: `reset` was never called.
        """
        if self._slots is None:
            raise ResetNeededError("expected reset() before the first step()")
        space = batch_space(self.single_action_space, max(1, len(self._slots)))
        given = list(_items(space, actions)) if len(self._slots) else []
        if len(given) != len(self._slots):
            raise InvalidActionError(
                f"expected {len(self._slots)} actions, one for each ready slot {self._slots.tolist()}, got {len(given)}"
            )
        every = list(_items(self.env.action_space, self._filler))
        for slot, action in zip(self._slots.tolist(), given, strict=True):
            every[slot] = action
        batch: Any = create_empty_array(self.single_action_space, self.num_envs)
        return self._ready(*self.env.step(concatenate(self.single_action_space, every, batch)))

    def sample(self, count: int) -> Any:
        """Return `count` random actions, batched."""
        actions = [self.single_action_space.sample() for _ in range(count)]
        batch: Any = create_empty_array(self.single_action_space, count)
        return concatenate(self.single_action_space, actions, batch) if actions else batch

    def _ready(
        self, observations: Any, rewards: Array, terminations: Array, truncations: Array, infos: dict[str, Any]
    ) -> Ready:
        self._slots = np.array([slot for slot, row in enumerate(observations) if row is not None], np.int64)
        rows = [row for row in observations if row is not None]
        batch: Any = create_empty_array(self.single_observation_space, len(rows))
        joined = concatenate(self.single_observation_space, rows, batch) if rows else batch
        return Ready(self._slots, joined, rewards, terminations, truncations, infos)

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


def _items(space: Space[Any], batch: Any) -> Any:
    if isinstance(batch, (np.ndarray, list)):
        return batch
    return iterate(space, batch)
