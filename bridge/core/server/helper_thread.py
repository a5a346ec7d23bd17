"""Threads that take jobs from the event loop: for what takes processor time, or for the environments of one world."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from bridge.core.worlds.scheduling import PendingResult, Scheduler
from bridge.errors import Code, RequestError

__all__ = ["HelperThread", "WorldThread"]

T = TypeVar("T")


class HelperThread:
    """One thread, which starts with the first job and ends with `close`.

    Args:
        scheduler: Gets the results.
        name: The thread's name.
    """

    def __init__(self, scheduler: Scheduler, name: str = "bridge-helper") -> None:
        self._scheduler = scheduler
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Call `job` in the thread, and `done` with what it returns, or with its exception, in the event loop.

        After `close` neither is called. Where the system has no thread left, `done` gets a RequestError.
        """
        if self._closed:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # Not raised: whoever submits has begun something that only `done` ends.
                text = "this server's system has no thread left for it; send the request again later"
                self.answer(done, RequestError(Code.RESOURCE_EXHAUSTED, text))
                return
            # Kept only once it runs: else the next job tries again.
            self._thread = thread
        self._jobs.put((job, done))

    def answer(self, done: Callable[[Any], None], result: Any) -> None:
        """Call `done` with a result in the event loop, soon; may be called by any thread."""
        self._scheduler.call_soon_threadsafe(partial(done, result))

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            del item
            try:
                result = job()
            # Whatever it is, the event loop waits for a result, and others for this thread.
            except BaseException as error:
                result = error
            self.answer(done, result)
            # While `get` waits, nothing of the last job may be kept: it refers to a connection, and to what that holds.
            del job, done, result

    def close(self, patience: float = 1.0) -> None:
        """Let the thread end after the jobs that it was given; wait for that at most so many seconds."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(patience)
            self._thread = None


class WorldThread(HelperThread):
    """The `Executor` of one world, or one lane, of a server with `thread_safe=True`: it has a thread of its own."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the thread. Raises RequestError where the system has no thread left."""
        pending: PendingResult[T] = PendingResult()

        def done(result: Any) -> None:
            if isinstance(result, BaseException):
                pending.set_error(result)
            else:
                pending.set_result(result)

        self.submit(partial(function, *args), done)
        return await pending

    def close(self, patience: float = 0.0) -> None:
        """Let the thread end after the calls that it was given."""
        super().close(patience)
