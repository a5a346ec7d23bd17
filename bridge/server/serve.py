"""`serve_gym`: a Gymnasium environment as worlds of a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from bridge.clock import Clock
from bridge.errors import SettingError
from bridge.server.auth import Security
from bridge.server.limits import Limits
from bridge.server.server import IDLE_TIMEOUT, RESET_WORLD_TIMEOUT, Server
from bridge.transport.address import is_loopback
from bridge.transport.credentials import TokenLike
from bridge.worlds.isolated.world import CALL_TIMEOUT, Isolation
from bridge.worlds.realtime.clocked_world import Realtime
from bridge.worlds.source import EnvLike, EnvSource
from bridge.worlds.timed import TimeAction

__all__ = ["serve_gym"]

_DEFAULTS = Limits()


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
    transport: Literal["http2", "grpcio"] = "http2",
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
        transport: What speaks gRPC at the port: `http2`, this package's own code, or `grpcio`, the library, for a
            hostile port or an unusual proxy: three to five times slower, with a thread for each connection.
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
        from bridge.server.process_group import ServerGroup

        del arguments["start"]  # the processes serve from their start on
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
        transport=transport,
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
