"""Frames, as the server speaks them: one call a connection, which a hello begins."""

from __future__ import annotations

from collections.abc import Callable

from bridge.errors import RequestError
from bridge.frames import HEADER, SMALL, FrameReader, Hello, pack_frame
from bridge.server.auth import Gate
from bridge.server.connection import Call, Connection, Dialect, Switchboard
from bridge.server.limits import Limits
from bridge.session import error_response

__all__ = ["EitherDialect", "FrameDialect"]

_HTTP2 = b"PRI "  # how HTTP/2 begins; no frame is as long as these four bytes would have it


class EitherDialect(Dialect):
    """Waits for a client's first bytes, and speaks as it does: frames, or gRPC.

    Args:
        connection: What speaks it.
        frames: Makes what speaks frames.
        grpc: Makes what speaks gRPC.
    """

    def __init__(
        self, connection: Connection, frames: Callable[[Connection], Dialect], grpc: Callable[[Connection], Dialect]
    ) -> None:
        self._connection = connection
        self._frames, self._grpc = frames, grpc
        self._first = b""

    def feed(self, data: bytes) -> None:
        """Take the first bytes, and hand them on once it is clear what they are."""
        self._first += data
        if len(self._first) >= len(_HTTP2):
            connection = self._connection
            connection.dialect = (self._grpc if self._first.startswith(_HTTP2) else self._frames)(connection)
            connection.dialect.feed(self._first)


class FrameDialect(Dialect):
    """A length before each message, and a hello before all others.

    Args:
        connection: What speaks it.
        switchboard: Gets the call.
        limits: `max_message_bytes`.
        gate: Asks the client for the token.
        server_id: What the hello calls this server.
    """

    def __init__(
        self, connection: Connection, switchboard: Switchboard, limits: Limits, gate: Gate, server_id: str
    ) -> None:
        self._connection = connection
        self._switchboard = switchboard
        self._gate = gate
        self._hello = pack_frame(Hello(server=server_id).pack())
        self._reader = FrameReader(limits.max_message_bytes, admit=connection.admit)
        self._call: Call | None = None

    @property
    def space(self) -> memoryview | None:
        """Where the rest of a large frame goes."""
        return self._reader.space

    def filled(self, count: int) -> None:
        """Take note that bytes are in `space`."""
        self._take(self._reader.filled(count))

    def feed(self, data: bytes) -> None:
        """Take bytes; what they complete goes to the call."""
        self._take(self._reader.feed(data))

    def _take(self, frames: list[bytes | bytearray]) -> None:
        for frame in frames:
            if self._call is None:
                self._greet(frame)
            else:
                self._switchboard.push(self._call, frame)

    def _greet(self, frame: bytes | bytearray) -> None:
        hello = Hello.unpack(frame)
        self._gate.check(hello.token, self._connection.peer)
        self._call = self._switchboard.begin(self._connection, hello.version, "frames-")
        self._connection.fresh.append(self._hello)

    def ended(self) -> bool:
        """Serve what came before the end. Who waits for others waits no longer: the client may be gone altogether."""
        if self._call is None:
            return False
        self._call.session.hang_up()
        self._switchboard.push(self._call, None)
        return True

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send an answer's frame."""
        fresh = self._connection.fresh
        if size <= SMALL:
            fresh.append(b"".join((HEADER.pack(size), *parts)))
        else:
            fresh.append(HEADER.pack(size))
            fresh += parts
        return True

    def finish(self, call: Call, error: RequestError | None) -> None:
        """Say nothing: it would be taken for an answer. The end of the stream says it."""
        self._connection.ending = True

    def refuse(self, error: RequestError) -> None:
        """Say why nothing more is read: in a hello where none was said."""
        if self._call is None:
            payload = Hello(code=int(error.code), message=error.message).pack()
        else:
            payload = error_response(error)
        self._connection.fresh.append(pack_frame(payload))
