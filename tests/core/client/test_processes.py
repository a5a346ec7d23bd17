"""Remote environments are copied, pickled and forked; each process has connections of its own, and none hangs."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from bridge import Server, make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.errors import BridgeError, ClosedError, ConnectionLostError, ResetNeededError
from bridge.perlert import PerlertEnv, serve_perlert
from bridge.wrappers import BlockingReset
from tests.inside import call_of, lock_of_environments, remote_of
from tests.parallel_envs import Relay
from tests.support import SERVE, assert_identical, sampled, server_process, until

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
]


@pytest.fixture
def server() -> Iterator[Server]:
    """A server in this very process: the hardest case for a fork."""
    with serve_gym("CartPole-v1") as made:
        yield made


def in_child(work: Callable[[], Any], deadline: float = 60.0) -> Any:
    """Do something in a forked process and return its result; an exception there fails here."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            result = pickle.dumps((True, work()))
        except BaseException as error:
            result = pickle.dumps((False, repr(error)))
        os.write(writing, result)
        os._exit(0)
    os.close(writing)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ)
            if not selector.select(deadline):
                os.kill(process, 9)
                pytest.fail("the forked process hangs")
        good, value = pickle.loads(os.read(reading, 1 << 16))
    finally:
        os.close(reading)
        os.waitpid(process, 0)
    assert good, value
    return value


def rollout(env: gymnasium.Env[Any, Any], seed: int = 6) -> list[Any]:
    found = [env.reset(seed=seed)[0].tolist()]
    found += [env.step(index % 2)[0].tolist() for index in range(8)]
    return found


@pytest.mark.parametrize("duplicate", [lambda env: pickle.loads(pickle.dumps(env)), copy.deepcopy])
def test_a_copy_of_an_environment_connects_by_itself(server: Server, duplicate: Callable[[Any], Any]) -> None:
    env = make_remote(server.url)
    expected = rollout(env)
    twin = duplicate(env)
    assert twin.observation_space == env.observation_space
    with pytest.raises(gymnasium.error.ResetNeeded, match="copy"):
        twin.step(0)
    assert twin.call("length") == 0.5  # before its first reset too
    env.step(0)
    assert rollout(twin) == expected
    assert server.connections == len(server.worlds) == 2
    twin.close()
    env.close()
    assert pickle.loads(pickle.dumps(env))._closed


def test_a_copy_of_a_vector_environment_connects_in_its_first_reset(server: Server) -> None:
    envs = BlockingReset(make_vec_remote(server.url, num_envs=3), autoreset_mode="SameStep")
    expected = envs.reset(seed=8)
    twin = pickle.loads(pickle.dumps(envs))
    assert twin.autoreset_mode is envs.autoreset_mode
    with pytest.raises(gymnasium.error.ResetNeeded):
        twin.step(np.zeros(3, np.int64))
    assert_identical(twin.reset(seed=8), expected)
    actions = np.ones(3, np.int64)
    for _ in range(30):
        assert_identical(twin.step(actions), envs.step(actions))
    twin.close()
    envs.close()


def test_an_environment_in_use_survives_a_fork_on_both_sides(server: Server) -> None:
    env = make_remote(server.url)
    expected = rollout(env)

    def child() -> Any:
        with pytest.raises(gymnasium.error.ResetNeeded, match="forked"):
            env.step(0)
        found = rollout(env)
        env.close()
        return found

    env.reset(seed=6)
    env.step(0)
    assert in_child(child) == expected
    # The parent's episode went on undisturbed.
    assert env.step(1)[0].tolist() == expected[2]
    env.close()


def test_a_vector_environment_in_use_survives_a_fork_on_both_sides(server: Server) -> None:
    envs = BlockingReset(make_vec_remote(server.url, num_envs=2))
    first = envs.reset(seed=1)[0].tolist()

    def child() -> Any:
        observations, _ = envs.reset(seed=1)
        envs.step(np.zeros(2, np.int64))
        envs.close()
        return observations.tolist()

    assert in_child(child) == first
    assert envs.step(np.zeros(2, np.int64))[0].shape == (2, 4)
    envs.close()


def test_an_environment_of_several_agents_survives_a_fork_on_both_sides() -> None:
    def child() -> Any:
        with pytest.raises(ResetNeededError):
            env.step(actions)
        observations, _ = env.reset(seed=1)
        env.close()
        return observations["ann"].tolist()

    def leave() -> None:
        env.close()
        env.__del__()

    with serve_parallel(Relay) as server:
        env = make_parallel_remote(server.url)
        first = env.reset(seed=1)[0]["ann"].tolist()
        actions = {name: env.action_space(name).sample() for name in env.agents}
        assert in_child(child) == first
        assert in_child(leave) is None
        assert len(env.step(actions)[0]) == 3
        env.close()


def test_a_forked_process_makes_environments_of_its_own_and_leaves_nothing_behind(server: Server) -> None:
    env = make_remote(server.url)
    env.reset()

    def child() -> Any:
        own = make_remote(server.url)
        found = rollout(own)
        own.close()
        return found

    found = [in_child(child) for _ in range(3)]
    assert found[0] == found[1] == found[2] == rollout(env)
    # A child that dies without a close takes its world with it.
    in_child(lambda: make_remote(server.url).reset()[1])
    until(lambda: server.connections == 1)
    until(lambda: len(server.worlds) == 1)
    env.close()


def test_a_forked_process_is_told_that_nobody_listens() -> None:
    with serve_gym("CartPole-v1") as server:
        url = server.url
        make_remote(url).close()

    def child() -> str:
        try:
            make_remote(url, timeout=20.0)
        except ConnectionError as error:
            return f"{type(error).__name__}: {error}"
        return "connected"

    assert in_child(child).startswith(f"ConnectError: {url}: no connection")


def test_a_connection_that_a_fork_inherits_is_the_parents(server: Server) -> None:
    """Whoever holds it: an error where it is used, no wait where it is closed."""
    env = make_remote(server.url)
    env.reset()
    connection = call_of(remote_of(env))
    assert connection is not None

    def child() -> str:
        with pytest.raises(ConnectionLostError, match="this process was forked") as caught:
            connection.send(b"")
        connection.close(30.0)
        return str(caught.value)

    assert server.url in in_child(child, deadline=20.0)
    env.step(0)
    env.close()


def remote_of_gymnasium(url: str, **keywords: Any) -> Any:
    """Make a remote by its id; an error of this has a traceback, which holds the environment."""
    return gymnasium.make("bridge/Remote-v0", url=url, **keywords)


def test_an_environment_that_could_not_be_made_is_none_that_a_fork_inherits(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error may be held long after, as a notebook holds the last one, and with it what was begun."""
    errors: list[BaseException] = []
    for make in (remote_of_gymnasium, make_remote, make_vec_remote, make_parallel_remote):
        for url in ("grpc://", "nonsense://a:1", f"{server.url}?nonsense=1", f"{server.url}/NoSuch-v0", "localhost:1"):
            with pytest.raises(BridgeError) as raised:
                make(url, timeout=5.0)
            errors.append(raised.value)
    env = make_remote(server.url)
    env.reset()
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)

    def child() -> list[str]:
        with pytest.raises(gymnasium.error.ResetNeeded, match="forked"):
            env.step(0)
        return [repr(each.exc_value) for each in found]

    assert in_child(child) == []
    env.step(0)
    env.close()


def test_a_server_that_a_fork_inherits_is_the_parents(server: Server) -> None:
    def child() -> str:
        server.stop()
        return repr(server)

    assert "stopped" in in_child(child)
    env = make_remote(server.url)
    env.reset()
    env.close()


def test_the_environments_lock_is_free_in_a_forked_process(server: Server) -> None:
    """A call that the parent was in when it was forked never ends in the child."""
    held, done = threading.Event(), threading.Event()

    def call() -> None:
        with lock_of_environments():
            held.set()
            done.wait(60.0)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        assert held.wait(20.0)
        assert in_child(lambda: lock_of_environments().acquire(timeout=5.0))
    finally:
        done.set()
        caller.join()


@pytest.mark.parametrize("context", sampled(["fork", "forkserver", "spawn"], 3))
@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_async_vector_env_holds_remote_environments(place: str, context: str, server: Server) -> None:
    local = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)

    def compare(url: str) -> None:
        envs = AsyncVectorEnv([lambda: make_remote(url)] * 2, context=context)
        try:
            assert_identical(envs.reset(seed=2), local.reset(seed=2))
            for _ in range(30):
                actions = np.array([0, 1])
                assert_identical(envs.step(actions), local.step(actions))
        finally:
            envs.close(timeout=30)

    if place == "here":
        compare(server.url)
    else:
        with server_process(SERVE, "CartPole-v1") as (_, url):
            compare(url)
    local.close()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_async_vector_env_holds_an_environment_that_is_in_use_here(context: str, server: Server) -> None:
    env = make_remote(server.url)
    expected = rollout(env)
    envs = AsyncVectorEnv([lambda: copy.deepcopy(env)], context=context)
    observations, _ = envs.reset(seed=6)
    assert observations[0].tolist() == expected[0]
    envs.close(timeout=30)
    env.step(0)
    env.close()


@pytest.mark.slow
def test_a_process_pool_takes_a_pickled_environment(server: Server) -> None:
    env = make_remote(server.url)
    expected = rollout(env)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(rollout, (env,)).get(60.0) == expected
    assert cloudpickle.loads(cloudpickle.dumps(env)).url == env.url
    env.close()


def test_serving_and_connecting_start_nothing_of_grpcs_own() -> None:
    """Its threads would be started anew in forked processes, and crash some of them."""
    code = """
import sys
from bridge import make_remote, serve_gym
with serve_gym("CartPole-v1") as server:
    env = make_remote(server.url)
    env.reset(seed=0)
    env.close()
print("grpc" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_a_forked_process_leaves_the_slot_of_a_perlert_client_to_its_parent() -> None:
    def try_it() -> None:
        with pytest.raises(ClosedError, match="another process"):
            env.step(0)
        env.close()

    with serve_perlert("CartPole-v1", port=0, fps=30) as server, PerlertEnv(server.url) as env:
        env.reset()
        in_child(try_it)
        assert env.step(0)[0] in env.observation_space
