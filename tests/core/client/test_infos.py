"""`bridge.core.encoding.infos`: the infos of several answers, put together by lane."""

import numpy as np

from bridge.core.encoding.infos import pick_lanes


def test_infos_that_do_not_fit_together_become_a_list() -> None:
    here = np.array([True, True])
    one, other = ({"a": np.array([1, 2]), "_a": here}, {"a": np.array([1.5, 2.5]), "_a": here})
    assert pick_lanes([one, other]) == [{"a": 1}, {"a": 2.5}]
    assert pick_lanes([one, [{"b": 1}, {"b": "text"}]]) == [{"a": 1}, {"b": "text"}]
    joined = pick_lanes([one, {"a": np.array([3, 4]), "_a": ~here}])
    assert isinstance(joined, dict)
    assert (joined["a"].tolist(), joined["_a"].tolist()) == ([1, 0], [True, False])
    nested = {"n": {"a": np.array([1, 2]), "_a": here}, "_n": here}
    mixed = pick_lanes([nested, {"n": {"a": np.array([5, 6]), "_a": here}, "_n": here}])
    assert isinstance(mixed, dict)
    assert mixed["n"]["a"].tolist() == [1, 6]
    assert pick_lanes([nested, {"n": np.array([1, 2]), "_n": here}])[1] == {"n": 2}  # type: ignore[index]
