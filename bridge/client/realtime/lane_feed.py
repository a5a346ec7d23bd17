"""Holds the answers of one environment whose Steps are in flight, until the next `step` takes them.

Rewards and frames of answers that nobody took are added up. The first observation of an episode and its end are each
told by a step of their own. Of lanes, an episode that ended before its first observation was told leaves its record.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from bridge.client.realtime.unseen_frames import Shown, UnseenFrames
from bridge.encoding.interventions import merge_interventions
from bridge.encoding.names import TIMING
from bridge.encoding.tensors import Array
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["LaneFeed", "Part", "Told"]

_INDEX = {name: index for index, name in enumerate(TIMING)}
# Ended episodes that wait for the next step, and those of them that keep their final observation.
_MOST_RECORDS, _MOST_FINALS = 65536, 8


Owed = tuple[float, int, Mapping[str, Any]]
_NOTHING: Owed = 0.0, 0, {}


def _sum(earlier: Owed, later: Owed) -> Owed:
    """Return rewards, frames and interventions of two spans of frames as those of one."""
    return earlier[0] + later[0], earlier[1] + later[1], merge_interventions(earlier[2], later[2])


@dataclasses.dataclass
class Part:
    """An answer of one environment, or several answers that were put together."""

    message: pb.EnvironmentResponse
    """The newest of them, with the observation."""
    timing: Array
    """Its times."""
    reward: float
    """The sum of all."""
    frames: int
    """Of how many frames that is."""
    terminated: bool = False
    truncated: bool = False
    intervention: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Who acted in the agent's place in some of these frames, and how; empty: nobody did."""
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


@dataclasses.dataclass(frozen=True)
class Told:
    """The result of one step of one environment."""

    message: pb.EnvironmentResponse
    """The answer with its observation."""
    timing: Array
    reward: float = 0.0
    frames: int = 0
    terminated: bool = False
    truncated: bool = False
    resetting: bool = False
    """True if it has no observation."""
    intervention: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """As in `Part`."""


class LaneFeed:
    """Holds the answers of one lane, of a single environment, or of one agent.

    Args:
        skips: Whether an episode that ended before its first observation was told is left out, but for its record.
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
        self._owed: Owed = _NOTHING  # what passed before the first observation of that episode

    @property
    def available(self) -> bool:
        """True if there is an observation to tell, new or not."""
        return bool(self.queue) or self.told is not None

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
        self._entered, self._owed = 0, _NOTHING

    def push(self, part: Part, number: int, *, counts: bool = True) -> bool:
        """Take what an answer says; return whether it is told, alone or with others.

        Args:
            part: What it says.
            number: That of its request.
            counts: Whether it may be told.
        """
        timing = part.timing
        shown = self._unseen.arrived(
            part.episode, float(timing[_INDEX["observed_at"]]), part.frames, int(timing[_INDEX["frames_skipped"]])
        )
        if number < self._since or not counts:
            return False
        part.shown, part.first = shown, part.episode != self._entered
        self.over, self._entered = part.ended, 0 if part.ended else part.episode
        if part.first:
            self._owed = _NOTHING
        self._add(part)
        return True

    def _add(self, part: Part) -> None:
        """Put a part behind what waits, or together with it."""
        last = self.queue[-1] if self.queue else None
        if last is not None and last.first and not part.ended:
            part.first = True  # the first observation is the newest
        elif last is not None and last.first and self._skips:
            self.queue.pop()  # an episode that nobody was in
            return
        if part.first and not part.ended:
            self._owed = _sum(self._owed, (part.reward, part.frames, part.intervention))
            part.reward, part.frames, part.intervention = _NOTHING
        elif not part.first:
            part.reward, part.frames, part.intervention = _sum(
                self._owed, (part.reward, part.frames, part.intervention)
            )
            self._owed = _NOTHING
        if last is None:
            self._add_first(part)
        elif last.first and part.first:
            self.queue[-1] = part
        elif last.ended or last.first:
            self.queue.append(part)
        else:
            part.reward, part.frames, part.intervention = _sum(
                (last.reward, last.frames, last.intervention), (part.reward, part.frames, part.intervention)
            )
            self.queue[-1] = part

    def _add_first(self, part: Part) -> None:
        """Have a part wait, behind nothing; where it says nothing new it stands for what was told."""
        told = self.told
        if told is not None and told.shown is part.shown and not part.ended and not part.frames:
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

    def tell(self, message: pb.EnvironmentResponse, timing: Array, *, pops: bool) -> Told:
        """Give out what there is.

        Args:
            message: The newest answer.
            timing: What it says of this lane's times.
            pops: Whether something new may be told.
        """
        new = bool(self.queue) and pops
        part = self.queue.popleft() if new else self.told
        timing = (timing if part is None else part.timing).copy()
        skipped = int(timing[_INDEX["frames_skipped"]])
        if part is None or part.shown is None:
            timing[_INDEX["frames_skipped"]] = self._unseen.so_far(skipped)
            return Told(message, timing, resetting=True)
        timing[_INDEX["frames_skipped"]] = self._unseen.told(part.shown, skipped)
        if not new:
            return Told(part.message, timing)
        self.told = None if part.ended else part
        return Told(
            part.message, timing, part.reward, part.frames, part.terminated, part.truncated, False, part.intervention
        )

    def take_records(self) -> list[dict[str, Any]]:
        """Give out the records of ended episodes, each once, but not before the end that waits."""
        waiting = next((part.episode for part in self.queue if part.ended), math.inf)
        told = [record for record in self._records if record["episode"] < waiting]
        self._records = [record for record in self._records if record["episode"] >= waiting]
        return told
