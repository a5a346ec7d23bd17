"""The order of a vector environment's calls: one at a time, and asynchronous ones in pairs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

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
        self._conflicts = ConflictDetector("vector environment", lock)
        self._abandon = abandon
        self._pending: str | None = None
        self._timed_out = False
        self.closed = closed
        """True if the environment is closed."""

    @contextlib.contextmanager
    def exclusive(self, call: str, begins: str | None = None) -> Iterator[None]:
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
        with self._conflicts:
            if self.closed:
                raise ClosedError(f"{call} on a closed vector environment; make a new one")
            if self._pending is not None:
                if not self._timed_out or (call != "reset" and self._pending != "call"):
                    remedy = f"call {self._pending}_wait" + (" again, or reset" if self._timed_out else " first")
                    raise AlreadyPendingError(f"{call} while a {self._pending} is pending; {remedy}", self._pending)
                self._abandon()
                self._pending, self._timed_out = None, False
            yield
            self._pending = begins

    @contextlib.contextmanager
    def waiting(self, pending: str, *, ends: Callable[[], bool] | None = None) -> Iterator[None]:
        """Run the wait for an asynchronous call in a `with` block; after a timeout it stays pending, and can go on.

        Args:
            pending: The asynchronous call.
            ends: Whether the call is over in spite of a timeout; None: it never is.

        Raises:
            ConcurrentUseError, ClosedError: As `exclusive`.
            NothingPendingError: No such call is pending.
        """
        with self._conflicts:
            if self.closed:
                raise ClosedError(f"{pending}_wait on a closed vector environment; make a new one")
            if self._pending != pending:
                raise NothingPendingError(f"expected {pending}_async before {pending}_wait", pending)
            over = True
            try:
                yield
            except RemoteTimeoutError:
                over = ends is not None and ends()
                raise
            finally:
                self._pending, self._timed_out = None if over else pending, not over

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Run `close` in a `with` block, after which no other call may come."""
        with self._conflicts:
            self.closed, self._pending = True, None
            yield

    def cancel(self) -> None:
        """Let a `reset` give up what is pending, without a wait for it."""
        self._timed_out = self._pending is not None
