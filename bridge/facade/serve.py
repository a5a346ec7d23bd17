"""`serve_gym`: a Gymnasium environment as worlds of a server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from bridge.core.extras import feature, needed
from bridge.core.keywords import grouped
from bridge.core.transport.address import is_loopback
from bridge.core.transport.credentials import TLS
from bridge.core.worlds.recipe import Adapter, EnvLike
from bridge.core.worlds.sources.source import EnvSource
from bridge.errors import SettingError
from bridge.facade.options import GROUPS, ServerKeywords, ServerOptions
from bridge.facade.server import Server

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bridge.core.adapters.named import ActionNames
    from bridge.core.adapters.timed import TimeAction
    from bridge.core.server.port import PortProtocol
    from bridge.core.worlds.own_worlds import OwnWorld
    from bridge.core.worlds.realtime_options import RealtimeOptions

__all__ = ["serve_gym"]


@grouped(ServerOptions, **GROUPS)
def serve_gym(
    env: EnvLike,
    *,
    num_envs: int = 1,
    vectorization_mode: Literal["sync", "async", "vector_entry_point"] = "sync",
    time_action: TimeAction | None = None,
    array: Literal["numpy", "torch", "jax"] = "numpy",
    device: str | None = None,
    default_action: Any = None,
    processes: int = 1,
    allow_env_factories: bool = False,
    openenv: bool | Literal["png"] = False,
    dial: str | None = None,
    dial_ca: str | os.PathLike[str] | None = None,
    dial_name: str | None = None,
    world: str | OwnWorld | None = None,
    **keywords: Unpack[ServerKeywords],
) -> Server:
    """Publish a Gymnasium environment as a world of dm_env_rpc.

    Each client may create its own worlds. Clients that do not create one join the default world, whose name is empty.

    Examples:
        >>> from bridge import serve_gym
        >>> with serve_gym("CartPole-v1") as server:
        ...     print(server.url.startswith("grpc://127.0.0.1:"))
        True

    Args:
        env: A Gymnasium id, an EnvSpec, a callable that returns an Env or VectorEnv, or a list of ids and patterns
            such as `"ALE/*"`, from which each client chooses one.
        num_envs: The number of lanes (environments) in each world; one message steps them all. 1: a single environment.
        vectorization_mode: How Gymnasium steps the lanes: `sync`, `async` (one process for each lane) or
            `vector_entry_point`.
        time_action: The part of an action that says how many steps, or seconds, one Step advances the environment.
        array: The arrays that the environment takes and returns: `numpy`, `torch` or `jax`. Results are copied to the
            host once in each step.
        device: The device on which `torch` or `jax` puts actions, such as `cuda:0`; None: the library's default device.
        default_action: In real time, the action used until the agent sends one, such as 1, (0, 0.5) or [0.0]; None:
            zeros, or the first choice.
        processes: The number of server processes, each with its own URL, so that environments use as many cores.
            Process i listens on `port + i` if a port is given, and at `unix_path` followed by `.i`.
        allow_env_factories: Let clients send a function that makes the environment. This machine then executes their
            code, in a process for each world. Beyond loopback this requires TLS, and a token or client certificates.
        openenv: With `web`, also speak OpenEnv at the port, for its clients and the trainers of language models that
            use it: `/ws`, `/schema`, `/reset`, `/step` and `/state`. `png`: pictures are sent as PNGs.
        dial: Also dial a trainer that waits for servers with `listen://`, if no port can be opened beside the
            environment: its `grpc://HOST:PORT`, with TLS `grpcs://HOST:PORT`, or `wss://HOST:PORT` if only HTTPS
            connections are permitted. The trainer's token comes from the URL's `?token=…`, from `token`, or from
            `BRIDGE_TOKEN`, which is never sent unencrypted to another machine.
        dial_ca: The CA of the trainer's certificate, a PEM file; None: the system's.
        dial_name: The name of this server at the trainer; None: made from machine, process and port.
        world: The pacer of the worlds: a class derived from `bridge.TurnPacer`, or its name in an installed package
            (docs/plugins.md); or a callable without arguments that returns a pacer; or a callable that makes a world
            from its name, its environment and its scheduler. None: lock-step with one agent, or real time with `fps`.
        keywords: Where and how to serve: the fields of `bridge.facade.options.ServerOptions`, which the signature
            lists.

    Returns:
        The server, with `.url`, `.wait()` and `.stop()`; also a context manager. The URL contains the token if the
        server generated it.

    Raises:
        SettingError: The environment is not registered, a keyword is out of its range, or the port is in use.
    """
    # Must come first: here `locals()` contains only the arguments.
    arguments: dict[str, Any] = {**locals(), **keywords}
    if not isinstance(processes, int) or isinstance(processes, bool) or not 1 <= processes <= 1024:
        raise SettingError(f"expected processes from 1 to 1024, got {processes!r}")
    if dial is None and (dial_ca is not None or dial_name is not None):
        raise SettingError("dial_ca and dial_name are for a server that dials: give dial= too")
    if processes > 1:
        from bridge.facade.process_group import ServerGroup

        start = arguments.pop("start", True)
        of_each = {name: value for name, value in arguments.items() if name not in ("env", "processes", "keywords")}
        return ServerGroup(env, processes, of_each, start=start)
    options = ServerOptions(**keywords)
    own_processes = options.isolated(always=allow_env_factories)
    security = options.security()
    if allow_env_factories and not is_loopback(options.host) and security.missing():
        raise SettingError(
            f"allow_env_factories=True lets clients execute code on this machine, and host={options.host!r} is open to "
            f"other machines: it needs {security.missing()}; give tls=TLS(certificate=…, key=…) and token"
        )
    source = EnvSource(
        env,
        num_envs=num_envs,
        vectorization_mode=vectorization_mode,
        env_kwargs=options.kwargs_for(env),
        max_lanes=options.bounds.max_lanes,
        adapters=_adapters(array, device, options.action_names(), time_action),
        realtime=_realtime(options, default_action),
        thread_safe=options.thread_safe,
        isolation=own_processes,
        allow_env_factories=allow_env_factories,
        world=world,
        traits={"play_fps": options.play_fps()},
        watched=options.page is not None or bool(options.observers),
    )
    single = num_envs == 1 and options.fps is None
    speaks = _openenv(openenv, source.title, web=options.page is not None, single=single)
    server = options.server(source, security, protocols=speaks)
    if dial is not None:
        try:
            # Use only a given token: `dial` itself reads `BRIDGE_TOKEN`, and a token generated for the port is wrong
            # here.
            token = security.token if options.token or options.token_file else None
            server.dial(dial, token=token, tls=None if dial_ca is None else TLS(ca=dial_ca), name=dial_name)
        except BaseException:
            # The caller gets no server object to stop.
            server.stop()
            raise
    if options.start:
        server.start()
    return server


def _adapters(
    array: Any, device: str | None, names: ActionNames | None, time_action: TimeAction | None
) -> list[Adapter]:
    """Return the adapters around each environment, the innermost first.

    Arrays are innermost, so that the other adapters see NumPy arrays. Names come before the time action, which turns
    the named Discrete space into a Dict.
    """
    wanted: list[Adapter] = []
    # Import an adapter only if it is used: few servers need one.
    if (array, device) != ("numpy", None):
        from bridge.core.adapters.arrays import Arrays

        arrays = Arrays(array, device)
        wanted += [arrays] if arrays.kind != "numpy" else []
    if names is not None:
        wanted.append(names)
    if time_action is not None:
        from bridge.core.adapters.timed import TimeAction

        if not isinstance(time_action, TimeAction):
            raise SettingError(f"expected time_action to be a bridge.TimeAction or None, got {time_action!r:.80}")
        wanted.append(time_action)
    return wanted


def _openenv(openenv: object, name: str, *, web: bool, single: bool) -> list[PortProtocol]:
    """Return the protocol of OpenEnv if the keyword `openenv` asks for it."""
    if openenv is False:
        return []
    with feature("openenv", "openenv="):
        from bridge.openenv.options import OpenEnvOptions
    options = OpenEnvOptions.of(openenv, name, web=web, single=single)
    if options is None:
        return []
    with needed("openenv= needs the package websockets", "web"):
        from bridge.openenv.protocol import openenv_protocol
    return [openenv_protocol(options)]


def _realtime(options: ServerOptions, default_action: Any) -> RealtimeOptions | None:
    """Combine the keywords of real time; raise SettingError if they are given without `fps`."""
    if options.fps is None and options.realtime is None:
        if default_action is not None:
            raise SettingError("default_action is for real-time worlds: give fps= too")
        return None
    from bridge.core.worlds.realtime_options import RealTime, RealtimeOptions

    if options.fps is None:
        # List them by name, because on a command line each of them is an option.
        given = [
            f"{name}=…" for name, value in vars(RealTime()).items() if getattr(options.realtime, name, value) != value
        ]
        raise SettingError(f"realtime=RealTime({', '.join(given)}) is for real-time worlds: give fps= too")
    return RealtimeOptions.of(options.fps, default_action, options.realtime, rests=options.page is not None)
