"""Environments that run in processes of their own.

The world, with its agents and its clock, stays in the server, as with an environment of the server's process.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import cloudpickle

from bridge.core.encoding import values
from bridge.core.encoding.message_form import Origin
from bridge.core.encoding.names import NAMES
from bridge.core.encoding.properties import Family, Property, PropertyTree, read_encoded
from bridge.core.samples import Samples
from bridge.core.worlds.environment import Call, Isolation, Result, StepTimes
from bridge.core.worlds.isolated.codec import Codec, facts_from_values
from bridge.core.worlds.isolated.world import WorldProcess
from bridge.core.worlds.messages import PartOutcome, SessionMessage
from bridge.core.worlds.scheduling import Executor, Runtime
from bridge.errors import Code, RequestError
from bridge.pb import bridge_pb2, properties_pb2

__all__ = ["IsolatedEnv", "start_isolated"]


class IsolatedEnv:
    """The server's proxy of an environment in a process of its own.

    Args:
        process: The process of the environment.
        description: The description of the environment that `WorldProcess.start` returned.
        executor: Runs the environment's code that belongs in the server's process.
    """

    step_in_row = None

    def __init__(self, process: WorldProcess, description: list[Any], executor: Executor) -> None:
        self.process = process
        told, leaves, families = description
        self.facts = facts = facts_from_values(told)
        self.executor = executor
        self.times = StepTimes()
        self.notes: list[str] = []
        self.failures: dict[int, str] = {}
        self.retried: list[str] = []
        self._known = {key: value for key, _, _, live, value in leaves if not live}
        """The values of the properties that are read without the environment."""
        found = [
            Property(key, kind, text, partial(self._known.get, key), in_environment=live)
            for key, kind, text, live, _ in leaves
        ]
        self._tree = PropertyTree(found, [_family(*family) for family in families])
        self._told: set[str] = set()
        """The names of the messages whose parts were sent to the process."""
        self._codecs = Codec(facts), Codec(facts.of_lane)
        """The codec of the environment, and that of a lane that is stepped by itself."""

    @property
    def ended(self) -> RequestError | None:
        """The error for later requests if the process ended unexpectedly; None: it did not."""
        return self.process.ended

    async def close(self, reason: RequestError | None = None) -> None:
        """Close the environment and end its process; raises what the environment raised."""
        await self.process.close()

    def properties(self) -> PropertyTree:
        """Return what the environment adds to the tree below `world`."""
        return self._tree

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Read, write or list a property for which code of the environment runs."""
        kind = str(request.WhichOneof("payload"))
        # If the code of a property hangs or crashes, the error says what the environment was doing.
        where = {"read_property": "render" if request.read_property.key == "world.frame" else "reading a property"}
        data = await self.process.ask(b"p", request.SerializeToString(), where.get(kind, "its properties"))
        return properties_pb2.PropertyResponse.FromString(data)

    async def render(self, lanes: Sequence[int]) -> list[object]:
        """Return what `render()` returns now for some lanes."""
        frame = properties_pb2.ReadPropertyRequest(key="world.frame")
        response = await self.answer_property(properties_pb2.PropertyRequest(read_property=frame))
        frames = read_encoded(response.read_property.value)
        return [frames[lane] for lane in lanes]

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute, on the lanes that the request names."""
        answer = await self.process.ask(b"c", request.SerializeToString(), f"call of {request.name}")
        return bridge_pb2.CallResponse.FromString(answer)

    @property
    def home(self) -> object:
        """The process of the environment."""
        return self.process

    async def run_message(self, message: SessionMessage, request: bytes) -> PartOutcome:
        """Have the part of a message in the environment's process answer a request."""
        name = message.form.name
        made = b""
        if name not in self._told:
            try:
                # Only the part: the handler stays in the server.
                made = cloudpickle.dumps(dataclasses.replace(message, handler=None))
            except Exception as error:  # whatever the pickling of another package's objects raises
                text = f"the message {name!r} cannot be sent to the world's process: {error!r}"
                raise RequestError(Code.UNIMPLEMENTED, text) from error
        answer = await self.process.ask(
            b"m", values.encode([name, made, request, message.moment]), f"the message {name}"
        )
        self._told.add(name)
        told, packed, lanes, origins, seconds, *names = values.decode(answer)
        if names:
            self._known[NAMES] = names[0]
        placed = None if packed is None else self._codecs[0].unpack(packed, self.notes)
        known = tuple(None if origin is None else Origin(*origin) for origin in origins)
        return PartOutcome(told, placed, tuple(lanes), known, seconds)

    def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Call[Result]:
        """Reset the environment, or one lane by itself."""
        return self._ask(self._codecs[lane is not None], b"r", [lane, seed, options], "reset", self.times.reset)

    def step(self, action: object, lane: int | None = None) -> Call[Result]:
        """Step the environment, or one lane by itself."""
        codec = self._codecs[lane is not None]
        return self._ask(codec, b"s", [lane, codec.pack_action(action)], "step", self.times.step)

    async def _ask(self, codec: Codec, kind: bytes, payload: list[object], where: str, times: Samples) -> Result:
        """Reset or step the environment, and measure the time."""
        began = time.perf_counter()
        try:
            answer = await self.process.ask(kind, values.encode(payload), where)
            packed, notes, failures, retried, *names = values.decode(answer)
        finally:
            times.add(time.perf_counter() - began)
        if names:  # a reset changed them
            self._known[NAMES] = names[0]
        self.notes.extend(notes)
        self.failures.clear()
        self.failures.update(failures)
        self.retried.extend(retried)
        return codec.unpack(packed, self.notes)


def _family(key: str, text: str) -> Family:
    def elsewhere(*arguments: object) -> Any:
        raise RequestError(Code.INTERNAL, f"{key} is answered by the environment's process")

    return Family(key, text, elsewhere, elsewhere, elsewhere, elsewhere, in_environment=True)


async def start_isolated(
    name: str, recipe: bytes, factory: bytes | None, isolation: Isolation, runtime: Runtime
) -> IsolatedEnv:
    """Start a process, have it make its environment, and return the proxy. See `WorldProcess.start`.

    Raises:
        RequestError: The environment could not be made, or not within `call_timeout`.
    """
    process = WorldProcess(name, isolation, runtime)
    try:
        return IsolatedEnv(process, await process.start(recipe, factory), runtime.executor)
    except BaseException:
        # Also if the environment could not be made: its process would wait for requests for ever.
        await process.close()
        raise
