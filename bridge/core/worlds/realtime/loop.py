"""The clock of lanes that are stepped one by one: each is an environment, with an episode and an action of its own."""

from __future__ import annotations

from bridge.core.worlds.environment import Job, Transition
from bridge.core.worlds.realtime.frame_loop import FrameLoop
from bridge.core.worlds.realtime.loop_lane import LaneBuffer, LoopAgent, LoopLane, Phase

__all__ = ["RealtimeLoop"]


class RealtimeLoop(FrameLoop):
    """Says when frames of one environment or of several lanes are due, and which action each of them takes."""

    def join(self, player: bool) -> LoopAgent:
        """Add an agent."""
        return self._admit(LoopAgent(self.lanes, player))

    def may_enter(self, loop_agent: LoopAgent, buffer: LaneBuffer) -> bool:
        """True if the lane of one of an agent's buffers has an episode for it, where it is in none."""
        return buffer.lane.phase is Phase.RUNNING

    def _choose(self, lane: LoopLane, now: float) -> object:
        return self._newest_action(lane, now)

    def stepped(self, job: Job, now: float, spent: float, step: Transition) -> None:
        """A frame of an environment returned; `spent` is what it took, in seconds."""
        self.step_times.add(spent)
        lane = self._current(job)
        if lane is None:
            return
        lane.add(now, step, self.step_frames)
        if step.ended:
            self._renew(lane)

    def _cut_off(self, lane: LoopLane, error: str | None = None, finished: bool = False) -> None:
        self.drop_action(lane)
        lane.end(lane.episode, error=error, finished=finished)
