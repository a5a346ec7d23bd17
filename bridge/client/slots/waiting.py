"""Reports for a loop that waits for lost remotes, and tells what else it may do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from bridge.client.slots.slot import Member
from bridge.logs import SafeLog

__all__ = ["OnLost", "WaitLog", "describe"]

_log = SafeLog(__name__)
_PERIOD = 5.0
_MOST_LINES = 5

OnLost: TypeAlias = Literal["wait", "raise", "continue"]
"""Decides what becomes of slots whose remote was lost: wait for them, raise, or go on with their last observations."""


class WaitLog:
    """Logs every 5 s what is waited for, in a few lines.

    Args:
        timeout: Seconds after which the wait ends.
        now: When it begins; monotonic seconds.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._began = now
        self._next = now + _PERIOD

    def tell(self, members: Sequence[Member], now: float) -> None:
        """Log a line for each member that is waited for, where it is time."""
        if now < self._next:
            return
        self._next = now + _PERIOD
        late = [member for member in members if not member.settled]
        # Of a fleet that is gone nobody reads a line for each of thousands of slots.
        for member in late[:_MOST_LINES]:
            waited = now - self._began
            _log.warning("waiting for %s, %.0f s of at most %g s", describe(member), waited, self._timeout)
        if len(late) > _MOST_LINES:
            _log.warning("waiting for %d more", len(late) - _MOST_LINES)


def describe(member: Member) -> str:
    """Say which slots a member fills, where they are, and why."""
    reason = f": {member.error.reason}" if member.error is not None else ""
    return f"{member.title} ({member.remote.url}), {member.state.name.lower()}{reason.partition(chr(10))[0]}"
