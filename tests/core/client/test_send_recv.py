"""`send` and `recv`: whichever slots answer first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import make_vec_remote, serve_gym
from bridge.errors import AlreadyPendingError, RemoteTimeoutError, ResetNeededError, SettingError
from bridge.wrappers import BlockingReset
from tests.support import assert_identical

GATES: dict[str, threading.Event] = {}


class Gated(gymnasium.Env[Any, Any]):
    """Counts its steps; one that is made with a gate steps only while that is open."""

    observation_space = gymnasium.spaces.Box(0, 1000, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(5)

    def __init__(self, gate: str = "", length: int = 1000) -> None:
        self._gate, self._length, self._count = gate, length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0
        return np.array([0.0, -0.0]), {"began": 1}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._gate:
            assert GATES[self._gate].wait(20.0)
        self._count += 1
        ended = self._count >= self._length
        return np.array([float(self._count), float(action)]), float(action), ended, False, {"count": self._count}


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    GATES["slow"] = threading.Event()
    yield GATES["slow"]
    GATES["slow"].set()


def test_a_straggler_holds_up_nobody(gate: threading.Event) -> None:
    with serve_gym(Gated) as fast, serve_gym(lambda: Gated("slow"), thread_safe=True) as slow:
        envs = BlockingReset(make_vec_remote([fast.url, slow.url, fast.url]))
        observations, _ = envs.reset(seed=0)
        envs.send(np.array([1, 2, 3]), np.arange(3))
        for count in range(1, 6):
            slots, observations, rewards, terminations, truncations, infos = envs.recv(at_least=2)
            assert slots.tolist() == [0, 2]
            assert observations.tolist() == [[count, 1], [count, 3]]
            assert rewards.tolist() == [1.0, 3.0]
            assert not terminations.any()
            assert not truncations.any()
            assert infos["count"].tolist() == [count, count]
            envs.send(np.array([1, 3]), slots)
        gate.set()
        slots, observations, *_ = envs.recv(at_least=3)
        assert slots.tolist() == [0, 1, 2]
        assert observations.tolist() == [[6, 1], [1, 2], [6, 3]]
        envs.close()


@pytest.mark.parametrize("lanes", [1, 2])
def test_trajectories_are_those_of_step(lanes: int) -> None:
    with serve_gym("CartPole-v1", num_envs=lanes) as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=4))
        local = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
        local.action_space.seed(3)
        assert_identical(envs.reset(seed=7)[0], local.reset(seed=7)[0])
        for _ in range(150):
            actions = local.action_space.sample()
            envs.send(actions[2:], [2, 3])
            envs.send(actions[:2], [0, 1])
            slots, *mine = envs.recv(at_least=4)
            assert slots.tolist() == [0, 1, 2, 3]
            assert_identical(tuple(mine), local.step(actions))
        assert_identical(envs.step(actions), local.step(actions))  # and `step` goes on from there
        envs.close()
        local.close()


def test_a_slot_whose_episode_ended_begins_its_next_one_instead() -> None:
    with serve_gym(lambda: Gated(length=2)) as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=2))
        envs.reset(seed=0)
        seen = []
        for _ in range(6):
            envs.send(np.array([4, 4]))
            _, observations, rewards, terminations, _, infos = envs.recv(at_least=2)
            seen.append((observations[0].tolist(), rewards[0], bool(terminations[0]), "began" in infos))
        one, two, again = (
            ([1.0, 4.0], 4.0, False, False),
            ([2.0, 4.0], 4.0, True, False),
            ([0.0, 0.0], 0.0, False, True),
        )
        assert seen == [one, two, again] * 2
        envs.close()


def test_a_lost_remote_is_cut_off_once_and_comes_back_by_itself() -> None:
    with serve_gym(Gated) as first:
        second = serve_gym(Gated)
        port = second.port
        envs = BlockingReset(make_vec_remote([first.url, second.url], timeout=20.0))
        envs.reset(seed=0)
        envs.send(np.array([1, 2]))
        assert envs.recv(at_least=2)[0].tolist() == [0, 1]
        second.stop()
        envs.send(np.array([1, 2]))
        slots, observations, _, _, truncations, infos = envs.recv(at_least=2)
        assert slots.tolist() == [0, 1]
        assert truncations.tolist() == [False, True]
        assert observations[1].tolist() == [1.0, 2.0]  # the last that it had
        assert infos["_error"].tolist() == [False, True]
        with serve_gym(Gated, port=port):
            envs.send(np.array([1, 2]))
            answers = {}
            while 1 not in answers:
                slots, observations, *_, infos = envs.recv(at_least=1)
                answers |= dict(zip(slots.tolist(), observations.tolist(), strict=True))
                if 1 not in answers:
                    envs.send(np.array([1]), [0])
            assert answers[1] == [0.0, 0.0]
            if 0 not in slots:
                envs.recv(at_least=1)  # what the first still owes
            for report in envs.unwrapped.remotes():
                assert report.steps_asked == report.steps_received + report.steps_lost > 0
            envs.close()


def test_misuse_is_told_and_changes_nothing(gate: threading.Event) -> None:
    with serve_gym(Gated, num_envs=2) as lanes, serve_gym(lambda: Gated("slow")) as slow:
        envs = make_vec_remote([lanes.url, slow.url], timeout=0.4)
        with pytest.raises(ResetNeededError, match="reset"):
            envs.send(np.array([0]), [0])
        with pytest.raises(ResetNeededError, match="reset"):
            envs.recv()
        observations, _ = envs.reset(seed=0)
        late = [slot for slot in range(3) if observations[slot] is None]
        if late:  # `reset` waits for none; `recv` gives the first observations that it had not
            assert envs.recv(at_least=len(late))[0].tolist() == late
        with pytest.raises(SettingError, match="0 slots that an answer is coming for"):
            envs.recv()
        with pytest.raises(SettingError, match="lanes of one world"):
            envs.send(np.array([0]), [1])
        with pytest.raises(SettingError, match="different slots from 0 to 2"):
            envs.send(np.array([0, 0]), [2, 2])
        with pytest.raises(SettingError, match="at least one"):
            envs.send(np.array([], np.int64), [])
        with pytest.raises(SettingError, match="positive"):
            envs.recv(at_least=0)
        envs.send(np.array([0]), [2])
        with pytest.raises(AlreadyPendingError, match="recv first"):
            envs.send(np.array([0]), [2])
        with pytest.raises(AlreadyPendingError, match="recv first"):
            envs.step(np.array([0, 0, 0]))
        slots, *_, truncations, infos = envs.recv()  # the gate is shut, so the slot is late
        assert slots.tolist() == [2]
        assert truncations.tolist() == [True]
        assert "within 0.4 s" in infos["error"][0]
        gate.set()
        envs.close()


def test_too_few_answers_within_the_timeout_are_an_error_and_stay(gate: threading.Event) -> None:
    with serve_gym(Gated) as fast:
        gone = serve_gym(Gated)
        envs = BlockingReset(make_vec_remote([fast.url, gone.url], timeout=1.0))
        envs.reset(seed=0)
        gone.stop()
        envs.send(np.array([1, 1]))
        assert envs.recv(at_least=2)[0].tolist() == [0, 1]
        envs.send(np.array([1, 1]))
        with pytest.raises(RemoteTimeoutError, match="1 slots answered"):
            envs.recv(at_least=2)
        assert envs.recv(at_least=1)[0].tolist() == [0]
        envs.close()
