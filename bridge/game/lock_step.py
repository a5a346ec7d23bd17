"""Pacers of a program that waits until its agents have acted."""

from __future__ import annotations

from collections.abc import Callable

from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import Agent, PacedWorld
from bridge.core.worlds.lock_step import LockStep
from bridge.core.worlds.settings import Settings
from bridge.core.worlds.turns import Turns
from bridge.game.clock import refuse_watcher
from bridge.game.environment import GameEnvironment

__all__ = ["GameLockStep", "GameTurns"]


class GameLockStep(LockStep):
    """Has the program do one step with each Step of its agent."""

    can_place = False

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world, whose environment is a `GameEnvironment`."""
        super().bind(world)
        assert isinstance(world.env, GameEnvironment), "its source makes no other"
        self._env = world.env

    def leave(self, agent: EnvAgent) -> None:
        """Leave the program to the next agent."""
        super().leave(agent)
        self._env.handover.withdraw()

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Take the settings of a ResetWorld, which no watcher may send."""
        refuse_watcher(caller)
        return super().prepare_reset(settings, caller)


class GameTurns(Turns):
    """Has the program do one step once all of its agents have acted."""

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world, whose environment is a `GameEnvironment`."""
        super().bind(world)
        assert isinstance(world.env, GameEnvironment), "its source makes no other"
        self._env = world.env

    def leave(self, agent: EnvAgent) -> None:
        """Free an agent; where it was the last one, the program goes on with default actions."""
        super().leave(agent)
        if not self.participants:
            self._env.handover.withdraw()

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Take the settings of a ResetWorld, which no watcher may send."""
        refuse_watcher(caller)
        return super().prepare_reset(settings, caller)
