"""Where everything that a client waits for arrives: a queue, and the sockets that fill it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import queue
import selectors
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from bridge.core.client.wire import keepalive
from bridge.core.transport.sockets import RECEIVE_TIMEOUT

__all__ = ["PolledConnection", "Poller", "PollerTimer"]

T = TypeVar("T")


class PolledConnection(Protocol):
    """A connection that a poller looks after."""

    unsent: int
    """Requests that wait to be sent together with others."""

    def check_keepalive(self) -> None:
        """Ask for a sign of a server that has been quiet, and give the connection up if none came in time."""

    def flush(self, *, wait: bool = False) -> None:
        """Send what is to be sent, as far as the socket takes it; `wait`: wait a while for a socket that does not."""


class PollerTimer:
    """A call that is due at a time, until it is cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Let it not be called. May be called twice, or too late."""
        self._call = None

    def run(self) -> None:
        """Call it, once."""
        call, self._call = self._call, None
        if call is not None:
            call()


class Poller(Generic[T]):
    """A queue that one thread takes from, which in the meantime looks after sockets: one selector, and no thread.

    While nobody takes from it, a thread that all pollers share looks after the connections that are `register`ed.
    """

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        """The events that nobody has taken yet. A thread that does not look after the sockets calls `wake` after it has
        appended one."""
        self._selector: selectors.BaseSelector | None = None
        self._waits: dict[socket.socket, Callable[[], None] | None] = {}
        self._alone: Callable[[], None] | None = None
        """Waits for the only socket that is watched; None: there are more, or none that can."""
        self._registered: set[PolledConnection] = set()
        self._check_at = 0.0
        self.deferred: dict[PolledConnection, int] | None = None
        """Connections that hold their requests back, to send them together at the end of `corked`, and how many each
        holds back at most; None: none does."""
        # Weak: in a fleet whose servers come and go, those that have ended would add up, at 30 KB each.
        self.connections: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        """Sockets that may carry further calls, by where to."""
        self.watches_health = False
        """True if connections ask to be told when their servers drain, because their calls may move elsewhere."""
        self.look_period = math.inf
        """Seconds between two looks of the keepalive thread, because Steps are in flight; inf: none are."""
        # Reentrant: the garbage collector runs anywhere, also where it is held, and may close a connection there.
        self.lock = threading.RLock()
        """Held by whoever is at the sockets."""
        self._timers: list[tuple[float, int, PollerTimer]] = []
        self._timer_numbers = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._posters = 0
        self._waker: tuple[socket.socket, socket.socket] | None = None
        self._waker_lock = threading.RLock()  # as `lock`: the garbage collector may close the waker within `wake`

    def look_every(self, seconds: float) -> None:
        """Have the keepalive thread take what has come between calls this often; the shortest time counts."""
        self.look_period = min(self.look_period, seconds)
        # The keepalive thread sleeps for as long as it was told at its last look.
        keepalive.look_soon()

    def look_seldom(self) -> None:
        """Undo `look_every`: no Steps are in flight any more."""
        self.look_period = math.inf

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        """Have `call` called by whatever looks after the sockets, and wake it; from any thread, after `add_poster`."""
        # First, so that whoever is woken finds it.
        self._calls.append(call)
        self.wake()

    def call_later(self, delay: float, call: Callable[[], None]) -> PollerTimer:
        """Have `call` called after some seconds by whatever looks after the sockets then; with the lock held."""
        timer = PollerTimer(call)
        heapq.heappush(self._timers, (time.monotonic() + delay, next(self._timer_numbers), timer))
        return timer

    def is_frozen(self) -> bool:
        """Take the lock at the end of the interpreter; True: another thread has it, and will never give it back."""
        return sys.is_finalizing() and not self.lock.acquire(blocking=False)

    def wake(self) -> None:
        """Wake whoever waits in `ready`; from any thread, after `add_poster`."""
        # Not `lock`, which whoever is to be woken holds while it waits.
        with self._waker_lock:
            waker = self._waker
            if waker is not None:
                with contextlib.suppress(OSError):  # it is full, or the garbage collector has just closed it
                    waker[1].send(b"\0")

    def add_poster(self) -> None:
        """Be woken by other threads, until `remove_poster`, which is called after an error too."""
        with self.lock:
            # Not before somebody posts: with a second socket, `recv` could not wait for the connection's own.
            self._posters += 1
            if self._waker is None:
                self._waker = socket.socketpair()
                for sock in self._waker:
                    sock.setblocking(False)
                self.watch(self._waker[0], selectors.EVENT_READ, self._on_wake)

    def remove_poster(self) -> None:
        """Undo one `add_poster`."""
        with self.lock:
            self._posters -= 1
            if self._waker is None or self._posters:
                return
            with self._waker_lock:
                waker, self._waker = self._waker, None
            self.forget(waker[0])
            for sock in waker:
                sock.close()

    def _on_wake(self, events: int) -> None:
        if self._waker is not None:
            with contextlib.suppress(BlockingIOError):
                self._waker[0].recv(4096)

    @contextlib.contextmanager
    def corked(self) -> Iterator[None]:
        """Send the requests made meanwhile over the same socket together."""
        self.deferred = {}
        try:
            yield
        finally:
            # After an error too: what was written has to be sent, and what follows must not be held back.
            held, self.deferred = self.deferred, None
            with self.lock:
                try:
                    for connection in held:
                        connection.flush()
                finally:  # those that an interrupt has left out
                    for connection in held:
                        if connection.unsent:
                            connection.flush()

    def watch(
        self,
        sock: socket.socket,
        events: int,
        ready: Callable[[int], None],
        alone: Callable[[], None] | None = None,
    ) -> None:
        """Call `ready` with the events, within `get`, whenever one of `events` is there; replaces what was watched.

        Args:
            sock: The socket.
            events: What to wait for, as `selectors` says.
            ready: What to call.
            alone: What to call in place of all this while no other socket is watched: does what `ready` does, and waits
                for it itself, `RECEIVE_TIMEOUT` seconds at most. None: nothing can.
        """
        # Made with the first socket, and closed with the last one: a selector holds a file descriptor.
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
        try:
            self._selector.modify(sock, events, ready)
        except KeyError:
            self._selector.register(sock, events, ready)
        self._waits[sock] = alone
        self._find_alone()

    def _find_alone(self) -> None:
        self._alone = next(iter(self._waits.values())) if len(self._waits) == 1 else None

    def forget(self, sock: socket.socket) -> None:
        """Watch a socket no more."""
        selector = self._selector
        if selector is None:
            return
        self._waits.pop(sock, None)
        self._find_alone()
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(sock)
        if not selector.get_map():
            selector.close()
            self._selector = None

    def register(self, connection: PolledConnection) -> None:
        """Check a connection's keepalive from now on, also while nobody calls `get`."""
        self._registered.add(connection)
        keepalive.add(self)

    def unregister(self, connection: PolledConnection) -> None:
        """Undo `register`."""
        self._registered.discard(connection)
        if not self._registered:
            keepalive.remove(self)

    def poll_nowait(self) -> float:
        """Serve the sockets that are ready and check keepalives, unless another thread does so now.

        Returns:
            The seconds until the next look.
        """
        # Its holder looks after the sockets itself. To wait for it would hold up the pollers of other environments.
        if self.lock.acquire(blocking=False):
            try:
                self._poll(0.0)
                self._check_keepalives()
            finally:
                self.lock.release()
        return keepalive.period()

    def _check_keepalives(self) -> None:
        self._check_at = time.monotonic() + keepalive.period()
        # A connection that is given up leaves the set.
        for connection in tuple(self._registered):
            connection.check_keepalive()

    def get(self, timeout: float) -> T:
        """Take the next item; as `ready`.

        Raises:
            queue.Empty: None came.
        """
        items = self.ready(timeout)
        if not items:
            raise queue.Empty
        return items.popleft()

    def ready(self, timeout: float) -> deque[T]:
        """Wait until there is an item; return `items`, from which the caller takes. It is empty where none came.

        Args:
            timeout: Seconds to wait; 0: only look at the sockets.
        """
        if self.items:
            return self.items
        now = time.monotonic()
        # Also where the deadline is over the sockets are looked at, once: what is due may have come by now.
        deadline, wait = now + timeout, max(0.0, timeout)
        with self.lock:
            while not self.items:  # the other thread may have put one before it let go of the lock
                if wait < 0:
                    break
                # A client with one socket waits in `recv`: a round of the selector costs as much as the `recv` itself.
                # But `recv` waits for `RECEIVE_TIMEOUT` whatever becomes due meanwhile, so not with a timer, nor with
                # less time than that.
                if self._alone is not None and wait > RECEIVE_TIMEOUT and not self._timers and now < self._check_at:
                    self._alone()
                elif self._selector is None and not self._timers:
                    time.sleep(wait)  # nothing is there from which anything could come
                # Also where one connection says so much that there is never a quiet moment.
                elif not self._poll(min(wait, keepalive.KEEPALIVE / 10)) or now > self._check_at:
                    self._check_keepalives()
                now = time.monotonic()
                wait = deadline - now
        return self.items

    def poll_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Look after the sockets until `done`, or until the deadline, monotonic seconds; with the lock held."""
        while not done() and self._selector is not None and (wait := deadline - time.monotonic()) > 0:
            self._poll(wait)

    def _poll(self, wait: float) -> bool:
        """Look after what is ready within `wait` seconds, sockets and timers; return whether a socket was."""
        selector, timers = self._selector, self._timers
        if timers:
            wait = max(0.0, min(wait, timers[0][0] - time.monotonic()))
        ready: list[tuple[selectors.SelectorKey, int]] = []
        if selector is not None:
            ready = selector.select(wait)
        elif wait > 0:
            time.sleep(wait)  # until a timer is due
        # A callback may close other sockets of this round. Their callbacks are called all the same, and have
        # to check.
        for key, events in ready:
            key.data(events)
        while self._calls:
            self._calls.popleft()()
        while timers and timers[0][0] <= time.monotonic():
            heapq.heappop(timers)[2].run()
        return bool(ready)
