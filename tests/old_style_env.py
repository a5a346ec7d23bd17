"""Environments with the interface of `gym` 0.21, without any package but NumPy: for Python 3.7 and newer."""

import numpy as np


class Box:
    def __init__(self, low, high, shape, dtype):
        self.low, self.high = np.full(shape, low, dtype), np.full(shape, high, dtype)
        self.shape, self.dtype = shape, np.dtype(dtype)

    def contains(self, value):
        return value.shape == self.shape and (value >= self.low).all() and (value <= self.high).all()


class Discrete:
    def __init__(self, n):
        self.n, self.shape, self.dtype = n, (), np.dtype(np.int64)

    def contains(self, value):
        return 0 <= int(value) < self.n


class Graph:
    shape = dtype = None


class Walk:
    """A random walk: the action adds 0, 1 or 2 to a number; five is the goal."""

    metadata = {"render.modes": ["human", "rgb_array"]}  # noqa: RUF012 - as `gym` has it
    observation_space = Box(-100, 100, (2,), np.float64)
    action_space = Discrete(3)
    closed = 0

    def __init__(self):
        self.generator = np.random.RandomState(0)
        self.seeds = []

    def seed(self, seed=None):
        self.seeds.append(seed)
        self.generator = np.random.RandomState(seed)
        return [seed]

    def _observe(self):
        return np.array([self.position, self.generator.uniform(-1, 1)])

    def reset(self):
        self.position = 0
        return self._observe()

    def step(self, action):
        self.position += int(action)
        return self._observe(), 1, self.position >= 5, {"seeds": list(self.seeds)}

    def render(self, mode="human"):
        return np.full((2, 3, 3), {"rgb_array": 7}[mode], np.uint8)

    def close(self):
        Walk.closed += 1


class Wrapper:
    """Hands on what it does not have itself, as the wrappers of `gym` 0.21."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, **kwargs):
        return self.env.reset(**kwargs)


class TimeLimit(Wrapper):
    """Ends an episode after some steps, and says so as `gym` 0.21 does."""

    def __init__(self, env, steps=4):
        super().__init__(env)
        self.most = steps

    def reset(self, **kwargs):
        self.steps = 0
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, done, info = self.env.step(action)
        self.steps += 1
        if self.steps >= self.most:
            info["TimeLimit.truncated"] = not done
            done = True
        return observation, reward, done, info


def limited_walk(steps=4):
    return TimeLimit(Walk(), steps)


class WalkOverGraphs(Walk):
    observation_space = Graph()
