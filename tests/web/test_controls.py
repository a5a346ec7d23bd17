"""Which keys play an environment, and what its actions are called."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import TimeAction, Web, make_parallel_remote, make_remote, serve_gym, serve_parallel
from bridge.errors import BridgeError, SettingError
from bridge.web.controls import ACTION_NAMES, controls_of, controls_of_space, default_keys, known_names
from tests.peers import Stream
from tests.support import everywhere


def test_keys_are_the_environment_s_own_where_it_has_some():
    class Own(gymnasium.Env):
        action_space = spaces.Discrete(4)

        def get_keys_to_action(self):
            return {(): 0, (ord("a"),): 1, ("d",): 2, (1073741904, 32): 3}

        def get_action_meanings(self):
            return ["NOOP", "LEFT", "RIGHT", "JUMP"]

    found = json.loads(controls_of(gymnasium.Wrapper(Own())))
    assert found["keys"] == [
        {"keys": ["a"], "action": 1},
        {"keys": ["d"], "action": 2},
        {"keys": ["left", "space"], "action": 3},
    ]
    assert (found["kind"], found["neutral"], found["names"][3]) == ("discrete", 0, "JUMP")


class Keyed(gymnasium.Env):
    """Its keys and the names of its actions are given."""

    action_space = spaces.Discrete(3)

    def __init__(self, keys, names=None):
        self.keys, self.names = keys, names

    def get_keys_to_action(self):
        return self.keys

    def get_action_meanings(self):
        return self.names


def test_a_key_that_no_page_has_costs_no_other_one():
    shift, keypad = 1073742049, 1073741912
    found = json.loads(controls_of(Keyed({(shift,): 0, (keypad,): 1, ("w",): 2})))
    assert found["keys"][0] == {"keys": ["shift"], "action": 0}
    assert found["keys"][2] == {"keys": ["w"], "action": 2}


@pytest.mark.parametrize("action", [None, "jump", np.zeros(3)], ids=["none", "text", "array"])
def test_keys_of_what_is_no_action_are_those_of_the_space(action):
    found = json.loads(controls_of(Keyed({("a",): action})))
    assert [entry["keys"] for entry in found["keys"]] == [["left"], ["right"]]


def test_names_of_more_actions_than_there_are_give_no_keys():
    """A wrapper that leaves actions out hands on the names of all."""
    found = json.loads(controls_of(Keyed({}, ["NOOP", "LEFT", "RIGHT", "UP", "FIRE"])))
    assert (found["names"], {entry["action"] for entry in found["keys"]}) == (None, {0, 2})


def test_the_action_of_no_key_is_the_environment_s_own_and_idle_where_it_does_nothing():
    def controls(space, own=None, names=None):
        found = json.loads(controls_of_space(space, own, names))
        return found["neutral"], found["idle"]

    assert controls(spaces.Discrete(2)) == (0, False)
    assert controls(spaces.Discrete(6)) == (0, False)
    assert controls(spaces.Discrete(3, start=-1)) == (0, True), "between left and right"
    assert controls(spaces.Discrete(3), None, ["NOOP", "LEFT", "RIGHT"]) == (0, True)
    assert controls(spaces.Discrete(3), None, ["LEFT", "RIGHT", "JUMP"]) == (0, False)
    assert controls(spaces.Discrete(4), {frozenset(): 2, frozenset("a"): 0}) == (2, True)
    assert controls(spaces.Discrete(4), {frozenset("a"): 1}) == (0, False)


@pytest.mark.parametrize(
    ("space", "default", "neutral", "keys"),
    [
        (spaces.Discrete(3), 0, 0, {"0": 0, "left": 1, "right": 2}),
        (spaces.Discrete(3), 1, 1, {"left": 0, "right": 2}),
        (spaces.Discrete(3, start=5), 7, 7, {"left": 5, "right": 6, "2": 7}),
        (spaces.Discrete(6), 4, 4, {"0": 0, "1": 1, "2": 2, "3": 3, "4": 4, "5": 5}),
        (spaces.Discrete(3), "no action", 1, {"left": 0, "right": 2}),
    ],
)
def test_what_a_program_does_where_nobody_acts_is_what_no_key_does(space, default, neutral, keys):
    found = json.loads(controls_of_space(space, default=default))
    assert found["neutral"] == neutral
    assert {entry["keys"][0]: entry["action"] for entry in found["keys"]} == keys


def test_the_numbers_of_no_key_are_those_where_nobody_acts():
    box = spaces.Box(-1, 1, (2,))
    assert json.loads(controls_of_space(box, default=np.array([0.5, 0], np.float32)))["neutral"] == [0.5, 0.0]
    assert json.loads(controls_of_space(box))["neutral"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("env_id", "keys", "no_key"),
    [
        ("CartPole-v1", {"left": 0, "right": 1}, None),
        ("MountainCar-v0", {"left": 0, "right": 2}, 1),
        ("FrozenLake-v1", {"left": 0, "down": 1, "right": 2, "up": 3}, None),
        ("CliffWalking-v1", {"up": 0, "right": 1, "down": 2, "left": 3}, None),
        ("Taxi-v4", {"down": 0, "up": 1, "right": 2, "left": 3, "t": 4, "d": 5}, None),
    ],
)
def test_keys_of_gymnasium_s_own_environments_are_what_the_actions_do(env_id, keys, no_key):
    found = json.loads(controls_of(gymnasium.make(env_id)))
    assert {entry["keys"][0]: entry["action"] for entry in found["keys"]} == keys
    assert (found["neutral"] if found["idle"] else None) == no_key


def test_every_action_of_gymnasium_s_own_environments_is_named():
    for name, names in ACTION_NAMES.items():
        specs = [spec for spec in gymnasium.registry.values() if (spec.namespace, spec.name) == (None, name)]
        spec = max(specs, key=lambda spec: spec.version)
        if name in ("LunarLander", "CarRacing"):  # Box2D may be missing; their spaces are in their documentation
            assert known_names(spec, spaces.Discrete(len(names))) == list(names)
        else:
            assert known_names(spec, gymnasium.make(spec).action_space) == list(names)
    assert known_names(spec, spaces.Discrete(99)) is None


@pytest.mark.parametrize(
    ("space", "kind", "keys"),
    [
        (spaces.Discrete(2), "discrete", [["left"], ["right"]]),
        (spaces.Discrete(3), "discrete", [["left"], ["right"]]),
        (spaces.Discrete(3, start=-1), "discrete", [["left"], ["right"]]),
        (spaces.Discrete(6), "discrete", [["1"], ["2"], ["3"], ["4"], ["5"]]),
        (spaces.Discrete(18), "discrete", [["9"], ["b"], ["c"], ["e"], ["f"], ["g"], ["h"], ["i"], ["j"]]),
    ],
)
def test_keys_of_a_space(space, kind, keys):
    found = json.loads(controls_of_space(space))
    assert found["kind"] == kind
    assert [entry["keys"] for entry in found["keys"]][-len(keys) :] == keys


def test_keys_of_a_box_are_arrows_and_of_others_there_are_none():
    found = json.loads(controls_of_space(spaces.Box(np.array([-1, 0, 0], np.float32), 1)))
    assert (found["low"], found["high"]) == ([-1, 0, 0], [1, 1, 1])
    assert [(axis["less"], axis["more"]) for axis in found["axes"]] == [("left", "right"), ("down", "up"), ("a", "d")]
    assert json.loads(controls_of_space(spaces.Box(-np.inf, np.inf, (1,))))["high"] == [1e6]
    for space in (spaces.Text(3), spaces.Box(0, 9, (2,), np.int64), spaces.Box(0, 1, (99,))):
        assert "no keys" in json.loads(controls_of_space(space))["why"]


def test_keys_by_digits_arrows_and_meanings():
    assert default_keys(spaces.Discrete(2, start=5), None) == {
        frozenset({"0"}): 5,
        frozenset({"1"}): 6,
        frozenset({"left"}): 5,
        frozenset({"right"}): 6,
    }
    assert default_keys(spaces.Discrete(4), ["NOOP", "FIRE", "RIGHT", "RIGHTFIRE"]) == {
        **{frozenset({str(digit)}): digit for digit in range(4)},
        frozenset({"space"}): 1,
        frozenset({"right"}): 2,
        frozenset({"right", "space"}): 3,
    }


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        ("NOOP,LEFT,RIGHT,DASH LEFT,DASH RIGHT", {"left": 1, "right": 2, "h": 3, "r": 4}),
        ("DASH RIGHT,DASH LEFT,RIGHT,LEFT", {"left": 3, "right": 2}),
        ("NOOP,LEFT,RIGHT,JUMP,JUMP LEFT,JUMP RIGHT", {"left": 1, "right": 2, "j": 3, "j left": 4, "j right": 5}),
        ("KICK UP,UP,KICK", {"up": 1, "k": 2, "k up": 0}),
        ("LEFT ENGINE,RIGHT ENGINE", {"left": 0, "right": 1}),
    ],
)
def test_of_names_with_the_same_arrow_the_plainest_has_it_and_others_are_combined_or_have_a_letter(names, keys):
    found = default_keys(spaces.Discrete(len(names.split(","))), names.split(","))
    by_name = {" ".join(sorted(held)): action for held, action in found.items()}
    assert {name: by_name.get(name) for name in keys} == keys


def test_actions_of_minigrid_are_named_by_its_enum():
    pytest.importorskip("minigrid", reason="minigrid is not installed: pip install minigrid")
    found = json.loads(controls_of(gymnasium.make("MiniGrid-Empty-5x5-v0")))
    keys = {found["names"][entry["action"]]: entry["keys"] for entry in found["keys"]}
    assert keys == {
        "left": ["left"],
        "right": ["right"],
        "forward": ["up"],
        "pickup": ["p"],  # no direction, though "up" is in it
        "drop": ["d"],
        "toggle": ["t"],
        "done": ["o"],
    }
    assert found["fps"] == 10


@pytest.mark.parametrize(("env_id", "arguments"), [("CarRacing-v3", {}), ("LunarLander-v3", {"continuous": True})])
def test_each_number_of_a_known_action_has_its_name_and_keys(env_id, arguments):
    pytest.importorskip("Box2D", reason="Box2D is not installed: pip install 'gymnasium[box2d]'")
    env = gymnasium.make(env_id, **arguments)
    found = json.loads(controls_of(env))
    assert len(found["axes"]) == env.action_space.shape[0]
    keys = [(axis["name"], axis["less"], axis["more"]) for axis in found["axes"]]
    if env_id == "CarRacing-v3":
        assert keys == [("steer", "left", "right"), ("gas", "", "up"), ("brake", "", "down")]
    else:
        assert keys == [("main engine", "", "up"), ("side engine", "left", "right")]
    assert found["fps"] == env.metadata["render_fps"]
    env.close()


def test_names_of_axes_of_another_length_are_not_used():
    assert json.loads(controls_of_space(spaces.Box(-1, 1, (2,)), axes=[("push", "left", "right")]))["axes"][1] == {
        "index": 1,
        "name": "1",
        "less": "down",
        "more": "up",
    }


@everywhere
@pytest.mark.parametrize("fps", [None, 30.0], ids=["lock-step", "real time"])
def test_the_seats_of_an_mpe_world_have_named_actions_with_arrows(isolation, fps):
    simple_tag_v3 = pytest.importorskip("mpe2.simple_tag_v3", reason="mpe2 is not installed: pip install mpe2")
    with serve_parallel(simple_tag_v3.parallel_env, fps=fps, isolation=isolation) as server:
        env = (
            make_remote(f"{server.url}?world=", agent="agent_0")
            if fps
            else make_parallel_remote(f"{server.url}?world=")
        )
        env.reset()
        seat = {"agent": "adversary_0"} if fps else {"agent": "adversary_0", "role": "takeover"}
        person = Stream(server, own_connection=True).join(**seat)
        found = json.loads(person.read_property("world.controls"))
        person.close()
        env.close()
    keys = {found["names"][entry["action"]]: entry["keys"] for entry in found["keys"]}
    assert keys == {name: [name.lower()] for name in ("LEFT", "RIGHT", "DOWN", "UP")}
    assert (found["neutral"], found["idle"]) == (0, True)


@everywhere
@pytest.mark.parametrize("names", ["PUSH, RIGHT", ["PUSH", "RIGHT"]], ids=["a string", "a list"])
def test_whoever_serves_an_environment_names_its_actions(names, isolation):
    with serve_gym("CartPole-v1", web=Web(action_names=names), isolation=isolation) as server:
        stream = Stream(server).join()
        found = json.loads(stream.read_property("world.controls"))
        stream.close()
    assert found["names"] == ["PUSH", "RIGHT"]
    assert [(entry["action"], entry["keys"]) for entry in found["keys"]] == [(0, ["p"]), (1, ["right"])]


def test_named_actions_may_have_a_time_too():
    with serve_gym("CartPole-v1", web=Web(action_names="LEFT,RIGHT"), time_action=TimeAction(most=5)) as server:
        env = make_remote(server.url)
        assert env.action_space["action"] == spaces.Discrete(2)
        env.close()


@pytest.mark.parametrize("mode", ["sync", "vector_entry_point"])
def test_lanes_of_actions_with_names_are_served_without_keys(mode):
    names = Web(action_names="LEFT,RIGHT")
    with serve_gym("CartPole-v1", num_envs=2, vectorization_mode=mode, web=names) as server:
        stream = Stream(server).join()
        assert json.loads(stream.read_property("world.controls"))["kind"] == "none"
        stream.close()


@pytest.mark.parametrize("names", [[], [""], "LEFT,,RIGHT", ["LEFT", 1], ["x" * 41], 2])
def test_names_that_are_none_are_refused(names):
    with pytest.raises(SettingError, match="expected action_names to be strings of 1 to 40 characters"):
        serve_gym("CartPole-v1", web=Web(action_names=names))


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ("CartPole-v1", r"1 names; an environment with Discrete\(2\) takes one for each of its 2 actions"),
        ("Pendulum-v1", "takes none"),
    ],
)
def test_names_that_do_not_fit_the_actions_are_told_to_who_asks_for_the_environment(env, problem):
    with (
        serve_gym(env, web=Web(action_names=["LEFT"])) as server,
        pytest.raises(BridgeError, match=problem),
    ):
        make_remote(server.url)


def test_an_environment_of_several_agents_takes_no_names_of_actions():
    with pytest.raises(SettingError, match="action_names are of an environment of one agent"):
        serve_parallel(lambda: None, web=Web(action_names=["LEFT"]))
