"""The infos of lanes, joined as Gymnasium joins them."""

from bridge.worlds.lane_infos import join_infos


def test_no_infos_are_an_empty_dict_and_lanes_without_one_are_masked():
    assert join_infos({}, 3) == {}
    joined = join_infos({1: {"a": 5}}, 3)
    assert joined["a"].tolist() == [0, 5, 0]
    assert joined["_a"].tolist() == [False, True, False]
    assert join_infos({0: {"a": 1}, 2: {"a": "x"}}, 3) == [{"a": 1}, {}, {"a": "x"}]
