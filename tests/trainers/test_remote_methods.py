"""Trainers' calls beside step and reset reach the remote: rewards of goals, masks of actions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from stable_baselines3 import DDPG, HerReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.wrappers import SB3VecEnv
from tests.support import assert_identical

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Reach(gymnasium.Env[Any, Any]):
    """Move a point to a goal, as FetchReach does."""

    observation_space = spaces.Dict(
        {name: spaces.Box(-1, 1, (2,), np.float32) for name in ("observation", "achieved_goal", "desired_goal")}
    )
    action_space = spaces.Box(-0.2, 0.2, (2,), np.float32)
    computed = 0

    def _observe(self) -> dict[str, Any]:
        return {"observation": self.at.copy(), "achieved_goal": self.at.copy(), "desired_goal": self.goal.copy()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        self.at: Any = np.zeros(2, np.float32)
        self.goal: Any = self.np_random.uniform(-0.5, 0.5, 2).astype(np.float32)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.at = np.clip(self.at + action, -1, 1).astype(np.float32)
        reward = float(self.compute_reward(self.at, self.goal, {}))
        return self._observe(), reward, False, self.steps == 10, {"is_success": reward == 0}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        self.computed += 1
        return -(np.linalg.norm(np.asarray(achieved) - desired, axis=-1) > 0.1).astype(np.float32)

    def action_masks(self) -> Any:
        return np.array([True, False, True])


class Choice(Reach):
    """Masks one of three actions, and fails where it comes."""

    observation_space = Reach.observation_space["observation"]  # type: ignore[assignment]
    action_space = spaces.Discrete(3)  # type: ignore[assignment]

    def _observe(self) -> Any:
        return self.at.copy()

    def step(self, action: Any) -> Any:
        assert action != 1, "a masked action came"
        return super().step(np.full(2, 0.1 * (action - 1), np.float32))


def test_hindsight_experience_replay_asks_the_remote_for_rewards() -> None:
    with serve_gym(Reach) as server:
        env = make_remote(server.url)
        model = DDPG(
            "MultiInputPolicy",
            env,
            replay_buffer_class=HerReplayBuffer,
            learning_starts=50,
            train_freq=(1, "episode"),
            policy_kwargs={"net_arch": [8]},
            seed=1,
            device="cpu",
        )
        model.learn(120)
        assert env.get_wrapper_attr("computed") > 120  # more than its own steps
        env.close()


class Telling(Reach):
    """Tells much in its infos, and more where an episode ends; rewards count on what they say."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        info |= {f"metric_{index}": float(index * self.steps) for index in range(12)}
        info |= {"steps": self.steps, "phase": "end" if truncated else "way"}
        if truncated:
            info |= {"summary": {"at": self.at.copy()}}
        return observation, reward, terminated, truncated, info

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        reward = super().compute_reward(achieved, desired, info)
        if np.ndim(reward):
            assert len(info) == len(reward)
            for index, told in enumerate(info):
                assert told["metric_2"] == 2.0 * told["steps"]
                assert ("summary" in told) == (told["phase"] == "end")
                reward[index] -= 0.01 * told["steps"]
        return reward


@pytest.mark.parametrize("slots", [1, 4])
def test_hindsight_experience_replay_sends_the_infos_of_its_batches(slots: int) -> None:
    """1,024 transitions with 15 infos are more than 16,000 values in each call."""

    def learn(env: Any) -> list[Any]:
        model = DDPG(
            "MultiInputPolicy",
            env,
            replay_buffer_class=HerReplayBuffer,
            replay_buffer_kwargs={"copy_info_dict": True},
            batch_size=1024,
            learning_starts=100,
            train_freq=10,
            policy_kwargs={"net_arch": [8]},
            seed=1,
            device="cpu",
        )
        model.learn(240)
        env.close()
        return [parameter.detach().numpy().copy() for parameter in model.policy.parameters()]

    with serve_gym(Telling) as server:
        remote = make_remote(server.url) if slots == 1 else SB3VecEnv(make_vec_remote(server.url, num_envs=slots))
        weights = learn(remote)
    assert_identical(weights, learn(Telling() if slots == 1 else DummyVecEnv([Telling] * slots)))


def test_maskable_ppo_takes_the_masks_of_the_remote() -> None:
    with serve_gym(Choice) as server:
        env = make_remote(server.url)
        model = MaskablePPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=1, seed=1, device="cpu")
        model.learn(128)
        env.close()


@pytest.mark.parametrize("kind", [DummyVecEnv, SubprocVecEnv])
def test_vector_environments_of_stable_baselines3_call_methods_of_remotes(kind: type[Any]) -> None:
    with serve_gym(Choice) as server:
        url = server.url
        envs = kind([lambda: make_remote(url)] * 2)
        assert [mask.tolist() for mask in envs.env_method("action_masks")] == [[True, False, True]] * 2
        assert envs.has_attr("action_masks")
        assert not envs.has_attr("nothing")
        envs.set_attr("computed", 5)
        assert envs.get_attr("computed") == [5, 5]
        envs.close()
