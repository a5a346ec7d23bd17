"""One client's connection to the frames' transport, as the server sees it."""

from __future__ import annotations

import queue
import selectors
import socket
from collections import deque

from bridge.errors import RequestError
from bridge.frames import FrameReader, RefusedFrame
from bridge.server.flight import Flight
from bridge.session import Session
from bridge.tls import Tls

__all__ = ["CHUNK", "Connection", "read", "send_all", "send_parts"]

CHUNK = 65536
"""Bytes that are received at a time."""


class Connection:
    """One client's socket and session."""

    def __init__(self, sock: socket.socket, peer: str, tls: Tls | None, max_message_bytes: int, flight: Flight) -> None:
        self.sock = sock
        self.peer = peer
        """Where the client is, for the log."""
        self.tls = tls
        """What stands between the socket and the frames; None: nothing."""
        self.reader = FrameReader(max_message_bytes, admit=self._admit)
        self._flight = flight
        self.session: Session | None = None
        self.requests: deque[bytes | bytearray] = deque()
        """Complete, and not served yet."""
        self.out: deque[memoryview] = deque()
        """What the socket did not take yet."""
        self.held = 0
        """Bytes that count for `max_queued_bytes`: of a large request that is not served, and of `out`."""
        self.events = selectors.EVENT_READ
        self.number = 0
        """For the log, once it was let in."""
        self.ending = False
        """Nothing more is read; it closes once what it has to say is sent."""
        self.waiting: queue.SimpleQueue[bytes | bytearray | RequestError | None] | None = None
        """Where its requests go once it has a thread of its own; those that are too many as why."""

    def _admit(self, size: int) -> None:
        self._flight.reserve(size)
        self.held += size

    def hold(self, size: int) -> None:
        """Count bytes that wait, fewer where `size` is negative."""
        self.held += size
        self._flight.hold(size)

    def enqueue(self, frame: bytes | bytearray) -> None:
        """Hand a request to the connection's own thread, or why it is refused."""
        if self.waiting is None:
            return
        if type(frame) is bytearray:
            self.hold(-len(frame))  # from here on it counts as a request
        try:
            if isinstance(frame, RefusedFrame):
                raise frame.error
            self._flight.enter(len(frame))
        except RequestError as error:
            self.waiting.put(error)
        else:
            self.waiting.put(frame)


def read(connection: Connection) -> tuple[list[bytes | bytearray], int]:
    """Receive once; return the frames that are complete, and the number of bytes: 0 at the end of the stream."""
    if connection.tls is not None:
        data = connection.sock.recv(CHUNK)
        return connection.reader.take(connection.tls.receive(data) if data else b""), len(data)
    space = connection.reader.space
    if space is not None:
        count = connection.sock.recv_into(space)
        return connection.reader.filled(count), count
    data = connection.sock.recv(CHUNK)
    return connection.reader.feed(data), len(data)


def send_parts(sock: socket.socket, parts: list[bytes | memoryview] | list[memoryview]) -> int:
    """Send what the socket takes of the first of some parts; return the number of bytes."""
    if hasattr(sock, "sendmsg"):
        return sock.sendmsg(parts[:64])
    return sock.send(parts[0])


def send_all(connection: Connection, parts: list[bytes | memoryview]) -> None:
    """Send from a connection's own thread, however long its client takes to read."""
    sock, tls = connection.sock, connection.tls
    data = memoryview(b"".join(parts) if tls is None else tls.send(parts))
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            with selectors.DefaultSelector() as selector:
                selector.register(sock, selectors.EVENT_WRITE)
                selector.select(1.0)
