"""Signals to real server processes: SIGTERM drains, SIGINT stops within 2 s, a second one ends at once.

Each is tried with `gymnasium-bridge serve` and `Server.run()`, whose environments live in the process's main thread,
and with `Server.wait()`, whose environments live in the serving thread. Those of the first test start as users start
them; the others are forked, which is quicker. `test_shutdown.py` has when a server ends, for each signal, grace and
client.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge import make_remote
from bridge.errors import RemoteError
from tests.places import ROOT
from tests.preloaded import Program
from tests.support import sampled, server_process, until
from tests.thread_envs import BLOCKED, read_log

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")

START = 60.0
"""Seconds that a process may take to start."""
STOP = 6.0
"""Seconds that a stop may take here: 2 s, and what a busy machine adds."""
AT_ONCE = 10.0
"""Seconds that an end at once may take on a busy machine: the drain that it ends takes 60 s."""
AFTER_ALL = 30.0
"""Seconds after which a process is killed, and its test fails."""

SCRIPT = """
import sys
import bridge, tests.thread_envs
how, env_id, log, grace = sys.argv[1:]
server = bridge.serve_gym(env_id, env_kwargs={"log": log}, **({"start": False} if how == "run" else {}))
print(server.url, flush=True)
(server.run if how == "run" else server.wait)(grace=float(grace))
print("returned", flush=True)
"""
every_way = pytest.mark.parametrize("how", ["serve", "run", "wait"])


class Served:
    """A server process.

    Args:
        how: `serve` on the command line; `run` or `wait`: a script that calls this method.
        env_id: Of the environment.
        log: Where the environment writes what it does.
        grace: Seconds that clients have to leave after SIGTERM.
        fresh: Start an interpreter; otherwise the process is forked.
    """

    def __init__(self, how: str, env_id: str, log: Path, grace: float = 2.0, fresh: bool = False) -> None:
        self.log = log
        self.process: Any
        if how == "serve":
            command = ["-m", "bridge", "serve", f"tests.thread_envs:{env_id}", "--env-kwargs", f"log={log}"]
        else:
            command = ["-c", SCRIPT, how, env_id, str(log), str(grace)]
        root = ROOT
        if fresh:
            self.process = subprocess.Popen(
                [sys.executable, "-u", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                cwd=root,
                start_new_session=True,
            )
        else:
            self.process = Program(*command, session=True, cwd=root)
        self.url = ""

    def wait_until_it_listens(self) -> None:
        """Read the URL that it prints."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(START), "the server printed no URL"
        line = self.process.stdout.readline()
        found = re.search(r"grpc://\S+", line)
        assert found, f"the server did not start: {line!r}"
        self.url = found.group()

    def did(self, what: str) -> bool:
        """True if the environment's log has an operation."""
        return any(record["what"] == what for record in read_log(self.log))

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> tuple[int, float]:
        """Wait for the end; return the exit code and the seconds that it took."""
        began = time.monotonic()
        code = self.process.wait(AFTER_ALL)
        return code, time.monotonic() - began

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(AFTER_ALL)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts server processes, and kills what is left of them."""
    started: list[Served] = []

    def start(how: str, env: str = "Recording", grace: float = 2.0, fresh: bool = False) -> Served:
        started.append(Served(how, f"ThreadTests/{env}-v0", tmp_path / f"log{len(started)}", grace, fresh))
        started[-1].wait_until_it_listens()
        return started[-1]

    yield start
    for each in started:
        each.kill()


@contextlib.contextmanager
def client(server: Served) -> Iterator[Any]:
    """An environment in its first episode."""
    env = make_remote(server.url, timeout=AFTER_ALL)
    try:
        env.reset(seed=0)
        yield env
    finally:
        env.close()


@contextlib.contextmanager
def stuck(server: Served) -> Iterator[None]:
    """Let a client's step block for a minute."""
    env = make_remote(server.url, timeout=BLOCKED)
    env.reset(seed=0)

    def step() -> None:
        with contextlib.suppress(RemoteError):
            env.step(1)

    stepper = threading.Thread(target=step)
    stepper.start()
    try:
        until(lambda: server.did("stuck"), START)
        yield
    finally:
        server.kill()  # which ends the client's wait
        stepper.join(AFTER_ALL)
        env.close()


def wait_until_refused(server: Served) -> None:
    """Wait until new clients are refused, which tells that the server drains."""

    def refused() -> bool:
        try:
            make_remote(server.url, timeout=5).close()
        except RemoteError:
            return True
        return False

    until(refused, STOP)


@pytest.mark.parametrize(
    ("how", "number"), sampled(itertools.product(["serve", "run", "wait"], [signal.SIGINT, signal.SIGTERM]), 3)
)
def test_a_signal_stops_a_server_that_has_no_clients(served: Any, how: str, number: int) -> None:
    server = served(how, fresh=True)
    with client(server):
        pass  # it serves, so it handles signals too
    server.send(number)
    code, seconds = server.ended()
    assert code == 0
    assert seconds < STOP
    if how != "serve":
        assert "returned" in server.process.stdout.read()


@every_way
def test_sigint_stops_the_server_and_closes_its_environments(served: Any, how: str) -> None:
    server = served(how)
    with client(server) as env:
        env.step(0)
        server.send(signal.SIGINT)
        code, seconds = server.ended()
    assert code == 0
    assert seconds < STOP
    assert server.did("close")


@every_way
def test_sigint_stops_the_server_within_2_s_during_a_step_that_does_not_return(served: Any, how: str) -> None:
    server = served(how, "Stuck")
    with stuck(server):
        server.send(signal.SIGINT)
        code, seconds = server.ended()
        assert seconds < STOP
        # The environment never returned, so the process cannot end as if it had.
        assert code in (0, 130)
        assert not server.did("raised KeyboardInterrupt")


@every_way
def test_sigterm_drains_the_server_and_running_clients_get_their_grace(served: Any, how: str) -> None:
    server = served(how)
    with client(server) as env:
        server.send(signal.SIGTERM)
        wait_until_refused(server)
        env.step(0)
    code, seconds = server.ended()
    assert code == 0
    assert seconds < STOP
    assert server.did("close")


@pytest.mark.parametrize("how", ["run", "wait"])
def test_a_drained_server_ends_as_soon_as_its_last_client_leaves(served: Any, how: str) -> None:
    server = served(how, grace=60.0)
    with client(server) as env:
        server.send(signal.SIGTERM)
        wait_until_refused(server)
        env.step(0)
        assert server.process.poll() is None
    code, seconds = server.ended()
    assert code == 0
    assert seconds < STOP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "second"), sampled(itertools.product(["run", "wait"], [signal.SIGTERM, signal.SIGINT]), 3)
)
def test_a_second_signal_stops_a_server_that_drains_in_order(served: Any, how: str, second: int) -> None:
    server = served(how, grace=60.0)
    with client(server) as env:
        server.send(signal.SIGTERM)
        wait_until_refused(server)
        env.step(0)
        assert server.process.poll() is None
        server.send(second)
        code, seconds = server.ended()
        assert seconds < AT_ONCE
        assert code == 0
        assert server.did("close")
        with pytest.raises(RemoteError, match="the server was stopped"):
            env.step(0)


@every_way
def test_sighup_drains_the_server(served: Any, how: str) -> None:
    server = served(how)
    with client(server) as env:
        server.send(signal.SIGHUP)
        wait_until_refused(server)
        env.step(0)
    code, _ = server.ended()
    assert code == 0
    assert server.did("close")


def test_a_server_that_nohup_started_ignores_sighup(tmp_path: Path) -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SCRIPT
    log = str(tmp_path / "log")
    with server_process(ignoring, "run", "tests.thread_envs:ThreadTests/Recording-v0", log, "2.0") as (process, url):
        env = make_remote(url, timeout=AFTER_ALL)
        env.reset(seed=0)
        process.send_signal(signal.SIGHUP)
        for _ in range(3):
            env.step(0)
        env.close()
        make_remote(url, timeout=AFTER_ALL).close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(AFTER_ALL) == 0


@pytest.mark.slow
@every_way
def test_a_second_signal_ends_the_server_at_once_during_a_step_that_does_not_return(served: Any, how: str) -> None:
    server = served(how, "Stuck", grace=60.0)
    with stuck(server):
        server.send(signal.SIGTERM)
        wait_until_refused(server)
        server.send(signal.SIGTERM)
        _, seconds = server.ended()
        assert seconds < AT_ONCE
        assert not server.did("raised KeyboardInterrupt")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["serve", "run"])
def test_environments_live_in_the_main_thread_of_a_process_that_only_serves(served: Any, how: str) -> None:
    server = served(how)
    with client(server) as env:
        for _ in range(3):
            env.call("nap", 0.12)
            for _ in range(110):
                *_, terminated, _, _ = env.step(0)
                if terminated:
                    env.reset()
            env.step(1)
            env.set_attr("speed", env.get_attr("speed") + 1)
    with contextlib.suppress(AssertionError):  # the last line tells
        until(lambda: server.did("__del__"), STOP)
    records = read_log(server.log)
    seen = "".join(f"\n{record['what']:10} in {record['thread']} {record['name']}" for record in records)
    assert all(record["main"] for record in records), f"other threads:{seen}"
    assert {record["pid"] for record in records} == {server.process.pid}
    assert records[-1]["what"] == "__del__", f"it was not destroyed:{seen}"


FORKING = """
import multiprocessing, time
import bridge
from bridge.testing import CountingEnv

class Forking(CountingEnv):
    def exit_code_of_a_child(self):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(30)
        return child.exitcode

server = bridge.serve_gym(lambda: Forking(1000), start=False)
print(server.url, flush=True)
server.run()
"""


def test_a_signal_to_a_process_that_an_environment_forked_is_its_own() -> None:
    """It ends that process, and the server goes on."""
    with server_process(FORKING) as (process, url):
        env = make_remote(url, timeout=AFTER_ALL)
        env.reset(seed=0)
        assert env.call("exit_code_of_a_child") == -signal.SIGTERM
        assert env.step(0)[1] == 1.0
        env.close()
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(AFTER_ALL) == 0
