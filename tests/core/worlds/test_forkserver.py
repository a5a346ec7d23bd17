"""Processes of environments get the signals that end a server too, leave them to it, and end with it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium.vector import AsyncVectorEnv

from bridge import make_remote, make_vec_remote
from bridge.core.worlds.forkserver import async_options, ended_by_kill
from bridge.errors import RemoteError
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.support import server_process, until
from tests.trick_envs import gone

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")

SCRIPT = """
import multiprocessing, subprocess, sys, time
import bridge
from bridge.testing import CountingEnv

class Starting(CountingEnv):
    def exit_codes_of_children(self):
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        forked.start()
        executed = subprocess.Popen(["sleep", "60"])
        for child in (forked, executed):
            child.terminate()
        forked.join(30)
        return [forked.exitcode, executed.wait(30)]


def make():
    return Starting(10**9)

if __name__ == "__main__":
    env, keywords = eval(sys.argv[1])
    server = bridge.serve_gym(env, start=False, limits=bridge.Limits(drain_timeout=60.0), **keywords)
    print(server.url, flush=True)
    server.run()
"""
ISOLATED, ASYNC = {"isolation": "process"}, {"num_envs": 2, "vectorization_mode": "async"}
WAYS = [("make", ISOLATED), ("'CartPole-v1'", ISOLATED), ("make", ASYNC), ("'CartPole-v1'", {**ASYNC, **ISOLATED})]
every_way = pytest.mark.parametrize(("env", "keywords"), WAYS, ids=["isolated", "isolated-id", "async", "both"])


@contextlib.contextmanager
def served(env: str, keywords: dict[str, Any]) -> Iterator[Any]:
    """Serve in a process; yields it, its URL, and an environment in its first episode."""
    with server_process(SCRIPT, f"({env}, {keywords})") as (process, url):
        envs = BlockingReset(make_vec_remote(url))
        try:
            envs.reset(seed=0)
            yield process, url, envs
        finally:
            envs.close()


def started_by(process: Any) -> list[psutil.Process]:
    """Return what a server's process has started, but for what tracks the resources of `multiprocessing`."""
    found = psutil.Process(process.pid).children(recursive=True)
    return [each for each in found if "resource_tracker" not in " ".join(each.cmdline())]


def refuses(url: str) -> bool:
    """Tell whether a server takes no further client, as one that drains."""
    try:
        make_remote(url, timeout=5.0).close()
    except RemoteError:
        return True
    return False


@every_way
def test_a_server_drains_when_all_of_its_processes_get_the_signal(env: str, keywords: dict[str, Any]) -> None:
    with served(env, keywords) as (process, url, envs):
        family = started_by(process)
        assert family
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            for each in family:
                each.send_signal(number)
        process.send_signal(signal.SIGTERM)
        until(lambda: refuses(url))
        for _ in range(20):
            envs.step(np.zeros(envs.num_envs, np.int64))
        assert envs.unwrapped.report()["losses"] == 0
        assert not any(gone(each.pid) for each in family)
        envs.close()
        assert process.wait(30) == 0
        until(lambda: all(gone(each.pid) for each in family))


@every_way
def test_no_process_outlives_a_server_that_is_killed(env: str, keywords: dict[str, Any]) -> None:
    with served(env, keywords) as (process, _, _):
        family = started_by(process)
        process.kill()
        until(lambda: all(gone(each.pid) for each in family))


def test_what_an_isolated_environment_starts_ends_by_sigterm() -> None:
    with served("make", ISOLATED) as (_, _, envs):
        for codes in envs.unwrapped.call("exit_codes_of_children"):
            assert list(codes) == [-signal.SIGTERM] * 2


class Sleeping(CountingEnv):
    """Does not return from its third step."""

    def step(self, action: Any) -> Any:
        if self.steps == 2:
            time.sleep(3600.0)
        return super().step(action)


def test_processes_of_lanes_end_where_one_of_them_cannot_make_its_environment() -> None:
    home = os.getpid()

    def fussy() -> CountingEnv:
        if os.getpid() != home:
            raise RuntimeError("not here")
        return CountingEnv(10)

    before = {child.pid for child in multiprocessing.active_children()}
    with pytest.raises((EOFError, ConnectionError)):
        AsyncVectorEnv([lambda: CountingEnv(10), fussy], copy=False, **async_options())
    gc.collect()
    until(lambda: {child.pid for child in multiprocessing.active_children()} <= before)


def test_lanes_that_do_not_return_are_ended_where_they_are_closed() -> None:
    vector = ended_by_kill(AsyncVectorEnv([lambda: Sleeping(10)] * 2, copy=False, **async_options()))
    vector.reset(seed=0)
    for _ in range(2):
        vector.step(np.zeros(2, np.int64))
    vector.step_async(np.zeros(2, np.int64))
    with pytest.warns(UserWarning, match="waiting for a pending call"):
        vector.close(terminate=True)
    assert [process.exitcode for process in vector.processes] == [-signal.SIGKILL] * 2
