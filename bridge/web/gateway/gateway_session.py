"""The session of a gateway's client: it forwards requests to the server that has the world."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from google.protobuf.message import DecodeError

from bridge.core.client.world.join_sequence import WORLD_PROPERTIES
from bridge.core.encoding.names import CALL_REQUEST_URL, CALL_RESPONSE_URL, PROPERTY_REQUEST_URL, PROPERTY_RESPONSE_URL
from bridge.core.encoding.properties import TEXT, Property, PropertyTree
from bridge.core.encoding.tensors import unpack_tensor
from bridge.core.encoding.values import check_count
from bridge.core.server.auth import as_look, refuse_acting, refuse_method
from bridge.core.server.calls import Answering, Arrive, Request, ServedSession
from bridge.core.server.session import error_response
from bridge.core.worlds.base import Agent, World
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.web.gateway.servers import OVERVIEW, PublishedServer

__all__ = ["GatewaySession", "Servers"]

# Requests without a name that change the list of worlds; writing a property changes it, too.
_CHANGING = ("leave_world", "reset")
_NAMED = ("join_world", "reset_world", "destroy_world")
# Properties below `world` that run no code of an environment: spectators may read them, as on the server itself.
_KNOWN = (
    *WORLD_PROPERTIES,
    *("name", "agent", "agents", "missing_agent", "players", "role", "seat", "episode_uid", "wait", "ready", "match"),
    *("fps", "realtime", "timing", "wrappers", "recording", "replay"),
)


class Servers(Protocol):
    """The interface of the gateway for its sessions."""

    def find(self, name: str) -> tuple[PublishedServer, str]:
        """Return the server whose name is a prefix of a world's name, and the world's name on that server."""

    def choose(self, name: str | None) -> PublishedServer:
        """Return the server with a name; None: the only server."""

    async def overview(self) -> str:
        """Return all worlds of all servers as JSON."""


class GatewaySession:
    """A session that forwards requests to a server.

    Requests that need no world are answered by the gateway's own session. The first CreateWorld or JoinWorld binds the
    session to a server and opens a call to it; all later requests are forwarded.

    Args:
        servers: The gateway.
        own: The session that answers requests for no server.
        version: The version of the client, if it is of this package; "" for others.
        may_act: True if the client may do more than watch.
        shared_control: True if a client that may only watch may still call methods and set attributes of environments,
            as far as the server allows.
    """

    def __init__(
        self, servers: Servers, own: ServedSession, version: str, may_act: bool, *, shared_control: bool = False
    ) -> None:
        self._servers = servers
        self._own = own
        self._version = version
        self._may_act = may_act
        self._shared_control = shared_control
        self._server: PublishedServer | None = None
        self._inner: ServedSession | None = None
        self._gone = False
        self._steps = False  # True if the last request was a Step of the server's world
        self.last_step: tuple[World, Agent, int] | None = None
        """Always None: steps are counted on the server."""
        self.last_error = 0
        """The code with which the gateway refused the last request; 0 if it did not."""
        self.last_reason = ""
        """The reason of the last refusal by the gateway, for the log."""
        self.last_failure: str | None = None
        """Always None: failures are logged on the server."""

    @property
    def world_name(self) -> str | None:
        """The name of the bound server; None if there is none."""
        return None if self._server is None else self._server.name

    # Requests

    async def handle(self, data: Request) -> list[bytes | memoryview]:
        """Answer a request, or forward it and return the response."""
        self.last_error = 0
        try:
            return await self._route(data)
        except RequestError as error:
            self.last_error, self.last_reason = int(error.code), error.message
            return [error_response(error)]

    def arrive(self, data: Request, overtakes: bool) -> Callable[[], Answering] | None:
        """Forward a Step before the previous ones are answered; see `Session.arrive`.

        The server that has the world decides when the Step acts, and answers in order.
        """
        arrive: Arrive | None = getattr(self._inner, "arrive", None)
        if arrive is None or not self._steps or not overtakes:
            return None
        try:
            request = pb.EnvironmentRequest.FromString(bytes(data))
            request.DiscardUnknownFields()
        except (DecodeError, ValueError):
            return None
        # As `_route` forwards a Step.
        if request.WhichOneof("payload") != "step" or request.ByteSize() != len(data):
            return None
        begun = arrive(data, overtakes)
        return None if begun is None else partial(self._answer_begun, begun)

    async def _answer_begun(self, begun: Callable[[], Answering]) -> list[bytes | memoryview]:
        """Return the response to a Step that was forwarded on arrival."""
        self.last_error = 0
        try:
            return await begun()
        except RequestError as error:
            self.last_error, self.last_reason = int(error.code), error.message
            return [error_response(error)]

    async def _route(self, data: Request) -> list[bytes | memoryview]:
        """Forward a request to its server, and return the response.

        A forwarded request is serialized again from the parsed message, except a Step without further bytes. In a
        oneof, protobuf keeps the last field, so the bytes of a Step may precede or follow those of another request, and
        a field that is unknown here may be a request for a newer server: each would be made with the gateway's own
        permissions.
        """
        try:
            # Steps are parsed, too: the kind of request decides whether a client that may only watch is allowed to make
            # it.
            request = pb.EnvironmentRequest.FromString(bytes(data))
            request.DiscardUnknownFields()
            kind = request.WhichOneof("payload")
            if kind == "step" and self._inner is not None and request.ByteSize() == len(data):
                # Unchanged, because it contains nothing else: servers read this form of a Step without protobuf.
                self._steps = True
                return await self._inner.handle(data)
            self._steps = False  # no later request may overtake
            if kind is None:
                return await self._own.handle(request.SerializeToString())
            changing = kind in _CHANGING
            if not self._may_act:
                refuse_acting(kind, request, _costs(request), shared_control=self._shared_control)
                if request.extension.type_url == CALL_REQUEST_URL and not self._shared_control:
                    return await self._look(request)
            if kind == "extension" and request.extension.type_url == PROPERTY_REQUEST_URL:
                asked = properties_pb2.PropertyRequest.FromString(request.extension.value)
                if asked.read_property.key == OVERVIEW:
                    return [await self._answer_overview(asked)]
                changing = asked.HasField("write_property")
        except (DecodeError, ValueError) as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"the request cannot be read: {error}") from error
        if kind == "create_world":
            return [await self._create(request)]
        if kind in _NAMED:
            body = getattr(request, kind)
            server, body.world_name = self._servers.find(body.world_name)
            return await self._change(server, request)
        if self._server is not None and changing:
            return await self._change(self._server, request)
        return await (self._inner or self._own).handle(request.SerializeToString())

    async def _look(self, request: pb.EnvironmentRequest) -> list[bytes | memoryview]:
        """Forward a call as a read: the server would execute any call, because the gateway has full permissions."""
        check_count(request.extension.value, bridge_pb2.CallRequest)
        asked = bridge_pb2.CallRequest.FromString(request.extension.value)
        request.extension.value = as_look(asked).SerializeToString()
        answer = await (self._inner or self._own).handle(request.SerializeToString())
        extension = pb.EnvironmentResponse.FromString(b"".join(answer)).extension
        if extension.type_url == CALL_RESPONSE_URL:
            refuse_method(asked, bridge_pb2.CallResponse.FromString(extension.value))
        return answer

    async def _change(self, server: PublishedServer, request: pb.EnvironmentRequest) -> list[bytes | memoryview]:
        """Forward a request that changes the server's list of worlds."""
        answer = await self._bind(server).handle(request.SerializeToString())
        server.changed()
        return answer

    async def _answer_overview(self, asked: properties_pb2.PropertyRequest) -> bytes:
        text = await self._servers.overview()
        tree = PropertyTree([Property(OVERVIEW, TEXT, "the worlds of all servers, as JSON", lambda: text)])
        response = pb.EnvironmentResponse()
        response.extension.type_url = PROPERTY_RESPONSE_URL
        response.extension.value = tree.answer(asked).SerializeToString()
        return response.SerializeToString()

    def _bind(self, server: PublishedServer) -> ServedSession:
        """Return the session for a server."""
        if self._inner is not None:
            if self._server is not server:
                raise RequestError(
                    Code.FAILED_PRECONDITION,
                    f"this connection is with {self.world_name}; use another connection for {server.name}",
                )
            return self._inner
        # After `hang_up`, nothing would cancel a call that is opened now.
        if self._gone:
            raise RequestError(Code.CANCELLED, "the client hung up")
        self._server = server
        self._inner = server.open(self._version, self._may_act)
        return self._inner

    async def _create(self, request: pb.EnvironmentRequest) -> bytes:
        """Forward a CreateWorld to the server in the setting `server`."""
        settings = dict(request.create_world.settings)
        wanted: str | None = None
        if "server" in settings:
            try:
                # The setting is for the gateway: the server would refuse it as unknown.
                wanted = str(unpack_tensor(settings.pop("server"), "server")[()])
            except TensorError as error:
                raise RequestError(Code.INVALID_ARGUMENT, f"bad CreateWorld settings: {error}") from error
        server = self._servers.choose(wanted)
        inner = self._bind(server)
        response = pb.EnvironmentResponse()
        # Whether the environment can render is known only after it is made with that option. If it cannot, the original
        # settings are tried.
        for attempt in server.creating(settings):
            answer = b"".join(await inner.handle(attempt.SerializeToString()))
            response = pb.EnvironmentResponse.FromString(answer)
            if response.WhichOneof("payload") != "error":
                server.changed()
                break
        if response.WhichOneof("payload") == "create_world":
            # Names of worlds are shared by all servers here.
            response.create_world.world_name = f"{server.name}/{response.create_world.world_name}"
        return response.SerializeToString()

    # The end

    def answer_lost(self) -> None:
        """Do nothing: a response that is too large ends the call to the server."""

    def hang_up(self) -> None:
        """Cancel the current request: the client has disconnected."""
        self._gone = True
        self._own.hang_up()
        if self._inner is not None:
            self._inner.hang_up()

    def close(self) -> None:
        """Close the session: the stream has ended."""
        self._own.close()
        if self._inner is not None:
            self._inner.close()


def _costs(request: pb.EnvironmentRequest) -> bool:
    """Return True if reading or listing a property may run code of an environment, as far as a gateway can tell."""
    if request.extension.type_url != PROPERTY_REQUEST_URL:
        return False
    asked = properties_pb2.PropertyRequest.FromString(request.extension.value)
    group, _, name = (asked.read_property.key or asked.list_property.key).partition(".")
    return group not in ("", "server", "connection") and bool(name) and name not in _KNOWN
