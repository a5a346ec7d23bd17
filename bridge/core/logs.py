"""A log that costs nobody anything where it cannot be written: handlers that raise, disks that are full."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

__all__ = ["LimitedLog", "SafeLog"]


class SafeLog(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A module's logger whose handlers and filters may raise: the line is lost, and what it tells about goes on.

    Args:
        name: The module's.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a line, as from where `info` or `warning` was called."""
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})


class LimitedLog(SafeLog):
    """A log of what strangers can cause: so many lines at once, and so many a second; the next line counts the others.

    Args:
        name: The module's.
        burst: Lines at once.
        rate: Lines a second, beyond those.
    """

    def __init__(self, name: str, burst: int = 20, rate: float = 2.0) -> None:
        super().__init__(name)
        self._burst, self._rate = burst, rate
        self._left = float(burst)
        self._seen = time.monotonic()
        self._dropped = 0

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a line, unless there were too many."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._seen) * self._rate)
        self._seen = now
        if self._left < 1:
            self._dropped += 1
            return
        self._left -= 1
        if self._dropped:
            msg, self._dropped = f"{msg} (and {self._dropped} further lines like it, which are left out)", 0
        super().log(level, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})
