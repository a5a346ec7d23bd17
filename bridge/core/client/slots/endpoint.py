"""The state of an endpoint, its retry times, and the placement of worlds on endpoints. Without I/O.

An endpoint is a server in a directory, or a URL of a list, to which slots are pinned.

An endpoint is *untried* until the first attempt to join a world there has ended. It is *up* once a world was joined,
and stays up while its worlds answer. There are four kinds of trouble, because each one ends in a different way:

- *dark*: nobody answers, or a connection was lost. It ends when a server is started or the network is repaired.
- *full*: the server answers, but has no room. It ends when another client leaves. Existing worlds go on.
- *failing*: the server works, but its environment raises in every reset. Worlds can still be joined, so only the first
  observation of an episode ends this state.
- *refused*: the server refuses this client, or serves another environment. It ends when a person changes the server.

A *draining* server has announced that it takes no further worlds. Its existing worlds go on until it ends, and a drain
is final: the next server at the URL is a new one. If all our worlds have left, we see no connection end, so we ask the
URL again after a second. A drained server is usually restarted. Until a world is joined there again, the endpoint has
*ended*. That is not a failure: it is tried every few seconds, however long the restart takes. It is tried at once when
another endpoint fails or drains, because fleets are restarted one server after the other.

An endpoint in trouble is tried again after pauses that double, with one world at a time. If all lost worlds tried it at
once, a black hole would delay each of them, and a full server would refuse each of them.
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

    __hash__ = object.__hash__  # faster than Enum's Python function; each attempt looks at all endpoints


def change_of(before: EndpointState, after: EndpointState, *, first: bool = False) -> str:
    """Return the rest of a log sentence about the server that describes a change of its state.

    Args:
        before: The state before the change.
        after: The state after it.
        first: True if the server has never been up before.
    """
    if after is EndpointState.DARK:
        return "does not answer" if before is EndpointState.UNTRIED else "no longer answers"
    text = _UP_AFTER[before] if after is EndpointState.UP else _TROUBLE_TEXTS[after]
    return text.removesuffix(" again") if first else text


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

# Each world of an endpoint is joined, stepped and lost independently, so events of several worlds mix, and any event
# may follow any other. So the table has a row for each pair.
#
# The latest event decides, with these exceptions. An observation in an existing world does not show that the server has
# room, or admits this client. While an environment fails, joining a world or finding the server full does not show that
# resets work again. A draining server refuses worlds and may fail, but it stays draining until it ends, or until a
# world is joined at its URL.
TRANSITIONS: Mapping[tuple[EndpointState, EndpointEvent], EndpointState] = {
    (_S.UNTRIED, _E.JOINED): _S.UP,
    (_S.UNTRIED, _E.OBSERVED): _S.UP,  # in a world that was joined before its URL became an endpoint of the directory
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
    (_S.FULL, _E.OBSERVED): _S.FULL,  # in an existing world
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
    (_S.DARK, _E.OBSERVED): _S.UP,  # one of several connections was lost, and another one still works
    (_S.DARK, _E.NO_ROOM): _S.FULL,
    (_S.DARK, _E.RAISED): _S.FAILING,
    (_S.DARK, _E.GONE): _S.DARK,
    (_S.DARK, _E.REFUSES): _S.REFUSED,
    (_S.DARK, _E.DRAINS): _S.DRAINING,
    (_S.DRAINING, _E.JOINED): _S.UP,  # the next server at the URL: the old one would have refused
    (_S.DRAINING, _E.OBSERVED): _S.DRAINING,
    (_S.DRAINING, _E.NO_ROOM): _S.DRAINING,
    (_S.DRAINING, _E.RAISED): _S.DRAINING,
    (_S.DRAINING, _E.GONE): _S.ENDED,
    (_S.DRAINING, _E.REFUSES): _S.DRAINING,
    (_S.DRAINING, _E.DRAINS): _S.DRAINING,
    (_S.ENDED, _E.JOINED): _S.UP,
    (_S.ENDED, _E.OBSERVED): _S.ENDED,  # in a world of the old server, which is still ending
    (_S.ENDED, _E.NO_ROOM): _S.FULL,
    (_S.ENDED, _E.RAISED): _S.FAILING,
    (_S.ENDED, _E.GONE): _S.ENDED,  # not started yet, or the old server is still ending and refuses worlds
    (_S.ENDED, _E.REFUSES): _S.REFUSED,
    (_S.ENDED, _E.DRAINS): _S.DRAINING,
    (_S.REFUSED, _E.JOINED): _S.UP,
    (_S.REFUSED, _E.OBSERVED): _S.REFUSED,  # in an existing world
    (_S.REFUSED, _E.NO_ROOM): _S.FULL,
    (_S.REFUSED, _E.RAISED): _S.FAILING,
    (_S.REFUSED, _E.GONE): _S.DARK,
    (_S.REFUSED, _E.REFUSES): _S.REFUSED,
    (_S.REFUSED, _E.DRAINS): _S.DRAINING,
}

# Seconds until the first attempt to find a new server at the URL of a draining one, and the longest pause afterwards. A
# restart may take a second or minutes, and other servers of a fleet may drain as soon as it is over.
_DRAINING = 1.0
LONGEST_RESTART_PAUSE = 5.0
"""The longest pause between two attempts at an endpoint whose server drained, in seconds."""
# The number of short pauses that are skipped before slots of a list try the server that they left. They have another
# server meanwhile, and an attempt may cost a slot some failed resets.
_PAUSES_SKIPPED = 5
_WELL = frozenset({_S.UNTRIED, _S.UP})
_RESTARTING = frozenset({_S.DRAINING, _S.ENDED})
_TROUBLE = frozenset({_E.NO_ROOM, _E.RAISED, _E.GONE, _E.REFUSES, _E.DRAINS})


def event_of(error: RemoteError) -> EndpointEvent:
    """Return the event that the error of an attempt or a connection means for the endpoint."""
    # Check this first, because it is a RefusedError too.
    if isinstance(error, EnvironmentFailedError):
        return EndpointEvent.RAISED
    if isinstance(error, PeerError):  # the server breaks the protocol, or has other spaces
        return EndpointEvent.REFUSES
    # A stopping server refuses worlds with UNAVAILABLE, and will soon be gone.
    if not isinstance(error, RefusedError) or error.code == Code.UNAVAILABLE:
        return EndpointEvent.GONE
    return EndpointEvent.NO_ROOM if error.code == Code.RESOURCE_EXHAUSTED else EndpointEvent.REFUSES


@dataclasses.dataclass
class EndpointRecord:
    """The state of one endpoint and its retry times, in monotonic seconds."""

    state: EndpointState = EndpointState.UNTRIED
    """Only `handle` assigns it."""
    was_up: bool = False
    """True if it has been up at any time."""
    failures: int = 0
    """Failed attempts in a row. Attempts that ran at the same time count as one."""
    failed_at: float = -math.inf
    """The time of the last failure."""
    retry_at: float = -math.inf
    """The time of the next permitted attempt."""
    trial_until: float = -math.inf
    """The time by which the current attempt ends. There is no other attempt until then."""

    def hurry(self, now: float) -> None:
        """If the server drained, allow an attempt at once, and start again with short pauses."""
        if self.state in _RESTARTING:
            self.failures, self.retry_at = 0, now

    def may_try(self, now: float) -> bool:
        """Return True if a world may be tried there now."""
        return self.state in _WELL or (now >= self.retry_at and now >= self.trial_until)

    @property
    def rank(self) -> tuple[bool, float]:
        """The sort key of endpoints: those without trouble first, then by the time of the last failure."""
        # `failed_at` is kept after the trouble, but must not rank an endpoint that is up again behind others.
        return self.state not in _WELL, -math.inf if self.state in _WELL else self.failed_at

    def tried(self, now: float, patience: float) -> None:
        """Record an attempt that ends within `patience` seconds, and block other attempts until then."""
        # An endpoint without trouble takes any number of attempts at a time.
        if self.state not in _WELL:
            self.trial_until = now + patience

    def handle(self, event: EndpointEvent, now: float, pause: Callable[[int], float]) -> bool:
        """Apply an event; return True if the state changed.

        Args:
            event: The event.
            now: The time.
            pause: Returns the seconds until the next attempt, given the number of failures in a row.
        """
        before, self.state = self.state, TRANSITIONS[self.state, event]
        self.was_up = self.was_up or self.state is EndpointState.UP
        if event is EndpointEvent.DRAINS and before is EndpointState.DRAINING:
            return False  # this event repeats often, and the first one has set the time of the next attempt
        # JOINED changes neither pause nor count: a server that loses each world after the join, or whose environment
        # raises in each reset, is tried with growing pauses too. OBSERVED shows that everything works.
        if event in _TROUBLE:
            if event is EndpointEvent.DRAINS:
                # A drain is not a failure, and earlier failures do not count for the next server.
                self.failures, self.retry_at = 0, now + _DRAINING
            # Before `retry_at`, this attempt ran together with one that has failed already: count them once. The end of
            # a drained server counts always: the next server may be at the URL in a moment.
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
        members: The worlds that have an endpoint.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.slots: Counter[str] = Counter()
        """The number of slots on each endpoint, by the endpoint's key."""
        self.draining: set[str] = set()
        """The URLs of draining servers."""
        self.failing: set[str] = set()
        """The keys of endpoints with a world whose last reset failed."""
        for member in members:
            key = member.endpoint.key
            self.slots[key] += member.lanes
            if member.remote.draining:
                self.draining.add(member.remote.url)
            if member.failures and member.link is LinkState.JOINED:
                self.failing.add(key)


class Placement:
    """Chooses endpoints: first those without trouble, by the fewest slots; then the others, by their last failure.

    Args:
        watch: Holds the endpoints of a directory or a list.
        request_for: Makes the request for a world at an endpoint.
    """

    def __init__(self, watch: EndpointWatch | ListedEndpoints, request_for: Callable[[Endpoint], WorldRequest]) -> None:
        self.watch = watch
        self.request_for = request_for
        self._records: defaultdict[str, EndpointRecord] = defaultdict(EndpointRecord)
        # Limited, because nobody reads a line for each of thousands of dead addresses.
        self._log = LimitedLog(__name__, burst=10, rate=1 / 30)

    @classmethod
    def of_list(cls, requests: Iterable[WorldRequest]) -> Placement:
        """Return the placement for a list of URLs, to which slots are pinned."""
        return cls(ListedEndpoints([ListedEndpoint.of(each) for each in requests]), attrgetter("request"))

    @property
    def title(self) -> str:
        """The name of the directory or list, for errors."""
        return self.watch.title

    def poll(self, now: float, *, soon: bool = False) -> None:
        """Start to read a directory again if that is due. `soon`: as soon as the directory permits."""
        self.watch.poll(now, soon=soon)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the placement without the endpoints' records, whose times are valid for this process only."""
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
        """Return an endpoint for a world, and count the world in `load`; None: no endpoint is available.

        Args:
            load: The load of the worlds that have an endpoint.
            lanes: The slots that the world fills.
            now: Monotonic seconds.
            patience: Seconds within which the attempt ends.
            kind: The kind of endpoint.
            proven: True: prefer endpoints that are up to untried ones. So a world that has met a dead endpoint tries
                a living one next, however many dead endpoints the directory lists.
            at_most: The most slots that the endpoint may have. The number of slots is then the first sort key, whatever
                the endpoints' states. None: any number.
        """
        records = self._records

        def order(endpoint: Endpoint) -> tuple[Any, ...]:
            record, count = records[endpoint.key], load.slots.get(endpoint.key, 0)
            untried = proven and record.state is EndpointState.UNTRIED
            # To even out, sort by the count first: a server that is back still has a record of trouble until it is
            # tried.
            return (count, *record.rank) if at_most is not None else (*record.rank, untried, count)

        free = self._free(load, lanes, now, kind)
        few = (each for each in free if at_most is None or load.slots.get(each.key, 0) <= at_most)
        best = min(few, key=order, default=None)
        if best is not None:
            load.slots[best.key] += lanes
            records[best.key].tried(now, patience)
        return best

    def choose_untried(self, load: Load, count: int, now: float) -> list[Endpoint]:
        """Return up to `count` untried endpoints in the directory's order, and count them in `load`."""
        untried = (e for e in self._free(load, 1, now) if self._records[e.key].state is EndpointState.UNTRIED)
        # An untried endpoint with slots is being tried just now.
        found = [endpoint for endpoint in untried if not load.slots.get(endpoint.key)]
        for endpoint in found[:count]:
            load.slots[endpoint.key] += 1
        return found[:count]

    def choose_well(self, load: Load, member: Member, now: float, *, up: bool = False) -> Endpoint | None:
        """Return an endpoint to which an existing world may move at once; None: no endpoint is available.

        Unlike `choose`, this never returns an endpoint in trouble, because the world already has a working server.

        Args:
            load: The load of the worlds that have an endpoint.
            member: The world.
            now: Monotonic seconds.
            up: True: exclude untried endpoints.
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
        """Return True if a world may be tried at an endpoint now, and record an attempt of `patience` seconds."""
        record = self._records[key]
        free = record.may_try(now)
        if free:
            record.tried(now, patience)
        return free

    def is_well(self, key: str) -> bool:
        """Return True if an endpoint is not in trouble."""
        return self._records[key].state in _WELL

    def has_ended(self, key: str) -> bool:
        """Return True if the server of an endpoint drained and has ended."""
        return self._records[key].state is EndpointState.ENDED

    def drains(self, endpoint: Endpoint) -> bool:
        """Return True if the directory says that an endpoint takes no further worlds."""
        return endpoint.key in self.watch.draining

    def any_well(self, member: Member) -> bool:
        """Return True if another endpoint of the world's kind is not in trouble."""
        return any(
            self.is_well(endpoint.key) and not endpoint.draining and endpoint.kind == member.kind
            for endpoint in self.watch.endpoints
            if not member.is_at(endpoint)
        )

    def kinds(self, worlds: int) -> list[Kind]:
        """Return the kinds of the first worlds: the endpoints' kinds in the directory's order, repeated as needed."""
        kinds = [endpoint.kind for endpoint in self.watch.endpoints if not endpoint.draining]
        return list(itertools.islice(itertools.cycle(kinds), worlds))

    def _free(self, load: Load, lanes: int, now: float, kind: Kind | None = None) -> Iterator[Endpoint]:
        """Yield the endpoints that may take a world of `lanes` slots now, of one kind or (None) of any."""
        slots, draining, records = load.slots, load.draining, self._records
        for endpoint in self.watch.endpoints:
            key = endpoint.key
            if endpoint.draining or not records[key].may_try(now):
                continue
            # A server tells its clients that it drains before the directory is read again. Compare the URL, not the
            # key: the next server with this name may be listed already.
            if draining and shown_url(endpoint.url) in draining:
                continue
            if kind is not None and endpoint.kind != kind:
                continue
            # Without a number in the directory, the server itself refuses when it is full.
            if endpoint.slots is None or slots.get(key, 0) + lanes <= endpoint.slots:
                yield endpoint

    def check_room(self, num_envs: int) -> None:
        """Raise SettingError if the endpoints' declared room is too small for `num_envs` slots."""
        slots = [endpoint.slots for endpoint in self.watch.endpoints if not endpoint.draining]
        room = sum(number for number in slots if number is not None)
        # If all endpoints declare their room, raise now. Otherwise the join would fail at the last worlds.
        if None not in slots and room < num_envs:
            raise SettingError(
                f"expected endpoints with room for num_envs={num_envs} slots, got room for {room} on {len(slots)} of "
                f"{self.title}; start more servers, or ask for fewer slots"
            )

    def handle(self, key: str, event: EndpointEvent, now: float, why: str) -> str:
        """Feed an event to an endpoint's state machine, and log a change of its state with `why`.

        Returns:
            How the endpoint came up after trouble, such as `answers again`; empty if it did not.
        """
        record = self._records[key]
        before, first = record.state, not record.was_up
        # The first success does not count as a change.
        changed = record.handle(event, now, self._pause) and (before, record.state) != (_S.UNTRIED, _S.UP)
        came_up = changed and record.state is EndpointState.UP
        back = change_of(before, record.state, first=first) if came_up else ""
        if changed and before in _WELL and not back:
            # There is one server less. Try drained endpoints now: one may be back before its pause is over.
            for other in self._records.values():
                if other is not record:
                    other.hurry(now)
        # With a list, each slot logs its own losses and moves.
        if self.watch.pinned:
            return back
        # A replaced server may have a new URL, so read the directory early.
        if event in _TROUBLE:
            self.watch.poll(now, soon=True)
        # Log one line for each change, however many slots saw it. Good news needs no reason.
        if back:
            self._log.warning("%s %s", shown_url(key), back)
        elif record.state is EndpointState.ENDED:
            # Only info: the drain itself was logged as a warning.
            if changed:
                self._log.info("%s %s", shown_url(key), change_of(before, record.state))
        elif changed:
            url = shown_url(key)
            said = why.removeprefix(url).removeprefix(":").lstrip()  # the error's text begins with the same URL
            text = change_of(before, record.state)
            self._log.warning("%s %s%s", url, text, f": {said}" if said else "")
        return back

    def _pause(self, failures: int) -> float:
        return pause(failures + (_PAUSES_SKIPPED if self.watch.pinned else 0))
