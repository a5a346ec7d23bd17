"""A player whose datagrams are kept."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Recorder(gymnasium.Env):
    """Records the actions that it is given, by episode; an episode lasts `length` steps."""

    observation_space = spaces.Box(-1e6, 1e6, (1,))
    action_space = spaces.Discrete(1000)

    def __init__(self, length=20):
        self.length, self.episodes = length, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes.append([])
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.episodes[-1].append(int(action))
        count = len(self.episodes[-1])
        return np.array([count], np.float32), 1.0, count >= self.length, False, {}
