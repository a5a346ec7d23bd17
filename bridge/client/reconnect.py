"""When a lost connection of a vector environment is retried, and which spare takes over meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.client.events import Lost
from bridge.client.members import SPARE, Member
from bridge.client.remote import SlotState
from bridge.client.slots.back_off import pause
from bridge.client.slots.placement import Load
from bridge.errors import RemoteError, shown_url
from bridge.logs import SafeLog

if TYPE_CHECKING:
    from bridge.client.vector_pool import VectorPool

__all__ = ["Reconnector"]

_log = SafeLog(__name__)


class Reconnector:
    """Tries again what failed, and gives up what is late.

    Args:
        pool: Whose members come and go.
    """

    def __init__(self, pool: VectorPool) -> None:
        self._pool = pool

    def lost(self, member: Member, event: Lost, now: float) -> None:
        """Set when a member that was lost is connected again: elsewhere at once, in the same place after a pause."""
        member.failures += 1
        placement = self._pool.placement
        if placement is not None and member.endpoint is not None:
            placement.failed(member.endpoint, event.error, now)
            placement.watch.poll(now, soon=True)
        member.retry_at = member.remote.record.lost(
            now, pause(member.failures), str(event.error), established=event.established
        )

    def refused(self, member: Member, error: RemoteError, now: float) -> None:
        """Set when a member whose Reset or Step was refused is reset again: the first time at once."""
        member.failures += 1
        placement = self._pool.placement
        if placement is not None and member.endpoint is not None and member.fails_every_reset:
            placement.failed(member.endpoint, error, now)
        member.retry_at = now + (pause(member.failures - 1) if member.failures > 1 else 0.0)

    def check(self, now: float) -> None:
        """Connect or reset what is due, and give up what is late."""
        pool = self._pool
        if pool.placement is not None:
            pool.placement.watch.poll(now)
        pool.moves.check(now)
        for member in pool.members:
            if member.cut_off:
                self._connect(member, now)  # its next episode begins once the end of this one was told
            elif member.state is SlotState.LOST:
                if self._replace(member):
                    pool.begin_in_new_world(member)
                else:
                    self._connect(member, now)
            elif member.idle:
                if now >= member.retry_at:
                    pool.begin(member, member.settings)
            elif not member.settled:
                self._give_up_if_late(member, now)
        for spare in tuple(pool.spares):
            self._connect(spare, now)

    def _connect(self, member: Member, now: float) -> None:
        """Connect a member that was lost, if it is due; give up a connection that is late."""
        if member.state is SlotState.LOST:
            if member.endpoint is not None:
                self._move(member, now)
            elif now >= member.retry_at:
                self._pool.open(member)
        elif member.state is SlotState.CONNECTING:
            self._give_up_if_late(member, now)

    def _move(self, member: Member, now: float) -> None:
        """Connect a member of a directory to the endpoint that suits best now; with none, look again later."""
        pool = self._pool
        if pool.placement is None:
            return
        others = [other for other in pool.everybody() if other is not member]
        endpoint = pool.placement.choose(Load(others), member.lanes, now, pool.timeout)
        if endpoint is None:
            pool.placement.watch.poll(now, soon=True)
            return
        if endpoint.key != member.endpoint and member.start != SPARE:
            _log.info("slot %d moves from %s to %s", member.start, member.remote.url, shown_url(endpoint.url))
        pool.move(member, endpoint)

    def _replace(self, member: Member) -> bool:
        """Let a spare that stands ready take over the slots of a member that is lost; return whether there was one."""
        for spare in self._pool.spares:
            if spare.idle and spare.lanes == member.lanes and spare.single == member.single:
                self._pool.replace(member, spare)
                spare.error, spare.failures = member.error, member.failures
                spare.retry_at, member.failures = member.retry_at, 0
                _log.warning("%s takes over the slots of %s", member.remote.url, spare.remote.url)
                return True
        return False

    def _give_up_if_late(self, member: Member, now: float) -> None:
        asked = {SlotState.CONNECTING: "connecting", SlotState.RESETTING: "a reset"}.get(member.state, "a step")
        timeout = self._pool.timeout
        lost = member.remote.tick(now, lambda: member.remote.late(f"to {asked}", timeout))
        if lost is not None:
            self._pool.lose(member, lost)
