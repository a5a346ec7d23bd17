"""Time as an object: the machine's, or one that a test advances (`bridge.testing.VirtualClock`)."""

from __future__ import annotations

import time
from typing import Protocol, runtime_checkable

__all__ = ["Clock", "MonotonicClock"]


@runtime_checkable
class Clock(Protocol):
    """A clock: seconds that never decrease, from an arbitrary zero."""

    def now(self) -> float:
        """Return the current time, seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return when this many seconds have passed; at once if the number is not positive."""
        ...


class MonotonicClock:
    """The machine's own clock, `time.monotonic`."""

    def now(self) -> float:
        """Return `time.monotonic()`, seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block this thread for this many seconds."""
        if seconds > 0:
            time.sleep(seconds)
