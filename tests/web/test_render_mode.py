"""Environments are made to draw, where they can."""

import gymnasium

from bridge.testing import CountingEnv
from bridge.web.watching.render_mode import drawing_kwargs
from tests.web.viewers import Painted


def test_environments_are_made_to_draw_where_they_can():
    mode = {"render_mode": "rgb_array"}
    assert drawing_kwargs("CartPole-v1", None) == mode
    assert drawing_kwargs(gymnasium.spec("CartPole-v1"), {"sutton_barto_reward": True}) == {
        **mode,
        "sutton_barto_reward": True,
    }
    assert drawing_kwargs("CartPole-v1", {"render_mode": "human"}) == {"render_mode": "human"}
    assert drawing_kwargs(Painted, None) == mode
    for other in (lambda: None, ["CartPole-v1", "Taxi-v3"], "NoSuchEnv-v0", CountingEnv, object()):
        assert drawing_kwargs(other, {"a": 1}) == {"a": 1}


class Wrapped(gymnasium.Wrapper):
    """A class of wrappers, whose metadata only its objects know."""

    def __init__(self, render_mode=None):
        super().__init__(CountingEnv())


def test_a_class_of_wrappers_is_made_to_draw_too():
    assert drawing_kwargs(Wrapped, None) == {"render_mode": "rgb_array"}
