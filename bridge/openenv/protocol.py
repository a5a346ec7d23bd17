"""HTTP/1.1 of a server that speaks OpenEnv too: `/ws` with its sessions, and the requests beside it.

A request over HTTP is a session of one message, as in OpenEnv: its world is made for it, and goes with it.
"""

from __future__ import annotations

import base64
import binascii
import http
import json
import re
from typing import Any

from websockets.frames import Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from bridge.errors import Code, RequestError
from bridge.openenv.session import ERRORS, FAILED, OpenEnvSession, error_message
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.server.auth import Gate
from bridge.server.calls import Call
from bridge.server.web_protocol import WebProtocol, field_of
from bridge.server.web_site import HttpAnswer, OpenEnvOptions
from bridge.transport.websocket import LOGGER, MessageJoiner
from bridge.version import __version__

__all__ = ["OpenEnvProtocol"]

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
}
_ROUTES["GET /openapi.json"] = {
    "openapi": "3.1.0",
    "info": {"title": "OpenEnv Environment HTTP API", "version": "1.0.0"},
    "paths": {
        path: {method.lower(): {"responses": {}}}
        for (method, path), route in ((name.split(), route) for name, route in _ROUTES.items())
        if isinstance(route, str) and route != _SESSION
    },
}
_STATUSES = dict([*ERRORS.values(), FAILED])
_LINE = re.compile(rb"[A-Z]+ [^? ]*")
_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*([^\r]*)")


class OpenEnvProtocol(WebProtocol):
    """One connection's HTTP/1.1, as `WebProtocol`, with the paths of OpenEnv.

    The token comes as Bearer, or as the password of a URL `ws://user:TOKEN@HOST`, which OpenEnv's clients can send.
    """

    _route: str | dict[str, Any] | None = None
    """The entry of `_ROUTES` that the path matches; None: no entry."""
    _length: re.Match[bytes] | None = None
    """The field that says how long the body is; None: there is none."""
    _request: Request | None = None
    """A request over HTTP whose head has come."""
    _missing, _body = 0, b""
    """The length of its body, and what has come of that."""

    @property
    def _over_http(self) -> bool:
        """True if it is a request that gets one response."""
        return self._route is not None and self._route != _SESSION

    def receive_data(self, data: bytes) -> None:
        """Take bytes, as `WebProtocol.receive_data`; those of a body go to the call once it is whole."""
        if self._over_http:
            self._receive_rest(data)
        else:
            super().receive_data(data)

    def _receive_head(self, head: bytes) -> None:
        line = _LINE.match(head)
        self._route = None if line is None else _ROUTES.get(line[0].decode())
        if self._route == _SESSION:
            self._joiner = MessageJoiner(Opcode.TEXT)
            self._websocket = ServerProtocol(max_size=self._limits.max_message_bytes, logger=LOGGER)
        if self._over_http and head.startswith(b"POST "):  # without its body it is like a request for a file
            self._length = _LENGTH.search(head)
            head = b"GET " + _LENGTH.sub(b"", head.removeprefix(b"POST "))
        super()._receive_head(head)

    def _serve_file(self, request: Request) -> None:
        if not self._over_http:
            super()._serve_file(request)
            return
        self._request = request
        length, most = b"0" if self._length is None else self._length[1], self._limits.max_message_bytes
        try:
            self._site.check_origin(field_of(request, "Origin"), request.headers["Host"])
            if not length.isdigit() or int(length) > most:
                text = f"expected a body with a Content-Length of at most max_message_bytes={most}, got {length!r:.20}"
                raise RequestError(Code.DATA_LOSS, text)
        except RequestError as error:
            self._refuse(error)
            return
        self._missing = int(length)
        self._receive_rest(b"")

    def _receive_rest(self, data: bytes) -> None:
        if not self._over_http:
            super()._receive_rest(data)
        elif self._request is not None and not self.finished and self._call is None:
            self._body += data
            self._admit(len(self._body))
            if len(self._body) >= self._missing:
                self._release()
                self._serve_request(self._request)

    def _serve_request(self, request: Request) -> None:
        if isinstance(self._route, dict):
            name = self._options.name
            text = f"the Gymnasium environment {name}, served by Gymnasium Bridge"
            self._respond(self._route or {"name": name, "description": text, "version": __version__})
            return
        try:
            call = self._call = self._open_session(field_of(request, "Authorization"))
        except RequestError as error:
            self._refuse(error)
            return
        message = b'{"type": "%s", "data": %s}' % (str(self._route).encode(), self._body or b"{}")
        self._handler.calls.receive(call, message)
        self._handler.calls.receive(call, None)

    def _refuse(self, error: RequestError) -> None:
        self._respond({"detail": error.message}, ERRORS.get(error.code, FAILED)[1])

    def _respond(self, body: Any, status: http.HTTPStatus = http.HTTPStatus.OK) -> None:
        self._send_file(HttpAnswer(status, json.dumps(body).encode(), "application/json"))

    def _is_websocket(self, request: Request) -> bool:
        return self._route == _SESSION or super()._is_websocket(request)

    def _open_call(self, request: Request, host: str) -> Call:
        if self._route != _SESSION:
            return super()._open_call(request, host)
        self._site.check_origin(field_of(request, "Origin"), host)
        return self._open_session(field_of(request, "Authorization"))

    @property
    def _options(self) -> OpenEnvOptions:
        assert self._site.openenv is not None  # else there is another protocol
        return self._site.openenv

    def _open_session(self, authorization: str | None) -> Call:
        """Admit a client. Raises RequestError."""
        if not self._gate.check(_token_in(authorization), self._connection.peer):
            text = "this token is for watching, and OpenEnv has no way to watch; ask for the other token"
            raise RequestError(Code.UNAUTHENTICATED, text)
        call = self._handler.open(self._connection, __version__, may_act=True)
        call.handle = OpenEnvSession(call.session.handle, pictures=self._options.pictures).handle
        call.stream = self
        return call

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send an answer: as a text message, or as the response to a request over HTTP."""
        if self._route is None:
            return super().answer(call, parts, size)
        data = b"".join(parts)
        if data[:1] not in (b"", b"{"):  # the server refused the message before the session saw it
            refusal = pb.EnvironmentResponse.FromString(data).error
            data = error_message(RequestError(Code(refusal.code), refusal.message))
        if self._over_http:
            message = json.loads(data)
            found = message.get("data", message)
            if message.get("type") == "error":
                self._respond({"detail": found["message"]}, _STATUSES[found["code"]])
            else:
                self._respond(found)
        elif not data:  # it was asked to close: the connection ends with its call
            self._handler.calls.receive(call, None)
        elif self._reply is None and not self.finished:
            self._websocket.send_text(data)
            self._outgoing.extend(self._websocket.data_to_send())
        return True

    def finish(self, call: Call, error: RequestError | None) -> None:
        """Send the last frame, or the response that a request over HTTP has not got."""
        if not self._over_http:
            super().finish(call, error)
        elif not self.finished:
            self._refuse(error or RequestError(Code.UNAVAILABLE, "the server gave no answer"))


def _token_in(header: str | None) -> str | None:
    """Return the token of an `Authorization` header, which Basic holds as the password; None: it holds none."""
    scheme, _, text = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return Gate.bearer(header)
    try:
        return base64.b64decode(text.strip(), validate=True).decode().partition(":")[2] or None
    except (binascii.Error, UnicodeDecodeError):
        return None
