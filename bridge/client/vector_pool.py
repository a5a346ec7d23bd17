"""The pool of a vector environment: deadlines, retries, spares, loss, questions and closing.

A pool has members, each a remote and the slots that it fills. The caller's thread drives the sockets inside calls; the
keepalive thread that all pools of the process share drives them in between, and connects again what was lost.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Mapping
from typing import Any

from bridge.client.endpoints import Endpoint
from bridge.client.events import Event, Joined, Lost, Refused, StepAnswered
from bridge.client.members import SPARE, Member
from bridge.client.moving import Moves
from bridge.client.pool import Pool
from bridge.client.reconnect import Reconnector
from bridge.client.remote import Remote, SlotState
from bridge.client.session import ENDED_CODES
from bridge.client.slots.placement import Placement
from bridge.client.world_request import WorldInfo, WorldRequest
from bridge.errors import (
    ClosedError,
    EnvironmentFailedError,
    PeerError,
    RefusedError,
    SettingError,
    shown_url,
)
from bridge.logs import SafeLog
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.transport import keepalive

__all__ = ["VectorPool"]

# If we did not poll for this many seconds, deadlines are extended by the gap: nobody else is to blame.
_POLL_GAP = 1.0
# Seconds between two looks at what was lost, between calls.
_AWAY_PERIOD = 0.1

_log = SafeLog(__name__)


def _member(remote: Remote, start: int, lanes: int, endpoint: str | None) -> Member:
    member = Member(remote, start, lanes)
    member.endpoint = endpoint
    return member


class VectorPool(Pool):
    """The remotes of a vector environment, which come, go and answer by themselves.

    Args:
        timeout: Seconds to wait for any answer.
        max_message_bytes: The largest request or answer, in bytes.
        transport: What to connect by, as for `connect`.
    """

    def __init__(self, timeout: float, max_message_bytes: int, transport: str) -> None:
        super().__init__(timeout, max_message_bytes, transport)
        self.members: list[Member] = []
        """Those that fill slots, in the slots' order."""
        self.spares: list[Member] = []
        """Those that stand by."""
        self.member_at: list[Member] = []
        """The member of each slot."""
        self.num_envs = 0
        """The number of slots."""
        self.shared = False
        """Whether some remotes are in the same place."""
        self.waits_for_lanes = False
        """Whether real-time worlds of lanes answer only when every lane has an observation."""
        self.has_errors = False
        """Whether a member may have an error."""
        self.started = False
        """Whether there was a first reset, since which lost members come back and begin episodes by themselves."""
        self.polled_at = time.monotonic()
        """When events were handled last."""
        self._closed = False
        self.placement: Placement | None = None
        """Where the worlds are, of a directory; None: each has a URL of its own."""
        self.moves = Moves(self)
        """Moves slots off servers that drain."""
        self._reconnector = Reconnector(self)
        self._member_of: dict[Remote, Member] = {}

    # Copies and forked processes

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs: its remotes connect anew."""
        members = [
            (member.remote.request, member.remote.info, (member.start, member.lanes, member.endpoint))
            for member in self.everybody()
        ]
        kept = {key: self.__dict__[key] for key in ("num_envs", "shared", "waits_for_lanes", "placement")}
        return {"parts": self.parts(), "members": members, "kept": kept, "moves": self.moves.enabled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        VectorPool.__init__(self, *state["parts"])
        self.__dict__.update(state["kept"])
        if state["moves"]:
            self.moves.enable()
        everybody = []
        for request, info, place in state["members"]:
            remote = self.new_remote(request, info, shared=self.shared)
            if self.waits_for_lanes:
                remote.session.wait_for_all()
            everybody.append(_member(remote, *place))
        self._adopt(everybody)

    def after_fork(self) -> None:
        """Leave the connections to the parent process; the next `check_deadlines` makes some."""
        everybody = self.everybody()
        self.disown(member.remote for member in everybody)
        if self.moves.enabled:
            self.moves.enable()
        self._adopt([_member(member.remote, member.start, member.lanes, member.endpoint) for member in everybody])

    def everybody(self) -> list[Member]:
        """Return the members that fill slots, and then the spares."""
        return [*self.members, *self.spares]

    def _adopt(self, everybody: list[Member]) -> None:
        """Begin with members that have no connection."""
        self.members = [member for member in everybody if member.start != SPARE]
        self.spares = [member for member in everybody if member.start == SPARE]
        self.member_at = [member for member in self.members for _ in range(member.lanes)]
        self._member_of = {member.remote: member for member in everybody}
        self.has_errors = True

    # Connecting

    def add_member(self, request: WorldRequest, lanes: int = 1, endpoint: str | None = None) -> Member:
        """Connect a world that is to fill slots, without waiting for it; `place_members` then gives it its slots."""
        member = _member(self.new_remote(request, shared=self.shared), len(self.members), lanes, endpoint)
        self.members.append(member)
        self._member_of[member.remote] = member
        self.open(member)
        return member

    def place_members(self) -> None:
        """Give the worlds, all of which are joined, their slots in order.

        Raises:
            SettingError: One has other spaces than the first.
        """
        start = 0
        for member in self.members:
            member.place(start, member.remote.slots)
            start += member.lanes
            self._check_spaces(member)
        self.num_envs = start
        self.member_at = [member for member in self.members for _ in range(member.lanes)]

    def move(self, member: Member, endpoint: Endpoint) -> None:
        """Connect a member that has no connection to an endpoint; what it counted goes with it."""
        if self.placement is None:
            return
        if endpoint.key != member.endpoint or shown_url(endpoint.url) != member.remote.url:
            before = member.remote
            del self._member_of[before]  # what still comes of it means nothing
            remote = self._new_remote_at(endpoint, self.placement, before)
            remote.record = before.record
            member.remote, member.endpoint = remote, endpoint.key
            self._member_of[remote] = member
        self.open(member)

    def _new_remote_at(self, endpoint: Endpoint, placement: Placement, like: Remote) -> Remote:
        """Make a remote that is to take over from another one."""
        remote = self.new_remote(placement.request_for(endpoint.url), shared=self.shared)
        remote.session.know(like.session)
        if self.waits_for_lanes:
            remote.session.wait_for_all()
        return remote

    def add_replacement(self, endpoint: Endpoint, placement: Placement, lanes: int) -> Member:
        """Connect a world at an endpoint of the directory that is to take over slots, without waiting for it."""
        spare = _member(self._new_remote_at(endpoint, placement, self.members[0].remote), SPARE, lanes, endpoint.key)
        self.spares.append(spare)
        self._member_of[spare.remote] = spare
        self.open(spare)
        return spare

    def drop_spare(self, spare: Member) -> None:
        """Leave a spare's world without waiting, and forget it."""
        self.spares.remove(spare)
        del self._member_of[spare.remote]  # what still comes of it means nothing
        spare.remote.close(0.0)

    def add_spare(self, request: WorldRequest) -> None:
        """Connect a world that stands by, without waiting for it."""
        spare = Member(self.new_remote(request, shared=self.shared), SPARE, 1)
        self.spares.append(spare)
        self._member_of[spare.remote] = spare
        self.open(spare)

    def open(self, member: Member) -> None:
        """Start to connect."""
        keepalive.add(self)
        member.remote.session.deadline = time.monotonic() + self.timeout
        member.remote.open()

    def has_spare_for(self, member: Member) -> bool:
        """Tell whether a spare stands ready that can take over the slots of a member."""
        return any(
            spare.idle and spare.lanes == member.lanes and spare.single == member.single for spare in self.spares
        )

    def _check_spaces(self, member: Member) -> None:
        mine, first = member.remote.info, self.world_info()
        if mine is None or mine.spaces != first.spaces:
            got = mine.spaces if mine else None
            raise SettingError(
                f"{member.remote.url} has the spaces {got}, but {self.members[0].remote.url} has {first.spaces}; one "
                "vector environment takes worlds of equal spaces"
            )

    def world_info(self) -> WorldInfo:
        """Return what is known of the worlds, whose spaces are equal."""
        world_info = self.members[0].remote.info
        if world_info is None:
            raise ClosedError("this vector environment never joined a world")
        return world_info

    # What comes in

    def _on_other_event(self, remote: Remote, event: Event) -> None:
        self.handle(event, self._member_of[remote])

    def next_event(self, deadline: float) -> tuple[Event | None, Member | None]:
        """Take one delivery; (None, None) once the deadline has passed.

        What a remote still delivers that was moved away from means nothing: its event is None, the member is any.
        """
        try:
            remote, number, what = self.poller.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None, None
        return remote.receive(number, what), self._member_of.get(remote, self.members[0])

    def _next_event_nowait(self) -> tuple[Event | None, Member | None]:
        """Take one delivery that is here already; (None, None): there is none."""
        try:
            remote, number, what = self.poller.get_nowait()
        except queue.Empty:
            return None, None
        return remote.receive(number, what), self._member_of.get(remote, self.members[0])

    def handle(self, event: Event, member: Member) -> None:
        """Let an event change the member that it came for."""
        if isinstance(event, Joined) and self.placement is not None and member.endpoint is not None:
            self.placement.joined(member.endpoint, time.monotonic())
        if member.start == SPARE:
            self._handle_spare(event, member)
        elif isinstance(event, StepAnswered):
            member.answer = event.message
            if not member.stepping:  # the first observation of an episode
                member.failures, member.settings = 0, None
                now = time.monotonic()
                if self.placement is not None and member.endpoint is not None:
                    self.placement.observed(member.endpoint, now)
                member.remote.record.back(now)
                if member.away_since is not None:
                    _log.warning("%s: back after %.0f s", member.title, now - member.away_since)
                    member.away_since = None
        elif isinstance(event, Joined):
            if self._fits(member, "it came back as another environment") and not member.cut_off:
                self.begin_in_new_world(member)
        elif isinstance(event, Refused):
            self.has_errors = True
            member.error, member.refused = event.error, True
            member.abandon_step()
            member.remote.session.abandon_episode()
            self._reconnector.refused(member, event.error, time.monotonic())
        elif isinstance(event, Lost):
            self.lose(member, event)

    def _fits(self, member: Member, complaint: str) -> bool:
        """Tell whether what was joined has the spaces of the others, and its own slots; where not, it is lost."""
        try:
            self._check_spaces(member)
            if self.num_envs and member.remote.slots != member.lanes:
                raise SettingError(f"expected {member.lanes} environments in its world, got {member.remote.slots}")
        except SettingError as error:
            lost = member.remote.give_up(PeerError(member.remote.url, f"{complaint}: {error}"))
            self.lose(member, dataclasses.replace(lost, established=False))
            return False
        return True

    def _handle_spare(self, event: Event, spare: Member) -> None:
        """Let an event change a spare. One that is in a world stands ready."""
        if isinstance(event, Joined):
            if spare.endpoint is None:
                spare.place(SPARE, spare.remote.slots)
            if self._fits(spare, "it is no spare"):
                spare.failures = 0
                spare.remote.record.back(time.monotonic())
        elif isinstance(event, Lost):
            self.lose(spare, event)

    def lose(self, member: Member, event: Lost) -> None:
        """Take note that a member's stream was lost; `check_deadlines` connects it again after a pause."""
        self.has_errors = True
        member.abandon_step()
        member.error, member.refused = event.error, False
        member.remote.salvage(member.answer)
        member.answer = None
        # A slot that moves is not away: it has left one server by itself, and the next did not answer.
        if member.start != SPARE and event.established and member.away_since is None and member.last is not None:
            member.away_since = time.monotonic()
        self._reconnector.lost(member, event, time.monotonic())

    def begin(self, member: Member, settings: Mapping[str, pb.Tensor] | None, *, reset: bool = True) -> None:
        """Ask for a member's next episode; on another server if its own one drains."""
        member.abandon_step()
        member.settings = settings
        member.remote.salvage(member.answer)
        member.answer = None
        if self.moves.enabled and self.moves.relocate(member):
            return
        member.remote.session.deadline = time.monotonic() + self.timeout
        member.remote.begin(settings, reset=reset)

    def begin_in_new_world(self, member: Member) -> None:
        """Ask for the first episode in a world that is new, and so has no lanes to leave as they are."""
        self.begin(member, {key: value for key, value in (member.settings or {}).items() if key != "reset_mask"})

    def check_deadlines(self, now: float) -> None:
        """Try again what is due, and give up what is late."""
        if not self._closed:
            self._reconnector.check(now)

    def replace(self, member: Member, spare: Member) -> None:
        """Let a spare take over the slots of a member, whose remote stands by then; with a directory it goes."""
        member.remote, spare.remote = spare.remote, member.remote
        member.refused = False  # it was refused where it leaves
        if self.waits_for_lanes:
            member.remote.session.wait_for_all()
        self._member_of[member.remote], self._member_of[spare.remote] = member, spare
        if self.placement is not None:
            member.remote.record, member.endpoint = spare.remote.record, spare.endpoint
            self.drop_spare(spare)

    def _extend_deadlines(self, now: float) -> float:
        """If we did not poll for a while, extend the deadlines by the gap; return it."""
        missed, self.polled_at = max(0.0, now - self.polled_at - _POLL_GAP), now
        if missed:
            for member in self.everybody():
                member.remote.session.deadline += missed
        return missed

    def drain(self) -> None:
        """Handle what has come, without waiting."""
        self._extend_deadlines(time.monotonic())
        while True:
            answer, member = self.next_event(0.0)
            if member is None:
                return
            if answer is not None:
                self.handle(answer, member)

    def poll_nowait(self) -> float:
        """Between calls: take what has come, and connect what was lost; called by the keepalive thread.

        Returns:
            The seconds until the next look.
        """
        if not self.turn.acquire(blocking=False):
            # The owner is in a call, which does the same.
            return min(keepalive.period(), self.poller.renew_every)
        try:
            self.drain()
            if self.started:
                self.check_deadlines(time.monotonic())
        finally:
            self.turn.release()
        if self._closed:  # meanwhile, by the garbage collector
            self.close_all(0.0)
        away = any(member.state in (SlotState.LOST, SlotState.CONNECTING) for member in self.everybody())
        return min(_AWAY_PERIOD if away else keepalive.period(), self.poller.renew_every)

    # Gathering

    def gather(self, enough: Callable[[], bool], deadline: float) -> bool:
        """Handle deliveries until `enough`, or until the deadline; return whether it is enough."""
        now = time.monotonic()
        done = enough()
        if done or now >= deadline:
            self.drain()
            done = enough()
        check_at = now + 0.02
        while not done:
            now = time.monotonic()
            deadline += self._extend_deadlines(now)
            if now >= check_at or now >= deadline:
                self.check_deadlines(now)
                check_at = now + 0.02
            if now >= deadline:
                # The deadlines of slots are those of whoever gathers, so a hung server has just been given up above:
                # its slots have an end to tell, and nothing is missing any more.
                return enough()
            # Wakes for what is due in between: a retry, or an answer that is late.
            answer, member = self.next_event(min(deadline, now + 0.1))
            while member is not None:
                if answer is not None:
                    self.handle(answer, member)
                answer, member = self._next_event_nowait()
            done = enough()
        return True

    def raise_permanent_error(self) -> None:
        """Raise what no waiting mends: settings that are refused, an environment that fails in every reset."""
        for member in self.members:
            error = member.error
            # Only what the Reset itself was refused with. A refusal of an attempt to connect, such as that of a full
            # server while another one was away, says nothing of the world that was joined since.
            if not member.refused or not isinstance(error, RefusedError) or member.in_episode:
                continue
            if member.state is not SlotState.RESETTING or error.code in ENDED_CODES:
                continue  # it was lost, or another world was made, since
            if isinstance(error, EnvironmentFailedError):
                if not member.fails_every_reset:
                    continue
                if self.placement is not None and self.placement.any_well():
                    continue  # its next reset is elsewhere
            member.error, member.failures, member.settings = None, 0, None
            raise error
        self.has_errors = any(member.error is not None for member in self.members)

    def infos(self) -> list[WorldInfo | None]:
        """Return what is known of each slot's world."""
        return [member.remote.info for member in self.member_at]

    def wait_for_lanes(self) -> None:
        """Have real-time worlds of lanes answer only when every lane has an observation."""
        self.waits_for_lanes = True
        for member in self.members:
            member.remote.session.wait_for_all()

    def close_all(self, timeout: float) -> None:
        """Leave all worlds and disconnect, within `timeout` seconds in all."""
        self._closed = True
        keepalive.remove(self)
        self.close([member.remote for member in self.everybody()], timeout)
