"""The threads of a server: the serving thread, its deputy, and helpers that run jobs for the event loop.

The serving thread runs the event loop, and calls the environments from it: this one thread makes, resets, steps,
renders and closes an environment, as OpenGL contexts, SQLite connections and GUI toolkits require. While such a call
lasts longer than a moment, the deputy runs the loop in its place: it answers what needs no environment, and queues the
calls of environments, which the serving thread makes afterwards.

A helper thread does work that takes processor time, or, with `thread_safe=True`, calls the environments of one world.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from bridge.core.logs import SafeLog
from bridge.core.server.event_loop import EventLoop
from bridge.core.worlds.scheduling import Executor, PendingResult, Scheduler
from bridge.errors import Code, RequestError

__all__ = ["HelperThread", "ServerRuntime", "ServingThread", "WorldThread", "environments_lock", "forget_lock_in_child"]

T = TypeVar("T")


class HelperThread:
    """One thread, which starts with the first job and ends after `close`.

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
        """Call `job` in the thread, and then `done` in the event loop with its result or its exception.

        After `close` neither is called. If the system has no thread left, `done` gets a RequestError.
        """
        if self._closed:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # Not raised, because the caller has begun something that only `done` ends.
                text = "this server's system has no thread left for it; send the request again later"
                self.answer(done, RequestError(Code.RESOURCE_EXHAUSTED, text))
                return
            # Stored only when it runs: otherwise the next job tries again.
            self._thread = thread
        self._jobs.put((job, done))

    def answer(self, done: Callable[[Any], None], result: Any) -> None:
        """Call `done` with a result in the event loop, soon. May be called by any thread."""
        self._scheduler.call_soon_threadsafe(partial(done, result))

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            del item
            try:
                result = job()
            # Whatever the exception is, the event loop waits for a result, and other jobs for this thread.
            except BaseException as error:
                result = error
            self.answer(done, result)
            # While `get` waits, keep nothing of the last job: it refers to a connection, and to its objects.
            del job, done, result

    def close(self, patience: float = 1.0) -> None:
        """End the thread after the jobs that it was given; wait for that at most `patience` seconds."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(patience)
            self._thread = None


class WorldThread(HelperThread):
    """The `Executor` of one world, or one lane, of a server with `thread_safe=True`: it has a thread of its own."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the thread. Raises RequestError if the system has no thread left."""
        pending: PendingResult[T] = PendingResult()

        def done(result: Any) -> None:
            if isinstance(result, BaseException):
                pending.set_error(result)
            else:
                pending.set_result(result)

        self.submit(partial(function, *args), done)
        return await pending

    def close(self, patience: float = 0.0) -> None:
        """End the thread after the calls that it was given."""
        super().close(patience)


_log = SafeLog(__name__)
MOMENT = 0.04
"""Seconds that an environment's call may block the event loop."""
_FORKED = (
    b"expected a process that an environment forks to end by os._exit() in the environment's call, got one that "
    b"returned from it: it is ended, for the connections are its parent's\n"
)
environments_lock = threading.RLock()
"""Held during every call of an environment in this process, whichever of its servers publishes it."""


def forget_lock_in_child() -> None:
    """In a forked process: create the lock again, because a thread of the parent may hold it."""
    global environments_lock
    environments_lock = threading.RLock()


class ServingThread:
    """Runs an event loop and, as its `Executor`, the calls of environments.

    Args:
        loop: The event loop.
        taken_over: Called by the deputy when it begins to run the loop.
    """

    def __init__(self, loop: EventLoop, taken_over: Callable[[], None] = lambda: None) -> None:
        self._loop = loop
        self._taken_over = taken_over
        self._owner: Any = threading.Lock()
        """Held by the thread that runs the loop."""
        self._serving: int | None = None
        self._deputy: threading.Thread | None = None
        self._deputy_runs = False
        self._deputy_ran = False
        """True if the deputy has run the loop during the current call."""
        self._jobs: deque[tuple[PendingResult[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._runs_job = False
        """True if the next call is one that the deputy has queued; the other queued calls do not delay it."""
        self._calls = 0
        self.in_call = False
        """True if a thread is in a call of an environment."""
        self._wanted_back = False
        """True while the thread that was in a call waits for the loop."""
        self._dozing = False
        self._call_began = threading.Event()
        self._over = threading.Event()
        self.begun = threading.Event()
        """Set when the loop runs, and the deputy is ready."""
        self.finished = threading.Event()
        """Set when the loop has ended. The serving thread may still be in a call then."""
        self._threads: weakref.WeakSet[WorldThread] = weakref.WeakSet()

    @property
    def is_current(self) -> bool:
        """True if the calling thread is the serving thread."""
        return threading.get_ident() == self._serving

    # The serving thread

    def serve(self) -> None:
        """Run the loop in the calling thread until `finish`."""
        self._serving = threading.get_ident()
        self._deputy = threading.Thread(target=self._stand_by, name="bridge-deputy", daemon=True)
        try:
            self._deputy.start()
        except RuntimeError:  # the system has no thread left
            self._deputy = None
            # The server works without a deputy, as long as no call takes long.
            _log.exception("no deputy: a slow call of an environment holds up everybody from now on")
        self.begun.set()
        try:
            with self._owner:
                while not self._over.is_set():
                    self._run_jobs()
                    if not self._over.is_set():
                        self._loop.run()
        finally:
            self.finish()
            if self._deputy is not None:
                self._deputy.join()

    def finish(self) -> None:
        """End the loop. Called by the thread that runs it."""
        self._over.set()
        self._loop.interrupt()
        self._call_began.set()
        for thread in tuple(self._threads):
            thread.close()
        self.finished.set()

    def _run_jobs(self) -> None:
        """Make the calls that the deputy could not make."""
        while self._jobs and not self._over.is_set():
            pending, function, args = self._jobs.popleft()
            # Otherwise `run` would queue it again, behind the waiting calls.
            self._runs_job = True
            self._loop.scheduler.start(self.run(function, *args), pending.finish)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of an environment in the serving thread; if it takes long, the deputy runs the loop."""
        # The deputy makes no calls, because environments belong to the serving thread. Calls that come after queued
        # ones are queued behind them, so that all are made in order.
        if (self._jobs and not self._runs_job) or self._deputy_runs:
            pending: PendingResult[T] = PendingResult()
            self._jobs.append((pending, function, args))
            if not self._deputy_runs:
                self._loop.interrupt()  # for `_run_jobs`
            return await pending
        self._runs_job = False
        # By this number the deputy distinguishes one long call from many quick ones. Waking it in each call was
        # measured to cost 3 % of the steps of one environment, and 5 % of those of 64 lanes.
        self._calls += 1
        self.in_call = True
        # After `in_call` is set: see `_doze`.
        if self._dozing:
            self._call_began.set()
        # From here on the deputy may run the loop. It does so when the call has lasted for a moment.
        self._owner.release()
        try:
            with environments_lock:
                return function(*args)
        finally:
            # Usually the lock is free. Otherwise the deputy runs the loop, and must leave it first.
            if not self._owner.acquire(blocking=False):
                self._wait_for_deputy()
            self.in_call = False
            if self._deputy_ran:
                self._deputy_ran = False
                self._loop.interrupt()  # there may be jobs, or the loop is over

    def _wait_for_deputy(self) -> None:
        """Take the loop back from the deputy after a long call."""
        # The interrupt alone is not enough: a deputy that is just leaving the loop clears it. On a busy machine it
        # could then run the loop again before this thread gets the lock, and would not leave it.
        self._wanted_back = True
        self._loop.interrupt()
        self._owner.acquire()
        self._wanted_back = False

    def run_in_row(
        self,
        calls: Sequence[tuple[Callable[[Any], Any], Any]],
        results: deque[tuple[Any, BaseException | None]],
        seconds: float,
    ) -> None:
        """Call functions of environments one after the other, each with an argument. `is_free` must be true.

        The loop is handed over once for all calls. While a call takes long, the deputy can process the earlier results.

        Args:
            calls: The functions and arguments.
            results: Gets each call's result, or exception.
            seconds: After this time no further function is called.
        """
        # Once for all: the row ends before it lasts for a moment, unless one call does.
        self._calls += 1
        self.in_call = True
        if self._dozing:
            self._call_began.set()
        owner, until = self._owner, time.monotonic() + seconds
        owner.release()
        try:
            with environments_lock:
                for function, argument in calls:
                    try:
                        results.append((function(argument), None))
                    except BaseException as error:
                        results.append((None, error))
                    # A process that an environment has forked makes no more calls: see `after_fork`.
                    if time.monotonic() > until or self._owner is not owner:
                        break
        finally:
            # Usually the lock is free. Otherwise the deputy runs the loop, and must leave it first.
            if not self._owner.acquire(blocking=False):
                self._wait_for_deputy()
            self.in_call = False
            if self._deputy_ran:
                self._deputy_ran = False
                self._loop.interrupt()  # there may be jobs, or the loop is over

    @property
    def is_free(self) -> bool:
        """True if a call would be made at once: by the thread that runs the loop, without others before it."""
        return not (self._jobs or self._deputy_runs)

    def after_fork(self) -> None:
        """In a process that an environment's call has forked: end the process when it returns from that call.

        Otherwise it would use the server's sockets, and receive the requests of the parent's clients.
        """
        # By the lock, which `run` acquires after the call: a separate check would cost each call time.
        if self.in_call:
            self._owner = SimpleNamespace(acquire=lambda **_: (os.write(2, _FORKED), os._exit(1)))

    def close(self) -> None:
        """Do nothing: the thread is still used by other environments."""

    # The deputy

    def _stand_by(self) -> None:
        """Run the loop whenever a call lasts longer than a moment; sleep while no environment is called."""
        while not self._over.is_set():
            # The same number before and after the wait, and in a call: that call has lasted for at least `MOMENT`.
            seen = self._calls
            if self._over.wait(MOMENT):
                return
            if self._calls != seen:  # it checks again later: being woken in each quick call would slow all of them
                continue
            if not self.in_call:
                self._doze()
            elif self._owner.acquire(blocking=False):
                try:
                    # Checked again with the lock held: the call may have ended, and its thread may wait for the lock.
                    if self.in_call and self._calls == seen:
                        self._run_loop()
                finally:
                    self._owner.release()

    def _doze(self) -> None:
        """Sleep until an environment is called."""
        self._call_began.clear()
        # Set before `in_call` is read, while `run` sets `in_call` before it reads this: one of the two sees the other,
        # so no call begins unnoticed.
        self._dozing = True
        if not self.in_call and not self._over.is_set():
            self._call_began.wait()
        self._dozing = False

    def _run_loop(self) -> None:
        self._deputy_runs = self._deputy_ran = True
        try:
            self._taken_over()
            # The earlier answers were flushed first. Meanwhile the call may have ended.
            if not self._wanted_back and not self._over.is_set():
                self._loop.run()
        # If the deputy ended here, the next long call would block all clients.
        except BaseException:
            _log.exception("the deputy failed: requests wait for the environment's call to end")
        finally:
            self._deputy_runs = False

    # Worlds with threads of their own

    def start_thread(self, name: str) -> Executor:
        """Return an executor with a thread of its own, which ends with the executor or with the server."""
        thread = WorldThread(self._loop.scheduler, name)
        self._threads.add(thread)
        return thread


class ServerRuntime:
    """Runs the worlds of a server (`bridge.core.worlds.scheduling.Runtime`).

    Args:
        loop: Watches files, and has the scheduler.
        serving: Calls the environments.
    """

    def __init__(self, loop: EventLoop, serving: ServingThread) -> None:
        self.scheduler = loop.scheduler
        self.scheduler.is_inside = lambda: serving.is_current
        self.executor: Executor = serving
        self.processes: set[Any] = set()
        self.note_failure: Callable[[str, str], None] = lambda name, message: None
        self.start_thread = serving.start_thread
        self.add_reader = loop.add_reader
        self.add_writer = loop.add_writer
        self.remove_reader = loop.unregister
        self.remove_writer = loop.remove_writer
