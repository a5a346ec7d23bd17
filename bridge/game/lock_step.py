"""The pacer for a program that waits until its agents have acted."""

from __future__ import annotations

import dataclasses

from bridge.core.worlds.base import PacedWorld
from bridge.core.worlds.group import DEFAULT, ONE
from bridge.core.worlds.multi_agent.joint_steps import AllActed
from bridge.core.worlds.turn_pacer import Decision, Turn
from bridge.core.worlds.turns import Turns
from bridge.game.pacer import ProgramPacer

__all__ = ["GameTurns", "TogetherInTime"]


_AWHILE = 1.0
"""Seconds of waiting after which the page names the agents that the program waits for."""


class TogetherInTime(AllActed):
    """Steps once all agents have acted, or with default actions once the program has waited for too long."""

    late = False
    """True if the program has waited for too long."""

    def decide(self, turn: Turn) -> Decision:
        """Decide like `AllActed`, but always step if it is late."""
        decision = turn.step(turn.actions) if self.late else super().decide(turn)
        if decision.kind == "step" and turn.names == [ONE]:
            return dataclasses.replace(decision, action=turn.actions.get(ONE, DEFAULT))
        return decision


class GameTurns(ProgramPacer, Turns):
    """Steps the program once all of its agents have acted, or after its timeout."""

    rules: TogetherInTime

    def bind(self, world: PacedWorld) -> None:
        """Attach the pacer to a world, whose environment must be a `GameEnvironment`."""
        super().bind(world)
        self._env.late = self._step_late
        world.shown["waits_for"] = self.waits_for

    def waits_for(self) -> list[str] | None:
        """Return the agents that the program has waited for since a while.

        An empty list: it waits for anybody to join. None: it does not wait, or not for long yet.
        """
        turn, since = self.turn, self._env.waits_since
        if since is None:
            return None
        plays = turn.running and turn.playing
        if not plays and not turn.joined:
            return []
        if self._scheduler.now() - since < _AWHILE:
            return None
        there, done = (turn.playing, turn.handed_in) if plays else (turn.joined, turn.asked)
        return [name for name in there if name not in done and (not plays or name in turn.alive)] or None

    def _step_late(self) -> bool:
        self.rules.late = True
        self.advance()
        self.rules.late = False
        return self._job is not None
