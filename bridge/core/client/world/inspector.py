"""Questions to a server over one connection, one at a time: for tools that inspect a server instead of playing."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from google.protobuf.message import DecodeError, Message

from bridge.core.client.wire.connection import connect
from bridge.core.client.wire.poller import Poller
from bridge.core.client.world.extensions import extension, property_request, refusal
from bridge.core.client.world.world_request import MAX_MESSAGE_BYTES, WorldRequest
from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.core.transport.credentials import ClientCredentials
from bridge.errors import Code, PeerError, RefusedError, RemoteError, RemoteTimeoutError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2

__all__ = ["Inspector"]

# The limit for a server that lists properties in circles, or without an end.
_MOST_PROPERTIES = 1000


class Inspector:
    """A connection that sends one request and waits for its answer. Leaves the world when it is closed.

    Args:
        url: The server's URL. `join` uses its environment, settings or world.
        timeout: Seconds to wait for any answer.
        credentials: The credentials for the server; None: the token of the environment variable, if there is one.
    """

    def __init__(self, url: str, timeout: float, credentials: ClientCredentials | None = None) -> None:
        self.request = WorldRequest.of(url, credentials=ClientCredentials.of() if credentials is None else credentials)
        self.url = self.request.address.url
        self._timeout = timeout
        self._poller: Poller[bytes | bytearray | RemoteError] = Poller()
        self._connection = connect(self.request.address, self._poller, self._poller.items.append, MAX_MESSAGE_BYTES)
        self._created: str | None = None
        self._joined = False
        self._outstanding = 0
        """Requests whose answers have not come. Only the last one's answer is returned: the others were abandoned."""

    @property
    def server_version(self) -> str | None:
        """The version of a Gymnasium Bridge server, None for another one; known after the first answer."""
        return self._connection.server_version

    def ask(self, kind: str, body: Message) -> Any:
        """Send a request and return its answer's body.

        Args:
            kind: The request's name in the protocol, such as `join_world`.
            body: The request's message.

        Raises:
            RefusedError: The answer is an error; EnvironmentFailedError if the environment raised.
            RemoteTimeoutError: No answer came in time.
            ConnectError, ConnectionLostError: The connection failed.
            PeerError: The answer is of another kind.
        """
        fields: dict[str, Any] = {kind: body}
        self._outstanding += 1  # before sending: KeyboardInterrupt may come while it is sent
        self._connection.send(pb.EnvironmentRequest(**fields).SerializeToString())
        data = self._receive(kind)
        try:
            response = pb.EnvironmentResponse.FromString(bytes(data))
        except DecodeError as error:
            raise PeerError(self.url, f"it answered {kind} by bytes that cannot be read: {error}") from error
        answered = response.WhichOneof("payload")
        if answered == "error":
            raise refusal(self.url, response.error)
        if answered != kind:
            raise PeerError(self.url, f"it answered {kind} by {answered}")
        return getattr(response, kind)

    def _receive(self, kind: str) -> bytes | bytearray:
        """Wait for the answer to the last request.

        Answers come in order: the answers to requests that timed out, or were interrupted, come first.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                what = self._poller.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                reason = f"no answer to {kind} within {self._timeout:g} s"
                if self._connection.silent:
                    hint = "are host and port right, and does a firewall stand between?"
                    reason = f"no answer within {self._timeout:g} s: {hint}"
                raise RemoteTimeoutError(self.url, reason) from None
            if isinstance(what, RemoteError):
                # The connection has ended, so no abandoned answers can come any more.
                raise what
            self._outstanding -= 1
            if not self._outstanding:
                return what

    def join(self) -> pb.ActionObservationSpecs:
        """Create the world that the URL describes and join it, or join the one that it names; return the specs."""
        name = self.request.address.world
        if name is None:
            name = self._create(self.request.settings())
        specs: pb.ActionObservationSpecs = self.ask("join_world", pb.JoinWorldRequest(world_name=name)).specs
        self._joined = True
        return specs

    def _create(self, settings: Mapping[str, pb.Tensor]) -> str:
        try:
            name: str = self.ask("create_world", pb.CreateWorldRequest(settings=settings)).world_name
        except RefusedError:
            if settings:
                raise
            return ""  # D-4: a server may have only one world, and refuse to create others
        # Stored for `close`: the default world, and one that the URL names, are not this inspector's to destroy.
        self._created = name
        return name

    def read_property(self, key: str) -> pb.Tensor:
        """Return a property's value."""
        return self._ask_property(property_request(key)).read_property.value

    def list_properties(self, key: str = "") -> Iterator[properties_pb2.PropertySpec]:
        """Yield every property below a key, each node before its children."""
        waiting, count = self._list(key), 0
        while waiting:
            spec = waiting.pop(0)
            count += 1
            if count > _MOST_PROPERTIES:
                raise PeerError(self.url, f"it lists more than {_MOST_PROPERTIES} properties")
            yield spec
            if spec.is_listable:
                # At the front, so that children follow their node.
                waiting = self._list(spec.spec.name) + waiting

    def _list(self, key: str) -> list[properties_pb2.PropertySpec]:
        body = properties_pb2.PropertyRequest(list_property=properties_pb2.ListPropertyRequest(key=key))
        return list(self._ask_property(extension(PROPERTY_REQUEST_URL, body)).list_property.values)

    def _ask_property(self, request: pb.EnvironmentRequest) -> properties_pb2.PropertyResponse:
        try:
            return properties_pb2.PropertyResponse.FromString(self.ask("extension", request.extension).value)
        except DecodeError as error:
            raise PeerError(self.url, f"its answer to a property request cannot be read: {error}") from error

    def close(self) -> None:
        """Leave the world, destroy it if this inspector created it, and end the connection."""
        deadline = time.monotonic() + self._timeout
        try:
            if self._joined:
                self.ask("leave_world", pb.LeaveWorldRequest())
            if self._created is not None:
                self.ask("destroy_world", pb.DestroyWorldRequest(world_name=self._created))
        except RefusedError as error:
            # Other servers may keep their worlds; ours destroys those of an ended connection anyway.
            if error.code not in (Code.UNIMPLEMENTED, Code.PERMISSION_DENIED, Code.NOT_FOUND):
                raise
        finally:
            self._joined, self._created = False, None
            self._connection.close(max(0.0, min(2.0, deadline - time.monotonic())))

    def __enter__(self) -> Inspector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._joined, self._created = False, None  # ending the connection is enough
        self.close()
