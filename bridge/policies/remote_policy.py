"""A policy that another process serves, called like a function."""

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
    """Return the timeout and the certificates of a policy's URL; those that are given where it has none.

    Raises:
        AddressError: Its query holds something else.
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
    """A policy behind a WebSocket that speaks openpi's wire: `serve_policy`, or a server of openpi.

    The connection is made by the first call. Where it is lost, the call connects again and asks again: a policy's
    answer depends on its request alone.

    Args:
        url: `ws://HOST:PORT`, or `wss://` with TLS. Its query may hold `token`, `timeout`, and `tls_ca`, the path of a
            CA's certificate. They count before the keywords, and can be given wherever a URL alone names a policy.
        execution_horizon: How many actions of a chunk are executed before the policy is asked again; None: all.
        timeout: Seconds to wait for an answer.
        reconnect: Seconds within which a server that is away has to be back; 0: a lost connection is an error.
        wait_for_server: Seconds that the first call waits for a server that is not up yet, if that is longer than
            `reconnect`: while it refuses the connection, nobody knows its name, or it answers UNAVAILABLE.
        keywords: Those of `ClientAccess`, which the signature lists.

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
        """How long the server's function took, as far as the server says so."""
        self._horizon, self._reconnect = execution_horizon, reconnect
        self._patience = max(reconnect, checked_wait(wait_for_server))
        """Seconds that the next call waits for the server: at first it may not be up yet."""
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
        """What the server says about itself when this end connects, at the first call."""
        self._chunks: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, observation: Any, slots: Sequence[int] | Array | None = None) -> Any:
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
        message = observation if isinstance(observation, dict) else {wire.OBSERVATION: observation}
        batch, numbers = (take(message, None), [-1]) if slots is None else (message, [int(slot) for slot in slots])
        if row_count(batch) != {len(numbers)}:
            raise SettingError(f"expected a row for each of {len(numbers)} slots, got {sorted(row_count(batch))}")
        with self._lock:
            # The lists themselves: where reset() drops one meanwhile, the rest of its chunk is dropped with it.
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
        if not isinstance(most, int) or most < 1:  # a server of openpi takes one observation a message
            return [chunk for row in range(rows) for chunk in self._request(take(batch, row), 1)]
        chunks: list[Any] = []
        for start in range(0, rows, most):
            count = min(most, rows - start)
            chunks += [*self._request({**take(batch, slice(start, start + count)), wire.BATCH: count}, count)]
        return chunks

    def _request(self, message: dict[str, Any], rows: int) -> Any:
        """Return a chunk for each row of a message, which is a single observation where it does not say how many."""
        answer = self._read(self._socket.ask(wire.pack(message), _ANSWER))
        timing = answer.get("server_timing")
        spent = timing.get("infer_ms") if isinstance(timing, dict) else None
        # The word of a server, which may be anything: NaN would spoil the sum.
        if isinstance(spent, (int, float)) and 0 <= spent < 1e9:
            self.seconds_in_function += spent / 1000
        chunks = answer.get("actions")
        # openpi answers one observation with one chunk, without the axis of rows.
        if wire.BATCH not in message and isinstance(chunks, np.ndarray):
            chunks = chunks[None]
        wire.check_chunks(chunks, rows)
        return chunks
