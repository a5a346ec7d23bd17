"""The helper thread of a server: what takes processor time, and must not hold up the event loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from bridge.worlds.scheduling import Scheduler

__all__ = ["HelperThread"]


class HelperThread:
    """One thread, which starts with the first job and ends with `close`.

    Args:
        scheduler: Gets the results.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Call `job` in the thread, and `done` with what it returns, or with its exception, in the event loop.

        After `close` neither is called.
        """
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bridge-helper", daemon=True)
            self._thread.start()
        self._jobs.put((job, done))

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            del item
            try:
                result = job()
            except Exception as error:
                result = error
            self._post(done, result)
            del job, done, result

    def _post(self, done: Callable[[Any], None], result: Any) -> None:
        self._scheduler.call_soon_threadsafe(lambda: done(result))

    def close(self) -> None:
        """Let the thread end after the jobs that it was given."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(1.0)
            self._thread = None
