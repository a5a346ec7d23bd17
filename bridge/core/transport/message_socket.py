"""A blocking WebSocket client for servers of another protocol."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from bridge.core.logs import SafeLog
from bridge.core.transport.address import Address, shown_token
from bridge.core.transport.http_proxies import ProxyError, connect_tcp, find_proxy, is_unavailable
from bridge.core.transport.sockets import end_if_unreachable
from bridge.core.transport.tls import client_context
from bridge.core.transport.websocket import LOGGER, without_ping_timeout
from bridge.errors import (
    Code,
    ConnectError,
    ConnectionLostError,
    PeerError,
    RefusedError,
    RemoteError,
    RemoteTimeoutError,
)

__all__ = ["MessageSocket"]

_log = SafeLog(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
# Bytes of a request that a connection without another limit buffers, whether its server reads or not.
_HELD = 1 << 14


class MessageSocket:
    """One connection at a time, made by `connect`. The token of the address is sent as a Bearer token.

    Args:
        address: The server's address, `ws://` or `wss://`.
        path: The path of the request, with its leading slash.
        url: The URL for errors.
        server: A name for the server's kind, for errors: "policy server".
        hint: What to do if there is no server, for errors.
        timeout: Seconds for the handshake, and for each answer.
        max_message_bytes: The largest answer.
        proxied: True to use the proxies of the environment variables. A server on this machine needs none.
    """

    def __init__(
        self,
        address: Address,
        path: str,
        *,
        url: str,
        server: str = "server",
        hint: str = "",
        timeout: float,
        max_message_bytes: int,
        proxied: bool = False,
    ) -> None:
        self._address, self._path, self._url, self._server, self._hint = address, path, url, server, hint
        self._timeout, self._most = timeout, max_message_bytes
        self._proxied, self._note = proxied, ""
        self._open = contextlib.ExitStack()
        self._connection: ClientConnection | None = None

    @property
    def connected(self) -> bool:
        """True if a connection was made; it may have been lost since."""
        return self._connection is not None

    def connect(self) -> None:
        """Connect.

        Raises:
            ConnectError: There is no server.
            RefusedError: The server answers with an HTTP status.
            RemoteTimeoutError: The handshake takes longer than `timeout`.
            PeerError: The server does not speak WebSocket.
            SettingError: An environment variable for proxies has an invalid value.
        """
        address, token, plain = self._address, shown_token(self._address), None
        # As for HTTP: `https_proxy` is for servers with TLS.
        kind = "https" if address.tls else "http"
        proxy = find_proxy(address.host, address.port, [kind]) if self._proxied else None
        self._note = "" if proxy is None else proxy.note
        try:
            # Given a socket, `websockets` looks for no proxy itself. Its versions have different rules for proxies.
            plain = connect_tcp(address.host, address.port, self._timeout, proxy)
            opening = connect(
                f"{address.scheme}://{address.target}{self._path}",
                sock=plain,
                ssl=client_context(address.credentials) if address.tls else None,
                server_hostname=address.server_name if address.tls else None,
                additional_headers={} if token is None else {"Authorization": f"Bearer {token}"},
                compression=None,
                open_timeout=self._timeout,
                close_timeout=1.0,
                max_size=self._most,
                logger=LOGGER,
                # A server that computes in its event loop answers no ping meanwhile. `timeout` limits how long it may.
                **without_ping_timeout(connect),
            )
            self._connection = self._open.enter_context(opening)  # newer versions of `websockets` connect here
        except BaseException as error:  # Ctrl-C too: nothing else holds the socket
            if plain is not None:
                plain.close()
            raise self._refused(error) from None
        # If a server sends endless pings and reads nothing, the thread of `websockets` blocks in `send`, with the lock
        # that each call here needs. Linux ends such a connection.
        end_if_unreachable(self._connection.socket, self._timeout)

    def _refused(self, error: BaseException) -> BaseException:
        """Return the exception to raise for an error of the handshake."""
        note = self._note
        if isinstance(error, InvalidStatus):
            status = error.response.status_code
            if status in (401, 403):
                text = f"the answer has the HTTP status {status}; give the server's token={note}"
                return RefusedError(self._url, text, Code.UNAUTHENTICATED)
            if status in (502, 504):  # from a gateway: the server behind it is down
                text = f"no {self._server}: a gateway answered with the HTTP status {status}{note}"
                return ConnectError(self._url, text, unavailable=True)
            code = Code.UNAVAILABLE if status == 503 else Code.UNKNOWN
            return RefusedError(self._url, f"the answer has the HTTP status {status}{note}", code)
        # Checked before OSError, of which it is a subclass.
        if isinstance(error, TimeoutError):
            return RemoteTimeoutError(self._url, f"no handshake within {self._timeout:g} s{note}")
        # If the server closes during the handshake, `websockets` raises its own error with this cause. It does the same
        # if a server refuses the client's certificate in TLS 1.3.
        if isinstance(error, (OSError, EOFError)) or isinstance(error.__cause__, (OSError, EOFError)):
            hint = "" if isinstance(error, ProxyError) else self._hint
            text = f"no {self._server}: {error.__cause__ or error}{hint}{note}"
            return ConnectError(self._url, text, unavailable=is_unavailable(error))
        if isinstance(error, (WebSocketException, ValueError)):
            return PeerError(self._url, f"it speaks no WebSocket: {error}{note}")
        return error

    def ask(self, message: str | bytes, answer: str) -> str | bytes:
        """Send a message and return the next one; connect first if there is no connection.

        Raises as `connect` and `receive`; also RemoteTimeoutError if the server does not read the message.
        """
        if self._connection is None:
            self.connect()
        assert self._connection is not None
        # `websockets` sends without a deadline, so a server that reads nothing would block the call for ever. For an
        # SSLSocket the plain socket's method is called: its own would let the rest be sent unencrypted.
        given_up, sock = threading.Event(), self._connection.socket

        def give_up() -> None:
            given_up.set()  # first: `send` raises as soon as the socket is shut down
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

        timer = threading.Timer(self._timeout, give_up)
        try:
            if len(message) > _HELD:
                timer.start()
            self._connection.send(message)
        except ConnectionClosed as error:
            if given_up.is_set():
                text = f"the {self._server} did not read the request within {self._timeout:g} s"
                raise RemoteTimeoutError(self._url, text) from None
            raise self._lost(error) from None
        finally:
            timer.cancel()
        return self.receive(answer)

    def receive(self, answer: str) -> str | bytes:
        """Return the next message.

        Args:
            answer: The name of the expected message, for errors.

        Raises:
            ConnectionLostError: The connection is closed.
            RemoteTimeoutError: No message came within `timeout`.
            RefusedError, PeerError: The request or the answer is too large for its receiver.
        """
        assert self._connection is not None
        try:
            return self._connection.recv(timeout=self._timeout)
        except TimeoutError:
            raise RemoteTimeoutError(self._url, f"no {answer} within {self._timeout:g} s") from None
        except ConnectionClosed as error:
            raise self._lost(error) from None

    def _lost(self, error: ConnectionClosed) -> RemoteError:
        self.close()  # the next request connects again, whatever ended this connection
        received, sent = error.rcvd, error.sent
        # A close frame is answered with the same code, so only the first of the two says which message was too large.
        if received is not None and received.code == CloseCode.MESSAGE_TOO_BIG and error.rcvd_then_sent is not False:
            return RefusedError(self._url, "the request is larger than the server takes", Code.RESOURCE_EXHAUSTED)
        if sent is not None and sent.code == CloseCode.MESSAGE_TOO_BIG:
            return PeerError(self._url, f"an answer is larger than max_message_bytes={self._most}")
        return ConnectionLostError(self._url, f"the {self._server} closed the connection: {error}")

    def persist(self, call: Callable[[], Any], seconds: float) -> Any:
        """Call a function again while the server is down or the connection is lost; return its result.

        Args:
            call: Connects if there is no connection, and sends a request.
            seconds: How long to try.
        """
        end, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while True:
            try:
                return call()
            except (ConnectError, ConnectionLostError) as error:
                # Trying again does not help against a refusal by TLS, or a program that is no such server.
                lasting = isinstance(error, ConnectError) and not error.unavailable
                if lasting or time.monotonic() + pause > end:
                    raise
                if pause == _FIRST_PAUSE:
                    _log.warning("%s; trying again, for at most %g s", error, seconds)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except BaseException as error:
                if not isinstance(error, RefusedError):  # otherwise the server is well, and may accept the next request
                    self.close()  # a late answer must never be taken for that of a later request
                raise

    def close(self) -> None:
        """Close the connection, if there is one."""
        self._connection = None
        if not sys.is_finalizing():  # else the connection's thread is frozen, and closing would wait for it for ever
            self._open.close()

    def __del__(self) -> None:
        self.close()
