"""A WebSocket to a server of another protocol, by blocking calls."""

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
# Bytes of a request that a connection without any other holds, whether its server reads or not.
_HELD = 1 << 14


class MessageSocket:
    """One connection at a time, made by `connect`; the token of the address is shown as Bearer.

    Args:
        address: The server's, `ws://` or `wss://`.
        path: The path of the request, with its leading slash.
        url: The URL for errors.
        server: What the server is, for errors: "policy server".
        hint: The remedy where there is no server, for errors.
        timeout: Seconds for the handshake, and for each answer.
        max_message_bytes: The largest answer.
        proxied: True to use the proxies that the environment variables name; a server of this machine needs none.
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
        """True if there is a connection, which may have been lost since."""
        return self._connection is not None

    def connect(self) -> None:
        """Connect.

        Raises:
            ConnectError: There is no server.
            RefusedError: It answers with an HTTP status.
            RemoteTimeoutError: There is no handshake within `timeout`.
            PeerError: It speaks no WebSocket.
            SettingError: A variable of the environment names a proxy that is none.
        """
        address, token, plain = self._address, shown_token(self._address), None
        # As a client of HTTP: `https_proxy` is for servers with TLS.
        kind = "https" if address.tls else "http"
        proxy = find_proxy(address.host, address.port, [kind]) if self._proxied else None
        self._note = "" if proxy is None else proxy.note
        try:
            # Given a socket, `websockets` looks for no proxy itself. Its versions have different rules for them.
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
                # A server that computes in its event loop answers no ping meanwhile. `timeout` says how long it may.
                **without_ping_timeout(connect),
            )
            self._connection = self._open.enter_context(opening)  # newer versions of `websockets` connect here
        except BaseException as error:  # Ctrl-C too: nobody else holds the socket
            if plain is not None:
                plain.close()
            raise self._refused(error) from None
        # A server that pings without end and reads nothing stops the thread of `websockets` in `send`, with the lock
        # that each call here waits for. Linux ends such a connection.
        end_if_unreachable(self._connection.socket, self._timeout)

    def _refused(self, error: BaseException) -> BaseException:
        """Return what is raised where the handshake raised."""
        note = self._note
        if isinstance(error, InvalidStatus):
            status = error.response.status_code
            if status in (401, 403):
                text = f"the answer has the HTTP status {status}; give the server's token={note}"
                return RefusedError(self._url, text, Code.UNAUTHENTICATED)
            if status in (502, 504):  # a gateway's: the server behind it is away
                text = f"no {self._server}: a gateway answered with the HTTP status {status}{note}"
                return ConnectError(self._url, text, unavailable=True)
            code = Code.UNAVAILABLE if status == 503 else Code.UNKNOWN
            return RefusedError(self._url, f"the answer has the HTTP status {status}{note}", code)
        # Checked before OSError, of which it is a subclass.
        if isinstance(error, TimeoutError):
            return RemoteTimeoutError(self._url, f"no handshake within {self._timeout:g} s{note}")
        # If the server closes during the handshake, `websockets` raises an error of its own with this cause. So it does
        # where a server refuses the client's certificate by TLS 1.3.
        if isinstance(error, (OSError, EOFError)) or isinstance(error.__cause__, (OSError, EOFError)):
            hint = "" if isinstance(error, ProxyError) else self._hint
            text = f"no {self._server}: {error.__cause__ or error}{hint}{note}"
            return ConnectError(self._url, text, unavailable=is_unavailable(error))
        if isinstance(error, (WebSocketException, ValueError)):
            return PeerError(self._url, f"it speaks no WebSocket: {error}{note}")
        return error

    def ask(self, message: str | bytes, answer: str) -> str | bytes:
        """Send a message, after connecting where there is no connection; return the next one.

        Raises as `connect` and `receive`; RemoteTimeoutError also where the server does not read the message.
        """
        if self._connection is None:
            self.connect()
        assert self._connection is not None
        # `websockets` sends without a deadline, and a server that reads nothing would be waited for without end. Of an
        # SSLSocket it is the plain method: its own would let the rest be sent unencrypted.
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
            RemoteTimeoutError: There is none within `timeout`.
            RefusedError, PeerError: The message, or this one's answer, is too large for its receiver.
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
        # A close frame is answered by one with the same code, so only the first of the two says who got too much.
        if received is not None and received.code == CloseCode.MESSAGE_TOO_BIG and error.rcvd_then_sent is not False:
            return RefusedError(self._url, "the request is larger than the server takes", Code.RESOURCE_EXHAUSTED)
        if sent is not None and sent.code == CloseCode.MESSAGE_TOO_BIG:
            return PeerError(self._url, f"an answer is larger than max_message_bytes={self._most}")
        return ConnectionLostError(self._url, f"the {self._server} closed the connection: {error}")

    def persist(self, call: Callable[[], Any], seconds: float) -> Any:
        """Return what a call returns, which is made again where the server is away or was lost meanwhile.

        Args:
            call: Connects where there is no connection, and asks.
            seconds: How long it is tried.
        """
        end, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while True:
            try:
                return call()
            except (ConnectError, ConnectionLostError) as error:
                # Whom TLS refuses, or a program that is no such server, is not there any sooner for being asked again.
                lasting = isinstance(error, ConnectError) and not error.unavailable
                if lasting or time.monotonic() + pause > end:
                    raise
                if pause == _FIRST_PAUSE:
                    _log.warning("%s; trying again, for at most %g s", error, seconds)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except BaseException as error:
                if not isinstance(error, RefusedError):  # then the server is well; the next request may be another
                    self.close()  # a late answer must never be taken for that of a later request
                raise

    def close(self) -> None:
        """Close the connection, where there is one."""
        self._connection = None
        if not sys.is_finalizing():  # else the connection's thread is frozen: closing would wait for it for ever
            self._open.close()

    def __del__(self) -> None:
        self.close()
