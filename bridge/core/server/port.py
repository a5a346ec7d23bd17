"""The protocols at a server's port beside gRPC: how their connections are told, and what they may ask of the server.

`PortProtocol` is the interface. A server is handed the protocols that it speaks, of this package and of others: the
page for browsers and dm_env_rpc over WebSocket are such. Each shares the port, the limits and the tokens with gRPC.
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
"""A session with the server's worlds that a client of a protocol has: what `ConnectionHandler.open` returns, and what
`request`, `answer` and `finish` say whose it is."""
Conversation: TypeAlias = Callable[[bytes], Awaitable["bytes | HttpAnswer | None"]]
"""Answers the messages of one client, one at a time."""
# A client that has sent its first bytes is told by them, so they must not be long.
_MOST_FIRST_BYTES = 64
# HTTP/1.1 is told by the capitals that it begins with. Others may begin with capitals too, but with no method of it.
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")
# Seconds until a connection ends whose client's machine acknowledges nothing that was sent.
_UNREACHABLE = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PortProtocol:
    """A protocol at a server's port: `protocols=[…]` of `serve_gym` and `serve_parallel`.

    Its connections are told by their first bytes, which `handler` takes, or it has paths of HTTP/1.1: `routes`. It may
    have both. The server's limits hold for it as for gRPC: a connection without a session is closed after
    `hello_timeout`, and sessions count for `max_connections`.

    Raises:
        SettingError: A value is of another kind, or there is neither a handler nor a route.
    """

    name: str
    """Its name, for messages."""
    first_bytes: Sequence[bytes] = ()
    """What a connection of it begins with, one of these: 64 bytes at most, which neither a connection of another
    protocol at the port nor a request of HTTP begins with."""
    handler: Callable[[Connection, Port], ConnectionHandler] | None = None
    """Makes what speaks it, for each connection: a subclass of `ConnectionHandler`."""
    routes: Sequence[Route | SessionRoute] = ()
    """What is served at paths of HTTP/1.1, which needs the package `websockets`."""
    url_scheme: str = ""
    """The scheme of the URLs by which its clients come, with TLS an `s` is added; `Server.urls` lists it. Empty: they
    come otherwise."""

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
    """A path of HTTP/1.1 at which each request is answered at once.

    A client shows the token as `Authorization: Bearer TOKEN`. A page of another site is refused.
    """

    path: str
    """The whole path, such as `/worlds`."""
    answer: Callable[[HttpRequest, Port], HttpAnswer]
    """Answers a request. It is called in the server's thread and must not wait. A RequestError that it raises becomes
    an answer that says so."""
    method: str = "GET"
    """With GET, also HEAD is answered. Others have a body, of `Limits.max_message_bytes` at most."""
    for_viewers: bool = False
    """True if also a client is answered that may only watch, by the token for that."""
    public: bool = False
    """True if it is answered without a token, whoever asks."""


@dataclasses.dataclass(frozen=True)
class Admitted:
    """What a client may do that was let in."""

    may_act: bool
    """False: it may only watch."""
    version: str = ""
    """The version of this package whose extensions of dm_env_rpc its session speaks; empty: none."""


def admit_by_token(request: HttpRequest, gate: Gate, peer: str) -> Admitted:
    """Let a client in that shows the token as `Authorization: Bearer TOKEN`, or as a WebSocket's subprotocol.

    Raises:
        RequestError: UNAUTHENTICATED: it shows none, or another one.
    """
    return Admitted(gate.check(token_of(request), peer))


def token_of(request: HttpRequest) -> str | None:
    """Return the token that a request shows; None: it shows none."""
    token = Gate.bearer(request.field("Authorization"))
    offered = ",".join(request.field_values("Sec-WebSocket-Protocol"))
    if token is None and offered:
        from bridge.core.transport.websocket import shown_token_in  # of a package that only HTTP/1.1 needs

        token = shown_token_in(map(str.strip, offered.split(",")))
    return token


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionRoute:
    """A path of HTTP/1.1 at which a client has a session with the server's worlds.

    Over a WebSocket the session lasts as long as that, and a message of the client is answered by a message. Otherwise
    it is for one request: its body is the message, and the answer is an `HttpAnswer`.
    """

    path: str
    """The whole path, such as `/play`."""
    converse: Callable[[HttpRequest, ServedSession], Conversation] | None
    """Called once for a client that was let in, with its request, without the body; returns what answers its messages.
    That may ask the session: `await session.handle(data)` answers an EnvironmentRequest of dm_env_rpc, as bytes, by an
    EnvironmentResponse, in parts. Its answer None ends the session. None: messages are those of dm_env_rpc."""
    method: str = "GET"
    websocket: bool = False
    """True if it is a WebSocket; its messages are binary."""
    texts: bool = False
    """True if the WebSocket's messages are texts, in UTF-8."""
    subprotocol: str = ""
    """The WebSocket's subprotocol; empty: it needs none."""
    admit: Callable[[HttpRequest, Gate, str], Admitted] = admit_by_token
    """Lets a client in by the token, which the gate knows, or raises RequestError; the text is where the client is.
    By itself, `Authorization: Bearer TOKEN` or a subprotocol of the WebSocket shows it."""
    refuse: Callable[[RequestError], bytes | HttpAnswer] | None = None
    """Makes the answer to a message that is refused before `converse` gets it, or at which that raises RequestError;
    without a WebSocket also that to a client that is not let in. None: the error's text, or an `HttpAnswer` of it."""
    unreachable_after: float | None = None
    """Seconds after which a client is gone whose machine acknowledges nothing, however long it answers no ping. None: a
    client is gone that answers none in time."""


class Port:
    """What a protocol may ask of the server whose port it is spoken at. The server's thread alone may call it.

    Args:
        connections: Those of the server.
        limits: The server's limits.
        gate: Asks clients for the token.
        status: What the server does and has done.
    """

    def __init__(
        self, connections: Connections, limits: CoreLimits, gate: Gate, status: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._connections = connections
        self.limits = limits
        """The limits of the server."""
        self.gate = gate
        """Asks clients for the token: `gate.check(token, peer)` raises RequestError for one that may not come in, and
        returns False for one that may only watch."""
        self.status = status
        """Returns what the server does and has done, by name, such as `worlds`, as `Server.status` does."""

    @property
    def calls(self) -> Calls:
        """Serves the sessions."""
        return self._connections.calls

    def open(self, connection: Connection, admitted: Admitted) -> PortSession:
        """Begin a session with the server's worlds, of a client that was let in.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are as many as there may be; UNAVAILABLE: the server is stopping.
        """
        return self._connections.open(connection, admitted.version, may_act=admitted.may_act)

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Call a function in some seconds, in the server's thread, unless the timer is cancelled."""
        return self._connections.call_later(seconds, function)


class ConnectionHandler(ConnectionProtocol):
    """Speaks a protocol over one connection: the base of what `PortProtocol.handler` makes.

    A subclass has `data_received`, and overrides what else it needs. Everything is called in the server's thread, and
    must not wait. Processor time that brings no request of a session is charged to the connection, which is read later
    where it uses too much; what a handler keeps of a client is its own to bound.

    A session begins with `open`. `request` sends it an EnvironmentRequest of dm_env_rpc, as bytes; they are answered in
    their order, one at a time, by calls of `answer`.

    Args:
        connection: The connection.
        port: The server's port.
    """

    unreachable_after: float | None = _UNREACHABLE
    """Seconds after which a client with a session is gone whose machine acknowledges nothing, however long it says
    nothing. None: it is gone if it has said nothing for some time and then says nothing after `ping`."""

    max_waiting = 1 << 22
    """Bytes of requests that wait for earlier ones, from which on nothing more is read."""

    def __init__(self, connection: Connection, port: Port) -> None:
        super().__init__(connection)
        self._port, self._calls = port, port.calls
        self._admitted = 0
        self._waiting = 0

    @property
    def port(self) -> Port:
        """The server's port: its limits, the gate, its status."""
        return self._port

    @property
    def peer(self) -> str:
        """Where the client is, for logs."""
        return self._connection.peer

    # What a subclass has

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client. It may `send`, `close`, `open` and `request`.

        Raises:
            RequestError: They are wrong: `refuse` says so to the client, and the connection ends.
        """
        raise NotImplementedError

    def answer(self, call: PortSession, parts: list[bytes | memoryview], size: int) -> bool:
        """Send the answer to the oldest request, an EnvironmentResponse in parts of together `size` bytes.

        Return True: what the client does not take yet waits, and its next requests with it.
        """
        for part in parts:
            self.send(part)
        return True

    def finish(self, call: PortSession, error: RequestError | None) -> None:
        """Say that the session ended: as it should, or with an error. By itself: `refuse` it, and close."""
        if error is not None:
            self.refuse(error)
        self.finished = True

    def refuse(self, error: RequestError) -> None:
        """Say why the connection ends. By itself: nothing."""

    # What it calls

    def send(self, data: bytes | memoryview) -> None:
        """Send bytes."""
        self._connection.outgoing.append(data)

    def close(self) -> None:
        """End the session, if there is one, and close the connection once what was sent has gone out."""
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
        """Let the client in by the token that it shows, and begin a session with the server's worlds.

        Args:
            token: What it shows; None: nothing.
            version: As of `Admitted`.

        Raises:
            RequestError: UNAUTHENTICATED: the token is wrong; RESOURCE_EXHAUSTED: there are too many sessions;
                UNAVAILABLE: the server is stopping.
        """
        return self.begin(Admitted(self._port.gate.check(token, self.peer), version))

    def begin(self, admitted: Admitted) -> PortSession:
        """Begin a session of a client that was let in. Raises as `open`, but for the token."""
        call = self._port.open(self._connection, admitted)
        call.stream = self
        if self.unreachable_after is not None:
            end_if_unreachable(self._connection.sock, self.unreachable_after)
        return call

    def request(self, call: PortSession, data: bytes) -> None:
        """Have the session answer an EnvironmentRequest of dm_env_rpc."""
        self._calls.receive(call, data)

    def admit(self, size: int) -> None:
        """Count the bytes of a large message that has not come whole, for `Limits.max_queued_bytes`.

        Args:
            size: All bytes of it that have come; 0: it is whole, or given up.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are too many.
        """
        more = (size if size > LARGE else 0) - self._admitted
        if more:
            self._connection.admit(more)
            self._admitted += more

    # What the server calls

    @property
    def receives_large(self) -> bool:
        """True if a large message is being received."""
        return self._admitted > 0

    def receive_data(self, data: bytes) -> None:
        """Take bytes; raises as `data_received`."""
        if not self.finished:
            self._heard = time.monotonic()
            self.data_received(data)

    def defer(self, call: PortSession, size: int) -> None:
        """Read nothing more from a client of which much waits."""
        # There are no windows for the peer: to read no more is the only way to slow it down.
        self._waiting += size
        if self._waiting > self.max_waiting and not self._connection.paused:
            self._connection.paused = True
            self._connection.flush()

    def resume(self, call: PortSession, size: int) -> None:
        """Read on once little waits."""
        self._waiting -= size
        # At half, so that it is not paused and read again for every request.
        if self._connection.paused and self._waiting <= self.max_waiting // 2:
            self._connection.paused = False
            self._connection.flush()

    def check_keepalive(self, now: float) -> bool:
        """Send a ping to a client that has been quiet; tell whether it is still there."""
        return super().check_keepalive(now) or self.unreachable_after is not None


def check_protocols(protocols: Iterable[PortProtocol]) -> None:
    """Check that the connections of protocols can be told apart.

    Raises:
        SettingError: Two of them have a name or a path in common, or begin alike, or one begins as gRPC or HTTP do.
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
