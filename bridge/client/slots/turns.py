"""The order of a vector environment's calls: one at a time, and asynchronous ones in pairs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from bridge.client.conflict import ConflictDetector
from bridge.errors import AlreadyPendingError, ClosedError, NothingPendingError, RemoteTimeoutError

__all__ = ["Turns"]


class Turns:
    """Lets one call of a vector environment run at a time, and knows which asynchronous call is pending.

    Args:
        lock: Held while a call runs; the thread that works between calls takes it, too.
        abandon: Called where a call that timed out is given up, so that its late answers are dropped.
        closed: Whether the environment is closed, as a copy of a closed one.
    """

    def __init__(self, lock: threading.Lock, abandon: Callable[[], None], *, closed: bool = False) -> None:
        self._conflicts = ConflictDetector("vector environment")
        self._lock = lock
        self._abandon = abandon
        self._pending: str | None = None
        self._timed_out = False
        self._closed = closed
        self._begins: str | None = None
        self._waits = False
        self._ends: Callable[[], bool] | None = None

    @property
    def closed(self) -> bool:
        """True if the environment is closed."""
        return self._closed

    def exclusive(self, call: str, begins: str | None = None) -> Turns:
        """Run a call that follows no asynchronous one, in a `with` block.

        Args:
            call: The method's name, for errors.
            begins: The asynchronous call that is pending once the block is left without an error.

        Raises:
            ConcurrentUseError: Another thread is in a call.
            ClosedError: The environment is closed.
            AlreadyPendingError: An asynchronous call is pending. After a timeout `reset` gives up any, and every call
                gives up a pending `call`.
        """
        if not self._conflicts.lock.acquire(blocking=False):
            self._conflicts.refuse()
        self._lock.acquire()
        try:
            if self._closed:
                raise self._is_closed(call)
            if self._pending is not None:
                if not self._timed_out or (call != "reset" and self._pending != "call"):
                    remedy = f"call {self._pending}_wait" + (" again, or reset" if self._timed_out else " first")
                    raise AlreadyPendingError(f"{call} while a {self._pending} is pending; {remedy}", self._pending)
                self._abandon()
                self._pending, self._timed_out = None, False
        except BaseException:
            self._release()
            raise
        self._begins, self._waits = begins, False
        return self

    def waiting(self, pending: str, *, ends: Callable[[], bool] | None = None) -> Turns:
        """Run the wait for an asynchronous call in a `with` block; after a timeout it stays pending, and can go on.

        Args:
            pending: The asynchronous call.
            ends: Whether the call is over in spite of a timeout; None: it never is.

        Raises:
            ConcurrentUseError, ClosedError: As `exclusive`.
            NothingPendingError: No such call is pending.
        """
        if not self._conflicts.lock.acquire(blocking=False):
            self._conflicts.refuse()
        self._lock.acquire()
        try:
            if self._closed:
                raise self._is_closed(f"{pending}_wait")
            if self._pending != pending:
                raise NothingPendingError(f"expected {pending}_async before {pending}_wait", pending)
        except BaseException:
            self._release()
            raise
        self._begins, self._waits, self._ends = pending, True, ends
        return self

    def closing(self) -> Turns:
        """Run `close` in a `with` block, after which no other call may come."""
        if not self._conflicts.lock.acquire(blocking=False):
            self._conflicts.refuse()
        self._lock.acquire()
        self._closed, self._begins, self._waits = True, None, False
        return self

    def __enter__(self) -> None:
        """Do nothing: the turn was taken by the method that returned this object."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waits:
            over = self._ends is not None and self._ends()
            self._timed_out = isinstance(error, RemoteTimeoutError) and not over
            self._pending = self._begins if self._timed_out else None
        elif error is None:
            self._pending = self._begins
        self._lock.release()
        self._conflicts.lock.release()

    def cancel(self) -> None:
        """Let a `reset` give up what is pending, without a wait for it."""
        self._timed_out = self._pending is not None

    def _release(self) -> None:
        self._lock.release()
        self._conflicts.lock.release()

    def _is_closed(self, call: str) -> ClosedError:
        return ClosedError(f"{call} on a closed vector environment; make a new one")
