"""The lobby and those whose address is not proven: how much they are sent, tokens, floods."""

import pytest

from bridge.core.rounds import RoundState
from bridge.perlert import GuardConfig
from bridge.perlert import lobby as module
from bridge.perlert.lobby import LobbyConfig
from bridge.perlert.protocol.packet import (
    LobbyInfo,
    Message,
    Registered,
    Start,
)
from bridge.perlert.protocol.profile import Claim, format_tag, offer_text
from tests.perlert.lobbies import ANN, H, claim, make, new_run, slot, to
from tests.perlert_simulation import guard_of
from tests.support import objects_of


def offer(token, seq, key):
    return offer_text(token, seq=seq, slot=key, fps=30.0, decimals=6)


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
