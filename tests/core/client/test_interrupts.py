"""Ctrl-C in the midst of a call: no later call gets the answer of the one that was interrupted."""

from __future__ import annotations

import contextlib
import copy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium
import numpy as np
import pytest
from pettingzoo import ParallelEnv

import bridge
from bridge import make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.errors import AlreadyPendingError, ConnectionLostError, ResetNeededError
from bridge.wrappers import BlockingReset
from tests.support import sampled

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals that wake a thread")
ROOT = str(Path(bridge.__file__).parent)
INTERRUPT = 0


class EchoEnv(gymnasium.Env[Any, Any]):
    """Observes the last action; while it executes `INTERRUPT`, somebody presses Ctrl-C."""

    observation_space = gymnasium.spaces.Discrete(1000)
    action_space = gymnasium.spaces.Discrete(1000)

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return (self.echo(INTERRUPT) if options else 999), {}

    def step(self, action: Any) -> Any:
        return self.echo(int(action)), float(action), False, False, {}

    def echo(self, value: int) -> int:
        if value == INTERRUPT and not self.gate.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert self.gate.wait(20.0)
        return value


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    opened = threading.Event()
    yield opened
    opened.set()
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def url(gate: threading.Event) -> Iterator[str]:
    with serve_gym(lambda: EchoEnv(gate)) as server:
        yield server.url
        gate.set()


def interrupt(call: Callable[[], Any], gate: threading.Event) -> None:
    """Make a call that is interrupted before its answer is there, and let the answer come."""
    gate.clear()
    with pytest.raises(KeyboardInterrupt):
        call()
    gate.set()


def test_after_an_interrupted_step_an_environment_asks_for_a_reset(url: str, gate: threading.Event) -> None:
    env = make_remote(url)
    env.reset()
    assert env.step(1)[0] == 1
    interrupt(lambda: env.step(INTERRUPT), gate)
    with pytest.raises(ResetNeededError, match=r"reset\(\) before step\(\): .* a call was interrupted"):
        env.step(2)
    for action in (3, 4):
        env.reset()
        assert env.step(action)[0] == action
    env.close()


def test_after_an_interrupted_call_an_environment_says_what_to_call(url: str, gate: threading.Event) -> None:
    env = make_remote(url)
    env.reset()
    interrupt(lambda: env.call("echo", INTERRUPT), gate)
    with pytest.raises(ConnectionLostError, match=r"reset\(\) makes a new one"):
        env.call("echo", 1)
    env.reset()
    assert env.call("echo", 2) == 2
    env.close()


def test_a_reset_can_follow_one_that_was_interrupted(url: str, gate: threading.Event) -> None:
    env = make_remote(url)
    interrupt(lambda: env.reset(options={"slow": True}), gate)
    assert env.reset()[0] == 999
    assert env.step(1)[0] == 1
    env.close()


def test_an_error_that_a_signal_handler_raises_is_an_interrupt_too(url: str, gate: threading.Event) -> None:
    class Overtime(Exception):  # noqa: N818 - as a user's own
        pass

    def handler(number: int, frame: FrameType | None) -> None:
        raise Overtime

    signal.signal(signal.SIGINT, handler)
    env = make_remote(url)
    env.reset()
    gate.clear()
    with pytest.raises(Overtime):
        env.step(INTERRUPT)
    gate.set()
    with pytest.raises(ResetNeededError):
        env.step(1)
    env.close()


def test_an_interrupted_step_of_a_vector_environment_can_be_waited_for(url: str, gate: threading.Event) -> None:
    envs = BlockingReset(make_vec_remote(url, num_envs=2))
    envs.reset()
    # The slot with the interrupt is first: one that was answered could be interrupted while its answer is read.
    interrupt(lambda: envs.step(np.array([INTERRUPT, 1])), gate)
    with pytest.raises(AlreadyPendingError, match=r"call step_wait again, or reset|by recv first, or reset") as pending:
        envs.step(np.array([2, 3]))
    if "recv" in str(pending.value):  # it was interrupted while it sent the actions
        assert envs.recv(2)[1].tolist() == [INTERRUPT, 1]
    else:
        assert envs.step_wait()[0].tolist() == [INTERRUPT, 1]
    assert envs.step(np.array([4, 5]))[0].tolist() == [4, 5]
    interrupt(lambda: envs.step(np.array([INTERRUPT, 6])), gate)
    envs.reset()
    assert envs.step(np.array([7, 8]))[0].tolist() == [7, 8]
    envs.close()


def test_the_answer_to_an_interrupted_call_is_not_that_to_the_next(url: str, gate: threading.Event) -> None:
    envs = BlockingReset(make_vec_remote(url, num_envs=2))
    envs.reset()
    interrupt(lambda: envs.call("echo", INTERRUPT), gate)
    assert envs.call("echo", 1) == (1, 1)
    interrupt(lambda: (envs.call_async("echo", INTERRUPT), envs.call_wait()), gate)
    assert envs.step(np.array([2, 3]))[0].tolist() == [2, 3]
    assert envs.call("echo", 4) == (4, 4)
    envs.close()


class Couple(ParallelEnv):  # type: ignore[misc]
    """Two agents that observe how often they were stepped; Ctrl-C as in `EchoEnv`, if the first one says so."""

    metadata = {"name": "couple"}  # noqa: RUF012

    def __init__(self, gate: threading.Event) -> None:
        self.possible_agents = self.agents = ["ann", "bob"]
        self.echo = EchoEnv(gate).echo

    def observation_space(self, agent: str) -> Any:
        return EchoEnv.observation_space

    def action_space(self, agent: str) -> Any:
        return EchoEnv.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return dict.fromkeys(self.agents, 0), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.echo(int(actions["ann"]))
        self.steps += 1
        no = dict.fromkeys(self.agents, False)
        return dict.fromkeys(self.agents, self.steps), dict.fromkeys(self.agents, 0.0), no, no, {a: {} for a in no}


def test_after_an_interrupted_joint_step_all_agents_are_reset(gate: threading.Event) -> None:
    with serve_parallel(lambda: Couple(gate)) as server:
        env = make_parallel_remote(server.url)
        env.reset()
        interrupt(lambda: env.step({"ann": INTERRUPT, "bob": 1}), gate)
        with pytest.raises(ResetNeededError):
            env.step({"ann": 1, "bob": 1})
        env.reset()
        for steps in (1, 2):
            assert env.step({"ann": 1, "bob": 1})[0] == {"ann": steps, "bob": steps}
        interrupt(lambda: env.call("echo", INTERRUPT), gate)
        with pytest.raises(ConnectionLostError, match=r"reset\(\) makes a new one"):
            env.call("echo", 1)
        with pytest.raises(ResetNeededError):
            env.step({"ann": 1, "bob": 1})
        env.close()


def interrupted_at(number: int, call: Callable[[], Any], where: str = "call") -> bool:
    """Interrupt a call at its event of this number in our functions; return whether it had so many.

    Args:
        number: Counted from 1.
        call: What is interrupted.
        where: `call`, where a function is entered, or `c_return`, right after one of C, such as `acquire`.
    """
    left = number

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        name = frame.f_code.co_filename
        # Not where the function begins that releases a lock: no code of Python can release it then.
        if event == where and name.startswith(ROOT) and (event != "call" or frame.f_code.co_name != "__exit__"):
            left -= 1
            if not left:
                raise KeyboardInterrupt

    sys.setprofile(enter)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("where", ["call", "c_return"])
def test_wherever_a_step_is_interrupted_the_next_one_gets_its_own_answer(url: str, where: str) -> None:
    env = make_remote(url)
    env.reset()
    number = 1
    while interrupted_at(number, lambda: env.step(1), where):
        number += 1
        with contextlib.suppress(ResetNeededError):
            assert env.step(number)[0] == number
        env.reset()
        assert env.step(number)[0] == number
    assert number > 10
    env.close()


# It may be interrupted right after a socket was made, or where Python can only print the error.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("slots", "where"), sampled([(None, "call"), (None, "c_return"), (2, "c_return"), (2, "call")], 4, 1, slow=3)
)
@pytest.mark.slow
def test_wherever_a_reset_that_connects_is_interrupted_the_next_one_connects(
    url: str, gate: threading.Event, where: str, slots: int | None
) -> None:
    gate.set()
    known: Any = make_remote(url, timeout=20) if slots is None else make_vec_remote(url, num_envs=slots, timeout=20)
    number, interrupted = 0, True
    while interrupted:
        number += 11
        env = copy.deepcopy(known)  # it connects in its first reset
        if slots is not None:
            env = BlockingReset(env)
        interrupted = interrupted_at(number, env.reset, where)
        try:
            env.reset()
        except AlreadyPendingError:  # it was interrupted before it waited
            env.reset_wait()
        action = number % 500 if slots is None else np.array([number, 2 * number]) % 1000
        assert np.array_equal(env.step(action)[0], action)
        env.close()
    assert number > 100
    known.close()


@pytest.mark.parametrize("where", ["call", "c_return"])
@pytest.mark.slow
def test_wherever_a_reset_of_slots_is_interrupted_the_next_one_is_answered(
    url: str, gate: threading.Event, where: str
) -> None:
    gate.set()
    envs = BlockingReset(make_vec_remote(url, num_envs=2, timeout=20))
    envs.reset()
    number = 1
    while interrupted_at(number, envs.reset, where):
        number += 1
        try:
            envs.reset()
        except AlreadyPendingError:  # it was interrupted before it waited
            envs.reset_wait()
        actions = np.array([number, 2 * number])
        assert envs.step(actions)[0].tolist() == actions.tolist()
    assert number > 50
    envs.close()


@pytest.mark.parametrize("where", ["call", "c_return"])
def test_wherever_a_step_of_slots_is_interrupted_the_next_gets_its_own_answers(
    url: str, gate: threading.Event, where: str
) -> None:
    gate.set()
    envs = BlockingReset(make_vec_remote(url, num_envs=2))
    envs.reset()
    number, lost = 1, 0
    while interrupted_at(number, lambda: envs.step(np.array([1, 2])), where):
        number += 1
        actions = np.array([number, 2 * number])
        try:
            observations, rewards, _, truncations, infos = envs.step(actions)
        except AlreadyPendingError as pending:
            actions = np.array([1, 2])
            waits = pending.name != "recv"
            observations, rewards, _, truncations, infos = envs.step_wait() if waits else envs.env.recv()[1:]
            if len(rewards) < 2:  # it was interrupted before both were sent
                truncations[:] = True
        except ResetNeededError:  # some results were handed out to nobody
            observations, rewards, truncations = actions, actions, ()
            lost += 1
        if np.any(truncations):
            assert all("interrupted" in text for text in infos.get("error", ()) if text)
        else:
            assert (observations.tolist(), rewards.tolist()) == (actions.tolist(), actions.tolist())
        envs.reset()
        assert envs.step(actions)[0].tolist() == actions.tolist()
    assert number > 50
    assert lost <= 20
    envs.close()


def test_wherever_recv_is_interrupted_no_answer_is_lost_unnoticed(url: str, gate: threading.Event) -> None:
    gate.set()
    envs = BlockingReset(make_vec_remote(url, num_envs=2))
    number, interrupted, lost = 0, True, 0
    while interrupted:
        number += 1
        envs.reset()
        envs.send(np.array([1, 2]))
        interrupted = interrupted_at(number, lambda: envs.recv(2))
        if interrupted:
            try:
                slots, _, rewards, _, truncations, infos = envs.recv(2)
                assert slots.tolist() == [0, 1]
                assert truncations.any() or rewards.tolist() == [1, 2]
                assert all("interrupted" in text for text in infos.get("error", ()) if text)
            except ResetNeededError:
                lost += 1
    assert lost > 3
    envs.close()
