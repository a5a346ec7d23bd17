"""Fixtures of all tests: a quiet display, loopback only, and a check for what each test leaves behind."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from bridge.core.transport.credentials import TOKEN_VARIABLE

# A busy machine is slow, and that is no failure.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")
# Environments that draw must not need a screen, nor a sound card; MuJoCo renders in software.
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")
# Public clients run in this process, and some tests fork it: gRPC would start its threads anew there, which crashes.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# A token of the user's shell is none of the tests'.
os.environ.pop(TOKEN_VARIABLE, None)
# Shells start background jobs with SIGINT ignored, and so would all programs be that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# As `nohup` does with SIGHUP.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


gc.disable()  # until all tests are collected: it would look at them again and again, and free nothing


def pytest_collection_finish() -> None:
    """Take the 10,000 tests out of the garbage collector's sight: it would look at all of them again in each test."""
    gc.freeze()
    gc.enable()


def ours() -> set[threading.Thread]:
    """The threads that this package started and that still run."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("bridge")}


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves one of our threads running."""
    before = ours()
    yield
    deadline = time.monotonic() + 60.0  # a disk may be slow
    while (left := ours() - before) and time.monotonic() < deadline:
        next(iter(left)).join(0.1)
    assert not left, f"threads left behind: {left}"


class _Faults(logging.Handler):
    """Keeps what a server logs of exceptions that nobody expected, and that it survives."""

    SIGNS = ("a callback of the event loop failed", "a fault of this server", "a request was not served")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if any(sign in record.msg for sign in self.SIGNS):
            self.found.append(logging.Formatter().format(record))


@pytest.fixture(autouse=True)
def no_server_hides_a_fault(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which a server of this process went on after a fault, unless it is marked `faulty`."""
    faults = _Faults()
    logger = logging.getLogger("bridge")
    logger.addHandler(faults)
    yield
    logger.removeHandler(faults)
    assert not faults.found or request.node.get_closest_marker("faulty"), "\n".join(faults.found)


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test in a folder of its own: MuJoCo writes its log into the current one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def streams() -> Iterator[Callable[[Any], Any]]:
    """Open a `tests.peers.Stream` to a server; all are closed in the end."""
    from tests.peers import Stream

    made: list[Any] = []

    def make(server: Any) -> Any:
        made.append(Stream(server))
        return made[-1]

    yield make
    for stream in made:
        stream.close()


@pytest.fixture
def isolation(request: pytest.FixtureRequest) -> Any:
    """The keyword `isolation` of the servers of a test; `tests.support.everywhere` runs it with either."""
    return getattr(request, "param", None)
