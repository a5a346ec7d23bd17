"""HTTP/2 for gRPC's calls, without input or output: either end of a connection, and its streams.

What dm_env_rpc needs of HTTP/2 (RFC 9113) and of gRPC's mapping onto it (the `PROTOCOL-HTTP2.md` of the gRPC project)
are streams that are opened once and then carry messages both ways: this file. A message costs either end a fraction of
what it does through the general library (docs/performance.md). Bytes go in and events come out; `take` gives what is
to be sent.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from bridge.errors import RequestError
from bridge.transport.hpack import Decoder, HpackError, encode

__all__ = [
    "CANCEL",
    "ENHANCE_YOUR_CALM",
    "NO_ERROR",
    "PREFACE",
    "SMALL",
    "Compressed",
    "End",
    "Event",
    "Fields",
    "Garbled",
    "Http2",
    "Http2Error",
    "RefusedMessage",
    "Reset",
    "Stream",
    "TooLarge",
]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""How a client begins."""
_DATA, _HEADERS, _PRIORITY_FRAME, _RST_STREAM, _SETTINGS, _PUSH_PROMISE = range(6)
_PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 6, 7, 8, 9
_OF_A_STREAM = (_DATA, _HEADERS, _PRIORITY_FRAME, _RST_STREAM, _CONTINUATION)
_END_STREAM = _ACK = 0x1
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _MAX_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 1, 2, 3, 4, 5

NO_ERROR = 0
"""HTTP/2's number for an end without a fault."""
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, REFUSED_STREAM, COMPRESSION_ERROR = 1, 3, 6, 7, 9
CANCEL = 8
"""HTTP/2's number for a stream that is not wanted any more."""
ENHANCE_YOUR_CALM = 11
"""HTTP/2's number for a peer that asks for too much."""

SMALL = 16384
"""Bytes of a message that is sent from one piece of memory: its parts may change before it is sent."""

_MESSAGE = struct.Struct(">BHBBIBI")  # a DATA frame's header, and the prefix of the one message in it
_FRAME = struct.Struct(">BHBBI")
_PREFIX = 5
_NO_TABLE = b"\x20"  # how a header block says that its sender uses none
_OUR_FRAME = (1 << 24) - 1
_START_WINDOW = 65535
_MOST_WINDOW = (1 << 31) - 1
_CONNECTION_WINDOW = _MOST_WINDOW
# Header blocks, and frames that hold no messages.
_MAX_BLOCK = 1 << 18
_MAX_CONTINUATIONS = 64
_LARGE = 65536


class Http2Error(Exception):
    """The peer does not speak HTTP/2 as it should; its connection is of no more use.

    Args:
        text: What is wrong.
        code: HTTP/2's number for it.
    """

    def __init__(self, text: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.code = code


@dataclasses.dataclass(frozen=True)
class Fields:
    """Header fields came: the first of the stream, or its last."""

    fields: dict[str, str]
    last: bool
    """Whether the peer sends nothing more on the stream."""


class End:
    """The peer sends no more messages."""


@dataclasses.dataclass(frozen=True)
class Reset:
    """The peer cut the stream."""

    code: int


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """A message is longer than it may be; nothing more is read from the stream."""

    size: int


@dataclasses.dataclass(frozen=True)
class Garbled:
    """What came is no message; nothing more is read from the stream."""

    what: str


class Compressed(bytes):
    """A message that came compressed."""


class RefusedMessage(bytes):
    """Stands for a message that was not admitted and whose bytes were dropped: empty, with the reason."""

    error: RequestError

    @classmethod
    def of(cls, error: RequestError) -> RefusedMessage:
        """Return one with this reason."""
        message = cls()
        message.error = error
        return message


Event = bytes | bytearray | Fields | End | Reset | TooLarge | Garbled


class Stream:
    """One stream of a connection.

    Args:
        number: HTTP/2's.
        room: Bytes that the peer may send.
        window: Bytes that we may send.
    """

    __slots__ = (
        "body",
        "closing",
        "compressed",
        "deaf",
        "deferred",
        "ended",
        "finished",
        "have",
        "headed",
        "number",
        "owner",
        "pending",
        "prefix",
        "room",
        "skip",
        "window",
    )

    def __init__(self, number: int, room: int, window: int) -> None:
        self.number = number
        self.owner: Any = None
        """Whose it is: for who uses the connection."""
        self.headed = False
        """Whether header fields came."""
        self.ended = False
        """Whether the peer sends nothing more."""
        self.deaf = False
        """Whether nothing more is read."""
        self.finished = False
        """Whether we said, or will after `pending`, that nothing more follows."""
        self.closing: bytes | None = None
        """The last frame, which goes after what is `pending`."""
        self.room = room
        self.deferred = 0
        """Bytes of messages that were handed out, for which the peer gets no new room yet."""
        self.window = window
        self.pending: deque[memoryview] = deque()
        """What the peer has no room for yet."""
        self.prefix = b""
        self.body: bytearray | None = None
        self.have = 0
        self.compressed = False
        self.skip: RefusedMessage | None = None
        """What comes in place of the message whose bytes are being dropped; `have` of them are still to come."""


class Http2:
    """One end of a connection.

    Args:
        client: Whether this end opens the streams.
        max_message_bytes: The largest message to take.
        stream_window: Bytes that the peer may send on a stream before they were taken.
        max_streams: Of a server: how many streams there may be at a time.
        admit: Called with the bytes of a large message before memory is taken for it, and with as many less than none
            where it will not come to its end; where it raises RequestError, a `RefusedMessage` comes in its place.
        outgoing: Where to append what is to be sent; None: `take` gives it.
    """

    def __init__(
        self,
        *,
        client: bool,
        max_message_bytes: int,
        stream_window: int = 1 << 26,
        max_streams: int = 1,
        admit: Callable[[int], None] | None = None,
        outgoing: list[bytes | memoryview] | None = None,
    ) -> None:
        self._client = client
        self._max_message_bytes = max_message_bytes
        self._stream_window = stream_window
        self._max_streams = max_streams
        self._admit = admit
        self.streams: dict[int, Stream] = {}
        """Those that are open, by number."""
        self.farewell: str | None = None
        """Why the peer takes no further streams, where it has said so; those it has may go on."""
        self.pongs = 0
        """How many pings were answered."""
        self.spoke = False
        """Whether the peer is known to speak HTTP/2."""
        self.resets = 0
        """How many streams the peer cut."""
        self.going = False
        """Whether we said that we take no further streams."""
        self.room_for_streams = 1 << 31
        """How many streams the peer takes at a time, as far as is known."""
        self.broken: Http2Error | None = None
        """What is wrong with the bytes after those that `feed` returned the events of."""
        self._decoder = Decoder()
        self._next = 1
        self._last = 0
        # What comes
        self._rest = b""
        self._preface = not client
        self.current: Stream | None = None
        """The stream of a DATA frame whose rest is still to come."""
        self._left = 0
        self._padding = 0
        self._left_ends = False
        self._block: bytearray | None = None
        self._block_of = 0
        self._block_ends = False
        self._continuations = 0
        self._room = _CONNECTION_WINDOW
        # What goes
        self._window = _START_WINDOW
        self._their_window = _START_WINDOW
        self._their_frame = 16384
        self._waiting: set[Stream] = set()
        self._widened = False
        self._before_block = b""
        settings = [(_INITIAL_WINDOW_SIZE, stream_window), (_MAX_FRAME_SIZE, _OUR_FRAME)]
        settings += [(_ENABLE_PUSH, 0)] if client else [(_MAX_STREAMS, max_streams)]
        self._out: list[bytes | memoryview] = [] if outgoing is None else outgoing
        if client:
            self._out.append(PREFACE)
        self._frame(_SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings))
        self._frame(_WINDOW_UPDATE, 0, 0, (_CONNECTION_WINDOW - _START_WINDOW).to_bytes(4, "big"))

    # What goes

    def take(self) -> list[bytes | memoryview]:
        """Return what is to be sent now, in parts."""
        out, self._out = self._out, []
        return out

    @property
    def owes(self) -> bool:
        """Whether something is to be sent."""
        return bool(self._out)

    def open(self, fields: Iterable[tuple[str, str]]) -> Stream:
        """Open a stream by its header fields. Raises ValueError where they are too many."""
        block = self._encode(fields)
        if len(block) > self._their_frame:
            raise ValueError(f"expected metadata of less than {self._their_frame} bytes, got {len(block)}")
        stream = self.streams[self._next] = Stream(self._next, self._stream_window, self._their_window)
        self._next += 2
        self._frame(_HEADERS, _END_HEADERS, stream.number, block)
        return stream

    def head(self, stream: Stream, fields: Iterable[tuple[str, str]]) -> None:
        """Send a stream's first header fields."""
        self._frame(_HEADERS, _END_HEADERS, stream.number, self._encode(fields))

    def send(self, stream: Stream, parts: list[bytes | memoryview], size: int) -> None:
        """Send a message of `size` bytes. What the peer has no room for stays `pending` with the stream."""
        if stream.finished:
            return
        whole = size + _PREFIX
        if whole <= self._their_frame and whole <= self._window and whole <= stream.window and not stream.pending:
            self._window -= whole
            stream.window -= whole
            head = _MESSAGE.pack(whole >> 16, whole & 0xFFFF, _DATA, 0, stream.number, 0, size)
            if size <= SMALL:
                self._out.append(b"".join((head, *parts)))
            else:
                self._out.append(head)
                self._out += parts
            return
        if size <= SMALL:
            parts = [b"".join(parts)]
        stream.pending.append(memoryview(b"\0" + size.to_bytes(4, "big")))
        stream.pending.extend(memoryview(part) for part in parts if len(part))
        self._waiting.add(stream)
        self._release(stream)

    def finish(self, stream: Stream, fields: Iterable[tuple[str, str]] | None = None) -> None:
        """Say, once all messages are sent, that no more follow: by header fields where there are some."""
        if stream.finished:
            return
        stream.finished = True
        if fields is None:
            stream.closing = _FRAME.pack(0, 0, _DATA, _END_STREAM, stream.number)
        else:
            block = self._encode(fields)[: self._their_frame]
            size = len(block)
            flags = _END_HEADERS | _END_STREAM
            stream.closing = _FRAME.pack(size >> 16, size & 0xFFFF, _HEADERS, flags, stream.number) + block
        self._release(stream)

    def forgo(self, stream: Stream) -> None:
        """Drop what the peer has no room for."""
        stream.pending.clear()
        self._waiting.discard(stream)

    def cut(self, stream: Stream, code: int) -> None:
        """Cut a stream; what is pending is dropped."""
        if self.streams.get(stream.number) is stream:
            self._frame(_RST_STREAM, 0, stream.number, code.to_bytes(4, "big"))
            self._forget(stream)

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._frame(_PING, 0, 0, bytes(8))

    def go_away(self, code: int = NO_ERROR, why: str = "") -> None:
        """Say that no further streams are taken."""
        self.going = True
        self._frame(_GOAWAY, 0, 0, struct.pack(">II", self._last, code) + why.encode()[:1000])

    def resume(self, stream: Stream, size: int) -> None:
        """Give the peer room again for a message that was deferred."""
        stream.deferred -= size
        if not stream.deaf and 0 <= stream.room < self._stream_window >> 1 and self._room >= 0:
            self._credit(stream)

    def _encode(self, fields: Iterable[tuple[str, str]]) -> bytes:
        before, self._before_block = self._before_block, b""
        return before + encode(fields)

    def _frame(self, kind: int, flags: int, number: int, payload: bytes | bytearray | memoryview) -> None:
        size = len(payload)
        self._out.append(_FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, number) + payload)

    def _release(self, stream: Stream) -> None:
        """Send of what waits as much as the peer has room for."""
        pending = stream.pending
        while pending:
            room = min(self._window, stream.window, self._their_frame)
            if room <= 0:
                return
            parts, size = [], 0
            while pending and size < room:
                first = pending[0]
                if len(first) > room - size:
                    parts.append(first[: room - size])
                    pending[0] = first[room - size :]
                    size = room
                else:
                    parts.append(pending.popleft())
                    size += len(first)
            self._out.append(_FRAME.pack(size >> 16, size & 0xFFFF, _DATA, 0, stream.number))
            self._out += parts
            self._window -= size
            stream.window -= size
        self._waiting.discard(stream)
        if stream.closing is not None:
            self._out.append(stream.closing)
            stream.closing = None
            if stream.ended:
                self._forget(stream)
            elif not self._client:  # all was said; what the client may still send is not wanted
                self.cut(stream, NO_ERROR)

    def _forget(self, stream: Stream) -> None:
        self.streams.pop(stream.number, None)
        self._waiting.discard(stream)
        stream.ended = stream.deaf = stream.finished = True
        stream.pending.clear()
        stream.closing = None
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        """Give up a message that has begun."""
        body, stream.body = stream.body, None
        stream.skip, stream.prefix = None, b""
        if body is not None and len(body) > _LARGE and self._admit is not None:
            self._admit(-len(body))

    # What comes

    @property
    def space(self) -> memoryview | None:
        """Where the next bytes of a large message go, to be received into and then told to `filled`; None: `feed`."""
        stream = self.current
        if stream is None or not self._left or stream.body is None or stream.deaf:
            return None
        return memoryview(stream.body)[stream.have : stream.have + self._left]

    def filled(self, count: int) -> list[tuple[Stream, Event]]:
        """Take note that `count` bytes were received into `space`; return what they complete."""
        stream = self.current
        events: list[tuple[Stream, Event]] = []
        if stream is None:
            return events
        if stream.body is not None:
            stream.have += count
            if stream.have == len(stream.body):
                events.append((stream, self._whole(stream)))
        self._passed(stream, count, events)
        return events

    def feed(self, data: bytes) -> list[tuple[Stream, Event]]:
        """Take bytes; return the events that they complete, each with its stream, in order.

        Raises:
            Http2Error: They cannot be read; where there are events before, it is `broken` instead.
        """
        events: list[tuple[Stream, Event]] = []
        try:
            self._read(data, events)
        except Http2Error as error:
            if not events:
                raise
            self.broken = error
        if self._widened:
            self._widened = False
            for stream in list(self._waiting):
                self._release(stream)
        return events

    def _read(self, data: bytes, events: list[tuple[Stream, Event]]) -> None:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        size = len(data)
        at = 0
        if self._preface:
            if not self._begun(data):
                return
            at = len(PREFACE)
        if self.current is not None:
            at = self._go_on(data, at, events)
        streams, most = self.streams, self._max_message_bytes
        while size - at >= 9:
            high, low, kind, flags, number = _FRAME.unpack_from(data, at)
            length = high << 16 | low
            start = at + 9
            stop = start + length
            if kind == _DATA and flags == 0 and stop <= size and length >= _PREFIX:
                # One whole message, as nearly all frames are.
                stream = streams.get(number)
                if (
                    stream is not None
                    and stream.headed
                    and not stream.deaf
                    and stream.body is None
                    and not stream.prefix
                    and stream.skip is None
                    and not data[start]
                    and length - _PREFIX == int.from_bytes(data[start + 1 : start + _PREFIX], "big")
                    and length <= _LARGE
                    and length - _PREFIX <= most
                    and self._block is None
                ):
                    events.append((stream, data[start + _PREFIX : stop]))
                    self._room -= length
                    stream.room -= length
                    if stream.room < self._stream_window >> 1 or self._room < _CONNECTION_WINDOW >> 1:
                        self._credit(stream)
                    at = stop
                    continue
            number &= _MOST_WINDOW
            if not self.spoke:
                self._greet(data[at:], kind, flags)
            if length > (_OUR_FRAME if kind == _DATA else _MAX_BLOCK):
                raise Http2Error(f"a frame of {length} bytes is larger than was granted", FRAME_SIZE_ERROR)
            self._check(kind, number)
            if kind == _DATA:
                if flags & _PADDED and size == start:
                    break  # how much is padding stands in the next byte
                at = self._go_on(data, self._data(data, start, length, flags, number), events)
                continue
            if stop > size:
                break
            self._control(kind, flags, number, data[start:stop], events)
            at = stop
        self._rest = data[at:]
        if self._rest and not self.spoke and self._client:
            self._greet(self._rest, None, 0)

    def _begun(self, data: bytes) -> bool:
        """Look for a client's first words; return whether they are all there."""
        if not PREFACE.startswith(data[: len(PREFACE)]):
            if data[0] == 0x16 and data[1:2] in (b"\x03", b""):
                raise Http2Error("the client speaks TLS, and this port does not")
            raise Http2Error(f"expected the first words of HTTP/2, got {data[:24]!r}")
        if len(data) < len(PREFACE):
            self._rest = data
            return False
        self._preface = False
        return True

    def _greet(self, data: bytes, kind: int | None, flags: int) -> None:
        """See to it that HTTP/2 is spoken at all."""
        if data.startswith(b"HTTP/"):
            raise Http2Error("an HTTP server is there, but it does not speak HTTP/2")
        if data[0] == 0x15 and data[1:2] in (b"\x03", b""):
            raise Http2Error("the port speaks TLS")
        if kind is None:
            return
        if kind != _SETTINGS or flags & _ACK:
            raise Http2Error(f"expected HTTP/2's settings first, got {data[:16]!r}")
        self.spoke = True

    def _check(self, kind: int, number: int) -> None:
        """Refuse a frame that may not stand where it does."""
        if self._block is not None and (kind != _CONTINUATION or number != self._block_of):
            raise Http2Error("another frame stands within a header block")
        if kind in _OF_A_STREAM:
            ours = number & 1 and number < self._next if self._client else number <= self._last
            begins = kind in (_HEADERS, _PRIORITY_FRAME, _CONTINUATION)  # the last of them: of a block that has begun
            if not number or (not ours and (self._client or not begins)):
                raise Http2Error(f"a frame of stream {number}, which was never opened")
        elif number and kind in (_SETTINGS, _PING, _GOAWAY):
            raise Http2Error(f"a frame about the connection names the stream {number}")

    # Messages

    def _data(self, data: bytes, start: int, length: int, flags: int, number: int) -> int:
        """Begin a DATA frame; return where its content begins."""
        stream = self.streams.get(number)
        self._room -= length
        padding = 0
        if flags & _PADDED:
            if not length or data[start] >= length:
                raise Http2Error("a frame is all padding")
            padding = data[start] + 1
            start += 1
        if stream is None or stream.ended:
            stream = Stream(number, length, 0)  # it was cut; what was on its way is dropped
            stream.ended = stream.deaf = True
        elif not stream.headed:
            raise Http2Error("a message came before the header fields")
        stream.room -= length
        self.current, self._left = stream, length - padding
        self._padding = max(0, padding - 1)
        self._left_ends = bool(flags & _END_STREAM)
        return start

    def _go_on(self, data: bytes, at: int, events: list[tuple[Stream, Event]]) -> int:
        """Take of the present DATA frame what is there; return where it ends, or all bytes do."""
        stream = self.current
        if stream is None:
            return at
        stop = min(len(data), at + self._left)
        if not stream.deaf:
            self._cut_up(stream, data, at, stop, events)
        self._passed(stream, stop - at, events)
        if not self._left and self._padding:
            skipped = min(self._padding, len(data) - stop)
            self._padding -= skipped
            stop += skipped
            self._passed(stream, 0, events)
        return stop

    def _passed(self, stream: Stream, count: int, events: list[tuple[Stream, Event]]) -> None:
        """Count bytes of the present DATA frame that were taken, and give the peer room for as many more."""
        self._left -= count
        if stream.room < self._stream_window >> 1 or self._room < _CONNECTION_WINDOW >> 1:
            self._credit(stream)
        if not self._left and not self._padding:
            self.current = None
            if self._left_ends and not stream.ended:
                self._ended(stream)
                events.append((stream, End()))

    def _ended(self, stream: Stream) -> None:
        """Take note that the peer sends nothing more on a stream."""
        stream.ended = stream.deaf = True
        self._drop(stream)
        if stream.finished and not stream.pending:
            self._forget(stream)

    def _credit(self, stream: Stream) -> None:
        """Give the peer room for what was taken."""
        if stream.room < 0 or self._room < 0:
            raise Http2Error("more bytes came than there was room for", FLOW_CONTROL_ERROR)
        if self._room < _CONNECTION_WINDOW >> 1:
            more = _CONNECTION_WINDOW - self._room
            self._room += more
            self._frame(_WINDOW_UPDATE, 0, 0, more.to_bytes(4, "big"))
        more = self._stream_window - stream.room - stream.deferred
        if more >= self._stream_window >> 2 and not stream.deaf:
            stream.room += more
            self._frame(_WINDOW_UPDATE, 0, stream.number, more.to_bytes(4, "big"))

    def _cut_up(self, stream: Stream, data: bytes, start: int, stop: int, events: list[tuple[Stream, Event]]) -> None:
        """Cut the bytes of a stream into messages."""
        while start < stop:
            if stream.skip is not None:
                count = min(stream.have, stop - start)
                stream.have -= count
                start += count
                if not stream.have:
                    events.append((stream, stream.skip))
                    stream.skip = None
                continue
            body = stream.body
            if body is None:
                need = _PREFIX - len(stream.prefix)
                stream.prefix += data[start : min(stop, start + need)]
                start = min(stop, start + need)
                if len(stream.prefix) < _PREFIX:
                    return
                body = self._body(stream, events)
                if stream.deaf:
                    return
                if body is None:
                    continue
            count = min(len(body) - stream.have, stop - start)
            body[stream.have : stream.have + count] = memoryview(data)[start : start + count]
            stream.have += count
            start += count
            if stream.have == len(body):
                events.append((stream, self._whole(stream)))

    def _body(self, stream: Stream, events: list[tuple[Stream, Event]]) -> bytearray | None:
        """Begin the message that a prefix announces; None: its bytes are dropped, or there are none."""
        flag, length = stream.prefix[0], int.from_bytes(stream.prefix[1:], "big")
        stream.prefix = b""
        if flag > 1:
            stream.deaf = True
            events.append((stream, Garbled(f"a message's first byte is {flag}")))
            return None
        stream.compressed = bool(flag)
        if length > self._max_message_bytes:
            stream.deaf = True
            events.append((stream, TooLarge(length)))
            return None
        stream.have = 0
        if not length:
            stream.body = bytearray()
            events.append((stream, self._whole(stream)))
            return None
        if length > _LARGE and self._admit is not None:
            try:
                self._admit(length)
            except RequestError as error:
                stream.skip, stream.have = RefusedMessage.of(error), length
                return None
        stream.body = bytearray(length)
        return stream.body

    def _whole(self, stream: Stream) -> bytes | bytearray:
        """Return a message that is complete: a bytearray where it was admitted as a large one, else bytes."""
        body, stream.body = stream.body, None
        if body is None:
            return b""
        large = len(body) > _LARGE
        if stream.compressed:
            if large and self._admit is not None:
                self._admit(-len(body))
            return Compressed(body)
        return body if large else bytes(body)

    # Everything else

    def _control(self, kind: int, flags: int, number: int, payload: bytes, events: list[tuple[Stream, Event]]) -> None:
        if kind in (_HEADERS, _CONTINUATION):
            self._headers(kind, flags, number, payload, events)
        elif kind == _SETTINGS:
            if not flags & _ACK:
                self._settings(payload)
        elif kind == _PING:
            if len(payload) != 8:
                raise Http2Error(f"a ping of {len(payload)} bytes", FRAME_SIZE_ERROR)
            if flags & _ACK:
                self.pongs += 1
            else:
                self._frame(_PING, _ACK, 0, payload)
        elif kind == _WINDOW_UPDATE:
            self._widen(number, payload)
        elif kind == _RST_STREAM:
            self._reset(number, payload, events)
        elif kind == _GOAWAY:
            self._farewell(payload, events)
        elif kind == _PUSH_PROMISE:
            raise Http2Error("the peer pushes, which was switched off")

    def _reset(self, number: int, payload: bytes, events: list[tuple[Stream, Event]]) -> None:
        if len(payload) != 4:
            raise Http2Error(f"a reset of {len(payload)} bytes", FRAME_SIZE_ERROR)
        self.resets += 1
        stream = self.streams.get(number)
        if stream is not None:
            self._forget(stream)
            events.append((stream, Reset(int.from_bytes(payload, "big"))))

    def _settings(self, payload: bytes) -> None:
        if len(payload) % 6:
            raise Http2Error(f"settings of {len(payload)} bytes", FRAME_SIZE_ERROR)
        window = self._their_window
        for key, value in struct.iter_unpack(">HI", payload):
            if key == _INITIAL_WINDOW_SIZE:
                if value > _MOST_WINDOW:
                    raise Http2Error(f"a window of {value} bytes", FLOW_CONTROL_ERROR)
                window = value
            elif key == _MAX_FRAME_SIZE:
                if not 16384 <= value < 1 << 24:
                    raise Http2Error(f"frames of at most {value} bytes")
                self._their_frame = value
            elif key == _MAX_STREAMS:
                self.room_for_streams = value
            elif key == _HEADER_TABLE_SIZE:
                self._before_block = _NO_TABLE  # a peer that makes its table smaller waits to be told so
        if window != self._their_window:
            for stream in self.streams.values():
                stream.window += window - self._their_window
                if stream.window > _MOST_WINDOW:
                    raise Http2Error("a window is wider than HTTP/2 allows", FLOW_CONTROL_ERROR)
            self._their_window = window
            self._widened = True
        self._frame(_SETTINGS, _ACK, 0, b"")

    def _widen(self, number: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & _MOST_WINDOW
        if len(payload) != 4:
            raise Http2Error(f"a window is widened by {len(payload)} bytes", FRAME_SIZE_ERROR)
        if not more:
            raise Http2Error("a window is widened by nothing")
        stream = self.streams.get(number)
        if not number:
            self._window += more
            if self._window > _MOST_WINDOW:
                raise Http2Error("a window is wider than HTTP/2 allows", FLOW_CONTROL_ERROR)
            self._widened = True
        elif stream is not None:
            stream.window += more
            if stream.window > _MOST_WINDOW:
                raise Http2Error("a window is wider than HTTP/2 allows", FLOW_CONTROL_ERROR)
            self._release(stream)
        elif not self._client and number > self._last:
            raise Http2Error(f"a frame of stream {number}, which was never opened")

    def _farewell(self, payload: bytes, events: list[tuple[Stream, Event]]) -> None:
        if len(payload) < 8:
            raise Http2Error(f"a farewell of {len(payload)} bytes", FRAME_SIZE_ERROR)
        last, number = struct.unpack_from(">II", payload)
        debug = payload[8:].decode("utf-8", "replace")
        self.farewell = f"the server takes no further calls (HTTP/2's error {number})" + (f": {debug}" if debug else "")
        if self._client:
            for stream in [stream for at, stream in self.streams.items() if at > last & _MOST_WINDOW]:
                self._forget(stream)
                events.append((stream, Reset(REFUSED_STREAM)))

    def _headers(self, kind: int, flags: int, number: int, payload: bytes, events: list[tuple[Stream, Event]]) -> None:
        if kind == _CONTINUATION:
            self._continuations += 1
            if self._block is None:
                raise Http2Error("a header block goes on that never began")
            if self._continuations > _MAX_CONTINUATIONS:
                raise Http2Error(f"a header block of more than {_MAX_CONTINUATIONS} frames", ENHANCE_YOUR_CALM)
            self._block += payload
        else:
            start, stop = 0, len(payload)
            if flags & _PADDED:
                start, stop = 1, stop - (payload[0] if payload else stop)
            start += 5 if flags & _PRIORITY else 0
            if start > stop:
                raise Http2Error("a header block is shorter than its frame says")
            self._block, self._block_ends = bytearray(payload[start:stop]), bool(flags & _END_STREAM)
            self._block_of, self._continuations = number, 0
        if len(self._block) > _MAX_BLOCK:
            raise Http2Error(f"a header block of more than {_MAX_BLOCK} bytes", ENHANCE_YOUR_CALM)
        if flags & _END_HEADERS:
            block, self._block = bytes(self._block), None
            try:
                fields = dict(self._decoder.decode(block))
            except HpackError as error:
                raise Http2Error(str(error), COMPRESSION_ERROR) from error
            self._fields(number, fields, self._block_ends, events)

    def _fields(self, number: int, fields: dict[str, str], last: bool, events: list[tuple[Stream, Event]]) -> None:
        stream = self.streams.get(number)
        if stream is None:
            if self._client or number <= self._last:
                return  # it was cut
            if not number & 1:
                raise Http2Error(f"a client opens the stream {number}, which is even")
            self._last = number
            if self.going or len(self.streams) >= self._max_streams:
                self._frame(_RST_STREAM, 0, number, REFUSED_STREAM.to_bytes(4, "big"))
                return
            stream = self.streams[number] = Stream(number, self._stream_window, self._their_window)
        elif stream.ended or (stream.headed and not last):
            if self._client and not stream.ended:
                return
            raise Http2Error("header fields came where none may stand")
        if self._client and not last and fields.get(":status", "").startswith("1"):
            return
        stream.headed = True
        events.append((stream, Fields(fields, last)))
        if last:
            self._ended(stream)
