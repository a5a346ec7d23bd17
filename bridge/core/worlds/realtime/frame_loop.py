"""The clock of a real-time world and the episodes of its environments, without I/O, threads or a time source.

The driver calls `poll(now)`, runs the returned jobs, and reports their results with `began`, `failed`, and the loop's
own `stepped` method. A job carries its lane and episode. Results of an episode that is over are counted and dropped.

`FrameLoop` is the base class. `LaneLoop` is for lanes, which are environments with one agent each. `JointLoop` is for
one environment with several agents.
"""

from __future__ import annotations

import abc
import math

from bridge.core.back_off import doubling_pause
from bridge.core.encoding.frame_buffer import Told
from bridge.core.samples import Samples
from bridge.core.worlds.environment import Job, Transition, kept
from bridge.core.worlds.realtime.loop_lane import RETRY, LaneBuffer, LaneEvent, LoopAgent, LoopLane, Phase, Seen
from bridge.core.worlds.realtime_options import check_timing

__all__ = ["FrameLoop", "LaneLoop"]


class FrameLoop(abc.ABC):
    """Decides when frames are due and which action each lane takes.

    Frame n is due at `start + n / fps`, so rounding and lateness never add up. A clock that is late by at most
    `catch_up` seconds runs every missed frame. A clock that is later runs one frame, and counts the other missed frames
    as dropped.

    Args:
        lanes: The number of environments.
        fps: Frames per second.
        default_action: The action for frames without an action of an agent.
        max_action_age: The longest time in seconds that an action is repeated; None: until the next action (U-13).
        catch_up: The lateness in seconds up to which missed frames are run.
        autoreset: True if a lane begins its next episode by itself (U-4); otherwise `ask_reset` begins each episode.
        rest_when_empty: True if the clock stops while no agent is in the world. The last frame before the stop uses the
            default action; after a failed step, a reset comes first.

    Raises:
        SettingError: A number is out of its range.
    """

    def __init__(
        self,
        lanes: int,
        fps: float,
        default_action: object,
        *,
        max_action_age: float | None = None,
        catch_up: float = 0.25,
        autoreset: bool = True,
        rest_when_empty: bool = False,
    ) -> None:
        check_timing(fps, max_action_age, catch_up)
        self.fps = float(fps)
        self.lanes = [LoopLane() for _ in range(lanes)]
        self.frames = 0
        """Frames that began."""
        self.overruns = 0
        """Frames that began late by more than the time of one frame."""
        self.dropped = 0
        """Missed frames that were not run."""
        self.stale = 0
        """Results of jobs whose episode was over."""
        self.actions_applied = 0
        """Actions that a frame used."""
        self.actions_replaced = 0
        """Actions that were replaced by a newer one before a frame used them."""
        self.actions_dropped = 0
        """Actions that arrived after their episode was over."""
        self.default_frames = 0
        """Frames of a lane that used the default action."""
        self.step_frames = 1
        """How many frames the current step covers: a program that does not wait may have made several."""
        self.step_times = Samples()
        self.lateness = Samples()
        self.action_delays = Samples()
        self._default = default_action
        self._max_action_age = max_action_age
        self._catch_up = catch_up
        self._autoreset = autoreset
        self._rests = rest_when_empty
        self._start: float | None = None
        self._index = 0
        self.loop_agents: list[LoopAgent] = []
        """The agents in the world."""

    # Time

    def start(self, now: float) -> None:
        """Start the clock, and an episode in every idle lane. May be called again."""
        # The agent of this Reset has left, or this is a ResetWorld from outside: the next agent starts the clock.
        if self._rests and not self.loop_agents:
            return
        if self._start is None:
            self._start = now
            self._index = 1
            for index, lane in enumerate(self.lanes):
                if lane.phase is Phase.IDLE and self._autoreset:
                    self.ask_reset(index)

    def next_due(self) -> float | None:
        """Return when the next frame is due; None: the clock has not started, or rests, or waits for `ask_reset`."""
        # Without autoreset no frame is due between two episodes: frames would only be counted as late or dropped.
        if self._start is None or not (self._autoreset or any(lane.phase is Phase.RUNNING for lane in self.lanes)):
            return None
        return self._start + self._index / self.fps

    @property
    def reset_waits(self) -> bool:
        """True if `poll` would return a reset, whatever the time."""
        # Called for each timer, so avoid a generator, which would cost more than the rest.
        for lane in self.lanes:  # noqa: SIM110
            if lane.asked and not lane.busy:
                return True
        return False

    def poll(self, now: float) -> list[Job]:
        """Return the jobs to run now: pending resets, and one frame if it is due."""
        jobs = []
        for index, lane in enumerate(self.lanes):
            if lane.phase is Phase.FAILED and self._autoreset and now >= lane.retry_at and not lane.busy:
                # The new episode gets a new number: agents may still have to read the end of the failed one.
                lane.move(LaneEvent.RETRIED)
                lane.episode += 1
                lane.asked = True
            # A running call of the environment cannot be interrupted: a Reset waits until it returns.
            if lane.asked and not lane.busy:
                lane.asked, lane.busy = False, True
                jobs.append(Job(index, lane.episode, "reset", seed=lane.seed, options=lane.options))
        if self._begin_frame(now):
            for index, lane in enumerate(self.lanes):
                if lane.phase is Phase.RUNNING and not lane.busy:
                    lane.busy = True
                    jobs.append(Job(index, lane.episode, "step", action=self._choose(lane, now)))
        return jobs

    def _begin_frame(self, now: float) -> bool:
        """Return True if a frame is due, after counting it and the dropped frames."""
        due = self.next_due()
        if due is None or now < due:
            return False
        if self._rests and not self.loop_agents and self._may_rest():
            self._start = None  # `start` sets it again, so that frames of the rest are not made up for
            return False
        late = now - due
        self.lateness.add(late)
        if late * self.fps >= 1.0:
            self.overruns += 1
        # Otherwise a process that was suspended for a minute would run all frames of that minute in a row.
        if late > self._catch_up:
            skipped = int(late * self.fps)
            self._index += skipped
            self.dropped += skipped
        self._index += 1
        self.frames += 1
        return True

    @abc.abstractmethod
    def _choose(self, lane: LoopLane, now: float) -> object:
        """Return the action of an environment's frame."""

    def _newest_action(self, lane: LoopLane, now: float) -> object:
        """Return a copy of the agent's newest action, or of the default one if it is missing or too old (U-13)."""
        # Without an action the age is infinite. It may be negative with a virtual clock: a frame runs at its own time,
        # but the action arrived at the later time to which the clock was advanced.
        age, lane.applied_at = now - lane.acted_at, now
        if age == math.inf or (self._max_action_age is not None and age > self._max_action_age):
            self.default_frames += 1
            lane.applied_by, lane.driven = "", False
            return kept(self._default)  # a copy, because the environment may change it and later frames use it too
        lane.applied_by, lane.driven = lane.player, True
        # A repeated action counts, and its delay is measured, only in the first frame that uses it.
        if lane.unused:
            lane.unused = False
            self.actions_applied += 1
            lane.action_delay = max(0.0, age)
            self.action_delays.add(lane.action_delay)
        return kept(lane.action)

    # Results of jobs

    def _current(self, job: Job) -> LoopLane | None:
        lane = self.lanes[job.lane]
        # Even if the result is stale, the environment is free again.
        lane.busy = False
        if lane.episode != job.episode:
            self.stale += 1
            return None
        return lane

    def began(self, job: Job, now: float, first: Transition) -> bool:
        """Handle the return of a reset; return False if it is stale."""
        lane = self._current(job)
        if lane is None:
            return False
        lane.failures = 0
        # Clear them only after success: a retry after a failure uses the same seed.
        lane.seed = lane.options = None
        lane.begin(now, first)
        return True

    def failed(self, job: Job, now: float, error: str) -> bool:
        """Handle an exception of the environment; return False if it is stale."""
        lane = self._current(job)
        if lane is None:
            return False
        lane.move(LaneEvent.FAILED)
        lane.failures += 1
        # A failed step may have applied its action. A failed reset changes nothing.
        lane.driven = lane.driven or job.kind == "step"
        lane.retry_at = now + doubling_pause(lane.failures, *RETRY)
        self._cut_off(lane, error, job.kind == "step")
        return True

    @abc.abstractmethod
    def _cut_off(self, lane: LoopLane, error: str | None = None, finished: bool = False) -> None:
        """End an episode because the environment raised, or because a new episode was asked for."""

    def _renew(self, lane: LoopLane) -> None:
        """Move from an ended episode to the next one."""
        self.drop_action(lane)
        lane.episode += 1
        lane.asked = self._autoreset  # otherwise `poll` returns no reset until `ask_reset`

    def drop_action(self, lane: LoopLane) -> None:
        """Drop a lane's action: frames use the default action until the next one arrives."""
        if lane.unused:
            self.actions_dropped += 1
        lane.acted_at, lane.unused = -math.inf, False

    # Agents

    def _admit(self, loop_agent: LoopAgent) -> LoopAgent:
        self.loop_agents.append(loop_agent)
        # An agent that follows gets each frame through `subscribe`. Nobody would read its buffers.
        if not loop_agent.follows:
            for buffer in loop_agent.buffers:
                buffer.lane.buffers.append(buffer)
        return loop_agent

    def leave(self, loop_agent: LoopAgent) -> None:
        """Remove an agent, and drop its actions."""
        # A `PolicyPlayer` may leave twice.
        if loop_agent in self.loop_agents:
            self.loop_agents.remove(loop_agent)
            for buffer in loop_agent.buffers:
                lane = buffer.lane
                if buffer in lane.buffers:
                    lane.buffers.remove(buffer)
                if loop_agent.player:
                    # A robot must not repeat the last action of a client that died.
                    self.drop_action(lane)
            if self._rests and not self.loop_agents:
                # A robot must not rest with the last command of a client that left: the default action comes first.
                for lane in self.lanes:
                    lane.driven = lane.driven or lane.phase is Phase.RUNNING
                if self._may_rest():
                    self._start = None

    def _may_rest(self) -> bool:
        """True if each environment's last job since the agents left was a default action or a reset."""
        return not any(lane.driven or lane.busy for lane in self.lanes)

    def ask_reset(self, index: int, seed: int | None = None, options: object = None) -> None:
        """Begin an episode of a lane; a running one is cut off (U-9)."""
        lane = self.lanes[index]
        if lane.phase is Phase.RUNNING:
            self._cut_off(lane)
        # A reset that `poll` has not returned yet is replaced and keeps its number. A running reset becomes stale,
        # because the episode gets a new number.
        if lane.phase is not Phase.RESETTING or lane.busy:
            lane.episode += 1
        lane.move(LaneEvent.ASKED)
        lane.seed, lane.options = seed, options
        lane.asked = True

    def act(self, loop_agent: LoopAgent, index: int, action: object, now: float, episode: int | None = None) -> bool:
        """Apply a player's action from now on; return False if its episode is over (U-5).

        Args:
            loop_agent: The player.
            index: The index of the lane, among the player's lanes.
            action: The action.
            now: When it arrived.
            episode: The number of the episode that the action is for; None: the player's current episode.
        """
        buffer = loop_agent.buffers[index]
        lane = buffer.lane
        if not loop_agent.player:
            return False
        # U-5: if the agent has not been told yet that its episode ended, it chose this action for the ended episode.
        here = loop_agent.follows or buffer.reading == lane.episode
        if lane.phase is not Phase.RUNNING or not here or (episode is not None and episode != lane.episode):
            self.actions_dropped += 1
            return False
        if lane.unused:
            self.actions_replaced += 1
        lane.action, lane.acted_at, lane.unused, lane.player = action, now, True, loop_agent.name
        return True

    def is_pending(self, lane: LoopLane, frames: int) -> bool:
        """True if a frame is still to come for a lane's action, after so many that have ended since it came.

        The first was under way then, and has used the action before. The next one uses it, unless it is too old.
        """
        return frames == 1 and lane.unused

    @abc.abstractmethod
    def may_enter(self, loop_agent: LoopAgent, buffer: LaneBuffer) -> bool:
        """True if an agent that is in no episode of the buffer's lane can enter one there."""

    def take(self, loop_agent: LoopAgent, index: int, *, repeats: bool = False) -> Told[Seen] | None:
        """Return what to report to an agent about a lane; None: it is in no episode, and cannot enter one.

        Args:
            loop_agent: The agent.
            index: The index of the lane, among the agent's lanes.
            repeats: True: if the agent is in an episode, only repeat its newest observation.
        """
        buffer = loop_agent.buffers[index]
        if buffer.reading:
            return buffer.repeat() if repeats else buffer.take()
        if not self.may_enter(loop_agent, buffer):
            return None
        loop_agent.asked = False
        return buffer.take()

    def statistics(self) -> dict[str, object]:
        """Return counts, and percentiles of times in seconds."""
        actions = "actions_applied", "actions_replaced", "actions_dropped", "default_frames"
        counts = {name: getattr(self, name) for name in ("fps", "frames", "overruns", "stale", *actions)}
        times = {"step_time": self.step_times, "lateness": self.lateness, "action_delay": self.action_delays}
        summaries = {name: samples.summary() for name, samples in times.items()}
        return {**counts, "frames_dropped": self.dropped, **summaries}


class LaneLoop(FrameLoop):
    """Decides when frames of one environment or of several lanes are due, and which action each of them takes."""

    def join(self, player: bool) -> LoopAgent:
        """Add an agent."""
        return self._admit(LoopAgent(self.lanes, player))

    def may_enter(self, loop_agent: LoopAgent, buffer: LaneBuffer) -> bool:
        """True if an agent that is in no episode of the buffer's lane can enter one there."""
        return buffer.lane.phase is Phase.RUNNING

    def _choose(self, lane: LoopLane, now: float) -> object:
        return self._newest_action(lane, now)

    def stepped(self, job: Job, now: float, spent: float, step: Transition) -> None:
        """Handle the return of a frame that took `spent` seconds."""
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
