"""Destroy worlds without agents: a timer that calls the registry."""

from __future__ import annotations

from collections.abc import Callable

from bridge.core.worlds.scheduling import Scheduler, Timer

__all__ = ["IdleWorlds"]


class IdleWorlds:
    """Calls `reap(seconds)` again and again, from `start` to `stop`.

    Time in which this process stood still, stopped or suspended, does not count: whoever is to join a world may have
    stood still with it.

    Args:
        reap: Given seconds that never go back.
        idle_timeout: A world goes at most a quarter of these seconds late; infinite: none goes.
        scheduler: Sets the timers.
    """

    def __init__(self, reap: Callable[[float], object], idle_timeout: float, scheduler: Scheduler) -> None:
        self._reap = reap
        self._period = min(idle_timeout / 4, 60.0)
        self._scheduler = scheduler
        self._seconds = 0.0
        self._checked_at = 0.0
        self._timer: Timer | None = None

    def start(self) -> None:
        """Begin."""
        self._checked_at = self._scheduler.now()
        self._timer = self._scheduler.call_later(self._period, self._look)

    def _look(self) -> None:
        before, self._checked_at = self._checked_at, self._scheduler.now()
        # More than that has passed only where the process stood still.
        self._seconds += min(self._checked_at - before, 2 * self._period)
        self._timer = self._scheduler.call_later(self._period, self._look)
        self._reap(self._seconds)

    def stop(self) -> None:
        """Call it no more."""
        if self._timer is not None:
            self._timer.cancel()
