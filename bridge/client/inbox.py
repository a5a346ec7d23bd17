"""Where everything that a client waits for arrives: gRPC's deliveries from other threads, and sockets of its own."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Inbox"]

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue that one thread takes from, which in the meantime looks after sockets.

    Without sockets it is a plain queue; with sockets alone, one selector and no thread at all. Only where both are
    used does `put` wake the selector through a pair of sockets.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._selector: selectors.BaseSelector | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._others = 0

    def put(self, item: T) -> None:
        """Add an item, from any thread."""
        self._queue.put(item)
        wake = self._wake
        if wake is not None:
            with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody waits any more
                wake[1].send(b"\0")

    def put_here(self, item: T) -> None:
        """Add an item, from the thread that takes them."""
        self._queue.put(item)

    def expect_others(self, number: int) -> None:
        """Take note that `number` more connections (or fewer) deliver from other threads."""
        self._others += number
        self._arrange()

    def watch(self, sock: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        """Call `ready` with the events, within `get`, whenever one of `events` is there; replaces what was watched."""
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
        try:
            self._selector.modify(sock, events, ready)
        except KeyError:
            self._selector.register(sock, events, ready)
        self._arrange()

    def forget(self, sock: socket.socket) -> None:
        """Watch a socket no more."""
        selector = self._selector
        if selector is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(sock)
        self._arrange()

    def _arrange(self) -> None:
        """Have a selector only for sockets, and a wake-up only for sockets beside other threads."""
        selector = self._selector
        if selector is None:
            return
        own = len(selector.get_map()) - (self._wake is not None)
        if self._wake is None and own and self._others:
            self._wake = socket.socketpair()
            for end in self._wake:
                end.setblocking(False)
            selector.register(self._wake[0], selectors.EVENT_READ, None)
        elif self._wake is not None and not (own and self._others):
            wake, self._wake = self._wake, None
            selector.unregister(wake[0])
            for end in wake:
                end.close()
        if not own:
            selector.close()
            self._selector = None

    def get_here(self) -> T:
        """Take an item that is here already; raises queue.Empty where none is. Does not look at the sockets."""
        return self._queue.get_nowait()

    def get(self, timeout: float) -> T:
        """Take the next item.

        Args:
            timeout: Seconds to wait for it; 0: take what is there or has arrived at a socket.

        Raises:
            queue.Empty: None came.
        """
        if self._selector is None:
            return self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            pass
        deadline = time.monotonic() + timeout
        wait = timeout
        while True:
            selector = self._selector
            if selector is None:
                return self._queue.get(timeout=max(0.0, wait))
            for key, events in selector.select(max(0.0, wait)):
                if key.data is not None:
                    key.data(events)
                elif self._wake is not None:
                    with contextlib.suppress(OSError):
                        self._wake[0].recv(4096)
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                wait = deadline - time.monotonic()
                if wait <= 0:
                    raise
