"""Decides what happens to slots whose servers are lost, drain, fail, or are crowded. Without I/O.

A `Placement` knows the endpoints. Slots of a directory may be at any endpoint of their kind. Each slot of a list is
pinned to the URL that the user gave: a lost slot reconnects there. It leaves that server only if every reset fails, or
if the server was silent at the start, and goes back once the server works again.

To move a slot, the policy first connects a spare: a world that then takes the slot over. A spare stands by for the
slots of one endpoint, because that endpoint drains, fails or is crowded, or because the slots are pinned to the spare's
endpoint. A spare that the user named stands by for all slots (`StandBy`).

Events enter through methods, each with the time. Decisions come from generators such as `check` and `before_episode`.
The pool executes each decision before it asks for the next one, because the next one depends on what is free then.
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

# Seconds between two checks for moves.
_PERIOD = 0.1
# Seconds for which the next episode waits for a connecting replacement. After that it begins at the old server.
_PATIENCE = 5.0
# Seconds between two checks for an uneven spread, and the most spares at a time for evening it out.
_EVEN_PERIOD = 1.0
_MOST_AHEAD = 8
# Seconds until a spare that the user named reconnects to the draining server that it left.
_RETURN = 1.0

_log = SafeLog(__name__)


class Connect(NamedTuple):
    """Connect a slot's world or a spare, after closing its current connection."""

    member: Member
    request: WorldRequest | None = None
    """The new world; None: the same world again."""
    endpoint: Endpoint | None = None
    """The endpoint of the new world; None: the same endpoint."""


class AddSpare(NamedTuple):
    """Connect a new world that will take over slots. It becomes the last one of the spares."""

    request: WorldRequest
    endpoint: Endpoint
    """The endpoint of the world."""
    lanes: int
    stands_by: StandBy
    """Its purpose."""


class DropSpare(NamedTuple):
    """Leave a spare's world, and remove the spare."""

    spare: Member


class Disconnect(NamedTuple):
    """Leave a spare's world; it is connected again later."""

    spare: Member


class TakeOver(NamedTuple):
    """Give the slots of a world to a spare."""

    member: Member
    spare: Member


class Begin(NamedTuple):
    """Ask for the next episode of a joined world."""

    member: Member


class GiveUp(NamedTuple):
    """End a connection whose answer is late."""

    member: Member


Decision: TypeAlias = Connect | AddSpare | DropSpare | Disconnect | TakeOver | Begin | GiveUp


@dataclasses.dataclass
class SlotPolicy:
    """Decides where the worlds of a vector environment are, and when failed ones are tried again."""

    filling: list[Member]
    """The members that fill slots."""
    spares: list[Member]
    """The spares."""
    placement: Placement
    """Chooses among the endpoints."""
    timeout: float
    """Seconds within which an attempt ends."""
    connect_timeout: float
    """Seconds within which a server must send something, if others may take its slots."""
    look_at: float = math.inf
    """The time of the next check for moves, in monotonic seconds; inf if there are no other servers."""
    lanes_leave: bool = False
    """True if a world of lanes has to move."""
    even_at: float = 0.0
    """The time of the next check for an uneven spread, in monotonic seconds."""
    _plans: Counter[tuple[int, str, str, str]] = dataclasses.field(default_factory=Counter, init=False)
    """Planned moves that were not logged yet: the number of slots, by the level and text of the log line."""

    @property
    def moves(self) -> bool:
        """True if there may be other servers."""
        return self.look_at != math.inf

    def everybody(self) -> list[Member]:
        """Return the worlds that fill slots, and then the spares."""
        return [*self.filling, *self.spares]

    # Events

    def endpoint_event(self, member: Member, event: EndpointEvent, now: float, why: str = "") -> None:
        """Feed an event to the state machine of a world's endpoint; `why` is for the log."""
        endpoint = member.endpoint
        back = self.placement.handle(endpoint.key, event, now, why)
        if back and any(other.is_displaced_from(endpoint) for other in self.filling):
            _log.warning("%s %s", member.remote.url, back)

    def lost(self, member: Member, error: RemoteError, now: float, *, established: bool) -> None:
        """Count a lost world or a failed attempt to connect, and set the time of the next attempt."""
        member.failures += 1
        why = str(error)
        self.endpoint_event(member, event_of(error), now, why.partition("\n")[0])
        wait = pause(member.failures)
        if self.placement.has_ended(member.endpoint.key):
            wait = min(wait, LONGEST_RESTART_PAUSE)
        member.retry_at = member.record.lost(now, wait, why, url=member.remote.url, established=established)

    def refused(self, member: Member, error: RemoteError, now: float) -> None:
        """Count a refused Reset or Step. After the first refusal in a row the world is reset again at once."""
        member.failures += 1
        # An occasional failed reset does not concern the server: its state changes after three in a row.
        if member.fails_every_reset:
            self.endpoint_event(member, event_of(error), now, str(error).partition("\n")[0])
        member.retry_at = now + (pause(member.failures - 1) if member.failures > 1 else 0.0)

    def permanent_error(self) -> RefusedError | None:
        """Return, once, an error that waiting cannot fix: refused settings, or an environment whose resets all fail."""
        for member in self.filling:
            # Only refusals of Resets and Steps count. The refusal of an earlier attempt to connect, such as at a full
            # server, says nothing about the world that was joined since.
            error = member.refusal
            if not isinstance(error, RefusedError) or error.code in ENDED_CODES:
                continue  # its world has ended, and another one is made
            if member.episode is EpisodeState.CUT and member.settings is None:
                continue  # it refused a Step: the end of that episode is reported first
            if isinstance(error, EnvironmentFailedError):
                if not member.fails_every_reset:
                    continue
                if member.may_leave and self.placement.any_well(member):
                    continue  # its next episode begins at another server
            # A caller that catches the error and goes on gets new attempts, without the refused settings.
            member.refusal, member.failures, member.settings = None, 0, None
            # Keep the error of a cut episode: the next step reports it as the reason.
            if member.episode is not EpisodeState.CUT:
                member.error = None
            return error
        return None

    # Decisions

    def check(self, now: float) -> Iterator[Decision]:
        """Decide which worlds to connect, which episodes to begin, which answers are late, and which slots to move."""
        self.placement.poll(now)
        if now >= self.look_at:
            self.look_at = now + _PERIOD
            yield from self._look_for_moves(now)
        logged: set[tuple[str, str]] = set()
        for member in self.filling:
            # Members in other states wait for the user's next call.
            if member.link is LinkState.OFFLINE:
                # A cut episode takes no spare: its next episode begins after its end was reported.
                spare = None if member.episode is EpisodeState.CUT else self.ready_spare(member)
                if spare is None:
                    yield from self._connect(member, now)
                else:
                    # The two swap their worlds: the spare gets the lost one, with its pauses and its error.
                    spare.failures, spare.retry_at = member.failures, member.retry_at
                    spare.error, member.failures = member.error, 0
                    # With a directory the change of the endpoint's state was logged already.
                    level = logging.INFO if member.home is None else logging.WARNING
                    servers = spare.remote.url, member.remote.url
                    if servers not in logged:  # once, whatever the number of slots
                        _log.log(level, "%s takes over the slots of %s", *servers)
                        logged.add(servers)
                    yield TakeOver(member, spare)
                    yield Begin(member)
            elif member.ready:
                if now >= member.retry_at:
                    yield Begin(member)
            elif member.waits and self._is_late(member, now):
                yield GiveUp(member)
        # A copy, because the pool removes dropped spares from the list during the loop.
        for spare in tuple(self.spares):
            if spare.link is LinkState.CONNECTING and self._is_late(spare, now):
                yield GiveUp(spare)
            elif spare.link is LinkState.OFFLINE and spare.is_named:
                yield from self._connect(spare, now)
            elif spare.link is LinkState.OFFLINE:
                # Drop a failed spare of the policy. The next check for moves chooses again.
                yield DropSpare(spare)

    def _is_late(self, member: Member, now: float) -> bool:
        """Return True if an answer is late. A silent server gets less time if there are other servers."""
        # `allowance` is slow to look up, so check it only after the deadline.
        if now > member.deadline:
            return now > member.deadline + member.remote.allowance
        # A black hole never sends anything. A server that has sent something gets all of `timeout`, because making a
        # world may take long.
        silent = member.link is LinkState.CONNECTING and now > member.silent_until and member.remote.silent
        return silent and member.home is None and self.placement.any_well(member)

    def _connect(self, member: Member, now: float) -> Iterator[Decision]:
        """Connect an offline world if that is due, to its pinned server or to the best endpoint.

        A pinned world has its own pauses, including those of its circuit breaker; a reset by the user ends them. For
        other worlds the pauses of the endpoints count, which all slots share.
        """
        if member.home is not None:
            if now >= member.retry_at:
                yield Connect(member)
            return
        placement = self.placement
        # Do not count its own slots as load: otherwise an endpoint with room for just these slots would look full.
        others = [other for other in self.everybody() if other is not member]
        proven = member.failures > 0
        endpoint = placement.choose(Load(others), member.lanes, now, self.timeout, member.kind, proven=proven)
        if endpoint is None:
            # No endpoint is free, but a server may have started since the last reading.
            placement.poll(now, soon=True)
            return
        if not member.is_at(endpoint):
            _log.debug("%s moves from %s to %s", member.title, member.remote.url, shown_url(endpoint.url))
        # Compare the URL too: a named endpoint keeps its key when its server gets another URL.
        stays = member.is_at(endpoint) and shown_url(endpoint.url) == member.remote.url
        yield Connect(member, None if stays else placement.request_for(endpoint), endpoint)

    def ready_spare(self, member: Member) -> Member | None:
        """Return a spare that is ready to take over the slots of a lost world; None: there is none."""
        return next((spare for spare in self.spares if spare.suits(member)), None)

    # Moves

    def is_leaving(self, member: Member) -> bool:
        """Return True if a world is on a draining server."""
        return member.remote.draining or self.placement.drains(member.endpoint)

    def _look_for_moves(self, now: float) -> Iterator[Decision]:
        """Connect worlds for slots that have to leave their servers, go back, or are crowded."""
        joined = [member for member in self.filling if member.link is LinkState.JOINED]
        drained = [member for member in joined if self.is_leaving(member)]
        for member in drained:
            self.endpoint_event(member, EndpointEvent.DRAINS, now)
        # A single environment leaves at the end of its episode. Episodes of lanes do not end together, so lanes leave
        # after any step, and some episodes are cut.
        self.lanes_leave = any(not member.single for member in drained)
        for spare in [spare for spare in self.spares if spare.link is LinkState.JOINED and self.is_leaving(spare)]:
            # Keep a spare that the user named: it waits for the next server at its URL.
            if spare.is_named:
                yield from self._come_back_later(spare, now)
            else:
                yield DropSpare(spare)
        failing = [member for member in joined if member.refusal is not None and member.may_leave]
        # A pinned slot stays at a draining server. If its resets fail, `before_episode` moves it.
        leaving = [member for member in dict.fromkeys(drained + failing) if member.home is None]
        yield from self._replace(leaving, now)
        yield from self._go_back(now)
        # Even out only when no slot has to leave: those need the free room first.
        if not leaving and now >= self.even_at:
            self.even_at = now + _EVEN_PERIOD
            yield from self._even_out(now)
        self._tell_plans()

    def _drop_surplus(self, reason: Reason, wanted: Counter[str]) -> Iterator[Decision]:
        """Drop the surplus spares for a reason, and subtract the remaining ones from `wanted`.

        Args:
            reason: The reason.
            wanted: The number of wanted spares for each endpoint; it is reduced.
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
        """Return the decision to connect a spare at an endpoint, for slots at `place`; `why` is for the log."""
        # An attempt at a server in trouble is logged for debugging only; `Placement.handle` logs when it answers.
        # Otherwise a dead server that stays in the directory would be logged with each attempt.
        level = logging.INFO if self.placement.is_well(endpoint.key) else logging.DEBUG
        self._plans[level, shown_url(endpoint.url), shown_url(place.url), why or reason.value] += lanes
        return AddSpare(self.placement.request_for(endpoint), endpoint, lanes, StandBy(reason, place.key))

    def _tell_plans(self) -> None:
        """Log the planned moves, with one line for all slots that move between the same two servers."""
        plans, self._plans = self._plans, Counter()
        for (level, url, place, why), slots in plans.items():
            number = "a slot" if slots == 1 else f"{slots} slots"
            _log.log(level, "%s is to take over %s of %s: %s", url, number, place, why)

    def _why_leaving(self, member: Member) -> str:
        """Return why a slot has to leave its server."""
        return "it drains" if self.is_leaving(member) else "every reset fails there"

    def _replace(self, leaving: Sequence[Member], now: float) -> Iterator[Decision]:
        """Connect worlds for slots that have to leave their servers."""
        wanted = Counter(member.endpoint.key for member in leaving)
        yield from self._drop_surplus(Reason.LEAVE, wanted)
        if not leaving:
            return  # the usual case: do not loop over all slots for a load
        load = Load(self.everybody())
        for member in leaving:
            if wanted[member.endpoint.key] <= 0:
                continue
            # An endpoint in trouble may be chosen: if all others are dark, only a replacement tries them again.
            endpoint = self.placement.choose(load, member.lanes, now, self.timeout, member.kind)
            if endpoint is not None and not member.is_at(endpoint):
                wanted[member.endpoint.key] -= 1
                why = self._why_leaving(member)
                yield self._add_spare(endpoint, member.lanes, Reason.LEAVE, member.endpoint, why)

    def _go_back(self, now: float) -> Iterator[Decision]:
        """Connect worlds at the pinned servers that slots have left, if those may be tried now.

        Lanes do not go back, because that would cut episodes.
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
        """Connect worlds at emptier endpoints for slots at crowded ones.

        Lanes are not moved for this, because that would cut episodes. Nothing is moved while slots are away, because
        those slots will go to the emptiest endpoints. Pinned slots stay.
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
                # Require a difference of two: with one, the move would only swap the two counts, again and again.
                at_most = load.slots[most.key] - 2
                endpoint = self.placement.choose(load, 1, now, self.timeout, kind, at_most=at_most)
                if endpoint is None:
                    break
                load.slots[most.key] -= 1
                yield self._add_spare(endpoint, 1, Reason.EVEN_OUT, most)

    def before_episode(self, member: Member, now: float) -> Iterator[Decision]:
        """Move a world before its next episode, if its server drains or fails, or if a better place is ready."""
        # A move would cut the episodes of lanes outside of the mask.
        if "reset_mask" in (member.settings or {}):
            return
        if not self.is_leaving(member) and not member.may_leave:
            replacement = next((spare for spare in self.spares if spare.betters(member)), None)
        else:
            replacement = self._ready_elsewhere(member)
            # A pinned slot stays at a draining server until the server ends.
            if replacement is None and (member.home is None or member.may_leave):
                replacement = self._connecting_elsewhere(member, now)
                if replacement is None:
                    endpoint = self.placement.choose_well(Load(self.everybody()), member, now)
                    if endpoint is None:
                        return  # the episode begins at the current server
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
        """Return an endpoint where others have joined, as a substitute for a missing server; None: there is none."""
        endpoint = self.placement.choose_well(Load(self.filling), member, now, up=True)
        if endpoint is not None:
            self.endpoint_event(member, EndpointEvent.GONE, now)
            self._look(now)
        return endpoint

    def _look(self, now: float) -> None:
        """Check for moves from now on, because a slot has left its pinned server and has to go back later."""
        self.look_at = min(self.look_at, now)

    def after_step(self, member: Member, now: float) -> Iterator[Decision]:
        """Move a world of lanes after a step, if its server drains and a replacement is ready."""
        leaves = member.link is LinkState.JOINED and self.is_leaving(member)
        if leaves and (replacement := self._ready_elsewhere(member)) is not None:
            member.settings = None
            yield from self._change_over(member, replacement, now)

    def _ready_elsewhere(self, member: Member) -> Member | None:
        """Return a spare that is ready for a world that has to leave its server; None: there is none."""
        for spare in self.spares:
            # A spare that the user named swaps places with the world. A world whose resets fail cannot be a spare.
            stays = spare.is_named and member.may_leave
            elsewhere = not spare.is_at(member.endpoint) and not self.is_leaving(spare)
            if spare.suits(member) and elsewhere and not stays:
                return spare
        return None

    def _connecting_elsewhere(self, member: Member, now: float) -> Member | None:
        """Return a replacement that is connecting to an endpoint without trouble; None: there is none.

        At an endpoint in trouble the attempt may fail and cost the slot its current server, so that is not chosen.
        """
        latest = now + self.timeout - _PATIENCE
        recent = (spare for spare in self.spares if spare.link is LinkState.CONNECTING and spare.deadline > latest)
        serving = (spare for spare in recent if spare.serves(member) and not spare.is_named)
        elsewhere = (spare for spare in serving if not spare.is_at(member.endpoint))
        return next((spare for spare in elsewhere if self.placement.is_well(spare.endpoint.key)), None)

    def _come_back_later(self, spare: Member, now: float) -> Iterator[Decision]:
        """Disconnect a spare from its draining server, and try the URL again after a pause."""
        yield Disconnect(spare)
        spare.retry_at = now + _RETURN

    def _change_over(self, member: Member, replacement: Member, now: float) -> Iterator[Decision]:
        """Give a world's slots to a replacement, and leave the old server."""
        before = member.remote
        member.record.moves += 1
        yield TakeOver(member, replacement)
        if replacement in self.spares:  # a spare that the user named has swapped places
            yield from self._come_back_later(replacement, now)
        _log.debug("%s moved from %s to %s", member.title, before.url, shown_url(member.remote.url))
        # Log one line for the last slot: a line for each slot would be thousands.
        if not any(other.remote.url == before.url for other in self.filling):
            _log.info("no slot is left at %s", before.url)
        # If the replacement is still connecting, the episode begins once it has joined.
        if member.ready:
            yield Begin(member)
