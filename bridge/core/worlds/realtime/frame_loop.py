"""The clock of a real-time world and the episodes of its environments, without input, output, threads or time.

The driver calls `poll(now)`, runs the returned jobs, and reports their results by `began`, `failed`, and the `stepped`
of the loop at hand. A job carries its lane and episode; results of an episode that is over are dropped and counted.

`FrameLoop` has what all real-time worlds share. What an episode's parts are is for the two loops that derive from it:
`LaneLoop`, whose lanes are environments with an agent each, and `JointLoop`, of one environment of several agents.
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

    Frame n is due at `start + n / fps`, so rounding and lateness never add up. A clock that is at most `catch_up`
    seconds late runs each frame that was missed. One that is later runs one frame, and counts all others that were due
    as dropped.

    Args:
        lanes: The number of environments.
        fps: Frames a second.
        default_action: Stands in where there is no action of an agent.
        max_action_age: Seconds that an action goes on at most; None: until the next one (U-13).
        catch_up: Seconds.
        autoreset: True if a lane begins its next episode by itself (U-4); else `ask_reset` begins each.
        rest_when_empty: True if the clock stands while no agent is in: a page that nobody looks at would play on for
            nobody. The last frame before it stands applies the default action; a step that failed is followed by a
            reset before.

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
        """Frames that began more than a frame's time late."""
        self.dropped = 0
        """Frames that were too late to be made up for."""
        self.stale = 0
        """Outcomes of jobs whose episode was over."""
        self.actions_applied = 0
        """Actions that a frame used."""
        self.actions_replaced = 0
        """Actions that another one replaced before a frame used them."""
        self.actions_dropped = 0
        """Actions that came when their episode was over."""
        self.default_frames = 0
        """Frames of a lane that used the default action."""
        self.step_frames = 1
        """How many frames the step at hand is of: those of an environment that did not wait are put together."""
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
        """The agents that are in."""

    # Time

    def start(self, now: float) -> None:
        """Start the clock, and an episode of every lane that has none. Again: nothing."""
        # A Reset of an agent that left since, or a ResetWorld of one that is not in: the next to come starts the clock.
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
        # No frame is due between two episodes: none would be stepped, and all would be counted as late or dropped.
        if self._start is None or not (self._autoreset or any(lane.phase is Phase.RUNNING for lane in self.lanes)):
            return None
        return self._start + self._index / self.fps

    @property
    def reset_waits(self) -> bool:
        """True if `poll` would return a reset, whatever the time."""
        # Asked for each timer, so without a generator, which costs more than all else here.
        for lane in self.lanes:  # noqa: SIM110
            if lane.asked and not lane.busy:
                return True
        return False

    def poll(self, now: float) -> list[Job]:
        """Return what is to be done now: the resets that wait, and one frame if it is due."""
        jobs = []
        for index, lane in enumerate(self.lanes):
            if lane.phase is Phase.FAILED and self._autoreset and now >= lane.retry_at and not lane.busy:
                # The failed episode keeps its number, by which an agent that has not heard of its end yet still reads.
                lane.move(LaneEvent.RETRIED)
                lane.episode += 1
                lane.asked = True
            # A call that is under way cannot be interrupted: a Reset that came meanwhile waits for its return.
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
        """Count a frame, and those that are dropped, if one is due; return whether one is."""
        due = self.next_due()
        if due is None or now < due:
            return False
        if self._rests and not self.loop_agents and self._may_rest():
            self._start = None  # `start` sets it anew, so that the frames of the rest are not made up for
            return False
        late = now - due
        self.lateness.add(late)
        if late * self.fps >= 1.0:
            self.overruns += 1
        # Else a process that was stopped for a minute would run all frames of that minute in a row.
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
        """A copy of the agent's latest action of this episode, unless it is too old; else of the default one (U-13)."""
        # The age is infinite where there is no action. It is negative where a virtual clock runs a frame at its own
        # time, which is earlier than that to which the clock was turned, and at which the action came.
        age, lane.applied_at = now - lane.acted_at, now
        if age == math.inf or (self._max_action_age is not None and age > self._max_action_age):
            self.default_frames += 1
            lane.applied_by, lane.driven = "", False
            return kept(self._default)  # later frames use it too, whatever the environment makes of it
        lane.applied_by, lane.driven = lane.player, True
        # An action that goes on is counted, and its delay measured, in the first frame that uses it.
        if lane.unused:
            lane.unused = False
            self.actions_applied += 1
            lane.action_delay = max(0.0, age)
            self.action_delays.add(lane.action_delay)
        return kept(lane.action)

    # Results of jobs

    def _current(self, job: Job) -> LoopLane | None:
        lane = self.lanes[job.lane]
        # Also where the result is stale: the environment is free again.
        lane.busy = False
        if lane.episode != job.episode:
            self.stale += 1
            return None
        return lane

    def began(self, job: Job, now: float, first: Transition) -> bool:
        """A reset returned; return whether it counts."""
        lane = self._current(job)
        if lane is None:
            return False
        lane.failures = 0
        # Only a reset that succeeded uses them up: one that is tried again after a failure has the same seed.
        lane.seed = lane.options = None
        lane.begin(now, first)
        return True

    def failed(self, job: Job, now: float, error: str) -> bool:
        """The environment raised; return whether it counts."""
        lane = self._current(job)
        if lane is None:
            return False
        lane.move(LaneEvent.FAILED)
        lane.failures += 1
        # Nobody knows what the environment did of the action. A reset that failed leaves what was before.
        lane.driven = lane.driven or job.kind == "step"
        lane.retry_at = now + doubling_pause(lane.failures, *RETRY)
        self._cut_off(lane, error, job.kind == "step")
        return True

    @abc.abstractmethod
    def _cut_off(self, lane: LoopLane, error: str | None = None, finished: bool = False) -> None:
        """End an episode: the environment raised, which finishes one that ran, or a new one was asked for."""

    def _renew(self, lane: LoopLane) -> None:
        """Turn from an episode that is over to the next one."""
        self.drop_action(lane)
        lane.episode += 1
        lane.asked = self._autoreset  # else `ask_reset` asks, so that `poll` gives out nothing

    def drop_action(self, lane: LoopLane) -> None:
        """Drop a lane's action: the default one stands in until the next comes."""
        if lane.unused:
            self.actions_dropped += 1
        lane.acted_at, lane.unused = -math.inf, False

    # Agents

    def _admit(self, loop_agent: LoopAgent) -> LoopAgent:
        self.loop_agents.append(loop_agent)
        # One that follows hears of each frame by `subscribe`; buffers that nobody takes from would only fill.
        if not loop_agent.follows:
            for buffer in loop_agent.buffers:
                buffer.lane.buffers.append(buffer)
        return loop_agent

    def leave(self, loop_agent: LoopAgent) -> None:
        """Remove an agent; the actions of a player go with it."""
        # A player of this process may leave twice.
        if loop_agent in self.loop_agents:
            self.loop_agents.remove(loop_agent)
            for buffer in loop_agent.buffers:
                lane = buffer.lane
                if buffer in lane.buffers:
                    lane.buffers.remove(buffer)
                if loop_agent.player:
                    # A robot must not go on with the last action of a client that died.
                    self.drop_action(lane)
            if self._rests and not self.loop_agents:
                # A robot must not stand with the last command of a client that left: the default action is next.
                for lane in self.lanes:
                    lane.driven = lane.driven or lane.phase is Phase.RUNNING
                if self._may_rest():
                    self._start = None

    def _may_rest(self) -> bool:
        """True if the last that each environment did, since nobody is in, is the default action or a reset."""
        return not any(lane.driven or lane.busy for lane in self.lanes)

    def ask_reset(self, index: int, seed: int | None = None, options: object = None) -> None:
        """Begin an episode of a lane; one that runs is cut off (U-9)."""
        lane = self.lanes[index]
        if lane.phase is Phase.RUNNING:
            self._cut_off(lane)
        # A reset that is not given out yet is replaced, under its number. One under way gets out of date by another
        # number.
        if lane.phase is not Phase.RESETTING or lane.busy:
            lane.episode += 1
        lane.move(LaneEvent.ASKED)
        lane.seed, lane.options = seed, options
        lane.asked = True

    def act(self, loop_agent: LoopAgent, index: int, action: object, now: float, episode: int | None = None) -> bool:
        """Apply a player's action from now on; return whether its episode still runs (U-5).

        Args:
            loop_agent: The player.
            index: Which of its lanes the action is for.
            action: The action.
            now: When it came.
            episode: The number of the episode that it is for; None: the one that the player is in.
        """
        buffer = loop_agent.buffers[index]
        lane = buffer.lane
        if not loop_agent.player:
            return False
        # U-5: an agent that has not been told that its episode ended chose this action for that one, not for the
        # running one.
        here = loop_agent.follows or buffer.reading == lane.episode
        if lane.phase is not Phase.RUNNING or not here or (episode is not None and episode != lane.episode):
            self.actions_dropped += 1
            return False
        if lane.unused:
            self.actions_replaced += 1
        lane.action, lane.acted_at, lane.unused, lane.player = action, now, True, loop_agent.name
        return True

    @abc.abstractmethod
    def may_enter(self, loop_agent: LoopAgent, buffer: LaneBuffer) -> bool:
        """True if the lane of one of an agent's buffers has an episode for it, where it is in none."""

    def take(self, loop_agent: LoopAgent, index: int, *, repeats: bool = False) -> Told[Seen] | None:
        """Give out what an agent is to be told of a lane; None: it is in no episode, and there is none for it.

        Args:
            loop_agent: The agent.
            index: Which of its lanes.
            repeats: True if it is told its newest observation alone, where it is in an episode.
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
