"""The parts behind the slots of a vector environment, their life in a copy, and the order of calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bridge.client.conflict import ConflictDetector
from bridge.client.slots.attributes import SlotAttributes
from bridge.client.slots.stepper import Stepper
from bridge.client.slots.vector_pool import VectorPool
from bridge.client.world.world_request import WorldRequest
from bridge.errors import AlreadyPendingError, ClosedError, NothingPendingError, RemoteTimeoutError
from bridge.forks import forget_in_child

__all__ = ["Slots"]


class Slots:
    """The remotes of a vector environment, what steps them and calls their methods, and whose turn it is.

    In a copy, and in a forked process, the remotes have no connection: they connect in the first `reset`.

    Args:
        pool: The remotes.
        connect: Connects those that fill slots, and waits for them.
        standing_by: Spares, which are not waited for.
    """

    def __init__(self, pool: VectorPool, connect: Callable[[], None], standing_by: Sequence[WorldRequest]) -> None:
        self.pool = pool
        """Waits for the remotes."""
        try:
            with pool.turn:
                connect()
                for world_request in standing_by:
                    pool.add(world_request, spare=True)
        except BaseException:
            pool.close_all(0.5)
            raise
        self.stepper = Stepper(pool)
        """Steps the slots."""
        self._begin_anew(closed=False)
        forget_in_child(self)

    def _begin_anew(self, *, closed: bool) -> None:
        """Have no call pending."""
        self.attributes = SlotAttributes(self.pool)
        """Calls methods, and reads and sets attributes."""
        self.closed = closed
        """True if the environment is closed."""
        self._conflicts = ConflictDetector("vector environment", self.pool.turn)
        self._pending: str | None = None
        """The asynchronous call that is pending."""
        self._timed_out = False
        """True if it timed out, so that it may be given up."""

    def __getstate__(self) -> dict[str, Any]:
        return {"pool": self.pool, "stepper": self.stepper, "closed": self.closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pool, self.stepper = state["pool"], state["stepper"]
        self.stepper.begin_anew()
        self._begin_anew(closed=state["closed"])
        forget_in_child(self)

    def after_fork(self) -> None:
        """Leave the connections to the parent process; the next `reset` makes some for this process."""
        self.pool.after_fork()
        self.stepper.begin_anew()
        self._begin_anew(closed=self.closed)

    # The order of calls: one at a time, and asynchronous ones in pairs

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
                self.attributes.abandon()
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

    def close(self) -> None:
        """Leave the worlds and disconnect; no other call may come after it."""
        with self._conflicts:
            self.closed, self._pending = True, None
            self.pool.close_all(2.0)

    def cancel(self) -> None:
        """Let a `reset` give up what is pending, without a wait for it."""
        self._timed_out = self._pending is not None
