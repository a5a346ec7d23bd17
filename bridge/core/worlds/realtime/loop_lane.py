"""Lanes of a real-time world: where each is in its episodes, the newest action of its agent, and who is told of it.

Who is told has a `LaneBuffer` of the lane. Each finished episode gives one record; of one that the agent was in, a Step
also returns the flags and the final observation, unless a Reset gives them up.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.core.encoding.frame_buffer import FrameBuffer, Observed, Told
from bridge.core.encoding.infos import split_intervention
from bridge.core.worlds.environment import Transition

__all__ = [
    "RETRY",
    "TRANSITIONS",
    "Ended",
    "LaneBuffer",
    "LaneEvent",
    "LoopAgent",
    "LoopLane",
    "Phase",
    "Seen",
]


class Phase(enum.Enum):
    """Where a lane is."""

    IDLE = "idle"
    """Nobody has asked for an episode yet."""
    RESETTING = "resetting"
    RUNNING = "running"
    FAILED = "failed"
    """The environment raised; it is reset again after a pause."""


class LaneEvent(enum.Enum):
    """An event of a lane."""

    ASKED = "a new episode was asked for"
    BEGAN = "reset returned"
    STEPPED = "a frame passed"
    ENDED = "a frame ended the episode"
    FAILED = "the environment raised"
    RETRIED = "the pause after a failure is over"


# A lane is moved by whoever wants an episode (ASKED), by the results of its jobs (BEGAN, STEPPED, ENDED, FAILED) and by
# `poll`, once the pause after a failure is over (RETRIED). Nothing leads back to IDLE: the first episode that was asked
# for leaves it for good.
#
# ASKED is allowed everywhere, because a Reset may come at any time (U-9). While a reset or a frame is under way, the
# environment cannot be called, so the lane stays RESETTING and busy until that call returns; its result has the number
# of an older episode and is dropped by `FrameLoop`, before it reaches this table: hence no row for a frame's result in
# RESETTING. ENDED leads to RESETTING also where no episode begins by itself: `asked` then stays False, and `poll` gives
# no reset out until ASKED. After a failure, a Reset does not wait for the end of the pause.
#
# An agent's part in an environment of several (`JointLoop`) only alternates between RESETTING and RUNNING: ENDED when
# its agent's episode ends or is cut off, BEGAN when the next one starts. What fails is the environment's own lane.
_I, _S, _R, _F = Phase.IDLE, Phase.RESETTING, Phase.RUNNING, Phase.FAILED
TRANSITIONS: Mapping[tuple[Phase, LaneEvent], Phase] = {
    (_I, LaneEvent.ASKED): _S,
    (_S, LaneEvent.ASKED): _S,
    (_S, LaneEvent.BEGAN): _R,
    (_S, LaneEvent.FAILED): _F,
    (_R, LaneEvent.ASKED): _S,
    (_R, LaneEvent.STEPPED): _R,
    (_R, LaneEvent.ENDED): _S,  # U-4
    (_R, LaneEvent.FAILED): _F,
    (_F, LaneEvent.ASKED): _S,
    (_F, LaneEvent.RETRIED): _S,
}

# Without a pause, an environment whose every reset raises would be reset in every frame.
RETRY = (0.1, 10.0)
"""Seconds until a failed lane is reset again: at first, and at most, doubling."""
CUT_OFF = Transition(None, truncated=True)
"""Ends an episode that the environment did not end."""


@dataclasses.dataclass(eq=False)
class Seen(Observed):
    """An observation of an agent."""

    observation: object
    info: Mapping[str, Any]
    """The info that came with it."""
    observed_at: float
    """When it was made, seconds of the server's clock."""
    error: str | None = None
    """Why its episode was cut off, where the environment failed."""


@dataclasses.dataclass(eq=False)
class Ended(Seen):
    """The end of an episode, with its final observation."""

    reward: float = 0.0
    """Its return: the sum of all its rewards, whether an agent saw them or not."""
    length: int = 0
    """Its number of frames."""
    terminated: bool = False
    """True if the environment terminated it."""
    truncated: bool = False
    """True if it was truncated, by the environment or because it was cut off."""
    finished: bool = True
    """False: somebody reset the lane in the midst of it."""


@dataclasses.dataclass(eq=False)
class LoopLane:
    """One environment and its running episode; or one agent's part in an environment of several (`JointLoop`)."""

    phase: Phase = Phase.IDLE
    episode: int = 0
    """The number of the running episode, or of the one that is being made."""
    begun: int = 0
    """How many episodes have begun: numbers of resets that failed, or were replaced, are of none."""
    busy: bool = False
    """True if a job is under way."""
    asked: bool = False
    """True if a reset is still to be given out as a job."""
    seed: int | None = None
    options: object = None
    newest: Seen = dataclasses.field(default_factory=lambda: Seen(0, 0, False, None, {}, 0.0))
    """The newest observation, of the running episode or the last one."""
    reward: float = 0.0
    """The return of the running episode so far."""
    length: int = 0
    frames: int = 0
    """Frames of all its episodes."""
    action: object = None
    acted_at: float = -math.inf
    """When the agent's action came; -inf: there is none in this episode."""
    unused: bool = False
    """True if no frame has used it yet."""
    player: str = ""
    """Who the action came from."""
    applied_by: str = ""
    """Who the action of the newest frame came from; empty: the default one was applied."""
    driven: bool = False
    """True if the world may not rest yet: the last that the environment did was the action of an agent or a person, or
    a step that failed, or the agents have left since."""
    applied_at: float = 0.0
    """When that frame took place."""
    failures: int = 0
    retry_at: float = 0.0
    action_delay: float = 0.0
    """Seconds from the arrival of the last applied action to the frame that applied it."""
    buffers: list[LaneBuffer] = dataclasses.field(default_factory=list)
    """A buffer for each agent that sees the lane."""

    @property
    def observation(self) -> object:
        """The newest observation's own; None: there was none yet."""
        return self.newest.observation

    def move(self, event: LaneEvent) -> None:
        """Follow the table."""
        self.phase = TRANSITIONS[self.phase, event]

    def begin(self, now: float, first: Transition) -> None:
        """Begin an episode with what its reset returned at `now`, seconds."""
        self.move(LaneEvent.BEGAN)
        self.begun += 1
        self.newest = Seen(self.episode, self.frames, False, first.observation, first.info, now)
        self.reward, self.length = 0.0, 0
        self.acted_at, self.unused, self.driven = -math.inf, False, False
        for buffer in self.buffers:
            buffer.began(self.newest)

    def add(self, now: float, step: Transition, frames: int = 1) -> None:
        """Add a step of so many frames that returned at `now`, seconds, to the episode, and end that where it did."""
        # An intervention is of this frame alone, but the newest info may be told twice, or frames later: buffers keep
        # it apart.
        info, intervention = split_intervention(step.info)
        # A person who takes over acts in the place of what the loop chose, which may have been the default action.
        self.driven = self.driven or bool(intervention)
        self.reward += step.reward
        self.length += frames
        self.frames += frames
        self.newest = Seen(self.episode, self.frames, True, step.observation, info, now)
        for buffer in self.buffers:
            buffer.add(self.newest, step.reward, frames, intervention)
        self.move(LaneEvent.ENDED if step.ended else LaneEvent.STEPPED)
        if step.ended:
            self.end(self.episode, step, finished=True)

    def end(self, episode: int, last: Transition = CUT_OFF, error: str | None = None, finished: bool = False) -> None:
        """Tell of the end of an episode.

        Args:
            episode: Its number in its environment.
            last: Has the flags: terminated, or truncated.
            error: Why it was cut off, where the environment raised; None: a new episode was asked for.
            finished: True if it counts as one that came to its end.
        """
        seen, info = self.newest, self.newest.info if error is None else {}
        final = episode, seen.passed, seen.of_frame, seen.observation, info, seen.observed_at, error
        ended = Ended(*final, self.reward, self.length, last.terminated, last.truncated, finished)
        for buffer in self.buffers:
            buffer.end(ended)


def _without_final(ended: Ended) -> Ended:
    return dataclasses.replace(ended, observation=None, info={})


class LaneBuffer(FrameBuffer[Seen, Ended]):
    """The news of one lane that one agent has not been told yet.

    Args:
        lane: The lane.
    """

    def __init__(self, lane: LoopLane) -> None:
        super().__init__(_without_final)
        self.lane = lane
        """The lane."""
        if lane.phase is Phase.RUNNING:
            self.newest = lane.newest
        self.entered = 0
        """The episode that the agent entered last; 0: none."""
        self.error: str | None = None
        """Why the lane has no episode, not told yet."""

    @property
    def follows_anew(self) -> bool:
        """True if the episode that runs began after the one that the agent was in, and no frame of it has passed."""
        lane = self.lane
        return lane.phase is Phase.RUNNING and not lane.length and 0 < self.entered < lane.episode

    def began(self, first: Seen) -> None:
        """An episode begins."""
        super().began(first)
        self.error = None

    def end(self, ended: Ended) -> None:
        """The running episode ended, or could not begin."""
        if ended.finished:
            # As of the end itself: who acted in the frames that the agent was not told.
            info = {**ended.info, **self._intervention} if self._intervention else ended.info
            self.add_record(ended.episode, dataclasses.replace(ended, info=info))
        # An agent that waits for an episode is told why there is none.
        if ended.error is not None and (self.reading != ended.episode or self.closing is not None):
            self.error = ended.error
        self.add(ended, frames=0, terminated=ended.terminated, truncated=ended.truncated)

    def abandon(self) -> None:
        """Drop the episode that the agent was in: it asked for a new one."""
        super().abandon()
        self.error = None

    def enter(self, first: Seen) -> Told[Seen]:
        """Enter the running episode."""
        if self.last is None:  # what passed before is not skipped: nobody was there to see it
            self._frames_told = first.passed - first.of_frame
        self.entered = first.episode
        return super().enter(first)

    def repeat(self) -> Told[Seen] | None:
        """Give out the newest observation of the agent's episode without its rewards, which stay for the next Step.

        So does an end that was not told yet: this gives its final observation, with both flags False.
        """
        seen = self.newest if self.closing is None else self.closing.observed
        return None if seen is None else self._tell(Told(seen))


class LoopAgent:
    """An agent that watches, or plays.

    Args:
        lanes: The lanes that it sees.
        player: True if its actions and resets count.
        follows: True if it is in every episode from its beginning, and is told nothing by its buffers.
    """

    def __init__(self, lanes: Sequence[LoopLane], player: bool, *, follows: bool = False) -> None:
        self.player = player
        self.name = "agent"
        """Who it is, for a recording."""
        self.follows = follows
        self.asked = False
        """True if it asked for an episode that it has not entered yet."""
        self.buffers = [LaneBuffer(lane) for lane in lanes]
        """Its news, a buffer for each lane."""
