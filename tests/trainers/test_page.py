"""What docs/trainers.md says to write for each trainer is typed as it is printed, and used by the trainer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import bridge
import bridge.wrappers
from bridge import serve_gym
from tests.trainers.remarks import OWN_REMARKS

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
torch.set_num_threads(1)

pytestmark = OWN_REMARKS


def printed() -> list[str]:
    """Return what the table says to write: each call, whole."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("## What was tried")[2].partition("\n##")[0]
    cells = [line.split(" | ")[1] for line in table.splitlines() if line.startswith("| ")]
    found = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    return [code for code in found if "(" in code and "…" not in code]


def trains(model: Any) -> None:
    model.learn(1)
    assert model.num_timesteps >= 1
    model.get_env().close()


def steps_vec_env(envs: Any) -> None:
    envs.reset()
    observations, rewards, _, _ = envs.step([envs.action_space.sample() for _ in range(envs.num_envs)])
    assert len(observations) == len(rewards) == envs.num_envs == 2
    envs.close()


def steps_vector(envs: Any) -> None:
    envs.reset(seed=0)
    observations, rewards, *_ = envs.step(envs.action_space.sample())
    assert observations.shape == (2, 4)
    assert np.array_equal(rewards, [1.0, 1.0])
    envs.close()


def rolls_out(env: Any) -> None:
    assert env.rollout(5, break_when_any_done=False)["next", "reward"].sum() >= 5
    env.close()


def steps_tensors(env: Any) -> None:
    observations, _ = env.reset()
    actions = torch.zeros((env.num_envs, 1), dtype=torch.int64)
    seen, rewards, *_ = env.step(actions)
    assert seen.shape == observations.shape
    assert rewards.sum() == env.num_envs
    env.close()


def is_registered(nothing: None) -> None:
    from ray.tune.registry import ENV_CREATOR, _global_registry

    with serve_gym("CartPole-v1") as server:
        env = _global_registry.get(ENV_CREATOR, "remote")({"url": server.url})
        assert env.reset(seed=0)[0].shape == (4,)
        env.close()


USES: dict[str, Callable[[Any], None]] = {
    "PPO": trains,
    "SubprocVecEnv": steps_vec_env,
    "GymWrapper": rolls_out,
    "GymEnv": rolls_out,
    "wrap_env": steps_tensors,
    "register_env": is_registered,
    "make_vec_remote": steps_vector,
    "make_remote": lambda env: steps_tensors(names()["wrap_env"](env)),  # what skrl's row says of one environment
    "AsyncVectorEnv": steps_vector,
    "gymnasium.make_vec": steps_vector,
}
"""What a trainer does with what a call returns, by the function that is called."""


def names() -> dict[str, Any]:
    """Return what the reader has imported."""
    from ray.tune.registry import register_env
    from skrl.envs.wrappers.torch import wrap_env
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecMonitor
    from torchrl.envs import GymEnv, GymWrapper

    found = {name: getattr(bridge, name) for name in ("make_remote", "make_vec_remote")}
    found |= {name: getattr(bridge.wrappers, name) for name in ("BlockingReset", "SB3VecEnv")}
    found |= {"PPO": PPO, "VecMonitor": VecMonitor, "SubprocVecEnv": SubprocVecEnv, "GymWrapper": GymWrapper}
    found |= {"GymEnv": GymEnv, "wrap_env": wrap_env, "register_env": register_env, "gymnasium": gymnasium}
    return {**found, "AsyncVectorEnv": gymnasium.vector.AsyncVectorEnv}


def test_the_table_has_a_call_for_each_trainer() -> None:
    called = [code.partition("(")[0] for code in printed()]
    assert len(called) >= 10
    assert set(called) == set(USES)


@pytest.mark.parametrize("code", printed())
def test_a_call_of_the_table_is_used_as_it_is_printed(code: str) -> None:
    with serve_gym("CartPole-v1") as server:
        given = {**names(), "url": server.url, "urls": [server.url] * 2, "n": 2}
        USES[code.partition("(")[0]](eval(code, given))
