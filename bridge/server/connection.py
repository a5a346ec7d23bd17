"""A client's connection and its calls, as the server's transport sees them."""

from __future__ import annotations

import queue
import selectors
import socket
import threading
from collections import deque
from typing import Any, Protocol

from bridge.errors import RequestError
from bridge.http2 import RefusedMessage
from bridge.server.flight import Flight
from bridge.session import Session
from bridge.tls import Tls

__all__ = ["CHUNK", "Call", "Connection", "Dialect", "Switchboard"]

CHUNK = 65536
"""Bytes that are received at a time."""
_MAX_PARTS = 64

Request = bytes | bytearray


class Dialect:
    """What a connection speaks: writes to its `fresh`. Called with the connection's lock held.

    What is here serves where there is nothing to do or to say.
    """

    throttles = False
    """Whether a call's client can be made to wait without the others of its connection."""

    @property
    def space(self) -> memoryview | None:
        """Where the next bytes go, to be received into and told to `filled`; None: any, to `feed`."""
        return None

    def filled(self, count: int) -> None:
        """Take note that bytes are in `space`."""

    def feed(self, data: bytes) -> None:
        """Take bytes; what they complete goes to the transport. Raises RequestError where they cannot be read."""
        raise NotImplementedError

    def ended(self) -> bool:
        """Take note that the client's stream of bytes came to its end; return whether it may take answers still."""
        return False

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send a call's answer; return whether the client has room for all of it."""
        raise NotImplementedError

    def blocked(self, call: Call) -> bool:
        """Whether the client has no room for a call's answers, though the socket has."""
        return False

    def defer(self, call: Call, size: int) -> None:
        """Make the client wait for room where a request of this size is not served yet."""

    def resume(self, call: Call, size: int) -> None:
        """Give the client the room of a deferred request."""

    def finish(self, call: Call, error: RequestError | None) -> None:
        """End a call: as it should, or for a reason."""

    def refuse(self, error: RequestError) -> None:
        """Tell a client whose bytes cannot be read why the connection ends."""

    def drain(self) -> None:
        """Tell the client that no further calls are taken."""

    def tend(self, now: float) -> bool:
        """See to signs of life; return whether the connection may stay."""
        return True


class Switchboard(Protocol):
    """What a dialect asks of the transport."""

    def begin(self, connection: Connection, version: str, prefix: str) -> Call:
        """Admit a call, of a client that says it has this version; raises RequestError where there are too many."""

    def push(self, call: Call, request: Request | None) -> None:
        """Have a request served once those before it were; None: no more follow."""

    def abandon(self, call: Call, error: RequestError | None = None) -> None:
        """End a call whose client is gone, or, for a reason that it is told, is listened to no longer."""

    def settled(self, connection: Connection) -> None:
        """Take note that a client speaks the connection's language."""


class Call:
    """One stream of requests: a session.

    Args:
        connection: Where it comes and answers go.
        session: What answers.
        name: For the log.
    """

    def __init__(self, connection: Connection, session: Session, name: str) -> None:
        self.connection = connection
        self.session = session
        self.name = name
        self.stream: Any = None
        """What the dialect knows it by."""
        self.requests: deque[Request | None] = deque()
        """Not served yet, because the client takes no answers; None: the end."""
        self.over = False
        """Nothing more is said."""
        self.concluded = False
        """Its session is closed, or is being."""
        self.waiting: queue.SimpleQueue[Request | RequestError | None] | None = None
        """Where its requests go while it has a thread of its own; those that are too many as why; None: the end."""
        self.pending = 0
        """Bytes of its answers that count while the client has no room for them."""
        self.room = threading.Event()
        """Set when the client may have room again for answers of its own thread."""


class Connection:
    """One client's socket, and what is to be sent over it.

    Args:
        sock: Not blocking.
        peer: Where the client is, for the log.
        tls: What stands between the socket and the dialect; None: nothing.
        flight: Counts the bytes that wait.
    """

    def __init__(self, sock: socket.socket, peer: str, tls: Tls | None, flight: Flight) -> None:
        self.sock = sock
        self.peer = peer
        self.tls = tls
        self.dialect: Dialect
        self.lock = threading.RLock()
        """Held by whoever reads, writes or changes what is here, or in the dialect."""
        self.calls: set[Call] = set()
        self.fresh: list[bytes | memoryview] = []
        """What is to be sent with the next `flush`."""
        self.out: deque[memoryview] = deque()
        """What the socket did not take."""
        self.held = 0
        """Bytes that count for `max_queued_bytes`: of large requests that are not served, and of `out`."""
        self.events = selectors.EVENT_READ
        self.ending = False
        """Nothing more is read; it closes once what it has to say is sent."""
        self.eof = False
        """The client sends nothing more."""
        self.broken = False
        """Another thread than the leader found that nothing can be sent."""
        self.closed = False
        self.moved = False
        """Whether the client took some of what waited, since somebody looked."""
        self.small = True
        """Whether the last answer may wait for the next ones, and be sent together with them."""
        self.stalled: set[Call] = set()
        """Calls that wait for their client to take answers."""
        self._flight = flight

    def admit(self, size: int) -> None:
        """Count a large request that begins, or raise RequestError; negative: give it up."""
        if size > 0:
            self._flight.reserve(size)
            self.held += size
        else:
            self.hold(size)

    def hold(self, size: int) -> None:
        """Count bytes that wait, fewer where `size` is negative."""
        with self.lock:
            if size and not self.closed:  # all was given back when it was closed
                self.held += size
                self._flight.hold(size)

    def drop(self, request: Request | None) -> None:
        """Forget a request that is not to be served."""
        if type(request) is bytearray:
            self.hold(-len(request))

    def receive(self) -> int:
        """Receive once; return the number of bytes: 0 at the end of the stream.

        Raises:
            OSError: As the socket does; ssl.SSLError where TLS ends it.
            RequestError: The bytes cannot be read.
        """
        dialect = self.dialect
        if self.tls is not None:
            data = self.sock.recv(CHUNK)
            plain = self.tls.receive(data) if data else b""
            while plain and (space := dialect.space) is not None:
                count = min(len(space), len(plain))
                space[:count] = plain[:count]
                dialect.filled(count)
                plain = plain[count:]
            if plain:
                dialect.feed(plain)
            return len(data)
        space = dialect.space
        if space is not None:
            count = self.sock.recv_into(space)
            dialect.filled(count)
            return count
        data = self.sock.recv(CHUNK)
        if data:
            dialect.feed(data)
        return len(data)

    def flush(self) -> None:
        """Send what is to be sent, as far as the socket takes it. Raises OSError as the socket does."""
        fresh = self.fresh
        if self.tls is not None:
            if not self.tls.ready:
                fresh = [self.tls.send()] if self.tls.owes else []
            else:
                fresh = [self.tls.send(fresh)] if fresh or self.tls.owes else []
                self.fresh = []
        else:
            self.fresh = []
        if not fresh:
            return
        size = len(fresh[0]) if len(fresh) == 1 else sum(map(len, fresh))
        if self.out:
            self._keep(fresh, size)
            return
        if size <= CHUNK or len(fresh) == 1:
            data = fresh[0] if len(fresh) == 1 else b"".join(fresh)
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent < size:
                self.out.append(memoryview(data)[sent:])
                self.hold(size - sent)
            return
        self._keep(fresh, size)
        self.drain()

    def _keep(self, parts: list[bytes | memoryview], size: int) -> None:
        self.out.extend(memoryview(part) for part in parts if len(part))
        self.hold(size)

    def drain(self) -> None:
        """Send of `out` what the socket takes. Raises OSError as the socket does."""
        out, sock = self.out, self.sock
        try:
            while out:
                if hasattr(sock, "sendmsg"):
                    sent = sock.sendmsg([out[i] for i in range(min(len(out), _MAX_PARTS))])
                else:
                    sent = sock.send(out[0])
                self.hold(-sent)
                self.moved = True
                while sent:
                    first = out[0]
                    if sent < len(first):
                        out[0] = first[sent:]
                        break
                    out.popleft()
                    sent -= len(first)
        except BlockingIOError:
            return

    def enter(self, request: Request) -> None:
        """Count a request as one in flight, or raise RequestError. A large one counted as one that waits until now."""
        self._taken(request)
        self._flight.enter(len(request))

    def check(self, request: Request) -> None:
        """Raise as `enter`, and count nothing: of a request that is served at once."""
        self._taken(request)
        self._flight.check(len(request))

    def _taken(self, request: Request) -> None:
        if type(request) is bytearray:
            self.hold(-len(request))
        if isinstance(request, RefusedMessage):
            raise request.error
