"""The events that a `ClientSession` gives its driver."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TypeAlias

from bridge.core.client.world.step_reader import StepMessage, StepReader
from bridge.errors import RefusedError, RemoteError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["Event", "Joined", "Lost", "Refused", "Replied", "StepAnswered"]


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """The world was joined; `ClientSession.world` says what it is."""


class StepAnswered(NamedTuple):
    """A Step of the present episode was answered."""

    message: StepMessage
    """The answer."""
    reader: StepReader
    """Reads it."""
    ended: bool = False
    """True if it ended the episode. Lanes begin their next episodes by themselves: their answers never do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """A Reset or Step of the present episode was refused; the stream goes on."""

    error: RemoteError
    """Why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replied:
    """A question was answered: a property, or a method call."""

    message: pb.EnvironmentResponse
    """The answer."""
    error: RefusedError | None
    """The text of the answer, if it is an error."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """The stream ended, the peer broke the protocol, or an answer is late. Nothing more comes."""

    error: RemoteError
    """Why."""
    established: bool
    """True if a world had been joined."""


Event: TypeAlias = Joined | StepAnswered | Refused | Replied | Lost
