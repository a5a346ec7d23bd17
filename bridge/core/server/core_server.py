"""A server: its parts put together, started, and stopped."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import socket
import sys
import threading
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
from bridge.core.server.shutdown import CLOSE_TIMEOUT, PLAYED_BY_NOBODY, Shutdown
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
"""`sys.setswitchinterval` in processes that do nothing but serve: what the deputy waits for the interpreter's lock."""


class Sessions(Protocol):
    """Makes the sessions of calls, in place of those with the server's own worlds."""

    def attach(self, loop: EventLoop, runtime: Runtime) -> None:
        """Keep the server's event loop, and the runtime of its worlds. Called once, before the loop runs."""

    def open(self, hub: Registry, version: str, may_act: bool) -> ServedSession:
        """Make the session of a call.

        Args:
            hub: The server's worlds.
            version: The version that a client of this package says it has; "" for others.
            may_act: Whether the client may do more than watch.
        """


class Attachment(Protocol):
    """What begins and ends with a server, such as what connects it to somebody who waits for it."""

    def start(self) -> None:
        """Begin; the server serves from now on. Called once."""

    def stop(self) -> None:
        """End; the server stops next. Called once, also where it was not started."""


class CoreServer:
    """Serves worlds until it is stopped.

    It listens from its construction on. `start` serves in a background thread, `run` in the calling one. Works as a
    context manager, which stops it.

    Args:
        source: Makes the worlds.
        host: The address to listen on.
        port: The port to listen on; 0: any free one.
        limits: What it refuses beyond.
        unix_path: Where to listen on a Unix socket too; None: nowhere.
        security: Certificates, and the token.
        metrics_port: Where to show metrics, 0: any free port; None: nowhere.
        metrics_host: The address of that port; None: `host`.
        transport: What speaks gRPC: `http2` or `grpcio`.
        insecure: Whether it goes without a token where others reach it; else it makes one.
        protocols: What is spoken at the port beside gRPC.
        hosts: The names under which browsers may reach it; None: addresses, and the names of this machine.
        overview: What clients see of all its worlds.
        sessions: Makes what answers calls; None: sessions with the worlds of this server.
        observers: Are told of the worlds, and let agents in; the first is asked first.
        messages: What else is served in a session.
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
        # A lambda, for the calls are made below.
        self._serving = ServingThread(self._loop, lambda: self._calls.flush_served())
        runtime = self._runtime = ServerRuntime(self._loop, self._serving)
        self._unix_path = None if unix_path is None else os.path.abspath(unix_path)
        try:
            served = ServedMessages(messages, self._loop.scheduler)
        except BaseException:  # a handler is another package's own
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
        """The requests and bytes that are held, over all connections."""
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
        self._stopping = threading.Lock()
        self._stopped = threading.Event()
        self._waited = False
        """True once the program has waited for its end, by `wait` or `run`."""
        self._warn_of(security)
        # For a program that ends without `stop`: environments are closed, and the file of the Unix socket goes.
        atexit.register(self._end_with_program)
        forget_in_child(self)

    def _listen(self, port: int, metrics_port: int | None, limits: CoreLimits, observers: Sequence[Observer]) -> int:
        """Listen at the ports, and start the observers, of which a user's own may raise; return the port of gRPC."""
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
        """Make the transport's end that receives and answers calls."""
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
        """Return what makes a connection's protocol, and the names of what may be spoken within TLS."""
        # Imported here, for most servers speak gRPC alone.
        from bridge.core.server.first_bytes import FirstBytes
        from bridge.core.server.http11 import HostNames
        from bridge.core.server.port import Port, check_protocols

        check_protocols(self._protocols)
        # By the first connection: those of the server are made below.
        port = functools.cache(lambda: Port(self._connections, limits, gate, self.status))
        speak_http: Speak | None = None
        # Browsers offer both, gRPC clients h2 alone. Others offer nothing.
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
        """Tell whether a further client is let in, and may have a world of its own."""
        return not self._count.full and self._registry.has_room

    def _warn_of(self, security: Security) -> None:
        """Warn where others reach the server, and it is not protected."""
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
        self._stopping = threading.Lock()
        self._stopped = threading.Event()
        self._stopped.set()

    # Properties

    @property
    def url(self) -> str:
        """The URL that a client on this machine, or on one that reaches it by its name, connects to.

        It ends in `?token=…` where the server has made its token: whoever has the URL is let in.
        """
        return f"{self._url_of('grpc')}{self._query}"

    def _url_of(self, scheme: str) -> str:
        return f"{scheme}{'s' if self._tls else ''}://{self._reachable}:{self.port}"

    @property
    def _reachable(self) -> str:
        host = self._host
        if host in ("0.0.0.0", "::", ""):
            # An address that stands for all is none to connect to.
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
        """The URL to open in a browser, with the token where the server has made it; None: there is nothing to see."""
        if not any(route.path == "/" for protocol in self._protocols for route in protocol.routes):
            return None
        # In the fragment, which browsers send to no server: so the token stands in no log of a proxy.
        return f"{self._url_of('http')}/{self._query.replace('?', '#', 1)}"

    @property
    def port(self) -> int:
        """The port that it listens on."""
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
        """The names of the worlds that there are."""
        return self._registry.names

    @property
    def env_ids(self) -> list[str]:
        """The environment ids that a client may name."""
        return self._source.env_ids

    def status(self) -> dict[str, Any]:
        """Return what it does and has done, as its property `server.status` says it (docs/protocol.md)."""
        return self._registry.status()

    def _measured(self) -> dict[str, Any]:
        """Return what metrics show: the status, and who was turned away before any session."""
        refused = {"refused_tokens": self._gate.refused, "failed_handshakes": self._connections.failed_handshakes}
        return {**self.status(), **refused}

    # Serving

    def start(self) -> None:
        """Serve in a background thread, which makes and calls the environments; returns once it does.

        Raises:
            SettingError: It is started already, or stopped.
        """
        self._begin("start()")
        self._thread = threading.Thread(target=self._serve, name="bridge-serving", daemon=True)
        self._thread.start()
        # Where the thread ends at once, nothing sets `begun`.
        while not self._serving.begun.wait(1.0) and self._thread.is_alive():
            pass

    def run(self, grace: float | None = None, *, started: Callable[[], None] | None = None) -> None:
        """Serve in the calling thread until Ctrl-C, SIGTERM, or `drain` or `stop` from another thread.

        Environments are made and called by this thread: in the main thread of a process also those that draw with a
        GUI toolkit work. Ctrl-C ends the connections at once and returns within 2 seconds; where an environment is in
        a call then, it ends the process with exit code 130. SIGTERM and SIGHUP drain, and a second signal stops at
        once, as Ctrl-C does, which a further one does not wait for.

        Args:
            grace: Seconds that clients have to leave after SIGTERM; None: `drain_timeout`.
            started: Called once the environment of the first world has been made, which otherwise waits for a client.

        Raises:
            SettingError: It is started already, or stopped, or `grace` is no number; with `started`, the environment
                cannot be served, such as for wrong `env_kwargs`.
            StartError: With `started`, the environment failed while it was made.
        """
        check_drain_timeout(0.0 if grace is None else grace, "grace")  # before it begins, and could not be begun again
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
            self._serving.finish()  # also where an interrupt came before signals were handled
        self.stop()
        for problem in problems:
            if isinstance(problem, RequestError):
                raise start_error(self._source.title, problem) from problem
            raise problem

    def _prepare(self, started: Callable[[], None], problems: list[BaseException]) -> None:
        """Have the loop make the first environment as it begins; where that fails, stop."""

        def prepared(result: object, error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error
                # A signal may have come while the environment was made: the server then says nothing of having started.
                if not self._shutdown.begun:
                    started()
            except BaseException as problem:
                # Raised by `run`, in the thread that called it, once the server has ended.
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
        # The deputy may have ended the loop while this thread was starting a process. Nobody else knows of that one,
        # and the program would wait for its end for ever.
        self._shutdown.end_processes()
        self._loop.close()

    def wait(self, grace: float | None = None) -> None:
        """Block until Ctrl-C or SIGTERM, or `drain` or `stop` from another thread; signals mean what `run` says.

        Args:
            grace: Seconds that clients have to leave after SIGTERM; None: `drain_timeout`.
        """
        self._waited = True
        if not self._running and not self._stopped.is_set():
            self.start()
        with self._shutdown.handle_signals(grace):
            # A wait without a timeout would keep Python from running signal handlers on some platforms.
            while not self._stopped.is_set() and not self._serving.finished.wait(0.2):
                pass
        self.stop()

    # What else begins and ends with it

    def attach(self, attachment: Attachment) -> None:
        """Have something start with the server, or now if that has started, and stop before the server does."""
        self._attachments = (*self._attachments, attachment)
        if self._running:
            attachment.start()

    @property
    def takes_sockets(self) -> bool:
        """True if `serve_on` can be called: with grpcio the server cannot serve on a socket that it is handed."""
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
        """Serve the other end of a socket, which needs no token; may be called by any thread.

        Args:
            sock: Connected, and not blocking.
            peer: Where the other end is, for the log.
            tls: What stands between, its handshake done; None: nothing.
            received: The first bytes of the other end, if some have come already.
            ended: Called once the connection is closed.
            websocket: Of a WebSocket, whose handshake is done: the version of this package at the other end, empty for
                another package; None: gRPC.
            used: Called when the other end begins to speak over a WebSocket.
        """
        connections, limits, gate = self._connections, self._limits, Gate(None)

        def speak_grpc(connection: Connection) -> ConnectionProtocol:
            return GrpcProtocol(connection, connections, limits, gate, self._services)

        # The other end speaks first, perhaps in hours: until then nothing is sent, and no ping.
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
        """True if it takes no further worlds, and ends once its clients have left."""
        return self._shutdown.begun

    @property
    def ended(self) -> bool:
        """True if it has ended: by `stop`, by a signal, or since the last client left while it drained."""
        return self._stopped.is_set() or self._serving.finished.is_set()

    def drain(self, timeout: float | None = None) -> None:
        """Take no further worlds, tell the clients, and end once the last of them has left. Returns at once.

        Clients are told by HTTP/2's GOAWAY on their connections, and by gRPC's health service, whose Watch says
        NOT_SERVING, where a proxy stands between. What they have goes on: their calls, and the episodes in them.
        A vector environment that knows other servers moves its slots there (docs/cluster.md). Who comes anew is
        refused with UNAVAILABLE. `wait` and `run` return when it has ended; a `stop` meanwhile ends it sooner.

        Args:
            timeout: Seconds after which the clients that are left are cut off; None: `drain_timeout`.
        """
        seconds = self._shutdown.drain_timeout if timeout is None else timeout
        check_drain_timeout(seconds, "timeout")
        if not self._running:
            self.stop()
        elif not self._serving.finished.is_set():
            self._loop.scheduler.call_soon_threadsafe(lambda: self._shutdown.begin(seconds))

    def stop(self, grace: float = 0.0) -> None:
        """Drain, and wait until it has ended: connections and environments are closed then. May be called twice.

        Args:
            grace: Seconds that clients have to leave.
        """
        check_drain_timeout(grace, "grace")
        # Held to the end: a second caller returns only once the server has ended, too. Not so an environment that stops
        # its own server: the thread that stops it already waits for the environment's call.
        if not self._stopping.acquire(blocking=not self._serving.is_current):
            return
        try:
            if self._stopped.is_set():
                return
            for attachment in self._attachments:
                attachment.stop()
            self._end_loop(grace)
            if self._metrics is not None:
                self._metrics.close()
            # Not where Ctrl-C ended the wait: the server still drains, and the next `stop`, or the end of the program,
            # ends it.
            self._stopped.set()
            atexit.unregister(self._end_with_program)
        finally:
            self._stopping.release()

    def _end_with_program(self) -> None:
        """Stop where the program ends without `stop`. A script that was to wait for clients, and does not, is told."""
        raised = hasattr(sys, "last_value")  # an exception has ended the program, and says more
        told = self._waited or raised
        if self._serving.begun.is_set() and not told and not self.status()["steps"] and not self.connections:
            _log.warning(PLAYED_BY_NOBODY)
        self.stop()

    def _end_loop(self, grace: float) -> None:
        serving = self._serving
        if not self._running:
            self._connections.stop_listening()
            self._registry.close_observers()
            self._loop.close()
            return
        if not serving.finished.is_set():
            self._loop.scheduler.call_soon_threadsafe(lambda: self._shutdown.begin(grace))
            if serving.is_current:  # an environment stops its own server: the loop ends when the call returns
                return
            # The loop ends by itself after `grace` and CLOSE_TIMEOUT. The rest is for one that hangs.
            serving.finished.wait(grace + 2 * CLOSE_TIMEOUT)
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
        """In the event loop: take no new calls and worlds."""
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
