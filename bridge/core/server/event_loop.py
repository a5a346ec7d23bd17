"""The event loop of a server: the only file of it that waits.

One thread at a time runs the loop: the serving thread, or its deputy while an environment's call lasts long
(`bridge.core.server.serving`). Whoever runs it owns everything that hangs on it, so nothing there needs a lock.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from bridge.core.logs import LimitedLog
from bridge.core.worlds.scheduling import Scheduler

__all__ = ["READ", "WRITE", "EventLoop"]

_log = LimitedLog(__name__)
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class _LoopScheduler(Scheduler):
    """A scheduler that other threads may wake."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(time.monotonic)
        self._wake = wake

    def call_soon_threadsafe(self, callback: Callable[[], Any]) -> None:
        """Call a function soon; may be called from any thread."""
        self.ready.append(callback)
        self._wake()


class _File:
    """The callbacks of a file that `add_reader` watches."""

    def __init__(self, reader: Callable[[], None]) -> None:
        self.reader = reader
        self.writer: Callable[[], None] | None = None

    def __call__(self, events: int) -> None:
        if events & READ:
            self.reader()
        # The reader may have removed it.
        if events & WRITE and self.writer is not None:
            self.writer()


class EventLoop:
    """Waits for sockets, timers and other threads, and calls what is due."""

    def __init__(self) -> None:
        self.scheduler: Scheduler = _LoopScheduler(self.wake)
        self.requests: Collection[Any] = ()
        """Requests that have come; `serve` is called while there are some."""
        self.serve: Callable[[], None] = lambda: None
        """Serves requests that have come, or some of them where they take long."""
        self.on_signal: Callable[[int], None] = lambda number: None
        """Called with the number of each signal that came."""
        self._interrupted = False
        # Sockets, as Windows selects nothing else; not blocking, as `signal.set_wakeup_fd` demands.
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        # Asking the selector for a file that it does not know takes it longer than all else of a turn.
        self._files: set[Any] = set()
        self._selector.register(self._woken, READ, self._on_wake)

    # Files

    def register(self, file: Any, events: int, callback: Callable[[int], None]) -> None:
        """Call a function with what a file is ready for (READ, WRITE). It must stand being called for nothing."""
        self._selector.register(file, events, callback)
        self._files.add(file)

    def modify(self, file: Any, events: int, callback: Callable[[int], None]) -> None:
        """Watch a file for something else; for nothing, where `events` is 0."""
        if not events:
            self.unregister(file)
        elif file in self._files:
            self._selector.modify(file, events, callback)
        else:
            self.register(file, events, callback)

    def unregister(self, file: Any) -> None:
        """Watch a file no longer; again: nothing."""
        self._files.discard(file)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def add_reader(self, file: Any, callback: Callable[[], None]) -> None:
        """Call a function whenever a file can be read. It must stand being called for nothing."""
        self._selector.register(file, READ, _File(callback))

    def add_writer(self, file: Any, callback: Callable[[], None]) -> None:
        """Call a function also whenever a file that is being read can be written."""
        watched: _File = self._selector.get_key(file).data
        watched.writer = callback
        self._selector.modify(file, READ | WRITE, watched)

    def remove_writer(self, file: Any) -> None:
        """Watch a file only for reading again."""
        with contextlib.suppress(KeyError, ValueError):
            watched: _File = self._selector.get_key(file).data
            if watched.writer is not None:
                watched.writer = None
                self._selector.modify(file, READ, watched)

    # Other threads and signals

    @property
    def wakeup_fd(self) -> int:
        """The descriptor for `signal.set_wakeup_fd`: the numbers of signals are written there."""
        return self._waker.fileno()

    def wake(self) -> None:
        """Have the loop look for what is ready; may be called from any thread."""
        with contextlib.suppress(OSError):  # it is full: the loop will look
            self._waker.send(b"\0")

    def _on_wake(self, events: int) -> None:
        try:
            data = self._woken.recv(4096)
        except BlockingIOError:
            return
        for number in data:
            # `wake` sends zeros, and the system the number of each signal.
            if number:
                self.on_signal(number)

    # The loop

    def interrupt(self) -> None:
        """Have `run` return soon; may be called from any thread."""
        self._interrupted = True
        self.wake()

    def run(self) -> None:
        """Wait until something happens, and call what is due, again and again until `interrupt`."""
        scheduler, selector, timers = self.scheduler, self._selector, self.scheduler.timers
        key: Any
        found: Any
        while not self._interrupted:
            # Requests are left where serving them took long. Then all sockets are looked at once before the next is
            # served, and without waiting.
            behind = bool(self.requests)
            timeout: float | None = None
            if behind or scheduler.ready:
                timeout = 0.0
            elif timers:
                timeout = max(0.0, timers[0][0] - time.monotonic())
            found = selector.select(timeout)
            try:
                for key, events in found:
                    key.data(events)
                    # Served before the next socket is read, so that an answer does not wait for requests of others.
                    if self.requests and not behind:
                        self.serve()
                        behind = bool(self.requests)
                if scheduler.ready or (timers and timers[0][0] <= time.monotonic()):
                    scheduler.run()
                if self.requests:
                    self.serve()
            # No callback of this package is known to raise. Those of observers, and of worlds with a pacer of their
            # own, are a user's: one that fails must not end the worlds of all others.
            except BaseException as error:
                # Ctrl-C where nobody handles its signal: it comes in the main thread, and ends the loop.
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise
                _log.exception("a callback of the event loop failed")
            key = found = None  # they refer to connections, which may have been closed
        # Taken by the thread that returns for it: the next one to run the loop begins without it.
        self._interrupted = False

    def close(self) -> None:
        """Give up the selector and the wake-ups; by the thread that ran the loop last."""
        self._selector.close()
        self._woken.close()
        self._waker.close()
