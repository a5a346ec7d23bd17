"""OpenEnv at the port of a server: its sessions at `/ws`, and its requests over HTTP/1.1.

A session translates JSON messages to requests of dm_env_rpc. The protocol state of client and server does no I/O, so
both ends are connected in memory here: an OpenEnv client can do what our own client can. An HTTP request is a session
of one message, as in OpenEnv: a world is made for the request, and closed after it.
"""

from __future__ import annotations

import http
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from websockets.exceptions import InvalidHeader
from websockets.headers import parse_authorization_basic

from bridge.core.client.slots.resets import reset_settings
from bridge.core.client.world.client_session import ClientSession
from bridge.core.client.world.session_states import ClientState, Lost, Refused
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.server.auth import Gate
from bridge.core.server.calls import ServedSession
from bridge.core.server.http11 import HttpAnswer, HttpRequest
from bridge.core.server.port import Admitted, Conversation, Port, PortProtocol, Route, SessionRoute
from bridge.errors import Code, RequestError, SettingError, UsageError
from bridge.openenv.json_values import expecting, from_json, schema_of, to_bytes, to_json
from bridge.openenv.options import OpenEnvOptions
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.version import __version__

__all__ = ["openenv_protocol"]

# The server has checked the size of the incoming message.
_REQUEST = WorldRequest.of("grpc://localhost:1", plain_spaces=True, max_message_bytes=1 << 31)
_LEAVE = pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()).SerializeToString()
# Seconds after which a session ends if the client's machine acknowledges no data.
_UNREACHABLE = 120.0
# Only real-time worlds ask for the time, and OpenEnv has none.
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
"""OpenEnv's error name and HTTP status for each gRPC code."""
_OTHER_ERROR = "EXECUTION_ERROR", 500
_NO_TOOLS = {"code": -32601, "message": "this environment has no tools; its actions go to /ws"}
_PATHS: dict[str, Any] = {"/schema": {"get": {}}, "/state": {"get": {}}, "/reset": {"post": {}}, "/step": {"post": {}}}
_OF_A_SESSION = {
    ("GET", "/schema"): "schema",
    ("GET", "/state"): "state",
    ("POST", "/reset"): "reset",
    ("POST", "/step"): "first step",
}
"""The message type for each HTTP method and path."""
_FIXED: dict[tuple[str, str], Any] = {
    ("GET", "/health"): {"status": "healthy"},
    ("POST", "/mcp"): {"jsonrpc": "2.0", "id": None, "error": _NO_TOOLS},
    ("GET", "/openapi.json"): {
        "openapi": "3.1.0",
        "info": {"title": "OpenEnv", "version": "1.0.0"},
        "paths": _PATHS,
    },
}
"""The responses, by method and path, that need no world and no token."""
# Parsing a value takes at least 0.1 µs, during which other clients wait; this limits their number.
_MOST_VALUES = 100_000


class _Session:
    """Answers JSON messages by requests to a dm_env_rpc session.

    Args:
        served: Answers requests of dm_env_rpc.
        pictures: True if pictures are sent as PNGs.
    """

    def __init__(self, served: Callable[[bytes], Coroutine[Any, Any, list[Any]]], *, pictures: bool) -> None:
        self._served, self._pictures = served, pictures
        self._client = ClientSession(_REQUEST)
        self._client.server_version = __version__
        self._state: dict[str, Any] = {"episode_id": None, "step_count": 0}

    async def answer(self, data: bytes | bytearray) -> tuple[str, Any, Code]:
        """Answer a JSON message; any bytes are accepted.

        Returns:
            The type of the response (empty if it ends the session), its data, and a code. For a code other than OK, the
                data is the error's text.
        """
        try:
            # Counted before parsing: without strings there is one comma less than there are values.
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
        await self._schema({})  # raises if a space cannot be written as JSON
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
        self._client.step(world.writer.write_action(action), _NOW)
        found = await self._observe()
        self._state["step_count"] += 1
        return found

    async def _first_step(self, payload: dict[str, Any]) -> dict[str, Any]:
        await self._reset({})
        with expecting('{"action": {"action": …}}', payload):
            action = dict(payload["action"])
        return await self._step(action)

    async def _observe(self) -> dict[str, Any]:
        """Return the data of the observation after the last request."""
        answer = await self._exchange()
        sample, reward, terminated, truncated, info = answer.reader.read(answer.message, _NOW)
        found = to_json(answer.reader.layout.space, sample, pictures=self._pictures)
        observation = {"observation": found, "terminated": terminated, "truncated": truncated, "info": info}
        return {"observation": observation, "reward": reward, "done": terminated or truncated}

    async def _schema(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Join a world if none is joined, and return the schemas of actions and observations.

        Raises:
            SettingError: A space cannot be written as JSON.
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
        """Pass the client's pending output to the served session; return the result.

        Raises:
            RequestError: The request was refused, or the world is lost.
        """
        event = None
        while requests := self._client.data_to_send():
            for request in requests:
                event = self._client.receive(b"".join(await self._served(request)), _NOW) or event
        if isinstance(event, (Lost, Refused)):
            raise RequestError(Code(getattr(event.error, "code", Code.INTERNAL)), event.error.reason)
        return event

    # For each message type: the type of the response (None if the session ends instead), and the function that returns
    # the data. Only HTTP requests use the last two; each of them has a session of its own.
    _ANSWERS: Mapping[str, tuple[str, Callable[[_Session, dict[str, Any]], Awaitable[Any]]]] = {
        "reset": ("observation", _reset),
        "step": ("observation", _step),
        "state": ("state", _read_state),
        "close": ("", _read_state),
        "schema": ("schema", _schema),
        "first step": ("observation", _first_step),
    }


def openenv_protocol(options: OpenEnvOptions) -> PortProtocol:
    """Return OpenEnv as a protocol at a server's port, with its paths.

    The token is sent as Bearer, or as the password of a URL `ws://user:TOKEN@HOST`, which OpenEnv's clients can send.
    """
    over_http = partial(_over_http, pictures=options.pictures)
    metadata = {"name": options.name, "description": f"{options.name} of Gymnasium Bridge"}
    return PortProtocol(
        name="openenv",
        routes=[
            SessionRoute(
                path="/ws",
                converse=partial(_over_websocket, pictures=options.pictures),
                websocket=True,
                texts=True,
                admit=_admit,
                refuse=lambda error: _message("error", error.message, error.code),
                unreachable_after=_UNREACHABLE,
            ),
            *(
                SessionRoute(
                    method=method,
                    path=path,
                    converse=partial(over_http, kind=kind),
                    admit=_admit,
                    refuse=lambda error: _http_answer(error.message, error.code),
                    unreachable_after=_UNREACHABLE,
                )
                for (method, path), kind in _OF_A_SESSION.items()
            ),
            *(
                Route(method=method, path=path, answer=partial(_say, said=said), public=True)
                for (method, path), said in {**_FIXED, ("GET", "/metadata"): metadata}.items()
            ),
        ],
    )


def _say(request: HttpRequest, port: Port, *, said: Any) -> HttpAnswer:
    return _http_answer(said, Code.OK)


def _admit(request: HttpRequest, gate: Gate, peer: str) -> Admitted:
    """Admit a client that may act; raise RequestError for any other."""
    if not gate.check(_token_in(request.field("Authorization")), peer):
        text = "this token is for watching, and OpenEnv has no way to watch; ask for the other token"
        raise RequestError(Code.PERMISSION_DENIED, text)
    # The requests of its session are made here by our own client, of this version.
    return Admitted(True, __version__)


def _over_websocket(request: HttpRequest, served: ServedSession, *, pictures: bool) -> Conversation:
    """Answer the messages of a session until the client asks to close it."""
    session = _Session(served.handle, pictures=pictures)

    async def answer(message: bytes) -> bytes | None:
        kind, data, code = await session.answer(message)
        return _message(kind, data, code) if kind else None

    return answer


def _over_http(request: HttpRequest, served: ServedSession, *, kind: str, pictures: bool) -> Conversation:
    """Answer a request whose body is the data of a message of this type."""
    session = _Session(served.handle, pictures=pictures)

    async def answer(body: bytes) -> HttpAnswer:
        _, data, code = await session.answer(b'{"type": "%s", "data": %s}' % (kind.encode(), body or b"{}"))
        return _http_answer(data, code)

    return answer


def _message(kind: str, data: Any, code: Code) -> bytes:
    """Encode a response as a message.

    Args:
        kind: The type of the response.
        data: The data; for a code other than OK, the error's text.
        code: OK, or the error's code.
    """
    name, _ = _ERRORS.get(code, _OTHER_ERROR)
    return to_bytes({"type": kind, "data": {"message": data, "code": name} if code else data})


def _http_answer(data: Any, code: Code) -> HttpAnswer:
    """Return the response to an HTTP request; for the arguments see `_message`."""
    _, status = _ERRORS.get(code, _OTHER_ERROR)
    return HttpAnswer(http.HTTPStatus(status), to_bytes({"detail": data} if code else data), "application/json")


def _token_in(header: str | None) -> str | None:
    """Return the token of an `Authorization` header (for Basic, the password); None if there is none."""
    try:
        return parse_authorization_basic(header or "")[1] or None
    except (InvalidHeader, UnicodeDecodeError):
        return Gate.bearer(header)
