"""Messages to users besides results: log lines, warnings, and the progress of a call that waits.

Logging never fails a call: handlers may raise, and disks may be full. The log of failing environments has each kind of
error in full once, and then a count per minute.
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
"""The end of the text that a client gets when its environment raised; the server's log omits it."""
RESET_ADVICE = "Fix its reset(). The next reset() calls it again, and may give it another seed or other options."
"""The same for an environment that raised in `reset`."""


def counted(number: int, what: str) -> str:
    """Return a number with its noun: `1 world`, `2,000 worlds`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def reason_of(error: BaseException) -> str:
    """Return an exception's text; a system error's without its number: `/urls.txt: No such file or directory`."""
    if not isinstance(error, OSError) or not isinstance(error.errno, int) or not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


class SafeLog(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A module's logger whose handlers and filters may raise: the line is lost, and the caller continues.

    Args:
        name: The module's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a line, attributed to the caller of `info` or `warning`."""
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})


class LimitedLog(SafeLog):
    """A log for events that strangers can cause: it limits the rate of lines, and the next line counts the omitted
    ones.

    Args:
        name: The module's name.
        burst: The most lines at once.
        rate: The most lines a second beyond those.
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
    """Issue a warning, attributed to the nearest caller outside this package and Gymnasium.

    Otherwise it would show a line of this package, which the user did not write and cannot change.
    """
    frame, level = inspect.currentframe(), 1
    # Counted on each call: the depth of the user's line depends on the wrappers around the environment.
    while frame is not None and frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _PASSED_THROUGH:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


LOOK = 2.0
"""Seconds of a wait after which the user is told what is still missing."""

_PERIOD = 1.5
"""Seconds of silence before the first line, and between two: most waits are over by then."""


def tell(text: str) -> None:
    """Write a line to standard error, if that is a terminal."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
        if sys.stderr.isatty():
            print(f"bridge: {text}", file=sys.stderr, flush=True)


class Progress:
    """Tells the user what a call waits for, if it takes long, and again when that changes."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _PERIOD
        self._said = ""

    def tell(self, text: str) -> None:
        """Write a line, if it differs from the last one and that is old enough."""
        now = time.monotonic()
        if now >= self._due and text != self._said:
            self._due, self._said = now + _PERIOD, text
            tell(text)


_failures = SafeLog(__name__)
_INTERVAL = 60.0
# The most kinds of failures that are distinguished; all others are counted as one kind.
_MOST_KINDS = 100
_FURTHER = "failures of further kinds"
_KIND = re.compile(r"the environment raised \w+ in [^:\n]*")


class FailureLog:
    """Logs failures, so that an environment that fails again and again does not fill the log.

    Args:
        call_later: Calls a function in some seconds: counts are logged a minute after the first failure that was not
            logged in full.
    """

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._call_later = call_later
        self._counts: dict[str, int] = {}
        """Failures of each kind that was logged in full, since they were last reported."""
        self._timer: object = None
        self.total = 0
        """The number of all failures."""

    def add(self, world: str | None, message: str) -> None:
        """Record a failure.

        Args:
            world: The name of the world.
            message: The text for the client: a line, and the environment's traceback.
        """
        self.total += 1
        found = _KIND.match(message)
        # Without the exception's text, which may contain a different number in each failure.
        kind = found[0] if found is not None else message.partition("\n")[0][:80]
        if kind not in self._counts:
            if len(self._counts) < _MOST_KINDS:
                self._counts[kind] = 0
                # Further lines are indented: text from a client must not look like a line of the log.
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
