"""The event loop of a server: the only file of the server that waits.

One thread at a time runs the loop: the serving thread, or its deputy while a call of an environment lasts long
(`bridge.core.server.serving`). The thread that runs the loop owns all its objects, so they need no locks.
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
    """Waits for sockets, timers and other threads, and calls their callbacks."""

    def __init__(self) -> None:
        self.scheduler: Scheduler = _LoopScheduler(self.wake)
        self.requests: Collection[Any] = ()
        """Requests that have arrived; `serve` is called while there are some."""
        self.serve: Callable[[], None] = lambda: None
        """Serves requests that have arrived, or only some if they take long."""
        self.on_signal: Callable[[int], None] = lambda number: None
        """Called with the number of each signal that came."""
        self._interrupted = False
        # Sockets, because Windows can only select sockets; not blocking, as `signal.set_wakeup_fd` requires.
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        # Asking the selector for an unknown file takes longer than the rest of a turn.
        self._files: set[Any] = set()
        self._selector.register(self._woken, READ, self._on_wake)

    # Files

    def register(self, file: Any, events: int, callback: Callable[[int], None]) -> None:
        """Call a function with the events of a file (READ, WRITE). It may also be called without need."""
        self._selector.register(file, events, callback)
        self._files.add(file)

    def modify(self, file: Any, events: int, callback: Callable[[int], None]) -> None:
        """Change the events that a file is watched for; 0: none."""
        if not events:
            self.unregister(file)
        elif file in self._files:
            self._selector.modify(file, events, callback)
        else:
            self.register(file, events, callback)

    def unregister(self, file: Any) -> None:
        """Stop watching a file. A second call does nothing."""
        self._files.discard(file)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def add_reader(self, file: Any, callback: Callable[[], None]) -> None:
        """Call a function whenever a file can be read. It may also be called without need."""
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
        """The descriptor for `signal.set_wakeup_fd`: Python writes the numbers of signals to it."""
        return self._waker.fileno()

    def wake(self) -> None:
        """Make the loop check for ready files and callbacks. May be called from any thread."""
        with contextlib.suppress(OSError):  # it is full: the loop will wake anyway
            self._waker.send(b"\0")

    def _on_wake(self, events: int) -> None:
        try:
            data = self._woken.recv(4096)
        except BlockingIOError:
            return
        for number in data:
            # `wake` sends zeros, and Python the number of each signal.
            if number:
                self.on_signal(number)

    # The loop

    def interrupt(self) -> None:
        """Make `run` return soon. May be called from any thread."""
        self._interrupted = True
        self.wake()

    def run(self) -> None:
        """Wait for events and call their callbacks, again and again until `interrupt`."""
        scheduler, selector, timers = self.scheduler, self._selector, self.scheduler.timers
        key: Any
        found: Any
        while not self._interrupted:
            # Requests are left if serving them took long. Then all sockets are checked once, without waiting, before
            # the next request is served.
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
            # No callback of this package is known to raise. Callbacks of observers, and of worlds with a custom pacer,
            # are a user's: if one fails, the worlds of all others must continue.
            except BaseException as error:
                # Ctrl-C without a signal handler raises in the main thread, and ends the loop.
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise
                _log.exception("a callback of the event loop failed")
            key = found = None  # these refer to connections, which may have been closed
        # Reset by the thread that returns for it, so that the next one to run the loop begins without it.
        self._interrupted = False

    def close(self) -> None:
        """Close the selector and the wake-up sockets. Called by the thread that ran the loop last."""
        self._selector.close()
        self._woken.close()
        self._waker.close()
