"""The clock of one environment, or of lanes that are stepped one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge.core.encoding.spaces import Layout
from bridge.core.worlds.base import PacedWorld
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
    """Return the default action of an environment, or of one lane, that a clock will step.

    Raises:
        SettingError: A clock cannot step the environment, or `options.default_action` is not in its action space.
    """
    if facts.num_envs is not None and not facts.steps_lanes:
        raise SettingError(
            f"a real-time world steps each lane separately: expected vectorization_mode='sync', got {facts.kind}"
        )
    if facts.reward_space is not None:
        raise SettingError(
            "a real-time world adds rewards up: expected rewards that are numbers, got "
            f"{facts.reward_space}; add a wrapper such as mo_gymnasium.wrappers.LinearReward"
        )
    space = facts.action_space
    default = neutral_action(space) if options.default_action is None else options.default_action
    layout = Layout(space, "action")
    try:
        # Convert it like a client's action: the environment must not get a list.
        return layout.unpack(layout.pack_action(default), check=True)
    except (InvalidActionError, TensorError) as error:
        raise SettingError(f"expected default_action to be an element of {space}, got {default!r:.80}") from error


class ClockPacer(FramePacer):
    """Steps one environment, or lanes one by one, by a clock. One client plays; any number of others may watch.

    Args:
        options: The options of real time.

    Raises:
        SettingError: Raised by `bind`: the lanes cannot be stepped one by one, or the options do not fit.
    """

    SETTINGS: tuple[str, ...] = ("role", "wait")
    """The settings of a JoinWorld."""
    LOOP: type[LaneLoop] = LaneLoop
    """Decides when frames are due."""
    by_lane = True
    loop: LaneLoop

    def _make_loop(self, world: PacedWorld) -> LaneLoop:
        """Return the loop, which decides when frames are due."""
        facts, options = world.env.facts, self.options
        return self.LOOP(facts.num_envs or 1, options.fps, default_action_of(facts, options), **options.timing())

    def _let_in(self, settings: Settings, player: bool) -> tuple[str, LoopAgent]:
        """Add an agent to the loop; return its name and its `LoopAgent`."""
        self.world.refuse_if_over()
        # Two players would overwrite each other's actions. The number of spectators is not limited.
        if player and self.has_players:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"{self.world.title_in_messages} has a player already; join it with the setting role=spectator, "
                f"or {self.world.if_full}",
            )
        return ONE, self.loop.join(player)

    @property
    def players(self) -> Mapping[str, str]:
        """The player of the single agent, by the agent's name."""
        names = [loop_agent.name for loop_agent in self.loop.loop_agents if loop_agent.player]
        return {ONE: names[0]} if names else {}

    def applied_by(self, lane: int) -> object:
        """Return the player whose action the current frame of a lane uses, or `default`."""
        return self.loop.lanes[lane].applied_by or "default"

    def moment(self, lane: int) -> tuple[float, float]:
        """Return the clock's time, and the arrival time of the action that the frame uses; NaN: the default action."""
        loop_lane = self.loop.lanes[lane]
        # A recording has the time at which the frame began, not the time at which the environment returned.
        now = loop_lane.applied_at if loop_lane.phase is Phase.RUNNING else self.now()
        return now, loop_lane.acted_at if loop_lane.applied_by else math.nan

    def ask_reset(self, loop_agent: LoopAgent, asked: ResetRequest) -> None:
        """Carry out an agent's Reset: leave its episodes, and begin new ones if it is a player.

        Without `restart`, a seed or options, running lanes are not reset, and the agent enters their episodes.
        """
        self.world.refuse_if_over()
        for index in np.flatnonzero(asked.mask).tolist():
            buffer, lane, seed = loop_agent.buffers[index], self.loop.lanes[index], asked.seeds[index]
            new = buffer.follows_anew  # the lane has just begun by itself: do not reset a robot twice
            # A spectator leaves its episode too: its next Step enters the running one. Other clients do not notice.
            buffer.abandon()
            # D-14: a pending reset, or the one that `start` asks for below, also serves this Reset, unless this Reset
            # has a seed or options.
            plain = seed is None and not asked.options
            under_way = new or lane.phase in (Phase.RESETTING, Phase.IDLE) or not asked.restart
            if not loop_agent.player or (plain and under_way):
                continue
            self.loop.ask_reset(index, seed, asked.options)
        self._changed()
        self.start()

    def _seen(self, name: str) -> object:
        """Return an agent's last observation, for a frame without one."""
        raise KeyError(name)  # a single environment returns an observation in each frame

    async def _default_action(self, name: str) -> object:
        """Return the action of an agent without an action."""
        raise KeyError(name)  # for a single environment the loop has the default action

    def _note(self, job: Job, now: float, spent: float, outcome: Outcome | None, error: str) -> None:
        """Report to the loop the outcome of a job that took `spent` seconds; None: the environment raised `error`."""
        if outcome is None:
            # For a single environment the error of the refused Step is logged instead.
            if self.loop.failed(job, now, error) and self.world.env.facts.num_envs is not None:
                self.world.report_failure(error)
        elif job.kind == "reset":
            self.loop.began(job, now, outcome[0][ONE])
        else:
            self.loop.stepped(job, now, spent, outcome[0][ONE])
