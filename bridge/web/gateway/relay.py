"""One call to another server: requests go there as they are, and its answers come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from bridge.core.client.wire.connection import ClientCall, ClientConnection
from bridge.core.client.world.extensions import property_request
from bridge.core.server.calls import Answering, Request
from bridge.core.transport.address import Address
from bridge.core.worlds.base import Agent, World
from bridge.core.worlds.scheduling import PendingResult
from bridge.errors import Code, ConnectError, RefusedError, RemoteError, RequestError, SettingError
from bridge.web.gateway.loop_poller import LoopPoller

__all__ = ["Relay"]

_REFUSALS = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)


class Relay:
    """Stands for a session on another server. The connection is made with the first request.

    Args:
        name: What clients know the server by, for messages.
        address: Where it is, and what is shown to it.
        poller: Looks after the socket.
        max_message_bytes: The largest request or answer.
        may_act: Whether the client may do more than watch.
    """

    def __init__(
        self, name: str, address: Address, poller: LoopPoller, max_message_bytes: int, *, may_act: bool = True
    ) -> None:
        self._name = name
        self._address = address
        self._poller = poller
        self._max_message_bytes = max_message_bytes
        self._may_act = may_act
        self._call: ClientCall | None = None
        self._pending: deque[PendingResult[bytes]] = deque()  # the answers that are to come, in their order
        self._error: RequestError | None = None
        self.last_step: tuple[World, Agent, int] | None = None
        self.last_error = 0
        self.last_reason = ""
        self.last_failure: str | None = None

    @property
    def world_name(self) -> str | None:
        """The world that it is in, which only the other server knows."""
        return None

    async def handle(self, data: Request) -> list[bytes | memoryview]:
        """Have a request answered by the other server.

        Raises:
            RequestError: UNAVAILABLE: it cannot be reached, or the connection was lost; CANCELLED: the client is gone;
                PERMISSION_DENIED: the client may only watch, and the server knows no spectators.
        """
        if not self._may_act and self._call is None:
            # A server of another package may ignore the setting `role`, and take a spectator for a player.
            await self.ask(property_request("server.version").SerializeToString())
            if self._call is not None and self._call.server_version is None:
                text = f"this token is for watching, and {self._name}, of another package, knows no spectators"
                self._error = RequestError(Code.PERMISSION_DENIED, text)
        return [await self.ask(data)]

    async def ask(self, data: Request) -> bytes:
        """Return the answer to a request; raises as `handle`."""
        return await self._send(data)

    def arrive(self, data: Request, overtakes: bool) -> Callable[[], Answering] | None:
        """Send a Step at once, while those before it are to be answered; return what gives its answer in its turn."""
        if not overtakes:
            return None
        try:
            pending = self._send(data)
        except RequestError:
            return None  # as `handle` will say in its turn
        return partial(self._answer_to, pending)

    async def _answer_to(self, pending: PendingResult[bytes]) -> list[bytes | memoryview]:
        return [await pending]

    def _send(self, data: Request) -> PendingResult[bytes]:
        """Send a request; return its answer. Raises as `handle`."""
        if self._error is not None:
            raise self._error
        pending: PendingResult[bytes] = PendingResult()
        self._pending.append(pending)
        try:
            if self._call is None:
                connection = ClientConnection(self._address, self._poller, self._max_message_bytes)
                self._call = ClientCall(connection, self._address.url, self._deliver)
            self._call.send(bytes(data))
        except (SettingError, RemoteError) as error:
            self._pending.remove(pending)
            raise RequestError(Code.FAILED_PRECONDITION, f"{self._name}: {error}") from error
        return pending

    def _deliver(self, what: bytes | bytearray | RemoteError) -> None:
        """Take an answer, or how the call ended."""
        if isinstance(what, RemoteError):
            self._error = self._said(what)
            self._fail(self._error)
        elif self._pending:
            self._pending.popleft().set_result(bytes(what))

    def _fail(self, error: RequestError) -> None:
        while self._pending:
            self._pending.popleft().set_error(error)

    def _said(self, error: RemoteError) -> RequestError:
        """Return the error for the client whose connection to the server was refused or lost."""
        if isinstance(error, RefusedError):
            code = Code(error.code) if error.code in Code.__members__.values() else Code.UNKNOWN
            # Passed on as it is, the client would take it for a refusal of the token that it has shown the gateway.
            if code in _REFUSALS:
                text = f"{self._name} does not let this gateway in ({Code.named(code)}): give it the server's token"
                return RequestError(Code.FAILED_PRECONDITION, text)
            return RequestError(code, f"{self._name}: {error.reason}")
        if isinstance(error, ConnectError):
            return RequestError(Code.UNAVAILABLE, f"{self._name} cannot be reached: {error.reason}")
        return RequestError(Code.UNAVAILABLE, f"{self._name}: {error.reason}")

    def answer_lost(self) -> None:
        """Do nothing: the other server cannot tell its answer again."""

    def hang_up(self) -> None:
        """End the call: the client is gone."""
        error = RequestError(Code.CANCELLED, "the client hung up while it waited")
        # The first reason stays: what the other server said tells more than that the call was closed then.
        self._error = self._error or error
        self._fail(error)
        self.close()

    def close(self) -> None:
        """End the call at once."""
        self._error = self._error or RequestError(Code.UNAVAILABLE, f"the call to {self._name} was closed")
        call, self._call = self._call, None
        if call is not None:
            # Without a wait for its end, for this is the event loop.
            call.close(0.0)
