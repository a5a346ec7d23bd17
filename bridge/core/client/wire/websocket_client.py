"""The client's side of a WebSocket, without a socket: one dm_env_rpc call, in binary messages."""

from __future__ import annotations

from typing import Any

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus, PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN, Protocol, Side
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from bridge.core.client.wire import keepalive
from bridge.core.client.wire.grpc_client import CarriedCall, Received, call_error
from bridge.core.transport.address import Address, shown_token
from bridge.core.transport.service import HELLO, code_of_status, remedy
from bridge.core.transport.websocket import (
    DRAINING,
    LOGGER,
    PATH,
    SUBPROTOCOL,
    MessageJoiner,
    WrongKindError,
    code_of_close,
    token_subprotocol,
)
from bridge.errors import Code, ConnectError, PeerError, RefusedError, RemoteError
from bridge.version import __version__

__all__ = ["WebSocketClient"]

_MAX_BODY = 200


class WebSocketClient:
    """Turns requests into bytes, and bytes into answers, for the only call of a connection.

    Args:
        address: The server.
        max_message_bytes: The largest answer.
    """

    ALPN = "http/1.1"
    http = None

    def __init__(self, address: Address, max_message_bytes: int) -> None:
        self._address = address
        self._max_message_bytes = max_message_bytes
        token = shown_token(address)
        names = [SUBPROTOCOL] if token is None else [SUBPROTOCOL, token_subprotocol(token)]
        self._websocket: Protocol
        if address.dialed:  # the handshake is done, in which the other end was the client
            # The end that was the client in the handshake masks its frames.
            self._websocket = Protocol(Side.SERVER, state=OPEN, max_size=max_message_bytes, logger=LOGGER)
        else:
            self._websocket = ClientProtocol(
                parse_uri(f"{address.scheme}://{address.target}{PATH}"),
                subprotocols=[Subprotocol(name) for name in names],
                max_size=max_message_bytes,
                logger=LOGGER,
            )
        self._joiner = MessageJoiner()
        self._call: CarriedCall | None = None
        self.outgoing: list[bytes | memoryview] = []
        """Bytes to send."""
        self.answered = False
        """True if the server is known to speak WebSocket."""
        self.replies = 0
        """The number of frames sent only in answer to the server's."""
        self.draining = False
        """True if the server has said that it accepts no more calls."""
        self.server_version: str | None = None
        """The version of a server of this package; None: not known, or another server."""

    foreign = False
    """Not used: a WebSocket carries one call, whatever the server."""

    @property
    def accepts_calls(self) -> bool:
        """True if another call may be opened. A WebSocket carries only one."""
        return self._call is None

    @property
    def keepalive_interval(self) -> float:
        """Seconds without a byte from the server after which it is sent a ping."""
        return keepalive.KEEPALIVE

    def open(self, call: CarriedCall) -> None:
        """Begin the only call. Requests are sent after the server's handshake."""
        self._call = call
        # If the server dialed in, it sent the handshake, and the listener answered it.
        if not isinstance(self._websocket, ClientProtocol):
            return
        request = self._websocket.connect()
        request.headers["User-Agent"] = f"gymnasium-bridge/{__version__}"
        request.headers.update(self._address.hello)  # U-12
        self._websocket.send_request(request)
        self._flush()

    def begin(self, server_version: str | None) -> None:
        """Send the requests that waited for the handshake.

        Args:
            server_version: The version of a server of this package; None: another server.
        """
        call = self._call
        if call is None:
            return
        self.server_version = server_version
        # From here on `pack` sends, and `ClientCall.send` keeps no copies.
        self.answered = True
        waiting, call.unconfirmed = call.unconfirmed, None
        for request in waiting or ():
            self.pack(call, request)
        if call.finished:
            self.finish(call)

    def pack(self, call: CarriedCall, request: bytes) -> None:
        """Send a request. Before the handshake is done, `begin` sends it."""
        if self.answered and self._websocket.state is OPEN:
            self._websocket.send_binary(request)
            self._flush()

    def finish(self, call: CarriedCall) -> None:
        """Declare that no request follows. The server serves earlier ones, and sends no more answers."""
        # WebSocket has no half-closed streams: a Close frame takes the place of HTTP/2's END_STREAM.
        if self.answered and self._websocket.state is OPEN:
            self._websocket.send_close(1000)
            self._flush()

    def cancel(self, call: CarriedCall) -> None:
        """Do nothing: the socket is closed with its only call."""

    def ping(self) -> None:
        """Send a ping."""
        if self.answered and self._websocket.state is OPEN:
            self._websocket.send_ping(b"")
            self._flush()

    def _flush(self) -> None:
        self.outgoing.extend(data for data in self._websocket.data_to_send() if data)

    def buffer_updated(self, count: int) -> list[Received]:
        """Raise: this connection has no buffer of its own to read into."""
        raise NotImplementedError

    def receive_data(self, data: bytes) -> list[Received]:
        """Read bytes; return the items that they complete. Raises RemoteError if they are not WebSocket."""
        websocket, call = self._websocket, self._call
        # The library raises EOFError for bytes after the end.
        if call is None or websocket.reader.eof:
            return []
        websocket.receive_data(data)
        came: list[Received] = []
        for event in websocket.events_received():
            if isinstance(event, Frame):
                came += self._receive_frame(call, event)
            # The answer that refuses a handshake is an event too.
            elif isinstance(event, Response) and websocket.handshake_exc is None:
                self.begin(event.headers.get(HELLO))
        self._flush()
        if websocket.handshake_exc is not None:
            raise self._refusal(websocket.handshake_exc)
        # Not the server's fault: raised with gRPC's status for it, whose remedy is a larger `max_message_bytes`.
        if isinstance(websocket.parser_exc, PayloadTooBig):
            text = f"an answer is larger than max_message_bytes={self._max_message_bytes}"
            came.append((call, RefusedError(call.url, f"the stream was ended: {text}", int(Code.RESOURCE_EXHAUSTED))))
        elif websocket.parser_exc is not None:
            raise PeerError(
                self._address.url, f"it speaks no WebSocket: {websocket.parser_exc}"
            ) from websocket.parser_exc
        return came

    def _receive_frame(self, call: CarriedCall, frame: Frame) -> list[Received]:
        if frame.opcode is Opcode.PING or frame.opcode is Opcode.PONG:
            self.replies += frame.opcode is Opcode.PING
            # WebSocket has no GOAWAY. A server of this package sends an unsolicited Pong instead, which other clients
            # ignore.
            self.draining = self.draining or (frame.opcode is Opcode.PONG and bytes(frame.data) == DRAINING)
            return []
        if frame.opcode is Opcode.CLOSE:
            return [(call, self._closed(call))]
        try:
            message = self._joiner.add(frame)
        except WrongKindError as error:
            raise PeerError(self._address.url, str(error)) from error
        return [] if message is None else [(call, message)]

    def _closed(self, call: CarriedCall) -> RemoteError:
        """Return the error for the server's close frame."""
        close: Any = self._websocket.close_rcvd
        details = close.reason or f"the server closed the WebSocket with the code {close.code}"
        return call_error(call.url, self._address, code_of_close(close.code), details, answered=True)

    def _refusal(self, problem: Exception) -> RemoteError:
        """Return the error for a failed handshake."""
        if isinstance(problem, InvalidStatus):
            status = problem.response.status_code
            body = bytes(problem.response.body or b"").decode(errors="replace").strip()
            # The body may be a page of any length.
            details = f"the answer has the HTTP status {status}{f': {body}' if body else ''}"[:_MAX_BODY]
            return call_error(self._address.url, self._address, code_of_status(status), details, answered=False)
        details = f"no WebSocket server: {problem}"
        return ConnectError(self._address.url, f"{details}. {remedy(self._address.scheme, details)}")

    def cut_off(self) -> str:
        """Return the meaning of the end of the socket's stream, as an error text."""
        if self.answered:
            return "the server ended the stream"
        websocket = self._websocket
        # Read first, because at the end the library drops bytes that it could not parse.
        said_something = bool(websocket.reader.buffer)
        if not websocket.reader.eof:
            websocket.receive_eof()
        # A page without a length is complete only at the end.
        if isinstance(websocket.handshake_exc, InvalidStatus):
            return f"the answer has the HTTP status {websocket.handshake_exc.response.status_code}"
        if said_something:
            return "no WebSocket server: what it said is no answer of HTTP/1.1"
        return "it closed the connection without replying"
