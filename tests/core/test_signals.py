"""Signals that end a program which waits for its server, at any moment."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from types import FrameType
from typing import Any

from bridge.core.signals import wait_or_stop


def interrupted_at(turn: int) -> bool:
    """Wait for a server, and send Ctrl-C when Python returns from a C function for the `turn`-th time.

    Returns:
        True if there was such a moment.
    """
    finished, turns, stops = threading.Event(), itertools.count(1), []
    sent, default = [], signal.getsignal(signal.SIGINT)

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        waits = event == "c_return" and signal.getsignal(signal.SIGINT) is not default
        if waits and next(turns) == turn:
            sys.setprofile(None)
            sent.append(turn)
            signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        stopped = wait_or_stop(finished, lambda: stops.append(True), timeout=0.05)
    finally:
        sys.setprofile(before)
    says_so = threading.Thread(target=finished.set, daemon=True)
    says_so.start()
    says_so.join(10.0)
    assert finished.is_set(), f"no thread can set the event after a signal at moment {turn}"
    assert (stopped, stops) == ((True, [True]) if sent else (False, [])), f"a signal at moment {turn} was lost"
    return bool(sent)


def test_a_signal_at_any_moment_of_a_wait_stops_the_server_which_can_finish() -> None:
    moments = next(turn for turn in itertools.count(1) if not interrupted_at(turn)) - 1
    assert moments > 15, "the wait was not interrupted where it waits"
