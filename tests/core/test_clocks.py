"""Clocks that jump: the machine's date set by hours, and processes that stood still. Nobody is ended by it."""

from __future__ import annotations

import ast
import itertools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import bridge
from bridge import Limits, Recorder, make_remote, make_vec_remote, serve_gym
from bridge.recording.reader import read_folder
from bridge.testing import CountingEnv, Proxy
from bridge.wrappers import BlockingReset
from tests.inside import set_client_clock
from tests.support import server_process, until

HOUR = 3600.0
ZEROS = np.zeros(2, np.int64)

# Where the date itself is meant: what stands in PERLERT's packets and in recordings, what is shown of it, and how long
# a certificate is valid; and dates as values of an environment that is saved.
MAY_NAME_THE_DATE = {
    "cli/runs.py",
    "cli/top.py",
    "core/server/shutdown.py",
    "fleet/top.py",
    "perlert/perlert_server.py",
    "recording/writer.py",
    "states/constants.py",
    "core/transport/certificates.py",
    "core/transport/tls.py",
}
DATE = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "ctime", "strftime"}


@pytest.mark.slow
def test_only_what_means_the_date_asks_for_it() -> None:
    root = Path(bridge.__file__).parent
    found = set()
    for path in (*root.rglob("*.py"), *(root.parent / "wrappers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            of_module = isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute))
            if of_module and node.attr in DATE:  # type: ignore[union-attr]
                owner = ast.unparse(node.value).split(".")[-1]  # type: ignore[union-attr]
                if owner in ("time", "datetime", "date"):
                    found.add(path.relative_to(root.parent).as_posix().removeprefix("bridge/"))
            if isinstance(node, ast.ImportFrom) and node.module in ("time",):
                assert not DATE & {alias.name for alias in node.names}, path
    assert found == MAY_NAME_THE_DATE


@pytest.fixture
def jumps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let each look at the date find it set, in turn, hours on and hours back; counts the looks.

    gRPC's looks are left out: it compares what it sees with the date in C, which nobody can set here.
    """
    real = time.time
    offsets, looks = itertools.cycle([5 * HOUR, -20 * HOUR, 0.0, 1e6]), [0]

    def jumping() -> float:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("grpc"):
            return real()
        looks[0] += 1
        return real() + next(offsets)

    monkeypatch.setattr(time, "time", jumping)
    yield looks
    monkeypatch.undo()


def test_a_date_that_jumps_ends_no_connection_world_or_backoff(jumps: list[int], tmp_path: Path) -> None:
    with (
        serve_gym(
            lambda: CountingEnv(1_000_000),
            unix_path=str(tmp_path / "s"),
            metrics_port=0,
            limits=Limits(idle_timeout=60.0),
        ) as server,
        Proxy(server.port) as proxy,
    ):
        default = make_remote(f"{server.url}?world=")
        default.close()  # leaves the default world without agents
        envs = make_vec_remote([f"grpc://127.0.0.1:{proxy.port}", server.urls[1]], timeout=20.0)
        blocking = BlockingReset(envs)
        blocking.reset(seed=0)
        for count in range(1, 20):
            time.time()
            assert blocking.step(ZEROS)[0].tolist() == [[1, count]] * 2
        proxy.cut()
        until(lambda: envs.step(ZEROS) and envs.remotes()[0].losses == 1, 20)
        until(lambda: envs.step(ZEROS) and envs.remotes()[0].state == "running", 20)
        report = envs.remotes()[0]
        assert 0 < report.seconds_away < 60
        assert (report.returns, envs.remotes()[1].losses) == (1, 0)
        assert "" in server.worlds
        envs.close()
    assert jumps[0]


def test_a_date_that_jumps_moves_no_frame_of_a_world_in_real_time(jumps: list[int]) -> None:
    with serve_gym(lambda: CountingEnv(1_000_000), fps=200.0) as server:
        env = make_remote(server.url)
        env.reset(seed=0)
        seen = [0]
        while seen[-1] < 30:
            time.time()
            seen.append(int(env.step(0)[0][1]))
        assert seen == sorted(seen)
        assert seen[-1] < 200 * 30  # an hour has 720 000 frames
        env.close()
    assert jumps[0]


@pytest.mark.parametrize("fps", [None, 200.0])
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_date_that_jumps_leaves_the_durations_and_the_order_of_recorded_episodes(
    jumps: list[int], tmp_path: Path, lanes: int, fps: float | None
) -> None:
    began = time.monotonic()
    with serve_gym(lambda: CountingEnv(3), fps=fps, num_envs=lanes, record=tmp_path / "server") as server:
        envs = Recorder(BlockingReset(make_vec_remote([server.url] * 2)), tmp_path / "client")
        for seed in range(4):
            time.time()
            envs.reset(seed=10 * seed)
            for _ in range(3):
                time.time()
                envs.step(np.zeros(envs.num_envs, np.int64))
        envs.close()
    most = time.monotonic() - began
    for folder in (tmp_path / "server", tmp_path / "client"):
        episodes = read_folder(folder).episodes()
        assert len(episodes) >= 8
        assert all(0 <= episode.seconds <= most for episode in episodes)
        assert episodes[-1].started - episodes[0].started <= most
        seeds = [episode.seed // 10 for episode in episodes if episode.seed is not None]
        assert seeds == sorted(seeds)
        for stream in read_folder(folder).streams:
            assert (np.diff(stream.column("time")) >= 0).all()
    assert jumps[0]


def test_time_in_which_a_client_stood_still_is_not_its_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, looks = threading.Event(), [0]

    def monotonic() -> float:
        if entered.is_set():  # in the midst of the step an hour passes; then the client looks a few times
            looks[0] += 1
            if looks[0] == 10:
                gate.set()
            return time.monotonic() + HOUR
        return time.monotonic()

    entered = threading.Event()

    class Slow(CountingEnv):
        def step(self, action: Any) -> Any:
            entered.set()
            assert gate.wait(30)
            return super().step(action)

    with serve_gym(Slow) as server:
        envs = make_vec_remote(server.url, timeout=20.0)
        BlockingReset(envs).reset(seed=0)
        set_client_clock(monkeypatch, monotonic)
        rows, _, _, truncated, _ = envs.step(np.zeros(1, np.int64))
        assert rows[0].tolist() == [1, 1]
        assert not truncated.any()
        assert envs.remotes()[0].losses == 0
        envs.close()
    assert looks[0] >= 10


SERVE_BOTH = """
import sys, bridge, bridge.testing
limits = bridge.Limits(idle_timeout=0.2)
server = bridge.serve_gym(lambda: bridge.testing.CountingEnv(1_000_000), limits=limits, unix_path=sys.argv[1])
print(*server.urls, flush=True)
server.wait(grace=0.0)
"""


def test_a_server_that_was_stopped_longer_than_its_idle_timeout_keeps_the_worlds_of_its_clients(tmp_path: Path) -> None:
    with server_process(SERVE_BOTH, str(tmp_path / "s")) as (process, urls):
        envs = make_vec_remote(urls.split(), timeout=60.0)
        blocking = BlockingReset(envs)
        blocking.reset(seed=0)
        stopped = psutil.Process(process.pid)
        process.send_signal(signal.SIGSTOP)
        until(lambda: stopped.status() == psutil.STATUS_STOPPED)
        blocking.step_async(ZEROS)  # is there when the server goes on
        assert not threading.Event().wait(0.5)  # there is no event for a time that passes
        process.send_signal(signal.SIGCONT)
        assert blocking.step_wait()[0].tolist() == [[1, 1]] * 2
        assert [report.losses for report in envs.remotes()] == [0, 0]
        envs.close()
