"""One session of OpenEnv: JSON comes and goes, and a session of dm_env_rpc answers behind it.

The client's protocol state and the server's are both without input or output, so they can talk to each other here, in
one process and without a socket: what our own client can do, an OpenEnv client can do too.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

from bridge.client.slots.resets import reset_settings
from bridge.client.world.events import Lost, Refused
from bridge.client.world.session import ClientSession, ClientState
from bridge.client.world.world_request import WorldRequest
from bridge.errors import Code, RemoteError, RequestError, SettingError, UsageError
from bridge.openenv.json_values import expecting, from_json, schema_of, to_json
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.version import __version__

__all__ = ["OpenEnvSession"]

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
        self._state: dict[str, Any] = {"episode_id": None, "step_count": 0}
        # Only requests over HTTP ask for the last two; each of them has a session of its own.
        self._answers = {
            "reset": self._reset,
            "step": self._step,
            "schema": self._schema,
            "first step": self._first_step,
        }

    async def answer(self, data: bytes | bytearray) -> tuple[str, Any, Code]:
        """Answer a message of JSON, whatever the bytes are.

        Returns:
            The type of the answer, empty where it ends the session, its data, and a code: OK, or that of an error,
            whose data is a text.
        """
        try:
            with expecting("JSON", data[:80], functools.partial(RequestError, Code.DATA_LOSS)):
                message = json.loads(data)
            with expecting('{"type": "step", "data": {"action": …}}', message):
                kind, payload = str(message["type"]), dict(message.get("data", {}))
            if kind == "close":
                return "", None, Code.OK
            if kind == "state":
                return kind, self._state, Code.OK
            if kind not in self._answers:
                text = f"expected the type reset, step, state or close, got {kind!r:.40}"
                raise RequestError(Code.UNIMPLEMENTED, text)
            return "observation", await self._answers[kind](payload), Code.OK
        except RequestError as error:
            return "error", error.message, error.code
        except UsageError as error:
            return "error", str(error), Code.INVALID_ARGUMENT
        except RemoteError as error:
            return "error", error.reason, getattr(error, "code", Code.INTERNAL)

    async def _reset(self, payload: dict[str, Any]) -> dict[str, Any]:
        seed, episode_id = payload.pop("seed", None), payload.pop("episode_id", None)
        await self._schema({})  # raises where JSON has no form for a space
        self._client.begin(reset_settings(seed=seed, options=payload or None), time.monotonic())
        self._state = {"episode_id": episode_id, "step_count": 0}
        return {**await self._observe(), "reward": None}

    async def _step(self, payload: dict[str, Any]) -> dict[str, Any]:
        world = self._client.world
        if world is None or self._client.state is not ClientState.RUNNING:
            text = "no episode has begun, or it has ended: send a reset before the step"
            raise RequestError(Code.FAILED_PRECONDITION, text)
        with expecting('{"action": …} with an action as the schema says', payload):
            action = from_json(world.info.action_space, payload["action"])
        self._client.step(world.write_action(action), time.monotonic())
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
        sample, reward, terminated, truncated, info = answer.reader.read(answer.message, time.monotonic())
        world: Any = self._client.info
        found = to_json(world.observation_space, sample, pictures=self._pictures)
        observation = {"observation": found, "terminated": terminated, "truncated": truncated, "info": info}
        return {"observation": observation, "reward": reward, "done": terminated or truncated}

    async def _schema(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Join a world, unless that is done, and return the schemas of what is sent and received.

        Raises:
            SettingError: JSON has no form for a space.
        """
        if self._client.state is ClientState.LOST:  # the server keeps the session in the lost world until it leaves
            await self._served(_LEAVE)
        if self._client.state in (ClientState.OFFLINE, ClientState.LOST):
            self._client.connect(time.monotonic())
            await self._exchange()
        world: Any = self._client.info
        if world.lanes is not None:
            raise SettingError(f"an OpenEnv session is one environment, and this world has {world.lanes} lanes")
        observed = {"observation": schema_of(world.observation_space, pictures=self._pictures)}
        flags = {"terminated": {"type": "boolean"}, "truncated": {"type": "boolean"}, "info": {"type": "object"}}
        parts = {"action": {"action": schema_of(world.action_space)}, "observation": {**observed, **flags}}
        objects = {name: {"type": "object", "properties": part, "required": list(part)} for name, part in parts.items()}
        return {**objects, "state": _STATE}

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
