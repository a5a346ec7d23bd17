"""The form of a message of a feature or another package: what both ends must know about it."""

from __future__ import annotations

import dataclasses

from google.protobuf.message import DecodeError

from bridge.errors import Code, RequestError, SettingError
from bridge.pb import bridge_pb2

__all__ = ["MAX_BYTES", "MESSAGES_KEY", "MessageForm", "Origin"]

MAX_BYTES = 1024 * 1024
"""The most bytes of a request, unless its form sets another limit."""
MESSAGES_KEY = "server.messages"
"""The property with the names of the messages that a server accepts, separated by spaces."""


@dataclasses.dataclass(frozen=True)
class MessageForm:
    """A kind of message, as a client and a server know it.

    The message travels in `EnvironmentRequest.extension`; the package defines what its bytes mean.

    Args:
        name: The message's name, of lower-case letters, digits, `-` and `_`. The operator's options and the property
            `server.messages` use it.
        request_url: The `type_url` of requests, such as `type.googleapis.com/my_package.NoteRequest`.
        response_url: The `type_url` of answers.
        max_bytes: The most bytes of a request.
        places: True if a request may put environments into another situation, in which an episode continues. Requests
            then travel in a `gymnasium_bridge.PlacingRequest`, and answers in a `PlacingResponse`, together with the
            first observations.

    Raises:
        SettingError: The name or a limit is invalid.
    """

    name: str
    request_url: str
    response_url: str
    max_bytes: int = MAX_BYTES
    places: bool = False

    def __post_init__(self) -> None:
        plain = isinstance(self.name, str) and self.name.replace("-", "_").isidentifier() and self.name.islower()
        if not plain:
            raise SettingError(f"expected a message's name to be of a-z, 0-9, - and _, got {self.name!r:.80}")
        if type(self.max_bytes) is not int or self.max_bytes < 1:
            raise SettingError(f"expected max_bytes to be a positive integer, got {self.max_bytes!r}")

    def check_size(self, size: int) -> None:
        """Raise RESOURCE_EXHAUSTED if a request is larger than `max_bytes`."""
        if size > self.max_bytes:
            text = f"a message {self.name!r} of {size} bytes came; it takes max_bytes={self.max_bytes} at most"
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)

    def unwrap(self, data: bytes) -> tuple[bytes, tuple[int, ...]]:
        """Return a request, and the UIDs of the observations that it asks for. Raises RequestError."""
        if not self.places:
            return data, ()
        try:
            wrapped = bridge_pb2.PlacingRequest.FromString(data)
        except DecodeError as error:
            text = f"expected a message {self.name!r} in a PlacingRequest, got {len(data)} bytes that are none"
            raise RequestError(Code.INVALID_ARGUMENT, text) from error
        return wrapped.request, tuple(wrapped.requested_observations)


@dataclasses.dataclass(frozen=True)
class Origin:
    """The earlier moment at which an environment was in the situation that a message puts it, or another one, into.

    Args:
        moment: A name for what the environment had done by then: `Stage.moment` of a server, or
            `RemoteVectorEnv.moment` of a client, for recordings. Empty: not recorded.
        lane: The lane of that environment, among those that one call stepped.
        seed: The seed with which its random generators were seeded again since; None: they were not.
    """

    moment: str
    lane: int = 0
    seed: int | None = None
