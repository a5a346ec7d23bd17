"""Socket options and keepalive times that both ends of a connection use."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections import deque

__all__ = [
    "AT_ONCE",
    "PATIENCE",
    "QUIET",
    "RECEIVE_TIMEOUT",
    "end_if_unreachable",
    "has_hung_up",
    "let_receive_wait",
    "prepare",
    "send_parts",
]

SEND_BUFFER = 1 << 20
"""Bytes that a Unix socket is asked to hold, so that a large message takes few turns; the system may grant less."""
QUIET = 20.0
"""Seconds of silence after which the other end is sent a ping."""
PATIENCE = 10.0
"""Seconds that it then has for the answer."""
AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)
"""Flag of a call of `send` or `recv` that is not to wait, whatever the socket's mode."""
RECEIVE_TIMEOUT = 0.05
"""Seconds for which `recv` waits without `AT_ONCE`, after `let_receive_wait`."""
# TCP_KEEPALIVE is what macOS calls TCP_KEEPIDLE.
_KEEPALIVE = {
    "TCP_KEEPIDLE": int(QUIET),
    "TCP_KEEPALIVE": int(QUIET),
    "TCP_KEEPINTVL": int(PATIENCE / 2),
    "TCP_KEEPCNT": 2,
}
# Of Linux's `tcp_info`, whose first byte is the state: CLOSE and CLOSE_WAIT, in which the peer sends nothing more.
_HUNG_UP = (7, 8)
# Parts of what is to be sent that the system is handed at a time. It takes no more than 1,024 (IOV_MAX), which would
# save little: 50,000 parts of 100 bytes took 189 ms one by one, 21 ms by 64, 17 ms by 1,024.
_MAX_PARTS = 64


def has_hung_up(sock: socket.socket) -> bool:
    """Return whether the peer is known to have closed, though bytes that it sent before may wait to be read.

    Only Linux tells: elsewhere, and of a Unix socket, it is found out by reading on.
    """
    if sys.platform != "linux" or sock.family == socket.AF_UNIX:
        return False
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _HUNG_UP


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


def end_if_unreachable(sock: socket.socket, seconds: float) -> None:
    """Set how long the system waits for acknowledgements before it ends a connection; Linux alone can.

    A process that is busy is no reason: its system acknowledges what comes, until it has no room for more.
    """
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        with contextlib.suppress(OSError):  # the other end has closed already, or it is a Unix socket
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, int(seconds * 1000)))


def let_receive_wait(sock: socket.socket) -> bool:
    """Make `recv` wait, `RECEIVE_TIMEOUT` seconds at most; return False where this system cannot, and nothing is done.

    A thread that waits for one socket alone needs no selector then, whose round costs as much as the `recv`. Calls of
    `send`, and those of `recv` that shall not wait, need the flag `AT_ONCE` from here on.
    """
    if sys.platform != "linux" or not AT_ONCE:
        return False
    sock.setblocking(True)
    # The system's option is cheaper: with `settimeout` Python would call `poll` before each `recv`.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(RECEIVE_TIMEOUT * 1e6)))
    return True


def send_parts(sock: socket.socket, parts: deque[memoryview]) -> int:
    """Send what a socket takes at once, and remove it from `parts`; return the number of bytes.

    Raises:
        OSError: As the socket does.
    """
    total = 0
    with contextlib.suppress(BlockingIOError):
        while parts:
            # Windows has no `sendmsg`.
            if hasattr(sock, "sendmsg"):
                sent = sock.sendmsg([parts[i] for i in range(min(len(parts), _MAX_PARTS))], [], AT_ONCE)
            else:
                sent = sock.send(parts[0])
            total += sent
            while sent:
                if sent < len(parts[0]):
                    parts[0] = parts[0][sent:]
                    break
                sent -= len(parts.popleft())
    return total
