"""The asynchronous half of the vector contract: nothing out of turn, and no late reply in another one's place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from bridge import make_vec_remote, serve_gym
from bridge.errors import AlreadyPendingError, ConnectionLostError, NothingPendingError, RemoteTimeoutError
from bridge.testing import CountingEnv, Proxy, SlowResetEnv
from bridge.wrappers import BlockingReset
from tests.inside import pool_of
from tests.support import until

NONE = np.zeros(2, np.int64)


class GatedEnv(CountingEnv):
    """Waits in a step, and in `slow`, while its gate is closed."""

    def __init__(self, gate: threading.Event, length: int = 5) -> None:
        super().__init__(length)
        self.gate = gate

    def step(self, action: Any) -> Any:
        assert self.gate.wait(20.0)
        return super().step(action)

    def slow(self, value: str) -> str:
        assert self.gate.wait(20.0)
        return value


@pytest.fixture
def gate() -> threading.Event:
    opened = threading.Event()
    opened.set()
    return opened


@pytest.fixture(params=["slots", "lanes"])
def envs(request: pytest.FixtureRequest, gate: threading.Event) -> Iterator[BlockingReset]:
    lanes = 2 if request.param == "lanes" else 1
    with serve_gym(lambda: GatedEnv(gate), num_envs=lanes) as server:
        made = BlockingReset(make_vec_remote(server.url, num_envs=2))
        yield made
        gate.set()
        made.close()


def test_what_was_sent_is_gathered(envs: BlockingReset) -> None:
    envs.reset_async(seed=3)
    observations, infos = envs.reset_wait()
    assert observations.tolist() == [[1, 0], [1, 0]]
    assert infos["seed"].tolist() == [3, 4]
    envs.step_async(NONE)
    observations, rewards, *_ = envs.step_wait(timeout=20.0)
    assert observations.tolist() == [[1, 1], [1, 1]]
    assert rewards.tolist() == [1.0, 1.0]
    envs.call_async("slow", "hello")
    assert envs.call_wait(timeout=20.0) == ("hello", "hello")


def test_a_wait_without_its_call_says_what_to_begin(envs: BlockingReset) -> None:
    envs.reset()
    for wait, name in ((envs.step_wait, "step"), (envs.reset_wait, "reset"), (envs.call_wait, "call")):
        with pytest.raises(gymnasium.error.NoAsyncCallError, match=f"expected {name}_async") as caught:
            wait()
        assert isinstance(caught.value, NothingPendingError)


def test_a_second_call_before_the_wait_is_refused(envs: BlockingReset) -> None:
    envs.reset()
    envs.step_async(NONE)
    for call in (lambda: envs.step_async(NONE), envs.reset_async, lambda: envs.call_async("length"), envs.render):
        with pytest.raises(gymnasium.error.AlreadyPendingCallError, match="call step_wait first"):
            call()
    assert envs.step_wait()[0].tolist() == [[1, 1], [1, 1]]


def test_a_wait_that_times_out_can_be_called_again(envs: BlockingReset, gate: threading.Event) -> None:
    envs.reset()
    gate.clear()
    envs.step_async(NONE)
    with pytest.raises(TimeoutError, match="no observation within"):
        envs.step_wait(timeout=0.05)
    with pytest.raises(AlreadyPendingError, match="step_wait again, or reset"):
        envs.step(NONE)
    gate.set()
    assert envs.step_wait()[0].tolist() == [[1, 1], [1, 1]]
    assert envs.step(NONE)[0].tolist() == [[1, 2], [1, 2]]


def test_the_late_reply_to_a_step_is_not_that_of_the_reset_after_it(envs: BlockingReset, gate: threading.Event) -> None:
    envs.reset()
    gate.clear()
    envs.step_async(NONE)
    with pytest.raises(RemoteTimeoutError):
        envs.step_wait(timeout=0.05)
    envs.reset_async()  # gives the step up, whose answer is still to come
    gate.set()
    observations, _ = envs.reset_wait()
    assert observations.tolist() == [[2, 0], [2, 0]]
    observations, rewards, *_ = envs.step(NONE)
    assert observations.tolist() == [[2, 1], [2, 1]]
    assert rewards.tolist() == [1.0, 1.0]


def test_a_masked_reset_does_not_give_up_a_step_of_the_other_slots(envs: BlockingReset, gate: threading.Event) -> None:
    envs.reset()
    gate.clear()
    envs.step_async(NONE)
    with pytest.raises(RemoteTimeoutError):
        envs.step_wait(timeout=0.05)
    with pytest.raises(AlreadyPendingError, match="to a step has not come, or was not taken; reset all"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    gate.set()
    assert envs.reset()[0].tolist() == [[2, 0], [2, 0]]


def test_the_late_result_of_a_call_is_not_that_of_the_next(envs: BlockingReset, gate: threading.Event) -> None:
    envs.reset()
    gate.clear()
    envs.call_async("slow", "late")
    with pytest.raises(TimeoutError, match="no answer to call of slow within"):
        envs.call_wait(timeout=0.05)
    envs.call_async("slow", "in time")  # gives the first one up
    gate.set()
    assert envs.call_wait() == ("in time", "in time")
    assert envs.call("slow", "again") == ("again", "again")
    assert envs.step(NONE)[0].tolist() == [[1, 1], [1, 1]]


def test_a_call_that_timed_out_can_be_waited_for_again(envs: BlockingReset, gate: threading.Event) -> None:
    envs.reset()
    gate.clear()
    envs.call_async("slow", "late")
    with pytest.raises(TimeoutError):
        envs.call_wait(timeout=0.05)
    gate.set()
    assert envs.call_wait(timeout=20.0) == ("late", "late")


def test_answers_to_a_call_that_come_before_its_wait_are_kept(envs: BlockingReset) -> None:
    envs.reset()
    envs.call_async("slow", "early")
    pool = pool_of(envs)
    until(lambda: pool.poll_nowait() and pool.question is not None and not pool.question.missing)
    assert envs.call_wait() == ("early", "early")
    assert envs.call("slow", "next") == ("next", "next")
    assert envs.step(NONE)[0].tolist() == [[1, 1], [1, 1]]


def test_a_loss_between_a_call_and_its_wait_is_told_by_the_wait(gate: threading.Event) -> None:
    with serve_gym(lambda: GatedEnv(gate)) as good, serve_gym(lambda: GatedEnv(gate)) as bad, Proxy(bad.port) as proxy:
        url = f"grpc://127.0.0.1:{proxy.port}"
        envs = make_vec_remote([good.url, url], timeout=20.0)
        BlockingReset(envs).reset()
        gate.clear()
        envs.call_async("slow", "never")
        proxy.cut()
        pool = pool_of(envs)
        until(lambda: pool.poll_nowait() and envs.remotes()[1].losses)
        gate.set()
        with pytest.raises(ConnectionLostError) as lost:
            envs.call_wait()
        assert lost.value.url == url
        assert envs.call_at([0], "slow", "next") == ("next",)
        envs.close()


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_same_step_reset_that_is_late_keeps_what_the_step_gave(lanes: int) -> None:
    release = threading.Event()
    with serve_gym(lambda: SlowResetEnv(release, deadline=20.0, free_resets=1, length=1), num_envs=lanes) as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=2), autoreset_mode=AutoresetMode.SAME_STEP)
        envs.reset()
        envs.step_async(NONE)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                envs.step_wait(timeout=0.1)
        release.set()
        observations, rewards, terminations, _, infos = envs.step_wait()
        assert observations.tolist() == [[2, 0], [2, 0]]
        assert rewards.tolist() == [1.0, 1.0]
        assert terminations.all()
        assert [row.tolist() for row in infos["final_obs"]] == [[1, 1], [1, 1]]
        envs.close()


def test_closing_does_not_wait_for_what_is_pending(envs: BlockingReset, gate: threading.Event) -> None:
    envs.reset()
    gate.clear()
    envs.step_async(NONE)
    threading.Timer(0.2, gate.set).start()
    envs.close()
    assert envs.closed
