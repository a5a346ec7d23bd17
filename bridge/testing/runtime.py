"""Run worlds and sessions without a server, in the calling thread."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from bridge.core.worlds.scheduling import PendingResult, Scheduler

__all__ = ["LocalRuntime"]

T = TypeVar("T")


class _LocalScheduler(Scheduler):
    """Runs callbacks from other threads at once, because there is no event loop."""

    def call_soon_threadsafe(self, callback: Callable[[], Any]) -> None:
        """Call a function, and run what becomes ready."""
        self.call_soon(callback)
        while self.ready:
            self.run()


class _LocalExecutor:
    """An executor that calls functions at once."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function and return its result."""
        return function(*args)

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class LocalRuntime:
    """Runs worlds and sessions in a test's own thread; `run` runs a coroutine to its end.

    Args:
        clock: Returns the time in seconds.
        deadline: Seconds after which `run` raises for a coroutine that still waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, deadline: float = 60.0) -> None:
        self.scheduler: Scheduler = _LocalScheduler(clock)
        self.executor = _LocalExecutor()
        self.processes: set[Any] = set()
        self.note_failure: Callable[[str, str], None] = lambda name, message: None
        self._deadline = deadline
        self._selector = selectors.DefaultSelector()

    def start_thread(self, name: str) -> _LocalExecutor:
        """Return an executor that calls functions in the calling thread."""
        del name
        return self.executor

    def add_reader(self, file: Any, callback: Callable[[], None]) -> None:
        """Call a function whenever a file or socket is readable while `run` waits."""
        self._selector.register(file, selectors.EVENT_READ, [callback, None])

    def add_writer(self, file: Any, callback: Callable[[], None]) -> None:
        """Call a function also whenever the socket is writable."""
        data = self._selector.get_key(file).data
        data[1] = callback
        self._selector.modify(file, selectors.EVENT_READ | selectors.EVENT_WRITE, data)

    def remove_writer(self, file: Any) -> None:
        """Watch a socket only for reading."""
        self._selector.modify(file, selectors.EVENT_READ, [self._selector.get_key(file).data[0], None])

    def remove_reader(self, file: Any) -> None:
        """Stop watching a file or socket. May be called twice."""
        if file in self._selector.get_map():
            self._selector.unregister(file)

    def run(self, coroutine: Coroutine[PendingResult[Any], None, T]) -> T:
        """Run a coroutine to its end, waiting for timers if needed; return its result.

        Raises:
            TimeoutError: It still waits after `deadline` seconds.
        """
        result: PendingResult[T] = PendingResult()
        self.scheduler.start(coroutine, result.finish)
        self.run_until(lambda: result.done)
        return _result_of(result)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Run due timers and events until a condition holds.

        Raises:
            TimeoutError: It does not hold after `deadline` seconds.
        """
        end = time.monotonic() + self._deadline
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"expected the coroutine or condition within {self._deadline:g} s; it still waits")
            self._turn()

    def _turn(self) -> None:
        due = self.scheduler.next_due()
        wait = 0.0 if self.scheduler.ready else 0.05 if due is None else min(0.05, max(0.0, due - self.scheduler.now()))
        if self._selector.get_map():
            for key, events in self._selector.select(wait):
                if events & selectors.EVENT_READ:
                    key.data[0]()
                if events & selectors.EVENT_WRITE and key.data[1] is not None:
                    key.data[1]()
        elif wait:
            time.sleep(wait)
        self.scheduler.run()


def _result_of(pending: PendingResult[T]) -> T:
    try:
        pending.__await__().send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("a result that is done was waited for")
