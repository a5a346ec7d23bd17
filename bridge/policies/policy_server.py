"""Serve a policy: one call of its function answers the waiting requests of all connections."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bridge.core.callers import Callers
from bridge.core.keywords import check_counts, grouped_class
from bridge.core.logs import LimitedLog
from bridge.core.server.auth import Gate, ListenKeywords, ListenOptions
from bridge.core.signals import wait_or_stop
from bridge.core.transport.credentials import TLS
from bridge.core.transport.sockets import check_listening, end_if_unreachable, listen_tcp
from bridge.core.transport.websocket import LOGGER, without_ping_timeout
from bridge.errors import RequestError, SettingError
from bridge.policies import wire
from bridge.policies.rows import check_policy, join, layout, row_count, take

# Imported after `wire`, whose error message says what to install.
from websockets.exceptions import ConnectionClosed  # isort: skip
from websockets.frames import CloseCode  # isort: skip
from websockets.http11 import Request as HttpRequest, Response  # isort: skip
from websockets.sync.server import ServerConnection, serve  # isort: skip

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["PolicyServer", "serve_policy"]

_LOG = logging.getLogger("bridge.policies")
_CLIENTS = LimitedLog("bridge.policies")
# Seconds after which a client is disconnected whose machine acknowledges no data.
_UNREACHABLE = 120.0


class _Waiting(NamedTuple):
    """A request that waits for a call of the function."""

    batch: Any
    rows: int
    layout: Any
    answer: Future[Any]
    """The actions, and the duration of the call; cancelled by `stop`."""


class _Port:
    """A listening socket for `websockets`, which serves each connection in a thread, and stops at an error of `accept`.

    Args:
        sock: The socket.
        callers: Set of the sockets whose handshake is not complete.
    """

    def __init__(self, sock: socket.socket, callers: Callers) -> None:
        sock.settimeout(1.0)  # otherwise `close` does not wake a thread that waits for a lost client
        self._sock, self._callers = sock, callers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        while True:
            try:
                sock, address = self._sock.accept()
                break
            except OSError:  # such as no free file descriptors, or a client that left during the TLS handshake
                if self._sock.fileno() < 0:
                    raise
                time.sleep(0.01)
        self._callers.add(sock)
        return sock, address


@grouped_class(ListenOptions, tls=TLS)
class PolicyServer:
    """A policy served in the background, for `RemotePolicy` and for openpi's clients.

    Used as a context manager, it stops at the end. `serve_policy` is another name for this class.

    Examples:
        >>> import numpy as np
        >>> from bridge.policies import RemotePolicy, serve_policy
        >>> with serve_policy(lambda observations: (observations[:, 0] > 0).astype(int)) as server:
        ...     with RemotePolicy(server.url) as policy:
        ...         print(policy(np.array([1.0, 2.0])))
        1

    Args:
        function: A function of a batch of observations, `(rows, …)` or a dict of them, with text as arrays of strings.
            It returns actions, `(rows, …)`. `by_rows` makes such a function from one of single observations.
        chunked: True if the function returns chunks, `(rows, horizon, …)`.
        max_batch: The most observations of one call.
        max_wait: Seconds for which a request waits for others that share its call.
        max_connections: The most clients at a time.
        max_message_bytes: The largest request.
        insecure: Beyond loopback, accept clients without a token. Otherwise `PolicyServer.token` is generated there.
        metadata: Sent to each client when it connects.
        keywords: The keywords of `bridge.core.server.auth.ListenOptions`, which the signature lists.

    Raises:
        SettingError: A keyword is out of its range, or the port is taken.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        chunked: bool = False,
        max_batch: int = 64,
        max_wait: float = 0.002,
        max_connections: int = 64,
        max_message_bytes: int = wire.MAX_MESSAGE_BYTES,
        insecure: bool = False,
        metadata: Mapping[str, Any] | None = None,
        **keywords: Unpack[ListenKeywords],
    ) -> None:
        options = ListenOptions(**keywords)
        host, port = options.host, options.port
        check_policy(function)
        check_counts(max_batch=max_batch, max_connections=max_connections, max_message_bytes=max_message_bytes)
        if not 0 <= max_wait < math.inf:
            raise SettingError(f"expected max_wait to be seconds, got {max_wait!r}")
        check_listening(host, port)
        security = options.security().for_host(host, insecure=insecure)
        self._function, self._gate, self._chunked = function, Gate(security.token), chunked
        self.token = None if security.token is None else str(security.token.reveal())
        """The token that clients must send; None: none."""
        self._max_batch, self._max_wait, self._max_connections = max_batch, max_wait, max_connections
        self._metadata = wire.pack({**(metadata or {}), wire.MAX_BATCH: max_batch})
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._connections = set[ServerConnection]()
        self._callers = Callers(64)
        self.calls = 0
        """The number of calls of the function."""
        context = security.context()
        self._servers = [
            serve(
                self._serve,
                sock=sock,
                ssl=context,
                process_request=self._admit,
                origins=[None],  # a web page of another site must not reach a policy on this machine
                compression=None,
                close_timeout=1.0,
                max_size=max_message_bytes,
                logger=LOGGER,
                # Pings are off: a client that computes in its event loop could not answer them in time.
                **without_ping_timeout(serve),
            )
            for sock in listen_tcp(host, port)
        ]
        for server in self._servers:
            server.socket = _Port(server.socket, self._callers)  # type: ignore[assignment]
        at = f"[{host}]" if ":" in host else host
        self.url = f"{'wss' if security.tls else 'ws'}://{at}:{self._servers[0].socket.getsockname()[1]}"
        """The URL for `RemotePolicy`, without a token."""
        runs = [self._work, *(server.serve_forever for server in self._servers)]
        self._threads = {threading.Thread(target=run, daemon=True) for run in runs}
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Block until Ctrl-C or SIGTERM, or until another thread calls `stop`; a signal stops the server."""
        wait_or_stop(self._stopped, self.stop)

    def stop(self) -> None:
        """Close the port and all connections. Do not wait for a running call of the function."""
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()
            # They are closed below without the lock, because the connections' threads take the lock when they end.
            connections = tuple(self._connections)
            for one in self._waiting:
                one.answer.cancel()
        for server in self._servers:
            server.shutdown()
        for connection in connections:
            with contextlib.suppress(Exception):  # it may be closing already
                connection.close(CloseCode.GOING_AWAY)
        for thread in self._threads - {threading.current_thread()}:
            thread.join(2.0)

    def __enter__(self) -> PolicyServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _admit(self, connection: ServerConnection, request: HttpRequest) -> Response | None:
        if request.path == "/healthz":  # like openpi's server; load balancers have no token
            return connection.respond(200, "OK\n")
        try:
            peer = "{}:{}".format(*connection.remote_address)
        except OSError:  # such as after a stop of this process by SIGSTOP, during which clients gave up
            _CLIENTS.warning("a client disconnected before its connection was accepted")
            return None  # nothing is sent to it
        header = ", ".join(request.headers.get_all("Authorization"))  # several fields are joined, and so do not match
        kind, _, key = header.partition(" ")
        shown = key if kind.lower() == "api-key" else Gate.bearer(header)
        try:
            self._gate.check(shown, peer)
        except RequestError as error:
            return connection.respond(401, f"{error.message}\n")
        return None

    def _serve(self, connection: ServerConnection) -> None:
        """Answer the requests of one connection, one at a time; close the connection at the end."""
        self._callers.let_in(connection.socket)
        # Without pings, a client whose machine is lost would keep its place among `max_connections`.
        end_if_unreachable(connection.socket, _UNREACHABLE)
        with self._changed:
            self._connections.add(connection)
            is_full = len(self._connections) > self._max_connections
        try:
            if is_full:
                connection.send(f"expected at most max_connections={self._max_connections} clients: close one")
            elif not self._stopped.is_set():  # `stop` may have been called during the handshake
                connection.send(self._metadata)
                for data in connection:
                    try:
                        connection.send(self._answer(data))
                    except ValueError as error:  # a WireError, or an error of NumPy for an invalid array
                        connection.send(str(error))  # a text message means an error; the connection stays open
        except (CancelledError, ConnectionClosed):
            pass
        finally:
            with self._changed:
                self._connections.discard(connection)

    def _answer(self, data: Any) -> bytes:
        message = wire.unpack(data)
        count = message.pop(wire.BATCH, None)
        rows = 1 if count is None else count
        # Compare the exact type: True is an int in Python.
        if type(rows) is not int or not 1 <= rows <= self._max_batch:
            raise wire.WireError(f"expected {wire.BATCH} to be 1 to max_batch={self._max_batch}, got {rows!r:.40}")
        batch = take(message, None if count is None else ...)
        if row_count(batch) != {rows}:
            raise wire.WireError(f"expected {rows} rows in every part of the observation, got {row_count(batch)}")
        batch = batch[wire.OBSERVATION] if set(batch) == {wire.OBSERVATION} else batch
        request = _Waiting(batch, rows, layout(batch), Future())
        with self._changed:
            # `stop` has cancelled the waiting requests, so nothing would answer this one.
            if self._stopped.is_set():
                raise CancelledError
            self._waiting.append(request)
            self._changed.notify_all()
        chunks, seconds = request.answer.result()
        return wire.pack({"actions": chunks if count else chunks[0], "server_timing": {"infer_ms": 1000 * seconds}})

    def _work(self) -> None:
        """Answer requests with calls of the function, until the server stops."""
        while True:
            with self._changed:
                self._waiting = [one for one in self._waiting if not one.answer.done()]
                self._changed.wait_for(lambda: self._stopped.is_set() or self._waiting)
                self._changed.wait_for(self._is_enough, self._max_wait)
                if self._stopped.is_set():
                    return
                # Requests with the same layout as the oldest. The others wait for the next call, whose layout is that
                # of its oldest.
                alike = [one for one in self._waiting if one.layout == self._waiting[0].layout]
            ends = np.cumsum([one.rows for one in alike])
            with contextlib.suppress(InvalidStateError):  # `stop` has cancelled them in the meantime
                self._run(alike[: np.searchsorted(ends, self._max_batch, "right")])

    def _is_enough(self) -> bool:
        """True if no further request can arrive soon, because every open connection has one waiting."""
        full = sum(one.rows for one in self._waiting) >= self._max_batch
        return self._stopped.is_set() or full or len(self._waiting) >= len(self._connections)

    def _run(self, requests: Sequence[_Waiting]) -> None:
        """Answer requests with one call. If it fails, call once per request, because one bad request fails them all."""
        ends = np.cumsum([one.rows for one in requests])
        began = time.perf_counter()
        self.calls += 1
        try:
            chunks = np.asarray(self._function(join([one.batch for one in requests])))
            # A function that returns actions gives chunks of length one.
            chunks = chunks if self._chunked else np.expand_dims(np.atleast_1d(chunks), 1)
            wire.check_chunks(chunks, ends[-1])
        except BaseException as error:  # such as SystemExit: without this thread no further request would be answered
            if len(requests) > 1:
                for one in requests:
                    self._run([one])
                return
            _LOG.exception("the policy failed")
            requests[0].answer.set_exception(wire.WireError(f"{type(error).__name__}: {error}"[:500]))
        else:
            seconds = time.perf_counter() - began
            for one, own in zip(requests, np.split(chunks, ends[:-1]), strict=True):
                one.answer.set_result((own, seconds))


serve_policy = PolicyServer
"""`PolicyServer`, with a name like the other functions that serve."""
