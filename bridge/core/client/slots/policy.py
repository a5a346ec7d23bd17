"""Decides what becomes of slots whose servers are lost, drain, fail, or have too many of them, without input or output.

Events go in by methods, each with the time. Decisions come out of `check` and `before_episode`, which are generators:
the pool executes each decision before the next one is made, because what is free then depends on it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from bridge.core.back_off import pause
from bridge.core.client.endpoints import Endpoint
from bridge.core.client.slots.endpoint import EndpointEvent, EndpointRecord, EndpointState, Load, Placement, event_of
from bridge.core.client.slots.slot import EpisodeState, LinkState, Member, Reason, StandBy
from bridge.core.client.world.client_session import ENDED_CODES
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.logs import SafeLog
from bridge.errors import EnvironmentFailedError, RefusedError, RemoteError, shown_url

__all__ = [
    "AddSpare",
    "Begin",
    "Connect",
    "Decision",
    "Disconnect",
    "DropSpare",
    "GiveUp",
    "SlotPolicy",
    "TakeOver",
]

# Seconds between two looks for servers that drain, and for an uneven spread.
_PERIOD = 0.1
# Seconds for which the next episode waits for a replacement that is still connecting; later it begins where it was.
_PATIENCE = 5.0
# Seconds between two looks for an uneven spread, and the worlds that stand ready at a time to even it out.
_EVEN_PERIOD = 1.0
_MOST_RELIEFS = 8
# Seconds until a spare connects again to the server that its slots have left.
_RETURN = 1.0
# Pauses that are skipped until a server of a list is tried again: a try costs a slot some resets that fail.
_PAUSES_SKIPPED = 5

_log = SafeLog(__name__)


class Connect(NamedTuple):
    """Connect a slot's world, or a spare; a connection that there is is given up."""

    member: Member
    request: WorldRequest | None = None
    """The world to connect to instead; None: the same again."""
    endpoint: str | None = None
    """The key of that world's endpoint in the directory; None: it is at a server of the list."""


class AddSpare(NamedTuple):
    """Connect a further world, which is to take over slots: the last one of the spares from then on."""

    request: WorldRequest
    lanes: int
    stands_by: StandBy
    """What it is for."""
    endpoint: str | None = None
    """The key of its endpoint in the directory; None: it is at a server of the list."""


class DropSpare(NamedTuple):
    """Leave a spare's world, and forget it."""

    spare: Member


class Disconnect(NamedTuple):
    """Leave a spare's world; it is connected again later."""

    spare: Member


class TakeOver(NamedTuple):
    """Let a spare take over the slots of a world."""

    member: Member
    spare: Member


class Begin(NamedTuple):
    """Ask for the next episode of a world that is joined."""

    member: Member


class GiveUp(NamedTuple):
    """End a connection whose answer is late."""

    member: Member


Decision: TypeAlias = Connect | AddSpare | DropSpare | Disconnect | TakeOver | Begin | GiveUp


@dataclasses.dataclass
class SlotPolicy:
    """Decides where the worlds of a vector environment are, and when what failed is tried again."""

    members: list[Member]
    """Those that fill slots."""
    spares: list[Member]
    """Those that stand by."""
    timeout: float
    """Seconds within which an attempt ends."""
    connect_timeout: float = 10.0
    """Seconds within which a server has to say anything, where others may take its slots."""
    placement: Placement | None = None
    """Chooses among the endpoints of a directory; None: each world has a URL of its own."""
    look_at: float = math.inf
    """The time of the next look for servers that drain, monotonic seconds; inf if there are no other servers."""
    lanes_leave: bool = False
    """True if a world of lanes is to change over."""
    even_at: float = 0.0
    """The time of the next look for an uneven spread, monotonic seconds."""
    left: dict[str, EndpointRecord] = dataclasses.field(default_factory=dict)
    """The records of servers of a list that slots have left, by URL."""

    @property
    def moves(self) -> bool:
        """True if there may be other servers."""
        return self.look_at != math.inf

    def everybody(self) -> list[Member]:
        """Return the worlds that fill slots, and then the spares."""
        return [*self.members, *self.spares]

    # Events

    def saw(self, member: Member, event: EndpointEvent, now: float, why: str = "") -> None:
        """Take note of what a world shows of its endpoint; `why` tells of it in the log."""
        if self.placement is not None and member.endpoint is not None:
            self.placement.saw(member.endpoint, event, now, why or event.value)
        record = self.left.get(member.remote.url)
        if record is None or not record.handle(event, now, lambda failures: pause(failures + _PAUSES_SKIPPED)):
            return
        # Of a list the departure of each slot is logged where it leaves; of a directory `Placement` logs all changes.
        if record.state is EndpointState.UP:
            _log.warning("%s answers again", member.remote.url)

    def lost(self, member: Member, error: RemoteError, now: float, *, established: bool) -> None:
        """Take note that a world was lost, or that an attempt to connect to it failed."""
        member.failures += 1
        self.saw(member, event_of(error), now, str(error).partition("\n")[0])
        if self.placement is not None:
            # A server that was replaced may have another URL by now: the directory is read before its period is over.
            self.placement.watch.poll(now, soon=True)
        wait = pause(member.failures)
        member.retry_at = member.remote.record.lost(now, wait, str(error), established=established)

    def refused(self, member: Member, error: RemoteError, now: float) -> None:
        """Take note that a Reset or Step was refused; the first time it is reset again at once."""
        member.failures += 1
        # A reset that fails now and then says nothing about the server: its state changes after three in a row.
        if member.fails_every_reset:
            self.saw(member, event_of(error), now, str(error).partition("\n")[0])
        member.retry_at = now + (pause(member.failures - 1) if member.failures > 1 else 0.0)

    def permanent_error(self) -> RefusedError | None:
        """Return, once, what no waiting mends: settings that are refused, an environment that fails in every reset."""
        for member in self.members:
            # Only what the Reset itself was refused with. A refusal of an attempt to connect, such as that of a full
            # server while another one was away, says nothing of the world that was joined since.
            error = member.refusal
            if not isinstance(error, RefusedError) or error.code in ENDED_CODES:
                continue  # another world was made since
            if member.episode is EpisodeState.CUT and member.settings is None:
                continue  # it refused a Step: that is to be told first
            if isinstance(error, EnvironmentFailedError):
                if not member.fails_every_reset:
                    continue
                if self.placement is None:
                    elsewhere = self._leaves_for(member) is not None
                else:
                    elsewhere = self.placement.any_well(member.kind)
                if elsewhere:
                    continue  # its next reset is there
            # A caller that catches the error and goes on gets further attempts, without the settings that were refused.
            member.refusal, member.failures, member.settings = None, 0, None
            # Of a cut one the next step tells it, as the reason why the other lanes were cut.
            if member.episode is not EpisodeState.CUT:
                member.error = None
            return error
        return None

    # Decisions

    def check(self, now: float) -> Iterator[Decision]:
        """Decide what to connect and what to begin, what is late, and who leaves its server."""
        if self.placement is not None:
            self.placement.watch.poll(now)
        if now >= self.look_at:
            self.look_at = now + _PERIOD
            yield from self._look_for_moves(now)
        for member in self.members:
            # What is not named here waits for the user's next call.
            if member.link is LinkState.OFFLINE:
                # Who has an end to tell takes no spare: its next episode begins once that was told.
                spare = None if member.episode is EpisodeState.CUT else self.ready_spare(member)
                if spare is None:
                    yield from self._connect(member, now)
                else:
                    # The two swap their remotes: the spare gets the lost one, with its pauses and its error.
                    spare.failures, spare.retry_at = member.failures, member.retry_at
                    spare.error, member.failures = member.error, 0
                    # Of a directory the change of the endpoint's state was told, and a line a slot would be too many.
                    level = logging.WARNING if spare.endpoint is None else logging.INFO
                    _log.log(level, "%s takes over the slots of %s", spare.remote.url, member.remote.url)
                    yield TakeOver(member, spare)
                    yield Begin(member)
            elif member.ready:
                if now >= member.retry_at:
                    yield from self._begin(member, now)
            elif member.waits and self._is_late(member, now):
                yield GiveUp(member)
        # A copy, because the pool takes a dropped one out of the list before the loop goes on.
        for spare in tuple(self.spares):
            # It was connected to one server for the sake of another. The next look chooses again, perhaps a third one.
            if spare.link is LinkState.OFFLINE and spare.relieves is not None:
                yield DropSpare(spare)
            elif spare.link is LinkState.OFFLINE:
                yield from self._connect(spare, now)
            elif spare.link is LinkState.CONNECTING and self._is_late(spare, now):
                yield GiveUp(spare)

    def _begin(self, member: Member, now: float) -> Iterator[Decision]:
        """Ask for the next episode of a world; of a list of URLs elsewhere if its environment always fails."""
        request = self._leaves_for(member) if self.placement is None and member.fails_every_reset else None
        if request is None:
            yield Begin(member)
        else:
            self.stood_in_for(member, EndpointEvent.RAISED, now)
            member.remote.record.moves += 1
            why = str(member.refusal).partition("\n")[0]
            _log.warning("%s leaves %s, where every reset fails: %s", member.title, member.remote.url, why)
            yield Connect(member, request)

    def _leaves_for(self, member: Member) -> WorldRequest | None:
        """Return where a slot of a list goes whose environment always fails; None: nowhere.

        Who lists a server that fails from the start hears of it: only what has worked before moves.
        """
        return None if member.last is None else self.stand_in(member)

    def stand_in(self, member: Member) -> WorldRequest | None:
        """Return the request of a world at another URL that is well, and of the same kind; None: there is none.

        Of a list of URLs only those with the same path, query and agent stand in for each other.
        """
        mine = member.remote.request
        # A list has no records of endpoints: that a server is well shows in the slots that run there.
        others = [
            other.remote.request for other in self.members if other.link is LinkState.JOINED and not other.failures
        ]
        load = Counter(request.address.url for request in others)
        same = (request for request in others if mine.kind is not None and request.kind == mine.kind)
        elsewhere = (request for request in same if request.address.url != mine.address.url)
        return min(elsewhere, key=lambda request: load[request.address.url], default=None)

    def stood_in_for(self, member: Member, event: EndpointEvent, now: float) -> None:
        """Take note that a slot of a list leaves its server because of `event`; once that is up it goes back there."""
        # A slot may leave a second server while it is away from its own: it goes back to the first.
        member.home = member.home or member.remote.request
        self.left.setdefault(member.remote.url, EndpointRecord())
        self.saw(member, event, now)
        # A list without spares has had nothing to look for so far: its `look_at` was infinite.
        self.look_at = min(self.look_at, now)

    def _is_late(self, member: Member, now: float) -> bool:
        """Tell whether an answer is late: a server that is silent is waited for less where there are others."""
        # `allowance` is looked up only here: the check is frequent, and nearly no answer is late.
        if now > member.deadline:
            return now > member.deadline + member.remote.allowance
        # A black hole never says anything. A server that has spoken gets all of `timeout`: to make a world may be slow.
        silent = member.link is LinkState.CONNECTING and now > member.silent_until and member.remote.silent
        return silent and self.placement is not None and self.placement.any_well(member.kind, member.endpoint)

    def _connect(self, member: Member, now: float) -> Iterator[Decision]:
        """Connect a world that has no connection, if it is due: of a directory, to the endpoint that suits best now."""
        placement = self.placement
        # Each world of a list has its own URL, and so has a spare.
        if placement is None:
            if now >= member.retry_at:
                yield Connect(member)
            return
        # Its own slots are no load: else an endpoint with room for just these would look full to it.
        others = [other for other in self.everybody() if other is not member]
        proven = member.failures > 0
        endpoint = placement.choose(Load(others), member.lanes, now, self.timeout, member.kind, proven=proven)
        if endpoint is None:
            # Nothing is free: perhaps a server was started since the last reading.
            placement.watch.poll(now, soon=True)
            return
        if endpoint.key != member.endpoint and member.stands_by is None:
            _log.info("%s moves from %s to %s", member.title, member.remote.url, shown_url(endpoint.url))
        # The URL counts too: an endpoint that has a name keeps it when its server gets another URL.
        stays = (endpoint.key, shown_url(endpoint.url)) == (member.endpoint, member.remote.url)
        yield Connect(member, None if stays else placement.request_for(endpoint.url), endpoint.key)

    def ready_spare(self, member: Member, *, elsewhere: bool = False) -> Member | None:
        """Return a spare that stands ready and can take over the slots of a world; None: there is none.

        Args:
            member: The world.
            elsewhere: Whether only a spare will do whose server does not drain.
        """
        for spare in self.spares:
            # `single` counts, because a world of one lane, unlike an environment, begins its next episodes by itself.
            alike = (spare.lanes, spare.single, spare.kind) == (member.lanes, member.single, member.kind)
            serves = spare.stands_by is not None and spare.stands_by.serves(member)
            if spare.ready and alike and serves and not (elsewhere and self.is_leaving(spare)):
                return spare
        return None

    def _ready_for(self, member: Member) -> Member | None:
        """Return a spare that stands ready for the very place that a world is at, or has left; None: there is none."""
        if member.place_left is None:
            return None
        ready = (spare for spare in self.spares if spare.ready and spare.lanes == member.lanes)
        return next((spare for spare in ready if spare.relieves == member.place_left), None)

    def _spares_for(self, reason: Reason) -> list[Member]:
        """Return the spares that stand by for a reason."""
        return [spare for spare in self.spares if spare.stands_by is not None and spare.stands_by.reason is reason]

    def _add_spare(self, placement: Placement, endpoint: Endpoint, lanes: int, stands_by: StandBy) -> AddSpare:
        """Return the decision to connect a spare at an endpoint of the directory."""
        return AddSpare(placement.request_for(endpoint.url), lanes, stands_by, endpoint.key)

    # Moves

    def is_leaving(self, member: Member) -> bool:
        """Tell whether a world is on a server that drains."""
        placement = self.placement
        return member.remote.draining or (placement is not None and member.endpoint in placement.watch.draining)

    def _look_for_moves(self, now: float) -> Iterator[Decision]:
        """Look for servers that drain or always fail, and connect replacements for the worlds there."""
        placement = self.placement
        leaving = [member for member in self.members if member.link is LinkState.JOINED and self.is_leaving(member)]
        for member in leaving:
            self.saw(member, EndpointEvent.DRAINS, now)
        # A single environment leaves at the end of its episode. The episodes of lanes have no common end: they leave
        # after a step, in the middle of some.
        self.lanes_leave = any(not member.single for member in leaving)
        for spare in [spare for spare in self.spares if spare.link is LinkState.JOINED and self.is_leaving(spare)]:
            # The user named this spare, so it stays, and waits for the next server at its URL.
            if spare.stands_by is not None and spare.stands_by.named:
                yield from self._come_back_later(spare, now)
            else:
                yield DropSpare(spare)
        if placement is None:  # the spares are connected already
            yield from self._go_back(now)
            return
        if leaving:
            placement.watch.poll(now, soon=True)
        # Where all others were dark when a slot began to fail, nobody but a replacement for it tries them again.
        joined = [member for member in self.members if member.link is LinkState.JOINED and not self.is_leaving(member)]
        leaving += [member for member in joined if member.fails_every_reset]
        if leaving:
            load = Load(self.everybody())
            # Each spare that there is already replaces one of them.
            for member in leaving[len(self.spares) :]:
                endpoint = placement.choose(load, member.lanes, now, self.timeout, member.kind)
                if endpoint is not None and endpoint.key != member.endpoint:
                    yield self._add_spare(placement, endpoint, member.lanes, StandBy(Reason.LEAVE))
        for spare in self._spares_for(Reason.LEAVE)[len(leaving) :]:
            yield DropSpare(spare)
        # First the slots that have to go: they take the room that there is.
        if not leaving and now >= self.even_at:
            self.even_at = now + _EVEN_PERIOD
            yield from self._even_out(placement, now)

    def _even_out(self, placement: Placement, now: float) -> Iterator[Decision]:
        """Connect worlds where there are fewer slots, for slots that are where there are more.

        Lanes are never moved for that, because it would cut episodes. Nor is anything while slots are away: they go to
        the emptiest endpoints by themselves.
        """
        if not all(member.single and member.link is LinkState.JOINED for member in self.members):
            return
        load = Load(self.everybody())
        kinds = {member.endpoint: member.kind for member in self.members}
        for spare in self.spares:
            if spare.relieves is None or spare.relieves not in kinds:
                yield DropSpare(spare)
            else:
                load.slots[spare.relieves] -= 1  # as if the slot had moved already
        for kind in set(kinds.values()):
            crowded = [key for key in kinds if key is not None and kinds[key] == kind]
            for _ in range(_MOST_RELIEFS - len(self.spares)):
                most = max(crowded, key=lambda key: load.slots[key])
                # With a difference of one a move would only turn it round, and slots would go back and forth for ever.
                endpoint = placement.choose(load, 1, now, self.timeout, kind, at_most=load.slots[most] - 2)
                if endpoint is None:
                    break
                load.slots[most] -= 1
                yield self._add_spare(placement, endpoint, 1, StandBy(Reason.EVEN_OUT, most))

    def _go_back(self, now: float) -> Iterator[Decision]:
        """Connect worlds at the own servers of slots that have left them, as far as these may be tried. For lists.

        Lanes never go back by themselves, because it would cut episodes.
        """
        away = Counter(member.place_left for member in self.members if member.home is not None and member.single)
        # One spare for each slot that is to go back. There are too many where a slot has got back otherwise.
        for spare in self._spares_for(Reason.GO_BACK):
            away[spare.relieves] -= 1
            if away[spare.relieves] < 0:
                yield DropSpare(spare)
        for member in self.members:
            home, record = member.home, self.left.get(member.place_left or "")
            if home is None or record is None or away[home.address.url] <= 0 or not record.may_try(now):
                continue
            away[home.address.url] -= 1
            record.tried(now, self.timeout)
            yield AddSpare(home, 1, StandBy(Reason.GO_BACK, home.address.url))

    def _come_back_later(self, spare: Member, now: float) -> Iterator[Decision]:
        """Leave a spare's server, which drains, and try after a while whether there is one again."""
        yield Disconnect(spare)
        spare.retry_at = now + _RETURN

    def before_episode(self, member: Member, now: float) -> Iterator[Decision]:
        """Let the next episode of a world begin elsewhere, if its server drains or its environment always fails."""
        leaves = self.is_leaving(member) or (self.placement is not None and member.fails_every_reset)
        # The lanes outside of the mask go on with their episodes, which a move would cut.
        if "reset_mask" in (member.settings or {}):
            return
        # Who has to leave takes any spare that suits; who may stay only one that was connected for its place.
        replacement = self.ready_spare(member, elsewhere=True) if leaves else self._ready_for(member)
        if leaves and replacement is None and self.placement is not None:
            replacement = self._connecting_elsewhere(member, self.placement, now)
            if replacement is None:
                endpoint = self.placement.choose(Load(self.everybody()), member.lanes, now, self.timeout, member.kind)
                # One that has failed could cost the slot the server that it has: the episode begins where it is.
                if endpoint is None or not self.placement.is_well(endpoint.key):
                    return
                yield self._add_spare(self.placement, endpoint, member.lanes, StandBy(Reason.LEAVE))
                replacement = self.spares[-1]
        if replacement is not None:
            yield from self._change_over(member, replacement, now)

    def after_step(self, member: Member, now: float) -> Iterator[Decision]:
        """Let a world of lanes change over after a step, if it is to leave and a replacement stands ready."""
        leaves = member.link is LinkState.JOINED and self.is_leaving(member)
        if leaves and (replacement := self.ready_spare(member, elsewhere=True)) is not None:
            member.settings = None
            yield from self._change_over(member, replacement, now)

    def _connecting_elsewhere(self, member: Member, placement: Placement, now: float) -> Member | None:
        """Return a replacement that is connected just now, to an endpoint that has not failed; None: there is none.

        One that has failed could cost the slot the server that it has, so a replacement there is waited for.
        """
        latest = now + self.timeout - _PATIENCE
        recent = (spare for spare in self.spares if spare.link is LinkState.CONNECTING and spare.deadline > latest)
        alike = (spare for spare in recent if (spare.lanes, spare.kind) == (member.lanes, member.kind))
        return next((spare for spare in alike if placement.is_well(spare.endpoint)), None)

    def _change_over(self, member: Member, replacement: Member, now: float) -> Iterator[Decision]:
        """Let a replacement take over a world's slots, and leave the server where they were."""
        before = member.remote
        before.record.moves += 1
        yield TakeOver(member, replacement)
        if replacement in self.spares:  # it has a server of its own in the list
            yield from self._come_back_later(replacement, now)
        _log.info("%s moved from %s to %s", member.title, before.url, shown_url(member.remote.url))
        # Where the replacement is still being joined, the episode begins when that is done.
        if member.ready:
            yield Begin(member)
