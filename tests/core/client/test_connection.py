"""`ClientCall` of `bridge.core.client.wire.connection`: when the requests of calls that share a connection leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bridge.core.client.wire.connection import ClientCall
from tests.inside import new_poller


class Connection:
    """A connection to nowhere, which keeps the sizes of the pieces in which requests leave."""

    max_message_bytes, inherited, silent, connected = 1 << 20, False, False, True

    def __init__(self, poller: Any, *, shared: bool = True) -> None:
        self.poller, self.shared = poller, shared
        self.unsent = self.packed = 0
        self.pieces: list[int] = []
        self.protocol: Any = SimpleNamespace(pack=self._pack)

    def _pack(self, call: ClientCall, request: bytes) -> None:
        self.packed += 1

    def add(self, call: ClientCall) -> None:
        """Do nothing: it is open."""

    remove = add

    def flush(self, *, wait: bool = False) -> None:
        self.unsent = 0
        if self.packed:
            self.pieces.append(self.packed)
        self.packed = 0

    def check_keepalive(self) -> None:
        """Do nothing: nobody is there."""


def calls_of(connection: Any, count: int) -> list[ClientCall]:
    return [ClientCall(connection, "grpc://nowhere:1", lambda what: None) for _ in range(count)]


@pytest.mark.parametrize("count", [33, 64, 200, 1000])
def test_the_first_of_many_requests_leave_while_the_others_are_written(count: int) -> None:
    connection = Connection(new_poller())
    first, *others = calls_of(connection, count)
    with connection.poller.corked():
        first.send(b"a")
        for number, call in enumerate(others, 2):
            call.send(b"a")
            assert bool(connection.pieces) == (number >= 16)
    assert sum(connection.pieces) == count
    assert len(connection.pieces) <= 2 + count // 64
    # Outside of the block each leaves at once, and the next block begins anew.
    first.send(b"a")
    assert connection.pieces[-1] == 1
    connection.pieces.clear()
    with connection.poller.corked():
        for call in (first, *others):
            call.send(b"a")
    assert connection.pieces[0] == 16


@pytest.mark.parametrize("count", [1, 2, 15, 16])
def test_few_requests_leave_in_one_piece(count: int) -> None:
    connection = Connection(new_poller())
    with connection.poller.corked():
        for call in calls_of(connection, count):
            call.send(b"a")
    assert connection.pieces == [count]


def test_each_server_gets_its_first_requests_early() -> None:
    poller: Any = new_poller()
    near, far = Connection(poller), Connection(poller)
    with poller.corked():
        for here, there in zip(calls_of(near, 40), calls_of(far, 40), strict=True):
            here.send(b"a")
            there.send(b"a")
    assert near.pieces == far.pieces == [16, 24]


def test_requests_over_a_connection_that_is_not_shared_leave_at_once() -> None:
    connection = Connection(new_poller(), shared=False)
    with connection.poller.corked():
        for call in calls_of(connection, 3):
            call.send(b"a")
    assert connection.pieces == [1, 1, 1]


def test_what_was_written_before_an_error_leaves() -> None:
    connection = Connection(new_poller())
    calls = calls_of(connection, 20)

    def send_all() -> None:
        with connection.poller.corked():
            for call in calls:
                call.send(b"a")
            raise ValueError("the last one")

    with pytest.raises(ValueError, match="the last one"):
        send_all()
    assert connection.pieces == [16, 4]
    calls[0].send(b"a")
    assert connection.pieces == [16, 4, 1]
