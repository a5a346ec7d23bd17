"""Detects the protocol of a connection: gRPC begins with `PRI`, HTTP/1.1 with a method such as `GET`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from bridge.core.server.connection import Connection, ConnectionProtocol
from bridge.core.transport.frames import PREFACE

__all__ = ["FirstBytes", "Speak"]

Speak: TypeAlias = Callable[[Connection], ConnectionProtocol]
"""Makes the protocol of a connection."""
_SIGN = PREFACE[:4]


class FirstBytes(ConnectionProtocol):
    """Takes the place of a connection's protocol until its first bytes have come. It sends nothing.

    Args:
        connection: The connection.
        grpc: Makes the protocol of a gRPC client, and of a client of no known protocol.
        http: Makes the protocol of an HTTP/1.1 client; None: HTTP/1.1 is not spoken.
        others: Makes further protocols, by the first bytes of their connections.
    """

    def __init__(self, connection: Connection, grpc: Speak, http: Speak | None, others: Mapping[bytes, Speak]) -> None:
        super().__init__(connection)
        self._grpc, self._http, self._others = grpc, http, others
        self._data = b""

    def receive_data(self, data: bytes) -> None:
        """Read bytes, and pass them to the protocol that they belong to. Raises as that does."""
        self._data += data
        speak = self._choose()
        if speak is None:
            return
        connection = self._connection
        connection.speak(speak(connection))
        connection.protocol.receive_data(self._data)

    def _choose(self) -> Speak | None:
        """Return the function that makes the protocol; None: more bytes are needed."""
        for sign, speak in self._others.items():
            if self._data.startswith(sign):
                return speak
        # A client may send its first bytes one by one.
        if any(len(self._data) < len(sign) and sign.startswith(self._data) for sign in (_SIGN, *self._others)):
            return None
        # `PRI` is a word of capitals as well. The gRPC side tells clients of unknown protocols so, and closes.
        is_http = not self._data.startswith(_SIGN) and b"A" <= self._data[:1] <= b"Z"
        return self._http if is_http and self._http is not None else self._grpc

    def check_keepalive(self, now: float) -> bool:
        """Return True: a client that does not begin to speak is closed by a timer."""
        return True

    def connection_lost(self) -> None:
        """Free all memory."""
        del self._grpc, self._http, self._others
