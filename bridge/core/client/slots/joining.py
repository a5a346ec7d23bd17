"""How a vector environment joins its worlds at first: of a list of URLs, or of a directory."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

from bridge.core.back_off import ServerWait
from bridge.core.client.endpoints import (
    Directory,
    DnsDirectory,
    Endpoint,
    EndpointWatch,
    ListedEndpoint,
    as_directory,
)
from bridge.core.client.options import VectorOptions, checked_urls
from bridge.core.client.slots.endpoint import Load, Placement
from bridge.core.client.slots.members import SlotMembers
from bridge.core.client.slots.slot import LinkState, Member, Reason, StandBy
from bridge.core.client.slots.vector_pool import VectorPool
from bridge.core.client.world.join_sequence import choose_lanes
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.logs import LOOK, SafeLog, tell
from bridge.errors import Code, ConnectError, RefusedError, RemoteError, RemoteTimeoutError, SettingError, shown_url

__all__ = ["join"]

# Seconds between two looks for servers that are silent, and between two lines of the log.
_LOOK, _LOG = 0.2, 5.0
# Endpoints that are asked at a time, where others did not answer.
_AT_ONCE = 64

_log = SafeLog(__name__)


def join(urls: str | Sequence[str] | Directory, options: VectorOptions, *, waits_for_all: bool = False) -> VectorPool:
    """Return a pool whose worlds are joined, and whose spares are being connected.

    Args:
        urls: As of `make_vec_remote`.
        options: What it was given beside.
        waits_for_all: Whether whoever steps the slots waits for all of them, so that lanes may stand for worlds.

    Raises:
        AddressError: A URL cannot be read.
        SettingError: The worlds differ in their spaces, do not add up to `num_envs`, or have no room; with `lanes=True`
            there cannot be one world for all slots.
        RemoteError: What cannot be joined, and nothing stands in for it.
    """
    num_envs, wait = options.num_envs, ServerWait(options.wait_for_server)
    watch: EndpointWatch | None = None
    directory, requests = as_directory(urls), list[WorldRequest]()
    spares = [options.request(url) for url in options.spares]
    if directory is None:
        requests = [options.request(url, name) for url, name in _with_agents(checked_urls(urls), options.agent)]
    has_directory, has_spares = directory is not None, bool(spares)
    of_all = choose_lanes(
        options.lanes, num_envs, requests, directory=has_directory, spares=has_spares, waits_for_all=waits_for_all
    )
    if directory is None:
        if of_all is not None and num_envs is not None:
            # What stands by for a world of lanes has as many.
            requests, spares = [of_all], [request.as_lanes(num_envs) for request in spares]
        elif num_envs is not None:
            requests, spares = requests[:num_envs], requests[num_envs:] + spares
        placement = Placement.of_list(requests)
    elif spares:
        raise SettingError(
            f"expected no spares with a directory, got {len(spares)}; add these URLs to the directory: its servers "
            "that are not needed stand by"
        )
    else:
        name = directory.server_name if isinstance(directory, DnsDirectory) else None
        watch = EndpointWatch(directory)
        placement = Placement(watch, partial(_request_at, options=options, server_name=name))
    pool = VectorPool(options.timeout, placement, options.connect_timeout)
    members = pool.members
    # Before the first connection: it asks the server whether it drains only where slots can move.
    if directory is not None or spares:
        pool.enable_moves()
    try:
        # Else the keepalive thread would take the answers to the join, as it does between calls.
        with pool.turn:
            if watch is None:
                _join_list(pool, requests, num_envs, wait, one_world=options.lanes is True)
            else:
                _join_directory(pool, watch, num_envs, wait)
            for request in spares:
                listed = ListedEndpoint.of(request)
                pool.connect(members.add(request, listed, stands_by=StandBy(Reason.NAMED)))
    # KeyboardInterrupt too: without an object there is nobody to close the connections.
    except BaseException:
        pool.close_all(0.5)
        raise
    return pool


def _request_at(endpoint: Endpoint, *, options: VectorOptions, server_name: str | None) -> WorldRequest:
    return options.request(endpoint.url, server_name=server_name)


def _with_agents(urls: list[str], agent: str | Sequence[str] | None) -> list[tuple[str, str | None]]:
    """Return each URL with the agent to join it as, or raise SettingError where they do not fit."""
    names = [agent] * len(urls) if agent is None or isinstance(agent, str) else list(agent)
    if len(urls) == 1:
        urls = urls * len(names)
    if not names or len(names) != len(urls):
        raise SettingError(f"expected agent to have a name for each of {len(urls)} URLs, got {agent!r:.80}")
    return list(zip(urls, names, strict=True))


def _join_list(
    pool: VectorPool, requests: Sequence[WorldRequest], num_envs: int | None, wait: ServerWait, *, one_world: bool
) -> None:
    """Join a world for each request, all at once, and further ones where `num_envs` asks for more slots.

    Args:
        pool: Gets them.
        requests: The worlds.
        num_envs: The number of slots; None: those of the requests.
        one_world: Whether the user wants one world for all slots.

    Raises:
        SettingError: The worlds differ in their spaces, or do not add up to `num_envs`.
        RemoteError: One cannot be joined.
    """
    places = {(request.address.scheme, request.address.target) for request in requests}
    members = pool.members
    # Set before the first remote is made: it decides whether remotes open a socket each, or share one.
    members.shared = len(places) < max(len(requests), num_envs or 0)
    _Join(pool, wait, _Listed(members, requests)).run()
    if num_envs is None:
        return
    # How many lanes a world has is known only now, and with it how many worlds make up `num_envs`.
    have = len(members.at)
    if have == num_envs and len(requests) == 1:
        members.shared = False  # there is no other one
    elif one_world:
        # Another server than ours may know no such setting, and make what it always makes.
        raise SettingError(
            f"lanes=True: expected {requests[0].address.url} to make a world of {num_envs} lanes, got one "
            f"that fills {have} of the slots; leave lanes out"
        )
    if have < num_envs and (num_envs - have) % have == 0:
        further = [dataclasses.replace(request, lanes_if_alike=None) for request in requests]  # it has answered
        _Join(pool, wait, _Listed(members, further * ((num_envs - have) // have))).run()
    elif have != num_envs:
        lanes = ", ".join(f"{member.remote.url} ({member.lanes})" for member in members.filling)
        raise SettingError(
            f"num_envs={num_envs} is no multiple of the {have} slots that the URLs give: {lanes}. "
            "A world of N lanes fills N slots"
        )


def _join_directory(pool: VectorPool, watch: EndpointWatch, num_envs: int | None, wait: ServerWait) -> None:
    """Join worlds spread over the endpoints of a directory.

    Args:
        pool: Gets them.
        watch: Reads the directory.
        num_envs: The number of slots; None: a world for each endpoint.
        wait: Says how long servers are waited for that are not up, or not in the directory yet.

    Raises:
        SettingError: The endpoints have too little room, or `num_envs` is no multiple of a world's lanes.
        RemoteError: No endpoint can be joined.
    """
    # The only reading that is waited for: it has to say which endpoints there are.
    count, members, placement = len(_first_endpoints(watch, pool.timeout, wait)), pool.members, pool.placement
    if num_envs is not None:
        placement.check_room(num_envs)
        members.shared = num_envs > count
    _Join(pool, wait, _Search(pool, num_envs, count, wait)).run()


def _first_endpoints(watch: EndpointWatch, timeout: float, wait: ServerWait) -> Sequence[Endpoint]:
    """Return the endpoints of the first reading of a directory that has some."""
    while True:
        try:
            return watch.wait(time.monotonic(), timeout)
        except RemoteError as error:
            pause = wait.pause_after(error)
        except SettingError as error:
            # A file that is not there, a name that nobody knows, or an empty list; not one that cannot be read.
            if not (watch.may_fill and wait.lasts):
                raise
            text = str(error).removeprefix(f"the directory {watch.title} ")
            pause = wait.pause_after(ConnectError(watch.title, text, unavailable=True))
        time.sleep(pause)


class _Join:
    """Joins the first worlds, and tells a person at a terminal, and more seldom the log, what is waited for.

    A world that is pinned is joined at its own server or, where that is silent or not up, where another one has joined.
    Any other one is joined anywhere: what cannot be joined at one endpoint is dropped, and others are asked.

    Args:
        pool: Gets them.
        wait: Says how long servers are waited for that are not up.
        search: Says which endpoints are asked, and when there are enough worlds.
    """

    def __init__(self, pool: VectorPool, wait: ServerWait, search: _Listed | _Search) -> None:
        self._pool, self._members, self._wait, self._search = pool, pool.members, wait, search
        self._missing: dict[Member, None] = {}
        """The members that are being connected."""
        self._later: dict[Member, float] = {}
        """The members whose servers are not up, each with the time of its next attempt; monotonic seconds."""

    def run(self) -> None:
        """Join worlds, and give them their slots."""
        pool, members, missing = self._pool, self._members, self._missing
        now = time.monotonic()
        tell_at, log_at = now + LOOK, now + _LOG
        while self._begin_more(now):
            # Not `pool.gather`: it would let the policy connect again what fails, and here a failure is raised.
            pool.drain(min(LOOK, _LOOK))
            now = time.monotonic()
            if self._search.asks:
                for member in list(missing):
                    if now > member.silent_until and member.remote.asking:
                        self._ask_nothing(member)
            # Each world has its own deadline: a server that stands in for a silent one has all of `timeout`, too.
            late = [member for member in missing if now > self._deadline(member)]
            for member in [member for member in missing if now > member.silent_until and member.remote.silent]:
                if self._pass_over(member) and member in late:
                    late.remove(member)
            # A list, because the loop takes members out of `missing`.
            for member in [member for member in missing if member.link is not LinkState.CONNECTING]:
                if member not in missing:  # it was dropped, because one that was joined before has more lanes
                    continue
                del missing[member]
                if member.link is LinkState.OFFLINE and member.error is not None:
                    self._on_failed(member, member.error)
                else:
                    self._on_joined(member)
            late = [member for member in late if member in missing]
            if late:
                urls = ", ".join(dict.fromkeys(member.remote.url for member in late))
                raise RemoteTimeoutError(urls, late[0].remote.late("to join a world", pool.timeout).reason)
            if missing and now >= tell_at:
                have, wanted = len(members.filling) - len(missing), self._search.wanted
                tell_at = now + LOOK
                text = f"waiting for {next(iter(missing)).remote.url}; {have} of {wanted} worlds joined"
                tell(text)
                if now >= log_at:
                    log_at = now + _LOG
                    _log.warning("%s", text)
        # At the end, because slots are numbered in the order of the requests, not in that of the answers.
        members.place()

    def _begin_more(self, now: float) -> bool:
        """Connect further worlds, if they are wanted; return whether there is anything to wait for."""
        for member in [member for member, due in self._later.items() if now >= due]:
            del self._later[member]
            # One that answers is enough: the slots go home once their own server is up.
            if not self._stand_in(member):
                self._pool.connect(member)
            self._missing[member] = None
        for request, endpoint in self._search.next_worlds(now):
            member = self._members.add(request, endpoint, lanes=self._search.lanes or 1)
            self._missing[self._pool.connect(member)] = None
        return self._search.goes_on(now, asking=bool(self._missing or self._later))

    def _on_joined(self, member: Member) -> None:
        """Count a world that was joined; with the first of a directory, drop those that are too many."""
        # It was not up before. Now it is well, and may stand in for others.
        member.failures = 0
        if self._search.joined(member):
            # Others were asked while nobody knew that a world has several lanes: fewer worlds are enough.
            for other in list(self._missing)[self._search.wanted - 1 :]:
                del self._missing[other]
                self._members.drop(other)

    def _on_failed(self, member: Member, error: RemoteError) -> None:
        """Go on without a world, or raise why it cannot be joined."""
        if member.home is None:
            self._search.failed(error)
            self._members.drop(member)
            return
        # A server of another package may have ended the stream at the question. One that is not there has not, and one
        # that wants a token wants it without the question, too.
        unanswered = not isinstance(error, ConnectError) and member.remote.asking
        if unanswered and not (isinstance(error, RefusedError) and error.code == Code.UNAUTHENTICATED):
            self._ask_nothing(member)
        else:
            self._later[member] = time.monotonic() + self._wait.pause_after(error)

    def _ask_nothing(self, member: Member) -> None:
        """Connect again, without a question: another server than ours may have ended the stream at it, or be silent."""
        again = dataclasses.replace(member.remote.request, lanes_if_alike=None)
        self._missing[self._pool.connect(member, again)] = None

    def _deadline(self, member: Member) -> float:
        """Return the time from which on a world is late, monotonic seconds."""
        # Separate worlds are joined in two turns, the first and then all others: lanes get as much time.
        return member.deadline + (self._pool.timeout if member.remote.agreed_on_lanes else 0.0)

    def _pass_over(self, member: Member) -> bool:
        """Leave a silent server, where others can take its slots; return whether it was left."""
        # It may be at any endpoint, so nobody waits for `timeout`.
        if member.home is None:
            self._pool.give_up(member)
            return True
        # Who stands in does so once: there is no end to the servers that might.
        return not member.is_displaced and self._stand_in(member)

    def _stand_in(self, member: Member) -> bool:
        """Join a world in a member's place where another one of its kind has joined; return whether there is one."""
        url, connected = member.remote.url, member.remote.connected
        endpoint = self._pool.stand_in(member)
        if endpoint is None:
            return False
        # A black hole, such as a firewall that drops packets, gives no error: without this, the user waits `timeout`
        # seconds for a training that the other servers could carry.
        why = f"has not replied within {self._pool.patience:g} s" if connected else "does not answer"
        _log.warning("%s %s: %s stands in for it", url, why, shown_url(endpoint.url))
        return True


class _Listed:
    """Asks each endpoint of a list for a world, all at once.

    Args:
        members: The worlds that there are.
        requests: The further ones, in the order of their slots.
    """

    lanes = 0
    """Those of each world: not known, and of each its own."""

    def __init__(self, members: SlotMembers, requests: Sequence[WorldRequest]) -> None:
        self._unasked = list(requests)
        self.wanted = len(members.filling) + len(requests)
        """The number of worlds."""
        self.asks = any(request.lanes_if_alike for request in requests)
        """True if a server is asked which form of world to make."""

    def next_worlds(self, now: float) -> list[tuple[WorldRequest, Endpoint]]:
        """Return the worlds that are asked for now, and where: all of them at first, and then none."""
        requests, self._unasked = self._unasked, []
        return [(request, ListedEndpoint.of(request)) for request in requests]

    def goes_on(self, now: float, *, asking: bool) -> bool:
        """Tell whether worlds are still to be joined: those that are asked for, now or later."""
        return asking

    def joined(self, member: Member) -> bool:
        """Return False: each world of a list is needed."""
        return False

    def failed(self, error: RemoteError) -> None:
        """Do nothing: a world that is pinned is tried again where it belongs."""


class _Search:
    """Says which endpoints of a directory are asked for worlds, until there are enough.

    Args:
        pool: Gets the worlds.
        num_envs: The number of slots; None: a world for each endpoint.
        count: The number of endpoints.
        wait: Says how long servers are waited for that are not up.
    """

    def __init__(self, pool: VectorPool, num_envs: int | None, count: int, wait: ServerWait) -> None:
        self._pool, self._members, self._placement, self._wait = pool, pool.members, pool.placement, wait
        self._num_envs, self._count = num_envs, count
        self.wanted = num_envs or count
        """The number of worlds."""
        self.lanes = 0
        """Those of each world; 0: not known."""
        self.asks = False
        """False: in a directory each slot has a world."""
        self._error: RemoteError | None = None
        """Why one could not be joined: what no waiting mends, if there is such an error, else the last."""
        self._failures = 0
        self._asked: set[str] = set()
        """The keys of the endpoints that were asked."""
        self._until = math.inf
        """The time until which endpoints that are silent are asked again; monotonic seconds."""
        self._look_at = 0.0
        """The time of the next look for endpoints that are up, while none is; monotonic seconds."""

    def next_worlds(self, now: float) -> list[tuple[WorldRequest, Endpoint]]:
        """Return the worlds that are asked for now, and where."""
        placement, filling = self._placement, self._members.filling
        # Until one was joined nobody knows how many lanes a world has. Who has met a dead endpoint asks twice as many
        # at a time, so that a list of thousands is gone through in moments.
        most = self.wanted if self.lanes else min(2**self._failures, _AT_ONCE, self._count)
        if len(filling) >= most:
            return []
        load, proven = Load(filling), self._failures > 0
        # While nothing is known of them, one look for all of them.
        found = [] if self.lanes else placement.choose_untried(load, most - len(filling), now)
        # A directory may list several environments: each gets its share of the worlds, whatever the others lack.
        have, nowhere = Counter([*(member.kind for member in filling), *(endpoint.kind for endpoint in found)]), set()
        for kind in placement.kinds(self.wanted):
            if have[kind] > 0:
                have[kind] -= 1
            elif len(filling) + len(found) < most and kind not in nowhere:
                endpoint = placement.choose(load, self.lanes or 1, now, self._pool.patience, kind, proven=proven)
                if endpoint is None:
                    nowhere.add(kind)
                else:
                    found.append(endpoint)
        for endpoint in found:
            # One that was not asked yet, or that answers, gets its own time, whatever the others took. Those that are
            # silent are asked again for no longer than that: else a start with none but them would never end.
            if endpoint.key not in self._asked or placement.is_well(endpoint.key):
                self._asked.add(endpoint.key)
                self._until = now + self._pool.timeout
        return [(placement.request_for(endpoint), endpoint) for endpoint in found]

    def goes_on(self, now: float, *, asking: bool) -> bool:
        """Tell whether worlds are still to be joined.

        Args:
            now: Monotonic seconds.
            asking: Whether endpoints are being asked.

        Raises:
            RemoteError: No endpoint can be joined.
            SettingError: None has room for another world.
        """
        have, placement = len(self._members.filling), self._placement
        if self.lanes and not asking and have >= self.wanted:
            return False
        if not asking and self._error is not None and self._error.unavailable:
            # All are away: who comes is in the directory, or will be.
            placement.poll(now, soon=True)
            self._asked.clear()
            if now >= self._look_at:
                self._look_at = now + self._wait.pause_after(self._error)
        elif not asking or (now > self._until and self._error is not None):
            raise self._error or SettingError(
                f"no endpoint of {placement.title} has room for another world, after {have} worlds"
            )
        return True

    def joined(self, member: Member) -> bool:
        """Count a world that was joined; return whether it was the first, from which the number of lanes is known.

        Raises:
            SettingError: `num_envs` is no multiple of its lanes.
        """
        self._until = time.monotonic() + self._pool.timeout
        if self.lanes:
            return False
        self.lanes = member.remote.slots
        if self._num_envs is not None:
            self.wanted, rest = divmod(self._num_envs, self.lanes)
            if rest:
                raise SettingError(f"num_envs={self._num_envs} is no multiple of the {self.lanes} lanes of each world")
        return True

    def failed(self, error: RemoteError) -> None:
        """Count a world that could not be joined, which is dropped."""
        if self._error is None or self._error.unavailable or not error.unavailable:
            self._error = error
        self._failures += 1
