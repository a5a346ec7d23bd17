"""The file that `bridge standalone` prints, run as a program in any Python."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 120.0
FILE = ROOT / "bridge" / "standalone" / "serve_env.py"


class Standalone:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], first_line: str) -> None:
        self.process = process
        self.url = first_line.rpartition(" served at ")[2].strip()

    @property
    def port(self) -> int:
        return int(self.url.partition("?")[0].rpartition(":")[2])


def first_line(process: subprocess.Popen[str]) -> str:
    """Return the first line that a process prints; raise where it prints none in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], DEADLINE)
    assert ready, f"it printed nothing within {DEADLINE:g} s"
    return process.stdout.readline()


@contextmanager
def standalone(*arguments: str, python: str | Path = sys.executable, **environment: str) -> Iterator[Standalone]:
    """Run the file with a command line until the block ends, and hold that it then stops in order."""
    process = subprocess.Popen(
        [str(python), str(FILE), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,  # `tests` can be imported
        env={**{name: value for name, value in os.environ.items() if name != "BRIDGE_TOKEN"}, **environment},
    )
    assert process.stdout is not None
    try:
        line = first_line(process)
        assert " served at " in line, f"expected where it is served, got {line!r}; code {process.poll()}"
        yield Standalone(process, line)
        process.terminate()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
