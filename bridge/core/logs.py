"""What a user is told beside results: lines of a log, warnings, and the progress of a call that waits.

A log costs nobody anything where it cannot be written: handlers that raise, disks that are full.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import time
import warnings
from typing import Any

__all__ = ["LOOK", "LimitedLog", "Progress", "SafeLog", "tell", "warn"]


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


_PASSED_THROUGH = ("bridge", "gymnasium")


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning whose place is the nearest caller outside of this package and of Gymnasium.

    A place of ours would show a line that its reader did not write and cannot change.
    """
    frame, level = inspect.currentframe(), 1
    # Counted anew each time: how deep the user's line is depends on the wrappers around the environment.
    while frame is not None and frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _PASSED_THROUGH:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


LOOK = 2.0
"""Seconds of a wait after which a person is told what is still missing."""

_PERIOD = 1.5
"""Seconds of silence before the first line, and between two: most waits are over by then."""


def tell(text: str) -> None:
    """Write a line to standard error, where that is a terminal."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
        if sys.stderr.isatty():
            print(f"bridge: {text}", file=sys.stderr, flush=True)


class Progress:
    """Tells what is waited for, once that takes a while, and again where it changes."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _PERIOD
        self._said = ""

    def tell(self, text: str) -> None:
        """Write a line, where it differs from the last one and that is old enough."""
        now = time.monotonic()
        if now >= self._due and text != self._said:
            self._due, self._said = now + _PERIOD, text
            tell(text)
