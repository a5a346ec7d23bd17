"""gRPC as the server speaks it: dm_env_rpc's calls, any number of them on an HTTP/2 connection, and gRPC's services."""

from __future__ import annotations

import time
import zlib
from typing import Protocol
from urllib.parse import quote

from bridge.errors import Code, RequestError
from bridge.server.auth import Gate
from bridge.server.calls import Call, Calls
from bridge.server.connection import Connection
from bridge.server.grpc_services import Services, SideCall
from bridge.server.limits import Limits
from bridge.transport.http2 import (
    ENHANCE_YOUR_CALM,
    NO_ERROR,
    Compressed,
    End,
    Event,
    Fields,
    Garbled,
    Http2,
    Http2Error,
    RefusedMessage,
    Reset,
    Stream,
    TooLarge,
)
from bridge.transport.service import HELLO, METHOD, SERVICE
from bridge.transport.sockets import PATIENCE, QUIET
from bridge.version import __version__

__all__ = ["CallHandler", "GrpcProtocol"]

_PATH = f"/{SERVICE}/{METHOD}"
_CONTENT = ("content-type", "application/grpc")
_OK = (":status", "200")
_ENCODINGS = "identity, deflate, gzip"
_HEAD = (_OK, _CONTENT, ("grpc-accept-encoding", _ENCODINGS), (HELLO, __version__))
_WINDOW = 1 << 22
# Streams that a connection may have beside its calls: health checks, reflection, and calls that are to be refused.
_SPARE_STREAMS = 128
# Streams that a client may cut: at once, and a second.
_RESETS = (1000, 100)
# Parts of answers of gRPC's own services that wait for a client; an answer has two.
_MAX_WAITING = 64
_MAX_SIDE_REQUEST = 65536
_MAX_DETAILS = 4000
_PRINTABLE = "".join(chr(code) for code in range(32, 127) if chr(code) != "%")


class CallHandler(Protocol):
    """What the protocol asks of the server."""

    def open(self, client: Connection, version: str) -> Call:
        """Admit a call, of a client that says it has this version; raises RequestError where there are too many."""

    calls: Calls
    """Serves the requests."""

    def abandon(self, call: Call, error: RequestError | None = None) -> None:
        """End a call; send `error` as its status if given."""

    def settled(self, connection: Connection) -> None:
        """Note that a client speaks HTTP/2."""


class GrpcProtocol:
    """The calls of one connection. What is to be sent goes into the connection's `outgoing`.

    Args:
        connection: What speaks it.
        handler: Gets the calls.
        limits: `max_message_bytes` and `max_connections`.
        gate: Asks each call for the token.
        services: gRPC's own.
    """

    def __init__(
        self, connection: Connection, handler: CallHandler, limits: Limits, gate: Gate, services: Services
    ) -> None:
        self._connection = connection
        self._handler = handler
        self._limits = limits
        self._gate = gate
        self._services = services
        self._began = self._heard = time.monotonic()
        self._asked: float | None = None
        self._settled = False
        self._encodings: dict[Stream, str] = {}
        self._receive = handler.calls.receive
        self.http = Http2(
            client=False,
            max_message_bytes=limits.max_message_bytes,
            stream_window=_WINDOW,
            max_streams=limits.max_connections + _SPARE_STREAMS,
            admit=connection.admit,
            outgoing=connection.outgoing,
        )

    # What comes

    def receive_data(self, data: bytes) -> None:
        """Take bytes; the requests that they complete go to the calls.

        Raises:
            RequestError: The client does not speak HTTP/2 as it should.
        """
        http = self.http
        try:
            self.handle(http.feed(data))
            if http.broken is not None:
                raise http.broken
        except Http2Error as error:
            http.go_away(error.code, str(error))
            raise RequestError(Code.INVALID_ARGUMENT, f"it speaks no HTTP/2: {error}") from error

    def handle(self, events: list[tuple[Stream, Event]]) -> None:
        """Handle what happened on the connection."""
        receive = self._receive
        for stream, event in events:
            owner = stream.owner
            if type(owner) is Call and (type(event) is bytes or type(event) is bytearray):
                receive(owner, event)
            else:
                self._other(stream, event)
        http = self.http
        self._heard = time.monotonic()
        if http.spoke and not self._settled:
            self._settled = True
            self._handler.settled(self._connection)

    def _other(self, stream: Stream, event: Event) -> None:
        owner = stream.owner
        if isinstance(event, Fields) and owner is None:
            if not stream.finished:  # else these are the last ones of a call that was refused
                self._open(stream, event)
        elif isinstance(event, (Fields, End)):
            if isinstance(owner, Call):
                self._receive(owner, None)
            elif isinstance(owner, SideCall):
                self._reply(stream, owner, owner.end())
        elif isinstance(event, Reset):
            self._encodings.pop(stream, None)
            if isinstance(owner, Call):
                self._handler.abandon(owner)
            allowed = _RESETS[0] + _RESETS[1] * (time.monotonic() - self._began)
            if self.http.resets > allowed:
                raise RequestError(Code.RESOURCE_EXHAUSTED, "the client cuts one stream after the other")
        elif isinstance(event, TooLarge):
            limit = self._limits.max_message_bytes
            text = f"a request of {event.size} bytes is larger than max_message_bytes={limit}"
            self._fail(stream, RequestError(Code.RESOURCE_EXHAUSTED, text))
        elif isinstance(event, Garbled):
            self._fail(stream, RequestError(Code.INTERNAL, event.what))
        elif isinstance(event, Compressed):
            self._inflate(stream, event)
        elif isinstance(owner, Call):
            self._receive(owner, event)  # one that was not admitted
        else:
            self._connection.drop(event)
            if isinstance(event, RefusedMessage):
                self._fail(stream, event.error)
            elif isinstance(owner, SideCall):
                self._reply(stream, owner, owner.message(bytes(event)))

    def _inflate(self, stream: Stream, data: Compressed) -> None:
        """Take a message that came compressed."""
        name, most = "max_message_bytes=", self._limits.max_message_bytes
        if not isinstance(stream.owner, Call):
            name, most = "", _MAX_SIDE_REQUEST
        try:
            if self._encodings.get(stream, "identity") == "identity":
                raise zlib.error("its header fields name no compression")
            inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip, or zlib's own format
            plain = inflater.decompress(data, most + 1)
            if not inflater.eof and len(plain) <= most:
                raise zlib.error("it is cut off")
        except zlib.error as error:
            problem = RequestError(Code.INTERNAL, f"a request came compressed that cannot be read: {error}")
            self._fail(stream, problem)
            return
        if len(plain) > most:
            text = f"a request is larger than {name}{most}, once it is uncompressed"
            self._fail(stream, RequestError(Code.RESOURCE_EXHAUSTED, text))
        elif isinstance(stream.owner, Call):
            try:
                self._connection.admit(len(plain))
            except RequestError as error:
                self._receive(stream.owner, RefusedMessage.of(error))
            else:
                self._receive(stream.owner, bytearray(plain))
        elif isinstance(stream.owner, SideCall):
            self._reply(stream, stream.owner, stream.owner.message(plain))

    def _fail(self, stream: Stream, error: RequestError) -> None:
        if isinstance(stream.owner, Call):
            self._handler.abandon(stream.owner, error)
        else:
            self._end(stream, error)

    # Calls

    def _open(self, stream: Stream, event: Fields) -> None:
        fields = event.fields
        kind, path = fields.get("content-type", ""), fields.get(":path", "")
        if fields.get(":method") != "POST" or not kind.startswith("application/grpc"):
            status = "405" if fields.get(":method") != "POST" else "415"
            self.http.finish(stream, ((":status", status), ("allow", "POST")))
            return
        encoding = fields.get("grpc-encoding", "identity")
        try:
            side = self._services.open(path) if path.startswith("/grpc.health.") else None
            if side is None:
                self._gate.check(Gate.bearer(fields.get("authorization")), self._connection.peer)
            if encoding not in _ENCODINGS.split(", "):
                raise RequestError(Code.UNIMPLEMENTED, f"the compression {encoding!r:.40} is none of {_ENCODINGS}")
            if path == _PATH:
                call = self._handler.open(self._connection, fields.get(HELLO, ""))
                stream.owner, call.stream = call, stream
                self.http.head(stream, _HEAD)
            else:
                side = side or self._services.open(path)
                if side is None:
                    raise RequestError(Code.UNIMPLEMENTED, f"there is no method {path!r:.200}; expected {_PATH}")
                stream.owner = side
        except RequestError as error:
            self._end(stream, error, headed=False)
            return
        if encoding != "identity":
            self._encodings[stream] = encoding
        if side is not None:
            self.http.head(stream, _HEAD)
        if event.last:
            if isinstance(stream.owner, Call):
                self._receive(stream.owner, None)
            elif side is not None:
                self._reply(stream, side, side.end())

    def _reply(self, stream: Stream, side: SideCall, messages: list[bytes]) -> None:
        """Answer a call of gRPC's own services."""
        for message in messages:
            self.http.send(stream, [message], len(message))
        if len(stream.pending) > _MAX_WAITING:
            self._encodings.pop(stream, None)
            self.http.cut(stream, ENHANCE_YOUR_CALM)
        elif side.over:
            self._end(stream, side.error)

    def _end(self, stream: Stream, error: RequestError | None, *, headed: bool = True) -> None:
        """End a stream by gRPC's trailers."""
        self._encodings.pop(stream, None)
        fields: list[tuple[str, str]] = [] if headed else [_OK, _CONTENT, ("grpc-accept-encoding", _ENCODINGS)]
        fields.append(("grpc-status", str(int(error.code) if error else 0)))
        if error:
            details = quote(error.message, safe=_PRINTABLE)[:_MAX_DETAILS]
            cut = details.rfind("%", len(details) - 2) if len(details) == _MAX_DETAILS else -1
            fields.append(("grpc-message", details[:cut] if cut >= 0 else details))
        self.http.finish(stream, fields)

    # What goes

    def defer(self, call: Call, size: int) -> None:
        """Give the stream no new room for a request."""
        call.stream.deferred += size

    def resume(self, call: Call, size: int) -> None:
        """Give the stream room again."""
        self.http.resume(call.stream, size)

    def finish(self, call: Call, error: RequestError | None) -> None:
        """Send the call's trailers."""
        if error is not None:
            self.http.forgo(call.stream)
        self._end(call.stream, error)

    def refuse(self, error: RequestError) -> None:
        """Send the farewell that is due."""
        if not self.http.going:
            self.http.go_away(ENHANCE_YOUR_CALM, error.message)

    def drain(self) -> None:
        """Say farewell; the open calls go on."""
        self.http.go_away(NO_ERROR, "the server is stopping")
        for stream in list(self.http.streams.values()):
            if isinstance(stream.owner, SideCall):
                self._reply(stream, stream.owner, stream.owner.drain())

    def tend(self, now: float) -> bool:
        """Ask for a sign of a client that has been quiet; tell whether it gave one in time."""
        if self._connection.progressed:  # it takes what was sent, behind which any ping would stand
            self._connection.progressed = False
            self._heard = now
        if self._asked is not None:
            if self._heard > self._asked:
                self._asked = None
            elif now - self._asked > PATIENCE:
                return False
        elif now - self._heard > QUIET:
            self._asked = now
            self.http.ping()
        return True
