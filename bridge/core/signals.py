"""Signals that end a program which serves."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["sigterm_as_interrupt", "wait_or_stop"]


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, also where a shell started this process with Ctrl-C ignored.

    Does nothing but in the main thread, which alone may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_or_stop(finished: threading.Event, stop: Callable[[], object], timeout: float | None = None) -> bool:
    """Block until a server has finished; Ctrl-C and SIGTERM stop it.

    Args:
        finished: Set once it has.
        stop: Stops it.
        timeout: Seconds to wait at most; None: no limit.

    Returns:
        True if it has stopped.
    """
    end = math.inf if timeout is None else time.monotonic() + timeout
    try:
        with sigterm_as_interrupt():
            # A wait without a timeout would keep Python from running signal handlers on some platforms.
            while not finished.wait(max(0.0, min(0.2, end - time.monotonic()))):
                if time.monotonic() >= end:
                    return False
    except KeyboardInterrupt:
        stop()
    return True
