"""Frames, as a client speaks them over a Unix or TCP socket."""

from __future__ import annotations

from bridge.address import Address
from bridge.client.link import Came, Line, Part
from bridge.client.remedies import remedy
from bridge.credentials import TOKEN_VARIABLE
from bridge.errors import Code, ConnectError, PeerError, RefusedError, RequestError
from bridge.frames import HEADER, FrameReader, Hello, pack_frame

__all__ = ["FrameDialect"]

_ALERT = b"\x15\x03"  # how an end that speaks TLS answers to what is none


class FrameDialect:
    """A length before each message, and a hello before all others.

    Args:
        address: A `unix`, `tcp` or `tcps` address.
        max_message_bytes: The largest answer.
        token: Shown to the server.
        server_id: The id that the server must have; None: any.
    """

    alpn = None
    quiet = None
    half_closes = True
    broken = False

    def __init__(self, address: Address, max_message_bytes: int, token: str | None, server_id: str | None) -> None:
        self._url, self._scheme = address.url, address.scheme
        self._token, self._server_id = token, server_id
        self._withheld = token is None and address.credentials.token is not None
        self._reader = FrameReader(max_message_bytes)
        self.answered = False
        self.server_version: str | None = None
        self._line: Line
        self._out: list[Part] = []

    @property
    def roomy(self) -> bool:
        """Say no: frames do not say whose they are."""
        return False

    def take(self) -> list[Part]:
        """Return what is to be sent now."""
        out, self._out = self._out, []
        return out

    def open(self, line: Line) -> None:
        """Say hello."""
        self._line = line
        self._out.append(pack_frame(Hello(token=self._token).pack()))

    def pack(self, line: Line, request: bytes) -> None:
        """Send a request's frame."""
        self._out.append(HEADER.pack(len(request)) + request)

    def finish(self, line: Line) -> None:
        """Say nothing: the end of the stream says it."""

    def cut(self, line: Line) -> None:
        """Say nothing: the end of the socket says it."""

    def ping(self) -> None:
        """Say nothing: the kernel looks after these sockets."""

    @property
    def space(self) -> memoryview | None:
        """Where the rest of a large frame goes."""
        return self._reader.space

    def filled(self, count: int) -> list[Came]:
        """Take note that bytes are in `space`."""
        return [(self._line, frame) for frame in self._reader.filled(count)]

    def feed(self, data: bytes) -> list[Came]:
        """Take bytes; return the answers that they complete."""
        try:
            frames = self._reader.feed(data)
        except RequestError as error:
            if self.answered:
                raise PeerError(self._url, error.message) from error
            if data[:2] == _ALERT:
                details = "it answered by a TLS alert"
                raise ConnectError(self._url, f"no connection: {details}. {remedy(self._scheme, details)}") from error
            raise self._stranger(error) from error
        if frames and not self.answered:
            self._greet(frames.pop(0))
        line = self._line
        return [(line, frame) for frame in frames]

    def _greet(self, frame: bytes | bytearray) -> None:
        try:
            hello = Hello.unpack(frame)
        except RequestError as error:
            raise self._stranger(error) from error
        if hello.code:
            hint = ""
            if hello.code == Code.UNAUTHENTICATED and self._withheld:
                hint = f" ({TOKEN_VARIABLE} is not sent unencrypted to another machine: use tcps://, or pass token=)"
            raise RefusedError(self._url, f"the stream was ended: {hello.message}{hint}", hello.code)
        if self._server_id is not None and hello.server != self._server_id:
            raise ConnectError(self._url, "another server answers at its Unix socket; use transport='grpc'")
        self.answered = True
        self.server_version = hello.version

    def _stranger(self, error: RequestError) -> ConnectError:
        details = f"no server of this package: {error.message.rstrip('.')}"
        return ConnectError(self._url, f"{details}. {remedy(self._scheme, details)}")

    def cut_off(self) -> str:
        """Say what the end of the stream means now."""
        if not self.answered:
            return "it closed the connection without a word"
        return "the server ended the stream" + (" in the midst of a frame" if self._reader.partial else "")
