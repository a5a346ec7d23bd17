"""HTTP/1.1 and WebSocket for a server: requests for paths, and sessions over WebSocket.

A connection carries one request, or one WebSocket with one session. The routes of the server's protocols (`port.py`)
define the paths. The protocol `websocket_protocol` is dm_env_rpc over WebSocket.
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
# The library limits lines and fields, but gets a request's head only when it is complete.
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
    """The routes of all protocols, by method and path.

    Args:
        protocols: The protocols; those without routes are skipped.
    """

    def __init__(self, protocols: Iterable[PortProtocol] = ()) -> None:
        self._routes: dict[tuple[str, str], Route | SessionRoute] = {}
        for protocol in protocols:
            for route in protocol.routes:
                self._routes[route.method, route.path] = route
                if route.method == "GET" and isinstance(route, Route):
                    self._routes.setdefault(("HEAD", route.path), route)

    def find(self, head: bytes) -> tuple[str, Route | SessionRoute | None]:
        """Return the method of a request, and its route; None: there is no route."""
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        name = method.decode("latin-1")
        return name, self._routes.get((name, path.decode("latin-1")))


class HttpProtocol(ConnectionHandler):
    """HTTP/1.1 on one connection. Its output goes into the connection's `outgoing`.

    Args:
        connection: The connection.
        port: The server's port.
        routes: The routes.
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
        """The received bytes of the request's head; None: the head was handled."""
        self._route: Route | SessionRoute | None = None
        self._request = HttpRequest("", "")
        self._length = 0
        """The length of the request's body."""
        self._body: bytearray | None = None
        """The received part of the body; None: there is no body, or it is complete."""
        self._websocket: Protocol
        self._expect(Opcode.BINARY)
        self._over_http = False
        """True if the session is for one request and its answer, not for a WebSocket."""
        self._call: Call | None = None
        self._reply: bytes | None = None
        """The answer to the client's close frame, until its requests are served."""

    def _expect(self, kind: Opcode, *subprotocols: str) -> None:
        """Set the kind of the messages and the subprotocols, before a handshake."""
        self._texts, self._joiner = kind is Opcode.TEXT, MessageJoiner(kind)
        size, names = self._limits.max_message_bytes, [Subprotocol(name) for name in subprotocols if name]
        self._websocket = ServerProtocol(subprotocols=names or None, max_size=size, logger=LOGGER)

    # Received data

    def receive_data(self, data: bytes) -> None:
        """Read bytes, and pass the requests that they complete to the call.

        Raises:
            RequestError: The client breaks the rules of WebSocket, or its request is not admitted.
        """
        # After our last answer, or the client's close frame, all bytes are ignored.
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
        """Read the bytes after a request's head."""
        if self._body is not None:
            self._receive_body(self._body, data)
        elif self._call is not None and not self._over_http:
            self._receive_frames(self._call, data)

    def _receive_head(self, head: bytes) -> None:
        """Answer an HTTP request, or begin to read its body or to speak WebSocket."""
        method, route = self._routes.find(head)
        self._route = route
        if route is not None and method != "GET":
            # The library accepts only GET, in some versions also HEAD: it is given the request as one without a body.
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
            method = getattr(received, "method", "GET")  # older versions of the package accept no other
        request = self._request = HttpRequest(method, received.path, received.headers)
        # Before all else: a page whose name was resolved to this machine gets no file, and no WebSocket.
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
        """Check that the client may send this request, and read the body."""
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
        """Begin to read the body. For a session, only if the client was accepted."""
        if not self.finished:
            self._body = bytearray()
            self._receive_body(self._body, b"")

    def _receive_body(self, body: bytearray, data: bytes) -> None:
        """Read a part of the body; serve the request when it is complete. Raises RequestError if it is too large."""
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
        # Without bytes after the body: the connection carries one request.
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
        except Exception:  # answered with an error; otherwise the connection would end without an answer
            _faults.exception("the route %s failed", route.path)
            answer = _FAILED
        self._send_answer(answer)

    # A session

    def _upgrade(self, received: Request, route: SessionRoute) -> None:
        """Begin to speak WebSocket; if the client may not connect, tell it by a close code."""
        websocket = self._websocket
        assert isinstance(websocket, ServerProtocol)
        # Also if the client is refused next: browsers show scripts a close code, but no HTTP status.
        response = websocket.accept(received)
        if response.status_code != http.HTTPStatus.SWITCHING_PROTOCOLS:
            self._send_answer(HttpAnswer(http.HTTPStatus(response.status_code), bytes(response.body or b"")))
            return
        response.headers[HELLO] = __version__
        websocket.send_response(response)
        self._outgoing.extend(websocket.data_to_send())
        self._begin_call(route)

    def _begin_call(self, route: SessionRoute) -> None:
        """Admit a client, or tell it why it was refused."""
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
        """Let a route answer the messages of a call."""
        if route.converse is None and not self._over_http:
            return  # the session itself answers the messages
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
            # An answer without parts ends the session.
            return [] if found is None and not self._over_http else [self._packed(found or b"")]

        call.translate(handle, refuse)

    def _packed(self, answer: bytes | HttpAnswer) -> bytes:
        """Return an answer's bytes, over HTTP or as a message of a WebSocket."""
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
        # The bytes that have arrived, not those that a frame's header announces.
        self.admit(len(websocket.reader.buffer) + self._joiner.size)

    def _broken(self, code: CloseCode, text: str) -> RequestError:
        """Send why the connection ends, by one of WebSocket's own codes; return the error that ends it."""
        self._say_goodbye(code, text)
        return RequestError(Code.INVALID_ARGUMENT, text)

    # Data to send

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send an answer with the next flush, unless the client has closed. Always True: there are no windows."""
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
        """Send the close frame, or the end of an answer."""
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
        """Tell the client why the connection ends, if it was not told before."""
        if self._websocket.state is OPEN or self._call is not None:
            self._say_goodbye(error.code, error.message)

    def drain(self) -> None:
        """Tell the client that the server drains; the call continues."""
        if self._websocket.state is OPEN and not self.finished:
            self._websocket.send_pong(DRAINING)
            self._outgoing.extend(self._websocket.data_to_send())

    def ping(self) -> None:
        """Send a ping."""
        if self._websocket.state is OPEN and not self.finished:
            self._websocket.send_ping(b"")
            self._outgoing.extend(self._websocket.data_to_send())

    def check_keepalive(self, now: float) -> bool:
        """Send a ping to a client that has been quiet. A client that does not speak WebSocket cannot answer one."""
        return self._websocket.state is not OPEN or super().check_keepalive(now)

    def connection_lost(self) -> None:
        """Free all memory at once, without the garbage collector."""
        self.admit(0)
        if self._call is not None:
            self._call.stream = None
            self._call = None
        self._websocket.parser.close()  # a generator, which refers to its owner
        del self._websocket, self._joiner


class OpenedWebSocket(HttpProtocol):
    """WebSocket on a connection that the server itself made, after the handshake.

    Args:
        connection: The connection.
        port: The server's port.
        client_version: The version of this package at the other end; empty: another package.
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
        """Read frames; the first ones open the call."""
        if self._call is None:
            # Not before: the other end may begin in hours, and an open call takes a place of `max_connections`.
            self._used()
            self._call = self.begin(Admitted(True, self._client_version))
        super()._receive_rest(data)


def _relay(request: HttpRequest, session: ServedSession) -> Conversation:
    """Answer messages of dm_env_rpc by the session itself."""

    async def answer(message: bytes) -> bytes:
        return b"".join(await session.handle(message))

    return answer
