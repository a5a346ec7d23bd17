"""What an object owns: nothing that is of another process, and what has to be ended once nobody holds the object.

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
from typing import Any, Protocol

__all__ = ["end_apart", "forget_in_child", "leak"]


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
    failed: Exception | None = None
    for item in list(_inherited):
        try:
            item.after_fork()
        except Exception as error:  # the others have to give up theirs too
            failed = failed or error
    _after_fork_in_parent()
    if failed is not None:
        raise failed  # Python prints it, and goes on


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
