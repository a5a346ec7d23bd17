"""Signals that end a serving program, and processes of that program that ignore them."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

__all__ = ["END_SIGNALS", "handled_signals", "leave_signals", "sigterm_as_interrupt", "wait_or_stop"]

END_SIGNALS = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that ask a program to end; Windows has no SIGHUP."""
_LOOK = 0.1
"""Seconds between two checks of a waiting thread whether a signal came."""


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to end: all of them, except a SIGHUP that is ignored."""
    # `nohup` makes a program ignore it, so that the program continues without its terminal.
    return tuple(each for each in END_SIGNALS if each.name != "SIGHUP" or signal.getsignal(each) != signal.SIG_IGN)


def leave_signals() -> None:
    """Make this process do nothing on signals that ask for an end: the server, which gets them too, ends it.

    A batch system, an init system or a terminal sends them to all processes of a server. A process that ended by itself
    would cut the episodes that its server is draining. Programs that this process starts do not inherit this, so that a
    signal can end them. Must be called in the main thread.
    """
    for number in END_SIGNALS:
        # A handler, not SIG_IGN, which an executed program would inherit.
        signal.signal(number, _leave)
    global _registered
    if hasattr(os, "register_at_fork") and not _registered:
        _registered = True
        os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_take_signals)


# The signal masks of threads that are forking now: a forked process would lose a signal before `_take_signals`.
_masks: dict[int, set[int]] = {}
_registered = False


def _hold_signals() -> None:
    _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)


def _release_signals() -> None:
    mask = _masks.pop(threading.get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _leave(number: int, frame: FrameType | None) -> None:
    """Do nothing."""


def _take_signals() -> None:
    for number in END_SIGNALS:
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _release_signals()


def sigterm_as_interrupt() -> AbstractContextManager[None]:
    """Make SIGTERM and SIGHUP act as Ctrl-C, even if a shell started this process with Ctrl-C ignored.

    Does nothing except in the main thread, the only one that may set handlers.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return _signals_to(interrupt)


@contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call a handler for the signals that ask this process to end, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def wait_or_stop(finished: threading.Event, stop: Callable[[], object], timeout: float | None = None) -> bool:
    """Block until a server has finished; Ctrl-C, SIGTERM and SIGHUP stop it.

    Args:
        finished: Set when the server has finished.
        stop: Stops the server.
        timeout: The longest wait in seconds; None: no limit.

    Returns:
        True if the server has finished.
    """
    signals: list[int] = []
    end = math.inf if timeout is None else time.monotonic() + timeout
    # The handler raises nothing: an exception in the middle of `Event.wait` can leave the event's lock held, and then
    # the server's thread would wait for ever to set the event.
    try:
        with _signals_to(lambda number, frame: signals.append(number)):
            while not signals and not finished.wait(max(0.0, min(_LOOK, end - time.monotonic()))):
                if time.monotonic() >= end:
                    break
    except KeyboardInterrupt:  # before the handlers were set, or after
        signals.append(signal.SIGINT)
    if signals:
        stop()
        return True
    return finished.is_set()
