"""The results and reports of the slots of a pool: rows and infos, where they are, and what failures cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.core.client.slots.members import SlotMembers
from bridge.core.client.slots.results import Results
from bridge.core.client.slots.slot import Member, SlotState
from bridge.core.client.slots.vector_pool import VectorPool
from bridge.core.client.world.remote import COUNTS, RemoteReport
from bridge.core.encoding.tensors import Array

__all__ = ["as_universe", "flat_report", "remote_reports", "slot_states"]


def as_universe(pool: VectorPool, results: Results) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
    """Return what a step of `RemoteVectorEnv` returns: rows of observations, None where a slot has none, and infos."""
    rows = results.rows()
    infos = results.merged_infos()
    infos["n"] = tuple(results.own_infos())
    infos["slot_state"] = slot_states(pool.members)
    away = {member: since for member in pool.members.filling if (since := member.remote.record.away_since) is not None}
    if away:
        seconds = infos["seconds_away"] = np.zeros(len(pool.members.at))
        for member, since in away.items():
            seconds[member.slots] = time.monotonic() - since
    batch = results.batch
    return rows, batch.rewards, batch.terminations, batch.truncations, infos


def slot_states(members: SlotMembers) -> Array:
    """Return where each slot is: an int64 array `(num_envs,)` of `SlotState`."""
    filling = members.filling
    found = [member.state for member in filling]
    states = np.fromiter(found, np.int64, len(found))
    # Only then some world has several lanes: nearly always there is nothing to repeat.
    if len(filling) < len(members.at):
        states = np.repeat(states, [member.lanes for member in filling])
    for member, state in zip(filling, found, strict=True):
        # In real time each lane of a running world may be between two episodes.
        realtime = member.remote.realtime if state is SlotState.RUNNING else None
        if realtime is not None and realtime.resetting is not None:
            states[member.slots][realtime.resetting] = SlotState.RESETTING
    return states


def flat_report(reports: Sequence[RemoteReport], states: Array, stalled: float) -> dict[str, float]:
    """Return what `RemoteVectorEnv.report` does.

    Args:
        reports: Of each remote.
        states: Of each slot, as `slot_states`.
        stalled: Seconds for which calls waited for slots that were lost.
    """
    found = {f"slots/{state.name.lower()}": float(np.count_nonzero(states == state)) for state in SlotState}
    found["stalled_seconds"] = stalled
    for name in COUNTS:
        key = "episodes_cut" if name == "episodes_lost" else name
        found[key] = float(sum(getattr(report, name) for report in reports))
    for report in reports:
        for name, value in (
            ("slots", len(report.slots)),
            ("losses", report.losses),
            ("seconds_away", report.seconds_away),
        ):
            key = f"servers/{report.url}/{name}"
            # Several remotes may be at one server.
            found[key] = found.get(key, 0.0) + float(value)
    return found


def remote_reports(members: Sequence[Member]) -> tuple[RemoteReport, ...]:
    """Say how each member's remote is."""
    now = time.monotonic()
    return tuple(
        member.remote.record.report(
            now,
            member.remote.url,
            tuple(range(member.start, member.start + member.lanes)) if member.stands_by is None else (),
            "spare" if member.stands_by is not None and member.ready else member.state.name.lower(),
        )
        for member in members
    )
