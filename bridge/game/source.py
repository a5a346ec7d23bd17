"""The source of the one world of a program."""

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
"""Seconds that a client waits for the program's first call."""


@dataclasses.dataclass(kw_only=True)
class GameSource:
    """Makes the world of a program, once that has called for the first time: by then it is known whether it waits."""

    SETTINGS: ClassVar[Sequence[str]] = ()
    factory: ClassVar[None] = None
    title: str
    """How a person knows the program."""
    spaces: Mapping[str, Spaces]
    """Observation and action space of each agent, by name."""
    several: bool
    """True if it has several agents, with names of their own."""
    handover: Handover
    """Where the program leaves its news."""
    realtime: RealtimeOptions
    """How it runs where the program does not wait for agents."""
    timeout: float | None
    """Seconds that a program that waits does so for its agents; None: any."""
    standstill: float
    """Seconds without a call after which the program stands still."""
    shown: Mapping[str, Any]
    """What a page shows of it."""
    names: ActionNames | None = None
    """What people are told that actions are called; None: nothing."""

    @property
    def env_ids(self) -> list[str]:
        """None: it is there once."""
        return []

    @property
    def fps(self) -> float | None:
        """Frames a second; None: the program waits for agents, or has not called yet."""
        return self.handover.rate(self.realtime.fps) if self.handover.waits is False else None

    @property
    def traits(self) -> Mapping[str, Any]:
        """What a page shows of it, and whether there is something to look at: before the first call there is not."""
        return {**self.shown, "called": self.handover.waits is not None}

    async def prepare(self, runtime: Runtime) -> object:
        """Make nothing ahead."""
        return None

    async def close(self) -> None:
        """Close nothing: the world has the environment."""

    def made_by(self, settings: Settings) -> dict[str, object]:
        """Return what a recording says of the program."""
        made = {"env_id": "", "title": self.title, "entry_point": self.title, "num_envs": 1, "kwargs": {}}
        return {**made, "own_loop": True}

    def describe(self) -> tuple[GameScreen, Any]:
        """Return what the program shows, and as an environment with its spaces; raises SettingError by the names."""
        screen = GameScreen(self.spaces, self.several, self.handover.defaults)
        described: Any = recognise(screen)
        return screen, described if self.names is None or self.several else self.names.wrap(described)

    async def make_world(self, name: str, settings: Settings, runtime: Runtime) -> EnvWorld:
        """Build the default world; raises RequestError for any other, or where the program does not call."""
        if name:
            text = "a game is there once: join its default world, with `?world=` in the URL or without settings"
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
