import os

import pytest

pytest.importorskip("cryptography")

from bridge.errors import SettingError
from bridge.perlert.protocol.cipher import OVERHEAD, UP_OVERHEAD, ClientSeal, ServerSeal, check_key
from bridge.perlert.protocol.packet import MAX_CLIENT_MESSAGE, MAX_DATAGRAM, MAX_MESSAGE

KEY = b"0123456789abcdef"
ANN, EVE = ("10.0.0.1", 1), ("10.0.0.2", 2)


def shake(server, client, address=ANN):
    """Let a client's HELLO be answered."""
    opened = server.open(client.hello(), address)
    assert opened.message is None
    client.open(opened.reply)
    assert client.connected


def joined(key=KEY, address=ANN):
    server, client = ServerSeal(KEY), ClientSeal(key)
    shake(server, client, address)
    return server, client


def test_messages_pass_both_ways_and_are_not_readable():
    # P-26
    server, client = joined()
    sealed = client.seal(b"city:7;lobby")
    assert b"city" not in sealed
    assert len(sealed) == len(b"city:7;lobby") + UP_OVERHEAD
    assert server.open(sealed, ANN).message == b"city:7;lobby"
    answer = server.seal(b"city:7;registered=agent0", ANN)
    assert len(answer) == len(b"city:7;registered=agent0") + OVERHEAD
    assert client.open(answer) == b"city:7;registered=agent0"
    assert MAX_MESSAGE + OVERHEAD == MAX_CLIENT_MESSAGE + UP_OVERHEAD == MAX_DATAGRAM


def test_a_datagram_of_one_port_opens_at_no_other_one():
    # The run is in the authenticated data, so nothing of one run is taken in another.
    server, client = joined()
    assert server.open(client.seal(b"city:7;lobby"), ANN).message
    action = client.seal(b"city:7;action=1", 40000)
    for port in (None, 40001):
        assert server.open(action, ANN, port).message is None
    assert server.open(action, ANN, 40000).message == b"city:7;action=1"
    step = server.seal(b"x", ANN, 40000)
    assert client.open(step, 40001) is None
    assert client.open(step, 40000) == b"x"


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


def test_without_the_key_nothing_is_opened():
    server = ServerSeal(KEY)
    for datagram in (
        ClientSeal(b"another key, 16b").hello(),
        b"city:7;lobby",
        b"",
        b"\x01",
        b"\x02" * 60,
        b"\x03" * 48,
        os.urandom(99),
    ):
        opened = server.open(datagram, ANN)
        assert opened.message is None
        assert opened.reply is None or datagram[:1] == b"\x03"


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


def test_old_connections_of_an_address_are_never_opened_again():
    server, client = joined()
    hello, first = client.hello(), [client.seal(b"%d" % number) for number in range(5)]
    assert server.open(first[0], ANN).message == b"0"
    again = ClientSeal(KEY)
    shake(server, again)
    assert server.open(again.seal(b"new"), ANN).message == b"new"
    server.open(hello, ANN)
    for sealed in first:  # those that never came, too
        assert server.open(sealed, ANN).message is None
    assert server.open(again.seal(b"newer"), ANN).message == b"newer"


def test_hellos_that_come_again_change_nothing():
    server, client = joined()
    hello = client.hello()
    assert server.open(client.seal(b"1"), ANN).message == b"1"
    for _ in range(10):
        client.open(server.open(ClientSeal(KEY).hello(), ANN).reply)
        client.open(server.open(hello, ANN).reply)
    assert server.open(client.seal(b"2"), ANN).message == b"2"
    assert client.open(server.seal(b"3", ANN)) == b"3"
    # Nor in the midst of another handshake.
    other = ClientSeal(KEY)
    reply = server.open(other.hello(), ANN).reply
    server.open(hello, ANN)
    other.open(reply)
    assert server.open(other.seal(b"4"), ANN).message == b"4"


def test_a_server_that_began_anew_challenges_its_clients_and_they_go_on():
    server, client = joined()
    assert server.open(client.seal(b"1"), ANN).message == b"1"
    restarted = ServerSeal(KEY)
    refused = restarted.open(client.seal(b"2"), ANN)
    assert refused.message is None
    assert len(refused.reply) <= 3 * len(client.seal(b"2"))
    client.open(refused.reply)
    assert restarted.open(client.seal(b"3"), ANN).message == b"3"
    assert client.open(restarted.seal(b"4", ANN)) == b"4"


def test_a_challenge_that_is_old_or_forged_or_of_another_datagram_changes_nothing():
    _, client = joined()
    restarted = ServerSeal(KEY)
    old = restarted.open(client.seal(b"x"), ANN).reply
    client.open(old)
    assert restarted.open(client.seal(b"1"), ANN).message == b"1"
    client.open(old)
    # Of something that the client never sent, and in answer to what it said in another connection:
    head = client.seal(b"2")[:33]
    client.open(restarted.open(head + os.urandom(60), ANN).reply)
    client.open(ServerSeal(KEY).open(ClientSeal(KEY).hello(), ANN).reply)
    client.open(b"\x02" + os.urandom(60))
    assert client.open(restarted.seal(b"3", ANN)) == b"3"
    assert restarted.open(client.seal(b"4"), ANN).message == b"4"


def test_a_client_that_comes_again_from_the_same_port_gets_a_new_connection():
    server, client = joined()
    assert server.open(client.seal(b"1"), ANN).message == b"1"
    again = ClientSeal(KEY)
    shake(server, again)
    assert server.open(again.seal(b"2"), ANN).message == b"2"
    assert again.open(server.seal(b"3", ANN)) == b"3"
    assert server.open(client.seal(b"4"), ANN).message is None


def test_a_connection_that_was_forgotten_is_not_opened_by_what_was_recorded():
    """A server holds so many connections, and then forgets the oldest."""
    server, client = joined()
    recorded = client.seal(b"1")
    assert server.open(recorded, ANN).message == b"1"
    for number in range(4096):
        other = ClientSeal(KEY)
        shake(server, other, ("10.0.0.9", number))
        assert server.open(other.seal(b"x"), ("10.0.0.9", number)).message == b"x"
    assert server.seal(b"x", ANN) is None
    assert server.open(recorded, ANN).message is None


def test_a_forged_challenge_is_not_taken():
    client = ClientSeal(KEY)
    client.hello()
    client.open(b"\x02" + os.urandom(60))
    other = ClientSeal(KEY)
    challenge = ServerSeal(KEY).open(other.hello(), ANN).reply
    client.open(challenge)
    assert not client.connected
    assert client.seal(b"x")[:1] == b"\x01"  # a HELLO again


def test_the_answer_to_a_hello_is_smaller_than_the_hello():
    server, client = ServerSeal(KEY), ClientSeal(KEY)
    hello = client.hello()
    assert len(server.open(hello, ANN).reply) <= len(hello)


@pytest.mark.parametrize("key", [b"", "short", b"15 bytes long..", 7])
def test_a_key_that_is_too_short_is_refused(key):
    with pytest.raises(SettingError, match="key of"):
        check_key(key)
