"""An environment that counts its steps, for tests of what is around it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counts(gymnasium.Env[Any, Any]):
    """Shows how many steps its episode has had; each has the same reward and info."""

    observation_space = spaces.Box(0, 1e6, (1,), np.float32)
    action_space: Any = spaces.Discrete(2)
    length = 0
    """The steps of an episode; 0: it has no end."""
    reward = 1.0
    info: dict[str, Any] = {}  # noqa: RUF012 - it is copied

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return np.full(1, self.count, np.float32), self.reward, self.count == self.length, False, dict(self.info)
