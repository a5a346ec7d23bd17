"""Servers for subjects: in processes of their own, on whatever transport, and joined."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridge import make_vec_remote
from bridge.testing import ServerProcess
from bridge.wrappers import BlockingReset

__all__ = ["Script", "joined", "server_on"]


@contextmanager
def server_on(transport: str, *arguments: str) -> Iterator[str]:
    """Serve in a process; yield the URL of a scheme: `grpc` or `unix`."""
    with tempfile.TemporaryDirectory() as folder:
        extra = {"grpc": [], "unix": ["--unix-path", f"{folder}/s"]}[transport]
        with ServerProcess(*arguments, *extra) as server:
            yield next(url for url in server.urls if url.startswith(f"{transport}://"))


@contextmanager
def joined(urls: Any, **kwargs: Any) -> Iterator[BlockingReset]:
    """Join worlds as one vector environment."""
    envs = BlockingReset(make_vec_remote(urls, **kwargs))
    try:
        yield envs
    finally:
        envs.close()


class Script:
    """A Python script in a process of its own that prints a line when it is ready, and ends with its input."""

    def __init__(self, code: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.line = self._process.stdout.readline().strip()

    def __enter__(self) -> str:
        if not self.line:
            self.__exit__()
            raise RuntimeError("the script ended before it was ready")
        return self.line

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
