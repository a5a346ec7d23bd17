"""Connections to a port that costs each caller a thread and a file: strangers must not use them all up."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["Callers"]


class Callers:
    """Those that were not let in yet; the oldest goes for a further one.

    Args:
        most: How many there are at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sockets: dict[socket.socket, None] = {}

    def add(self, sock: socket.socket, address: object = None) -> bool:
        """Take one more; return True. It is as `verify_request` of `socketserver`."""
        self._sockets[sock] = None
        if len(self._sockets) > self._most:
            oldest = next(iter(self._sockets))
            self._sockets.pop(oldest, None)  # another thread may have let it in
            with contextlib.suppress(OSError):  # it has ended
                oldest.shutdown(socket.SHUT_RDWR)
        return True

    def let_in(self, sock: socket.socket) -> None:
        """One is no caller any more."""
        self._sockets.pop(sock, None)
