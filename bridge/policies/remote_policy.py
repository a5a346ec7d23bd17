"""A policy in another process, called like a function."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.core.back_off import checked_wait
from bridge.core.encoding.tensors import Array
from bridge.core.keywords import check_counts, grouped_class
from bridge.core.transport.address import Address, parse_address
from bridge.core.transport.credentials import TLS, AccessKeywords, ClientAccess
from bridge.core.transport.message_socket import MessageSocket
from bridge.errors import AddressError, Code, PeerError, RefusedError, SettingError
from bridge.policies import wire
from bridge.policies.rows import row_count, take

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["RemotePolicy"]

_FORM = "ws://HOST:PORT or wss://HOST:PORT, optionally with ?token=TEXT&timeout=SECONDS&tls_ca=FILE"
_ANSWER = "answer of the policy"


def _of_query(address: Address, timeout: float, tls: TLS | None) -> tuple[float, TLS | None]:
    """Return the timeout and the certificates of a policy's URL, or the given ones if the URL has none.

    Raises:
        AddressError: The query contains an unknown setting.
    """
    for name, text in address.settings:
        try:
            if name == "timeout":
                timeout = float(text)
                continue
        except ValueError:
            raise AddressError(address.url, f"the timeout {text!r} is no number of seconds", _FORM) from None
        if name != "tls_ca":
            raise AddressError(address.url, f"{name!r} means nothing to a policy", _FORM)
        if not address.tls:
            raise AddressError(address.url, "a CA's certificate is for wss:// URLs", _FORM)
        tls = dataclasses.replace(tls or TLS(), ca=text)
    return timeout, tls


@grouped_class(ClientAccess, tls=TLS)
class RemotePolicy:
    """A policy that is served over openpi's WebSocket protocol, by `serve_policy` or openpi's server.

    The first call connects. If the connection is lost, the call connects again and repeats the request: a policy's
    answer depends on the request alone.

    Args:
        url: `ws://HOST:PORT`, or `wss://` with TLS. Its query may contain `token`, `timeout`, and `tls_ca`, the path of
            a CA's certificate. They override the keywords, for places where a policy is named by a URL alone.
        execution_horizon: How many actions of a chunk are executed before the policy is asked again; None: all.
        timeout: Seconds to wait for a response.
        reconnect: Seconds to wait for a lost server to return; 0: a lost connection is an error.
        wait_for_server: Seconds for which the first call waits for a server that is not ready yet, if longer than
            `reconnect`: it refuses the connection, its name is unknown, or it answers UNAVAILABLE.
        keywords: The keywords of `ClientAccess`, which the signature lists.

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
        wait_for_server: float = 0.0,
        **keywords: Unpack[AccessKeywords],
    ) -> None:
        if not str(url).startswith(("ws://", "wss://")):
            raise AddressError(url, "a policy is served over WebSocket", "ws://HOST:PORT or wss://HOST:PORT")
        address = parse_address(url)
        timeout, keywords["tls"] = _of_query(address, timeout, keywords.get("tls"))
        address = address.with_credentials(ClientAccess(**keywords).credentials)
        address.check_tls()
        if execution_horizon is not None:
            check_counts(execution_horizon=execution_horizon)
        if not 0 < timeout < math.inf:
            raise SettingError(f"expected timeout to be a positive number of seconds, got {timeout!r}")
        self.url = address.url
        """The URL, without its token."""
        self.seconds_in_function = 0.0
        """The time spent in the server's function, as reported by the server."""
        self._horizon, self._reconnect = execution_horizon, reconnect
        self._patience = max(reconnect, checked_wait(wait_for_server))
        """Seconds for which the next call waits for the server; longer for the first call, when it may be starting."""
        self._socket = MessageSocket(
            address,
            f"/{address.env_id or ''}",
            url=self.url,
            server="policy server",
            hint=". Start one: `gymnasium-bridge policy MODULE:NAME`",
            timeout=timeout,
            max_message_bytes=wire.MAX_MESSAGE_BYTES,
        )
        self.metadata: dict[str, Any] = {}
        """What the server says about itself; received with the first call."""
        self._chunks: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, observation: Any, slots: Sequence[int] | Array | None = None) -> Any:
        """Return the action for an observation, or with `slots` a batch of actions for a batch of observations.

        Args:
            observation: An observation: an array, or a dict of arrays and text; with `slots`, a batch of observations.
            slots: The slot of each row of a batch. Each slot executes its own chunks.

        Raises:
            RemoteTimeoutError: No response came in time.
            RefusedError: The server answered with an error.
            PeerError: The response is not a chunk of finite actions.
            ConnectError, ConnectionLostError: The server cannot be reached.
        """
        message = observation if isinstance(observation, dict) else {wire.OBSERVATION: observation}
        batch, numbers = (take(message, None), [-1]) if slots is None else (message, [int(slot) for slot in slots])
        if row_count(batch) != {len(numbers)}:
            raise SettingError(f"expected a row for each of {len(numbers)} slots, got {sorted(row_count(batch))}")
        with self._lock:
            # The lists themselves, not copies: if reset() removes one during the call, the rest of its chunk goes with
            # it.
            held = [self._chunks.setdefault(slot, []) for slot in numbers]
            need = [row for row, chunk in enumerate(held) if not chunk]
            if need:
                try:
                    chunks = self._socket.persist(lambda: self._ask(take(batch, need), len(need)), self._patience)
                except wire.WireError as error:
                    raise PeerError(self.url, str(error)) from None
                for row, chunk in zip(need, chunks, strict=True):
                    held[row].extend(chunk[: self._horizon])
            actions = [chunk.pop(0) for chunk in held]
        return actions[0] if slots is None else np.stack(actions)

    def reset(self, slots: Sequence[int] | Array | None = None) -> None:
        """Drop the remaining actions of chunks because new episodes began, in some slots or in all."""
        # Without the lock: a call for other slots may be running, and waiting for it would delay the next steps.
        for slot in list(self._chunks) if slots is None else slots:
            self._chunks.pop(int(slot), None)

    def close(self) -> None:
        """Disconnect. A later call connects again."""
        with self._lock:
            self._socket.close()

    def __enter__(self) -> RemotePolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, data: str | bytes) -> dict[str, Any]:
        if isinstance(data, str):
            raise RefusedError(self.url, f"the policy failed: {data}", Code.INTERNAL)
        return wire.unpack(data)

    def _ask(self, batch: Any, rows: int) -> list[Any]:
        """Return a chunk for each row of a batch."""
        if not self._socket.connected:
            self._socket.connect()
            self.metadata = self._read(self._socket.receive(_ANSWER))
            self._patience = self._reconnect
        most = self.metadata.get(wire.MAX_BATCH)
        if not isinstance(most, int) or most < 1:  # openpi's server takes one observation per message
            return [chunk for row in range(rows) for chunk in self._request(take(batch, row), 1)]
        chunks: list[Any] = []
        for start in range(0, rows, most):
            count = min(most, rows - start)
            chunks += [*self._request({**take(batch, slice(start, start + count)), wire.BATCH: count}, count)]
        return chunks

    def _request(self, message: dict[str, Any], rows: int) -> Any:
        """Return a chunk for each row of a message. A message without a number of rows is a single observation."""
        answer = self._read(self._socket.ask(wire.pack(message), _ANSWER))
        timing = answer.get("server_timing")
        spent = timing.get("infer_ms") if isinstance(timing, dict) else None
        # The server may report any value: NaN would make the sum NaN.
        if isinstance(spent, (int, float)) and 0 <= spent < 1e9:
            self.seconds_in_function += spent / 1000
        chunks = answer.get("actions")
        # openpi answers one observation with one chunk, without an axis for rows.
        if wire.BATCH not in message and isinstance(chunks, np.ndarray):
            chunks = chunks[None]
        wire.check_chunks(chunks, rows)
        return chunks
