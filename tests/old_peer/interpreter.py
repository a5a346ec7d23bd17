"""Another Python interpreter in which a test runs code: one that has an older version installed, or today's."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

__all__ = ["Interpreter"]

HERE = Path(__file__).resolve().parent


class Interpreter:
    """A child process that runs code until it is killed.

    Code sees what earlier code has left in that process, and the values that `run` is given; what it assigns to
    `result` is returned. Values travel as pickles over the pipes of the process, so both sides need the classes
    that are sent.

    Args:
        python: The interpreter's path.
        deadline: Seconds within which each piece of code must end; else the process is killed.
    """

    def __init__(self, python: Path, deadline: float = 120.0) -> None:
        self.python, self.deadline = python, deadline
        # In the repository's root, or by a PYTHONPATH, today's package would hide the installed one.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `kill` closes it
        self._process = subprocess.Popen(
            [str(python), str(HERE / "child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=HERE,
            env={**environment, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"},
        )

    def run(self, code: str, **values: Any) -> Any:
        """Run code and return its `result`.

        Raises:
            AssertionError: The code raised, which its traceback shows, or the process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        too_long = threading.Timer(self.deadline, self._process.kill)
        too_long.start()
        try:
            self._process.stdin.write(base64.b64encode(pickle.dumps((code, values))) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            too_long.cancel()
        if not line:
            self._errors.seek(0)
            raise AssertionError(f"the interpreter ended while it ran\n{code}\n{self._errors.read()}")
        returned, value = pickle.loads(base64.b64decode(line))
        assert returned, f"in the other interpreter\n{code}\nraised\n{value}"
        return value

    def kill(self) -> None:
        """End the process without giving it time for anything, and wait until it is gone."""
        self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()
