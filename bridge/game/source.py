"""The source of the one world of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bridge.core.adapters.named import ActionNames
from bridge.core.worlds.environment import Spaces
from bridge.core.worlds.local import adopt
from bridge.core.worlds.multi_agent.joint_steps import MissingAgent, MultiAgentOptions
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.realtime_options import RealtimeOptions
from bridge.core.worlds.scheduling import PendingResult, Runtime
from bridge.core.worlds.settings import Settings, refuse_unknown
from bridge.core.worlds.world import EnvWorld
from bridge.errors import Code, RequestError
from bridge.game.environment import GameEnvironment, described
from bridge.game.handover import Handover

__all__ = ["GameSource"]

_FIRST = 30.0
"""Seconds that a client waits for the program's first call."""


class GameSource:
    """Makes the world of a program, once that has called for the first time: by then it is known whether it waits.

    Args:
        title: How a person knows the program.
        spaces: Observation and action space of each agent, by name.
        several: Whether it has several agents, with names of their own.
        handover: Where the program's thread leaves its news.
        options: How it runs where the program does not wait for agents.
        agent_timeout: Seconds that a program that waits does so for the rest of several agents.
        standstill: Seconds without a call after which the program stands still.
        traits: What a page shows of it.
        names: What people are told that actions are called; None: nothing.
    """

    SETTINGS: Sequence[str] = ()
    factory: Any = None
    lanes = 0

    def __init__(
        self,
        title: str,
        spaces: Mapping[str, Spaces],
        several: bool,
        handover: Handover,
        options: RealtimeOptions,
        agent_timeout: float,
        standstill: float,
        traits: Mapping[str, Any],
        names: ActionNames | None = None,
    ) -> None:
        self.title = title
        self.traits = traits
        self._spaces, self._several = spaces, several
        self._handover = handover
        self._options = options
        self._agent_timeout = agent_timeout
        self._standstill = standstill
        self._names = names
        self._first: PendingResult[None] = PendingResult()

    @property
    def env_ids(self) -> list[str]:
        """None: it is there once."""
        return []

    @property
    def fps(self) -> float | None:
        """Frames a second; None: the program waits for agents, or has not called yet."""
        return self._handover.rate(self._options.fps) if self._handover.waits is False else None

    async def prepare(self, runtime: Runtime) -> object:
        """Make nothing ahead."""
        return None

    async def close(self) -> None:
        """Close nothing: the world has the environment."""

    def made_by(self, settings: Settings) -> dict[str, object]:
        """Return what a recording says of the program."""
        return {"env_id": "", "title": self.title, "entry_point": self.title, "num_envs": 1, "kwargs": {}}

    async def make_world(self, name: str, settings: Settings, runtime: Runtime) -> EnvWorld:
        """Build the default world; raises RequestError for any other, or where the program does not call."""
        if name:
            text = "a game is there once: join its default world, with `?world=` in the URL or without settings"
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)
        refuse_unknown(settings, (), "CreateWorld")
        await self._wait_for_program(runtime)
        screen = described(self._spaces, self._several, self._handover.default.actions or {})
        named = screen if self._names is None else self._names.wrap(screen)
        inner = await adopt(lambda: named, runtime.executor)
        env = GameEnvironment(inner, screen, self._handover, runtime.scheduler, self._standstill)
        world = EnvWorld(name, env, runtime.scheduler, self._pacer())
        world.title = self.title
        world.shown["stands_still"] = lambda: env.standstill() is not None
        return world

    async def _wait_for_program(self, runtime: Runtime) -> None:
        def called() -> None:
            self._first.set_result(None)

        self._handover.began = partial(runtime.scheduler.call_soon_threadsafe, called)
        if self._handover.waits is None and not self._handover.closed:
            timer = runtime.scheduler.call_later(_FIRST, called)
            await self._first
            timer.cancel()
            self._first = PendingResult()
        if self._handover.closed:
            raise RequestError(Code.UNAVAILABLE, "the game was closed")
        if self._handover.waits is None:
            text = f"the game has not called exchange() for {_FIRST:g} s; connect again once its loop runs"
            raise RequestError(Code.DEADLINE_EXCEEDED, text)

    def _pacer(self) -> Pacer:
        if not self._handover.waits:
            from bridge.game.clock import GameClock, JointGameClock

            return (JointGameClock if self._several else GameClock)(self._options)
        from bridge.game.lock_step import GameLockStep, GameTurns, TogetherOrMissed

        if not self._several:
            return GameLockStep()
        options = MultiAgentOptions(MissingAgent.DEFAULT, self._agent_timeout, self._default)
        return GameTurns(TogetherOrMissed(options))

    def _default(self, agent: object, observation: object, space: object) -> object:
        actions = self._handover.default.actions
        return None if actions is None else actions[str(agent)]
