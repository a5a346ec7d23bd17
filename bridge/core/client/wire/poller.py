"""The queue of all events that a client waits for, and the sockets that fill it."""

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
    """A connection that a poller watches."""

    unsent: int
    """The number of requests that wait to be sent together with others."""

    def check_keepalive(self) -> None:
        """Send a ping to a server that has been quiet; end the connection if it did not answer the last one."""

    def flush(self, *, wait: bool = False) -> None:
        """Send the outgoing bytes, as far as the socket takes them; `wait`: wait a while for one that does not."""


class PollerTimer:
    """A call that is due at a time, unless it is cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Cancel the call. May be called twice, or too late."""
        self._call = None

    def run(self) -> None:
        """Call the function, once."""
        call, self._call = self._call, None
        if call is not None:
            call()


class Poller(Generic[T]):
    """A queue that one thread takes from. While it waits, it watches the sockets: one selector, and no thread.

    While no thread takes from the queue, a thread that all pollers share watches the `register`ed connections.
    """

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        """The events that were not taken yet. A thread that does not watch the sockets calls `wake` after it has
        appended one."""
        self._selector: selectors.BaseSelector | None = None
        self._waits: dict[socket.socket, Callable[[], None] | None] = {}
        self._alone: Callable[[], None] | None = None
        """Waits for the only watched socket; None: there are more sockets, or it cannot."""
        self._registered: set[PolledConnection] = set()
        self._check_at = 0.0
        self.deferred: dict[PolledConnection, int] | None = None
        """Connections that collect their requests, to send them together at the end of `corked`, and how many each
        collects at most; None: none does."""
        # Weak: in a fleet whose servers come and go, ended connections would add up, at 30 KB each.
        self.connections: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        """Connections that may carry further calls, by address."""
        self.watches_health = False
        """True if connections watch whether their servers drain, because their calls may move elsewhere."""
        self.look_period = math.inf
        """Seconds between two polls of the keepalive thread while Steps are in flight; inf: none are."""
        # Reentrant: the garbage collector may run while it is held, and close a connection in this thread.
        self.lock = threading.RLock()
        """Held by the thread that uses the sockets."""
        self._timers: list[tuple[float, int, PollerTimer]] = []
        self._timer_numbers = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._posters = 0
        self._waker: tuple[socket.socket, socket.socket] | None = None
        self._waker_lock = threading.RLock()  # as `lock`: the garbage collector may close the waker within `wake`

    def look_every(self, seconds: float) -> None:
        """Have the keepalive thread read between calls this often; the shortest time counts."""
        self.look_period = min(self.look_period, seconds)
        # The keepalive thread sleeps for as long as its last poll has returned.
        keepalive.look_soon()

    def look_seldom(self) -> None:
        """Undo `look_every`: no Steps are in flight any more."""
        self.look_period = math.inf

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        """Call a function in the thread that watches the sockets, and wake it. From any thread, after `add_poster`."""
        # Before waking, so that the woken thread finds it.
        self._calls.append(call)
        self.wake()

    def call_later(self, delay: float, call: Callable[[], None]) -> PollerTimer:
        """Call a function after some seconds, in the thread that watches the sockets then. With the lock held."""
        timer = PollerTimer(call)
        heapq.heappush(self._timers, (time.monotonic() + delay, next(self._timer_numbers), timer))
        return timer

    def is_frozen(self) -> bool:
        """Take the lock at the end of the interpreter. True: another thread has it, and will never release it."""
        return sys.is_finalizing() and not self.lock.acquire(blocking=False)

    def wake(self) -> None:
        """Wake the thread that waits in `ready`. From any thread, after `add_poster`."""
        # Not `lock`, which the thread to wake holds while it waits.
        with self._waker_lock:
            waker = self._waker
            if waker is not None:
                with contextlib.suppress(OSError):  # it is full, or the garbage collector has just closed it
                    waker[1].send(b"\0")

    def add_poster(self) -> None:
        """Allow other threads to wake this one, until `remove_poster`, which must be called even after an error."""
        with self.lock:
            # Only when needed: with a second socket, `recv` could not wait for the connection's own.
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
        """Send the requests that are made within, and that share a socket, together."""
        self.deferred = {}
        try:
            yield
        finally:
            # After an error too: the written requests must be sent, and later ones must not be held back.
            held, self.deferred = self.deferred, None
            with self.lock:
                try:
                    for connection in held:
                        connection.flush()
                finally:  # for connections that an interrupt has skipped
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
        """Call `ready` with the events, within `get`, when one of `events` occurs; replaces the socket's earlier watch.

        Args:
            sock: The socket.
            events: The events to wait for, of `selectors`.
            ready: The function to call.
            alone: The function to call instead while no other socket is watched. It does the same as `ready`, and waits
                for the events itself, for at most `RECEIVE_TIMEOUT` seconds. None: there is none.
        """
        # Made with the first socket, and closed with the last one: a selector uses a file descriptor.
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
        """Stop watching a socket."""
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
        """Check a connection's keepalive from now on, even while no thread calls `get`."""
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
            The seconds until the next poll.
        """
        # The lock's holder watches the sockets itself. Waiting for it would delay the pollers of other environments.
        if self.lock.acquire(blocking=False):
            try:
                self._poll(0.0)
                self._check_keepalives()
            finally:
                self.lock.release()
        return keepalive.period()

    def _check_keepalives(self) -> None:
        self._check_at = time.monotonic() + keepalive.period()
        # A connection that is closed leaves the set.
        for connection in tuple(self._registered):
            connection.check_keepalive()

    def get(self, timeout: float) -> T:
        """Take the next item; see `ready`.

        Raises:
            queue.Empty: No item came.
        """
        items = self.ready(timeout)
        if not items:
            raise queue.Empty
        return items.popleft()

    def ready(self, timeout: float) -> deque[T]:
        """Wait until there is an item; return `items`, from which the caller takes. It is empty if none came.

        Args:
            timeout: Seconds to wait; 0: only check the sockets once.
        """
        if self.items:
            return self.items
        now = time.monotonic()
        # The sockets are checked once even after the deadline: items may have arrived by now.
        deadline, wait = now + timeout, max(0.0, timeout)
        with self.lock:
            while not self.items:  # the other thread may have put an item before it released the lock
                if wait < 0:
                    break
                # A client with one socket waits in `recv`: a round of the selector costs as much as the `recv` itself.
                # But `recv` waits for `RECEIVE_TIMEOUT` even if something else becomes due, so it is not used with a
                # timer, or with less time than that.
                if self._alone is not None and wait > RECEIVE_TIMEOUT and not self._timers and now < self._check_at:
                    self._alone()
                elif self._selector is None and not self._timers:
                    time.sleep(wait)  # there is nothing from which an item could come
                # Also if a connection sends so much that there is never a quiet moment.
                elif not self._poll(min(wait, keepalive.KEEPALIVE / 10)) or now > self._check_at:
                    self._check_keepalives()
                now = time.monotonic()
                wait = deadline - now
        return self.items

    def poll_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Watch the sockets until `done` returns True, or until the deadline, monotonic seconds. With the lock held."""
        while not done() and self._selector is not None and (wait := deadline - time.monotonic()) > 0:
            self._poll(wait)

    def _poll(self, wait: float) -> bool:
        """Serve the sockets and timers that are ready within `wait` seconds; return True if a socket was."""
        selector, timers = self._selector, self._timers
        if timers:
            wait = max(0.0, min(wait, timers[0][0] - time.monotonic()))
        ready: list[tuple[selectors.SelectorKey, int]] = []
        if selector is not None:
            ready = selector.select(wait)
        elif wait > 0:
            time.sleep(wait)  # until a timer is due
        # A callback may close other sockets of this round. Their callbacks are called all the same, and must check.
        for key, events in ready:
            key.data(events)
        while self._calls:
            self._calls.popleft()()
        while timers and timers[0][0] <= time.monotonic():
            heapq.heappop(timers)[2].run()
        return bool(ready)
