"""Lanes beside those of Gymnasium."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from bridge.testing import CountingEnv

MODES = list(AutoresetMode)


in_each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


class Objectives(CountingEnv):
    """Two objectives, whose rewards are written into one array."""

    reward_space = spaces.Box(-99, 99, (2,), np.float32)

    def __init__(self, length=3):
        super().__init__(length)
        self.reward = np.zeros(2, np.float32)

    def step(self, action):
        observation, reward, *rest = super().step(action)
        self.reward[:] = reward, -reward
        return observation, self.reward, *rest
