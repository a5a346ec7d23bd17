"""The end of a server, by a signal, `drain` or `stop`: first its calls end, then its worlds, then its event loop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from bridge.core.logs import SafeLog
from bridge.core.server.event_loop import EventLoop
from bridge.core.server.limits import check_drain_timeout
from bridge.core.server.registry import Registry
from bridge.core.server.serving import ServingThread
from bridge.errors import Code, RequestError

__all__ = ["CLOSE_TIMEOUT", "PLAYED_BY_NOBODY", "SLICE", "Shutdown", "Stopping", "draining_line"]

_log = SafeLog(__name__)
PLAYED_BY_NOBODY = (
    "the program ends, and its server with it, before anybody has played there; Server.wait() and bridge.serve() serve "
    "until Ctrl-C"
)
"""The warning for a script that ends although it was meant to wait for clients."""
CLOSE_TIMEOUT = 5.0
"""Seconds for closing environments when a server stops."""
_INTERRUPT_TIMEOUT = 1.5
"""The same after Ctrl-C."""
# Seconds between two checks whether the last call has ended by itself.
_POLL = 0.02
SLICE = 0.1
"""The longest wait at a time for the end of what is stopped, in seconds: Python may notice a signal only after it."""


class Stopping:
    """Lets one thread at a time stop an object; other threads wait. A later call may shorten the grace, too.

    A signal handler may call `stop` while its own thread is in it. The inner call cannot do the work: the interrupted
    one may hold a lock of the standard library, such as that of a `subprocess.Popen`. So it only shortens the grace.
    """

    def __init__(self) -> None:
        self.grace = 0.0
        """Seconds that clients have to leave."""
        self.deadline = 0.0
        """The end of these seconds, in monotonic seconds. Any thread may bring it forward: read it at least each
        `SLICE` seconds."""
        self._lock = threading.RLock()
        self._thread: int | None = None
        """The thread that stops the object; None: nobody does."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    @contextlib.contextmanager
    def begin(self, grace: float, *, blocking: bool = True) -> Iterator[bool]:
        """Yield True if the caller has to stop the object; False: another call does.

        Args:
            grace: Seconds that clients have to leave.
            blocking: False: do not wait for another thread that stops the object.
        """
        deadline = time.monotonic() + grace
        if deadline < self.deadline:
            self.grace, self.deadline = grace, deadline
        if self._thread == threading.get_ident() or not self._lock.acquire(blocking=blocking):
            yield False
            return
        try:
            self._thread, self.grace, self.deadline = threading.get_ident(), grace, deadline
            yield True
        finally:
            self._thread = None
            self._lock.release()


class Shutdown:
    """Ends a server. Its methods are called in the event loop, except `handle_signals`.

    Args:
        loop: The event loop.
        serving: Runs the event loop.
        registry: The worlds.
        connections: The connections; its `clients` is the number of those with an open call.
        processes: The processes of isolated worlds.
        drain: Called once, first of all, with the seconds of grace: no new calls and worlds from then on.
        drain_timeout: Seconds that open calls have to end by themselves, by default.
    """

    def __init__(
        self,
        loop: EventLoop,
        serving: ServingThread,
        registry: Registry,
        connections: Any,
        processes: set[Any],
        drain: Callable[[float], None],
        drain_timeout: float,
    ) -> None:
        self._loop = loop
        self._serving = serving
        self._registry = registry
        self._connections = connections
        self._processes = processes
        self._drain = drain
        self.drain_timeout = drain_timeout
        """Seconds that open calls have to end by themselves, by default."""
        self.begun = False
        """True if the server is ending."""
        self.left_behind = False
        """True if an environment was still in a call at the end."""
        self.ends_process = False
        """True if a signal ends the process when an environment is in a call: the calling thread cannot return."""
        self._grace = drain_timeout
        self._waits_since: float | None = None
        """When the server began to wait for its clients, in seconds of the scheduler; None: it does not wait."""
        self._waits_until = 0.0
        """The planned end of this wait; a signal or a call may bring it forward."""
        self._signal: int | None = None
        """The last signal that was received; None: none was."""
        self._stopping = False
        """True if a signal has requested an end that waits for no client."""
        self._handlers: dict[signal.Signals, Any] = {}
        """The earlier handlers of the signals, while the signals are passed to the event loop."""

    @contextlib.contextmanager
    def handle_signals(self, grace: float | None) -> Iterator[None]:
        """Pass signals to the event loop, whichever thread runs it. Does nothing except in the main thread.

        Args:
            grace: Seconds that open calls have to end by themselves after SIGTERM or SIGHUP; None: `drain_timeout`.
        """
        self._grace = self.drain_timeout if grace is None else grace
        check_drain_timeout(self._grace, "grace")
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ignore(number: int, frame: FrameType | None) -> None:
            """Do nothing: Python writes the number of the signal to the event loop's wake-up socket."""

        # Through the wake-up socket the event loop gets a signal even while this thread is in a call of an environment:
        # the deputy runs the loop then.
        self._loop.on_signal = self._on_signal
        from bridge.core.signals import handled_signals  # not every server handles signals

        self._handlers = {number: signal.signal(number, ignore) for number in handled_signals()}
        wakeup = signal.set_wakeup_fd(self._loop.wakeup_fd, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def after_fork(self) -> None:
        """In a forked process: its signals are its own, and are not passed to the parent's event loop."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
            self._restore_handlers()

    def _on_signal(self, number: int) -> None:
        if number not in self._handlers:
            return
        before, self._signal = self._signal, number
        # A second signal asks not to wait for clients, and a third, or a second Ctrl-C, not to wait for anything.
        if before is not None and self._stopping:
            _end_process(number)
        if number == signal.SIGINT or before is not None:
            if before is not None:
                _log.info("stopping: a second signal, %s, ended the drain", signal.Signals(number).name)
            self._stopping = True
            self.begin(0.0, _INTERRUPT_TIMEOUT)
        else:
            self.begin(self._grace, CLOSE_TIMEOUT)

    def begin(self, grace: float, close_timeout: float = CLOSE_TIMEOUT) -> None:
        """Accept no more calls and worlds, and end when the last call has ended.

        Args:
            grace: Seconds after which the remaining calls are ended.
            close_timeout: Seconds for closing environments.
        """
        if self._serving.finished.is_set():
            return
        # A later call, by `stop` or a signal, only brings the end forward.
        if not self.begun:
            self.begun = True
            if grace and (left := self._connections.clients):
                self._waits_since = self._loop.scheduler.now()
                self._waits_until = self._waits_since + grace
                _log.info(draining_line(left, grace))
            self._drain(grace)
        deadline = self._loop.scheduler.now() + grace
        self._loop.scheduler.call_soon(lambda: self._end_connections(deadline, close_timeout))

    def _end_connections(self, deadline: float, close_timeout: float) -> None:
        """End the calls that are open at the deadline, and all connections; then close the worlds."""
        scheduler = self._loop.scheduler
        if self._serving.finished.is_set():
            return
        left = self._connections.clients
        if left and scheduler.now() < deadline:
            when = min(deadline, scheduler.now() + _POLL)
            scheduler.call_at(when, lambda: self._end_connections(deadline, close_timeout))
            return
        if self._waits_since is not None:
            waited, self._waits_since = scheduler.now() - self._waits_since, None
            if left:
                how = "timed out" if scheduler.now() >= self._waits_until else "was cut short"
                _log.warning("drain %s: %s still there, and cut off after %.1f s", how, _clients(left), waited)
            else:
                _log.info("drained: the last client has left after %.1f s", waited)
        self._connections.close_all(RequestError(Code.UNAVAILABLE, "the server was stopped"))
        # An environment may never return from its call, or from `close`.
        scheduler.call_later(close_timeout, self._give_up)
        # In the next turn of the loop: this one still serves the ends of the calls, by which agents leave their worlds.
        scheduler.call_soon(lambda: scheduler.start(self._registry.close(), lambda result, error: self._finish()))

    def _give_up(self) -> None:
        """End although an environment is in a call that does not return."""
        if self._serving.finished.is_set():
            return
        self.left_behind = self._serving.in_call
        if self.left_behind and self._signal is not None and self.ends_process:
            sys.stderr.write("an environment is still in a call: the process is ended\n")
            _end_process(self._signal)
        self._finish()

    def _finish(self) -> None:
        # Sessions whose last request ended with their world are closed now, because the loop serves nothing afterwards.
        self._loop.serve()
        self.end_processes()
        self._serving.finish()

    def end_processes(self) -> None:
        """Kill the remaining processes, of worlds that are being made, or do not close."""
        for process in list(self._processes):
            process.abandon()


def draining_line(clients: int, grace: float) -> str:
    """Return a log line that says how many clients a server waits for, and until when.

    Args:
        clients: The number of remaining clients.
        grace: Seconds that they have.
    """
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + grace))
    return f"draining: {_clients(clients)} left, until {until} at the latest ({grace:g} s)"


def _clients(count: int) -> str:
    return "1 client is" if count == 1 else f"{count} clients are"


def _end_process(number: int) -> None:
    """End this process at once, with the exit code of a process that a signal has ended."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # Nothing less ends a process whose main thread is in an environment's call. It flushes nothing by itself.
    os._exit(128 + number)
