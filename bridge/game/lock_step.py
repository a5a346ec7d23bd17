"""The pacer of a program that waits until its agents have acted."""

from __future__ import annotations

import dataclasses

from bridge.core.worlds.base import PacedWorld
from bridge.core.worlds.group import DEFAULT, ONE
from bridge.core.worlds.multi_agent.joint_steps import AllActed
from bridge.core.worlds.turn_pacer import Decision, Turn
from bridge.core.worlds.turns import Turns
from bridge.game.pacer import ProgramPacer

__all__ = ["GameTurns", "TogetherInTime"]


class TogetherInTime(AllActed):
    """Steps once all agents have acted, or the program has waited for too long: then with default actions."""

    late = False
    """True if it has."""

    def decide(self, turn: Turn) -> Decision:
        """Decide as `AllActed`, and when it is late in any case."""
        decision = turn.step(turn.actions) if self.late else super().decide(turn)
        if decision.kind == "step" and turn.names == [ONE]:
            return dataclasses.replace(decision, action=turn.actions.get(ONE, DEFAULT))
        return decision


class GameTurns(ProgramPacer, Turns):
    """Has the program do one step once all of its agents have acted, or its timeout is over."""

    rules: TogetherInTime

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world, whose environment is a `GameEnvironment`."""
        super().bind(world)
        self._env.late = self._go_on

    def _go_on(self) -> None:
        self.rules.late = True
        self.advance()
        self.rules.late = False
        if self._job is None:  # nobody plays, so nobody is told of it
            self._env.go_on()
