"""gRPC's length-prefixed messages in the bytes of an HTTP/2 stream, and their compression.

Memory is allocated, and admitted, for bytes that have arrived, never for bytes that a prefix announces. Messages are
compressed with gzip from the standard library, or with zstd (extra `zstd`), which is several times faster.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

from bridge.core.extras import install_command
from bridge.core.transport.frames import MIN_FRAME_SIZE, Stream
from bridge.errors import RequestError, SettingError

__all__ = [
    "LARGE",
    "PREFIX",
    "WORTHWHILE",
    "CompressedMessage",
    "Compression",
    "Inflater",
    "MalformedMessage",
    "MessageReader",
    "RefusedMessage",
    "TooLarge",
    "checked_compression",
    "compress",
    "encodings",
    "pack_prefix",
]

Compression: TypeAlias = Literal["zstd", "gzip"]
"""The compression of answers, by gRPC's name."""
WORTHWHILE = 1024
"""The smallest size in bytes of a message that is compressed."""
_LEVEL = 1
# The largest window of zstd, as a power of two: the memory that the reader needs for one message. RFC 8878 asks every
# reader to support 8 MiB.
_WINDOW_LOG = 23
_PIECE = 1 << 20


@functools.cache
def _zstd() -> Any | None:
    """Return the zstd module; None: it is not installed."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def encodings() -> tuple[str, ...]:
    """Return the compressions that this machine supports, by gRPC's names."""
    return ("deflate", "gzip") if _zstd() is None else ("deflate", "gzip", "zstd")


def checked_compression(value: Any) -> Compression | None:
    """Return a valid `compression` setting.

    Raises:
        SettingError: The compression is unknown, or its library is not installed.
    """
    if value is None:
        return None
    if value not in get_args(Compression):
        raise SettingError(f"expected compression='zstd', 'gzip' or None, got {value!r:.80}")
    if value == "zstd" and _zstd() is None:
        raise SettingError(f"compression='zstd' needs a library that is not installed: {install_command('zstd')}")
    return cast(Compression, value)


def compress(encoding: str, parts: Sequence[bytes | memoryview]) -> bytes:
    """Return the parts of a message compressed, without the prefix.

    Args:
        encoding: One of `Compression`.
        parts: The parts, each contiguous in memory.
    """
    zstd = _zstd() if encoding == "zstd" else None
    wbits = zlib.MAX_WBITS | 16  # 16: gzip's header and trailer
    packer: Any = zlib.compressobj(_LEVEL, wbits=wbits) if zstd is None else zstd.ZstdCompressor(level=_LEVEL)
    return b"".join([*(packer.compress(part) for part in parts), packer.flush()])


class Inflater:
    """Decompresses one message in pieces: gzip, zlib's own format (gRPC calls it deflate), or one frame of zstd.

    Args:
        encoding: One of `encodings`.
    """

    def __init__(self, encoding: str) -> None:
        self._rest = memoryview(b"")
        self._inner: Any = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: gzip or zlib, told from the first bytes
        if encoding == "zstd" and (zstd := _zstd()) is not None:
            self._inner = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})

    @property
    def eof(self) -> bool:
        """True if the end of the compressed data was reached."""
        return bool(self._inner.eof)

    def take(self, data: bytes | bytearray, most: int) -> bytes:
        """Return at most `most` more bytes. `data` is the whole message in the first call, and empty in later calls.

        Raises an exception of the library if the data cannot be read.
        """
        if data:
            self._rest = memoryview(data)
        parts: list[bytes] = []
        while most and not self.eof:
            # zlib returns a copy of the input that it has not read. If all of a message were passed at once, it would
            # be copied for each MiB.
            piece = getattr(self._inner, "unconsumed_tail", b"")
            if not piece:
                piece, self._rest = self._rest[:_PIECE], self._rest[_PIECE:]
            parts.append(self._inner.decompress(piece, most))
            most -= len(parts[-1])
            if not (piece or parts[-1]):
                break
        return b"".join(parts)


PREFIX = 5
"""Bytes before each message: whether it is compressed, and its length."""
LARGE = 65536
"""The size of a message from which on it is received into memory that was admitted for it, as a bytearray."""
# For a trusted peer: the largest message whose memory is allocated at once when its first part has arrived.
_AT_ONCE = 1 << 26
_HEAD = struct.Struct(">BI")
_unpack_prefix = _HEAD.unpack_from
pack_prefix = _HEAD.pack
"""Packs a prefix: 1 if the message is compressed, else 0; and the message's length."""


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """A message is longer than allowed; nothing more is read from the stream."""

    size: int


@dataclasses.dataclass(frozen=True)
class MalformedMessage:
    """The bytes are no message; nothing more is read from the stream."""

    reason: str


@dataclasses.dataclass(frozen=True)
class CompressedMessage:
    """A message that arrived compressed: a bytearray if it was admitted as a large one, else bytes."""

    data: bytes | bytearray


class RefusedMessage(bytes):
    """Replaces a message that was not admitted and whose bytes were dropped: empty, with the reason."""

    error: RequestError

    @classmethod
    def of(cls, error: RequestError) -> RefusedMessage:
        """Return an empty message with this reason."""
        message = cls()
        message.error = error
        return message


class MessageReader:
    """Splits the bytes of one stream into messages: events of type bytes, or bytearray for large ones.

    Args:
        max_message_bytes: The largest message to accept.
        admit: Called with a number of bytes before memory is allocated for them, and with the negative number if their
            message will not be completed. If it raises RequestError, a `RefusedMessage` takes the message's place.
            Small messages are not counted. None: the peer is trusted.
    """

    __slots__ = ("_admit", "_body", "_compressed", "_have", "_max", "_most_at_once", "_prefix", "_refused", "_size")

    def __init__(self, max_message_bytes: int, admit: Callable[[int], None] | None = None) -> None:
        self._max = max_message_bytes
        # A large message of an untrusted peer is copied only after memory is admitted for it.
        self._most_at_once = max_message_bytes if admit is None else min(max_message_bytes, LARGE)
        self._admit = admit
        self._prefix = b""
        self._body: bytearray | None = None
        self._have = 0
        self._size = 0
        self._compressed = False
        self._refused: RefusedMessage | None = None

    @property
    def receives_large(self) -> bool:
        """True if most bytes of a large message are still missing, whatever the size of their frames."""
        return self._size - self._have >= MIN_FRAME_SIZE and (self._body is not None or self._refused is not None)

    def receive_data(self, stream: Stream, data: bytes, start: int, stop: int, events: list[Any]) -> None:
        """Read `data[start:stop]`; append the messages that it completes to `events`."""
        if self._body is None and not self._prefix and self._refused is None:
            # One whole message: the usual case.
            size = stop - start - PREFIX
            if 0 <= size <= self._most_at_once and _unpack_prefix(data, start) == (0, size):
                begin = start + PREFIX
                # Arrays over a bytearray are writable, so that large observations can be returned without a copy.
                message = data[begin:stop] if size <= LARGE else bytearray(memoryview(data)[begin:stop])
                events.append((stream, message))
                return
        self._split(stream, data, start, stop, events)

    def _split(self, stream: Stream, data: bytes, start: int, stop: int, events: list[Any]) -> None:
        while start < stop:
            # Skip the bytes of a refused message: the prefix of the next message follows them.
            if self._refused is not None:
                start += self._skip(stream, stop - start, events)
                continue
            if self._body is None:
                count = min(PREFIX - len(self._prefix), stop - start)
                self._prefix += data[start : start + count]
                start += count
                if len(self._prefix) == PREFIX and not self._begin(stream, events):
                    return
                continue
            count = min(self._size - self._have, stop - start)
            # Memory was refused just now: the next round skips the rest.
            if not self._grow(count):
                continue
            # A memoryview saves a copy: a slice of `data` would be one.
            self._body[self._have : self._have + count] = memoryview(data)[start : start + count]
            start += count
            self.buffer_updated(stream, count, events)

    def _begin(self, stream: Stream, events: list[Any]) -> bool:
        """Begin the message that a prefix announces; return False if nothing more is read from the stream."""
        flag, size = _HEAD.unpack(self._prefix)
        self._prefix = b""
        if flag > 1:
            events.append((stream, MalformedMessage(f"a message's first byte is {flag}")))
        elif size > self._max:
            events.append((stream, TooLarge(size)))
        else:
            self._compressed, self._size, self._have = bool(flag), size, 0
            # It begins empty, whatever `size` says: a prefix of five bytes could claim 4 GiB.
            self._body = bytearray()
            # An empty message is complete already: no bytes follow that would complete it.
            if not size:
                self.buffer_updated(stream, 0, events)
            return True
        stream.discard()
        return False

    def _grow(self, count: int) -> bool:
        """Allocate memory for `count` more bytes; return False if they are not admitted."""
        body = self._body
        if body is None:
            return False
        more = self._have + count - len(body)
        if more <= 0:
            return True
        if self._size > LARGE:  # at most as much again as arrived, so that few steps are needed
            rest = self._size - len(body)
            more = min(max(more, len(body)), rest)
            if self._admit is None:
                # Allocate all of the rest at once: each step copies the bytes so far.
                more = rest if self._have >= LARGE and self._size <= _AT_ONCE else more
            else:
                try:
                    self._admit(more)
                except RequestError as error:
                    # `close` resets both, and gives back the bytes admitted so far.
                    missing = self._size - self._have
                    self.close()
                    self._refused, self._size, self._have = RefusedMessage.of(error), missing, 0
                    return False
        self._body = bytearray(len(body) + more)
        self._body[: self._have] = memoryview(body)[: self._have]
        return True

    def _skip(self, stream: Stream, count: int, events: list[Any]) -> int:
        """Drop bytes of a refused message; return how many."""
        count = min(count, self._size - self._have)
        self._have += count
        if self._have == self._size:
            # It takes the refused message's place, so that the answers stay in order (D-1).
            events.append((stream, self._refused))
            self._refused = None
        return count

    def get_buffer(self) -> memoryview | None:
        """Return the memory for the next bytes of a large message; None: pass them to `receive_data`."""
        if self._body is None or self._have < LARGE or not self._grow(min(LARGE, self._size - self._have)):
            return None
        return memoryview(self._body)[self._have :]

    def buffer_updated(self, stream: Stream, count: int, events: list[Any]) -> None:
        """Note that `count` bytes were received into the buffer."""
        self._have += count
        body = self._body
        if body is None or self._have < self._size:
            return
        self._body = None
        message = body if len(body) > LARGE else bytes(body)
        events.append((stream, CompressedMessage(message) if self._compressed else message))

    def end(self, stream: Stream, events: list[Any]) -> None:
        """Note that the stream has ended. In the middle of a message, that is an event of its own."""
        if self._body is not None or self._prefix or self._refused is not None:
            events.append((stream, MalformedMessage("the stream ended in the midst of a message")))
        self.close()

    def close(self) -> None:
        """Drop an incomplete message."""
        body, self._body = self._body, None
        self._prefix, self._refused = b"", None
        if body is not None and self._size > LARGE and self._admit is not None:
            self._admit(-len(body))
        self._size = self._have = 0
