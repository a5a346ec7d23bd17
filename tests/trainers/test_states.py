"""States of environments that Stable-Baselines3 trains in, by its own `env_method`."""

from __future__ import annotations

import numpy as np
import pytest

import bridge.states
from bridge import make_vec_remote, serve_gym
from bridge.errors import SettingError
from tests.support import assert_identical

pytest.importorskip("stable_baselines3")

from stable_baselines3.common.vec_env import VecMonitor

from bridge.wrappers import SB3VecEnv


@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "worlds"])
def test_env_method_saves_and_restores_slots(lanes: bool) -> None:
    assert bridge.states.__doc__, "without the folder, this file goes too"
    with serve_gym("FrozenLake-v1") as server:
        envs = VecMonitor(SB3VecEnv(make_vec_remote(server.url, num_envs=3, lanes=lanes, blocking=True)))
        envs.seed(3)
        first = envs.reset()
        envs.step(np.zeros(3, np.int64))
        states = envs.env_method("save_state", indices=[2, 0])
        assert [state.how for state in states] == ["copy", "copy"]
        wanted = [envs.step(np.full(3, step % 3))[0] for step in range(30)]
        results = envs.env_method("restore_state", states, indices=[2, 0])
        assert [type(info) for _, info in results] == [dict, dict]
        again = [envs.step(np.full(3, step % 3))[0] for step in range(30)]
        for mine, theirs in zip(again, wanted, strict=True):
            assert_identical(mine[[0, 2]], theirs[[0, 2]])
        # One state in all slots, each with its own seed; and in one slot, by its number from the end.
        forks = envs.env_method("restore_state", states[0], seed=3)
        assert len({int(observation) for observation, _ in forks}) == 1
        assert len(forks) == len(first)
        assert len(envs.env_method("restore_state", states[1], indices=-1)) == 1
        with pytest.raises(SettingError, match="different slots"):
            envs.env_method("restore_state", states[0], indices=[1, 1])
        assert envs.env_method("release_states", states, indices=0) == [None]
        envs.step(np.zeros(3, np.int64))
        envs.close()
