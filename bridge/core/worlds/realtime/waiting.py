"""Agents of a real-time world whose Steps wait until something has happened."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bridge.core.worlds.base import Agent
from bridge.core.worlds.realtime.loop_lane import LaneBuffer
from bridge.core.worlds.scheduling import PendingResult, Scheduler
from bridge.errors import Code, RequestError

__all__ = ["FrameWait", "Waiters"]


class Waiters:
    """The agents that wait, each for something of its own.

    Args:
        scheduler: Has the timers of their deadlines.
        refuse_if_over: Raises RequestError where the world is over.
    """

    def __init__(self, scheduler: Scheduler, refuse_if_over: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._refuse_if_over = refuse_if_over
        self._waiting: dict[Agent, tuple[Callable[[], bool], PendingResult[None]]] = {}
        """For each agent a function that is True once it need not wait, and the result that ends its wait."""

    async def wait(
        self, agent: Agent, ready: Callable[[], bool], seconds: float, reason: Callable[[], str | None]
    ) -> None:
        """Wait until `ready()`; the arguments and errors are those of `FramePacer.wait_until`."""
        self._refuse_if_over()
        pending: PendingResult[None] | None = None
        try:
            while not ready():  # again: before the coroutine went on, another agent may have changed that
                if pending is not None and agent not in self._waiting:
                    # `hang_up` came when the result was there already, which an error cannot replace.
                    raise _hung_up()
                pending = PendingResult()
                self._waiting[agent] = ready, pending
                # The machine's clock and not the world's: nobody may ever turn a virtual one again, and the client
                # would hang.
                timer = self._scheduler.call_later(seconds, partial(pending.set_result, None))
                try:
                    await pending
                finally:
                    # The scheduler clears the callback of a timer when it runs it.
                    expired = timer.callback is None
                    timer.cancel()
                self._refuse_if_over()
                if expired and not ready() and (text := reason()) is not None:
                    raise RequestError(Code.DEADLINE_EXCEEDED, text)
        finally:
            self._waiting.pop(agent, None)

    def look(self) -> None:
        """End the wait of those for whom enough has happened."""
        for ready, pending in list(self._waiting.values()):
            try:
                self._refuse_if_over()
                if ready():
                    pending.set_result(None)
            except RequestError as error:
                pending.set_error(error)

    def hang_up(self, agent: Agent) -> None:
        """End the wait of an agent whose client has gone; an agent that does not wait: nothing."""
        # Taken out first, so that `wait` sees it even if its result is there already.
        if agent in self._waiting:
            _, pending = self._waiting.pop(agent)
            pending.set_error(_hung_up())


def _hung_up() -> RequestError:
    return RequestError(Code.CANCELLED, "the client hung up while it waited")


class FrameWait:
    """The wait for a lane's next frame, or for the end of its episode.

    Args:
        buffer: The news of the lane.
        acts: True to wait for a frame that began after the lane got its action. One that was under way then used the
            action before.
    """

    def __init__(self, buffer: LaneBuffer, acts: bool) -> None:
        self._buffer = buffer
        self._seen = buffer.lane.newest
        self._acts = acts

    def is_over(self) -> bool:
        """True if it is over; to be asked after each frame."""
        buffer, lane = self._buffer, self._buffer.lane
        # A lane that the agent is not in may be long in its reset, and an end is news enough.
        if not buffer.reading or buffer.closing is not None:
            return True
        if lane.newest is self._seen:
            return False
        if self._acts and lane.unused:
            # Once: the next frame uses it, unless it is too old by then.
            self._acts, self._seen = False, lane.newest
            return False
        return True
