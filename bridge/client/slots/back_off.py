"""Pauses between attempts: they double, and no two clients have the same."""

from __future__ import annotations

import random

__all__ = ["pause"]

# Seconds until the second attempt, and at most until any.
_LEAST, _MOST = 0.1, 10.0
_jitter = random.Random()


def pause(failures: int) -> float:
    """Return the seconds until the next attempt: doubling, with jitter so that many clients do not come at once."""
    # A bound for the exponent: of a server that is gone for hours 1,024 attempts fail, and 2.0 ** 1024 overflows.
    return min(_MOST, _LEAST * 2.0 ** min(failures - 1, 10)) * _jitter.uniform(0.5, 1.5)
