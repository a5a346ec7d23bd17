"""The lobby in virtual time: slots, readiness, countdowns and runs."""

import math
import tracemalloc

import pytest

from bridge.core.rounds import TRANSITIONS, RoundEvent, RoundState
from bridge.errors import PacketError, SettingError
from bridge.perlert import GuardConfig
from bridge.perlert.lobby import Lobby, LobbyConfig
from bridge.perlert.protocol.packet import (
    LobbyInfo,
    Message,
    Registered,
    Slot,
    Start,
)
from tests.perlert.lobbies import ANN, BOB, EVE, H, claim, make, new_run, slot, to
from tests.perlert_simulation import guard_of


def texts(out, address):
    return [datagram.decode() for datagram, target in out if target == address]


def end_run(lobby, now, missed=()):
    """End the run that is on; all clients but those have been at its port."""
    for address, player in lobby.run.players.items():
        player.here = address not in missed
    lobby.run.end(now)
    return lobby.tick(now)


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
    assert slot(lobby, "agent1") == slot(lobby, "agent1")._replace(open=False, tag="ann", ready=False)
    assert len(lobby.clients) == 1


def test_a_registration_that_is_refused_keeps_the_old_slot_and_is_answered_with_the_lobby():
    # P-8
    lobby = make()
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;register=agent1,bob", BOB, 1.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 2.0)
    for now, datagram in ((3.0, b"city:7;register=agent1,ann"), (3.5, b"city:7;register=agent9,ann")):
        (info,) = to(lobby.receive(datagram, ANN, now), ANN)
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
    lobby = make(3, config=LobbyConfig(clients=1))
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;register=agent1,bob", BOB, 0.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 1.0)
    assert lobby.state is RoundState.GATHERING
    assert lobby.missing() == "not ready: agent1"
    lobby.receive(b"city:7;ready=agent1,true", BOB, 2.0)
    assert lobby.state is RoundState.STARTING


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
    assert lobby.state is RoundState.STARTING


def test_bots_alone_start_nothing():
    lobby = make(1, bots=("agent0",))
    lobby.tick(100.0)
    assert lobby.state is RoundState.GATHERING
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
    lobby.tick(120.0)
    assert list(lobby.clients) == [ANN]


def test_who_is_not_ready_may_take_time_while_nobody_waits():
    lobby = make(2, config=LobbyConfig(patience=120.0))
    for second in range(300):
        lobby.receive(b"city:7;register=agent0,ann", ANN, float(second))
    assert list(lobby.clients) == [ANN]


def test_a_countdown_is_announced_and_put_off_while_somebody_is_not_ready():
    # P-10
    lobby = make(1, config=LobbyConfig(countdown=3.0))
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    out = lobby.receive(b"city:7;ready=agent0,true", ANN, 1.0)
    assert Message(H, "Simulation will start in 3 s") in to(out, ANN)
    assert Message(H, "Simulation will start in 2 s") in to(lobby.tick(2.0), ANN)
    out = lobby.receive(b"city:7;ready=agent0,false", ANN, 2.5)
    assert Message(H, "The start is put off: not ready: agent0") in to(out, ANN)
    assert lobby.state is RoundState.GATHERING
    # Nobody was ready any more: it is counted anew.
    lobby.receive(b"city:7;ready=agent0,true", ANN, 3.0)
    lobby.tick(5.9)
    assert lobby.state is RoundState.COUNTDOWN
    lobby.tick(6.0)
    assert lobby.state is RoundState.STARTING


@pytest.mark.parametrize(("setting", "word", "countdown"), [(None, "r", 0.0), (None, "p", 3.0), (0.0, "p", 0.0)])
def test_without_a_setting_only_people_have_a_moment_before_the_start(setting, word, countdown):
    lobby = make(1, config=LobbyConfig(countdown=setting))
    lobby.receive(claim(lobby, "agent0", "ann", ANN, 1, word), ANN, 1.0)
    lobby.tick(1.0 + max(0.0, countdown - 0.1))
    assert (lobby.state is RoundState.STARTING) == (countdown == 0.0)
    lobby.tick(1.0 + countdown)
    assert lobby.state is RoundState.STARTING


def test_one_client_cannot_begin_a_countdown_again_for_ever():
    lobby = make(2, config=LobbyConfig(countdown=3.0))
    for key, address in (("agent0", ANN), ("agent1", EVE)):
        lobby.receive(f"city:7;register={key},x".encode(), address, 0.0)
        lobby.receive(f"city:7;ready={key},true".encode(), address, 0.0)
    for tick in range(1, 40):
        now = tick / 10
        word = "true" if tick % 2 else "false"
        lobby.receive(f"city:7;ready=agent1,{word}".encode(), EVE, now)
        lobby.receive(b"city:7;lobby", ANN, now)
        if lobby.state is RoundState.STARTING:
            break
    assert now <= 3.1


def test_who_toggles_or_registers_again_holds_the_others_up_no_longer_than_who_does_nothing():
    lobby = make(2, config=LobbyConfig(patience=10.0))
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 0.0)
    now = 0.0
    while now < 30.0:
        now += 0.25
        lobby.receive(f"city:7;register=agent1,eve{int(now * 4) % 7}".encode(), EVE, now)
        lobby.receive(b"city:7;lobby", ANN, now)
        if EVE not in lobby.clients:
            break
    assert 9.0 <= now <= 11.0
    lobby.receive(b"city:7;register=agent1,again", EVE, now + 1)
    assert EVE not in lobby.clients
    assert lobby.counts["held the others up"] >= 1
    # Another client takes the slot, the run starts, and the next one is open to everybody.
    lobby.receive(b"city:7;register=agent1,bob", BOB, now + 2)
    lobby.receive(b"city:7;ready=agent1,true", BOB, now + 2)
    lobby.started(new_run(lobby), now + 3)
    end_run(lobby, now + 4)
    lobby.receive(b"city:7;register=agent1,eve", EVE, now + 5)
    assert EVE not in lobby.clients, "the slot is held"
    lobby.tick(now + 60)
    lobby.receive(b"city:7;register=agent1,eve", EVE, now + 61)
    assert EVE in lobby.clients


def test_a_spectator_is_never_waited_for():
    # P-10: it is told of no run before it is ready.
    lobby = make(1, spectators=1)
    lobby.receive(b"city:7;register=spectator0,bob", BOB, 0.0)
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 1.0)
    assert lobby.state is RoundState.STARTING
    out = lobby.started(new_run(lobby), 1.0)
    assert to(out, ANN) == [Start(H, 40000)]
    assert to(out, BOB) == []


def start(lobby, port=40000, now=10.0):
    for i, address in enumerate((ANN, BOB)[: len(lobby.slots)]):
        lobby.receive(f"city:7;register=agent{i},x".encode(), address, now)
        lobby.receive(f"city:7;ready=agent{i},true".encode(), address, now)
    assert lobby.state is RoundState.STARTING
    return lobby.started(new_run(lobby, port), now)


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
    out = end_run(lobby, 100.0)
    for address in ANN, BOB:
        (info,) = to(out, address)
        assert not any(s.ready for s in info.slots)
    assert lobby.state is RoundState.GATHERING
    lobby.tick(114.0)
    assert len(lobby.clients) == 2
    lobby.tick(115.0)
    assert lobby.clients == {}


def test_a_client_that_missed_the_run_is_told_its_port_until_it_has_been_there():
    # P-16
    lobby = make(1)
    start(lobby)
    end_run(lobby, 10.5, missed=[ANN])
    player = lobby.clients[ANN].player
    assert Start(H, 40000) in to(lobby.receive(b"city:7;lobby", ANN, 11.0), ANN)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 11.5)
    assert lobby.state is RoundState.GATHERING
    player.here, player.heard = True, 11.7
    lobby.receive(b"city:7;ready=agent0,true", ANN, 12.6)  # it may still ask there
    assert lobby.state is RoundState.GATHERING
    lobby.receive(b"city:7;ready=agent0,true", ANN, 12.7)
    assert lobby.state is RoundState.STARTING


def test_a_client_that_never_comes_to_the_runs_port_is_told_it_until_that_is_closed():
    # P-16, P-17
    lobby = make(1)
    start(lobby)
    end_run(lobby, 10.5, missed=[ANN])
    assert to(lobby.receive(b"city:7;ready=agent0,true", ANN, 20.4), ANN)[-1] == Start(H, 40000)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 20.5)
    assert lobby.state is RoundState.STARTING


def test_a_start_that_fails_is_told_and_nobody_is_ready():
    lobby = make(1)
    lobby.receive(b"city:7;register=agent0,x", ANN, 0.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 1.0)
    out = lobby.start_failed("no licence", 2.0)
    assert Message(H, "The simulation could not start: no licence") in to(out, ANN)
    assert not slot(lobby, "agent0").ready
    assert lobby.state is RoundState.GATHERING


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


def test_a_lobby_of_many_slots_comes_in_several_datagrams_of_at_most_the_limit():
    lobby = make(64)
    out = lobby.receive(b"city:7;lobby", ANN, 0.0)
    assert len(out) > 1
    assert all(len(datagram) <= 1000 for datagram, _ in out)
    assert [s.key for message in to(out, ANN) for s in message.slots] == [f"agent{i}" for i in range(64)]


# Settings and the table


def test_every_state_and_event_of_the_table_is_reached_by_the_lobby():
    table = TRANSITIONS
    assert {state for state, _ in table} == set(RoundState)
    assert {event for _, event in table} == set(RoundEvent)
    assert set(table.values()) == set(RoundState)


def test_an_event_out_of_turn_is_an_error_of_the_owner():
    lobby = make()
    with pytest.raises(KeyError):
        lobby.start_failed("no licence", 0.0)
    with pytest.raises(KeyError):
        lobby.started(new_run(lobby), 0.0)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"slots": 0}, SettingError),
        ({"config": LobbyConfig(clients=3)}, SettingError),
    ],
)
def test_a_lobby_that_cannot_be_is_refused(settings, error):
    with pytest.raises(error):
        make(**settings)


def test_a_key_that_the_grammar_reserves_is_refused():
    with pytest.raises(PacketError):
        Lobby(H, [Slot("message", True, "agent", "", False)], guard_of())


@pytest.mark.parametrize("policy", [{"clients": 0}, {"countdown": -1.0}, {"countdown": math.inf}])
def test_a_start_policy_that_cannot_be_is_refused(policy):
    with pytest.raises(SettingError):
        LobbyConfig(**policy)


@pytest.mark.parametrize(
    "settings",
    [{"amplification": 0}, {"trusted": ("nowhere",)}, {"max_slots_per_host": 0}, {"unproven_bytes_per_second": 0}],
)
def test_a_guard_that_cannot_be_is_refused(settings):
    with pytest.raises(SettingError):
        GuardConfig(**settings)


@pytest.mark.slow
def test_of_addresses_without_end_that_hold_others_up_few_are_remembered():
    lobby = make(2, guard=GuardConfig(unproven_bytes_per_second=1e9, max_addresses=50))
    lobby.receive(claim(lobby, "agent1", "ann", ANN, 1, "r"), ANN, 0.0)

    def come_and_go(numbers):
        for number in numbers:
            address = f"fd00::{number:x}", 1000
            lobby.receive(claim(lobby, "agent0", "eve", address, 1), address, number * 1e-4)
            lobby.receive(claim(lobby, "agent0", "eve", address, 2, "l"), address, number * 1e-4)

    come_and_go(range(200))
    tracemalloc.start()
    try:
        come_and_go(range(200, 300))
        before, _ = tracemalloc.get_traced_memory()
        come_and_go(range(300, 1300))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What was read of the slots is remembered too, up to a limit: 100 kB here. The addresses took 240 kB more.
    assert after - before < 200_000
