"""Environments that are served over PERLERT."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces


class Counter(gymnasium.Env):
    """Counts to `length`; every reward is 0.5."""

    observation_space = spaces.Dict({"count": spaces.Discrete(10_000), "last": spaces.Box(-1, 1, (2,))})
    action_space = spaces.Box(-1, 1, (2,))
    made = 0
    closed = 0

    def __init__(self, length=10, truncates=False):
        Counter.made += 1
        self.length, self.truncates = length, truncates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return {"count": 0, "last": np.zeros(2, np.float32)}, {}

    def step(self, action):
        self.count += 1
        over = self.count >= self.length
        seen = {"count": self.count, "last": action}
        return seen, 0.5, over and not self.truncates, over and self.truncates, {}

    def close(self):
        Counter.closed += 1


def two_agents():
    pettingzoo = pytest.importorskip("pettingzoo")

    class Two(pettingzoo.ParallelEnv):
        metadata = {"name": "two"}  # noqa: RUF012
        possible_agents = ["a_0", "a_1"]  # noqa: RUF012

        def observation_space(self, agent):
            return spaces.Discrete(1000)

        def action_space(self, agent):
            return spaces.Discrete(5)

        def reset(self, seed=None, options=None):
            self.agents, self.count = list(self.possible_agents), 0
            return dict.fromkeys(self.agents, 0), {}

        def step(self, actions):
            self.count += 1
            ended = [a for a in self.agents if self.count >= (5 if a == "a_0" else 10)]
            agents = self.agents
            self.agents = [a for a in agents if a not in ended]
            rewards = {a: float(actions[a]) for a in agents}
            return (
                dict.fromkeys(agents, self.count),
                rewards,
                {a: a in ended for a in agents},
                dict.fromkeys(agents, False),
                {},
            )

    return Two()
