"""HTTP/1.1 as the server speaks it to browsers: the files of its page, and dm_env_rpc over WebSocket.

A connection carries one request for a file, or one WebSocket with one call.
"""

from __future__ import annotations

import http
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from websockets.exceptions import PayloadTooBig
from websockets.frames import CloseCode, Opcode
from websockets.headers import parse_subprotocol
from websockets.http11 import Request
from websockets.protocol import OPEN, Protocol, Side
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from bridge.core.logs import LimitedLog
from bridge.core.server.auth import Gate
from bridge.core.server.connection import Connection, ConnectionProtocol
from bridge.core.server.limits import Limits
from bridge.core.server.web_site import HttpAnswer, WebSite
from bridge.core.transport.http2_sender import SMALL
from bridge.core.transport.messages import LARGE
from bridge.core.transport.service import HELLO
from bridge.core.transport.websocket import (
    DRAINING,
    LOGGER,
    PATH,
    SUBPROTOCOL,
    MessageJoiner,
    WrongKindError,
    close_frame,
    shown_token_in,
)
from bridge.errors import Code, RequestError
from bridge.version import __version__

if TYPE_CHECKING:
    from bridge.core.server.calls import Call
    from bridge.core.server.connections import Connections

__all__ = ["DialedWebProtocol", "WebProtocol", "field_of"]

_log = LimitedLog(__name__)
_END_OF_HEAD = b"\r\n\r\n"
# The library bounds lines and fields, but is given a head only once all of it has come.
_MAX_HEAD = 16384
# Bytes of requests that wait for earlier ones, from which on nothing more is read.
_MAX_WAITING = 1 << 22


class WebProtocol(ConnectionProtocol):
    """One connection's HTTP/1.1. What is to be sent goes into the connection's `outgoing`.

    Args:
        connection: What speaks it.
        handler: Gets the call.
        limits: `max_message_bytes`.
        gate: Asks for the token.
        site: The files, and who may come.
    """

    _path = PATH
    """The path that is for a WebSocket, and not for a file."""

    def __init__(self, connection: Connection, handler: Connections, limits: Limits, gate: Gate, site: WebSite) -> None:
        super().__init__(connection)
        self._handler = handler
        self._limits = limits
        self._gate = gate
        self._site = site
        self._outgoing = connection.outgoing
        self._head: bytes | None = b""
        """The received bytes of the request's head; None: it was answered."""
        self._websocket: Protocol
        self._expect(Opcode.BINARY, Subprotocol(SUBPROTOCOL))
        self._call: Call | None = None
        self._reply: bytes | None = None
        """The answer to the client's close frame, until its requests are served."""
        self._admitted = 0
        self._waiting = 0

    def _expect(self, kind: Opcode, *subprotocols: Subprotocol) -> None:
        """Before a handshake: say of what kind messages are, and which subprotocols there are."""
        self._texts, self._joiner = kind is Opcode.TEXT, MessageJoiner(kind)
        size = self._limits.max_message_bytes
        self._websocket = ServerProtocol(subprotocols=subprotocols or None, max_size=size, logger=LOGGER)

    @property
    def receives_large(self) -> bool:
        """True if a large request is being received."""
        return self._admitted > 0

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
                    self._send_file(HttpAnswer(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text.encode()))
                return
            head, data = self._head[: end + len(_END_OF_HEAD)], self._head[end + len(_END_OF_HEAD) :]
            self._head = None
            self._receive_head(head)
        if data:
            self._receive_rest(data)

    def _receive_rest(self, data: bytes) -> None:
        """Take what follows the head of a request."""
        if self._call is not None:
            self._receive_frames(self._call, data)

    def _receive_head(self, head: bytes) -> None:
        """Answer an HTTP request."""
        self._websocket.receive_data(head)
        events = self._websocket.events_received()
        request = events[0] if events else None
        if not isinstance(request, Request):
            text = "expected a request of HTTP/1.1 without a body\n"
            self._send_file(HttpAnswer(http.HTTPStatus.BAD_REQUEST, text.encode()))
            return
        # Before all else: a page whose name was made to resolve to this machine gets no file, and no WebSocket.
        host = field_of(request, "Host")
        refusal = self._site.check_host(host)
        if refusal is not None or host is None:
            _log.warning("refused %s: a request for the host %.80r", self._connection.peer, host)
            self._send_file(refusal)
        elif request.path.partition("?")[0] == self._path:
            self._upgrade(request, host)
        else:
            self._serve_file(request)

    def _serve_file(self, request: Request) -> None:
        """Answer a request that is for no WebSocket."""
        method = getattr(request, "method", "GET")  # older versions of the package take no other
        answer = self._site.answer(method, request.path, field_of(request, "Accept-Encoding") or "")
        self._send_file(answer, with_body=method != "HEAD")

    def _send_file(self, answer: HttpAnswer | None, *, with_body: bool = True) -> None:
        if answer is not None:
            self._outgoing.append(answer.serialize(with_body=with_body))
        self.finished = True

    def _upgrade(self, request: Request, host: str) -> None:
        """Begin to speak WebSocket, and say in its words if the client may not."""
        websocket = self._websocket
        assert isinstance(websocket, ServerProtocol)
        # Also where the client is refused next: browsers show scripts a close code, and no HTTP status.
        response = websocket.accept(request)
        if response.status_code != http.HTTPStatus.SWITCHING_PROTOCOLS:
            self._send_file(HttpAnswer(http.HTTPStatus(response.status_code), bytes(response.body or b"")))
            return
        response.headers[HELLO] = __version__
        websocket.send_response(response)
        self._outgoing.extend(websocket.data_to_send())
        self._begin_call(request, host)

    def _begin_call(self, request: Request, host: str) -> None:
        """Admit a client, or say why it may not."""
        try:
            self._call = self._open_call(request, host)
        except RequestError as error:
            self._say_goodbye(error.code, error.message)

    def _open_call(self, request: Request, host: str) -> Call:
        """Admit a client. Raises RequestError."""
        peer = self._connection.peer
        try:
            self._site.check_origin(field_of(request, "Origin"), host)
        except RequestError as error:
            _log.warning("refused %s: %s", peer, error.message)
            raise
        names = [name for text in request.headers.get_all("Sec-WebSocket-Protocol") for name in parse_subprotocol(text)]
        may_act = self._gate.check(shown_token_in(names), peer)
        call = self._handler.open(self._connection, field_of(request, HELLO) or "", may_act=may_act)
        call.stream = self
        return call

    def _receive_frames(self, call: Call, data: bytes) -> None:
        websocket = self._websocket
        websocket.receive_data(data)
        frames = websocket.events_received()
        for frame in frames:
            opcode = frame.opcode  # type: ignore[union-attr]
            if opcode is Opcode.CLOSE:
                self._release()
                # Kept until the requests before it are answered: nothing may follow a close frame.
                self._reply = b"".join(websocket.data_to_send())
                self._handler.calls.receive(call, None)
                return
            # The library has answered a ping: its pong is in `data_to_send` below.
            if opcode is Opcode.PING or opcode is Opcode.PONG:
                continue
            try:
                message = self._joiner.add(frame)  # type: ignore[arg-type]
            except WrongKindError as error:
                raise self._broken(CloseCode.UNSUPPORTED_DATA, str(error)) from None
            if message is not None:
                self._handler.calls.receive(call, message)
        problem = websocket.parser_exc
        if isinstance(problem, PayloadTooBig):
            text = f"a request is larger than max_message_bytes={self._limits.max_message_bytes}"
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)
        if problem is not None:
            raise self._broken(CloseCode.PROTOCOL_ERROR, f"it speaks no WebSocket: {problem}")
        self._outgoing.extend(websocket.data_to_send())
        # Bytes that have come, and not those that a frame's head announces.
        self._admit(len(websocket.reader.buffer) + self._joiner.size)

    def _broken(self, code: CloseCode, text: str) -> RequestError:
        """Say why the connection ends, by a code of WebSocket's own; return what ends it."""
        self._say_goodbye(code, text)
        return RequestError(Code.INVALID_ARGUMENT, text)

    # The bytes that count for `max_queued_bytes`

    def _admit(self, incomplete: int) -> None:
        """Count the bytes of a request that is not complete; raise RequestError where they are too many."""
        more = (incomplete if incomplete > LARGE else 0) - self._admitted
        if more:
            self._connection.admit(more)
            self._admitted += more

    def _release(self) -> None:
        """Give back what was counted: the request is given up."""
        self._connection.hold(-self._admitted)
        self._admitted = 0

    # Data to send

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send an answer with the next flush; a client that has closed gets none. There are no windows: True."""
        self._connection.joins_answers = size <= SMALL
        if self._reply is None and not self.finished:
            self._send(parts[0] if len(parts) == 1 else b"".join(parts))
            self._outgoing.extend(self._websocket.data_to_send())
        return True

    def _send(self, data: bytes | memoryview) -> None:
        (self._websocket.send_text if self._texts else self._websocket.send_binary)(data)

    def defer(self, call: Call, size: int) -> None:
        """Read nothing more from a client of which much waits."""
        # WebSocket has no windows for the peer: to read no more is the only way to slow it down.
        self._waiting += size
        if self._waiting > _MAX_WAITING and not self._connection.paused:
            self._connection.paused = True
            self._connection.flush()

    def resume(self, call: Call, size: int) -> None:
        """Read on once little waits."""
        self._waiting -= size
        # At half, so that it is not paused and read again for every request.
        if self._connection.paused and self._waiting <= _MAX_WAITING // 2:
            self._connection.paused = False
            self._connection.flush()

    def finish(self, call: Call, error: RequestError | None) -> None:
        """Send the last frame."""
        if self._reply is not None:
            self._outgoing.append(self._reply)
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
        self._release()
        if self._call is not None:
            self._call.stream = None
            self._call = None
        self._websocket.parser.close()  # a generator, which holds its owner
        del self._websocket, self._joiner


class DialedWebProtocol(WebProtocol):
    """WebSocket over a connection that the server itself has made, after its handshake.

    Args:
        connection: What speaks it.
        handler: Gets the call, once the other end begins to speak.
        limits: `max_message_bytes`.
        client_version: The version of this package at the other end; empty: of another package.
        used: Called when the other end begins to speak.
    """

    def __init__(
        self,
        connection: Connection,
        handler: Connections,
        limits: Limits,
        client_version: str,
        used: Callable[[], None],
    ) -> None:
        super().__init__(connection, handler, limits, Gate(None), WebSite({}))
        # The handshake is done: frames follow at once.
        self._head = None
        self._websocket = Protocol(Side.CLIENT, state=OPEN, max_size=limits.max_message_bytes, logger=LOGGER)
        self._client_version = client_version
        self._used = used

    def _receive_rest(self, data: bytes) -> None:
        """Take frames; the first ones begin the call."""
        if self._call is None:
            # Not before: the other end may begin in hours, and an open call takes a place of `max_connections`.
            self._used()
            self._call = self._handler.open(self._connection, self._client_version, may_act=True)
            self._call.stream = self
        super()._receive_rest(data)


def field_of(request: Request, name: str) -> str | None:
    """Return a header field; None: it is missing, or came several times."""
    try:
        return request.headers.get(name)
    except LookupError:
        return None
