"""Policies that a server is given for agents that no client plays, from Python and from the command line."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from gymnasium import spaces

from bridge.errors import SettingError
from bridge.facade.policies import GivenPolicies, as_policy, policy_name
from tests.parallel_envs import Relay
from tests.policies.plain import still


def test_a_random_policy_takes_any_action_that_the_mask_allows():
    space = spaces.Discrete(4, start=-1)
    space.seed(0)
    act = as_policy("agents", "random", space)
    assert {int(act(np.zeros(3))) for _ in range(100)} == {-1, 0, 1, 2}
    masked = {"observation": np.zeros(3), "action_mask": np.array([False, True, False, True])}
    assert {int(act(masked)) for _ in range(100)} == {0, 2}
    assert {int(act({"action_mask": np.zeros(4, np.int8)})) for _ in range(100)} == {-1, 0, 1, 2}
    box = spaces.Box(-1, 1, (2,), np.float32)
    assert box.contains(as_policy("agents", "random", box)(masked))


@pytest.mark.parametrize("given", [3, "clever", {"a": None}, {"a": still, "b": 1.0}])
def test_what_is_no_policy_is_refused(given):
    with pytest.raises(
        SettingError, match='expected agents as policies \\(observation to action\\), their ws:// URLs or "random", got'
    ):
        GivenPolicies("agents", given)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("random", "random"),
        ("ws://gpu:8000", "policy"),
        (still, "still"),
        (partial(still, 0), "still"),
        (lambda seen: 0, "policy"),
        (Relay, "Relay"),
        (Relay(), "Relay"),
        (Relay().reset, "reset"),
    ],
)
def test_a_policy_has_a_name_for_people(given, name):
    assert policy_name(given) == name
