"""The steps of a world in lock-step, shared by all spectators: the cost of a step does not depend on their number.

A spectator gets everything since its last look, with rewards added up. Adding them up for each spectator separately
would take most of a trainer's time with a few hundred spectators who never look. So the steps are stored once, in
stretches: a stretch ends where a spectator looked. A spectator who looks joins the stretches that it has not seen. A
stretch at which no spectator begins is merged into the previous one, so there is at most one more than spectators.
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
    """Consecutive steps between two looks."""

    __slots__ = ("after", "before", "readers", "transition")

    def __init__(self, before: Stretch | None) -> None:
        self.before = before
        self.after: Stretch | None = None
        self.readers = 0
        """The number of spectators who have seen everything before this stretch, and nothing of it."""
        self.transition: Result | None = None
        """Its steps as one transition, with the sum of rewards; None: no steps."""


def _addable(reward: Any) -> Any:
    """Return a reward in a form that adds up: NumPy's small integers overflow, its bools stay bools, lists grow."""
    if np.ndim(reward) == 0 and not isinstance(reward, np.ndarray):
        return as_number(reward)
    array: Array = np.asarray(reward)
    return array if array.dtype.kind == "f" else array.astype(np.float64)


class SharedSteps(Listener):
    """Records the results of a world's environment.

    Args:
        newest: Observation and info of the running episode; None: no episode runs.
        batched: True if it has lanes, whose episodes end and begin within one sequence of steps.
    """

    def __init__(self, newest: Result | None, batched: bool) -> None:
        self.newest = newest
        """Observation and info of the last reset or step; None: there was none."""
        self.running = newest is not None
        """True if an episode runs."""
        self.error: RequestError | None = None
        """Why the world has ended; None: it has not."""
        self.waiting: dict[object, PendingResult[None]] = {}
        """Results to set at the next change, by the waiting object."""
        self._batched = batched
        self._last = Stretch(None)

    # Events of the environment

    def began(self, lane: int | None, result: Result, mask: Array | None) -> None:
        """Record the result of `reset`."""
        self.newest, self.running = result, True
        self._wake()

    def stepped(self, lane: int | None, action: object, result: Result) -> Result:
        """Record the result of `step`."""
        observation, reward, terminated, truncated, info = result
        self.newest = observation, info
        self.running = self._batched or not (terminated or truncated)
        if self._batched:  # the environment may reuse the arrays for its next step
            reward, terminated, truncated = np.array(reward), np.array(terminated), np.array(truncated)
        elif type(reward) is not float:
            reward = _addable(reward)
        self._last.transition = self._joined(self._last.transition, (observation, reward, terminated, truncated, info))
        if self.waiting:
            self._wake()
        return result

    def over(self, error: RequestError) -> None:
        """Record that the world has ended."""
        self.error = error
        self._wake()

    def _wake(self) -> None:
        # Cleared first: a resumed coroutine may wait again at once.
        waiting, self.waiting = self.waiting, {}
        for pending in waiting.values():
            pending.set_result(None)

    def _joined(self, first: Result | None, second: Result | None) -> Result | None:
        """Join two transitions. After the end of an episode, steps of the next one are not added."""
        if first is None or second is None:
            return second if first is None else first
        _, reward, terminated, truncated, _ = first
        # A spectator that is behind gets the end, and enters the running episode with its next Step.
        if not self._batched and (terminated or truncated):
            return first
        observation, more, ends, cuts, info = second
        return observation, reward + more, terminated | ends, truncated | cuts, info

    # Calls of spectators

    def begin(self) -> Stretch:
        """Return the stretch for a spectator who has seen everything so far."""
        # If nothing happened since the last look, both spectators begin at the same place and share the stretch.
        if self._last.transition is not None:
            before = self._last
            before.after = self._last = Stretch(before)
        self._last.readers += 1
        return self._last

    def look(self, stretch: Stretch) -> Any:
        """Return everything since a stretch began as one transition; None if nothing happened."""
        found: Result | None = None
        one: Stretch | None = stretch
        while one is not None:
            found = self._joined(found, one.transition)
            one = one.after
        return found

    def leave(self, stretch: Stretch) -> None:
        """Record that a spectator no longer begins at a stretch."""
        stretch.readers -= 1
        if stretch.readers:
            return
        before, after = stretch.before, stretch.after
        # Spectators who begin earlier still need these steps.
        if before is not None:
            before.transition = self._joined(before.transition, stretch.transition)
            before.after = after
            if after is None:
                self._last = before
        # No spectator needs them, so the stretch is emptied and used for the next steps.
        elif after is None:
            stretch.transition = None
        if after is not None:
            after.before = before
