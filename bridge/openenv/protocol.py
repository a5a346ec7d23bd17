"""HTTP/1.1 of a server that speaks OpenEnv too: `/ws` with its sessions, and the requests beside it.

A request over HTTP is a session of one message, as in OpenEnv: its world is made for it, and goes with it.
"""

from __future__ import annotations

import http
import re
from typing import Any

from websockets.exceptions import InvalidHeader
from websockets.frames import CloseCode, Opcode
from websockets.headers import parse_authorization_basic
from websockets.http11 import Request
from websockets.server import ServerProtocol

from bridge.errors import Code, RequestError
from bridge.openenv.json_values import to_bytes
from bridge.openenv.session import OpenEnvSession
from bridge.server.auth import Gate
from bridge.server.calls import Call
from bridge.server.web_protocol import WebProtocol, field_of
from bridge.server.web_site import HttpAnswer
from bridge.transport.websocket import LOGGER, MessageJoiner
from bridge.version import __version__

__all__ = ["OpenEnvProtocol"]

_ERRORS = {
    Code.OK: ("", 200),
    Code.INVALID_ARGUMENT: ("VALIDATION_ERROR", 422),
    Code.RESOURCE_EXHAUSTED: ("CAPACITY_REACHED", 503),
    Code.UNIMPLEMENTED: ("UNKNOWN_TYPE", 500),
    Code.DATA_LOSS: ("INVALID_JSON", 400),
    Code.UNAUTHENTICATED: ("EXECUTION_ERROR", 401),
    Code.PERMISSION_DENIED: ("EXECUTION_ERROR", 403),
    Code.UNAVAILABLE: ("EXECUTION_ERROR", 503),
}
"""OpenEnv's name of an error of each gRPC code, and its status over HTTP; any other is of its own kind and 500."""
_SESSION = "session"
_NO_TOOLS = {"code": -32601, "message": "this environment has no tools; its actions go to /ws"}
# By method and path: the session over WebSocket, the type of the message that stands for a request, or what is said
# without a world, but for /metadata.
_ROUTES: dict[str, str | dict[str, Any]] = {
    "GET /ws": _SESSION,
    "GET /schema": "schema",
    "GET /state": "state",
    "POST /reset": "reset",
    "POST /step": "first step",
    "GET /health": {"status": "healthy"},
    "GET /metadata": {},
    "POST /mcp": {"jsonrpc": "2.0", "id": None, "error": _NO_TOOLS},
    "GET /openapi.json": {
        "openapi": "3.1.0",
        "info": {"title": "OpenEnv Environment HTTP API", "version": "1.0.0"},
        "paths": {"/schema": {"get": {}}, "/state": {"get": {}}, "/reset": {"post": {}}, "/step": {"post": {}}},
    },
}
_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*([0-9]{1,18})(?=[ \t]*\r\n)")


class OpenEnvProtocol(WebProtocol):
    """One connection's HTTP/1.1, as `WebProtocol`, with the paths of OpenEnv.

    The token comes as Bearer, or as the password of a URL `ws://user:TOKEN@HOST`, which OpenEnv's clients can send.
    """

    _route: str | dict[str, Any] | None = None
    """The entry of `_ROUTES` that the path matches; None: no entry."""
    _request: Request | None = None
    """The request, where it is one of OpenEnv's over HTTP."""
    _length = 0
    """The length of its body."""
    _body: bytes | None = b""
    """What has come of that; None: it was whole."""

    def _receive_head(self, head: bytes) -> None:
        method_and_path = b" ".join(re.split(rb"[? ]", head, maxsplit=2)[:2])
        self._route = _ROUTES.get(method_and_path.decode("latin-1"))
        if self._route == _SESSION:
            self._path, self._joiner = "/ws", MessageJoiner(Opcode.TEXT)
            self._websocket = ServerProtocol(max_size=self._limits.max_message_bytes, logger=LOGGER)
        elif self._route is not None and head.startswith(b"POST "):  # without its body it is like one for a file
            self._length = int(length[1]) if (length := _LENGTH.search(head)) else 0
            head = b"GET " + _LENGTH.sub(b"", head.removeprefix(b"POST "))
        super()._receive_head(head)

    def _serve_file(self, request: Request) -> None:
        if self._route is None:
            super()._serve_file(request)
            return
        self._request, host = request, request.headers["Host"]
        try:
            if self._length > self._limits.max_message_bytes:
                text = f"expected a body of at most max_message_bytes={self._limits.max_message_bytes}"
                raise RequestError(Code.DATA_LOSS, text)
            if isinstance(self._route, str):
                self._call = self._open_call(request, host)
                self._receive_frames(self._call, b"")
                return
            self._site.check_origin(field_of(request, "Origin"), host)
        except RequestError as error:
            self._say_goodbye(error.code, error.message)
            return
        options: Any = self._site.openenv
        text = f"the Gymnasium environment {options.name}, served by Gymnasium Bridge"
        described = {"name": options.name, "description": text, "version": __version__}
        self._send(self._write("", self._route or described))

    def _receive_frames(self, call: Call, data: bytes) -> None:
        """Take frames, or of a request over HTTP the body, which is one message."""
        if self._request is None:
            super()._receive_frames(call, data)
        elif self._body is not None:
            self._body += data
            self._admit(len(self._body))
            if len(self._body) >= self._length:
                message = b'{"type": "%s", "data": %s}' % (str(self._route).encode(), self._body or b"{}")
                self._body = None
                self._release()
                self._handler.calls.receive(call, message)
                self._handler.calls.receive(call, None)

    def _open_call(self, request: Request, host: str) -> Call:
        if self._route is None:
            return super()._open_call(request, host)
        self._site.check_origin(field_of(request, "Origin"), host)
        if not self._gate.check(_token_in(field_of(request, "Authorization")), self._connection.peer):
            text = "this token is for watching, and OpenEnv has no way to watch; ask for the other token"
            raise RequestError(Code.UNAUTHENTICATED, text)
        call = self._handler.open(self._connection, __version__, may_act=True)
        options: Any = self._site.openenv
        session = OpenEnvSession(call.session.handle, pictures=options.pictures)

        async def handle(data: bytes | bytearray) -> list[bytes | memoryview]:
            return [self._write(*await session.answer(data))]

        call.handle, call.stream = handle, self
        call.refuse = lambda error: self._write("error", error.message, error.code)
        return call

    # Data to send

    def _write(self, kind: str, data: Any, code: Code = Code.OK) -> bytes:
        """Return an answer as a message, or as the response to a request over HTTP.

        Args:
            kind: The message's type; empty: the session ends without one.
            data: Its data; with another code than OK, the text of an error.
            code: The error's.
        """
        name, status = _ERRORS.get(code, ("EXECUTION_ERROR", 500))
        if self._request is not None:
            body = to_bytes({"detail": data} if code else data)
            return HttpAnswer(http.HTTPStatus(status), body, "application/json").serialize()
        return to_bytes({"type": kind, "data": {"message": data, "code": name} if code else data}) if kind else b""

    def _send(self, data: bytes | memoryview) -> None:
        if self._request is not None:
            self._outgoing.append(data)
            self.finished = True
        elif self._route is None:
            super()._send(data)
        elif data:
            self._websocket.send_text(data)
        elif self._call is not None:  # it was asked to close: the connection ends with its call
            self._handler.calls.receive(self._call, None)

    def _say_goodbye(self, code: Code | CloseCode, reason: str) -> None:
        if self._request is None:
            super()._say_goodbye(code, reason)
        elif not self.finished:
            self._send(self._write("error", reason, Code(code)))


def _token_in(header: str | None) -> str | None:
    """Return the token of an `Authorization` header, which Basic holds as the password; None: it holds none."""
    try:
        return parse_authorization_basic(header or "")[1] or None
    except (InvalidHeader, UnicodeDecodeError):
        return Gate.bearer(header)
