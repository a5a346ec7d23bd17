"""The source of a program's single world."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from bridge.core.adapters.named import ActionNames
from bridge.core.worlds.environment import Spaces
from bridge.core.worlds.kinds import recognise
from bridge.core.worlds.local import adopt
from bridge.core.worlds.multi_agent.joint_steps import MissingAgent, MultiAgentOptions
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.realtime_options import RealtimeOptions
from bridge.core.worlds.scheduling import PendingResult, Runtime
from bridge.core.worlds.settings import Settings, refuse_unknown
from bridge.core.worlds.world import EnvWorld
from bridge.errors import Code, RequestError
from bridge.game.environment import GameEnvironment, GameScreen
from bridge.game.handover import Handover

__all__ = ["GameSource"]

_FIRST = 30.0
"""Seconds for which a client waits for the program's first call."""


@dataclasses.dataclass(kw_only=True)
class GameSource:
    """Makes the world of a program after its first call, which shows whether the program waits for agents."""

    SETTINGS: ClassVar[Sequence[str]] = ()
    factory: ClassVar[None] = None
    title: str
    """The program's name, for people."""
    spaces: Mapping[str, Spaces]
    """Observation and action space of each agent, by name."""
    several: bool
    """True if it has several agents, each with a name."""
    handover: Handover
    """Queues the program's news."""
    realtime: RealtimeOptions
    """The options of real time, for a program that does not wait for agents."""
    timeout: float | None
    """Seconds for which a waiting program waits for its agents; None: without limit."""
    standstill: float
    """Seconds without a call after which the program stands still."""
    shown: Mapping[str, Any]
    """What a page shows of the program."""
    names: ActionNames | None = None
    """The names of actions, for people; None: actions have no names."""

    @property
    def env_ids(self) -> list[str]:
        """Return no ids: there is one world, without an id."""
        return []

    @property
    def fps(self) -> float | None:
        """Frames per second; None: the program waits for agents, or has not called yet."""
        return self.handover.rate(self.realtime.fps) if self.handover.waits is False else None

    @property
    def traits(self) -> Mapping[str, Any]:
        """What a page shows of the program, and whether it has called yet: before that there is no picture."""
        return {**self.shown, "called": self.handover.waits is not None}

    async def prepare(self, runtime: Runtime) -> object:
        """Do nothing: no environment can be made ahead."""
        return None

    async def close(self) -> None:
        """Do nothing: the world closes the environment."""

    def made_by(self, settings: Settings) -> dict[str, object]:
        """Return a recording's description of the program."""
        made = {"env_id": "", "title": self.title, "entry_point": self.title, "num_envs": 1, "kwargs": {}}
        return {**made, "own_loop": True}

    def describe(self) -> tuple[GameScreen, Any]:
        """Return the program's screen, and an environment with its spaces; raises SettingError for wrong names."""
        screen = GameScreen(self.spaces, self.several, self.handover.defaults)
        described: Any = recognise(screen)
        return screen, described if self.names is None or self.several else self.names.wrap(described)

    async def make_world(self, name: str, settings: Settings, runtime: Runtime) -> EnvWorld:
        """Make the default world; raise RequestError for another world, or if the program does not call in time."""
        if name:
            text = "a game has one world: join its default world, with `?world=` in the URL or without settings"
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)
        refuse_unknown(settings, (), "CreateWorld")
        await self._wait_for_program(runtime)
        screen, described = self.describe()
        inner = await adopt(lambda: described, runtime.executor)
        if self.several:
            names = None if self.names is None else self.names.names
            defaults = self.handover.defaults
            inner.facts = dataclasses.replace(inner.facts, default_actions=defaults, action_names=names)
        times = self.standstill, self.timeout
        env = GameEnvironment(inner, screen, self.handover, runtime.scheduler, *times)
        world = EnvWorld(name, env, runtime.scheduler, self._pacer())
        world.title = self.title
        world.shown["stands_still"] = lambda: env.standstill() is not None
        world.draws_itself = True
        # It is there once, so that no client can create another world.
        world.if_full = "watch, by the setting role=spectator" if self.handover.waits else "wait until a client leaves"
        return world

    async def _wait_for_program(self, runtime: Runtime) -> None:
        handover, first = self.handover, PendingResult[None]()
        called = partial(first.set_result, None)
        handover.notify = partial(runtime.scheduler.call_soon_threadsafe, called)
        if handover.waits is None and not handover.closed:
            timer = runtime.scheduler.call_later(_FIRST, called)
            await first
            timer.cancel()
        if handover.closed:
            handover.settled.set()
            raise RequestError(Code.UNAVAILABLE, "the game was closed")
        if handover.waits is None:
            handover.notify = None
            text = f"the game has not called exchange() for {_FIRST:g} s; connect again once its loop runs"
            raise RequestError(Code.DEADLINE_EXCEEDED, text)

    def _pacer(self) -> Pacer:
        if not self.handover.waits:
            from bridge.game.clock import GameClock, JointGameClock

            return (JointGameClock if self.several else GameClock)(self.realtime)
        from bridge.game.lock_step import GameTurns, TogetherInTime

        timeout = math.inf if self.timeout is None else self.timeout
        options = MultiAgentOptions(
            MissingAgent.DEFAULT, timeout, lambda agent, seen, space: self.handover.defaults[str(agent)]
        )
        return GameTurns(TogetherInTime(options))
