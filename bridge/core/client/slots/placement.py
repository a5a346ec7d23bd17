"""On which endpoint of a directory each world of a vector environment is."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bridge.core.back_off import pause
from bridge.core.client.endpoints import Endpoint, EndpointWatch, Kind
from bridge.core.client.slots.endpoint import EndpointEvent, EndpointRecord, EndpointState, change_of
from bridge.core.client.slots.slot import Member
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.logs import LimitedLog
from bridge.errors import SettingError, shown_url

__all__ = ["Load", "Placement"]


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
        for member in members:
            if member.endpoint is not None:
                self.slots[member.endpoint] += member.lanes
                if member.remote.draining:
                    self.draining.add(member.remote.url)


class Placement:
    """Chooses endpoints: of those that are well the one with the fewest slots, and the last to fail last.

    Args:
        watch: Knows the endpoints.
        request_for: Makes the request for a world at a URL.
    """

    def __init__(self, watch: EndpointWatch, request_for: Callable[[str], WorldRequest]) -> None:
        self.watch = watch
        self.request_for = request_for
        self._records: defaultdict[str, EndpointRecord] = defaultdict(EndpointRecord)
        # Of thousands of dead addresses nobody reads a line each.
        self._log = LimitedLog(__name__, burst=10, rate=1 / 30)

    def choose(
        self,
        load: Load,
        lanes: int,
        now: float,
        patience: float,
        kind: Kind | None,
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
            kind: The kind of endpoint; None: any.
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

    def is_well(self, key: str | None) -> bool:
        """Tell whether nothing speaks against an endpoint."""
        return key is not None and not self._records[key].rank[0]

    def any_well(self, kind: Kind | None, but: str | None = None) -> bool:
        """Tell whether there is an endpoint of a kind that nothing speaks against, besides that with the key `but`."""
        return any(
            self.is_well(endpoint.key) and not endpoint.draining and kind in (None, endpoint.kind)
            for endpoint in self.watch.endpoints
            if endpoint.key != but
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
                f"{self.watch.directory!r}; start more servers, or ask for fewer slots"
            )

    def saw(self, key: str, event: EndpointEvent, now: float, why: str) -> None:
        """Feed an event to an endpoint's state machine; the log says a change of its state, and `why`."""
        record = self._records[key]
        before = record.state
        # A line for each change, whatever the number of slots that saw it; the first success is none.
        if record.handle(event, now, pause) and (before, record.state) != (EndpointState.UNTRIED, EndpointState.UP):
            change = change_of(before, record.state)
            # Good news needs no reason; the event behind it is our own word.
            if record.state is EndpointState.UP:
                self._log.warning("%s %s", shown_url(key), change)
            else:
                self._log.warning("%s %s: %s", shown_url(key), change, why)
