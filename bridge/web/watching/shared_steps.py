"""The steps of a world in lock-step, for all who look on: one costs the same, however many those are.

Each spectator is told what happened since it looked last, rewards added up. Were they added up for each by itself, a
few hundred spectators who never look would take most of a trainer's time. So the steps are kept once, in stretches: a
stretch ends where somebody looked. Who looks puts those together that it has not seen; a stretch that nobody begins at
any longer becomes part of the one before it, so that there are never more stretches than spectators, and one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge.core.encoding.tensors import Array
from bridge.core.worlds.environment import Result
from bridge.core.worlds.observers import Listener
from bridge.core.worlds.rewards import as_number
from bridge.core.worlds.scheduling import PendingResult
from bridge.errors import RequestError

__all__ = ["SharedSteps", "Stretch"]


class Stretch:
    """Steps in a row, between two moments at which somebody looked."""

    __slots__ = ("after", "before", "readers", "transition")

    def __init__(self, before: Stretch | None) -> None:
        self.before = before
        self.after: Stretch | None = None
        self.readers = 0
        """The number of spectators who have seen everything before it, and nothing of it."""
        self.transition: Result | None = None
        """Its steps as one, with the sum of rewards; None: there was none."""


def _addable(reward: Any) -> Any:
    """Return a reward whose sums are right: small integers of NumPy overflow, its bools stay bools, lists grow."""
    if np.ndim(reward) == 0 and not isinstance(reward, np.ndarray):
        return as_number(reward)
    array: Array = np.asarray(reward)
    return array if array.dtype.kind == "f" else array.astype(np.float64)


class SharedSteps(Listener):
    """Takes what the environment of a world returns.

    Args:
        newest: Observation and info of the running episode; None: there is none.
        batched: Whether it has lanes, whose episodes end and begin within one sequence of steps.
    """

    def __init__(self, newest: Result | None, batched: bool) -> None:
        self.newest = newest
        """Observation and info of the last reset or step; None: there was none."""
        self.running = newest is not None
        """True if an episode runs."""
        self.error: RequestError | None = None
        """Why the world is over; None: it is not."""
        self.waiting: dict[object, PendingResult[None]] = {}
        """The results that are set at the next change, by who waits for it."""
        self._batched = batched
        self._last = Stretch(None)

    # What the environment does

    def began(self, lane: int | None, result: Result, mask: Array | None) -> None:
        """Take what `reset` returned."""
        self.newest, self.running = result, True
        self._wake()

    def stepped(self, lane: int | None, action: object, result: Result) -> Result:
        """Take what `step` returned."""
        observation, reward, terminated, truncated, info = result
        self.newest = observation, info
        self.running = self._batched or not (terminated or truncated)
        if self._batched:  # it may write its next step into the same arrays
            reward, terminated, truncated = np.array(reward), np.array(terminated), np.array(truncated)
        elif type(reward) is not float:
            reward = _addable(reward)
        self._last.transition = self._joined(self._last.transition, (observation, reward, terminated, truncated, info))
        if self.waiting:
            self._wake()
        return result

    def over(self, error: RequestError) -> None:
        """Note that the world has ended."""
        self.error = error
        self._wake()

    def _wake(self) -> None:
        # Emptied first: who is woken may wait again at once.
        waiting, self.waiting = self.waiting, {}
        for pending in waiting.values():
            pending.set_result(None)

    def _joined(self, first: Result | None, second: Result | None) -> Result | None:
        """Return two transitions as one. Who has seen the end of an episode is told nothing of the next one."""
        if first is None or second is None:
            return second if first is None else first
        _, reward, terminated, truncated, _ = first
        # A spectator that is behind sees the end, and enters the running episode by its next Step.
        if not self._batched and (terminated or truncated):
            return first
        observation, more, ends, cuts, info = second
        return observation, reward + more, terminated | ends, truncated | cuts, info

    # Spectators

    def begin(self) -> Stretch:
        """Return the stretch of one who has seen everything so far."""
        # Where nothing happened since somebody looked, both begin at the same place and share the stretch.
        if self._last.transition is not None:
            before = self._last
            before.after = self._last = Stretch(before)
        self._last.readers += 1
        return self._last

    def look(self, stretch: Stretch) -> Any:
        """Return as one transition what happened since a stretch began; None: nothing did."""
        found: Result | None = None
        one: Stretch | None = stretch
        while one is not None:
            found = self._joined(found, one.transition)
            one = one.after
        return found

    def leave(self, stretch: Stretch) -> None:
        """Note that a spectator goes on from a stretch."""
        stretch.readers -= 1
        if stretch.readers:
            return
        before, after = stretch.before, stretch.after
        # Those who began earlier still have to be told these steps.
        if before is not None:
            before.transition = self._joined(before.transition, stretch.transition)
            before.after = after
            if after is None:
                self._last = before
        # Nobody is left to be told: the next steps are kept in it anew.
        elif after is None:
            stretch.transition = None
        if after is not None:
            after.before = before
