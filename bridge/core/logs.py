"""What a user is told beside results: lines of a log, warnings, and the progress of a call that waits.

A log costs nobody anything where it cannot be written: handlers that raise, disks that are full. That of environments
that fail has each kind of error in full once, and then a count a minute.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

__all__ = [
    "ADVICE",
    "LOOK",
    "RESET_ADVICE",
    "FailureLog",
    "LimitedLog",
    "Progress",
    "SafeLog",
    "counted",
    "reason_of",
    "tell",
    "warn",
]

ADVICE = "Fix the environment, or call reset() to begin a new episode."
"""How the text ends that a client gets of an environment that raised; the server's log, for others, leaves it out."""
RESET_ADVICE = "Fix its reset(). The next reset() calls it again, and may give it another seed or other options."
"""The same where it raised in `reset`."""


def counted(number: int, what: str) -> str:
    """Write how many of something there are: `1 world`, `2,000 worlds`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def reason_of(error: BaseException) -> str:
    """Return what an exception says, of the system's without their number: `/urls.txt: No such file or directory`."""
    if not isinstance(error, OSError) or not isinstance(error.errno, int) or not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


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


_failures = SafeLog(__name__)
_INTERVAL = 60.0
# Kinds of failures that are told apart; all further ones are counted as one.
_MOST_KINDS = 100
_FURTHER = "failures of further kinds"
_KIND = re.compile(r"the environment raised \w+ in [^:\n]*")


class FailureLog:
    """Logs failures without letting an environment that only fails fill the log.

    Args:
        call_later: Calls a function in some seconds: the counts are told a minute after the first failure that was not
            logged in full.
    """

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._call_later = call_later
        self._counts: dict[str, int] = {}
        """Failures of each kind that was logged, since they were last told."""
        self._timer: object = None
        self.total = 0
        """All failures that were ever noted."""

    def add(self, world: str | None, message: str) -> None:
        """Note a failure.

        Args:
            world: The name of the world.
            message: What its client is told: a line, and the environment's traceback.
        """
        self.total += 1
        found = _KIND.match(message)
        # Without the exception's text, in which each failure may have a number of its own.
        kind = found[0] if found is not None else message.partition("\n")[0][:80]
        if kind not in self._counts:
            if len(self._counts) < _MOST_KINDS:
                self._counts[kind] = 0
                # Further lines are indented: what a client has sent must not look like a line of the log.
                text = message.removesuffix(ADVICE).removesuffix(RESET_ADVICE).rstrip()
                _failures.error("world=%s %s", world, text.replace("\n", "\n  "))
                return
            kind = _FURTHER
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._timer is None:
            self._timer = self._call_later(_INTERVAL, self._tell)

    def _tell(self) -> None:
        self._timer = None
        for kind, count in self._counts.items():
            if count:
                _failures.error("%s: %d times more in the last minute", kind, count)
                self._counts[kind] = 0
