"""HTTP/1.1 and WebSocket as a server speaks them: requests for paths, and sessions over WebSocket.

A connection carries one request, or one WebSocket with one session. What is at which path is said by the routes of the
server's protocols (`port.py`); of them `websocket_protocol` is dm_env_rpc over WebSocket.
"""

from __future__ import annotations

import http
import re
import time
from collections.abc import Callable, Iterable

from websockets.exceptions import PayloadTooBig
from websockets.frames import CloseCode, Opcode
from websockets.http11 import Request
from websockets.protocol import OPEN, Protocol, Side
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from bridge.core.logs import LimitedLog, SafeLog
from bridge.core.server.auth import Gate
from bridge.core.server.calls import Call, ServedSession
from bridge.core.server.connection import Connection
from bridge.core.server.http11 import HostNames, HttpAnswer, HttpRequest, check_site
from bridge.core.server.port import (
    Admitted,
    ConnectionHandler,
    Conversation,
    Port,
    PortProtocol,
    Route,
    SessionRoute,
    admit_by_token,
    token_of,
)
from bridge.core.transport.http2_sender import SMALL
from bridge.core.transport.service import HELLO
from bridge.core.transport.websocket import (
    DRAINING,
    LOGGER,
    PATH,
    SUBPROTOCOL,
    MessageJoiner,
    WrongKindError,
    close_frame,
)
from bridge.errors import Code, RequestError
from bridge.version import __version__

__all__ = ["HttpProtocol", "OpenedWebSocket", "Routes", "websocket_protocol"]

_log = LimitedLog(__name__)
_faults = SafeLog(__name__)
_END_OF_HEAD = b"\r\n\r\n"
# The library bounds lines and fields, but is given a head only once all of it has come.
_MAX_HEAD = 16384
_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*([0-9]{1,18})(?=[ \t]*\r\n)")
_NO_FILE = HttpAnswer(http.HTTPStatus.NOT_FOUND, b"there is no such file here\n")
_NO_METHOD = HttpAnswer(http.HTTPStatus.METHOD_NOT_ALLOWED, b"expected GET or HEAD\n")
_FAILED = HttpAnswer(http.HTTPStatus.INTERNAL_SERVER_ERROR, b"the server failed\n")


def websocket_protocol() -> PortProtocol:
    """Return the protocol of clients of `ws://`: dm_env_rpc over WebSocket."""

    def admit(request: HttpRequest, gate: Gate, peer: str) -> Admitted:
        return Admitted(admit_by_token(request, gate, peer).may_act, request.field(HELLO) or "")

    route = SessionRoute(path=PATH, converse=None, websocket=True, subprotocol=SUBPROTOCOL, admit=admit)
    return PortProtocol(name="websocket", routes=(route,), url_scheme="ws")


class Routes:
    """What is at which path.

    Args:
        protocols: Those that have routes.
    """

    def __init__(self, protocols: Iterable[PortProtocol] = ()) -> None:
        self._routes: dict[tuple[str, str], Route | SessionRoute] = {}
        for protocol in protocols:
            for route in protocol.routes:
                self._routes[route.method, route.path] = route
                if route.method == "GET" and isinstance(route, Route):
                    self._routes.setdefault(("HEAD", route.path), route)

    def find(self, head: bytes) -> tuple[str, Route | SessionRoute | None]:
        """Return the method of a request, and the route for it; None: there is none."""
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        name = method.decode("latin-1")
        return name, self._routes.get((name, path.decode("latin-1")))


class HttpProtocol(ConnectionHandler):
    """One connection's HTTP/1.1. What is to be sent goes into the connection's `outgoing`.

    Args:
        connection: What speaks it.
        port: The server's port.
        routes: What is at which path.
        hosts: The names of the server.
    """

    unreachable_after: float | None = None

    def __init__(self, connection: Connection, port: Port, routes: Routes, hosts: HostNames) -> None:
        super().__init__(connection, port)
        self._limits = port.limits
        self._routes = routes
        self._hosts = hosts
        self._outgoing = connection.outgoing
        self._head: bytes | None = b""
        """The received bytes of the request's head; None: it was answered."""
        self._route: Route | SessionRoute | None = None
        self._request = HttpRequest("", "")
        self._length = 0
        """The length of the request's body."""
        self._body: bytearray | None = None
        """The received part of the body; None: there is none, or it was whole."""
        self._websocket: Protocol
        self._expect(Opcode.BINARY)
        self._over_http = False
        """True if it is for one request, with its answer, and not for a WebSocket."""
        self._call: Call | None = None
        self._reply: bytes | None = None
        """The answer to the client's close frame, until its requests are served."""

    def _expect(self, kind: Opcode, *subprotocols: str) -> None:
        """Before a handshake: say of what kind messages are, and which subprotocols there are."""
        self._texts, self._joiner = kind is Opcode.TEXT, MessageJoiner(kind)
        size, names = self._limits.max_message_bytes, [Subprotocol(name) for name in subprotocols if name]
        self._websocket = ServerProtocol(subprotocols=names or None, max_size=size, logger=LOGGER)

    # Received data

    def receive_data(self, data: bytes) -> None:
        """Take bytes; the requests that they complete go to the call.

        Raises:
            RequestError: The client does not speak WebSocket as it should, or its request is not admitted.
        """
        # After the last words, or the client's close frame, whatever comes means nothing.
        if self.finished or self._reply is not None:
            return
        self._heard = time.monotonic()
        if self._head is not None:
            self._head += data
            end = self._head.find(_END_OF_HEAD)
            if end < 0:
                if len(self._head) > _MAX_HEAD:
                    text = f"expected header fields of at most {_MAX_HEAD} bytes\n"
                    self._send_answer(HttpAnswer(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text.encode()))
                return
            head, data = self._head[: end + len(_END_OF_HEAD)], self._head[end + len(_END_OF_HEAD) :]
            self._head = None
            self._receive_head(head)
        if data:
            self._receive_rest(data)

    def _receive_rest(self, data: bytes) -> None:
        """Take what follows the head of a request."""
        if self._body is not None:
            self._receive_body(self._body, data)
        elif self._call is not None and not self._over_http:
            self._receive_frames(self._call, data)

    def _receive_head(self, head: bytes) -> None:
        """Answer an HTTP request, or begin to take its body or to speak WebSocket."""
        method, route = self._routes.find(head)
        self._route = route
        if route is not None and method != "GET":
            # The library takes GET alone, in some versions HEAD too: for it the request is one without a body.
            self._length = int(length[1]) if method != "HEAD" and (length := _LENGTH.search(head)) else 0
            head = b"GET" + _LENGTH.sub(b"", head[len(method) :])
        if isinstance(route, SessionRoute):
            self._over_http = not route.websocket
            self._expect(Opcode.TEXT if route.texts else Opcode.BINARY, route.subprotocol)
        self._websocket.receive_data(head)
        events = self._websocket.events_received()
        received = events[0] if events else None
        if not isinstance(received, Request):
            text = "expected a request of HTTP/1.1 without a body\n"
            self._send_answer(HttpAnswer(http.HTTPStatus.BAD_REQUEST, text.encode()))
            return
        if route is None:
            method = getattr(received, "method", "GET")  # older versions of the package take no other
        request = self._request = HttpRequest(method, received.path, received.headers)
        # Before all else: a page whose name was made to resolve to this machine gets no file, and no WebSocket.
        host = request.field("Host")
        refusal = self._hosts.check(host)
        if refusal is not None:
            _log.warning("refused %s: a request for the host %.80r", self._connection.peer, host)
            self._send_answer(refusal)
        elif isinstance(route, SessionRoute) and route.websocket:
            self._upgrade(received, route)
        elif isinstance(route, SessionRoute):
            self._begin_call(route)
            self._begin_body()
        elif route is not None:
            self._begin_answer(route)
        else:
            self._send_answer(_NO_FILE if method in ("GET", "HEAD") else _NO_METHOD)

    # A request and its answer

    def _send_answer(self, answer: HttpAnswer) -> None:
        self._outgoing.append(answer.serialize(with_body=self._request.method != "HEAD"))
        self.finished = True

    def _begin_answer(self, route: Route) -> None:
        """Let a client in that may ask for this, and take the body."""
        if not route.public:
            try:
                self._check_site(websocket=False)
                may_act = self._port.gate.check(token_of(self._request), self.peer)
                if not may_act and not route.for_viewers:
                    text = f"this token is for watching, and {route.path} is not: show the other token"
                    raise RequestError(Code.PERMISSION_DENIED, text)
            except RequestError as error:
                self._send_answer(HttpAnswer.of_error(error))
                return
        self._begin_body()

    def _begin_body(self) -> None:
        """Take the body from here on; of a session only where the client was let in."""
        if not self.finished:
            self._body = bytearray()
            self._receive_body(self._body, b"")

    def _receive_body(self, body: bytearray, data: bytes) -> None:
        """Take a part of the body; the whole one is served. Raises RequestError where it is too large."""
        try:
            if self._length > (most := self._limits.max_message_bytes):
                raise RequestError(Code.DATA_LOSS, f"expected a body of at most max_message_bytes={most}")
            body += data
            self.admit(len(body))
        except RequestError as error:
            if isinstance(self._route, Route):
                self._send_answer(HttpAnswer.of_error(error))
            raise
        if len(body) < self._length:
            return
        self._body = None
        self.admit(0)
        # Without what a client sends behind it: the connection carries one request.
        whole = bytes(body[: self._length])
        if self._call is not None:
            self.request(self._call, whole)
            self._calls.receive(self._call, None)
        elif isinstance(self._route, Route):
            self._answer_request(self._route, whole)

    def _answer_request(self, route: Route, body: bytes) -> None:
        request = self._request
        try:
            found = route.answer(HttpRequest(request.method, request.target, request.fields, body), self._port)
            answer = found if isinstance(found, HttpAnswer) else _FAILED
            if answer is not found:
                _faults.error("expected an HttpAnswer of the route %s, got %.80r", route.path, found)
        except RequestError as error:
            answer = HttpAnswer.of_error(error)
        except Exception:  # the client is told; the connection would else end without an answer
            _faults.exception("the route %s failed", route.path)
            answer = _FAILED
        self._send_answer(answer)

    # A session

    def _upgrade(self, received: Request, route: SessionRoute) -> None:
        """Begin to speak WebSocket, and say in its words if the client may not."""
        websocket = self._websocket
        assert isinstance(websocket, ServerProtocol)
        # Also where the client is refused next: browsers show scripts a close code, and no HTTP status.
        response = websocket.accept(received)
        if response.status_code != http.HTTPStatus.SWITCHING_PROTOCOLS:
            self._send_answer(HttpAnswer(http.HTTPStatus(response.status_code), bytes(response.body or b"")))
            return
        response.headers[HELLO] = __version__
        websocket.send_response(response)
        self._outgoing.extend(websocket.data_to_send())
        self._begin_call(route)

    def _begin_call(self, route: SessionRoute) -> None:
        """Admit a client, or say why it may not."""
        try:
            self._call = self._open_call(route)
        except RequestError as error:
            self._say_goodbye(error.code, error.message)

    def _check_site(self, *, websocket: bool) -> None:
        try:
            check_site(self._request, websocket=websocket)
        except RequestError as error:
            _log.warning("refused %s: %s", self.peer, error.message)
            raise

    def _open_call(self, route: SessionRoute) -> Call:
        """Admit a client. Raises RequestError."""
        self._check_site(websocket=route.websocket)
        admitted = route.admit(self._request, self._port.gate, self.peer)
        self.unreachable_after = route.unreachable_after
        call = self.begin(admitted)
        self._converse(call, route)
        return call

    def _converse(self, call: Call, route: SessionRoute) -> None:
        """Have a route answer the messages of a call."""
        if route.converse is None and not self._over_http:
            return  # the session's own answers, to the messages as they are
        try:
            answer = (route.converse or _relay)(self._request, call.session)
        except BaseException:
            self._calls.abandon(call)
            raise

        def refuse(error: RequestError) -> bytes:
            return self._packed(self._refusal(route, error))

        async def handle(data: bytes | bytearray) -> list[bytes | memoryview]:
            try:
                found = await answer(bytes(data))
            except RequestError as error:
                return [refuse(error)]
            # Without parts the answer ends the session.
            return [] if found is None and not self._over_http else [self._packed(found or b"")]

        call.handle, call.refuse, call.arrive = handle, refuse, None

    def _packed(self, answer: bytes | HttpAnswer) -> bytes:
        """Return an answer as it is sent, over HTTP or as a message of a WebSocket."""
        if not self._over_http:
            return answer.body if isinstance(answer, HttpAnswer) else answer
        if isinstance(answer, bytes):
            answer = HttpAnswer(http.HTTPStatus.OK, answer, "application/octet-stream")
        return answer.serialize()

    def _refusal(self, route: SessionRoute, error: RequestError) -> bytes | HttpAnswer:
        if route.refuse is not None:
            return route.refuse(error)
        return error.message.encode() if route.websocket else HttpAnswer.of_error(error)

    def _receive_frames(self, call: Call, data: bytes) -> None:
        websocket = self._websocket
        websocket.receive_data(data)
        frames = websocket.events_received()
        for frame in frames:
            opcode = frame.opcode  # type: ignore[union-attr]
            if opcode is Opcode.CLOSE:
                self.admit(0)
                # Kept until the requests before it are answered: nothing may follow a close frame.
                self._reply = b"".join(websocket.data_to_send())
                self._calls.receive(call, None)
                return
            # The library has answered a ping: its pong is in `data_to_send` below.
            if opcode is Opcode.PING or opcode is Opcode.PONG:
                continue
            try:
                message = self._joiner.add(frame)  # type: ignore[arg-type]
            except WrongKindError as error:
                raise self._broken(CloseCode.UNSUPPORTED_DATA, str(error)) from None
            if message is not None:
                self._calls.receive(call, message)
        problem = websocket.parser_exc
        if isinstance(problem, PayloadTooBig):
            text = f"a request is larger than max_message_bytes={self._limits.max_message_bytes}"
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)
        if problem is not None:
            raise self._broken(CloseCode.PROTOCOL_ERROR, f"it speaks no WebSocket: {problem}")
        self._outgoing.extend(websocket.data_to_send())
        # Bytes that have come, and not those that a frame's head announces.
        self.admit(len(websocket.reader.buffer) + self._joiner.size)

    def _broken(self, code: CloseCode, text: str) -> RequestError:
        """Say why the connection ends, by a code of WebSocket's own; return what ends it."""
        self._say_goodbye(code, text)
        return RequestError(Code.INVALID_ARGUMENT, text)

    # Data to send

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send an answer with the next flush; a client that has closed gets none. There are no windows: True."""
        self._connection.joins_answers = size <= SMALL
        if self._reply is not None or self.finished:
            return True
        if not parts:
            self._calls.receive(call, None)  # the connection ends with its call
            return True
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if self._over_http:
            self._outgoing.append(data)
            self.finished = True
            return True
        (self._websocket.send_text if self._texts else self._websocket.send_binary)(data)
        self._outgoing.extend(self._websocket.data_to_send())
        return True

    def finish(self, call: Call, error: RequestError | None) -> None:
        """Send the last frame."""
        if self._reply is not None:
            self._outgoing.append(self._reply)
            self.finished = True
        elif error is None and self._over_http:
            self.finished = True
        elif error is None:
            self._say_goodbye(Code.OK, "")
        else:
            self._say_goodbye(error.code, error.message)

    def _say_goodbye(self, code: Code | CloseCode, reason: str) -> None:
        if not self.finished:
            self._outgoing.append(self._last_words(code, reason))
            self.finished = True

    def _last_words(self, code: Code | CloseCode, reason: str) -> bytes:
        route = self._route
        if self._over_http and isinstance(route, SessionRoute):
            return self._packed(self._refusal(route, RequestError(Code(code), reason)))
        return close_frame(code, reason, mask=self._websocket.side is Side.CLIENT)

    def refuse(self, error: RequestError) -> None:
        """Say why the connection ends, where that was not said."""
        if self._websocket.state is OPEN or self._call is not None:
            self._say_goodbye(error.code, error.message)

    def drain(self) -> None:
        """Say that the server drains; the call goes on."""
        if self._websocket.state is OPEN and not self.finished:
            self._websocket.send_pong(DRAINING)
            self._outgoing.extend(self._websocket.data_to_send())

    def ping(self) -> None:
        """Send a ping."""
        if self._websocket.state is OPEN and not self.finished:
            self._websocket.send_ping(b"")
            self._outgoing.extend(self._websocket.data_to_send())

    def check_keepalive(self, now: float) -> bool:
        """Ask for a sign of a client that has been quiet; one that speaks no WebSocket can give none."""
        return self._websocket.state is not OPEN or super().check_keepalive(now)

    def connection_lost(self) -> None:
        """Free everything, at once and without the garbage collector."""
        self.admit(0)
        if self._call is not None:
            self._call.stream = None
            self._call = None
        self._websocket.parser.close()  # a generator, which holds its owner
        del self._websocket, self._joiner


class OpenedWebSocket(HttpProtocol):
    """WebSocket over a connection that the server itself has made, after its handshake.

    Args:
        connection: What speaks it.
        port: The server's port.
        client_version: The version of this package at the other end; empty: of another package.
        used: Called when the other end begins to speak.
    """

    def __init__(self, connection: Connection, port: Port, client_version: str, used: Callable[[], None]) -> None:
        super().__init__(connection, port, Routes(), HostNames())
        # The handshake is done: frames follow at once.
        self._head = None
        size = self._limits.max_message_bytes
        self._websocket = Protocol(Side.CLIENT, state=OPEN, max_size=size, logger=LOGGER)
        self._client_version = client_version
        self._used = used

    def _receive_rest(self, data: bytes) -> None:
        """Take frames; the first ones begin the call."""
        if self._call is None:
            # Not before: the other end may begin in hours, and an open call takes a place of `max_connections`.
            self._used()
            self._call = self.begin(Admitted(True, self._client_version))
        super()._receive_rest(data)


def _relay(request: HttpRequest, session: ServedSession) -> Conversation:
    """Answer messages of dm_env_rpc as they are."""

    async def answer(message: bytes) -> bytes:
        return b"".join(await session.handle(message))

    return answer
