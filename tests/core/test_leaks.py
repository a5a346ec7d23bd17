"""Nothing is left behind, on either side: threads, processes, ports, file descriptors, worlds."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.places import ROOT
from tests.preloaded import run
from tests.support import SERVE, sampled, server_process, until

pytestmark = pytest.mark.slow


def resources() -> tuple[int, int]:
    """Threads and file descriptors of this process."""
    gc.collect()
    return threading.active_count(), psutil.Process().num_fds()


def open_and_close(url: str, count: int) -> None:
    for _ in range(count):
        remote = make_remote(url)
        remote.reset()
        remote.step(0)
        remote.close()


def test_a_hundred_connections_leave_nothing_behind() -> None:
    with serve_gym("CartPole-v1") as server:
        open_and_close(server.url, 10)  # what grpc and gymnasium keep, they have now
        until(lambda: server.connections == 0)
        threads, descriptors = resources()
        open_and_close(server.url, 100)
        until(lambda: server.connections == 0 and server.worlds == [])
        until(lambda: resources()[0] <= threads)
        until(lambda: resources()[1] <= descriptors + 2)


def test_a_hundred_connections_at_once_leave_nothing_behind() -> None:
    with serve_gym(CountingEnv) as server:
        open_and_close(server.url, 5)
        until(lambda: server.connections == 0)
        threads, descriptors = resources()
        envs = BlockingReset(make_vec_remote(server.url, num_envs=100))
        envs.reset()
        envs.step(np.zeros(100, np.int64))
        assert server.connections == 100
        assert len(server.worlds) == 100
        envs.close()
        until(lambda: server.connections == 0 and server.worlds == [])
        until(lambda: resources()[0] <= threads)
        until(lambda: resources()[1] <= descriptors + 2)


def test_a_server_in_another_process_is_left_as_it_was() -> None:
    with server_process(SERVE, "CartPole-v1", fresh=True) as (process, url):
        server = psutil.Process(process.pid)
        open_and_close(url, 10)
        threads, descriptors = server.num_threads(), server.num_fds()
        open_and_close(url, 100)
        until(lambda: server.num_threads() <= threads + 2)
        until(lambda: server.num_fds() <= descriptors + 2)


def test_a_client_that_is_killed_takes_its_worlds_along() -> None:
    script = (
        "import sys, numpy, bridge\n"
        "envs = bridge.make_vec_remote(sys.argv[1], num_envs=3)\n"
        "envs.reset()\n"
        "print('ready', flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    with serve_gym("CartPole-v1") as server:
        client = subprocess.Popen([sys.executable, "-c", script, server.url], stdout=subprocess.PIPE, text=True)
        try:
            assert client.stdout is not None
            assert client.stdout.readline().strip() == "ready"
            assert len(server.worlds) == 3
        finally:
            client.kill()
            client.wait(20)
            if client.stdout is not None:
                client.stdout.close()
        until(lambda: server.connections == 0 and server.worlds == [], 30)


def test_stopping_a_server_closes_its_environments_and_its_port() -> None:
    closed = []

    class Noting(CountingEnv):
        def close(self) -> None:
            closed.append(self)
            super().close()

    server = serve_gym(Noting)
    envs = make_vec_remote(server.url, num_envs=3)
    server.stop()
    server.stop()  # twice is once
    assert len(closed) == 3
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0
    envs.close()


def test_a_port_in_use_is_an_error_with_a_remedy() -> None:
    from bridge.errors import SettingError

    with (
        serve_gym("CartPole-v1") as server,
        pytest.raises(SettingError, match=r"port=0: any free one"),
    ):
        serve_gym("CartPole-v1", port=server.port)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_a_waiting_server_and_its_lanes_processes(number: int) -> None:
    script = (
        "import sys, bridge\n"
        "if __name__ == '__main__':\n"
        "    server = bridge.serve_gym('CartPole-v1', num_envs=2, vectorization_mode='async')\n"
        "    print(server.url, flush=True)\n"
        "    server.wait(grace=0.2)\n"
        "    print('drained', flush=True)\n"
    )
    with server_process(script, fresh=True) as (process, url):
        envs = BlockingReset(make_vec_remote(url))
        envs.reset(seed=0)
        envs.step(np.zeros(2, np.int64))
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(number)
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert process.stdout.read().strip() == "drained"
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        envs.close()


@pytest.mark.parametrize("made", ["bridge.make_remote(server.url)", "bridge.make_vec_remote(server.url, num_envs=2)"])
def test_a_script_ends_though_another_thread_was_at_the_sockets_to_the_end(made: str) -> None:
    script = (
        "import bridge\n"
        "from tests.inside import hold_sockets\n"
        "server = bridge.serve_gym('CartPole-v1')\n"
        f"env = {made}\n"
        "env.reset()\n"
        "hold_sockets(env)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0


@pytest.mark.parametrize("attempt", sampled(range(4), 4))  # what hung here hung one time in six
def test_a_script_that_ends_without_stopping_its_server_ends(attempt: int) -> None:
    script = (
        "import bridge\n"
        "server = bridge.serve_gym('CartPole-v1')\n"
        "env = bridge.make_remote(server.url)\n"
        "env.reset(); env.step(0)\n"
        "envs = bridge.make_vec_remote(server.url, num_envs=3)\n"
        "envs.reset()\n"
        "print('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "end"


@pytest.mark.parametrize(
    ("ending", "told"), [("", True), ("server.stop()", False), ("play(server)", False), ("1 / 0", False)]
)
@pytest.mark.parametrize("more", ["", pytest.param(", processes=2", marks=pytest.mark.slow)], ids=["here", "processes"])
def test_a_script_that_ends_before_anybody_has_played_is_told_how_to_wait(more: str, ending: str, told: bool) -> None:
    script = (
        "import bridge\n"
        "def play(server):\n"
        "    env = bridge.make_remote(server.url, token='a-secret')\n"
        "    env.reset(); env.step(0); env.close()\n"
        f"server = bridge.serve_gym('CartPole-v1', token='a-secret'{more})\n"
        f"{ending}\n"
    )
    done = run("-c", script)
    assert done.returncode == (ending == "1 / 0"), done.stderr
    assert ("Server.wait() and bridge.serve() serve until Ctrl-C" in done.stderr) is told
    assert "a-secret" not in done.stderr
