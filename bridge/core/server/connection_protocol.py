"""The base of the protocols of a server's connections, and the pings that they send to a quiet client."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bridge.core.transport.sockets import PATIENCE, QUIET

if TYPE_CHECKING:
    from bridge.core.server.calls import Call
    from bridge.core.server.connection import Connection
    from bridge.core.transport.http2 import Http2
    from bridge.errors import RequestError

__all__ = ["ConnectionProtocol"]


class ConnectionProtocol:
    """The protocol of a connection: gRPC, or HTTP/1.1 and WebSocket. It appends its output to `outgoing`.

    Subclasses do more than what is here, which is right before a client has begun to speak.

    Args:
        connection: The connection.
    """

    http: Http2 | None = None
    """The HTTP/2 that large messages are received into; None: it is none."""
    finished = False
    """True if it has said its last words: the connection closes once they are sent and no call is left."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._heard = time.monotonic()
        self._asked: float | None = None

    @property
    def receives_large(self) -> bool:
        """True if a large request is being received."""
        return False

    def receive_data(self, data: bytes) -> None:
        """Take bytes; raises RequestError where they cannot be read."""
        raise NotImplementedError

    def buffer_updated(self, count: int) -> None:
        """Note that bytes were received into the buffer of `http`; raises as `receive_data`."""

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send an answer with the next `flush`; return whether the client has room for all of it."""
        return True

    def is_blocked(self, call: Call) -> bool:
        """True if the client has no room for the answers of a call."""
        return False

    def defer(self, call: Call, size: int) -> None:
        """Let the client send `size` bytes less, for a request that waits, until `resume`."""

    def resume(self, call: Call, size: int) -> None:
        """Take back a `defer`."""

    def finish(self, call: Call, error: RequestError | None) -> None:
        """End a call: as it should, or for a reason."""

    def refuse(self, error: RequestError) -> None:
        """Say why the connection ends."""

    def drain(self) -> None:
        """Say that no further calls are taken; the open calls go on."""

    def ping(self) -> None:
        """Ask for a sign of life, if the protocol can."""

    def check_keepalive(self, now: float) -> bool:
        """Ask for a sign of a client that has been quiet; tell whether it gave one in time."""
        connection = self._connection
        if connection.progressed:  # it takes what was sent, behind which any ping would stand
            connection.progressed = False
            self._heard = now
        if connection.paused or connection.account.timer is not None:  # nothing is read, a sign neither
            self._heard = now
        if self._asked is not None:
            # Any bytes are a sign: behind a large request the answer to a ping comes late.
            if self._heard > self._asked:
                self._asked = None
            elif now - self._asked > PATIENCE:
                return False
        elif now - self._heard > QUIET:
            self._asked = now
            self.ping()
        return True

    def connection_lost(self) -> None:
        """Free everything, at once."""
