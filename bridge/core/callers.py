"""Limits new connections to a port where each costs a thread and a file: strangers must not use them all up."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["Callers"]


class Callers:
    """New connections that were not accepted yet. If there are too many, the oldest is closed.

    Args:
        most: The most connections at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sockets: dict[socket.socket, None] = {}

    def add(self, sock: socket.socket, address: object = None) -> bool:
        """Add a connection; return True, as `verify_request` of `socketserver` must."""
        self._sockets[sock] = None
        if len(self._sockets) > self._most:
            oldest = next(iter(self._sockets))
            self._sockets.pop(oldest, None)  # another thread may have accepted it
            with contextlib.suppress(OSError):  # it has ended
                oldest.shutdown(socket.SHUT_RDWR)
        return True

    def let_in(self, sock: socket.socket) -> None:
        """Remove an accepted connection."""
        self._sockets.pop(sock, None)
