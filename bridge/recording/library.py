"""The list of the recorded episodes of a folder, read by a process of its own: a server goes on meanwhile."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

__all__ = ["MOST_EPISODES", "Library"]

MOST_EPISODES = 100
"""Episodes that are listed: those that began last."""
_FRESH = 2.0
"""Seconds for which a list counts as new."""
_DEADLINE = 60.0
"""Seconds that reading a folder may take."""


class Library:
    """Lists the newest episodes of a folder. No call waits: whoever wants the list asks until it is there.

    Args:
        folder: The folder of the recordings.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._began = 0.0
        self._read_at = -math.inf
        self._episodes: list[dict[str, Any]] = []
        self._problem = ""

    def list(self) -> dict[str, Any]:
        """Return the list as it is now: `episodes`, `reading` (whether a newer one is on its way), and a `problem`."""
        now = time.monotonic()
        if self._process is not None:
            self._look(self._process, now)
        elif now - self._read_at > _FRESH:
            self._start(now)
        return {"episodes": self._episodes, "reading": self._process is not None, "problem": self._problem}

    def _start(self, now: float) -> None:
        if not any(self._folder.glob("*.arrow")) and not any(
            self._folder.glob("*.parquet")
        ):  # nothing has been recorded yet
            self._episodes = []
            self._end(now, "")
            return
        command = [sys.executable, "-m", "bridge", "runs", str(self._folder), "--json", "--last", str(MOST_EPISODES)]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        self._began = now
        try:
            # In a folder without modules, and with the modules of this process.
            path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError as error:
            self._end(now, f"the recordings cannot be listed: {error}")

    def _look(self, process: subprocess.Popen[bytes], now: float) -> None:
        """Take the list where the process has ended."""
        code = process.poll()
        if code is None:
            if now - self._began > _DEADLINE:
                self.close()
                self._end(now, f"reading the recordings took more than {_DEADLINE:g} s")
            return
        assert self._output is not None
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        if code != 0:
            self._end(now, f"the recordings cannot be listed: {text.strip()[-300:]}")
            return
        self._episodes = [_plain(json.loads(line)) for line in text.splitlines() if line.startswith("{")]
        self._episodes.reverse()
        self._end(now, "")

    def _end(self, now: float, problem: str) -> None:
        self._process, self._read_at, self._problem = None, now, problem
        if self._output is not None:
            self._output.close()
            self._output = None

    def close(self) -> None:
        """End the process, where one reads."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait(10.0)
        self._end(time.monotonic(), self._problem)


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of an episode with None in place of numbers that JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in facts.items()
    }
