"""The words by which a server that dials out asks for the roles to be swapped, and how they are read."""

from __future__ import annotations

import http
import http.client
import io
import re

from bridge.errors import Code, RequestError
from bridge.transport.address import Address
from bridge.transport.service import HELLO
from bridge.version import __version__

__all__ = [
    "ACCEPTED",
    "MAX_HEAD",
    "PATH",
    "Asking",
    "check_name",
    "end_of_head",
    "is_name",
    "read_request",
    "refusal",
]

PATH = "/gymnasium-bridge/dial"
"""The path that is asked for."""
PROTOCOL = "dm_env_rpc.v1"
"""The protocol after the upgrade, in the swapped roles: gRPC over HTTP/2."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
MAX_HEAD = 16384
"""The most bytes of a request or an answer."""
ACCEPTED = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n\r\n".encode()
"""The answer that lets a server in."""
_END = b"\r\n\r\n"


def is_name(name: str) -> bool:
    """Return whether a server that dials out may have this name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Raise RequestError where a server's name is none."""
    if not is_name(name):
        raise RequestError(Code.INVALID_ARGUMENT, f"expected a name of letters, digits, dots and dashes, got {name!r}")


class Asking:
    """What a server asks a trainer by gRPC, and what the answer means.

    Args:
        address: The trainer's.
        name: The server's own, the same each time that it dials.
        token: What the trainer expects; None: nothing.
    """

    version: str | None = None
    """Of a WebSocket: the version of this package at the trainer; empty: of another package. None: it is gRPC."""

    def __init__(self, address: Address, name: str, token: str | None) -> None:
        lines = [f"GET {PATH} HTTP/1.1", f"Host: {address.target}", "Connection: Upgrade", f"Upgrade: {PROTOCOL}"]
        lines += [f"Name: {name}", f"{HELLO}: {__version__}"]
        lines += [] if token is None else [f"Authorization: Bearer {token}"]
        self.request = "\r\n".join([*lines, "", ""]).encode()
        """The bytes to send."""

    def refusal(self, head: bytes, rest: bytes) -> str:
        """Return why a trainer refused; "": it did not.

        Args:
            head: Its answer.
            rest: What has come behind that.
        """
        line = head.partition(b"\r\n")[0].decode("latin-1")
        if line.split(" ")[1:2] == ["101"]:
            return ""
        text = rest.decode(errors="replace").strip().partition("\n")[0]
        return f"it answered {line[:80]!r}{f': {text[:300]}' if text else ''}"


def end_of_head(data: bytes | bytearray) -> int:
    """Return how many bytes the header fields have, their end included; 0: they have not all come."""
    end = data.find(_END)
    return 0 if end < 0 else end + len(_END)


def read_request(head: bytes) -> tuple[str, str | None]:
    """Return the name and the `Authorization` of a server that asks to be let in.

    Raises:
        RequestError: It asks for something else.
    """
    line, _, rest = head.partition(b"\r\n")
    text = "this is a trainer that waits for servers: expected `bridge serve ENV --dial`, got another request"
    try:
        fields = http.client.parse_headers(io.BytesIO(rest))
    except http.client.HTTPException as error:  # more than a hundred fields
        raise RequestError(Code.NOT_FOUND, text) from error
    name = fields.get("Name", "")
    if line != f"GET {PATH} HTTP/1.1".encode() or fields.get("Upgrade", "") != PROTOCOL:
        raise RequestError(Code.NOT_FOUND, text)
    check_name(name)
    return name, fields.get("Authorization")


def refusal(error: RequestError) -> bytes:
    """Return the answer that lets a server not in."""
    status = {
        Code.UNAUTHENTICATED: http.HTTPStatus.UNAUTHORIZED,
        Code.NOT_FOUND: http.HTTPStatus.NOT_FOUND,
    }.get(error.code, http.HTTPStatus.BAD_REQUEST)
    body = f"{error.message}\n".encode()
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Length: {len(body)}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + body
