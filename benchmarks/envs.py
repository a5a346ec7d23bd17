"""Environments that the benchmarks serve: `benchmarks.envs:Frames-v0` and so on."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

__all__ = ["Pictures", "Slow"]


class Pictures(gymnasium.Env[Any, Any]):
    """Gives observations of a size at the cost of one copy, so that what carries them is what is measured."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.dtype(dtype))  # type: ignore[arg-type]
        self.action_space = gymnasium.spaces.Discrete(2)
        self._picture = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._picture.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._picture.copy(), 1.0, False, False, {}


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A CartPole whose step takes 50 ms."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        time.sleep(0.05)
        return self.env.step(action)


gymnasium.register(
    "Frames-v0",
    entry_point=Pictures,
    kwargs={"shape": (210, 160, 3), "dtype": "uint8"},
    disable_env_checker=True,
)
gymnasium.register(
    "Floats-v0",
    entry_point=Pictures,
    kwargs={"shape": (84, 84, 4), "dtype": "float32"},
    disable_env_checker=True,
)
gymnasium.register(
    "Still-v0",
    entry_point=Pictures,
    kwargs={"shape": (4,), "dtype": "float32"},
    disable_env_checker=True,
)
gymnasium.register("SlowCartPole-v0", entry_point=Slow)
