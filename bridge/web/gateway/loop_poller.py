"""The client's sockets in a server's event loop, without a thread of their own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from bridge.core.client.wire import keepalive
from bridge.core.client.wire.poller import PolledConnection, Poller, PollerTimer
from bridge.core.server.event_loop import EventLoop
from bridge.core.worlds.scheduling import Timer

__all__ = ["LoopPoller"]


class LoopPoller(Poller[Any]):
    """Serves connections of the client by an event loop: nobody calls `get`.

    Args:
        loop: The event loop. All methods are called in it but `call_soon_threadsafe`.
    """

    def __init__(self, loop: EventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._keeper: Timer | None = None

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        """Have `call` called in the event loop; from any thread."""
        self._loop.scheduler.call_soon_threadsafe(call)

    def call_later(self, delay: float, call: Callable[[], None]) -> PollerTimer:
        """Have `call` called after some seconds."""
        # The client's own kind of timer, which its code cancels. The loop's then calls nothing.
        timer = PollerTimer(call)
        self._loop.scheduler.call_later(delay, timer.run)
        return timer

    def add_poster(self) -> None:
        """Do nothing: an event loop can be woken always."""

    def remove_poster(self) -> None:
        """Do nothing."""

    def poll_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Do nothing: the event loop waits for no server."""

    def watch(
        self,
        sock: socket.socket,
        events: int,
        ready: Callable[[int], None],
        alone: Callable[[], None] | None = None,
    ) -> None:
        """Call `ready` with the events whenever one of `events` is there; replaces what was watched.

        The event loop has other sockets too, so nothing waits in `alone`.
        """
        self._loop.modify(sock, events, ready)

    def forget(self, sock: socket.socket) -> None:
        """Watch a socket no more."""
        self._loop.unregister(sock)

    def register(self, connection: PolledConnection) -> None:
        """Check a connection's keepalive from now on."""
        self._registered.add(connection)
        if self._keeper is None:
            self._keeper = self._loop.scheduler.call_later(keepalive.period(), self._check)

    def unregister(self, connection: PolledConnection) -> None:
        """Undo `register`."""
        self._registered.discard(connection)
        if not self._registered and self._keeper is not None:
            # A gateway whose clients have left wakes for nothing.
            self._keeper.cancel()
            self._keeper = None

    def _check(self) -> None:
        self._keeper = self._loop.scheduler.call_later(keepalive.period(), self._check)
        self._check_keepalives()
