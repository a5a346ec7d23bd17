"""A remote environment beside the local one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector import SyncVectorEnv

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.testing import EVERY_SPACE, SpaceEnv
from bridge.wrappers import BlockingReset
from tests.support import (
    TAXI,
    SmallNumbers,
    assert_identical,
    assert_same_space,
    minigrid,
    pong,
)

EnvFn = Callable[..., Any]


def made(env_id: str) -> EnvFn:
    return lambda **kwargs: gymnasium.make(env_id, **kwargs)


# name: (environment, steps of one environment, steps of vectors)
ZOO: dict[str, tuple[EnvFn, int, int]] = {
    "CartPole": (made("CartPole-v1"), 3000, 600),
    "Acrobot": (made("Acrobot-v1"), 1500, 300),
    "Pendulum": (made("Pendulum-v1"), 3000, 500),
    "MountainCarContinuous": (made("MountainCarContinuous-v0"), 3000, 500),
    "Blackjack": (made("Blackjack-v1"), 3000, 600),
    "Taxi": (made(TAXI), 3000, 500),
    "FrozenLake": (made("FrozenLake-v1"), 3000, 600),
    "Hopper": (made("Hopper-v5"), 1500, 300),
    "Pong": (pong, 600, 40),
    "MiniGrid": (minigrid, 1500, 300),
}


def compare_one(function: EnvFn, steps: int, seed: int = 11) -> None:
    """Step a remote environment and a local one side by side."""
    local = function()
    try:
        with serve_gym(function) as server:
            remote = make_remote(server.url)
            assert_same_space(remote.observation_space, local.observation_space)
            assert_same_space(remote.action_space, local.action_space)
            local.action_space.seed(seed)
            assert_identical(remote.reset(seed=seed), local.reset(seed=seed), "reset")
            for step in range(steps):
                action = local.action_space.sample()
                mine, theirs = remote.step(action), local.step(action)
                assert_identical(mine, theirs, f"step {step}")
                assert type(mine[1]) is type(theirs[1]), f"the reward of step {step}"
                if theirs[2] or theirs[3]:
                    # The next episode goes on from the environment's own generator.
                    assert_identical(remote.reset(), local.reset(), f"reset after step {step}")
            remote.close()
    finally:
        local.close()


def compare_many(function: EnvFn, slots: int, lanes: int, steps: int, seed: int = 5) -> None:
    """Step remote slots beside Gymnasium's SyncVectorEnv of as many environments."""
    local = SyncVectorEnv([function] * slots)
    try:
        with serve_gym(function, num_envs=lanes) as server:
            remote = BlockingReset(make_vec_remote(server.url, num_envs=slots))
            assert remote.num_envs == slots
            assert_same_space(remote.observation_space, local.observation_space)
            assert_same_space(remote.action_space, local.action_space)
            assert_same_space(remote.single_observation_space, local.single_observation_space)
            step_together(remote, local, steps, seed)
            assert_identical(remote.reset(), local.reset(), "the second reset")
            remote.close()
    finally:
        local.close()


def step_together(remote: Any, local: Any, steps: int, seed: int) -> None:
    """Reset and step two vector environments with the same actions, and compare what they give."""
    local.action_space.seed(seed)
    assert_identical(remote.reset(seed=seed), local.reset(seed=seed), "reset")
    for step in range(steps):
        actions = local.action_space.sample()
        assert_identical(remote.step(actions), local.step(actions), f"step {step}")


def compare_briefly(name: str) -> None:
    """Compare an environment of `ZOO`, alone, in slots and in lanes, in fewer steps: for the other transports."""
    function, steps, vector_steps = ZOO[name]
    slow = name == "Pong"
    compare_one(function, min(steps, 40 if slow else 150))
    compare_many(function, 3, 1, min(vector_steps, 8 if slow else 25))
    compare_many(function, 4, 2, min(vector_steps, 8 if slow else 25))


def compare_space(name: str) -> None:
    """Compare an environment with a space of `EVERY_SPACE` for observations and actions, in few steps."""
    actions = None if name == "dict_empty" else EVERY_SPACE[name]()
    compare_one(lambda: SpaceEnv(EVERY_SPACE[name](), actions), 12)
    compare_many(lambda: SmallNumbers(SpaceEnv(EVERY_SPACE[name](), actions)), 2, 2, 8)
