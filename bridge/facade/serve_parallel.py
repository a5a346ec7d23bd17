"""`serve_parallel`: a PettingZoo environment as a world of several agents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from bridge.core.extras import feature
from bridge.core.keywords import grouped
from bridge.core.worlds.kinds import is_parallel
from bridge.core.worlds.multi_agent.joint_steps import MultiAgentOptions
from bridge.core.worlds.own_worlds import OwnWorld
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.realtime.multi_agent import JointClock
from bridge.core.worlds.realtime_options import RealtimeOptions
from bridge.core.worlds.sources.parallel_source import ParallelSource
from bridge.core.worlds.stand_ins import Policy
from bridge.errors import SettingError
from bridge.facade.options import GROUPS, ServerKeywords, ServerOptions
from bridge.facade.policies import RANDOM, GivenPolicies
from bridge.facade.server import Server

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["serve_parallel"]


@grouped(ServerOptions, **GROUPS)
def serve_parallel(
    env: object,
    *,
    missing_agent: Literal["wait", "default", "end"] | None = None,
    agent_timeout: float | None = None,
    default_action: Callable[[Any, Any, Any], Any] | None = None,
    agents: Mapping[str, Policy | str] | Policy | str | None = None,
    match: bool = False,
    countdown: float | None = None,
    patience: float | None = None,
    world: str | OwnWorld | None = None,
    **keywords: Unpack[ServerKeywords],
) -> Server:
    """Publish a PettingZoo environment as a world of dm_env_rpc in which each connection is an agent.

    A client joins as the agent that its JoinWorld setting `agent` names, or as the first free agent. In lock-step the
    environment steps once all agents have acted. With `fps` it does not wait for them: each agent's last action is
    repeated, and spectators may watch.

    Args:
        env: An id of PettingZoo's registry, a callable that returns a ParallelEnv or AECEnv, a PettingZoo module, or
            one environment. PettingZoo converts an AECEnv; a `gymnasium.Env` has one agent, `agent0`. An environment
            object belongs to the server's thread from the server's first call on: nothing else may use it then. Its
            single world is never destroyed for being idle.
        missing_agent: In lock-step, what to do if nobody has joined as an agent, if its client left or died, or if its
            Step is late: `wait` for it, use a `default` action, or `end` the sequence; None: `wait`.
        agent_timeout: In lock-step, the seconds that a Step waits for the other agents; None: 30.
        default_action: Returns a missing agent's action, given its id, last observation and action space; None: the
            first allowed action, or zeros within the bounds. In real time it is called if an agent has no action.
        agents: In real time, policies that play agents without a client, by agent, or one policy for all: a function of
            an observation that returns an action, "random", or the URL of a served policy, `ws://HOST:PORT`. None:
            `default_action`; in a match without it, a random policy.
        match: Play in rounds: clients take seats, people say that they are ready, and a countdown begins the round.
        countdown: In a match, the seconds from when everybody is ready to the start; None: 3.
        patience: In a match, the seconds after which a round begins without people who are not ready; None: 60.
        world: The pacer of its worlds instead of lock-step; see `serve_gym`. None: the environment steps once all
            agents have acted.
        keywords: Where and how to serve: the fields of `bridge.facade.options.ServerOptions`, which the signature
            lists.

    Returns:
        The server; see `serve_gym`.

    Raises:
        SettingError: The environment cannot be served, a keyword is out of its range, or the port is in use.
    """
    options = ServerOptions(**keywords)
    if options.action_names() is not None:
        raise SettingError(
            "action_names are of an environment of one agent: each agent has actions of its own here; leave it out"
        )
    fps = options.fps
    in_lockstep = {"missing_agent": missing_agent, "agent_timeout": agent_timeout}
    decided = {**in_lockstep, "default_action": default_action, "fps": fps}
    if world is not None and (twice := [name for name, value in decided.items() if value is not None]):
        raise SettingError(
            f"{' and '.join(twice)}: world= has a pacer of its own, which decides that; leave out either"
        )
    in_real_time = {"realtime": options.realtime, "agents": agents, "match": match or None}
    wrong = [name for name, value in (in_real_time if fps is None else in_lockstep).items() if value is not None]
    if wrong and fps is None:
        raise SettingError(f"{' and '.join(wrong)}: only in a real-time world; give fps= too")
    if wrong:
        raise SettingError(
            f"{' and '.join(wrong)} are of lock-step, where a world waits for its agents; with fps={fps!r} it waits "
            "for none, and default_action stands in for those that are missing: leave out either"
        )
    given = {name: value for name, value in in_lockstep.items() if value is not None}
    times = {name: value for name, value in (("countdown", countdown), ("patience", patience)) if value is not None}
    if times and not match:
        raise SettingError(f"{' and '.join(times)} are of a match: give match=True too")
    clock: Callable[[RealtimeOptions], Pacer] = JointClock
    if match:
        with feature("web", "match=True"):
            from bridge.web.watching.match import MatchOptions
            from bridge.web.watching.match_pacer import MatchPacer
        rounds = MatchOptions(**times)
        rounds.check()
        clock = partial(MatchPacer, match=rounds)
        if agents is None and default_action is None:
            agents = RANDOM  # otherwise agents without a client would not be played
    source = ParallelSource(
        env,
        MultiAgentOptions(default_action=default_action, **given),  # type: ignore[arg-type]
        options.kwargs_for(env, made=is_parallel(env)),
        options.isolated(),
        realtime=None
        if fps is None
        else RealtimeOptions.of(
            fps,
            default_action,
            options.realtime,
            None if agents is None else GivenPolicies("agents", agents),
            rests=options.page is not None and not match,
        ),
        thread_safe=options.thread_safe,
        clock=clock,
        world=world,
        traits={"match": match, "play_fps": options.play_fps()},
    )
    bounds = options.bounds
    # Keep the single world of an environment object, because another one cannot be made.
    if not source.offers_one:
        bounds = dataclasses.replace(bounds, idle_timeout=None, abandoned_timeout=None)
    server = options.server(source, options.security(), bounds=bounds)
    if options.start:
        server.start()
    return server
