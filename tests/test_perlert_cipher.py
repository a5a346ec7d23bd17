import os

import pytest

pytest.importorskip("cryptography")

from bridge.errors import SettingError
from bridge.perlert.cipher import OVERHEAD, ClientSeal, ServerSeal, check_key
from bridge.perlert.packet import MAX_DATAGRAM, MAX_MESSAGE

KEY = b"0123456789abcdef"
ANN, EVE = ("10.0.0.1", 1), ("10.0.0.2", 2)


def joined(key=KEY, address=ANN):
    server, client = ServerSeal(KEY), ClientSeal(key)
    opened = server.open(client.hello(), address)
    assert opened.message is None
    client.open(opened.reply)
    return server, client


def test_messages_pass_both_ways_and_are_not_readable():
    # P-26
    server, client = joined()
    sealed = client.seal(b"city:7;lobby")
    assert b"city" not in sealed
    assert len(sealed) == len(b"city:7;lobby") + OVERHEAD
    assert server.open(sealed, ANN).message == b"city:7;lobby"
    assert client.open(server.seal(b"city:7;registered=agent0", ANN)) == b"city:7;registered=agent0"
    assert MAX_MESSAGE + OVERHEAD <= MAX_DATAGRAM


def test_nothing_is_taken_twice_and_order_does_not_matter():
    # P-26
    server, client = joined()
    sealed = [client.seal(b"%d" % number) for number in range(50)]
    order = [3, 0, 49, 1, 48, 2]
    assert [server.open(sealed[number], ANN).message for number in order] == [b"%d" % number for number in order]
    assert all(server.open(sealed[number], ANN).message is None for number in order)


def test_a_datagram_older_than_the_window_is_dropped():
    server, client = joined()
    old = client.seal(b"old")
    for _ in range(1100):
        assert server.open(client.seal(b"x"), ANN).message == b"x"
    assert server.open(old, ANN).message is None


def test_a_changed_datagram_is_dropped_and_costs_its_number_nothing():
    server, client = joined()
    sealed = client.seal(b"city:7;lobby")
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        assert server.open(bytes(changed), ANN).message is None
    for size in range(len(sealed)):
        assert server.open(sealed[:size], ANN).message is None
    assert server.open(sealed, ANN).message == b"city:7;lobby"


def test_without_the_key_nothing_is_answered():
    server = ServerSeal(KEY)
    for datagram in (
        ClientSeal(b"another key, 16b").hello(),
        b"city:7;lobby",
        b"",
        b"\x01",
        b"\x02" * 60,
        b"\x03" * 60,
        os.urandom(99),
    ):
        opened = server.open(datagram, ANN)
        assert (opened.message, opened.reply) == (None, None)


def test_what_was_recorded_does_not_open_after_a_restart_or_elsewhere():
    server, client = joined()
    hello = client.hello()
    recorded = client.seal(b"city:7;action=1")
    restarted = ServerSeal(KEY)
    assert restarted.open(recorded, ANN).message is None
    assert restarted.open(hello, ANN).reply is not None
    assert restarted.open(recorded, ANN).message is None
    assert server.open(recorded, EVE).message is None
    server.open(hello, EVE)
    assert server.open(recorded, EVE).message is None
    # What the server said does not open as if a client had said it.
    server.open(recorded, ANN)
    assert [server.open(server.seal(b"x", ANN), ANN).message for _ in range(5)] == [None] * 5


def test_a_hello_again_leaves_the_connection_as_it_is():
    server, client = joined()
    hello = client.hello()
    assert server.open(client.seal(b"1"), ANN).message == b"1"
    other = ClientSeal(KEY)
    server.open(other.hello(), ANN)
    server.open(hello, ANN)
    assert server.open(client.seal(b"2"), ANN).message == b"2"
    assert client.open(server.seal(b"3", ANN)) == b"3"


def test_a_client_that_comes_again_from_the_same_port_gets_a_new_connection():
    server, client = joined()
    assert server.open(client.seal(b"1"), ANN).message == b"1"
    again = ClientSeal(KEY)
    again.open(server.open(again.hello(), ANN).reply)
    assert server.open(again.seal(b"2"), ANN).message == b"2"
    assert again.open(server.seal(b"3", ANN)) == b"3"
    assert server.open(client.seal(b"4"), ANN).message is None


def test_a_forged_challenge_is_not_taken():
    client = ClientSeal(KEY)
    client.open(b"\x02" + os.urandom(60))
    assert not client.ready
    other = ClientSeal(KEY)
    challenge = ServerSeal(KEY).open(other.hello(), ANN).reply
    client.open(challenge)
    assert not client.ready
    assert client.seal(b"x") is None


def test_the_answer_to_a_hello_is_smaller_than_the_hello():
    server, client = ServerSeal(KEY), ClientSeal(KEY)
    hello = client.hello()
    assert len(server.open(hello, ANN).reply) <= len(hello)


@pytest.mark.parametrize("key", [b"", "short", b"15 bytes long..", 7])
def test_a_key_that_is_too_short_is_refused(key):
    with pytest.raises(SettingError, match="key of"):
        check_key(key)
