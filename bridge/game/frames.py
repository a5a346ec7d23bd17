"""Frames of a program that does not wait for agents: when one is due, which actions it used, and how many there were.

The program makes its frames by itself. So a frame is due here once we know which actions the program took, and is
counted once we know its result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bridge.core.worlds.group import ONE
from bridge.core.worlds.realtime.frame_loop import FrameLoop, LaneLoop
from bridge.core.worlds.realtime.joint_loop import JointLoop
from bridge.core.worlds.realtime.loop_lane import LoopLane, Phase
from bridge.game.environment import GameEnvironment

__all__ = ["GameFrames", "JointGameFrames", "OneGameFrames"]


class GameFrames(FrameLoop):
    """A frame is due when the program has taken actions."""

    env: GameEnvironment
    agent_lanes: dict[str, LoopLane]
    """The lane of each agent in the round, by name."""
    alive: list[str]
    """The agents that act in the next frame."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._applied: dict[str, float] = {}
        """The arrival time of the newest applied action, by agent."""

    def _may_repeat(self, name: str, observation: object, action: object) -> bool:
        return True

    def acting(self) -> Mapping[str, LoopLane]:
        """Return the lanes of the agents that act."""
        return {name: self.agent_lanes[name] for name in self.alive}

    def next_due(self) -> float | None:
        """Return when the next frame is due; None: no frame is due."""
        lane = self.lanes[0]
        if self._start is not None and not lane.busy and lane.phase is Phase.FAILED:
            return lane.retry_at
        return self._start if self._is_due() else None

    def _is_due(self) -> bool:
        lane = self.lanes[0]
        free = self._start is not None and not lane.busy and lane.phase is Phase.RUNNING
        return free and self.env.chosen.actions is not None

    def _begin_frame(self, now: float) -> bool:
        """Return whether a frame is due. `count` counts it later."""
        return self._is_due()

    def _may_rest(self) -> bool:
        """Return True: the program goes on by itself, and its next call takes the default action."""
        return True

    def count(self, passed: int, frames: int) -> None:
        """Count frames, before the result of the last one is reported.

        Args:
            passed: How many frames the program has made.
            frames: How many of the last frames belong to the current step; 0 for a reset.
        """
        skipped = passed - frames - self.lanes[0].frames
        for lane in {self.lanes[0], *self.agent_lanes.values()}:
            lane.frames += skipped
        self.frames, self.step_frames = passed, frames
        self.default_frames += frames * sum(not agent_lane.applied_by for agent_lane in self.acting().values())

    def _choose(self, lane: LoopLane, now: float) -> Any:
        """Return the actions that the program has taken, and count them."""
        choice = self.env.chosen
        for name, agent_lane in self.acting().items():
            agent_lane.applied_by, agent_lane.applied_at = choice.by.get(name, ""), self.env.read_at
            came = choice.came.get(name)
            if came is not None and came != self._applied.get(name):
                self._applied[name] = came
                if agent_lane.acted_at == came:
                    agent_lane.unused = False
                elif (
                    agent_lane.unused
                ):  # counted as replaced when a newer one arrived, but the program had taken it by then
                    self.actions_replaced -= 1
                self.actions_applied += 1
                agent_lane.action_delay = max(0.0, self.env.read_at - came)
                self.action_delays.add(agent_lane.action_delay)
        return choice.actions

    def is_pending(self, lane: LoopLane, frames: int) -> bool:
        """True if the program has yet to take an agent's action: it takes actions at the end of a frame.

        Until it is known that it has, what comes next would replace the action, which nobody would have executed.
        """
        name = next(name for name, own in self.agent_lanes.items() if own is lane)
        taken = self.env.chosen.came.get(name)
        return lane.unused and taken != lane.acted_at and self.usable(name, lane, self.env.read_at)

    def usable(self, name: str, agent_lane: LoopLane, now: float) -> bool:
        """True if an agent's newest action may be applied now: it is young enough, and no mask forbids repeating it."""
        oldest = -math.inf if self._max_action_age is None else now - self._max_action_age
        if agent_lane.acted_at == -math.inf or agent_lane.acted_at < oldest:
            return False
        return agent_lane.unused or self._may_repeat(name, agent_lane.observation, agent_lane.action)


class OneGameFrames(GameFrames, LaneLoop):
    """Frames of a program with one agent."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.agent_lanes, self.alive = {ONE: self.lanes[0]}, [ONE]

    def _choose(self, lane: LoopLane, now: float) -> Any:
        return super()._choose(lane, now)[ONE]


class JointGameFrames(GameFrames, JointLoop):
    """Frames of a program with several agents."""

    def _choose(self, lane: LoopLane, now: float) -> Any:
        actions = super()._choose(lane, now)
        return {name: actions[name] for name in self.alive}

    def end_deserted(self) -> bool:
        """End a round that all players have left, if a player asked for a new one; otherwise the round goes on."""
        return self.env.asked and super().end_deserted()
