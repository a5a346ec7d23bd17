"""Server and clients on a simulated link: what is lost, doubled, late or forged, thousands of runs from their seeds."""

import os
import re
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bridge.perlert
from bridge.perlert import GuardConfig, LobbyConfig, RolloutConfig
from bridge.perlert.protocol.packet import Header, parse_server
from tests.perlert_simulation import LOBBY_PORT, SERVER, CountWorld, Simulation, ports_of
from tests.support import sampled

H = Header("count", 0)
EXAMPLES = int(os.environ.get("PERLERT_EXAMPLES", "0"))
"""How many random sequences, for `python -m benchmarks.perlert_fuzz`; 0: a few."""
IO = re.compile(r"^\s*(import|from) (socket|threading|asyncio|time|selectors|select)\b", re.M)
LOBBY = (SERVER, LOBBY_PORT)
TRUST = GuardConfig(trusted=("10.0.0.0/8",))


def check(world, visitors, runs, *, profile=True):
    for visitor in visitors:
        key = visitor.player.key
        for run in range(runs):
            steps = visitor.steps[run]
            assert [step.done for step in steps].count(True) == 1, "done exactly once"
            assert steps[-1].done
            assert not steps[-1].lost
            if profile:
                exact = sum(Decimal(repr(reward)) for reward in world.returns[run][key])
                assert steps[-1].ret == exact == sum(step.reward for step in steps), "the return is recovered exactly"
        if profile:
            for episode in world.applied:
                assert episode[key] == sorted(episode[key]), "no stale action is applied"


def play(seed, *, agents=2, runs=1, length=8, loss=0.3, duplicate=0.3, delay=(0.001, 0.15), guard=None):
    simulation = Simulation(seed, loss=loss, duplicate=duplicate, delay=delay, guard=guard)
    world = CountWorld(agents, length, seed)
    instance = simulation.publish(H, world, rollout=RolloutConfig(fps=10))
    visitors = [simulation.join(H, runs=runs) for _ in range(agents)]
    over = simulation.run(300.0, lambda: all(visitor.finished for visitor in visitors))
    assert over, (seed, instance.lobby.state, instance.lobby.missing(), [v.player.waits_for() for v in visitors])
    check(world, visitors, runs)
    return simulation, instance, visitors


@pytest.mark.slow
@pytest.mark.parametrize("block", sampled(range(16), 16))
def test_with_a_third_lost_doubled_and_reordered_every_return_is_recovered(block):
    for seed in range(block * 188, (block + 1) * 188):
        play(seed, guard=TRUST if seed % 2 else None, agents=1 + seed % 2)
    for seed in range(block * 7, (block + 1) * 7):
        play(seed, agents=3, runs=2)


def test_without_loss_no_step_is_missing():
    _, _, (visitor,) = play(1, agents=1, loss=0.0, duplicate=0.0, length=30, delay=(0.05, 0.05))
    assert [step.step for step in visitor.steps[0]] == list(range(31))
    assert visitor.player.stats.lost == 0


KINDS = [
    (rb"lobby\Z", "up"),
    (rb"register=", "up"),
    (rb"\.r\Z", "up"),  # ready, in the profile
    (rb"action=", "up"),
    (rb"(open|close),", "down"),
    (rb"registered=", "down"),
    (rb"message=", "down"),
    (rb"start=port", "down"),
    (rb";obs=", "down"),
    (rb"done=true", "down"),
]


@pytest.mark.parametrize(("pattern", "way"), KINDS, ids=lambda value: str(value))
@pytest.mark.parametrize("first", [1, 3])
def test_the_loss_of_any_one_kind_of_message_is_overcome(pattern, way, first):
    # P-16, P-18: S4 and the last S5 are told again.
    simulation = Simulation(1)
    world = CountWorld(2, 6)
    simulation.publish(H, world, rollout=RolloutConfig(fps=10))
    visitors = [simulation.join(H, runs=2) for _ in range(2)]
    seen = {visitor.address: 0 for visitor in visitors}

    def drop(datagram, source, target):
        client = source if way == "up" else target
        if client in seen and (source[0] == SERVER) == (way == "down") and re.search(pattern, datagram):
            seen[client] += 1
            return seen[client] <= first
        return False

    simulation.drop = drop
    assert simulation.run(200.0, lambda: all(visitor.finished for visitor in visitors))
    assert all(count > 0 for count in seen.values())
    check(world, visitors, 2)


def test_a_late_ready_does_not_start_the_next_run_over_a_client_that_has_not_seen_the_last_ones_end():
    simulation = Simulation(1, guard=TRUST)
    world = CountWorld(1, 3)
    instance = simulation.publish(H, world, rollout=RolloutConfig(fps=10))
    visitor = simulation.join(H, runs=2)
    simulation.drop = lambda datagram, source, target: b"start=" in datagram or b"done=true" in datagram
    assert simulation.run(20.0, lambda: len(world.applied) == 1 and instance.lobby.run is None)
    simulation.drop = lambda datagram, source, target: b"done=true" in datagram
    simulation.run(2.0)
    assert visitor.player.port == 40000
    simulation.deliver(b"count:0;ready=agent0,true", visitor.address, LOBBY)
    assert not instance.lobby.clients[visitor.address].ready
    simulation.drop = lambda datagram, source, target: False
    assert simulation.run(30.0, lambda: visitor.finished)
    check(world, [visitor], 2)


def test_a_lobby_that_does_not_start_says_why():
    # P-10
    simulation = Simulation(3, loss=0.3, duplicate=0.3, delay=(0.001, 0.1), guard=TRUST)
    instance = simulation.publish(H, CountWorld(2))
    visitor = simulation.join(H)
    assert not simulation.run(30.0, lambda: visitor.finished)
    assert instance.lobby.missing() == "open: agent1"
    assert "open or not ready: agent1" in visitor.player.waits_for()


def test_a_client_that_vanished_holds_the_others_up_no_longer_than_its_registration():
    # P-10
    simulation = Simulation(3, guard=TRUST)
    world = CountWorld(3, 6)
    simulation.publish(H, world, lobby=LobbyConfig(clients=2), rollout=RolloutConfig(fps=10))
    ghost = simulation.join(H, ready=False)
    simulation.run(1.0)
    simulation.drop = lambda datagram, source, target: ghost.address in (source, target)
    visitors = [simulation.join(H) for _ in range(2)]
    begun = simulation.now
    assert simulation.run(60.0, lambda: all(visitor.finished for visitor in visitors))
    assert 14.0 < simulation.now - begun < 25.0


def test_a_plain_client_and_a_client_of_ours_share_a_world():
    # P-29
    simulation = Simulation(4, guard=TRUST)
    world = CountWorld(2, 20)
    simulation.publish(H, world, rollout=RolloutConfig(fps=10))
    plain, ours = simulation.join(H, use_profile=False), simulation.join(H)
    assert simulation.run(60.0, lambda: plain.finished and ours.finished)
    check(world, [plain, ours], 1)
    assert plain.steps[0][-1].ack is None
    assert ours.steps[0][-1].ack


def test_a_plain_client_under_loss_sees_its_end_once_and_its_return_is_what_arrived():
    for seed in range(50):
        simulation = Simulation(seed, loss=0.3, duplicate=0.3, delay=(0.001, 0.15), guard=TRUST)
        world = CountWorld(1, 8, seed)
        simulation.publish(H, world, rollout=RolloutConfig(fps=10))
        visitor = simulation.join(H, use_profile=False)
        assert simulation.run(100.0, lambda visitor=visitor: visitor.finished)
        check(world, [visitor], 1, profile=False)


def test_bots_play_the_slots_that_nobody_holds_and_a_spectator_sees_the_run():
    # P-29, P-15: a spectator is registered in a slot of its own.
    simulation = Simulation(5, guard=TRUST)
    world = CountWorld(2, 20)
    simulation.publish(H, world, bots={"agent1": lambda observation: 77}, spectators=1, rollout=RolloutConfig(fps=10))
    watcher = simulation.join(H, agent="spectator0", action=None)
    watcher.acts = False
    visitor = simulation.join(H, agent="agent0")
    assert simulation.run(60.0, lambda: visitor.finished)
    assert set(world.applied[0]["agent1"]) == {77}
    assert [s.observation for s in watcher.steps[0]] == [s.observation for s in visitor.steps[0]]


def test_a_slot_that_a_silent_client_holds_is_not_the_bots():
    # P-27: until its first valid action the server chooses, and that is the default action.
    simulation = Simulation(5, guard=TRUST)
    world = CountWorld(1, 10)
    simulation.publish(H, world, bots={"agent0": lambda observation: 77}, rollout=RolloutConfig(fps=10))
    visitor = simulation.join(H, action=None)
    visitor.acts = False
    assert simulation.run(60.0, lambda: visitor.finished)
    assert set(world.applied[0]["agent0"]) == {0}


def test_a_spectator_that_comes_late_joins_the_run_that_is_on():
    simulation = Simulation(5, guard=TRUST)
    simulation.publish(H, CountWorld(1, 40), spectators=1, rollout=RolloutConfig(fps=10))
    visitor = simulation.join(H)
    assert simulation.run(20.0, lambda: len(visitor.steps[0]) > 5)
    watcher = simulation.join(H, agent="spectator0")
    assert simulation.run(20.0, lambda: watcher.finished)
    assert watcher.steps[0][0].step > 5
    assert watcher.steps[0][-1].done


def test_runs_follow_each_other_and_each_has_a_port_of_its_own():
    simulation = Simulation(6, guard=TRUST)
    instance = simulation.publish(H, CountWorld(1, 3), rollout=RolloutConfig(fps=10))
    visitor = simulation.join(H, runs=5)
    ports = set()

    def watch():
        ports.update(ports_of(instance))
        return visitor.finished

    assert simulation.run(60.0, watch)
    assert instance.runs == 5
    assert len(ports) == 5
    simulation.run(15.0)
    assert ports_of(instance) == []


def test_the_environment_stands_still_between_its_runs():
    simulation = Simulation(6, guard=TRUST)
    world = CountWorld(1, 10_000)
    instance = simulation.publish(H, world, rollout=RolloutConfig(fps=10, abandoned=20.0))
    visitor = simulation.join(H)
    assert simulation.run(10.0, lambda: len(visitor.steps[0]) > 5)
    simulation.drop = lambda datagram, source, target: True
    assert simulation.run(60.0, lambda: instance.lobby.run is None)
    stepped = len(world.applied[0]["agent0"])
    assert stepped > 200
    simulation.run(60.0)
    assert len(world.applied[0]["agent0"]) <= stepped + 1
    simulation.drop = lambda datagram, source, target: False
    again = simulation.join(H, agent="agent0")
    assert simulation.run(60.0, lambda: len(again.steps[0]) > 5)
    assert len(world.applied[1]["agent0"]) >= 5


def test_a_port_that_the_last_runs_had_is_not_given_again():
    simulation = Simulation(6)
    host = simulation.host
    numbers = iter([40000, 40000, 40000, 40007])
    host.ports.open_port = lambda: next(numbers)
    closed = []
    host.ports.close_port = closed.append
    assert host.open_port() == 40000
    assert host.open_port() == 40007
    assert closed == [40000, 40000]


def test_two_instances_share_a_lobby_port_and_one_client_may_be_in_both():
    simulation = Simulation(7, guard=TRUST)
    worlds = {Header("count", n): CountWorld(1, 5) for n in range(2)}
    for header, world in worlds.items():
        simulation.publish(header, world, rollout=RolloutConfig(fps=10))
    one, two = (simulation.join(header) for header in worlds)
    simulation.visitors.pop(two.address)
    for header in worlds:
        simulation.deliver(f"{header};register=agent0,both".encode(), ("10.9.9.9", 9), LOBBY)
    assert [len(instance.lobby.clients) for instance in simulation.host.instances.values()] == [1, 1]
    assert one.player.header != two.player.header


def test_lobby_messages_leave_from_the_lobbys_port_and_steps_from_the_rollouts():
    # P-12, P-13
    simulation = Simulation(8, guard=TRUST)
    instance = simulation.publish(H, CountWorld(2, 10), rollout=RolloutConfig(fps=10))
    visitors = [simulation.join(H) for _ in range(2)]
    seen = []
    inner = simulation.send

    def spy(datagram, source, target):
        if source[0] == SERVER:
            seen.append((source[1], b";obs=" in datagram, set(ports_of(instance))))
        inner(datagram, source, target)

    simulation.send = spy
    assert simulation.run(60.0, lambda: all(visitor.finished for visitor in visitors))
    assert {port for port, step, _ in seen if not step} == {LOBBY_PORT}
    assert all(port in open_ports for port, step, open_ports in seen if step)


def test_replayed_and_injected_datagrams_change_nothing():
    """Everything that a client ever sent is sent again, from its own address and from another one."""
    simulation = Simulation(9, guard=TRUST)
    world = CountWorld(1, 30)
    simulation.publish(H, world, rollout=RolloutConfig(fps=10))
    visitor = simulation.join(H, runs=2)
    recorded = []
    inner = simulation.send

    def replay(datagram, source, target):
        inner(datagram, source, target)
        if source == visitor.address and b"ready=" not in datagram and b"register=" not in datagram:
            recorded.append((datagram, target))
            for old, old_target in recorded[-20:]:
                inner(old, source, old_target)
                inner(old, ("10.6.6.6", 666), old_target)

    simulation.send = replay
    assert simulation.run(100.0, lambda: visitor.finished)
    check(world, [visitor], 2)


def test_an_environment_that_fails_ends_its_run_and_not_the_server(caplog):
    class Fails(CountWorld):
        def step(self, actions):
            if len(self.applied) == 1 and self._step == 3:
                raise ZeroDivisionError("out of wheels")
            return super().step(actions)

    simulation = Simulation(10, guard=TRUST)
    instance = simulation.publish(H, Fails(1, 6), rollout=RolloutConfig(fps=10))
    visitor = simulation.join(H, runs=2)
    assert simulation.run(60.0, lambda: visitor.finished)
    assert visitor.steps[0][-1].truncated
    assert not visitor.steps[1][-1].truncated
    assert instance.stats()["failures"] == 1
    assert "out of wheels" in caplog.text


@pytest.mark.parametrize("observation", [[float("nan"), 0.0], [1.0], None, "x"])
def test_an_observation_that_cannot_be_sent_ends_the_run(observation, caplog):
    class Wrong(CountWorld):
        def step(self, actions):
            seen = super().step(actions)
            return {key: (observation, *rest) for key, (_, *rest) in seen.items()} if self._step == 3 else seen

    simulation = Simulation(10, guard=TRUST)
    simulation.publish(H, Wrong(1, 6), rollout=RolloutConfig(fps=10))
    visitor = simulation.join(H)
    assert simulation.run(60.0, lambda: visitor.finished)
    assert visitor.steps[0][-1].truncated


def test_a_reset_that_fails_is_told_and_the_next_start_is_tried(caplog):
    class Fails(CountWorld):
        tries = 0

        def reset(self, seed=None, options=None):
            self.tries += 1
            if self.tries == 1:
                raise OSError("no display")
            return super().reset(seed, options)

    simulation = Simulation(11, guard=TRUST)
    instance = simulation.publish(H, Fails(1, 3), rollout=RolloutConfig(fps=10))
    visitor = simulation.join(H)
    assert simulation.run(60.0, lambda: visitor.finished)
    assert instance.stats()["failures"] == 1


def test_a_server_that_stops_ends_the_run_for_everybody():
    simulation = Simulation(12, guard=TRUST)
    simulation.publish(H, CountWorld(2, 1000), rollout=RolloutConfig(fps=10))
    visitors = [simulation.join(H) for _ in range(2)]
    assert simulation.run(20.0, lambda: all(len(visitor.steps[0]) > 3 for visitor in visitors))
    for instance in simulation.host.instances.values():
        instance.stop()
    assert simulation.run(1.0, lambda: all(visitor.finished for visitor in visitors))
    assert all(visitor.steps[0][-1].truncated for visitor in visitors)


def test_a_flood_from_one_client_ends_no_other_ones_run():
    simulation = Simulation(13, guard=GuardConfig(trusted=("10.0.0.0/8",), datagrams_per_second=100))
    world = CountWorld(2, 20)
    simulation.publish(H, world, rollout=RolloutConfig(fps=10))
    visitors = [simulation.join(H) for _ in range(2)]
    evil = ("10.200.0.1", 1)
    assert simulation.run(5.0, lambda: all(visitor.player.settled for visitor in visitors))

    def flood():
        ports = [LOBBY_PORT, *(port for i in simulation.host.instances.values() for port in ports_of(i))]
        for number in range(30):
            junk = simulation.random.choice(
                [
                    b"count:0;register=agent0,x,ready;agent1=close",
                    b"count:0;register=agent0,evil",
                    b"count:0;ready=agent0,false",
                    b"count:0;action=9999",
                    b"\xff" * 30,
                    b"count:0;" * 500,
                ]
            )
            simulation.deliver(junk, (evil[0], number % 3), (SERVER, simulation.random.choice(ports)))
        return all(visitor.finished for visitor in visitors)

    assert simulation.run(100.0, flood)
    check(world, visitors, 1)
    assert not any(9999 in episode[key] for episode in world.applied for key in episode)


def test_the_whole_conversation_with_a_spoofed_address_stays_below_the_bound():
    """A blind attacker registers a victim, readies it and lets the simulation start."""
    simulation = Simulation(14)
    instance = simulation.publish(H, CountWorld(1, 300), rollout=RolloutConfig(fps=30, abandoned=20))
    victim = ("203.0.113.7", 7)
    spent, begun = 0, simulation.now
    for _ in range(40):
        for datagram in (
            b"count:0;lobby",
            b"count:0;register=agent0,v",
            b"count:0;register=agent0,v+b1",
            b"count:0;register=agent0,v+b1.0123456789ab.1.r",
            b"count:0;ready=agent0,true",
        ):
            spent += len(datagram)
            simulation.deliver(datagram, victim, LOBBY)
        for port in ports_of(instance):  # guessed
            spent += len(b"count:0;action=1")
            simulation.deliver(b"count:0;action=1", victim, (SERVER, port))
        simulation.run(1.0)
        assert simulation.sent_bytes.get(victim, 0) <= max(3 * spent, 1000 * (simulation.now - begun + 1))
    assert simulation.sent_bytes[victim] > 0
    assert not simulation.host.guard.proven(victim)


server_junk = st.one_of(
    st.binary(max_size=80),
    st.sampled_from([b"count:0;lobby", b"count:0;register=agent0,a", b"count:0;register=agent1,b+b1"]),
    st.sampled_from([b"count:0;ready=agent0,true", b"count:0;ready=agent1,true", b"count:0;ready=agent0,false"]),
    st.sampled_from([b"count:0;action=1", b"count:0;action=0123456789ab,1,2", b"count:0;action=x"]),
    st.text("count:0;=,agentrdylobis1234+.", max_size=40).map(str.encode),
)


@settings(max_examples=EXAMPLES or 60, deadline=None)
@given(
    st.lists(st.tuples(server_junk, st.integers(0, 3), st.booleans(), st.floats(0, 5)), max_size=40), st.integers(0, 99)
)
def test_no_datagram_raises_out_of_the_server_and_its_promises_hold(events, seed):
    simulation = Simulation(seed)
    instance = simulation.publish(H, CountWorld(2, 5), spectators=1, rollout=RolloutConfig(fps=10))
    heard: dict = {}
    begun = simulation.now
    for datagram, who, to_rollout, wait in events:
        source = [("10.1.1.1", 1), ("10.1.1.1", 2), ("127.0.0.1", 3), ("10.1.1.2", 1)][who]
        ports = ports_of(instance) if to_rollout else []
        heard[source] = heard.get(source, 0) + len(datagram)
        simulation.deliver(datagram, source, (SERVER, ports[0] if ports else LOBBY_PORT))
        simulation.run(wait)
        clients = instance.lobby.clients
        assert len({client.key for client in clients.values()}) == len(clients)  # P-8
        if instance.lobby.state.name == "RUNNING":
            port = instance.lobby.port
            assert all(client.ready for client in clients.values() if client.port == port)  # P-10
        for address, sent in simulation.sent_bytes.items():
            if not simulation.host.guard.proven(address):
                assert sent <= max(3 * heard[address], 1000 * (simulation.now - begun + 1))


client_junk = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [b"count:0;agent0=open,k,,not_ready", b"count:0;agent0=close,k,joe,ready", b"count:0;registered=agent0"]
    ),
    st.sampled_from(
        [b"count:0;start=port:40000", b"count:0;start=port:40001", b'count:0;message=bridge/1 {"token":"00112233"}']
    ),
    st.builds(
        lambda t, s, r, d, x: f"count:0:{t}:{s};obs=1;reward={r};done={d}{x}".encode(),
        st.integers(0, 9),
        st.integers(0, 9),
        st.sampled_from(["1", "-0.5", "nan", "x"]),
        st.sampled_from(["true", "false"]),
        st.sampled_from(
            ["", ";extra=ack:1,got:1,sent:1,ret:5", ";extra=ack:x", ";extra=ack:9,got:1,sent:1,ret:1,token:00112233"]
        ),
    ),
)


@settings(max_examples=EXAMPLES or 150, deadline=None)
@given(st.lists(st.tuples(client_junk, st.sampled_from([LOBBY_PORT, 40000, 40001, 9]), st.floats(0, 5)), max_size=40))
def test_no_datagram_raises_out_of_the_client_and_done_comes_once_a_run(events):
    simulation = Simulation(0)
    visitor = simulation.join(H, tag="joe")
    visitor.runs = 10**9
    for datagram, port, wait in events:
        simulation.deliver(datagram, (SERVER, port), visitor.address)
        for address, _ in visitor.player.tick(simulation.now):
            assert parse_client_ok(address)
        simulation.now += wait
    for steps in visitor.steps[:-1]:
        assert [step.done for step in steps].count(True) == 1
        order = [(step.step, step.timestamp) for step in steps if not step.lost]
        assert order == sorted(set(order))


def parse_client_ok(datagram):
    from bridge.perlert.protocol.packet import parse_client

    parse_client(datagram)
    return True


def test_the_machines_name_no_socket_thread_or_clock():
    folder = Path(bridge.perlert.__file__).parent
    assert [path.name for path in folder.glob("protocol/*.py") if IO.search(path.read_text())] == []
    for name in ("lobby", "rollout", "player", "player_run"):
        assert not IO.search((folder / f"{name}.py").read_text()), name
    with_sockets = [p.name for p in folder.glob("*.py") if re.search(r"^\s*import socket\b", p.read_text(), re.M)]
    # A gateway's lobby looks names up; its datagrams go through `udp.py`, too.
    assert sorted(with_sockets) == ["gateway_lobby.py", "udp.py"]


def test_a_datagram_that_is_for_nobody_is_dropped_and_counted():
    simulation = Simulation()
    simulation.publish(H, CountWorld())
    stranger = ("10.0.0.9", 9)
    for datagram in (
        b"count:1;ready=agent0,true",
        b"city:0;register=agent0,x",
        b"count:0;register=a,x,ready",
        b"",
        b"\xff",
    ):
        simulation.deliver(datagram, stranger, LOBBY)
    simulation.deliver(b"count:0;action=1", stranger, (SERVER, 50000))
    assert simulation.host.counts == {"no such instance": 2, "malformed": 3, "closed port": 1}
    assert simulation.sent_bytes == {}


def test_who_asks_for_a_lobby_that_is_not_there_is_told_what_there_is():
    simulation = Simulation(guard=GuardConfig())
    simulation.publish(H, CountWorld())
    visitors = [simulation.join(Header("nope", 0), host=host) for host in ("127.0.0.1", "203.0.113.1")]
    simulation.run(3.0)
    for visitor in visitors:
        assert visitor.player.waits_for() == (
            "the lobby has not answered, but said: There is no nope:0 here; there is count:0"
        )
    # An address that is not proven is sent no more than a kilobyte a second, or three times what it sent.
    far = ("203.0.113.9", 1)
    for _ in range(100):
        simulation.deliver(b"nope:0;lobby", far, LOBBY)
    assert simulation.sent_bytes.get(far, 0) <= 3 * 100 * 12


@pytest.mark.slow
def test_every_datagram_of_the_server_is_within_the_limit_and_in_the_grammar():
    # P-1
    simulation = Simulation(15, loss=0.2, duplicate=0.2, delay=(0.001, 0.1), guard=TRUST)
    simulation.publish(H, CountWorld(40, 50), rollout=RolloutConfig(fps=30))
    visitors = [simulation.join(H) for _ in range(40)]
    inner = simulation.send
    longest = 0

    def spy(datagram, source, target):
        nonlocal longest
        longest = max(longest, len(datagram))
        if source[0] == SERVER:
            parse_server(datagram)
        inner(datagram, source, target)

    simulation.send = spy
    assert simulation.run(100.0, lambda: all(visitor.finished for visitor in visitors))
    assert longest <= 1200
