"""A buffer of the frames of one lane, between a clock that keeps running and a reader with its own pace.

Both ends of a real-time world have one buffer for each lane. At the server, frames are what the environment
returned, and the reader is an agent that sends Steps. At the client, frames are the contents of answers, and the reader
is the caller of `step`. One `step` of Gymnasium returns one observation, one reward and one pair of flags. So for a
slow reader:

- frames of an episode are merged: the newest observation, and the sums of rewards and frames;
- the first observation and the end of an episode are not merged: each is returned by a step of its own;
- the first observation is returned without a reward, as by a reset. The rewards of the frames before it are returned
  by the step after it, so rewards add up to the episode's return and are never attributed to another episode;
- an episode that began and ended before the reader took any part of it is skipped, and only its record is returned.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from bridge.core.encoding.infos import merge_interventions

__all__ = ["FrameBuffer", "Observed", "Told"]

# A reader that takes nothing, such as a spectator whose program hangs, must not fill the memory.
_MOST_RECORDS = 65536
# Final observations may be large: only the newest waiting records keep theirs.
_MOST_FINALS = 8
_NOBODY: Mapping[str, Any] = {}


@dataclasses.dataclass(eq=False)
class Observed:
    """An observation of a lane. Each end adds fields of its own."""

    episode: int
    """The number of the observation's episode, from 1."""
    passed: int
    """The lane's frames up to this observation, including those of earlier episodes."""
    of_frame: bool
    """True if the observation is of a frame, False if it is of a reset."""


S = TypeVar("S", bound=Observed)
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Told(Generic[S]):
    """What one step returns for a lane."""

    observed: S
    """The newest observation of the reader's episode, or the final one."""
    reward: float = 0.0
    """The sum of the rewards since the last step in this episode."""
    frames: int = 0
    """The number of frames in that sum."""
    intervention: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Who acted in the agent's place in some of the frames, and how; empty: nobody did."""
    terminated: bool = False
    truncated: bool = False


# A reader is in no episode (`reading` is 0), in the running episode (`reading` is its number), or in an episode that
# has ended and whose end the reader has not taken (`closing`). In the last case the lane may be several episodes
# further. The next `take` returns the end, with the rewards of that episode only; the `take` after it enters the
# running episode.
#
# `newest` is an observation of the running episode, and None if none runs. With `skips=False` there is one more case:
# the episode has ended, and the reader has taken nothing of it. Then `newest` waits with `closing` and is returned
# first.
class FrameBuffer(Generic[S, R]):
    """The frames of one lane that one reader has not taken yet.

    Args:
        without_final: Returns a record of an ended episode without its final observation.
        skips: True: an episode that ended before the reader entered it is skipped, except for its record. False: its
            first observation and its end are returned, one after the other. The reader asked for this episode, and no
            other begins until `abandon`.
    """

    def __init__(self, without_final: Callable[[R], R], *, skips: bool = True) -> None:
        self.reading = 0
        """The episode that the reader is in; 0: none, the next `take` enters one."""
        self.newest: S | None = None
        """The newest observation of the running episode; None: no episode runs."""
        self.closing: Told[S] | None = None
        """The end of the reader's episode, if the reader has not taken it yet."""
        self.last: S | None = None
        """The observation that was returned last, or abandoned."""
        self._without_final = without_final
        self._skips = skips
        self._frames_told = 0  # frames whose own observation was returned
        self._reward, self._frames, self._intervention = 0.0, 0, _NOBODY
        self._records: deque[tuple[int, R]] = deque(maxlen=_MOST_RECORDS)

    @property
    def frames_skipped(self) -> int:
        """Frames up to the last returned observation that were merged into others, or were of skipped episodes."""
        return 0 if self.last is None else self.last.passed - self._frames_told

    @property
    def unseen(self) -> int:
        """Frames of the running episode, and of skipped ones before it, since the last return or the waiting end."""
        known = self.last if self.closing is None else self.closing.observed
        return 0 if known is None or self.newest is None else self.newest.passed - known.passed

    @property
    def waiting(self) -> list[S]:
        """The observations that steps will return for the first time: at most two, in order."""
        fresh = self.newest is not None and (not self.reading or self.closing is not None or self.unseen > 0)
        waiting = [self.newest] if self.newest is not None and fresh else []
        if self.closing is not None:
            waiting.insert(0 if self.reading else len(waiting), self.closing.observed)
        return waiting

    # Frames that come in

    def began(self, first: S) -> None:
        """Begin an episode: rewards from here on are of this episode."""
        self.newest = first
        self._clear()
        # If the end of the episode before is missing, which a server may leave out, the reader enters this one anyway.
        if self.closing is None:
            self.reading = 0

    def add(
        self,
        observed: S,
        reward: float = 0.0,
        frames: int = 1,
        intervention: Mapping[str, Any] = _NOBODY,
        *,
        terminated: bool = False,
        truncated: bool = False,
    ) -> None:
        """Add frames of the running episode, and end the episode if a flag is set.

        Args:
            observed: The observation of the last frame.
            reward: The sum of the frames' rewards.
            frames: The number of frames; 0 if the episode was cut off without one.
            intervention: Who acted in the agent's place in some of the frames, and how; empty: nobody did.
            terminated: True if the environment terminated the episode.
            truncated: True if the episode was truncated, by the environment or because it was cut off.
        """
        self._reward += reward
        self._frames += frames
        if intervention:
            self._intervention = merge_interventions(self._intervention, intervention)
        if not (terminated or truncated):
            self.newest = observed
            return
        enters = not (self._skips or self.reading)
        # The end is kept apart from the next episodes: the lane may be several further when the reader takes it.
        if self.closing is None and (enters or self.reading == observed.episode):
            gained = self._reward, self._frames, self._intervention
            self.closing = Told(observed, *gained, terminated, truncated)
        if not enters:
            self.newest = None
        self._clear()

    def _clear(self) -> None:
        self._reward, self._frames, self._intervention = 0.0, 0, _NOBODY

    def add_record(self, episode: int, record: R) -> None:
        """Keep the record of an ended episode until the reader takes it."""
        self._records.append((episode, record))
        if len(self._records) > _MOST_FINALS:
            number, old = self._records[-1 - _MOST_FINALS]
            self._records[-1 - _MOST_FINALS] = number, self._without_final(old)

    def abandon(self) -> None:
        """Take the reader out of its episode, without its end. The next `take` enters a running or later episode."""
        if self.closing is not None:
            self.last = self.closing.observed  # frames up to here count as skipped
            if not self.reading:  # the first observation waits together with the end
                self.newest = None
        self.reading, self.closing = 0, None

    # Frames that the reader takes

    def take(self) -> Told[S] | None:
        """Return the frames since the last `take`; None: the reader is in no episode, and none runs.

        If no frame came, return the newest observation again, without a reward.
        """
        if not self.reading and self.newest is not None:
            return self.enter(self.newest)
        if self.closing is not None:
            told, self.closing, self.reading = self.closing, None, 0
            return self._tell(told)
        if self.newest is None:
            return None
        told = Told(self.newest, self._reward, self._frames, self._intervention)
        self._clear()
        return self._tell(told)

    def enter(self, first: S) -> Told[S]:
        """Enter an episode with its observation. Its rewards so far are returned by the next step."""
        self.reading = first.episode
        if self.closing is not None:  # the episode has ended: the end is returned next
            self.newest = None
        return self._tell(Told(first))

    def _tell(self, told: Told[S]) -> Told[S]:
        """Count an observation as returned, and return `told`."""
        observed = told.observed
        # An observation that is returned again is not another frame.
        if observed.of_frame and (self.last is None or observed.passed > self.last.passed):
            self._frames_told += 1
        self.last = observed
        return told

    def take_records(self, *, after_end: bool = False) -> list[R]:
        """Return the records of ended episodes, each once, the oldest first.

        Args:
            after_end: True: keep the records of the episode whose end waits, and of later ones.
        """
        waiting = math.inf if self.closing is None or not after_end else self.closing.observed.episode
        records = []
        while self._records and self._records[0][0] < waiting:
            records.append(self._records.popleft()[1])
        return records
