"""Serves a policy: requests of all connections that wait are answered by one call of the function."""

from __future__ import annotations

import contextlib
import http
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, NamedTuple

import numpy as np

from bridge.errors import SettingError
from bridge.keywords import check_counts
from bridge.policies.rows import join, layout, row_count, with_rows
from bridge.policies.wire import ACTIONS, BATCH, MAX_BATCH, MAX_MESSAGE_BYTES, OBSERVATION, WireError, pack, unpack
from bridge.server.auth import Security
from bridge.signals import sigterm_as_interrupt
from bridge.transport.credentials import TLS, TokenLike
from bridge.transport.websocket import LOGGER

# After `wire`, whose error says what to install.
from websockets.exceptions import ConnectionClosed  # isort: skip
from websockets.frames import CloseCode  # isort: skip
from websockets.http11 import Request as HttpRequest, Response  # isort: skip
from websockets.protocol import State  # isort: skip
from websockets.sync.server import ServerConnection, serve  # isort: skip

__all__ = ["PolicyServer", "serve_policy"]

_LOG = logging.getLogger("bridge.policies")


class _Waiting(NamedTuple):
    """A request that waits for the function."""

    batch: Any
    rows: int
    layout: Any
    answer: Future[Any]
    """The actions, and how long the function took; cancelled by `stop`."""


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
        self.token = None if security.token is None else str(security.token.reveal())
        """The token that clients have to show; None: none."""
        self._max_batch, self._max_wait, self._max_connections = max_batch, max_wait, max_connections
        self._metadata = pack({**(metadata or {}), MAX_BATCH: max_batch})
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._connections = set[ServerConnection]()
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
                close_timeout=1.0,
                max_size=max_message_bytes,
                server_header=None,
                logger=LOGGER,
            )
        except OSError as error:
            raise SettingError(f"cannot listen on {host}:{port}: {error}; choose another port=") from None
        at = f"[{host}]" if ":" in host else host
        self.url = f"{'wss' if security.tls else 'ws'}://{at}:{self._server.socket.getsockname()[1]}"
        """The URL for `RemotePolicy`, without a token."""
        self._threads = {threading.Thread(target=run, daemon=True) for run in (self._server.serve_forever, self._work)}
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Block until Ctrl-C or SIGTERM, or `stop` from another thread; a signal stops the server."""
        try:
            with sigterm_as_interrupt():
                while not self._stopped:
                    time.sleep(0.2)
        except KeyboardInterrupt:
            self.stop()

    def stop(self) -> None:
        """Close the port and all connections; a call of the function that takes long is left to itself."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            connections = tuple(self._connections)
            for one in self._waiting:
                one.answer.cancel()
        self._server.shutdown()
        for connection in connections:
            with contextlib.suppress(Exception):  # it is closing already
                connection.close(CloseCode.GOING_AWAY)
        for thread in self._threads - {threading.current_thread()}:
            thread.join(2.0)

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
            # Those whose handshake failed after this method never came to `_serve`.
            self._connections -= {one for one in self._connections if one.protocol.state is State.CLOSED}
            if len(self._connections) >= self._max_connections:
                text = f"expected at most max_connections={self._max_connections} clients\n"
                return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, text)
            self._connections.add(connection)
        return None

    def _serve(self, connection: ServerConnection) -> None:
        """Answer the requests of one connection, one after the other; at the end it is closed."""
        with contextlib.suppress(CancelledError, ConnectionClosed):
            if not self._stopped:  # else `stop` may have come during its handshake
                connection.send(self._metadata)
                for data in connection:
                    try:
                        connection.send(self._answer(data))
                    except WireError as error:
                        connection.send(str(error))  # a text is an error on this wire; the connection goes on
        with self._changed:
            self._connections.discard(connection)

    def _answer(self, data: Any) -> bytes:
        batch = unpack(data)
        count = batch.pop(BATCH, None)
        if count is None:
            batch = with_rows(batch)
        elif type(count) is not int or not 1 <= count <= self._max_batch:
            raise WireError(f"expected {BATCH} to be 1 to max_batch={self._max_batch}, got {count!r:.40}")
        rows = count or 1
        if not batch or row_count(batch) != {rows}:
            raise WireError(f"expected {rows} rows in every part of the observation, got {row_count(batch)}")
        alone = set(batch) == {OBSERVATION}
        request = _Waiting(batch[OBSERVATION] if alone else batch, rows, layout(batch), Future())
        with self._changed:
            if self._stopped:
                raise CancelledError
            self._waiting.append(request)
            self._changed.notify_all()
        actions, seconds = request.answer.result()
        if actions.dtype.kind == "f" and not np.isfinite(actions).all():
            raise WireError("the policy returned NaN or infinity; look for them in the observation")
        return pack({ACTIONS: actions if count else actions[0], "server_timing": {"infer_ms": 1000 * seconds}})

    def _work(self) -> None:
        """Answer requests by calls of the function until the server stops."""
        while True:
            with self._changed:
                self._waiting = [one for one in self._waiting if not one.answer.done()]
                self._changed.wait_for(lambda: self._stopped or self._waiting)
                self._changed.wait_for(self._is_enough, self._max_wait)
                if self._stopped:
                    return
                alike = [one for one in self._waiting if one.layout == self._waiting[0].layout]
            with contextlib.suppress(InvalidStateError):  # `stop` has cancelled them meanwhile
                self._run(alike[: np.searchsorted(_ends(alike), self._max_batch, "right")])

    def _is_enough(self) -> bool:
        """True if no request is worth waiting for: where all open connections wait already, none can add one soon."""
        full = sum(one.rows for one in self._waiting) >= self._max_batch
        return self._stopped or full or len(self._waiting) >= len(self._connections)

    def _run(self, requests: list[_Waiting]) -> None:
        """Answer requests by one call; where that fails, each by a call of its own: one may spoil it for the others."""
        began = time.perf_counter()
        try:
            actions = self._call(requests)
        except WireError as error:
            for one in requests:
                if len(requests) > 1:
                    self._run([one])
                else:
                    one.answer.set_exception(error)
            return
        seconds = time.perf_counter() - began
        for one, own in zip(requests, np.split(actions, _ends(requests)[:-1]), strict=True):
            one.answer.set_result((own, seconds))

    def _call(self, requests: list[_Waiting]) -> Any:
        self.calls += 1
        try:
            actions = np.asarray(self._function(join([one.batch for one in requests])))
        except Exception as error:
            _LOG.exception("the policy raised")
            raise WireError(f"the policy raised {type(error).__name__}: {error}"[:500]) from None
        rows, least = _ends(requests)[-1], 2 if self._chunked else 1
        if actions.dtype.kind not in "biuf" or actions.ndim < least or len(actions) != rows:
            shape = f"({rows}, horizon, …)" if self._chunked else f"({rows}, …)"
            raise WireError(
                f"expected the policy to return an array of numbers of {shape}, got {actions.dtype} of {actions.shape}"
            )
        return actions if self._chunked else actions[:, None]


def _ends(requests: Sequence[_Waiting]) -> Any:
    """Return where each request's rows end, were they all joined."""
    return np.cumsum([one.rows for one in requests])


serve_policy = PolicyServer
"""`PolicyServer`, by a name as the other functions that serve have."""
