"""The policy of slots over random fleets, in virtual time: servers die, hang, fill, fail, drain, return and join.

No socket is opened: a simulated fleet executes the policy's decisions, as `bridge.core.client.slots.vector_pool` does
over the network, and plays a training loop that goes on without lost slots.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import pickle
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bridge import Endpoint
from bridge.core.client.slots.endpoint import Load, Placement
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


class Machine(RuleBasedStateMachine):
    """Random fleets, and what happens to them."""

    @initialize(servers=st.integers(1, 5), slots=st.integers(1, 6), room=st.integers(1, 12))
    def begin(self, servers: int, slots: int, room: int) -> None:
        self.fleet = Fleet(servers, slots, room)
        self.fleet.advance(2.0)

    def pick(self, number: int) -> Server:
        return self.fleet.servers[number % len(self.fleet.servers)]

    @rule(number=st.integers(0, 9))
    def kill(self, number: int) -> None:
        self.fleet.stop(self.pick(number))

    @rule(number=st.integers(0, 9))
    def restart(self, number: int) -> None:
        server = self.pick(number)
        self.fleet.stop(server)
        server.up, server.fails = True, False

    @rule(number=st.integers(0, 9), lasts=st.booleans())
    def hang(self, number: int, lasts: bool) -> None:
        self.pick(number).hangs = self.pick(number).up
        if lasts:
            self.calm_down()

    @rule(number=st.integers(0, 9))
    def wake(self, number: int) -> None:
        self.pick(number).hangs = False

    @rule(number=st.integers(0, 9), fails=st.booleans())
    def fail(self, number: int, fails: bool) -> None:
        self.pick(number).fails = fails

    @rule(number=st.integers(0, 9))
    def drain(self, number: int) -> None:
        self.pick(number).draining = self.pick(number).up

    @rule(number=st.integers(0, 9), room=st.integers(0, 8))
    def resize(self, number: int, room: int) -> None:
        self.pick(number).room = room

    @precondition(lambda self: len(self.fleet.servers) < 8)
    @rule(room=st.integers(1, 6))
    def join(self, room: int) -> None:
        self.fleet.servers.append(Server(f"grpc://s{len(self.fleet.servers)}:1", room))
        self.fleet.list_servers()

    @rule()
    def kill_all(self) -> None:
        for server in self.fleet.servers:
            self.fleet.stop(server)
        self.go_on(10.0)

    @rule(seconds=st.sampled_from([0.2, 1.0, 3.0, 10.0]))
    def go_on(self, seconds: float) -> None:
        before = self.fleet.attempts.copy()
        self.fleet.advance(seconds)
        slots = len(self.fleet.members)
        for url, count in (self.fleet.attempts - before).items():
            if not next(server for server in self.fleet.servers if server.url == url).well:
                # Worlds that were tried together, and then one at a time after pauses that double from 0.1 s.
                assert count <= 2 * slots + 8 + 2 * seconds, f"{count} attempts at {url} in {seconds} s"

    @rule()
    def calm_down(self) -> None:
        self.fleet.advance(CALM)
        slots = len(self.fleet.members)
        if sum(server.room for server in self.fleet.servers if server.well) >= slots + len(self.fleet.servers):
            self.check_that_all_run()

    def check_that_all_run(self) -> None:
        stepped = {member: member.record.steps_received for member in self.fleet.members}
        self.fleet.advance(20.0)
        for member in self.fleet.members:
            assert member.record.steps_received != stepped[member], f"{member.title} stands still: {member}"

    @invariant()
    def each_step_is_accounted_for(self) -> None:
        if "fleet" not in self.__dict__:
            return
        for member in self.fleet.members:
            record = member.record
            outstanding = member.episode in STEPPED
            assert record.steps_asked == record.steps_received + record.steps_lost + outstanding

    @invariant()
    def an_episode_says_whether_there_is_an_answer(self) -> None:
        for member in self.fleet.members if "fleet" in self.__dict__ else ():
            here = (EpisodeState.BEGUN, EpisodeState.ANSWERED, EpisodeState.RENEWED)
            assert (member.answer is not None) == (member.episode in here)

    def teardown(self) -> None:
        """Mend everything: then every slot runs again, evenly, and no world is left that nobody uses."""
        fleet = self.fleet
        for server in fleet.servers:
            if server.draining or not server.up:
                fleet.stop(server)
            server.up, server.hangs, server.fails, server.room = True, False, False, 20
        fleet.advance(CALM + 40.0)
        self.check_that_all_run()
        used = Counter(fleet.of(member).server.url for member in fleet.members)
        assert sum(len(server.worlds) for server in fleet.servers) == len(fleet.members) + len(fleet.spares)
        counts = [used[server.url] for server in fleet.servers]
        assert max(counts) - min(counts) <= 1, f"uneven: {used}"


class ListMachine(Machine):
    """Random lists of servers, and what happens to them."""

    @initialize(servers=st.integers(1, 5), slots=st.integers(1, 6), room=st.integers(1, 12))
    def begin(self, servers: int, slots: int, room: int) -> None:
        self.fleet = Fleet(servers, slots, max(room, slots), directory=False)
        self.fleet.advance(2.0)
        self.own = [self.fleet.of(member).server for member in self.fleet.members]

    def join(self, room: int) -> None:
        """Happen never: a list stays as it is."""

    @rule()
    def calm_down(self) -> None:
        self.fleet.advance(CALM)
        if all(server.well and server.room >= len(self.own) for server in self.own):
            self.check_that_all_run()

    def teardown(self) -> None:
        """Mend everything: then every slot runs again at its own server, and no world is left that nobody uses."""
        super().teardown()
        assert [self.fleet.of(member).server for member in self.fleet.members] == self.own
        assert not self.fleet.spares


# What single faults do


def received(fleet: Fleet) -> list[int]:
    return [member.record.steps_received for member in fleet.members]


def spread(fleet: Fleet) -> list[int]:
    used = Counter(fleet.of(member).server.url for member in fleet.members)
    return [used[server.url] for server in fleet.servers]


def test_slots_leave_a_server_that_hangs() -> None:
    fleet = Fleet(3, 6, 12)
    fleet.advance(2.0)
    fleet.servers[0].hangs = True
    fleet.advance(TIMEOUT + CONNECT_TIMEOUT + 5.0)
    assert spread(fleet) == [0, 3, 3]
    before = received(fleet)
    fleet.advance(5.0)
    assert all(after > count for after, count in zip(received(fleet), before, strict=True))


def test_slots_leave_a_server_whose_environment_always_raises_and_try_it_again() -> None:
    fleet = Fleet(3, 6, 12)
    fleet.advance(2.0)
    fleet.servers[0].fails = True
    fleet.advance(20.0)
    seen = []
    for _ in range(20):  # now and then a slot tries whether it still fails
        fleet.advance(0.5)
        seen.append(spread(fleet))
    assert seen.count([0, 3, 3]) > 10
    assert max(each[0] for each in seen) <= 1
    fleet.servers[0].fails = False
    fleet.advance(CALM)
    assert spread(fleet) == [2, 2, 2]


def test_slots_of_a_list_leave_a_server_that_always_raises_try_it_again_and_go_back() -> None:
    fleet = Fleet(3, 6, 12, directory=False)
    fleet.advance(2.0)
    fleet.servers[0].fails = True
    fleet.advance(20.0)
    fleet.attempts.clear()
    seen = []
    for _ in range(120):
        fleet.advance(0.5)
        seen.append(spread(fleet))
    assert seen.count([0, 3, 3]) > 80
    assert max(each[0] for each in seen) <= 1, "one slot tries it at a time"
    assert 3 <= fleet.attempts[fleet.servers[0].url] <= 13, "in pauses of 5 to 15 s"
    fleet.servers[0].fails = False
    fleet.advance(CALM)
    assert [fleet.of(member).server.url for member in fleet.members] == [f"grpc://s{i % 3}:1" for i in range(6)]
    assert not fleet.spares
    assert sum(member.record.losses for member in fleet.members) == 0


def urls(fleet: Fleet) -> list[str]:
    return [fleet.of(member).server.url for member in fleet.members]


def test_a_slot_of_a_list_waits_for_its_own_server_while_others_have_room() -> None:
    fleet = Fleet(3, 6, 12, directory=False)
    fleet.advance(2.0)
    before = urls(fleet)
    fleet.stop(fleet.servers[1])
    fleet.advance(CALM)
    assert urls(fleet) == before
    assert [member.link is LinkState.JOINED for member in fleet.members] == [True, False, True] * 2
    fleet.servers[1].up = True
    fleet.advance(CALM)
    assert urls(fleet) == before
    assert all(member.link is LinkState.JOINED for member in fleet.members)


def test_a_slot_of_a_list_that_has_lost_the_server_that_stood_in_goes_back_to_its_own() -> None:
    fleet = Fleet(2, 2, 12, directory=False)
    fleet.advance(2.0)
    before = urls(fleet)
    fleet.servers[0].fails = True
    fleet.advance(20.0)
    assert urls(fleet) == [before[1]] * 2
    fleet.stop(fleet.servers[1])
    fleet.servers[0].fails = False
    fleet.advance(CALM)
    assert fleet.of(fleet.members[0]).server is fleet.servers[0]
    assert fleet.members[0].link is LinkState.JOINED
    fleet.servers[1].up = True
    fleet.advance(CALM)
    assert urls(fleet) == before
    assert not fleet.spares


def test_a_spare_that_the_user_named_and_a_lost_slot_swap_places_for_good() -> None:
    fleet = Fleet(2, 2, 12, directory=False, spares=1)
    fleet.advance(2.0)
    before, third = urls(fleet), fleet.servers[2].url
    fleet.stop(fleet.servers[0])
    fleet.advance(5.0)
    assert urls(fleet) == [third, before[1]]
    (spare,) = fleet.spares
    assert spare.endpoint.url == before[0]
    fleet.servers[0].up = True
    fleet.advance(CALM)
    assert (spare.ready, spare.endpoint.url) == (True, before[0]), "the lost one stands by once it is back"
    assert urls(fleet) == [third, before[1]], "no slot leaves a server that is well"
    fleet.stop(fleet.servers[1])
    fleet.advance(5.0)
    assert urls(fleet) == [third, before[0]]


def test_a_spare_that_the_user_named_takes_no_slots_of_an_environment_that_always_raises() -> None:
    """It would swap places with it: a world that only fails would stand by."""
    fleet = Fleet(2, 2, 12, directory=False, spares=1)
    fleet.advance(2.0)
    before, third = urls(fleet), fleet.servers[2].url
    fleet.servers[0].fails = True
    fleet.advance(20.0)
    assert urls(fleet) == [before[1]] * 2
    assert [spare.endpoint.url for spare in fleet.spares if spare.is_named] == [third]
    fleet.servers[0].fails = False
    fleet.advance(CALM)
    assert urls(fleet) == before


def test_a_slot_leaves_a_server_of_a_list_that_drains_for_a_spare_that_the_user_named_alone() -> None:
    for spares in (0, 1):
        fleet = Fleet(2, 2, 12, directory=False, spares=spares)
        fleet.advance(2.0)
        before = urls(fleet)
        fleet.servers[0].draining = True
        fleet.advance(20.0)
        assert urls(fleet) == ([fleet.servers[2].url, before[1]] if spares else before)
        assert sum(member.record.losses for member in fleet.members) == 0


def test_slots_of_a_list_go_to_no_server_whose_environment_fails_as_theirs_does() -> None:
    fleet = Fleet(3, 6, 12, directory=False)
    fleet.advance(2.0)
    fleet.servers[0].fails = fleet.servers[1].fails = True
    for _ in range(120):
        fleet.advance(0.5)
        for number, member in enumerate(fleet.members):
            assert fleet.of(member).server in (fleet.servers[number % 3], fleet.servers[2])
    assert fleet.attempts[fleet.servers[2].url] >= 4


def test_an_answer_is_waited_for_as_much_longer_as_its_world_may_take() -> None:
    fleet = Fleet(2, 2, 12)
    fleet.advance(2.0)
    for member in fleet.members:
        member.remote.allowance = 20.0  # type: ignore[misc]
    fleet.servers[0].hangs = True
    fleet.advance(TIMEOUT + 15.0)
    assert spread(fleet) == [1, 1]
    fleet.advance(10.0)
    assert spread(fleet) == [0, 2]


def test_slots_leave_a_server_that_drains_between_two_episodes() -> None:
    fleet = Fleet(3, 6, 12)
    fleet.advance(2.0)
    fleet.servers[0].draining = True
    fleet.advance(20.0)
    assert spread(fleet) == [0, 3, 3]
    assert sum(member.record.losses for member in fleet.members) == 0
    assert sum(member.record.moves for member in fleet.members) == 2


def test_a_move_is_a_line_for_a_server_which_says_why_and_its_planned_end_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet(2, 12, 12)
    fleet.advance(2.0)
    caplog.clear()
    old, new = (server.url for server in fleet.servers)
    fleet.servers[0].draining = True
    fleet.advance(20.0)
    assert spread(fleet) == [0, 12]
    fleet.stop(fleet.servers[0])
    fleet.advance(60.0)
    said = [record.getMessage() for record in caplog.records if "shuts down" not in record.getMessage()]
    assert said[0] == f"{new} is to take over 6 slots of {old}: it drains"
    assert f"no slot is left at {old}" in said
    assert f"{old} was shut down" in said
    assert len(said) < 6, said
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and "ended" in r.getMessage()]
    assert "no longer answers" not in caplog.text


def test_a_move_off_a_server_whose_resets_fail_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet(2, 8, 12)
    fleet.advance(2.0)
    fleet.servers[0].fails = True
    fleet.advance(20.0)
    plans = [record.getMessage() for record in caplog.records if "is to take over" in record.getMessage()]
    assert plans
    assert all(plan.endswith(": every reset fails there") for plan in plans)


def restart(fleet: Fleet, server: Server, away: float, period: float) -> None:
    """Drain a server for at most `period` seconds, as SIGTERM does, and start it again `away` seconds after its end."""
    server.draining = True
    end = fleet.now + period
    while server.worlds and fleet.now < end:
        fleet.advance(TICK)
    fleet.stop(server)
    fleet.advance(away)
    server.up = True


@pytest.mark.parametrize("away", [0.4, 3.0, 20.0, 100.0])
@pytest.mark.parametrize(("servers", "between"), [(2, 0.4), (2, 7.0), (3, 0.4), (5, 2.0)])
def test_a_fleet_is_restarted_one_server_after_the_other_without_a_lost_episode(
    servers: int, between: float, away: float
) -> None:
    fleet = Fleet(servers, 2 * servers, 12)
    fleet.advance(2.0)
    for server in fleet.servers:
        before = received(fleet)
        restart(fleet, server, away, period=15.0)
        fleet.advance(between)
        assert all(after > count for after, count in zip(received(fleet), before, strict=True))
    assert sum(member.record.losses for member in fleet.members) == 0
    fleet.advance(20.0)
    assert spread(fleet) == [2] * servers


@pytest.mark.parametrize("away", [20.0, 60.0, 300.0])
def test_a_restarted_server_is_used_within_seconds_however_long_its_restart_took(away: float) -> None:
    fleet = Fleet(2, 4, 12)
    fleet.advance(2.0)
    restart(fleet, fleet.servers[0], away, period=15.0)
    assert fleet.attempts[fleet.servers[0].url] <= 8 + away / 2.5
    fleet.advance(8.0)
    assert spread(fleet)[0] > 0


def test_a_server_that_drained_is_asked_at_once_when_the_last_other_one_is_killed() -> None:
    fleet = Fleet(2, 4, 12)
    fleet.advance(2.0)
    restart(fleet, fleet.servers[0], 30.0, period=15.0)
    fleet.stop(fleet.servers[1])
    fleet.advance(1.0)
    assert spread(fleet) == [4, 0]
    assert all(member.episode in (*STEPPED, EpisodeState.ENDED) for member in fleet.members)


def test_a_slot_of_a_list_is_back_within_seconds_after_a_long_restart() -> None:
    fleet = Fleet(2, 2, 12, directory=False, spares=1)
    fleet.advance(2.0)
    before = urls(fleet)
    for away in (20.0, 90.0):
        restart(fleet, fleet.servers[0], away, period=15.0)
        fleet.advance(8.0)
        assert fleet.servers[0].worlds, "a spare stands by there again"
        fleet.servers[2].draining = True
        fleet.advance(5.0)
        assert urls(fleet) == before
        fleet.stop(fleet.servers[2])
        fleet.servers[2].up = True
        fleet.advance(8.0)
    assert sum(member.record.losses for member in fleet.members) == 0


def test_a_planned_restart_is_told_in_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(2, 4, 12)
    fleet.advance(2.0)
    with caplog.at_level(logging.WARNING, "bridge.core.client.slots.endpoint"):
        restart(fleet, fleet.servers[0], 60.0, period=15.0)
        fleet.advance(8.0)
    told = [record.getMessage() for record in caplog.records if record.name == "bridge.core.client.slots.endpoint"]
    assert [text.partition(":1 ")[2].partition(":")[0] for text in told] == [
        "shuts down, and takes no further environments",
        "was started again, and answers",
    ]


def test_a_slot_leaves_a_server_that_only_fails_for_one_that_had_been_dark() -> None:
    fleet = Fleet(2, 1, 12)
    fleet.advance(2.0)
    for server in fleet.servers:
        fleet.stop(server)
    fleet.advance(10.0)
    fleet.servers[0].up = fleet.servers[0].fails = True
    fleet.advance(CALM)
    assert spread(fleet) == [1, 0]
    fleet.servers[1].up = True
    fleet.advance(CALM)
    assert spread(fleet) == [0, 1]


def test_a_server_that_joins_gets_its_share_and_loses_no_episode() -> None:
    fleet = Fleet(1, 6, 12)
    fleet.advance(2.0)
    fleet.servers.append(Server("grpc://new:1", 12))
    fleet.list_servers()
    fleet.advance(30.0)
    assert spread(fleet) == [3, 3]
    assert sum(member.record.losses for member in fleet.members) == 0


def test_a_dead_server_that_stays_listed_is_asked_again_without_a_line_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet(3, 12, 12)
    fleet.advance(2.0)
    fleet.stop(fleet.servers[1])
    fleet.advance(120.0)
    assert spread(fleet) == [6, 0, 6]
    assert fleet.attempts[fleet.servers[1].url] > 4

    def announced() -> list[str]:
        return [r.getMessage() for r in caplog.records if f"{fleet.servers[1].url} is to take over" in r.getMessage()]

    assert not announced(), "nobody answers there"
    fleet.servers[1].up = True
    fleet.advance(CALM)
    assert spread(fleet) == [4, 4, 4]
    assert any(f"{fleet.servers[1].url} answers again" in record.getMessage() for record in caplog.records)
    assert announced(), "it is up again"


def test_of_a_fleet_that_is_gone_each_server_is_asked_in_growing_pauses() -> None:
    fleet = Fleet(2, 6, 12)
    fleet.advance(2.0)
    for server in fleet.servers:
        fleet.stop(server)
    fleet.advance(20.0)
    fleet.attempts.clear()
    fleet.advance(300.0)
    assert 0 < sum(fleet.attempts.values()) <= 2 * 300 / 5
    for server in fleet.servers:
        server.up = True
    fleet.advance(CALM)
    assert spread(fleet) == [3, 3]


def test_a_full_server_is_asked_in_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(2, 8, 12)
    fleet.servers[0].room = 2
    fleet.advance(20.0)
    assert spread(fleet) == [2, 6]
    fleet.attempts.clear()
    fleet.advance(300.0)
    assert 0 < fleet.attempts[fleet.servers[0].url] <= 300 / 5
    assert len([record for record in caplog.records if "is full" in record.getMessage()]) == 1


# Random fleets


def run(examples: int, machine: type[Machine] = Machine) -> None:
    logging.getLogger("bridge").setLevel(logging.ERROR)
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=20,
                deadline=None,
                derandomize=True,  # the same fleets in each run, for a failure must not depend on luck
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        logging.getLogger("bridge").setLevel(logging.NOTSET)


def test_slots_of_random_fleets_run_again_whatever_happened() -> None:
    run(30)


@pytest.mark.slow
def test_slots_of_random_lists_run_again_at_their_own_servers() -> None:
    run(60, ListMachine)


@pytest.mark.repeat
def test_slots_of_a_thousand_random_lists_run_again_at_their_own_servers() -> None:
    run(1000, ListMachine)


@pytest.mark.repeat
def test_slots_of_a_thousand_random_fleets_run_again_whatever_happened() -> None:
    run(1000)


# A list of URLs, whose endpoints slots are pinned to

URLS = ("grpc://a:1", "grpc://b:1", "grpc://c:1", "grpc://d:1/Other-v0")


def placement(*requests: Any) -> Placement:
    """The placement of a list; by itself of `URLS`, the last of which is of another environment."""
    return Placement.of_list(requests or [request_of(url, f"the path {urlsplit(url).path!r}") for url in URLS])


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


def test_where_a_slot_may_go_at_once_nothing_speaks_against_the_server() -> None:
    places = placement()
    a, b, c, _ = places.watch.endpoints
    slot = member_at(a)
    assert places.choose_well(Load([slot, member_at(b)]), slot, 0.0) is c, "the one with fewer slots, and of its kind"
    assert places.choose_well(Load([slot]), slot, 0.0, up=True) is None, "nobody has joined there"
    for endpoint in (b, c):
        places.handle(endpoint.key, EndpointEvent.JOINED, 0.0, "")
    assert places.choose_well(Load([slot]), slot, 0.0, up=True) is b
    assert places.choose_well(Load([slot, member_at(b, failures=1)]), slot, 0.0) is c, "there a reset has just failed"
    places.handle(c.key, EndpointEvent.GONE, 0.0, "")
    assert places.choose_well(Load([slot, member_at(b, failures=1)]), slot, 0.0) is None
    assert places.any_well(slot)
    places.handle(b.key, EndpointEvent.RAISED, 0.0, "")
    assert not places.any_well(slot), "the last one is of another kind"


def test_a_server_that_slots_of_a_list_have_left_is_tried_by_one_at_a_time_and_after_a_pause(caplog: Any) -> None:
    places = placement()
    key = places.watch.endpoints[0].key
    assert places.may_try(key, 0.0, 10.0)
    places.handle(key, EndpointEvent.RAISED, 0.0, "ValueError")
    assert not places.may_try(key, 1.0, 10.0)
    assert places.may_try(key, 20.0, 10.0)
    assert not places.may_try(key, 21.0, 10.0), "one is under way"
    assert not places.handle(key, EndpointEvent.JOINED, 22.0, ""), "its resets may fail as before"
    assert places.handle(key, EndpointEvent.OBSERVED, 23.0, ""), "it is well again"
    assert places.may_try(key, 23.0, 10.0)
    assert not caplog.records, "the slots of a list tell by themselves what they lose"


def test_a_copy_has_seen_nothing_of_the_servers() -> None:
    places = placement()
    key = places.watch.endpoints[0].key
    places.handle(key, EndpointEvent.GONE, 1e9, "")  # by the clock of a machine that runs for years
    copied = pickle.loads(pickle.dumps(places))
    assert (places.may_try(key, 5.0, 10.0), copied.may_try(key, 5.0, 10.0)) == (False, True)
    assert [endpoint.key for endpoint in copied.watch.endpoints] == list(URLS)


def test_only_listed_urls_of_one_kind_replace_each_other_and_a_world_that_exists_is_of_its_own() -> None:
    own, second, level = placement(
        *(request_of(f"grpc://{host}:1", kind) for host, kind in (("own", "a"), ("second", "a"), ("level", "another")))
    ).watch.endpoints
    assert own.kind == second.kind != level.kind
    worlds = [request_of(f"grpc://{host}:1?world=arena", None) for host in ("a", "b")]
    agents = [request_of("grpc://a:1?world=arena", None, agent) for agent in ("red", "blue")]
    endpoints = placement(*worlds, *worlds, *agents).watch.endpoints
    assert len(endpoints) == 4, "each once"
    assert len({endpoint.kind for endpoint in endpoints}) == 4
