"""gRPC, as a client speaks it over a TCP socket: dm_env_rpc's one call, on an HTTP/2 connection of its own."""

from __future__ import annotations

from bridge.address import Address
from bridge.client import keepalive
from bridge.client.http2 import Http2Call, Http2Error, Status
from bridge.client.remedies import remedy
from bridge.client.token import shown_token
from bridge.credentials import TOKEN_VARIABLE
from bridge.errors import Code, ConnectError, ConnectionLostError, PeerError, RefusedError, RemoteError
from bridge.version import __version__
from bridge.wire import HELLO, METHOD, SERVICE

__all__ = ["GrpcDialect"]

# Other servers than ours hang up on who asks them more often than every five minutes.
_QUIET_UNKNOWN = 310.0


class GrpcDialect:
    """The messages of the call.

    Args:
        address: A `grpc` or `grpcs` address.
        max_message_bytes: The largest answer.
    """

    alpn = "h2"
    half_closes = False

    def __init__(self, address: Address, max_message_bytes: int) -> None:
        self._url, self._scheme = address.url, address.scheme
        token = shown_token(address)
        self._withheld = token is None and address.credentials.token is not None
        metadata = [("user-agent", f"gymnasium-bridge/{__version__}"), (HELLO, __version__)]  # U-12
        if token is not None:
            metadata.append(("authorization", f"Bearer {token}"))
        scheme = "https" if address.tls else "http"
        self._call = Http2Call(address.target, f"/{SERVICE}/{METHOD}", metadata, max_message_bytes, scheme)
        self.answered = False
        self.ending: RemoteError | None = None
        self.quiet: float | None = _QUIET_UNKNOWN

    @property
    def server_version(self) -> str | None:
        """What the server's metadata says of it."""
        return (self._call.metadata or {}).get(HELLO)

    @property
    def owed(self) -> bytes:
        """What HTTP/2 itself has to say."""
        return self._call.take()

    def opening(self) -> bytes:
        """Return the settings, and the call's header fields."""
        return self._call.take()

    def pack(self, request: bytes) -> bytes:
        """Return a request's frames, as far as the server has room."""
        return self._call.pack(request)

    def finish(self) -> bytes:
        """Return the end of the call's requests."""
        return self._call.finish()

    def ping(self) -> bytes:
        """Return a ping."""
        return self._call.ping()

    @property
    def space(self) -> memoryview | None:
        """Where the rest of a large answer goes."""
        return self._call.space

    def filled(self, count: int) -> list[bytes | bytearray]:
        """Take note that bytes are in `space`."""
        return self._noted(self._call.filled(count))

    def feed(self, data: bytes) -> list[bytes | bytearray]:
        """Take bytes; return the answers that they complete."""
        try:
            answers = self._call.feed(data)
        except Http2Error as error:
            if self.answered:
                raise PeerError(self._url, f"it speaks no HTTP/2: {error}") from error
            details = f"no gRPC server: {error}"
            raise ConnectError(self._url, f"{details}. {remedy(self._scheme, details)}") from error
        return self._noted(answers)

    def _noted(self, answers: list[bytes | bytearray]) -> list[bytes | bytearray]:
        """Take note of what the last bytes changed; return the answers that they completed."""
        if answers and not self.answered:
            self.answered = True
            if self.server_version is not None:
                self.quiet = keepalive.KEEPALIVE
        if self._call.status is not None and self.ending is None:
            self.ending = self._explain(self._call.status)
        return answers

    def _explain(self, status: Status) -> RemoteError:
        """Say how the call ended."""
        code, details = status.code, status.details or "no details"
        if code == Code.OK:
            return ConnectionLostError(self._url, "the server ended the stream")
        if code == Code.UNAVAILABLE and not self.answered:
            return ConnectError(self._url, f"no connection: {details}. {remedy(self._scheme, details)}")
        if code in (Code.UNAVAILABLE, Code.CANCELLED):
            return ConnectionLostError(self._url, f"the connection was lost: {details}")
        if code == Code.UNIMPLEMENTED:
            return ConnectError(self._url, f"a gRPC server is there, but it does not speak dm_env_rpc: {details}")
        if code == Code.UNAUTHENTICATED and self._withheld:
            details += f" ({TOKEN_VARIABLE} is not sent unencrypted to another machine: use grpcs://, or pass token=)"
        return RefusedError(self._url, f"the stream was ended: {details}", code)

    def cut_off(self) -> str:
        """Say what the end of the stream means now."""
        if self._call.farewell:
            return f"the connection was lost: {self._call.farewell}"
        return "the server ended the stream" if self.answered else "it closed the connection without a word"
