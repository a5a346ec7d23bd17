"""`bridge.core.transport.sockets`: a socket that `recv` waits at for a moment."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

import pytest

from bridge.core.transport.sockets import AT_ONCE, RECEIVE_TIMEOUT, let_receive_wait


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere recv does not wait, and a selector does")
def test_recv_waits_for_a_moment_unless_it_is_told_not_to() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert let_receive_wait(ours)
        with pytest.raises(BlockingIOError):
            ours.recv(10, AT_ONCE)
        with pytest.raises(BlockingIOError):
            ours.recv(10)  # after RECEIVE_TIMEOUT
        timer = threading.Timer(RECEIVE_TIMEOUT / 5, theirs.send, [b"late"])
        timer.start()
        received = b""
        while not received:
            with contextlib.suppress(BlockingIOError):
                received = ours.recv(10)
        assert received == b"late"
        timer.join()
        with contextlib.suppress(BlockingIOError):
            while ours.send(bytes(65536), AT_ONCE):
                pass
        with pytest.raises(BlockingIOError):
            ours.send(bytes(1 << 24), AT_ONCE)
