"""Socket options and keepalive times that both ends of a connection use."""

from __future__ import annotations

import socket

__all__ = ["PATIENCE", "QUIET", "prepare"]

SEND_BUFFER = 1 << 20
"""Bytes that a Unix socket is asked to hold, so that a large message takes few turns; the system may grant less."""
QUIET = 20.0
"""Seconds without a sign of the other end after which it is asked for one."""
PATIENCE = 10.0
"""Seconds that it then has for it."""
_KEEPALIVE = {
    "TCP_KEEPIDLE": int(QUIET),
    "TCP_KEEPALIVE": int(QUIET),
    "TCP_KEEPINTVL": int(PATIENCE / 2),
    "TCP_KEEPCNT": 2,
}


def prepare(sock: socket.socket) -> None:
    """Make a socket non-blocking, without delay before small messages, and with TCP keepalive."""
    sock.setblocking(False)
    if sock.family == getattr(socket, "AF_UNIX", None):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)  # each system has its own selection
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
