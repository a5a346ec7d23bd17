"""Pacers of a program that waits until its agents have acted."""

from __future__ import annotations

from collections.abc import Callable

from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import Agent, PacedWorld
from bridge.core.worlds.environment import Result
from bridge.core.worlds.group import ONE
from bridge.core.worlds.lock_step import LockStep
from bridge.core.worlds.multi_agent.joint_steps import AllActed
from bridge.core.worlds.settings import Settings
from bridge.core.worlds.turn_pacer import Decision, Turn
from bridge.core.worlds.turns import Turns
from bridge.game.clock import refuse_watcher
from bridge.game.environment import GameEnvironment
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["GameLockStep", "GameTurns", "TogetherOrMissed"]


class GameLockStep(LockStep):
    """Has the program do one step with each Step of its agent."""

    steps_at_once = can_place = False

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world, whose environment is a `GameEnvironment`."""
        super().bind(world)
        assert isinstance(world.env, GameEnvironment), "its source makes no other"
        self._env = world.env

    def applied_by(self, lane: int) -> object:
        """Return whose the action is that the program takes now."""
        return "default" if self._env.missed else super().applied_by(lane)

    async def step(self, agent: EnvAgent, action: object) -> int:
        """Have the program act; before that, tell the world of the frames that it made without the agent."""
        env, handover, missed = agent.world.env, self._env.handover, 0.0
        result: Result | None = None
        for _ in range(handover.missed):
            self._env.missed = True
            try:
                result = await env.step(handover.default.actions[ONE])  # type: ignore[index]
            finally:
                self._env.missed = False
            missed += result[1]
            if result[2] or result[3]:
                break
        else:
            result = await env.step(action)
            missed += result[1]
        agent.observation, _, terminated, truncated, agent.info = result
        agent.take_reward(missed)
        agent.terminated[...], agent.truncated[...] = terminated, truncated
        agent.world.episodes += bool(terminated or truncated)
        return pb.TERMINATED if terminated else pb.INTERRUPTED if truncated else pb.RUNNING

    def leave(self, agent: EnvAgent) -> None:
        """Leave the program to the next agent."""
        super().leave(agent)
        self._env.handover.withdraw()

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Take the settings of a ResetWorld, which no watcher may send."""
        refuse_watcher(caller)
        return super().prepare_reset(settings, caller)


class TogetherOrMissed(AllActed):
    """Steps once all agents have acted, and in the frames that the program made without waiting for that."""

    env: GameEnvironment

    def decide(self, turn: Turn) -> Decision:
        """Step with default actions, which the program has taken, or as `AllActed` says."""
        if self.env.handover.queued:
            self.env.missed = True
            return turn.step({})
        return super().decide(turn)


class GameTurns(Turns):
    """Has the program do one step once all of its agents have acted."""

    rules: TogetherOrMissed

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world, whose environment is a `GameEnvironment`."""
        super().bind(world)
        assert isinstance(world.env, GameEnvironment), "its source makes no other"
        self._env = self.rules.env = world.env

    def leave(self, agent: EnvAgent) -> None:
        """Free an agent; where it was the last one, the program goes on with default actions."""
        super().leave(agent)
        if not self.participants:
            self._env.handover.withdraw()

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Take the settings of a ResetWorld, which no watcher may send."""
        refuse_watcher(caller)
        return super().prepare_reset(settings, caller)
