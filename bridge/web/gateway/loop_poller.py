"""Client sockets in a server's event loop, without a thread of their own."""

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
    """A poller that runs client connections in an event loop: `get` is never called.

    Args:
        loop: The event loop. All methods except `call_soon_threadsafe` must be called in it.
    """

    def __init__(self, loop: EventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._keeper: Timer | None = None

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        """Call a function in the event loop; safe to call from any thread."""
        self._loop.scheduler.call_soon_threadsafe(call)

    def call_later(self, delay: float, call: Callable[[], None]) -> PollerTimer:
        """Call a function after some seconds."""
        # The client's own kind of timer, because its code cancels it. The loop's timer then does nothing.
        timer = PollerTimer(call)
        self._loop.scheduler.call_later(delay, timer.run)
        return timer

    def add_poster(self) -> None:
        """Do nothing: the event loop can always be woken."""

    def remove_poster(self) -> None:
        """Do nothing."""

    def poll_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Do nothing: the event loop must not block."""

    def watch(
        self,
        sock: socket.socket,
        events: int,
        ready: Callable[[int], None],
        alone: Callable[[], None] | None = None,
    ) -> None:
        """Call `ready` with the events whenever one of `events` occurs; replaces a previous registration.

        The event loop has other sockets too, so `alone` is ignored.
        """
        self._loop.modify(sock, events, ready)

    def forget(self, sock: socket.socket) -> None:
        """Stop watching a socket."""
        self._loop.unregister(sock)

    def register(self, connection: PolledConnection) -> None:
        """Check a connection's keepalive regularly from now on."""
        self._registered.add(connection)
        if self._keeper is None:
            self._keeper = self._loop.scheduler.call_later(keepalive.period(), self._check)

    def unregister(self, connection: PolledConnection) -> None:
        """Undo `register`."""
        self._registered.discard(connection)
        if not self._registered and self._keeper is not None:
            # A gateway without clients needs no timer.
            self._keeper.cancel()
            self._keeper = None

    def _check(self) -> None:
        self._keeper = self._loop.scheduler.call_later(keepalive.period(), self._check)
        self._check_keepalives()
