"""Reports the progress of a call that waits, to a person at a terminal."""

from __future__ import annotations

import contextlib
import sys
import time

__all__ = ["LOOK", "Progress", "tell"]

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
