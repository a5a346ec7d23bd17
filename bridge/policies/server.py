"""Serves a policy: requests of all connections that wait are answered by one call of the function."""

from __future__ import annotations

import contextlib
import dataclasses
import http
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from bridge.errors import SettingError
from bridge.keywords import check_counts
from bridge.policies.rows import from_map, join, layout, row_count, with_rows
from bridge.policies.wire import ACTIONS, BATCH, MAX_BATCH, MAX_MESSAGE_BYTES, WireError, pack, unpack
from bridge.server.auth import Security
from bridge.signals import sigterm_as_interrupt
from bridge.transport.credentials import TLS, TokenLike
from bridge.transport.websocket import LOGGER

# After `wire`, whose error says what to install.
from websockets.exceptions import ConnectionClosed  # isort: skip
from websockets.frames import CloseCode  # isort: skip
from websockets.http11 import Request as HttpRequest, Response  # isort: skip
from websockets.sync.server import ServerConnection, serve  # isort: skip

__all__ = ["PolicyServer", "serve_policy"]

_LOG = logging.getLogger("bridge.policies")
_CLOSE_TIMEOUT = 1.0


class _FunctionError(Exception):
    """The function raised, or returned what are no actions."""


@dataclasses.dataclass
class _Waiting:
    """A request that waits for the function."""

    batch: Any
    rows: int
    layout: Any
    answer: Future[Any] = dataclasses.field(default_factory=Future)
    """The actions, and how long the function took; cancelled where the server stops."""


class PolicyServer:
    """A policy that is served in the background, for `RemotePolicy` and for clients of openpi.

    A context manager, which stops it. `serve_policy` is another name for it.

    Examples:
        >>> import numpy as np
        >>> from bridge.policies import RemotePolicy, serve_policy
        >>> with serve_policy(lambda observations: (observations[:, 0] > 0).astype(int)) as server:
        ...     with RemotePolicy(server.url) as policy:
        ...         print(policy(np.array([1.0, 2.0])))
        1

    Args:
        function: Takes a batch of observations, `(rows, …)` or a dict of such, and returns `(rows, …)` actions.
            `by_rows` makes one of a function of single observations.
        host: The address to listen on.
        port: The port; 0: any free one.
        chunked: Whether the function returns chunks, `(rows, horizon, …)`.
        max_batch: The most observations of one call.
        max_wait: Seconds that a request waits for others to share a call with.
        max_connections: How many clients there may be.
        max_message_bytes: The largest request.
        token: What clients have to show. Without one, a server beyond loopback makes one, `PolicyServer.token`, unless
            `tls` holds a `client_ca`, which refuses strangers too.
        token_file: A file that holds it.
        tls: The server's certificate and key; with `client_ca`, clients need a certificate of that CA.
        insecure: Beyond loopback, let anybody in.
        metadata: What clients are told when they connect.

    Raises:
        SettingError: A keyword is out of its range, or the port is taken.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        chunked: bool = False,
        max_batch: int = 64,
        max_wait: float = 0.002,
        max_connections: int = 64,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        token: TokenLike | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls: TLS | None = None,
        insecure: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise SettingError(f"expected a policy that takes a batch of observations, got a {type(function).__name__}")
        check_counts(max_batch=max_batch, max_connections=max_connections, max_message_bytes=max_message_bytes)
        if not 0 <= max_wait < math.inf:
            raise SettingError(f"expected max_wait to be seconds, got {max_wait!r}")
        security = Security.of(token, token_file, tls).for_host(host, insecure=insecure)
        self._function, self._token, self._chunked = function, security.token, chunked
        self._max_batch, self._max_wait, self._max_connections = max_batch, max_wait, max_connections
        self._metadata = pack({**(metadata or {}), MAX_BATCH: max_batch})
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._connections: dict[ServerConnection, threading.Thread] = {}
        self.calls = 0
        """How often the function was called."""
        try:
            self._server = serve(
                self._serve,
                host,
                port,
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                ssl=security.context(),
                process_request=self._admit,
                origins=[None],  # a page in a browser that visits another site must not reach a policy on this machine
                compression=None,
                close_timeout=_CLOSE_TIMEOUT,
                max_size=max_message_bytes,
                server_header=None,
                logger=LOGGER,
            )
        except OSError as error:
            raise SettingError(f"cannot listen on {host}:{port}: {error}; choose another port=") from None
        at = f"[{host}]" if ":" in host else host
        self.url = f"{'wss' if security.tls else 'ws'}://{at}:{self._server.socket.getsockname()[1]}"
        """The URL for `RemotePolicy`, without a token."""
        self._threads = [
            threading.Thread(target=self._server.serve_forever, name="policy-accept", daemon=True),
            threading.Thread(target=self._work, name="policy-batches", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def token(self) -> str | None:
        """The token that clients have to show; None: none."""
        return None if self._token is None else str(self._token.reveal())

    def wait(self) -> None:
        """Block until Ctrl-C or SIGTERM, or `stop` from another thread; a signal stops the server."""
        try:
            with sigterm_as_interrupt():
                while self._threads[0].is_alive():
                    self._threads[0].join(1.0)
        except KeyboardInterrupt:
            self.stop()

    def stop(self) -> None:
        """Close the port and all connections."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            open_now = dict(self._connections)
        self._server.shutdown()
        for connection in open_now:
            with contextlib.suppress(Exception):  # it is closing already
                connection.close(CloseCode.GOING_AWAY)
        for thread in (*self._threads, *open_now.values()):
            if thread is not threading.current_thread():
                thread.join(5.0)

    def __enter__(self) -> PolicyServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _admit(self, connection: ServerConnection, request: HttpRequest) -> Response | None:
        if request.path == "/healthz":  # as openpi's server has it, for probes
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        kind, _, shown = request.headers.get("Authorization", "").partition(" ")
        if self._token is not None and not (kind in ("Bearer", "Api-Key") and self._token.matches(shown)):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "expected this server's token\n")
        with self._changed:
            if len(self._connections) >= self._max_connections:
                text = f"expected at most max_connections={self._max_connections} clients\n"
                return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, text)
            self._connections[connection] = threading.current_thread()
        return None

    def _serve(self, connection: ServerConnection) -> None:
        """Answer the requests of one connection, one after the other."""
        try:
            if self._stopped:  # `stop` does not know of this one
                raise CancelledError
            connection.send(self._metadata)
            for data in connection:
                began = time.perf_counter()
                try:
                    actions, seconds = self._answer(data)
                    spent = {"infer_ms": 1000 * seconds, "total_ms": 1000 * (time.perf_counter() - began)}
                    connection.send(pack({ACTIONS: actions, "server_timing": spent}))
                except (WireError, _FunctionError) as error:
                    connection.send(str(error))  # a text is an error on this wire; the connection goes on
        except CancelledError:
            # A text would say that the function failed; who loses a connection tries again.
            connection.close(CloseCode.GOING_AWAY, "the server stops")
        except ConnectionClosed:
            pass
        finally:
            with self._changed:
                del self._connections[connection]

    def _answer(self, data: Any) -> tuple[Any, float]:
        batch = unpack(data)
        count = batch.pop(BATCH, None)
        if count is None:
            batch = with_rows(batch)
        elif type(count) is not int or not 1 <= count <= self._max_batch:
            raise WireError(f"expected {BATCH} to be 1 to max_batch={self._max_batch}, got {count!r:.40}")
        rows = count or 1
        if not batch or row_count(batch) != {rows}:
            raise WireError(f"expected {rows} rows in every part of the observation, got {row_count(batch)}")
        request = _Waiting(from_map(batch), rows, layout(batch))
        with self._changed:
            if self._stopped:
                raise CancelledError
            self._waiting.append(request)
            self._changed.notify_all()
        actions, seconds = request.answer.result()
        return (actions if count else actions[0]), seconds

    def _work(self) -> None:
        while batch := self._next():
            self._run(batch)

    def _next(self) -> list[_Waiting]:
        """Wait for requests; return those for one call, none once the server stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._waiting)
            # Connections with no request under way cannot add one sooner than a turn of their loops: where all that
            # are open wait already, waiting longer gains nothing.
            self._changed.wait_for(
                lambda: (
                    self._stopped
                    or _rows(self._waiting) >= self._max_batch
                    or len(self._waiting) >= len(self._connections)
                ),
                self._max_wait,
            )
            chosen: list[_Waiting] = []
            for one in tuple(self._waiting):
                if self._stopped:
                    one.answer.cancel()
                elif one.layout == self._waiting[0].layout and _rows([*chosen, one]) <= self._max_batch:
                    chosen.append(one)
            self._waiting = [one for one in self._waiting if all(one is not taken for taken in chosen)]
            return chosen

    def _run(self, requests: list[_Waiting]) -> None:
        """Answer requests by one call; where that fails, each by a call of its own: one may spoil it for the others."""
        began = time.perf_counter()
        try:
            actions = self._call(join([one.batch for one in requests]), _rows(requests))
        except Exception as error:
            if len(requests) > 1:
                for one in requests:
                    self._run([one])
                return
            if not isinstance(error, _FunctionError):
                _LOG.exception("the policy raised")
                error = _FunctionError(f"the policy raised {type(error).__name__}: {error}"[:500])
            requests[0].answer.set_exception(error)
            return
        seconds = time.perf_counter() - began
        for one, own in zip(requests, np.split(actions, np.cumsum([one.rows for one in requests])[:-1]), strict=True):
            if own.dtype.kind == "f" and not np.isfinite(own).all():
                text = "the policy returned NaN or infinity for this observation; look for them in the observation"
                one.answer.set_exception(_FunctionError(text))
            else:
                one.answer.set_result((own, seconds))

    def _call(self, batch: Any, rows: int) -> Any:
        self.calls += 1
        actions = np.asarray(self._function(batch))
        least = 2 if self._chunked else 1
        if actions.dtype.kind not in "biuf" or actions.ndim < least or len(actions) != rows:
            shape = f"({rows}, horizon, …)" if self._chunked else f"({rows}, …)"
            raise _FunctionError(
                f"expected the policy to return an array of numbers of {shape}, got {actions.dtype} of {actions.shape}"
            )
        return actions if self._chunked else actions[:, None]


def _rows(requests: Sequence[_Waiting]) -> int:
    return sum(one.rows for one in requests)


serve_policy = PolicyServer
"""`PolicyServer`, by a name as the other functions that serve have."""
