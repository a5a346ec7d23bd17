"""Run servers in separate processes: for the demo, the benchmarks, and tests."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from bridge.errors import ConnectError

__all__ = ["ServerProcess"]

_SERVED_AT = " served at "  # between the ids and the URLs in the output of `gymnasium-bridge serve`


class ServerProcess:
    """A `gymnasium-bridge serve` in a separate process, on a port of this machine.

    Several can start at the same time; `urls` waits. The process ends with `stop`, at the end of the `with` block, and
    also if this process is killed: its standard input is a pipe from here.

    Args:
        arguments: The arguments of `gymnasium-bridge serve`.
        timeout: Seconds to wait for its URL.
        port: The port; 0: any free one.
    """

    def __init__(self, *arguments: str, timeout: float = 60.0, port: int = 0) -> None:
        self._timeout = timeout
        # A pipe that is not read would fill up and block the process.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `stop` closes it
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._urls: list[str] | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bridge", "serve", *arguments, "--port", str(port), "--exit-on-eof"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="locale",  # that of the process: on Windows, output to a pipe is not UTF-8
            errors="replace",
            # Ctrl-C in the terminal goes to this process, which then stops its servers in order.
            start_new_session=os.name == "posix",
        )
        self._reader = threading.Thread(target=self._read, name="bridge-launch", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process number."""
        return self._process.pid

    @property
    def urls(self) -> Sequence[str]:
        """The URLs of the server; waits until it has started.

        Raises:
            ConnectError: The process ended, or printed no URL in time.
        """
        deadline = time.monotonic() + self._timeout
        while self._urls is None:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ConnectError(self._title, f"it printed no URL within {self._timeout:g} s") from None
            if line is None:
                self._lines.put(None)  # for later calls
                self._errors.seek(0)
                said = self._errors.read().decode(errors="replace").strip() or "nothing"
                raise ConnectError(self._title, f"it ended before it printed a URL; it said: {said}")
            if _SERVED_AT in line:
                self._urls = line.rpartition(_SERVED_AT)[2].split()
        return self._urls

    @property
    def url(self) -> str:
        """The first URL."""
        return self.urls[0]

    @property
    def _title(self) -> str:
        return " ".join(map(str, self._process.args[1:] if isinstance(self._process.args, list) else ()))

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def release(self) -> None:
        """Close the standard input of the process, as when this process ends: the server then ends by itself."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def wait(self, timeout: float) -> int:
        """Wait until the process ends by itself; return its exit code.

        Raises:
            subprocess.TimeoutExpired: It has not ended after `timeout` seconds.
        """
        return self._process.wait(timeout)

    def stop(self, timeout: float = 5.0) -> int:
        """End the process, by force after `timeout` seconds; return its exit code."""
        self.release()
        if self._process.poll() is None:
            self._process.terminate()
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join(timeout)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
        return code

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
