"""Holds the answers of one environment whose Steps are in flight, until the next `step` takes them.

The server answers a Step for each frame, whether the caller steps or not. `LaneAnswers` is the buffer of these frames:
it adds which answers count, and how many frames nobody saw. A lane leaves an episode out that ended before its first
observation was told; a single environment, or an agent of several, was asked to play it by a Reset, and is told of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.core.encoding.frame_buffer import FrameBuffer, Observed, Told
from bridge.core.encoding.names import TIMING_INDEX
from bridge.core.encoding.tensors import Array
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["LaneAnswers", "Shown"]

_OBSERVED, _EPISODE, _SKIPPED = (TIMING_INDEX[name] for name in ("observed_at", "episode", "frames_skipped"))
_NO_MESSAGE = pb.EnvironmentResponse()


@dataclasses.dataclass(eq=False)
class Shown(Observed):
    """An observation that was in one answer or more. A first one is taken to be of a reset, until more is known."""

    message: pb.EnvironmentResponse
    """The newest answer with it."""
    timing: Array
    """That answer's times of the lane."""
    told: bool = False
    """True if a `step` or `reset` returned it."""


def _without_final(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("final_obs", "final_info")}


class LaneAnswers(FrameBuffer[Shown, dict[str, Any]]):
    """Holds the answers of one lane, of a single environment, or of one agent.

    The server counts the frames that it sent in no answer. Those that were in an answer which nobody took come on top.

    Args:
        skips: True for lanes: an episode that ended before its first observation was told is left out, but for its
            record.
    """

    def __init__(self, *, skips: bool) -> None:
        super().__init__(_without_final, skips=skips)
        self.over = False
        """True if the newest answer ended the episode."""
        self._since = 0
        self._episode = 0  # the episode of the newest answer; 0: the next one is the first of its episode
        self._sent = 0  # frames that were in answers
        self._arrived: Shown | None = None  # the newest observation, whether it counts or not
        # Of an episode whose first observation is not known to be of a frame: that one, and those since.
        self._unsure: list[Shown] = []

    def begin(self, since: int) -> None:
        """Give up what has come, and leave out answers to requests with a number below `since`."""
        self._since = since
        self.abandon()
        self.newest = None
        self.restart()
        self._release()

    def restart(self) -> None:
        """Expect the first answer of an episode."""
        self.over, self._episode = False, 0

    def push(
        self,
        message: pb.EnvironmentResponse,
        timing: Array,
        reward: float,
        frames: int,
        intervention: Mapping[str, Any],
        terminated: bool,
        truncated: bool,
        *,
        number: int,
        counts: bool = True,
    ) -> bool:
        """Take what an answer says; return whether it is told, alone or with others.

        Args:
            message: The answer.
            timing: Its times of this lane.
            reward: The sum of the rewards of its frames.
            frames: Their number.
            intervention: Who acted in the agent's place in some of them, and how; empty: nobody did.
            terminated: True if the environment terminated the episode.
            truncated: True if the episode was truncated.
            number: The number of its request.
            counts: True if it may be told.
        """
        ends = terminated or truncated
        shown = self._count(message, timing, frames, ends)
        # After `_count`, because its frames count as unseen too.
        counts = counts and number >= self._since
        if counts:
            if shown.episode != self._episode:
                self.began(shown)
                if ends:  # it has no first observation to tell before
                    self.newest = None
            self.over, self._episode = ends, 0 if ends else shown.episode
            self.add(shown, reward, frames, intervention, terminated=terminated, truncated=truncated)
        self._release()
        return counts

    def _count(self, message: pb.EnvironmentResponse, timing: Array, frames: int, ends: bool) -> Shown:
        """Return what an answer shows; the same observation in a further answer is the same object."""
        episode, skipped = int(timing[_EPISODE]), int(timing[_SKIPPED])
        shown = self._arrived
        # An agent may enter an episode that runs: its first observation is of a reset or of a frame, and the answer
        # does not say which. The frames told with a later answer do.
        if shown is None or shown.episode != episode:
            shown = Shown(episode, skipped + self._sent, False, message, timing)
            self._unsure = [shown]
        elif shown.timing[_OBSERVED] != timing[_OBSERVED]:
            self._sent += 1
            shown = Shown(episode, skipped + self._sent, True, message, timing)
            if self._unsure:
                self._unsure.append(shown)
        elif ends:  # a copy: what waits of it, or was told, is no end
            shown = dataclasses.replace(shown, message=message, timing=timing)
            if self._unsure:
                self._unsure.append(shown)
        else:
            shown.message, shown.timing = message, timing
        self._arrived = shown
        if frames and self._unsure:
            self._resolve(frames, shown)
        if ends:
            self._unsure = []
        return shown

    def _resolve(self, frames: int, newest: Shown) -> None:
        """Learn whether an episode's first observation is of a frame: then more are told than have passed since."""
        first, unsure = self._unsure[0], self._unsure
        self._unsure = []
        if frames > newest.passed - first.passed:
            first.of_frame = True
            self._sent += 1
            self._frames_told += first.told
            for shown in unsure:
                shown.passed += 1

    @property
    def missing(self) -> bool:
        """True if there is no observation to tell, new or not."""
        return not self.reading and self.newest is None and self.closing is None

    def tell(self, message: pb.EnvironmentResponse, timing: Array, *, pops: bool) -> Told[Shown]:
        """Give out what there is; where it is `missing`, the newest answer stands in for an observation.

        Args:
            message: The newest answer.
            timing: What it says of this lane's times.
            pops: True if something new may be told.
        """
        # Where nothing new may be told, the observation that was told last is told again, without a reward.
        told = self.take() if pops or self.last is None else Told(self.last)
        if told is None:
            told = Told(Shown(0, 0, False, message, timing))
            skipped = int(timing[_SKIPPED]) + self._sent - self._frames_told
        else:
            told.observed.told = True
            skipped = self.frames_skipped
        timing = told.observed.timing.copy()
        timing[_SKIPPED] = skipped
        result = dataclasses.replace(told, observed=dataclasses.replace(told.observed, timing=timing))
        self._release()
        return result

    def _release(self) -> None:
        """Let go of messages that no step will tell: each has the observations of all lanes.

        Else a lane that takes long to reset would keep them all.
        """
        if self.missing:
            for shown in (self._arrived, self.last, *self._unsure):
                if shown is not None:
                    shown.message = _NO_MESSAGE
