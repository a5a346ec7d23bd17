import dataclasses
import itertools
import math

import pytest

from bridge.errors import PacketError, SettingError
from bridge.perlert import lobby as module
from bridge.perlert.guard import Guard, GuardConfig
from bridge.perlert.lobby import Lobby, LobbyConfig, SlotConfig, StartPolicy, State
from bridge.perlert.packet import Header, LobbyInfo, Message, Registered, Start, parse_server

H = Header("city", 7)
ANN, BOB, EVE = ("127.0.0.1", 1001), ("127.0.0.1", 1002), ("127.0.0.1", 1003)


def make(slots=2, *, bots=(), guard=None, policy=None, config=None, **settings):
    tokens = (f"{number:012x}" for number in itertools.count(1))
    return Lobby(
        H,
        [SlotConfig(f"agent{i}", "citizen", bot=f"agent{i}" in bots) for i in range(slots)],
        Guard(guard),
        new_token=lambda: next(tokens),
        policy=policy,
        config=config,
        **settings,
    )


def to(out, address):
    return [parse_server(datagram) for datagram, target in out if target == address]


def texts(out, address):
    return [datagram.decode() for datagram, target in out if target == address]


def slot(lobby, key):
    return lobby.listing()[key]


def test_a_client_that_asks_is_told_the_lobby():
    # P-7
    lobby = make()
    out = lobby.receive(b"city:7;lobby", ANN, 0.0)
    assert texts(out, ANN) == ["city:7;agent0=open,citizen,,not_ready;agent1=open,citizen,,not_ready"]
    assert len(out) == 1
    assert lobby.clients == {}


def test_a_registration_and_a_ready_are_told_to_all_registered_clients():
    # P-7, P-9
    lobby = make()
    out = lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    assert texts(out, ANN) == [
        "city:7;registered=agent0",
        "city:7;agent0=close,citizen,ann,not_ready;agent1=open,citizen,,not_ready",
    ]
    out = lobby.receive(b"city:7;register=agent1,bob", BOB, 1.0)
    both = "city:7;agent0=close,citizen,ann,not_ready;agent1=close,citizen,bob,not_ready"
    for text in texts(out, ANN), texts(out, BOB):
        ordered = sorted(text[-1].removeprefix("city:7;").split(";"))
        assert ordered == sorted(both.removeprefix("city:7;").split(";"))
    out = lobby.receive(b"city:7;ready=agent0,true", ANN, 2.0)
    for address in ANN, BOB:
        (info,) = to(out, address)
        assert isinstance(info, LobbyInfo)
        assert {s.key: s.ready for s in info.slots} == {"agent0": True, "agent1": False}


def test_the_lobby_is_not_told_to_clients_that_are_not_registered():
    # P-15
    lobby = make()
    lobby.receive(b"city:7;lobby", EVE, 0.0)
    out = lobby.receive(b"city:7;register=agent0,ann", ANN, 1.0)
    out += lobby.receive(b"city:7;ready=agent0,true", ANN, 2.0)
    assert {address for _, address in out} == {ANN}
    assert lobby.receive(b"city:7;ready=agent0,true", EVE, 3.0) == []
    assert lobby.receive(b"city:7;action=1", EVE, 3.0) == []


def test_a_client_leaves_its_old_slot_before_it_is_put_into_a_new_one():
    # P-8, P-28: the last registration that was received counts.
    lobby = make()
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 1.0)
    lobby.receive(b"city:7;register=agent1,ann", ANN, 2.0)
    assert slot(lobby, "agent0").open
    assert slot(lobby, "agent1") == dataclasses.replace(slot(lobby, "agent1"), open=False, tag="ann", ready=False)
    assert len(lobby.clients) == 1


def test_a_registration_that_is_refused_keeps_the_old_slot_and_is_answered_with_the_lobby():
    # P-8
    lobby = make()
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;register=agent1,bob", BOB, 1.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 2.0)
    for datagram in b"city:7;register=agent1,ann", b"city:7;register=agent9,ann":
        (info,) = to(lobby.receive(datagram, ANN, 3.0), ANN)
        assert isinstance(info, LobbyInfo)
    assert slot(lobby, "agent0").ready
    (info,) = to(lobby.receive(b"city:7;register=agent1,eve", EVE, 4.0), EVE)
    assert isinstance(info, LobbyInfo)
    assert slot(lobby, "agent1").tag == "bob"


def test_the_same_registration_again_changes_nothing_and_another_tag_is_not_ready():
    # P-9, P-28
    lobby = make()
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 1.0)
    out = lobby.receive(b"city:7;register=agent0,ann", ANN, 2.0)
    assert to(out, ANN) == [Registered(H, "agent0")]
    assert slot(lobby, "agent0").ready
    lobby.receive(b"city:7;register=agent0,anna", ANN, 3.0)
    assert not slot(lobby, "agent0").ready


def test_the_same_address_with_another_port_is_another_client():
    lobby = make()
    lobby.receive(b"city:7;register=agent0,ann", ("127.0.0.1", 1), 0.0)
    lobby.receive(b"city:7;register=agent1,ann", ("127.0.0.1", 2), 0.0)
    assert len(lobby.clients) == 2


def test_a_client_readies_its_own_slot_only():
    lobby = make()
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;register=agent1,bob", BOB, 0.0)
    lobby.receive(b"city:7;ready=agent1,true", ANN, 1.0)
    assert not slot(lobby, "agent0").ready
    assert not slot(lobby, "agent1").ready
    assert lobby.counts["not the sender's slot"] == 1


def test_the_simulation_does_not_start_while_a_client_is_not_ready():
    # P-10
    lobby = make(3, policy=StartPolicy(clients=1))
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;register=agent1,bob", BOB, 0.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 1.0)
    assert lobby.state is State.GATHERING
    assert lobby.missing() == "not ready: agent1"
    lobby.receive(b"city:7;ready=agent1,true", BOB, 2.0)
    assert lobby.state is State.STARTING


def test_the_simulation_starts_when_every_slot_has_a_ready_client_or_a_bot():
    # P-29: agents of clients and of the server in one simulation.
    lobby = make(3, bots=("agent2",))
    assert slot(lobby, "agent2").open
    assert (slot(lobby, "agent2").tag, slot(lobby, "agent2").ready) == ("cpu", True)
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 1.0)
    assert lobby.missing() == "open: agent1"
    lobby.receive(b"city:7;register=agent1,bob", BOB, 2.0)
    lobby.receive(b"city:7;ready=agent1,true", BOB, 3.0)
    assert lobby.state is State.STARTING


def test_bots_alone_start_nothing():
    lobby = make(1, bots=("agent0",))
    lobby.tick(100.0)
    assert lobby.state is State.GATHERING
    assert lobby.missing() == "nobody is registered"


def test_a_bots_slot_can_be_taken_over_and_is_the_bots_again_afterwards():
    lobby = make(1, bots=("agent0",), config=LobbyConfig(expiry=15.0))
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    assert slot(lobby, "agent0").tag == "ann"
    assert not slot(lobby, "agent0").open
    lobby.tick(15.0)
    assert slot(lobby, "agent0").tag == "cpu"


def test_a_silent_registration_expires_and_the_others_are_told():
    lobby = make()
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;register=agent1,bob", BOB, 0.0)
    lobby.tick(1.0)
    for second in range(1, 15):
        lobby.receive(b"city:7;lobby", BOB, float(second))
    assert lobby.wake() <= 15.0
    out = lobby.tick(14.9)
    assert len(lobby.clients) == 2
    out = lobby.tick(15.0)
    assert list(lobby.clients) == [BOB]
    (info,) = to(out, BOB)
    assert {s.key: s.open for s in info.slots} == {"agent0": True, "agent1": False}


def test_who_is_never_ready_holds_the_others_up_for_two_minutes_at_most():
    # P-10
    lobby = make(2, config=LobbyConfig(patience=120.0))
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;register=agent1,eve", EVE, 0.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 0.0)
    for second in range(1, 120):
        # Changing the slot or the tag wins no time.
        lobby.receive(f"city:7;register=agent1,eve{second}".encode(), EVE, float(second))
        lobby.receive(b"city:7;lobby", ANN, float(second))
    assert EVE in lobby.clients
    assert lobby.wake() <= 120.0
    lobby.tick(120.0)
    assert list(lobby.clients) == [ANN]


def test_who_is_not_ready_may_take_time_while_nobody_waits():
    lobby = make(2, config=LobbyConfig(patience=120.0))
    for second in range(300):
        lobby.receive(b"city:7;register=agent0,ann", ANN, float(second))
    assert list(lobby.clients) == [ANN]


def test_a_client_that_waits_is_told_what_for():
    lobby = make(config=LobbyConfig(expiry=100.0, explain=5.0))
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 1.0)
    assert lobby.wake() <= 6.0
    assert Message(H, "Waiting: open: agent1") in to(lobby.tick(6.0), ANN)


def test_a_countdown_is_announced_and_called_off_when_somebody_is_no_longer_ready():
    # P-10
    lobby = make(1, policy=StartPolicy(countdown=3.0))
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    out = lobby.receive(b"city:7;ready=agent0,true", ANN, 1.0)
    assert Message(H, "Simulation will start in 3 s") in to(out, ANN)
    assert lobby.wake() == 2.0
    assert Message(H, "Simulation will start in 2 s") in to(lobby.tick(2.0), ANN)
    out = lobby.receive(b"city:7;ready=agent0,false", ANN, 2.5)
    assert Message(H, "The start is called off: not ready: agent0") in to(out, ANN)
    assert lobby.state is State.GATHERING
    lobby.receive(b"city:7;ready=agent0,true", ANN, 3.0)
    lobby.tick(5.9)
    assert lobby.state is State.COUNTDOWN
    lobby.tick(6.0)
    assert lobby.state is State.STARTING


def start(lobby, port=40000, now=10.0):
    for i, address in enumerate((ANN, BOB)[: len(lobby.slots)]):
        lobby.receive(f"city:7;register=agent{i},x".encode(), address, now)
        lobby.receive(f"city:7;ready=agent{i},true".encode(), address, now)
    assert lobby.state is State.STARTING
    return lobby.started(port, now)


def test_all_registered_clients_are_told_the_port_and_again_on_any_contact():
    # P-16: for the whole run, which is longer than 5 s.
    lobby = make()
    out = start(lobby)
    assert to(out, ANN)[-1] == to(out, BOB)[-1] == Start(H, 40000)
    for after in (1.0, 4.9, 60.0):
        for datagram in (b"city:7;lobby", b"city:7;ready=agent0,true", b"city:7;register=agent0,x", b"city:7;action=1"):
            assert to(lobby.receive(datagram, ANN, 10.0 + after), ANN)[-1] == Start(H, 40000)
    assert not any(isinstance(m, Start) for m in to(lobby.receive(b"city:7;lobby", EVE, 20.0), EVE))


def test_a_contact_during_the_run_changes_no_slot():
    lobby = make()
    start(lobby)
    lobby.receive(b"city:7;ready=agent0,false", ANN, 11.0)
    lobby.receive(b"city:7;register=agent0,other", ANN, 11.0)
    assert slot(lobby, "agent0").ready
    assert slot(lobby, "agent0").tag == "x"


def test_a_run_keeps_the_registrations_and_after_it_nobody_is_ready():
    lobby = make(config=LobbyConfig(expiry=15.0))
    start(lobby)
    lobby.tick(100.0)
    assert len(lobby.clients) == 2
    out = lobby.run_ended(100.0)
    for address in ANN, BOB:
        (info,) = to(out, address)
        assert not any(s.ready for s in info.slots)
    assert lobby.state is State.GATHERING
    lobby.tick(114.0)
    assert len(lobby.clients) == 2
    lobby.tick(115.0)
    assert lobby.clients == {}


def test_a_client_that_missed_the_run_is_told_its_port_until_it_has_been_there():
    # P-16
    lobby = make(1)
    start(lobby)
    lobby.run_ended(10.5, missed=[ANN])
    assert Start(H, 40000) in to(lobby.receive(b"city:7;lobby", ANN, 11.0), ANN)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 11.5)
    assert lobby.state is State.GATHERING
    lobby.settled(ANN, 40000)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 12.0)
    assert lobby.state is State.STARTING


def test_a_start_that_fails_is_told_and_nobody_is_ready():
    lobby = make(1)
    lobby.receive(b"city:7;register=agent0,x", ANN, 0.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 1.0)
    out = lobby.start_failed("no licence", 2.0)
    assert Message(H, "The simulation could not start: no licence") in to(out, ANN)
    assert not slot(lobby, "agent0").ready
    assert lobby.state is State.GATHERING


def test_a_storm_of_ready_toggles_is_told_at_most_ten_times_a_second():
    lobby = make(config=LobbyConfig(coalesce=0.1))
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;register=agent1,bob", BOB, 0.0)
    told = []
    for tick in range(150):
        now = 1.0 + tick / 150
        word = "true" if tick % 2 else "false"
        told += to(lobby.receive(f"city:7;ready=agent0,{word}".encode(), ANN, now), BOB)
    told += to(lobby.tick(2.5), BOB)
    assert 5 <= len([m for m in told if isinstance(m, LobbyInfo)]) <= 12
    assert told[-1].slots[0].ready == lobby.clients[ANN].ready or told[-1].slots[1].ready == lobby.clients[ANN].ready


def test_the_lobby_is_told_before_the_start_in_a_storm_too():
    lobby = make(1)
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    out = lobby.receive(b"city:7;ready=agent0,true", ANN, 0.01)
    messages = to(out, ANN)
    assert isinstance(messages[0], LobbyInfo)
    assert messages[0].slots[0].ready
    assert messages[1] == Message(H, "Simulation will start...")


def test_a_datagram_for_another_instance_is_dropped():
    lobby = make()
    assert lobby.receive(b"city:8;lobby", ANN, 0.0) == []
    assert lobby.receive(b"town:7;lobby", ANN, 0.0) == []
    assert lobby.counts["other instance"] == 2


@pytest.mark.parametrize("datagram", [b"", b"\xff\xff", b"city:7;register=agent0,x,ready;agent1=close", b"x" * 60_000])
def test_a_malformed_datagram_is_counted_and_answered_by_nothing(datagram):
    lobby = make()
    assert lobby.receive(datagram, ANN, 0.0) == []
    assert lobby.counts["malformed"] == 1


def test_a_lobby_of_many_slots_comes_in_several_datagrams_of_at_most_the_limit():
    lobby = make(64)
    out = lobby.receive(b"city:7;lobby", ANN, 0.0)
    assert len(out) > 1
    assert all(len(datagram) <= 1200 for datagram, _ in out)
    assert [s.key for message in to(out, ANN) for s in message.slots] == [f"agent{i}" for i in range(64)]


# Spoofed sources and squatters

FAR = ("203.0.113.5", 4000)


def bytes_to(out, address):
    return sum(len(datagram) for datagram, target in out if target == address)


def test_a_spoofed_address_is_sent_at_most_three_bytes_for_each_of_its_own():
    lobby = make(8, config=LobbyConfig(expiry=1e9))
    ours = theirs = 0
    script = [b"city:7;lobby"] * 5 + [
        b"city:7;register=agent0,x",
        b"city:7;register=agent1,x+b1",
        b"city:7;ready=agent1,true",
    ]
    for turn in range(200):
        datagram = script[turn % len(script)]
        theirs += len(datagram)
        ours += bytes_to(lobby.receive(datagram, FAR, turn * 0.5), FAR)
        ours += bytes_to(lobby.tick(turn * 0.5 + 0.2), FAR)
        # Somebody else makes changes that all registered clients are told.
        ours += bytes_to(lobby.receive(b"city:7;register=agent5,y" + b"z" * (turn % 9), ANN, turn * 0.5 + 0.3), FAR)
        assert ours <= 3 * theirs
    assert ours > theirs
    assert lobby.guard.dropped["amplification"] or lobby.counts["partial"]


@pytest.mark.parametrize("tag", ["", "x", "x" * 20, "x" * 40, "x+b1", "x" * 20 + "+b1"])
@pytest.mark.parametrize("asks", [0, 1])
def test_an_address_that_is_not_proven_still_gets_its_port_when_the_run_starts(tag, asks):
    lobby = make(1, offer=lambda token, key: "bridge/1 {}")
    out = []
    script = [b"city:7;lobby"] * asks + [f"city:7;register=agent0,{tag}".encode(), b"city:7;ready=agent0,true"]
    for datagram in script:
        out += lobby.receive(datagram, FAR, 0.0)
    assert Registered(H, "agent0") in to(out, FAR)
    assert lobby.state is State.STARTING
    out += lobby.started(40000, 0.1)
    assert to(out, FAR)[-1] == Start(H, 40000)
    assert bytes_to(out, FAR) <= 3 * sum(map(len, script))


def test_a_far_client_sees_every_slot_in_parts_and_all_at_once_when_it_has_answered():
    lobby = make(6, offer=lambda token, key: "bridge/1 {}")
    seen = set()
    for turn in range(12):
        for message in to(lobby.receive(b"city:7;lobby", FAR, float(turn)), FAR):
            seen |= {s.key for s in message.slots}
    assert seen == {f"agent{i}" for i in range(6)}
    lobby.receive(b"city:7;register=agent0,joe+b1", FAR, 20.0)
    out = lobby.receive(b"city:7;register=agent0,joe+b1", FAR, 20.5)
    assert [m.text for m in to(out, FAR) if isinstance(m, Message)] == ['bridge/1 {"token":"000000000001"}']
    out = lobby.receive(b"city:7;register=agent0,joe+b1.000000000001", FAR, 21.0)
    assert lobby.guard.proven(FAR)
    assert Message(H, "bridge/1 {}") in to(out, FAR)
    assert slot(lobby, "agent0").tag == "joe"
    (info,) = to(lobby.receive(b"city:7;lobby", FAR, 22.0), FAR)
    assert len(info.slots) == 6


def test_a_guessed_token_proves_nothing():
    lobby = make(1, offer=lambda token, key: "bridge/1 {}")
    lobby.receive(b"city:7;register=agent0,joe+b1", FAR, 0.0)
    lobby.receive(b"city:7;register=agent0,joe+b1.ffffffffffff", FAR, 1.0)
    assert not lobby.guard.proven(FAR)


def test_a_plain_client_is_offered_nothing():
    lobby = make(1, offer=lambda token, key: "bridge/1 {}")
    out = lobby.receive(b"city:7;register=agent0,joe", ANN, 0.0)
    assert [type(m) for m in to(out, ANN)] == [Registered, LobbyInfo]


def test_one_host_holds_four_slots_and_more_only_in_a_trusted_network():
    lobby = make(10)
    for i in range(10):
        lobby.receive(f"city:7;register=agent{i},x".encode(), ("198.51.100.1", 100 + i), 0.0)
    assert len(lobby.clients) == 4
    assert lobby.counts["slots of one host"] == 6
    lobby.receive(b"city:7;register=agent9,y", ("198.51.100.2", 100), 0.0)
    assert len(lobby.clients) == 5
    trusting = make(10)
    for i in range(10):
        trusting.receive(f"city:7;register=agent{i},x".encode(), ("127.0.0.1", 100 + i), 0.0)
    assert len(trusting.clients) == 10
    strict = make(10, guard=GuardConfig(max_slots_per_host=2))
    for i in range(10):
        strict.receive(f"city:7;register=agent{i},x".encode(), ("127.0.0.1", 100 + i), 0.0)
    assert len(strict.clients) == 2


def test_a_client_at_its_hosts_limit_can_still_change_its_slot():
    lobby = make(4, guard=GuardConfig(max_slots_per_host=1))
    lobby.receive(b"city:7;register=agent0,x", ANN, 0.0)
    lobby.receive(b"city:7;register=agent2,x", ANN, 1.0)
    assert not slot(lobby, "agent2").open


def test_a_flood_of_registrations_from_one_address_is_dropped():
    lobby = make(2, guard=GuardConfig(datagrams_per_second=50))
    answered = sum(bool(lobby.receive(b"city:7;lobby", ANN, 0.001 * i)) for i in range(1000))
    assert answered <= 51 + 50
    assert lobby.guard.dropped["flood"] >= 899


def test_a_flood_from_many_addresses_is_answered_up_to_the_total_rate_and_remembered_up_to_the_table():
    guard = GuardConfig(unproven_bytes_per_second=5000, max_addresses=100)
    lobby = make(1, guard=guard, bots=("agent0",))
    sent = 0
    for i in range(5000):
        address = (f"203.0.{i % 250}.{i // 250}", 5)
        sent += bytes_to(lobby.receive(b"city:7;lobby", address, i / 5000), address)
    assert 0 < sent <= 10_000
    assert len(lobby.guard._unproven) <= 100
    assert len(lobby.guard._hosts) <= 100
    # A client that is trusted is served all the same.
    assert lobby.receive(b"city:7;lobby", ANN, 1.0)


def test_the_total_rate_holds_for_everybody():
    lobby = make(1, guard=GuardConfig(bytes_per_second=1000))
    sent = 0
    for i in range(500):
        address = ("127.0.0.1", 2000 + i)
        sent += bytes_to(lobby.receive(b"city:7;lobby", address, i / 500), address)
    assert 0 < sent <= 2000
    assert lobby.guard.dropped["rate"] > 0


# Settings and the table


def test_every_state_and_event_of_the_table_is_reached_by_the_lobby():
    table = module.TRANSITIONS
    assert {state for state, _ in table} == set(State)
    assert {event for _, event in table} == set(module.Event)
    assert set(table.values()) == set(State)


def test_an_event_out_of_turn_is_an_error_of_the_owner():
    lobby = make()
    with pytest.raises(KeyError):
        lobby.run_ended(0.0)
    with pytest.raises(KeyError):
        lobby.started(1, 0.0)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"slots": 0}, SettingError),
        ({"policy": StartPolicy(clients=3)}, SettingError),
    ],
)
def test_a_lobby_that_cannot_be_is_refused(settings, error):
    with pytest.raises(error):
        make(**settings)


def test_a_key_that_the_grammar_reserves_is_refused():
    with pytest.raises(PacketError):
        Lobby(H, [SlotConfig("message")], Guard(), new_token=lambda: "0" * 12)


@pytest.mark.parametrize("policy", [{"clients": 0}, {"countdown": -1.0}, {"countdown": math.inf}])
def test_a_start_policy_that_cannot_be_is_refused(policy):
    with pytest.raises(SettingError):
        StartPolicy(**policy)


@pytest.mark.parametrize(
    "settings",
    [{"amplification": 0}, {"trusted": ("nowhere",)}, {"max_slots_per_host": 0}, {"bytes_per_second": 0}],
)
def test_a_guard_that_cannot_be_is_refused(settings):
    with pytest.raises(SettingError):
        GuardConfig(**settings)
