"""Pauses between attempts, which double with each consecutive failure, and waiting for a server that is not up yet."""

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
# Pauses while waiting for a server.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
# Seconds between two log lines.
_LOG = 10.0


def doubling_pause(failures: int, least: float, most: float) -> float:
    """Return the seconds until the next attempt: `least` after the first failure, then doubling up to `most`."""
    # The exponent is limited: 1,024 attempts fail if a server is gone for hours, and 2.0 ** 1024 overflows.
    return min(most, least * 2.0 ** min(failures - 1, 10))


def pause(failures: int) -> float:
    """Return the seconds until a client's next attempt, with a random part, so that clients do not retry together."""
    return doubling_pause(failures, 0.1, 10.0) * _jitter.uniform(0.5, 1.5)


def checked_wait(seconds: Any) -> float:
    """Return the keyword `wait_for_server`; raise SettingError if it is no valid number of seconds."""
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds < 1e9:
        raise SettingError(f"expected wait_for_server to be seconds, 0 or more, got {seconds!r}")
    return float(seconds)


class ServerWait:
    """One wait for a server, which begins now.

    Args:
        seconds: The longest duration of the wait.
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
        """Log why an attempt failed; return the seconds until the next one.

        Raises:
            RemoteError: The given error, if waiting does not help. At the end of the wait it says how long that was.
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
        # The last attempt is made at the very end.
        return min(doubling_pause(self._failures, _FIRST_PAUSE, _LONGEST_PAUSE), max(0.01, self._end - now))


def until_up(connect: Callable[[], T], wait: float | ServerWait) -> T:
    """Return the result of a call, which is repeated while its server is not up.

    Args:
        connect: Connects. A refused connection, a name that cannot be resolved, and UNAVAILABLE are waited for.
        wait: The seconds to wait from now on, or a wait that several calls share.

    Raises:
        RemoteError: The error of the last call.
    """
    if not isinstance(wait, ServerWait):
        wait = ServerWait(wait)
    while True:
        try:
            return connect()
        except RemoteError as error:
            pause = wait.pause_after(error)
        time.sleep(pause)
