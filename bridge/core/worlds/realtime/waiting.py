"""The waits of agents in a real-time world whose Steps are held until an event."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bridge.core.worlds.base import Agent
from bridge.core.worlds.realtime.loop_lane import LaneBuffer, LoopLane
from bridge.core.worlds.scheduling import PendingResult, Scheduler
from bridge.errors import Code, RequestError

__all__ = ["FrameWait", "Waiters"]


class Waiters:
    """The waiting agents, each with its own condition.

    Args:
        scheduler: Provides the timers of deadlines.
        refuse_if_over: Raises RequestError if the world is over.
    """

    def __init__(self, scheduler: Scheduler, refuse_if_over: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._refuse_if_over = refuse_if_over
        self._waiting: dict[Agent, tuple[Callable[[], bool], PendingResult[None]]] = {}
        """For each agent a function that returns True once the wait is over, and the result that ends the wait."""

    async def wait(
        self, agent: Agent, ready: Callable[[], bool], seconds: float, reason: Callable[[], str | None]
    ) -> None:
        """Wait until `ready()`; for arguments and errors see `FramePacer.wait_until`."""
        self._refuse_if_over()
        pending: PendingResult[None] | None = None
        try:
            while not ready():  # check again: another agent may have run before this coroutine continued
                if pending is not None and agent not in self._waiting:
                    # `hang_up` came after the result was set, and could not replace it by an error.
                    raise _hung_up()
                pending = PendingResult()
                self._waiting[agent] = ready, pending
                # Use real time: a virtual clock may never be advanced again, and the client would hang.
                timer = self._scheduler.call_later(seconds, partial(pending.set_result, None))
                try:
                    await pending
                finally:
                    # The scheduler clears a timer's callback when it runs the timer.
                    expired = timer.callback is None
                    timer.cancel()
                self._refuse_if_over()
                if expired and not ready() and (text := reason()) is not None:
                    raise RequestError(Code.DEADLINE_EXCEEDED, text)
        finally:
            self._waiting.pop(agent, None)

    def look(self) -> None:
        """End the waits whose condition is true."""
        for ready, pending in list(self._waiting.values()):
            try:
                self._refuse_if_over()
                if ready():
                    pending.set_result(None)
            except RequestError as error:
                pending.set_error(error)

    def hang_up(self, agent: Agent) -> None:
        """End the wait of an agent whose client has gone, if it waits."""
        # Remove the entry first, so that `wait` notices even if the result is already set.
        if agent in self._waiting:
            _, pending = self._waiting.pop(agent)
            pending.set_error(_hung_up())


def _hung_up() -> RequestError:
    return RequestError(Code.CANCELLED, "the client hung up while it waited")


class FrameWait:
    """The wait for a lane's next frame, or for the end of its episode.

    Args:
        buffer: The agent's buffer of the lane.
        pending: Returns, of a lane and how many frames have ended since, whether a frame is still to come for its
            action. None: any frame will do.
    """

    def __init__(self, buffer: LaneBuffer, pending: Callable[[LoopLane, int], bool] | None) -> None:
        self._buffer = buffer
        self._seen = buffer.lane.newest
        self._pending = pending
        self._frames = 0
        self._over = False

    def is_over(self) -> bool:
        """True if the wait is over, and stays so. Must be called after each frame."""
        buffer, lane = self._buffer, self._buffer.lane
        # Do not wait for a lane that the agent is not in, because its reset may take long, nor after an end.
        if not buffer.reading or buffer.closing is not None:
            return True
        if lane.newest is not self._seen and not self._over:
            self._frames, self._seen = self._frames + 1, lane.newest
            self._over = self._pending is None or not self._pending(lane, self._frames)
        return self._over
