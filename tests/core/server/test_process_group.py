"""`serve_gym(processes=K)`: full servers in processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.errors import RemoteTimeoutError, SettingError, StartError
from bridge.facade.process_group import ServerGroup
from bridge.wrappers import BlockingReset
from tests.preloaded import Program
from tests.support import assert_identical, sampled, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """Two servers in processes, of worlds of two lanes, for the tests that leave them as they are."""
    with serve_gym("CartPole-v1", processes=2, num_envs=2) as servers:
        yield servers


class WhoAmI(gymnasium.Env[Any, Any]):
    """Says in which process it is, and prints what nobody asked for."""

    observation_space = gymnasium.spaces.Box(0, 2**40, (), np.int64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        print("an environment prints what it likes")
        return np.array(os.getpid()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array(os.getpid()), 0.0, False, False, {}


def gone(pids: list[int], seconds: float = 20.0) -> bool:
    """True if processes end within some time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.02)  # there is no event for the end of a process that is not ours
    return False


def test_each_server_has_a_process_and_a_url_and_all_end_with_stop(tmp_path: Path) -> None:
    gymnasium.register("OnlyHere-v0", entry_point=WhoAmI)  # a registration that a fresh interpreter does not have
    try:
        with serve_gym("OnlyHere-v0", processes=2, unix_path=str(tmp_path / "s")) as server:
            assert isinstance(server, ServerGroup)
            assert len(server.urls) == len(set(server.urls)) == 2
            assert [urls[1] for urls in server.all_urls] == [f"unix://{tmp_path}/s.{i}" for i in range(2)]
            assert server.url == server.urls[0]
            assert server.env_ids == ["OnlyHere-v0"]
            envs = BlockingReset(make_vec_remote(server.urls, num_envs=4))
            observations, _ = envs.reset(seed=0)
            assert sorted(set(observations.tolist())) == sorted(server.pids)
            assert server.connections == 4
            assert len(server.worlds) == 4
            envs.close()
            pids = server.pids
            assert os.getpid() not in pids
        assert gone(pids)
        server.stop()  # again
    finally:
        del gymnasium.registry["OnlyHere-v0"]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a server is suspended, which needs POSIX")
def test_an_answer_that_came_too_late_is_not_that_of_the_next_question(group: Any) -> None:
    os.kill(group.pids[1], signal.SIGSTOP)
    try:
        group.status()  # until its deadline
    finally:
        os.kill(group.pids[1], signal.SIGCONT)
    with contextlib.closing(make_vec_remote(group.urls[1])):
        assert group.connections == 1


def test_trajectories_over_processes_equal_those_of_sync_vector_env(group: Any) -> None:
    envs = BlockingReset(make_vec_remote(group.urls))
    local = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
    local.action_space.seed(3)
    assert_identical(envs.reset(seed=7), local.reset(seed=7))
    for _ in range(60):
        actions = local.action_space.sample()
        assert_identical(envs.step(actions), local.step(actions))
    envs.close()
    local.close()


def test_a_server_that_cannot_start_is_told_with_its_own_words() -> None:
    with serve_gym("CartPole-v1") as taken, pytest.raises(SettingError, match=r"could not start: cannot listen on"):
        serve_gym("CartPole-v1", processes=2, port=taken.port - 1 or 1)
    with pytest.raises(SettingError, match="cannot serve 'NoSuch-v0'"):
        serve_gym("NoSuch-v0", processes=2)
    with pytest.raises(SettingError, match="processes from 1"):
        serve_gym("CartPole-v1", processes=0)


class Tallied(WhoAmI):
    """Appends its process to a file when it is made."""

    def __init__(self, path: str, broken: bool = False) -> None:
        with open(path, "a") as tally:
            print(os.getpid(), file=tally)
        if broken:
            raise RuntimeError("the motor does not answer")


def test_the_first_process_makes_the_environment_of_its_first_world_at_the_start(tmp_path: Path) -> None:
    tally, started = tmp_path / "tally", threading.Event()
    with serve_gym(Tallied, env_kwargs={"path": str(tally)}, processes=2, start=False) as server:
        assert isinstance(server, ServerGroup)
        assert not tally.exists()
        running = threading.Thread(target=server.run, kwargs={"started": started.set})
        running.start()
        assert started.wait(60.0)
        assert tally.read_text().split() == [str(server.pids[0])]
        with pytest.raises(SettingError, match="on a server that is already started"):
            server.start()
        envs = BlockingReset(make_vec_remote(server.urls))
        envs.reset()
        assert tally.read_text().split() == [str(pid) for pid in server.pids]
        envs.close()
    running.join(60.0)
    assert not running.is_alive()


@pytest.mark.slow
def test_processes_of_start_false_serve_once_they_are_told_to() -> None:
    with serve_gym("CartPole-v1", processes=2, start=False) as server:
        with pytest.raises(RemoteTimeoutError, match="no answer"):
            make_remote(server.urls[1], timeout=0.3)
        assert server.worlds == []
        server.start()
        for url in server.urls:
            with make_remote(url) as env:
                env.reset()
    with pytest.raises(SettingError, match="on a stopped server"):
        server.start()


def test_an_environment_that_fails_at_the_start_ends_all_processes_and_is_raised(tmp_path: Path) -> None:
    kwargs = {"path": str(tmp_path / "tally"), "broken": True}
    server = serve_gym(Tallied, env_kwargs=kwargs, processes=2, start=False)
    assert isinstance(server, ServerGroup)
    pids = server.pids
    text = r"^Tallied: the environment raised RuntimeError in its constr.*: the motor"
    with pytest.raises(StartError, match=text) as caught:
        server.run(started=lambda: None)
    assert re.search(r'test_process_group\.py", line \d+, in __init__\n', caught.value.traceback)
    assert gone(pids)


def test_a_process_that_ends_while_it_makes_its_environment_is_told() -> None:
    server = serve_gym(lambda: os._exit(3), processes=2, start=False)
    with pytest.raises(StartError, match="a server process ended while it made the environment"):
        server.run(started=lambda: None)
    server.stop()


PARENT = """
import signal, threading, time
from bridge import serve_gym
server = serve_gym("CartPole-v1", processes=2)
def tell():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # `wait` has not begun
        time.sleep(0.01)
    print(*server.pids, flush=True)
threading.Thread(target=tell).start()
server.wait()
print("drained", flush=True)
"""


def test_processes_that_are_killed_are_told_and_none_that_is_left_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with serve_gym("CartPole-v1", processes=2) as group:
        for pid in group.pids:
            psutil.Process(pid).kill()
        with pytest.raises(StartError, match="all server processes ended by themselves"):
            group.wait()
        assert all(
            f"{pid} of {url} ended by itself" in caplog.text for pid, url in zip(group.pids, group.urls, strict=True)
        )


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="servers are suspended, which needs POSIX")
def test_processes_that_do_not_stop_are_killed_together_and_told(caplog: pytest.LogCaptureFixture) -> None:
    group = serve_gym("CartPole-v1", processes=2)
    pids = group.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids))
    group.stop()
    assert gone(pids)
    killed = [record for record in caplog.records if "did not stop within 15 s, and is killed" in record.getMessage()]
    assert [record.args[0] for record in killed if isinstance(record.args, tuple)] == pids
    first, second = killed
    assert second.created - first.created < 10  # one after the other would take 15 s more


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("number", sampled([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], 3))
def test_processes_end_with_their_parent_whatever_ends_it(number: signal.Signals) -> None:
    parent = Program("-c", PARENT)
    assert parent.stdout is not None
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(number)
        rest = parent.stdout.read() if number is not signal.SIGKILL else "drained"
        assert "drained" in rest
        assert gone(pids)
        parent.wait(20.0)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


FORKING = """
import os, sys
from bridge import make_remote, serve_gym

server = serve_gym("CartPole-v1", processes=2)
if os.fork() == 0:
    assert server.connections == 0 and server.urls
    sys.exit(0)  # runs what atexit has
_, status = os.wait()
print("the child ended with", os.waitstatus_to_exitcode(status), flush=True)
for url in server.urls:
    env = make_remote(url)
    env.reset(seed=0)
    print("connections:", server.connections, flush=True)
    env.close()
server.stop()
print("stopped", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_leaves_the_servers_to_its_parent_and_ends() -> None:
    # In a session of its own, so that a child that hangs can be ended too.
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKING], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, _ = parent.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait(20)
    assert said.splitlines() == ["the child ended with 0", "connections: 1", "connections: 1", "stopped"]


FORKED_AND_KILLED = """
import os, signal, sys
from bridge import serve_gym

server = serve_gym("CartPole-v1", processes=2)
child = os.fork()
if child == 0:
    signal.pause()
print(child, *server.pids, flush=True)
signal.pause()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_servers_end_with_their_parent_though_a_forked_process_lives_on() -> None:
    parent = Program("-c", FORKED_AND_KILLED)
    assert parent.stdout is not None
    child = None
    try:
        child, *pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        parent.wait(20)
        assert gone(pids)
        assert psutil.pid_exists(child)
    finally:
        parent.kill()
        parent.wait(20)
        if child is not None:
            os.kill(child, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_of_multiprocessing_leaves_the_servers_to_its_parent(group: Any) -> None:
    child = multiprocessing.get_context("fork").Process(target=group.stop)
    child.start()
    child.join(30)
    hangs = child.is_alive()
    child.kill()
    child.join()
    assert not hangs
    assert child.exitcode == 0
    for url in group.urls:
        envs = make_vec_remote(url)
        envs.reset(seed=0)
        envs.close()


@pytest.mark.slow
def test_the_metrics_ports_of_all_servers_are_known(group: Any) -> None:
    with serve_gym("CartPole-v1", processes=2, metrics_port=0) as server:
        assert isinstance(server, ServerGroup)
        assert server.metrics_port == server.metrics_ports[0]
        assert len(set(server.metrics_ports)) == 2
        for port in server.metrics_ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                assert b"bridge_connections" in answer.read()
    assert group.metrics_port is None
    assert group.metrics_ports == []
