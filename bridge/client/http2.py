"""One gRPC call on an HTTP/2 connection of its own, seen from the client, without input or output.

A dm_env_rpc client needs of HTTP/2 (RFC 9113) and of gRPC's mapping onto it (the `PROTOCOL-HTTP2.md` of the gRPC
project) one stream that is opened once and then carries messages both ways: this file. A message costs the client a
third of what it does through the general library (docs/performance.md). Bytes go in, messages come out, and `take`
gives what is to be sent.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import deque
from collections.abc import Iterable
from urllib.parse import unquote

from bridge.client.hpack import Decoder, HpackError, encode
from bridge.errors import Code

__all__ = ["Http2Call", "Http2Error", "Status"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE = 0, 1, 3, 4, 5
_PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 6, 7, 8, 9
_OF_THE_STREAM = (_DATA, _HEADERS, _RST_STREAM, _CONTINUATION)
_END_STREAM = _ACK = 0x1
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20
_MAX_FRAME_SIZE, _INITIAL_WINDOW_SIZE, _ENABLE_PUSH = 5, 4, 2

_MESSAGE = struct.Struct(">BHBBIBI")  # a DATA frame's header, and the prefix of the one message in it
_FRAME = struct.Struct(">BHBBI")
_STREAM = 1
_PREFIX = 5
_OUR_FRAME = 1 << 20
_OUR_WINDOW = 1 << 26
_START_WINDOW = 65535
_MOST_WINDOW = (1 << 31) - 1
_MAX_BLOCK = 1 << 18

_BY_HTTP_STATUS = {
    "400": Code.INTERNAL,
    "401": Code.UNAUTHENTICATED,
    "403": Code.PERMISSION_DENIED,
    "404": Code.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), Code.UNAVAILABLE),
}
_BY_RESET = {
    7: Code.UNAVAILABLE,
    8: Code.CANCELLED,
    11: Code.RESOURCE_EXHAUSTED,
    12: Code.PERMISSION_DENIED,
}


class Http2Error(Exception):
    """The peer does not speak HTTP/2 as it should; its connection is of no more use."""


@dataclasses.dataclass(frozen=True)
class Status:
    """How a call ended."""

    code: int
    """One of gRPC's codes; 0: as it should."""
    details: str


class Http2Call:
    """A bidirectional call.

    Args:
        authority: The host and port, as the URL has them.
        method: The call's path, `/SERVICE/METHOD`.
        metadata: What goes with the call: names in lower case, and texts.
        max_message_bytes: The largest message to take.
        scheme: `http`, or `https` within TLS.
    """

    def __init__(
        self,
        authority: str,
        method: str,
        metadata: Iterable[tuple[str, str]],
        max_message_bytes: int,
        scheme: str = "http",
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self.metadata: dict[str, str] | None = None
        """What came with the first answer, or before it; None: nothing yet."""
        self.status: Status | None = None
        """How the call ended; None: it has not."""
        self.farewell = ""
        """Why the peer takes no further calls, where it has said so; the present one may go on."""
        self.pongs = 0
        """How many pings were answered."""
        self._decoder = Decoder()
        self._rest = b""
        self._spoke = False
        # What comes
        self._left = 0
        self._left_ends = False
        self._prefix = b""
        self._body: bytearray | None = None
        self._have = 0
        self._block: bytearray | None = None
        self._block_ends = False
        self._uncredited = 0
        # What goes
        self._window = self._stream_window = _START_WINDOW
        self._their_window = _START_WINDOW
        self._their_frame = 16384
        self._pending: deque[memoryview] = deque()
        self._finished = False
        settings = ((_ENABLE_PUSH, 0), (_INITIAL_WINDOW_SIZE, _OUR_WINDOW), (_MAX_FRAME_SIZE, _OUR_FRAME))
        fields = [
            (":method", "POST"),
            (":scheme", scheme),
            (":path", method),
            (":authority", authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        ]
        self._out = bytearray(_PREFACE)
        self._frame(_SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings))
        self._frame(_WINDOW_UPDATE, 0, 0, (_OUR_WINDOW - _START_WINDOW).to_bytes(4, "big"))
        block = encode(fields)
        self._frame(_HEADERS, _END_HEADERS, _STREAM, block[: self._their_frame])
        if len(block) > self._their_frame:
            raise ValueError(f"expected metadata of less than {self._their_frame} bytes, got {len(block)}")

    # What goes

    def take(self) -> bytes:
        """Return what is to be sent now."""
        if not self._out:
            return b""
        out = bytes(self._out)
        self._out.clear()
        return out

    def pack(self, message: bytes) -> bytes:
        """Take a message; return what is to be sent now. The rest follows when the peer has room for it."""
        size = len(message) + _PREFIX
        if (
            not self._pending
            and not self._out
            and size <= self._their_frame
            and size <= self._window
            and size <= self._stream_window
        ):
            self._window -= size
            self._stream_window -= size
            return _MESSAGE.pack(size >> 16, size & 0xFFFF, _DATA, 0, _STREAM, 0, len(message)) + message
        self._pending += (memoryview(b"\0" + len(message).to_bytes(4, "big")), memoryview(message))
        self._release()
        return self.take()

    def finish(self) -> bytes:
        """Say that no message follows; return what is to be sent now."""
        if not self._finished:
            self._finished = True
            self._release()
        return self.take()

    def ping(self) -> bytes:
        """Ask for a sign of life; return what is to be sent now."""
        self._frame(_PING, 0, 0, bytes(8))
        return self.take()

    @property
    def waiting(self) -> int:
        """Bytes of messages that the peer has no room for yet."""
        return sum(map(len, self._pending))

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes | bytearray | memoryview) -> None:
        size = len(payload)
        self._out += _FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream)
        self._out += payload

    def _release(self) -> None:
        """Send of what waits as much as the peer has room for."""
        pending = self._pending
        while pending:
            first = pending[0]
            room = min(self._window, self._stream_window, self._their_frame)
            if room <= 0 and len(first):
                return
            part = first[:room]
            self._frame(_DATA, 0, _STREAM, part)
            self._window -= len(part)
            self._stream_window -= len(part)
            if len(part) < len(first):
                pending[0] = first[len(part) :]
            else:
                pending.popleft()
        if self._finished and self.status is None:
            self._frame(_DATA, _END_STREAM, _STREAM, b"")

    # What comes

    @property
    def space(self) -> memoryview | None:
        """Where the next bytes of a large message go, to be received into and then told to `filled`; None: `feed`."""
        if not self._left or self._body is None:
            return None
        stop = min(len(self._body), self._have + self._left)
        return memoryview(self._body)[self._have : stop]

    def filled(self, count: int) -> list[bytes | bytearray]:
        """Take note that `count` bytes were received into `space`; return the message if it is complete."""
        body = self._body
        if body is None:
            return []
        self._have += count
        self._passed(count)
        if self._have < len(body):
            return []
        self._body = None
        return [body]

    def feed(self, data: bytes) -> list[bytes | bytearray]:
        """Take bytes; return the messages that they complete.

        Raises:
            Http2Error: They cannot be read.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        size = len(data)
        messages: list[bytes | bytearray] = []
        at = 0
        if self._left:
            at = min(self._left, size)
            self._take_data(data, 0, at, messages)
            self._passed(at)
        while size - at >= 9:
            high, low, kind, flags, stream = _FRAME.unpack_from(data, at)
            length, stream = high << 16 | low, stream & _MOST_WINDOW
            start = at + 9
            stop = start + length
            if not self._spoke:
                self._greet(data, kind, flags)
            if length > _OUR_FRAME:
                raise Http2Error(f"a frame of {length} bytes is larger than the {_OUR_FRAME} that were granted")
            if kind == _DATA and not flags & _PADDED:
                self._check(kind, stream)
                if flags == 0 and stop <= size and self._is_message(data, start, length):
                    messages.append(data[start + _PREFIX : stop])
                    self._credit(length)
                    at = stop
                    continue
                at = min(stop, size)
                self._left, self._left_ends = length, bool(flags & _END_STREAM)
                self._take_data(data, start, at, messages)
                self._passed(at - start)
                continue
            if stop > size:
                break
            self._check(kind, stream)
            if kind == _WINDOW_UPDATE:
                self._widen(stream, data[start:stop])
            else:
                self._control(kind, flags, data[start:stop])
                if kind == _DATA:
                    self._take_padded(data[start:stop], flags, messages)
            at = stop
        self._rest = data[at:]
        if self._rest and not self._spoke:
            self._greet(self._rest, None, 0)
        return messages

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
        self._spoke = True

    def _check(self, kind: int, stream: int) -> None:
        """Refuse a frame that may not stand where it does."""
        if self._block is not None and kind != _CONTINUATION:
            raise Http2Error("another frame stands within a header block")
        if stream != _STREAM and kind in _OF_THE_STREAM:
            raise Http2Error(f"a frame of stream {stream}, which was never opened")
        if kind == _DATA and self.metadata is None and self.status is None:
            raise Http2Error("a message came before the header fields")

    def _is_message(self, data: bytes, start: int, length: int) -> bool:
        """Whether a DATA frame is one whole message that may be taken, as nearly all are."""
        return (
            self._body is None
            and not self._prefix
            and self.status is None
            and length >= _PREFIX
            and data[start] == 0
            and int.from_bytes(data[start + 1 : start + _PREFIX], "big") == length - _PREFIX
            and length - _PREFIX <= self._max_message_bytes
        )

    def _passed(self, count: int) -> None:
        """Count bytes of a DATA frame that were taken, and give the peer room for as many more."""
        self._left -= count
        self._credit(count)
        if not self._left and self._left_ends:
            self._left_ends = False
            self._end(int(Code.INTERNAL), "the server ended the stream without a status")

    def _credit(self, count: int) -> None:
        self._uncredited += count
        if self._uncredited >= _OUR_WINDOW // 2:
            update = self._uncredited.to_bytes(4, "big")
            self._uncredited = 0
            self._frame(_WINDOW_UPDATE, 0, 0, update)
            self._frame(_WINDOW_UPDATE, 0, _STREAM, update)

    def _take_data(self, data: bytes, start: int, stop: int, messages: list[bytes | bytearray]) -> None:
        """Cut the bytes of the stream into messages."""
        while start < stop:
            body = self._body
            if body is None:
                if self._prefix or stop - start < _PREFIX:
                    need = _PREFIX - len(self._prefix)
                    self._prefix += data[start : min(stop, start + need)]
                    start = min(stop, start + need)
                    if len(self._prefix) < _PREFIX:
                        return
                    prefix, self._prefix = self._prefix, b""
                else:
                    prefix = data[start : start + _PREFIX]
                    start += _PREFIX
                length = self._length(prefix)
                if length < 0:
                    return
                if length <= stop - start:
                    messages.append(data[start : start + length])
                    start += length
                    continue
                self._body = body = bytearray(length)
                self._have = 0
            count = min(len(body) - self._have, stop - start)
            body[self._have : self._have + count] = memoryview(data)[start : start + count]
            self._have += count
            start += count
            if self._have == len(body):
                messages.append(body)
                self._body = None

    def _length(self, prefix: bytes) -> int:
        """Return the length of the message that follows; -1 where the call is over."""
        if self.status is not None:
            return -1
        if prefix[0]:
            self._end(int(Code.INTERNAL), "the server sent a compressed message, which was not asked for")
            return -1
        length = int.from_bytes(prefix[1:], "big")
        if length > self._max_message_bytes:
            self._end(
                int(Code.RESOURCE_EXHAUSTED),
                f"an answer of {length} bytes is larger than max_message_bytes={self._max_message_bytes}",
            )
            return -1
        return length

    def _take_padded(self, payload: bytes, flags: int, messages: list[bytes | bytearray]) -> None:
        padding = payload[0] if payload else 0
        if padding >= len(payload):
            raise Http2Error("a frame is all padding")
        self._left, self._left_ends = len(payload), bool(flags & _END_STREAM)
        self._take_data(payload, 1, len(payload) - padding, messages)
        self._passed(len(payload))

    def _control(self, kind: int, flags: int, payload: bytes) -> None:
        if kind in (_HEADERS, _CONTINUATION):
            self._take_headers(kind, flags, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._take_settings(payload)
        elif kind == _PING:
            if len(payload) != 8:
                raise Http2Error(f"a ping of {len(payload)} bytes")
            if flags & _ACK:
                self.pongs += 1
            else:
                self._frame(_PING, _ACK, 0, payload)
        elif kind == _RST_STREAM:
            number = int.from_bytes(payload, "big")
            code = _BY_RESET.get(number, Code.INTERNAL)
            self._end(int(code), f"the server cut the stream with HTTP/2's error {number}")
        elif kind == _GOAWAY:
            self._take_farewell(payload)
        elif kind == _PUSH_PROMISE:
            raise Http2Error("the server pushes, which was switched off")

    def _take_settings(self, payload: bytes) -> None:
        if len(payload) % 6:
            raise Http2Error(f"settings of {len(payload)} bytes")
        for key, value in struct.iter_unpack(">HI", payload):
            if key == _INITIAL_WINDOW_SIZE:
                if value > _MOST_WINDOW:
                    raise Http2Error(f"a window of {value} bytes")
                self._stream_window += value - self._their_window
                self._their_window = value
            elif key == _MAX_FRAME_SIZE:
                if not 16384 <= value < 1 << 24:
                    raise Http2Error(f"frames of at most {value} bytes")
                self._their_frame = value
        self._frame(_SETTINGS, _ACK, 0, b"")
        if self._pending:
            self._release()

    def _widen(self, stream: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & _MOST_WINDOW
        if len(payload) != 4 or not more:
            raise Http2Error("a window is widened by nothing")
        if stream == 0:
            self._window += more
        elif stream == _STREAM:
            self._stream_window += more
        if self._window > _MOST_WINDOW or self._stream_window > _MOST_WINDOW:
            raise Http2Error("a window is wider than HTTP/2 allows")
        if self._pending:
            self._release()

    def _take_farewell(self, payload: bytes) -> None:
        if len(payload) < 8:
            raise Http2Error(f"a farewell of {len(payload)} bytes")
        last, number = struct.unpack_from(">II", payload)
        debug = payload[8:].decode("utf-8", "replace")
        self.farewell = f"the server takes no further calls (HTTP/2's error {number})" + (f": {debug}" if debug else "")
        if last & _MOST_WINDOW < _STREAM:
            self._end(int(Code.UNAVAILABLE), self.farewell)

    def _take_headers(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _CONTINUATION:
            if self._block is None:
                raise Http2Error("a header block goes on that never began")
            self._block += payload
        else:
            start, stop = 0, len(payload)
            if flags & _PADDED:
                start, stop = 1, stop - (payload[0] if payload else stop)
            start += 5 if flags & _PRIORITY else 0
            if start > stop:
                raise Http2Error("a header block is shorter than its frame says")
            self._block, self._block_ends = bytearray(payload[start:stop]), bool(flags & _END_STREAM)
        if len(self._block) > _MAX_BLOCK:
            raise Http2Error(f"a header block of more than {_MAX_BLOCK} bytes")
        if flags & _END_HEADERS:
            block, self._block = bytes(self._block), None
            try:
                fields = dict(self._decoder.decode(block))
            except HpackError as error:
                raise Http2Error(str(error)) from error
            self._take_fields(fields, self._block_ends)

    def _take_fields(self, fields: dict[str, str], last: bool) -> None:
        if self.metadata is None:
            http = fields.get(":status", "")
            if http.startswith("1"):
                return
            self.metadata = fields
            kind = fields.get("content-type", "")
            if http != "200" and "grpc-status" not in fields:
                code = _BY_HTTP_STATUS.get(http, Code.UNKNOWN)
                self._end(int(code), f"the answer has the HTTP status {http or 'missing'}")
            elif not kind.startswith("application/grpc"):
                self._end(int(Code.UNKNOWN), f"expected the content-type application/grpc, got {kind!r:.80}")
        if last:
            text = fields.get("grpc-status", "")
            # Python reads no number of thousands of digits, and no code has more than two.
            number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else int(Code.UNKNOWN)
            self._end(number, unquote(fields.get("grpc-message", ""), errors="replace"))

    def _end(self, code: int, details: str) -> None:
        if self.status is None:
            self.status = Status(code, details)
            self._pending.clear()
            self._body = None
