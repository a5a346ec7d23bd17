"""A buffer between a lane of a real-time world and an agent that steps at its own pace.

A `LaneBuffer` collects frames and ends of episodes with their episode's number, until the agent's next Step takes them.
Rewards are never attributed to another episode. Each finished episode gives one record; of one that the agent was in, a
Step also returns the flags and the final observation, unless a Reset gives them up. At most 65536 records wait.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from bridge.core.encoding.infos import merge_interventions

__all__ = ["Ended", "LaneBuffer", "ObservedLane", "Taken"]

# An agent that never Steps, such as a spectator whose program hangs, must not fill the server's memory.
_MOST_RECORDS = 65536
_MOST_FINALS = 8


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of an episode."""

    episode: int
    """Its number in its lane, from 1."""
    reward: float
    """Its return: the sum of all its rewards, whether an agent saw them or not."""
    length: int
    """Its number of frames."""
    terminated: bool
    """True if the environment terminated it."""
    truncated: bool
    """True if it was truncated, by the environment or because it was cut off."""
    observation: object
    """The final one."""
    info: Mapping[str, object]
    """The final one."""
    error: str | None = None
    """Why it was cut off, where the environment failed."""
    finished: bool = True
    """False: somebody reset the lane in the midst of it."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """The report of one Step on one lane."""

    observation: object
    """The newest of the agent's episode, or the final one."""
    info: Mapping[str, object]
    """The one that came with it."""
    observed_at: float
    """When the observation was made, seconds of the server's clock."""
    episode: int
    """The agent's episode."""
    reward: float = 0.0
    """The sum since the agent's last Step in this episode."""
    frames: int = 0
    """How many frames that sum is of."""
    terminated: bool = False
    truncated: bool = False
    error: str | None = None
    """Why the episode was cut off."""


class ObservedLane(Protocol):
    """What a buffer reads of its lane: the newest observation of the running episode."""

    episode: int
    """The episode's number, from 1."""
    observation: object
    info: Mapping[str, Any]
    """The info that came with it."""
    observed_at: float
    """When it was made, seconds of the server's clock."""


L = TypeVar("L", bound=ObservedLane)


# An agent is in no episode of its lane (`reading` is 0: its next Step enters one), in the running one (`reading` is its
# number), or in one that is over and of which it was not told (`closing`). In the last case the lane may be several
# episodes further. The next Step tells the end, with the rewards of that episode alone; the one after it enters the
# episode that runs by then, and the next one tells its rewards from its beginning. Ends of the episodes between are
# told by their records.
class LaneBuffer(Generic[L]):
    """The news of one lane that one agent has not been told yet.

    Args:
        lane: The lane, which has the newest observation of the running episode.
    """

    def __init__(self, lane: L) -> None:
        self.lane = lane
        """The lane."""
        self.reading = 0
        """The episode that the agent is in; 0: none, its next Step is a first one."""
        self.entered = 0
        """The episode that it entered last; 0: none."""
        self.closing: Taken | None = None
        """The end of the agent's episode, not told yet."""
        self.error: str | None = None
        """Why the lane has no episode, not told yet."""
        self.frames_skipped = 0
        """Frames since the agent first entered an episode whose observation no answer to it had; those of episodes that
        it never entered count too."""
        self.unseen = 0
        """Frames since the newest observation that the agent saw."""
        self._closing_unseen = 0
        self._reward, self._frames = 0.0, 0
        self._intervention: dict[str, object] = {}  # of those frames: who acted in the agent's place, and how
        self._records: deque[Ended] = deque(maxlen=_MOST_RECORDS)

    def began(self) -> None:
        """An episode begins: rewards from here on are its own."""
        self._reward, self._frames, self._intervention = 0.0, 0, {}
        self.error = None

    def frame(self, reward: float, intervention: dict[str, object]) -> None:
        """A frame of the running episode passed; `intervention` is empty where the agent acted itself."""
        self._reward += reward
        self._frames += 1
        if intervention:
            self._intervention = merge_interventions(self._intervention, intervention)
        # What passed before the agent first entered an episode is not skipped: nobody was there to see it.
        self.unseen += bool(self.entered)

    def ended(self, ended: Ended, observed_at: float) -> None:
        """The running episode ended; its last observation was made at `observed_at`."""
        if self._intervention:
            ended = dataclasses.replace(ended, info={**ended.info, **self._intervention})
        if ended.finished:
            self._record(ended)
        # Rewards and flags wait apart from the lane, which may be episodes further when the agent's next Step takes
        # them.
        if self.reading == ended.episode and self.closing is None:
            seen = ended.observation, ended.info, observed_at, ended.episode
            end = ended.terminated, ended.truncated, ended.error
            self.closing = Taken(*seen, self._reward, self._frames, *end)
            # Frames of later episodes are counted in `unseen` meanwhile.
            self._closing_unseen, self.unseen = self.unseen, 0
        elif ended.error is not None:
            # The agent waits for an episode: it is told why there is none.
            self.error = ended.error
        self._reward, self._frames, self._intervention = 0.0, 0, {}

    def _record(self, ended: Ended) -> None:
        self._records.append(ended)
        if len(self._records) > _MOST_FINALS:  # final observations may be large: the oldest that wait lose theirs
            old = self._records[-1 - _MOST_FINALS]
            self._records[-1 - _MOST_FINALS] = dataclasses.replace(old, observation=None, info={})

    def abandon(self) -> None:
        """Drop the episode that the agent was in: it asked for a new one."""
        if self.closing is not None:  # its final observation will be in no answer either
            self.frames_skipped += self._closing_unseen
        self.reading, self.closing, self.error = 0, None, None

    def enter(self) -> Taken:
        """Enter the running episode. Its rewards so far stay for the Step that follows."""
        self.reading = self.entered = self.lane.episode
        return self.repeat()

    def repeat(self) -> Taken:
        """Give out the newest observation of the agent's episode without its rewards, which stay for the next Step.

        So does an end that was not told yet: this gives its final observation, with both flags False.
        """
        if (end := self.closing) is not None:
            return Taken(end.observation, end.info, end.observed_at, end.episode)
        # The newest observation is that of a frame, or of the reset where no frame has passed since.
        self.frames_skipped += max(0, self.unseen - (self._frames > 0))
        self.unseen = 0
        return Taken(self.lane.observation, self.lane.info, self.lane.observed_at, self.reading)

    def take(self) -> Taken:
        """Give out what came since the last Step."""
        if self.closing is not None:
            # With `reading` at 0 the agent's next Step is a first one, of the episode that runs then.
            told, self.reading, self.closing = self.closing, 0, None
            self.frames_skipped += max(0, self._closing_unseen - 1)  # the newest one is in this answer
            return told
        self.frames_skipped += max(0, self.unseen - 1)
        self.unseen = 0
        lane, reward, frames = self.lane, self._reward, self._frames
        info = {**lane.info, **self._intervention} if self._intervention else lane.info
        self._reward, self._frames, self._intervention = 0.0, 0, {}
        return Taken(lane.observation, info, lane.observed_at, self.reading, reward, frames)

    def take_records(self) -> list[Ended]:
        """Give out the ends of all finished episodes that were not given out before, the oldest first."""
        records, self._records = list(self._records), deque(maxlen=_MOST_RECORDS)
        return records
