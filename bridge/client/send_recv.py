"""`send` and `recv` of a vector environment: step whichever slots have answered, so that slow ones hold up nobody."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.client.infos import merge_lanes
from bridge.client.results import InfoJoiner, hand_over
from bridge.client.step_reader import Batch
from bridge.errors import AlreadyPendingError, RemoteError, RemoteTimeoutError, ResetNeededError, SettingError
from bridge.tensors import Array

if TYPE_CHECKING:
    from bridge.client.members import Member
    from bridge.client.remote_vector_env import RemoteVectorEnv

__all__ = ["Received", "receive", "send"]

Received = tuple[Array, Any, Array, Array, Array, dict[str, Any]]
"""Slots, observations, rewards, terminations, truncations and infos."""


def send(envs: RemoteVectorEnv, actions: Any, slots: Any) -> None:
    """Do what `RemoteVectorEnv.send` says."""
    if not envs._was_reset:
        raise ResetNeededError("expected reset() before the first send()")
    order = _checked_slots(slots, envs.num_envs)
    plan = _plan(envs, order)
    columns = envs._action_layout.split(actions, len(order))
    envs.pool.drain()
    for member, _ in plan:
        if member.stepping:
            raise AlreadyPendingError(
                f"the slots {member.start} to {member.start + member.lanes - 1} have an action already whose answer "
                "was not taken; call recv first",
                "recv",
            )
    envs.ask(plan, columns)  # of a slot that has no episode, the next one begins by itself
    envs._sent = True


def _checked_slots(slots: Any, num_envs: int) -> list[int]:
    array = np.arange(num_envs) if slots is None else np.asarray(slots)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise SettingError(f"expected slots to be a list of slot numbers, with at least one, got {slots!r:.80}")
    order: list[int] = array.tolist()
    if len(set(order)) != len(order) or min(order) < 0 or max(order) >= num_envs:
        raise SettingError(f"expected different slots from 0 to {num_envs - 1}, got {order}")
    return order


def _plan(envs: RemoteVectorEnv, order: list[int]) -> list[tuple[Member, int]]:
    """Return the members that `order` names, each with the position of its first slot."""
    plan: list[tuple[Member, int]] = []
    member_at, position = envs.pool.member_at, 0
    while position < len(order):
        member = member_at[order[position]]
        stop = position + member.lanes
        if member.lanes > 1 and order[position:stop] != list(range(member.start, member.start + member.lanes)):
            raise SettingError(
                f"the slots {member.start} to {member.start + member.lanes - 1} are lanes of one world, which one "
                "message steps: name all of them, in order and side by side, as recv returns them"
            )
        plan.append((member, position))
        position = stop
    return plan


def receive(envs: RemoteVectorEnv, at_least: int) -> Received:
    """Do what `RemoteVectorEnv.recv` says."""
    if not envs._was_reset:
        raise ResetNeededError("expected reset() before recv()")
    if not isinstance(at_least, (int, np.integer)) or isinstance(at_least, bool) or at_least < 1:
        raise SettingError(f"expected at_least to be a positive number of slots, got {at_least!r}")
    envs.pool.drain()
    coming = sum(
        member.lanes
        for member in envs.pool.members
        if member.answer is not None or member.cut_off or not member.settled
    )
    if coming < at_least:
        raise SettingError(
            f"expected at_least to be at most the {coming} slots that an answer is coming for, got {at_least}; call "
            "send for more slots first"
        )

    def ready() -> int:
        return sum(member.lanes for member in envs.pool.members if member.answer is not None or member.cut_off)

    def enough() -> bool:
        if envs.pool.has_errors:
            envs.pool.raise_permanent_error()
        return ready() >= at_least

    envs.pool.gather(enough, time.monotonic() + envs.pool.timeout + 1.0)
    found = ready()
    if found < at_least:
        late = [member for member in envs.pool.members if not member.settled]
        raise RemoteTimeoutError(
            ", ".join(dict.fromkeys(member.remote.url for member in late)),
            f"{found} slots answered within {envs.pool.timeout:g} s, where recv(at_least={at_least}) waits for more",
        )
    return _results(envs, [member for member in envs.pool.members if member.answer is not None or member.cut_off])


def _results(envs: RemoteVectorEnv, members: Sequence[Member]) -> Received:
    """Hand out the answers of some members, side by side."""
    size = sum(member.lanes for member in members)
    batch = Batch.empty(envs._observation_layout, size)
    joiner = InfoJoiner(size)
    position = 0
    for member in members:
        block = slice(position, position + member.lanes)
        info, error = _hand_out(envs, member, batch, position)
        if error is not None:
            batch.truncations[block] = True
            for slot in range(block.start, block.stop):
                joiner.add({"error": str(error)}, slot)
        elif isinstance(info, list):
            for lane, own in enumerate(info):
                joiner.add(own, position + lane)
        elif info and member.single:
            joiner.add(info, position)
        elif info:
            merge_lanes(joiner.infos, info, position, member.lanes, size)
        position = block.stop
    slots = np.concatenate([np.arange(member.start, member.start + member.lanes) for member in members])
    observations = envs._observation_layout.batch(batch.columns)
    return slots, observations, batch.rewards, batch.terminations, batch.truncations, joiner.infos


def _hand_out(
    envs: RemoteVectorEnv, member: Member, batch: Batch, position: int
) -> tuple[Mapping[str, Any] | list[Any], RemoteError | None]:
    """Write a member's answer into a batch; or its last observation where it was cut off, and why."""
    if member.answer is not None:
        try:
            return hand_over(member, member.answer, batch, position), None
        except RemoteError as problem:
            envs.pool.lose(member, member.remote.give_up(problem))
    error = member.error
    member.in_episode = False
    if member.last is not None:
        member.remote.reader.read_into(member.last, batch, position, member.remote.now())
        block = slice(position, position + member.lanes)
        batch.rewards[block] = 0.0
        batch.terminations[block] = False
    return {}, error
