"""A message of a feature, or of another package, from the client's side: what is sent, and what comes of it.

`RemoteEnv.send_message`, `RemoteVectorEnv.send_message` and `BlockingReset.send_message` send one. All lanes of a world
are asked by one request.
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
    """The environments of one world, which one request is for."""

    url: str
    """Of the world's server."""
    slots: tuple[int, ...]
    """The slots; of a single environment slot 0."""
    lanes: tuple[int, ...]
    """The lanes of the world that fill them, in the same order; of a single environment lane 0."""


@dataclasses.dataclass(frozen=True)
class MessageAnswer:
    """The answer of one world."""

    target: MessageTarget
    """Which was asked."""
    data: bytes
    """What the message says."""
    placed: bool = False
    """True if it has put environments into another situation."""


@dataclasses.dataclass(frozen=True)
class MessageReply:
    """What came of a message."""

    answers: list[MessageAnswer]
    """One for each world that was asked, in the order of their slots."""
    began: tuple[Any, Any] | None = None
    """Observations and infos, as `reset` returns them, where environments are in another situation; None: none is."""


class PlaceListener(Protocol):
    """Is told where slots go on that a message puts into another situation, as what records them."""

    def moment(self, slot: int) -> str:
        """Return a name, without spaces, for what a slot has done so far; empty: there is none."""

    def placed(self, slot: int, observation: Any, origin: Origin | None) -> None:
        """Note that a slot goes on elsewhere.

        Args:
            slot: The slot.
            observation: What it sees there, of the space of one slot.
            origin: When a slot was there before; its moment may be of several listeners, with spaces between.
        """


MessageWriter: TypeAlias = bytes | Callable[[MessageTarget], bytes]
"""A request, or what writes that of each world."""


def message_request(
    form: MessageForm, write: MessageWriter, target: MessageTarget, wanted: Sequence[int]
) -> pb.EnvironmentRequest:
    """Return the request to one world; `wanted` are the UIDs of the observations that its Steps ask for.

    Raises:
        SettingError: It is larger than its form allows.
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
    """Return an answer, and what environments see that were put into another situation; None: none was.

    Raises:
        PeerError: It cannot be read.
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
