"""The handshake in which a server that dials out asks the trainer to swap roles: the messages of both ends.

The server requests an HTTP/1.1 upgrade, to gRPC or to a WebSocket. The latter needs the package `websockets`.
"""

from __future__ import annotations

import dataclasses
import http
import http.client
import io
import re
from email.message import Message
from urllib.parse import parse_qs

from bridge.core.extras import install_command, is_installed
from bridge.core.server.auth import Gate
from bridge.core.server.http11 import HttpAnswer
from bridge.core.transport.service import HELLO
from bridge.errors import Code, RequestError
from bridge.version import __version__

__all__ = ["PATH", "PROTOCOL", "Asked", "pack_head", "problem_of_name", "read_head", "read_request", "refusal"]

PATH = "/gymnasium-bridge/dial"
"""The path of the request."""
PROTOCOL = "dm_env_rpc.v1"
"""The protocol after the upgrade, with swapped roles: gRPC over HTTP/2."""
_MAX_HEAD = 16384
_END = b"\r\n\r\n"
_LINE = re.compile(rf"GET {PATH}(?:\?(\S*))? HTTP/1\.1")
_KEY = re.compile(r"[A-Za-z0-9+/]{22}==")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")


def problem_of_name(name: str) -> str:
    """Return why a text is not a valid name of a server; "" if it is valid."""
    return "" if _NAME.fullmatch(name) else f"expected a name of letters, digits, dots and dashes, got {name!r}"


def pack_head(line: str, fields: dict[str, str]) -> bytes:
    """Return the head of a request or a response."""
    return "\r\n".join([line, *(f"{name}: {value}" for name, value in fields.items()), "", ""]).encode()


def read_head(data: bytes) -> tuple[str, Message, bytes] | None:
    """Read the head of a request or a response.

    Returns:
        The first line, the header fields (empty if there are more than a hundred) and the bytes that follow; None if
        the head is incomplete.

    Raises:
        RequestError: The head is too long.
    """
    head, end, rest = data.partition(_END)
    if not end:
        if len(data) > _MAX_HEAD:
            raise RequestError(Code.INVALID_ARGUMENT, f"the header fields have no end within {_MAX_HEAD} bytes")
        return None
    line, _, lines = head.partition(b"\r\n")
    try:
        fields: Message = http.client.parse_headers(io.BytesIO(lines + _END))
    except http.client.HTTPException:
        # With no fields, the request is refused because required ones are missing.
        fields = Message()
    # Latin-1 decodes any bytes. The line is compared, and shown in an error if it is wrong.
    return line.decode("latin-1"), fields, rest


@dataclasses.dataclass(frozen=True)
class Asked:
    """A server's request for admission, as the trainer reads it."""

    name: str
    """The name of the server."""
    token: str | None
    """The token in the request, if any."""
    origin: str | None
    """The origin of the web page that asks; None: the request is not from a browser."""
    version: str | None
    """The version of this package that sent the request; None: another package did."""
    key: str | None
    """The key of a WebSocket handshake, from which the response is computed. None: the request is for gRPC."""

    @property
    def opening(self) -> bytes:
        """The response that admits the server."""
        fields = {"Connection": "Upgrade", "Upgrade": PROTOCOL}
        if self.key is not None:
            from websockets.utils import accept_key

            fields |= {"Upgrade": "websocket", "Sec-WebSocket-Accept": accept_key(self.key)}
            fields |= {"Sec-WebSocket-Protocol": PROTOCOL, HELLO: __version__}
        return pack_head("HTTP/1.1 101 Switching Protocols", fields)


def read_request(data: bytes) -> Asked | None:
    """Read a server's request for admission; return None if it is incomplete.

    A web page cannot set header fields: its name is in the query, and its token is a subprotocol.

    Raises:
        RequestError: The request asks for something else.
    """
    head = read_head(data)
    if head is None:
        return None
    line, fields, _ = head  # a server sends nothing after its request until the trainer has answered
    found, upgrade = _LINE.fullmatch(line), fields.get("Upgrade", "").lower()
    if found is None or upgrade not in (PROTOCOL, "websocket"):
        text = "this is a trainer that waits for servers: expected `gymnasium-bridge serve --dial`, got another request"
        raise RequestError(Code.NOT_FOUND, text)
    # A program sends header fields. A script in a web page can choose only its URL and its subprotocols.
    name = fields.get("Name") or parse_qs(found[1] or "").get("name", [""])[0]
    token, key = Gate.bearer(fields.get("Authorization")), None
    if upgrade == "websocket":
        if not is_installed("websockets"):
            text = f"WebSockets need the package websockets on the trainer's machine: {install_command('web')}"
            raise RequestError(Code.UNIMPLEMENTED, text)
        from bridge.core.transport.websocket import shown_token_in

        key, version = fields.get("Sec-WebSocket-Key", ""), fields.get("Sec-WebSocket-Version")
        offered = re.split(r"\s*,\s*", ", ".join(fields.get_all("Sec-WebSocket-Protocol", [])))
        if not _KEY.fullmatch(key) or version != "13" or PROTOCOL not in offered:
            raise RequestError(Code.INVALID_ARGUMENT, f"it speaks no WebSocket of {PROTOCOL} as it should")
        token = token or shown_token_in(offered)
    return Asked(name, token, fields.get("Origin"), fields.get(HELLO), key)


def refusal(error: RequestError, asked: Asked | None) -> bytes:
    """Return the response to a server that is not admitted.

    Args:
        error: The reason.
        asked: The server's request; None: it could not be read.
    """
    if asked is not None and asked.key is not None:  # accept, then close: scripts see no HTTP status
        from bridge.core.transport.websocket import close_frame

        return asked.opening + close_frame(error.code, error.message)
    status = {Code.UNAUTHENTICATED: 401, Code.NOT_FOUND: 404}.get(error.code, 400)
    return HttpAnswer(http.HTTPStatus(status), f"{error.message}\n".encode()).serialize()
