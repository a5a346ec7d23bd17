"""Waiting without threads: coroutines, the results that they wait for, and timers.

A request that has to wait (for an environment in another thread or process, for other agents, for a clock) is a
coroutine that awaits a `PendingResult`. The producer calls `set_result` or `set_error`, and the scheduler resumes the
coroutine. Nothing here blocks: an event loop calls `run` again and again.

All methods are called by the thread that runs the event loop, unless their docstrings say otherwise.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

__all__ = ["Executor", "PendingResult", "Runtime", "Scheduler", "Timer", "gather"]

T = TypeVar("T")
# So many cancelled timers may stay in the heap until they are due, however few other timers there are.
_MOST_CANCELLED = 100


class PendingResult(Generic[T]):
    """A result that is available later. Any number of coroutines may `await` it."""

    __slots__ = ("_callbacks", "_error", "_result", "done")

    def __init__(self) -> None:
        self.done = False
        """True if the result, or the error, is set."""
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def set_result(self, result: T) -> None:
        """Resume the waiting coroutines with a result. Has no effect if `done`."""
        self.finish(result, None)

    def set_error(self, error: BaseException) -> None:
        """Raise an exception in the waiting coroutines. Has no effect if `done`."""
        self.finish(None, error)

    def finish(self, result: T | None, error: BaseException | None) -> None:
        """Set the error if there is one, otherwise the result; `Scheduler.start` calls this at the end."""
        if self.done:
            return
        self.done, self._result, self._error = True, result, error
        # A result may be kept for long; the objects that its callbacks refer to must not be.
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call a function when the result is set; at once if it is set already."""
        if self.done:
            callback()
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[PendingResult[Any], None, T]:
        if not self.done:
            yield self
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


Waiting: TypeAlias = Coroutine[PendingResult[Any], None, T]
"""A coroutine that waits for results."""
Done: TypeAlias = Callable[[T | None, BaseException | None], None]
"""Called at the end of a coroutine: with its result and None, or with None and its exception."""


class Timer:
    """A call that is made at a given time, unless it is cancelled."""

    __slots__ = ("_scheduler", "callback")

    def __init__(self, callback: Callable[[], None], scheduler: Scheduler) -> None:
        self.callback: Callable[[], None] | None = callback
        self._scheduler = scheduler

    def cancel(self) -> None:
        """Cancel the call. Has no effect on a call that was made, or cancelled, before."""
        if self.callback is not None:
            self.callback = None
            self._scheduler.timer_cancelled()


async def gather(scheduler: Scheduler, coroutines: Iterable[Waiting[T]]) -> list[T]:
    """Run coroutines side by side; return their results in order once all have ended, or raise the first error."""
    waiting: list[PendingResult[T]] = []
    for coroutine in coroutines:
        waiting.append(PendingResult())
        scheduler.start(coroutine, waiting[-1].finish)
    results, problem = [], None
    for pending in waiting:
        try:
            # All are awaited, also after an error: the caller may close the lanes then, and none may be in a call.
            results.append(await pending)
        except Exception as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return results


class Executor(Protocol):
    """Runs the calls of environments in the one thread that they belong to."""

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Call a function in that thread, after all earlier ones; return what it returns."""

    def close(self) -> None:
        """Note that an environment is closed: ends its own thread, but not a thread that it shares."""


class Scheduler:
    """Runs callbacks, timers and coroutines in the serving thread.

    Args:
        clock: Returns the time in seconds; it never decreases.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.ready: deque[Callable[[], object]] = deque()
        """Callbacks that wait for `run`."""
        self.timers: list[tuple[float, int, Timer]] = []
        """A heap of timers, some of them cancelled; the first is due first."""
        self._numbers = itertools.count()
        self._cancelled = 0
        self.is_inside: Callable[[], bool] = lambda: False
        """Returns True if the calling thread runs the environments: it must not wait for the scheduler."""

    def now(self) -> float:
        """Return the time, in seconds."""
        return self._clock()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call a function in the next `run`."""
        self.ready.append(callback)

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        """Call a function soon; may be called from any thread."""
        # Safe from any thread, because `deque.append` is atomic. A scheduler with an event loop wakes it, too.
        self.ready.append(callback)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call a function at a time, in seconds of `now()`."""
        timer = Timer(callback, self)
        # The number keeps timers for the same time in order; without it, the heap would compare `Timer` objects.
        heapq.heappush(self.timers, (when, next(self._numbers), timer))
        return timer

    def timer_cancelled(self) -> None:
        """Count a cancelled timer, and remove all cancelled timers if they are many and most of the heap."""
        self._cancelled += 1
        # Each call of an isolated environment sets a timer of `call_timeout`, 300 s by default, and cancels it when the
        # call returns. All of them would stay in the heap until they are due.
        if self._cancelled > _MOST_CANCELLED and 2 * self._cancelled > len(self.timers):
            # In place: the event loop refers to this list.
            self.timers[:] = [item for item in self.timers if item[2].callback is not None]
            heapq.heapify(self.timers)
            self._cancelled = 0

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call a function after so many seconds."""
        return self.call_at(self.now() + seconds, callback)

    def start(self, coroutine: Waiting[T], done: Done[T]) -> None:
        """Run a coroutine to its end, at once until it waits for the first time."""
        try:
            pending = coroutine.send(None)
        except StopIteration as stop:
            done(stop.value, None)
        except Exception as error:
            done(None, error)
        else:
            self.start_after(pending, coroutine, done)

    def start_after(self, pending: PendingResult[Any], coroutine: Waiting[T], done: Done[T]) -> None:
        """Resume a coroutine, as `start` does, when the result that it awaits is set."""
        # Not within `set_result`: the coroutine may change what the caller of `set_result` works on.
        pending.add_done_callback(lambda: self.call_soon(lambda: self.start(coroutine, done)))

    def next_due(self) -> float | None:
        """Return when the next timer is due; None: there is none."""
        timers = self.timers
        while timers and timers[0][2].callback is None:
            heapq.heappop(timers)
            self._cancelled -= 1
        return timers[0][0] if timers else None

    def run(self) -> None:
        """Call what is ready, and the timers that are due, in their order."""
        # Only what is ready now: callbacks that keep adding others must not delay timers and sockets.
        for _ in range(len(self.ready)):
            if not self.ready:  # a long call lets another thread run the rest
                break
            self.ready.popleft()()
        # Only timers that are due now: a frame that takes too long makes the next one due at once.
        now = self.now()
        while (due := self.next_due()) is not None and due <= now:
            timer = heapq.heappop(self.timers)[2]
            callback, timer.callback = timer.callback, None  # so that `cancel` does not count it
            if callback is not None:
                callback()


class Runtime(Protocol):
    """Services for worlds, provided by a server's event loop or by `bridge.testing.LocalRuntime`."""

    scheduler: Scheduler
    executor: Executor
    """Calls environments in the serving thread, one call after the other."""
    processes: set[object]
    """The processes of isolated worlds, each with a method `abandon`, which ends the process at once."""
    note_failure: Callable[[str, str], None]
    """Logs and counts the end of an environment's process. Takes the name of the world, and the reason."""

    def start_thread(self, name: str) -> Executor:
        """Return an executor with a thread of its own, for environments of a server with `thread_safe=True`."""

    def add_reader(self, file: object, callback: Callable[[], None]) -> None:
        """Call a function when a file or socket is readable. The function must expect that there is nothing to read."""

    def add_writer(self, file: object, callback: Callable[[], None]) -> None:
        """Call a function whenever a socket, which has a reader already, is writable."""

    def remove_writer(self, file: object) -> None:
        """Stop watching whether a socket is writable; its reader stays."""

    def remove_reader(self, file: object) -> None:
        """Stop watching a file or socket."""
