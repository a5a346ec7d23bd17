"""Steps whose frames are large, in both ways."""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge import make_vec_remote
from bridge.wrappers import BlockingReset


def step_large_frames(url: str, **keywords: Any) -> None:
    envs = BlockingReset(make_vec_remote(url, num_envs=3, **keywords))
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 255, (3, 700, 1000), np.uint8)
    for _ in range(3):
        observations, rewards, *_ = envs.step(actions)
        assert np.array_equal(observations, actions + np.uint8(1))
        assert rewards.tolist() == actions.sum((1, 2), dtype=np.int64).tolist()
    envs.close()
