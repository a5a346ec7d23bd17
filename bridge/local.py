"""How a client finds the Unix socket of a server on the same machine, given the server's gRPC port.

A server that listens on a Unix socket leaves a note for it in a folder that only its user can read or write: the path
and the server's id, under the port's number and the network namespace (in another container the same port is another
server's). A client takes an offer only if the socket can be connected to at once, and the server there must have that
id. A note that a killed server left is seen by its socket, at which nobody listens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import stat
import tempfile

from bridge.address import Address

__all__ = ["Offer", "find", "publish"]


@dataclasses.dataclass(frozen=True)
class Offer:
    """A Unix socket that stands for a gRPC port of this machine."""

    note: str
    """The file that says so."""
    path: str
    """The socket's path."""
    server_id: str
    """The server's id."""

    def applied(self, address: Address) -> Address:
        """Return the same address over the Unix socket; its URL stays as it was given."""
        return dataclasses.replace(address, scheme="unix", host="", port=0, path=self.path)

    def withdraw(self) -> None:
        """Take the note away."""
        with contextlib.suppress(OSError, ValueError):
            if _read(self.note) == self:
                os.unlink(self.note)


def publish(port: int, path: str, server_id: str) -> Offer | None:
    """Leave a note for clients; None where there is no safe place for it."""
    folder = _folder(make=True)
    if folder is None:
        return None
    offer = Offer(os.path.join(folder, _name(port)), path, server_id)
    draft = f"{offer.note}.{server_id}"
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump({"path": path, "server_id": server_id}, file)
        os.replace(draft, offer.note)
    except OSError:
        return None  # it is only a hint: gRPC works without it
    return offer


def find(host: str, port: int) -> Offer | None:
    """Return what a server at this port of this machine offers; None: nothing, or it is on another machine."""
    if host not in ("127.0.0.1", "localhost", "::1") and host != socket.gethostname():
        return None
    folder = _folder(make=False)
    if folder is None:
        return None
    try:
        offer = _read(os.path.join(folder, _name(port)))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(offer.path)
    except (OSError, ValueError):
        return None
    return offer


def _read(note: str) -> Offer:
    with open(note, encoding="utf-8") as file:
        fields = json.load(file)
    if not isinstance(fields, dict) or not all(isinstance(fields.get(key), str) for key in ("path", "server_id")):
        raise ValueError(f"{note} is no note of a server")
    return Offer(note, fields["path"], fields["server_id"])


def _name(port: int) -> str:
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        namespace = 0
    return f"{port}-{namespace}"


def _folder(*, make: bool) -> str | None:
    """The folder for notes, if it is this user's alone; anybody may make folders beside it."""
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "getuid"):
        return None
    user = os.getuid()
    folder = os.path.join(tempfile.gettempdir(), f"gymnasium-bridge-{user}")
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        info = os.lstat(folder)
    except OSError:
        return None
    private = stat.S_ISDIR(info.st_mode) and info.st_uid == user and not info.st_mode & 0o077
    return folder if private else None
