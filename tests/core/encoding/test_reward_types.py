"""A reward comes in the type that the environment returned it in, and a foreign client gets the same number as ever."""

from __future__ import annotations

import enum
import fractions
import threading
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv

from bridge import make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.core.encoding import values
from bridge.errors import EnvironmentFailedError
from bridge.recording.reader import read_folder
from bridge.recording.replay import verify
from tests.parallel_envs import Relay
from tests.peers import PublicClient
from tests.support import everywhere


class Level(enum.IntEnum):
    """An int of an environment's own."""

    HIGH = 3


class Currency(float):
    """A float of an environment's own."""


REWARDS: list[Any] = [
    1.5, 1, 2, True, False, np.float64(2.5), np.float64(-0.0), np.float32(0.1), np.float32(0.2), np.float16("inf"),
    np.bool_(True), np.bool_(False), np.int8(-3), np.uint8(200), np.int64(2**53 + 1), np.int64(7), np.int64(-(2**63)),
    np.uint64(2**64 - 1), np.uint64(3), 7, 2**53 + 1, -(2**63) - 1, 10**400, -(10**400), 8, 8.5, np.array(3.5),
    np.array(4.5), np.array([1], np.int8), np.array([[2]], np.int8), np.array([2**53 + 1]), np.array([False]),
    float("nan"), np.float32("nan"), float("-inf"), 0, 0.0,
]  # fmt: skip
"""What environments return, in an order in which types change, come again, and hold values that no float64 holds."""
OTHERS: list[tuple[Any, Any]] = [
    (Level.HIGH, 3), (Currency(2.5), 2.5), (fractions.Fraction(1, 4), 0.25), (np.longdouble(1.5), 1.5),
    (np.ma.masked_array([2.5]), 2.5), (np.array(4, object), 4.0), (10**5000, float("inf")),
]  # fmt: skip
"""Rewards that have no such type, and what comes of them."""


class Rewarding(gymnasium.Env[Any, Any]):
    """Gives some rewards one after the other."""

    observation_space: Any = spaces.Box(-1, 1, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)
    rewards: ClassVar[list[Any]] = REWARDS

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(2, np.float32), self.rewards[self.steps - 1], False, self.steps == len(self.rewards), {}


class Unusual(Rewarding):
    rewards: ClassVar[list[Any]] = [given for given, _ in OTHERS]


class Whole(Rewarding):
    rewards: ClassVar[list[Any]] = [1] * 9


class Talkative(Rewarding):
    """Its infos are never empty, and its observations have a form of their own."""

    observation_space: Any = spaces.Discrete(99)

    def reset(self, **given: Any) -> Any:
        super().reset(**given)
        return 0, {"steps": 0}

    def step(self, action: Any) -> Any:
        _, reward, *flags, _ = super().step(action)
        return self.steps if self.steps % 3 else np.int64(self.steps), reward, *flags, {"steps": self.steps}


def assert_same_reward(mine: Any, theirs: Any) -> None:
    """Hold two rewards against each other, with their types."""
    assert type(mine) is type(theirs), f"{mine!r} beside {theirs!r}"
    assert getattr(mine, "dtype", None) == getattr(theirs, "dtype", None)
    assert np.shape(mine) == np.shape(theirs)
    assert mine == theirs or (mine != mine and theirs != theirs), f"{mine!r} beside {theirs!r}"


def play(env: Any, expected: list[Any], episodes: int = 2) -> None:
    """Play episodes, the second of which begins with the type that the first one ended with."""
    for _ in range(episodes):
        env.reset(seed=0)
        for theirs in expected:
            assert_same_reward(env.step(0)[1], theirs)


@everywhere
@pytest.mark.parametrize("kind", [Rewarding, Talkative])
def test_a_reward_has_the_type_and_the_value_that_the_environment_gave_it(kind: Any, isolation: Any) -> None:
    with serve_gym(kind, isolation=isolation) as server, make_remote(server.url) as env:
        play(env, REWARDS)


@everywhere
def test_a_reward_of_a_type_that_does_not_travel_is_a_plain_number(isolation: Any) -> None:
    with serve_gym(Unusual, isolation=isolation) as server, make_remote(server.url) as env:
        play(env, [number for _, number in OTHERS])


def test_grpcios_transport_gives_the_types_of_rewards() -> None:
    with serve_gym(Rewarding, transport="grpcio") as server, make_remote(server.url, transport="grpcio") as env:
        play(env, REWARDS)


def test_a_rollout_gives_the_types_of_rewards() -> None:
    with serve_gym(Rewarding) as server, make_remote(server.url) as env:
        env.reset()
        for step, theirs in zip(env.rollout([0] * len(REWARDS)), REWARDS, strict=True):
            assert_same_reward(step.reward, theirs)


def test_a_type_that_only_a_dropped_answer_tells_is_known_afterwards() -> None:
    """A rollout that is given up leaves answers on their way, one of which told that rewards are integers."""
    with serve_gym(Whole) as server, make_remote(server.url) as env:
        env.reset()
        steps = env.rollout([0] * 8, window=8)
        assert type(next(steps).reward) is int
        steps.close()
        play(env, Whole.rewards)
    with serve_gym(Rewarding) as server, make_remote(server.url) as env:
        env.reset()
        steps = env.rollout([0] * 20, window=20)
        next(steps)
        steps.close()  # 19 answers are dropped, in which the type changes ten times
        env.reset()
        assert_same_reward(env.step(0)[1], 1.5)


def infos_of(client: PublicClient, steps: int) -> list[Any]:
    """Return the reward that the info of each step tells; `values.UNCHANGED`: none."""
    answers = [client.step("info", action=0)[1]["info"].tobytes() for _ in range(steps)]
    return [values.decode_step_info(data)[3] for data in answers]


def test_a_type_is_told_when_it_changes_and_a_value_where_no_float64_holds_it() -> None:
    with serve_gym(Rewarding) as server:
        client = PublicClient(server).join(gymnasium=True)
        client.step("info")
        told = infos_of(client, 16)
        client.close()
    new = [False, True, False, True, False, True, False, True, False, True, True, False, True, True, True, False]
    assert [reward is not values.UNCHANGED for reward in told] == new
    for mine, theirs in zip(told, REWARDS, strict=False):
        if mine is not values.UNCHANGED:
            assert_same_reward(mine, theirs)


def test_a_type_that_changed_while_nobody_asked_for_the_info_is_told_by_the_next_one() -> None:
    with serve_gym(Rewarding) as server:
        client = PublicClient(server).join(gymnasium=True)
        client.step("info")
        for _ in range(2):
            client.step("reward", action=0)
        (told,) = infos_of(client, 1)  # the second int: the first was in a step without an info
        assert_same_reward(told, 2)
        for _ in range(6):  # it changes three times
            client.step("reward", action=0)
        (told,) = infos_of(client, 1)
        assert_same_reward(told, np.float16("inf"))
        client.close()


def test_a_foreign_client_gets_the_float64_that_it_always_got() -> None:
    with serve_gym(Rewarding) as server:
        client = PublicClient(server).join()
        assert "info" not in client.observations
        client.step("reward")
        rewards = [client.step("reward", action=0)[1]["reward"] for _ in REWARDS]
        client.close()
    for mine, theirs in zip(rewards, REWARDS, strict=True):
        assert (mine.dtype, mine.shape) == (np.float64, ())
        number = rounded(theirs)
        assert mine == number or (np.isnan(mine) and np.isnan(number))


def rounded(reward: Any) -> float:
    """Return a reward as the nearest float."""
    try:
        return float(np.asarray(reward).item())
    except OverflowError:
        return float("inf") if reward > 0 else float("-inf")


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_vector_gives_arrays_of_float64_as_gymnasiums_own(lanes: int) -> None:
    local = gymnasium.vector.SyncVectorEnv([Numbers] * 2)
    with serve_gym(Numbers, num_envs=lanes) as server:
        envs = make_vec_remote(server.url, num_envs=2, blocking=True)
        envs.reset()
        local.reset()
        for _ in range(len(Numbers.rewards)):
            mine, theirs = envs.step(np.zeros(2, np.int64))[1], local.step(np.zeros(2, np.int64))[1]
            assert (mine.dtype, mine.tolist()) == (theirs.dtype, theirs.tolist())
        envs.close()


class Numbers(Rewarding):
    rewards: ClassVar[list[Any]] = [2, np.float32(0.1), True, np.float64(3), 2**53 + 1, np.array(3.5)]


class Wage(Rewarding):
    """Its reward space has no dimension."""

    reward_space = spaces.Box(-9, 9, (), np.float64)
    rewards: ClassVar[list[Any]] = [np.array(1.5), np.array(2.5)]


@everywhere
def test_a_reward_of_a_space_without_dimensions_is_an_array_without_dimensions(isolation: Any) -> None:
    with serve_gym(Wage, isolation=isolation) as server, make_remote(server.url) as env:
        play(env, Wage.rewards)


class Stated(Rewarding):
    reward_space = spaces.Box(-9, 9, (2,), np.float32)
    rewards: ClassVar[list[Any]] = [np.array([1, 2], np.float32), 1.5]


@everywhere
def test_a_number_where_the_reward_space_has_two_is_refused_and_not_taken_for_both(isolation: Any) -> None:
    with serve_gym(Stated, isolation=isolation) as server, make_remote(server.url) as env:
        env.reset()
        np.testing.assert_array_equal(env.step(0)[1], Stated.rewards[0])
        with pytest.raises(EnvironmentFailedError, match="reward is not of its reward_space"):
            env.step(0)


# Several agents


class Team(ParallelEnv):  # type: ignore[misc]
    """Two agents whose rewards are of types of their own."""

    metadata: ClassVar[Any] = {"name": "team_v0"}

    def __init__(self) -> None:
        self.possible_agents, self.agents, self.steps = ["a", "b"], [], 0

    def observation_space(self, agent: str) -> Any:
        return spaces.Discrete(1000)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.steps = list(self.possible_agents), 0
        return dict.fromkeys(self.agents, 0), {"a": {}, "b": {}}

    def step(self, actions: Any) -> Any:
        rewards = {"a": REWARDS[self.steps], "b": REWARDS[-1 - self.steps]}
        self.steps += 1
        over = dict.fromkeys("ab", self.steps == len(REWARDS))
        self.agents = [] if over["a"] else self.agents
        return dict.fromkeys("ab", self.steps), rewards, over, dict.fromkeys("ab", False), {"a": {}, "b": {}}


@everywhere
def test_each_agents_reward_has_a_type_of_its_own(isolation: Any) -> None:
    with serve_parallel(Team, isolation=isolation) as server:
        env = make_parallel_remote(server.url)
        for _ in range(2):
            env.reset()
            for step in range(len(REWARDS)):
                rewards = env.step({"a": 0, "b": 1})[1]
                assert_same_reward(rewards["a"], REWARDS[step])
                assert_same_reward(rewards["b"], REWARDS[-1 - step])
        env.close()


class WholeRelay(Relay):
    """Its rewards are integers of eight bits, which would overflow in a sum."""

    def step(self, actions: Any) -> Any:
        observations, rewards, *rest = super().step(actions)
        return observations, dict.fromkeys(rewards, np.int8(100)), *rest


def test_the_rewards_that_a_late_agent_missed_are_added_up_as_floats() -> None:
    env = WholeRelay(horizon=4)
    with serve_parallel(env, missing_agent="default", agent_timeout=0.3) as server:
        ann, bob = (make_remote(f"{server.url}?world=", agent=name, timeout=20) for name in ("ann", "bob"))
        starts = [threading.Thread(target=one.reset) for one in (ann, bob)]
        for thread in starts:
            thread.start()
        for thread in starts:
            thread.join(20)
        for _ in range(4):
            assert_same_reward(ann.step(np.int64(1))[1], np.int8(100))
        assert_same_reward(bob.step(bob.action_space.sample())[1], 400.0)
        ann.close()
        bob.close()


# Who else sees rewards


def test_a_world_in_real_time_gives_sums_which_are_floats() -> None:
    with serve_gym(Whole, fps=200) as server, make_remote(server.url, wait="next_frame") as env:
        env.reset()
        for _ in range(20):
            _, reward, terminated, truncated, _ = env.step(0)
            assert type(reward) is float
            if terminated or truncated:
                env.reset()


@everywhere
def test_rewards_of_all_types_are_recorded_as_float64(isolation: Any, tmp_path: Any) -> None:
    with serve_gym(Rewarding, record=tmp_path, isolation=isolation) as server, make_remote(server.url) as env:
        play(env, REWARDS)
    first, *_ = read_folder(tmp_path).episodes()
    np.testing.assert_array_equal(first.rewards, [rounded(reward) for reward in REWARDS])
    assert verify(first, Rewarding).ok


def test_rewards_of_agents_are_recorded_as_float64(tmp_path: Any) -> None:
    with serve_parallel(Team, record=tmp_path) as server:
        env = make_parallel_remote(server.url)
        env.reset()
        while env.agents:
            env.step({"a": 0, "b": 1})
        env.close()
    first, *_ = read_folder(tmp_path).episodes()
    numbers = [rounded(reward) for reward in REWARDS]
    np.testing.assert_array_equal(first.rewards, np.transpose([numbers, numbers[::-1]]))


class Small(Rewarding):
    """Its rewards would overflow, or stay True, if they were added up as they are."""

    rewards: ClassVar[list[Any]] = [
        np.int8(100),
        np.int8(100),
        np.bool_(True),
        np.bool_(True),
        np.array([100], np.int8),
    ]


def test_a_spectator_is_told_the_sum_of_rewards_whatever_their_type() -> None:
    with serve_gym(Small) as server:
        player = make_remote(server.url + "?world=")
        player.reset()
        spectator = make_remote(server.url + "?world=", role="spectator")
        spectator.reset()
        for _ in Small.rewards:
            player.step(0)
        assert np.asarray(spectator.step(0)[1]).item() == 302.0
        spectator.close()
        player.close()


@pytest.mark.parametrize("reward", [None, "one", [1.0, 2.0], np.zeros(2), np.zeros(0), 1j, {}], ids=str)
def test_what_is_no_number_is_refused_as_a_reward(reward: Any) -> None:
    class Bad(Rewarding):
        rewards: ClassVar[list[Any]] = [2, reward]

    with serve_gym(Bad) as server, make_remote(server.url) as env:
        env.reset()
        assert_same_reward(env.step(0)[1], 2)
        with pytest.raises(EnvironmentFailedError, match="expected a number as the environment's reward"):
            env.step(0)
