"""Tells a connection's protocol by its first bytes: gRPC begins with `PRI`, HTTP/1.1 with a method such as `GET`."""

from __future__ import annotations

from collections.abc import Callable

from bridge.core.server.connection import Connection, ConnectionProtocol
from bridge.core.transport.frames import PREFACE

__all__ = ["FirstBytes"]

_SIGN = PREFACE[:4]


class FirstBytes(ConnectionProtocol):
    """Stands for a connection's protocol until its first bytes have come. It says nothing before.

    Args:
        connection: What is to speak.
        grpc: Makes the protocol of a gRPC client, and of one that is neither.
        web: Makes the protocol of an HTTP/1.1 client.
    """

    def __init__(
        self,
        connection: Connection,
        grpc: Callable[[Connection], ConnectionProtocol],
        web: Callable[[Connection], ConnectionProtocol],
    ) -> None:
        super().__init__(connection)
        self._grpc, self._web = grpc, web
        self._data = b""

    def receive_data(self, data: bytes) -> None:
        """Take bytes; the protocol that they begin gets them. Raises as that does."""
        self._data += data
        # A client may send its first bytes one by one.
        if len(self._data) < len(_SIGN) and _SIGN.startswith(self._data):
            return
        # `PRI` is a word of capitals as well. What begins with neither is told so by gRPC's side, and closed.
        is_web = not self._data.startswith(_SIGN) and b"A" <= self._data[:1] <= b"Z"
        connection = self._connection
        connection.speak((self._web if is_web else self._grpc)(connection))
        connection.protocol.receive_data(self._data)

    def check_keepalive(self, now: float) -> bool:
        """Wait: a client that does not begin to speak is closed by a timer."""
        return True

    def connection_lost(self) -> None:
        """Free everything."""
        del self._grpc, self._web
