"""Protocols at a server's port beside gRPC: how their connections are recognised, and the server's interface to them.

`PortProtocol` is the interface of a protocol. A server gets its protocols from this package and from others: the page
for browsers and dm_env_rpc over WebSocket are examples. All share the port, the limits and the tokens with gRPC.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from bridge.core.server.auth import Gate
from bridge.core.server.calls import Call, Calls, ServedSession
from bridge.core.server.connection import Connection, ConnectionProtocol
from bridge.core.server.http11 import HttpAnswer, HttpRequest
from bridge.core.server.limits import CoreLimits
from bridge.core.transport.frames import PREFACE
from bridge.core.transport.messages import LARGE
from bridge.core.transport.sockets import end_if_unreachable
from bridge.core.worlds.scheduling import Timer
from bridge.errors import RequestError, SettingError

if TYPE_CHECKING:
    from bridge.core.server.connections import Connections

__all__ = [
    "Admitted",
    "ConnectionHandler",
    "Conversation",
    "Port",
    "PortProtocol",
    "PortSession",
    "Route",
    "SessionRoute",
    "check_protocols",
]

PortSession: TypeAlias = Call
"""A client's session with the server's worlds: `ConnectionHandler.open` returns it, and `request`, `answer` and
`finish` take it as an argument."""
Conversation: TypeAlias = Callable[[bytes], Awaitable["bytes | HttpAnswer | None"]]
"""Answers the messages of one client, one at a time."""
# A client that sends fewer bytes and waits is not recognised, so the first bytes must not be long.
_MOST_FIRST_BYTES = 64
# HTTP/1.1 is recognised by capitals. Other protocols may begin with capitals too, but not with an HTTP method.
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")
# Seconds until a connection is closed whose client's machine acknowledges nothing that was sent.
_UNREACHABLE = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PortProtocol:
    """A protocol at a server's port: `protocols=[…]` of `serve_gym` and `serve_parallel`.

    Its connections are recognised by their first bytes, and passed to `handler`, or are HTTP/1.1 requests for the paths
    in `routes`. A protocol may have both. The server's limits apply as for gRPC: a connection without a session is
    closed after `hello_timeout`, and sessions count for `max_connections`.

    Raises:
        SettingError: A value has the wrong type, or there is neither a handler nor a route.
    """

    name: str
    """The protocol's name, for messages."""
    first_bytes: Sequence[bytes] = ()
    """The possible first bytes of its connections: at most 64 bytes each. No connection of another protocol at the
    port, and no HTTP request, may begin with them."""
    handler: Callable[[Connection, Port], ConnectionHandler] | None = None
    """Makes the handler of each connection: a subclass of `ConnectionHandler`."""
    routes: Sequence[Route | SessionRoute] = ()
    """The paths of HTTP/1.1 that the protocol serves. They need the package `websockets`."""
    url_scheme: str = ""
    """The scheme of the URLs of its clients; with TLS an `s` is appended. `Server.urls` lists it. Empty: its clients
    use no such URL."""

    def __post_init__(self) -> None:
        first: Any = self.first_bytes
        if not isinstance(self.name, str) or not self.name:
            raise SettingError(f"expected the name of a protocol to be a text, got {self.name!r:.80}")
        if isinstance(first, (bytes, str)) or not all(isinstance(each, bytes) and each for each in first):
            raise SettingError(f"expected first_bytes of {self.name!r} to be a list of bytes, got {first!r:.80}")
        if any(len(each) > _MOST_FIRST_BYTES for each in first):
            raise SettingError(f"expected first_bytes of {self.name!r} to be at most {_MOST_FIRST_BYTES} bytes each")
        if not all(isinstance(route, (Route, SessionRoute)) for route in self.routes):
            raise SettingError(f"expected routes of {self.name!r} to be bridge.Route or bridge.SessionRoute objects")
        if bool(first) != (self.handler is not None) or not (first or self.routes):
            raise SettingError(f"expected the protocol {self.name!r} to have first_bytes with a handler, or routes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """A path of HTTP/1.1 whose requests are answered at once.

    A client sends the token as `Authorization: Bearer TOKEN`. Requests from pages of other sites are refused.
    """

    path: str
    """The whole path, such as `/worlds`."""
    answer: Callable[[HttpRequest, Port], HttpAnswer]
    """Answers a request. It is called in the server's thread and must not wait. If it raises RequestError, the answer
    is that error."""
    method: str = "GET"
    """The method. GET includes HEAD. Other methods have a body, of at most `Limits.max_message_bytes`."""
    for_viewers: bool = False
    """True if clients with the watch token are answered, too."""
    public: bool = False
    """True if requests need no token."""


@dataclasses.dataclass(frozen=True)
class Admitted:
    """The rights of an accepted client."""

    may_act: bool
    """False: the client may only watch."""
    version: str = ""
    """The version of this package whose extensions of dm_env_rpc the session supports; empty: none."""


def admit_by_token(request: HttpRequest, gate: Gate, peer: str) -> Admitted:
    """Accept a client that sends the token as `Authorization: Bearer TOKEN`, or as a WebSocket's subprotocol.

    Raises:
        RequestError: UNAUTHENTICATED: the token is missing or wrong.
    """
    return Admitted(gate.check(token_of(request), peer))


def token_of(request: HttpRequest) -> str | None:
    """Return the token in a request; None: there is none."""
    token = Gate.bearer(request.field("Authorization"))
    offered = ",".join(request.field_values("Sec-WebSocket-Protocol"))
    if token is None and offered:
        from bridge.core.transport.websocket import shown_token_in  # needs a package that only HTTP/1.1 uses

        token = shown_token_in(map(str.strip, offered.split(",")))
    return token


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionRoute:
    """A path of HTTP/1.1 at which a client has a session with the server's worlds.

    Over a WebSocket the session lasts as long as the WebSocket, and each message of the client is answered with a
    message. Otherwise it lasts for one request: the body is the message, and the answer is an `HttpAnswer`.
    """

    path: str
    """The whole path, such as `/play`."""
    converse: Callable[[HttpRequest, ServedSession], Conversation] | None
    """Called once for each accepted client, with its request, without the body; returns the function that answers its
    messages. That function may use the session: `await session.handle(data)` answers an EnvironmentRequest of
    dm_env_rpc, as bytes, with an EnvironmentResponse, in parts. If it returns None, the session ends. None: messages
    are those of dm_env_rpc."""
    method: str = "GET"
    websocket: bool = False
    """True for a WebSocket. Its messages are binary."""
    texts: bool = False
    """True if the WebSocket's messages are text, in UTF-8."""
    subprotocol: str = ""
    """The WebSocket's subprotocol; empty: it needs none."""
    admit: Callable[[HttpRequest, Gate, str], Admitted] = admit_by_token
    """Accepts the client by its token, which the gate checks, or raises RequestError. The last argument is the client's
    address. By default the token is in `Authorization: Bearer TOKEN` or in a subprotocol of the WebSocket."""
    refuse: Callable[[RequestError], bytes | HttpAnswer] | None = None
    """Makes the answer to a message that is refused before `converse` gets it, or for which that raises RequestError;
    without a WebSocket also the answer to a refused client. None: the error's text, or an `HttpAnswer` of it."""
    unreachable_after: float | None = None
    """Seconds without acknowledgement of sent bytes after which a client counts as gone. It then need not answer pings.
    None: a client counts as gone if it does not answer pings in time."""


class Port:
    """The server's interface for protocols at its port. May be called only in the server's thread.

    Args:
        connections: The server's connections.
        limits: The server's limits.
        gate: Checks the tokens of clients.
        status: Returns the server's status.
    """

    def __init__(
        self, connections: Connections, limits: CoreLimits, gate: Gate, status: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._connections = connections
        self.limits = limits
        """The limits of the server."""
        self.gate = gate
        """Checks tokens: `gate.check(token, peer)` raises RequestError if the client is refused, and returns False if
        the client may only watch."""
        self.status = status
        """Returns the server's state and counters by name, such as `worlds`, as `Server.status` does."""

    @property
    def calls(self) -> Calls:
        """The object that serves the sessions."""
        return self._connections.calls

    def open(self, connection: Connection, admitted: Admitted) -> PortSession:
        """Begin a session of an accepted client with the server's worlds.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are too many; UNAVAILABLE: the server is stopping.
        """
        return self._connections.open(connection, admitted.version, may_act=admitted.may_act)

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Call a function in some seconds, in the server's thread, unless the timer is cancelled."""
        return self._connections.call_later(seconds, function)


class ConnectionHandler(ConnectionProtocol):
    """The base class of handlers for `PortProtocol.handler`: it speaks a protocol on one connection.

    A subclass defines `data_received`, and overrides other methods as needed. All methods are called in the server's
    thread, and must not wait. Processor time that brings no request of a session is charged to the connection, and
    reading is delayed if it uses too much. A handler must limit itself the memory that it keeps for a client.

    A session begins with `open`. `request` sends it an EnvironmentRequest of dm_env_rpc, as bytes. Requests are
    answered in order, one at a time, by calls of `answer`.

    Args:
        connection: The connection.
        port: The server's port.
    """

    unreachable_after: float | None = _UNREACHABLE
    """Seconds without acknowledgement of sent bytes after which a client with a session counts as gone, however long it
    sends nothing. None: it counts as gone if it was quiet for some time and then sends nothing after a `ping`."""

    max_waiting = 1 << 22
    """If this many bytes of requests wait for earlier ones, nothing more is read."""

    def __init__(self, connection: Connection, port: Port) -> None:
        super().__init__(connection)
        self._port, self._calls = port, port.calls
        self._admitted = 0
        self._waiting = 0

    @property
    def port(self) -> Port:
        """The server's port, with its limits, gate and status."""
        return self._port

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        return self._connection.peer

    # Methods for subclasses to define

    def data_received(self, data: bytes) -> None:
        """Read bytes of the client. May call `send`, `close`, `open` and `request`.

        Raises:
            RequestError: The bytes are invalid. `refuse` tells the client, and the connection ends.
        """
        raise NotImplementedError

    def answer(self, call: PortSession, parts: list[bytes | memoryview], size: int) -> bool:
        """Send the answer to the oldest request, an EnvironmentResponse in parts of `size` bytes together.

        Return True: bytes that the client does not take yet wait, and so do its next requests.
        """
        for part in parts:
            self.send(part)
        return True

    def finish(self, call: PortSession, error: RequestError | None) -> None:
        """Tell the client that the session ended, with `error` if given. By default `refuse` the client, and close."""
        if error is not None:
            self.refuse(error)
        self.finished = True

    def refuse(self, error: RequestError) -> None:
        """Tell the client why the connection ends. Does nothing by default."""

    # Methods for subclasses to call

    def send(self, data: bytes | memoryview) -> None:
        """Send bytes."""
        self._connection.outgoing.append(data)

    def close(self) -> None:
        """End the session, if there is one, and close the connection after all bytes were sent."""
        self.finished = True
        for call in tuple(self._connection.calls):
            self._calls.receive(call, None)
        self._connection.flush()

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Call a function in some seconds, unless the connection has ended, or the timer is cancelled."""

        def run() -> None:
            if not self._connection.closed:
                function()
                self._connection.flush()

        return self._port.call_later(seconds, run)

    def open(self, token: str | None, version: str = "") -> PortSession:
        """Accept the client by its token, and begin a session with the server's worlds.

        Args:
            token: The client's token; None: it sent none.
            version: See `Admitted`.

        Raises:
            RequestError: UNAUTHENTICATED: the token is wrong; RESOURCE_EXHAUSTED: there are too many sessions;
                UNAVAILABLE: the server is stopping.
        """
        return self.begin(Admitted(self._port.gate.check(token, self.peer), version))

    def begin(self, admitted: Admitted) -> PortSession:
        """Begin a session of an accepted client. Raises as `open`, except for the token."""
        call = self._port.open(self._connection, admitted)
        call.stream = self
        if self.unreachable_after is not None:
            end_if_unreachable(self._connection.sock, self.unreachable_after)
        return call

    def request(self, call: PortSession, data: bytes) -> None:
        """Have the session answer an EnvironmentRequest of dm_env_rpc."""
        self._calls.receive(call, data)

    def admit(self, size: int) -> None:
        """Count the bytes of an incomplete large message, for `Limits.max_queued_bytes`.

        Args:
            size: The bytes that have arrived so far; 0: the message is complete, or dropped.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are too many bytes.
        """
        more = (size if size > LARGE else 0) - self._admitted
        if more:
            self._connection.admit(more)
            self._admitted += more

    # Methods that the server calls

    @property
    def receives_large(self) -> bool:
        """True if a large message is being received."""
        return self._admitted > 0

    def receive_data(self, data: bytes) -> None:
        """Read bytes; raises as `data_received`."""
        if not self.finished:
            self._heard = time.monotonic()
            self.data_received(data)

    def defer(self, call: PortSession, size: int) -> None:
        """Stop reading from a client with too many waiting bytes."""
        # The protocol has no flow-control windows, so the client can be slowed down only by not reading.
        self._waiting += size
        if self._waiting > self.max_waiting and not self._connection.paused:
            self._connection.paused = True
            self._connection.flush()

    def resume(self, call: PortSession, size: int) -> None:
        """Continue reading when few bytes wait."""
        self._waiting -= size
        # At half, so that reading does not stop and start again for every request.
        if self._connection.paused and self._waiting <= self.max_waiting // 2:
            self._connection.paused = False
            self._connection.flush()

    def check_keepalive(self, now: float) -> bool:
        """Send a ping to a client that has been quiet; return False if it is gone."""
        return super().check_keepalive(now) or self.unreachable_after is not None


def check_protocols(protocols: Iterable[PortProtocol]) -> None:
    """Check that the connections of protocols can be distinguished.

    Raises:
        SettingError: Two protocols have the same name, path or first bytes, or one has the first bytes of gRPC or HTTP.
    """
    names: set[str] = set()
    begins = {PREFACE: "gRPC", **{f"{method} ".encode(): "HTTP/1.1" for method in _METHODS}}
    paths: dict[tuple[str, str], str] = {}
    for protocol in protocols:
        if protocol.name in names:
            raise SettingError(f"expected each protocol once, got two of the name {protocol.name!r}")
        names.add(protocol.name)
        for first in protocol.first_bytes:
            for other, owner in begins.items():
                if other.startswith(first) or first.startswith(other):
                    text = f"the protocols {owner!r} and {protocol.name!r} cannot be told apart"
                    raise SettingError(f"{text}: connections begin with {other!r} and {first!r}; leave out either")
            begins[first] = protocol.name
        for route in protocol.routes:
            place = route.method, route.path
            if not route.path.startswith("/") or not route.method.isupper():
                text = "expected a method in capitals and a path that begins with a slash"
                raise SettingError(f"a route of the protocol {protocol.name!r}: {text}, got {place!r:.80}")
            if place in paths:
                text = f"the protocols {paths[place]!r} and {protocol.name!r} have {route.method} {route.path}"
                raise SettingError(f"{text} both: leave out either")
            paths[place] = protocol.name
