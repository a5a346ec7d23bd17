"""`serve_parallel`: a PettingZoo environment as a world of several agents."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from bridge.errors import SettingError
from bridge.facade.record import Recording, open_journal, recorded
from bridge.keywords import grouped
from bridge.server.auth import Security
from bridge.server.limits import Limits, checked_limits
from bridge.server.server import Server
from bridge.server.web_site import WebSite, page_files
from bridge.transport.credentials import TLS, TokenLike
from bridge.watching.agents import Gallery
from bridge.watching.match import MatchOptions
from bridge.watching.match_world import MatchWorld
from bridge.watching.render_mode import drawing_kwargs
from bridge.worlds.controls import checked_play_fps
from bridge.worlds.isolated.world import Isolation
from bridge.worlds.kinds import is_parallel
from bridge.worlds.multi_agent.joint_steps import MultiAgentOptions
from bridge.worlds.multi_agent.source import ParallelSource, WorldKind
from bridge.worlds.observers import Observer
from bridge.worlds.policies import RANDOM, Policy
from bridge.worlds.realtime.clocked_world import RealTime, RealtimeOptions
from bridge.worlds.realtime.multi_agent import RealtimeMultiAgentWorld

__all__ = ["serve_parallel"]


@grouped(limits=Limits, realtime=RealTime, record=Recording, tls=TLS)
def serve_parallel(
    env: Any,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    missing_agent: Literal["wait", "default", "end"] | None = None,
    agent_timeout: float | None = None,
    default_action: Callable[[Any, Any, Any], Any] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    fps: float | None = None,
    realtime: RealTime | None = None,
    agents: Mapping[str, Policy | str] | Policy | str | None = None,
    match: bool = False,
    countdown: float | None = None,
    patience: float | None = None,
    isolation: Literal["process"] | None = None,
    thread_safe: bool = False,
    token: TokenLike | None = None,
    token_file: str | os.PathLike[str] | None = None,
    watch_token: TokenLike | None = None,
    watch_token_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    insecure: bool = False,
    limits: Limits | None = None,
    transport: Literal["http2", "grpcio"] = "http2",
    metrics_port: int | None = None,
    record: str | os.PathLike[str] | Recording | None = None,
    web: bool = False,
    web_hosts: str | Sequence[str] = (),
    play_fps: float | None = None,
    observers: Sequence[Observer] = (),
    start: bool = True,
) -> Server:
    """Publish a PettingZoo environment as a world of dm_env_rpc in which each connection is an agent.

    A client joins as the agent that its JoinWorld setting `agent` names, or as the first that is free. In lock-step the
    environment steps once all agents' actions are in. With `fps` it does not wait for them: each agent's last action
    goes on, and spectators may watch.

    Args:
        env: An id of PettingZoo's registry, a callable that returns a ParallelEnv or AECEnv, a PettingZoo module, or
            one environment. PettingZoo converts an AECEnv; a `gymnasium.Env` has one agent, `agent0`. An environment
            object belongs to the server's thread from the server's first call on: nothing else may use it then.
        env_kwargs: Keyword arguments for the callable; those that a client sends override them.
        missing_agent: In lock-step, what to do if nobody has joined as an agent, its client left or died, or its Step
            is late: `wait` for it, use a `default` action, or `end` the sequence; None: `wait`.
        agent_timeout: In lock-step, the seconds that a Step waits for the other agents; None: 30.
        default_action: Returns a missing agent's action, given its id, last observation and action space; None: the
            first allowed action, or zeros within the bounds. In real time it is called where an agent has no action.
        host: The address to listen on, as for `serve_gym`.
        port: The port to listen on; 0: any free port.
        fps: Frames a second of a real-time world, which runs whether or not `step` is called; None: lock-step.
        realtime: With `fps`, how frames and late actions are handled; None: as `RealTime` has it.
        agents: In real time, policies by agent that play while no client does, or one for all: a function of an
            observation that returns an action, "random", or the URL of a served policy, `ws://HOST:PORT`. None:
            `default_action` does, and in a match without one a random policy.
        match: Play in rounds: clients take seats, people say that they are ready, and a countdown begins the round.
        countdown: In a match, the seconds from everybody's being ready to the start; None: 3.
        patience: In a match, the seconds after which a round begins without people who are not ready; None: 60.
        isolation: `process` runs each world's environment in a process of its own, so that a crash, an endless loop or
            a memory leak ends that world only; it needs a callable. None: all run in the server's process.
        thread_safe: Run each world in a thread of its own, as for `serve_gym`.
        token: The secret that each client must send, as for `serve_gym`.
        token_file: A file that contains the token.
        watch_token: A second secret, for clients that may watch and do nothing else; None: there are none.
        watch_token_file: A file that contains the watch token.
        tls: The server's certificate and key, with which the port speaks TLS only; None: no TLS.
        insecure: Ask for no token beyond loopback either, as `serve_gym`.
        limits: Bounds of connections, worlds, bytes and times; None: the defaults of `Limits`. Each agent has a
            connection. A world of an environment object is never destroyed for being idle.
        transport: The gRPC implementation: `http2` or `grpcio`, as for `serve_gym`.
        metrics_port: Serve metrics for Prometheus at this port; 0: any free port; None: no metrics.
        record: A folder in which every episode is recorded, or `Recording(folder, …)`; None: nothing is recorded.
        web: Also speak WebSocket at the port, as for `serve_gym`.
        web_hosts: Names under which browsers may reach the server, as for `serve_gym`.
        play_fps: In lock-step, the steps a second at which people play, as for `serve_gym`.
        observers: Are told of the worlds and of what environments do, as for `serve_gym`.
        start: Serve in a background thread at once. False: listen, and serve when `start()` or `run()` of the server
            is called.

    Returns:
        The server, as `serve_gym` returns it.

    Raises:
        SettingError: The environment cannot be served, a keyword is out of its range, the port is in use.
    """
    in_lockstep = {"missing_agent": missing_agent, "agent_timeout": agent_timeout}
    in_real_time = {"realtime": realtime, "agents": agents, "match": match or None}
    wrong = [name for name, value in (in_real_time if fps is None else in_lockstep).items() if value is not None]
    if wrong and fps is None:
        raise SettingError(f"{' and '.join(wrong)}: of a real-time world alone, give fps= too")
    if wrong:
        raise SettingError(
            f"{' and '.join(wrong)} are of lock-step, where a world waits for its agents; with fps={fps!r} it waits "
            "for none, and default_action stands in for those that are missing: leave out either"
        )
    limits = checked_limits(limits)
    given = {name: value for name, value in in_lockstep.items() if value is not None}
    times = {name: value for name, value in (("countdown", countdown), ("patience", patience)) if value is not None}
    if times and not match:
        raise SettingError(f"{' and '.join(times)} are of a match: give match=True too")
    kind: WorldKind = RealtimeMultiAgentWorld
    if match:
        options = MatchOptions(**times)
        options.check()
        kind = partial(MatchWorld, match=options)
        if agents is None and default_action is None:
            agents = RANDOM  # else nobody would play whom no client plays
    source = ParallelSource(
        env,
        MultiAgentOptions(default_action=default_action, **given),  # type: ignore[arg-type]
        drawing_kwargs(env, env_kwargs) if web and not is_parallel(env) else env_kwargs,
        Isolation.of(isolation, limits.call_timeout, limits.max_world_bytes),
        realtime=None
        if fps is None
        else RealtimeOptions.of(fps, default_action, realtime, agents, rests=web and not match),
        thread_safe=thread_safe,
        kind=kind,
        traits={"match": match, "play_fps": checked_play_fps(play_fps, fps)},
    )
    security = Security.of(
        token=token, token_file=token_file, watch_token=watch_token, watch_token_file=watch_token_file, tls=tls
    )
    if source.single:
        limits = dataclasses.replace(limits, idle_timeout=None, abandoned_timeout=None)
    server = Server(
        recorded(source, open_journal(record)),
        host=host,
        port=port,
        limits=limits,
        security=security,
        metrics_port=metrics_port,
        transport=transport,
        insecure=insecure,
        web=WebSite(page_files(), web_hosts) if web else None,
        observers=(*observers, Gallery(limits.takeover_timeout, limits.seat_timeout)),
    )
    if start:
        server.start()
    return server
