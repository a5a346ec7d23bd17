"""Gymnasium's vector wrappers around remote slots and lanes give what they give around SyncVectorEnv."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import vector as wrappers

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.wrappers import BlockingReset
from tests.support import NO_BOX2D, assert_identical, import_box2d, sampled

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's remarks about its own environments
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Vector = VectorEnv[Any, Any, Any]
NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


class KeepsOptions(VectorWrapper):
    """Keeps the caller's options, of which SyncVectorEnv takes the mask before outer wrappers see it."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.env.reset(seed=seed, options=None if options is None else dict(options))


@contextmanager
def pair(env_id: str, mode: AutoresetMode = NEXT, **kwargs: Any) -> Iterator[tuple[Vector, Vector]]:
    """Three environments of Gymnasium's, and three remote ones: a world of two lanes and one of one."""

    def make(**more: Any) -> Any:
        return gymnasium.make(env_id, **{**kwargs, **more})

    # One server, as drawn environments need one lock around them all.
    with serve_gym(make, num_envs=2) as server:
        remote = BlockingReset(make_vec_remote([server.url, f"{server.url}?num_envs=1"]), autoreset_mode=mode)
        local = KeepsOptions(SyncVectorEnv([make] * 3, autoreset_mode=mode))
        yield remote, local
        remote.close()
        local.close()


def without_times(value: Any) -> Any:
    """Leave out how long an episode took."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key != "t"}
    if isinstance(value, (list, tuple)):
        return type(value)(without_times(item) for item in value)
    return value


def compare(remote: Any, local: Any, steps: int = 90) -> None:
    """Step both side by side."""
    space = local.action_space
    space.seed(5)
    assert_identical(without_times(remote.reset(seed=2)), without_times(local.reset(seed=2)), "reset")
    for step in range(steps):
        actions = space.sample()
        mine, theirs = remote.step(actions), local.step(actions)
        assert_identical(without_times(mine), without_times(theirs), f"step {step}")
        over = np.asarray(theirs[2]) | np.asarray(theirs[3])
        if local.metadata["autoreset_mode"] is DISABLED and over.any():
            masks = [{"reset_mask": over.copy()} for _ in range(2)]
            mine, theirs = remote.reset(options=masks[0]), local.reset(options=masks[1])
            assert_identical(without_times(mine), without_times(theirs), "a masked reset")


TAXI = "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"  # of Gymnasium before 1.3
VECTOR: dict[str, tuple[str, Callable[[Vector], Any]]] = {
    "RecordEpisodeStatistics": ("CartPole-v1", wrappers.RecordEpisodeStatistics),
    "DictInfoToList": (TAXI, wrappers.DictInfoToList),
    "NormalizeObservation": ("CartPole-v1", wrappers.NormalizeObservation),
    "NormalizeReward": ("Pendulum-v1", wrappers.NormalizeReward),
    "ClipReward": ("Pendulum-v1", lambda envs: wrappers.ClipReward(envs, -1, 0)),
    "TransformReward": ("Pendulum-v1", lambda envs: wrappers.TransformReward(envs, lambda reward: 2 * reward)),
    "ClipAction": ("Pendulum-v1", wrappers.ClipAction),
    "RescaleAction": ("Pendulum-v1", lambda envs: wrappers.RescaleAction(envs, -1.0, 1.0)),
    "TransformAction": (
        "Pendulum-v1",
        lambda envs: wrappers.TransformAction(envs, lambda actions: actions / 2, envs.action_space),
    ),
    "FlattenObservation": ("FrozenLake-v1", wrappers.FlattenObservation),
    "FilterObservation": ("Blackjack-v1", lambda envs: wrappers.FilterObservation(envs, [0, 2])),
    "RescaleObservation": ("MountainCar-v0", lambda envs: wrappers.RescaleObservation(envs, 0.0, 1.0)),
    "ReshapeObservation": ("CartPole-v1", lambda envs: wrappers.ReshapeObservation(envs, (2, 2))),
    "DtypeObservation": ("CartPole-v1", lambda envs: wrappers.DtypeObservation(envs, np.float64)),
    "TransformObservation": (
        "CartPole-v1",
        lambda envs: wrappers.TransformObservation(envs, lambda row: row * 2, envs.single_observation_space),
    ),
    "GrayscaleObservation": ("CarRacing-v3", wrappers.GrayscaleObservation),
}


@pytest.mark.parametrize("mode", [NEXT, DISABLED, SAME], ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", sampled(VECTOR, 4))
def test_a_vector_wrapper_cannot_tell_remote_slots_from_local_ones(name: str, mode: AutoresetMode) -> None:
    env_id, wrap = VECTOR[name]
    if env_id == "CarRacing-v3" and not import_box2d():
        pytest.skip(NO_BOX2D)
    with pair(env_id, mode) as (remote, local):
        try:
            wrapped = wrap(local)
        except (ValueError, AssertionError) as refusal:  # wrappers that do not take this mode refuse ours too
            assert mode is not NEXT
            with pytest.raises(type(refusal), match="autoreset_mode" if refusal.args else ""):
                wrap(remote)
        else:
            compare(wrap(remote), wrapped, 25 if env_id == "CarRacing-v3" else 90)


def test_wrappers_stack() -> None:
    def stack(envs: Any) -> Any:
        envs = wrappers.RecordEpisodeStatistics(envs)
        envs = wrappers.NormalizeObservation(envs)
        return wrappers.NormalizeReward(envs)

    with pair("CartPole-v1") as (remote, local):
        compare(stack(remote), stack(local), 200)


SINGLE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "TimeLimit": ("Pendulum-v1", lambda env: gymnasium.wrappers.TimeLimit(env, 20)),
    "RecordEpisodeStatistics": ("CartPole-v1", gymnasium.wrappers.RecordEpisodeStatistics),
    "FrameStackObservation": ("CartPole-v1", lambda env: gymnasium.wrappers.FrameStackObservation(env, 3)),
    "NormalizeObservation": ("CartPole-v1", gymnasium.wrappers.NormalizeObservation),
    "NormalizeReward": ("Pendulum-v1", gymnasium.wrappers.NormalizeReward),
    "TimeAwareObservation": ("CartPole-v1", gymnasium.wrappers.TimeAwareObservation),
    "RescaleAction": ("Pendulum-v1", lambda env: gymnasium.wrappers.RescaleAction(env, -1.0, 1.0)),
    "FlattenObservation": ("Blackjack-v1", gymnasium.wrappers.FlattenObservation),
    "Autoreset": ("CartPole-v1", gymnasium.wrappers.Autoreset),
    "AddRenderObservation": ("CartPole-v1", gymnasium.wrappers.AddRenderObservation),
    "RenderCollection": ("CartPole-v1", gymnasium.wrappers.RenderCollection),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_wrapper_of_one_environment_cannot_tell_a_remote_one_from_a_local_one(name: str) -> None:
    env_id, wrap = SINGLE[name]
    local = gymnasium.make(env_id, render_mode="rgb_array")
    with serve_gym(env_id) as server:
        remote = make_remote(server.url, render_mode="rgb_array")
        mine, theirs = wrap(remote), wrap(local)
        space = theirs.action_space
        space.seed(1)
        assert_identical(without_times(mine.reset(seed=4)), without_times(theirs.reset(seed=4)), "reset")
        for step in range(40):
            action = space.sample()
            results = without_times(mine.step(action)), without_times(theirs.step(action))
            assert_identical(*results, f"step {step}")
            if name != "Autoreset" and (results[1][2] or results[1][3]):
                assert_identical(without_times(mine.reset()), without_times(theirs.reset()), "reset")
        if name == "RenderCollection":
            assert_identical(mine.render(), theirs.render(), "frames")
        remote.close()
    local.close()
