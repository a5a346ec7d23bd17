"""What can be said of the members of a pool: where their slots are, and what failures have cost."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from bridge.client.members import SPARE, Member
from bridge.client.remote import SlotState
from bridge.client.remote_record import RemoteReport
from bridge.encoding.tensors import Array

__all__ = ["remote_reports", "seconds_away", "slot_states"]


def slot_states(members: Sequence[Member], num_envs: int) -> Array:
    """Return where each slot is: an int64 array `(num_envs,)` of `SlotState`."""
    states = np.empty(num_envs, np.int64)
    for member in members:
        states[member.slots] = member.state
        if member.state is SlotState.RUNNING and member.remote.realtime is not None:
            resetting = member.remote.realtime.resetting
            if resetting is not None:
                states[member.slots][resetting] = SlotState.RESETTING
    return states


def seconds_away(members: Sequence[Member], num_envs: int) -> Array | None:
    """Return for how long each slot's remote has been away, `(num_envs,)`; None: none is."""
    away: Array | None = None
    for member in members:
        since = member.remote.record.away_since
        if since is not None:
            away = np.zeros(num_envs) if away is None else away
            away[member.slots] = time.monotonic() - since
    return away


def remote_reports(members: Sequence[Member]) -> tuple[RemoteReport, ...]:
    """Say how each member's remote is."""
    now = time.monotonic()
    return tuple(
        member.remote.record.report(
            now,
            member.remote.url,
            () if member.start == SPARE else tuple(range(member.start, member.start + member.lanes)),
            "spare" if member.start == SPARE and member.idle else member.state.name.lower(),
        )
        for member in members
    )
