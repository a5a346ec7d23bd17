"""A policy that another process serves, called like a function."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.errors import AddressError, Code, PeerError, RefusedError, SettingError
from bridge.keywords import check_counts
from bridge.policies.rows import as_map, row_count, take, with_rows
from bridge.policies.wire import ACTIONS, BATCH, MAX_BATCH, MAX_MESSAGE_BYTES, WireError, pack, unpack
from bridge.transport.address import parse_address
from bridge.transport.credentials import TLS, ClientCredentials, TokenLike
from bridge.transport.message_socket import MessageSocket  # after `wire`, whose error says what to install

__all__ = ["RemotePolicy"]

_ANSWER = "answer of the policy"


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
        address = address.with_credentials(ClientCredentials.of(token=token, token_file=token_file, tls=tls))
        if execution_horizon is not None:
            check_counts(execution_horizon=execution_horizon)
        for name, seconds in (("timeout", timeout), ("reconnect", reconnect)):
            if not 0 <= seconds < math.inf or (name == "timeout" and not seconds):
                raise SettingError(f"expected {name} to be seconds, got {seconds!r}")
        self.url = address.url
        """The URL, without its token."""
        self.seconds_in_function = 0.0
        """How long the server's function took, as far as the server says so."""
        self._horizon, self._reconnect = execution_horizon, reconnect
        self._socket = MessageSocket(
            address,
            f"/{address.env_id or ''}",
            url=self.url,
            server="policy server",
            hint=". Start one: `bridge policy MODULE:NAME`",
            timeout=timeout,
            max_message_bytes=max_message_bytes,
            proxied=False,
        )
        self._metadata: dict[str, Any] = {}
        self._chunks: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    @property
    def metadata(self) -> dict[str, Any]:
        """The server's metadata, sent when this end connected; connects if that was not done yet."""
        with self._lock:
            self._socket.persist(self._connect, self._reconnect)
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
            held = [self._chunks.setdefault(slot, []) for slot in numbers]
            need = [row for row, chunk in enumerate(held) if not chunk]
            if need:
                chunks = self._socket.persist(lambda: self._ask(take(batch, need)), self._reconnect)
                for row, chunk in zip(need, chunks, strict=True):
                    held[row].extend(chunk[: self._horizon])
            actions = [chunk.pop(0) for chunk in held]
        return actions[0] if single else np.stack(actions)

    def reset(self, slots: Sequence[int] | None = None) -> None:
        """Drop what is left of chunks, because episodes began anew: those of some slots, or all."""
        # No lock: a call for other slots may be under way, which would delay their next steps.
        for slot in list(self._chunks) if slots is None else slots:
            self._chunks.pop(int(slot), None)

    def close(self) -> None:
        """Disconnect; a later call connects again."""
        with self._lock:
            self._socket.close()

    def __enter__(self) -> RemotePolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connect(self) -> None:
        if not self._socket.connected:
            self._socket.connect()
            self._metadata = self._read(self._socket.receive(_ANSWER))

    def _read(self, data: str | bytes) -> dict[str, Any]:
        if isinstance(data, str):
            raise RefusedError(self.url, f"the policy failed: {data}", Code.INTERNAL)
        try:
            return unpack(data)
        except WireError as error:
            raise PeerError(self.url, str(error)) from None

    def _ask(self, batch: Any) -> list[Any]:
        """Return a chunk for each row."""
        self._connect()
        most = self._metadata.get(MAX_BATCH)
        stacked = isinstance(most, int) and most > 0
        size: Any = most if stacked else 1  # a server of openpi takes one observation a message
        (rows,) = row_count(batch)
        parts = [take(batch, slice(start, start + size)) for start in range(0, rows, size)]
        return [chunk for part in parts for chunk in self._request(part, stacked)]

    def _request(self, batch: Any, stacked: bool) -> Any:
        """Return a chunk for each row of a batch, which is one observation where it is not sent as a batch."""
        (count,) = row_count(batch)
        try:
            data = pack({**as_map(batch), BATCH: count} if stacked else as_map(take(batch, 0)))
        except WireError as error:
            raise SettingError(f"the observation {error}") from None
        answer = self._read(self._socket.ask(data, _ANSWER))
        try:
            chunks = np.asarray(answer.get(ACTIONS))
        except ValueError:  # a list of lists of different lengths
            chunks = np.empty(0, object)
        chunks = chunks if stacked else chunks[None]
        if chunks.dtype.kind not in "biuf" or chunks.ndim < 2 or len(chunks) != count or chunks.shape[1] < 1:
            came = f"{chunks.dtype} of {chunks.shape}" if ACTIONS in answer else f"the keys {sorted(answer)!r:.100}"
            raise PeerError(
                self.url, f"expected actions as an array of numbers, {count} chunks of one or more, got {came}"
            )
        if chunks.dtype.kind == "f" and not np.isfinite(chunks).all():
            raise PeerError(self.url, "expected finite actions, got NaN or infinity; look at what the policy computes")
        timing = answer.get("server_timing")
        spent = timing.get("infer_ms") if isinstance(timing, dict) else None
        if isinstance(spent, (int, float)) and 0 <= spent < 1e9:
            self.seconds_in_function += float(spent) / 1000
        return chunks
