"""Serves a policy: requests of all connections that wait are answered by one call of the function."""

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
from bridge.core.server.auth import Gate, ListenKeywords, ListenOptions
from bridge.core.signals import wait_or_stop
from bridge.core.transport.credentials import TLS
from bridge.core.transport.sockets import check_listening, end_if_unreachable, listen_tcp
from bridge.core.transport.websocket import LOGGER, without_ping_timeout
from bridge.errors import RequestError, SettingError
from bridge.policies import wire
from bridge.policies.rows import check_policy, join, layout, row_count, take

# After `wire`, whose error says what to install.
from websockets.exceptions import ConnectionClosed  # isort: skip
from websockets.frames import CloseCode  # isort: skip
from websockets.http11 import Request as HttpRequest, Response  # isort: skip
from websockets.sync.server import ServerConnection, serve  # isort: skip

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["PolicyServer", "serve_policy"]

_LOG = logging.getLogger("bridge.policies")
# Seconds until a client is given up whose machine acknowledges nothing that was sent.
_UNREACHABLE = 120.0


class _Waiting(NamedTuple):
    """A request that waits for the function."""

    batch: Any
    rows: int
    layout: Any
    answer: Future[Any]
    """The actions, and how long the function took; cancelled by `stop`."""


class _Port:
    """A listening socket for `websockets`, which gives each caller a thread, and ends with the first error of `accept`.

    Args:
        sock: The socket.
        callers: Gets those whose handshake is not over.
    """

    def __init__(self, sock: socket.socket, callers: Callers) -> None:
        sock.settimeout(1.0)  # else a thread that waits for a caller who has gone again is not woken by `close`
        self._sock, self._callers = sock, callers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def accept(self) -> tuple[socket.socket, Any]:
        """Take a caller."""
        while True:
            try:
                sock, address = self._sock.accept()
                break
            except OSError:  # such as no files left, or of TLS a caller who has gone
                if self._sock.fileno() < 0:
                    raise
                time.sleep(0.01)
        self._callers.add(sock)
        return sock, address


@grouped_class(ListenOptions, tls=TLS)
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
        function: Takes a batch of observations, `(rows, …)` or a dict of such, where text is an array of strings, and
            returns `(rows, …)` actions.
            `by_rows` makes one of a function of single observations.
        chunked: Whether the function returns chunks, `(rows, horizon, …)`.
        max_batch: The most observations of one call.
        max_wait: Seconds that a request waits for others to share a call with.
        max_connections: How many clients there may be.
        max_message_bytes: The largest request.
        insecure: Beyond loopback, let anybody in. Else `PolicyServer.token` is the token that is made there.
        metadata: What clients are told when they connect.
        keywords: Those of `bridge.core.server.auth.ListenOptions`, which the signature lists.

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
        """The token that clients have to show; None: none."""
        self._max_batch, self._max_wait, self._max_connections = max_batch, max_wait, max_connections
        self._metadata = wire.pack({**(metadata or {}), wire.MAX_BATCH: max_batch})
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._connections = set[ServerConnection]()
        self._callers = Callers(64)
        self.calls = 0
        """How often the function was called."""
        context = security.context()
        self._servers = [
            serve(
                self._serve,
                sock=sock,
                ssl=context,
                process_request=self._admit,
                origins=[None],  # a page in a browser that visits another site must not reach a policy on this machine
                compression=None,
                close_timeout=1.0,
                max_size=max_message_bytes,
                logger=LOGGER,
                # A client that computes in its event loop answers no ping meanwhile, and comes back.
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
        """Block until Ctrl-C or SIGTERM, or `stop` from another thread; a signal stops the server."""
        wait_or_stop(self._stopped, self.stop)

    def stop(self) -> None:
        """Close the port and all connections; a call of the function that takes long is left to itself."""
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()
            # Closed below without the lock, which the threads of the connections take at their ends.
            connections = tuple(self._connections)
            for one in self._waiting:
                one.answer.cancel()
        for server in self._servers:
            server.shutdown()
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
        if request.path == "/healthz":  # as openpi's own server; load balancers have no token
            return connection.respond(200, "OK\n")
        header = ", ".join(request.headers.get_all("Authorization"))  # of several, none is the token
        kind, _, key = header.partition(" ")
        shown = key if kind.lower() == "api-key" else Gate.bearer(header)
        try:
            self._gate.check(shown, "{}:{}".format(*connection.remote_address))
        except RequestError as error:
            return connection.respond(401, f"{error.message}\n")
        return None

    def _serve(self, connection: ServerConnection) -> None:
        """Answer the requests of one connection, one after the other; at the end it is closed."""
        self._callers.let_in(connection.socket)
        # No pong is waited for. So a client whose machine is gone would keep its place among `max_connections`.
        end_if_unreachable(connection.socket, _UNREACHABLE)
        with self._changed:
            self._connections.add(connection)
            is_full = len(self._connections) > self._max_connections
        try:
            if is_full:
                connection.send(f"expected at most max_connections={self._max_connections} clients: close one")
            elif not self._stopped.is_set():  # `stop` may have come during its handshake
                connection.send(self._metadata)
                for data in connection:
                    try:
                        connection.send(self._answer(data))
                    except ValueError as error:  # a WireError, or NumPy's where something is no array
                        connection.send(str(error))  # a text is an error on this wire; the connection goes on
        except (CancelledError, ConnectionClosed):
            pass
        finally:
            with self._changed:
                self._connections.discard(connection)

    def _answer(self, data: Any) -> bytes:
        message = wire.unpack(data)
        count = message.pop(wire.BATCH, None)
        rows = 1 if count is None else count
        # By the exact type: true is an integer for Python.
        if type(rows) is not int or not 1 <= rows <= self._max_batch:
            raise wire.WireError(f"expected {wire.BATCH} to be 1 to max_batch={self._max_batch}, got {rows!r:.40}")
        batch = take(message, None if count is None else ...)
        if row_count(batch) != {rows}:
            raise wire.WireError(f"expected {rows} rows in every part of the observation, got {row_count(batch)}")
        batch = batch[wire.OBSERVATION] if set(batch) == {wire.OBSERVATION} else batch
        request = _Waiting(batch, rows, layout(batch), Future())
        with self._changed:
            # `stop` has cancelled what waited: nobody would answer this one.
            if self._stopped.is_set():
                raise CancelledError
            self._waiting.append(request)
            self._changed.notify_all()
        chunks, seconds = request.answer.result()
        return wire.pack({"actions": chunks if count else chunks[0], "server_timing": {"infer_ms": 1000 * seconds}})

    def _work(self) -> None:
        """Answer requests by calls of the function until the server stops."""
        while True:
            with self._changed:
                self._waiting = [one for one in self._waiting if not one.answer.done()]
                self._changed.wait_for(lambda: self._stopped.is_set() or self._waiting)
                self._changed.wait_for(self._is_enough, self._max_wait)
                if self._stopped.is_set():
                    return
                # Those like the oldest request. The others wait for the next call, which the oldest of them decides.
                alike = [one for one in self._waiting if one.layout == self._waiting[0].layout]
            ends = np.cumsum([one.rows for one in alike])
            with contextlib.suppress(InvalidStateError):  # `stop` has cancelled them meanwhile
                self._run(alike[: np.searchsorted(ends, self._max_batch, "right")])

    def _is_enough(self) -> bool:
        """True if no request is worth waiting for: where all open connections wait already, none can add one soon."""
        full = sum(one.rows for one in self._waiting) >= self._max_batch
        return self._stopped.is_set() or full or len(self._waiting) >= len(self._connections)

    def _run(self, requests: Sequence[_Waiting]) -> None:
        """Answer requests by one call; where that fails, each by a call of its own: one may spoil it for the others."""
        ends = np.cumsum([one.rows for one in requests])
        began = time.perf_counter()
        self.calls += 1
        try:
            chunks = np.asarray(self._function(join([one.batch for one in requests])))
            # A function of actions gives chunks of one.
            chunks = chunks if self._chunked else np.expand_dims(np.atleast_1d(chunks), 1)
            wire.check_chunks(chunks, ends[-1])
        except BaseException as error:  # such as sys.exit(): without this thread nobody would be answered any more
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
"""`PolicyServer`, by a name as the other functions that serve have."""
