"""Environments of the zoo that their packages register under no Gymnasium id."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

__all__ = ["Crafter", "airstriker"]


class Crafter(gymnasium.Env[Any, Any]):
    """Crafter, of the old Gym interface, whose seed is an argument of its constructor. Its metadata is None."""

    metadata: Any = None

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.action_space = spaces.Discrete(17)
        self.observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)

    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        """Begin an episode; it takes no options."""
        import crafter

        if seed is not None or not hasattr(self, "_game"):
            self._game = crafter.Env(seed=0 if seed is None else seed)
        return self._game.reset(), {}

    def step(self, action: Any) -> Any:
        """Step it."""
        observation, reward, done, info = self._game.step(action)
        return observation, reward, done, False, info


def airstriker(render_mode: str = "rgb_array") -> Any:
    """Airstriker, the game that stable-retro brings along."""
    import stable_retro

    return stable_retro.make("Airstriker-Genesis-v0", render_mode=render_mode)


gymnasium.register("Airstriker-v0", airstriker, disable_env_checker=True)
