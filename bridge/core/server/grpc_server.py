"""gRPC for the server: any number of dm_env_rpc calls per HTTP/2 connection, and gRPC's own services."""

from __future__ import annotations

import re
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, get_args
from urllib.parse import quote

from bridge.core.server.auth import Gate
from bridge.core.server.calls import Call
from bridge.core.server.connection import Connection, ConnectionProtocol
from bridge.core.server.connections import Connections
from bridge.core.server.grpc_services import MAX_REQUEST, Services, SideCall
from bridge.core.server.limits import CoreLimits
from bridge.core.transport.frames import ErrorCode, Event, HeadersReceived, Http2Error, Stream, StreamEnded, StreamReset
from bridge.core.transport.http2 import Http2
from bridge.core.transport.http2_sender import SMALL
from bridge.core.transport.messages import (
    PREFIX,
    WORTHWHILE,
    CompressedMessage,
    Compression,
    MalformedMessage,
    MessageReader,
    RefusedMessage,
    TooLarge,
    compress,
    encodings,
    pack_prefix,
)
from bridge.core.transport.service import HELLO, METHOD, SERVICE
from bridge.core.worlds.scheduling import Timer
from bridge.errors import Code, RequestError
from bridge.version import __version__

if TYPE_CHECKING:
    from bridge.core.server.inflation import Inflation

__all__ = ["GrpcProtocol"]

_PATH = f"/{SERVICE}/{METHOD}"
_CONTENT = ("content-type", "application/grpc")
_OK = (":status", "200")
_ENCODINGS = ", ".join(("identity", *encodings()))
_HEAD = (_OK, _CONTENT, ("grpc-accept-encoding", _ENCODINGS), (HELLO, __version__))
_WINDOW = 1 << 22
# Streams of a connection beside its calls, and how many of them may be calls of gRPC's own services (health checks,
# reflection), which need no token.
_SPARE_STREAMS = 128
_MAX_SIDE_CALLS = 16
# The most streams that a client may reset, or break so that the server resets them: at once, and per second. Each costs
# this end a call, and the client a few bytes: the attacks "rapid reset" and "MadeYouReset".
_RESETS = (1000, 100)
# The most waiting parts of answers of gRPC's own services; an answer has two.
_MAX_WAITING = 64
# Clients limit the size of trailers, but a message may contain a traceback of any length.
_MAX_DETAILS = 4000
_PRINTABLE = "".join(chr(code) for code in range(32, 127) if chr(code) != "%")
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


class GrpcProtocol(ConnectionProtocol):
    """The calls of one connection. Its output goes into the connection's `outgoing`.

    Args:
        connection: The connection.
        handler: Opens the calls.
        limits: `max_message_bytes` and `max_connections`.
        gate: Checks the token of each call.
        services: gRPC's own services.
    """

    http: Http2

    def __init__(
        self, connection: Connection, handler: Connections, limits: CoreLimits, gate: Gate, services: Services
    ) -> None:
        super().__init__(connection)
        self._handler = handler
        self._limits = limits
        self._gate = gate
        self._services = services
        self._began = self._heard
        self._settled = False
        self._side_calls = 0
        self._encodings: dict[Stream, str] = {}
        self._deadlines: dict[Stream, Timer] = {}
        self._inflating: dict[Stream, tuple[Inflation, deque[Event]]] = {}
        """Streams with a message that is being inflated, and the events that wait for it."""
        self._receive, self._ready = handler.calls.receive, handler.calls.ready
        self.http = Http2(
            client=False,
            stream_window=_WINDOW,
            max_streams=limits.max_connections + _SPARE_STREAMS,
            outgoing=connection.outgoing,
        )

    @property
    def receives_large(self) -> bool:
        """True while a large request is being received. gRPC's own services, which need no token, accept none."""
        return self.http.receives_large

    # Received data

    def receive_data(self, data: bytes) -> None:
        """Read bytes, and pass the requests that they complete to the calls.

        Raises:
            RequestError: The client breaks the rules of HTTP/2.
        """
        http = self.http
        try:
            events = http.receive_data(data)
            # The usual turn of a client that steps. `_handle` would do the same with more calls.
            if len(events) == 1 and self._settled and not self._inflating and not http.paused and http.error is None:
                stream, event = events[0]
                if type(stream.owner) is Call and type(event) is bytes:  # a request, the usual case
                    self._heard = time.monotonic()
                    self._connection.unserved += 1  # as `Calls.receive` does, without a call in every step
                    self._ready.append((stream.owner, event))
                    return
            self._handle(events)
            # It stops at each new stream, so that the call is open, with its reader, before its first bytes are read.
            while http.paused:
                self._handle(http.receive_data(b""))
            if http.error is not None:
                raise http.error
        except Http2Error as error:
            self._fail_connection(error)

    def buffer_updated(self, count: int) -> None:
        """Note that bytes were received into `http.get_buffer()`. Raises as `receive_data`."""
        try:
            self._handle(self.http.buffer_updated(count))
        except Http2Error as error:
            self._fail_connection(error)

    def _fail_connection(self, error: Http2Error) -> None:
        self.http.go_away(error.code, str(error))
        raise RequestError(Code.INVALID_ARGUMENT, f"it speaks no HTTP/2: {error}") from error

    def _handle(self, events: list[tuple[Stream, Event]]) -> None:
        """Handle the events of the connection's streams."""
        connection, ready, inflating = self._connection, self._ready, self._inflating
        for stream, event in events:
            owner = stream.owner
            if inflating and stream in inflating:
                self._wait_for_inflation(stream, event)
            elif type(owner) is Call and (type(event) is bytes or type(event) is bytearray):
                connection.unserved += 1  # as `Calls.receive` does, without a call for each of 64 requests
                ready.append((owner, event))
            else:
                self._other(stream, event)
        http = self.http
        self._heard = time.monotonic()
        if http.settings_received and not self._settled:
            self._settled = True
            self._handler.settled(self._connection)
        if http.resets > _RESETS[0] and http.resets > _RESETS[0] + _RESETS[1] * (self._heard - self._began):
            raise RequestError(Code.RESOURCE_EXHAUSTED, "the client has one stream after the other reset")

    def _other(self, stream: Stream, event: Event) -> None:
        owner = stream.owner
        if isinstance(event, HeadersReceived) and owner is None:
            if not stream.local_closed:  # otherwise these are the trailers of a call that was refused
                self._open(stream, event)
        elif isinstance(event, (HeadersReceived, StreamEnded)):
            if isinstance(owner, Call):
                # A half-close: the requests before it are served first.
                self._receive(owner, None)
            elif isinstance(owner, SideCall):
                self._reply(stream, owner, owner.end())
        elif isinstance(event, StreamReset):
            self._forget(stream)
            if isinstance(owner, Call):
                self._handler.calls.abandon(owner)
        elif isinstance(event, TooLarge):
            limit = f"max_message_bytes={self._limits.max_message_bytes}"
            if not isinstance(owner, Call):
                limit = f"the {MAX_REQUEST} bytes that are taken here"
            text = f"a request of {event.size} bytes is larger than {limit}"
            self._fail(stream, RequestError(Code.RESOURCE_EXHAUSTED, text))
        elif isinstance(event, MalformedMessage):
            self._fail(stream, RequestError(Code.INTERNAL, event.reason))
        elif isinstance(event, CompressedMessage):
            self._inflate(stream, event)
        elif isinstance(owner, Call):
            self._receive(owner, event)  # a request that was not admitted
        elif isinstance(owner, SideCall):
            self._reply(stream, owner, owner.message(event))
        else:
            self._connection.drop(event)

    def _fail(self, stream: Stream, error: RequestError) -> None:
        stream.discard()
        if isinstance(stream.owner, Call):
            self._handler.calls.abandon(stream.owner, error)
        else:
            self._end(stream, error)

    # Compressed requests

    def _inflate(self, stream: Stream, message: CompressedMessage) -> None:
        """Inflate a compressed message; later events of its stream wait."""
        if self._encodings.get(stream, "identity") == "identity":
            self._connection.drop(message.data)
            text = "a request came compressed that cannot be read: its header fields name no compression"
            # gRPC requires this code if a message's flag is set without an encoding.
            code = Code.INTERNAL
            if isinstance(stream.owner, SideCall):  # from a client that may not have shown its token
                code, text = Code.UNIMPLEMENTED, "this service takes no compressed requests"
            self._fail(stream, RequestError(code, text))
            return

        connection, handler, done = self._connection, self._handler, partial(self._inflated, stream)
        encoding, most = self._encodings[stream], self._limits.max_message_bytes
        from bridge.core.server.inflation import Inflation  # few clients compress

        inflation = Inflation(message, encoding, most, connection.admit, handler.helper, handler.inflations, done)
        self._inflating[stream] = inflation, deque()
        connection.unserved += 1  # so that nothing more is read meanwhile
        inflation.start()

    def _wait_for_inflation(self, stream: Stream, event: Event) -> None:
        if isinstance(event, StreamReset):
            self._other(stream, event)
        else:
            # Requests of a stream are served in order (D-1).
            self._inflating[stream][1].append(event)

    def _cancel_inflation(self, stream: Stream) -> None:
        inflation, waiting = self._inflating.pop(stream)
        self._connection.unserved -= 1
        inflation.cancel()
        self._handler.charge_request(self._connection, inflation.seconds)
        for event in waiting:
            self._connection.drop(event)

    def _inflated(self, stream: Stream, result: bytearray | RefusedMessage | RequestError) -> None:
        inflation, waiting = self._inflating.pop(stream)
        self._connection.unserved -= 1
        if not isinstance(result, bytearray):  # it brought no request: without a charge, bombs would be free
            self._handler.charge_request(self._connection, inflation.seconds)
        if isinstance(result, RequestError):
            self._fail(stream, result)
        elif isinstance(stream.owner, Call):
            self._receive(stream.owner, result)
        self._handle([(stream, event) for event in waiting])
        self._connection.flush()

    # Calls

    def _open(self, stream: Stream, event: HeadersReceived) -> None:
        fields = event.fields
        kind, path = fields.get("content-type", ""), fields.get(":path", "")
        # A client that does not speak gRPC reads no trailers: it is answered as by any HTTP server.
        if fields.get(":method") != "POST" or not kind.startswith("application/grpc"):
            status = "405" if fields.get(":method") != "POST" else "415"
            self.http.end_stream(stream, ((":status", status), ("allow", "POST")))
            return
        try:
            # First, so that an invalid header field takes no place.
            timeout = _timeout(fields.get("grpc-timeout"))
            # Without the token, because Kubernetes' probes can send none.
            if path.startswith("/grpc.health."):
                self._open_side_call(stream, path)
            else:
                may_act = self._gate.check(Gate.bearer(fields.get("authorization")), self._connection.peer)
                self._open_call(stream, path, fields, may_act=may_act)
        except RequestError as error:
            self._end(stream, error, headed=False)
            return
        compression = stream.owner.compression if isinstance(stream.owner, Call) else None
        self.http.send_headers(stream, _HEAD if compression is None else (*_HEAD, ("grpc-encoding", compression)))
        if timeout is not None:
            self._deadlines[stream] = self._handler.call_later(timeout, lambda: self._expire(stream))
        if event.end_stream:
            self._other(stream, StreamEnded())

    def _open_call(self, stream: Stream, path: str, fields: dict[str, str], *, may_act: bool) -> None:
        """Open a call of an accepted client. Raises RequestError."""
        encoding = fields.get("grpc-encoding", "identity")
        # gRPC requires UNIMPLEMENTED, with `grpc-accept-encoding` in the trailers, which lists what the client may use.
        if encoding not in _ENCODINGS.split(", "):
            text = f"the compression {encoding!r:.40} is none of {_ENCODINGS}"
            remedy = "; zstd needs the extra `zstd` on the server" if encoding == "zstd" else ""
            raise RequestError(Code.UNIMPLEMENTED, text + remedy)
        if path != _PATH:
            self._open_side_call(stream, path)
            return
        call = self._handler.open(self._connection, fields.get(HELLO, ""), may_act=may_act)
        stream.owner, call.stream = call, stream
        # Bytes of a stream without a reader are dropped, so a refused call takes no memory.
        stream.reader = MessageReader(self._limits.max_message_bytes, self._connection.admit)
        if encoding != "identity":
            self._encodings[stream] = encoding
        accepted = re.split(r"\s*,\s*", fields.get("grpc-accept-encoding", ""))
        if encoding in get_args(Compression) and encoding in accepted:  # answers are compressed as requests may be
            call.compression = encoding

    def _open_side_call(self, stream: Stream, path: str) -> None:
        """Open a call of gRPC's own services. Raises RequestError."""
        if (side := self._services.open(path)) is None:
            raise RequestError(Code.UNIMPLEMENTED, f"there is no method {path!r:.200}; expected {_PATH}")
        if self._side_calls >= _MAX_SIDE_CALLS:
            text = f"this connection has {_MAX_SIDE_CALLS} calls of gRPC's own services already; end one"
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)
        self._side_calls += 1
        stream.owner, stream.reader = side, MessageReader(MAX_REQUEST)

    def _expire(self, stream: Stream) -> None:
        """End a call whose deadline has passed."""
        if stream in self._deadlines:
            self._fail(stream, RequestError(Code.DEADLINE_EXCEEDED, "the time of grpc-timeout is over"))
            self._connection.flush()

    def _reply(self, stream: Stream, side: SideCall, messages: list[bytes]) -> None:
        """Answer a call of gRPC's own services."""
        for message in messages:
            self.http.send_grpc_message(stream, [message], len(message))
        # The client sends requests and takes no answers. It may have shown no token, so no more answers are stored.
        if len(stream.pending) > _MAX_WAITING:
            self._forget(stream)
            # It counts for the limit on resets, otherwise a client could cause this endlessly.
            self.http.resets += 1
            self.http.reset_stream(stream, ErrorCode.ENHANCE_YOUR_CALM)
        elif side.over:
            self._end(stream, side.error)

    def _end(self, stream: Stream, error: RequestError | None, *, headed: bool = True) -> None:
        """End a stream with gRPC's trailers."""
        self._forget(stream)
        fields: list[tuple[str, str]] = [] if headed else [_OK, _CONTENT, ("grpc-accept-encoding", _ENCODINGS)]
        fields.append(("grpc-status", str(int(error.code) if error else 0)))
        if error:
            details = quote(error.message, safe=_PRINTABLE)[:_MAX_DETAILS]
            # Do not cut inside an escape such as %C3.
            cut = details.rfind("%", len(details) - 2) if len(details) == _MAX_DETAILS else -1
            fields.append(("grpc-message", (details[:cut] if cut >= 0 else details).strip()))
        self.http.end_stream(stream, fields)

    def _forget(self, stream: Stream) -> None:
        """Note that a stream is over."""
        self._encodings.pop(stream, None)
        if (deadline := self._deadlines.pop(stream, None)) is not None:
            deadline.cancel()
        if isinstance(stream.owner, SideCall):
            stream.owner = None
            self._side_calls -= 1
        if stream in self._inflating:
            self._cancel_inflation(stream)
        stream.discard()

    # Data to send

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send an answer with the next flush. Return True if the client has a window for all of it.

        An answer that must be compressed first is sent later; meanwhile the client counts as having no window.
        """
        # The parts of a larger answer share the environment's memory, which the next step overwrites: it is sent before
        # that step.
        self._connection.joins_answers = size <= SMALL
        if call.compression is not None and size >= WORTHWHILE:
            self._compress(call, parts, size)
            return False
        stream: Stream = call.stream
        self.http.send_grpc_message(stream, parts, size)
        return not stream.pending

    def is_blocked(self, call: Call) -> bool:
        """True if the client has no window for the answers of a call, or one is still being compressed."""
        return bool(call.stream.pending or call.compressing)

    def _compress(self, call: Call, parts: list[bytes | memoryview], size: int) -> None:
        """Compress an answer in the helper thread, then send it; uncompressed if compression makes it no smaller."""
        encoding = str(call.compression)
        call.compressing = True

        def done(result: bytes | Exception) -> None:
            call.compressing = False
            if call.over:
                return
            if isinstance(result, bytes) and len(result) < size:
                self.http.send_data(call.stream, [pack_prefix(1, len(result)), result], len(result) + PREFIX)
            else:
                self.http.send_grpc_message(call.stream, parts, size)
            self._handler.calls.unblock(call)
            self._connection.flush()

        self._handler.helper.submit(lambda: compress(encoding, parts), done)

    def defer(self, call: Call, size: int) -> None:
        """Give the stream no new window for a request."""
        call.stream.deferred += size

    def resume(self, call: Call, size: int) -> None:
        """Give the stream its window again."""
        self.http.acknowledge_data(call.stream, size)

    def finish(self, call: Call, error: RequestError | None) -> None:
        """Send the call's trailers."""
        if error is not None:
            # Trailers follow all data, and this client may never have a window for the data.
            self.http.discard_pending(call.stream)
        self._end(call.stream, error)

    def refuse(self, error: RequestError) -> None:
        """Send GOAWAY, if it was not sent before."""
        # Otherwise `_fail_connection` sent one with the error's code, or `drain` did.
        if not self.http.goaway_sent:
            self.http.go_away(ErrorCode.ENHANCE_YOUR_CALM, error.message)

    def drain(self) -> None:
        """Tell the client that no more calls are accepted; open calls continue."""
        self.http.go_away(ErrorCode.NO_ERROR, "the server is stopping")
        for stream in list(self.http.streams.values()):
            if isinstance(stream.owner, SideCall):
                # A proxy ends HTTP/2, so clients behind it learn of a drain only from health's Watch.
                self._reply(stream, stream.owner, stream.owner.drain())

    def ping(self) -> None:
        """Send PING."""
        self.http.ping()

    def connection_lost(self) -> None:
        """Free all memory at once: memory that waits for the garbage collector is not counted."""
        for stream in list(self.http.streams.values()):
            self._forget(stream)
        self.http.connection_lost()


def _timeout(text: str | None) -> float | None:
    """Return the seconds of a `grpc-timeout`; raise RequestError if it is malformed."""
    if text is None:
        return None
    if (found := _TIMEOUT.fullmatch(text)) is None:
        raise RequestError(Code.INTERNAL, f"expected grpc-timeout to be digits and one of HMSmun, got {text!r:.40}")
    return int(found[1]) * _UNITS[found[2]]
