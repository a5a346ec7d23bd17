"""The sockets that a server listens on for frames."""

from __future__ import annotations

import errno
import os
import socket
import stat

from bridge.errors import SettingError

__all__ = ["inode", "listen_tcp", "listen_unix"]

_BACKLOG = 1024


def inode(path: str) -> tuple[int, int]:
    """Return what tells a file from another one that took its name."""
    info = os.stat(path)
    return info.st_dev, info.st_ino


def listen_unix(path: str) -> socket.socket:
    """Make a Unix socket that this user alone may connect to; a socket file that nobody listens at is replaced.

    Raises:
        SettingError: A server listens there, the path is too long or not ours, or the platform has no Unix sockets.
    """
    family = getattr(socket, "AF_UNIX", None)
    if family is None:
        raise SettingError("this platform has no Unix sockets, so unix_path cannot be given; use tcp_port")
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
        raise SettingError(
            f"cannot listen on unix_path={path!r}: {error.strerror or error}{hint}. Expected a path of "
            "at most about 100 bytes in a directory that exists and is yours"
        ) from error
    return sock


def _bind_unix(sock: socket.socket, path: str) -> None:
    sock.bind(path)
    os.chmod(path, 0o600)  # nobody can connect before `listen`


def _stale(family: int, path: str) -> bool:
    """Whether a path is a socket that nobody listens at, as a killed server leaves it."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def listen_tcp(host: str, port: int) -> socket.socket:
    """Listen on a TCP port.

    Raises:
        SettingError: It is in use, or the address is not of this machine.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(target)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise SettingError(
            f"cannot listen on tcp_port={port} of {host}: {error.strerror or error}. Is the port in use, or "
            "the address not of this machine? tcp_port=0 takes any free one"
        ) from error
    return sock
