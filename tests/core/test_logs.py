"""A log that cannot be written: a disk that is full, handlers that raise. Whatever it would have told goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bridge import errors, make_remote, make_vec_remote, serve_gym
from bridge.core.logs import LimitedLog
from bridge.testing import CountingEnv, FailingEnv
from bridge.wrappers import BlockingReset
from tests.support import until


class FullDisk(logging.Handler):
    """Raises for every line, as handlers do that do not catch their own errors."""

    lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()
        self.lines += 1
        raise OSError(28, "No space left on device")


@pytest.fixture
def full() -> Iterator[FullDisk]:
    log, handler = logging.getLogger("bridge"), FullDisk()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield handler
    log.setLevel(level)
    log.removeHandler(handler)


def test_a_handler_that_raises_ends_no_connection(full: FullDisk) -> None:
    with serve_gym(CountingEnv, token="secret") as server:
        url = server.url
        for _ in range(2):
            with pytest.raises(errors.RefusedError, match="UNAUTHENTICATED"):
                make_remote(url, token="wrong")
            env = make_remote(url, token="secret")
            env.reset()
            with pytest.raises(errors.RefusedError, match="PERMISSION_DENIED"):
                env.call("_private")
            env.step(1)
            env.close()
            until(lambda: server.connections == 0 and server.worlds == [])
    assert full.lines >= 2 * 3  # refused, opened, refused


def test_a_client_whose_log_raises_goes_on(full: FullDisk) -> None:
    with serve_gym(lambda: FailingEnv(fail_in_step=3, length=100)) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset(seed=0)
        cut = [bool(envs.step(np.zeros(1, np.int64))[3][0]) for _ in range(4)]
        assert any(cut)
        envs.close()
    assert full.lines


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full disk at hand")
def test_a_server_whose_output_goes_to_a_full_disk_serves_and_ends_in_order() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "always", "-m", "bridge", "serve", "CartPole-v1", "--port", str(port)]
    with open("/dev/full", "w") as disk:
        process = subprocess.Popen(command, stdout=disk, stderr=disk, env={**os.environ, "BRIDGE_TOKEN": "secret"})
    try:
        until(lambda: process.poll() is not None or listens(port), 60)
        assert process.poll() is None, "it ended with its output"
        for _ in range(2):
            with pytest.raises(errors.RefusedError, match="UNAUTHENTICATED"):
                make_remote(f"grpc://127.0.0.1:{port}", token="wrong")
            with contextlib.closing(make_remote(f"grpc://127.0.0.1:{port}", token="secret")) as env:
                env.reset(seed=0)
                env.step(0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(30)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_stop_in_the_midst_of_a_step_leaves_no_port_open() -> None:
    entered, release = threading.Event(), threading.Event()

    class Slow(CountingEnv):
        def step(self, action: Any) -> Any:
            entered.set()
            release.wait(30)
            return super().step(action)

    server = serve_gym(Slow)
    port = server.port
    envs = make_vec_remote(server.url)
    BlockingReset(envs).reset(seed=0)
    envs.step_async(np.zeros(1, np.int64))
    assert entered.wait(10)
    stopper = threading.Thread(target=server.stop)
    stopper.start()
    until(lambda: server.draining)
    release.set()  # its thread is in the step until here, and finds the stop before it looks at its sockets again
    stopper.join(20)
    assert not stopper.is_alive()
    assert not listens(port)
    envs.close()


def test_a_limited_log_drops_what_is_too_much_and_counts_it(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    log = LimitedLog("bridge.test", burst=3, rate=2.0)
    with caplog.at_level("WARNING"):
        for number in range(10):
            log.warning("line %d", number)
        now[0] += 1.0
        log.warning("later")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:3] == ["line 0", "line 1", "line 2"]
    assert len(lines) == 4
    assert lines[3].startswith("later (and 7 further lines")
