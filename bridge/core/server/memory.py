"""The release of what a server no longer uses: worlds without agents, and freed memory.

The C library of Linux (glibc) keeps freed memory between pieces that are still in use. After a peak, such as answers of
hundreds of megabytes that waited for clients, that is most of the peak, and it would be kept until the server ends.
Returning it to the system takes milliseconds, or tens of them if there is much. So it is done a while after large
memory was freed, and only if the process has grown.

On other systems (musl, macOS, Windows) nothing is done: their libraries return memory themselves, or cannot.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

from bridge.core.worlds.scheduling import Scheduler, Timer

__all__ = ["IdleWorlds", "MemoryRelease"]

# Seconds from the first free of memory to the check. A client that leaves may also end its worlds, and clients often
# leave together.
_PAUSE = 5.0
# The longest pause, after checks that found nothing to return because the memory is in use.
_LONGEST = 80.0
# The growth in bytes beyond the smallest size so far that is worth a trim.
_WORTH = 16 << 20


class MemoryRelease:
    """Returns freed memory to the system, a while after `soon` was called.

    Args:
        call_later: Calls a function in some seconds.
        resident: Returns the memory of the process, in bytes; None: it is unknown, and nothing is done.
        trim: Returns free memory to the system; None: the C library's function, if there is one.
    """

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], object],
        resident: Callable[[], int | None] | None = None,
        trim: Callable[[], object] | None = None,
    ) -> None:
        self._call_later = call_later
        self._resident = resident or _resident
        self._trim = trim or _find_trim()
        self._lowest = self._resident()
        self._pause = _PAUSE
        self._waits = False

    def soon(self) -> None:
        """Schedule a trim, because memory was freed, perhaps much. Called by the thread that runs the event loop."""
        if not self._waits and self._trim is not None and self._lowest is not None:
            self._waits = True
            self._call_later(self._pause, self._look)

    def _look(self) -> None:
        self._waits = False
        before = self._resident()
        if before is None or self._lowest is None or self._trim is None:
            return
        self._lowest = min(self._lowest, before)
        if before - self._lowest < _WORTH:
            self._pause = _PAUSE
            return
        self._trim()
        after = self._resident() or before
        self._lowest = min(self._lowest, after)
        # A large server whose clients come and go all the time must not repeat this in vain.
        self._pause = _PAUSE if before - after >= _WORTH else min(2 * self._pause, _LONGEST)


def _resident() -> int | None:
    """Return the resident memory of this process in bytes; None: this system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return None


def _find_trim() -> Callable[[], object] | None:
    """Return glibc's `malloc_trim(0)`; None: the C library is another one."""
    if sys.platform != "linux":
        return None
    try:
        trim: Any = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: trim(0)


class IdleWorlds:
    """Calls `reap(seconds)` periodically, from `start` to `stop`.

    Time in which this process was stopped or suspended does not count: the client that will join a world may have been
    stopped too.

    Args:
        reap: Called with seconds that never decrease.
        idle_timeout: A world is destroyed at most a quarter of these seconds late; infinite: no world is.
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
        # More time has passed only if the process was stopped.
        self._seconds += min(self._checked_at - before, 2 * self._period)
        self._timer = self._scheduler.call_later(self._period, self._look)
        self._reap(self._seconds)

    def stop(self) -> None:
        """Stop the calls."""
        if self._timer is not None:
            self._timer.cancel()
