"""A client's call: one stream of requests and answers, whatever carries it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from bridge.core.client.wire.poller import Poller
from bridge.errors import ConnectionLostError, RemoteError, SettingError

__all__ = ["ClientCall", "Deliver"]

# Requests of a connection that are sent together: few at first, so that the server begins with them while the rest is
# written, and then many, as each `send` costs both ends processor time.
_FIRST = 16
_TOGETHER = 64

Deliver: TypeAlias = Callable[[bytes | bytearray | RemoteError], None]
"""A function that takes an answer, or how a stream ended."""


class _Protocol(Protocol):
    """The protocol of a connection, gRPC or WebSocket, as a call uses it."""

    @property
    def server_version(self) -> str | None:
        """The version of a Gymnasium Bridge server, None for another one; known once an answer came."""

    @property
    def draining(self) -> bool:
        """True if the server has said that it takes no further calls."""

    def pack(self, call: ClientCall, request: bytes) -> None:
        """Append the bytes of a request to what is to be sent."""

    def finish(self, call: ClientCall) -> None:
        """Say that no request follows."""


class _Connection(Protocol):
    """What carries a call: `bridge.core.client.wire.connection.ClientConnection` says what each of these is."""

    poller: Poller[Any]
    max_message_bytes: int
    inherited: bool
    shared: bool
    silent: bool
    unsent: int

    @property
    def protocol(self) -> _Protocol: ...

    @property
    def connected(self) -> bool: ...

    def add(self, call: ClientCall) -> None: ...

    def remove(self, call: ClientCall) -> None: ...

    def flush(self, *, wait: bool = False) -> None: ...

    def check_keepalive(self) -> None: ...


class ClientCall:
    """One stream of requests and answers; used by one thread, the one that takes from the poller.

    Args:
        connection: What carries it.
        url: Where to, for messages.
        deliver: Called with each answer's bytes, and at the end of the stream once with the RemoteError that says why.
    """

    def __init__(self, connection: _Connection, url: str, deliver: Deliver) -> None:
        self.connection = connection
        self.url = url
        self.deliver = deliver
        self.stream: Any = None
        """The number or object by which the connection's protocol knows it."""
        self.unconfirmed: list[bytes] | None = []
        """Requests to send again on a further connection, until the server has begun to answer; None: it has."""
        self.attempts = 0
        """Connections that refused it; one that had no other call counts as many."""
        self.ended = False
        self.finished = False
        # The keepalive thread may be at the same sockets now.
        with connection.poller.lock:
            connection.add(self)

    @property
    def server_version(self) -> str | None:
        """The version of a Gymnasium Bridge server, None for another one; known once an answer came."""
        return self.connection.protocol.server_version

    @property
    def silent(self) -> bool:
        """True if not a byte has come yet."""
        return self.connection.silent

    @property
    def draining(self) -> bool:
        """True if the server has said that it takes no further calls; this one goes on."""
        return self.connection.protocol.draining

    def send(self, request: bytes) -> None:
        """Send a request; it is on its way when this returns, or when the poller sends what it holds together.

        Raises:
            SettingError: It is larger than `max_message_bytes`.
            ConnectionLostError: This process was forked from the one that the call belongs to.
        """
        connection = self.connection
        if len(request) > connection.max_message_bytes:
            raise SettingError(
                f"a request of {len(request)} bytes is larger than max_message_bytes={connection.max_message_bytes}"
            )
        if connection.inherited:
            raise ConnectionLostError(self.url, "this process was forked, and the connection is its parent's")
        with connection.poller.lock:
            # A server, or a proxy such as nginx (`http2_max_concurrent_streams`), may refuse a stream by
            # REFUSED_STREAM: nothing was done for it, so the same requests can go over a further connection. Once
            # header fields came, a world may exist already.
            if self.unconfirmed is not None:
                if self.stream is not None and self.stream.headers_received:
                    self.unconfirmed = None
                else:
                    self.unconfirmed.append(request)
            if not self.ended:  # else how it ended was delivered
                connection.protocol.pack(self, request)
                deferred = connection.poller.deferred
                if deferred is not None and connection.shared:
                    connection.unsent += 1
                    if connection.unsent < deferred.setdefault(connection, _FIRST):
                        return
                    deferred[connection] = _TOGETHER
                connection.flush(wait=True)

    def finish(self) -> None:
        """Say that no request follows; those sent before are served."""
        connection = self.connection
        # A forked process has the parent's socket: what it sends there would end the parent's stream.
        if self.finished or connection.inherited:
            return
        self.finished = True
        with connection.poller.lock:
            if not self.ended:
                connection.protocol.finish(self)
                connection.flush()

    def close(self, timeout: float) -> None:
        """End the stream. Waits for the server at most `timeout` seconds, then cuts it."""
        if self.connection.inherited:
            return
        self.finish()
        self.deliver = lambda what: None  # nobody waits for what comes after the last request
        poller = self.connection.poller
        with poller.lock:
            if timeout > 0 and not sys.is_finalizing():
                # A call that has no connection yet is not waited for: nothing could end it.
                poller.poll_until(lambda: self.ended or not self.connection.connected, time.monotonic() + timeout)
            self.connection.remove(self)
