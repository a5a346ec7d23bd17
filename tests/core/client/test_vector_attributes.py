"""Attributes, methods and wrappers of some slots of a vector alone, as trainers ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import gymnasium
import pytest

from bridge import make_vec_remote, serve_gym
from bridge.testing import CountingEnv
from tests.public_server import PublicServer
from tests.support import everywhere


@pytest.fixture
def envs(isolation: Any) -> Iterator[Any]:
    """Four slots: a world of two lanes between two of one."""
    with (
        serve_gym("CartPole-v1", num_envs=2, isolation=isolation) as lanes,
        serve_gym("CartPole-v1", isolation=isolation) as one,
        closing(make_vec_remote([one.url, lanes.url, one.url])) as made,
    ):
        made.reset(seed=1)
        yield made


@pytest.fixture
def in_processes() -> Iterator[Any]:
    """Two lanes in processes of their own, which are called all together."""
    with (
        serve_gym("CartPole-v1", num_envs=2, vectorization_mode="async") as server,
        closing(make_vec_remote(server.url, blocking=True)) as made,
    ):
        made.reset(seed=1)
        yield made


@everywhere
def test_an_attribute_of_some_slots_is_read_in_their_order(envs: Any) -> None:
    envs.set_attr("length", [0.5, 0.6, 0.7, 0.8])
    assert envs.get_attr_at([3, 1], "length") == (0.8, 0.6)
    space, other = envs.get_attr_at([2, 0], "action_space")
    assert space == other == gymnasium.spaces.Discrete(2)
    assert space is not other


@everywhere
def test_a_method_of_some_slots_is_called_in_its_own_one(envs: Any) -> None:
    third, first = envs.get_attr_at([2, 0], "set_wrapper_attr")
    assert envs.get_attr("length") == (0.5,) * 4, "nothing is called before"
    third("length", 2.0)
    first("length", 3.0)
    assert envs.get_attr("length") == (3.0, 0.5, 2.0, 0.5)


@everywhere
def test_an_attribute_that_no_slot_has_is_an_attribute_error(envs: Any) -> None:
    for name in ("nothing", "_private"):
        with pytest.raises(AttributeError, match=name):
            envs.get_attr_at([0, 2], name)
    with pytest.raises(ValueError, match="slots from 0 to 3"):
        envs.get_attr_at([4], "length")


def test_lanes_that_are_called_all_together_give_and_take_what_is_of_some(in_processes: Any) -> None:
    envs = in_processes.unwrapped
    assert envs.get_attr_at([1], "length") == (0.5,)
    envs.set_attr_at([1], "length", 2.0)
    assert envs.get_attr("length") == (0.5, 2.0), "the other lane keeps its own"
    assert envs.get_attr_at([1, 0], "length") == (2.0, 0.5)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_the_classes_of_the_wrappers_are_told_for_each_slot(num_envs: int) -> None:
    def make() -> Any:
        return gymnasium.wrappers.TimeLimit(gymnasium.wrappers.ClipReward(CountingEnv(), 0.0, 1.0), 5)

    with serve_gym(make, num_envs=num_envs) as server, closing(make_vec_remote(server.url, num_envs=2)) as envs:
        for names in envs.wrapper_classes():
            assert "gymnasium.wrappers.common:TimeLimit" in names
            assert any(name.endswith(":ClipReward") for name in names)
        assert len(envs.wrapper_classes()) == 2


def test_of_another_server_no_wrappers_are_known() -> None:
    with PublicServer() as server, closing(make_vec_remote(server.url, num_envs=2)) as envs:
        assert envs.wrapper_classes() == ([], [])
