"""The clock of one environment, or of lanes that are stepped one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge.core.encoding.spaces import Layout
from bridge.core.worlds.base import OTHER_WORLD, PacedWorld
from bridge.core.worlds.environment import EnvFacts, Job
from bridge.core.worlds.group import ONE, neutral_action
from bridge.core.worlds.realtime.frame_loop import LaneLoop
from bridge.core.worlds.realtime.frame_pacer import FramePacer, Outcome
from bridge.core.worlds.realtime.loop_lane import LoopAgent, Phase
from bridge.core.worlds.realtime_options import RealtimeOptions
from bridge.core.worlds.settings import ResetRequest, Settings
from bridge.errors import Code, InvalidActionError, RequestError, SettingError, TensorError

__all__ = ["ClockPacer", "default_action_of"]


def default_action_of(facts: EnvFacts, options: RealtimeOptions) -> Any:
    """Return what stands in for the action of an environment, or of one lane, that a clock is to step.

    Raises:
        SettingError: A clock cannot step it, or the default action of the options is none of its actions.
    """
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
    layout = Layout(space, "action")
    try:
        # As a client's action: a list, of Python or of a command line, must not reach the environment as a list.
        return layout.unpack(layout.pack_action(default), check=True)
    except (InvalidActionError, TensorError) as error:
        raise SettingError(f"expected default_action to be an element of {space}, got {default!r:.80}") from error


class ClockPacer(FramePacer):
    """Steps one environment, or lanes one by one, by a clock. One agent plays, any number of others watch.

    Args:
        options: How it runs.

    Raises:
        SettingError: `bind` raises it: the lanes cannot be stepped one by one, or options do not fit.
    """

    SETTINGS: tuple[str, ...] = ("role", "wait")
    """The settings of a JoinWorld."""
    LOOP: type[LaneLoop] = LaneLoop
    """Decides when frames are due."""
    by_lane = True
    loop: LaneLoop

    def _make_loop(self, world: PacedWorld) -> LaneLoop:
        """Return what decides which frames are due."""
        facts, options = world.env.facts, self.options
        return self.LOOP(facts.num_envs or 1, options.fps, default_action_of(facts, options), **options.timing())

    def _let_in(self, settings: Settings, player: bool) -> tuple[str, LoopAgent]:
        """Add an agent to the loop, by other settings than `role` and `wait` too; return its name and place."""
        self.world.refuse_if_over()
        # Two players would overwrite each other's actions; of spectators there may be any number.
        if player and self.has_players:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"{self.world.title_in_messages} has its one player already; join it with the setting role=spectator, "
                f"or {OTHER_WORLD}",
            )
        return ONE, self.loop.join(player)

    @property
    def players(self) -> Mapping[str, str]:
        """Who plays the one agent."""
        names = [loop_agent.name for loop_agent in self.loop.loop_agents if loop_agent.player]
        return {ONE: names[0]} if names else {}

    def applied_by(self, lane: int) -> object:
        """Return who the action is of that a lane is stepped by now: `default` where it is nobody's."""
        return self.loop.lanes[lane].applied_by or "default"

    def moment(self, lane: int) -> tuple[float, float]:
        """Return the clock's seconds, and when the action came that its frame applies; NaN: never."""
        part = self.loop.lanes[lane]
        # A recording says when the frame began, and not when the environment had returned from it.
        now = part.applied_at if part.phase is Phase.RUNNING else self.now()
        return now, part.acted_at if part.applied_by else math.nan

    def ask_reset(self, loop_agent: LoopAgent, asked: ResetRequest) -> None:
        """Carry out an agent's Reset: give up its episodes, and where it is a player see to new ones.

        Without `restart`, and without a seed or options, lanes that run stay as they are, and the agent enters the
        episodes that run there.
        """
        self.world.refuse_if_over()
        for index in np.flatnonzero(asked.mask).tolist():
            buffer, lane, seed = loop_agent.buffers[index], self.loop.lanes[index], asked.seeds[index]
            new = buffer.follows_anew  # it has begun by itself: a robot is not to be reset twice
            # A spectator's Reset, too, leaves the episode: its next Step enters the one that runs then, and nobody else
            # notices.
            buffer.abandon()
            # D-14: a reset that is under way, or that `start` asks for below, serves for this one as well, unless it
            # was to have another seed or other options.
            plain = seed is None and not asked.options
            under_way = new or lane.phase in (Phase.RESETTING, Phase.IDLE) or not asked.restart
            if not loop_agent.player or (plain and under_way):
                continue
            self.loop.ask_reset(index, seed, asked.options)
        self._changed()
        self.start()

    def _seen(self, name: str) -> object:
        """Return what an agent saw last, for a frame without an observation of it."""
        raise KeyError(name)  # of one environment there is one in each

    async def _default_action(self, name: str) -> object:
        """Return the action of an agent that has none."""
        raise KeyError(name)  # of one environment it is in the loop

    def _note(self, job: Job, now: float, spent: float, outcome: Outcome | None, error: str) -> None:
        """Tell the loop what came of a job that took `spent` seconds; None: the environment raised `error`."""
        if outcome is None:
            # Of a single environment, the Step that is refused for it has it logged.
            if self.loop.failed(job, now, error) and self.world.env.facts.num_envs is not None:
                self.world.report_failure(error)
        elif job.kind == "reset":
            self.loop.began(job, now, outcome[0][ONE])
        else:
            self.loop.stepped(job, now, spent, outcome[0][ONE])
