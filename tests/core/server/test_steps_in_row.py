"""Steps that come together: made in a row by the thread of the environments, and answered after that."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import Limits, make_vec_remote, serve_gym
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.inside import deputy_runs_after
from tests.support import until
from tests.thread_envs import Gate

WORLDS = 8


class Actor(CountingEnv):
    """Calls a function in each step whose action is 1."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(50)
        self._function = function

    def step(self, action: Any) -> Any:
        if action == 1:
            self._function()
        return super().step(action)


class Drawn(gymnasium.Env[Any, Any]):
    """Draws each observation into the same memory; too large to be copied before it is sent."""

    observation_space = spaces.Box(0, 255, (300, 300), np.uint8)
    action_space = spaces.Discrete(256)

    def __init__(self) -> None:
        self._screen = np.zeros((300, 300), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._screen[:] = 0
        return self._screen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._screen[:] = action
        return self._screen, 0.0, False, False, {}


class Shared(gymnasium.Env[Any, Any]):
    """Tells what it was asked for in memory that all environments of its class share."""

    memory = np.zeros(2, np.float32)
    action_space = spaces.Discrete(256)

    def __init__(self, space: spaces.Space[Any], told: Callable[[np.ndarray[Any, Any]], Any]) -> None:
        self.observation_space, self._told = space, told
        self._info = {"position": self.memory}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.memory[:] = 0
        return self._told(self.memory), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.memory[:] = action
        return self._told(self.memory), 0.0, False, False, self._info


BOX = spaces.Box(0, 255, (2,), np.float32)


def begun(url: str, count: int = WORLDS, **more: Any) -> BlockingReset:
    """Worlds of a server as one vector environment, whose episodes have begun: their Steps leave together."""
    envs = BlockingReset(make_vec_remote(url, num_envs=count, timeout=40.0, **more))
    envs.reset(seed=0)
    return envs


def only(*slots: int, count: int = WORLDS) -> np.ndarray[Any, Any]:
    """Actions: 1 for these slots, else 0."""
    return np.isin(np.arange(count), slots).astype(np.int64)


def test_a_step_that_raises_leaves_the_others_of_its_row_alone() -> None:
    def fail() -> None:
        raise ValueError("a broken joint")

    with serve_gym(lambda: Actor(fail)) as server:
        envs = begun(server.url)
        try:
            for count in (1, 2, 3):
                observations, rewards, terminations, truncations, _ = envs.step(only())
                assert observations.tolist() == [[1, count]] * WORLDS
            _, rewards, terminations, truncations, _ = envs.step(only(2, 5))
            assert truncations.tolist() == only(2, 5).astype(bool).tolist()
            assert not terminations.any()
            healthy = ~truncations
            assert rewards[healthy].tolist() == [4.0] * 6
            # Those that failed begin their next episodes, the others go on.
            observations, *_ = envs.step(only())
            assert observations[healthy].tolist() == [[1, 5]] * 6
            assert observations[~healthy].tolist() == [[2, 0]] * 2
        finally:
            envs.close()


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (BOX, lambda memory: memory),
        (BOX, lambda memory: memory[:]),
        (spaces.Dict(a=spaces.Tuple((BOX, BOX))), lambda memory: {"a": (memory, memory[::-1])}),
    ],
    ids=["array", "view", "nested"],
)
def test_environments_that_share_memory_tell_each_what_is_its_own(space: Any, told: Any) -> None:
    with serve_gym(lambda: Shared(space, told)) as server:
        envs = begun(server.url)
        try:
            for first in (10, 20):
                actions = np.arange(first, first + WORLDS)
                observations, *_, infos = envs.step(actions)
                expected = np.stack([actions, actions], axis=1)
                for part in observations["a"] if isinstance(observations, dict) else [observations]:
                    assert part.tolist() == expected.tolist()
                assert infos["position"].tolist() == expected.tolist()
        finally:
            envs.close()


def test_answers_of_a_row_leave_while_one_of_its_steps_takes_long() -> None:
    gate = Gate()
    with serve_gym(lambda: Actor(gate)) as server:
        envs = begun(server.url)
        try:
            envs.send(only(5), np.arange(WORLDS))
            slots, observations, *_ = envs.recv(at_least=5)
            assert gate.entered.is_set()
            assert slots.tolist() == [0, 1, 2, 3, 4]
            assert observations.tolist() == [[1, 1]] * 5
            gate.release.set()
            slots, observations, *_ = envs.recv(at_least=3)
            assert slots.tolist() == [5, 6, 7]
            assert observations.tolist() == [[1, 1]] * 3
        finally:
            gate.release.set()
            envs.close()


@pytest.mark.parametrize(("count", "early"), [(40, 16), (64, 33), (65, 33)])
def test_answers_of_many_steps_leave_while_the_last_ones_are_made(
    count: int, early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deputy_runs_after(monkeypatch, 60.0)  # it would send them, too, once a step has taken long
    gate = Gate()
    with serve_gym(lambda: Actor(gate)) as server:
        envs = begun(server.url, count)
        try:
            envs.send(only(count - 1, count=count), np.arange(count))
            first, observations, *_ = envs.recv(at_least=early)
            assert first.tolist() == list(range(len(first)))
            assert observations.tolist() == [[1, 1]] * len(first)
            gate.release.set()
            rest, observations, *_ = envs.recv(at_least=count - len(first))
            assert rest.tolist() == list(range(len(first), count))
            assert observations.tolist() == [[1, 1]] * len(rest)
        finally:
            gate.release.set()
            envs.close()


@pytest.mark.parametrize("count", [17, 31, 32, 33, 65, 150])
def test_steps_that_are_sent_and_answered_in_pieces_are_each_their_world_s(count: int) -> None:
    with serve_gym(lambda: CountingEnv(3)) as server:
        envs = begun(server.url, count)
        rewards = np.zeros(count)
        try:
            # Some are ahead of the others, so that episodes end in different steps.
            ahead = np.arange(count) % 3 == 0
            envs.env.send(np.zeros(int(ahead.sum()), np.int64), np.flatnonzero(ahead))
            envs.env.recv(at_least=int(ahead.sum()))
            for step in range(9):
                observations, rewards, terminations, *_ = envs.step(np.zeros(count, np.int64))
                done = (step + 1 + ahead) % 4
                assert observations[:, 1].tolist() == done.tolist()
                assert terminations.tolist() == (done == 3).tolist()
                assert rewards.tolist() == done.tolist()
        finally:
            envs.close()


def test_what_waits_behind_a_long_step_is_dropped_where_its_client_goes() -> None:
    gate = Gate()
    with serve_gym(lambda: Actor(gate)) as server:
        try:
            envs = begun(server.url)
            envs.send(only(0), np.arange(WORLDS))
            assert gate.entered.wait(20)
            envs.close(timeout=0.1)
        finally:
            gate.release.set()
        until(lambda: server.status()["connections"] == 0, 20.0)
        assert server.status()["requests"] == server.status()["queued_bytes"] == 0
        others = begun(server.url)
        try:
            assert others.step(only())[0].tolist() == [[1, 1]] * WORLDS
        finally:
            others.close()


def test_steps_that_take_long_are_all_made_in_their_order() -> None:
    order: list[int] = []
    lock, numbers = threading.Lock(), iter(range(100))

    class Slow(CountingEnv):
        def __init__(self) -> None:
            super().__init__(50)
            self._number = next(numbers)

        def step(self, action: Any) -> Any:
            order.append(self._number)
            lock.acquire(timeout=0.003)  # longer than answers wait for each other
            return super().step(action)

    with lock, serve_gym(Slow) as server:
        envs = begun(server.url)
        try:
            for count in (1, 2, 3):
                assert envs.step(only())[0].tolist() == [[1, count]] * WORLDS
        finally:
            envs.close()
    assert order == order[:WORLDS] * 3
    assert len(set(order)) == WORLDS


@pytest.mark.parametrize("limits", [Limits(max_requests_in_flight=1), Limits(max_queued_bytes=200)])
def test_a_row_is_no_longer_than_the_limits_of_the_server(limits: Limits) -> None:
    with serve_gym(lambda: CountingEnv(50), limits=limits) as server:
        envs = begun(server.url)
        try:
            for count in (1, 2, 3):
                assert envs.step(only())[0].tolist() == [[1, count]] * WORLDS
        finally:
            envs.close()


def test_large_observations_of_a_row_are_sent_before_the_next_step_draws_over_them() -> None:
    with serve_gym(Drawn) as server:
        envs = begun(server.url)
        try:
            for count in range(1, 5):
                drawn = np.arange(WORLDS) * 10 + count
                observations, *_ = envs.step(drawn)
                assert (observations == drawn[:, None, None]).all()
        finally:
            envs.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("returns", [True, False])
def test_a_process_that_an_environment_forks_makes_no_further_step_of_the_row(returns: bool) -> None:
    statuses: list[int] = []
    read, write = os.pipe()

    class Forks(CountingEnv):
        def step(self, action: Any) -> Any:
            os.write(write, f"{os.getpid()}\n".encode())
            if action == 1:
                child = os.fork()
                if not child:
                    signal.alarm(20)
                    if not returns:
                        sys.exit(3)
                else:
                    statuses.append(os.waitpid(child, 0)[1])
            return super().step(action)

    try:
        with serve_gym(lambda: Forks(50)) as server:
            envs = begun(server.url)
            try:
                for count in (1, 2):
                    assert envs.step(only(3))[0].tolist() == [[1, count]] * WORLDS
            finally:
                envs.close()
        assert os.read(read, 65536).decode().split() == [str(os.getpid())] * 2 * WORLDS
        assert [os.waitstatus_to_exitcode(status) for status in statuses] == [1, 1]
    finally:
        os.close(read)
        os.close(write)
