"""How a vector environment joins its worlds at first: of a list of URLs, or of a directory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from bridge.client.endpoints import Endpoint
from bridge.client.slots.placement import Load, Placement
from bridge.client.slots.slot import Member
from bridge.client.slots.vector_pool import VectorPool
from bridge.client.world.events import Event, Joined, Lost
from bridge.client.world.world_request import WorldRequest
from bridge.errors import RemoteError, RemoteTimeoutError, SettingError
from bridge.logs import SafeLog
from bridge.progress import LOOK, tell

__all__ = ["join_directory", "join_urls"]

# Seconds between two looks for servers that are silent, and between two lines of the log.
_LOOK, _LOG = 0.2, 5.0
# Endpoints that are asked at a time, where others did not answer.
_AT_ONCE = 64

_log = SafeLog(__name__)


def join_urls(pool: VectorPool, requests: Sequence[WorldRequest], num_envs: int | None) -> None:
    """Join a world for each request, all at once, and further ones where `num_envs` asks for more slots.

    Raises:
        SettingError: The worlds differ in their spaces, or do not add up to `num_envs`.
        RemoteError: One cannot be joined.
    """
    _check_number(num_envs)
    places = {(request.address.scheme, request.address.target) for request in requests}
    pool.shared = len(places) < max(len(requests), num_envs or 0)
    _join(pool, requests)
    if num_envs is None:
        return
    have = pool.num_envs
    if have < num_envs and (num_envs - have) % have == 0:
        _join(pool, list(requests) * ((num_envs - have) // have))
    elif have != num_envs:
        lanes = ", ".join(f"{member.remote.url} ({member.lanes})" for member in pool.members)
        raise SettingError(
            f"num_envs={num_envs} is no multiple of the {have} slots that the URLs give: {lanes}. "
            "A world of N lanes fills N slots"
        )


def _join(pool: VectorPool, requests: Sequence[WorldRequest]) -> None:
    missing = dict.fromkeys([pool.add_member(request) for request in requests])
    began = now = time.monotonic()
    waiting = _WaitingWorld(began)
    while missing:
        event, source = pool.next_event(min(began + pool.timeout, now + min(LOOK, _LOOK)))
        now = time.monotonic()
        if source in missing:
            if isinstance(event, Joined):
                pool.joined(source)
                del missing[source]
            elif isinstance(event, Lost):
                raise event.error
        elif event is not None and source is not None:
            pool.handle(event, source)
        if now > began + pool.timeout:
            urls = ", ".join(dict.fromkeys(member.remote.url for member in missing))
            raise RemoteTimeoutError(urls, next(iter(missing)).remote.late("to join a world", pool.timeout).reason)
        waiting.tell(missing, f"{len(requests) - len(missing)} of {len(requests)} answered", now)
        for member in [member for member in missing if now > member.silent_until and member.remote.silent]:
            _let_stand_in(pool, member, missing)
    pool.place_members()


class _WaitingWorld:
    """Tells a person at a terminal, and more seldom the log, what is waited for.

    Args:
        now: When the wait begins.
    """

    def __init__(self, now: float) -> None:
        self._tell_at, self._log_at = now + LOOK, now + _LOG

    def tell(self, missing: Collection[Member], progress: str, now: float) -> None:
        """Tell it, where it is time."""
        if missing and now >= self._tell_at:
            self._tell_at = now + LOOK
            tell(text := f"waiting for {next(iter(missing)).remote.url}; {progress}")
            if now >= self._log_at:
                self._log_at = now + _LOG
                _log.warning("%s", text)


def _let_stand_in(pool: VectorPool, member: Member, missing: Collection[Member]) -> None:
    """Join a world of a server that answers in place of one that is silent, where their URLs ask for the same."""
    wanted = _what(member.remote.request)
    known = [other.remote.request for other in pool.members if other not in missing]
    same = [request for request in known if wanted is not None and _what(request) == wanted]
    if not same:
        return
    load = Counter(request.address.url for request in known)
    request = min(same, key=lambda request: load[request.address.url])
    _log.warning(
        "%s has not said anything within %g s: %s stands in for it",
        member.remote.url,
        pool.policy.connect_timeout,
        request.address.url,
    )
    pool.connect_instead(member, request)


def _what(request: WorldRequest) -> Any:
    """Return what a request asks for, wherever that is; None: a world that is there already, which is one place."""
    address = request.address
    return None if address.world is not None else (request.env_id, address.settings, request.agent)


def join_directory(pool: VectorPool, placement: Placement, num_envs: int | None) -> None:
    """Join worlds spread over the endpoints of a directory.

    Args:
        pool: Gets them.
        placement: Chooses the endpoints.
        num_envs: The number of slots; None: a world for each endpoint.

    Raises:
        SettingError: The endpoints have too little room, or `num_envs` is no multiple of a world's lanes.
        RemoteError: No endpoint can be joined.
    """
    _check_number(num_envs)
    pool.policy.placement = placement
    count = len(placement.watch.wait(time.monotonic(), pool.timeout))
    if num_envs is not None:
        placement.check_room(num_envs)
        pool.shared = num_envs > count
    _DirectoryJoin(pool, placement, num_envs, count).run()
    pool.place_members()


class _DirectoryJoin:
    """Joins worlds until there are enough: those of endpoints that are dead, full or silent are had elsewhere.

    Args:
        pool: Gets them.
        placement: Chooses the endpoints.
        num_envs: The number of slots; None: a world for each endpoint.
        count: The number of endpoints.
    """

    def __init__(self, pool: VectorPool, placement: Placement, num_envs: int | None, count: int) -> None:
        self._pool, self._placement = pool, placement
        self._num_envs, self._count = num_envs, count
        self._lanes = 0  # of a world; 0: not known
        self._wanted = num_envs or count
        self._missing: dict[Member, None] = {}
        self._error: RemoteError | None = None
        self._failures = 0

    def run(self) -> None:
        """Join them."""
        pool, missing = self._pool, self._missing
        began = now = time.monotonic()
        waiting = _WaitingWorld(began)
        while not self._lanes or missing or len(pool.members) < self._wanted:
            self._begin_more(now)
            event, source = pool.next_event(min(began + pool.timeout, now + min(LOOK, _LOOK)))
            while source is not None:
                self._take(event, source)
                event, source = pool.next_event(0.0)
            now = time.monotonic()
            if now > began + pool.timeout:
                raise next(iter(missing)).remote.late("to join a world", pool.timeout)
            joined = len(pool.members) - len(missing)
            waiting.tell(missing, f"{joined} of {self._wanted} worlds joined", now)
            for member in [member for member in missing if now > member.silent_until and member.remote.silent]:
                late = member.remote.late("to join a world", pool.policy.connect_timeout)
                self._failed(member, member.remote.give_up(late))

    def _take(self, event: Event | None, source: Member) -> None:
        if source not in self._missing:
            if event is not None:
                self._pool.handle(event, source)
        elif isinstance(event, Joined):
            self._joined(source)
        elif isinstance(event, Lost):
            self._failed(source, event)

    def _begin_more(self, now: float) -> None:
        pool, placement = self._pool, self._placement
        # Until one was joined nobody knows how many lanes a world has. Who has met a dead endpoint asks twice as many
        # at a time, so that a list of thousands is gone through in moments.
        most = self._wanted if self._lanes else min(2**self._failures, _AT_ONCE, self._count)
        if len(pool.members) < most:
            load, proven = Load(pool.members), self._failures > 0
            if not self._lanes:  # one look for all of them
                for untried in placement.choose_untried(load, most - len(pool.members), now):
                    self._add(untried)
            while len(pool.members) < most:
                endpoint = placement.choose(load, self._lanes or 1, now, pool.policy.connect_timeout, proven=proven)
                if endpoint is None:
                    break
                self._add(endpoint)
        if not self._missing:
            raise self._error or SettingError(
                f"no endpoint of {placement.watch.directory!r} has room for another world, after "
                f"{len(pool.members)} worlds"
            )

    def _add(self, endpoint: Endpoint) -> None:
        request = self._placement.request_for(endpoint.url)
        self._missing[self._pool.add_member(request, self._lanes or 1, endpoint.key)] = None

    def _joined(self, member: Member) -> None:
        self._pool.joined(member)
        del self._missing[member]
        if self._lanes:
            return
        lanes = self._lanes = member.remote.slots
        if self._num_envs is not None:
            self._wanted, rest = divmod(self._num_envs, lanes)
            if rest:
                raise SettingError(f"num_envs={self._num_envs} is no multiple of the {lanes} lanes of each world")
        for other in list(self._missing)[self._wanted - 1 :]:
            del self._missing[other]
            self._pool.drop(other)

    def _failed(self, member: Member, event: Lost) -> None:
        self._error = event.error
        self._failures += 1
        del self._missing[member]
        self._pool.lose(member, event)
        self._pool.drop(member)


def _check_number(num_envs: Any) -> None:
    if num_envs is not None and (not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 1):
        raise SettingError(f"expected num_envs to be a positive integer, got {num_envs!r}")
