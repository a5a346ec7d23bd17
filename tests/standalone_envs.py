"""Environments of today's Gymnasium that the standalone server is tested with."""

import threading
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from bridge.testing import EVERY_SPACE, SpaceEnv, make_info


def every_space(space):
    """An environment that observes and acts in one of `EVERY_SPACE`."""
    return SpaceEnv(EVERY_SPACE[space](), EVERY_SPACE[space](), infos=False)


class Remarkable(gymnasium.Env[Any, Any]):
    """Gives infos of every type, takes options, and returns what its spaces do not say."""

    metadata: ClassVar[Any] = {"render_modes": ["rgb_array"], "render_fps": 7, "a class": object}
    action_space: Any = spaces.Discrete(2)
    observation_space: Any = spaces.Dict(a=spaces.Discrete(9), b=spaces.Box(-9, 9, (2,), np.float32))

    def __init__(self, render_mode=None):
        self.render_mode, self.steps = render_mode, 0

    def _observe(self):
        return {"b": np.array([self.steps, 0.25], np.float32), "a": self.steps}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {"options": options, "seed": self.np_random_seed}

    def step(self, action):
        self.steps += 1
        return self._observe(), np.float32(0.5), self.steps == 5, self.steps == 5, self._info()

    def _info(self):
        return make_info(np.random.default_rng(self.steps), self.steps)

    def render(self):
        return np.full((4, 5, 3), self.steps, np.uint8)


class Numbered(Remarkable):
    """Gives infos that Gymnasium joins without loss."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"seed": seed}

    def _info(self):
        return {"steps": self.steps, "nested": {"half": self.steps / 2}, "array": np.arange(self.steps)}


class Talkative(Remarkable):
    """Its infos hold what does not travel, and its observation is of another dtype than its space."""

    observation_space: Any = spaces.Box(-9, 9, (2,), np.float32)

    def _observe(self):
        return np.array([self.steps, 0.1])

    def _info(self):
        return {"file": open, "list": [1, open], "kept": 1}


class Failing(Remarkable):
    def __init__(self, text, render_mode=None):
        super().__init__(render_mode)
        self._text = text

    def step(self, action):
        raise ZeroDivisionError(self._text)


class Interrupted(Remarkable):
    def step(self, action):
        raise KeyboardInterrupt


class NeverClosed(Remarkable):
    def close(self):
        print("closing", flush=True)
        # Python notices a signal that comes just before a wait at the wait's end alone: short ones.
        while not threading.Event().wait(0.1):
            pass


class TwoAtATime(Remarkable):
    """Holds a file open to others while it is open, and cannot be made where two are."""

    def __init__(self, folder, render_mode=None):
        super().__init__(render_mode)
        taken = {path.name for path in Path(folder).iterdir()}
        if len(taken) == 2:
            raise RuntimeError("there are two already")
        self._file = Path(folder, "first" if "first" not in taken else "second")
        self._file.touch()

    def close(self):
        self._file.unlink()


class Needy(gymnasium.Env):
    """An environment that needs a package which nobody has."""

    observation_space = action_space = spaces.Discrete(2)

    def __init__(self, where: str = "reset") -> None:
        self.where = where
        self.need("construction")

    def need(self, where: str) -> None:
        if where == self.where:
            try:
                import no_such_game  # type: ignore[import-not-found]  # noqa: F401
            except ImportError as error:
                raise gymnasium.error.DependencyNotInstalled("the game is not installed") from error

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[int, dict]:
        self.need("reset")
        return 0, {}
