"""Worlds and sessions without a server: everything happens in the calling thread."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from bridge.core.worlds.scheduling import PendingResult, Scheduler

__all__ = ["LocalRuntime"]

T = TypeVar("T")


class _LocalScheduler(Scheduler):
    """Runs callbacks of other threads at once: there is no loop that would."""

    def call_soon_threadsafe(self, callback: Callable[[], Any]) -> None:
        """Call a function and what becomes ready by it."""
        self.call_soon(callback)
        while self.ready:
            self.run()


class _LocalExecutor:
    """Calls a function at once."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function; return what it returns."""
        return function(*args)

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class LocalRuntime:
    """Runs the worlds and sessions of a test in its own thread; `run` runs a coroutine to its end.

    Args:
        clock: Gives the time in seconds.
        deadline: Seconds after which `run` gives up a coroutine that still waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, deadline: float = 60.0) -> None:
        self.scheduler: Scheduler = _LocalScheduler(clock)
        self.executor = _LocalExecutor()
        self.processes: set[Any] = set()
        self.note_failure: Callable[[str, str], None] = lambda name, message: None
        self._deadline = deadline
        self._selector = selectors.DefaultSelector()

    def start_thread(self, name: str) -> _LocalExecutor:
        """Return what calls functions in the calling thread."""
        del name
        return self.executor

    def add_reader(self, file: Any, callback: Callable[[], None]) -> None:
        """Call a function whenever a file or socket can be read while `run` waits."""
        self._selector.register(file, selectors.EVENT_READ, [callback, None])

    def add_writer(self, file: Any, callback: Callable[[], None]) -> None:
        """Call a function also whenever it can be written."""
        data = self._selector.get_key(file).data
        data[1] = callback
        self._selector.modify(file, selectors.EVENT_READ | selectors.EVENT_WRITE, data)

    def remove_writer(self, file: Any) -> None:
        """Watch a socket only for reading again."""
        self._selector.modify(file, selectors.EVENT_READ, [self._selector.get_key(file).data[0], None])

    def remove_reader(self, file: Any) -> None:
        """Watch a file or socket no longer; again: nothing."""
        if file in self._selector.get_map():
            self._selector.unregister(file)

    def run(self, coroutine: Coroutine[PendingResult[Any], None, T]) -> T:
        """Run a coroutine to its end, waiting for timers where it does; return its result.

        Raises:
            TimeoutError: It still waited after `deadline` seconds.
        """
        result: PendingResult[T] = PendingResult()
        self.scheduler.start(coroutine, result.finish)
        self.run_until(lambda: result.done)
        return _result_of(result)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Run what is due or arrives, until a condition holds.

        Raises:
            TimeoutError: It did not hold after `deadline` seconds.
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
