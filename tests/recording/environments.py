"""Environments that are recorded."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class Noisy(gymnasium.Env[Any, Any]):
    """Its observations are of a generator that nobody seeds."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        return np.random.default_rng().random(2), 0.0, False, False, {}
