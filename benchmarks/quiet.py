"""A check that the machine is quiet, and a load that keeps its cores awake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

__all__ = ["MOST", "Spinner", "busy_share"]

MOST = 0.05
"""The most of the processors' time that other programs may use on a machine that counts as quiet."""


def busy_share(seconds: float = 2.0) -> float:
    """Return the share of the processors' time that programs used while this one slept, 0 to 1."""
    return 1.0 - psutil.cpu_times_percent(seconds).idle / 100.0


class Spinner:
    """A loop of the lowest priority on each core, so that no core sleeps; it runs only within `running()`."""

    def __init__(self) -> None:
        code = "import os; os.nice(19)\nwhile True: pass"
        self._loops = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count() or 1)]
        self._send(signal.SIGSTOP)

    def __enter__(self) -> Spinner:
        return self

    def __exit__(self, *error: object) -> None:
        for loop in self._loops:
            loop.kill()
            loop.wait()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the loops."""
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for loop in self._loops:
            loop.send_signal(number)
