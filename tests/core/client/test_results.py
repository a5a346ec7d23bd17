"""`bridge.core.client.slots.results`: what the slots tell, put together."""

import gymnasium
import numpy as np
import pytest

from bridge import make_vec_remote, serve_gym
from bridge.core.client.slots.results import InfoJoiner


def test_infos_of_slots_whose_types_differ_become_objects() -> None:
    """One slot's seed is a number and another's None, where both begin an episode in one step."""
    joiner = InfoJoiner(3)
    joiner.add({"seed": 4, "kept": 1.5}, 0)
    joiner.add({"seed": None, "kept": 2.5}, 1)
    assert joiner.infos["seed"].tolist() == [4, None, None]
    assert joiner.infos["_seed"].tolist() == [True, True, False]
    assert joiner.infos["kept"].tolist() == [1.5, 2.5, 0.0]


class Says(gymnasium.Env):
    """Has an info of its own."""

    observation_space = gymnasium.spaces.Box(0, 1, ())
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, info):
        self.info = info

    def reset(self, *, seed=None, options=None):
        return np.zeros((), np.float32), self.info

    def step(self, action):
        return np.zeros((), np.float32), 0.0, False, False, self.info


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, {"b": 1}),
        ({"b": 1}, {"b": {"c": 1}}),
        (10**30, 1),
        (1.5, "text"),
        (np.zeros(3), np.zeros(2)),
        ({"b": np.zeros(3)}, {"b": [1, 2]}),
    ],
)
@pytest.mark.parametrize("lanes", [1, 2])
def test_an_info_of_one_server_never_costs_the_others_theirs(one, other, lanes):
    with (
        serve_gym(lambda: Says({"a": one, "mine": 1}), num_envs=lanes) as first,
        serve_gym(lambda: Says({"a": other}), num_envs=lanes) as second,
    ):
        envs = make_vec_remote([first.url, second.url], blocking=True)
        infos = envs.reset()[1]
        envs.close()
    assert infos["mine"].tolist() == [1] * lanes + [0] * lanes
    assert infos["_a"].all()
    if not isinstance(one, dict):
        assert np.array_equal(infos["a"][0], one)
        assert np.array_equal(infos["a"][-1], other)
