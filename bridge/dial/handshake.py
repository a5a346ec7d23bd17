"""The handshake by which a server that dials out asks the trainer to swap roles: its requests and answers.

It asks for an upgrade of HTTP/1.1: to gRPC, or to a WebSocket, of which the package `websockets` is needed.
"""

from __future__ import annotations

import base64
import dataclasses
import http
import http.client
import io
import os
import re
import socket
from email.message import Message
from types import ModuleType
from urllib.parse import parse_qs

from bridge.errors import Code, RequestError
from bridge.extras import install_command
from bridge.server.auth import Gate
from bridge.transport.address import Address
from bridge.transport.service import HELLO
from bridge.transport.tls import Tls
from bridge.version import __version__

__all__ = ["PATH", "Asked", "Asking", "HandshakeConnection", "check_name", "pack_head", "read_request", "refusal"]

PATH = "/gymnasium-bridge/dial"
"""The path that is asked for."""
PROTOCOL = "dm_env_rpc.v1"
"""The protocol after the upgrade, in the swapped roles: gRPC over HTTP/2."""
_LINE = re.compile(rf"GET {PATH}(?:\?(\S*))? HTTP/1\.1")
_KEY = re.compile(r"[A-Za-z0-9+/]{22}==")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
_MAX_HEAD = 16384
_END = b"\r\n\r\n"


def check_name(name: str) -> None:
    """Raise RequestError where a server's name is none."""
    if _NAME.fullmatch(name) is None:
        raise RequestError(Code.INVALID_ARGUMENT, f"expected a name of letters, digits, dots and dashes, got {name!r}")


class HandshakeConnection:
    """A connection before the roles are swapped, at either end.

    Args:
        sock: Its socket.
        tls: TLS over it; None: there is none.
    """

    def __init__(self, sock: socket.socket, tls: Tls | None = None) -> None:
        self.sock, self.tls = sock, tls
        self.received = b""
        """The bytes that have come, without TLS."""

    def send(self, data: bytes = b"") -> None:
        """Send a few bytes, which the socket's buffer holds, after what TLS has to send."""
        self.sock.sendall(data if self.tls is None else self.tls.send([data]))

    def receive(self) -> bool:
        """Take what has come; return whether the connection goes on. Raises OSError as the socket does."""
        data = self.sock.recv(_MAX_HEAD)
        self.received += data if self.tls is None else self.tls.receive(data)
        if self.tls is not None and self.tls.has_output:
            self.send()
        return bool(data)

    def take_head(self) -> bytes:
        """Take the header fields of a request or an answer, their end included; b"": they have not all come.

        Raises:
            OSError: They have no end.
        """
        end = self.received.find(_END)
        if end >= 0:
            end += len(_END)
            head, self.received = self.received[:end], self.received[end:]
            return head
        if len(self.received) > _MAX_HEAD:
            raise OSError(f"its header fields have no end within {_MAX_HEAD} bytes")
        return b""


class Asking:
    """The handshake at the server that dials out: writes the request and reads the answer.

    Args:
        address: The trainer's.
        name: The server's own, the same each time that it dials.
        token: What the trainer expects; None: nothing.
    """

    def __init__(self, address: Address, name: str, token: str | None) -> None:
        fields = {"Host": address.target, "Connection": "Upgrade", "Upgrade": PROTOCOL, "Name": name}
        fields |= {HELLO: __version__, **({} if token is None else {"Authorization": f"Bearer {token}"})}
        self.version: str | None = None
        """Of a WebSocket: the version of this package at the trainer, empty for another package. None: it is gRPC."""
        self._accept: str | None = None
        if address.websocket:
            key = base64.b64encode(os.urandom(16)).decode()
            self._accept = _accept_key(key)
            fields |= {"Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key}
            fields["Sec-WebSocket-Protocol"] = PROTOCOL
        self.request = pack_head(f"GET {PATH} HTTP/1.1", fields)
        """The bytes to send."""

    def refusal(self, head: bytes, rest: bytes) -> str:
        """Return why a trainer refused; "": it did not.

        Args:
            head: Its answer.
            rest: What has come behind that.
        """
        line, fields = _read_head(head)
        if line.split(" ")[1:2] != ["101"]:
            text = rest.decode(errors="replace").strip().partition("\n")[0]
            return f"it answered {line[:80]!r}{f': {text[:300]}' if text else ''}"
        if self._accept is None:
            return ""
        if fields.get("Sec-WebSocket-Accept") != self._accept:
            return "it speaks no WebSocket as it should"
        self.version = fields.get(HELLO, "")
        close = _websocket().received_close(rest)
        return "" if close is None else f"it closed the WebSocket with {close.code}: {close.reason}"


@dataclasses.dataclass(frozen=True)
class Asked:
    """The request of a server that asks to be let in, as a trainer reads it."""

    name: str
    """The name of the server."""
    token: str | None
    """The token in the request, if any."""
    origin: str | None
    """The page that asks; None: it is no browser."""
    version: str | None
    """The version of this package that asks; None: another package does."""
    key: str | None
    """Of a WebSocket: what the answer is made from. None: it asks for gRPC."""

    @property
    def opening(self) -> bytes:
        """The answer that lets it in."""
        fields = {"Connection": "Upgrade", "Upgrade": PROTOCOL}
        if self.key is not None:
            fields |= {"Upgrade": "websocket", "Sec-WebSocket-Accept": _accept_key(self.key)}
            fields |= {"Sec-WebSocket-Protocol": PROTOCOL, HELLO: __version__}
        return pack_head("HTTP/1.1 101 Switching Protocols", fields)


def read_request(head: bytes) -> Asked:
    """Read the request of a server that asks to be let in.

    A web page can send no header fields of its own: its name is in the query, and its token is a subprotocol.

    Raises:
        RequestError: It asks for something else.
    """
    line, fields = _read_head(head)
    found, upgrade = _LINE.fullmatch(line), fields.get("Upgrade", "").lower()
    if found is None or upgrade not in (PROTOCOL, "websocket"):
        text = "this is a trainer that waits for servers: expected `bridge serve ENV --dial`, got another request"
        raise RequestError(Code.NOT_FOUND, text)
    name = fields.get("Name") or parse_qs(found[1] or "").get("name", [""])[0]
    token, key = Gate.bearer(fields.get("Authorization")), None
    if upgrade == "websocket":
        try:
            websocket = _websocket()
        except ImportError as error:
            text = f"WebSockets need the package websockets on the trainer's machine: {install_command('web')}"
            raise RequestError(Code.UNIMPLEMENTED, text) from error
        key, version = fields.get("Sec-WebSocket-Key", ""), fields.get("Sec-WebSocket-Version")
        offered = re.split(r"\s*,\s*", ", ".join(fields.get_all("Sec-WebSocket-Protocol", [])))
        if not _KEY.fullmatch(key) or version != "13" or PROTOCOL not in offered:
            raise RequestError(Code.INVALID_ARGUMENT, f"it speaks no WebSocket of {PROTOCOL} as it should")
        token = token or websocket.shown_token_in(offered)
    return Asked(name, token, fields.get("Origin"), fields.get(HELLO), key)


def refusal(error: RequestError, asked: Asked | None) -> bytes:
    """Return the answer that lets a server not in.

    Args:
        error: Why.
        asked: Its request; None: that is none.
    """
    if asked is not None and asked.key is not None:  # it is closed at once, for browsers show scripts no HTTP status
        closing: bytes = _websocket().close_frame(error.code, error.message)
        return asked.opening + closing
    status = {
        Code.UNAUTHENTICATED: http.HTTPStatus.UNAUTHORIZED,
        Code.NOT_FOUND: http.HTTPStatus.NOT_FOUND,
    }.get(error.code, http.HTTPStatus.BAD_REQUEST)
    body = f"{error.message}\n".encode()
    fields = {"Content-Length": str(len(body)), "Connection": "close"}
    return pack_head(f"HTTP/1.1 {status.value} {status.phrase}", fields) + body


def pack_head(line: str, fields: dict[str, str]) -> bytes:
    """Return the head of a request or an answer."""
    return "\r\n".join([line, *(f"{name}: {value}" for name, value in fields.items()), "", ""]).encode()


def _read_head(head: bytes) -> tuple[str, Message]:
    """Return the first line and the header fields; none of them where there are more than a hundred."""
    line, _, rest = head.partition(b"\r\n")
    try:
        return line.decode("latin-1"), http.client.parse_headers(io.BytesIO(rest))
    except http.client.HTTPException:
        return line.decode("latin-1"), Message()


def _websocket() -> ModuleType:
    """Return the module of the WebSocket protocol; raises ImportError if the package that it needs is not installed."""
    from bridge.transport import websocket

    return websocket


def _accept_key(key: str) -> str:
    """Return the value of `Sec-WebSocket-Accept` for a key; raises ImportError as `_websocket`."""
    from websockets.utils import accept_key

    return accept_key(key)
