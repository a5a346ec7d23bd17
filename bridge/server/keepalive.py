"""When a server asks a client that has been quiet for a sign of life, and when it gives the client up."""

from __future__ import annotations

import time

from bridge.server.connection import Connection
from bridge.transport.sockets import PATIENCE, QUIET

__all__ = ["Keepalive"]


class Keepalive:
    """The common part of the protocols that ask for signs of life.

    Args:
        connection: The connection.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._heard = time.monotonic()
        self._asked: float | None = None

    def ping(self) -> None:
        """Ask for a sign of life."""
        raise NotImplementedError

    def check_keepalive(self, now: float) -> bool:
        """Ask for a sign of a client that has been quiet; tell whether it gave one in time."""
        connection = self._connection
        if connection.progressed:  # it takes what was sent, behind which any ping would stand
            connection.progressed = False
            self._heard = now
        if connection.paused or connection.account.timer is not None:  # nothing is read, a sign neither
            self._heard = now
        if self._asked is not None:
            if self._heard > self._asked:
                self._asked = None
            elif now - self._asked > PATIENCE:
                return False
        elif now - self._heard > QUIET:
            self._asked = now
            self.ping()
        return True
