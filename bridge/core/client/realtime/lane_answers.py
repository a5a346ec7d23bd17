"""Holds the answers of one environment with Steps in flight, until the next `step` takes them.

The server answers one Step for each frame, even if the caller does not step. `LaneAnswers` extends the buffer of these
frames: it decides which answers count, and counts skipped frames. If an episode ended before its first observation was
reported, a lane leaves it out. A single environment, or one agent of several, asked for the episode by a Reset, so it
is reported there.
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
    """An observation from one or several answers. A first observation counts as that of a reset until more is known."""

    message: pb.EnvironmentResponse
    """The newest answer that contains it."""
    timing: Array
    """The times of the lane in that answer."""
    told: bool = False
    """True if a `step` or `reset` returned it."""


def _without_final(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("final_obs", "final_info")}


class LaneAnswers(FrameBuffer[Shown, dict[str, Any]]):
    """Holds the answers of one lane, of a single environment, or of one agent.

    The server counts frames that were in no answer. This class adds frames in answers that no `step` returned.

    Args:
        skips: True for lanes: an episode that ended before its first observation was reported is left out, except for
            its record.
    """

    def __init__(self, *, skips: bool) -> None:
        super().__init__(_without_final, skips=skips)
        self.over = False
        """True if the newest answer ended the episode."""
        self._since = 0
        self._episode = 0  # the episode of the newest answer; 0: the next one is the first of its episode
        self._sent = 0  # the number of frames in answers
        self._arrived: Shown | None = None  # the newest observation, whether it counts or not
        # The observations of an episode while we do not know whether its first one is of a reset or of a frame.
        self._unsure: list[Shown] = []

    def begin(self, since: int) -> None:
        """Drop unreported data, and ignore answers to requests with a number below `since`."""
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
        """Store an answer's data for this lane; return False if it is ignored.

        Args:
            message: The answer.
            timing: Its times for this lane.
            reward: The sum of the rewards of its frames.
            frames: The number of its frames.
            intervention: The intervention in its frames; empty: there was none.
            terminated: True if the environment terminated the episode.
            truncated: True if the episode was truncated.
            number: The number of its request.
            counts: False: the answer must be ignored.
        """
        ends = terminated or truncated
        shown = self._count(message, timing, frames, ends)
        # Only after `_count`: the frames of an ignored answer count as skipped.
        counts = counts and number >= self._since
        if counts:
            if shown.episode != self._episode:
                self.began(shown)
                if ends:  # there is no separate first observation
                    self.newest = None
            self.over, self._episode = ends, 0 if ends else shown.episode
            self.add(shown, reward, frames, intervention, terminated=terminated, truncated=truncated)
        self._release()
        return counts

    def _count(self, message: pb.EnvironmentResponse, timing: Array, frames: int, ends: bool) -> Shown:
        """Return the observation of an answer; the same object if the previous answer had the same observation."""
        episode, skipped = int(timing[_EPISODE]), int(timing[_SKIPPED])
        shown = self._arrived
        # An agent may enter a running episode. The answer does not say whether its first observation is of a reset or
        # of a frame; the number of frames in a later answer does.
        if shown is None or shown.episode != episode:
            shown = Shown(episode, skipped + self._sent, False, message, timing)
            self._unsure = [shown]
        elif shown.timing[_OBSERVED] != timing[_OBSERVED]:
            self._sent += 1
            shown = Shown(episode, skipped + self._sent, True, message, timing)
            if self._unsure:
                self._unsure.append(shown)
        elif ends:  # a copy, because the earlier object is not an end
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
        """Find out whether an episode's first observation is of a frame: then one more frame is reported."""
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
        """True if there is no observation to report, new or old."""
        return not self.reading and self.newest is None and self.closing is None

    def tell(self, message: pb.EnvironmentResponse, timing: Array, *, pops: bool) -> Told[Shown]:
        """Return the data to report; if it is `missing`, with the newest answer as a placeholder.

        Args:
            message: The newest answer.
            timing: Its times for this lane.
            pops: True if new data may be reported.
        """
        # Otherwise repeat the last observation, without a reward.
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
        """Release messages that no step will report: each contains the observations of all lanes.

        Otherwise a lane with a slow reset would keep all of them alive.
        """
        if self.missing:
            for shown in (self._arrived, self.last, *self._unsure):
                if shown is not None:
                    shown.message = _NO_MESSAGE
