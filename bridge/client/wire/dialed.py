"""Servers that have dialed in: their sockets wait for a connection to take them (`bridge.dial`)."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple

from bridge.transport.address import Address
from bridge.transport.tls import Tls

__all__ = ["Dialed", "listeners", "take"]


class Dialed(NamedTuple):
    """A connection that a server has made."""

    sock: socket.socket
    """Its socket."""
    tls: Tls | None
    """TLS between the socket and what is spoken, its handshake done; None: there is none."""
    server_version: str | None = None
    """Of a WebSocket: the version of a server of this package; None: another server, or gRPC, which tells by itself."""


listeners: dict[int, Callable[[str], Dialed | None]] = {}
"""Functions that give the socket of a server, by the number of the listener that it has dialed."""


def take(address: Address) -> Dialed | None:
    """Return a connection that the server has made, which is then the caller's; None: there is none."""
    give = listeners.get(address.port)
    return None if give is None else give(address.host)
