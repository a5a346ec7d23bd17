"""Worlds in processes of their own: what happens in one ends that one alone, is told, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import Limits, Server, SlotState, errors, make_remote, make_vec_remote, serve_gym
from bridge.testing import CountingEnv, FailingEnv, LocalRuntime, VirtualClock
from bridge.wrappers import BlockingReset
from tests.inside import registry_of
from tests.places import ROOT
from tests.support import assert_identical, direct_world, parallel_source, server_process, until, world_of
from tests.trick_envs import TrickEnv, TrickRelay, gone, pid_of


def processes_of(server: Server) -> list[int]:
    return [pid for world in registry_of(server).worlds if (pid := pid_of(world)) is not None]


@pytest.fixture
def isolated() -> Iterator[Any]:
    """Serves in processes, with keywords."""
    with contextlib.ExitStack() as stack:

        def serve(env: Any, **keywords: Any) -> Server:
            return stack.enter_context(serve_gym(env, isolation="process", **keywords))

        yield serve


@pytest.mark.parametrize("lanes", [1, 3])
def test_an_isolated_world_is_bit_for_bit_the_local_one(isolated: Any, lanes: int) -> None:
    server = isolated("CartPole-v1", num_envs=lanes)
    with serve_gym("CartPole-v1", num_envs=lanes) as plain:
        mine, theirs = (BlockingReset(make_vec_remote(each.url)) for each in (server, plain))
        assert_identical(mine.reset(seed=5), theirs.reset(seed=5))
        rng = np.random.default_rng(1)
        for _ in range(60):
            actions = rng.integers(0, 2, lanes)
            assert_identical(mine.step(actions), theirs.step(actions))
        inner = mine.unwrapped
        assert inner.get_attr("gravity") == theirs.unwrapped.get_attr("gravity")
        inner.set_attr("gravity", 3.5)
        assert inner.get_attr("gravity") == (3.5,) * lanes
        mine.close()
        theirs.close()


def test_each_world_has_its_process_which_ends_with_it(isolated: Any) -> None:
    server = isolated(TrickEnv)
    one, two = make_remote(server.url), make_remote(server.url)
    pids = {one.call("pid"), two.call("pid")}
    assert len(pids | {os.getpid()}) == 3
    assert pids == set(processes_of(server))
    one.close()
    two.close()
    until(lambda: all(gone(pid) for pid in pids))


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
@pytest.mark.parametrize("ends_by", ["close", "crash"])
def test_nothing_is_killed_once_a_process_is_gone(monkeypatch: pytest.MonkeyPatch, ends_by: str) -> None:
    """Its number may be another program's by then."""
    kill_group, killed = os.killpg, []
    monkeypatch.setattr(os, "killpg", lambda pid, number: (killed.append(pid), kill_group(pid, number)))
    clock = VirtualClock()
    runtime = LocalRuntime(clock.now)
    world = direct_world(parallel_source(TrickRelay, isolation="process"), runtime=runtime)
    pid = pid_of(world)
    if ends_by == "crash":
        os.kill(pid, signal.SIGKILL)
        runtime.run_until(lambda: not world.alive)
    world.close()
    assert set(killed) <= {pid}
    killed.clear()
    assert runtime.scheduler.next_due() is None
    clock.advance(3600.0)
    runtime.scheduler.run()
    assert killed == []


@pytest.mark.parametrize(
    ("trick", "said", "code"),
    [
        ("exit", "ended with exit code 7 in step", errors.Code.UNAVAILABLE),
        ("segfault", "ended by SIGSEGV in step", errors.Code.UNAVAILABLE),
        ("loop", r"did not return from step within call_timeout=3 s", errors.Code.DEADLINE_EXCEEDED),
        ("raise", "RuntimeError in step: not today", errors.Code.INTERNAL),
    ],
)
def test_what_one_environment_does_ends_its_world_alone_and_is_told(
    isolated: Any, trick: str, said: str, code: errors.Code
) -> None:
    server = isolated(TrickEnv, limits=Limits(call_timeout=3.0))
    good = make_remote(server.url, env_kwargs={"trick": ""})
    bad = make_remote(server.url, env_kwargs={"trick": trick})
    pid = bad.call("pid")
    good.reset(seed=1)
    bad.reset(seed=1)
    for _ in range(2):
        bad.step(1)
    with pytest.raises(errors.RefusedError, match=said) as caught:
        bad.step(1)
    assert caught.value.code == code
    if trick != "raise":
        assert gone(pid)
    for _ in range(5):
        good.step(1)
    bad.reset()  # in a process anew
    bad.step(1)
    assert (bad.call("pid") == pid) == (trick == "raise")
    bad.close()
    good.close()
    until(lambda: server.worlds == [])


def told_failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the server's log has told at level ERROR."""
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("trick", "said"),
    [
        ("exit", "the environment's process ended with exit code 7 in step"),
        ("segfault", "the environment's process ended by SIGSEGV in step"),
        ("loop", "did not return from step within call_timeout=3 s"),
    ],
)
def test_a_process_that_ends_is_logged_and_counted_as_a_failure(
    isolated: Any, caplog: pytest.LogCaptureFixture, trick: str, said: str
) -> None:
    server = isolated(TrickEnv, limits=Limits(call_timeout=3.0), env_kwargs={"trick": trick})
    env = make_remote(server.url)
    for count in (1, 2):
        env.reset(seed=1)
        env.step(1)
        env.step(1)
        with pytest.raises(errors.RefusedError):
            env.step(1)
        assert server.status()["failures"] == count
    env.close()
    (line,) = told_failures(caplog)  # further ones of its kind are counted a minute
    assert line.startswith("world=world-")
    assert said in line


def test_a_process_that_ends_while_nobody_waits_for_it_is_logged_and_counted_once(
    isolated: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = isolated(TrickEnv)
    env = make_remote(server.url)
    env.reset(seed=1)
    os.kill(env.call("pid"), signal.SIGKILL)
    until(lambda: server.status()["failures"] == 1)
    with pytest.raises(errors.RefusedError, match="SIGKILL"):
        env.step(1)
    env.close()
    assert server.status()["failures"] == 1
    assert "ended by SIGKILL (perhaps out of memory)" in told_failures(caplog)[0]


def test_a_process_that_its_server_ends_is_no_failure(isolated: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = isolated(TrickEnv, limits=Limits(drain_timeout=0.1))
    env, left = make_remote(server.url), make_remote(server.url)
    env.reset(seed=1)
    env.close()
    until(lambda: len(server.worlds) == 1)
    assert server.status()["failures"] == 0
    server.stop()
    left.close()
    assert told_failures(caplog) == []


def test_a_leak_ends_at_the_worlds_limit(isolated: Any) -> None:
    server = isolated(TrickEnv, limits=Limits(max_world_bytes=1_500_000_000, call_timeout=30.0))
    env = make_remote(server.url, env_kwargs={"trick": "leak"})
    env.reset()
    env.step(1)
    env.step(1)
    with pytest.raises(errors.RefusedError, match=r"MemoryError|ended"):
        env.step(1)
    other = make_remote(server.url)
    other.reset()
    other.close()
    env.close()


@pytest.mark.parametrize(
    ("trick", "said"), [("exit", "exit code 7 in its construction"), ("loop", "from its construction within")]
)
def test_a_construction_that_fails_is_told_and_leaves_no_world(isolated: Any, trick: str, said: str) -> None:
    server = isolated(TrickEnv, limits=Limits(call_timeout=1.5))
    with pytest.raises(errors.RefusedError, match=said):
        make_remote(server.url, env_kwargs={"trick": trick, "where": "init"})
    assert server.worlds == []
    assert server.status()["failures"] == 1


def test_wrong_kwargs_are_answered_as_without_isolation(isolated: Any) -> None:
    server = isolated("CartPole-v1")
    with pytest.raises(errors.RefusedError, match=r"unexpected keyword argument 'gravity'.*sutton_barto_reward"):
        make_remote(server.url, env_kwargs={"gravity": 3.0})


def test_the_vector_goes_on_with_a_world_made_anew(isolated: Any) -> None:
    server = isolated(TrickEnv)
    envs = make_vec_remote(server.url, num_envs=2)
    blocking = BlockingReset(envs)
    blocking.reset(seed=1)
    victim, other = envs.call("pid")
    os.kill(victim, signal.SIGKILL)
    _, _, terminations, truncations, infos = blocking.step(np.zeros(2, np.int64))
    assert truncations.tolist() == [True, False]
    assert not terminations.any()
    # In the step, or before it where the server has seen it already.
    assert "ended by SIGKILL (perhaps out of memory)" in infos["error"][0]
    blocking.step(np.zeros(2, np.int64))
    assert (envs.slot_states == SlotState.RUNNING).all()
    assert envs.call("pid")[1] == other
    blocking.close()


def test_the_default_world_is_made_again_once_its_process_is_gone(isolated: Any) -> None:
    server = isolated(TrickEnv)
    make_remote(f"{server.url}?world=").close()
    first = world_of(server)
    pid = pid_of(first)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not first.alive)
    with pytest.raises(errors.RequestError, match=r"ended by SIGKILL \(perhaps out of memory\); connect again"):
        first.join({})
    make_remote(f"{server.url}?world=").close()
    assert pid_of(world_of(server)) != pid


def test_stopping_does_not_wait_for_an_environment_that_never_returns(isolated: Any) -> None:
    server = isolated(TrickEnv, limits=Limits(call_timeout=None))
    env = make_vec_remote(server.url, env_kwargs={"trick": "loop"})
    env.reset()
    while env.step(np.zeros(1, np.int64))[0][0] is None:
        pass
    pid = env.call("pid")[0]
    env.step(np.zeros(1, np.int64))
    env.step_async(np.zeros(1, np.int64))
    server.stop()
    until(lambda: gone(pid))
    env.close()


@pytest.mark.slow
def test_an_environment_that_fails_in_close_is_ended_all_the_same(isolated: Any) -> None:
    server = isolated(TrickEnv, limits=Limits(call_timeout=3.0))
    env = make_remote(server.url, env_kwargs={"trick": "loop", "where": "close"})
    pid = env.call("pid")
    env.close()
    until(lambda: gone(pid))


def test_what_an_environment_raises_stays_its_own_error(isolated: Any) -> None:
    server = isolated(FailingEnv, env_kwargs={"fail_in_step": 2})
    env = make_remote(server.url)
    env.reset()
    env.step(0)
    with pytest.raises(errors.EnvironmentFailedError, match="step 2 fails on purpose"):
        env.step(0)
    env.close()


class LostFile(CountingEnv):
    """Names a file whose name is not UTF-8."""

    def step(self, action: Any) -> Any:
        raise FileNotFoundError("\udcff.rom")


def test_an_error_whose_text_cannot_be_sent_does_not_end_the_world(isolated: Any) -> None:
    env = make_remote(isolated(LostFile).url)
    for _ in range(2):
        env.reset()
        with pytest.raises(errors.EnvironmentFailedError, match=r"FileNotFoundError in step: \\udcff\.rom"):
            env.step(0)
    env.close()


class Machine(CountingEnv):
    """Starts a program, such as a game, which it ends in `close` alone."""

    def __init__(self) -> None:
        super().__init__(10**9)
        self.program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def pids(self) -> list[int]:
        return [os.getpid(), self.program.pid]

    def close(self) -> None:
        self.program.kill()


SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
from bridge import serve_gym
from tests.core.worlds.test_isolation import Machine
server = serve_gym(Machine, isolation="process")
print(server.url, flush=True)
server.wait()
"""


@pytest.mark.slow
def test_what_an_environment_has_started_ends_with_a_server_that_is_killed() -> None:
    with server_process(SERVE, str(ROOT)) as (process, url):
        env = make_remote(url)
        pids = env.call("pids")
        assert not any(map(gone, pids))
        process.kill()
        until(lambda: all(map(gone, pids)))
        env.close()


def test_what_cannot_be_sent_to_a_process_is_refused_at_once() -> None:
    import threading

    lock = threading.Lock()

    def factory() -> gymnasium.Env[Any, Any]:
        with lock:
            return CountingEnv(3)

    with pytest.raises(errors.SettingError, match="cannot be pickled"):
        serve_gym(factory, isolation="process")
    with pytest.raises(errors.SettingError, match="isolation to be 'process' or None, got 'thread'"):
        serve_gym("CartPole-v1", isolation="thread")
    with pytest.raises(errors.SettingError, match="give isolation='process' too"):
        serve_gym("CartPole-v1", limits=Limits(call_timeout=3.0))
    for value in (0, -1, "soon", True):
        with pytest.raises(errors.SettingError, match="expected call_timeout to be a positive number"):
            serve_gym("CartPole-v1", isolation="process", limits=Limits(call_timeout=value))  # type: ignore[arg-type]
    with pytest.raises(errors.SettingError, match="expected max_world_bytes"):
        serve_gym("CartPole-v1", isolation="process", limits=Limits(max_world_bytes=0))


UNGUARDED = """
from bridge import make_remote, serve_gym

with serve_gym("CartPole-v1", isolation="process") as server:
    make_remote(server.url, timeout=20)
"""


@pytest.mark.slow
def test_a_main_module_without_a_guard_is_told_by_one_traceback_at_its_line(tmp_path: Path) -> None:
    main = tmp_path / "unguarded.py"
    main.write_text(UNGUARDED, encoding="utf-8")
    done = subprocess.run([sys.executable, main], capture_output=True, text=True, timeout=60, check=False)
    assert "below `if __name__ == '__main__':`" in done.stderr
    # The last line is the client's, far below the traceback.
    assert "below `if __name__ == '__main__':`" in done.stderr.rstrip().rpartition("\n")[2]
    assert "the server failed at" not in done.stderr
