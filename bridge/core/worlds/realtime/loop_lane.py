"""Lanes of a real-time world: the state of each lane's episode, the newest action, and the buffers of its agents.

An agent that sees the lane has a `LaneBuffer`. Each finished episode gives one record. If the agent was in the episode,
a Step also returns the flags and the final observation, unless a Reset comes first.
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
    """The state of a lane."""

    IDLE = "idle"
    """No episode has been asked for yet."""
    RESETTING = "resetting"
    RUNNING = "running"
    FAILED = "failed"
    """The environment raised. It is reset again after a pause."""


class LaneEvent(enum.Enum):
    """An event of a lane."""

    ASKED = "a new episode was asked for"
    BEGAN = "reset returned"
    STEPPED = "a frame passed"
    ENDED = "a frame ended the episode"
    FAILED = "the environment raised"
    RETRIED = "the pause after a failure is over"


# The events come from requests for an episode (ASKED), from the results of jobs (BEGAN, STEPPED, ENDED, FAILED), and
# from `poll` once the pause after a failure is over (RETRIED). No event leads back to IDLE.
#
# ASKED is allowed in every state, because a Reset may arrive at any time (U-9). If a reset or a frame is running then,
# the lane is RESETTING and busy until that call returns. The result has the number of an older episode, so `FrameLoop`
# drops it before it reaches this table: hence there is no row for a frame's result in RESETTING. ENDED leads to
# RESETTING even without autoreset: then `asked` stays False, and `poll` returns no reset until ASKED. After a failure,
# a Reset does not wait for the end of the pause.
#
# The lane of one agent of several (`JointLoop.agent_lanes`) only alternates between RESETTING and RUNNING: ENDED when
# the agent's episode ends or is cut off, BEGAN when the next one starts. Failures belong to the environment's lane.
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

# Without a pause, an environment that raises in every reset would be reset in every frame.
RETRY = (0.1, 10.0)
"""Seconds until a failed lane is reset again: the first and the longest pause; pauses double."""
CUT_OFF = Transition(None, truncated=True)
"""Ends an episode that the environment did not end."""


@dataclasses.dataclass(eq=False)
class Seen(Observed):
    """An observation of an agent."""

    observation: object
    info: Mapping[str, Any]
    """The info returned with the observation."""
    observed_at: float
    """When it was observed, in seconds of the server's clock."""
    error: str | None = None
    """The error that ended its episode; None: the environment did not fail."""


@dataclasses.dataclass(eq=False)
class Ended(Seen):
    """The end of an episode, with its final observation."""

    reward: float = 0.0
    """The return of the episode: the sum of all rewards, whether an agent saw them or not."""
    length: int = 0
    """The number of frames."""
    terminated: bool = False
    """True if the environment terminated it."""
    truncated: bool = False
    """True if it was truncated, by the environment or because it was cut off."""
    finished: bool = True
    """False: a reset cut it off."""


@dataclasses.dataclass(eq=False)
class LoopLane:
    """One environment and its running episode, or one agent of several in an environment (`JointLoop.agent_lanes`)."""

    phase: Phase = Phase.IDLE
    episode: int = 0
    """The number of the running episode, or of the one whose reset is pending."""
    begun: int = 0
    """How many episodes have begun. `episode` also counts resets that failed or were replaced."""
    busy: bool = False
    """True while a job runs."""
    asked: bool = False
    """True if `poll` has to return a reset."""
    seed: int | None = None
    options: object = None
    newest: Seen = dataclasses.field(default_factory=lambda: Seen(0, 0, False, None, {}, 0.0))
    """The newest observation of the running or the last episode."""
    reward: float = 0.0
    """The return of the running episode so far."""
    length: int = 0
    frames: int = 0
    """Frames of all episodes."""
    action: object = None
    acted_at: float = -math.inf
    """When the agent's action arrived; -inf: there is no action in this episode."""
    unused: bool = False
    """True if no frame has used the action yet."""
    player: str = ""
    """The player who sent the action."""
    applied_by: str = ""
    """The player whose action the newest frame used; empty: the default action."""
    driven: bool = False
    """True if the world may not rest yet: the last step used an action of an agent or a person or has failed, or the
    agents have left since."""
    applied_at: float = 0.0
    """The time of the newest frame."""
    failures: int = 0
    retry_at: float = 0.0
    action_delay: float = 0.0
    """Seconds from the arrival of the last applied action to the frame that applied it."""
    buffers: list[LaneBuffer] = dataclasses.field(default_factory=list)
    """The buffers of the agents that see the lane."""

    @property
    def observation(self) -> object:
        """The newest observation; None: there is none yet."""
        return self.newest.observation

    def move(self, event: LaneEvent) -> None:
        """Change the phase by the table."""
        self.phase = TRANSITIONS[self.phase, event]

    def begin(self, now: float, first: Transition) -> None:
        """Begin an episode with the result of a reset, which returned at `now`, in seconds."""
        self.move(LaneEvent.BEGAN)
        self.begun += 1
        self.newest = Seen(self.episode, self.frames, False, first.observation, first.info, now)
        self.reward, self.length = 0.0, 0
        self.acted_at, self.unused, self.driven = -math.inf, False, False
        for buffer in self.buffers:
            buffer.began(self.newest)

    def add(self, now: float, step: Transition, frames: int = 1) -> None:
        """Add the result of a step over `frames` frames that returned at `now`; end the episode if it has ended."""
        # Buffers keep the intervention apart, because it belongs to this frame alone, and the newest info may be
        # reported twice, or frames later.
        info, intervention = split_intervention(step.info)
        # A person who takes over may have replaced a default action.
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
        """Report the end of an episode to the buffers.

        Args:
            episode: The number of the episode.
            last: The transition with the flags `terminated` and `truncated`.
            error: The error of the environment; None: it did not raise.
            finished: False if a reset cut the episode off.
        """
        seen, info = self.newest, self.newest.info if error is None else {}
        final = episode, seen.passed, seen.of_frame, seen.observation, info, seen.observed_at, error
        ended = Ended(*final, self.reward, self.length, last.terminated, last.truncated, finished)
        for buffer in self.buffers:
            buffer.end(ended)


def _without_final(ended: Ended) -> Ended:
    return dataclasses.replace(ended, observation=None, info={})


class LaneBuffer(FrameBuffer[Seen, Ended]):
    """What happened in one lane and was not yet reported to one agent.

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
        """The unreported error because of which the lane has no episode; None: no error."""

    @property
    def follows_anew(self) -> bool:
        """True if the running episode began after the agent's last one, and has had no frame yet."""
        lane = self.lane
        return lane.phase is Phase.RUNNING and not lane.length and 0 < self.entered < lane.episode

    def began(self, first: Seen) -> None:
        """Handle the begin of an episode."""
        super().began(first)
        self.error = None

    def end(self, ended: Ended) -> None:
        """Handle the end of the running episode, or an episode that could not begin."""
        if ended.finished:
            # The record has the interventions of all unreported frames, like the end itself.
            info = {**ended.info, **self._intervention} if self._intervention else ended.info
            self.add_record(ended.episode, dataclasses.replace(ended, info=info))
        # Keep the error for an agent that waits for an episode.
        if ended.error is not None and (self.reading != ended.episode or self.closing is not None):
            self.error = ended.error
        self.add(ended, frames=0, terminated=ended.terminated, truncated=ended.truncated)

    def abandon(self) -> None:
        """Leave the agent's episode, because it asked for a new one."""
        super().abandon()
        self.error = None

    def enter(self, first: Seen) -> Told[Seen]:
        """Enter the running episode."""
        if self.last is None:  # frames from before the agent joined do not count as skipped
            self._frames_told = first.passed - first.of_frame
        self.entered = first.episode
        return super().enter(first)

    def repeat(self) -> Told[Seen] | None:
        """Return the newest observation of the agent's episode; its rewards stay for the next Step.

        An unreported end stays for the next Step too: this returns the final observation with both flags False.
        """
        seen = self.newest if self.closing is None else self.closing.observed
        return None if seen is None else self._tell(Told(seen))


class LoopAgent:
    """A client of the loop, which plays or watches.

    Args:
        lanes: The lanes that it sees.
        player: True if its actions and resets count.
        follows: True for a player in this process: it is in every episode from the beginning, and does not use buffers.
    """

    def __init__(self, lanes: Sequence[LoopLane], player: bool, *, follows: bool = False) -> None:
        self.player = player
        self.name = "agent"
        """The name of the player, for recordings."""
        self.follows = follows
        self.asked = False
        """True if it has asked for an episode and has not entered one since."""
        self.buffers = [LaneBuffer(lane) for lane in lanes]
        """Its buffers, one for each lane."""
