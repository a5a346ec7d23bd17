"""SB3VecEnv keeps the contract of Stable-Baselines3's VecEnv: what it gives is what DummyVecEnv gives."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecCheckNan,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.errors import RemoteTimeoutError
from bridge.recording.reader import read_folder
from bridge.testing import EVERY_SPACE, SpaceEnv
from bridge.wrappers import BlockingReset, SB3VecEnv
from tests.support import assert_identical

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's and Stable-Baselines3's own remarks
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def cartpole() -> Any:
    return gymnasium.make("CartPole-v1", render_mode="rgb_array")


class SomeOptions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes empty options as none: a lane that is reset alone is given empty ones."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.env.reset(seed=seed, options=options or None)


def mixed() -> Any:
    space = gymnasium.spaces.Dict({"image": EVERY_SPACE["box_image"](), "number": gymnasium.spaces.Discrete(4)})
    return SomeOptions(SpaceEnv(space, EVERY_SPACE["box_float32"]()))


ENVIRONMENTS = {"CartPole": cartpole, "Dict": mixed, "FrozenLake": lambda: gymnasium.make("FrozenLake-v1")}


@pytest.fixture(params=["CartPole", "Dict", "FrozenLake"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[SB3VecEnv, DummyVecEnv]]:
    """Three environments of each: a world of two lanes and one of one, and three local ones."""
    function = ENVIRONMENTS[request.param]
    with serve_gym(function, num_envs=2) as server:
        remote = SB3VecEnv(make_vec_remote([server.url, f"{server.url}?num_envs=1"]))
        local = DummyVecEnv([function] * 3)
        yield remote, local
        remote.close()
        local.close()


def without_times(infos: Any) -> Any:
    return [{key: value for key, value in info.items() if key != "episode"} for info in infos]


def test_steps_resets_seeds_and_infos_are_those_of_dummy_vec_env(pair: tuple[SB3VecEnv, DummyVecEnv]) -> None:
    remote, local = pair
    assert remote.observation_space == local.observation_space
    assert remote.action_space == local.action_space
    local.action_space.seed(3)
    for each in pair:
        assert each.seed(17) == [17, 18, 19]
    truncated = ended = 0
    for episode in range(3):
        assert_identical(remote.reset(), local.reset(), "reset")
        assert_identical(remote.reset_infos, local.reset_infos, "reset_infos")
        for step in range(60):
            actions = np.array([local.action_space.sample() for _ in range(3)])
            mine, theirs = remote.step(actions), local.step(actions)
            assert_identical(mine[:3], theirs[:3], f"step {step}")
            assert mine[1].dtype == np.float32
            assert_identical(without_times(mine[3]), without_times(theirs[3]), f"infos {step}")
            assert_identical(remote.reset_infos, local.reset_infos, "reset_infos")
            ended += int(theirs[2].sum())
            truncated += sum(info["TimeLimit.truncated"] for info in theirs[3])
            for slot in np.flatnonzero(theirs[2]):
                assert "terminal_observation" in mine[3][slot]
        if episode == 1:
            remote.seed(4)
            local.seed(4)
    assert ended
    if "image" in getattr(local.observation_space, "spaces", {}):
        assert truncated


def test_options_count_once_and_for_each_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_gym("CartPole-v1") as server:
        remote = SB3VecEnv(make_vec_remote(server.url, num_envs=2))
        local = DummyVecEnv([cartpole] * 2)
        for options in ({"low": 0.02, "high": 0.03}, [{"low": 0.0, "high": 0.01}, {}], None):
            for each in (remote, local):
                each.seed(5)
                each.set_options(copy.deepcopy(options))
            assert_identical(remote.reset(), local.reset(), f"options {options}")
        remote.close()
        local.close()


def test_lanes_of_one_world_refuse_options_that_differ() -> None:
    with serve_gym("CartPole-v1", num_envs=2) as server:
        remote = SB3VecEnv(make_vec_remote(server.url))
        remote.set_options([{"low": 0.0, "high": 0.01}, {}])
        with pytest.raises(ValueError, match="same options for all 2 lanes"):
            remote.reset()
        remote.close()


@pytest.mark.parametrize("name", ["CartPole"])
def test_attributes_and_methods_of_chosen_slots(name: str) -> None:
    with serve_gym(lambda: Monitor(cartpole()), num_envs=2) as server:
        remote = SB3VecEnv(make_vec_remote([server.url, f"{server.url}?num_envs=1"]))
        assert remote.get_attr("length") == [0.5, 0.5, 0.5]
        remote.set_attr("length", 2.0, indices=[1])
        assert remote.get_attr("length") == [0.5, 2.0, 0.5]
        assert remote.get_attr("length", indices=[2, 1]) == [0.5, 2.0]
        remote.set_attr("length", 3.0)
        assert remote.get_attr("length", indices=0) == [3.0]
        assert remote.has_attr("length")
        assert not remote.has_attr("no_such_thing")
        remote.reset()
        found = remote.env_method("has_wrapper_attr", "length", indices=[2, 0])
        assert found == [True, True]
        assert remote.env_method("has_wrapper_attr", "nothing") == [False] * 3
        assert remote.env_is_wrapped(Monitor) == [True] * 3
        assert remote.env_is_wrapped(gymnasium.wrappers.TimeLimit, indices=1) == [True]
        assert remote.env_is_wrapped(gymnasium.wrappers.FlattenObservation) == [False] * 3
        assert remote.env_is_wrapped(gymnasium.Wrapper, indices=[0]) == [True]
        remote.close()


def test_frames_are_tiled_as_those_of_local_environments() -> None:
    with serve_gym(cartpole, num_envs=2) as server:
        remote, local = SB3VecEnv(make_vec_remote(server.url)), DummyVecEnv([cartpole] * 2)
        for each in (remote, local):
            each.seed(1)
            each.reset()
            each.step(np.array([0, 1]))
        assert remote.render_mode == "rgb_array"
        assert_identical(list(remote.get_images()), list(local.get_images()))
        assert_identical(remote.render(), local.render())
        remote.close()
        local.close()


def test_a_step_that_is_under_way_is_given_up_by_a_reset() -> None:
    with serve_gym("CartPole-v1") as server:
        remote = SB3VecEnv(make_vec_remote(server.url, num_envs=2))
        remote.seed(1)
        first = remote.reset()
        remote.step_async(np.array([0, 1]))
        remote.seed(1)
        assert_identical(remote.reset(), first)
        remote.step(np.array([0, 1]))
        remote.close()
        remote.close()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda envs: pickle.loads(pickle.dumps(envs))], ids=["copy", "pickle"]
)
def test_a_copy_plays_by_itself_and_waits_as_long(copied: Any) -> None:
    free = threading.Event()

    class Stuck(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            assert free.wait(20)
            return self.env.step(action)

    with serve_gym(lambda: Stuck(cartpole())) as server:
        remote = SB3VecEnv(BlockingReset(make_vec_remote(server.url), 2.0))
        twin = copied(remote)
        assert twin.reset().shape == (1, 4)
        with pytest.raises(RemoteTimeoutError, match=r"within 2 s|2\.0 s"):
            twin.step(np.array([0]))
        free.set()
        twin.close()
        remote.close()


def test_what_it_takes() -> None:
    with pytest.raises(ValueError, match="make_vec_remote"):
        SB3VecEnv(cartpole())


@pytest.mark.parametrize("wrap", [VecNormalize, lambda e: VecFrameStack(e, 2), VecCheckNan, VecMonitor])
def test_wrappers_of_stable_baselines3_cannot_tell(wrap: Any) -> None:
    with serve_gym("CartPole-v1", num_envs=2) as server:
        remote, local = wrap(SB3VecEnv(make_vec_remote(server.url))), wrap(DummyVecEnv([cartpole] * 2))
        for each in (remote, local):
            each.seed(6)
        assert_identical(remote.reset(), local.reset())
        for _ in range(60):
            actions = np.array([0, 1])
            mine, theirs = remote.step(actions), local.step(actions)
            assert_identical(mine[:3], theirs[:3])
            for left, right in zip(mine[3], theirs[3], strict=True):
                assert left.get("episode", {}).get("r") == right.get("episode", {}).get("r")
        remote.close()
        local.close()


def learn(kind: Any, envs: Any, **kwargs: Any) -> tuple[list[Any], list[float]]:
    model = kind("MlpPolicy", envs, seed=3, device="cpu", **kwargs)
    model.learn(1500)
    returns = [float(episode["r"]) for episode in model.ep_info_buffer]
    return [parameter.detach().numpy().copy() for parameter in model.policy.parameters()], returns


@pytest.mark.parametrize(
    ("kind", "slots", "kwargs"),
    [(PPO, 4, {"n_steps": 64, "batch_size": 64}), (DQN, 1, {"learning_starts": 100, "buffer_size": 2000})],
    ids=["PPO", "DQN"],
)
def test_training_is_the_same_as_locally_bit_for_bit(kind: Any, slots: int, kwargs: Any) -> None:
    weights, returns = learn(kind, VecMonitor(DummyVecEnv([cartpole] * slots)), **kwargs)
    with serve_gym("CartPole-v1") as server:
        remote = VecMonitor(SB3VecEnv(make_vec_remote(server.url, num_envs=slots)))
        mine, remote_returns = learn(kind, remote, **kwargs)
        remote.close()
    assert remote_returns == returns
    assert_identical(mine, weights)


def test_monitor_statistics_come_from_where_the_environments_run() -> None:
    with serve_gym(lambda: Monitor(cartpole()), num_envs=4) as server:
        remote = SB3VecEnv(make_vec_remote(server.url))
        model = PPO("MlpPolicy", remote, n_steps=64, batch_size=64, seed=0, device="cpu").learn(512)
        assert len(model.ep_info_buffer) > 5
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # evaluate_policy warns where it finds no Monitor
            mean, _ = evaluate_policy(model, remote, n_eval_episodes=4)
        assert 5 < mean <= 500
        remote.close()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_subproc_vec_env_holds_remote_environments(method: str) -> None:
    with serve_gym("CartPole-v1") as server:
        url = server.url
        held = SubprocVecEnv([lambda: make_remote(url)] * 2, start_method=method)
        local = DummyVecEnv([cartpole] * 2)
        for each in (held, local):
            each.seed(2)
        assert_identical(held.reset(), local.reset())
        for _ in range(40):
            actions = np.array([1, 0])
            mine, theirs = held.step(actions), local.step(actions)
            assert_identical((mine[0], mine[2]), (theirs[0], theirs[2]))
            assert mine[1].tolist() == theirs[1].tolist()
        held.close()
        local.close()


def test_a_single_remote_environment_trains() -> None:
    with serve_gym("CartPole-v1") as server:
        env = make_remote(server.url)
        PPO("MlpPolicy", env, n_steps=64, batch_size=64, device="cpu").learn(128)
        env.close()


def test_a_recording_holds_the_steps_that_were_made_and_no_others(tmp_path: Any) -> None:
    """Each lane that ends is reset alone, which is no step of the others."""
    lanes, steps = 8, 150
    with serve_gym("CartPole-v1", num_envs=lanes, record=tmp_path) as server:
        envs = SB3VecEnv(make_vec_remote(server.url))
        envs.seed(1)
        envs.reset()
        rewards = np.zeros(lanes)
        for _ in range(steps):
            rewards += envs.step(np.ones(lanes, np.int64))[1]
        envs.close()
    episodes = read_folder(tmp_path).episodes()
    assert sum(episode.length for episode in episodes) == lanes * steps
    assert sum(episode.total for episode in episodes) == rewards.sum()
