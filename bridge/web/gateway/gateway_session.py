"""A client of a gateway: its requests go to the server that has its world."""

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

# Requests that change what the list of worlds shows, beside those with a name; so does a property that is written.
_CHANGING = ("leave_world", "reset")
_NAMED = ("join_world", "reset_world", "destroy_world")
# Properties below `world` that no code of an environment is run for: spectators may read them, as at the server itself.
_KNOWN = (
    *WORLD_PROPERTIES,
    *("name", "agent", "agents", "missing_agent", "players", "role", "seat", "episode_uid", "wait", "ready", "match"),
    *("fps", "realtime", "timing", "wrappers", "recording", "replay"),
)


class Servers(Protocol):
    """The gateway, as sessions see it."""

    def find(self, name: str) -> tuple[PublishedServer, str]:
        """Return the server that a world's name begins with, and the rest: its name there."""

    def choose(self, name: str | None) -> PublishedServer:
        """Return the server of a name; None: the only one."""

    async def overview(self) -> str:
        """Return all worlds of all servers, as JSON."""


class GatewaySession:
    """Stands for a client's session.

    What needs no world is answered by the gateway's own session. The first CreateWorld or JoinWorld binds it to a
    server, by a call of its own to there; all that follows is handed on.

    Args:
        servers: The servers.
        own: Answers what is for no server.
        version: The version that a client of this package says it has; "" for others.
        may_act: Whether the client may do more than watch.
        shared_control: Whether one that may only watch may all the same call methods and set attributes of
            environments, where the server lets it.
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
        self._steps = False  # the last request was a Step of the server's world
        self.last_step: tuple[World, Agent, int] | None = None
        """Nothing: steps are counted where they are made."""
        self.last_error = 0
        """The code with which the gateway refused the last request; 0: it did not."""
        self.last_reason = ""
        """Why it refused the last one that it did, for the log."""
        self.last_failure: str | None = None
        """Nothing: failures are logged where they happen."""

    @property
    def world_name(self) -> str | None:
        """The server that it is bound to; None: none."""
        return None if self._server is None else self._server.name

    # Requests

    async def handle(self, data: Request) -> list[bytes | memoryview]:
        """Answer a request, or have it answered."""
        self.last_error = 0
        try:
            return await self._route(data)
        except RequestError as error:
            self.last_error, self.last_reason = int(error.code), error.message
            return [error_response(error)]

    def arrive(self, data: Request, overtakes: bool) -> Callable[[], Answering] | None:
        """Hand on a Step while those before it are to be answered, as `Session.arrive`.

        What it does when it comes is for the server that has the world to say. That answers in order.
        """
        arrive: Arrive | None = getattr(self._inner, "arrive", None)
        if arrive is None or not self._steps or not overtakes:
            return None
        try:
            request = pb.EnvironmentRequest.FromString(bytes(data))
            request.DiscardUnknownFields()
        except (DecodeError, ValueError):
            return None
        # As `_route` does with a Step.
        if request.WhichOneof("payload") != "step" or request.ByteSize() != len(data):
            return None
        begun = arrive(data, overtakes)
        return None if begun is None else partial(self._answer_begun, begun)

    async def _answer_begun(self, begun: Callable[[], Answering]) -> list[bytes | memoryview]:
        """Answer a Step that was handed on when it came."""
        self.last_error = 0
        try:
            return await begun()
        except RequestError as error:
            self.last_error, self.last_reason = int(error.code), error.message
            return [error_response(error)]

    async def _route(self, data: Request) -> list[bytes | memoryview]:
        """Send a request to the server that it is for; return the answer.

        What is handed on is written anew from what was parsed, but for a Step of no further bytes. Protobuf takes the
        last field of a oneof, so the bytes of a Step may stand before or behind those of another request, and a field
        that this version does not know may be a request to a newer server: each would get the gateway's own rights.
        """
        try:
            # Also a Step is parsed: what a request is decides whether a client that may only watch is let through.
            request = pb.EnvironmentRequest.FromString(bytes(data))
            request.DiscardUnknownFields()
            kind = request.WhichOneof("payload")
            if kind == "step" and self._inner is not None and request.ByteSize() == len(data):
                # As it came, with nothing else in it: servers read their own clients' form of a Step without protobuf.
                self._steps = True
                return await self._inner.handle(data)
            self._steps = False  # none overtakes what follows
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
        """Hand on a call as a look: the server would execute it, as it gives this gateway a trainer's rights."""
        check_count(request.extension.value, bridge_pb2.CallRequest)
        asked = bridge_pb2.CallRequest.FromString(request.extension.value)
        request.extension.value = as_look(asked).SerializeToString()
        answer = await (self._inner or self._own).handle(request.SerializeToString())
        extension = pb.EnvironmentResponse.FromString(b"".join(answer)).extension
        if extension.type_url == CALL_RESPONSE_URL:
            refuse_method(asked, bridge_pb2.CallResponse.FromString(extension.value))
        return answer

    async def _change(self, server: PublishedServer, request: pb.EnvironmentRequest) -> list[bytes | memoryview]:
        """Hand on a request after which the server's list of worlds is old."""
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
        """Return what a server is asked through."""
        if self._inner is not None:
            if self._server is not server:
                raise RequestError(
                    Code.FAILED_PRECONDITION,
                    f"this connection is with {self.world_name}; use another connection for {server.name}",
                )
            return self._inner
        # After `hang_up` nothing would end what a call that is opened now waits for.
        if self._gone:
            raise RequestError(Code.CANCELLED, "the client hung up")
        self._server = server
        self._inner = server.open(self._version, self._may_act)
        return self._inner

    async def _create(self, request: pb.EnvironmentRequest) -> bytes:
        """Have a world made, by the server that the setting `server` names."""
        settings = dict(request.create_world.settings)
        wanted: str | None = None
        if "server" in settings:
            try:
                # The setting is the gateway's: the server would refuse it as unknown.
                wanted = str(unpack_tensor(settings.pop("server"), "server")[()])
            except TensorError as error:
                raise RequestError(Code.INVALID_ARGUMENT, f"bad CreateWorld settings: {error}") from error
        server = self._servers.choose(wanted)
        inner = self._bind(server)
        response = pb.EnvironmentResponse()
        # Whether the environment can draw is known only once it is made so. If it cannot, the settings are tried as
        # they came.
        for attempt in server.creating(settings):
            answer = b"".join(await inner.handle(attempt.SerializeToString()))
            response = pb.EnvironmentResponse.FromString(answer)
            if response.WhichOneof("payload") != "error":
                server.changed()
                break
        if response.WhichOneof("payload") == "create_world":
            # Worlds of all servers share one space of names here.
            response.create_world.world_name = f"{server.name}/{response.create_world.world_name}"
        return response.SerializeToString()

    # The end

    def answer_lost(self) -> None:
        """Do nothing: an answer of a server that is too large ends the call to it."""

    def hang_up(self) -> None:
        """End what the request at hand waits for: the client is gone."""
        self._gone = True
        self._own.hang_up()
        if self._inner is not None:
            self._inner.hang_up()

    def close(self) -> None:
        """Take note that the stream ended."""
        self._own.close()
        if self._inner is not None:
            self._inner.close()


def _costs(request: pb.EnvironmentRequest) -> bool:
    """True if reading or listing a property may run code of an environment, as far as a gateway can know."""
    if request.extension.type_url != PROPERTY_REQUEST_URL:
        return False
    asked = properties_pb2.PropertyRequest.FromString(request.extension.value)
    group, _, name = (asked.read_property.key or asked.list_property.key).partition(".")
    return group not in ("", "server", "connection") and bool(name) and name not in _KNOWN
