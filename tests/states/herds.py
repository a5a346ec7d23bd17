"""Environments of several agents for the tests of states: agents that end and come back, and what is hard to copy."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

NAMES = ("ann", "bob", "cyd", "dan")


class Herd(ParallelEnv):
    """Four animals that wander; all but one that go too far have ended, and may be back. Subclasses add to it."""

    metadata = {"name": "herd_v0"}  # noqa: RUF012

    def __init__(self, horizon: int = 40) -> None:
        self.possible_agents, self.agents, self.horizon = list(NAMES), [], horizon
        self.rng, self.old, self.luck = np.random.default_rng(5), [np.random.RandomState(3)], {"back": random.Random(4)}
        self.make()

    def make(self) -> None:
        """Make what the subclass has."""

    def begin(self) -> None:
        """Begin an episode."""

    def noise(self) -> float:
        return float(self.rng.normal() + self.old[0].normal())

    @functools.cache  # noqa: B019 - as PettingZoo's own documentation has it
    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-np.inf, np.inf, (2,), np.float64)

    @functools.cache  # noqa: B019
    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3) if agent in NAMES[:2] else spaces.Box(-1, 1, (1,), np.float32)

    def _see(self, agents: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        seen = {agent: np.array([self.x[agent], self.t]) for agent in agents}
        return seen, {agent: {"alive": list(self.agents)} for agent in agents}

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.agents = 0, list(NAMES)
        self.begin()
        self.x = {agent: self.noise() for agent in NAMES}
        return self._see(self.agents)

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        acted, ended = list(actions), []
        for agent, action in actions.items():
            self.x[agent] += float(np.asarray(action).reshape(-1)[0]) - 0.5 + self.noise()
            if abs(self.x[agent]) > 4 and agent != acted[-1]:
                ended.append(agent)
        over = self.t >= self.horizon
        rewards = {agent: self.x[agent] for agent in acted}
        back = [agent for agent in NAMES if agent not in acted and self.luck["back"].random() < 0.3]
        for agent in back:
            self.x[agent] = self.noise()
        alive = [agent for agent in NAMES if (agent in acted and agent not in ended) or agent in back]
        self.agents = [] if over else alive
        told = [*acted, *(() if over else back)]
        observations, infos = self._see(told)
        flags = {agent: agent in ended for agent in told}
        late = {agent: over and agent not in ended for agent in told}
        return observations, {agent: rewards.get(agent, 0.0) for agent in told}, flags, late, infos


class Fragile(Herd):
    """Holds what cannot be copied, and makes it anew in each reset."""

    def begin(self) -> None:
        self.numbers = iter([float(n % 7) for n in range(300)])

    def noise(self) -> float:
        return super().noise() + next(self.numbers) * 0.01


def fragile() -> Fragile:
    return Fragile()


class OfClass(Herd):
    """Draws from a generator of its class."""

    shared = np.random.default_rng(0)

    def noise(self) -> float:
        return float(self.shared.normal())


class Sampling(Herd):
    """Draws from a space that its class remembers for it."""

    def noise(self) -> float:
        return float(self.observation_space("ann").sample()[0])
