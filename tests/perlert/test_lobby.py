import math
import tracemalloc

import pytest

from bridge.core.rounds import TRANSITIONS, RoundEvent, RoundState
from bridge.errors import PacketError, SettingError
from bridge.perlert import GuardConfig, RolloutConfig
from bridge.perlert import lobby as module
from bridge.perlert.lobby import Lobby, LobbyConfig
from bridge.perlert.protocol.packet import (
    Header,
    LobbyInfo,
    Message,
    Registered,
    Slot,
    Start,
    parse_client,
    parse_server,
)
from bridge.perlert.protocol.profile import Claim, format_tag, offer_text
from bridge.perlert.rollout import Rollout
from tests.perlert_simulation import guard_of
from tests.support import objects_of

H = Header("city", 7)
ANN, BOB, EVE = ("127.0.0.1", 1001), ("127.0.0.1", 1002), ("127.0.0.1", 1003)


SECRET = b"a secret of the server"


class Heard(Lobby):
    """A lobby with what a host does before: the book of bytes, and the grammar."""

    def receive(self, datagram, sender, now):
        if not self.guard.heard(sender, datagram, now):
            return []
        return self.handle(parse_client(datagram), sender, len(datagram), now)


def make(slots=2, *, bots=(), guard=None, config=None, spectators=0, **settings):
    watches = {f"spectator{i}": "agent0" for i in range(spectators)}
    keys = [f"agent{i}" for i in range(slots)]
    found = [Slot(key, True, "citizen", "cpu" if key in bots else "", key in bots) for key in keys]
    return Heard(
        H,
        found + [Slot(key, True, "spectator", "", False) for key in watches],
        guard_of(guard, SECRET),
        config=config,
        watches=watches,
        **settings,
    )


def offer(token, seq, key):
    return offer_text(token, seq=seq, slot=key, fps=30.0, decimals=6)


def claim(lobby, key, name, address, seq, word="w", former=""):
    """A registration with the token of the address."""
    tag = format_tag(Claim(name, True, lobby.guard.token(address), seq, word, former))
    return f"city:7;register={key},{tag}".encode()


def to(out, address):
    return [parse_server(datagram) for datagram, target in out if target == address]


def texts(out, address):
    return [datagram.decode() for datagram, target in out if target == address]


def slot(lobby, key):
    return lobby.listing()[key]


def new_run(lobby, port=40000):
    return Rollout(H, port, lobby.guard, lambda key, text: None, RolloutConfig())


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


# Spoofed sources and squatters

FAR = ("203.0.113.5", 4000)


def bytes_to(out, address):
    return sum(len(datagram) for datagram, target in out if target == address)


def test_an_address_that_is_not_proven_is_sent_a_kilobyte_a_second_or_three_times_its_bytes():
    lobby = make(8, config=LobbyConfig(expiry=1e9))
    ours = theirs = 0
    script = [b"city:7;lobby"] * 5 + [
        b"city:7;register=agent0,x",
        b"city:7;register=agent1,x",
        b"city:7;ready=agent1,true",
    ]
    for turn in range(4000):
        now = turn * 0.01
        datagram = script[turn % len(script)]
        theirs += len(datagram)
        ours += bytes_to(lobby.receive(datagram, FAR, now), FAR)
        # Somebody else makes changes that all registered clients are told.
        tag = b"z" * (turn % 9)
        ours += bytes_to(lobby.receive(b"city:7;register=agent5,y" + tag, ANN, now + 0.005), FAR)
        assert ours <= max(1000 * (now + 1), 3 * theirs)
    assert ours > 3 * theirs / 2
    assert lobby.guard.dropped["amplification"] or lobby.counts["partial"]


def test_silence_earns_an_address_that_is_not_proven_nothing():
    guard = guard_of()
    assert guard.heard(FAR, b"x" * 10, 0.0)
    sent, now = 0, 0.0
    while now < 60.0:
        sent += 50 * guard.spend(FAR, 50, now)
        now += 0.02
    assert sent <= 6000  # the first second's worth, and 5 s after the datagram


def test_four_addresses_of_a_host_are_served_before_they_are_proven_and_every_one_gets_its_token():
    lobby = make(9, offer=offer)
    answered = {
        port: bytes_to(lobby.receive(b"city:7;lobby", ("203.0.113.9", port), 0.0), ("203.0.113.9", port))
        for port in range(1, 9)
    }
    assert [bool(size) for size in answered.values()] == [True] * 4 + [False] * 4
    fifth = ("203.0.113.9", 8)
    (told,) = to(lobby.receive(b"city:7;register=agent0,joe+b1", fifth, 1.0), fifth)
    assert told.text == offer_text(lobby.guard.token(fifth))
    out = lobby.receive(claim(lobby, "agent0", "joe", fifth, 1), fifth, 2.0)
    assert Registered(H, "agent0") in to(out, fifth)
    # Those that were silent make room.
    ninth = ("203.0.113.9", 9)
    assert bytes_to(lobby.receive(b"city:7;lobby", ninth, 30.0), ninth)


def test_a_plain_client_far_away_is_pushed_the_lobby():
    # P-7
    lobby = make()
    lobby.receive(b"city:7;register=agent0,far", FAR, 0.0)
    out = lobby.receive(b"city:7;register=agent1,ann", ANN, 2.0)
    (info,) = to(out, FAR)
    assert {s.key: s.tag for s in info.slots} == {"agent0": "far", "agent1": "ann"}
    (info,) = to(lobby.receive(b"city:7;ready=agent1,true", ANN, 3.0), FAR)
    assert {s.key: s.ready for s in info.slots} == {"agent0": False, "agent1": True}


def test_a_lobby_that_an_address_may_not_be_sent_at_once_follows_in_parts():
    # P-7
    lobby = make(64)
    seen = set()
    for second in range(12):
        now = float(second)
        out = lobby.receive(b"city:7;register=agent0,far", FAR, now) + lobby.tick(now + 0.5)
        for message in to(out, FAR):
            if isinstance(message, LobbyInfo):
                seen |= {s.key for s in message.slots}
    assert len(seen) == 64


@pytest.mark.parametrize("tag", ["", "x", "x" * 20, "x" * 40])
@pytest.mark.parametrize("asks", [0, 1])
def test_an_address_that_is_not_proven_still_gets_its_port_when_the_run_starts(tag, asks):
    lobby = make(1, offer=offer)
    out = []
    for datagram in [b"city:7;lobby"] * asks + [f"city:7;register=agent0,{tag}".encode(), b"city:7;ready=agent0,true"]:
        out += lobby.receive(datagram, FAR, 0.0)
    assert Registered(H, "agent0") in to(out, FAR)
    assert lobby.state is RoundState.STARTING
    out += lobby.started(new_run(lobby), 0.1)
    assert to(out, FAR)[-1] == Start(H, 40000)


# The token


def test_a_registration_with_the_profile_counts_with_its_token_alone():
    lobby = make(6, offer=offer)
    out = lobby.receive(b"city:7;register=agent0,joe+b1", FAR, 0.0)
    assert [m.text for m in to(out, FAR)] == [offer_text(lobby.guard.token(FAR))]
    assert lobby.clients == {}
    wrong = format_tag(Claim("joe", True, "f" * 12, 1, "r"))
    out = lobby.receive(f"city:7;register=agent0,{wrong}".encode(), FAR, 1.0)
    assert [m.text for m in to(out, FAR)] == [offer_text(lobby.guard.token(FAR))]
    assert lobby.clients == {}
    assert not lobby.guard.proven(FAR)
    out = lobby.receive(claim(lobby, "agent0", "joe", FAR, 1), FAR, 2.0)
    assert lobby.guard.proven(FAR)
    assert to(out, FAR)[:2] == [
        Registered(H, "agent0"),
        Message(H, offer(lobby.guard.token(FAR), 1, "agent0")),
    ]
    assert slot(lobby, "agent0").tag == "joe"
    assert not slot(lobby, "agent0").ready  # P-9
    lobby.receive(claim(lobby, "agent0", "joe", FAR, 2, "r"), FAR, 3.0)
    assert slot(lobby, "agent0").ready


def test_who_registered_with_a_token_is_changed_by_nothing_without_it():
    lobby = make(2, offer=offer)
    lobby.receive(b"city:7;register=agent0,early", FAR, 0.0)  # spoofed, before
    lobby.receive(claim(lobby, "agent0", "joe", FAR, 1, "r"), FAR, 1.0)
    before = slot(lobby, "agent0"), lobby.clients[FAR].token
    assert (before[0].tag, before[0].ready) == ("joe", True)
    for datagram in (
        b"city:7;register=agent0,joe",
        b"city:7;register=agent1,joe",
        b"city:7;register=agent0,joe+b1",
        b"city:7;register=agent0,joe+b1." + b"0" * 12 + b".9.l",
        b"city:7;ready=agent0,false",
        b"city:7;ready=agent1,false",
    ):
        lobby.receive(datagram, FAR, 2.0)
        assert (slot(lobby, "agent0"), lobby.clients[FAR].token) == before
    # Nor is it kept alive by them.
    for second in range(3, 30):
        lobby.receive(b"city:7;lobby", FAR, float(second))
    lobby.tick(30.0)
    assert lobby.clients == {}


def test_an_older_registration_that_comes_late_changes_nothing():
    lobby = make(2, offer=offer)
    late = claim(lobby, "agent1", "joe", FAR, 2, "r")
    lobby.receive(claim(lobby, "agent0", "joe", FAR, 1), FAR, 1.0)
    lobby.receive(claim(lobby, "agent0", "joe", FAR, 3), FAR, 2.0)
    lobby.receive(late, FAR, 3.0)
    assert slot(lobby, "agent1").open
    assert not slot(lobby, "agent0").ready
    # A client that began anew at this address is told how far the numbers are.
    out = lobby.receive(claim(lobby, "agent0", "joe", FAR, 1), FAR, 4.0)
    assert Message(H, offer(lobby.guard.token(FAR), 3, "agent0")) in to(out, FAR)


def test_an_older_registration_changes_nothing_after_the_client_has_expired_either():
    lobby = make(2, offer=offer)
    lobby.receive(claim(lobby, "agent0", "joe", FAR, 2), FAR, 0.0)
    lobby.tick(30.0)
    assert lobby.clients == {}
    lobby.receive(claim(lobby, "agent0", "joe", FAR, 1, "r"), FAR, 31.0)
    assert lobby.clients == {}
    # No host keeps a number for each address of the world: what 5,000 others sent after it has displaced this one's.
    for number in range(5000):
        other = (f"203.0.{number // 250}.{number % 250}", 9)
        lobby.receive(claim(lobby, "agent1", "x", other, 1, "l"), other, 32.0 + number / 100)
    lobby.receive(claim(lobby, "agent0", "joe", FAR, 1, "r"), FAR, 90.0)
    assert list(lobby.clients) == [FAR]


def test_a_client_that_leaves_frees_its_slot_at_once_and_nothing_that_is_late_takes_it_again():
    lobby = make(1, offer=offer)
    late = claim(lobby, "agent0", "joe", FAR, 1, "r")
    lobby.receive(claim(lobby, "agent0", "joe", FAR, 2), FAR, 1.0)
    lobby.receive(claim(lobby, "agent0", "joe", FAR, 3, "l"), FAR, 2.0)
    assert slot(lobby, "agent0").open
    lobby.receive(late, FAR, 3.0)
    assert slot(lobby, "agent0").open
    newest = claim(lobby, "agent0", "joe", FAR, 4)
    lobby.receive(newest, FAR, 4.0)
    assert not slot(lobby, "agent0").open
    lobby.tick(60.0)
    assert slot(lobby, "agent0").open
    lobby.receive(newest, FAR, 61.0)  # delivered twice
    assert slot(lobby, "agent0").open


def test_a_client_of_ours_that_comes_takes_no_slot_from_a_plain_one():
    lobby = make(2, offer=offer)
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(claim(lobby, "agent1", "joe", FAR, 1), FAR, 1.0)
    assert {address: client.key for address, client in lobby.clients.items()} == {ANN: "agent0", FAR: "agent1"}


def test_nobody_ceases_to_be_ready_while_the_environment_is_reset_for_those_who_are():
    # P-10
    lobby = make(1)
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    lobby.receive(b"city:7;ready=agent0,true", ANN, 1.0)
    assert lobby.state is RoundState.STARTING
    lobby.receive(b"city:7;ready=agent0,false", ANN, 2.0)
    assert slot(lobby, "agent0").ready


def test_a_client_that_comes_back_from_another_address_takes_its_slot_along():
    lobby = make(2, offer=offer, config=LobbyConfig(expiry=15.0))
    lobby.receive(claim(lobby, "agent0", "joe", FAR, 7, "r"), FAR, 0.0)
    token, new = lobby.guard.token(FAR), ("203.0.113.5", 4711)
    stranger = ("203.0.113.6", 1)
    lobby.receive(claim(lobby, "agent0", "joe", stranger, 1, "w", "f" * 12), stranger, 1.0)
    assert list(lobby.clients) == [FAR]
    out = lobby.receive(claim(lobby, "agent0", "joe", new, 1, "r", token), new, 1.0)
    assert list(lobby.clients) == [new]
    assert Registered(H, "agent0") in to(out, new)
    assert slot(lobby, "agent0").ready
    # The former address has no say any more.
    lobby.receive(claim(lobby, "agent0", "joe", FAR, 8, "l"), FAR, 2.0)
    assert list(lobby.clients) == [new]


def test_the_lobby_is_written_once_for_each_of_its_versions(monkeypatch):
    lobby = make(64)
    lobby.receive(b"city:7;register=agent0,ann", ANN, 0.0)
    written = []
    monkeypatch.setattr(module.packet, "format_message", lambda message: written.append(message) or b"x")
    for number in range(1000):
        lobby.receive(b"city:7;lobby", ("127.0.0.1", 2000 + number), 1.0)
    assert written == []
    lobby.receive(b"city:7;ready=agent0,true", ANN, 2.0)
    count = len([message for message in written if isinstance(message, LobbyInfo)])
    assert 0 < count <= 5


def test_a_plain_client_is_offered_nothing():
    lobby = make(1, offer=offer)
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
    sent, before = 0, sum(objects_of("bridge.perlert.protocol.guard").values())
    for i in range(5000):
        address = (f"203.0.{i % 250}.{i // 250}", 5)
        sent += bytes_to(lobby.receive(b"city:7;lobby", address, i / 5000), address)
    assert 0 < sent <= 10_000
    assert sum(objects_of("bridge.perlert.protocol.guard").values()) <= before + 4 * 100, "an address has three budgets"
    assert lobby.guard.trusts.cache_info().currsize <= 100
    # A client that is trusted is served all the same.
    assert lobby.receive(b"city:7;lobby", ANN, 1.0)


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
