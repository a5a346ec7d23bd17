"""The thread that tells the registry the time, so that idle worlds go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Reaper"]


class Reaper:
    """Calls `reap(now)` from a thread of its own until `stop`.

    Time in which this process stood still, stopped or suspended, does not count: whoever is to join a world may have
    stood still with it.

    Args:
        reap: Given seconds that never go back.
        idle_timeout: A world goes at most a quarter of these seconds late; None: no thread.
    """

    def __init__(self, reap: Callable[[float], object], idle_timeout: float | None) -> None:
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if idle_timeout is not None:
            period = min(idle_timeout / 4, 60.0)
            self._thread = threading.Thread(
                target=self._run, args=(reap, period), name="bridge-server-reaper", daemon=True
            )
            self._thread.start()

    def _run(self, reap: Callable[[float], object], period: float) -> None:
        now, looked = 0.0, time.monotonic()
        while not self._stopped.wait(period):
            before, looked = looked, time.monotonic()
            now += min(looked - before, 2 * period)
            reap(now)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(5.0)
