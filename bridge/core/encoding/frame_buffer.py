"""A buffer of the frames of one lane, between a clock that goes on and a reader that takes them at its own pace.

Both ends of a real-time world have one for each lane. At the server the frames are what the environment returned, and
the reader is an agent that Steps; at the client they are what answers say, and the reader is the caller of `step`. A
slow reader has to be told as much as Gymnasium's `step` can tell: one observation, one reward, one pair of flags. So

- frames of an episode are merged: the newest observation, and the sums of rewards and frames;
- the first observation and the end of an episode are merged with nothing: each is told by a step of its own;
- the first observation is told without a reward, as by a reset. What the frames before it earned is told by the step
  after it, so rewards add up to the episode's return and are never attributed to another one;
- an episode that began and ended before anything of it was taken is left out, and only its record is told.
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
# Final observations may be large: of the records that wait, the newest keep theirs.
_MOST_FINALS = 8
_NOBODY: Mapping[str, Any] = {}


@dataclasses.dataclass(eq=False)
class Observed:
    """An observation of a lane; each end adds what it has of it."""

    episode: int
    """The number of its episode, from 1."""
    passed: int
    """The lane's frames up to it, those of episodes before too."""
    of_frame: bool
    """True if a frame made it, False if a reset did."""


S = TypeVar("S", bound=Observed)
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Told(Generic[S]):
    """What one step tells of a lane."""

    observed: S
    """The newest observation of the reader's episode, or the final one."""
    reward: float = 0.0
    """The sum of the rewards since the last step in this episode."""
    frames: int = 0
    """How many frames that sum is of."""
    intervention: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Who acted in the agent's place in some of them, and how; empty: nobody did."""
    terminated: bool = False
    truncated: bool = False


# A reader is in no episode (`reading` is 0), in the running one (`reading` is its number), or in one that is over and
# of which it was not told (`closing`). In the last case the lane may be several episodes further. The next `take` tells
# the end, with the rewards of that episode alone; the one after it enters the episode that runs by then.
#
# `newest` is of the running episode, and None where none runs. With `skips=False` there is one more case: the episode
# is over, and nothing of it was told. Then `newest` waits with `closing` and is told first.
class FrameBuffer(Generic[S, R]):
    """What passed in one lane and one reader was not told yet.

    Args:
        without_final: Returns a record of an ended episode without its final observation.
        skips: True if an episode is left out, but for its record, that ended before the reader entered it. False:
            its first observation and its end are told, one after the other; so it was asked for, and none begins until
            `abandon`.
    """

    def __init__(self, without_final: Callable[[R], R], *, skips: bool = True) -> None:
        self.reading = 0
        """The episode that the reader is in; 0: none, it enters one by the next `take`."""
        self.newest: S | None = None
        """The newest observation of the episode that runs; None: none runs."""
        self.closing: Told[S] | None = None
        """The end of the reader's episode, not told yet."""
        self.last: S | None = None
        """The observation that was told last, or given up."""
        self._without_final = without_final
        self._skips = skips
        self._frames_told = 0  # those whose own observation was told
        self._reward, self._frames, self._intervention = 0.0, 0, _NOBODY
        self._records: deque[tuple[int, R]] = deque(maxlen=_MOST_RECORDS)

    @property
    def frames_skipped(self) -> int:
        """Frames up to the observation told last whose own was not told; those of episodes left out count too."""
        return 0 if self.last is None else self.last.passed - self._frames_told

    @property
    def unseen(self) -> int:
        """Frames of the running episode, and of those left out before it, since what was told or waits as an end."""
        known = self.last if self.closing is None else self.closing.observed
        return 0 if known is None or self.newest is None else self.newest.passed - known.passed

    @property
    def waiting(self) -> list[S]:
        """The observations that steps will tell for the first time: at most two, in their order."""
        fresh = self.newest is not None and (not self.reading or self.closing is not None or self.unseen > 0)
        waiting = [self.newest] if self.newest is not None and fresh else []
        if self.closing is not None:
            waiting.insert(0 if self.reading else len(waiting), self.closing.observed)
        return waiting

    # What passes

    def began(self, first: S) -> None:
        """An episode begins: rewards from here on are its own."""
        self.newest = first
        self._clear()
        # Without an end of the episode before, which a server may not have told, the reader enters this one anyway.
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
        """Add frames of the running episode, and end it where a flag is set.

        Args:
            observed: The observation of the last of them.
            reward: Their rewards.
            frames: Their number; an episode may be cut off without one.
            intervention: Who acted in the agent's place in some of them, and how; empty: nobody did.
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
        # The end waits apart from what the lane does next, which may be episodes further when the reader takes it.
        if self.closing is None and (enters or self.reading == observed.episode):
            gained = self._reward, self._frames, self._intervention
            self.closing = Told(observed, *gained, terminated, truncated)
        if not enters:
            self.newest = None
        self._clear()

    def _clear(self) -> None:
        self._reward, self._frames, self._intervention = 0.0, 0, _NOBODY

    def add_record(self, episode: int, record: R) -> None:
        """Keep the record of an ended episode, until it is taken."""
        self._records.append((episode, record))
        if len(self._records) > _MOST_FINALS:
            number, old = self._records[-1 - _MOST_FINALS]
            self._records[-1 - _MOST_FINALS] = number, self._without_final(old)

    def abandon(self) -> None:
        """Take the reader out of its episode, whose end it is not told; it enters the one that runs, or the next."""
        if self.closing is not None:
            self.last = self.closing.observed  # its frames are skipped
            if not self.reading:  # its first observation waits with it
                self.newest = None
        self.reading, self.closing = 0, None

    # What is told

    def take(self) -> Told[S] | None:
        """Give out what came since the last `take`; None: the reader is in no episode, and none runs.

        Where nothing came, the newest observation is told again, without a reward.
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
        """Enter an episode with an observation of it. Its rewards so far stay for the step that follows."""
        self.reading = first.episode
        if self.closing is not None:  # the episode is over: its end comes next
            self.newest = None
        return self._tell(Told(first))

    def _tell(self, told: Told[S]) -> Told[S]:
        """Count an observation as told, and return what is told with it."""
        observed = told.observed
        # An observation that is told again is no further frame.
        if observed.of_frame and (self.last is None or observed.passed > self.last.passed):
            self._frames_told += 1
        self.last = observed
        return told

    def take_records(self, *, after_end: bool = False) -> list[R]:
        """Give out the records of ended episodes, each once, the oldest first.

        Args:
            after_end: True if those stay that are of the episode whose end waits, or of later ones.
        """
        waiting = math.inf if self.closing is None or not after_end else self.closing.observed.episode
        records = []
        while self._records and self._records[0][0] < waiting:
            records.append(self._records.popleft()[1])
        return records
