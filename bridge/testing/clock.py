"""A clock that tests advance by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

from bridge.errors import SettingError

__all__ = ["VirtualClock"]


class VirtualClock:
    """A clock that stands still until it is advanced, so that tests of minutes are fast and deterministic.

    `sleep` advances it instead of waiting. Only one thread may advance it. Real-time worlds that use it
    (`serve_gym(…, fps=30, realtime=RealTime(clock=clock))`) run their frames during `advance`: when it returns, all due
    frames are done.

    Examples:
        >>> clock = VirtualClock()
        >>> clock.advance(0.5)
        0.5
        >>> clock.sleep(59.5)
        >>> clock.now()
        60.0

    Args:
        start: The initial time in seconds.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(start)
        self._subscribers: list[Callable[[float], None]] = []

    def subscribe(self, callback: Callable[[float], None]) -> Callable[[], None]:
        """Call `callback(time)` whenever the clock is advanced; return a function that cancels this."""
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

        return unsubscribe

    def _tell(self) -> float:
        for callback in tuple(self._subscribers):
            callback(self._now)
        return self._now

    def now(self) -> float:
        """Return the current time of the clock in seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Advance the clock by a number of seconds, and return its new time.

        Raises:
            SettingError: The number is negative, infinite or NaN.
        """
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise SettingError(f"expected a finite number of seconds, 0 or more, got {seconds}: time does not go back")
        self._now += seconds
        return self._tell()

    def advance_to(self, when: float) -> float:
        """Advance the clock to a time, and return its time. A time in the past has no effect.

        Raises:
            SettingError: The time is infinite or NaN.
        """
        if not math.isfinite(when):
            raise SettingError(f"expected a finite time in seconds, got {when}")
        self._now = max(self._now, float(when))
        return self._tell()

    def sleep(self, seconds: float) -> None:
        """Advance the clock by a number of seconds."""
        self.advance(max(0.0, seconds))
