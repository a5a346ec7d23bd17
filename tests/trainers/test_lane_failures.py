"""Stable-Baselines3, and a plain PPO loop, train on the lanes of a world, of which one raises at random."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import VectorWrapper
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnvWrapper, VecMonitor

from bridge import make_vec_remote, serve_gym
from bridge.wrappers import SB3VecEnv

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Stable-Baselines3's own remarks
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
LANES, SEED, FAILING = 16, 3, 8
"""The lane that fails is the one whose seed is `SEED + FAILING`."""


class RaisesAtRandom(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One of them raises in each twentieth of its steps, and in each fifth of its resets."""

    raised = 0

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.random, self.number = np.random.default_rng(1), None

    def _maybe(self, part: float) -> None:
        if self.number == SEED + FAILING and self.random.random() < part:
            RaisesAtRandom.raised += 1
            raise RuntimeError("the cable is loose")

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        first, self.number = self.number is None, seed if self.number is None else self.number
        self._maybe(0.0 if first else 0.2)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._maybe(0.05)
        return self.env.step(action)


class Kept(VecEnvWrapper):
    """Keeps what a training sends and gets."""

    def __init__(self, envs: Any) -> None:
        super().__init__(envs)
        self.first: Any = None
        self.actions: list[Any] = []
        self.results: list[Any] = []

    def reset(self) -> Any:
        self.first = self.venv.reset()
        return self.first

    def step_async(self, actions: Any) -> None:
        self.actions.append(actions.copy())
        self.venv.step_async(actions)

    def step_wait(self) -> Any:
        self.results.append(self.venv.step_wait())
        return self.results[-1]


def test_a_training_goes_on_and_the_other_episodes_are_those_of_local_environments() -> None:
    RaisesAtRandom.raised = 0
    with serve_gym(RaisesAtRandom) as server:
        kept = Kept(SB3VecEnv(make_vec_remote(server.url, num_envs=LANES, blocking=True)))
        model = PPO("MlpPolicy", VecMonitor(kept), n_steps=64, batch_size=256, seed=SEED, device="cpu")
        model.learn(LANES * 64 * 4)
        model.env.close()  # type: ignore[union-attr]
    assert model.num_timesteps == LANES * 64 * 4
    assert RaisesAtRandom.raised > 5
    failures, ends = 0, 0
    for lane in range(LANES):
        local = gymnasium.make("CartPole-v1")
        seen, _ = local.reset(seed=SEED + lane)
        assert kept.first[lane].tobytes() == seen.tobytes()
        for actions, (observations, rewards, dones, infos) in zip(kept.actions, kept.results, strict=True):
            info = infos[lane]
            if lane == FAILING:
                failures += "the cable is loose" in info.get("error", "")
                continue
            seen, reward, terminated, truncated, _ = local.step(actions[lane])
            assert (rewards[lane], dones[lane]) == (np.float32(reward), terminated or truncated)
            assert "error" not in info
            if dones[lane]:
                ends += 1
                assert info["terminal_observation"].tobytes() == seen.tobytes()
                seen, _ = local.reset()
            assert observations[lane].tobytes() == seen.tobytes()
        local.close()
    assert failures > 5
    assert ends > 50


class KeptSteps(VectorWrapper):  # type: ignore[type-arg]
    """Keeps what a loop sends and gets."""

    def __init__(self, envs: Any) -> None:
        super().__init__(envs)
        self.first: Any = None
        self.steps: list[Any] = []

    def reset(self, **given: Any) -> Any:
        self.first = self.env.reset(**given)
        return self.first

    def step(self, actions: Any) -> Any:
        result = self.env.step(actions)
        self.steps.append((actions.copy(), *result))
        return result


def test_a_plain_ppo_loop_goes_on_and_the_other_episodes_are_those_of_local_environments() -> None:
    train = runpy.run_path(str(EXAMPLES / "ppo.py"))["train"]
    RaisesAtRandom.raised = 0
    steps = LANES * 64 * 4
    with serve_gym(RaisesAtRandom) as server:
        # `lanes`, since with `continue` each slot would have a world. It fails too often to end an episode by itself.
        keywords: Any = {"lanes": True, "on_lost": "continue", "max_failures": None}
        kept = KeptSteps(make_vec_remote(server.url, num_envs=LANES, blocking=True, **keywords))
        assert len(kept.unwrapped.remotes()) == 1  # type: ignore[attr-defined]
        train(kept, steps, seed=SEED)
        kept.close()
    assert RaisesAtRandom.raised > 5
    assert len(kept.steps) * LANES >= steps
    failures, ends = 0, 0
    for lane in range(LANES):
        local = gymnasium.make("CartPole-v1")
        seen, _ = local.reset(seed=SEED + lane)
        assert kept.first[0][lane].tobytes() == seen.tobytes()
        over = False
        for actions, observations, rewards, terminations, truncations, infos in kept.steps:
            error = infos["error"][lane] if "error" in infos else None
            if lane == FAILING:
                failures += "the cable is loose" in (error or "")
                continue
            assert not error
            assert infos["valid"][lane]
            reward, terminated, truncated = 0.0, False, False
            if over:  # in this step the next episode begins, and no action is applied
                seen, _ = local.reset()
            else:
                seen, reward, terminated, truncated, _ = local.step(actions[lane])
            assert observations[lane].tobytes() == seen.tobytes()
            assert (rewards[lane], terminations[lane], truncations[lane]) == (reward, terminated, truncated)
            over = terminated or truncated
            ends += over
        local.close()
    assert failures > 5
    assert ends > 50
