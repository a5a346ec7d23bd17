"""The thread that keeps connections alive while their owners do something else, such as training.

It answers the keepalive pings of servers, sends ours, and lets pools reconnect after losses. A process has one such
thread, and none while no connection needs it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Protocol

from bridge.core.logs import SafeLog
from bridge.core.ownership import forget_in_child
from bridge.core.transport.sockets import QUIET

__all__ = ["KEEPALIVE", "add", "look_soon", "period", "remove"]

_log = SafeLog(__name__)
KEEPALIVE = QUIET
"""Seconds of silence after which the server is sent a ping. It has half of that time to answer."""


def period() -> float:
    """Return the seconds between two polls. Servers give their clients ten or more to answer a ping."""
    return KEEPALIVE / 10


class _Pollable(Protocol):
    def poll_nowait(self) -> float:
        """Handle what has arrived, without waiting; return the seconds until the next poll."""


class _Keeper:
    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        # Its lock is reentrant: the garbage collector may close a connection, which calls `remove`, in a thread that
        # holds the lock.
        self._change = threading.Condition()
        # Weak references, so that an unreferenced environment is collected, and closed.
        self._all: weakref.WeakSet[_Pollable] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._added = False

    def add(self, poller: _Pollable) -> None:
        with self._change:
            if poller in self._all:
                return
            self._all.add(poller)
            self.look_soon()  # it may be due before the others
            if self._thread is not None:
                return
            thread = self._thread = threading.Thread(target=self._run, name="bridge-keepalive", daemon=True)
        # Without the lock: the garbage collector may call `remove` in the new thread while `start` waits for it.
        try:
            thread.start()
        except BaseException:  # no thread is left, or KeyboardInterrupt: the next `add` tries again
            with self._change:
                self._thread = None
                self._all.discard(poller)
            raise

    def look_soon(self) -> None:
        """Poll all pollers now, because something is due earlier than the last poll has returned."""
        with self._change:
            self._added = True
            self._change.notify_all()

    def remove(self, poller: _Pollable) -> None:
        with self._change:
            self._all.discard(poller)
            thread = self._thread
            self._change.notify_all()
            # The garbage collector may call this in the thread itself, which cannot wait for its own end. At the end of
            # Python the thread is frozen.
            if self._all or thread is None or thread is threading.current_thread() or sys.is_finalizing():
                return
            # If another poller is added meanwhile, the thread continues for it, and the wait ends.
            self._change.wait_for(lambda: self._all or self._thread is not thread, 2 * period())
            if self._thread is thread:
                return
        thread.join(2 * period())

    def _run(self) -> None:
        wait = period()
        while True:
            with self._change:
                self._change.wait_for(lambda: not self._all or self._added, wait)
                self._added = False
                if not self._all:
                    # Cleared under the lock: an `add` before this still has a thread, and one after it starts another.
                    self._thread = None
                    self._change.notify_all()
                    return
            wait = self._look()

    def _look(self) -> float:
        with self._change:
            everybody = tuple(self._all)
        wait = period()
        # Poll without the lock: `add` and `remove` must not wait for a busy poller.
        for poller in everybody:
            try:
                wait = min(wait, poller.poll_nowait())
            except Exception:  # without this thread the connections of all others would be lost
                _log.exception("a connection was not looked after")
        return wait

    def after_fork(self) -> None:
        """Start again in the forked process, which does not have the thread."""
        self._start()


_keeper = _Keeper()
forget_in_child(_keeper)
add = _keeper.add
look_soon = _keeper.look_soon
remove = _keeper.remove
