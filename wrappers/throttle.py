"""A frame rate for the agent's loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from gymnasium.vector import VectorEnv

from bridge.core.client.envs.vector_env import slots_of
from bridge.core.client.slots.results import Results
from bridge.core.clock import Clock, MonotonicClock
from bridge.core.encoding.tensors import Array
from bridge.errors import SettingError

from .transparent import Transparent

__all__ = ["Throttle"]


class Throttle(Transparent):
    """A wrapper whose `step` takes one frame: it sends the actions at once and returns the results at the frame's end.

    Results are requested at the end of the frame, so they are up to date. Frame n ends at `start + n / fps`, where
    `start` is the time of `reset`, so delays do not accumulate. A late loop does not wait; `infos["late"]` says by how
    many seconds it is late, 0.0 if it is in time.

    Args:
        env: The result of `make_vec_remote`. `BlockingReset` goes outside: `BlockingReset(Throttle(env))`.
        fps: Steps a second; None: the frame rate of the remote real-time worlds.
        clock: The clock; tests use a `VirtualClock`.

    Raises:
        SettingError: `fps` is not a positive number, or is not given while the worlds are in lock-step.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Array], fps: float | None = None, *, clock: Clock | None = None
    ) -> None:
        super().__init__(env)
        fps = self.remote.fps if fps is None else fps
        if fps is None:
            raise SettingError("expected fps=, since the remote worlds are in lock-step and have no frame rate")
        if not isinstance(fps, (int, float)) or isinstance(fps, bool) or not 0 < fps < math.inf:
            raise SettingError(f"expected fps to be a positive number of steps a second, got {fps!r}")
        self.fps = float(fps)
        self.late = 0
        """The number of late steps."""
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._start: float | None = None
        self._count = 0
        self._lateness = 0.0
        # Called between sending the actions and requesting the results. Sleeping before `step` would send the actions a
        # frame late; sleeping after it would return results that are a frame old.
        slots_of(self.remote).pacer = self._pace

    def _pace(self) -> None:
        """Wait for the end of the frame; called after the actions are sent."""
        now = self._clock.now()
        if self._start is None:
            self._start = now
        self._count += 1
        due = self._start + self._count / self.fps
        self._lateness = max(0.0, now - due)
        if self._lateness > 0.0:
            self.late += 1
            self._count = int((now - self._start) * self.fps)  # missed frames are not made up for
        else:
            self._clock.sleep(due - now)

    def reset_async(self, **kwargs: Any) -> None:
        """Send the Resets, like `RemoteVectorEnv.reset_async`, and restart the frame count."""
        self._begin_count()
        self.env.reset_async(**kwargs)  # type: ignore[attr-defined]

    def _begin_count(self) -> None:
        self._start, self._count, self._lateness = self._clock.now(), 0, 0.0

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes, like the remote environment, and restart the frame count."""
        self._begin_count()
        observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        return observations, self._report(infos)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Send the actions, wait for the end of the frame, and return the results at that time."""
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        return observations, rewards, terminations, truncations, self._report(infos)

    def wait_for_all(self, pending: Literal["reset", "step"], timeout: float | None = None, **kwargs: Any) -> Results:
        """Wait like `RemoteVectorEnv.wait_for_all`, and add `late` to the infos."""
        results: Results = self.env.wait_for_all(pending, timeout, **kwargs)  # type: ignore[attr-defined]
        self._report(results.common)
        return results

    def _report(self, infos: dict[str, Any]) -> dict[str, Any]:
        infos["late"] = np.full(self.num_envs, self._lateness)
        infos["_late"] = np.ones(self.num_envs, np.bool_)
        return infos

    def close(self, **kwargs: Any) -> None:
        """Close the environments."""
        slots_of(self.remote).pacer = None
        super().close(**kwargs)
