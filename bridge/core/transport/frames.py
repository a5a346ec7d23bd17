"""Frames, error codes, events and streams of HTTP/2 (RFC 9113), for both halves of a connection.

The functions check single frames (section 6), independent of the connection's state.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

__all__ = [
    "FRAME",
    "INITIAL_WINDOW",
    "MAX_WINDOW",
    "MIN_FRAME_SIZE",
    "PREFACE",
    "ErrorCode",
    "Event",
    "Fields",
    "Flag",
    "FrameType",
    "HeadersReceived",
    "Http2Error",
    "Setting",
    "Stream",
    "StreamEnded",
    "StreamError",
    "StreamReader",
    "StreamReset",
    "StreamTable",
    "check_greeting",
    "check_length",
    "check_settings",
    "check_size",
    "has_preface",
    "header_fragment",
    "pack_frame",
    "padding_of",
    "read_goaway",
]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes that a client sends."""


class FrameType:
    """Types of frames (RFC 9113, section 6)."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9
    OF_STREAMS = (DATA, HEADERS, PRIORITY, RST_STREAM, PUSH_PROMISE, CONTINUATION)
    """The types that need a stream number. WINDOW_UPDATE may have one."""
    OF_CONNECTIONS = (SETTINGS, PING, GOAWAY)
    """The types that must not have one."""


class Flag:
    """Flags of frames."""

    END_STREAM = ACK = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Setting:
    """Settings of a connection (RFC 9113, section 6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode:
    """Error codes (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


# `struct` has no integers of three bytes.
FRAME = struct.Struct(">BHBBI")
"""A frame's header: the length as its highest byte and the rest, the type, the flags, the stream."""
INITIAL_WINDOW = 65535
"""Flow-control window of a connection, and of a stream unless the peer's settings say otherwise."""
MAX_WINDOW = (1 << 31) - 1
"""The largest flow-control window, and the largest stream number."""
MIN_FRAME_SIZE = 16384
"""The size of a frame that every peer accepts, in bytes."""

# The number of closed streams that are remembered, because frames that the peer sent before it knew may still arrive.
# Limited, because a connection may open any number of streams.
_MAX_REMEMBERED = 1000

Fields: TypeAlias = "Iterable[tuple[str, str]]"
"""Header fields to send."""


class Http2Error(Exception):
    """The peer broke the rules of HTTP/2; the connection cannot be used any more.

    Args:
        text: What is wrong.
        code: HTTP/2's error code.
    """

    def __init__(self, text: str, code: int = ErrorCode.PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.code = code


class StreamError(Exception):
    """The peer broke the rules of HTTP/2 on one stream. This stream is reset; the others continue.

    Args:
        number: The stream's number.
        text: What is wrong.
        code: HTTP/2's error code.
    """

    def __init__(self, number: int, text: str, code: int = ErrorCode.PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.number = number
        self.code = code


@dataclasses.dataclass(frozen=True)
class HeadersReceived:
    """Header fields arrived: the first of the stream, or its trailers."""

    fields: dict[str, str]
    """Values by name; the values of a repeated name are joined by `, ` (RFC 9110, section 5.3)."""
    end_stream: bool
    """True if the peer sends nothing more on the stream."""


class StreamEnded:
    """The peer sends nothing more on the stream."""


@dataclasses.dataclass(frozen=True)
class StreamReset:
    """The stream was reset."""

    code: int
    """HTTP/2's error code."""
    reason: str | None = None
    """The peer's mistake, if this end reset the stream; None: the peer reset it."""


Event: TypeAlias = Any
"""One of the classes above, or an event that a stream's reader makes from its bytes."""


class StreamReader(Protocol):
    """Turns the bytes of one stream into events, as `bridge.core.transport.messages.MessageReader` does."""

    @property
    def receives_large(self) -> bool:
        """True if most bytes of a large message are still missing."""

    def receive_data(self, stream: Stream, data: bytes, start: int, stop: int, events: list[Any]) -> None:
        """Read `data[start:stop]`; append the events that it completes to `events`."""

    def get_buffer(self) -> memoryview | None:
        """Return the memory for the next bytes of a large message; None: pass them to `receive_data`."""

    def buffer_updated(self, stream: Stream, count: int, events: list[Any]) -> None:
        """Note that `count` bytes were received into the buffer."""

    def end(self, stream: Stream, events: list[Any]) -> None:
        """Note that the stream has ended. In the middle of a message, that is an event of its own."""

    def close(self) -> None:
        """Drop an incomplete message."""


class Stream:
    """One stream of a connection.

    Args:
        number: The stream's number in HTTP/2.
        recv_window: The number of bytes that the peer may send.
    """

    __slots__ = (
        "deferred",
        "expected_bytes",
        "headers_received",
        "local_closed",
        "number",
        "owner",
        "pending",
        "reader",
        "recv_window",
        "remote_closed",
        "send_window",
        "trailers",
    )

    def __init__(self, number: int, recv_window: int) -> None:
        self.number = number
        self.owner: Any = None
        """The object that the stream belongs to, such as a call; set and read by the user of the connection."""
        self.reader: StreamReader | None = None
        """The reader of the stream's bytes; None: they are dropped."""
        self.headers_received = False
        self.remote_closed = False
        """True if the peer sends nothing more."""
        self.local_closed = False
        """True if this end sends nothing more, once `pending` is sent."""
        self.trailers: list[tuple[str, str]] | None = None
        """Header fields that end the stream after the `pending` bytes."""
        self.recv_window = recv_window
        self.deferred = 0
        """Received bytes for which the peer gets no new window yet."""
        self.send_window = 0
        """The window for sending, relative to the initial window of the peer's settings."""
        self.pending: deque[memoryview] = deque()
        """Bytes to send for which the peer has no window yet."""
        self.expected_bytes: int | None = None
        """The bytes that remain of `content-length`; None: there was none."""

    def discard(self) -> None:
        """Drop all bytes from now on, and incomplete messages."""
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()


# A stream is idle until HEADERS open it. It closes when both ends have declared that they send nothing more
# (`remote_closed` and `local_closed`), or at once when either end resets it. It then leaves the table, which remembers
# only how it closed. Frames for a stream that this end has reset were sent before the peer knew, and are dropped.
# Frames after the peer's own end or reset break the rules (RFC 9113, 5.1). If the peer answers our reset with its own,
# it knows of ours, and further frames break the rules too.
class StreamTable(dict[int, Stream]):
    """The open streams of a connection, by number, and the recently closed ones (RFC 9113, section 5.1).

    Args:
        client: True for the end that opens the streams.
        max_open: On a server: the most streams that may be open at a time.
    """

    def __init__(self, *, client: bool, max_open: int) -> None:
        super().__init__()
        # A client numbers its streams 1, 3, 5, …: each number is the last one plus 2.
        self.last = -1 if client else 0
        """The largest stream number that was opened."""
        self._max_open = max_open
        self._closed: OrderedDict[int, bool] = OrderedDict()
        """For each recently closed stream, whether this end reset it, so that frames sent before are ignored."""

    def is_idle(self, number: int) -> bool:
        """True if no stream of this number was ever opened."""
        # Even numbers belong to streams that a server opens by PUSH_PROMISE, which is disabled.
        return number > self.last or not number & 1

    def check_new(self, number: int) -> None:
        """Raise Http2Error unless a client may open a stream of this number next."""
        if number in self._closed:
            raise Http2Error(f"header fields came on stream {number}, which has ended", ErrorCode.STREAM_CLOSED)
        if not number & 1 or number <= self.last:
            raise Http2Error(f"a client opens stream {number} after {self.last}; expected a larger, odd number")

    @property
    def full(self) -> bool:
        """True if the peer may open no more streams for now."""
        return len(self) >= self._max_open

    def open(self, stream: Stream) -> Stream:
        """Add a stream, and return it."""
        self.last = stream.number
        self[stream.number] = stream
        return stream

    def refuse(self, number: int) -> None:
        """Note that the peer opened a stream and this end reset it at once."""
        self.last = number
        self.note_closed(number, reset=True)

    def close(self, number: int, *, reset: bool) -> None:
        """Remove a stream; do nothing if it was removed before. `reset`: this end resets it."""
        if self.pop(number, None) is not None:
            self.note_closed(number, reset=reset)

    def note_closed(self, number: int, *, reset: bool) -> None:
        """Remember a closed stream, and forget the oldest if there are too many."""
        self._closed[number] = reset
        if len(self._closed) > _MAX_REMEMBERED:
            self._closed.popitem(last=False)

    def was_reset(self, number: int) -> bool:
        """True if this end reset a stream, and the peer may not know it yet."""
        return self._closed.get(number, False)

    def note_peer_reset(self, number: int) -> None:
        """Note that the peer, too, has reset a closed stream: it sends nothing more on it."""
        if number in self._closed:
            self._closed[number] = False


def pack_frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    size = len(payload)
    return FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, number) + payload


def has_preface(data: bytes) -> bool:
    """True if a client's connection preface is complete. Raises Http2Error if the bytes are not the preface."""
    # Compare the bytes so far: a client of another protocol may send less than 24 bytes and then wait for an answer.
    if not PREFACE.startswith(data[: len(PREFACE)]):
        # 0x16 0x03 begins a TLS handshake. The second byte may not have arrived yet.
        if data[0] == 0x16 and data[1:2] in (b"\x03", b""):
            raise Http2Error("the client speaks TLS, and this port does not")
        raise Http2Error(f"expected HTTP/2's connection preface, got {data[:24]!r}")
    return len(data) >= len(PREFACE)


def check_greeting(data: bytes, kind: int | None, flags: int) -> None:
    """Check that the peer's first frame is SETTINGS.

    Args:
        data: The peer's first bytes.
        kind: The frame's type; None: its header is not complete.
        flags: The frame's flags.

    Raises:
        Http2Error: The first frame is another one.
    """
    # Read as a frame's header, `HTT` announces a frame of 4.7 MB, for which the client would wait.
    if data.startswith(b"HTTP/"):
        raise Http2Error("an HTTP server is there, but it does not speak HTTP/2")
    # 0x15 0x03 begins a TLS alert, the answer to the preface from a server that expects TLS.
    if data[0] == 0x15 and data[1:2] in (b"\x03", b""):
        raise Http2Error("the port speaks TLS")
    if kind is not None and (kind != FrameType.SETTINGS or flags & Flag.ACK):
        raise Http2Error(f"expected HTTP/2's settings first, got {data[:16]!r}")


def check_length(name: str, payload: bytes, expected: int) -> None:
    """Raise Http2Error unless a frame has the length that its type prescribes."""
    if len(payload) != expected:
        raise Http2Error(f"expected a {name} of {expected} bytes, got {len(payload)}", ErrorCode.FRAME_SIZE_ERROR)


def check_size(kind: int, length: int, most: int) -> None:
    """Raise Http2Error if a frame, except DATA, is too large."""
    if length <= most:
        return
    if kind in (FrameType.HEADERS, FrameType.CONTINUATION):
        raise Http2Error(f"a header block of more than {most} bytes", ErrorCode.ENHANCE_YOUR_CALM)
    raise Http2Error(f"a frame of {length} bytes is larger than is taken", ErrorCode.FRAME_SIZE_ERROR)


def check_settings(payload: bytes, client: bool) -> dict[int, int]:
    """Return the settings of a frame; the last value of each counts.

    Args:
        payload: The frame's payload.
        client: True if this end is the client: the settings are a server's.

    Raises:
        Http2Error: A setting has an invalid value.
    """
    if len(payload) % 6:
        raise Http2Error(f"a SETTINGS frame of {len(payload)} bytes", ErrorCode.FRAME_SIZE_ERROR)
    found: dict[int, int] = {}
    for key, value in struct.iter_unpack(">HI", payload):
        if key == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise Http2Error(f"a window of {value} bytes", ErrorCode.FLOW_CONTROL_ERROR)
        if key == Setting.MAX_FRAME_SIZE and not MIN_FRAME_SIZE <= value < 1 << 24:
            raise Http2Error(f"frames of at most {value} bytes")
        # A server may not send 1 (RFC 9113, 6.5.2).
        if key == Setting.ENABLE_PUSH and value > (0 if client else 1):
            raise Http2Error(f"SETTINGS_ENABLE_PUSH={value}")
        found[key] = value
    return found


def header_fragment(flags: int, payload: bytes) -> bytes:
    """Return the fragment of a header block in a HEADERS frame. Raises Http2Error if the frame is too short."""
    start, stop = 0, len(payload)
    if flags & Flag.PADDED:
        # An empty frame lacks even the byte with the length of its padding: `start > stop` is true then too.
        start, stop = 1, stop - (payload[0] if payload else stop)
    start += 5 if flags & Flag.PRIORITY else 0
    if start > stop:
        raise Http2Error("a header block is shorter than its frame says")
    return payload[start:stop]


def padding_of(data: bytes, start: int, length: int) -> int:
    """Return the bytes of padding in a DATA frame, including the length byte. Raises Http2Error if all are padding."""
    if not length or data[start] >= length:
        raise Http2Error("a frame is all padding")
    return data[start] + 1


def read_goaway(payload: bytes) -> tuple[int, str]:
    """Return the last stream that a GOAWAY frame allows, and the reason. Raises Http2Error if it is too short."""
    if len(payload) < 8:
        raise Http2Error(f"a GOAWAY frame of {len(payload)} bytes", ErrorCode.FRAME_SIZE_ERROR)
    last, number = struct.unpack_from(">II", payload)
    debug = payload[8:].decode("utf-8", "replace")
    # gRPC servers put the reason here, such as `too_many_pings`.
    reason = f"the server takes no further calls (HTTP/2's error {number})" + (f": {debug}" if debug else "")
    return last & MAX_WINDOW, reason
