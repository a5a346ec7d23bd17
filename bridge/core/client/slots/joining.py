"""How a vector environment joins its first worlds, from a list of URLs or from a directory."""

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

# Seconds between two checks for silent servers, and between two log lines.
_LOOK, _LOG = 0.2, 5.0
# The most endpoints that are tried at a time after others did not answer.
_AT_ONCE = 64

_log = SafeLog(__name__)


def join(urls: str | Sequence[str] | Directory, options: VectorOptions, *, waits_for_all: bool = False) -> VectorPool:
    """Return a pool whose worlds are joined and whose spares are connecting.

    Args:
        urls: The URLs of `make_vec_remote`.
        options: The other arguments of `make_vec_remote`.
        waits_for_all: True if each step waits for all slots, so that one world of lanes may replace separate worlds.

    Raises:
        AddressError: A URL cannot be read.
        SettingError: The worlds differ in their spaces, do not add up to `num_envs`, or have no room; or with
            `lanes=True` there cannot be one world for all slots.
        RemoteError: A world cannot be joined, and there is no substitute.
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
            # A spare for a world of lanes must have as many lanes.
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
    # Before the first connection: connections watch for a drain only if slots can move.
    if directory is not None or spares:
        pool.enable_moves()
    try:
        # Otherwise the keepalive thread would take the answers to the join, as it does between calls.
        with pool.turn:
            if watch is None:
                _join_list(pool, requests, num_envs, wait, one_world=options.lanes is True)
            else:
                _join_directory(pool, watch, num_envs, wait)
            for request in spares:
                listed = ListedEndpoint.of(request)
                pool.connect(members.add(request, listed, stands_by=StandBy(Reason.NAMED)))
    # Includes KeyboardInterrupt: the caller gets no object with which to close the connections.
    except BaseException:
        pool.close_all(0.5)
        raise
    return pool


def _request_at(endpoint: Endpoint, *, options: VectorOptions, server_name: str | None) -> WorldRequest:
    return options.request(endpoint.url, server_name=server_name)


def _with_agents(urls: list[str], agent: str | Sequence[str] | None) -> list[tuple[str, str | None]]:
    """Return pairs of a URL and the agent to join as; raise SettingError if their numbers differ."""
    names = [agent] * len(urls) if agent is None or isinstance(agent, str) else list(agent)
    if len(urls) == 1:
        urls = urls * len(names)
    if not names or len(names) != len(urls):
        raise SettingError(f"expected agent to have a name for each of {len(urls)} URLs, got {agent!r:.80}")
    return list(zip(urls, names, strict=True))


def _join_list(
    pool: VectorPool, requests: Sequence[WorldRequest], num_envs: int | None, wait: ServerWait, *, one_world: bool
) -> None:
    """Join a world for each request, all at once, and then further worlds until there are `num_envs` slots.

    Args:
        pool: The pool that the worlds are added to.
        requests: The worlds.
        num_envs: The number of slots; None: the slots of the requested worlds.
        one_world: True if the user wants one world for all slots.

    Raises:
        SettingError: The worlds differ in their spaces, or do not add up to `num_envs`.
        RemoteError: A world cannot be joined.
    """
    places = {(request.address.scheme, request.address.target) for request in requests}
    members = pool.members
    # Set this before the first remote is made: it decides whether remotes share a socket.
    members.shared = len(places) < max(len(requests), num_envs or 0)
    _Join(pool, wait, _Listed(members, requests)).run()
    if num_envs is None:
        return
    # Only now we know how many lanes a world has, and so how many worlds `num_envs` needs.
    have = len(members.at)
    if have == num_envs and len(requests) == 1:
        members.shared = False  # there is only one world
    elif one_world:
        # A server of another package may ignore the setting.
        raise SettingError(
            f"lanes=True: expected {requests[0].address.url} to make a world of {num_envs} lanes, got one "
            f"that fills {have} of the slots; leave lanes out"
        )
    if have < num_envs and (num_envs - have) % have == 0:
        further = [
            dataclasses.replace(request, lanes_if_alike=None) for request in requests
        ]  # the server has answered this question
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
        pool: The pool that the worlds are added to.
        watch: Reads the directory.
        num_envs: The number of slots; None: a world for each endpoint.
        wait: How long to wait for servers that are not up, or not in the directory yet.

    Raises:
        SettingError: The endpoints have too little room, or `num_envs` is no multiple of a world's lanes.
        RemoteError: No endpoint can be joined.
    """
    # Only this first reading of the directory blocks.
    count, members, placement = len(_first_endpoints(watch, pool.timeout, wait)), pool.members, pool.placement
    if num_envs is not None:
        placement.check_room(num_envs)
        members.shared = num_envs > count
    _Join(pool, wait, _Search(pool, num_envs, count, wait)).run()


def _first_endpoints(watch: EndpointWatch, timeout: float, wait: ServerWait) -> Sequence[Endpoint]:
    """Read a directory until it has endpoints; return them."""
    while True:
        try:
            return watch.wait(time.monotonic(), timeout)
        except RemoteError as error:
            pause = wait.pause_after(error)
        except SettingError as error:
            # Wait for a missing file, an unknown name or an empty list, but not for an unreadable one.
            if not (watch.may_fill and wait.lasts):
                raise
            text = str(error).removeprefix(f"the directory {watch.title} ")
            pause = wait.pause_after(ConnectError(watch.title, text, unavailable=True))
        time.sleep(pause)


class _Join:
    """Joins the first worlds, and reports what it waits for: often at a terminal, less often in the log.

    A pinned world is joined at its own server or, if that is silent or not up, at a server where another world has
    joined. Other worlds are joined anywhere: after a failure the world is dropped, and other endpoints are tried.

    Args:
        pool: The pool that the worlds are added to.
        wait: How long to wait for servers that are not up.
        search: Decides which endpoints to try, and when there are enough worlds.
    """

    def __init__(self, pool: VectorPool, wait: ServerWait, search: _Listed | _Search) -> None:
        self._pool, self._members, self._wait, self._search = pool, pool.members, wait, search
        self._missing: dict[Member, None] = {}
        """The members that are connecting."""
        self._later: dict[Member, float] = {}
        """The members whose servers are not up, with the time of the next attempt, in monotonic seconds."""

    def run(self) -> None:
        """Join worlds, and assign their slots."""
        pool, members, missing = self._pool, self._members, self._missing
        now = time.monotonic()
        tell_at, log_at = now + LOOK, now + _LOG
        while self._begin_more(now):
            # Do not use `pool.gather`, which retries failures by the policy. Here a failure is raised.
            pool.drain(min(LOOK, _LOOK))
            now = time.monotonic()
            if self._search.asks:
                for member in list(missing):
                    if now > member.silent_until and member.remote.asking:
                        self._ask_nothing(member)
            # Each world has its own deadline, so that a substitute for a silent server has the full `timeout` too.
            late = [member for member in missing if now > self._deadline(member)]
            for member in [member for member in missing if now > member.silent_until and member.remote.silent]:
                if self._pass_over(member) and member in late:
                    late.remove(member)
            # A list, because the loop removes members from `missing`.
            for member in [member for member in missing if member.link is not LinkState.CONNECTING]:
                if member not in missing:  # it was dropped, because an earlier world turned out to have several lanes
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
        # Only now, because slots are numbered in the order of the requests, not of the answers.
        members.place()

    def _begin_more(self, now: float) -> bool:
        """Connect further worlds if they are needed; return True if there is something to wait for."""
        for member in [member for member, due in self._later.items() if now >= due]:
            del self._later[member]
            # One working server is enough: the slots move home once their own server is up.
            if not self._stand_in(member):
                self._pool.connect(member)
            self._missing[member] = None
        for request, endpoint in self._search.next_worlds(now):
            member = self._members.add(request, endpoint, lanes=self._search.lanes or 1)
            self._missing[self._pool.connect(member)] = None
        return self._search.goes_on(now, asking=bool(self._missing or self._later))

    def _on_joined(self, member: Member) -> None:
        """Count a joined world. After the first world of a directory, drop worlds that are no longer needed."""
        # Its server is up now, and may be a substitute for others.
        member.failures = 0
        if self._search.joined(member):
            # Others were tried before we knew that a world has several lanes. Fewer worlds are enough.
            for other in list(self._missing)[self._search.wanted - 1 :]:
                del self._missing[other]
                self._members.drop(other)

    def _on_failed(self, member: Member, error: RemoteError) -> None:
        """Handle a failed attempt: try again later or elsewhere, or raise the error."""
        if member.home is None:
            self._search.failed(error)
            self._members.drop(member)
            return
        # A server of another package may have ended the stream because of our question about lanes. A refused
        # connection or a missing token has another cause.
        unanswered = not isinstance(error, ConnectError) and member.remote.asking
        if unanswered and not (isinstance(error, RefusedError) and error.code == Code.UNAUTHENTICATED):
            self._ask_nothing(member)
        else:
            self._later[member] = time.monotonic() + self._wait.pause_after(error)

    def _ask_nothing(self, member: Member) -> None:
        """Connect again without the question about lanes, to which a server of another package may not reply."""
        again = dataclasses.replace(member.remote.request, lanes_if_alike=None)
        self._missing[self._pool.connect(member, again)] = None

    def _deadline(self, member: Member) -> float:
        """Return the time from which on a world is late, in monotonic seconds."""
        # Separate worlds are joined in two rounds, first one and then all others. A world of lanes gets as much time.
        return member.deadline + (self._pool.timeout if member.remote.agreed_on_lanes else 0.0)

    def _pass_over(self, member: Member) -> bool:
        """Leave a silent server if another one can take its slots; return True if it was left."""
        # An unpinned world may go to any endpoint, so do not wait for `timeout`.
        if member.home is None:
            self._pool.give_up(member)
            return True
        # Use only one substitute for each server: otherwise this would never end.
        return not member.is_displaced and self._stand_in(member)

    def _stand_in(self, member: Member) -> bool:
        """Join a member's world at a server where another one of its kind has joined; return False if there is none."""
        url, connected = member.remote.url, member.remote.connected
        endpoint = self._pool.stand_in(member)
        if endpoint is None:
            return False
        # A black hole, such as a firewall that drops packets, gives no error. Without this, the user would wait for
        # `timeout` seconds, although the other servers could carry the training.
        why = f"has not replied within {self._pool.patience:g} s" if connected else "does not answer"
        _log.warning("%s %s: %s stands in for it", url, why, shown_url(endpoint.url))
        return True


class _Listed:
    """Tries each endpoint of a list, all at once.

    Args:
        members: The existing worlds.
        requests: The requests of further worlds, in the order of their slots.
    """

    lanes = 0
    """The lanes of each world; 0: unknown, and each world may have a different number."""

    def __init__(self, members: SlotMembers, requests: Sequence[WorldRequest]) -> None:
        self._unasked = list(requests)
        self.wanted = len(members.filling) + len(requests)
        """The number of worlds that are needed."""
        self.asks = any(request.lanes_if_alike for request in requests)
        """True if a server is asked whether to make lanes or separate worlds."""

    def next_worlds(self, now: float) -> list[tuple[WorldRequest, Endpoint]]:
        """Return the worlds to join now, with their endpoints: all of them at the first call."""
        requests, self._unasked = self._unasked, []
        return [(request, ListedEndpoint.of(request)) for request in requests]

    def goes_on(self, now: float, *, asking: bool) -> bool:
        """Return True while worlds are still being joined, or will be tried again."""
        return asking

    def joined(self, member: Member) -> bool:
        """Return False: all worlds of a list are needed."""
        return False

    def failed(self, error: RemoteError) -> None:
        """Do nothing: a pinned world is tried again at its own server."""


class _Search:
    """Decides which endpoints of a directory to try, until there are enough worlds.

    Args:
        pool: The pool that the worlds are added to.
        num_envs: The number of slots; None: a world for each endpoint.
        count: The number of endpoints.
        wait: How long to wait for servers that are not up.
    """

    def __init__(self, pool: VectorPool, num_envs: int | None, count: int, wait: ServerWait) -> None:
        self._pool, self._members, self._placement, self._wait = pool, pool.members, pool.placement, wait
        self._num_envs, self._count = num_envs, count
        self.wanted = num_envs or count
        """The number of worlds that are needed."""
        self.lanes = 0
        """The lanes of each world; 0: unknown."""
        self.asks = False
        """False: with a directory each slot has its own world."""
        self._error: RemoteError | None = None
        """The error to raise: the last permanent one or, if there is none, the last one."""
        self._failures = 0
        self._asked: set[str] = set()
        """The keys of the endpoints that were tried."""
        self._until = math.inf
        """The time until which silent endpoints are tried again, in monotonic seconds."""
        self._look_at = 0.0
        """The time of the next report while no endpoint is up, in monotonic seconds."""

    def next_worlds(self, now: float) -> list[tuple[WorldRequest, Endpoint]]:
        """Return the worlds to join now, with their endpoints."""
        placement, filling = self._placement, self._members.filling
        # Before the first join we do not know how many lanes a world has, so start with one. After each failure try
        # twice as many at a time, so that thousands of dead endpoints take only moments.
        most = self.wanted if self.lanes else min(2**self._failures, _AT_ONCE, self._count)
        if len(filling) >= most:
            return []
        load, proven = Load(filling), self._failures > 0
        # Fast path while nothing is known: choose untried endpoints in one pass.
        found = [] if self.lanes else placement.choose_untried(load, most - len(filling), now)
        # A directory may list several kinds of environments. Each kind gets its share of the worlds.
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
            # A new endpoint, or one without trouble, extends the time for all. Silent endpoints do not: if there were
            # only silent ones, the start would never end.
            if endpoint.key not in self._asked or placement.is_well(endpoint.key):
                self._asked.add(endpoint.key)
                self._until = now + self._pool.timeout
        return [(placement.request_for(endpoint), endpoint) for endpoint in found]

    def goes_on(self, now: float, *, asking: bool) -> bool:
        """Return True if worlds still have to be joined.

        Args:
            now: Monotonic seconds.
            asking: True if endpoints are being tried.

        Raises:
            RemoteError: No endpoint can be joined.
            SettingError: No endpoint has room for another world.
        """
        have, placement = len(self._members.filling), self._placement
        if self.lanes and not asking and have >= self.wanted:
            return False
        if not asking and self._error is not None and self._error.unavailable:
            # All endpoints are unavailable: wait for one of them, or for new ones in the directory.
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
        """Count a joined world; return True for the first one, which shows the number of lanes.

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
        """Count a world that could not be joined."""
        if self._error is None or self._error.unavailable or not error.unavailable:
            self._error = error
        self._failures += 1
