"""A policy that another process serves, called like a function."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from bridge.errors import (
    AddressError,
    Code,
    ConnectError,
    ConnectionLostError,
    PeerError,
    RefusedError,
    RemoteError,
    RemoteTimeoutError,
    SettingError,
)
from bridge.policies.rows import as_map, row_count, take, with_rows
from bridge.policies.wire import ACTIONS, BATCH, MAX_BATCH, MAX_MESSAGE_BYTES, WireError, pack, unpack
from bridge.transport.address import parse_address
from bridge.transport.credentials import TLS, ClientCredentials, TokenLike
from bridge.transport.tls import client_context
from bridge.transport.token import shown_token
from bridge.transport.websocket import LOGGER

# After `wire`, whose error says what to install.
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException  # isort: skip
from websockets.sync.client import ClientConnection, connect  # isort: skip

__all__ = ["RemotePolicy"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class RemotePolicy:
    """A policy behind a WebSocket that speaks openpi's wire: `serve_policy`, or a server of openpi.

    The connection is made by the first call. Where it is lost, the call connects again and asks again: a policy's
    answer depends on its request alone.

    Args:
        url: `ws://HOST:PORT`, or `wss://` with TLS.
        execution_horizon: How many actions of a chunk are executed before the policy is asked again; None: all.
        timeout: Seconds to wait for an answer.
        reconnect: Seconds within which a server that is away has to be back; 0: a lost connection is an error.
        max_message_bytes: The largest answer.
        token: The token that the server expects, as for `make_remote`.
        token_file: A file that holds the token.
        tls: For `wss://`: the CA of the server's certificate.

    Raises:
        AddressError: The URL cannot be read.
        SettingError: A keyword is out of its range.
    """

    def __init__(
        self,
        url: str,
        *,
        execution_horizon: int | None = None,
        timeout: float = 10.0,
        reconnect: float = 30.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        token: TokenLike | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls: TLS | None = None,
    ) -> None:
        address = parse_address(url)
        if not address.websocket:
            raise AddressError(url, "a policy is served over WebSocket: ws://HOST:PORT or wss://HOST:PORT")
        given = ClientCredentials.of(token=token, token_file=token_file, tls=tls)
        credentials = given.with_token_of(address.credentials, address.url)
        if execution_horizon is not None and (type(execution_horizon) is not int or execution_horizon < 1):
            raise SettingError(f"expected execution_horizon to be a positive integer, got {execution_horizon!r}")
        for name, seconds in (("timeout", timeout), ("reconnect", reconnect)):
            if not 0 <= seconds < math.inf or (name == "timeout" and not seconds):
                raise SettingError(f"expected {name} to be seconds, got {seconds!r}")
        self.url = address.url
        """The URL, without its token."""
        self.seconds_in_function = 0.0
        """How long the server's function took, as far as the server says so."""
        self._address = type(address)(**{**vars(address), "credentials": credentials})
        self._horizon, self._timeout, self._reconnect = execution_horizon, timeout, reconnect
        self._max_message_bytes = max_message_bytes
        self._connection: ClientConnection | None = None
        self._open = contextlib.ExitStack()
        self._metadata: dict[str, Any] = {}
        self._chunks: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    @property
    def metadata(self) -> dict[str, Any]:
        """The server's metadata, sent when this end connected; connects if that was not done yet."""
        with self._lock:
            self._persist(self._connected)
        return self._metadata

    def __call__(self, observation: Any, slots: Sequence[int] | None = None) -> Any:
        """Return the action for an observation, or with `slots` a batch of actions for a batch of observations.

        Args:
            observation: An observation: an array, or a dict of arrays and text. With `slots`: a batch of them.
            slots: Whose the rows of a batch are: each slot executes chunks of its own.

        Raises:
            RemoteTimeoutError: No answer came in time.
            RefusedError: The server answered with an error.
            PeerError: The answer is no chunk of finite actions.
            ConnectError, ConnectionLostError: The server is away.
        """
        single = slots is None
        batch = with_rows(observation) if single else observation
        numbers = [-1] if slots is None else [int(slot) for slot in slots]
        if row_count(batch) != {len(numbers)}:
            raise SettingError(f"expected a row for each of {len(numbers)} slots, got {sorted(row_count(batch))}")
        with self._lock:
            need = [row for row, slot in enumerate(numbers) if not self._chunks.get(slot)]
            if need:
                chunks = self._persist(lambda: self._ask(take(batch, need)))
                for row, chunk in zip(need, chunks, strict=True):
                    self._chunks[numbers[row]] = list(chunk[: self._horizon])
            actions = [self._chunks[slot].pop(0) for slot in numbers]
        return actions[0] if single else np.stack(actions)

    def reset(self, slots: Sequence[int] | None = None) -> None:
        """Drop what is left of chunks, because episodes began anew: those of some slots, or all."""
        with self._lock:
            for slot in list(self._chunks) if slots is None else slots:
                self._chunks.pop(int(slot), None)

    def close(self) -> None:
        """Disconnect; a later call connects again."""
        with self._lock:
            self._drop()

    def __enter__(self) -> RemotePolicy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if "_open" in self.__dict__:  # else a URL or keyword was refused
            self._open.close()

    def _drop(self) -> None:
        self._connection = None
        self._open.close()

    def _persist(self, call: Any) -> Any:
        """Return what a call returns, connecting again where the server was lost meanwhile."""
        end, pause = time.monotonic() + self._reconnect, _FIRST_PAUSE
        while True:
            try:
                return call()
            except (ConnectError, ConnectionLostError):
                self._drop()
                if time.monotonic() + pause > end:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except RefusedError:
                raise  # the server is well; the next request may be another
            except BaseException:
                self._drop()  # a late answer must never be taken for that of a later request
                raise

    def _connected(self) -> ClientConnection:
        if self._connection is not None:
            return self._connection
        address, token = self._address, shown_token(self._address)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            plain = socket.create_connection((address.host, address.port), self._timeout)
        except OSError as error:
            raise ConnectError(self.url, f"no policy server: {error}. Start one: `bridge policy MODULE:NAME`") from None
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opening = connect(
                f"{address.scheme}://{address.target}/{address.env_id or ''}",
                sock=plain,
                ssl=client_context(address.credentials) if address.tls else None,
                server_hostname=address.server_name if address.tls else None,
                additional_headers=headers,
                compression=None,
                open_timeout=self._timeout,
                close_timeout=1.0,
                max_size=self._max_message_bytes,
                logger=LOGGER,
            )
            connection = self._open.enter_context(opening)  # newer versions of `websockets` connect here
        except InvalidStatus as error:
            plain.close()
            status = error.response.status_code
            code = Code.UNAUTHENTICATED if status in (401, 403) else Code.UNAVAILABLE
            hint = "; give the server's token=" if status in (401, 403) else ""
            raise RefusedError(self.url, f"the answer has the HTTP status {status}{hint}", code) from None
        except TimeoutError:
            plain.close()
            raise RemoteTimeoutError(self.url, f"no handshake within {self._timeout:g} s") from None
        except (OSError, EOFError) as error:
            plain.close()
            raise ConnectError(self.url, f"the handshake failed: {error}") from None
        except (WebSocketException, ValueError) as error:
            plain.close()
            if isinstance(error.__cause__, EOFError):
                raise ConnectError(self.url, "it closed the connection without replying") from None
            raise PeerError(self.url, f"it speaks no WebSocket: {error}") from None
        self._connection = connection
        self._metadata = self._receive(connection)
        return connection

    def _receive(self, connection: ClientConnection) -> dict[str, Any]:
        try:
            data = connection.recv(timeout=self._timeout)
        except TimeoutError:
            raise RemoteTimeoutError(self.url, f"no answer of the policy within {self._timeout:g} s") from None
        except ConnectionClosed as error:
            raise self._lost(error) from None
        if isinstance(data, str):
            raise RefusedError(self.url, f"the policy failed: {data}", Code.INTERNAL)
        try:
            return unpack(data)
        except WireError as error:
            raise PeerError(self.url, str(error)) from None

    def _lost(self, error: ConnectionClosed) -> RemoteError:
        if error.rcvd is not None and error.rcvd.code == 1009 and error.rcvd_then_sent is not False:
            return RefusedError(self.url, "the request is larger than the server takes", Code.RESOURCE_EXHAUSTED)
        if error.sent is not None and error.sent.code == 1009:
            return PeerError(self.url, f"an answer is larger than max_message_bytes={self._max_message_bytes}")
        return ConnectionLostError(self.url, f"the policy server closed the connection: {error}")

    def _ask(self, batch: Any) -> list[Any]:
        """Return a chunk for each row."""
        connection = self._connected()
        (rows,) = row_count(batch)
        most = self._metadata.get(MAX_BATCH)
        chunks: list[Any] = []
        if not isinstance(most, int) or most < 1:  # a server of openpi takes one observation a message
            return [self._request(connection, as_map(take(batch, row)), None) for row in range(rows)]
        for start in range(0, rows, most):
            part = as_map(take(batch, slice(start, start + most)))
            count = min(most, rows - start)
            chunks += list(self._request(connection, {**part, BATCH: count}, count))
        return chunks

    def _request(self, connection: ClientConnection, message: dict[str, Any], count: int | None) -> Any:
        """Send a request; return its chunk, or with a count a chunk for each row."""
        try:
            connection.send(pack(message))
        except WireError as error:
            raise SettingError(f"the observation {error}") from None
        except ConnectionClosed as error:
            raise self._lost(error) from None
        answer = self._receive(connection)
        actions = answer.get(ACTIONS)
        try:
            chunk = np.asarray(actions)
        except ValueError:  # a list of lists of different lengths
            chunk = np.empty(0, object)
        least = 1 if count is None else 2
        if chunk.dtype.kind not in "biuf" or chunk.ndim < least or chunk.shape[least - 1] < 1:
            came = f"{chunk.dtype} of {chunk.shape}" if ACTIONS in answer else f"the keys {sorted(answer)!r:.100}"
            raise PeerError(self.url, f"expected actions as an array of numbers, a chunk of one or more, got {came}")
        if count is not None and len(chunk) != count:
            raise PeerError(self.url, f"expected actions for {count} observations, got {len(chunk)}")
        if chunk.dtype.kind == "f" and not np.isfinite(chunk).all():
            raise PeerError(self.url, "expected finite actions, got NaN or infinity; look at what the policy computes")
        timing = answer.get("server_timing")
        spent = timing.get("infer_ms") if isinstance(timing, dict) else None
        if isinstance(spent, (int, float)) and 0 <= spent < 1e9:
            self.seconds_in_function += float(spent) / 1000
        return chunk
