"""The usual call under trainers: one world of lanes gives what a world for each slot gives, and what it gave before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.wrappers import vector as wrappers
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor

from bridge import make_vec_remote, serve_gym
from bridge.wrappers import SB3VecEnv
from tests.support import assert_identical

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Stable-Baselines3's and Gymnasium's own remarks
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def trained(url: str, **keywords: Any) -> tuple[dict[str, Any], list[Any], int]:
    """The weights and the returns of a short training, and how many worlds there were."""
    remote = make_vec_remote(url, num_envs=8, **keywords)
    worlds = len(remote.remotes())
    envs = VecMonitor(SB3VecEnv(remote))
    model = PPO("MlpPolicy", envs, n_steps=32, batch_size=64, seed=3, device="cpu").learn(1024)
    weights = {name: tensor.numpy() for name, tensor in model.policy.state_dict().items()}
    returns = [[episode["r"], episode["l"]] for episode in model.ep_info_buffer or ()]
    envs.close()
    return weights, returns, worlds


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_training_gets_the_same_weights_and_returns_with_and_without_blocking(env_id: str) -> None:
    with serve_gym(env_id) as server:
        usual = trained(server.url, blocking=True)
        worlds = trained(server.url, blocking=True, lanes=False)
        before = trained(server.url)
    assert (usual[2], worlds[2], before[2]) == (1, 8, 8)
    for other in (worlds, before):
        assert_identical(usual[:2], other[:2])
    assert usual[1] or env_id == "Pendulum-v1"


def test_what_stable_baselines3_asks_of_slots_is_the_same() -> None:
    found = []
    with serve_gym("CartPole-v1") as server:
        for lanes in (True, False):
            envs = SB3VecEnv(make_vec_remote(server.url, num_envs=3, lanes=lanes, render_mode="rgb_array"))
            envs.seed(4)
            envs.set_options({"low": -0.01, "high": 0.01})
            asked: list[Any] = [envs.reset()]
            asked += [envs.step(np.ones(3, np.int64)) for _ in range(40)]
            envs.set_attr("gravity", 5.0, indices=[0, 2])
            asked += [envs.get_attr("gravity"), envs.get_attr("gravity", 1)]
            asked += [envs.env_method("has_wrapper_attr", "gravity", indices=[2])]
            asked += [envs.env_is_wrapped(wrappers.RecordVideo), list(envs.get_images()), envs.reset_infos]
            found.append(asked)
            envs.close()
    assert_identical(*found)


def test_videos_of_both_forms_have_the_same_frames(tmp_path: Path) -> None:
    found = []
    with serve_gym("CartPole-v1") as server:
        for lanes in (None, False):
            folder = tmp_path / str(lanes)
            envs = make_vec_remote(server.url, num_envs=2, blocking=True, lanes=lanes, render_mode="rgb_array")
            recorded = wrappers.RecordVideo(envs, str(folder), episode_trigger=lambda episode: True)
            recorded.reset(seed=1)
            for _ in range(30):
                recorded.step(np.ones(2, np.int64))
            recorded.close()
            found.append([(path.name, path.read_bytes()) for path in sorted(folder.glob("*.mp4"))])
    assert found[0] == found[1]
    assert len(found[0]) >= 1
