"""Counts the frames of one environment whose observation no `step` returned, where not every answer is handed out."""

from __future__ import annotations

import dataclasses

__all__ = ["Shown", "UnseenFrames"]


@dataclasses.dataclass(eq=False)
class Shown:
    """An observation that was in one answer or more."""

    episode: int
    """The number of its episode."""
    observed_at: float
    """When it was made, seconds of the server's clock."""
    skipped: int
    """Frames that the server had sent in no answer by then."""
    sent: int
    """Frames that were in answers by then, this one too."""
    of_frame: bool = False
    """True if it is known to be of a frame, and not of a reset."""
    told: bool = False
    """True if a `step` or `reset` returned it."""


class UnseenFrames:
    """The frames of one environment that were in answers, and those that were told.

    The server counts the frames that it sent in no answer. Those that were in an answer which nobody took come on top.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._told = 0
        self._newest: Shown | None = None
        # Of an episode whose first observation is not known to be of a frame: that one, and those since.
        self._unsure: list[Shown] = []

    def arrived(self, episode: int, observed_at: float, frames: int, skipped: int) -> Shown:
        """Take note of what an answer shows; the same observation in a further answer is the same object.

        Args:
            episode: The number of its episode.
            observed_at: When it was made.
            frames: The frames that the answer tells the rewards of.
            skipped: The frames that the server has sent in no answer so far.
        """
        newest = self._newest
        # An agent may enter an episode that runs: its first observation is of a reset or of a frame, and the answer
        # does not say which. The frames told with a later answer do.
        if newest is None or newest.episode != episode:
            newest = Shown(episode, observed_at, skipped, self._sent)
            self._unsure = [newest]
        elif newest.observed_at != observed_at:
            self._sent += 1
            newest = Shown(episode, observed_at, skipped, self._sent, of_frame=True)
            if self._unsure:
                self._unsure.append(newest)
        self._newest = newest
        if frames and self._unsure:
            self._resolve(frames, skipped)
        return newest

    def _resolve(self, frames: int, skipped: int) -> None:
        """Learn whether an episode's first observation is of a frame: then more are told than have passed since."""
        first, unsure = self._unsure[0], self._unsure
        self._unsure = []
        if frames > self._sent - first.sent + skipped - first.skipped:
            first.of_frame = True
            self._sent += 1
            self._told += first.told
            for shown in unsure:
                shown.sent += 1

    def told(self, shown: Shown, skipped: int) -> int:
        """Take note that an observation is told; return the frames up to it whose observation was not.

        Args:
            shown: The observation.
            skipped: The frames that the server had sent in no answer.
        """
        # An observation that is told again is no further frame.
        if not shown.told:
            shown.told = True
            self._told += shown.of_frame
        return skipped + shown.sent - self._told

    def so_far(self, skipped: int) -> int:
        """Return the frames whose observation was not told, where there is no observation."""
        return skipped + self._sent - self._told
