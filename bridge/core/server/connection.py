"""A client's connection: its socket, what is received and sent over it, and the base of the protocols spoken there."""

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
"""Bytes that are received at a time."""
SMALL_CHUNK = 4096
"""Bytes that are received at a time of a client that uses much processor time without asking for anything."""


class _Owner(Protocol):
    """What watches the sockets: `bridge.core.server.connections.Connections`."""

    calls: Calls

    def arrange(self, connection: Connection) -> None: ...

    def close(self, connection: Connection) -> None: ...


class Connection:
    """One client's socket, and what is to be sent over it.

    Args:
        owner: Watches the socket.
        sock: Not blocking.
        peer: Where the client is, for the log.
        tls: What stands between the socket and the protocol; None: nothing.
        admission: Counts the bytes that wait.
        account: Counts the processor time that it uses.
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
        """Send an answer with the next `flush`; return whether the client has room for all of it."""
        self.calls: set[Call] = set()
        self.blocked_calls: set[Call] = set()
        """Those whose requests wait until the client takes their answers."""
        self.unserved = 0
        """Requests that were received, and not looked at yet."""
        self.turns = 0
        """How often requests of it were served."""
        self.turns_beside = 0
        """How often those of others were, when it sent a message last."""
        self.outgoing: list[bytes | memoryview] = []
        """Bytes to send with the next `flush`; the protocol appends to it."""
        self.unsent: deque[memoryview] = deque()
        """Bytes that the socket did not take."""
        self.events = READ
        """The events that the event loop watches the socket for."""
        self.paused = False
        """True if nothing is read for now, because too many requests wait."""
        self.ending = False
        """True if nothing more is read; it closes once what it has to say is sent."""
        self.shut = False
        """True if the client was told that nothing more comes."""
        self.closed = False
        self.progressed = False
        """True if the client took some of what waited, since somebody looked."""
        self.timer: Timer | None = None
        """Closes it where the client does not begin to speak, or once it was refused."""
        self.joins_answers = True
        """True if the last answer may wait for the next ones, to be sent together with them."""
        self._admission = admission
        self.held = 0
        """Its bytes that count for `max_queued_bytes`."""
        self.ended: Callable[[], None] | None = None
        """Called once it is closed; None: nothing is."""
        self.account = account
        self.role = "stranger"
        """The role of its client, as far as it has shown: `stranger`, `viewer` or `client`."""

    def speak(self, protocol: ConnectionProtocol) -> None:
        """Speak a protocol from now on."""
        self.protocol = protocol
        # Kept here so that an answer costs one call less in every step.
        self.answer = protocol.answer

    # The bytes that count for `max_queued_bytes`

    def admit(self, size: int) -> None:
        """Count `size` bytes of a large request, or raise RequestError; negative: give them back."""
        if size > 0:
            self._admission.check(size)
        self.hold(size)

    def hold(self, size: int) -> None:
        """Count bytes that wait, fewer where `size` is negative."""
        if size and not self.closed:  # all was given back when it was closed
            self.held += size
            self._admission.bytes += size

    def drop(self, request: bytes | bytearray | None) -> None:
        """Count the bytes of a large request no longer: it is dropped, or begins to be served."""
        # Large requests are counted when memory is taken for them, small ones only where they wait.
        if type(request) is bytearray:
            self.hold(-len(request))
            self._owner.calls.freed()

    # Received data

    def receive(self) -> int:
        """Receive once; return the number of bytes: 0 at the end of the stream.

        Raises:
            OSError: As the socket does; ssl.SSLError where TLS ends it.
            RequestError: The bytes cannot be read.
        """
        http, account = self.protocol.http, self.account
        # A large message is received into its own memory, without a copy. TLS has to decrypt it first.
        if http is not None and self.tls is None:
            buffer = http.get_buffer() if http.frame is not None else None
            if buffer is not None:
                with buffer:
                    count = self.sock.recv_into(buffer)
                self.protocol.buffer_updated(count)
                account.productive = True
                return count
        began, before = perf_counter(), self.unserved
        # Small pieces bound what one turn of a flood takes before it is charged, and so what others wait.
        data = self.sock.recv(CHUNK if account.productive else SMALL_CHUNK)
        plain = data if self.tls is None else self.tls.receive(data)
        if plain:
            self.protocol.receive_data(plain)
        seconds, requests = perf_counter() - began, self.unserved - before
        # Nearly every turn of a client that steps is one request, and is not judged: a call less in every step.
        if requests != 1 or seconds > account.share.usual:
            account.judge(seconds, len(data), requests, receives_large=self.protocol.receives_large)
        else:  # as in nearly every step
            account.productive = True
            if seconds < account.share.fastest:
                account.share.note_fastest(seconds)
        return len(data)

    # Data to send

    def flush(self) -> None:
        """Send what is to be sent, as far as the socket takes it, and watch for what is needed next."""
        if self.closed:
            return
        try:
            if self.tls is None:
                # A copy: the protocol appends to this very list, and keeps it.
                outgoing = self.outgoing[:]
                self.outgoing.clear()
            else:
                outgoing = self.tls.take(self.outgoing)
            size = len(outgoing[0]) if len(outgoing) == 1 else sum(map(len, outgoing))
            if self.unsent:
                self._keep(outgoing, size)
            # To join large parts would copy them; `send_parts` hands them to the system as they are.
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
        # The client is gone. Whoever flushes need not know how that is told.
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
        """Send of `unsent` what the socket takes. Raises OSError as the socket does."""
        sent = send_parts(self.sock, self.unsent)
        self.hold(-sent)
        self.progressed = self.progressed or sent > 0

    # The interface that a call has to its client, whatever the transport (`bridge.core.server.calls.Client`)

    def is_blocked(self, call: Call) -> bool:
        """True if the client does not take the answers of a call for now."""
        return bool(self.unsent) or self.protocol.is_blocked(call)

    def defer(self, call: Call, size: int) -> None:
        """Let the client send `size` bytes less, for a request that waits, until `resume`."""
        self.protocol.defer(call, size)

    def resume(self, call: Call, size: int) -> None:
        """Take back a `defer`."""
        if not self.closed:
            self.protocol.resume(call, size)

    def finish(self, call: Call, error: RequestError | None) -> None:
        """End a call: as it should, or for a reason."""
        self.protocol.finish(call, error)


class ConnectionProtocol:
    """The protocol of a connection: gRPC, or HTTP/1.1 and WebSocket. It appends its output to `outgoing`.

    Subclasses do more than what is here, which is right before a client has begun to speak.

    Args:
        connection: The connection.
    """

    http: Http2 | None = None
    """The HTTP/2 that large messages are received into; None: it is none."""
    finished = False
    """True if it has said its last words: the connection closes once they are sent and no call is left."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._heard = monotonic()
        self._asked: float | None = None

    @property
    def receives_large(self) -> bool:
        """True if a large request is being received."""
        return False

    def receive_data(self, data: bytes) -> None:
        """Take bytes; raises RequestError where they cannot be read."""
        raise NotImplementedError

    def buffer_updated(self, count: int) -> None:
        """Note that bytes were received into the buffer of `http`; raises as `receive_data`."""

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send an answer with the next `flush`; return whether the client has room for all of it."""
        return True

    def is_blocked(self, call: Call) -> bool:
        """True if the client has no room for the answers of a call."""
        return False

    def defer(self, call: Call, size: int) -> None:
        """Let the client send `size` bytes less, for a request that waits, until `resume`."""

    def resume(self, call: Call, size: int) -> None:
        """Take back a `defer`."""

    def finish(self, call: Call, error: RequestError | None) -> None:
        """End a call: as it should, or for a reason."""

    def refuse(self, error: RequestError) -> None:
        """Say why the connection ends."""

    def drain(self) -> None:
        """Say that no further calls are taken; the open calls go on."""

    def ping(self) -> None:
        """Ask for a sign of life, if the protocol can."""

    def check_keepalive(self, now: float) -> bool:
        """Ask for a sign of a client that has been quiet; tell whether it gave one in time."""
        connection = self._connection
        if connection.progressed:  # it takes what was sent, behind which any ping would stand
            connection.progressed = False
            self._heard = now
        if connection.paused or connection.account.timer is not None:  # nothing is read, a sign neither
            self._heard = now
        if self._asked is not None:
            # Any bytes are a sign: behind a large request the answer to a ping comes late.
            if self._heard > self._asked:
                self._asked = None
            elif now - self._asked > PATIENCE:
                return False
        elif now - self._heard > QUIET:
            self._asked = now
            self.ping()
        return True

    def connection_lost(self) -> None:
        """Free everything, at once."""
