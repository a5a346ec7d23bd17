"""A call to another server, to which requests are forwarded unchanged."""

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
    """A session on another server. The first request opens the connection.

    Args:
        name: The server's name for clients, in messages.
        address: The server's address and credentials.
        poller: Runs the connection.
        max_message_bytes: The largest request or response.
        may_act: True if the client may do more than watch.
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
        self._pending: deque[PendingResult[bytes]] = deque()  # the pending responses, in order
        self._error: RequestError | None = None
        self.last_step: tuple[World, Agent, int] | None = None
        self.last_error = 0
        self.last_reason = ""
        self.last_failure: str | None = None

    @property
    def world_name(self) -> str | None:
        """None: only the other server knows the world's name."""
        return None

    async def handle(self, data: Request) -> list[bytes | memoryview]:
        """Forward a request and return the response.

        Raises:
            RequestError: UNAVAILABLE: the server cannot be reached, or the connection was lost; CANCELLED: the client
                has disconnected; PERMISSION_DENIED: the client may only watch, and the server does not support
                spectators.
        """
        if not self._may_act and self._call is None:
            # A server of another package may ignore the setting `role`, and treat a spectator as a player.
            await self.ask(property_request("server.version").SerializeToString())
            if self._call is not None and self._call.server_version is None:
                text = f"this token is for watching, and {self._name}, of another package, knows no spectators"
                self._error = RequestError(Code.PERMISSION_DENIED, text)
        return [await self.ask(data)]

    async def ask(self, data: Request) -> bytes:
        """Return the response to a request; raise like `handle`."""
        return await self._send(data)

    def arrive(self, data: Request, overtakes: bool) -> Callable[[], Answering] | None:
        """Send a Step before the previous ones are answered; return a function for its response."""
        if not overtakes:
            return None
        try:
            pending = self._send(data)
        except RequestError:
            return None  # `handle` raises the error in its turn
        return partial(self._answer_to, pending)

    async def _answer_to(self, pending: PendingResult[bytes]) -> list[bytes | memoryview]:
        return [await pending]

    def _send(self, data: Request) -> PendingResult[bytes]:
        """Send a request and return its pending response. Raise like `handle`."""
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
        """Process a response, or the end of the call."""
        if isinstance(what, RemoteError):
            self._error = self._said(what)
            self._fail(self._error)
        elif self._pending:
            self._pending.popleft().set_result(bytes(what))

    def _fail(self, error: RequestError) -> None:
        while self._pending:
            self._pending.popleft().set_error(error)

    def _said(self, error: RemoteError) -> RequestError:
        """Return the error for the client when the server refused the connection or it was lost."""
        if isinstance(error, RefusedError):
            code = Code(error.code) if error.code in Code.__members__.values() else Code.UNKNOWN
            # Forwarded unchanged, the client would think that the gateway refused its own token.
            if code in _REFUSALS:
                text = f"{self._name} does not let this gateway in ({Code.named(code)}): give it the server's token"
                return RequestError(Code.FAILED_PRECONDITION, text)
            return RequestError(code, f"{self._name}: {error.reason}")
        if isinstance(error, ConnectError):
            return RequestError(Code.UNAVAILABLE, f"{self._name} cannot be reached: {error.reason}")
        return RequestError(Code.UNAVAILABLE, f"{self._name}: {error.reason}")

    def answer_lost(self) -> None:
        """Do nothing: the other server cannot repeat a response."""

    def hang_up(self) -> None:
        """Cancel the call: the client has disconnected."""
        error = RequestError(Code.CANCELLED, "the client hung up while it waited")
        # The first reason is kept: the server's message says more than that the call was then closed.
        self._error = self._error or error
        self._fail(error)
        self.close()

    def close(self) -> None:
        """End the call at once, without waiting."""
        self._error = self._error or RequestError(Code.UNAVAILABLE, f"the call to {self._name} was closed")
        call, self._call = self._call, None
        if call is not None:
            # Does not wait for the end, because this is the event loop.
            call.close(0.0)
