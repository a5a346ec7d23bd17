"""`bridge.core.client.slots.results`: what the slots tell, put together."""

import gymnasium
import numpy as np
import pytest

from bridge import SlotState, make_vec_remote, serve_gym
from bridge.core.client.slots.results import InfoJoiner
from bridge.testing import CountingEnv
from tests.support import until


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


class Echo(gymnasium.Env):
    """Observes the last action."""

    observation_space = gymnasium.spaces.Box(-5000, 5000, (1,), np.int64)

    def __init__(self, actions):
        self.action_space = actions

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.int64), {}

    def step(self, action):
        return np.array([action], np.int64), 0.0, False, False, {}


@pytest.mark.parametrize("actions", [gymnasium.spaces.Discrete(3000, start=-1500), gymnasium.spaces.Discrete(200)])
def test_each_slot_gets_its_own_action_however_often_it_was_sent_before(actions):
    with serve_gym(lambda: Echo(actions)) as server:
        envs = make_vec_remote(server.url, num_envs=8, blocking=True, lanes=False)
        envs.reset(seed=0)
        draws = np.random.default_rng(0)
        for high in (2, 2, 2, 200, 2, 200, 200, 3, 3):  # few that were sent before, many that were not, or both
            sent = actions.start + draws.integers(high, size=8) * (actions.n // high)
            assert envs.step(sent)[0][:, 0].tolist() == sent.tolist()
        envs.close()


def test_every_step_tells_where_the_slots_are_with_infos_or_without():
    class Speaks(CountingEnv):
        """Has an info in every other episode."""

        def step(self, action):
            observation, reward, terminated, truncated, _ = super().step(action)
            return observation, reward, terminated, truncated, {"loud": 1} if self.episode % 2 else {}

    with serve_gym(lambda: Speaks(2)) as server:
        envs = make_vec_remote(server.url, num_envs=3, lanes=False)
        envs.reset(seed=0)
        until(lambda: all(seen is not None for seen in envs.step(np.zeros(3, np.int64))[0]))
        told = []
        for _ in range(9):
            *_, infos = envs.step(np.zeros(3, np.int64))
            assert infos["slot_state"].tolist() == [SlotState.RUNNING] * 3
            assert infos["slot_state"].dtype == np.int64
            assert infos.keys() - {"loud", "_loud", "seed", "_seed"} == {"n", "slot_state"}
            told.append([info.get("loud") for info in infos["n"]])
        envs.close()
    assert [1] * 3 in told
    assert [None] * 3 in told
