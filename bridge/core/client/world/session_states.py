"""The states of a client's stream, and their transitions in one literal table; the events for the driver.

`ClientSession` changes its state only by the table; a transition that is not in it is an error. An `Event` tells the
driver about a change.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from bridge.core.client.world.steps import StepMessage, StepReader
from bridge.errors import RefusedError, RemoteError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = [
    "CONNECTING",
    "ONLINE",
    "TRANSITIONS",
    "ClientState",
    "Event",
    "Joined",
    "Lost",
    "Refused",
    "Replied",
    "StepAnswered",
    "Trigger",
]


class ClientState(enum.Enum):
    """The state of a stream."""

    OFFLINE = "offline"
    """There is no stream yet."""
    ASKING = "asking"
    """The server is asked which form of world to make, or a world that cannot be used is being destroyed."""
    CREATING = "creating"
    """CreateWorld was sent."""
    JOINING = "joining"
    """JoinWorld was sent."""
    DESCRIBING = "describing"
    """The joined world's properties are being read."""
    JOINED = "joined"
    """In a world. No episode runs, and none was requested."""
    RESETTING = "resetting"
    """An episode was requested; its first observation has not come."""
    RUNNING = "running"
    """In an episode."""
    ENDED = "ended"
    """The episode has ended. The next Step begins another."""
    LOST = "lost"
    """The stream ended, or was abandoned."""

    # Members are unique objects. Enum's own __hash__ is a Python function, which would be called in each step.
    __hash__ = object.__hash__


class Trigger(enum.Enum):
    """An event that changes the state."""

    ASK = "question before CreateWorld sent"
    CREATE = "CreateWorld sent"
    JOIN = "JoinWorld sent"
    DESCRIBE = "property asked for"
    READY = "all of the world is known"
    BEGIN = "first Step of an episode sent"
    STEP_RAN = "Step answered, running"
    STEP_ENDED = "Step answered, terminated or interrupted"
    REFUSED = "Reset or Step refused"
    ABANDON = "episode given up"
    END = "end of stream"


_O, _A, _C = ClientState.OFFLINE, ClientState.ASKING, ClientState.CREATING
_W, _D = ClientState.JOINING, ClientState.DESCRIBING
_J, _B, _R, _E, _L = ClientState.JOINED, ClientState.RESETTING, ClientState.RUNNING, ClientState.ENDED, ClientState.LOST

# ASK, CREATE, JOIN, DESCRIBE and BEGIN are requests of the driver. READY, STEP_RAN, STEP_ENDED and REFUSED follow from
# answers. ABANDON is the driver's decision, of which the server is not told; END is the end of the stream.
#
# A client that prefers lanes, if they are as good as worlds, asks first (ASK). If the server cannot make lanes, CREATE
# follows at once, for a world of one environment; if it does not let the client join them, that world is destroyed
# first (ASK again).
#
# A Step within an episode changes nothing when it is sent: many may be in flight (D-25), so the state is that of the
# last answer.
#
# A refused request changes nothing at the server (D-2), so REFUSED leaves the state as it was, except RESETTING: no
# first observation has come, so no episode is known to run. ABANDON leads to JOINED from every state in a world: the
# next episode must be requested, and answers to earlier requests are recognised by their numbers.
#
# LOST is not final: the same session connects again, and still knows the world that it was in. Worlds of lanes never
# get to ENDED, because their lanes begin their next episodes automatically.
TRANSITIONS: Mapping[tuple[ClientState, Trigger], ClientState] = {
    (_O, Trigger.ASK): _A,
    (_O, Trigger.CREATE): _C,
    (_O, Trigger.JOIN): _W,
    (_A, Trigger.ASK): _A,  # one question after the other
    (_A, Trigger.CREATE): _C,
    (_A, Trigger.END): _L,
    (_C, Trigger.CREATE): _C,
    (_C, Trigger.JOIN): _W,
    (_C, Trigger.END): _L,
    (_W, Trigger.ASK): _A,
    (_W, Trigger.DESCRIBE): _D,
    (_W, Trigger.READY): _J,  # a server of another package has no properties
    (_W, Trigger.END): _L,
    (_D, Trigger.DESCRIBE): _D,  # one after the other
    (_D, Trigger.READY): _J,
    (_D, Trigger.END): _L,
    (_J, Trigger.BEGIN): _B,
    (_J, Trigger.STEP_RAN): _R,  # a Step sent ahead, as by a rollout (D-25)
    (_J, Trigger.STEP_ENDED): _E,
    (_J, Trigger.REFUSED): _J,
    (_J, Trigger.ABANDON): _J,
    (_J, Trigger.END): _L,
    (_B, Trigger.BEGIN): _B,
    (_B, Trigger.STEP_RAN): _R,
    (_B, Trigger.STEP_ENDED): _E,
    (_B, Trigger.REFUSED): _J,
    (_B, Trigger.ABANDON): _J,
    (_B, Trigger.END): _L,
    (_R, Trigger.BEGIN): _B,
    (_R, Trigger.STEP_RAN): _R,
    (_R, Trigger.STEP_ENDED): _E,
    (_R, Trigger.REFUSED): _R,  # D-2: the episode continues
    (_R, Trigger.ABANDON): _J,
    (_R, Trigger.END): _L,
    (_E, Trigger.BEGIN): _B,
    (_E, Trigger.STEP_RAN): _R,  # D-9
    (_E, Trigger.STEP_ENDED): _E,
    (_E, Trigger.REFUSED): _E,
    (_E, Trigger.ABANDON): _J,
    (_E, Trigger.END): _L,
    (_L, Trigger.ASK): _A,
    (_L, Trigger.CREATE): _C,
    (_L, Trigger.JOIN): _W,
}

CONNECTING = frozenset({ClientState.ASKING, ClientState.CREATING, ClientState.JOINING, ClientState.DESCRIBING})
"""Not in a world yet."""
ONLINE = frozenset({ClientState.JOINED, ClientState.RESETTING, ClientState.RUNNING, ClientState.ENDED})
"""In a world."""


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """The world was joined; `ClientSession.world` describes it."""


class StepAnswered(NamedTuple):
    """A Step of the current episode was answered."""

    message: StepMessage
    """The answer."""
    reader: StepReader
    """Reads the answer."""
    ended: bool = False
    """True if it ended the episode. Always False with lanes, which begin their next episodes automatically."""


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """A Reset or Step of the current episode was refused; the stream continues."""

    error: RemoteError
    """The reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replied:
    """A question was answered: a property, or a method call."""

    message: pb.EnvironmentResponse
    """The answer."""
    error: RefusedError | None
    """The error, if the answer is one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """The stream ended, the peer broke the protocol, or an answer is late. No more answers come."""

    error: RemoteError
    """The reason."""
    established: bool
    """True if a world had been joined."""


Event: TypeAlias = Joined | StepAnswered | Refused | Replied | Lost
