"""The infos of lanes, joined as Gymnasium joins them."""

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from bridge.core.worlds.environment import EnvFacts
from bridge.core.worlds.lane_hosts import FinalInfos, join_infos


def test_no_infos_are_an_empty_dict_and_lanes_without_one_are_masked():
    assert join_infos({}, 3) == {}
    joined = join_infos({1: {"a": 5}}, 3)
    assert joined["a"].tolist() == [0, 5, 0]
    assert joined["_a"].tolist() == [False, True, False]
    assert join_infos({0: {"a": 1}, 2: {"a": "x"}}, 3) == [{"a": 1}, {}, {"a": "x"}]


def test_a_key_of_an_info_at_an_end_need_not_be_a_text():
    pair = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    finals = FinalInfos(EnvFacts("Simulator", pair, num_envs=2, autoreset=AutoresetMode.SAME_STEP))
    info = {3: "lives", "final_obs": np.ones((2, 2), np.float32)}
    read = finals.read(info, [True, False], [False, False], [])
    assert read[3] == "lives"
    assert read["final_obs"][0].tolist() == [1, 1]
    assert read["final_obs"][1] is None
