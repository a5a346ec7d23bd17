"""Servers in processes of any Python: `gymnasium-bridge serve`, and the file of `gymnasium-bridge standalone`."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.preloaded import AVAILABLE, Program

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 120.0
SERVED_AT = " served at "
FILE = ROOT / "bridge" / "standalone" / "serve_env.py"


class Standalone:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str] | Program, url: str, output: Output) -> None:
        self.process, self.url = process, url
        self.output = output
        """What it prints after the line with the URL."""

    @property
    def port(self) -> int:
        return int(self.url.partition("?")[0].rpartition(":")[2])


class Output:
    """The lines that a process prints, read to the end: a pipe that nobody reads fills, and blocks the process."""

    def __init__(self, process: subprocess.Popen[str] | Program) -> None:
        self._process = process
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def __iter__(self) -> Iterator[str]:
        """Give the lines; raise where the next one does not come in time."""
        while (line := self._lines.get(timeout=DEADLINE)) is not None:
            yield line

    def close(self) -> None:
        """Give up what is left, once the process has ended."""
        self._reader.join(DEADLINE)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def served(*command: str | Path, folder: Path = ROOT, **environment: str) -> Iterator[Standalone]:
    """Run a command that serves until the block ends, and hold that it then stops in order.

    Args:
        command: The interpreter, the program and its arguments.
        folder: Where it runs; environments may leave files there.
        environment: Variables.
    """
    known = {name: value for name, value in os.environ.items() if name != "BRIDGE_TOKEN"}
    process = _start([str(part) for part in command], folder, {**known, **environment})
    output = Output(process)
    try:
        said = []
        for line in output:  # environments may print, too
            said.append(line)
            if SERVED_AT in line:
                break
        else:
            raise AssertionError(f"expected where it is served, got {said}; code {process.wait(DEADLINE)}")
        yield Standalone(process, said[-1].rpartition(SERVED_AT)[2].strip(), output)
        process.terminate()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
        output.close()


def _start(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[str] | Program:
    """Start a command; of this interpreter, fork it from one that has not imported this package."""
    if AVAILABLE and command[0] == sys.executable:
        return Program(*command[1:], cwd=folder, env=environment, bare=True)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)


def standalone(
    *arguments: str, python: str | Path = sys.executable, folder: Path = ROOT, **environment: str
) -> AbstractContextManager[Standalone]:
    """Run the file of `gymnasium-bridge standalone` with a command line, as `served` does."""
    # In another folder, the module that a command line names is still found.
    path = str(ROOT) if folder != ROOT else ""
    return served(python, FILE, *arguments, folder=folder, **{"PYTHONPATH": path, **environment})
