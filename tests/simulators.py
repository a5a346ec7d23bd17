"""Doubles of batched simulators: the classes and conventions of Isaac Lab, ManiSkill and others, with a tiny physics.

Each takes and gives arrays of the library whose `asarray` it was made with, and refuses actions of another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

__all__ = ["DuckLanes", "IsaacDouble", "ManiSkillDouble", "Physics"]


class Physics:
    """Points that move by their actions. An episode ends at the border (terminated) or after so many steps."""

    def __init__(self, lanes: int, asarray: Callable[[Any], Any], horizon: int = 7) -> None:
        self.lanes, self.asarray, self.horizon = lanes, asarray, horizon
        self.kind = type(asarray(np.zeros(1, np.float32)))
        self.random = np.random.default_rng(0)
        self.place = np.zeros((lanes, 3), np.float32)
        self.age = np.zeros(lanes, np.int64)

    def begin(self, chosen: Any) -> None:
        self.place[chosen] = self.random.uniform(-0.5, 0.5, (int(np.sum(chosen)), 3)).astype(np.float32)
        # Lanes end at different steps.
        self.age[chosen] = self.random.integers(0, 3, int(np.sum(chosen)))

    def reset(self, seed: int | None) -> None:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.begin(np.ones(self.lanes, np.bool_))

    def move(self, actions: Any) -> tuple[Any, Any, Any]:
        assert isinstance(actions, self.kind), f"expected actions as {self.kind}, got {type(actions)}"
        self.place = self.place + np.float32(0.2) * np.asarray(actions, np.float32)
        self.age += 1
        reward = -np.abs(self.place).sum(axis=1)
        return reward.astype(np.float32), np.abs(self.place).max(axis=1) > 1, self.age >= self.horizon


class _Spaces:
    """The spaces of one lane and of the batch."""

    def __init__(self, lanes: int, observation: spaces.Space[Any]) -> None:
        self.num_envs = lanes
        self.single_observation_space = observation
        self.single_action_space = spaces.Box(-1, 1, (3,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, lanes)
        self.action_space = batch_space(self.single_action_space, lanes)


_PLACE = spaces.Box(-np.inf, np.inf, (3,), np.float32)


class IsaacDouble(_Spaces, gymnasium.Env[Any, Any]):
    """As Isaac Lab's `ManagerBasedRLEnv`: a `gymnasium.Env` that resets in the step, without final observations."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [None, "rgb_array"]}

    def __init__(self, lanes: int = 4, asarray: Callable[[Any], Any] = np.asarray) -> None:
        super().__init__(lanes, spaces.Dict(policy=_PLACE))
        self.physics = Physics(lanes, asarray)

    def _observation(self) -> Any:
        return {"policy": self.physics.asarray(self.physics.place.copy())}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.physics.reset(seed)
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        reward, terminated, truncated = self.physics.move(action)
        self.physics.begin(terminated | truncated)
        asarray = self.physics.asarray
        extras = {"time_outs": asarray(truncated)}
        return self._observation(), asarray(reward), asarray(terminated), asarray(truncated), extras


class ManiSkillDouble(_Spaces, VectorEnv[Any, Any, Any]):
    """As `ManiSkillVectorEnv`: final observations of all lanes as a batch, by the name that Gymnasium had once."""

    def __init__(self, lanes: int = 4, asarray: Callable[[Any], Any] = np.asarray) -> None:
        super().__init__(lanes, _PLACE)
        self.physics = Physics(lanes, asarray)

    @property
    def unwrapped(self) -> Any:
        """Like ManiSkill's own class, this returns no VectorEnv."""
        return self.physics

    def _told(self) -> Any:
        return self.physics.asarray(self.physics.place.copy()), {
            "elapsed_steps": self.physics.asarray(self.physics.age.copy())
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.physics.reset(seed)
        return self._told()

    def step(self, actions: Any) -> Any:
        reward, terminated, truncated = self.physics.move(actions)
        asarray, ended = self.physics.asarray, terminated | truncated
        observation, info = self._told()
        if ended.any():
            final_observation, final_info = observation, info
            self.physics.begin(ended)
            observation, info = self._told()
            info.update(final_observation=final_observation, final_info=final_info)
            info.update(_final_observation=asarray(ended), _final_info=asarray(ended))
        return observation, asarray(reward), asarray(terminated), asarray(truncated), info


class DuckLanes(_Spaces):
    """A simulator of no class of Gymnasium, with no more than a world needs."""

    def __init__(self, lanes: int = 4, asarray: Callable[[Any], Any] = np.asarray) -> None:
        super().__init__(lanes, _PLACE)
        self._inner = ManiSkillDouble(lanes, asarray)

    def reset(self, seed: int | None = None) -> Any:
        return self._inner.reset(seed=seed)

    def step(self, actions: Any) -> Any:
        return self._inner.step(actions)
