"""A user of this package sees no difference between the versions of Gymnasium."""

from __future__ import annotations

import gc

from bridge import make_vec_remote, serve_gym
from bridge.wrappers import BlockingReset


def test_a_wrapper_that_nobody_refers_to_leaves_its_environments_open() -> None:
    """Gymnasium 1.1 and 1.2 close them."""
    with serve_gym("CartPole-v1", num_envs=2) as server:
        envs = make_vec_remote(server.url)
        BlockingReset(envs).reset(seed=1)
        gc.collect()
        assert not envs.closed
        assert BlockingReset(envs).reset(seed=1)[0].shape == (2, 4)
        envs.close()
