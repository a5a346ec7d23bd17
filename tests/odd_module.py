"""A module of a user's, with a state of its own, for `tests.odd_envs`."""

from __future__ import annotations

counter = 0
table = {"n": 0}


def bump() -> int:
    """Count."""
    global counter
    counter += 1
    return counter
