"""A server: it assembles its parts, starts them, and stops them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias
from urllib.parse import quote

from bridge.core.extras import needed
from bridge.core.logs import SafeLog
from bridge.core.ownership import forget_in_child, leak
from bridge.core.server.auth import Gate, Security
from bridge.core.server.calls import Calls, ServedSession
from bridge.core.server.connection import Connection, ConnectionProtocol
from bridge.core.server.connections import Connections
from bridge.core.server.event_loop import EventLoop
from bridge.core.server.grpc_server import GrpcProtocol
from bridge.core.server.grpc_services import Services
from bridge.core.server.limits import Admission, ConnectionCount, CoreLimits, check_drain_timeout
from bridge.core.server.memory import IdleWorlds, MemoryRelease
from bridge.core.server.messages import ServedMessages
from bridge.core.server.registry import Overview, Registry, WorldSource
from bridge.core.server.serving import ServerRuntime, ServingThread, forget_lock_in_child
from bridge.core.server.shutdown import CLOSE_TIMEOUT, PLAYED_BY_NOBODY, SLICE, Shutdown, Stopping
from bridge.core.transport.address import is_loopback
from bridge.core.transport.sockets import check_listening
from bridge.core.worlds.base import start_error
from bridge.core.worlds.messages import SessionMessage
from bridge.core.worlds.observers import Observer
from bridge.core.worlds.scheduling import Runtime
from bridge.errors import RequestError, SettingError

if TYPE_CHECKING:
    from typing_extensions import Self

    from bridge.core.server.first_bytes import Speak
    from bridge.core.server.http11 import HostNames
    from bridge.core.server.metrics import Metrics
    from bridge.core.server.port import Port, PortProtocol
    from bridge.core.transport.tls import Tls

__all__ = ["SWITCH_INTERVAL", "Attachment", "CoreServer", "Sessions", "Transport"]

Transport: TypeAlias = Literal["http2", "grpcio"]

_log = SafeLog(__name__)
_LIMITS = CoreLimits()
_OPEN = Security()
_OVERVIEW = Overview()
SWITCH_INTERVAL = 0.0005
"""`sys.setswitchinterval` in processes that only serve: how long the deputy waits for the interpreter's lock."""


class Sessions(Protocol):
    """Makes the sessions of calls, in place of sessions with the server's own worlds."""

    def attach(self, loop: EventLoop, runtime: Runtime) -> None:
        """Store the server's event loop, and the runtime of its worlds. Called once, before the loop runs."""

    def open(self, hub: Registry, version: str, may_act: bool) -> ServedSession:
        """Make the session of a call.

        Args:
            hub: The server's worlds.
            version: The version that a client of this package reports; "" for others.
            may_act: True if the client may do more than watch.
        """


class Attachment(Protocol):
    """An object that starts and stops with a server, such as one that connects it to a listener."""

    def start(self) -> None:
        """Start: the server now serves. Called once."""

    def stop(self) -> None:
        """Stop: the server stops next. Called once, even if `start` was not."""


class CoreServer:
    """Serves worlds until it is stopped.

    It listens as soon as it is constructed. `start` serves in a background thread, `run` in the calling one. As a
    context manager it stops at the end.

    Args:
        source: Makes the worlds.
        host: The address to listen on.
        port: The port to listen on; 0: any free one.
        limits: The limits beyond which it refuses requests.
        unix_path: The path of a Unix socket to listen on, too; None: no Unix socket.
        security: Certificates, and the token.
        metrics_port: The port of the metrics; 0: any free port; None: no metrics.
        metrics_host: The address of that port; None: `host`.
        transport: The implementation of gRPC: `http2` or `grpcio`.
        insecure: True: no token is needed, even if other machines can reach the server. False: the server makes one.
        protocols: Further protocols at the port, beside gRPC.
        hosts: The host names that browsers may use; None: addresses, and the names of this machine.
        overview: What clients see of all worlds.
        sessions: Makes the sessions that answer calls; None: sessions with the worlds of this server.
        observers: Are notified of worlds, and admit agents; the first is asked first.
        messages: Further messages that sessions serve.
    """

    _attachments: tuple[Attachment, ...] = ()

    def __init__(
        self,
        source: WorldSource,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: CoreLimits = _LIMITS,
        unix_path: str | None = None,
        security: Security = _OPEN,
        metrics_port: int | None = None,
        metrics_host: str | None = None,
        transport: Transport = "http2",
        insecure: bool = False,
        protocols: Sequence[PortProtocol] = (),
        hosts: HostNames | None = None,
        overview: Overview = _OVERVIEW,
        sessions: Sessions | None = None,
        observers: Sequence[Observer] = (),
        messages: Sequence[SessionMessage] = (),
    ) -> None:
        _check_settings(host, port, unix_path, transport)
        if metrics_host is not None and metrics_port is None:
            raise SettingError(f"metrics_host={metrics_host!r} is the address of metrics_port: give that too")
        self._source = source
        self._host = host
        self._limits = limits
        security = security.for_host(host, insecure=insecure)
        self._tls, self._query = security.tls, security.query
        self._loop = EventLoop()
        # A lambda, because the calls are made below.
        self._serving = ServingThread(self._loop, lambda: self._calls.flush_served())
        runtime = self._runtime = ServerRuntime(self._loop, self._serving)
        self._unix_path = None if unix_path is None else os.path.abspath(unix_path)
        try:
            served = ServedMessages(messages, self._loop.scheduler)
        except BaseException:  # a handler may be another package's
            self._loop.close()
            raise
        self._registry = Registry(
            source,
            limits,
            runtime,
            unix_path=self._unix_path,
            overview=overview,
            shared_control=security.shared_control,
            observers=observers,
            messages=served,
        )
        self._count = ConnectionCount(limits.max_connections, "max_connections")
        self._viewers = ConnectionCount(limits.max_viewers, "max_viewers")
        self._services = Services(self._has_room)
        self._admission = Admission(limits)
        """Counts the requests and bytes in progress, over all connections."""
        self._protocols = tuple(protocols)
        try:
            self._connections = self._connect(transport, limits, security, hosts)
        except BaseException:
            self._loop.close()
            raise
        if sessions is not None:
            sessions.attach(self._loop, runtime)
        self._calls = self._make_calls(limits, None if sessions is None else sessions.open)
        self._calls.freed = self._registry.freed = MemoryRelease(self._loop.scheduler.call_later).soon
        timeouts = [seconds for seconds in (limits.idle_timeout, limits.abandoned_timeout) if seconds is not None]
        self._idle_worlds = IdleWorlds(self._registry.reap, min(timeouts, default=math.inf), self._loop.scheduler)
        self._metrics: Metrics | None = None
        self._metrics_host = host if metrics_host is None else metrics_host
        self._port = self._listen(port, metrics_port, limits, observers)
        self._thread: threading.Thread | None = None
        self._running = False
        self._shutdown = Shutdown(
            self._loop,
            self._serving,
            self._registry,
            self._connections,
            runtime.processes,
            self._begin_draining,
            limits.drain_timeout,
        )
        self._stopping = Stopping()
        self._stopped = threading.Event()
        self._waited = False
        """True once the program has waited for the server's end, by `wait` or `run`."""
        self._warn_of(security)
        # For a program that ends without `stop`: close the environments, and remove the Unix socket's file.
        atexit.register(self._end_with_program)
        forget_in_child(self)

    def _listen(self, port: int, metrics_port: int | None, limits: CoreLimits, observers: Sequence[Observer]) -> int:
        """Listen at the ports, and start the observers, which may be a user's and raise; return the port of gRPC."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._loop.close)
            undo.callback(self._connections.stop_listening)
            found: int = self._connections.listen(self._host, port)
            for observer in observers:
                observer.start(self._connections.helper)
                undo.callback(observer.close)
            if metrics_port is not None:
                from bridge.core.server.metrics import Metrics  # few servers have them

                self._metrics = Metrics(self._metrics_host, metrics_port, self._measured, limits)
            undo.pop_all()
        self._calls.metrics = self._metrics
        return found

    def _connect(self, transport: Transport, limits: CoreLimits, security: Security, hosts: HostNames | None) -> Any:
        """Make the part of the transport that receives and answers calls."""
        if transport == "grpcio":
            if self._protocols:
                names = ", ".join(protocol.name for protocol in self._protocols)
                raise SettingError(f"expected transport='http2' with {names}, got 'grpcio', which speaks gRPC alone")
            from bridge.core.server.grpcio_transport import GrpcioTransport

            grpcio = GrpcioTransport(self._loop.scheduler, limits, security, self._unix_path, self._has_room)
            self._gate = grpcio.gate
            return grpcio
        self._gate = gate = Gate(security.token, security.watch_token)

        def speak_grpc(connection: Connection) -> ConnectionProtocol:
            return GrpcProtocol(connection, self._connections, limits, gate, self._services)

        speak: Speak = speak_grpc
        alpn = ["h2"]
        if self._protocols:
            speak, alpn = self._speak_all(speak_grpc, limits, gate, hosts)
        return Connections(self._loop, limits, self._admission, speak, security.context(*alpn), self._unix_path)

    def _speak_all(
        self, speak_grpc: Speak, limits: CoreLimits, gate: Gate, hosts: HostNames | None
    ) -> tuple[Speak, list[str]]:
        """Return the function that makes a connection's protocol, and the names for TLS's ALPN."""
        # Imported here, because most servers speak only gRPC.
        from bridge.core.server.first_bytes import FirstBytes
        from bridge.core.server.http11 import HostNames
        from bridge.core.server.port import Port, check_protocols

        check_protocols(self._protocols)
        # Made at the first connection, because the server's connections are made below.
        port = functools.cache(lambda: Port(self._connections, limits, gate, self.status))
        speak_http: Speak | None = None
        # Browsers offer both, gRPC clients only h2. Others offer nothing.
        alpn = ["h2"]
        if of_http := [protocol for protocol in self._protocols if protocol.routes]:
            with needed(f"the protocol {of_http[0].name!r} needs the package websockets", "web"):
                from bridge.core.server.http_protocol import HttpProtocol, Routes
            routes, names = Routes(of_http), hosts or HostNames()
            speak_http = lambda connection: HttpProtocol(connection, port(), routes, names)  # noqa: E731
            alpn.insert(0, "http/1.1")
        others: dict[bytes, Speak] = {}
        for protocol in self._protocols:
            if protocol.handler is not None:
                others.update(dict.fromkeys(protocol.first_bytes, partial(_handle, protocol.handler, port)))
        return lambda connection: FirstBytes(connection, speak_grpc, speak_http, others), alpn

    def _make_calls(
        self, limits: CoreLimits, open_session: Callable[[Registry, str, bool], ServedSession] | None = None
    ) -> Calls:
        """Make the object that serves the requests of calls."""
        calls = self._connections.calls = Calls(
            self._registry,
            limits,
            count=self._count,
            viewers=self._viewers,
            admission=self._admission,
            scheduler=self._loop.scheduler,
            serving=self._serving,
            cut=self._connections.close,
            charge=self._connections.charge_request,
            open_session=open_session,
        )
        self._loop.requests, self._loop.serve = calls.ready, calls.serve_ready
        self._registry.note_failure = self._runtime.note_failure = calls.failures.add
        self._registry.counted = lambda: {
            "connections": self._count.value + self._viewers.value,
            "viewer_connections": self._viewers.value,
            "full": not self._has_room(),
            "requests": self._admission.requests,
            "queued_bytes": self._admission.bytes,
            "failures": calls.failures.total,
            **self._connections.counts(),
        }
        return calls

    def _has_room(self) -> bool:
        """True if another client is accepted, and may have a world of its own."""
        return not self._count.full and self._registry.has_room

    def _warn_of(self, security: Security) -> None:
        """Warn if other machines can reach the server, and it is not protected."""
        if is_loopback(self._host) or not security.missing():
            return
        danger = (
            f"traffic of port {self.port} can be read and changed by others on the network"
            if security.authenticates
            else f"anyone who reaches port {self.port} can use the environments"
        )
        warnings.warn(f"listening on {self._host} without {security.missing()}: {danger}", RuntimeWarning, stacklevel=4)

    def after_fork(self) -> None:
        """In a forked process: leave the server to the parent process."""
        forget_lock_in_child()
        self._serving.after_fork()
        atexit.unregister(self._end_with_program)
        self._shutdown.after_fork()
        leak(self._connections)
        leak(self._loop)
        self._stopping = Stopping()
        self._stopped = threading.Event()
        self._stopped.set()

    # Properties

    @property
    def url(self) -> str:
        """The URL for clients on this machine, or on one that can resolve its name.

        It ends in `?token=…` if the server made its token: every client that has the URL is accepted.
        """
        return f"{self._url_of('grpc')}{self._query}"

    def _url_of(self, scheme: str) -> str:
        return f"{scheme}{'s' if self._tls else ''}://{self._reachable}:{self.port}"

    @property
    def _reachable(self) -> str:
        host = self._host
        if host in ("0.0.0.0", "::", ""):
            # Clients cannot connect to a wildcard address.
            host = socket.gethostname()
        return f"[{host}]" if ":" in host else host

    @property
    def urls(self) -> list[str]:
        """All URLs that this server listens on."""
        urls = [self.url]
        if self._unix_path is not None:
            urls.append(f"unix://{quote(self._unix_path)}{self._query}")
        urls += [f"{self._url_of(each.url_scheme)}{self._query}" for each in self._protocols if each.url_scheme]
        return urls

    @property
    def web_url(self) -> str | None:
        """The URL to open in a browser, with the token if the server made it; None: there is no page."""
        if not any(route.path == "/" for protocol in self._protocols for route in protocol.routes):
            return None
        # In the fragment, which browsers send to no server, so that no proxy's log contains the token.
        return f"{self._url_of('http')}/{self._query.replace('?', '#', 1)}"

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._port)

    @property
    def metrics_port(self) -> int | None:
        """The port of the metrics; None: there are none."""
        return None if self._metrics is None else self._metrics.port

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return self._count.value + self._viewers.value

    @property
    def worlds(self) -> list[str]:
        """The names of the current worlds."""
        return self._registry.names

    @property
    def env_ids(self) -> list[str]:
        """The environment ids that a client may request."""
        return self._source.env_ids

    def status(self) -> dict[str, Any]:
        """Return the server's state and counters, as the property `server.status` does (docs/protocol.md)."""
        return self._registry.status()

    def _measured(self) -> dict[str, Any]:
        """Return the values for metrics: the status, and the clients refused before a session."""
        refused = {"refused_tokens": self._gate.refused, "failed_handshakes": self._connections.failed_handshakes}
        return {**self.status(), **refused}

    # Serving

    def start(self) -> None:
        """Serve in a background thread, which makes and calls the environments. Returns when the server is running.

        Raises:
            SettingError: The server was started or stopped before.
        """
        self._begin("start()")
        self._thread = threading.Thread(target=self._serve, name="bridge-serving", daemon=True)
        self._thread.start()
        # If the thread ends at once, nothing sets `begun`.
        while not self._serving.begun.wait(1.0) and self._thread.is_alive():
            pass

    def run(self, grace: float | None = None, *, started: Callable[[], None] | None = None) -> None:
        """Serve in the calling thread until Ctrl-C, SIGTERM, or `drain` or `stop` from another thread.

        This thread makes and calls the environments. So in the main thread of a process, environments that draw with a
        GUI toolkit work too. Ctrl-C ends the connections at once and returns within 2 seconds; if an environment is in
        a call then, it ends the process with exit code 130. SIGTERM and SIGHUP drain. A second signal stops at once, as
        Ctrl-C does, and a further one ends the wait for that.

        Args:
            grace: Seconds that clients have to leave after SIGTERM; None: `drain_timeout`.
            started: Called when the environment of the first world has been made. Without it, the server makes that
                environment for the first client.

        Raises:
            SettingError: The server was started or stopped before, or `grace` is no number; with `started`, the
                environment cannot be served, such as for wrong `env_kwargs`.
            StartError: With `started`, the environment raised while it was made.
        """
        check_drain_timeout(0.0 if grace is None else grace, "grace")  # before: a server cannot begin twice
        self._begin("run()")
        self._waited = True
        self._shutdown.ends_process = True
        problems: list[BaseException] = []
        if started is not None:
            self._prepare(started, problems)
        try:
            with self._shutdown.handle_signals(grace):
                self._serve()
        finally:
            self._serving.finish()  # also if an interrupt came before signals were handled
        self.stop()
        for problem in problems:
            if isinstance(problem, RequestError):
                raise start_error(self._source.title, problem) from problem
            raise problem

    def _prepare(self, started: Callable[[], None], problems: list[BaseException]) -> None:
        """Make the first environment when the loop begins; stop if that fails."""

        def prepared(result: object, error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error
                # A signal may have come while the environment was made: the server then does not report its start.
                if not self._shutdown.begun:
                    started()
            except BaseException as problem:
                # Raised by `run`, in the thread that called it, after the server has ended.
                problems.append(problem)
                self._shutdown.begin(0.0)

        scheduler = self._loop.scheduler
        scheduler.call_soon(lambda: scheduler.start(self._source.prepare(self._runtime), prepared))

    def _begin(self, method: str) -> None:
        if self._stopped.is_set():
            raise SettingError(f"{method} was called on a stopped server; create a new one")
        if self._running:
            raise SettingError(
                f"{method} was called on a server that is already started; create it with start=False to call start() "
                "or run() later"
            )
        self._running = True
        for attachment in self._attachments:
            attachment.start()

    def _serve(self) -> None:
        self._idle_worlds.start()
        self._serving.serve()
        # The deputy may have ended the loop while this thread was starting a process. No other code knows of that
        # process, and the program would wait for it for ever.
        self._shutdown.end_processes()
        self._loop.close()

    def wait(self, grace: float | None = None) -> None:
        """Block until Ctrl-C or SIGTERM, or `drain` or `stop` from another thread; signals act as in `run`.

        Args:
            grace: Seconds that clients have to leave after SIGTERM; None: `drain_timeout`.
        """
        self._waited = True
        if not self._running and not self._stopped.is_set():
            self.start()
        with self._shutdown.handle_signals(grace):
            # A wait without a timeout would keep Python from running signal handlers on some platforms.
            while not self._stopped.is_set() and not self._serving.finished.wait(SLICE):
                pass
        self.stop()

    # Objects that start and stop with the server

    def attach(self, attachment: Attachment) -> None:
        """Start an object with the server, or now if it has started, and stop it before the server."""
        self._attachments = (*self._attachments, attachment)
        if self._running:
            attachment.start()

    @property
    def takes_sockets(self) -> bool:
        """True if `serve_on` can be called: with grpcio the server cannot serve on a given socket."""
        return isinstance(self._connections, Connections)

    def serve_on(
        self,
        sock: socket.socket,
        peer: str,
        tls: Tls | None,
        received: bytes,
        ended: Callable[[], None],
        websocket: str | None = None,
        used: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve the other end of a socket, which needs no token. May be called by any thread.

        Args:
            sock: A connected socket, in non-blocking mode.
            peer: The address of the other end, for the log.
            tls: TLS on the socket, with its handshake done; None: none.
            received: Bytes of the other end that have arrived already.
            ended: Called when the connection is closed.
            websocket: For a WebSocket, whose handshake is done: the version of this package at the other end, empty for
                another package; None: gRPC.
            used: Called when the other end begins to speak over a WebSocket.
        """
        connections, limits, gate = self._connections, self._limits, Gate(None)

        def speak_grpc(connection: Connection) -> ConnectionProtocol:
            return GrpcProtocol(connection, connections, limits, gate, self._services)

        # The other end speaks first, perhaps in hours. Until then nothing is sent, not even a ping.
        def wait(connection: Connection) -> ConnectionProtocol:
            if websocket is None:
                from bridge.core.server.first_bytes import FirstBytes

                return FirstBytes(connection, speak_grpc, None, {})
            from bridge.core.server.http_protocol import OpenedWebSocket
            from bridge.core.server.port import Port

            return OpenedWebSocket(connection, Port(connections, limits, gate, self.status), websocket, used)

        self._loop.scheduler.call_soon_threadsafe(lambda: connections.serve_on(sock, peer, tls, received, wait, ended))

    # Stopping

    @property
    def draining(self) -> bool:
        """True if the server accepts no more worlds, and ends when its clients have left."""
        return self._shutdown.begun

    @property
    def ended(self) -> bool:
        """True if the server has ended: by `stop`, by a signal, or because the last client left while it drained."""
        return self._stopped.is_set() or self._serving.finished.is_set()

    def drain(self, timeout: float | None = None) -> None:
        """Accept no more worlds, tell the clients, and end when the last of them has left. Returns at once.

        Clients are told by HTTP/2's GOAWAY on their connections and, behind a proxy, by gRPC's health service, whose
        Watch says NOT_SERVING. Their calls and episodes continue. A vector environment that knows other servers moves
        its slots there (docs/cluster.md). New clients are refused with UNAVAILABLE. `wait` and `run` return when the
        server has ended; a `stop` meanwhile ends it sooner.

        Args:
            timeout: Seconds after which the remaining clients are disconnected; None: `drain_timeout`.
        """
        seconds = self._shutdown.drain_timeout if timeout is None else timeout
        check_drain_timeout(seconds, "timeout")
        if not self._running:
            self.stop()
        elif not self._serving.finished.is_set():
            self._loop.scheduler.call_soon_threadsafe(lambda: self._shutdown.begin(seconds))

    def stop(self, grace: float = 0.0) -> None:
        """Drain, and wait for the end: connections and environments are closed then. May be called twice.

        A call during another one shortens its grace, and waits for its end; in a signal handler that interrupts the
        other one it returns at once.

        Args:
            grace: Seconds that clients have to leave.
        """
        check_drain_timeout(grace, "grace")
        # A second thread also returns only when the server has ended. An environment that stops its own server does not
        # wait: the thread that stops the server waits for the environment's call.
        with self._stopping.begin(grace, blocking=not self._serving.is_current) as begun:
            if not begun or self._stopped.is_set():
                return
            for attachment in self._attachments:
                attachment.stop()
            self._end_loop()
            if self._metrics is not None:
                self._metrics.close()
            # Not if Ctrl-C ended the wait: the server still drains, and the next `stop`, or the end of the program,
            # ends it.
            self._stopped.set()
            atexit.unregister(self._end_with_program)

    def _end_with_program(self) -> None:
        """Stop when the program ends without `stop`. Warn if it neither waited for clients nor served one."""
        raised = hasattr(sys, "last_value")  # an exception ended the program, and says more
        told = self._waited or raised
        if self._serving.begun.is_set() and not told and not self.status()["steps"] and not self.connections:
            _log.warning(PLAYED_BY_NOBODY)
        self.stop()

    def _end_loop(self) -> None:
        serving, stopping = self._serving, self._stopping
        known: float | None = None
        """The deadline that the event loop knows."""
        if not self._running:
            self._connections.stop_listening()
            self._registry.close_observers()
            self._loop.close()
            return
        while not serving.finished.is_set():
            if known != stopping.deadline:
                known = stopping.deadline
                self._loop.scheduler.call_soon_threadsafe(partial(self._shutdown.begin, stopping.grace))
                if serving.is_current:  # an environment stops its own server: the loop ends when the call returns
                    return
            # The loop ends by itself after the grace and CLOSE_TIMEOUT. The rest is for a loop that hangs.
            if time.monotonic() > stopping.deadline + 2 * CLOSE_TIMEOUT:
                break
            serving.finished.wait(SLICE)
        self._connections.stop_listening()
        if self._thread is not None:
            # An environment that is in a call after its deadline may stay there for ever.
            self._thread.join(0.0 if serving.in_call else CLOSE_TIMEOUT)
        if self._shutdown.left_behind or not serving.finished.is_set():
            warnings.warn(
                "an environment is still in a call after the deadline; its thread is left behind",
                RuntimeWarning,
                stacklevel=4,
            )

    def _begin_draining(self, grace: float) -> None:
        """Accept no new calls and worlds. Called in the event loop."""
        self._idle_worlds.stop()
        self._services.stop()
        self._registry.drain()
        self._connections.drain(grace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._stopped.is_set() else f"{self.connections} connections"
        return f"Server({self._source.title}, {self._url_of('grpc')}, {state})"


def _check_settings(host: Any, port: Any, unix_path: Any, transport: Any) -> None:
    check_listening(host, port)
    if unix_path == "":
        raise SettingError("expected unix_path to be a path, or None, got ''")
    if transport not in ("http2", "grpcio"):
        raise SettingError(f"expected transport to be 'http2' or 'grpcio', got {transport!r}")


def _handle(
    make: Callable[[Connection, Port], ConnectionProtocol], port: Callable[[], Port], connection: Connection
) -> ConnectionProtocol:
    return make(connection, port())
