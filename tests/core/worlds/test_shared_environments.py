"""A function that returns one environment again and again: nobody steps, or resets, what another one plays in."""

from __future__ import annotations

import contextlib
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from bridge import make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.errors import Code, RefusedError, RemoteError
from bridge.testing import CountingEnv
from tests.parallel_envs import Relay
from tests.support import assert_identical

TOLD = "its function returned the same CountingEnv again, which another {} steps already"


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TimeLimit(env, 9)], ids=["itself", "wrapped anew"])
def test_a_second_client_is_refused_and_the_first_one_plays_on(wrap: Any) -> None:
    env = CountingEnv(5)
    with serve_gym(lambda: wrap(env)) as server, contextlib.closing(make_remote(server.url)) as one:
        first = one.reset(seed=1)
        one.step(0)
        with pytest.raises(RefusedError, match=TOLD.format("world")) as refused:
            make_remote(server.url)
        assert refused.value.code == Code.FAILED_PRECONDITION
        local = CountingEnv(5)
        assert_identical(first, local.reset(seed=1))
        local.step(0)
        assert_identical(one.step(0), local.step(0))


def test_who_comes_after_it_was_closed_plays_with_it() -> None:
    env = CountingEnv(5)
    with serve_gym(lambda: env) as server:
        for _ in range(3):
            with contextlib.closing(make_remote(server.url)) as one:
                one.reset()
                one.step(0)


@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "worlds"])
def test_the_slots_of_a_vector_are_refused(lanes: bool) -> None:
    env = CountingEnv(5)
    with (
        serve_gym(lambda: env) as server,
        pytest.raises(RefusedError, match=TOLD.format("lane" if lanes else "world")),
    ):
        make_vec_remote(server.url, num_envs=3, lanes=lanes, blocking=True, timeout=10.0)


def test_lanes_and_a_vector_of_the_users_own_are_refused_where_they_share() -> None:
    env = CountingEnv(5)
    with serve_gym(lambda: env, num_envs=2) as server, pytest.raises(RefusedError, match=TOLD.format("lane")):
        make_vec_remote(server.url, timeout=10.0)
    with (
        serve_gym(lambda: SyncVectorEnv([lambda: env] * 2)) as server,
        pytest.raises(RefusedError, match=TOLD.format("lane")),
    ):
        make_vec_remote(server.url, timeout=10.0)


def test_two_servers_of_one_process_share_none() -> None:
    env = CountingEnv(5)
    with (
        serve_gym(lambda: env) as server,
        serve_gym(lambda: env) as other,
        contextlib.closing(make_remote(server.url)) as one,
    ):
        one.reset()
        with pytest.raises(RefusedError, match=TOLD.format("world")):
            make_remote(other.url)
        one.step(0)


def test_agents_of_several_worlds_share_no_environment() -> None:
    env = Relay()
    with serve_parallel(lambda: env) as server, contextlib.closing(make_parallel_remote(server.url)) as one:
        one.reset(seed=1)
        with pytest.raises(RemoteError, match="its function returned the same Relay again"):
            make_parallel_remote(server.url)
        one.step({agent: one.action_space(agent).sample() for agent in one.agents})


def test_lanes_of_a_process_of_their_own_share_none_either() -> None:
    env = CountingEnv(5)
    with (
        serve_gym(lambda: env, num_envs=2, isolation="process") as server,
        pytest.raises(RefusedError, match=TOLD.format("lane")),
    ):
        make_vec_remote(server.url, timeout=60.0)


@pytest.mark.parametrize("keywords", [{"isolation": "process"}, {"num_envs": 2, "vectorization_mode": "async"}])
def test_processes_have_copies_of_their_own(keywords: dict[str, Any]) -> None:
    env = gymnasium.make("CartPole-v1")
    with serve_gym(lambda: env, **keywords) as server:
        envs = [make_vec_remote(server.url, blocking=True, timeout=60.0) for _ in range(2)]
        for each in envs:
            each.reset(seed=0)
            each.close()
