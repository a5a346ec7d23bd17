"""One session of OpenEnv: JSON comes and goes, and a session of dm_env_rpc answers behind it.

The client's protocol state and the server's are both without input or output, so they can talk to each other here, in
one process and without a socket: what our own client can do, an OpenEnv client can do too.
"""

from __future__ import annotations

import http
import json
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from bridge.client.slots.resets import reset_settings
from bridge.client.world.events import Lost, Refused, StepAnswered
from bridge.client.world.session import ClientSession, ClientState
from bridge.client.world.world_request import WorldInfo, WorldRequest
from bridge.errors import Code, RemoteError, RequestError, SettingError, UsageError
from bridge.openenv.json_values import from_json, schema_of, to_bytes, to_json
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.version import __version__

__all__ = ["ERRORS", "FAILED", "OpenEnvSession", "error_message"]

FAILED = "EXECUTION_ERROR", http.HTTPStatus.INTERNAL_SERVER_ERROR
"""What OpenEnv calls an error that has no name of its own, and its status over HTTP."""
ERRORS = {
    Code.INVALID_ARGUMENT: ("VALIDATION_ERROR", http.HTTPStatus.UNPROCESSABLE_ENTITY),
    Code.RESOURCE_EXHAUSTED: ("CAPACITY_REACHED", http.HTTPStatus.SERVICE_UNAVAILABLE),
    Code.UNIMPLEMENTED: ("UNKNOWN_TYPE", http.HTTPStatus.INTERNAL_SERVER_ERROR),
    Code.DATA_LOSS: ("INVALID_JSON", http.HTTPStatus.BAD_REQUEST),
    Code.UNAUTHENTICATED: (FAILED[0], http.HTTPStatus.UNAUTHORIZED),
    Code.PERMISSION_DENIED: (FAILED[0], http.HTTPStatus.FORBIDDEN),
    Code.UNAVAILABLE: (FAILED[0], http.HTTPStatus.SERVICE_UNAVAILABLE),
}
"""The OpenEnv name and HTTP status of each gRPC code that has its own."""
# The server has checked the size of what came.
_REQUEST = WorldRequest.of("grpc://localhost:1", plain_spaces=True, max_message_bytes=1 << 31)
_LEAVE = pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()).SerializeToString()
_STATE = {
    "type": "object",
    "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer", "minimum": 0}},
}


class OpenEnvSession:
    """Answers JSON messages by a session that answers dm_env_rpc.

    Args:
        served: Answers requests of dm_env_rpc.
        pictures: Whether pictures become PNGs.
    """

    def __init__(self, served: Callable[[bytes], Coroutine[Any, Any, list[Any]]], *, pictures: bool) -> None:
        self._served = served
        self._pictures = pictures
        self._client = ClientSession(_REQUEST)
        self._client.server_version = __version__
        self._episode_id: Any = None
        self._steps = 0
        # Only requests over HTTP send the last two; each of them has a session of its own.
        self._answers = {
            "reset": self._reset,
            "step": self._step,
            "state": self._state,
            "schema": self._schema,
            "first step": self._first_step,
        }

    async def handle(self, data: bytes | bytearray) -> list[bytes | memoryview]:
        """Answer a message of JSON by one of JSON, whatever the bytes are; by nothing where it ends the session."""
        try:
            kind, payload = _read(data)
            if kind == "close":
                return [b""]
            if not isinstance(kind, str) or kind not in self._answers:
                raise RequestError(
                    Code.UNIMPLEMENTED, f"expected the type reset, step, state or close, got {kind!r:.40}"
                )
            return [to_bytes(await self._answers[kind](payload))]
        except (RequestError, UsageError, RemoteError) as error:
            return [error_message(error)]

    async def _state(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "state", "data": {"episode_id": self._episode_id, "step_count": self._steps}}

    async def _first_step(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        await self._reset({})
        return await self._step(_checked(payload.get("action"), payload))

    async def _reset(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        options = dict(payload)
        seed, self._episode_id = options.pop("seed", None), options.pop("episode_id", None)
        await self._join()
        self._client.begin(reset_settings(seed=seed, options=options or None), time.monotonic())
        self._steps = 0
        answer = self._observation(await self._exchange())
        answer["data"]["reward"] = None
        return answer

    async def _step(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        world = self._client.world
        if world is None or self._client.state is not ClientState.RUNNING:
            ended = self._client.state is ClientState.ENDED
            text = f"{'the episode has ended' if ended else 'no episode has begun'}: send a reset before the step"
            raise RequestError(Code.FAILED_PRECONDITION, text)
        if "action" not in payload:
            raise SettingError(f"expected an action of the form {{'action': …}}, got the keys {list(payload)!r:.80}")
        action = from_json(world.info.action_space, payload["action"], "the action")
        self._client.step(world.write_action(action), time.monotonic())
        answer = await self._exchange()
        self._steps += 1
        return self._observation(answer)

    def _observation(self, answer: StepAnswered) -> dict[str, Any]:
        sample, reward, terminated, truncated, info = answer.reader.read(answer.message, time.monotonic())
        flags = {"terminated": terminated, "truncated": truncated, "info": info}
        observation = {"observation": to_json(self._info.observation_space, sample, pictures=self._pictures), **flags}
        done = terminated or truncated
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}

    async def _schema(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        await self._join()
        observed = {"observation": schema_of(self._info.observation_space, pictures=self._pictures)}
        flags = {"terminated": {"type": "boolean"}, "truncated": {"type": "boolean"}, "info": {"type": "object"}}
        parts = {"action": {"action": schema_of(self._info.action_space)}, "observation": {**observed, **flags}}
        objects = {name: {"type": "object", "properties": part, "required": list(part)} for name, part in parts.items()}
        return {**objects, "state": _STATE}

    @property
    def _info(self) -> WorldInfo:
        assert self._client.info is not None
        return self._client.info

    async def _join(self) -> None:
        if self._client.state is ClientState.LOST:  # the server keeps the session in the lost world until it leaves
            await self._served(_LEAVE)
        if self._client.state in (ClientState.OFFLINE, ClientState.LOST):
            self._client.connect(time.monotonic())
            await self._exchange()
        if self._info.lanes is not None:
            raise SettingError(f"an OpenEnv session is one environment, and this world has {self._info.lanes} lanes")
        for space in (self._info.observation_space, self._info.action_space):
            schema_of(space)  # refuses those that JSON does not hold

    async def _exchange(self) -> Any:
        """Have the served session answer what the client's has to say; return what came of it.

        Raises:
            RemoteError: It was refused, or the world is gone.
        """
        event = None
        while requests := self._client.data_to_send():
            for request in requests:
                answer = b"".join(await self._served(request))
                event = self._client.receive(answer, time.monotonic()) or event
        if isinstance(event, (Lost, Refused)):
            raise event.error
        return event


def _read(data: bytes | bytearray) -> tuple[Any, Mapping[str, Any]]:
    """Return the type and the data of a message."""
    try:
        message = json.loads(data)
    except (RecursionError, ValueError) as error:
        raise RequestError(Code.DATA_LOSS, f"expected a message of JSON, got {data[:80]!r}: {error}") from error
    if not isinstance(message, dict) or "type" not in message:
        raise SettingError(f'expected {{"type": "step", "data": {{"action": …}}}}, got {data[:80]!r}')
    return message["type"], _checked(message.get("data", {}), message)


def _checked(data: Any, message: Any) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise SettingError(f"expected an object with an action in it, got {message!r:.80}")
    return data


def error_message(error: Exception) -> bytes:
    """Return the message by which OpenEnv says that something went wrong."""
    code = getattr(error, "code", Code.INVALID_ARGUMENT if isinstance(error, UsageError) else Code.INTERNAL)
    text = error.message if isinstance(error, RequestError) else getattr(error, "reason", str(error))
    return to_bytes({"type": "error", "data": {"message": text, "code": ERRORS.get(code, FAILED)[0]}})
