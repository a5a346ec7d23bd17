"""The real-time world of one environment, or of lanes that are stepped one by one (U-1)."""

from __future__ import annotations

import numpy as np

from bridge.core.worlds.base import OTHER_WORLD
from bridge.core.worlds.default_actions import neutral_action
from bridge.core.worlds.environment import Environment, Job, Transition, kept
from bridge.core.worlds.realtime.agent import RealtimeAgent
from bridge.core.worlds.realtime.clocked_world import ClockedWorld, RealtimeOptions
from bridge.core.worlds.realtime.loop import LoopAgent, Phase, RealtimeLoop
from bridge.core.worlds.rewards import as_number
from bridge.core.worlds.scheduling import Scheduler
from bridge.core.worlds.settings import ResetRequest, Settings
from bridge.errors import Code, RequestError, SettingError

__all__ = ["RealtimeWorld"]


class RealtimeWorld(ClockedWorld[Transition]):
    """The world of one environment, or of lanes that are stepped one by one, that a clock drives.

    One agent plays, any number of others watch.

    Args:
        name: The world's name.
        env: The environment that is stepped; owned by the world from here on.
        scheduler: Runs the frames.
        options: How it runs.

    Raises:
        SettingError: The lanes cannot be stepped one by one, or options do not fit.
    """

    def __init__(self, name: str, env: Environment, scheduler: Scheduler, options: RealtimeOptions) -> None:
        facts = env.facts
        if facts.num_envs is not None and not facts.steps_lanes:
            raise SettingError(
                "a real-time world of lanes steps each environment by itself: expected vectorization_mode='sync', "
                f"got {facts.kind}"
            )
        if facts.reward_space is not None:
            raise SettingError(
                "a real-time world adds rewards up, which are numbers then: expected none of "
                f"{facts.reward_space}; make them numbers by a wrapper such as mo_gymnasium.wrappers.LinearReward"
            )
        space = facts.action_space
        default = neutral_action(space) if options.default_action is None else options.default_action
        if not space.contains(default):
            raise SettingError(f"expected default_action to be an element of {space}, got {default!r:.80}")
        loop = RealtimeLoop(facts.num_envs or 1, options.fps, default, **options.timing())
        super().__init__(name, env, scheduler, options, loop)

    def _let_in(self, settings: Settings, player: bool, wait: str) -> RealtimeAgent:
        self.refuse_if_over()
        # Two players would overwrite each other's actions; of spectators there may be any number.
        if player and self.has_players:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"{self.title_in_messages} has its one player already; join it with the setting role=spectator, "
                f"or {OTHER_WORLD}",
            )
        return RealtimeAgent(self, self.loop.join(player), wait)

    def ask_reset(self, loop_agent: LoopAgent, asked: ResetRequest) -> None:
        """Give up an agent's episodes, and where it is the player have the lanes begin new ones."""
        self.refuse_if_over()
        for index in np.flatnonzero(asked.mask).tolist():
            # A spectator's Reset, too, leaves the episode: its next Step enters the one that runs then, and nobody else
            # notices.
            loop_agent.buffers[index].abandon()
            lane, seed = self.loop.lanes[index], asked.seeds[index]
            # D-14: a reset that is under way, or that `start` asks for below, serves for this one as well, unless it
            # was to have another seed or other options.
            plain = seed is None and not asked.options
            under_way = lane.phase in (Phase.RESETTING, Phase.IDLE) or not asked.restart
            if not loop_agent.player or (plain and under_way):
                continue
            self.loop.ask_reset(index, seed, asked.options)
        self._changed()
        self.start()

    async def _call_environment(self, job: Job) -> Transition:
        lane = None if self.env.facts.num_envs is None else job.lane
        if job.kind == "reset":
            observation, info = await self.env.reset(seed=job.seed, options=job.options, lane=lane)
            return Transition(kept(observation), info=kept(info))
        observation, reward, terminated, truncated, info = await self.env.step(job.action, lane)
        return Transition(kept(observation), as_number(reward), bool(terminated), bool(truncated), kept(info))

    def _note(self, job: Job, now: float, spent: float, outcome: Transition | None, error: str) -> None:
        if outcome is None:
            # Of a single environment, the Step that is refused for it has it logged.
            if self.loop.failed(job, now, error) and self.env.facts.num_envs is not None:
                self.report_failure(error)
        elif job.kind == "reset":
            self.loop.began(job, now, outcome)
        else:
            self.loop.stepped(job, now, spent, outcome)
