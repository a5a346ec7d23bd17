"""Who uses an object, and what it owns: one thread at a time, and nothing that is of another process.

Threads do not exist in a forked process, and its sockets are still its parent's: waiting for the former hangs, ending
what is spoken over the latter breaks the parent's connections. So the child keeps every inherited connection and
server alive and untouched until it exits, and its environments connect anew.

Listeners, servers, and files that a thread writes, which are dropped without `close`, are ended in a thread that may
wait for them.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol

from bridge.errors import BridgeError, ConcurrentUseError

__all__ = ["ConflictDetector", "end_apart", "forget_in_child", "leak"]


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


class _Inherited(Protocol):
    def after_fork(self) -> None:
        """Give up what belongs to the parent process."""


_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def forget_in_child(item: _Inherited) -> None:
    """Call `item.after_fork()` in every process that is forked from this one while the item lives."""
    _inherited.add(item)


def leak(item: Any) -> None:
    """Keep an object until the process ends: destroying it would touch the parent's sockets."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


# The signal masks of threads that are forking now. A signal to a forked process must not come before `after_fork`: the
# handlers that it inherits are its parent's.
_masks: dict[int, set[int]] = {}


def _before_fork() -> None:
    if _inherited:
        ended_by = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, ended_by)


def _after_fork_in_parent() -> None:
    mask = _masks.pop(threading.get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    try:
        for item in list(_inherited):
            item.after_fork()
    finally:
        _after_fork_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def end_apart(end: Callable[[], object]) -> None:
    """Call a function that may wait, in a thread of its own; for `__del__`, which the garbage collector calls anywhere.

    The thread that collects may be the one that is to be waited for, or hold a lock that it needs. At the end of the
    interpreter nothing is called: what is left ends with the process.
    """
    if sys.is_finalizing():
        return
    # `Thread.start` takes a lock of `threading` and waits for the new thread, which takes it too. The collection may
    # have come while the lock is held here, so another thread has to call it.
    thread = threading.Thread(target=end, name="bridge-end", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread is left, or the interpreter begins to end
        _thread.start_new_thread(thread.start, ())
