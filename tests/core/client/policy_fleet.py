"""Fleets of servers in virtual time, whose slots go where the policy has them go.

No socket is opened: a fleet executes the policy's decisions, as `bridge.core.client.slots.vector_pool` does over the
network, and plays a training loop that goes on without lost slots.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from bridge import Endpoint
from bridge.core.client.slots.endpoint import Placement
from bridge.core.client.slots.policy import (
    AddSpare,
    Begin,
    Connect,
    Decision,
    Disconnect,
    DropSpare,
    EndpointEvent,
    GiveUp,
    SlotPolicy,
    TakeOver,
)
from bridge.core.client.slots.slot import (
    STEPPED,
    EpisodeEvent,
    EpisodeState,
    LinkEvent,
    LinkState,
    Member,
    Reason,
    StandBy,
)
from bridge.errors import (
    Code,
    ConnectError,
    ConnectionLostError,
    EnvironmentFailedError,
    RefusedError,
    RemoteError,
    RemoteTimeoutError,
)

TIMEOUT, CONNECT_TIMEOUT = 12.0, 3.0
TICK, LATENCY = 0.2, 0.02
EPISODE = 7
"""Steps of an episode."""
CALM = 60.0
"""Seconds after which everything that can run does: the longest pause is 15 s, and one attempt may take TIMEOUT."""


class Server:
    """A server as the policy's world has it."""

    def __init__(self, url: str, room: int) -> None:
        self.url, self.room = url, room
        self.up, self.hangs, self.fails, self.draining, self.listed = True, False, False, False, True
        self.worlds: set[Any] = set()

    @property
    def well(self) -> bool:
        return self.up and self.listed and not (self.hangs or self.fails or self.draining)


class Remote:
    """A remote as the policy sees it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url, self.silent, self.connected = server.url, True, True
        self.realtime, self.allowance = None, 0.0

    @property
    def draining(self) -> bool:
        return self.connected and not self.silent and self.server.draining and not self.server.hangs

    def salvage(self, message: Any) -> None:
        """Do nothing: nothing is in an answer."""

    def send_step(self, request: bytes) -> None:
        """Do nothing: the fleet answers."""


def request_for(endpoint: Endpoint) -> Any:
    """A request, as far as the fleet looks at it."""
    return SimpleNamespace(address=SimpleNamespace(url=endpoint.url))


def request_of(url: str, kind: Any = "environment", agent: str | None = None) -> Any:
    """A request for a URL of a list, as far as its placement looks at it."""
    return SimpleNamespace(kind=kind, agent=agent, address=SimpleNamespace(url=url))


class Fleet:
    """Servers, slots, a clock, and a loop that steps.

    Args:
        servers: Their number.
        slots: Their number.
        room: Worlds that each server takes.
        directory: Whether a directory lists the servers; else the user does, and each slot has a server of its own.
        spares: The number of further servers whose worlds the user has stand by.
    """

    def __init__(self, servers: int, slots: int, room: int, *, directory: bool = True, spares: int = 0) -> None:
        self.now = 0.0
        self.servers = [Server(f"grpc://s{number}:1", room) for number in range(servers + spares)]
        self.attempts: Counter[str] = Counter()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._steps: Counter[Member] = Counter()
        self.watch = SimpleNamespace(
            endpoints=(), draining=frozenset(), pinned=False, poll=lambda now, soon=False: None
        )
        self.list_servers()
        self.members: list[Member] = []
        self.spares: list[Member] = []
        self.directory = directory
        watch: Any = self.watch
        listed = [request_of(server.url) for server in self.servers[:servers]]
        placement = Placement(watch, request_for) if directory else Placement.of_list(listed)
        self.policy = SlotPolicy(self.members, self.spares, placement, TIMEOUT, CONNECT_TIMEOUT)
        if directory or spares:
            self.policy.look_at = 0.0
        for number in range(slots):
            server = self.servers[number % servers]
            self.members.append(self.member(server, number))
        for server in self.servers[servers:]:
            self.spares.append(self.member(server, 0, StandBy(Reason.NAMED)))

    def member(self, server: Server, start: int, stands_by: StandBy | None = None) -> Member:
        remote: Any = Remote(server)
        remote.connected = False
        endpoint: Any = Placement.of_list([request_of(server.url)]).watch.endpoints[0]
        home = None if self.directory else endpoint
        return Member(remote, home or Endpoint(server.url), start, 1, home, stands_by=stands_by)

    def list_servers(self) -> None:
        self.watch.endpoints = tuple(Endpoint(server.url) for server in self.servers if server.listed)

    def later(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._numbers), call))

    def of(self, member: Member) -> Any:
        return member.remote

    @property
    def joined(self) -> list[bool]:
        """Of each slot, whether it has a world."""
        return [member.link is LinkState.JOINED for member in self.members]

    def check(self) -> None:
        """Fail unless each step is accounted for, and each slot's episode says whether there is an answer."""
        for member in self.members:
            record = member.record
            outstanding = member.episode in STEPPED
            assert record.steps_asked == record.steps_received + record.steps_lost + outstanding
            here = (EpisodeState.BEGUN, EpisodeState.ANSWERED, EpisodeState.RENEWED)
            assert (member.answer is not None) == (member.episode in here)

    @property
    def all_play(self) -> bool:
        """True while each slot steps, or is between two episodes."""
        return all(member.episode in (*STEPPED, EpisodeState.ENDED) for member in self.members)

    # What servers do

    def connect(self, member: Member, request: Any = None, endpoint: Endpoint | None = None) -> None:
        url = member.remote.url if request is None else request.address.url
        server = next(server for server in self.servers if server.url == url)
        member.remote = Remote(server)  # type: ignore[assignment]
        member.endpoint = endpoint or member.endpoint
        member.deadline, member.silent_until = self.now + TIMEOUT, self.now + CONNECT_TIMEOUT
        member.handle_link(LinkEvent.CONNECT)
        self.attempts[url] += 1
        self.later(LATENCY, self._if_current(member, self._accept))

    def _if_current(self, member: Member, call: Callable[[Member], None]) -> Callable[[], None]:
        remote = member.remote

        def current() -> None:
            if not remote.connected:  # given up meanwhile
                return
            for each in (*self.members, *self.spares):  # the remote may fill other slots by now
                if each.remote is remote:
                    call(each)
                    return  # else the spare that took it over just now would hear of it too

        return current

    def _accept(self, member: Member) -> None:
        remote = self.of(member)
        server = remote.server
        if server.hangs:
            self.later(1.0, self._if_current(member, self._accept))  # it may come round
        elif not server.up:
            self.lose(member, ConnectError(server.url, "refused"))
        elif server.draining:
            self.lose(member, RefusedError(server.url, "stopping", Code.UNAVAILABLE))
        elif len(server.worlds) >= server.room:
            self.lose(member, RefusedError(server.url, "full", Code.RESOURCE_EXHAUSTED))
        else:
            remote.silent = False
            server.worlds.add(remote)
            self.policy.endpoint_event(member, EndpointEvent.JOINED, self.now)
            member.handle_link(LinkEvent.JOINED)
            member.single, member.refusal = True, None
            if member.stands_by is not None:
                member.failures = 0
            elif member.ready:
                self.begin(member)

    def begin(self, member: Member) -> None:
        remote = member.remote
        if self.policy.moves or member.may_leave:
            self.execute(self.policy.before_episode(member, self.now))
        if member.remote is not remote:
            return
        member.deadline = self.now + TIMEOUT
        member.handle(EpisodeEvent.BEGIN)
        self.later(LATENCY, self._if_current(member, self._answer))

    def _answer(self, member: Member) -> None:
        server = self.of(member).server
        if member.episode not in (EpisodeState.RESETTING, EpisodeState.STEPPING):
            return
        if server.hangs:
            self.later(1.0, self._if_current(member, self._answer))
        elif server.fails and member.episode is EpisodeState.RESETTING:
            member.error = member.refusal = EnvironmentFailedError(server.url, "ValueError", Code.INTERNAL)
            member.handle(EpisodeEvent.FAILED)
            self.policy.refused(member, member.error, self.now)
        else:
            first = member.episode is EpisodeState.RESETTING
            self._steps[member] = 0 if first else self._steps[member] + 1
            member.take(SimpleNamespace(message="message", ended=self._steps[member] >= EPISODE))  # type: ignore[arg-type]
            if first:
                member.failures, member.refusal = 0, None
                self.policy.endpoint_event(member, EndpointEvent.OBSERVED, self.now)
                member.record.back(self.now)

    def lose(self, member: Member, error: RemoteError) -> None:
        remote = self.of(member)
        established = remote in remote.server.worlds
        remote.server.worlds.discard(remote)
        remote.connected = False
        member.error, member.refusal = error, None
        member.handle_link(LinkEvent.LOST)
        self.policy.lost(member, error, self.now, established=established)

    def stop(self, server: Server) -> None:
        server.up = server.draining = server.hangs = False
        for member in (*self.members, *self.spares):
            if self.of(member).server is server and self.of(member) in server.worlds:
                self.lose(member, ConnectionLostError(server.url, "killed"))
        server.worlds.clear()

    # What the pool does

    def execute(self, decisions: Any) -> None:
        for decision in decisions:
            self.execute_one(decision)

    def execute_one(self, decision: Decision) -> None:
        match decision:
            case Connect(member, request, endpoint):
                if member.link is not LinkState.OFFLINE:
                    self._leave(member)
                    member.handle_link(LinkEvent.LOST)
                    member.refusal = None
                self.connect(member, request, endpoint)
            case AddSpare(request, endpoint, lanes, stands_by):
                assert endpoint.url == request.address.url
                url = request.address.url
                spare = self.member(next(server for server in self.servers if server.url == url), 0, stands_by)
                assert lanes == 1
                self.spares.append(spare)
                self.connect(spare)
            case DropSpare(spare):
                self.spares.remove(spare)
                self._leave(spare)
            case Disconnect(spare):
                self._leave(spare)
                spare.handle_link(LinkEvent.LOST)
            case TakeOver(member, spare):
                lost = member.link is LinkState.OFFLINE
                member.handle_link(LinkEvent.MOVE if spare.ready else LinkEvent.MOVE_AHEAD)
                member.remote, spare.remote = spare.remote, member.remote
                member.deadline, member.silent_until, member.refusal = spare.deadline, spare.silent_until, None
                member.endpoint, spare.endpoint = spare.endpoint, member.endpoint
                if spare.is_named:
                    member.home, spare.home = spare.home, member.home
                    member.record, spare.record = spare.record, member.record
                    if lost:
                        spare.handle_link(LinkEvent.LOST)
                else:
                    self.spares.remove(spare)
                    self._leave(spare)
            case Begin(member):
                self.begin(member)
            case GiveUp(member):
                self.lose(member, RemoteTimeoutError(member.remote.url, "late"))

    def _leave(self, member: Member) -> None:
        remote = self.of(member)
        remote.connected = False
        remote.server.worlds.discard(remote)

    # Time, and the training loop

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            tick = self.now + TICK
            while self._due and self._due[0][0] <= tick:
                self.now, _, call = heapq.heappop(self._due)
                call()
            self.now = tick
            self.execute(self.policy.check(self.now))
            self._step_all()

    def _step_all(self) -> None:
        for member in list(self.members):
            if member.episode is EpisodeState.CUT:
                member.handle(EpisodeEvent.TOLD)
            elif member.answer is not None:
                member.handed()
            if member.episode is EpisodeState.ENDED:
                self.begin(member)
            elif member.episode is EpisodeState.RUNNING:
                member.step(b"", self.now + TIMEOUT)
                self.later(LATENCY, self._if_current(member, self._answer))


class WellRemote:
    """What a load looks at."""

    draining, url = False, ""


def member_at(endpoint: Endpoint, failures: int = 0) -> Member:
    """A slot whose world at an endpoint is joined."""
    remote: Any = WellRemote()
    one = Member(remote, endpoint, 0, 1, failures=failures)
    one.handle_link(LinkEvent.CONNECT)
    one.handle_link(LinkEvent.JOINED)
    return one
