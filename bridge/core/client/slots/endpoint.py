"""The state of an endpoint, without input or output: one table, and when to try again; and who goes where.

An endpoint is a server that a directory has, or a URL of a list, which slots are pinned to.

An endpoint is *untried* until an attempt to join a world there has ended. It is *up* once one was joined, and stays so
while its worlds answer. Four kinds of trouble are told apart, because each ends in another way:

- *dark*: nobody answers there, or a connection was lost. It ends when a server is started, or the network mended.
- *full*: a server answers, and has no room. It ends when another client leaves. Worlds that are there go on.
- *failing*: the server is well, but its environment raises in every reset. A world can still be joined, so that shows
  nothing: only the first observation of an episode ends it.
- *refused*: it refuses us, or serves another environment. It ends when a person changes the server.

A *draining* server has said that it takes no further worlds. Its worlds go on until it is gone, and it does not take
that back: the next server at its URL is another one. Whose worlds have all left sees no connection end, so after a
second it is asked. Who drains leaves in order, most often to be started again: until a world is joined there the
endpoint has *ended*, which is no failure, and is asked every few seconds, however long the restart takes. It is asked
at once where another one fails or drains: one after the other is how a fleet is restarted.

An endpoint in trouble is tried again after pauses that double, by one world at a time: were all that are lost to try
it at once, a black hole would hold up each of them, and a full server would refuse each of them.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from bridge.core.back_off import pause
from bridge.core.client.endpoints import Endpoint, EndpointWatch, Kind, ListedEndpoint, ListedEndpoints
from bridge.core.client.slots.slot import LinkState, Member
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.logs import LimitedLog
from bridge.errors import Code, EnvironmentFailedError, PeerError, RefusedError, RemoteError, SettingError, shown_url

__all__ = [
    "LONGEST_RESTART_PAUSE",
    "TRANSITIONS",
    "EndpointEvent",
    "EndpointRecord",
    "EndpointState",
    "Load",
    "Placement",
    "change_of",
    "event_of",
]


class EndpointState(enum.Enum):
    """The state of an endpoint, as far as this client has seen."""

    UNTRIED = "untried"
    UP = "up"
    FULL = "full"
    FAILING = "failing"
    DARK = "dark"
    DRAINING = "draining"
    ENDED = "ended"
    REFUSED = "refused"

    __hash__ = object.__hash__  # Enum's own is a Python function; each attempt goes through all endpoints


def change_of(before: EndpointState, after: EndpointState) -> str:
    """Return what a change of state means to a user who reads the log: the rest of a sentence about the server."""
    if after is EndpointState.DARK:
        return "does not answer" if before is EndpointState.UNTRIED else "no longer answers"
    return _UP_AFTER[before] if after is EndpointState.UP else _TROUBLE_TEXTS[after]


_TROUBLE_TEXTS = {
    EndpointState.UNTRIED: "was not tried yet",
    EndpointState.FULL: "is full",
    EndpointState.FAILING: "answers, but its environment fails when it is made or reset",
    EndpointState.DRAINING: "shuts down, and takes no further environments",
    EndpointState.ENDED: "was shut down",
    EndpointState.REFUSED: "answers, but refuses this client",
}
_UP_AFTER = {
    EndpointState.UNTRIED: "answers",
    EndpointState.UP: "answers",
    EndpointState.FULL: "has room again",
    EndpointState.FAILING: "answers, and its environment works again",
    EndpointState.DARK: "answers again",
    EndpointState.DRAINING: "was started again, and answers",
    EndpointState.ENDED: "was started again, and answers",
    EndpointState.REFUSED: "accepts this client again",
}


class EndpointEvent(enum.Enum):
    """An event of an endpoint."""

    JOINED = "world joined"
    OBSERVED = "first observation of an episode"
    NO_ROOM = "no room for a world"
    RAISED = "environment raised when it was made or reset"
    GONE = "no connection, connection lost, or no answer in time"
    REFUSES = "refused, or other spaces"
    DRAINS = "server says that it drains"


_S, _E = EndpointState, EndpointEvent

# Each world of an endpoint is joined, stepped and lost by itself, so events of several worlds mix, and any event may
# follow any other: the table has a row for each pair.
#
# The latest event decides, with these exceptions. An observation of a world that was there before says nothing about
# room for another one, or about who is let in. While an environment fails, a world can still be joined, or find the
# server full: neither shows that its resets work again. A server that drains refuses worlds and may still fail, but
# nothing brings it back: only its end, or a world that was joined at its URL, shows that it is over.
TRANSITIONS: Mapping[tuple[EndpointState, EndpointEvent], EndpointState] = {
    (_S.UNTRIED, _E.JOINED): _S.UP,
    (_S.UNTRIED, _E.OBSERVED): _S.UP,  # of a world of a URL that is an endpoint of the directory since
    (_S.UNTRIED, _E.NO_ROOM): _S.FULL,
    (_S.UNTRIED, _E.RAISED): _S.FAILING,
    (_S.UNTRIED, _E.GONE): _S.DARK,
    (_S.UNTRIED, _E.REFUSES): _S.REFUSED,
    (_S.UNTRIED, _E.DRAINS): _S.DRAINING,
    (_S.UP, _E.JOINED): _S.UP,
    (_S.UP, _E.OBSERVED): _S.UP,
    (_S.UP, _E.NO_ROOM): _S.FULL,
    (_S.UP, _E.RAISED): _S.FAILING,
    (_S.UP, _E.GONE): _S.DARK,
    (_S.UP, _E.REFUSES): _S.REFUSED,
    (_S.UP, _E.DRAINS): _S.DRAINING,
    (_S.FULL, _E.JOINED): _S.UP,
    (_S.FULL, _E.OBSERVED): _S.FULL,  # of a world that was there before
    (_S.FULL, _E.NO_ROOM): _S.FULL,
    (_S.FULL, _E.RAISED): _S.FAILING,
    (_S.FULL, _E.GONE): _S.DARK,
    (_S.FULL, _E.REFUSES): _S.REFUSED,
    (_S.FULL, _E.DRAINS): _S.DRAINING,
    (_S.FAILING, _E.JOINED): _S.FAILING,  # the environment can be made, and still raise when it is reset
    (_S.FAILING, _E.OBSERVED): _S.UP,
    (_S.FAILING, _E.NO_ROOM): _S.FAILING,
    (_S.FAILING, _E.RAISED): _S.FAILING,
    (_S.FAILING, _E.GONE): _S.DARK,
    (_S.FAILING, _E.REFUSES): _S.REFUSED,
    (_S.FAILING, _E.DRAINS): _S.DRAINING,
    (_S.DARK, _E.JOINED): _S.UP,
    (_S.DARK, _E.OBSERVED): _S.UP,  # one of several connections was lost, another one goes on
    (_S.DARK, _E.NO_ROOM): _S.FULL,
    (_S.DARK, _E.RAISED): _S.FAILING,
    (_S.DARK, _E.GONE): _S.DARK,
    (_S.DARK, _E.REFUSES): _S.REFUSED,
    (_S.DARK, _E.DRAINS): _S.DRAINING,
    (_S.DRAINING, _E.JOINED): _S.UP,  # the next server at its URL; the old one would say once more that it drains
    (_S.DRAINING, _E.OBSERVED): _S.DRAINING,
    (_S.DRAINING, _E.NO_ROOM): _S.DRAINING,
    (_S.DRAINING, _E.RAISED): _S.DRAINING,
    (_S.DRAINING, _E.GONE): _S.ENDED,
    (_S.DRAINING, _E.REFUSES): _S.DRAINING,
    (_S.DRAINING, _E.DRAINS): _S.DRAINING,
    (_S.ENDED, _E.JOINED): _S.UP,
    (_S.ENDED, _E.OBSERVED): _S.ENDED,  # of a world of the old server, which is still ending
    (_S.ENDED, _E.NO_ROOM): _S.FULL,
    (_S.ENDED, _E.RAISED): _S.FAILING,
    (_S.ENDED, _E.GONE): _S.ENDED,  # not started yet, or still ending: then it refuses worlds
    (_S.ENDED, _E.REFUSES): _S.REFUSED,
    (_S.ENDED, _E.DRAINS): _S.DRAINING,
    (_S.REFUSED, _E.JOINED): _S.UP,
    (_S.REFUSED, _E.OBSERVED): _S.REFUSED,  # of a world that was there before
    (_S.REFUSED, _E.NO_ROOM): _S.FULL,
    (_S.REFUSED, _E.RAISED): _S.FAILING,
    (_S.REFUSED, _E.GONE): _S.DARK,
    (_S.REFUSED, _E.REFUSES): _S.REFUSED,
    (_S.REFUSED, _E.DRAINS): _S.DRAINING,
}

# Seconds until it is asked whether there is another server at the URL of one that drains, and the longest pause from
# then on. A restart may take a second or minutes, and the next server may drain as soon as it is over.
_DRAINING = 1.0
LONGEST_RESTART_PAUSE = 5.0
"""The longest pause between two attempts at an endpoint whose server drained, seconds."""
# Pauses that are skipped until slots of a list try the server again that they have left: meanwhile they have another
# one, and a try may cost a slot some resets that fail.
_PAUSES_SKIPPED = 5
_WELL = frozenset({_S.UNTRIED, _S.UP})
_RESTARTING = frozenset({_S.DRAINING, _S.ENDED})
_TROUBLE = frozenset({_E.NO_ROOM, _E.RAISED, _E.GONE, _E.REFUSES, _E.DRAINS})


def event_of(error: RemoteError) -> EndpointEvent:
    """Return what the end of an attempt, or of a connection, says of the endpoint."""
    # The first question, for this is a RefusedError too.
    if isinstance(error, EnvironmentFailedError):
        return EndpointEvent.RAISED
    if isinstance(error, PeerError):  # it breaks the protocol, or has other spaces
        return EndpointEvent.REFUSES
    # A server that is stopping refuses worlds by UNAVAILABLE: soon nobody answers there.
    if not isinstance(error, RefusedError) or error.code == Code.UNAVAILABLE:
        return EndpointEvent.GONE
    return EndpointEvent.NO_ROOM if error.code == Code.RESOURCE_EXHAUSTED else EndpointEvent.REFUSES


@dataclasses.dataclass
class EndpointRecord:
    """The state of one endpoint, and when a world may be tried there; times are monotonic seconds."""

    state: EndpointState = EndpointState.UNTRIED
    """Assigned by `handle` alone."""
    failures: int = 0
    """Attempts in a row that failed; those that were under way together count as one."""
    failed_at: float = -math.inf
    """The time of the last failure."""
    retry_at: float = -math.inf
    """The time from which on a world may be tried again."""
    trial_until: float = -math.inf
    """The time by which the one attempt under way will have ended; until then there is no other."""

    def hurry(self, now: float) -> None:
        """Allow an attempt at once, if the server drained; its pauses begin anew."""
        if self.state in _RESTARTING:
            self.failures, self.retry_at = 0, now

    def may_try(self, now: float) -> bool:
        """Tell whether a world may be tried there now."""
        return self.state in _WELL or (now >= self.retry_at and now >= self.trial_until)

    @property
    def rank(self) -> tuple[bool, float]:
        """The key to sort endpoints by: those that are well first, and the last to fail last."""
        # `failed_at` outlasts the trouble: one that is up again does not come behind others for it.
        return self.state not in _WELL, -math.inf if self.state in _WELL else self.failed_at

    def tried(self, now: float, patience: float) -> None:
        """Count a world as tried there, so that no other is until its attempt ends, within `patience` seconds."""
        # Where it is well, as many worlds as there is room for are tried at a time.
        if self.state not in _WELL:
            self.trial_until = now + patience

    def handle(self, event: EndpointEvent, now: float, pause: Callable[[int], float]) -> bool:
        """Take an event; return whether the state changed.

        Args:
            event: What was seen.
            now: When.
            pause: Gives the seconds until the next attempt for the number of failures in a row.
        """
        before, self.state = self.state, TRANSITIONS[self.state, event]
        if event is EndpointEvent.DRAINS and before is EndpointState.DRAINING:
            return False  # it is looked for often, and when to ask the next server there was decided when it began
        # JOINED changes neither pause nor count: a server that takes each world and then loses it, or whose environment
        # raises in each reset, is tried in growing pauses too. OBSERVED shows that all of it works.
        if event in _TROUBLE:
            if event is EndpointEvent.DRAINS:
                # To leave in order is no failure to back off from, and those before it were of another server.
                self.failures, self.retry_at = 0, now + _DRAINING
            # Else what fails now was tried together with what has failed before. Not so the end of a server that
            # drained: the next one may be at its URL in a moment.
            elif now >= self.retry_at or (before is EndpointState.DRAINING and event is EndpointEvent.GONE):
                self.failures += 1
                wait = pause(self.failures)
                self.retry_at = now + (min(wait, LONGEST_RESTART_PAUSE) if self.state is _S.ENDED else wait)
            self.failed_at, self.trial_until = now, -math.inf
        elif self.state in _WELL and event is EndpointEvent.OBSERVED:
            self.failures, self.retry_at = 0, -math.inf
        return self.state is not before


class Load:
    """Counts the worlds on each endpoint.

    Args:
        members: The worlds that have a place.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.slots: Counter[str] = Counter()
        """The number of slots on each endpoint, by its key."""
        self.draining: set[str] = set()
        """The URLs of servers that have said that they take no further worlds."""
        self.failing: set[str] = set()
        """The keys of endpoints where a world is whose last reset failed."""
        for member in members:
            key = member.endpoint.key
            self.slots[key] += member.lanes
            if member.remote.draining:
                self.draining.add(member.remote.url)
            if member.failures and member.link is LinkState.JOINED:
                self.failing.add(key)


class Placement:
    """Chooses endpoints: of those that are well the one with the fewest slots, and the last to fail last.

    Args:
        watch: Knows the endpoints: those of a directory, or of a list.
        request_for: Makes the request for a world at an endpoint.
    """

    def __init__(self, watch: EndpointWatch | ListedEndpoints, request_for: Callable[[Endpoint], WorldRequest]) -> None:
        self.watch = watch
        self.request_for = request_for
        self._records: defaultdict[str, EndpointRecord] = defaultdict(EndpointRecord)
        # Of thousands of dead addresses nobody reads a line each.
        self._log = LimitedLog(__name__, burst=10, rate=1 / 30)

    @classmethod
    def of_list(cls, requests: Iterable[WorldRequest]) -> Placement:
        """Return the placement of a list of URLs, whose endpoints slots are pinned to."""
        return cls(ListedEndpoints([ListedEndpoint.of(each) for each in requests]), attrgetter("request"))

    @property
    def title(self) -> str:
        """What has the endpoints, for errors."""
        return self.watch.title

    def poll(self, now: float, *, soon: bool = False) -> None:
        """Read a directory again, without a wait, where that is due; `soon`: as soon as it may be read again."""
        self.watch.poll(now, soon=soon)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy it without what was seen of the endpoints, whose times are of this machine's clock."""
        return type(self), (self.watch, self.request_for)

    def choose(
        self,
        load: Load,
        lanes: int,
        now: float,
        patience: float,
        kind: Kind,
        *,
        proven: bool = False,
        at_most: int | None = None,
    ) -> Endpoint | None:
        """Return where a world may go now, and count it in `load`; None: nowhere.

        Args:
            load: Of the worlds that have a place.
            lanes: The slots that the world fills.
            now: Monotonic seconds.
            patience: Seconds within which the attempt ends.
            kind: The kind of endpoint.
            proven: Whether to prefer endpoints that are up to untried ones. So who has met a dead one of many asks a
                living one next, however many further dead ones the directory lists.
            at_most: The most slots that are there already; their number then comes first, whatever state an endpoint is
                in. None: any number.
        """
        records = self._records

        def order(endpoint: Endpoint) -> tuple[Any, ...]:
            record, count = records[endpoint.key], load.slots.get(endpoint.key, 0)
            untried = proven and record.state is EndpointState.UNTRIED
            # To even out, the count comes first: by its record, a server that is back is in trouble until it is tried.
            return (count, *record.rank) if at_most is not None else (*record.rank, untried, count)

        free = self._free(load, lanes, now, kind)
        few = (each for each in free if at_most is None or load.slots.get(each.key, 0) <= at_most)
        best = min(few, key=order, default=None)
        if best is not None:
            load.slots[best.key] += lanes
            records[best.key].tried(now, patience)
        return best

    def choose_untried(self, load: Load, count: int, now: float) -> list[Endpoint]:
        """Return up to so many endpoints that no world was tried at, in the directory's order; count them in `load`."""
        untried = (e for e in self._free(load, 1, now) if self._records[e.key].state is EndpointState.UNTRIED)
        # One with slots is being tried just now.
        found = [endpoint for endpoint in untried if not load.slots.get(endpoint.key)]
        for endpoint in found[:count]:
            load.slots[endpoint.key] += 1
        return found[:count]

    def choose_well(self, load: Load, member: Member, now: float, *, up: bool = False) -> Endpoint | None:
        """Return where a world may go at once that has a place already; None: nowhere.

        Unlike `choose`, it returns no endpoint that something speaks against: the world could lose what it has.

        Args:
            load: Of the worlds that have a place.
            member: The world.
            now: Monotonic seconds.
            up: Whether one that was not tried yet will not do.
        """
        well = [
            endpoint
            for endpoint in self._free(load, member.lanes, now, member.kind)
            if self.is_well(endpoint.key) and endpoint.key not in load.failing and not member.is_at(endpoint)
        ]
        if up:
            well = [endpoint for endpoint in well if self._records[endpoint.key].state is EndpointState.UP]
        return min(well, key=lambda endpoint: load.slots.get(endpoint.key, 0), default=None)

    def may_try(self, key: str, now: float, patience: float) -> bool:
        """Tell whether a world may be tried at an endpoint now; then the attempt ends within `patience` seconds."""
        record = self._records[key]
        free = record.may_try(now)
        if free:
            record.tried(now, patience)
        return free

    def is_well(self, key: str) -> bool:
        """Tell whether nothing speaks against an endpoint."""
        return self._records[key].state in _WELL

    def has_ended(self, key: str) -> bool:
        """Tell whether the server of an endpoint drained, and is gone."""
        return self._records[key].state is EndpointState.ENDED

    def drains(self, endpoint: Endpoint) -> bool:
        """Tell whether the directory says that an endpoint takes no further worlds."""
        return endpoint.key in self.watch.draining

    def any_well(self, member: Member) -> bool:
        """Tell whether nothing speaks against another endpoint of the kind of a world's own."""
        return any(
            self.is_well(endpoint.key) and not endpoint.draining and endpoint.kind == member.kind
            for endpoint in self.watch.endpoints
            if not member.is_at(endpoint)
        )

    def kinds(self, worlds: int) -> list[Kind]:
        """Return the kinds of the first worlds: those of the endpoints in the directory's order, again and again."""
        kinds = [endpoint.kind for endpoint in self.watch.endpoints if not endpoint.draining]
        return list(itertools.islice(itertools.cycle(kinds), worlds))

    def _free(self, load: Load, lanes: int, now: float, kind: Kind | None = None) -> Iterator[Endpoint]:
        """Yield the endpoints that may take a world of `lanes` slots now, of one kind or (None) of any."""
        slots, draining, records = load.slots, load.draining, self._records
        for endpoint in self.watch.endpoints:
            key = endpoint.key
            if endpoint.draining or not records[key].may_try(now):
                continue
            # A server tells its clients that it drains before the directory is read again, if the directory knows of it
            # at all. By the URL, not the key: the next server of that name may be listed already.
            if draining and shown_url(endpoint.url) in draining:
                continue
            if kind is not None and endpoint.kind != kind:
                continue
            # Without a number the server itself says whether it is full.
            if endpoint.slots is None or slots.get(key, 0) + lanes <= endpoint.slots:
                yield endpoint

    def check_room(self, num_envs: int) -> None:
        """Raise SettingError where the endpoints say that they cannot carry so many slots."""
        slots = [endpoint.slots for endpoint in self.watch.endpoints if not endpoint.draining]
        room = sum(number for number in slots if number is not None)
        # Told at once where all of them say how much they carry: else the join would fail at the last worlds.
        if None not in slots and room < num_envs:
            raise SettingError(
                f"expected endpoints with room for num_envs={num_envs} slots, got room for {room} on {len(slots)} of "
                f"{self.title}; start more servers, or ask for fewer slots"
            )

    def handle(self, key: str, event: EndpointEvent, now: float, why: str) -> bool:
        """Feed an event to an endpoint's state machine; the log says a change of its state, and `why`.

        Returns:
            Whether the endpoint is well again.
        """
        record = self._records[key]
        before = record.state
        # The first success is no change.
        changed = record.handle(event, now, self._pause) and (before, record.state) != (_S.UNTRIED, _S.UP)
        back = changed and record.state is EndpointState.UP
        if changed and before in _WELL and not back:
            # There is one server less: where one drained a moment ago, it may be back before its pause is over.
            for other in self._records.values():
                if other is not record:
                    other.hurry(now)
        # Of a list, which never changes, each slot tells by itself what it lost, and where it goes.
        if self.watch.pinned:
            return back
        # A server that was replaced may have another URL by now: the directory is read before its period is over.
        if event in _TROUBLE:
            self.watch.poll(now, soon=True)
        # A line for each change, whatever the number of slots that saw it. Good news needs no reason; the event behind
        # it is our own word.
        if back:
            self._log.warning("%s %s", shown_url(key), change_of(before, record.state))
        elif record.state is EndpointState.ENDED:
            # The drain was told, and its end is what was to come.
            if changed:
                self._log.info("%s %s", shown_url(key), change_of(before, record.state))
        elif changed:
            self._log.warning("%s %s: %s", shown_url(key), change_of(before, record.state), why)
        return back

    def _pause(self, failures: int) -> float:
        return pause(failures + (_PAUSES_SKIPPED if self.watch.pinned else 0))
