"""`serve_game`: a program with a loop of its own as a world of a server."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymnasium import Space

from bridge.core.encoding.space_json import space_to_json
from bridge.core.encoding.spaces import Layout
from bridge.core.extras import feature
from bridge.core.keywords import grouped
from bridge.core.transport.credentials import TLS
from bridge.core.worlds.environment import Spaces
from bridge.core.worlds.group import ONE, neutral_action
from bridge.core.worlds.realtime_options import RealtimeOptions
from bridge.core.worlds.stand_ins import Policy
from bridge.errors import SettingError, TensorError, UnsupportedSpaceError
from bridge.facade.options import GROUPS, ServerKeywords, ServerOptions
from bridge.facade.policies import GivenPolicies
from bridge.facade.server import Server

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bridge.game.game import Game
    from bridge.game.handover import Handover

__all__ = ["serve_game"]

_UNTIL_KNOWN = 30.0
"""Frames per second that clients are told until the program's rate is known."""
_OF_ENVIRONMENTS = ("env_kwargs", "fps", "isolation", "thread_safe", "states", "start")
"""Keywords for servers that make and call environments, which a game's server does not."""


@grouped(ServerOptions, **GROUPS)
def serve_game(
    observation_space: Space[Any] | Mapping[str, tuple[Space[Any], Space[Any]]],
    action_space: Space[Any] | None = None,
    *,
    name: str | None = None,
    default_action: Any = None,
    timeout: float | None = 60.0,
    standstill: float = 1.0,
    agents: Mapping[str, Policy | str] | Policy | str | None = None,
    process: bool = False,
    dial: str | None = None,
    dial_ca: str | os.PathLike[str] | None = None,
    dial_name: str | None = None,
    **keywords: Unpack[ServerKeywords],
) -> Game:
    """Let agents and people play a program with a loop of its own, such as a game, a simulator or a robot controller.

    The program calls `exchange` in its loop: it passes an observation, and gets an action. The server has one world.
    One client plays each agent, and any number of others may watch.

    Examples:
        >>> import gymnasium
        >>> from bridge import serve_game
        >>> with serve_game(gymnasium.spaces.Discrete(10), gymnasium.spaces.Discrete(2)) as game:
        ...     for frame in range(3):
        ...         action = game.exchange(frame)
        ...         if game.begins:
        ...             print("a new round, with the seed", game.seed)
        a new round, with the seed None

    Args:
        observation_space: The observation space; for several agents a dict of pairs, of observation and action space,
            by the agent's name.
        action_space: The action space; None: `observation_space` is a dict for several agents.
        name: The game's name, for people; None: the name of the program.
        default_action: The action of an agent for which nobody acts, an element of the action space; for several agents
            a dict by name. None: zeros, or the first choice.
        timeout: Seconds that `exchange(wait=True)` waits for an action before it goes on with the default action; None:
            without limit. With several agents also the seconds that a Step waits for the other agents.
        standstill: Seconds without a call of `exchange` after which the game counts as standing still: requests of
            agents are refused with DEADLINE_EXCEEDED until it goes on. Must be longer than the begin of a round takes.
        agents: With several agents, if the program does not wait: policies by agent that play while no client does, as
            in `serve_parallel`.
        process: True: serve from a separate process, so that frames of the program never wait for the server's Python
            code. The arguments are pickled for that process, and `Game.server` forwards to it. If it ends by itself,
            `exchange` raises ClosedError.
        dial: Also dial a trainer that waits with `listen://`, as in `serve_gym`.
        dial_ca: The CA of the trainer's certificate, a PEM file; None: the system's.
        dial_name: The name of this server at the trainer; None: made from machine, process and port.
        keywords: Where and how to serve: the fields of `bridge.facade.options.ServerOptions`, which the signature
            lists, except those for environments (`env_kwargs`, `fps`, `isolation`, `thread_safe`, `states`, `start`).

    Returns:
        The game, with `exchange`, `begins`, `seed`, `options`, `url` and `close`; also a context manager.

    Raises:
        SettingError: A space cannot be sent to clients, a keyword is out of its range, or the port is in use.
    """
    with feature("game", "serve_game()"):
        from bridge.game.game import Game
        from bridge.game.handover import ProgramEnd
    _check_seconds("timeout", timeout)
    _check_seconds("standstill", standstill)
    several = isinstance(observation_space, Mapping) and not isinstance(observation_space, Space)
    given: Any = observation_space if several else {ONE: (observation_space, action_space)}
    _check_spaces(given, several, action_space)
    defaults = _defaults(given, several, default_action)
    title = name or Path(sys.argv[0]).stem or "game"
    served = _Served(given, several, title, timeout, standstill, agents, dial, dial_ca, dial_name, keywords)
    if process:
        from bridge.game.process import GameProcess

        server: Any = GameProcess(_serve, defaults, served)
        return Game(server, server.handover, given, several, timeout)
    handover = ProgramEnd(defaults)
    return Game(_serve(handover, served), handover, given, several, timeout)


@dataclasses.dataclass(frozen=True)
class _Served:
    """The arguments of `serve_game` that the server needs."""

    spaces: Mapping[str, Spaces]
    several: bool
    name: str
    timeout: float | None
    standstill: float
    agents: Any
    dial: str | None
    dial_ca: str | os.PathLike[str] | None
    dial_name: str | None
    keywords: ServerKeywords


def _serve(handover: Handover, served: _Served) -> Server:
    """Start and return the server of a program; called in the server's process if that is separate."""
    from bridge.game.source import GameSource

    given, several, keywords = served.spaces, served.several, served.keywords
    if wrong := [key for key in _OF_ENVIRONMENTS if key in keywords]:
        raise SettingError(
            f"serve_game() takes no {', '.join(wrong)}: it makes and steps no environment, a game has a loop of its own"
        )
    if served.dial is None and (served.dial_ca is not None or served.dial_name is not None):
        raise SettingError("expected dial= beside dial_ca and dial_name, which say how it dials, got none")
    if served.agents is not None and not several:
        raise SettingError(
            "agents= are policies for several agents: expected the spaces as a dict by their names, got two spaces"
        )
    options = dataclasses.replace(ServerOptions(**keywords), states=False)
    if options.record is not None:
        options = dataclasses.replace(options, record=_whole(options.record))
    security = options.security()
    stand_ins = None if served.agents is None else GivenPolicies("agents", served.agents)
    if stand_ins is not None:
        stand_ins.check(list(given))
    defaults = handover.defaults
    realtime = RealtimeOptions.of(
        _UNTIL_KNOWN, None if several else defaults[ONE], options.realtime, stand_ins, rests=True
    )
    if realtime.clock is not None:
        raise SettingError("a game's frames are its own calls: leave out clock of realtime=RealTime(clock=…)")
    if several:
        realtime = dataclasses.replace(realtime, default_action=lambda agent, seen, space: defaults[str(agent)])
    names = options.action_names()
    if names is not None:
        for _, space in given.values():
            names.check(space)
    source = GameSource(
        title=served.name,
        spaces=given,
        several=several,
        handover=handover,
        realtime=realtime,
        timeout=served.timeout,
        standstill=served.standstill,
        shown={"play_fps": options.play_fps(), "one_world": True},
        names=names,
    )
    # Keep a world without clients, because another program cannot be made.
    bounds = dataclasses.replace(options.bounds, idle_timeout=None, abandoned_timeout=None)
    server = options.server(source, security, bounds=bounds)
    try:
        if served.dial is not None:
            # Use only a given token, as in `serve_gym`.
            token = security.token if options.token or options.token_file else None
            tls = None if served.dial_ca is None else TLS(ca=served.dial_ca)
            server.dial(served.dial, token=token, tls=tls, name=served.dial_name)
        server.attach(handover)
        server.start()
    except BaseException:
        server.stop()
        raise
    return server


def _whole(record: Any) -> Any:
    """Return the options for recording a game: with observations, because replaying it cannot restore them."""
    with feature("recording", "record="):
        from bridge.recording.record import Recording
    return dataclasses.replace(record if isinstance(record, Recording) else Recording(record), observations=True)


def _check_seconds(name: str, seconds: Any) -> None:
    fits = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < math.inf
    if not fits and not (seconds is None and name == "timeout"):
        raise SettingError(f"expected {name} to be a positive number of seconds, got {seconds!r}")


def _check_spaces(given: Mapping[Any, Any], several: bool, action_space: Any) -> None:
    """Raise SettingError if a value is not a space, or is a space that cannot be sent."""
    if several and (action_space is not None or not given):
        text = 'expected an observation and an action space, or {"NAME": (observation_space, action_space), …} alone'
        raise SettingError(f"{text}, got {given!r:.80} and {action_space!r:.80}")
    for name, pair in given.items():
        if not isinstance(name, str) or not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise SettingError(f"expected a pair of spaces by the name of each agent, got {name!r}: {pair!r:.80}")
        for part, space in zip(("observation", "action"), pair, strict=True):
            if not isinstance(space, Space):
                raise SettingError(f"expected the {part} space of {name!r} to be a gymnasium.Space, got {space!r:.80}")
            try:
                Layout(space, part)
                space_to_json(space)
            except (TensorError, UnsupportedSpaceError) as error:
                raise SettingError(f"the {part} space of {name!r} cannot be sent to clients: {error}") from error


def _defaults(given: Mapping[str, Any], several: bool, default_action: Any) -> dict[str, Any]:
    """Return the default action of each agent; raises SettingError."""
    chosen = {} if default_action is None else default_action if several else {ONE: default_action}
    if not isinstance(chosen, Mapping) or set(chosen) - set(given):
        raise SettingError(f"expected default_action as a dict by the agents {', '.join(given)}, got {chosen!r:.80}")
    for agent, action in chosen.items():
        if not given[agent][1].contains(action):
            raise SettingError(f"expected default_action to be an element of {given[agent][1]}, got {action!r:.80}")
    return {agent: chosen[agent] if agent in chosen else neutral_action(pair[1]) for agent, pair in given.items()}
