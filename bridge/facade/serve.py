"""`serve_gym`: a Gymnasium environment as worlds of a server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bridge.errors import SettingError
from bridge.facade.record import Recording, open_journal, recorded
from bridge.keywords import grouped
from bridge.server.auth import Security
from bridge.server.limits import Limits, checked_limits
from bridge.server.server import Server
from bridge.server.web_site import OpenEnvOptions, WebSite, page_files
from bridge.transport.address import is_loopback
from bridge.transport.credentials import TLS, TokenLike
from bridge.watching.agents import Gallery
from bridge.watching.render_mode import drawing_kwargs
from bridge.worlds.arrays import ArrayKind, Arrays
from bridge.worlds.controls import checked_play_fps
from bridge.worlds.isolated.world import Isolation
from bridge.worlds.observers import Observer
from bridge.worlds.realtime.clocked_world import RealTime, RealtimeOptions
from bridge.worlds.source import EnvLike, EnvSource, WorldKind
from bridge.worlds.timed import TimeAction

__all__ = ["serve_gym"]


@grouped(limits=Limits, realtime=RealTime, record=Recording, tls=TLS)
def serve_gym(
    env: EnvLike,
    *,
    num_envs: int = 1,
    vectorization_mode: Literal["sync", "async", "vector_entry_point"] = "sync",
    env_kwargs: Mapping[str, Any] | None = None,
    time_action: TimeAction | None = None,
    array: ArrayKind = "numpy",
    device: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    unix_path: str | None = None,
    fps: float | None = None,
    default_action: Any = None,
    realtime: RealTime | None = None,
    isolation: Literal["process"] | None = None,
    thread_safe: bool = False,
    processes: int = 1,
    token: TokenLike | None = None,
    token_file: str | os.PathLike[str] | None = None,
    watch_token: TokenLike | None = None,
    watch_token_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    insecure: bool = False,
    allow_env_factories: bool = False,
    limits: Limits | None = None,
    transport: Literal["http2", "grpcio"] = "http2",
    metrics_port: int | None = None,
    record: str | os.PathLike[str] | Recording | None = None,
    web: bool = False,
    web_hosts: str | Sequence[str] = (),
    play_fps: float | None = None,
    action_names: str | Sequence[str] | None = None,
    openenv: bool | Literal["png"] = False,
    dial: str | None = None,
    dial_ca: str | os.PathLike[str] | None = None,
    dial_name: str | None = None,
    observers: Sequence[Observer] = (),
    world: WorldKind | None = None,
    start: bool = True,
) -> Server:
    """Publish a Gymnasium environment as a world of dm_env_rpc.

    Each client may create worlds of its own. Clients that create none join the default world, whose name is empty.

    Examples:
        >>> from bridge import serve_gym
        >>> with serve_gym("CartPole-v1") as server:
        ...     print(server.url.startswith("grpc://127.0.0.1:"))
        True

    Args:
        env: A Gymnasium id, an EnvSpec, a callable that returns an Env or VectorEnv, or a list of ids and patterns
            such as `"ALE/*"`, from which each client chooses one.
        num_envs: The number of lanes (environments) in each world; one message steps them all. 1: a single environment.
        vectorization_mode: How Gymnasium steps the lanes: `sync`, `async` (a process each) or `vector_entry_point`.
        env_kwargs: Keyword arguments for the environment's constructor; those that a client sends override them.
        time_action: Which part of an action says how many steps, or seconds, one Step advances the environment.
        array: Which arrays the environment takes and gives: `numpy`, `torch` or `jax`. Results come to the host once a
            step.
        device: Where `torch` or `jax` puts actions, such as `cuda:0`; None: the library's default device.
        host: The address to listen on. Beyond loopback, a server that is given neither a token nor
            `TLS(client_ca=…)` makes a token, which its URL carries.
        port: The port to listen on; 0: any free port.
        unix_path: Also listen on a Unix socket at this path, for clients on this machine: a little faster than TCP, and
            open to this user only. Its URL is `unix://` followed by the path.
        fps: Frames a second of a real-time world, which runs whether or not `step` is called; None: lock-step, where
            each step waits for an action.
        default_action: In real time, the action used until the agent sends one; None: zeros, or the first choice.
        realtime: With `fps`, how frames and late actions are handled; None: as `RealTime` has it.
        isolation: `process` runs each world in a process of its own, so that a crash, an endless loop or a memory leak
            ends that world only; None: all worlds run in the server's process.
        thread_safe: Run each world in a thread of its own (in real time, each lane), so that a slow environment delays
            no other. False: one thread creates and calls all environments of the server, and only one environment of
            the process runs at a time.
        processes: How many server processes to run, so that environments step on as many cores, each at a URL.
            Process i listens on `port + i` if a port is given, and at `unix_path` followed by `.i`.
        token: The secret that each client must send; None: the one in `token_file`, else in the environment variable
            `BRIDGE_TOKEN`; if there is none, see `host`.
        token_file: A file that contains the token.
        watch_token: A second secret, for clients that may watch and do nothing else; None: there are none.
        watch_token_file: A file that contains the watch token.
        tls: The server's certificate and key, with which the port speaks TLS only; None: no TLS.
        insecure: Ask for no token beyond loopback either: whoever reaches the port is let in, with a warning.
        allow_env_factories: Let clients send a function that makes the environment. This machine then executes their
            code, in a process for each world. Unless only loopback is served, it needs TLS, and a token or client
            certificates.
        limits: Bounds of connections, worlds, bytes and times; None: the defaults of `Limits`.
        transport: The gRPC implementation: `http2`, this package's own, or `grpcio`, the library, for untrusted
            networks and unusual proxies; it is three to five times slower and needs a thread for each connection.
        metrics_port: Serve metrics for Prometheus at this port, by HTTP without TLS or token; 0: any free port;
            None: no metrics.
        record: A folder in which every episode is recorded, or `Recording(folder, …)`; None: nothing is recorded.
        web: Also speak WebSocket at the port, for browsers and for clients behind proxies that pass nothing else. The
            environment is made with `render_mode="rgb_array"`, where it has that and `env_kwargs` name no other.
        web_hosts: Names under which browsers may reach the server, beside addresses, localhost and this machine's name:
            those under which a proxy publishes it; as one string: with commas between them.
        action_names: Names for people of the actions of a Discrete space, in their order; as one string: with commas
            between them. LEFT, RIGHT, UP and DOWN get arrows, others a letter. None: the environment's
            `get_action_meanings`.
        play_fps: With `web`, in lock-step: the steps a second at which people play, and take over from agents, who wait
            for them; None: the environment's `render_fps`, or 30 where it has none.
        openenv: With `web`, also speak OpenEnv at the port, for its clients and the trainers of language models that
            use it: `/ws`, `/schema`, `/reset`, `/step` and `/state`. `png`: pictures travel as PNGs.
        dial: Also dial a trainer that waits for servers with `listen://`, where no port can be opened beside the
            environment: its `grpc://HOST:PORT` or, with TLS, `grpcs://HOST:PORT`. The token that it expects is that of
            the URL's `?token=…`, or `token`.
        dial_ca: The CA of the trainer's certificate, a PEM file; None: the system's.
        dial_name: The name by which the trainer knows this server; None: of machine, process and port.
        observers: Objects of subclasses of `bridge.Observer`, which are told of the worlds and of what environments
            do. With `processes` each process has copies of them.
        world: Makes the worlds, for a pacer of your own: a class such as a subclass of `bridge.worlds.single.EnvWorld`,
            called with name, environment and scheduler. None: lock-step with one agent, or with `fps` real time.
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
        from bridge.facade.process_group import ServerGroup

        del arguments["start"]
        return ServerGroup(arguments.pop("env"), count, arguments, start=start)
    limits = checked_limits(limits)
    own_processes = Isolation.of(isolation, limits.call_timeout, limits.max_world_bytes, always=allow_env_factories)
    security = Security.of(
        token=token, token_file=token_file, watch_token=watch_token, watch_token_file=watch_token_file, tls=tls
    )
    if allow_env_factories and not is_loopback(host) and security.missing():
        raise SettingError(
            f"allow_env_factories=True lets clients execute code on this machine, and host={host!r} is open to other "
            f"machines: it needs {security.missing()}; give tls=TLS(certificate=…, key=…) and token"
        )
    source: Any = EnvSource(
        env,
        num_envs=num_envs,
        vectorization_mode=vectorization_mode,
        env_kwargs=drawing_kwargs(env, env_kwargs) if web else env_kwargs,
        max_lanes=limits.max_lanes,
        time_action=time_action,
        action_names=action_names,
        arrays=Arrays(array, device),
        realtime=_realtime(fps, default_action, realtime, web),
        thread_safe=thread_safe,
        isolation=own_processes,
        allow_env_factories=allow_env_factories,
        kind=world,
        traits={"play_fps": checked_play_fps(play_fps, fps)},
    )
    speaks = OpenEnvOptions.of(openenv, source.title, web=web, single=num_envs == 1 and fps is None)
    source = recorded(source, open_journal(record))
    server = Server(
        source,
        host=host,
        port=port,
        limits=limits,
        unix_path=unix_path,
        security=security,
        metrics_port=metrics_port,
        transport=transport,
        insecure=insecure,
        web=WebSite(page_files(), web_hosts, speaks) if web else None,
        observers=(*observers, Gallery(limits.takeover_timeout, limits.seat_timeout)),
    )
    if dial is not None:
        try:
            server.dial(dial, token=security.token, tls=None if dial_ca is None else TLS(ca=dial_ca), name=dial_name)
        except BaseException:
            server.stop()
            raise
    if start:
        server.start()
    return server


def _realtime(fps: float | None, default_action: Any, realtime: RealTime | None, web: bool) -> RealtimeOptions | None:
    """Join the keywords of real time, or raise SettingError where they stand without `fps`."""
    if fps is not None:
        return RealtimeOptions.of(fps, default_action, realtime, rests=web)
    if default_action is not None or realtime is not None:
        raise SettingError("default_action and realtime need a real-time world: give fps= too")
    return None
