"""Waits until every slot has an observation, and reports which slots it waits for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, TypeAlias

from bridge.core.client.slots.slot import SETTLED, LinkState, Member
from bridge.core.client.slots.vector_pool import VectorPool
from bridge.core.logs import SafeLog
from bridge.errors import RemoteTimeoutError

__all__ = ["OnLost", "gather_all"]

_log = SafeLog(__name__)
# Seconds between two reports.
_PERIOD = 5.0
_MOST_LINES = 5

OnLost: TypeAlias = Literal["wait", "raise", "continue"]
"""Decides what becomes of slots whose remote was lost: wait for them, raise, or go on with their last observations."""


def gather_all(pool: VectorPool, timeout: float, on_lost: OnLost) -> None:
    """Wait until every slot has an observation, or is not waited for by `on_lost`; raises as `Stepper.wait_for_all`."""
    members = pool.members.filling
    first = 0
    began = looked = time.monotonic()
    tell_at = began + _PERIOD

    def tolerated(member: Member) -> bool:
        """Tell whether nobody waits for a slot that has no observation; raise where its loss is to be raised."""
        # A slot that moves is not `away`, and one that connects again is offline no more: neither raises.
        gone = on_lost == "raise" and member.away and member.link is LinkState.OFFLINE
        if gone and member.error is not None and not pool.has_spare(member):
            raise member.error
        # If every slot is away, going on would give nothing but repeated observations: then it waits.
        return on_lost == "continue" and member.away and not all(other.away for other in members)

    def enough() -> bool:
        nonlocal first, looked, tell_at
        # The flag, because this runs after each answer: a look at every slot would cost a step of n slots n² looks.
        if pool.has_errors:
            pool.raise_permanent_error()
            first = 0
        while first < len(members) and (
            members[first].episode in SETTLED or (on_lost != "wait" and tolerated(members[first]))
        ):
            first += 1
        if first < len(members):
            now = time.monotonic()
            # Only what a lost slot costs is counted, not the time that environments take.
            pool.stalled += now - looked if members[first].away_since is not None else 0.0
            looked = now
            if now >= tell_at:
                tell_at = now + _PERIOD
                _tell(members, now - began, timeout)
        return first == len(members)

    if not pool.gather(enough, began + timeout):
        late = [member for member in members if not (member.episode in SETTLED or tolerated(member))]
        raise RemoteTimeoutError(
            ", ".join(dict.fromkeys(member.remote.url for member in late)),
            f"no observation within {timeout:g} s: {'; '.join(_describe(late))}",
        )


def _tell(members: Sequence[Member], waited: float, timeout: float) -> None:
    """Log what is waited for, in a few lines."""
    lines = _describe([member for member in members if member.episode not in SETTLED])
    # Of a fleet that is gone nobody reads a line for each of thousands of servers.
    for line in lines[:_MOST_LINES]:
        _log.warning("waiting %.0f s of at most %g s for %s", waited, timeout, line)
    if len(lines) > _MOST_LINES:
        _log.warning("and %d further lines like these, which are left out", len(lines) - _MOST_LINES)


def _describe(late: Sequence[Member]) -> list[str]:
    """Say which slots members fill, where they are, and why, in a line for all that are late for the same reason."""
    titles: dict[str, list[str]] = {}
    for member in late:
        reason = f": {member.error.reason}" if member.error is not None else ""
        why = f"({member.remote.url}), {member.state.name.lower()}{reason.partition(chr(10))[0]}"
        titles.setdefault(why, []).append(member.title)
    return [f"{own[0]}{f' and {len(own) - 1} more' if own[1:] else ''} {why}" for why, own in titles.items()]
