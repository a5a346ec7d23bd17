"""dm_env_rpc over WebSocket: what both ends must agree on. The path, the token, the close codes, whole messages.

One binary message is one EnvironmentRequest or EnvironmentResponse. The frames are those of the package `websockets`,
whose protocol objects do no input or output. It is an extra: this module is imported only if WebSocket is used.
"""

from __future__ import annotations

import base64
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

from websockets.frames import Close, CloseCode, Frame, Opcode

from bridge.core.transport.service import METHOD, SERVICE
from bridge.errors import Code

__all__ = [
    "DRAINING",
    "LOGGER",
    "PATH",
    "SUBPROTOCOL",
    "MessageJoiner",
    "WrongKindError",
    "close_frame",
    "code_of_close",
    "shown_token_in",
    "token_subprotocol",
    "without_ping_timeout",
]

PATH = f"/{SERVICE}/{METHOD}"
"""The path of the WebSocket's URL: that of the gRPC method."""
SUBPROTOCOL = SERVICE.rpartition(".")[0]
"""The subprotocol that the server selects: `dm_env_rpc.v1`."""
_TOKEN = "bridge.token."
# Codes from 4000 on are for private use (RFC 6455, 7.4.2). We send 4000 plus the number of the gRPC status.
_CLOSE_CODES = 4000
# A control frame has at most 125 bytes, of which the code takes two (RFC 6455, 5.5).
_MAX_REASON = 123
DRAINING = b"draining"
"""The data of an unsolicited Pong with which a server announces that it drains; other packages' clients ignore it."""
LOGGER = logging.getLogger("bridge.websockets")
"""The logger of the package `websockets`: its debug lines would show the token."""
LOGGER.setLevel(logging.WARNING)

# WebSocket's own codes: proxies and other servers send them, and our server sends NORMAL_CLOSURE for OK.
_BY_CLOSE_CODE = {
    CloseCode.NORMAL_CLOSURE: Code.OK,
    CloseCode.GOING_AWAY: Code.UNAVAILABLE,
    CloseCode.NO_STATUS_RCVD: Code.UNAVAILABLE,
    CloseCode.POLICY_VIOLATION: Code.PERMISSION_DENIED,
    CloseCode.MESSAGE_TOO_BIG: Code.RESOURCE_EXHAUSTED,
    CloseCode.SERVICE_RESTART: Code.UNAVAILABLE,
    CloseCode.TRY_AGAIN_LATER: Code.UNAVAILABLE,
    CloseCode.BAD_GATEWAY: Code.UNAVAILABLE,
}


def token_subprotocol(token: str) -> str:
    """Return the subprotocol that carries a token, because scripts in a browser cannot set header fields."""
    # The name of a subprotocol may contain neither `/` nor `=` (RFC 6455, 4.1).
    return _TOKEN + base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")


def shown_token_in(subprotocols: Iterable[str]) -> str | None:
    """Return the token in the offered subprotocols; None: there is none."""
    for name in subprotocols:
        if name.startswith(_TOKEN):
            text = name[len(_TOKEN) :]
            try:
                return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode()
            except ValueError:
                return ""  # there is one, and it is malformed
    return None


def close_frame(code: Code | CloseCode, reason: str, *, mask: bool = False) -> bytes:
    """Return the frame with which a server ends a connection.

    Args:
        code: A status code, sent as 4000 plus its number (OK as 1000), or one of WebSocket's own codes.
        reason: The reason; it is cut to what a frame holds.
        mask: True if the server made the connection: it is then WebSocket's client, whose frames are masked.
    """
    if isinstance(code, Code):
        number = int(CloseCode.NORMAL_CLOSURE) if code is Code.OK else _CLOSE_CODES + int(code)
    else:
        number = int(code)
    text = reason.encode()
    if len(text) > _MAX_REASON:
        # The ellipsis takes three bytes. A character that is cut in two is dropped: a reason must be valid UTF-8.
        text = text[: _MAX_REASON - 3].decode(errors="ignore").encode() + "…".encode()
    return bytes(Frame(Opcode.CLOSE, Close(number, text.decode()).serialize()).serialize(mask=mask))


def code_of_close(number: int) -> Code:
    """Return the status code for a close code."""
    if number - _CLOSE_CODES in Code.__members__.values():
        return Code(number - _CLOSE_CODES)
    return _BY_CLOSE_CODE.get(number, Code.INTERNAL)  # type: ignore[call-overload, no-any-return]


class WrongKindError(Exception):
    """A text message came where binary ones are expected, or the reverse."""


class MessageJoiner:
    """Joins the frames of fragmented messages.

    Args:
        kind: The opcode of messages: BINARY or TEXT.
    """

    def __init__(self, kind: Opcode = Opcode.BINARY) -> None:
        self._kind = kind
        self._parts: bytearray | None = None

    @property
    def size(self) -> int:
        """The bytes so far of an incomplete message."""
        return 0 if self._parts is None else len(self._parts)

    def add(self, frame: Frame) -> bytes | None:
        """Add a data frame; return the message that it completes.

        Raises:
            WrongKindError: The message is of the other kind.
        """
        if frame.opcode is not self._kind and frame.opcode is not Opcode.CONT:
            if self._kind is Opcode.TEXT:
                raise WrongKindError("expected text messages, each one message of JSON, got a binary message")
            raise WrongKindError("expected binary messages, each one message of dm_env_rpc, got a text message")
        if self._parts is None:
            if frame.fin:
                return bytes(frame.data)
            # A bytearray grows in place. Joining `bytes` for each fragment would take time quadratic in their number.
            self._parts = bytearray()
        self._parts += frame.data
        if not frame.fin:
            return None
        message, self._parts = bytes(self._parts), None
        return message


def without_ping_timeout(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords with which `connect` or `serve` of `websockets.sync` does not close for a missing pong.

    Pings are sent nonetheless: proxies and firewalls forget idle connections.
    """
    # Versions before 15 send no pings, and do not have the keyword.
    return {"ping_timeout": None} if "ping_timeout" in inspect.signature(function).parameters else {}
