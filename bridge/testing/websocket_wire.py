"""dm_env_rpc over WebSocket for the conformance checks, in the form of a gRPC channel.

It uses the client of the package `websockets`, not this library's.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.protocol import OPEN, Protocol, Side
from websockets.sync.client import connect
from websockets.sync.connection import Connection
from websockets.typing import Subprotocol

from bridge.core.client.wire.dialed import take
from bridge.core.transport.address import Address, shown_token
from bridge.core.transport.service import code_of_status
from bridge.core.transport.tls import client_context
from bridge.core.transport.websocket import PATH, SUBPROTOCOL, code_of_close, token_subprotocol
from bridge.errors import Code, SettingError

__all__ = ["WebSocketChannel"]

_CODES = {status.value[0]: status for status in grpc.StatusCode}


class _Ended(grpc.RpcError):
    """The end of a stream, in the form of grpcio's exception."""

    def __init__(self, code: Code, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        """Return the status code."""
        return _CODES[int(self._code)]

    def details(self) -> str:
        """Return the message."""
        return self._details


class _Call:
    """A call over one WebSocket: iterating connects, and yields the responses.

    Args:
        open_socket: Connects.
        requests: The requests; sending ends with the iterator.
        pack: Serializes a request.
        unpack: Parses a response.
        lazy: True to connect only at the first request.
    """

    def __init__(
        self,
        open_socket: Callable[[], Connection],
        requests: Iterator[Any],
        pack: Callable[[Any], bytes],
        unpack: Callable[[bytes], Any],
        *,
        lazy: bool = False,
    ) -> None:
        self._open_socket = open_socket
        self._requests = requests
        self._pack, self._unpack = pack, unpack
        self._lazy = lazy
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._cancelled = False

    def __iter__(self) -> Iterator[Any]:
        if self._lazy and (first := next(self._requests, None)) is not None:
            self._requests = itertools.chain([first], self._requests)
        try:
            connection = self._open_socket()
        except InvalidStatus as error:
            status = error.response.status_code
            raise _Ended(code_of_status(status), f"the answer has the HTTP status {status}") from error
        except (OSError, InvalidHandshake) as error:
            raise _Ended(Code.UNAVAILABLE, f"no connection: {error}") from error
        sender = threading.Thread(target=self._send, args=(connection,), name="bridge-conformance-sender", daemon=True)
        with connection:
            with self._lock:
                self._connection = connection
                cancelled = self._cancelled
            if cancelled:
                self.cancel()
            sender.start()
            try:
                yield from self._answers(connection)
            finally:
                self.cancel()
        sender.join(5.0)

    def _answers(self, connection: Connection) -> Iterator[Any]:
        try:
            while True:
                message = connection.recv()
                if isinstance(message, str):
                    raise _Ended(Code.INTERNAL, f"it sent a text message: {message!r:.80}")
                yield self._unpack(bytes(message))
        except ConnectionClosed as error:
            if error.rcvd is None:
                raise _Ended(Code.UNAVAILABLE, "it closed the connection without a close frame") from error
            code = code_of_close(error.rcvd.code)
            if code is not Code.OK:
                raise _Ended(code, error.rcvd.reason or f"it closed with {error.rcvd.code}") from error

    def _send(self, connection: Connection) -> None:
        with contextlib.suppress(ConnectionClosed, OSError):
            for request in self._requests:
                connection.send(self._pack(request))
            connection.close()

    def cancel(self) -> None:
        """End the stream at once, as if the client had died."""
        with self._lock:
            self._cancelled, connection = True, self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)


class WebSocketChannel:
    """A channel to a server over WebSocket.

    Args:
        address: The server.
        timeout: Seconds to wait for the connection.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self._address, self._timeout = address, timeout
        token = shown_token(address)
        names = [SUBPROTOCOL] if token is None else [SUBPROTOCOL, token_subprotocol(token)]
        self._url = f"{address.scheme}://{address.target}{PATH}"
        self._options: dict[str, Any] = {
            "subprotocols": [Subprotocol(name) for name in names],
            "max_size": None,
            "compression": None,
            "open_timeout": timeout,
            "close_timeout": 1.0,
        }
        if address.tls:
            self._options["ssl"] = client_context(address.credentials, "http/1.1")
            self._options["server_hostname"] = address.server_name

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any) -> Any:
        """Return a function that begins a call with an iterator of requests."""
        del method  # the path implies it

        def call(requests: Iterator[Any], metadata: Sequence[tuple[str, str]] = ()) -> _Call:
            del metadata  # the token is sent as a subprotocol
            # A server that dials in notices only at the first request that a socket is used, and opens the next one
            # then.
            lazy = self._address.dialed
            return _Call(self._open_socket, requests, request_serializer, response_deserializer, lazy=lazy)

        return call

    def _open_socket(self) -> Connection:
        if not self._address.dialed:
            connection: Connection = connect(self._url, **self._options)
            return connection
        # It opens the next socket when it notices that one is used.
        deadline = time.monotonic() + self._timeout
        while (found := take(self._address)) is None:
            if time.monotonic() > deadline:
                raise OSError(f"the server has dialed no further WebSocket within {self._timeout:g} s")
            time.sleep(0.02)
        if found.tls is not None:
            raise SettingError("expected listen:// without tls= for a check, got it with TLS")
        found.sock.setblocking(True)
        return Connection(found.sock, Protocol(Side.SERVER, state=OPEN, max_size=None), close_timeout=1.0)

    def __enter__(self) -> WebSocketChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: each call has its own connection."""
