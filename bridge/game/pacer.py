"""The base class of the pacers for programs."""

from __future__ import annotations

from collections.abc import Callable

from bridge.core.worlds.base import Agent, PacedWorld
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.settings import Settings
from bridge.errors import Code, RequestError
from bridge.game.environment import GameEnvironment

__all__ = ["ProgramPacer"]


class ProgramPacer(Pacer):
    """Paces a program, and refuses a ResetWorld from viewers."""

    def bind(self, world: PacedWorld) -> None:
        """Attach the pacer to a world, whose environment must be a `GameEnvironment`."""
        super().bind(world)
        assert isinstance(world.env, GameEnvironment), "GameSource makes no other"
        self._env = world.env
        self._env.drawn = lambda: world.redraw()
        self._env.all_ended = world.resets.all_ended

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Prepare a ResetWorld; raise PERMISSION_DENIED for a viewer."""
        if caller is not None and caller.watches:
            text = "a client that only watches cannot begin a round: join as the player of a free agent"
            raise RequestError(Code.PERMISSION_DENIED, text)
        return super().prepare_reset(settings, caller)  # type: ignore[safe-super]  # the other base class defines it
