"""Environments and plays for a peer of either version; a play returns all that it saw.

Only names that docs/reference.md calls stable are used of `bridge`. A play of a remote environment and of a local one
give the same, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv

from bridge.testing import EVERY_SPACE, CountingEnv, SpaceEnv

LONG = 10**9
NO_ACTIONS = ("dict_empty", "tuple_empty", "tuple_of_empty_ones")
"""Spaces without elements, over which Gymnasium's own vector environments cannot step."""


class SmallNumbers(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Leaves out the info that Gymnasium's vector environments cannot join: an integer beyond 64 bits."""

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return observation, {key: value for key, value in info.items() if key != "big"}

    def step(self, action: Any) -> Any:
        *rest, info = self.env.step(action)
        return (*rest, {key: value for key, value in info.items() if key != "big"})


def of_space(name: str) -> Callable[[], gymnasium.Env[Any, Any]]:
    """An environment whose observations and actions are of a space, with every kind of info."""
    actions = None if name in NO_ACTIONS else EVERY_SPACE[name]
    return lambda: SmallNumbers(SpaceEnv(EVERY_SPACE[name](), actions and actions()))


def counting(length: int = LONG) -> Callable[[], gymnasium.Env[Any, Any]]:
    """Environments that count their episodes and steps."""
    return lambda: CountingEnv(length)


class Recorder(gymnasium.Env[Any, Any]):
    """Observations are the frame, the action that was applied, and the episode; each frame of 30 has the reward 1."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(50)
    episode = frame = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.frame = self.episode + 1, 0
        return np.array([0.0, 0.0, self.episode]), {}

    def step(self, action: Any) -> Any:
        self.frame += 1
        return np.array([self.frame, float(action), self.episode]), 1.0, self.frame == 30, False, {}


def play(env: Any, steps: int = 8, seed: int = 3) -> list[Any]:
    """Everything that one environment gives, over some episodes of seeded actions."""
    env.action_space.seed(seed)
    seen = [env.reset(seed=seed, options={"level": 2})]
    for _ in range(steps):
        seen.append(env.step(env.action_space.sample()))
        if seen[-1][2] or seen[-1][3]:
            seen.append(env.reset())
    return seen


def play_vector(envs: Any, steps: int = 6, seed: int = 3) -> list[Any]:
    """Everything that a vector environment with Gymnasium's contract gives."""
    envs.action_space.seed(seed)
    seen = [envs.reset(seed=seed)]
    seen += [envs.step(envs.action_space.sample()) for _ in range(steps)]
    mask = np.arange(envs.num_envs) % 2 == 0
    seen.append(envs.reset(seed=[seed + 10 + i for i in range(envs.num_envs)], options={"reset_mask": mask}))
    seen += [envs.step(envs.action_space.sample()) for _ in range(steps)]
    seen.append(envs.reset(seed=[seed + i if mask[i] else None for i in range(envs.num_envs)]))
    return seen


def play_agents(env: Any, episodes: int = 3, seed: int = 3) -> list[Any]:
    """Everything that an environment of several agents gives."""
    spaces = {agent: env.action_space(agent) for agent in env.possible_agents}
    for index, space in enumerate(spaces.values()):
        space.seed(seed + index)
    seen: list[Any] = []
    for episode in range(episodes):
        seen.append(env.reset(seed=seed if episode == 0 else None, options={"time": episode}))
        while env.agents:
            seen.append((list(env.agents), *env.step({agent: spaces[agent].sample() for agent in env.agents})))
    return seen


def local_vector(function: Callable[[], gymnasium.Env[Any, Any]], num_envs: int) -> SyncVectorEnv:
    """The local environments that slots and lanes are compared with."""
    return SyncVectorEnv([function] * num_envs)


def until(step: Callable[[], Any], condition: Callable[[Any], bool], seconds: float = 60.0) -> list[Any]:
    """Call `step` until the condition holds for what it gave; return all that it gave."""
    end = time.monotonic() + seconds
    seen: list[Any] = []
    while not seen or not condition(seen[-1]):
        if time.monotonic() > end:
            raise TimeoutError(f"the condition did not hold within {seconds:g} s; the last steps gave {seen[-3:]}")
        seen.append(step())
    return seen
