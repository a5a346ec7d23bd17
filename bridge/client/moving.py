"""How slots leave a server that drains or fails, and none of their steps and episodes is lost.

A server says that it drains by a GOAWAY or by its health service, or its directory says so. A replacement is then
connected for each of its worlds: at a free endpoint of the directory, or it is one of the spares. A world of one
environment changes over at the end of its episode. Of a world of lanes some are always in the midst of theirs: it
changes over with the answer to a step, which ends them. Where there is no replacement, the world stays.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from bridge.client.members import Member
from bridge.client.remote import SlotState
from bridge.client.slots.placement import Load
from bridge.client.step_reader import Batch
from bridge.encoding.tensors import Array
from bridge.errors import shown_url
from bridge.logs import SafeLog

if TYPE_CHECKING:
    from bridge.client.vector_pool import VectorPool

__all__ = ["Moves"]

# Seconds between two looks for servers that drain.
_PERIOD = 0.1
# Seconds for which the next episode waits for a replacement that is still connecting; later it begins where it was.
_PATIENCE = 5.0
# Seconds until a spare connects again to the server that its slots have left.
_RETURN = 1.0

_log = SafeLog(__name__)


class Moves:
    """Moves the members of a pool off servers that drain.

    Args:
        pool: Whose.
    """

    def __init__(self, pool: VectorPool) -> None:
        self._pool = pool
        self.look_at = float("inf")
        """When to look next, monotonic seconds; never, where there is nowhere else to go."""
        self.lanes_leave = False
        """Whether a world of lanes is to change over."""

    @property
    def enabled(self) -> bool:
        """Whether there may be other servers."""
        return self.look_at != float("inf")

    def enable(self) -> None:
        """Look for servers that drain from now on; called before the first one is connected."""
        self.look_at = 0.0
        self._pool.poller.watches_health = True

    def is_leaving(self, member: Member) -> bool:
        """Whether a member is on a server that drains."""
        placement = self._pool.placement
        return member.remote.draining or (placement is not None and placement.is_draining(member.endpoint))

    def check(self, now: float) -> None:
        """If it is time, look for servers that drain, and connect replacements."""
        if now < self.look_at:
            return
        self.look_at = now + _PERIOD
        pool = self._pool
        leaving = [member for member in pool.members if member.connected and self.is_leaving(member)]
        self.lanes_leave = any(not member.single for member in leaving)
        for spare in [spare for spare in pool.spares if spare.connected and self.is_leaving(spare)]:
            if pool.placement is None:
                self._come_back_later(spare, now)
            else:
                pool.drop_spare(spare)
        if pool.placement is None:
            return  # the spares are connected already
        if leaving:
            pool.placement.watch.poll(now, soon=True)
            load = Load(pool.everybody())
            for member in leaving[len(pool.spares) :]:
                endpoint = pool.placement.choose(load, member.lanes, now, pool.timeout)
                if endpoint is not None:
                    pool.add_replacement(endpoint, pool.placement, member.lanes)
        for spare in pool.spares[len(leaving) :]:
            pool.drop_spare(spare)

    def _come_back_later(self, spare: Member, now: float) -> None:
        """Leave a spare's server, which drains, and try after a while whether there is one again."""
        spare.remote.close(0.0)
        spare.retry_at = now + _RETURN

    # Changing over

    def relocate(self, member: Member) -> bool:
        """Have the next episode of a member begin elsewhere if it is to leave; return whether it does.

        Args:
            member: Its episode has ended, or is given up; `settings` are those of its next Reset.
        """
        leaves = self.is_leaving(member) or (self._pool.placement is not None and member.fails_every_reset)
        if not member.connected or not leaves or "reset_mask" in (member.settings or {}):
            return False
        now = time.monotonic()
        replacement = self._ready(member) or self._connecting(member, now)
        if replacement is None:
            return False
        self._change_over(member, replacement)
        return True

    def move_lanes(self, member: Member, batch: Batch, position: int) -> Array | None:
        """Have a world of lanes change over after a step, if it is to leave and a replacement stands ready.

        Args:
            member: Its answer to the step was just handed out.
            batch: The results, in which the lanes that were in an episode get truncated.
            position: The member's first slot in it.

        Returns:
            Which lanes were truncated by it, bools `(lanes,)`; None: it stays.
        """
        replacement = self._ready(member) if member.connected and self.is_leaving(member) else None
        if replacement is None:
            return None
        block = slice(position, position + member.lanes)
        cut: Array = ~(batch.terminations[block] | batch.truncations[block])
        realtime = member.remote.realtime
        if realtime is not None and realtime.resetting is not None:
            cut &= ~realtime.resetting  # they are in no episode
        batch.truncations[block] |= cut
        member.in_episode, member.settings = False, None
        member.remote.record.episodes_moved += int(np.count_nonzero(cut))
        self._change_over(member, replacement)
        return cut

    def _ready(self, member: Member) -> Member | None:
        """Return a replacement that is in its world."""
        for spare in self._pool.spares:
            fits = spare.idle and spare.lanes == member.lanes and spare.single == member.single
            if fits and not self.is_leaving(spare):
                return spare
        return None

    def _connecting(self, member: Member, now: float) -> Member | None:
        """Return a replacement that is connected just now, to an endpoint that has not failed; None: there is none.

        One that has failed could cost the slot the server that it has, so a replacement there is waited for.
        """
        placement = self._pool.placement
        if placement is None:
            return None
        latest = now + self._pool.timeout - _PATIENCE
        for spare in self._pool.spares:
            recent = spare.state is SlotState.CONNECTING and spare.remote.session.deadline > latest
            if recent and spare.lanes == member.lanes and placement.is_well(spare.endpoint):
                return spare
        endpoint = placement.choose(Load(self._pool.everybody()), member.lanes, now, self._pool.timeout)
        if endpoint is None or not placement.is_well(endpoint.key):
            return None
        return self._pool.add_replacement(endpoint, placement, member.lanes)

    def _change_over(self, member: Member, replacement: Member) -> None:
        """Let a replacement take over a member's slots, and leave the server that drains."""
        pool, before = self._pool, member.remote
        before.record.moves += 1
        pool.replace(member, replacement)
        if pool.placement is None:
            self._come_back_later(replacement, time.monotonic())
        _log.info(
            "%s moved from %s, which drains or fails, to %s", member.title, before.url, shown_url(member.remote.url)
        )
        if member.idle:
            pool.begin_in_new_world(member)
