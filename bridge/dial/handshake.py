"""The words by which a server that dials out asks for the roles to be swapped, and how they are read."""

from __future__ import annotations

import http
import http.client
import io
import re

from bridge.errors import Code, RequestError
from bridge.transport.service import HELLO
from bridge.version import __version__

__all__ = ["ACCEPTED", "MAX_HEAD", "NAME", "answer", "end_of_head", "read_request", "refusal", "request"]

PATH = "/gymnasium-bridge/dial"
"""The path that is asked for."""
PROTOCOL = "dm_env_rpc.v1"
"""The protocol after the upgrade, in the swapped roles: gRPC over HTTP/2."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
"""The names of servers that dial out."""
MAX_HEAD = 16384
"""The most bytes of a request or an answer."""
ACCEPTED = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n\r\n".encode()
"""The answer that lets a server in."""
_END = b"\r\n\r\n"


def request(host: str, name: str, token: str | None) -> bytes:
    """Return what a server asks a trainer.

    Args:
        host: The trainer's, with its port.
        name: The server's own, the same each time that it dials.
        token: What the trainer expects; None: nothing.
    """
    lines = [f"GET {PATH} HTTP/1.1", f"Host: {host}", "Connection: Upgrade", f"Upgrade: {PROTOCOL}", f"Name: {name}"]
    lines += [f"{HELLO}: {__version__}", *([] if token is None else [f"Authorization: Bearer {token}"])]
    return "\r\n".join([*lines, "", ""]).encode()


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
    if not NAME.fullmatch(name):
        raise RequestError(Code.INVALID_ARGUMENT, f"expected a name of letters, digits, dots and dashes, got {name!r}")
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


def answer(head: bytes, rest: bytes) -> str:
    """Return why a trainer refused; "": it did not."""
    line = head.partition(b"\r\n")[0].decode("latin-1")
    status = line.split(" ")[1:2]
    if status == ["101"]:
        return ""
    text = rest.decode(errors="replace").strip().partition("\n")[0]
    return f"it answered {line[:80]!r}{f': {text[:300]}' if text else ''}"
