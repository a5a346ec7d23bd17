"""Actions that say how long the world advances (D-23).

The action space becomes a Dict of the environment's own action and the time; on the wire they are `action.action` and
`action.steps` or `action.seconds`. One Step then repeats the action for that time: rewards are summed; observation,
flags and info are those of the last step. It stops early at the end of the episode.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from gymnasium import spaces

from bridge.core.gymnasium_versions import dict_space
from bridge.core.worlds.kinds import EnvWrapper, GymEnv, Lanes
from bridge.core.worlds.rewards import as_number
from bridge.errors import SettingError

__all__ = ["TimeAction", "TimeActionEnv"]


@dataclasses.dataclass(frozen=True)
class TimeAction:
    """The settings of actions with a duration."""

    most: float = 100
    """The largest duration of an action, in `unit`."""
    unit: str = "steps"
    """`steps` of the environment, or `seconds` of its time."""
    seconds_per_step: float | None = None
    """The environment's time per step; None: from the `render_fps` of its metadata."""

    def __post_init__(self) -> None:
        if self.unit not in ("steps", "seconds"):
            raise SettingError(f"expected the unit of time_action to be steps or seconds, got {self.unit!r}")
        if not isinstance(self.most, (int, float)) or not self.most > 0 or math.isinf(self.most):
            raise SettingError(f"expected the most of time_action to be a positive number, got {self.most!r}")
        if self.unit == "steps" and self.most != int(self.most):
            raise SettingError(f"expected the most of time_action to be a whole number of steps, got {self.most!r}")
        if self.seconds_per_step is not None and not self.seconds_per_step > 0:
            raise SettingError(f"expected seconds_per_step to be positive, got {self.seconds_per_step!r}")

    def wrap(self, env: GymEnv) -> TimeActionEnv:
        """Return the environment with a duration in its action."""
        return TimeActionEnv(env, self)

    def wrap_lanes(self, env: Lanes) -> Lanes:
        """Raise SettingError: lanes that are stepped together cannot have different durations."""
        raise SettingError(f"time_action needs a gymnasium.Env, got a {type(env.unwrapped).__name__}")

    def describe(self) -> dict[str, object]:
        """Return the arguments that make an equal one, for a recording."""
        return {"time_action": dataclasses.asdict(self)}


class TimeActionEnv(EnvWrapper):
    """An environment whose action is a dict of its own `action`, and of the `steps` or `seconds` to advance.

    At least one step is made. `info["elapsed_steps"]` is the number of steps made.

    Raises:
        SettingError: The unit is seconds, and neither the settings nor the metadata give the time of a step.
    """

    def __init__(self, env: GymEnv, time: TimeAction) -> None:
        super().__init__(env)
        self._unit = time.unit
        self._seconds_per_step = 1.0
        if time.unit == "steps":
            amount: spaces.Space[object] = spaces.Discrete(int(time.most), start=1)
        else:
            fps = env.metadata.get("render_fps")
            if time.seconds_per_step is None and not fps:
                raise SettingError(
                    f"expected seconds_per_step in time_action, for the metadata of {env} has no render_fps that says "
                    "how long a step is"
                )
            self._seconds_per_step = time.seconds_per_step or 1.0 / float(fps or 1.0)
            amount = spaces.Box(0.0, time.most, (), np.float64)
        self.action_space = dict_space([("action", env.action_space), (time.unit, amount)], sort_keys=False)

    def step(self, action: Any) -> tuple[object, float, bool, bool, dict[str, object]]:
        """Step the environment for the duration in the action, or until its episode ends."""
        count = max(1, round(float(action[self._unit]) / self._seconds_per_step))
        total = 0.0
        for made in range(1, count + 1):
            observation, reward, terminated, truncated, info = self.env.step(action["action"])
            total += as_number(reward)
            if terminated or truncated or made == count:
                break
        return observation, total, terminated, truncated, {**info, "elapsed_steps": made}
