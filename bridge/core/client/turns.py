"""The order of calls: one thread at a time in an environment, and asynchronous calls in pairs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

from bridge.errors import (
    AlreadyPendingError,
    BridgeError,
    ClosedError,
    ConcurrentUseError,
    NothingPendingError,
    RemoteTimeoutError,
)

__all__ = ["CallOrder", "ConflictDetector"]

T = TypeVar("T")


class ConflictDetector:
    """A `with` block that refuses a second thread, instead of letting it race with the first.

    Args:
        what: The name of the protected object, for the error.
        turn: A lock that is also held within the block; entering waits for its holder. None: there is none.
        interrupted: Returns a function to call, within the block, if an error ends it that is not this package's, such
            as KeyboardInterrupt; or None.
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
        """Empty within the block. `del free[0]` enters it, and cannot be interrupted between that and a `try:`. A lock
        is acquired by a call, after which Python checks for signals: an interrupt there would leave it held for
        ever."""

    def refuse(self) -> NoReturn:
        """Raise the error that another thread is in the block."""
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
            # The keepalive thread holds it for a moment between calls, which is no conflict: wait for it. Recorded in
            # the same step of Python: an interrupt between the two would leave it held for ever.
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


class _Pool(Protocol):
    """The parts of an environment's pool that `CallOrder` uses; `VectorPool` documents them."""

    closed: bool
    started: bool
    handing_out: bool

    @property
    def question(self) -> object | None: ...

    def abandon_question(self) -> None: ...


class CallOrder(ConflictDetector):
    """The calls of a vector environment: one at a time, and asynchronous ones in pairs. Each call is a `with` block.

    Args:
        pool: The pool that the calls use.
        turn: See `ConflictDetector`.
    """

    def __init__(self, pool: _Pool, turn: threading.Lock) -> None:
        super().__init__("vector environment", turn)
        self._pool = pool
        self.pending: str | None = None
        """The pending asynchronous call; None: none is."""
        self._timed_out = False
        """True if it timed out or was interrupted, so that it may be abandoned."""

    def check(self, call: str) -> None:
        """Check that a call may begin, because no asynchronous one is pending. Called within the block.

        Args:
            call: The method's name, for errors.

        Raises:
            ClosedError: The environment is closed.
            AlreadyPendingError: An asynchronous call is pending. After a timeout `reset` abandons any, and every call
                abandons a pending `call`.
        """
        if self._pool.closed:
            raise ClosedError(f"{call} on a closed vector environment; make a new one")
        if self.pending is not None:
            if not self._timed_out or (call != "reset" and self.pending != "call"):
                remedy = f"call {self.pending}_wait" + (" again, or reset" if self._timed_out else " first")
                raise AlreadyPendingError(f"{call} while a {self.pending} is pending; {remedy}", self.pending)
            self.pending, self._timed_out = None, False
        if self._pool.question is not None:
            self._pool.abandon_question()  # the call is abandoned, or was interrupted

    def wait(self, pending: str, gather: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return the result of `gather`, which waits for an asynchronous call.

        After a timeout or an interrupt, another call can continue the wait.

        Args:
            pending: The asynchronous call. A `call` is over if late remotes are lost.
            gather: The function that waits.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Raises:
            ConcurrentUseError: Another thread is in a call.
            ClosedError: The environment is closed.
            NothingPendingError: No such call is pending.
        """
        with self:
            if self._pool.closed:
                raise ClosedError(f"{pending}_wait on a closed vector environment; make a new one")
            if self.pending != pending:
                raise NothingPendingError(f"expected {pending}_async before {pending}_wait", pending)
            over, self._pool.handing_out = True, False
            try:
                return gather(*args, **kwargs)
            except BaseException as error:
                # An interrupted wait, as by KeyboardInterrupt, can be continued too, unless results were lost.
                if self._pool.handing_out and not isinstance(error, BridgeError):
                    self._pool.started = False
                elif isinstance(error, RemoteTimeoutError) or not isinstance(error, BridgeError):
                    over = pending == "call" and self._pool.question is None
                raise
            finally:
                # Also after another error: a call that failed cannot be waited for again.
                self.pending, self._timed_out = None if over else pending, not over

    def cancel(self) -> None:
        """Allow the next `reset` to abandon a pending call, without waiting for it."""
        self._timed_out = self.pending is not None
