"""Reports for a loop that waits for lost remotes, and tells what else it may do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from bridge.client.slots.slot import Member
from bridge.logs import SafeLog

__all__ = ["LOG_PERIOD", "OnLost", "describe", "log_late"]

_log = SafeLog(__name__)
LOG_PERIOD = 5.0
"""Seconds between two reports of what is waited for."""
_MOST_LINES = 5

OnLost: TypeAlias = Literal["wait", "raise", "continue"]
"""Decides what becomes of slots whose remote was lost: wait for them, raise, or go on with their last observations."""


def log_late(members: Sequence[Member], waited: float, timeout: float) -> None:
    """Log in a few lines what has been waited for, seconds of at most `timeout`."""
    late = [member for member in members if not member.settled]
    for member in late[:_MOST_LINES]:
        _log.warning("waiting for %s, %.0f s of at most %g s", describe(member), waited, timeout)
    if len(late) > _MOST_LINES:
        _log.warning("waiting for %d more", len(late) - _MOST_LINES)


def describe(member: Member) -> str:
    """Say which slots a member fills, where they are, and why."""
    reason = f": {member.error.reason}" if member.error is not None else ""
    return f"{member.title} ({member.remote.url}), {member.state.name.lower()}{reason.partition(chr(10))[0]}"
