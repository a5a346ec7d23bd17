"""What the pacers of programs share."""

from __future__ import annotations

from collections.abc import Callable

from bridge.core.worlds.base import Agent, PacedWorld
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.settings import Settings
from bridge.errors import Code, RequestError
from bridge.game.environment import GameEnvironment

__all__ = ["ProgramPacer"]


class ProgramPacer(Pacer):
    """Steps a program, in which nobody who only watches asks for a round."""

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world, whose environment is a `GameEnvironment`."""
        super().bind(world)
        assert isinstance(world.env, GameEnvironment), "its source makes no other"
        self._env = world.env
        self._env.drawn = lambda: world.redraw()
        self._env.all_ended = world.resets.all_ended

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Take the settings of a ResetWorld, which no watcher may send."""
        if caller is not None and caller.watches:
            text = "who only watches cannot ask for a round: expected a player; join as one where an agent is free"
            raise RequestError(Code.PERMISSION_DENIED, text)
        return super().prepare_reset(settings, caller)  # type: ignore[safe-super]  # the pacer beside it has it
