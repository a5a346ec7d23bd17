"""A message of a feature, or of another package, on the client: the request, and the result.

`RemoteEnv.send_message`, `RemoteVectorEnv.send_message` and `BlockingReset.send_message` send messages. All lanes of a
world get one request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from google.protobuf.message import DecodeError

from bridge.core.client.world.extensions import extension
from bridge.core.encoding.message_form import MessageForm, Origin
from bridge.errors import PeerError, SettingError
from bridge.pb import bridge_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = [
    "MessageAnswer",
    "MessageReply",
    "MessageTarget",
    "MessageWriter",
    "PlaceListener",
    "message_request",
    "read_message",
]


@dataclasses.dataclass(frozen=True)
class MessageTarget:
    """The environments of one world that one request is for."""

    url: str
    """The URL of the world's server."""
    slots: tuple[int, ...]
    """The slots; for a single environment slot 0."""
    lanes: tuple[int, ...]
    """The lanes of the world that fill the slots, in the same order; for a single environment lane 0."""


@dataclasses.dataclass(frozen=True)
class MessageAnswer:
    """The answer of one world."""

    target: MessageTarget
    """The environments that the request was for."""
    data: bytes
    """The bytes of the answer."""
    placed: bool = False
    """True if the message has put environments into another situation."""


@dataclasses.dataclass(frozen=True)
class MessageReply:
    """The result of a message."""

    answers: list[MessageAnswer]
    """One answer for each world, in the order of their slots."""
    began: tuple[Any, Any] | None = None
    """Observations and infos, as `reset` returns them, if environments are in another situation; None: none is."""


class PlaceListener(Protocol):
    """Is notified when a message puts slots into another situation, for example to record them."""

    def moment(self, slot: int) -> str:
        """Return a name, without spaces, for what a slot has done so far; empty: there is none."""

    def placed(self, slot: int, observation: Any, origin: Origin | None) -> None:
        """Note that a slot continues in another situation.

        Args:
            slot: The slot.
            observation: The observation there, in the space of one slot.
            origin: The earlier moment of that situation; `Origin.moment` may have the names of several listeners,
                separated by spaces.
        """


MessageWriter: TypeAlias = bytes | Callable[[MessageTarget], bytes]
"""A request, or a function that writes the request of each world."""


def message_request(
    form: MessageForm, write: MessageWriter, target: MessageTarget, wanted: Sequence[int]
) -> pb.EnvironmentRequest:
    """Return the request to one world; `wanted` are the UIDs of the observations that its Steps request.

    Raises:
        SettingError: The request is larger than its form allows.
    """
    data = write(target) if callable(write) else write
    request: Any = data
    if form.places:
        request = bridge_pb2.PlacingRequest(request=data, requested_observations=wanted).SerializeToString()
    if len(request) > form.max_bytes:
        text = f"expected a message {form.name!r} of at most {form.max_bytes} bytes, got {len(request)}"
        raise SettingError(text)
    sent = extension(form.request_url, bridge_pb2.PlacingRequest())
    sent.extension.value = request
    return sent


def read_message(form: MessageForm, message: pb.EnvironmentResponse, url: str) -> tuple[bytes, pb.StepResponse | None]:
    """Return an answer, and the Step response of environments in another situation; None: there are none.

    Raises:
        PeerError: The answer cannot be read.
    """
    got = message.extension.type_url
    if got != form.response_url:
        raise PeerError(url, f"expected an answer {form.response_url} to the message {form.name!r}, got {got!r:.200}")
    if not form.places:
        return message.extension.value, None
    try:
        wrapped = bridge_pb2.PlacingResponse.FromString(message.extension.value)
    except DecodeError as error:
        raise PeerError(url, f"the answer to the message {form.name!r} cannot be read: {error}") from error
    return wrapped.response, wrapped.step if wrapped.HasField("step") else None
