"""The policy of slots over random fleets, in virtual time: servers die, hang, fill, fail, drain, return and join."""

from __future__ import annotations

import logging
from collections import Counter

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

from tests.core.client.policy_fleet import CALM, Fleet, Server


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
    def the_slots_are_consistent(self) -> None:
        if "fleet" in self.__dict__:
            self.fleet.check()

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
