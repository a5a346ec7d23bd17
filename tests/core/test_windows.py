"""A simulation of Windows: each part a process of its own, without what CPython lacks there.

`tests/windows/simulated_windows.py` lists what is missing. The clients that these tests use themselves are not
simulated.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import make_remote
from bridge.errors import BridgeError
from tests.browser import in_browser, launched, opened_in, says, shows
from tests.places import ROOT
from tests.support import assert_identical, sampled, until
from tests.web_envs import PADDLE
from tests.windows import simulated_windows

HERE = ROOT / "tests"
PLAY = """
import sys
import numpy as np, bridge
from bridge.wrappers import BlockingReset

if __name__ == "__main__":
    envs = BlockingReset(bridge.make_vec_remote(sys.argv[1].split(","), num_envs=4))
    observations, infos = envs.reset(seed=1)
    for _ in range(60):
        observations, *rest = envs.step(np.ones(4, np.int64))
    envs.close()
    print(observations.tobytes().hex())
"""


LOOK = """
import json, socket, sys
import bridge.testing.proxy as proxy, bridge.testing.server_process as process
try:
    exec("import fcntl", vars(process))
except ImportError as error:
    missing = str(error)
left, right = socket.socketpair()
print(json.dumps([
    process.os.name, process.sys.platform, hasattr(process.os, "fork"), hasattr(proxy.socket, "AF_UNIX"),
    hasattr(left, "sendmsg"), missing, left.family == socket.AF_INET,
]))
left.close()
right.close()
"""


def environment() -> dict[str, str]:
    """The variables of a process on the simulated Windows."""
    path = os.pathsep.join([str(HERE / "windows"), str(HERE.parent)])
    return {**os.environ, **simulated_windows.PIPE_FLAGS, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def run(*arguments: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run Python there until it ends; without the lines in which a client on a slow machine says what it waits for."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True,
        encoding=simulated_windows.ENCODING,
        env=environment(),
        timeout=timeout,
        check=False,
    )
    done.stderr = "".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith("waiting for "))
    return done


class Serving:
    """A Python program there that prints where it serves."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        self.output = folder / f"output-{time.monotonic_ns()}.txt"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )

    def said(self) -> str:
        return self.output.read_text(encoding=simulated_windows.ENCODING)

    def url(self, scheme: str = "grpc") -> str:
        """Wait for the URL that it prints."""
        pattern = re.compile(rf"{scheme}://\S+")

        def found() -> bool:
            assert self.process.poll() is None, self.said()
            return pattern.search(self.said()) is not None

        until(found, 120.0)
        match = pattern.search(self.said())
        assert match is not None
        return match[0]

    def interrupt(self) -> int:
        """Press Ctrl-C in its console, which every process there is told of; return its exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(60)

    def end(self) -> None:
        """Kill what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    """Start commands that serve; all are ended."""
    started: list[Serving] = []

    def start(*arguments: str) -> Serving:
        started.append(Serving(*arguments, folder=tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_the_simulation_takes_away_what_it_says() -> None:
    done = run("-c", LOOK)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == ["nt", "win32", False, False, False, "No module named 'fcntl'", True]


def local_play() -> str:
    envs = gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="sync")
    observations, _ = envs.reset(seed=1)
    for _ in range(60):
        observations, *_ = envs.step(np.ones(4, np.int64))
    envs.close()
    return observations.tobytes().hex()


@pytest.mark.parametrize(
    "options",
    sampled(["", "--num-envs 4", "--processes 2", "--isolation process", "--thread-safe", "--web"], 6, slow=2),
)
def test_a_server_and_a_client_play_as_the_local_environment_does(serving: Any, tmp_path: Path, options: Any) -> None:
    server = serving("-m", "bridge", "serve", "CartPole-v1", *options.split())
    url = server.url()
    urls = re.findall(r"grpc://127\.0\.0\.1:\d+(?=\s)", server.said())
    script = tmp_path / "play.py"
    script.write_text(PLAY, "utf-8")
    done = run(str(script), ",".join(dict.fromkeys(urls)) if "--processes" in options else url)
    assert done.stderr == ""
    assert done.stdout.strip() == local_play()
    assert server.interrupt() in (0, 130), server.said()
    assert "Traceback" not in server.said()


CRASH = """
import os
import bridge, gymnasium
from bridge.testing import CountingEnv


class Crashing(CountingEnv):
    def step(self, action):
        if action == 1:
            os._exit(3)
        while action == 2:
            pass
        if action == 3:
            os.kill(os.getpid(), 9)
        return super().step(action)


def make():
    return Crashing(10**9, action_space=gymnasium.spaces.Discrete(4))


if __name__ == "__main__":
    server = bridge.serve_gym(make, isolation="process", limits=bridge.Limits(call_timeout=2.0))
    print("served at", server.url, flush=True)
    server.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "said"),
    [(1, "ended with exit code 3"), (3, "ended by SIGKILL"), (2, r"did not return from step within call_timeout=2 s")],
)
def test_a_world_that_crashes_or_hangs_ends_alone(serving: Any, tmp_path: Path, action: int, said: str) -> None:
    script = tmp_path / "crash.py"
    script.write_text(CRASH, "utf-8")
    url = serving(str(script)).url()
    steady, doomed = make_remote(url), make_remote(url)
    for env in (steady, doomed):
        env.reset(seed=1)
    with pytest.raises(BridgeError, match=said):
        doomed.step(action)
    assert steady.step(0)[1] == 1.0
    assert doomed.reset(seed=1)[0].tolist() == [1, 0]  # in a new world
    steady.close()
    doomed.close()


@pytest.mark.slow
def test_a_recording_is_listed_verified_and_bounded(serving: Any, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    server = serving(
        "-m",
        "bridge",
        "serve",
        "CartPole-v1",
        "--record",
        str(folder),
        "--record-observations",
        "--record-frames",
        "--env-kwargs",
        "render_mode=rgb_array",
    )
    env = make_remote(server.url())
    for _ in range(3):
        env.reset(seed=1)
        over = False
        while not over:
            *_, terminated, truncated, _ = env.step(1)
            over = terminated or truncated
    env.close()
    assert server.interrupt() in (0, 130), server.said()
    listed = run("-m", "bridge", "runs", str(folder))
    assert (listed.returncode, listed.stderr) == (0, "")
    verified = run("-m", "bridge", "replay", str(folder), "--verify")
    assert (verified.returncode, verified.stderr) == (0, ""), verified.stdout
    assert len(re.findall("the same", verified.stdout)) >= 1


def test_the_page_is_served_and_steered_over_websocket(serving: Any) -> None:
    server = serving("-m", "bridge", "serve", "CartPole-v1", "--web")
    page = server.url("http")
    with urllib.request.urlopen(page, timeout=60) as answer:
        assert "<canvas" in answer.read().decode()
    env = make_remote(server.url().replace("grpc://", "ws://"))
    local = gymnasium.make("CartPole-v1")
    assert_identical(env.reset(seed=1), local.reset(seed=1))
    for _ in range(5):
        assert_identical(env.step(1), local.step(1))
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--unix-path", "socket"), "no Unix sockets, so --unix-path"),
        (
            ("--isolation", "process", "--max-world-bytes", "1000000000"),
            "--max-world-bytes is not possible on this system: leave it out",
        ),
    ],
    ids=["a Unix socket", "a limit of memory"],
)
def test_what_cannot_work_is_an_error_that_says_so(arguments: tuple[str, ...], said: str) -> None:
    done = run("-m", "bridge", "serve", "CartPole-v1", *arguments)
    assert done.returncode in (1, 2), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_lobby_for_terminals_says_that_it_cannot_work() -> None:
    done = run("-m", "bridge", "lobby", "perlert://127.0.0.1:1")
    assert done.returncode == 2
    assert "needs Linux or macOS" in done.stderr


ALL = """
import bridge, gymnasium, numpy as np
from bridge.perlert import PerlertEnv, serve_perlert
from bridge.wrappers import BlockingReset


def played(envs):
    envs = BlockingReset(envs)
    envs.reset(seed=1)
    for _ in range(30):
        envs.step(envs.action_space.sample())
    envs.close()


def over(env):
    env.reset(seed=1)
    ended = False
    while not ended:
        *_, terminated, truncated, _ = env.step(1)
        ended = terminated or truncated
    env.close()


if __name__ == "__main__":
    with bridge.serve_gym("CartPole-v1", processes=2) as group:
        played(bridge.make_vec_remote(group.urls))
    with bridge.serve_gym("CartPole-v1", num_envs=2, fps=100, isolation="process") as server:
        played(bridge.make_vec_remote(server.url))
    with bridge.serve_gym("CartPole-v1", num_envs=2, vectorization_mode="async") as server:
        played(bridge.make_vec_remote(server.url))
    with bridge.serve_gym("CartPole-v1", allow_env_factories=True) as server:
        played(bridge.make_vec_remote(server.url, env=lambda: gymnasium.make("MountainCar-v0")))
    with bridge.serve_gym("CartPole-v1", transport="grpcio") as server:
        played(bridge.make_vec_remote(server.url, transport="grpcio"))
    with serve_perlert("CartPole-v1", fps=60) as server:
        over(PerlertEnv(server.url))
    print("played")
"""


@pytest.mark.slow
def test_servers_of_a_script_are_played_with_in_every_way(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ALL, "utf-8")
    done = run(str(script))
    assert (done.returncode, done.stdout, done.stderr) == (0, "played\n", "")


@in_browser
@pytest.mark.slow
def test_a_person_plays_on_the_page_in_chromium(serving: Any) -> None:
    url = serving("-m", "bridge", "serve", "tests.web_envs:Paddle", "--web", "--fps", "30").url("http")
    with launched() as browser, opened_in(browser) as opened:
        page = opened(url)
        page.click("#begin")
        says(page, "#badge", "playing")
        page.keyboard.down("ArrowRight")
        shows(page, f"() => ({PADDLE})() > 130")
        page.keyboard.up("ArrowRight")


@pytest.mark.slow
def test_the_demo_trains_and_says_what_it_reached(tmp_path: Path) -> None:
    curve = tmp_path / "curve.png"
    small = ["--lanes", "8", "--generations", "3", "--episodes", "1"]
    done = run("-m", "bridge", "demo", "--picture", str(curve), *small, timeout=600.0)
    assert (done.returncode, done.stderr) == (1, "")
    assert "Not learned: below the 475" in done.stdout
    assert curve.exists()


@pytest.mark.repeat
def test_the_demo_learns(tmp_path: Path) -> None:
    done = run("-m", "bridge", "demo", "--picture", str(tmp_path / "curve.png"), timeout=600.0)
    assert (done.returncode, done.stderr) == (0, "")
