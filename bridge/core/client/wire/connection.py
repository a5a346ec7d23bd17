"""A client's sockets, and its calls on them: a connection carries one call, or several to the same server. `connect`
opens a call, over this transport or by grpcio.

There are no threads: the owner's poller watches the socket. A protocol, gRPC or WebSocket, turns requests into bytes,
and bytes into answers.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from bridge.core.client.wire import keepalive
from bridge.core.client.wire.dialer import Dialer, known_targets
from bridge.core.client.wire.grpc_client import CallRefused, GrpcClient, Received
from bridge.core.client.wire.poller import Poller
from bridge.core.extras import needed
from bridge.core.ownership import forget_in_child
from bridge.core.transport.address import Address, is_loopback
from bridge.core.transport.service import remedy
from bridge.core.transport.sockets import AT_ONCE, let_receive_wait, send_parts
from bridge.errors import ConnectError, ConnectionLostError, PeerError, RemoteError, SettingError

if TYPE_CHECKING:
    from bridge.core.client.wire.dialed import Dialed, DialedIn
    from bridge.core.client.wire.grpcio_transport import GrpcioCall
    from bridge.core.client.wire.websocket_client import WebSocketClient
    from bridge.core.transport.tls import Tls

__all__ = [
    "TRANSPORTS",
    "AnyCall",
    "ClientCall",
    "ClientConnection",
    "Deliver",
    "Transport",
    "checked_transport",
    "connect",
    "connection_to",
]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
# Bytes that are received at a time; for longer answers the size of one of them, because an answer in pieces is copied.
# Receiving 128 KiB at all times cost steps of large arrays 5 %.
_CHUNK = 65536
_LARGEST_CHUNK = 1 << 18
# How much larger than the last answer the next one may be: infos vary.
_SLACK = 1024
# Seconds that `send` waits for a server that reads nothing, before the rest is left to `Poller.get`.
_STALL = 5.0
# The most connections that may refuse a call, and how many one counts for that had no other call.
_MAX_ATTEMPTS = 60
_ALONE = 20
# The most answers to pings and settings that a server may leave unread.
_MAX_REPLIES = 10_000
# Requests of a connection that are sent together: few at first, so that the server begins with them while the rest is
# written, and then many, because each `send` costs both ends processor time.
_FIRST_TOGETHER = 16
_MOST_TOGETHER = 64

Deliver: TypeAlias = Callable[[bytes | bytearray | RemoteError], None]
"""A function that takes an answer, or the error that ended a stream."""


class ClientCall:
    """One stream of requests and answers. Used by one thread, the one that takes items from the poller.

    Args:
        connection: The connection of the call.
        url: The server's URL, for messages.
        deliver: Called with each answer's bytes, and at the end of the stream once with the RemoteError that ended it.
    """

    def __init__(self, connection: ClientConnection, url: str, deliver: Deliver) -> None:
        self.connection = connection
        self.url = url
        self.deliver = deliver
        self.stream: Any = None
        """The number or object that identifies the call in the connection's protocol."""
        self.unconfirmed: list[bytes] | None = []
        """Requests to send again on another connection, until the server has begun to answer; None: it has."""
        self.attempts = 0
        """The number of connections that refused the call; one that had no other call counts as many."""
        self.ended = False
        self.finished = False
        # The keepalive thread may be using the same sockets now.
        with connection.poller.lock:
            connection.add(self)

    @property
    def server_version(self) -> str | None:
        """The version of a Gymnasium Bridge server, None for another one; known after the first answer."""
        return self.connection.protocol.server_version

    @property
    def silent(self) -> bool:
        """True if no byte has been received yet."""
        return self.connection.silent

    @property
    def draining(self) -> bool:
        """True if the server has said that it accepts no more calls; this one continues."""
        return self.connection.protocol.draining

    def send(self, request: bytes) -> None:
        """Send a request. It is sent when this returns, or when the poller sends requests together.

        Raises:
            SettingError: The request is larger than `max_message_bytes`.
            ConnectionLostError: This process was forked, and the call belongs to its parent.
        """
        connection = self.connection
        if len(request) > connection.max_message_bytes:
            raise SettingError(
                f"a request of {len(request)} bytes is larger than max_message_bytes={connection.max_message_bytes}"
            )
        if connection.inherited:
            raise ConnectionLostError(self.url, "this process was forked, and the connection is its parent's")
        with connection.poller.lock:
            # A server, or a proxy such as nginx (`http2_max_concurrent_streams`), may refuse a stream by
            # REFUSED_STREAM: it did nothing, so the same requests can be sent on another connection. After header
            # fields arrived, a world may exist already.
            if self.unconfirmed is not None:
                if self.stream is not None and self.stream.headers_received:
                    self.unconfirmed = None
                else:
                    self.unconfirmed.append(request)
            if not self.ended:  # otherwise its end was delivered
                connection.protocol.pack(self, request)
                deferred = connection.poller.deferred
                if deferred is not None and connection.shared:
                    connection.unsent += 1
                    if connection.unsent < deferred.setdefault(connection, _FIRST_TOGETHER):
                        return
                    deferred[connection] = _MOST_TOGETHER
                connection.flush(wait=True)

    def finish(self) -> None:
        """Declare that no request follows; those sent before are served."""
        connection = self.connection
        # A forked process shares the parent's socket: bytes that it sends there would end the parent's stream.
        if self.finished or connection.inherited:
            return
        self.finished = True
        with connection.poller.lock:
            if not self.ended:
                connection.protocol.finish(self)
                connection.flush()

    def close(self, timeout: float) -> None:
        """End the stream. Wait for the server for at most `timeout` seconds, then cut it."""
        if self.connection.inherited or self.ended:
            return
        self.finish()
        self.deliver = lambda what: None  # answers after the last request are dropped
        poller = self.connection.poller
        with poller.lock:
            if timeout > 0 and not sys.is_finalizing():
                # A call that has no connection yet is not waited for: nothing could end it.
                poller.poll_until(lambda: self.ended or not self.connection.connected, time.monotonic() + timeout)
            self.connection.remove(self)


class ClientConnection:
    """A socket, and the calls on it.

    Args:
        address: The server's address; its scheme says whether there is TLS.
        poller: Watches the socket.
        max_message_bytes: The largest request or answer.
        shared: True if it may carry several calls, whose requests are sent together.

    Raises:
        SettingError: The certificates cannot be used.
    """

    def __init__(self, address: Address, poller: Poller[Any], max_message_bytes: int, *, shared: bool = False) -> None:
        self._address = address
        self.protocol = _protocol_for(address, max_message_bytes, poller.watches_health)
        self.poller = poller
        self.max_message_bytes = max_message_bytes
        self.inherited = False
        self.ended = False
        """True if the socket is closed."""
        self.shared = shared
        """True if it may carry several calls, whose requests are sent together."""
        self._cut = False
        """True if a call was cut: perhaps the server is gone, so the next call uses a new connection."""
        self._calls: set[ClientCall] = set()
        self.unsent = 0
        """The number of requests that wait to be sent together with others."""
        self._chunk = _CHUNK
        """The number of bytes that are received at a time."""
        self._replies_taken = 0
        """The number of replies when the server had last taken all sent bytes."""
        self._heard = time.monotonic()
        """When bytes were last received, or when the connection was made; monotonic seconds."""
        self._asked = -math.inf
        """When the server was last sent a keepalive ping; monotonic seconds."""
        self.silent = True
        """True if no byte has been received yet."""
        self._error: OSError | None = None
        """The first error of the socket, after which bytes that have arrived are still received."""
        self._out: deque[memoryview] = deque()
        self._tls: Tls | None = None
        if address.tls:
            from bridge.core.transport.tls import Tls, client_context

            self._tls = Tls(client_context(address.credentials, self.protocol.ALPN), address.server_name)
            # `receive` begins the handshake: without bytes it writes the ClientHello, which is sent when the socket
            # connects.
            self._tls.receive(b"")
        self._sock: socket.socket | None = None
        self._dialer: Dialer | DialedIn | None = None
        forget_in_child(self)

    def after_fork(self) -> None:
        """In a forked process: leave the socket to the parent process."""
        self.inherited = True

    @property
    def connected(self) -> bool:
        """True if the socket is connected."""
        return self._sock is not None

    @property
    def accepts_calls(self) -> bool:
        """True if the connection accepts another call."""
        return not (self.ended or self.inherited or self._cut) and self.protocol.accepts_calls

    # Calls

    def add(self, call: ClientCall) -> None:
        """Begin a call; the first one connects."""
        self._calls.add(call)
        try:
            self.protocol.open(call)
            if self._dialer is not None:
                self.flush()
                return
            if self._address.dialed:
                from bridge.core.client.wire.dialed import DialedIn  # few clients have such servers

                self._dialer = DialedIn(self._address, self.poller, self._dialed_in, self._failed)
            else:
                self._dialer = Dialer(self._address, self.poller, self._connected, self._failed)
            self.poller.register(self)
            self._dialer.start()
        # KeyboardInterrupt: further calls would wait for a connection that is never made.
        except BaseException:
            self._end_interrupted("it was begun")
            raise

    def remove(self, call: ClientCall) -> None:
        """Cut a call that has not ended. After the last call the socket is closed."""
        if not call.ended:
            self._cut = call.ended = True
            self._calls.discard(call)
            self.protocol.cancel(call)
            if self._calls:
                self.flush()
        if not (self._calls or self.ended):
            self._abort()

    # Connecting

    def _dialed_in(self, found: Dialed) -> None:
        self._tls = found.tls
        # The listener did the handshake of a WebSocket, in which this end was the server.
        if not isinstance(self.protocol, GrpcClient):
            self.protocol.begin(found.server_version)
        self._connected(found.sock)

    def _connected(self, sock: socket.socket) -> None:
        self._sock = sock
        try:
            let_receive_wait(sock)
            # The time that connecting took is no silence of the server.
            self._heard = time.monotonic()
            self.flush()
            # Last: until then the dialer owns the socket, and calls this again after an interrupt.
            if not (self.ended or self._out):
                self._watch(sock)
        except OSError as error:  # the process has no file descriptor left for the selector
            self._lost(error)

    def _failed(self, reason: str, unavailable: bool) -> None:
        self._end(ConnectError(self._address.url, reason, unavailable=unavailable))

    def _end_of(self, lost: str, details: str) -> RemoteError:
        """Return the error for a socket's end: `lost`, or `details` with a remedy if the protocol is not known."""
        if self.protocol.answered:
            return ConnectionLostError(self._address.url, lost)
        text = f"no connection: {details.rstrip('.')}. {remedy(self._address.scheme, details)}"
        return ConnectError(self._address.url, text)

    # The socket

    def _watch(self, sock: socket.socket) -> None:
        """Let the poller watch the socket: for incoming bytes and, if `_out` waits, for room to send it."""
        # `recv` alone does not notice that the socket takes bytes again: with bytes to send the selector is needed.
        if self._out:
            self.poller.watch(sock, _READ | _WRITE, self._on_ready)
        else:
            alone = partial(self._receive, flags=0) if sock.getblocking() else None
            self.poller.watch(sock, _READ, self._receive, alone)

    def _on_ready(self, events: int) -> None:
        self.flush()
        # Another event of the same round of the selector may have closed this connection, and so may `flush`.
        if events & _READ and self._sock is not None:
            self._receive()

    def flush(self, *, wait: bool = False) -> None:
        """Send the outgoing bytes, as far as the socket takes them.

        Args:
            wait: True: wait a while for a socket that does not take all.
        """
        sock, tls = self._sock, self._tls
        self.unsent = 0
        # The protocol's bytes are sent when the socket is connected.
        if sock is None:
            return
        data: bytes | memoryview = b""
        sent: list[int] = []
        try:
            if tls is None:
                # Emptied, not replaced: HTTP/2 and its sender append to this list object.
                outgoing = self.protocol.outgoing
                parts = outgoing[:]
                outgoing.clear()
            else:
                parts = tls.take(self.protocol.outgoing)
            if not parts and not self._out:
                return
            # Nearly each request is one small part, or several that are joined: one `send`, without memoryviews and a
            # queue. Waiting bytes must be sent first, and larger requests are not copied.
            if parts and not self._out and (len(parts) == 1 or sum(map(len, parts)) <= _CHUNK):
                data = parts[0] if len(parts) == 1 else b"".join(parts)
                try:
                    sent += map(sock.send, (data,), (AT_ONCE,))  # as in `_receive`
                except BlockingIOError:
                    sent = [0]
                if sent == [len(data)]:
                    return
                parts = [memoryview(data)[sent[0] :]]
            waits = bool(self._out)
            self._out.extend(memoryview(part) for part in parts if len(part))
            send_parts(sock, self._out)
            # Here, so that an interrupt leaves no connection that is watched for the wrong events.
            if bool(self._out) != waits:
                self._watch(sock)
        except OSError as error:
            self._lost(error)
            return
        # KeyboardInterrupt: it is unknown how much was sent.
        except BaseException:
            if sent != [len(data)]:
                self._end_interrupted("a request was sent")
            raise
        if self._out and wait:
            # Incoming bytes are read meanwhile, so that neither end waits for the other.
            self.poller.poll_until(lambda: not (self._out and self.connected), time.monotonic() + _STALL)

    def _receive(self, events: int = _READ, flags: int = AT_ONCE) -> None:
        """Receive bytes, and deliver the answers in them. Without flags, wait for bytes a moment."""
        sock, protocol, http = self._sock, self.protocol, self.protocol.http
        # Another event of the same round of the selector may have closed this connection.
        if sock is None:
            return
        # Filled in the same step of Python: an interrupt right after `recv` would lose its bytes unnoticed, and the
        # answers in them would be waited for until the timeout.
        taken: list[Any] = []
        try:
            try:
                came: Iterable[Received] = ()
                # Ciphertext cannot be received into an answer's own memory. TLS's own output is sent with `outgoing`,
                # where requests wait until the handshake is done.
                if self._tls is not None:
                    taken += map(sock.recv, (_CHUNK,), (flags,))
                    if count := len(taken[0]):
                        came = protocol.receive_data(self._tls.receive(taken[0]))
                elif http is None or http.frame is None or (buffer := http.get_buffer()) is None:
                    taken += map(sock.recv, (self._chunk,), (flags,))
                    if count := len(taken[0]):  # otherwise it is the end, which `_settle` gets as 0
                        came = protocol.receive_data(taken[0])
                    # The bytes end within a frame. Answers of one world are alike: receive the next one in one piece.
                    if http is not None and http.frame is not None:
                        size = count + http.frame.left + _SLACK
                        self._chunk = size if _CHUNK < size <= _LARGEST_CHUNK else _CHUNK
                else:
                    # The rest of a large answer is received into the answer's own memory, without a copy.
                    with buffer:
                        taken += map(sock.recv_into, (buffer,), (0,), (flags,))
                    if count := taken[0]:
                        came = protocol.buffer_updated(count)
            except BlockingIOError:
                return
            except RemoteError as error:  # some of them are OSErrors too
                self._end(error)
                return
            except OSError as error:
                self._lost(error)
                return
            if count:
                self._heard, self.silent = time.monotonic(), False
            for call, what in came:
                if isinstance(what, (RemoteError, CallRefused)):
                    self._end_call(call, what)
                else:
                    call.deliver(what)
            # After nearly every answer there is nothing else to do, which saves a call in each step.
            if not count or protocol.outgoing or self._out or (http is not None and http.error is not None):
                self._settle(count)
        # KeyboardInterrupt: it is unknown how far the protocol has read the bytes.
        except BaseException:
            if taken:
                self._end_interrupted("an answer was read")
            raise

    def _settle(self, count: int) -> None:
        """Send the replies to the `count` bytes received, and end the connection if they end it; 0: its end."""
        protocol, http = self.protocol, self.protocol.http
        # The delivery of an answer, or the end of the last call, may have closed the connection.
        if self.ended:
            return
        if protocol.outgoing or self._out:
            self.flush()
            if not self._out:
                self._replies_taken = protocol.replies
            elif protocol.replies - self._replies_taken > _MAX_REPLIES:
                # It sends requests and never reads: the answers would fill the memory.
                text = f"it has sent pings or settings and read none of {_MAX_REPLIES} answers to them"
                self._end(PeerError(self._address.url, text))
                return
        # The bytes that break the rules came after answers, which were delivered by now. This raises the error.
        if http is not None and http.error is not None and not self.ended:
            try:
                protocol.receive_data(b"")
            except RemoteError as error:
                self._end(error)
        # After an error of the socket, `_lost` reads the rest and then reports that error.
        if not count and not self.ended and self._error is None:
            why = protocol.cut_off()
            self._end(self._end_of(why, why))

    def check_keepalive(self) -> None:
        """Send a ping to a server that has been quiet; end the connection if it did not answer the last one."""
        if self._sock is None:
            return
        now, patience = time.monotonic(), keepalive.KEEPALIVE / 2
        if self._heard < self._asked:
            if now - self._asked > patience:
                text = f"the connection was lost: no answer to a keepalive ping within {patience:g} s"
                self._end(ConnectionLostError(self._address.url, text))
        # TCP's keepalive is not enough: the system answers it even if the server's process hangs or was stopped.
        elif now - self._heard > self.protocol.keepalive_interval:
            self._asked = now
            self.protocol.ping()
            self.flush()

    # The end

    def _lost(self, error: OSError) -> None:
        first, self._error = self._error is None, self._error or error
        if first and isinstance(error, (BrokenPipeError, ConnectionResetError)) and not self.protocol.answered:
            # A server that refuses us closes before it takes our first request: its last bytes may have arrived.
            self._receive()
        if self.ended:
            return
        # Reading the rest may have failed too, and called this again: the first error is the reason. A TLS alert says
        # more than either, such as that the server requires a certificate.
        if not isinstance(error, ssl.SSLError):
            error = self._error
        reason = error.strerror or str(error)
        if isinstance(error, ssl.SSLError):
            from bridge.core.transport.tls import explain

            reason = explain(error)
        self._end(self._end_of(f"the connection was lost: {reason}", reason))

    def _end_call(self, call: ClientCall, ending: RemoteError | CallRefused) -> None:
        """Deliver the end of a call, once, or open it elsewhere if it was refused. After the last call, disconnect."""
        if call.ended:
            return
        self._calls.discard(call)
        if isinstance(ending, CallRefused):
            # With other calls, the connection may only be full. A server that refuses the only call of a connection
            # will hardly accept the next one: after three of those it is an error.
            call.attempts += 1 if self._calls else _ALONE
            if call.unconfirmed is not None and call.attempts < _MAX_ATTEMPTS and not self.inherited:
                self._move(call)
            else:
                ending = ending.error
        if isinstance(ending, RemoteError):
            call.ended = True
            if not call.finished:
                call.deliver(ending)
        if not (self._calls or self.ended):
            self._abort()

    def _move(self, call: ClientCall) -> None:
        """Open a call on another connection to the same server."""
        call.stream = None
        call.connection = connection_to(self._address, self.poller, self.max_message_bytes, shared=self.shared)
        call.connection.add(call)

    def _end(self, error: RemoteError) -> None:
        """Close the socket, and deliver the error to each call, once."""
        if self.ended:
            return
        self._abort()
        for call in list(self._calls):
            self._end_call(call, error.at(call.url))

    def _end_interrupted(self, what: str) -> None:
        text = f"the connection was given up, for a call was interrupted while {what}"
        self._end(ConnectionLostError(self._address.url, text))

    def _abort(self) -> None:
        sock, self._sock = self._sock, None
        if not self.ended:
            self.poller.unregister(self)
        self.ended = True
        if sock is None and self._dialer is not None:  # a dialer that has connected is done
            self._dialer.cancel()
        if sock is not None:
            outgoing, tls = self.protocol.outgoing, self._tls
            # `_out` may contain a GOAWAY, a Close frame or a TLS alert, which tells the server the reason. One attempt,
            # without waiting, because the socket may be full or broken.
            with contextlib.suppress(OSError):
                if parts := outgoing if tls is None else tls.take(outgoing):
                    self._out.extend(map(memoryview, parts))
                    send_parts(sock, self._out)
            self.poller.forget(sock)
            sock.close()


def _protocol_for(address: Address, max_message_bytes: int, watches_health: bool) -> GrpcClient | WebSocketClient:
    """Return the protocol for an address; raises SettingError if the package that it needs is missing."""
    if address.websocket and address.compression is not None:
        raise SettingError(f"compression is for gRPC, but {address.url!r} is a WebSocket: leave it out")
    if not address.websocket:
        return GrpcClient(address, max_message_bytes, watches_health=watches_health)
    with needed(f"{address.scheme}:// needs the package websockets", "web"):
        from bridge.core.client.wire.websocket_client import WebSocketClient
    return WebSocketClient(address, max_message_bytes)


def connection_to(address: Address, poller: Poller[Any], max_message_bytes: int, *, shared: bool) -> ClientConnection:
    """Return a connection that accepts another call: an existing one if calls may share it, otherwise a new one."""
    # A connection's header fields, with the token and the compression, and its certificates are the same for all its
    # calls.
    key = address.scheme, address.target, address.credentials, address.compression
    known: ClientConnection | None = poller.connections.get(key) if shared else None
    if known is not None and known.accepts_calls:
        return known
    if known is not None and known.protocol.foreign and not known.ended:
        shared = False  # the existing one stays, to tell the next call the same
    connection = ClientConnection(address, poller, max_message_bytes, shared=shared)
    if shared:
        poller.connections[key] = connection
    return connection


Transport: TypeAlias = Literal["http2", "grpcio"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
"""The transports: our own HTTP/2, or the library grpcio."""
AnyCall: TypeAlias = "ClientCall | GrpcioCall"
"""A stream of requests and answers, over any transport."""


def checked_transport(transport: Any) -> str:
    """Return a valid choice of transport; raises SettingError otherwise."""
    if transport not in TRANSPORTS:
        raise SettingError(f"expected transport to be one of {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
    return str(transport)


def connect(
    address: Address,
    poller: Poller[Any],
    deliver: Deliver,
    max_message_bytes: int,
    transport: str = "http2",
    *,
    shared: bool = False,
    together: bool = False,
) -> AnyCall:
    """Open a connection, without waiting.

    Args:
        address: The server's address.
        poller: Watches the socket.
        deliver: Called with each answer's bytes, and at the end of the stream once with the RemoteError that ended it;
            puts the items that its owner waits for into the poller. With grpcio it is called in one of the transport's
            threads.
        max_message_bytes: The largest request or answer.
        transport: One of `TRANSPORTS`.
        shared: True if there are other calls to the same server. On this machine they use the same socket, which costs
            a fraction of a socket each. Another machine's name may stand for many machines, over which separate sockets
            are spread.
        together: True if all calls must reach the same server, whatever its name stands for: they share a socket.

    Raises:
        SettingError: The credentials are for TLS, but the address is without TLS, or they cannot be used; or this
            platform has no Unix sockets.
    """
    local = address.scheme == "unix"
    address.check_tls()
    if local:
        known_targets(address)  # raises if there are no Unix sockets
    if transport == "grpcio":
        if address.websocket:
            raise SettingError(
                f"transport='grpcio' speaks gRPC alone, but {address.url!r} is for WebSocket: leave it out"
            )
        from bridge.core.client.wire.grpcio_transport import GrpcioCall  # imports grpcio, which no other code needs

        return GrpcioCall(address, poller, deliver, max_message_bytes)
    near = local or is_loopback(address.host)
    # A server that has dialed in has made one connection, for all its calls.
    shared = not address.websocket and (together or address.dialed or (shared and near))
    return ClientCall(connection_to(address, poller, max_message_bytes, shared=shared), address.url, deliver)
