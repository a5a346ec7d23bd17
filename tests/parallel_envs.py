"""Small PettingZoo environments for tests."""

import functools
import string

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

NAMES = ("ann", "bob", "cyd")


class Relay(ParallelEnv):
    """Three runners with specs of their own; each is done when it has run its distance, the game after `horizon` steps.

    `ann` sees numbers and chooses one of three speeds, `bob` has a dict, `cyd` text and a vector action. A reward is
    what all agents' actions add up to, so that each agent can see what was taken for the others.
    """

    metadata = {"name": "relay_v0", "render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, horizon=8, distances=(100, 100, 100), fail_at=None, render_mode=None):
        self.possible_agents = list(NAMES)
        self.agents = []
        self.horizon, self.distances, self.fail_at = horizon, distances, fail_at
        self.render_mode = render_mode
        self.resets, self.log, self.seeds, self.closed = 0, [], [], False

    @functools.cache  # noqa: B019 - PettingZoo asks for the same object each time
    def observation_space(self, agent):
        if agent == "ann":
            return spaces.Box(-1000, 1000, (4,), np.float32)
        if agent == "bob":
            return spaces.Dict({"place": spaces.Discrete(1000), "noise": spaces.Box(0, 1, (2, 2), np.float64)})
        return spaces.Text(40, charset=string.printable)

    @functools.cache  # noqa: B019
    def action_space(self, agent):
        if agent == "ann":
            return spaces.Discrete(3)
        if agent == "bob":
            return spaces.Dict({"run": spaces.Discrete(4), "lean": spaces.Box(-1, 1, (2,), np.float32)})
        return spaces.Box(0, 5, (1,), np.float32)

    def _speed(self, agent, action):
        if agent == "ann":
            return int(action)
        return int(action["run"]) if agent == "bob" else int(action[0])

    def _see(self, agent):
        if agent == "ann":
            return np.array([*self.ran.values(), self.time], np.float32)
        if agent == "bob":
            return {"place": np.int64(self.ran["bob"]), "noise": self.rng.random((2, 2))}
        return f"at {self.ran['cyd']} after {self.time}"

    def reset(self, seed=None, options=None):
        self.resets += 1
        self.seeds.append(seed)
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.time = int((options or {}).get("time", 0))
        self.ran = dict.fromkeys(NAMES, 0)
        self.agents = list(NAMES)
        return {a: self._see(a) for a in self.agents}, {a: {"name": a, "resets": self.resets} for a in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents), (actions, self.agents)
        if self.fail_at == self.time:
            self.fail_at = None
            raise RuntimeError("a shoe came off")
        self.log.append({agent: self._speed(agent, action) for agent, action in actions.items()})
        self.time += 1
        for agent, action in actions.items():
            self.ran[agent] += self._speed(agent, action)
        total = float(sum(self.log[-1].values()))
        done = {a: self.ran[a] >= d for a, d in zip(NAMES, self.distances, strict=True)}
        over = self.time >= self.horizon
        agents = self.agents
        self.agents = [] if over else [a for a in agents if not done[a]]
        return (
            {a: self._see(a) for a in agents},
            {a: total + NAMES.index(a) / 10 for a in agents},
            {a: done[a] for a in agents},
            {a: over and not done[a] for a in agents},
            {a: {"ran": self.ran[a]} for a in agents},
        )

    def render(self):
        return np.full((2, 2, 3), self.time, np.uint8)

    def state(self):
        return np.array([*self.ran.values()], np.int64)

    def close(self):
        self.closed = True
