"""The attributes and methods of a remote environment, as Gymnasium's wrappers and vector environments ask for them."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.errors import RefusedError
from bridge.testing import CountingEnv
from tests.public_server import PublicServer
from tests.support import assert_identical

ISOLATION = pytest.mark.parametrize("isolation", [None, "process"])


class Masked(CountingEnv):
    """Has methods and attributes of its own."""

    action_space = spaces.Discrete(4)

    def __init__(self, render_mode=None):
        super().__init__(8)
        self.gravity = 9.8
        self.engine = object()
        self.calls = 0
        self.render_mode = render_mode

    def action_masks(self):
        self.calls += 1
        return np.array([True, False, True, self.gravity > 5])

    def compute_reward(self, achieved, desired, info):
        return -np.abs(np.asarray(achieved) - np.asarray(desired)).sum(-1)

    def set_task(self, *, name):
        return f"the task is {name}"


class Named(gymnasium.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        self.title = "robot"


def masked(render_mode=None):
    return Named(Masked(render_mode))


@ISOLATION
def test_attributes_and_methods_of_the_remote_are_found_through_its_wrappers(isolation):
    with serve_gym(masked, isolation=isolation) as server, make_remote(server.url) as env:
        outer = gymnasium.wrappers.TimeLimit(env, 100)
        assert outer.get_wrapper_attr("gravity") == 9.8
        assert outer.get_wrapper_attr("title") == "robot"
        assert env.get_wrapper_attr("calls") == 0
        masks = outer.get_wrapper_attr("action_masks")
        assert env.get_wrapper_attr("calls") == 0  # a look calls nothing
        assert_identical(masks(), np.array([True, False, True, True]))
        reward = env.get_wrapper_attr("compute_reward")
        assert reward(np.zeros((2, 3)), np.ones((2, 3)), info={}).tolist() == [-3.0, -3.0]
        assert env.get_wrapper_attr("set_task")(name="reach") == "the task is reach"
        assert env.get_wrapper_attr("url") == server.url  # one's own come first


@ISOLATION
def test_attributes_that_are_not_there_are_attribute_errors(isolation):
    with serve_gym(masked, isolation=isolation) as server, make_remote(server.url) as env:
        outer = gymnasium.wrappers.TimeLimit(env, 100)
        for name in ("nothing", "_private"):
            assert not outer.has_wrapper_attr(name)
            with pytest.raises(AttributeError, match=name):
                outer.get_wrapper_attr(name)
        for name in ("gravity", "title", "action_masks", "engine", "step"):
            assert outer.has_wrapper_attr(name)
        with pytest.raises(RefusedError, match="engine cannot be sent"):
            env.get_wrapper_attr("engine")


@ISOLATION
def test_attributes_are_set_on_the_remote(isolation):
    with serve_gym(masked, isolation=isolation) as server, make_remote(server.url) as env:
        outer = gymnasium.wrappers.TimeLimit(env, 100)
        assert outer.set_wrapper_attr("gravity", 1.5)
        assert env.call("action_masks").tolist() == [True, False, True, False]
        assert "gravity" not in vars(env)
        assert not env.set_wrapper_attr("brand_new", 1, force=False)
        assert not env.has_wrapper_attr("brand_new")
        assert env.set_wrapper_attr("brand_new", [1, 2])
        assert env.get_wrapper_attr("brand_new") == [1, 2]
        assert env.set_wrapper_attr("render_mode", "ansi")
        assert env.render_mode == "ansi"


def test_a_server_without_methods_has_no_attributes():
    with PublicServer() as server, make_remote(server.url) as env:
        assert not env.has_wrapper_attr("gravity")


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_gymnasiums_vector_environments_of_remotes_call_and_set(kind):
    with serve_gym(masked) as server:
        url = server.url
        envs = kind([lambda: make_remote(url)] * 2)
        assert [mask.tolist() for mask in envs.call("action_masks")] == [[True, False, True, True]] * 2
        assert envs.get_attr("gravity") == (9.8, 9.8)
        envs.set_attr("gravity", [1.0, 9.0])
        assert [mask.tolist()[3] for mask in envs.call("action_masks")] == [False, True]
        envs.close()


@pytest.mark.parametrize(
    ("mode", "text"),
    [("human", "opens a window where the environment runs"), ("bogus", "render_mode='bogus', which it does not name")],
)
@pytest.mark.parametrize("make", [make_remote, make_vec_remote])
def test_a_render_mode_that_gives_no_frames_is_warned_of(mode, text, make):
    with serve_gym(masked) as server:
        with pytest.warns(UserWarning, match=text) as said:
            env = make(server.url, render_mode=mode)
        env.close()
    assert said[0].filename == __file__, "the place of a warning is the user's line"
