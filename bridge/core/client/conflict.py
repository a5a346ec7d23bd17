"""One thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from bridge.errors import BridgeError, ConcurrentUseError

__all__ = ["ConflictDetector"]


class ConflictDetector:
    """A `with` block that a second thread is refused, rather than let race with the first.

    Args:
        what: What it is of, for the error.
        turn: Held inside of the block too; a block waits for the one who holds it. None: there is none.
        interrupted: Returns what is called, inside of the block, where an error ends it that is none of ours, such as
            KeyboardInterrupt; or None.
    """

    def __init__(
        self,
        what: str,
        turn: threading.Lock | None = None,
        interrupted: Callable[[], Callable[[], object] | None] = lambda: None,
    ) -> None:
        self._what = what
        self._turn = turn or threading.Lock()
        self._interrupted = interrupted
        self.free = [True]
        """Empty inside of the block; `del free[0]` enters it, and cannot be interrupted between that and a `try:`. A
        lock is acquired by a call, and after calls Python looks for signals: it would be held for good."""

    def refuse(self) -> NoReturn:
        """Raise that another thread is inside of the block."""
        raise ConcurrentUseError(
            f"another thread is using this {self._what}; give each thread an environment of its own, or hold a lock"
        ) from None

    def __enter__(self) -> None:
        held: list[bool] = []
        try:
            del self.free[0]
        except IndexError:
            # A second caller is refused: if it waited, its step would go into the other's episode.
            self.refuse()
        try:
            # The keepalive thread has it for a moment between calls: that is no conflict, and is waited for. Noted in
            # the same step of Python: an interrupt between two would leave it held for good.
            held += map(self._turn.acquire, (True,))
        except BaseException:
            if held:
                self._turn.release()
            self.free.append(True)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None and not issubclass(kind, BridgeError) and (call := self._interrupted()) is not None:
                call()
        finally:
            try:
                self._turn.release()
            finally:
                self.free.append(True)
