"""Decides what becomes of slots whose servers are lost, drain, fail, or have too many of them, without input or output.

Where worlds may be, a `Placement` knows. The slots of a directory may be at any endpoint of their kind. Those of a list
are pinned each to the URL that the user gave: a lost one is connected there again. It leaves only where every reset
fails, or where the server was silent at the start; and it goes back once that is well again.

A slot changes its server by a spare: a world that is connected first, and then takes the slot over. A spare stands by
for the slots of an endpoint, because it drains or fails, has too many of them, or is where they belong; or for those of
any, because the user named it (`StandBy`).

Events go in by methods, each with the time. Decisions come out of `check` and `before_episode`, which are generators:
the pool executes each decision before the next one is made, because what is free then depends on it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from bridge.core.back_off import pause
from bridge.core.client.endpoints import Endpoint
from bridge.core.client.slots.endpoint import LONGEST_RESTART_PAUSE, EndpointEvent, Load, Placement, event_of
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
# Seconds between two looks for an uneven spread, and the spares at a time with which it is evened out.
_EVEN_PERIOD = 1.0
_MOST_AHEAD = 8
# Seconds until a spare connects again to the server that its slots have left.
_RETURN = 1.0

_log = SafeLog(__name__)


class Connect(NamedTuple):
    """Connect a slot's world, or a spare; a connection that there is is given up."""

    member: Member
    request: WorldRequest | None = None
    """The world to connect to instead; None: the same again."""
    endpoint: Endpoint | None = None
    """Where that world is; None: at the same endpoint."""


class AddSpare(NamedTuple):
    """Connect a further world, which is to take over slots: the last one of the spares from then on."""

    request: WorldRequest
    endpoint: Endpoint
    """Where that world is."""
    lanes: int
    stands_by: StandBy
    """What it is for."""


class DropSpare(NamedTuple):
    """Leave a spare's world, and forget it."""

    spare: Member


class Disconnect(NamedTuple):
    """Leave a spare's world; it is connected again later."""

    spare: Member


class TakeOver(NamedTuple):
    """Give the slots of a world to a spare."""

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

    filling: list[Member]
    """Those that fill slots."""
    spares: list[Member]
    """Those that stand by."""
    placement: Placement
    """Chooses among the endpoints."""
    timeout: float
    """Seconds within which an attempt ends."""
    connect_timeout: float
    """Seconds within which a server has to say anything, where others may take its slots."""
    look_at: float = math.inf
    """The time of the next look for servers that drain, monotonic seconds; inf if there are no other servers."""
    lanes_leave: bool = False
    """True if a world of lanes is to change over."""
    even_at: float = 0.0
    """The time of the next look for an uneven spread, monotonic seconds."""
    _plans: Counter[tuple[int, str, str, str]] = dataclasses.field(default_factory=Counter, init=False)
    """The slots for which worlds are connected, and nothing was logged yet, by what the log is to say."""

    @property
    def moves(self) -> bool:
        """True if there may be other servers."""
        return self.look_at != math.inf

    def everybody(self) -> list[Member]:
        """Return the worlds that fill slots, and then the spares."""
        return [*self.filling, *self.spares]

    # Events

    def endpoint_event(self, member: Member, event: EndpointEvent, now: float, why: str = "") -> None:
        """Feed an event to the state machine of a world's endpoint; `why` tells of it in the log."""
        endpoint = member.endpoint
        back = self.placement.handle(endpoint.key, event, now, why or event.value)
        if back and any(other.is_displaced_from(endpoint) for other in self.filling):
            _log.warning("%s answers again", member.remote.url)

    def lost(self, member: Member, error: RemoteError, now: float, *, established: bool) -> None:
        """Count that a world was lost, or that an attempt to connect to it failed, and say when to try again."""
        member.failures += 1
        why = str(error)
        self.endpoint_event(member, event_of(error), now, why.partition("\n")[0])
        wait = pause(member.failures)
        if self.placement.has_ended(member.endpoint.key):
            wait = min(wait, LONGEST_RESTART_PAUSE)
        member.retry_at = member.record.lost(now, wait, why, url=member.remote.url, established=established)

    def refused(self, member: Member, error: RemoteError, now: float) -> None:
        """Count that a Reset or Step was refused; the first time it is reset again at once."""
        member.failures += 1
        # A reset that fails now and then says nothing about the server: its state changes after three in a row.
        if member.fails_every_reset:
            self.endpoint_event(member, event_of(error), now, str(error).partition("\n")[0])
        member.retry_at = now + (pause(member.failures - 1) if member.failures > 1 else 0.0)

    def permanent_error(self) -> RefusedError | None:
        """Return, once, what no waiting mends: settings that are refused, an environment that fails in every reset."""
        for member in self.filling:
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
                if member.may_leave and self.placement.any_well(member):
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
        self.placement.poll(now)
        if now >= self.look_at:
            self.look_at = now + _PERIOD
            yield from self._look_for_moves(now)
        for member in self.filling:
            # What is not named here waits for the user's next call.
            if member.link is LinkState.OFFLINE:
                # Who has an end to tell takes no spare: its next episode begins once that was told.
                spare = None if member.episode is EpisodeState.CUT else self.ready_spare(member)
                if spare is None:
                    yield from self._connect(member, now)
                else:
                    # The two swap their worlds: the spare gets the lost one, with its pauses and its error.
                    spare.failures, spare.retry_at = member.failures, member.retry_at
                    spare.error, member.failures = member.error, 0
                    # Of a directory the change of the endpoint's state was told, and a line a slot would be too many.
                    level = logging.INFO if member.home is None else logging.WARNING
                    _log.log(level, "%s takes over the slots of %s", spare.remote.url, member.remote.url)
                    yield TakeOver(member, spare)
                    yield Begin(member)
            elif member.ready:
                if now >= member.retry_at:
                    yield Begin(member)
            elif member.waits and self._is_late(member, now):
                yield GiveUp(member)
        # A copy, because the pool takes a dropped one out of the list before the loop goes on.
        for spare in tuple(self.spares):
            if spare.link is LinkState.CONNECTING and self._is_late(spare, now):
                yield GiveUp(spare)
            elif spare.link is LinkState.OFFLINE and spare.is_named:
                yield from self._connect(spare, now)
            elif spare.link is LinkState.OFFLINE:
                # It was connected to one server for the sake of another. The next look chooses again.
                yield DropSpare(spare)

    def _is_late(self, member: Member, now: float) -> bool:
        """Tell whether an answer is late: a server that is silent is waited for less where there are others."""
        # `allowance` is looked up only here: the check is frequent, and nearly no answer is late.
        if now > member.deadline:
            return now > member.deadline + member.remote.allowance
        # A black hole never says anything. A server that has spoken gets all of `timeout`: to make a world may be slow.
        silent = member.link is LinkState.CONNECTING and now > member.silent_until and member.remote.silent
        return silent and member.home is None and self.placement.any_well(member)

    def _connect(self, member: Member, now: float) -> Iterator[Decision]:
        """Connect a world that has no connection, if it is due: to its own server, or to the endpoint that suits best.

        Who is pinned has its own pauses: those of its remote's circuit breaker are among them, and a reset ends them.
        Who is not has those of the endpoints, which all slots see.
        """
        if member.home is not None:
            if now >= member.retry_at:
                yield Connect(member)
            return
        placement = self.placement
        # Its own slots are no load: else an endpoint with room for just these would look full to it.
        others = [other for other in self.everybody() if other is not member]
        proven = member.failures > 0
        endpoint = placement.choose(Load(others), member.lanes, now, self.timeout, member.kind, proven=proven)
        if endpoint is None:
            # Nothing is free: perhaps a server was started since the last reading.
            placement.poll(now, soon=True)
            return
        if not member.is_at(endpoint):
            _log.debug("%s moves from %s to %s", member.title, member.remote.url, shown_url(endpoint.url))
        # The URL counts too: an endpoint that has a name keeps it when its server gets another URL.
        stays = member.is_at(endpoint) and shown_url(endpoint.url) == member.remote.url
        yield Connect(member, None if stays else placement.request_for(endpoint), endpoint)

    def ready_spare(self, member: Member) -> Member | None:
        """Return a spare that stands ready to take over the slots of a lost world; None: there is none."""
        return next((spare for spare in self.spares if spare.suits(member)), None)

    # Moves

    def is_leaving(self, member: Member) -> bool:
        """Tell whether a world is on a server that drains."""
        return member.remote.draining or self.placement.drains(member.endpoint)

    def _look_for_moves(self, now: float) -> Iterator[Decision]:
        """Connect worlds for slots that have to leave their servers, go back to them, or are too many there."""
        joined = [member for member in self.filling if member.link is LinkState.JOINED]
        drained = [member for member in joined if self.is_leaving(member)]
        for member in drained:
            self.endpoint_event(member, EndpointEvent.DRAINS, now)
        # A single environment leaves at the end of its episode. The episodes of lanes have no common end: they leave
        # after a step, in the middle of some.
        self.lanes_leave = any(not member.single for member in drained)
        for spare in [spare for spare in self.spares if spare.link is LinkState.JOINED and self.is_leaving(spare)]:
            # The user named this spare, so it stays, and waits for the next server at its URL.
            if spare.is_named:
                yield from self._come_back_later(spare, now)
            else:
                yield DropSpare(spare)
        failing = [member for member in joined if member.refusal is not None and member.may_leave]
        # Who is pinned stays at a server that drains, and `before_episode` moves it from one whose resets fail.
        leaving = [member for member in dict.fromkeys(drained + failing) if member.home is None]
        yield from self._replace(leaving, now)
        yield from self._go_back(now)
        # First the slots that have to go: they take the room that there is.
        if not leaving and now >= self.even_at:
            self.even_at = now + _EVEN_PERIOD
            yield from self._even_out(now)
        self._tell_plans()

    def _drop_surplus(self, reason: Reason, wanted: Counter[str]) -> Iterator[Decision]:
        """Drop the spares for a reason that are too many, and take those that stay off the number that is wanted.

        Args:
            reason: The reason.
            wanted: The number for each endpoint.
        """
        for spare in tuple(self.spares):
            stands_by = spare.stands_by
            if stands_by is None or stands_by.reason is not reason:
                continue
            if wanted[stands_by.place] > 0:
                wanted[stands_by.place] -= 1
            else:
                yield DropSpare(spare)

    def _add_spare(self, endpoint: Endpoint, lanes: int, reason: Reason, place: Endpoint, why: str = "") -> AddSpare:
        """Return the decision to connect a world at an endpoint, for the slots of a place; `why` is for the log."""
        # A server in trouble is only asked again: `Placement.handle` tells when it answers. A dead one that a directory
        # goes on listing would be announced with each try.
        level = logging.INFO if self.placement.is_well(endpoint.key) else logging.DEBUG
        self._plans[level, shown_url(endpoint.url), shown_url(place.url), why or reason.value] += lanes
        return AddSpare(self.placement.request_for(endpoint), endpoint, lanes, StandBy(reason, place.key))

    def _tell_plans(self) -> None:
        """Log the worlds that are connected for slots, a line for all slots of a server that another one takes."""
        plans, self._plans = self._plans, Counter()
        for (level, url, place, why), slots in plans.items():
            number = "a slot" if slots == 1 else f"{slots} slots"
            _log.log(level, "%s is to take over %s of %s: %s", url, number, place, why)

    def _why_leaving(self, member: Member) -> str:
        """Say why a slot has to leave its server."""
        return "it drains" if self.is_leaving(member) else "every reset fails there"

    def _replace(self, leaving: Sequence[Member], now: float) -> Iterator[Decision]:
        """Connect worlds for slots that have to leave their servers."""
        wanted = Counter(member.endpoint.key for member in leaving)
        yield from self._drop_surplus(Reason.LEAVE, wanted)
        if not leaving:
            return  # as nearly always: a load goes through all slots
        load = Load(self.everybody())
        for member in leaving:
            if wanted[member.endpoint.key] <= 0:
                continue
            # One that is in trouble will do: where all others were dark, nobody but a replacement tries them again.
            endpoint = self.placement.choose(load, member.lanes, now, self.timeout, member.kind)
            if endpoint is not None and not member.is_at(endpoint):
                wanted[member.endpoint.key] -= 1
                why = self._why_leaving(member)
                yield self._add_spare(endpoint, member.lanes, Reason.LEAVE, member.endpoint, why)

    def _go_back(self, now: float) -> Iterator[Decision]:
        """Connect worlds at the servers that slots are pinned to and have left, as far as these may be tried.

        Lanes never go back by themselves, because it would cut episodes.
        """
        away = [member for member in self.filling if member.home is not None and member.is_displaced and member.single]
        wanted = Counter(member.home.key for member in away if member.home is not None)
        yield from self._drop_surplus(Reason.GO_BACK, wanted)
        for member in away:
            home = member.home
            if home is not None and wanted[home.key] > 0 and self.placement.may_try(home.key, now, self.timeout):
                wanted[home.key] -= 1
                yield self._add_spare(home, 1, Reason.GO_BACK, home)

    def _even_out(self, now: float) -> Iterator[Decision]:
        """Connect worlds where there are fewer slots, for slots that are where there are more.

        Lanes are never moved for that, because it would cut episodes. Nor is anything while slots are away: they go to
        the emptiest endpoints by themselves. Who is pinned stays.
        """
        free = [member for member in self.filling if member.home is None]
        if not all(member.single and member.link is LinkState.JOINED for member in free):
            return
        places = {member.endpoint.key: member.endpoint for member in free}
        yield from self._drop_surplus(Reason.EVEN_OUT, Counter(member.endpoint.key for member in free))
        load = Load(self.everybody())
        for spare in self.spares:
            if spare.stands_by is not None and spare.stands_by.place:
                load.slots[spare.stands_by.place] -= 1  # as if the slot had moved already
        for kind in {place.kind for place in places.values()}:
            crowded = [place for place in places.values() if place.kind == kind]
            for _ in range(_MOST_AHEAD - len(self.spares)):
                most = max(crowded, key=lambda place: load.slots[place.key])
                # With a difference of one a move would only turn it round, and slots would go back and forth for ever.
                at_most = load.slots[most.key] - 2
                endpoint = self.placement.choose(load, 1, now, self.timeout, kind, at_most=at_most)
                if endpoint is None:
                    break
                load.slots[most.key] -= 1
                yield self._add_spare(endpoint, 1, Reason.EVEN_OUT, most)

    def before_episode(self, member: Member, now: float) -> Iterator[Decision]:
        """Move a world before its next episode: off a server that drains or fails, or to where it is better off."""
        # The lanes outside of the mask go on with their episodes, which a move would cut.
        if "reset_mask" in (member.settings or {}):
            return
        if not self.is_leaving(member) and not member.may_leave:
            replacement = next((spare for spare in self.spares if spare.betters(member)), None)
        else:
            replacement = self._ready_elsewhere(member)
            # Who is pinned stays at a server that drains, until its end.
            if replacement is None and (member.home is None or member.may_leave):
                replacement = self._connecting_elsewhere(member, now)
                if replacement is None:
                    endpoint = self.placement.choose_well(Load(self.everybody()), member, now)
                    if endpoint is None:
                        return  # the episode begins where it is
                    why = self._why_leaving(member)
                    yield self._add_spare(endpoint, member.lanes, Reason.LEAVE, member.endpoint, why)
                    replacement = self.spares[-1]
            if member.home is not None and member.may_leave and replacement is not None:
                why = str(member.refusal).partition("\n")[0]
                _log.warning("%s leaves %s, where every reset fails: %s", member.title, member.remote.url, why)
                self._look(now)
        if replacement is not None:
            yield from self._change_over(member, replacement, now)

    def stand_in(self, member: Member, now: float) -> Endpoint | None:
        """Return an endpoint where others have joined, for a world whose server is not there; None: there is none."""
        endpoint = self.placement.choose_well(Load(self.filling), member, now, up=True)
        if endpoint is not None:
            self.endpoint_event(member, EndpointEvent.GONE, now)
            self._look(now)
        return endpoint

    def _look(self, now: float) -> None:
        """Look for moves from now on: a slot leaves the server that it is pinned to, and is to go back."""
        self.look_at = min(self.look_at, now)

    def after_step(self, member: Member, now: float) -> Iterator[Decision]:
        """Move a world of lanes after a step, if it is to leave and a replacement stands ready."""
        leaves = member.link is LinkState.JOINED and self.is_leaving(member)
        if leaves and (replacement := self._ready_elsewhere(member)) is not None:
            member.settings = None
            yield from self._change_over(member, replacement, now)

    def _ready_elsewhere(self, member: Member) -> Member | None:
        """Return a spare that stands ready for a world that is to leave its server; None: there is none."""
        for spare in self.spares:
            # A spare of the user's and the world swap places: one whose resets fail is none that could stand by.
            stays = spare.is_named and member.may_leave
            elsewhere = not spare.is_at(member.endpoint) and not self.is_leaving(spare)
            if spare.suits(member) and elsewhere and not stays:
                return spare
        return None

    def _connecting_elsewhere(self, member: Member, now: float) -> Member | None:
        """Return a replacement that is connected just now, to an endpoint that has not failed; None: there is none.

        One that has failed could cost the slot the server that it has, so a replacement there is waited for.
        """
        latest = now + self.timeout - _PATIENCE
        recent = (spare for spare in self.spares if spare.link is LinkState.CONNECTING and spare.deadline > latest)
        serving = (spare for spare in recent if spare.serves(member) and not spare.is_named)
        elsewhere = (spare for spare in serving if not spare.is_at(member.endpoint))
        return next((spare for spare in elsewhere if self.placement.is_well(spare.endpoint.key)), None)

    def _come_back_later(self, spare: Member, now: float) -> Iterator[Decision]:
        """Leave a spare's server, which drains, and try after a while whether there is one again."""
        yield Disconnect(spare)
        spare.retry_at = now + _RETURN

    def _change_over(self, member: Member, replacement: Member, now: float) -> Iterator[Decision]:
        """Give a world's slots to a replacement, and leave the server where they were."""
        before = member.remote
        member.record.moves += 1
        yield TakeOver(member, replacement)
        if replacement in self.spares:  # it has a server of its own in the list
            yield from self._come_back_later(replacement, now)
        _log.debug("%s moved from %s to %s", member.title, before.url, shown_url(member.remote.url))
        # A line a slot would be thousands.
        if not any(other.remote.url == before.url for other in self.filling):
            _log.info("no slot is left at %s", before.url)
        # Where the replacement is still being joined, the episode begins when that is done.
        if member.ready:
            yield Begin(member)
