"""The event loop of a server: the only file of it that waits.

One thread at a time runs the loop: the serving thread, or its deputy while an environment's call lasts long
(`bridge.server.serving`). Whoever runs it owns everything that hangs on it, so nothing there needs a lock.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from bridge.worlds.scheduling import Scheduler

__all__ = ["READ", "WRITE", "EventLoop"]

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class _LoopScheduler(Scheduler):
    """A scheduler that other threads may wake."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(time.monotonic)
        self._wake = wake

    def call_soon_threadsafe(self, callback: Callable[[], Any]) -> None:
        """Call a function soon; may be called from any thread."""
        self._ready.append(callback)
        self._wake()


class _File:
    """The callbacks of a file that `add_reader` watches."""

    def __init__(self, reader: Callable[[], None]) -> None:
        self.reader = reader
        self.writer: Callable[[], None] | None = None

    def __call__(self, events: int) -> None:
        if events & READ:
            self.reader()
        if events & WRITE and self.writer is not None:
            self.writer()


class EventLoop:
    """Waits for sockets, timers and other threads, and calls what is due."""

    def __init__(self) -> None:
        self.scheduler: Scheduler = _LoopScheduler(self.wake)
        self.serve: Callable[[], bool] = lambda: False
        """Called after each event: serves requests that have come; returns whether some are left."""
        self.on_signal: Callable[[int], None] = lambda number: None
        """Called with the number of each signal that came."""
        self._behind = False
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, READ, self._on_wake)

    # Files

    def register(self, file: Any, events: int, callback: Callable[[int], None]) -> None:
        """Call a function with what a file is ready for (READ, WRITE). It must stand being called for nothing."""
        self._selector.register(file, events, callback)

    def modify(self, file: Any, events: int, callback: Callable[[int], None]) -> None:
        """Watch a file for something else."""
        self._selector.modify(file, events, callback)

    def unregister(self, file: Any) -> None:
        """Watch a file no longer; again: nothing."""
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

    def remove_reader(self, file: Any) -> None:
        """Watch a file no longer; again: nothing."""
        self.unregister(file)

    # Other threads and signals

    @property
    def wakeup_fd(self) -> int:
        """What `signal.set_wakeup_fd` takes: the numbers of signals are written there."""
        return self._waker.fileno()

    def wake(self) -> None:
        """Have `turn` return soon; may be called from any thread."""
        with contextlib.suppress(OSError):  # it is full: the loop will look
            self._waker.send(b"\0")

    def _on_wake(self, events: int) -> None:
        try:
            data = self._woken.recv(4096)
        except BlockingIOError:
            return
        for number in data:
            if number:
                self.on_signal(number)

    # The loop

    def turn(self, *, block: bool = True) -> None:
        """Wait until something happens, and call what is due.

        Args:
            block: Whether to wait at all.
        """
        scheduler = self.scheduler
        for key, events in self._selector.select(self._timeout() if block else 0):
            key.data(events)
            if not self._behind:
                self._behind = self.serve()
        scheduler.run()
        self._behind = self.serve()

    def _timeout(self) -> float | None:
        """Seconds until something is due; None: nothing is."""
        if self._behind or self.scheduler.ready:
            return 0
        due = self.scheduler.next_due()
        return None if due is None else max(0.0, due - time.monotonic())

    def close(self) -> None:
        """Give up the selector and the wake-ups; by the thread that ran the loop last."""
        self._selector.close()
        self._woken.close()
        self._waker.close()
