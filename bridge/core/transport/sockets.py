"""Sockets: options and keepalive times that both ends of a connection use, and the sockets that a server listens on."""

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
"""The buffer size in bytes for a Unix socket, so that a large message takes few turns; the system may grant less."""
QUIET = 20.0
"""Seconds of silence after which the other end is sent a ping."""
PATIENCE = 10.0
"""Seconds that the other end has to answer the ping."""
AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)
"""Flag of a call of `send` or `recv` that must not wait, whatever the socket's mode."""
RECEIVE_TIMEOUT = 0.05
"""Seconds for which `recv` waits without `AT_ONCE`, after `let_receive_wait`."""
# macOS has the name TCP_KEEPALIVE for TCP_KEEPIDLE.
_KEEPALIVE = {
    "TCP_KEEPIDLE": int(QUIET),
    "TCP_KEEPALIVE": int(QUIET),
    "TCP_KEEPINTVL": int(PATIENCE / 2),
    "TCP_KEEPCNT": 2,
}
# The states CLOSE and CLOSE_WAIT, the first byte of Linux's `tcp_info`: the peer sends nothing more.
_HUNG_UP = (7, 8)
# Parts of the outgoing data that are passed to the system at a time. It accepts at most 1,024 (IOV_MAX), which would
# save little: 50,000 parts of 100 bytes took 189 ms one by one, 21 ms by 64, 17 ms by 1,024.
_MAX_PARTS = 64


def has_hung_up(sock: socket.socket) -> bool:
    """True if the peer is known to have closed, even if bytes that it sent before wait to be read.

    Only Linux tells, and only for TCP. Otherwise the end is found by reading.
    """
    if sys.platform != "linux" or sock.family == socket.AF_UNIX:
        return False
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _HUNG_UP


def prepare(sock: socket.socket) -> None:
    """Make a socket non-blocking, without delay for small messages, and with TCP keepalive."""
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
    """Set how long the system waits for acknowledgements before it ends a connection. Only Linux supports this.

    A busy process does not cause it: its system acknowledges incoming data until its buffers are full.
    """
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        with contextlib.suppress(OSError):  # the other end has closed already, or it is a Unix socket
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, int(seconds * 1000)))


def let_receive_wait(sock: socket.socket) -> bool:
    """Make `recv` wait for up to `RECEIVE_TIMEOUT` seconds; return False, without effect, if the system cannot.

    A thread that waits for only one socket then needs no selector, whose call costs as much as the `recv`. From here
    on, calls of `send`, and calls of `recv` that must not wait, need the flag `AT_ONCE`.
    """
    if sys.platform != "linux" or not AT_ONCE:
        return False
    sock.setblocking(True)
    # The system's option is cheaper: with `settimeout` Python would call `poll` before each `recv`.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(RECEIVE_TIMEOUT * 1e6)))
    return True


def send_parts(sock: socket.socket, parts: deque[memoryview]) -> int:
    """Send as much as a socket takes at once, and remove it from `parts`; return the number of bytes.

    Raises:
        OSError: The error of the socket.
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
    """Listen on a Unix socket that only this user may connect to. A file left by a dead server is replaced.

    Returns:
        The socket, and a function that removes its file, unless another server has its own there by then.

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
    """Return the device and inode, which distinguish a file from a later one of the same name."""
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
    """True if a path is a socket on which nothing listens, such as a killed server leaves behind."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def listen_tcp(host: str, port: int) -> list[socket.socket]:
    """Listen on a TCP port of all addresses of a host.

    Args:
        host: A name or an address of this machine; `::`: all addresses, including IPv4.
        port: The port; 0: any free one, the same for all addresses.

    Raises:
        ListenError: The port is in use, or the address is not of this machine.
        SettingError: This user may not listen there, or it is no address or port.
    """
    check_listening(host, port)
    problem: OSError | UnicodeError | None = None
    for _ in range(8 if port == 0 else 1):  # a port that is free for one address may be in use for the next
        try:
            return _listen_all(host, port)
        except (OSError, UnicodeError) as error:  # UnicodeError: no host name, such as "a..b"
            problem = error
    at = f"[{host}]" if ":" in host else host
    # Errors that an operator has to fix. The others may pass: another program may end, or an interface come up.
    wrong = isinstance(problem, (UnicodeError, PermissionError))
    why = getattr(problem, "strerror", None) or problem
    # Another port is no remedy if the address is not of this machine.
    if isinstance(problem, (UnicodeError, socket.gaierror)) or getattr(problem, "errno", None) == errno.EADDRNOTAVAIL:
        text = f"cannot listen on host={at!r}: {why}. Expected an address of this machine, or 0.0.0.0 for all"
    else:
        text = f"cannot listen on port={port} of {at}: {why}. Choose another port (port=0: any free one)"
    raise (SettingError if wrong else ListenError)(text) from None


def check_listening(host: Any, port: Any, name: str = "") -> None:
    """Check the address and port to listen on, because the C library takes a larger port modulo 65536.

    Args:
        host: The address. An empty one, such as from an unset variable, would mean every address of the machine.
        port: The port.
        name: The first part of the keywords' names, such as `metrics_`.

    Raises:
        SettingError: The host or the port is invalid.
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
                problem = error  # a machine without IPv6 may still resolve names to IPv6 addresses
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
            # For a server that restarts at once. On Windows this option would let two programs use the port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # The socket of `::` is also for IPv4. Other IPv6 sockets leave IPv4 to a socket of its own.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(target[0] != "::"))
        sock.bind(target)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
