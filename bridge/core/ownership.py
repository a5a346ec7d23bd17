"""Ownership of objects: after a fork, objects of the parent process; and objects that must be closed when unreferenced.

A forked process does not have its parent's threads, and its sockets are still the parent's: waiting for such a thread
hangs, and closing the protocol on such a socket breaks the parent's connection. So the child keeps every inherited
connection and server alive and untouched until it exits, and its environments connect again.

Listeners, servers, and files that a thread writes are closed in a separate thread, which may wait, if they are dropped
without `close`.
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
from typing import Any, Protocol

__all__ = ["end_apart", "forget_in_child", "leak"]


class _Inherited(Protocol):
    def after_fork(self) -> None:
        """Release the objects that belong to the parent process."""


_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def forget_in_child(item: _Inherited) -> None:
    """Call `item.after_fork()` in every process that is forked from this one while the item lives."""
    _inherited.add(item)


def leak(item: Any) -> None:
    """Keep an object until the process ends: destroying it would touch the parent's sockets."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


# The signal masks of threads that are forking now. A forked process must not get a signal before `after_fork`, because
# it inherits its parent's handlers.
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
    failed: Exception | None = None
    for item in list(_inherited):
        try:
            item.after_fork()
        except Exception as error:  # the others must release their objects too
            failed = failed or error
    _after_fork_in_parent()
    if failed is not None:
        raise failed  # Python prints it, and continues


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def end_apart(end: Callable[[], object]) -> None:
    """Call a function that may wait, in a separate thread; for `__del__`, which the garbage collector calls anywhere.

    The thread that runs the garbage collector may be the one to wait for, or hold a lock that it needs. At the end of
    the interpreter nothing is called: the remaining objects end with the process.
    """
    if sys.is_finalizing():
        return
    # `Thread.start` takes a lock of `threading` and waits for the new thread, which takes it too. The garbage
    # collection may have begun while this thread holds the lock, so another thread must call `start`.
    thread = threading.Thread(target=end, name="bridge-end", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread is left, or the interpreter is ending
        _thread.start_new_thread(thread.start, ())
