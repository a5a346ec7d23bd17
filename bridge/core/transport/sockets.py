"""Sockets: options and keepalive times that both ends of a connection use, and those that a server listens on."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from bridge.errors import ListenError, SettingError

__all__ = [
    "AT_ONCE",
    "PATIENCE",
    "QUIET",
    "RECEIVE_TIMEOUT",
    "check_listening",
    "end_if_unreachable",
    "has_hung_up",
    "let_receive_wait",
    "listen_tcp",
    "listen_unix",
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


_BACKLOG = 1024


def listen_unix(path: str) -> tuple[socket.socket, Callable[[], None]]:
    """Listen on a Unix socket that this user alone may connect to; a socket file that nobody listens at is replaced.

    Returns:
        The socket, and what takes its file away, unless another server has its own there by then.

    Raises:
        SettingError: A server listens there, the path is too long or not ours, or the platform has no Unix sockets.
    """
    if (family := getattr(socket, "AF_UNIX", None)) is None:
        raise SettingError("this platform has no Unix sockets, so unix_path cannot be given; leave it out")
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:
            _bind_unix(sock, path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _stale(family, path):
                raise
            os.unlink(path)
            _bind_unix(sock, path)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        hint = " (a server listens there, or the file is not ours)" if error.errno == errno.EADDRINUSE else ""
        kind = ListenError if error.errno == errno.EADDRINUSE else SettingError
        raise kind(
            f"cannot listen on unix_path={path!r}: {error.strerror or error}{hint}. Expected a path of "
            "at most about 100 bytes in a directory that exists and is yours"
        ) from error
    return sock, partial(_remove, path, _inode(path))


def _inode(path: str) -> tuple[int, int]:
    """Return the device and inode, which tell a file from a later one of the same name."""
    info = os.stat(path)
    return info.st_dev, info.st_ino


def _remove(path: str, inode: tuple[int, int]) -> None:
    with contextlib.suppress(OSError):
        if _inode(path) == inode:
            os.unlink(path)


def _bind_unix(sock: socket.socket, path: str) -> None:
    sock.bind(path)
    os.chmod(path, 0o600)  # nobody can connect before `listen`


def _stale(family: int, path: str) -> bool:
    """True if a path is a socket that nobody listens at, as a killed server leaves it."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def listen_tcp(host: str, port: int) -> list[socket.socket]:
    """Listen on a TCP port of all addresses that a host's name stands for.

    Args:
        host: A name or an address of this machine; `::`: all of them, of IPv4 too.
        port: The port; 0: any free one, the same for all addresses.

    Raises:
        ListenError: It is in use, or the address is not of this machine.
        SettingError: This user may not listen there, or it is no address or port.
    """
    check_listening(host, port)
    problem: OSError | UnicodeError | None = None
    for _ in range(8 if port == 0 else 1):  # a port that is free for one address may be taken for the next
        try:
            return _listen_all(host, port)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host, such as "a..b"
            problem = error
    at = f"[{host}]" if ":" in host else host
    # What an operator has to change, before another start can help: others may end, or an interface come up.
    wrong = isinstance(problem, (UnicodeError, PermissionError))
    why = getattr(problem, "strerror", None) or problem
    # Another port is no remedy for a host that is not this one.
    if isinstance(problem, (UnicodeError, socket.gaierror)) or getattr(problem, "errno", None) == errno.EADDRNOTAVAIL:
        text = f"cannot listen on host={at!r}: {why}. Expected an address of this machine, or 0.0.0.0 for all"
    else:
        text = f"cannot listen on port={port} of {at}: {why}. Choose another port (port=0: any free one)"
    raise (SettingError if wrong else ListenError)(text) from None


def check_listening(host: Any, port: Any, name: str = "") -> None:
    """Check what is to be listened at, before the C library takes the rest of a division for the port.

    Args:
        host: The address. An empty one, as of a variable that is not set, would be every address of the machine.
        port: The port.
        name: What the keywords begin with, such as `metrics_`.

    Raises:
        SettingError: One is out of range.
    """
    if not isinstance(host, str) or not host:
        raise SettingError(f"expected {name}host to be an address, such as 0.0.0.0 for every one, got {host!r}")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise SettingError(f"expected {name or 'a '}port from 0 to 65535, got {port!r}")


def _listen_all(host: str, port: int) -> list[socket.socket]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    socks: list[socket.socket] = []
    problem: OSError | None = None
    for family, kind, protocol, _, target in dict.fromkeys(found):
        at = (target[0], socks[0].getsockname()[1], *target[2:]) if socks else target
        try:
            socks.append(_bind_tcp(family, kind, protocol, at))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                problem = error  # a machine without IPv6 has its names in it all the same
                continue
            for sock in socks:
                sock.close()
            raise
    if not socks:
        raise problem or OSError(errno.EADDRNOTAVAIL, "the name has no address")
    return socks


def _bind_tcp(family: int, kind: int, protocol: int, target: Any) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            # For a server that is started again at once. On Windows this option would let two programs have the port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # The socket of `::` is for IPv4, too. One of another address leaves IPv4 to the socket of its own.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(target[0] != "::"))
        sock.bind(target)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
