"""`serve_gym` and the server that it makes."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any
from urllib.parse import quote

from bridge.address import is_loopback
from bridge.clock import Clock
from bridge.credentials import TokenLike
from bridge.errors import Code, RequestError, SettingError
from bridge.forks import forget_in_child, leak
from bridge.server.admission import Admission
from bridge.server.auth import Gate, Security
from bridge.server.calls import Calls
from bridge.server.connection import Connection
from bridge.server.connections import Connections
from bridge.server.event_loop import EventLoop
from bridge.server.grpc_protocol import GrpcProtocol
from bridge.server.grpc_services import Services
from bridge.server.idle_worlds import IdleWorlds
from bridge.server.limits import ConnectionCount, Limits
from bridge.server.listeners import UnixListener, listen_tcp
from bridge.server.metrics import Metrics
from bridge.server.registry import Registry, WorldSource
from bridge.server.serving import ServerRuntime, ServingThread, forget_lock_in_child
from bridge.worlds.isolated import CALL_TIMEOUT, Isolation
from bridge.worlds.realtime import Realtime
from bridge.worlds.source import EnvLike, EnvSource
from bridge.worlds.timed import TimeAction

__all__ = ["Server", "serve_gym"]

_DEFAULTS = Limits()
_OPEN = Security()
IDLE_TIMEOUT = 3600.0
"""Seconds after which a world without agents goes, unless told otherwise."""
RESET_WORLD_TIMEOUT = 60.0
"""Seconds that a ResetWorld waits for the other agents, unless told otherwise."""
CLOSE_TIMEOUT = 5.0
"""Seconds that environments have to be closed when a server stops."""
_INTERRUPT_TIMEOUT = 1.5
"""The same after Ctrl-C."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server:
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
        idle_timeout: Seconds after which a world without agents goes; None: never.
        reset_world_timeout: Seconds that a ResetWorld waits for the other agents.
        metrics_port: Where to show metrics, 0: any free port; None: nowhere.
    """

    def __init__(
        self,
        source: WorldSource,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits = _DEFAULTS,
        unix_path: str | None = None,
        security: Security = _OPEN,
        idle_timeout: float | None = None,
        reset_world_timeout: float = RESET_WORLD_TIMEOUT,
        metrics_port: int | None = None,
    ) -> None:
        _check_seconds(reset_world_timeout=reset_world_timeout)
        if idle_timeout is not None:
            _check_seconds(idle_timeout=idle_timeout)
        if not isinstance(port, int) or not 0 <= port <= 65535:
            raise SettingError(f"expected a port from 0 to 65535, got {port!r}")
        self._source = source
        self._host = host
        self._tls = security.tls
        self._loop = EventLoop()
        self._serving = ServingThread(self._loop, lambda: self._calls.flush_served())
        self._registry = Registry(
            source,
            limits,
            ServerRuntime(self._loop, self._serving),
            idle_timeout=idle_timeout,
            reset_world_timeout=reset_world_timeout,
        )
        self._services = Services()
        self._count = ConnectionCount(limits.max_connections)
        self.admission = Admission(limits)
        """What is being served."""
        gate = Gate(security.token)

        def speak(connection: Connection) -> GrpcProtocol:
            return GrpcProtocol(connection, self._connections, limits, gate, self._services)

        self._connections = Connections(self._loop, limits, self.admission, speak)
        self._calls = self._connections.calls = Calls(
            self._registry,
            limits,
            count=self._count,
            admission=self.admission,
            scheduler=self._loop.scheduler,
            flush=self._connections.flush,
            cut=self._connections.close,
        )
        self._loop.serve = self._calls.serve_ready
        self._loop.on_signal = self._on_signal
        self._idle_worlds: IdleWorlds | None = None
        if idle_timeout is not None:
            self._idle_worlds = IdleWorlds(self._registry.reap, idle_timeout, self._loop.scheduler)
        self._unix: UnixListener | None = None
        self._metrics: Metrics | None = None
        try:
            self._port = self._listen(security, host, port, unix_path)
            if metrics_port is not None:
                self._metrics = Metrics(host, metrics_port, lambda: self.connections, lambda: self.worlds)
        except BaseException:
            self._connections.stop_listening()
            self._loop.close()
            raise
        self._calls.metrics = self._metrics
        self._thread: threading.Thread | None = None
        self._running = False
        self._draining = False
        self._grace = 0.0
        self._signal: int | None = None
        """The signal that stops the server."""
        self._left_behind = False
        """Whether an environment was still in a call when the server ended."""
        self._stopping = threading.Lock()
        self._stopped = threading.Event()
        if not is_loopback(host) and security.missing():
            self._warn(security)
        atexit.register(self.stop, 0.0)
        forget_in_child(self)

    def _listen(self, security: Security, host: str, port: int, unix_path: str | None) -> int:
        """Open all ports; return that of gRPC."""
        tls = security.context("h2")
        socks = listen_tcp(host, port)
        for sock in socks:
            self._connections.listen(sock, tls)
        if unix_path is not None:
            self._unix = UnixListener(os.path.abspath(unix_path))
            self._connections.listen(self._unix.sock, None, self._unix.remove)
            self._registry.unix_path = self._unix.path
        found: int = socks[0].getsockname()[1]
        return found

    def _warn(self, security: Security) -> None:
        danger = (
            f"what travels over port {self.port} can be read and changed on its way"
            if security.authenticates
            else f"whoever reaches port {self.port} can use the environments"
        )
        warnings.warn(f"listening on {self._host} without {security.missing()}: {danger}", RuntimeWarning, stacklevel=4)

    def after_fork(self) -> None:
        """In a forked process: leave the server to the parent process."""
        forget_lock_in_child()
        atexit.unregister(self.stop)
        leak(self._connections)
        leak(self._loop)
        self._stopping = threading.Lock()
        self._stopped = threading.Event()
        self._stopped.set()

    # What there is

    @property
    def url(self) -> str:
        """The URL that a client on this machine, or on one that reaches it by its name, connects to."""
        return f"{'grpcs' if self._tls else 'grpc'}://{self._reachable}:{self.port}"

    @property
    def _reachable(self) -> str:
        host = self._host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        return f"[{host}]" if ":" in host else host

    @property
    def urls(self) -> list[str]:
        """All URLs that this server listens on."""
        urls = [self.url]
        if self._unix is not None:
            urls.append(f"unix://{quote(self._unix.path)}")
        return urls

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._port

    @property
    def metrics_port(self) -> int | None:
        """The port of the metrics; None: there are none."""
        return None if self._metrics is None else self._metrics.port

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return self._count.value

    @property
    def worlds(self) -> list[str]:
        """The names of the worlds that there are."""
        return self._registry.names

    @property
    def env_ids(self) -> list[str]:
        """The environment ids that a client may name."""
        return self._source.env_ids

    # Serving

    def start(self) -> None:
        """Serve in a background thread, which makes and calls the environments.

        Raises:
            SettingError: It is started already, or stopped.
        """
        self._begin("start()")
        self._thread = threading.Thread(target=self._serve, name="bridge-serving", daemon=True)
        self._thread.start()

    def run(self, grace: float = 2.0) -> None:
        """Serve in the calling thread until Ctrl-C, SIGTERM or `stop` from another thread.

        Environments are made and called by this thread: in the main thread of a process also those that draw with a
        GUI toolkit work. Ctrl-C ends the connections at once and returns within 2 seconds; where an environment is in
        a call then, it ends the process with exit code 130. SIGTERM drains first. A second signal ends the process.

        Args:
            grace: Seconds that open connections get to end by themselves after SIGTERM.

        Raises:
            SettingError: It is started already, or stopped.
        """
        self._begin("run()")
        with self._handle_signals(grace):
            self._serve()
        self.stop()

    def _begin(self, method: str) -> None:
        if self._stopped.is_set():
            raise SettingError(f"expected {method} of a server that was not stopped; make another one")
        if self._running:
            raise SettingError(
                f"expected {method} of a server that is not started, and this one is; make it with start=False to call "
                "start() or run() later"
            )
        self._running = True

    def _serve(self) -> None:
        if self._idle_worlds is not None:
            self._idle_worlds.start()
        self._serving.serve()

    def wait(self, grace: float = 2.0) -> None:
        """Block until Ctrl-C, SIGTERM or `stop` from another thread; signals have the meaning that `run` says.

        Args:
            grace: Seconds that open connections get to end by themselves after SIGTERM.
        """
        if not self._running and not self._stopped.is_set():
            self.start()
        with self._handle_signals(grace):
            # A wait without a timeout would keep Python from running signal handlers on some platforms.
            while not self._stopped.is_set() and not self._serving.finished.wait(0.2):
                pass
        self.stop()

    @contextlib.contextmanager
    def _handle_signals(self, grace: float) -> Iterator[None]:
        """Let signals reach the event loop, whichever thread runs it; in the main thread of the process alone."""
        self._grace = grace
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ignore(number: int, frame: FrameType | None) -> None:
            """Nothing: the number of the signal is written to the event loop's wake-up."""

        before = {number: signal.signal(number, ignore) for number in _SIGNALS}
        wakeup = signal.set_wakeup_fd(self._loop.wakeup_fd, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int) -> None:
        """In the event loop: a signal came."""
        if number not in _SIGNALS:
            return
        if self._signal is not None:
            _end_process(number)
        self._signal = number
        if number == signal.SIGINT:
            self._begin_stop(0.0, _INTERRUPT_TIMEOUT)
        else:
            self._begin_stop(self._grace, CLOSE_TIMEOUT)

    # Stopping

    def stop(self, grace: float = 0.0) -> None:
        """Stop listening, end the connections, close the environments. May be called twice.

        Args:
            grace: Seconds that open connections get to end by themselves.
        """
        with self._stopping:
            if self._stopped.is_set():
                return
            atexit.unregister(self.stop)
            try:
                self._end_loop(grace)
                if self._metrics is not None:
                    self._metrics.close()
            finally:
                self._stopped.set()

    def _end_loop(self, grace: float) -> None:
        serving = self._serving
        if not self._running:
            self._connections.stop_listening()
            self._loop.close()
            return
        if not serving.finished.is_set():
            self._loop.scheduler.call_soon_threadsafe(lambda: self._begin_stop(grace, CLOSE_TIMEOUT))
            if serving.is_current:  # an environment stops its own server: the loop ends when the call returns
                return
            serving.finished.wait(grace + 2 * CLOSE_TIMEOUT)
        if self._thread is not None:
            self._thread.join(0.0 if serving.in_call else CLOSE_TIMEOUT)
        if self._left_behind or not serving.finished.is_set():
            warnings.warn(
                "an environment is still in a call after the deadline; its thread is left behind",
                RuntimeWarning,
                stacklevel=4,
            )
        elif self._thread is None or not self._thread.is_alive():
            self._loop.close()

    def _begin_stop(self, grace: float, close_timeout: float) -> None:
        """In the event loop: take no new connections, and end the open ones after a while."""
        scheduler = self._loop.scheduler
        if not self._draining:
            self._draining = True
            if self._idle_worlds is not None:
                self._idle_worlds.stop()
            self._services.stop()
            self._registry.drain()
            self._connections.drain()
        deadline = scheduler.now() + grace
        scheduler.call_soon(lambda: self._end_connections(deadline, close_timeout))

    def _end_connections(self, deadline: float, close_timeout: float) -> None:
        """End the connections that are open at the deadline, and then close the worlds."""
        scheduler = self._loop.scheduler
        if self._serving.finished.is_set():
            return
        if self._connections.all and scheduler.now() < deadline:
            scheduler.call_at(
                min(deadline, scheduler.now() + 0.02), lambda: self._end_connections(deadline, close_timeout)
            )
            return
        self._connections.close_all(RequestError(Code.UNAVAILABLE, "the server was stopped"))
        scheduler.call_later(close_timeout, self._give_up)
        scheduler.call_soon(lambda: scheduler.start(self._registry.close(), lambda result, error: self._finish()))

    def _give_up(self) -> None:
        """In the event loop: an environment is in a call that does not return."""
        if self._serving.finished.is_set():
            return
        self._left_behind = self._serving.in_call
        if self._left_behind and self._signal is not None and self._thread is None:
            sys.stderr.write("an environment is still in a call: the process is ended\n")
            _end_process(self._signal)
        self._finish()

    def _finish(self) -> None:
        self._calls.serve_ready()
        self._serving.finish()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._stopped.is_set() else f"{self.connections} connections"
        return f"Server({self._source.title}, {self.url}, {state})"


def _check_seconds(**settings: Any) -> None:
    for name, value in settings.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise SettingError(f"expected {name} to be a positive number of seconds, got {value!r}")


def _end_process(number: int) -> None:
    """End this process at once, as one that a signal has ended."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(128 + number)


def serve_gym(
    env: EnvLike,
    *,
    num_envs: int = 1,
    vectorization_mode: str = "sync",
    env_kwargs: Mapping[str, Any] | None = None,
    time_action: TimeAction | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    fps: float | None = None,
    default_action: Any = None,
    max_action_age: float | None = None,
    thread_safe: bool = False,
    clock: Clock | None = None,
    max_connections: int = _DEFAULTS.max_connections,
    max_worlds: int = _DEFAULTS.max_worlds,
    max_lanes: int = _DEFAULTS.max_lanes,
    max_message_bytes: int = _DEFAULTS.max_message_bytes,
    unix_path: str | None = None,
    processes: int = 1,
    max_requests_in_flight: int = _DEFAULTS.max_requests_in_flight,
    max_queued_bytes: int = _DEFAULTS.max_queued_bytes,
    token: TokenLike | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls_certificate: str | os.PathLike[str] | bytes | None = None,
    tls_key: str | os.PathLike[str] | bytes | None = None,
    tls_client_ca: str | os.PathLike[str] | bytes | None = None,
    isolation: str | None = None,
    call_timeout: float | None = CALL_TIMEOUT,
    max_world_bytes: int | None = None,
    allow_env_factories: bool = False,
    idle_timeout: float | None = IDLE_TIMEOUT,
    reset_world_timeout: float = RESET_WORLD_TIMEOUT,
    metrics_port: int | None = None,
    start: bool = True,
) -> Server:
    """Publish a Gymnasium environment as a world of dm_env_rpc.

    Every client may make worlds of its own; the default world, whose name is empty, is there for clients that make
    none.

    Example:
        >>> from bridge import serve_gym
        >>> with serve_gym("CartPole-v1") as server:
        ...     print(server.url.startswith("grpc://127.0.0.1:"))
        True

    Args:
        env: A Gymnasium id, an EnvSpec, a callable that returns an Env or VectorEnv, or a list of ids and patterns
            such as `"ALE/*"`, of which each client names one.
        num_envs: The number of lanes in each world: one message steps them all. 1: a single environment, without lanes.
        vectorization_mode: How Gymnasium steps the lanes: `sync`, `async` (a process each) or `vector_entry_point`.
        env_kwargs: Keyword arguments for the environment's constructor; a client's own go on top of them.
        time_action: Lets each action say for how many steps, or seconds, its environment advances in one Step.
        host: The address to listen on; anything but loopback warns.
        port: The port to listen on; 0 takes any free one.
        fps: Frames a second of a real-time world, which goes on while nobody calls `step`; None: lock-step, where
            every frame waits for an action.
        default_action: In real time, the action where there is none of the agent; None: zeros, or the first choice.
        max_action_age: In real time, the seconds after which the default action takes the place of the agent's last;
            None: the last one goes on.
        thread_safe: The environments may be called at the same time: each world has a thread of its own, in real time
            each lane, so that a slow one holds up no other. False: one thread makes and calls all environments of the
            server, and one call is made at a time in this process, over all of its servers.
        clock: In real time, what tells the time, such as `bridge.testing.VirtualClock()`; None: the machine.
        max_connections: Connections at a time.
        max_worlds: Worlds at a time.
        max_lanes: The most lanes in a world that a client may ask for.
        max_message_bytes: The largest request or response, in bytes.
        unix_path: Listen on a Unix socket at this path too, for gRPC clients on this machine: cheaper than TCP, and
            open to nobody but this user. Its URL is `unix://` and the path.
        processes: How many full servers to run, each in a process of its own, so that environments step on as many
            cores; `.urls` lists them. Process i listens on `port + i` where a port is given, and at `unix_path` with
            `.i` after it.
        max_requests_in_flight: Requests being served at a time, over all connections.
        max_queued_bytes: Bytes of requests being served and of responses being sent at a time, over all connections.
        token: What every client has to show; None: that of `token_file`, or else of the environment variable
            `BRIDGE_TOKEN`; where that is not set either, whoever reaches the port is let in.
        token_file: A file that holds the token.
        tls_certificate: The server's certificate, the path or the bytes of a PEM file: the ports then speak TLS.
        tls_key: The certificate's key, PEM.
        tls_client_ca: The authorities of which every client needs a certificate, PEM; None: clients need none.
        isolation: `process` puts each world in a process of its own, so that a crash, an endless loop or a leak in
            one environment ends that world alone; None: all of them live in this process.
        call_timeout: With isolation, the seconds that one call of an environment may take, its construction too; its
            process is ended then. None: for ever.
        max_world_bytes: With isolation, the memory that a world's process may allocate, where the system can limit it;
            None: no limit.
        allow_env_factories: Let clients send the function that makes the environment: code that this machine executes.
            Each runs in a process of its own. Beyond loopback it needs TLS and a token, or certificates of clients.
        idle_timeout: Seconds after which a world without agents goes; None: never.
        reset_world_timeout: Seconds that a ResetWorld waits for the Steps of the world's other agents.
        metrics_port: Show metrics for Prometheus at this port, by HTTP without TLS or token, 0: any free one;
            None: nowhere.
        start: Serve in a background thread at once. False: listen, and serve when `start()` or `run()` of the server
            is called.

    Returns:
        The server: `.url`, `.wait()`, `.stop()`, or a `with` block.

    Raises:
        SettingError: The environment is not registered, a keyword is out of its range, the port is in use.
    """
    arguments = dict(locals())
    count = arguments.pop("processes")
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 1024:
        raise SettingError(f"expected processes from 1 to 1024, got {count!r}")
    if count > 1:
        from bridge.server.processes import ServerGroup

        return ServerGroup(arguments.pop("env"), count, arguments)
    limits = Limits(max_connections, max_worlds, max_lanes, max_message_bytes, max_requests_in_flight, max_queued_bytes)
    own_processes = Isolation.of(isolation, call_timeout, max_world_bytes, always=allow_env_factories)
    security = Security.of(
        token=token,
        token_file=token_file,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
    )
    if allow_env_factories and not is_loopback(host) and security.missing():
        raise SettingError(
            f"allow_env_factories=True lets clients execute code on this machine, and host={host!r} is reached from "
            f"others: refused without {security.missing()}; give tls_certificate, tls_key and token"
        )
    source = EnvSource(
        env,
        num_envs=num_envs,
        vectorization_mode=vectorization_mode,
        env_kwargs=env_kwargs,
        max_lanes=max_lanes,
        time_action=time_action,
        realtime=_realtime(fps, default_action, max_action_age, clock),
        thread_safe=thread_safe,
        isolation=own_processes,
        allow_env_factories=allow_env_factories,
    )
    server = Server(
        source,
        host=host,
        port=port,
        limits=limits,
        unix_path=unix_path,
        security=security,
        idle_timeout=idle_timeout,
        reset_world_timeout=reset_world_timeout,
        metrics_port=metrics_port,
    )
    if start:
        server.start()
    return server


def _realtime(
    fps: float | None, default_action: Any, max_action_age: float | None, clock: Clock | None
) -> Realtime | None:
    """Join the keywords of real time, or raise SettingError where they stand without `fps`."""
    if fps is None:
        if default_action is not None or max_action_age is not None or clock is not None:
            raise SettingError("default_action, max_action_age and clock are of real time: give fps= too")
        return None
    options = Realtime(fps, default_action=default_action, max_action_age=max_action_age, clock=clock)
    options.check()
    return options
