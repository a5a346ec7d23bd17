"""Worlds whose action says how long to advance (D-23)."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import bridge
from bridge import TimeAction
from bridge.errors import EnvironmentFailedError, InvalidActionError, RefusedError, SettingError
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.peers import PublicClient
from tests.support import assert_identical


@pytest.fixture
def remote():
    made = []

    def make(env, **options):
        server = bridge.serve_gym(env, **options)
        made.append(server.stop)
        env = bridge.make_remote(server.url, timeout=20)
        made.append(env.close)
        return env

    yield make
    for close in reversed(made):
        close()


def test_an_action_advances_as_many_steps_as_it_says(remote):
    """D-23: the rewards of the steps add up, what is observed is the last."""
    env = remote(lambda: CountingEnv(10), time_action=TimeAction(most=5))
    assert env.action_space["steps"] == spaces.Discrete(5, start=1)
    env.reset()
    observation, reward, terminated, truncated, info = env.step({"action": 1, "steps": 4})
    assert observation.tolist() == [1, 4]
    assert reward == 1 + 2 + 3 + 4
    assert (terminated, truncated, info["elapsed_steps"]) == (False, False, 4)
    assert env.step({"action": 0, "steps": 1})[0].tolist() == [1, 5]


def test_rewards_may_be_arrays_of_one_number(remote):
    class Boxed(CountingEnv):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return observation, np.array([reward]), *rest

    env = remote(lambda: Boxed(10), time_action=TimeAction(most=5))
    env.reset()
    assert env.step({"action": 1, "steps": 3})[1] == 1 + 2 + 3


def test_the_end_of_an_episode_ends_the_time_early(remote):
    """D-23, D-13."""
    env = remote(lambda: CountingEnv(6), time_action=TimeAction(most=100))
    env.reset()
    observation, _, terminated, _, info = env.step({"action": 0, "steps": 100})
    assert observation.tolist() == [1, 6]
    assert terminated
    assert info["elapsed_steps"] == 6
    assert env.reset()[0].tolist() == [2, 0]


def test_it_equals_single_steps_with_the_same_action(remote):
    """D-23: over the real CartPole, bit for bit."""
    local = gymnasium.make("CartPole-v1")
    far = remote("CartPole-v1", time_action=TimeAction(most=4))
    assert_identical(far.reset(seed=3), local.reset(seed=3))
    for steps in (1, 3, 2, 4):
        total = 0.0
        for _ in range(steps):
            observation, reward, *_ = local.step(1 if steps % 2 else 0)
            total += reward
        got = far.step({"action": 1 if steps % 2 else 0, "steps": steps})
        assert_identical(got[0], observation)
        assert got[1] == total


def test_time_may_be_seconds_of_the_environments_own(remote):
    """D-23: by the metadata's frames a second, or as given; less than a step is one."""
    env = remote("CartPole-v1", time_action=TimeAction(most=1.0, unit="seconds"))  # CartPole draws 50 frames a second
    env.reset(seed=1)
    assert env.step({"action": 0, "seconds": 0.1})[4]["elapsed_steps"] == 5
    assert env.step({"action": 1, "seconds": 0.0})[4]["elapsed_steps"] == 1
    with pytest.raises(InvalidActionError):
        env.step({"action": 0, "seconds": 1.5})
    with pytest.raises(InvalidActionError):
        env.step(0)
    given = remote(lambda: CountingEnv(50), time_action=TimeAction(2.0, "seconds", seconds_per_step=0.5))
    given.reset()
    assert given.step({"action": 0, "seconds": 2.0})[4]["elapsed_steps"] == 4


def test_every_lane_has_a_time_of_its_own():
    """D-23 in a world of lanes."""
    for env in ("CartPole-v1", lambda: gymnasium.make("CartPole-v1")):
        with bridge.serve_gym(env, num_envs=3, time_action=TimeAction(most=4)) as server:
            envs = BlockingReset(bridge.make_vec_remote([server.url], timeout=20))
            envs.reset(seed=1)
            actions = {"action": np.array([0, 1, 0]), "steps": np.array([1, 2, 4])}
            _, rewards, _, _, infos = envs.step(actions)
            assert rewards.tolist() == [1.0, 2.0, 4.0]
            assert infos["elapsed_steps"].tolist() == [1, 2, 4]
            envs.close()


def test_any_client_sets_the_time_by_the_specs():
    """D-23: the time is an action like any other."""
    with bridge.serve_gym(lambda: CountingEnv(10), time_action=TimeAction(most=5)) as server:
        client = PublicClient(server).join()
        client.step()
        state, seen = client.step("observation", "reward", action__action=0, action__steps=5)
        assert (state, seen["observation"].tolist(), seen["reward"]) == (1, [1, 5], 15.0)
        client.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"unit": "weeks"}, "steps or seconds"),
        ({"most": 0}, "positive"),
        ({"most": 1.5}, "whole number"),
        ({"unit": "seconds", "seconds_per_step": 0.0}, "seconds_per_step"),
    ],
)
def test_bad_settings_are_told(fields, message):
    with pytest.raises(SettingError, match=message):
        TimeAction(**fields)


def test_what_cannot_have_a_time_says_so():
    with pytest.raises(SettingError, match=r"bridge\.TimeAction"):
        bridge.serve_gym("CartPole-v1", time_action=4)
    with (
        bridge.serve_gym(lambda: CountingEnv(3), time_action=TimeAction(1.0, "seconds")) as server,
        pytest.raises((EnvironmentFailedError, RefusedError), match="render_fps"),
    ):
        bridge.make_remote(server.url)
