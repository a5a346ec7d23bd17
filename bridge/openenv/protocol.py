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
from bridge.openenv.session import OpenEnvSession, error_message
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.server.auth import Gate
from bridge.server.calls import Call
from bridge.server.web_protocol import WebProtocol
from bridge.server.web_site import HttpAnswer
from bridge.transport.websocket import LOGGER, MessageJoiner
from bridge.version import __version__

__all__ = ["OpenEnvProtocol"]

# By method and path, the type of the message that stands for a request.
_MESSAGES = {"GET /schema": "schema", "GET /state": "state", "POST /reset": "reset", "POST /step": "first step"}
_STATUSES = {
    "INVALID_JSON": http.HTTPStatus.BAD_REQUEST,
    "VALIDATION_ERROR": http.HTTPStatus.UNPROCESSABLE_ENTITY,
    "CAPACITY_REACHED": http.HTTPStatus.SERVICE_UNAVAILABLE,
}
_NO_TOOLS = {"code": -32601, "message": "this environment has no tools; its actions go to /ws"}
# What is said without a world, but for /metadata.
_DOCUMENTS: dict[str, dict[str, Any]] = {
    "GET /health": {"status": "healthy"},
    "GET /metadata": {},
    "POST /mcp": {"jsonrpc": "2.0", "id": None, "error": _NO_TOOLS},
    "GET /openapi.json": {
        "openapi": "3.1.0",
        "info": {"title": "OpenEnv Environment HTTP API", "version": "1.0.0"},
        "paths": {name.split()[1]: {name.split()[0].lower(): {"responses": {}}} for name in _MESSAGES},
    },
}


class OpenEnvProtocol(WebProtocol):
    """One connection's HTTP/1.1, as `WebProtocol`, with the paths of OpenEnv.

    The token comes as Bearer, or as the password of a URL `ws://user:TOKEN@HOST`, which OpenEnv's clients can send.
    """

    _is_session = False
    """True if the connection is a session of OpenEnv, over WebSocket."""
    _request: str | None = None
    """The method and the path of a request over HTTP; None: this is none."""

    def receive_data(self, data: bytes) -> None:
        """Take bytes, as `WebProtocol.receive_data`; those of a body go to the call once it is whole."""
        if self._request is None:
            super().receive_data(data)
        else:
            self._receive_rest(data)

    def _receive_head(self, head: bytes) -> None:
        line, _, fields = head.partition(b"\r\n")
        method, _, target = line.decode("latin-1").rpartition(" ")[0].partition(" ")
        name = f"{method} {target.partition('?')[0]}"
        if name == "GET /ws":
            self._is_session = True
            self._joiner = MessageJoiner(Opcode.TEXT)
            self._websocket = ServerProtocol(max_size=self._limits.max_message_bytes, logger=LOGGER)
        if name not in _MESSAGES and name not in _DOCUMENTS:
            super()._receive_head(head)
            return
        self._request, self._fields, self._body = name, http.client.parse_headers(io.BytesIO(fields)), bytearray()
        host, length = self._fields.get("Host"), self._fields.get("Content-Length", "0")
        if (refusal := self._site.check_host(host)) is not None:
            self._send_file(refusal)
            return
        try:
            self._site.check_origin(self._fields.get("Origin"), host or "")
        except RequestError as error:
            self._send_json(http.HTTPStatus.FORBIDDEN, {"detail": error.message})
            return
        most = self._limits.max_message_bytes
        if not length.isdecimal() or int(length) > most or "Transfer-Encoding" in self._fields:
            text = f"expected a body with a Content-Length of at most max_message_bytes={most}, got {length:.20}"
            self._send_json(http.HTTPStatus.BAD_REQUEST, {"detail": text})
            return
        self._length = int(length) if method == "POST" else 0
        self._receive_rest(b"")

    def _receive_rest(self, data: bytes) -> None:
        if self._request is None:
            super()._receive_rest(data)
        elif not self.finished and self._call is None:
            self._body += data
            self._admit(len(self._body))
            if len(self._body) >= self._length:
                self._release()
                self._serve_request(self._request)

    def _serve_request(self, request: str) -> None:
        if request in _DOCUMENTS:
            text = f"the Gymnasium environment {self._site.openenv.name}, served by Gymnasium Bridge"  # type: ignore[union-attr]
            metadata = {"name": self._site.openenv.name, "description": text, "version": __version__}  # type: ignore[union-attr]
            self._send_json(http.HTTPStatus.OK, _DOCUMENTS[request] or metadata)
            return
        try:
            call = self._call = self._open_session(self._fields.get("Authorization"))
        except RequestError as error:
            asks = error.code in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
            status = http.HTTPStatus.UNAUTHORIZED if asks else http.HTTPStatus.SERVICE_UNAVAILABLE
            self._send_json(status, {"detail": error.message})
            return
        message = b'{"type": "%s", "data": %s}' % (_MESSAGES[request].encode(), bytes(self._body) or b"{}")
        self._handler.calls.receive(call, message)
        self._handler.calls.receive(call, None)

    def _send_json(self, status: http.HTTPStatus, body: Any) -> None:
        self._send_file(HttpAnswer(status, json.dumps(body).encode(), "application/json"))

    def _is_websocket(self, request: Request) -> bool:
        return self._is_session or super()._is_websocket(request)

    def _open_call(self, request: Request, host: str) -> Call:
        if not self._is_session:
            return super()._open_call(request, host)
        self._site.check_origin(request.headers.get("Origin"), host)
        return self._open_session(request.headers.get("Authorization"))

    def _open_session(self, authorization: str | None) -> Call:
        """Admit a client. Raises RequestError."""
        if not self._gate.check(_token_in(authorization), self._connection.peer):
            text = "this token is for watching, and OpenEnv has no way to watch; ask for the other token"
            raise RequestError(Code.PERMISSION_DENIED, text)
        call = self._handler.open(self._connection, __version__, may_act=True)
        call.session = OpenEnvSession(call.session, pictures=self._site.openenv.pictures)  # type: ignore[union-attr]
        call.stream = self
        return call

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send an answer: as a text message, or as the response to a request over HTTP."""
        if self._request is None and not self._is_session:
            return super().answer(call, parts, size)
        data = b"".join(parts)
        if data[:1] not in (b"", b"{"):  # the server refused the message before the session saw it
            refusal = pb.EnvironmentResponse.FromString(data).error
            data = error_message(refusal.message, Code(refusal.code))
        if self._request is not None:
            message = json.loads(data)
            found = message.get("data", message)
            if message.get("type") == "error":
                status = _STATUSES.get(found["code"], http.HTTPStatus.INTERNAL_SERVER_ERROR)
                self._send_json(status, {"detail": found["message"]})
            else:
                self._send_json(http.HTTPStatus.OK, found)
        elif not data:  # it was asked to close: the connection ends with its call
            self._handler.calls.receive(call, None)
        elif self._reply is None and not self.finished:
            self._websocket.send_text(data)
            self._outgoing.extend(self._websocket.data_to_send())
        return True

    def finish(self, call: Call, error: RequestError | None) -> None:
        """Send the last frame, or the response that a request over HTTP has not got."""
        if self._request is None:
            super().finish(call, error)
        elif not self.finished:
            text = "the server gave no answer" if error is None else error.message
            self._send_json(http.HTTPStatus.SERVICE_UNAVAILABLE, {"detail": text})


def _token_in(header: str | None) -> str | None:
    """Return the token of an `Authorization` header, which Basic holds as the password; None: it holds none."""
    scheme, _, text = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return Gate.bearer(header)
    try:
        return base64.b64decode(text.strip(), validate=True).decode().partition(":")[2] or None
    except (binascii.Error, UnicodeDecodeError):
        return None
