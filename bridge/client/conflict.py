"""One thread at a time."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import NoReturn

from bridge.errors import ConcurrentUseError

__all__ = ["ConflictDetector"]


class ConflictDetector:
    """A `with` block that a second thread is refused, rather than let race with the first.

    Args:
        what: What it is of, for the error.
        turn: Held inside of the block too; a block waits for the one who holds it. None: there is none.
    """

    def __init__(self, what: str, turn: threading.Lock | None = None) -> None:
        self._what = what
        self._turn = turn
        self.lock = threading.Lock()
        """Held inside of the block; what runs in each step acquires it without the cost of two calls."""

    def refuse(self) -> NoReturn:
        """Raise that another thread holds the lock."""
        raise ConcurrentUseError(
            f"another thread is using this {self._what}; give each thread an environment of its own, or hold a lock"
        )

    def __enter__(self) -> None:
        # A second caller is refused: if it waited, its step would go into the other's episode.
        if not self.lock.acquire(blocking=False):
            self.refuse()
        if self._turn is not None:
            # The keepalive thread has it for a moment between calls: that is no conflict, and is waited for.
            self._turn.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._turn is not None:
            self._turn.release()
        self.lock.release()
