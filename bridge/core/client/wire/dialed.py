"""Servers that have dialed in: their sockets wait until a connection takes them."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bridge.core.client.wire.poller import Poller, PollerTimer
from bridge.core.transport.address import Address
from bridge.core.transport.tls import Tls

__all__ = ["Dialed", "DialedIn", "listeners", "take"]

# Seconds that a server which dials in has for its next connection.
_NEXT = 2.0


class Dialed(NamedTuple):
    """A connection that a server has made."""

    sock: socket.socket
    """The connected socket."""
    tls: Tls | None
    """TLS on the socket, with its handshake done; None: there is none."""
    server_version: str | None = None
    """With WebSocket the version of a server of this package, None for another server; with gRPC always None."""


listeners: dict[int, Callable[[str], Dialed | None]] = {}
"""Functions that return the socket of a server, by the number of the listener that it has dialed."""


def take(address: Address) -> Dialed | None:
    """Return a connection that the server has made, which the caller then owns; None: there is none."""
    give = listeners.get(address.port)
    return None if give is None else give(address.host)


@dataclasses.dataclass(eq=False)
class DialedIn:
    """Takes one connection that a server has made, without blocking. Replaces the `Dialer` of outgoing connections."""

    address: Address
    """The address of the server."""
    poller: Poller[Any]
    """Calls back when a timer is ready."""
    connected: Callable[[Dialed], None]
    """Called once with the connection, which the callee then owns, unless `failed` or `cancel` is called."""
    failed: Callable[[str, bool], None]
    """Called once with the reason, and whether the server may still come up."""
    _until: float = 0.0
    _timer: PollerTimer | None = None

    def start(self) -> None:
        """Begin. May call `connected` or `failed` before it returns."""
        self._until = time.monotonic() + _NEXT
        self._look()

    def cancel(self) -> None:
        """Cancel, and call no callback."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        found = take(self.address)
        if found is not None:
            self.connected(found)
        elif time.monotonic() < self._until:
            # The server dials again when its connection has ended, or with WebSocket when it sees that one is used.
            self._timer = self.poller.call_later(_NEXT / 40, self._look)
        else:
            self.failed(f"the server {self.address.host!r} has not dialed in, or serves another connection", True)
