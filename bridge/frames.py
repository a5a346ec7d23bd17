"""Messages as length-prefixed frames: what a stream socket carries in place of gRPC.

A frame is its length, four bytes, big-endian, and that many bytes. The first frame each way is a hello in JSON: the
client's says who it is and its token, the server's its version and an id that no other server has, or why the client
is refused. Every other frame is one EnvironmentRequest, or one EnvironmentResponse.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable

from bridge.errors import Code, RequestError
from bridge.version import __version__
from bridge.wire import HELLO

__all__ = ["HEADER", "MAX_HELLO_BYTES", "SMALL", "FrameReader", "Hello", "RefusedFrame", "pack_frame"]

HEADER = struct.Struct(">I")
"""The length before each frame."""
MAX_HELLO_BYTES = 16384
"""Bytes in a hello, which is read before anybody has shown a token."""
SMALL = 16384
"""Bytes of a message that is sent from one piece of memory: its parts may change before it is sent."""
_LARGE = 65536


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first frame each way."""

    version: str = __version__
    """The version of the package that sends it."""
    token: str | None = None
    """What a client shows to be let in."""
    server: str | None = None
    """The server's id, another one for each server that ever was."""
    code: int = 0
    """Of a server that refuses: one of `Code`; 0: it does not."""
    message: str = ""
    """Of a server that refuses: why."""

    def pack(self) -> bytes:
        """Return the payload of its frame."""
        fields = {HELLO: self.version, "token": self.token, "server": self.server}
        if self.code:
            fields["error"] = {"code": self.code, "message": self.message}  # type: ignore[assignment]
        return json.dumps({key: value for key, value in fields.items() if value is not None}).encode()

    @classmethod
    def unpack(cls, payload: bytes | bytearray) -> Hello:
        """Read the payload of a first frame.

        Raises:
            RequestError: INVALID_ARGUMENT: it is no hello.
        """
        try:
            fields = json.loads(bytes(payload))
            error = fields.get("error", {})
            hello = cls(
                fields[HELLO], fields.get("token"), fields.get("server"), error.get("code", 0), error.get("message", "")
            )
            texts = [hello.version, hello.message, *(text for text in (hello.token, hello.server) if text is not None)]
            if not all(isinstance(text, str) for text in texts) or not isinstance(hello.code, int):
                raise TypeError("a field has another type")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RequestError(
                Code.INVALID_ARGUMENT,
                f"expected a hello as the first frame, got {bytes(payload[:40])!r}: {error!r}. "
                "Connect with unix:// or tcp:// to a server of this package, and with grpc:// to a gRPC port",
            ) from error
        return hello


def pack_frame(payload: bytes) -> bytes:
    """Return a payload with its length before it."""
    return HEADER.pack(len(payload)) + payload


class RefusedFrame(bytes):
    """What stands for a frame that was not admitted, and whose bytes were dropped: empty, with the reason."""

    error: RequestError

    @classmethod
    def of(cls, error: RequestError) -> RefusedFrame:
        """Return one with this reason."""
        frame = cls()
        frame.error = error
        return frame


class FrameReader:
    """Cuts what comes out of a stream into frames.

    A large frame is received into its own memory: as long as `space` is not None, receive into it and call `filled`;
    else receive anything and call `feed`.

    Args:
        max_bytes: The largest frame after the first.
        max_first: The largest first frame.
        admit: Called with the bytes of a large frame before memory is taken for it; where it raises RequestError, a
            `RefusedFrame` comes in the frame's place. None: all are admitted.
    """

    def __init__(
        self, max_bytes: int, max_first: int = MAX_HELLO_BYTES, admit: Callable[[int], None] | None = None
    ) -> None:
        self._max_bytes = max_bytes
        self._limit = max_first
        self._rest = b""
        self._large: bytearray | None = None
        self._have = 0
        self._admit = admit
        self._skip = 0
        self._refused = RefusedFrame()

    @property
    def space(self) -> memoryview | None:
        """Where the rest of a large frame goes; None: no large frame has begun."""
        return None if self._large is None else memoryview(self._large)[self._have :]

    @property
    def partial(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return self._large is not None or bool(self._rest) or self._skip > 0

    def filled(self, count: int) -> list[bytes | bytearray]:
        """Take note that `count` bytes were received into `space`; return the frame if it is complete."""
        if self._large is None:
            return []
        self._have += count
        if self._have < len(self._large):
            return []
        frame, self._large = self._large, None
        return [frame]

    def feed(self, data: bytes) -> list[bytes | bytearray]:
        """Take bytes; return the frames that they complete.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: a frame is longer than it may be; the stream cannot be read further.
        """
        frames: list[bytes | bytearray] = []
        if self._skip:
            dropped = min(self._skip, len(data))
            self._skip -= dropped
            data = data[dropped:]
            if not self._skip:
                frames.append(self._refused)
        if self._rest:
            data = self._rest + data
            self._rest = b""
        size = len(data)
        start = 0
        while size - start >= 4:
            length = HEADER.unpack_from(data, start)[0]
            if length > self._limit:
                raise RequestError(Code.RESOURCE_EXHAUSTED, self._refusal(length))
            self._limit = self._max_bytes
            stop = start + 4 + length
            if stop > size:
                if length > _LARGE:
                    self._begin(length, memoryview(data)[start + 4 :])
                    return frames
                break
            frames.append(data[start + 4 : stop])
            start = stop
        self._rest = data[start:]
        return frames

    def _begin(self, length: int, first: memoryview) -> None:
        """Begin a large frame."""
        self._have = len(first)
        try:
            if self._admit is not None:
                self._admit(length)
        except RequestError as error:
            self._refused, self._skip = RefusedFrame.of(error), length - self._have
            return
        self._large = bytearray(length)
        self._large[: self._have] = first

    def _refusal(self, length: int) -> str:
        if self._limit != self._max_bytes:
            return f"expected a hello of at most {self._limit} bytes as the first frame, got a frame of {length} bytes"
        return f"a frame of {length} bytes is larger than max_message_bytes={self._max_bytes}"
