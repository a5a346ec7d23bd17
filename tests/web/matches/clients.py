"""Clients of matches, with a clock that the test turns."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from tests.peers import Stream
from tests.support import until

RUNNING, TERMINATED, INTERRUPTED = 1, 2, 3


FPS = 8.0  # whose frames take an exact number of seconds


FRAME = 1 / FPS


class Client(Stream):
    """A stream that sits in a seat, or watches."""

    def sit(self, seat: str | None, player: str = "", **settings: Any) -> Client:
        given = {"player": player} if player else {}
        return self.join("", **given, **({} if seat is None else {"agent": seat}), **settings)

    def property(self, **payload: Any) -> Any:
        request = properties_pb2.PropertyRequest(**payload).SerializeToString()
        answer = self.ask(extension={"type_url": PROPERTY_REQUEST_URL, "value": request})
        if answer.WhichOneof("payload") == "error":
            return answer.error
        return properties_pb2.PropertyResponse.FromString(answer.extension.value)

    def ready(self, value: int = 1) -> Any:
        """Say that it is ready; return the refusal, if it is refused."""
        tensor = pack_tensor(np.int64(value))
        answer = self.property(write_property={"key": "world.ready", "value": tensor})
        return answer if isinstance(answer, pb.Status) else None

    def is_ready(self) -> int:
        answer = self.property(read_property={"key": "world.ready"})
        return int(unpack_tensor(answer.read_property.value))

    def match(self) -> dict[str, Any]:
        answer = self.property(read_property={"key": "world.match"})
        found: dict[str, Any] = json.loads(unpack_tensor(answer.read_property.value)[()])
        return found

    def seats(self, *keys: str) -> list[tuple[Any, ...]]:
        return [tuple(seat[key] for key in keys) for seat in self.match()["seats"]]

    def step(self, action: int | None = None) -> tuple[int, float]:
        """Step ann, or look; return the state and the reward."""
        self.send_step(action)
        return self.stepped()

    def send_step(self, action: int | None = None) -> None:
        acts = {spec.name: uid for uid, spec in self.specs.actions.items()}
        actions = {} if action is None else {acts["action"]: pack_tensor(np.int64(action))}
        self.send(step=pb.StepRequest(actions=actions, requested_observations=[self.uids["reward"]]))

    def stepped(self) -> tuple[int, float]:
        answer = self.take()
        assert answer.WhichOneof("payload") == "step", answer
        return answer.step.state, float(unpack_tensor(answer.step.observations[self.uids["reward"]]))

    def refused(self) -> pb.Status:
        answer = self.take()
        assert answer.WhichOneof("payload") == "error", answer
        return answer.error


def still(observation: Any) -> Any:
    """Plays whoever is left, without moving: found by what it observes."""
    if isinstance(observation, dict):
        return {"run": 0, "lean": np.zeros(2, np.float32)}
    return np.zeros(1, np.float32) if isinstance(observation, str) else 0


def states(one: Client, *wanted: str) -> None:
    """Wait until the match is in one of some states."""
    until(lambda: one.match()["state"] in wanted)
