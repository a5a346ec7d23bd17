"""The client's side of a gRPC connection, without a socket: one or several dm_env_rpc calls over HTTP/2."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeAlias
from urllib.parse import unquote

from bridge.core.client.wire import keepalive
from bridge.core.transport.address import Address, shown_token, withheld
from bridge.core.transport.frames import ErrorCode, Event, HeadersReceived, Http2Error, Stream, StreamReset
from bridge.core.transport.http2 import Http2
from bridge.core.transport.messages import (
    LARGE,
    CompressedMessage,
    Inflater,
    MalformedMessage,
    MessageReader,
    TooLarge,
)
from bridge.core.transport.service import HELLO, METHOD, SERVICE, code_of_status, is_absent, is_stopping, remedy
from bridge.errors import Code, ConnectError, ConnectionLostError, PeerError, RefusedError, RemoteError
from bridge.version import __version__

__all__ = ["FOREIGN_KEEPALIVE_INTERVAL", "CallRefused", "CarriedCall", "GrpcClient", "Received", "call_error"]


class CarriedCall(Protocol):
    """A call, as its connection's protocol uses it: `bridge.core.client.wire.connection.ClientCall`."""

    url: str
    stream: Any
    unconfirmed: list[bytes] | None
    finished: bool


@dataclasses.dataclass(frozen=True)
class CallRefused:
    """The server did nothing for a call, which must be opened on another connection."""

    error: RemoteError
    """The error of the call, if trying again does not help."""


Received = tuple[Any, bytes | bytearray | RemoteError | CallRefused]
"""A call, as given to `open`, and an answer or the way it ended."""

FOREIGN_KEEPALIVE_INTERVAL = 310.0
"""Seconds between pings to other packages' servers, which disconnect clients that ping every five minutes or more."""
# The health method that reports whenever the server begins or stops to accept calls, and its answer for the latter.
_WATCH_PATH = "/grpc.health.v1.Health/Watch"
_NOT_SERVING = b"\x08\x02"
_MAX_HEALTH_BYTES = 4096
# The most calls of a connection. RFC 9113 advises servers to accept at least 100; this applies if a server says
# nothing.
_MAX_CALLS = 64
_MAX_HEADER_BYTES = 65536
_INADEQUATE_SECURITY = 12
# Statuses of a lost stream: answers to requests, including errors, travel within the stream.
_LOST = (Code.UNAVAILABLE, Code.CANCELLED)
_BROKEN = (Code.INTERNAL, Code.UNKNOWN)


_CallStatus: TypeAlias = tuple[int, str]
"""A status code, and its message."""


def call_error(url: str, address: Address, code: int, details: str, *, answered: bool) -> RemoteError:
    """Return the error for a call's status.

    Args:
        url: The server's URL, for the message.
        address: The address of the server.
        code: The status code.
        details: The status message.
        answered: True if the server had answered anything.
    """
    details, scheme = details or "no details", address.scheme
    if code == Code.OK:
        return ConnectionLostError(url, "the server ended the stream")
    # grpcio reports this if no server listens, and proxies if their server is away: a missing server's remedies apply.
    if code == Code.UNAVAILABLE and not answered:
        text = f"no connection: {details}. {remedy(scheme, details)}"
        if is_stopping(details):
            text = f"refused: {details}"  # the server is there, so the way to it is fine
        return ConnectError(url, text, unavailable=is_absent(details))
    # Proxies cut a stream by RST_STREAM with any number, or end it without a status. That is a lost connection, which
    # is made again; a refusal would be final.
    if code in _LOST or (answered and code in _BROKEN):
        return ConnectionLostError(url, f"the connection was lost: {details}")
    if code in _BROKEN:
        return ConnectError(url, f"no connection: {details}. {remedy(scheme, details)}")
    if code == Code.UNIMPLEMENTED:
        return ConnectError(url, f"a gRPC server is there, but it does not speak dm_env_rpc: {details}")
    details += withheld(address) if code == Code.UNAUTHENTICATED else ""
    return RefusedError(url, details, int(code))


def _is_refused(stream: Stream, event: Event) -> bool:
    """True if the server did nothing for a stream, so that the call may be opened on another connection."""
    # `reason` is set if this end reset the stream. After header fields came, the server has begun to serve the call.
    refused = isinstance(event, StreamReset) and event.reason is None and event.code == ErrorCode.REFUSED_STREAM
    return refused and not stream.headers_received


class GrpcClient:
    """Turns requests into bytes, and bytes into answers, for all calls of one connection.

    Args:
        address: The server.
        max_message_bytes: The largest answer.
        watches_health: True to ask gRPC's health service to report when the server drains.
    """

    ALPN = "h2"

    def __init__(self, address: Address, max_message_bytes: int, *, watches_health: bool = False) -> None:
        self._address = address
        self._max_message_bytes = max_message_bytes
        token = shown_token(address)
        self._fields = [
            (":method", "POST"),
            (":scheme", "https" if address.tls else "http"),
            (":path", f"/{SERVICE}/{METHOD}"),
            (":authority", address.authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", f"gymnasium-bridge/{__version__}"),
            *address.hello,  # U-12
            *([] if token is None else [("authorization", f"Bearer {token}")]),
        ]
        if address.compression is not None:
            self._fields += [("grpc-encoding", address.compression), ("grpc-accept-encoding", address.compression)]
        self.http = Http2(client=True, max_header_bytes=_MAX_HEADER_BYTES)
        """The connection's HTTP/2."""
        self.outgoing = self.http.outgoing
        """Bytes to send."""
        # A server that has dialed in has only this connection, with as many streams as its settings say.
        self._most_streams = self.http.max_peer_streams if address.dialed else _MAX_CALLS
        self._watch: Stream | None = None
        """The stream of the health service; None: there was none yet."""
        self._watches_health = watches_health
        self._not_serving = False
        self._queued: list[CarriedCall] = []
        """Calls that wait until the server's stream limit, and its package, are known."""
        self.answered = False
        """True if the server is known to speak gRPC."""
        self._headers_received = False
        """True if the header fields of an answer have come, which identify a server of this package."""
        self.server_version: str | None = None
        """The version of a server of this package; None: not known, or another server."""

    @property
    def keepalive_interval(self) -> float:
        """Seconds without a byte from the server after which it is sent a ping."""
        return FOREIGN_KEEPALIVE_INTERVAL if self.server_version is None else keepalive.KEEPALIVE

    @property
    def replies(self) -> int:
        """The number of frames sent only in answer to the server's."""
        return self.http.replies

    @property
    def draining(self) -> bool:
        """True if the server has said that it accepts no more calls; open calls continue."""
        return self.http.goaway_received is not None or self._not_serving

    @property
    def foreign(self) -> bool:
        """True once the server is known to be of another package. It then gets a connection for each call.

        Other servers may store state by the client's address and port: remote-gym does, and mixes up the worlds of two
        streams of one connection.
        """
        return self._headers_received and self.server_version is None

    @property
    def accepts_calls(self) -> bool:
        """True if another call may be opened."""
        http = self.http
        streams = len(http.streams) + len(self._queued)
        return not (self.draining or self.foreign) and streams < min(self._most_streams, http.max_peer_streams)

    def open(self, call: CarriedCall) -> None:
        """Open a call, and send the requests that were made already.

        All but the first call wait for the settings and for the first one's header fields. A server of this package
        sends both as soon as the first call is opened, before it makes a world: this costs a round trip per connection.
        """
        http = self.http
        if http.streams and not (http.settings_received and self._headers_received):
            self._queued.append(call)
            return
        stream = call.stream = http.open_stream(self._fields)
        stream.owner = call
        stream.reader = MessageReader(self._max_message_bytes)
        for request in call.unconfirmed or ():
            self.pack(call, request)
        if call.finished:
            http.end_stream(stream)

    def _open_watch(self) -> None:
        """Watch the server's health, of which it then reports each change. A server without that service refuses."""
        http = self.http
        # The server counts it as a stream, and calls come first: without room for both, health is not watched.
        if len(http.streams) < http.max_peer_streams and http.goaway_received is None:
            fields = [(name, _WATCH_PATH if name == ":path" else value) for name, value in self._fields]
            stream = self._watch = http.open_stream(fields)
            stream.reader = MessageReader(_MAX_HEALTH_BYTES)
            # An empty HealthCheckRequest asks for the server as a whole.
            http.send_grpc_message(stream, [], 0)
            http.end_stream(stream)

    def _open_queued(self) -> list[Received]:
        """Open the waiting calls; return those that need another connection."""
        refused: list[Received] = []
        queued, self._queued = self._queued, []
        for call in queued:
            if self.accepts_calls:
                self.open(call)
            else:
                # Also for a server that turned out to be another package's, whose calls each get a connection.
                text = f"the server takes {self.http.max_peer_streams} streams of a connection"
                refused.append((call, CallRefused(ConnectError(call.url, text))))
        return refused

    def pack(self, call: CarriedCall, request: bytes) -> None:
        """Send a request, as far as the server has windows. If the call is not open yet, `open` sends it."""
        if call.stream is not None:
            self.http.send_grpc_message(call.stream, [request], len(request))

    def finish(self, call: CarriedCall) -> None:
        """End the call's requests."""
        if call.stream is not None:
            self.http.end_stream(call.stream)

    def cancel(self, call: CarriedCall) -> None:
        """Cancel the call."""
        if call.stream is not None:
            self.http.reset_stream(call.stream, ErrorCode.CANCEL)
        elif call in self._queued:
            self._queued.remove(call)

    def ping(self) -> None:
        """Send a ping."""
        self.http.ping()

    def buffer_updated(self, count: int) -> list[Received]:
        """Note that bytes were received into the buffer. Raises as `receive_data`."""
        try:
            return self._handle(self.http.buffer_updated(count))
        except Http2Error as error:
            raise self._broken(error) from error

    def _broken(self, error: Http2Error) -> RemoteError:
        """Tell the server that it broke the rules of HTTP/2; return the error for the user."""
        self.http.go_away(error.code, str(error))
        if self.answered:
            return PeerError(self._address.url, f"it speaks no HTTP/2: {error}")
        details = f"no gRPC server: {error}"
        return ConnectError(self._address.url, f"{details}. {remedy(self._address.scheme, details)}")

    def receive_data(self, data: bytes) -> list[Received]:
        """Read bytes; return the items that they complete. Raises RemoteError if they are not HTTP/2."""
        http = self.http
        try:
            # The items before the error were returned by the last call.
            if http.error is not None:
                raise http.error
            events = http.receive_data(data)
            if self.answered and len(events) == 1 and not self._queued:  # the usual case
                stream, event = events[0]
                if (type(event) is bytes or type(event) is bytearray) and stream is not self._watch:
                    return [(stream.owner, event)]
            return self._handle(events)
        except Http2Error as error:
            raise self._broken(error) from error

    def _handle(self, events: list[tuple[Stream, Event]]) -> list[Received]:
        """Return the items for calls that events bring."""
        came: list[Received] = []
        for stream, event in events:
            # A server without that service refuses the stream: its health is unknown, and its calls continue.
            if stream is self._watch:
                if isinstance(event, (bytes, bytearray)):
                    self._not_serving = event == _NOT_SERVING
                continue
            found = event
            if type(event) is not bytes:  # few are not
                found = self._look_at(stream, event)
                if found is None:
                    continue
                if isinstance(found, tuple):
                    came.append((stream.owner, self._end(stream, event, found)))
                    continue
            self.answered = True
            came.append((stream.owner, found))
        if self._queued and self.http.settings_received:
            came += self._open_queued()
        # A proxy does not forward the GOAWAY of a draining server, but it forwards the health service. Then the slots
        # can move before the server ends.
        if self._watches_health and self.answered:
            self._watches_health = False
            self._open_watch()
        return came

    def _end(self, stream: Stream, event: Event, status: _CallStatus) -> RemoteError | CallRefused:
        """End a call's stream because of an event; return the call's end."""
        self.http.reset_stream(stream, ErrorCode.CANCEL)  # if it is still open
        error = call_error(stream.owner.url, self._address, *status, answered=self.answered)
        if not _is_refused(stream, event):
            return error
        # Some servers, and most proxies, accept fewer streams than their settings say.
        self._most_streams = len(self.http.streams) or self._most_streams
        return CallRefused(error)

    def _look_at(self, stream: Stream, event: Event) -> bytes | bytearray | _CallStatus | None:
        """Return an event's answer, or the call's status that it means; None: the call continues."""
        if isinstance(event, bytearray):
            return event
        if isinstance(event, HeadersReceived):
            return self._by_fields(stream, event)
        if isinstance(event, StreamReset):
            return self._by_reset(event)
        if isinstance(event, TooLarge):
            text = f"an answer of {event.size} bytes is larger than max_message_bytes={self._max_message_bytes}"
            return Code.RESOURCE_EXHAUSTED, text
        if isinstance(event, MalformedMessage):
            return Code.INTERNAL, event.reason
        if isinstance(event, CompressedMessage):
            if self._address.compression is not None:
                return self._inflate(event.data)
            return Code.INTERNAL, "the server sent a compressed message, which was not asked for"
        return Code.INTERNAL, "the server ended the stream without a status"  # StreamEnded

    def _inflate(self, data: bytes | bytearray) -> bytes | bytearray | _CallStatus:
        """Return a compressed answer inflated, or the status of a call whose answer cannot be read."""
        reader, most = Inflater(str(self._address.compression)), self._max_message_bytes
        try:
            # Only one byte more than the limit: 0.2 MB of gzip may stand for 200 MiB.
            plain = reader.take(data, most + 1)
        except Exception as error:  # each library has its own exceptions
            return Code.INTERNAL, f"the server sent a compressed message that cannot be read: {error}"
        if len(plain) > most:
            text = f"an answer is larger than max_message_bytes={most} once it is uncompressed"
            return Code.RESOURCE_EXHAUSTED, text
        if not reader.eof:
            return Code.INTERNAL, "the server sent a compressed message that is cut off"
        return bytearray(plain) if len(plain) > LARGE else plain  # the same types as for uncompressed answers

    def _by_reset(self, event: StreamReset) -> _CallStatus:
        """Return the status for a reset stream: lost, by the server or by a proxy, unless the call was forbidden."""
        if event.reason is not None:
            return Code.INTERNAL, f"the server broke the rules of HTTP/2: {event.reason}"
        # The reason of a GOAWAY says more, such as too_many_pings.
        why = self.http.goaway_received or f"the stream was reset with HTTP/2's error {event.code}"
        # gRPC's mapping of HTTP/2's errors, except ENHANCE_YOUR_CALM. With it, servers end a connection that pings too
        # often: the call is lost, not refused.
        code = {
            ErrorCode.REFUSED_STREAM: Code.UNAVAILABLE,
            ErrorCode.CANCEL: Code.CANCELLED,
            ErrorCode.ENHANCE_YOUR_CALM: Code.UNAVAILABLE,
            _INADEQUATE_SECURITY: Code.PERMISSION_DENIED,
        }.get(event.code, Code.INTERNAL)
        return code, why

    def _by_fields(self, stream: Stream, event: HeadersReceived) -> _CallStatus | None:
        fields = event.fields
        http = fields.get(":status")
        if http is not None:  # the first header fields of the call
            kind = fields.get("content-type", "")
            # From a page of a proxy, or from a server that does not speak gRPC.
            if http != "200" and "grpc-status" not in fields:
                return code_of_status(int(http)), f"the answer has the HTTP status {http}"
            if not kind.startswith("application/grpc"):
                return Code.UNKNOWN, f"expected the content-type application/grpc, got {kind!r:.80}"
            self.server_version = fields.get(HELLO, self.server_version)
            # A call that was refused at once may have met a proxy in front of the server, so it shows nothing.
            self._headers_received |= not event.end_stream or self.server_version is not None
        if not event.end_stream:
            return None
        if "grpc-status" not in fields:
            return Code.INTERNAL, "the server ended the stream without a status"
        text = fields.get("grpc-status", "")
        # Python reads no number of thousands of digits, and no code has more than two.
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else int(Code.UNKNOWN)
        return number, unquote(fields.get("grpc-message", ""), errors="replace")

    def cut_off(self) -> str:
        """Return the meaning of the end of the socket's stream, as an error text."""
        if self.http.goaway_received:
            return f"the connection was lost: {self.http.goaway_received}"
        return "the server ended the stream" if self.answered else "it closed the connection without replying"
