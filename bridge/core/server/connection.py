"""A client's connection: its socket, its received and outgoing bytes, and the base class of protocols on it."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Protocol

from bridge.core.server.event_loop import READ
from bridge.core.server.limits import Admission, ProcessorAccount
from bridge.core.transport.sockets import PATIENCE, QUIET, send_parts
from bridge.core.worlds.scheduling import Timer
from bridge.errors import RequestError

if TYPE_CHECKING:
    from bridge.core.server.calls import Call, Calls
    from bridge.core.transport.http2 import Http2
    from bridge.core.transport.tls import Tls

__all__ = ["CHUNK", "SMALL_CHUNK", "Connection", "ConnectionProtocol"]

CHUNK = 65536
"""The most bytes to receive at a time."""
SMALL_CHUNK = 4096
"""The most bytes to receive at a time from a client that uses much processor time without sending requests."""


class _Owner(Protocol):
    """The object that watches the sockets: `bridge.core.server.connections.Connections`."""

    calls: Calls

    def arrange(self, connection: Connection) -> None: ...

    def close(self, connection: Connection) -> None: ...


class Connection:
    """One client's socket, and the bytes to send over it.

    Args:
        owner: Watches the socket.
        sock: The socket, in non-blocking mode.
        peer: The client's address, for the log.
        tls: TLS between the socket and the protocol; None: none.
        admission: Counts the bytes that wait.
        account: Counts the processor time of the connection.
    """

    def __init__(
        self,
        owner: _Owner,
        sock: socket.socket,
        peer: str,
        tls: Tls | None,
        admission: Admission,
        account: ProcessorAccount,
    ) -> None:
        self._owner = owner
        self.sock = sock
        self.peer = peer
        self.tls = tls
        self.protocol: ConnectionProtocol
        self.answer: Callable[[Call, list[bytes | memoryview], int], bool]
        """Send an answer with the next `flush`. Return True if the client has room for all of it."""
        self.calls: set[Call] = set()
        self.blocked_calls: set[Call] = set()
        """Calls whose requests wait until the client takes their answers."""
        self.unserved = 0
        """Requests that were received but not examined yet."""
        self.turns = 0
        """The number of this connection's requests that were served."""
        self.turns_beside = 0
        """The number of other connections' requests served when this one last sent a message."""
        self.outgoing: list[bytes | memoryview] = []
        """Bytes to send with the next `flush`; the protocol appends to it."""
        self.unsent: deque[memoryview] = deque()
        """Bytes that the socket did not take."""
        self.events = READ
        """The events that the event loop watches the socket for."""
        self.paused = False
        """True if nothing is read for now, because too many requests wait."""
        self.ending = False
        """True if nothing more is read. The connection closes when its last bytes are sent."""
        self.shut = False
        """True if the client was told that nothing more is sent."""
        self.closed = False
        self.progressed = False
        """True if the client took some of the waiting bytes since the last check."""
        self.timer: Timer | None = None
        """Closes the connection if the client does not begin to speak, or after a refusal."""
        self.joins_answers = True
        """True if the last answer may wait for the next ones, to be sent together with them."""
        self._admission = admission
        self.held = 0
        """Bytes of this connection that count for `max_queued_bytes`."""
        self.ended: Callable[[], None] | None = None
        """Called when the connection is closed; None: nothing is called."""
        self.account = account
        self.role = "stranger"
        """The role of the client, as far as it is known: `stranger`, `viewer` or `client`."""

    def speak(self, protocol: ConnectionProtocol) -> None:
        """Use a protocol from now on."""
        self.protocol = protocol
        # Stored here to save a call in every step.
        self.answer = protocol.answer

    # The bytes that count for `max_queued_bytes`

    def admit(self, size: int) -> None:
        """Count `size` bytes of a large request, or raise RequestError. A negative size releases them."""
        if size > 0:
            self._admission.check(size)
        self.hold(size)

    def hold(self, size: int) -> None:
        """Count `size` more waiting bytes; a negative size reduces the count."""
        if size and not self.closed:  # all bytes were released when it was closed
            self.held += size
            self._admission.bytes += size

    def drop(self, request: bytes | bytearray | None) -> None:
        """Stop counting the bytes of a large request: it is dropped, or begins to be served."""
        # Large requests are counted when their memory is allocated, small ones only while they wait.
        if type(request) is bytearray:
            self.hold(-len(request))
            self._owner.calls.freed()

    # Received data

    def receive(self) -> int:
        """Receive once; return the number of bytes: 0 at the end of the stream.

        Raises:
            OSError: The error of the socket; ssl.SSLError if TLS ends it.
            RequestError: The bytes cannot be read.
        """
        http, account = self.protocol.http, self.account
        # A large message is received into its own memory, without a copy. TLS must decrypt it first.
        if http is not None and self.tls is None:
            buffer = http.get_buffer() if http.frame is not None else None
            if buffer is not None:
                with buffer:
                    count = self.sock.recv_into(buffer)
                self.protocol.buffer_updated(count)
                account.productive = True
                return count
        began, before = perf_counter(), self.unserved
        # Small pieces limit how long one turn of a flood takes before it is charged, and so how long others wait.
        data = self.sock.recv(CHUNK if account.productive else SMALL_CHUNK)
        plain = data if self.tls is None else self.tls.receive(data)
        if plain:
            self.protocol.receive_data(plain)
        seconds, requests = perf_counter() - began, self.unserved - before
        # Nearly every turn of a client that steps has one request and is not judged, which saves a call in every step.
        if requests != 1 or seconds > account.share.usual:
            account.judge(seconds, len(data), requests, receives_large=self.protocol.receives_large)
        else:  # the usual case
            account.productive = True
            if seconds < account.share.fastest:
                account.share.note_fastest(seconds)
        return len(data)

    # Data to send

    def flush(self) -> None:
        """Send as many bytes as the socket takes, and watch for the events that are needed next."""
        if self.closed:
            return
        try:
            if self.tls is None:
                # A copy: the protocol keeps this list object, and appends to it.
                outgoing = self.outgoing[:]
                self.outgoing.clear()
            else:
                outgoing = self.tls.take(self.outgoing)
            size = len(outgoing[0]) if len(outgoing) == 1 else sum(map(len, outgoing))
            if self.unsent:
                self._keep(outgoing, size)
            # Joining large parts would copy them; `send_parts` passes them to the system as they are.
            elif size > CHUNK and len(outgoing) > 1:
                self._keep(outgoing, size)
                self.drain()
            elif outgoing:
                data = outgoing[0] if len(outgoing) == 1 else b"".join(outgoing)
                try:
                    sent = self.sock.send(data)
                except BlockingIOError:
                    sent = 0
                if sent < size:
                    self.unsent.append(memoryview(data)[sent:])
                    self.hold(size - sent)
        # The client is gone. The caller of `flush` does not need to handle that.
        except OSError:
            self._owner.close(self)
            return
        # After nearly every step there is nothing to arrange: the socket is watched for the next request already.
        if self.unsent or self.ending or not self.calls or self.events != READ or self.paused:
            self._owner.arrange(self)

    def _keep(self, parts: list[bytes | memoryview], size: int) -> None:
        self.unsent.extend(memoryview(part) for part in parts if len(part))
        self.hold(size)

    def drain(self) -> None:
        """Send as much of `unsent` as the socket takes. Raises OSError as the socket does."""
        sent = send_parts(self.sock, self.unsent)
        self.hold(-sent)
        self.progressed = self.progressed or sent > 0

    # The interface of a call to its client, for all transports (`bridge.core.server.calls.Client`)

    def is_blocked(self, call: Call) -> bool:
        """True if the client does not take the answers of a call for now."""
        return bool(self.unsent) or self.protocol.is_blocked(call)

    def defer(self, call: Call, size: int) -> None:
        """Reduce the bytes that the client may send by `size`, for a waiting request, until `resume`."""
        self.protocol.defer(call, size)

    def resume(self, call: Call, size: int) -> None:
        """Undo a `defer`."""
        if not self.closed:
            self.protocol.resume(call, size)

    def finish(self, call: Call, error: RequestError | None) -> None:
        """End a call, with `error` as its status if given."""
        self.protocol.finish(call, error)


class ConnectionProtocol:
    """The protocol of a connection: gRPC, or HTTP/1.1 and WebSocket. It appends its output to `outgoing`.

    Subclasses override these methods, which do what is right before a client has begun to speak.

    Args:
        connection: The connection.
    """

    http: Http2 | None = None
    """The HTTP/2 connection that large messages are received into; None: another protocol."""
    finished = False
    """True if the last bytes are in `outgoing`: the connection closes when they are sent and no call is left."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._heard = monotonic()
        self._asked: float | None = None

    @property
    def receives_large(self) -> bool:
        """True if a large request is being received."""
        return False

    def receive_data(self, data: bytes) -> None:
        """Read bytes; raises RequestError if they are invalid."""
        raise NotImplementedError

    def buffer_updated(self, count: int) -> None:
        """Note that bytes were received into the buffer of `http`; raises as `receive_data`."""

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send an answer with the next `flush`. Return True if the client has room for all of it."""
        return True

    def is_blocked(self, call: Call) -> bool:
        """True if the client has no room for the answers of a call."""
        return False

    def defer(self, call: Call, size: int) -> None:
        """Reduce the bytes that the client may send by `size`, for a waiting request, until `resume`."""

    def resume(self, call: Call, size: int) -> None:
        """Undo a `defer`."""

    def finish(self, call: Call, error: RequestError | None) -> None:
        """End a call, with `error` as its status if given."""

    def refuse(self, error: RequestError) -> None:
        """Tell the client why the connection ends."""

    def drain(self) -> None:
        """Tell the client that no more calls are accepted; open calls continue."""

    def ping(self) -> None:
        """Send a ping, if the protocol has one."""

    def check_keepalive(self, now: float) -> bool:
        """Send a ping to a client that has been quiet; return False if it did not answer the last one in time."""
        connection = self._connection
        if connection.progressed:  # the client takes bytes, which any ping would have to wait behind
            connection.progressed = False
            self._heard = now
        if connection.paused or connection.account.timer is not None:  # an answer would not be read
            self._heard = now
        if self._asked is not None:
            # Any bytes count as an answer: behind a large request the answer to a ping arrives late.
            if self._heard > self._asked:
                self._asked = None
            elif now - self._asked > PATIENCE:
                return False
        elif now - self._heard > QUIET:
            self._asked = now
            self.ping()
        return True

    def connection_lost(self) -> None:
        """Free all memory, at once."""
