"""`bridge.core.worlds.group`: what is done where nobody acts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from bridge.core.worlds.group import default_action, neutral_action


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Discrete(3, start=-1), -1),
        (spaces.Box(1.0, 2.0, (2,)), [1.0, 1.0]),
        (spaces.Box(-1.0, 1.0, (2,)), [0.0, 0.0]),
        (spaces.Box(2**53 + 1, 2**53 + 5, (1,), np.int64), [2**53 + 1]),
        (spaces.MultiBinary(2), [0, 0]),
        (spaces.MultiDiscrete([2, 3]), [0, 0]),
        (spaces.Text(3, min_length=2, charset="ab"), "aa"),
        (spaces.Tuple((spaces.Discrete(2),)), (0,)),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"a": 0}),
    ],
)
def test_the_neutral_action_is_in_its_space(space: spaces.Space[Any], expected: Any) -> None:
    action = neutral_action(space)
    assert space.contains(action)
    assert (action.tolist() if isinstance(action, np.ndarray) else action) == expected


def test_the_default_action_is_in_every_space_and_obeys_masks() -> None:
    """D-22: what stands in for a missing agent is an element of its space."""
    for space in (
        spaces.Discrete(4, start=2),
        spaces.Box(np.array([1.0, -2.0]), np.array([3.0, -1.0]), dtype=np.float64),
        spaces.MultiDiscrete([2, 3], start=[4, 5]),
        spaces.MultiBinary(3),
        spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(1, 2)}),
        spaces.Tuple((spaces.Discrete(2), spaces.Text(3))),
    ):
        assert space.contains(default_action("a", None, space)), space
    mask = {"action_mask": np.array([0, 0, 1, 1])}
    assert default_action("a", mask, spaces.Discrete(4)) == 2
