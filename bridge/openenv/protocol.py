"""OpenEnv at the port of a server: `/ws` with its sessions, and the requests of HTTP/1.1 beside it.

A session answers JSON by requests of dm_env_rpc. The client's protocol state and the server's are both without input or
output, so they can talk to each other here, in one process and without a socket: what our own client can do, an OpenEnv
client can do too. A request over HTTP is a session of one message, as in OpenEnv: its world is made for it, and goes
with it.
"""

from __future__ import annotations

import http
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from websockets.exceptions import InvalidHeader
from websockets.frames import CloseCode, Opcode
from websockets.headers import parse_authorization_basic
from websockets.http11 import Request

from bridge.core.client.slots.resets import reset_settings
from bridge.core.client.world.events import Lost, Refused
from bridge.core.client.world.session import ClientSession
from bridge.core.client.world.session_states import ClientState
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.server.auth import Gate
from bridge.core.server.calls import Call
from bridge.core.server.web_protocol import WebProtocol, field_of
from bridge.core.server.web_site import HttpAnswer
from bridge.core.transport.sockets import end_if_unreachable
from bridge.errors import Code, RequestError, SettingError, UsageError
from bridge.openenv.json_values import expecting, from_json, schema_of, to_bytes, to_json
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.version import __version__

__all__ = ["OpenEnvProtocol"]

# The server has checked the size of what came.
_REQUEST = WorldRequest.of("grpc://localhost:1", plain_spaces=True, max_message_bytes=1 << 31)
_LEAVE = pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()).SerializeToString()
# Seconds until a session ends whose client's machine acknowledges nothing that was sent.
_UNREACHABLE = 120.0
# Worlds of OpenEnv are not in real time, and only those ask what time it is.
_NOW = 0.0
_STATE: dict[str, Any] = {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer", "minimum": 0}}
_FLAGS: dict[str, Any] = {
    "terminated": {"type": "boolean"},
    "truncated": {"type": "boolean"},
    "info": {"type": "object"},
}
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
_NO_TOOLS = {"code": -32601, "message": "this environment has no tools; its actions go to /ws"}
_PATHS: dict[str, Any] = {"/schema": {"get": {}}, "/state": {"get": {}}, "/reset": {"post": {}}, "/step": {"post": {}}}
# By method and path: the session over WebSocket, the type of the message that stands for a request, or what is said
# without a world, but for /metadata.
_ROUTES: dict[str, str | dict[str, Any]] = {
    "GET /ws": "session",
    "GET /schema": "schema",
    "GET /state": "state",
    "POST /reset": "reset",
    "POST /step": "first step",
    "GET /health": {"status": "healthy"},
    "GET /metadata": {},
    "POST /mcp": {"jsonrpc": "2.0", "id": None, "error": _NO_TOOLS},
    "GET /openapi.json": {"openapi": "3.1.0", "info": {"title": "OpenEnv", "version": "1.0.0"}, "paths": _PATHS},
}
# More would hold up the other clients while it is parsed: each takes a tenth of a microsecond or more.
_MOST_VALUES = 100_000
_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*([0-9]{1,18})(?=[ \t]*\r\n)")


class _Session:
    """Answers JSON messages by a session that answers dm_env_rpc.

    Args:
        served: Answers requests of dm_env_rpc.
        pictures: Whether pictures become PNGs.
    """

    def __init__(self, served: Callable[[bytes], Coroutine[Any, Any, list[Any]]], *, pictures: bool) -> None:
        self._served, self._pictures = served, pictures
        self._client = ClientSession(_REQUEST)
        self._client.server_version = __version__
        self._state: dict[str, Any] = {"episode_id": None, "step_count": 0}

    async def answer(self, data: bytes | bytearray) -> tuple[str, Any, Code]:
        """Answer a message of JSON, whatever the bytes are.

        Returns:
            The type of the answer, empty where it ends the session, its data, and a code: OK, or that of an error,
            whose data is a text.
        """
        try:
            # Before it is parsed: there is one comma less than there are values, if texts have none.
            if (count := data.count(b",")) >= _MOST_VALUES:
                text = f"expected at most {_MOST_VALUES} values in a message, got {count} commas: send less at a time"
                raise RequestError(Code.INVALID_ARGUMENT, text)
            with expecting("JSON", data[:80], partial(RequestError, Code.DATA_LOSS)):
                message = json.loads(data)
            with expecting('{"type": "step", "data": {"action": …}}', message):
                kind, payload = str(message["type"]), dict(message.get("data", {}))
            with expecting("the type reset, step, state or close", kind, partial(RequestError, Code.UNIMPLEMENTED)):
                name, handle = self._ANSWERS[kind]
            return name, await handle(self, payload), Code.OK
        except RequestError as error:
            return "error", error.message, error.code
        except UsageError as error:
            return "error", str(error), Code.INVALID_ARGUMENT

    async def _read_state(self, payload: dict[str, Any]) -> dict[str, Any]:
        return self._state

    async def _reset(self, payload: dict[str, Any]) -> dict[str, Any]:
        seed, episode_id = payload.pop("seed", None), payload.pop("episode_id", None)
        await self._schema({})  # raises where JSON has no form for a space
        self._client.begin(reset_settings(seed=seed, options=payload or None), _NOW)
        self._state = {"episode_id": episode_id, "step_count": 0}
        return {**await self._observe(), "reward": None}

    async def _step(self, payload: dict[str, Any]) -> dict[str, Any]:
        world = self._client.world
        if world is None or self._client.state is not ClientState.RUNNING:
            text = "no episode has begun, or it has ended: send a reset before the step"
            raise RequestError(Code.FAILED_PRECONDITION, text)
        with expecting('{"action": …} with an action as the schema says', payload):
            action = from_json(world.info.action_space, payload["action"])
        self._client.step(world.write_action(action), _NOW)
        found = await self._observe()
        self._state["step_count"] += 1
        return found

    async def _first_step(self, payload: dict[str, Any]) -> dict[str, Any]:
        await self._reset({})
        with expecting('{"action": {"action": …}}', payload):
            action = dict(payload["action"])
        return await self._step(action)

    async def _observe(self) -> dict[str, Any]:
        """Return the data of the observation that follows the last request."""
        answer = await self._exchange()
        sample, reward, terminated, truncated, info = answer.reader.read(answer.message, _NOW)
        found = to_json(answer.reader.layout.space, sample, pictures=self._pictures)
        observation = {"observation": found, "terminated": terminated, "truncated": truncated, "info": info}
        return {"observation": observation, "reward": reward, "done": terminated or truncated}

    async def _schema(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Join a world, unless that is done, and return the schemas of what is sent and received.

        Raises:
            SettingError: JSON has no form for a space.
        """
        if self._client.state in (ClientState.OFFLINE, ClientState.LOST):
            await self._served(_LEAVE)  # the server keeps the session in a lost world until it leaves
            self._client.connect(_NOW)
            await self._exchange()
        world: Any = self._client.info
        if world.lanes is not None:
            raise SettingError(f"an OpenEnv session is one environment, and this world has {world.lanes} lanes")
        action, observed = schema_of(world.action_space), schema_of(world.observation_space, pictures=self._pictures)
        parts = {"action": {"action": action}, "observation": {"observation": observed, **_FLAGS}, "state": _STATE}
        return {name: {"type": "object", "properties": part, "required": list(part)} for name, part in parts.items()}

    async def _exchange(self) -> Any:
        """Have the served session answer what the client's has to say; return what came of it.

        Raises:
            RequestError: It was refused, or the world is gone.
        """
        event = None
        while requests := self._client.data_to_send():
            for request in requests:
                event = self._client.receive(b"".join(await self._served(request)), _NOW) or event
        if isinstance(event, (Lost, Refused)):
            raise RequestError(Code(getattr(event.error, "code", Code.INTERNAL)), event.error.reason)
        return event

    # By the type of a message: that of its answer, none where the session ends instead, and what gives its data. Only
    # requests over HTTP ask for the last two; each of them has a session of its own.
    _ANSWERS: Mapping[str, tuple[str, Callable[[_Session, dict[str, Any]], Awaitable[Any]]]] = {
        "reset": ("observation", _reset),
        "step": ("observation", _step),
        "state": ("state", _read_state),
        "close": ("", _read_state),
        "schema": ("schema", _schema),
        "first step": ("observation", _first_step),
    }


class OpenEnvProtocol(WebProtocol):
    """One connection's HTTP/1.1, as `WebProtocol`, with the paths of OpenEnv.

    The token comes as Bearer, or as the password of a URL `ws://user:TOKEN@HOST`, which OpenEnv's clients can send.
    """

    _route: str | dict[str, Any] | None = None
    """The entry of `_ROUTES` that the path matches; None: no entry."""
    _over_http = False
    """True if it is for a request over HTTP."""
    _length = 0
    """The length of the request's body."""
    _body: bytearray | None = None
    """The received part of the body; None: it was whole."""

    def _receive_head(self, head: bytes) -> None:
        method_and_path = head.partition(b" HTTP/")[0].partition(b"?")[0]
        self._route = _ROUTES.get(method_and_path.decode("latin-1"))
        if self._route == "session":
            self._path = "/ws"
            self._expect(Opcode.TEXT)
        elif self._route is not None and head.startswith(b"POST "):  # without its body it is like one for a file
            self._length = int(length[1]) if (length := _LENGTH.search(head)) else 0
            head = b"GET " + _LENGTH.sub(b"", head.removeprefix(b"POST "))
        super()._receive_head(head)

    def _serve_file(self, request: Request) -> None:
        self._over_http = self._route is not None
        if isinstance(self._route, str):
            self._body = bytearray()
            self._begin_call(request, request.headers["Host"])
            self._receive_rest(b"")
        elif self._route is None:
            super()._serve_file(request)
        else:
            name = self._site.openenv.name  # type: ignore[union-attr] # else there is another protocol
            self._send(self._write("", self._route or {"name": name, "description": f"{name} of Gymnasium Bridge"}))

    def _receive_frames(self, call: Call, data: bytes) -> None:
        """Take frames, or of a request over HTTP the body, which is one message."""
        if not self._over_http:
            super()._receive_frames(call, data)
        elif self._length > (most := self._limits.max_message_bytes):
            raise RequestError(Code.DATA_LOSS, f"expected a body of at most max_message_bytes={most}")
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
        # An image of another site's page is asked for without an Origin, and a GET of /schema makes an environment.
        if field_of(request, "Sec-Fetch-Site") not in (None, "none", "same-origin"):
            text = "expected a request of a program, or of this server's own page, got one of another site's page"
            raise RequestError(Code.PERMISSION_DENIED, f"{text}; open this server's page, or ask from a program")
        if not self._gate.check(_token_in(field_of(request, "Authorization")), self._connection.peer):
            text = "this token is for watching, and OpenEnv has no way to watch; ask for the other token"
            raise RequestError(Code.PERMISSION_DENIED, text)
        call = self._handler.open(self._connection, __version__, may_act=True)
        session = _Session(call.session.handle, pictures=self._site.openenv.pictures)  # type: ignore[union-attr]

        async def handle(data: bytes | bytearray) -> list[bytes | memoryview]:
            return [self._write(*await session.answer(data))]

        call.handle, call.stream = handle, self
        end_if_unreachable(self._connection.sock, _UNREACHABLE)
        call.refuse = lambda error: self._write("error", error.message, error.code)
        return call

    def check_keepalive(self, now: float) -> bool:
        """Send a ping to a client that has been quiet; none is closed for want of a pong.

        OpenEnv's clients often run a model in their event loop, which answers nothing meanwhile. A session whose
        machine is gone ends by TCP's keepalive, or after `_UNREACHABLE` seconds in which no ping was acknowledged.
        """
        super().check_keepalive(now)
        return True

    # Data to send

    def _write(self, kind: str, data: Any, code: Code = Code.OK) -> bytes:
        """Return an answer as a message, or as the response to a request over HTTP.

        Args:
            kind: The message's type; empty: the session ends without one.
            data: Its data; with another code than OK, the text of an error.
            code: The error's.
        """
        name, status = _ERRORS.get(code, ("EXECUTION_ERROR", 500))
        if self._over_http:
            body = to_bytes({"detail": data} if code else data)
            return HttpAnswer(http.HTTPStatus(status), body, "application/json").serialize()
        return to_bytes({"type": kind, "data": {"message": data, "code": name} if code else data}) if kind else b""

    def _send(self, data: bytes | memoryview) -> None:
        if self._over_http:
            self._outgoing.append(data)
            self.finished = True
        elif data or self._call is None:
            super()._send(data)
        else:  # it was asked to close: the connection ends with its call
            self._handler.calls.receive(self._call, None)

    def _last_words(self, code: Code | CloseCode, reason: str) -> bytes:
        return self._write("error", reason, Code(code)) if self._over_http else super()._last_words(code, reason)


def _token_in(header: str | None) -> str | None:
    """Return the token of an `Authorization` header, which Basic holds as the password; None: it holds none."""
    try:
        return parse_authorization_basic(header or "")[1] or None
    except (InvalidHeader, UnicodeDecodeError):
        return Gate.bearer(header)
