"""`bridge.client.wire.directory`: the addresses of a name, in the order in which they are tried."""

import socket

from bridge.client.wire.directory import interleave


def test_address_families_take_turns_and_the_first_stays_first() -> None:
    six, four = socket.AF_INET6, socket.AF_INET
    assert interleave([(six, 1), (six, 2), (six, 3), (four, 4)]) == ((six, 1), (four, 4), (six, 2), (six, 3))
    assert interleave([(four, 1), (six, 2), (four, 3)]) == ((four, 1), (six, 2), (four, 3))
    assert interleave([]) == ()
