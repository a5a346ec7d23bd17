"""A client's sockets, and its calls over them: a connection carries one call, or several to the same place. `connect`
opens a call, over this transport or by grpcio.

No thread: the owner's poller looks after the socket. A protocol, gRPC or WebSocket, turns requests into bytes, and
bytes into answers.
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
# Bytes that are received at a time: of longer answers as many as one of them has, for what comes in pieces is copied.
# To receive 128 KiB at all times cost steps of large arrays 5 %.
_CHUNK = 65536
_LARGEST_CHUNK = 1 << 18
# How much more than the last one an answer may have: infos vary.
_SLACK = 1024
# Seconds that `send` waits for a server that takes nothing off the socket before the rest is left to `Poller.get`.
_STALL = 5.0
# Connections that may refuse a call, and what one counts as that had no other.
_MAX_ATTEMPTS = 60
_ALONE = 20
# Answers to pings and settings that a server may leave unread.
_MAX_REPLIES = 10_000
# Requests of a connection that are sent together: few at first, so that the server begins with them while the rest is
# written, and then many, as each `send` costs both ends processor time.
_FIRST_TOGETHER = 16
_MOST_TOGETHER = 64

Deliver: TypeAlias = Callable[[bytes | bytearray | RemoteError], None]
"""A function that takes an answer, or how a stream ended."""


class ClientCall:
    """One stream of requests and answers; used by one thread, the one that takes from the poller.

    Args:
        connection: What carries it.
        url: Where to, for messages.
        deliver: Called with each answer's bytes, and at the end of the stream once with the RemoteError that says why.
    """

    def __init__(self, connection: ClientConnection, url: str, deliver: Deliver) -> None:
        self.connection = connection
        self.url = url
        self.deliver = deliver
        self.stream: Any = None
        """The number or object by which the connection's protocol knows it."""
        self.unconfirmed: list[bytes] | None = []
        """Requests to send again on a further connection, until the server has begun to answer; None: it has."""
        self.attempts = 0
        """Connections that refused it; one that had no other call counts as many."""
        self.ended = False
        self.finished = False
        # The keepalive thread may be at the same sockets now.
        with connection.poller.lock:
            connection.add(self)

    @property
    def server_version(self) -> str | None:
        """The version of a Gymnasium Bridge server, None for another one; known once an answer came."""
        return self.connection.protocol.server_version

    @property
    def silent(self) -> bool:
        """True if not a byte has come yet."""
        return self.connection.silent

    @property
    def draining(self) -> bool:
        """True if the server has said that it takes no further calls; this one goes on."""
        return self.connection.protocol.draining

    def send(self, request: bytes) -> None:
        """Send a request; it is on its way when this returns, or when the poller sends what it holds together.

        Raises:
            SettingError: It is larger than `max_message_bytes`.
            ConnectionLostError: This process was forked from the one that the call belongs to.
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
            # REFUSED_STREAM: nothing was done for it, so the same requests can go over a further connection. Once
            # header fields came, a world may exist already.
            if self.unconfirmed is not None:
                if self.stream is not None and self.stream.headers_received:
                    self.unconfirmed = None
                else:
                    self.unconfirmed.append(request)
            if not self.ended:  # else how it ended was delivered
                connection.protocol.pack(self, request)
                deferred = connection.poller.deferred
                if deferred is not None and connection.shared:
                    connection.unsent += 1
                    if connection.unsent < deferred.setdefault(connection, _FIRST_TOGETHER):
                        return
                    deferred[connection] = _MOST_TOGETHER
                connection.flush(wait=True)

    def finish(self) -> None:
        """Say that no request follows; those sent before are served."""
        connection = self.connection
        # A forked process has the parent's socket: what it sends there would end the parent's stream.
        if self.finished or connection.inherited:
            return
        self.finished = True
        with connection.poller.lock:
            if not self.ended:
                connection.protocol.finish(self)
                connection.flush()

    def close(self, timeout: float) -> None:
        """End the stream. Waits for the server at most `timeout` seconds, then cuts it."""
        if self.connection.inherited or self.ended:
            return
        self.finish()
        self.deliver = lambda what: None  # nobody waits for what comes after the last request
        poller = self.connection.poller
        with poller.lock:
            if timeout > 0 and not sys.is_finalizing():
                # A call that has no connection yet is not waited for: nothing could end it.
                poller.poll_until(lambda: self.ended or not self.connection.connected, time.monotonic() + timeout)
            self.connection.remove(self)


class ClientConnection:
    """A socket, and the calls over it.

    Args:
        address: Where to; with TLS where its scheme says so.
        poller: Looks after the socket.
        max_message_bytes: The largest request or answer.
        shared: Whether it may carry several calls, whose requests are sent together.

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
        """True if a call was cut: perhaps nobody is there any more, so whoever connects next does so anew."""
        self._calls: set[ClientCall] = set()
        self.unsent = 0
        """Requests that wait to be sent together with others."""
        self._chunk = _CHUNK
        """How many bytes are received at a time."""
        self._replies_taken = 0
        """How many replies there were when the server had taken all that was sent."""
        self._heard = time.monotonic()
        """When bytes came last, or when the connection was made; monotonic seconds."""
        self._asked = -math.inf
        """When the server was sent a keepalive ping last; monotonic seconds."""
        self.silent = True
        """True if not a byte has come yet."""
        self._error: OSError | None = None
        """The first error of the socket, after which what is here is still received."""
        self._out: deque[memoryview] = deque()
        self._tls: Tls | None = None
        if address.tls:
            from bridge.core.transport.tls import Tls, client_context

            self._tls = Tls(client_context(address.credentials, self.protocol.ALPN), address.server_name)
            # The handshake begins in `receive`: without a byte it writes the ClientHello, which goes out once the
            # socket connects.
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
        """True if it takes a further call."""
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
        # KeyboardInterrupt: further calls would wait for a connection that nobody makes.
        except BaseException:
            self._end_interrupted("it was begun")
            raise

    def remove(self, call: ClientCall) -> None:
        """Cut a call that has not ended. With the last one the socket goes."""
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
        # The handshake of a WebSocket was done by the listener, in which this end was the server.
        if not isinstance(self.protocol, GrpcClient):
            self.protocol.begin(found.server_version)
        self._connected(found.sock)

    def _connected(self, sock: socket.socket) -> None:
        self._sock = sock
        try:
            let_receive_wait(sock)
            # The time that connecting took is no silence of the server's.
            self._heard = time.monotonic()
            self.flush()
            # Last: until then the dialer is called, and calls this again after an interrupt.
            if not (self.ended or self._out):
                self._watch(sock)
        except OSError as error:  # no file is left for the selector
            self._lost(error)

    def _failed(self, reason: str, unavailable: bool) -> None:
        self._end(ConnectError(self._address.url, reason, unavailable=unavailable))

    def _end_of(self, lost: str, details: str) -> RemoteError:
        """Return the error of a socket that ended: `lost`, or `details` where the server never said what it speaks."""
        if self.protocol.answered:
            return ConnectionLostError(self._address.url, lost)
        text = f"no connection: {details.rstrip('.')}. {remedy(self._address.scheme, details)}"
        return ConnectError(self._address.url, text)

    # The socket

    def _watch(self, sock: socket.socket) -> None:
        """Have the poller watch the socket: for what comes and, where `_out` waits, for room to send it."""
        # `recv` alone does not notice that the socket takes bytes again: with something to send it has to be the
        # selector.
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
        """Send what is to be sent, as far as the socket takes it.

        Args:
            wait: Whether to wait a while for a socket that does not take all.
        """
        sock, tls = self._sock, self._tls
        self.unsent = 0
        # What the protocol holds goes out once the socket is connected.
        if sock is None:
            return
        data: bytes | memoryview = b""
        sent: list[int] = []
        try:
            if tls is None:
                # Emptied, not replaced: HTTP/2 and its sender append to this very list.
                outgoing = self.protocol.outgoing
                parts = outgoing[:]
                outgoing.clear()
            else:
                parts = tls.take(self.protocol.outgoing)
            if not parts and not self._out:
                return
            # Nearly each request is one small part, or several that are joined: a `send`, without memoryviews and a
            # queue. What waits already has to go first, and what is larger is not copied.
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
        # KeyboardInterrupt: nobody knows what was sent, if not all was.
        except BaseException:
            if sent != [len(data)]:
                self._end_interrupted("a request was sent")
            raise
        if self._out and wait:
            # What comes meanwhile is taken too, so that neither end waits for the other.
            self.poller.poll_until(lambda: not (self._out and self.connected), time.monotonic() + _STALL)

    def _receive(self, events: int = _READ, flags: int = AT_ONCE) -> None:
        """Receive what has come, and deliver what it means; with no flags, wait for it a moment."""
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
                # Ciphertext, which cannot be received into the place where an answer is put together. What TLS itself
                # says to it goes out with `outgoing`, where requests wait until the handshake is done.
                if self._tls is not None:
                    taken += map(sock.recv, (_CHUNK,), (flags,))
                    if count := len(taken[0]):
                        came = protocol.receive_data(self._tls.receive(taken[0]))
                elif http is None or http.frame is None or (buffer := http.get_buffer()) is None:
                    taken += map(sock.recv, (self._chunk,), (flags,))
                    if count := len(taken[0]):  # else it is the end, which `_settle` is told
                        came = protocol.receive_data(taken[0])
                    # It ends within a frame. Answers of one world are alike: the next one is to come in a single piece.
                    if http is not None and http.frame is not None:
                        size = count + http.frame.left + _SLACK
                        self._chunk = size if _CHUNK < size <= _LARGEST_CHUNK else _CHUNK
                else:
                    # The rest of a large answer goes into that answer's own memory, without a copy.
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
            # After nearly every answer there is nothing else to do: a call less in each step.
            if not count or protocol.outgoing or self._out or (http is not None and http.error is not None):
                self._settle(count)
        # KeyboardInterrupt: nobody knows how far the protocol has read what came.
        except BaseException:
            if taken:
                self._end_interrupted("an answer was read")
            raise

    def _settle(self, count: int) -> None:
        """Send what answers the `count` bytes that came, and end the connection where they end it; 0: its end."""
        protocol, http = self.protocol, self.protocol.http
        # An answer that was delivered, or the end of the last call, may have closed the connection.
        if self.ended:
            return
        if protocol.outgoing or self._out:
            self.flush()
            if not self._out:
                self._replies_taken = protocol.replies
            elif protocol.replies - self._replies_taken > _MAX_REPLIES:
                # It asks and never reads: what it is answered would be kept without end.
                text = f"it has sent pings or settings and read none of {_MAX_REPLIES} answers to them"
                self._end(PeerError(self._address.url, text))
                return
        # The bytes that break the rules came behind answers, which are delivered by now. This raises the error.
        if http is not None and http.error is not None and not self.ended:
            try:
                protocol.receive_data(b"")
            except RemoteError as error:
                self._end(error)
        # With an error of the socket, `_lost` reads what is left and then says that error.
        if not count and not self.ended and self._error is None:
            why = protocol.cut_off()
            self._end(self._end_of(why, why))

    def check_keepalive(self) -> None:
        """Ask for a sign of a server that has been quiet; give up one that gave none."""
        if self._sock is None:
            return
        now, patience = time.monotonic(), keepalive.KEEPALIVE / 2
        if self._heard < self._asked:
            if now - self._asked > patience:
                text = f"the connection was lost: no answer to a keepalive ping within {patience:g} s"
                self._end(ConnectionLostError(self._address.url, text))
        # The keepalive of TCP is answered by the system even where the server's process hangs or was stopped.
        elif now - self._heard > self.protocol.keepalive_interval:
            self._asked = now
            self.protocol.ping()
            self.flush()

    # The end

    def _lost(self, error: OSError) -> None:
        first, self._error = self._error is None, self._error or error
        if first and isinstance(error, (BrokenPipeError, ConnectionResetError)) and not self.protocol.answered:
            # A server that refuses us closes before it takes our first request: what it said by then may be here.
            self._receive()
        if self.ended:
            return
        # Reading on may have failed too, and come here again: the first error is the reason. An alert of TLS says more
        # than either, such as that the server wants a certificate.
        if not isinstance(error, ssl.SSLError):
            error = self._error
        reason = error.strerror or str(error)
        if isinstance(error, ssl.SSLError):
            from bridge.core.transport.tls import explain

            reason = explain(error)
        self._end(self._end_of(f"the connection was lost: {reason}", reason))

    def _end_call(self, call: ClientCall, ending: RemoteError | CallRefused) -> None:
        """Say how a call ended, once, or open it elsewhere where it was refused; with the last one the socket goes."""
        if call.ended:
            return
        self._calls.discard(call)
        if isinstance(ending, CallRefused):
            # Beside other calls the connection may only be full. A server that refuses the only call of a connection
            # will hardly take the next one: after three of those it is an error.
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
        """Open a call on a further connection to the same place."""
        call.stream = None
        call.connection = connection_to(self._address, self.poller, self.max_message_bytes, shared=self.shared)
        call.connection.add(call)

    def _end(self, error: RemoteError) -> None:
        """Close the socket, and say why to each call, once."""
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
        if sock is None and self._dialer is not None:  # one that has connected is done
            self._dialer.cancel()
        if sock is not None:
            outgoing, tls = self.protocol.outgoing, self._tls
            # A GOAWAY, a Close frame or an alert of TLS may be in it, which tells the server why. Once, and without
            # waiting for a socket that may be full or broken.
            with contextlib.suppress(OSError):
                if parts := outgoing if tls is None else tls.take(outgoing):
                    self._out.extend(map(memoryview, parts))
                    send_parts(sock, self._out)
            self.poller.forget(sock)
            sock.close()


def _protocol_for(address: Address, max_message_bytes: int, watches_health: bool) -> GrpcClient | WebSocketClient:
    """Return what is spoken there; SettingError where the package that it needs is missing."""
    if address.websocket and address.compression is not None:
        raise SettingError(f"compression is for gRPC, but {address.url!r} is a WebSocket: leave it out")
    if not address.websocket:
        return GrpcClient(address, max_message_bytes, watches_health=watches_health)
    with needed(f"{address.scheme}:// needs the package websockets", "web"):
        from bridge.core.client.wire.websocket_client import WebSocketClient
    return WebSocketClient(address, max_message_bytes)


def connection_to(address: Address, poller: Poller[Any], max_message_bytes: int, *, shared: bool) -> ClientConnection:
    """Return a connection that takes a further call: a new one, unless it may be shared and there is one."""
    # A connection's header fields, with the token and the compression, and its certificates are the same for all its
    # calls.
    key = address.scheme, address.target, address.credentials, address.compression
    known: ClientConnection | None = poller.connections.get(key) if shared else None
    if known is not None and known.accepts_calls:
        return known
    if known is not None and known.protocol.foreign and not known.ended:
        shared = False  # the one that is known stays, and tells the next call too that this server shares none
    connection = ClientConnection(address, poller, max_message_bytes, shared=shared)
    if shared:
        poller.connections[key] = connection
    return connection


Transport: TypeAlias = Literal["http2", "grpcio"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
"""The ways to connect: our own HTTP/2, or the library grpcio."""
AnyCall: TypeAlias = "ClientCall | GrpcioCall"
"""A stream of requests and answers, over whatever transport."""


def checked_transport(transport: Any) -> str:
    """Return a choice of transport, or raise SettingError where it is none."""
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
        address: Where to.
        poller: Looks after the socket.
        deliver: Called with each answer's bytes, and at the end of the stream once with the RemoteError that says why;
            puts what its owner waits for into the poller. With grpcio it is called in a thread of the transport's own.
        max_message_bytes: The largest request or answer.
        transport: One of `TRANSPORTS`.
        shared: Whether there are others to the same place. On this machine they go over the same socket, which costs
            a fraction of what a socket each does. Another machine's name may stand for many, over which sockets of
            their own are spread.
        together: Whether all of them have to reach the same server, whatever its name stands for: they share a socket.

    Raises:
        SettingError: The credentials are for TLS, and the address is without, or they cannot be used; this platform has
            no Unix sockets.
    """
    local = address.scheme == "unix"
    address.check_tls()
    if local:
        known_targets(address)  # raises where there are no Unix sockets
    if transport == "grpcio":
        if address.websocket:
            raise SettingError(
                f"transport='grpcio' speaks gRPC alone, but {address.url!r} is for WebSocket: leave it out"
            )
        from bridge.core.client.wire.grpcio_transport import GrpcioCall  # loads grpcio, which nothing else needs

        return GrpcioCall(address, poller, deliver, max_message_bytes)
    near = local or is_loopback(address.host)
    # A server that has dialed in has made one connection, for all that goes there.
    shared = not address.websocket and (together or address.dialed or (shared and near))
    return ClientCall(connection_to(address, poller, max_message_bytes, shared=shared), address.url, deliver)
