"""WebSockets of servers that dial, without input or output: web pages, and servers where nothing but HTTPS gets out."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from websockets.client import ClientProtocol
from websockets.http11 import Request, Response
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from bridge.dial import handshake
from bridge.errors import Code, RequestError
from bridge.server.auth import Gate
from bridge.transport.address import Address, is_loopback
from bridge.transport.service import HELLO
from bridge.transport.websocket import LOGGER, SUBPROTOCOL, close_frame, shown_token_in, token_subprotocol
from bridge.version import __version__

__all__ = ["AskingForWebSocket", "accept", "read_request"]


def read_request(head: bytes) -> Request | None:
    """Return the request of a server that asks for a WebSocket; None: it asks for something else."""
    websocket = ServerProtocol(logger=LOGGER)
    websocket.receive_data(head)
    event = next(iter(websocket.events_received()), None)
    if not isinstance(event, Request) or event.path.partition("?")[0] != handshake.PATH:
        return None
    return event if event.headers.get("Upgrade", "").lower() == "websocket" else None


def accept(asked: Request, gate: Gate, peer: str) -> tuple[str, bytes, RequestError | None]:
    """Answer the request of a server: return its name, the answer, and why it is not let in.

    A refusal is a WebSocket that is closed at once: browsers show scripts no HTTP status.
    """
    websocket = ServerProtocol(subprotocols=[Subprotocol(SUBPROTOCOL)], logger=LOGGER)
    response = websocket.accept(asked)
    if response.status_code == 101:
        response.headers[HELLO] = __version__
    websocket.send_response(response)
    data = b"".join(websocket.data_to_send())
    name = parse_qs(urlsplit(asked.path).query).get("name", [""])[0]
    if websocket.state is not OPEN:
        return name, data, RequestError(Code.INVALID_ARGUMENT, "it speaks no WebSocket as it should")
    try:
        _check(asked, name, gate, peer)
    except RequestError as error:
        return name, data + close_frame(error.code, error.message), error
    return name, data, None


def _check(asked: Request, name: str, gate: Gate, peer: str) -> None:
    """Raise RequestError unless a server may come in."""
    offered = ", ".join(asked.headers.get_all("Sec-WebSocket-Protocol"))
    gate.check(shown_token_in(text.strip() for text in offered.split(",")), peer)
    origin = asked.headers.get("Origin")
    # Any page that a browser of this machine shows can reach its loopback. Without a token only its own pages may.
    if origin is not None and not gate.asks and not is_loopback(urlsplit(origin).hostname or ""):
        text = f"a page of {origin!r:.80} needs a token: start the listener with token=, and have the page show it"
        raise RequestError(Code.PERMISSION_DENIED, text)
    handshake.check_name(name)


class AskingForWebSocket(handshake.Asking):
    """As `handshake.Asking`, for a WebSocket."""

    def __init__(self, address: Address, name: str, token: str | None) -> None:
        names = [SUBPROTOCOL] if token is None else [SUBPROTOCOL, token_subprotocol(token)]
        self._websocket = ClientProtocol(
            parse_uri(f"{address.scheme}://{address.target}{handshake.PATH}?name={name}"),
            subprotocols=[Subprotocol(text) for text in names],
            logger=LOGGER,
        )
        asked = self._websocket.connect()
        asked.headers[HELLO] = __version__
        self._websocket.send_request(asked)
        self.request = b"".join(self._websocket.data_to_send())

    def refusal(self, head: bytes, rest: bytes) -> str:
        """Return why a trainer refused, by the status or by closing at once; "": it did not."""
        self._websocket.receive_data(head + rest)
        problem, close = self._websocket.handshake_exc, self._websocket.close_rcvd
        for event in self._websocket.events_received():
            if isinstance(event, Response):
                self.version = event.headers.get(HELLO, "")
        if problem is not None:
            return super().refusal(head, rest) or f"it speaks no WebSocket as it should: {problem}"
        return "" if close is None else f"it closed the WebSocket with {close.code}: {close.reason}"
