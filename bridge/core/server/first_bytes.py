"""Tells a connection's protocol by its first bytes: gRPC begins with `PRI`, HTTP/1.1 with a method such as `GET`."""

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
    """Stands for a connection's protocol until its first bytes have come. It says nothing before.

    Args:
        connection: What is to speak.
        grpc: Makes the protocol of a gRPC client, and of one that is none of the others.
        http: Makes the protocol of an HTTP/1.1 client; None: there is none.
        others: What makes further protocols, by what their connections begin with.
    """

    def __init__(self, connection: Connection, grpc: Speak, http: Speak | None, others: Mapping[bytes, Speak]) -> None:
        super().__init__(connection)
        self._grpc, self._http, self._others = grpc, http, others
        self._data = b""

    def receive_data(self, data: bytes) -> None:
        """Take bytes; the protocol that they begin gets them. Raises as that does."""
        self._data += data
        speak = self._choose()
        if speak is None:
            return
        connection = self._connection
        connection.speak(speak(connection))
        connection.protocol.receive_data(self._data)

    def _choose(self) -> Speak | None:
        """Return what makes the protocol; None: further bytes say which."""
        for sign, speak in self._others.items():
            if self._data.startswith(sign):
                return speak
        # A client may send its first bytes one by one.
        if any(len(self._data) < len(sign) and sign.startswith(self._data) for sign in (_SIGN, *self._others)):
            return None
        # `PRI` is a word of capitals as well. What begins with neither is told so by gRPC's side, and closed.
        is_http = not self._data.startswith(_SIGN) and b"A" <= self._data[:1] <= b"Z"
        return self._http if is_http and self._http is not None else self._grpc

    def check_keepalive(self, now: float) -> bool:
        """Wait: a client that does not begin to speak is closed by a timer."""
        return True

    def connection_lost(self) -> None:
        """Free everything."""
        del self._grpc, self._http, self._others
