"""HTTP/1.1 of a server that speaks OpenEnv too: `/ws` with its sessions, and the requests beside it.

A request over HTTP is a session of one message, as in OpenEnv: its world is made for it, and goes with it.
"""

from __future__ import annotations

import base64
import binascii
import http
import http.client
import io
import json
from typing import Any

from websockets.frames import Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from bridge.errors import Code, RequestError
from bridge.openenv.session import ERRORS, FAILED, OpenEnvSession, error_message
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.server.auth import Gate
from bridge.server.calls import Call
from bridge.server.web_protocol import WebProtocol
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
_STATUSES = dict([FAILED, *ERRORS.values()])


class OpenEnvProtocol(WebProtocol):
    """One connection's HTTP/1.1, as `WebProtocol`, with the paths of OpenEnv.

    The token comes as Bearer, or as the password of a URL `ws://user:TOKEN@HOST`, which OpenEnv's clients can send.
    """

    _route: str | dict[str, Any] | None = None
    """What is asked for, of `_ROUTES`; None: nothing of it."""

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
        line, _, fields = head.partition(b"\r\n")
        method, _, target = line.decode("latin-1").rpartition(" ")[0].partition(" ")
        self._route = _ROUTES.get(f"{method} {target.partition('?')[0]}")
        if self._route == _SESSION:
            self._joiner = MessageJoiner(Opcode.TEXT)
            self._websocket = ServerProtocol(max_size=self._limits.max_message_bytes, logger=LOGGER)
        if not self._over_http:
            super()._receive_head(head)
            return
        try:
            self._fields, self._body = http.client.parse_headers(io.BytesIO(fields)), bytearray()
        except http.client.HTTPException as error:  # more than a hundred fields
            self._refuse(http.HTTPStatus.BAD_REQUEST, str(error))
            return
        host, length = self._fields.get("Host"), self._fields.get("Content-Length", "0")
        if (refusal := self._site.check_host(host)) is not None:
            self._send_file(refusal)
            return
        try:
            self._site.check_origin(self._fields.get("Origin"), host or "")
        except RequestError as error:
            self._refuse(http.HTTPStatus.FORBIDDEN, error.message)
            return
        most = self._limits.max_message_bytes
        if not length.isdecimal() or int(length) > most or "Transfer-Encoding" in self._fields:
            text = f"expected a body with a Content-Length of at most max_message_bytes={most}, got {length:.20}"
            self._refuse(http.HTTPStatus.BAD_REQUEST, text)
            return
        self._length = int(length) if method == "POST" else 0
        self._receive_rest(b"")

    def _receive_rest(self, data: bytes) -> None:
        if not self._over_http:
            super()._receive_rest(data)
        elif not self.finished and self._call is None:
            self._body += data
            self._admit(len(self._body))
            if len(self._body) >= self._length:
                self._release()
                self._serve_request()

    def _serve_request(self) -> None:
        if isinstance(self._route, dict):
            name = self._options.name
            text = f"the Gymnasium environment {name}, served by Gymnasium Bridge"
            self._respond(self._route or {"name": name, "description": text, "version": __version__})
            return
        try:
            call = self._call = self._open_session(self._fields.get("Authorization"))
        except RequestError as error:
            asks = error.code in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
            self._refuse(http.HTTPStatus.UNAUTHORIZED if asks else http.HTTPStatus.SERVICE_UNAVAILABLE, error.message)
            return
        message = b'{"type": "%s", "data": %s}' % (str(self._route).encode(), bytes(self._body) or b"{}")
        self._handler.calls.receive(call, message)
        self._handler.calls.receive(call, None)

    def _refuse(self, status: http.HTTPStatus, text: str) -> None:
        self._respond({"detail": text}, status)

    def _respond(self, body: Any, status: http.HTTPStatus = http.HTTPStatus.OK) -> None:
        self._send_file(HttpAnswer(status, json.dumps(body).encode(), "application/json"))

    def _is_websocket(self, request: Request) -> bool:
        return self._route == _SESSION or super()._is_websocket(request)

    def _open_call(self, request: Request, host: str) -> Call:
        if self._route != _SESSION:
            return super()._open_call(request, host)
        self._site.check_origin(request.headers.get("Origin"), host)
        return self._open_session(request.headers.get("Authorization"))

    @property
    def _options(self) -> OpenEnvOptions:
        assert self._site.openenv is not None  # else there is another protocol
        return self._site.openenv

    def _open_session(self, authorization: str | None) -> Call:
        """Admit a client. Raises RequestError."""
        if not self._gate.check(_token_in(authorization), self._connection.peer):
            text = "this token is for watching, and OpenEnv has no way to watch; ask for the other token"
            raise RequestError(Code.PERMISSION_DENIED, text)
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
                self._refuse(_STATUSES[found["code"]], found["message"])
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
            text = "the server gave no answer" if error is None else error.message
            self._refuse(http.HTTPStatus.SERVICE_UNAVAILABLE, text)


def _token_in(header: str | None) -> str | None:
    """Return the token of an `Authorization` header, which Basic holds as the password; None: it holds none."""
    scheme, _, text = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return Gate.bearer(header)
    try:
        return base64.b64decode(text.strip(), validate=True).decode().partition(":")[2] or None
    except (binascii.Error, UnicodeDecodeError):
        return None
