"""Pauses between attempts: they double with each failure in a row."""

from __future__ import annotations

import random

__all__ = ["doubling_pause", "pause"]

_jitter = random.Random()


def doubling_pause(failures: int, least: float, most: float) -> float:
    """Return the seconds until the next attempt: `least` after the first failure, then doubling up to `most`."""
    # A bound for the exponent: of a server that is gone for hours 1,024 attempts fail, and 2.0 ** 1024 overflows.
    return min(most, least * 2.0 ** min(failures - 1, 10))


def pause(failures: int) -> float:
    """Return the seconds until a client's next attempt; no two have the same, so many do not come at once."""
    return doubling_pause(failures, 0.1, 10.0) * _jitter.uniform(0.5, 1.5)
