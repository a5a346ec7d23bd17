"""Ends what an object owned that is dropped without `close`: listeners, servers, files that a thread writes."""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
from collections.abc import Callable

__all__ = ["end_apart"]


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
