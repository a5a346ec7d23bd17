"""Asks a server of this package about the world that the client has joined, one property after the other."""

from __future__ import annotations

import dataclasses
from typing import Any

from bridge.client.realtime.answer_buffer import pays
from bridge.client.world.extensions import property_request, property_value, property_write
from bridge.encoding.tensors import pack_tensor
from bridge.errors import RefusedError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["WORLD_PROPERTIES", "Description"]

WORLD_PROPERTIES = (
    "observation_space",
    "action_space",
    "reward_space",
    "num_envs",
    "env_id",
    "metadata",
    "render_mode",
    "spec",
)
"""The properties below `world` that a client reads of a world that it has joined."""
# Those that are of the values codec.
_ENCODED = ("metadata", "spec", "fps")
# Of a world whose Steps are to be in flight; older servers do not know them.
_FAR = ("seat", "wait")


@dataclasses.dataclass
class Description:
    """The description of a world, as far as it has been read."""

    specs: pb.ActionObservationSpecs = dataclasses.field(default_factory=pb.ActionObservationSpecs)
    may_wait: bool = False
    """True if the server may hold Steps, because the user has not said what they wait for."""
    properties: dict[str, Any] = dataclasses.field(default_factory=dict)
    unread: list[str] = dataclasses.field(default_factory=list)
    """Properties that are still to be asked for."""
    round_trip: float = float("inf")
    """The shortest time that an answer has taken, seconds."""

    def ask_all(self) -> None:
        """Have all properties to ask for that such a world has; `take` may add some."""
        self.unread = [*WORLD_PROPERTIES]
        if any(spec.name == "frames" for spec in self.specs.observations.values()):
            self.unread.append("fps")

    @property
    def optional(self) -> bool:
        """True if the world can be used without the property that is asked for."""
        return self.unread[0] in _FAR

    def next_request(self) -> pb.EnvironmentRequest:
        """Return the next question; the last one asks that each Step is held until there is a new frame."""
        key = f"world.{self.unread[0]}"
        return property_write(key, pack_tensor("new_frame")) if key == "world.wait" else property_request(key)

    def take(self, message: pb.EnvironmentResponse, error: RefusedError | None, url: str, took: float) -> None:
        """Take an answer; raises PeerError where it cannot be read."""
        key = self.unread.pop(0)
        # The shortest: a longer one may be the work of a busy server, which Steps in flight would not hide.
        self.round_trip = min(took, self.round_trip)
        if error is not None:  # Steps are not in flight then
            self.unread.clear()
        elif key == "wait":
            self.properties["round_trip"] = self.round_trip
        else:
            self.properties[key] = property_value(message, url, key in _ENCODED)
        # `fps` comes after the others: by now several round trips were measured.
        if key == "fps" and self.may_wait and pays(self.round_trip, self.properties["fps"]):
            self.unread += _FAR
