"""Steps: actions that are wrong, and observations that are asked for."""

import numpy as np
import pytest
from gymnasium import spaces

from bridge.core.encoding import values
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.core.server.sessions.peers import Looked, Server, Told
from tests.support import typed_discrete


@pytest.mark.parametrize("kind", ["step", "reset"])
def test_step_and_reset_when_not_joined_are_errors(kind, server, peer):
    # D-8: and touch no environment
    peer.refused(Code.FAILED_PRECONDITION, "in no world; send JoinWorld first", **{kind: {}})
    assert not server.envs
    peer.join()
    peer.ask(leave_world={})
    peer.refused(Code.FAILED_PRECONDITION, "in no world; send JoinWorld first", **{kind: {}})
    assert server.envs[0].episode == 0


BAD_ACTIONS = {
    "unknown UID": {99: pack_tensor(0)},
    "out of range": {1: pack_tensor(7)},
    "another dtype": {1: pack_tensor("left")},
    "nothing in it": {1: pb.Tensor()},
    "none": {},
}


@pytest.mark.parametrize("actions", BAD_ACTIONS.values(), ids=BAD_ACTIONS)
def test_the_first_step_of_a_sequence_ignores_its_actions(actions, server, peer):
    # D-9: after join, after an end, and after Reset, whatever the actions are
    peer.join()
    wanted = {"requested_observations": [peer.observations["observation"]]}
    for before in ("join", "end", "reset"):
        if before == "end":
            while peer.play()[0] == "RUNNING":
                pass
        elif before == "reset":
            peer.play()
            peer.ask(reset={})
        response = peer.ask(step={"actions": actions, **wanted})
        assert response.step.state == pb.RUNNING
        assert unpack_tensor(response.step.observations[1])[1] == 0
    assert server.envs[-1].episode == 3


def test_an_unknown_requested_uid_is_an_error_on_the_first_step_too(server, peer):
    # D-10
    peer.join()
    for _ in range(2):
        peer.refused(
            Code.INVALID_ARGUMENT,
            "unknown observation UID 77; there are 1 (observation), 2 (reward)",
            step={"requested_observations": [1, 77], "actions": {1: pack_tensor(0)}},
        )
        peer.play()
    assert (server.envs[-1].episode, server.envs[-1].steps) == (1, 1)


def test_duplicates_are_harmless_and_none_requested_none_returned(peer):
    # D-10
    peer.join()
    response = peer.ask(step={"requested_observations": [1, 2, 1, 1, 2]})
    assert sorted(response.step.observations) == [1, 2]
    assert not peer.step(0, ()).step.observations


def test_what_is_not_requested_is_not_computed():
    # D-10
    looks = []
    seen = {name: Looked(lambda name=name: looks.append(name) or 1) for name in "ab"}
    info = {"more": Looked(lambda: pytest.fail("the info was encoded"))}
    space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))
    peer = Server(lambda: Told(space, lambda: seen, info)).connect()
    peer.join()
    peer.play(wanted=["observation.b", "reward"])
    assert looks == ["b"]


def tensor(shape=(), member="floats", elements=(0.0,)):
    message = pb.Tensor(shape=shape)
    getattr(message, member).array.extend(elements)
    return message


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        ({2: tensor()}, "unknown action UID 2; there are 1 (action)"),
        ({1: tensor((3,), "doubles", [0, 0, 0])}, "'action': expected FLOAT of shape [3], min -1.0, max 1.0"),
        ({1: tensor((3,), "int32s", [0, 0, 0])}, "got a tensor that holds int32s"),
        ({1: tensor((), "floats", [0])}, "got the shape []"),
        ({1: tensor((1,), "floats", [0])}, "got the shape [1]"),
        ({1: tensor((4,), "floats", [0] * 4)}, "got the shape [4]"),
        ({1: tensor((1, 3), "floats", [0] * 3)}, "got the shape [1, 3]"),
        ({1: tensor((3,), "floats", [0] * 2)}, "needs 3 elements"),
        ({1: tensor((-1,), "floats", [0] * 4)}, "got the shape [-1]"),
        ({1: tensor((-1, -1), "floats", [0] * 3)}, "2 variable dimensions"),
        ({1: tensor((2**31 - 1, 2**31 - 1), "floats", [0])}, "got the shape"),
        ({1: tensor((3,), "floats", [0, 0, 1.5])}, "got 1.5, which is above the maximum"),
        ({1: tensor((3,), "floats", [0, 0, -1.5])}, "got -1.5, which is below the minimum"),
        ({1: tensor((3,), "floats", [0, 0, float("nan")])}, "got nan"),
        ({1: pb.Tensor()}, "got a tensor that holds nothing"),
        ({}, "lacks the action 'action': expected FLOAT of shape [3]"),  # D-12
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_action_that_is_wrong_in_any_way_is_an_error_that_says_how(actions, words):
    # D-11, D-12
    peer = Server(lambda: CountingEnv(action_space=spaces.Box(-1, 1, (3,)))).connect()
    peer.join()
    peer.play(None)
    words = words.replace("-1.0", "-1.").replace("max 1.0", "max 1.")
    good = {"actions": {1: tensor((3,), "floats", [0] * 3)}, "requested_observations": [1, 2]}
    for _ in range(2):
        assert peer.ask(step=good).step.state == pb.RUNNING
    peer.refused(Code.INVALID_ARGUMENT, words, step={**good, "actions": actions})
    assert peer.play(np.zeros(3, np.float32)) == ("RUNNING", [1, 3], 3.0, 1.0)


@pytest.mark.parametrize(
    "action",
    [tensor((3,), "floats", [1, 0, -1]), tensor((-1,), "floats", [0] * 3), tensor((3,), "floats", [0.5])],
    ids=str,
)
def test_a_variable_dimension_and_a_single_element_are_accepted(action):
    # D-11
    peer = Server(lambda: CountingEnv(action_space=spaces.Box(-1, 1, (3,)))).connect()
    peer.join()
    peer.play(None)
    assert peer.ask(step={"actions": {1: action}}).step.state == pb.RUNNING


def test_a_scalar_sent_as_one_element_is_an_error(peer):
    # D-11
    peer.join()
    peer.play(None)
    peer.refused(Code.INVALID_ARGUMENT, "got the shape [1]", step={"actions": {1: pack_tensor([0])}})


def test_one_missing_action_of_several_is_named():
    # D-12
    space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(3))
    peer = Server(lambda: CountingEnv(action_space=space)).connect()
    peer.join()
    peer.play(None)
    uid = peer.actions["action.a"]
    peer.refused(Code.INVALID_ARGUMENT, "lacks the action 'action.b'", step={"actions": {uid: pack_tensor(0)}})


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Text(3, charset="ab"), pack_tensor("xyz")),
        (spaces.Sequence(spaces.Discrete(2)), pack_tensor([0, 7])),
        (spaces.OneOf([spaces.Discrete(2)]), pack_tensor(np.frombuffer(values.encode([0, 9]), np.uint8))),
        (spaces.Graph(spaces.Discrete(2), None), pack_tensor(np.frombuffer(values.encode("x"), np.uint8))),
        (spaces.Graph(spaces.Discrete(2), None), pack_tensor(np.uint8([255]))),
        (spaces.Box(-np.inf, np.inf, (), np.float16), pack_tensor(np.float32(1e10))),
        (typed_discrete(3, -1, np.int8), pack_tensor(np.int8(2))),
    ],
    ids=lambda value: str(value) if isinstance(value, spaces.Space) else "",
)
def test_the_environment_never_sees_an_action_that_is_not_in_its_space(space, action):
    # D-11
    server = Server(lambda: CountingEnv(action_space=space))
    peer = server.connect()
    peer.join()
    peer.play(None)
    peer.refused(Code.INVALID_ARGUMENT, step={"actions": {1: action}})
    assert server.envs[-1].steps == 0
