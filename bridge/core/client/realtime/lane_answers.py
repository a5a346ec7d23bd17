"""Holds the answers of one environment whose Steps are in flight, until the next `step` takes them.

The server answers a Step for each frame, whether the caller steps or not. A slow caller therefore finds several
answers, and must be told as much as Gymnasium's `step` can tell: one observation, one reward, one pair of flags. So

- answers within an episode are merged: the newest observation, the sum of rewards and frames;
- the first observation of an episode and its end are never merged with others: each is told by a step of its own;
- an episode of a lane that began and ended between two steps is left out, and only its record is told.

At most two parts wait, however slow the caller is: an end, and a first observation before or after it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from bridge.core.client.realtime.unseen_frames import Shown, UnseenFrames
from bridge.core.encoding.infos import merge_interventions
from bridge.core.encoding.names import TIMING
from bridge.core.encoding.tensors import Array
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["Gain", "LaneAnswers", "Part"]

_INDEX = {name: index for index, name in enumerate(TIMING)}
# Ended episodes that wait for the next step, and those of them that keep their final observation.
_MOST_RECORDS, _MOST_FINALS = 65536, 8


@dataclasses.dataclass(frozen=True)
class Gain:
    """The rewards, counts and infos of some frames."""

    reward: float = 0.0
    """The sum of all."""
    frames: int = 0
    """Their number."""
    intervention: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Who acted in the agent's place in some of them, and how; empty: nobody did."""

    def __add__(self, later: Gain) -> Gain:
        """Return what these frames and later ones brought."""
        intervention = merge_interventions(self.intervention, later.intervention)
        return Gain(self.reward + later.reward, self.frames + later.frames, intervention)


_NOTHING = Gain()


@dataclasses.dataclass
class Part:
    """An answer of one environment, or several answers that were put together."""

    message: pb.EnvironmentResponse
    """The newest of them, with the observation."""
    timing: Array
    """Its times."""
    gain: Gain = _NOTHING
    """The rewards, counts and infos of all of them."""
    terminated: bool = False
    truncated: bool = False
    resetting: bool = False
    """True if there is no observation."""
    first: bool = False
    """True if it is the first one of an episode."""
    shown: Shown | None = None
    """Its observation; None: it was not counted yet."""

    @property
    def ended(self) -> bool:
        """True if it ends the episode."""
        return self.terminated or self.truncated

    @property
    def episode(self) -> int:
        """The number of its episode."""
        return int(self.timing[_INDEX["episode"]])


class LaneAnswers:
    """Holds the answers of one lane, of a single environment, or of one agent.

    Args:
        skips: True for lanes: an episode that ended before its first observation was told is left out, but for its
            record.
    """

    def __init__(self, skips: bool) -> None:
        self.queue: deque[Part] = deque()
        """The results to return: at most two, one of which begins or ends an episode."""
        self.told: Part | None = None
        """The last result of the episode that the caller is in; None: it is in none."""
        self.over = False
        """True if the newest answer ended the episode."""
        self._skips = skips
        self._unseen = UnseenFrames()
        self._records: list[dict[str, Any]] = []
        self._since = 0
        self._entered = 0  # the episode of the newest answer; 0: the next one is the first of its episode
        self._carried = _NOTHING  # what passed before the first observation of that episode

    @property
    def episode(self) -> int:
        """The number of the episode that the caller is in; 0: it is in none."""
        return 0 if self.told is None else self.told.episode

    # What comes

    def begin(self, since: int) -> None:
        """Give up what has come, and leave out answers to requests with a number below `since`."""
        self._since = since
        self.queue.clear()
        self.told = None
        self.restart()

    def restart(self) -> None:
        """Expect the first answer of an episode."""
        self.over = False
        self._entered, self._carried = 0, _NOTHING

    def push(self, part: Part, number: int, *, counts: bool = True) -> bool:
        """Take what an answer says; return whether it is told, alone or with others.

        Args:
            part: What it says.
            number: That of its request.
            counts: True if it may be told.
        """
        timing = part.timing
        shown = self._unseen.arrived(
            part.episode, float(timing[_INDEX["observed_at"]]), part.gain.frames, int(timing[_INDEX["frames_skipped"]])
        )
        # After `arrived`, because its frames count as unseen too.
        if number < self._since or not counts:
            return False
        part.shown, part.first = shown, part.episode != self._entered
        self.over, self._entered = part.ended, 0 if part.ended else part.episode
        if part.first:
            self._carried = _NOTHING
        self._add(part)
        return True

    def _add(self, part: Part) -> None:
        """Append a part to the queue, or merge it with the last one there.

        After each call the queue holds at most two parts: one of a running episode, or the first part of an episode, or
        an end; or an end and the first part of the episode after it, or a first part and the end of the same episode.
        """
        last = self.queue[-1] if self.queue else None
        # The caller has not taken the episode's first observation yet: this newer one is told in its place, and it is
        # still the episode's first step to the caller.
        if last is not None and last.first and not part.ended:
            part.first = True
        # The episode began and ended before the caller took anything of it. A lane leaves it out; its record is kept
        # by `note_record`. A single environment or agent was asked to play it by a Reset, and is told its end.
        elif last is not None and last.first and self._skips:
            self.queue.pop()
            return
        # A reset gives no reward in Gymnasium. What the frames before the first observation earned is kept, and added
        # to the step after it, so that the rewards that a caller gets add up to the episode's return.
        if part.first and not part.ended:
            self._carried, part.gain = self._carried + part.gain, _NOTHING
        elif not part.first:
            part.gain, self._carried = self._carried + part.gain, _NOTHING
        if last is None:
            self._add_first(part)
        elif last.first and part.first:
            self.queue[-1] = part
        # An end is told by a step of its own: neither the next episode nor later frames may hide it. A first
        # observation is too, where an end follows on it.
        elif last.ended or last.first:
            self.queue.append(part)
        # A slow caller: both are of the running episode. It gets the newest observation and the sum of the rewards.
        else:
            part.gain = last.gain + part.gain
            self.queue[-1] = part

    def _add_first(self, part: Part) -> None:
        """Append a part to an empty queue.

        The server answers with the observation that was told before where no frame has passed. Such an answer only
        refreshes the message and the times of what was told; it must not look like a step.
        """
        told = self.told
        if told is not None and told.shown is part.shown and not part.ended and not part.gain.frames:
            told.message, told.timing = part.message, part.timing
        else:
            self.queue.append(part)

    def note_record(self, record: dict[str, Any]) -> None:
        """Take the record of an ended episode."""
        self._records.append(record)
        del self._records[:-_MOST_RECORDS]
        for old in self._records[:-_MOST_FINALS]:
            old.pop("final_obs", None)
            old.pop("final_info", None)

    # What is told

    def tell(self, message: pb.EnvironmentResponse, timing: Array, *, pops: bool) -> Part:
        """Give out what there is.

        Args:
            message: The newest answer.
            timing: What it says of this lane's times.
            pops: True if something new may be told.
        """
        new = bool(self.queue) and pops
        # Where nothing new may be told, the observation that was told last is told again, without a reward.
        part = self.queue.popleft() if new else self.told
        timing = (timing if part is None else part.timing).copy()
        skipped = int(timing[_INDEX["frames_skipped"]])
        if part is None or part.shown is None:
            timing[_INDEX["frames_skipped"]] = self._unseen.so_far(skipped)
            return Part(message, timing, resetting=True)
        timing[_INDEX["frames_skipped"]] = self._unseen.told(part.shown, skipped)
        if not new:
            return Part(part.message, timing)
        self.told = None if part.ended else part
        return dataclasses.replace(part, timing=timing)

    def take_records(self) -> list[dict[str, Any]]:
        """Give out the records of ended episodes, each once, but not before the end that waits."""
        waiting = next((part.episode for part in self.queue if part.ended), math.inf)
        told = [record for record in self._records if record["episode"] < waiting]
        self._records = [record for record in self._records if record["episode"] >= waiting]
        return told
