"""Pauses between attempts, which double with each failure in a row, and waiting for a server that is not up yet."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from bridge.core.logs import LOOK, SafeLog, tell
from bridge.errors import RemoteError, SettingError

__all__ = ["ServerWait", "checked_wait", "doubling_pause", "pause", "until_up"]

T = TypeVar("T")
_log = SafeLog(__name__)
_jitter = random.Random()
# Of the wait for a server.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
# Seconds between two lines of the log.
_LOG = 10.0


def doubling_pause(failures: int, least: float, most: float) -> float:
    """Return the seconds until the next attempt: `least` after the first failure, then doubling up to `most`."""
    # A bound for the exponent: of a server that is gone for hours 1,024 attempts fail, and 2.0 ** 1024 overflows.
    return min(most, least * 2.0 ** min(failures - 1, 10))


def pause(failures: int) -> float:
    """Return the seconds until a client's next attempt; no two have the same, so many do not come at once."""
    return doubling_pause(failures, 0.1, 10.0) * _jitter.uniform(0.5, 1.5)


def checked_wait(seconds: Any) -> float:
    """Return the keyword `wait_for_server`, or raise SettingError where it is no number of seconds."""
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds < 1e9:
        raise SettingError(f"expected wait_for_server to be seconds, 0 or more, got {seconds!r}")
    return float(seconds)


class ServerWait:
    """One wait, which begins now.

    Args:
        seconds: How long it lasts at most.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds
        self._failures = 0
        self._log_at = self._tell_at = 0.0

    @property
    def lasts(self) -> bool:
        """True if there is a wait at all, over or not."""
        return self._seconds > 0

    def pause_after(self, error: RemoteError) -> float:
        """Say in the log why an attempt failed; return the seconds until the next one.

        Raises:
            RemoteError: The error itself, where no waiting helps. At the end of the wait it says how long that was.
        """
        if not (error.unavailable and self.lasts):
            raise error
        now = time.monotonic()
        if now >= self._end:
            text = f"{error.reason.rstrip()} (waited {self._seconds:g} s for it: wait_for_server)"
            raise error.with_reason(text) from error.__cause__
        if now >= self._log_at:
            self._log_at = now + _LOG
            _log.warning("waiting for a server, at most %.0f s more: %s", self._end - now, error)
        if now >= self._tell_at:
            self._tell_at = now + LOOK
            tell(f"waiting for {error.url}, at most {self._end - now:.0f} s more")
        self._failures += 1
        # The last attempt comes at the very end.
        return min(doubling_pause(self._failures, _FIRST_PAUSE, _LONGEST_PAUSE), max(0.01, self._end - now))


def until_up(connect: Callable[[], T], wait: float | ServerWait) -> T:
    """Return what a call returns, which is made again while its server is not up.

    Args:
        connect: Connects. A connection that is refused, a name that nobody knows, and UNAVAILABLE are waited for.
        wait: How many seconds from now on, or a wait that several calls share.

    Raises:
        RemoteError: Of the last call.
    """
    if not isinstance(wait, ServerWait):
        wait = ServerWait(wait)
    while True:
        try:
            return connect()
        except RemoteError as error:
            pause = wait.pause_after(error)
        time.sleep(pause)
