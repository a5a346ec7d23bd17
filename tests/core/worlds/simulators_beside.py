"""Simulators of a server beside local ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from bridge import make_vec_remote
from bridge.wrappers import BlockingReset
from tests.support import assert_identical


def play_beside(served: Any, local: Any, to_local: Any = lambda actions: actions, steps: int = 200) -> int:
    """Step a server's lanes beside a simulator in the mode SAME_STEP; return how many episodes ended.

    Args:
        served: What `serve_gym` returned.
        local: The same simulator.
        to_local: Makes of NumPy's actions what the local one takes.
        steps: How many.
    """
    ends = 0
    envs = BlockingReset(make_vec_remote(served.url), autoreset_mode=AutoresetMode.SAME_STEP)
    try:
        assert envs.num_envs == local.num_envs
        assert envs.single_action_space == local.single_action_space
        envs.action_space.seed(3)
        observation, infos = envs.reset(seed=5)
        expected, expected_infos = local.reset(seed=5)
        assert_identical(observation, plain(expected))
        assert_identical(infos, plain(expected_infos))
        for _ in range(steps):
            actions = envs.action_space.sample()
            observation, reward, terminated, truncated, infos = envs.step(actions)
            expected = local.step(to_local(actions))
            assert_identical(observation, plain(expected[0]))
            assert_identical(reward, plain(expected[1]).astype(np.float64))
            assert_identical([terminated, truncated], [plain(expected[2]), plain(expected[3])])
            ends += int((terminated | truncated).sum())
            compare_infos(infos, plain(expected[4]), terminated | truncated)
    finally:
        envs.close()
    return ends


def compare_infos(infos: Any, expected: Any, ended: Any) -> None:
    """Hold infos against a simulator's, whose final observations are a batch under the name of older versions."""
    final = expected.pop("final_observation", None)
    for mask in ("_final_observation", "_final_info"):
        expected.pop(mask, None)
    if final is not None:
        rows = infos.pop("final_obs")
        assert_identical(infos.pop("_final_obs"), ended)
        assert_identical(infos.pop("_final_info"), ended)
        for lane in range(len(ended)):
            assert_identical(rows[lane], final[lane] if ended[lane] else None)
    assert_identical(infos, expected)


def plain(value: Any) -> Any:
    """Arrays of any library as NumPy's."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return np.asarray(value)
