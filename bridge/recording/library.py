"""List the recorded episodes of a folder, in a separate process, so that the server is not delayed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["MOST_EPISODES", "Library"]

MOST_EPISODES = 100
"""The most episodes in the list: those that began last."""
_FRESH = 2.0
"""Seconds for which a list counts as current."""
_DEADLINE = 60.0
"""Seconds after which reading a folder is given up."""


class Library:
    """The list of a folder's newest episodes. No call blocks: a caller repeats the request until the list is complete.

    Args:
        folder: The folder of the recordings.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._waiting: threading.Thread | None = None
        self._read_at = -math.inf
        self._files = 0
        """The number of files that the process reads."""
        self._episodes: Sequence[dict[str, Any]] = []
        self._problem = ""

    def list(self) -> dict[str, Any]:
        """Return the present list: `episodes`, `reading` (whether a newer one is being read), and a `problem`.

        While reading, also `files`, their number.
        """
        if self._process is None and time.monotonic() - self._read_at > _FRESH:
            self._files = sum(path.suffix in (".arrow", ".parquet") for path in self._folder.glob("*"))
            if self._files:
                self._start()
            else:  # nothing was recorded yet
                self._end([], "")
        found = {"episodes": self._episodes, "reading": self._process is not None, "problem": self._problem}
        return {**found, "files": self._files} if found["reading"] else found

    def _start(self) -> None:
        command = [sys.executable, "-m", "bridge", "runs", str(self._folder), "--json", "--last", str(MOST_EPISODES)]
        # With this process's module path. By default Python also searches the current folder, and a user who can add a
        # recording to the server's folder must not be able to add code.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        place: dict[str, Any] = {"cwd": os.path.abspath(os.sep), "env": {**os.environ, "PYTHONPATH": path}}
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            self._process = subprocess.Popen(command, text=True, errors="replace", **place, **pipes)
        except OSError as error:
            self._end(self._episodes, f"the recordings cannot be listed: {error}")
            return
        self._waiting = threading.Thread(target=self._wait, args=(self._process,), name="bridge-library", daemon=True)
        self._waiting.start()

    def _wait(self, process: subprocess.Popen[str]) -> None:
        """Wait for a process, and read the list that it prints."""
        try:
            text, problem = process.communicate(timeout=_DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self._end(self._episodes, f"reading the recordings took more than {_DEADLINE:g} s")
            return
        if process.returncode != 0:
            self._end(self._episodes, f"the recordings cannot be listed: {problem.strip()[-300:]}")
            return
        episodes = []
        for line in reversed(text.splitlines()):
            with contextlib.suppress(ValueError):  # other output, such as what a package prints when it is imported
                # A return may be NaN or infinite, which the page's JSON does not have.
                episodes.append(json.loads(line, parse_constant=lambda name: None))
        self._end([episode for episode in episodes if isinstance(episode, dict)], "")

    def _end(self, episodes: Sequence[dict[str, Any]], problem: str) -> None:
        self._episodes, self._problem, self._read_at = episodes, problem, time.monotonic()
        self._process = None  # last: a new process may be started from here on

    def close(self) -> None:
        """End the process if one is running."""
        process, waiting = self._process, self._waiting
        if process is not None and waiting is not None:
            process.kill()
            waiting.join(10.0)
