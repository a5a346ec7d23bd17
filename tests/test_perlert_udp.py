"""`bridge.perlert.udp`: what a socket gives, by datagrams of each length."""

import socket

import pytest

from bridge.perlert.udp import receive


@pytest.mark.parametrize(("size", "kept"), [(20, True), (21, False), (1000, False)])
def test_a_datagram_that_the_buffer_cuts_is_told_from_a_whole_one(size, kept):
    # P-19: a fixed buffer, and no plausible `12.` out of a cut `12.5`.
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(5.0)
        sender.sendto(b"x" * size, receiver.getsockname())
        datagram, address, _ = receive(receiver, 20)
        assert (datagram is not None) == kept
        assert address[0] == "127.0.0.1"
