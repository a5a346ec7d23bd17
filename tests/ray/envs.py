"""Environments of the tests on Ray, which Ray's processes import."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

__all__ = ["Varied", "varied"]


class Varied(gymnasium.Env[Any, Any]):
    """Episodes of very different lengths, which end by `terminated` alone; observes the step's number and that."""

    observation_space = spaces.Box(0, 1 << 20, (2,), np.int64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        # Most are short, and some of them a hundred times as long.
        self._length = int(self.np_random.choice([3, 10, 40, 300], p=[0.4, 0.3, 0.2, 0.1]))
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._observe(), 1.0, self._step == self._length, False, {}

    def _observe(self) -> Any:
        return np.array([self._step, self._length], np.int64)


def varied() -> Varied:
    """Make one."""
    return Varied()
