"""`bridge.core.server.session`: each request is answered in each state, and one that fails changes nothing."""

import threading

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import Observer
from bridge.core.encoding import values
from bridge.core.encoding.names import CALL_REQUEST_URL, CALL_RESPONSE_URL, PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor
from bridge.core.server.session import SessionState
from bridge.errors import Code
from bridge.pb import bridge_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, FailingEnv, SpaceEnv
from tests.core.server.sessions.peers import Looked, Server, Told, WildEnv, brought_to
from tests.support import stable_id

KINDS = ("create_world", "join_world", "step", "reset", "reset_world", "leave_world", "destroy_world", "extension")


# D-1, D-2


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_request_is_answered_in_every_state(kind):
    # D-1; `ask` looks at the answer's kind
    for state in SessionState:
        _, peer, _ = brought_to(state)
        peer.ask(**{kind: {}})


@pytest.mark.parametrize("kind", ["leave_world", "destroy_world"])
def test_an_empty_response_still_sets_its_member(kind, peer):
    # D-1
    name = peer.ask(create_world={}).create_world.world_name
    fields = {"world_name": name} if kind == "destroy_world" else {}
    data = peer.session.handle(pb.EnvironmentRequest(**{kind: fields}).SerializeToString())
    assert pb.EnvironmentResponse.FromString(data).WhichOneof("payload") == kind


def test_a_request_without_a_payload_is_refused(peer):
    assert "got one without a payload" in pb.EnvironmentResponse.FromString(peer.session.handle(b"")).error.message


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=40))
def test_garbage_bytes_are_answered_and_the_connection_goes_on(data):
    # D-1, D-2
    server = Server()
    peer = server.connect()
    peer.join()
    before = peer.state
    response = pb.EnvironmentResponse.FromString(peer.session.handle(data))
    assert response.WhichOneof("payload") is not None
    if response.HasField("error"):
        assert peer.state is before
    if before is SessionState.JOINED is peer.state:
        assert peer.play()[0] == "RUNNING"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_garbled_requests_are_answered_and_the_connection_goes_on(data):
    # D-1, D-2: valid requests with some bytes changed reach deeper than random ones
    server = Server(lambda: SpaceEnv(spaces.Discrete(3), spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Text(3))))
    peer = server.connect()
    peer.join()
    peer.ask(step={})
    request = data.draw(
        st.sampled_from(
            [
                {"step": {"actions": {1: pack_tensor(np.float32([0, 1])), 2: pack_tensor("abc")}}},
                {"step": {"requested_observations": [1, 2, 3]}},
                {"reset": {"settings": {"seed": pack_tensor(3), "options": pack_tensor(np.uint8([90, 0]))}}},
                {"create_world": {"settings": {"num_envs": pack_tensor(1), "kwargs.x": pack_tensor("y")}}},
                {"join_world": {"world_name": "x"}},
                {"extension": {"type_url": PROPERTY_REQUEST_URL, "value": b"\n\x0f\n\rworld.env_id"}},
                {"extension": {"type_url": CALL_REQUEST_URL, "value": b"\n\x05close"}},
            ]
        )
    )
    raw = bytearray(pb.EnvironmentRequest(**request).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    response = pb.EnvironmentResponse.FromString(peer.session.handle(bytes(raw)))
    assert response.WhichOneof("payload") is not None
    if response.HasField("error"):
        assert "the server failed" not in response.error.message
        assert peer.state is SessionState.RUNNING


def test_a_map_entry_with_an_unknown_field_is_read():
    # D-2: the parser of Protobuf 4.21 crashes at these settings, whose entries have a third field
    peer = Server().connect()
    settings = "0a260a110a086b77617267732e78120552030a01790a110a086e756d5f656e767318052a030a0101"
    for _ in range(100):
        response = pb.EnvironmentResponse.FromString(peer.session.handle(bytes.fromhex(settings)))
        assert "unexpected keyword argument 'x'" in response.error.message


def test_a_setting_whose_name_is_no_text_is_refused():
    # D-2: Protobuf before 4.25 gave its name as bytes
    peer = Server().connect()
    data = pb.EnvironmentRequest(create_world={"settings": {"abcd": pack_tensor(1)}}).SerializeToString()
    response = pb.EnvironmentResponse.FromString(peer.session.handle(data.replace(b"abcd", b"ab\xff\xfe")))
    assert response.error.code == Code.INVALID_ARGUMENT
    assert "bytes that are none" in response.error.message


def test_a_failed_request_changes_nothing(server, peer):
    # D-2
    peer.join()
    peer.play()
    env = server.envs[-1]
    before = (env.episode, env.steps)
    for fields in (
        {"step": {"requested_observations": [999]}},
        {"step": {"actions": {99: pack_tensor(0)}}},
        {"step": {"actions": {1: pack_tensor(7)}}},
        {"step": {}},
        {"reset": {"settings": {"nope": pack_tensor(0)}}},
        {"reset": {"settings": {"seed": pack_tensor(-1)}}},
        {"join_world": {}},
        {"destroy_world": {}},
        {"destroy_world": {"world_name": "nope"}},
        {"create_world": {"settings": {"nope": pack_tensor(0)}}},
        {"reset_world": {"world_name": "nope"}},
        {"extension": {"type_url": "nope"}},
    ):
        response = peer.ask(**fields)
        assert response.HasField("error"), fields
        assert len(response.error.message) > 20
        assert peer.state is SessionState.RUNNING
        assert (env.episode, env.steps) == before
    assert peer.play() == ("RUNNING", [1, 1], 1.0, 1.0)


def test_an_error_of_the_environment_has_its_traceback_and_the_episode_can_go_on():
    # D-2
    peer = Server(lambda: FailingEnv(fail_in_reset=1, fail_in_step=2)).connect()
    peer.join()
    message = peer.refused(Code.INTERNAL, "TestFailure in reset: reset 1 fails", step={})
    assert "Traceback" in message
    assert 'raise TestFailure(f"reset' in message
    assert peer.play() == ("RUNNING", [1, 0], 0.0, 1.0)
    assert peer.play() == ("RUNNING", [1, 1], 1.0, 1.0)
    peer.refused(Code.INTERNAL, "TestFailure in step: step 2 fails", step={"actions": {1: pack_tensor(0)}})
    assert peer.play() == ("RUNNING", [1, 2], 2.0, 1.0)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "step() of WildEnv returned None, expected (observation, reward,"),
        ((1, 2), "step() of WildEnv returned a tuple of 2 values (int, int), expected (observation, reward,"),
        (({}, "reward", False, False, {}), "expected a number as the environment's reward, got a str"),
        (({}, 0, np.array([True, False]), False, {}), "ValueError in step"),
        (({}, 0.0, False, False, {}), "not of its observation_space: 'observation.a'"),
        ((None, 0.0, False, False, {}), "not of its observation_space: 'observation.a'"),
        (("a", np.zeros(3)), "in step"),
        (("g", None), "not of its observation_space: 'observation.g'"),
        (("t", ["a", "b"]), "not of its observation_space: 'observation.t'"),
        (("s", 5), "not of its observation_space: 'observation.s'"),
        (("a", object()), "in step"),
    ],
    ids=stable_id,
)
def test_an_environment_that_returns_nonsense_is_told_so_and_the_stream_goes_on(result, words):
    # D-1, D-2
    server = Server(WildEnv)
    peer = server.connect()
    peer.join()
    names = [f"observation.{key}" for key in "agst"]
    peer.play(wanted=[])
    env = server.envs[0]
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str):
        result = ({**env.good(), result[0]: result[1]}, 0.0, False, False, {})
        words = words.replace("in step", "not of its observation_space: 'observation.a'")
    env.result = result
    response = peer.step(0, names)
    assert response.error.code == Code.INTERNAL
    assert words in response.error.message
    env.result = (env.good(), 1.0, True, False, {})
    assert peer.play(0, ["reward"]) == ("TERMINATED", 1.0)


class BadEnd(CountingEnv):
    """Its last observation is not of its space."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return (np.zeros(3) if terminated or truncated else observation), reward, terminated, truncated, info


@pytest.mark.parametrize(("truncates", "state"), [(False, "TERMINATED"), (True, "INTERRUPTED")])
def test_an_end_whose_observation_cannot_be_sent_is_told_by_the_next_step_that_can_be_answered(truncates, state):
    # D-1, D-13: and nothing is stepped meanwhile
    server = Server(lambda: BadEnd(2, truncates=truncates))
    peer = server.connect()
    peer.join()
    peer.play()
    peer.play()
    for _ in range(3):
        response = peer.step(0)
        assert response.error.code == Code.INTERNAL
        assert "the environment's observation is not of its observation_space" in response.error.message
    assert peer.play(0, ["reward"]) == (state, 2.0)
    assert server.envs[0].steps == 2
    assert peer.play() == ("RUNNING", [2, 0], 0.0, 1.0)


@pytest.mark.parametrize("request_of_the_client", [{"reset": {}}, {"reset_world": {}}])
def test_an_end_that_could_not_be_told_is_not_told_after_a_reset(request_of_the_client):
    # D-13, D-14, D-15: the client has asked for the end itself
    peer = Server(lambda: BadEnd(1)).connect()
    peer.join()
    peer.play()
    assert peer.step(0).error.code == Code.INTERNAL
    assert peer.ask(**request_of_the_client).WhichOneof("payload") != "error"
    assert peer.play() == ("RUNNING", [2, 0], 0.0, 1.0)


@pytest.mark.parametrize("joined", [False, True])
def test_an_unknown_extension_is_unimplemented(peer, joined):
    # D-18
    if joined:
        peer.join()
    peer.refused(
        Code.UNIMPLEMENTED,
        "unknown extension 'type.googleapis.com/x.Y'",
        extension={"type_url": "type.googleapis.com/x.Y"},
    )


@pytest.mark.parametrize("url", [PROPERTY_REQUEST_URL, CALL_REQUEST_URL])
def test_an_extension_that_cannot_be_read_is_refused(peer, url):
    peer.join()
    peer.refused(Code.INVALID_ARGUMENT, "cannot be read", extension={"type_url": url, "value": b"\xff\xff"})


def test_a_method_is_called_on_the_joined_environment(server, peer):
    request = bridge_pb2.CallRequest(name="length").SerializeToString()
    fields = {"extension": {"type_url": CALL_REQUEST_URL, "value": request}}
    peer.refused(Code.FAILED_PRECONDITION, "send JoinWorld first", **fields)
    peer.join()
    response = peer.ask(**fields)
    assert response.extension.type_url == CALL_RESPONSE_URL
    answer = bridge_pb2.CallResponse.FromString(response.extension.value)
    assert [values.from_value(item) for item in answer.results] == [5]
    for name in ("_np_random", "__class__", "a.b", ""):
        data = bridge_pb2.CallRequest(name=name).SerializeToString()
        peer.refused(Code.PERMISSION_DENIED, "public", extension={"type_url": CALL_REQUEST_URL, "value": data})


# The end


def test_a_closed_session_gives_back_its_seat_and_its_own_world(server):
    one, two = server.connect(), server.connect()
    name = one.ask(create_world={}).create_world.world_name
    one.join(name)
    two.refused(Code.RESOURCE_EXHAUSTED, join_world={"world_name": name})
    one.session.close()
    one.session.close()
    assert server.envs[0].closed
    two.refused(Code.NOT_FOUND, join_world={"world_name": name})
    for kind in KINDS:
        one.refused(Code.FAILED_PRECONDITION, **{kind: {}})


def test_a_fault_of_the_server_itself_is_answered_with_its_traceback():
    # D-1: and the stream stays open
    faulty = threading.Event()

    def broken():
        raise ZeroDivisionError("oops")

    peer = Server(lambda: Told(spaces.Discrete(2), lambda: Looked(broken) if faulty.is_set() else 1)).connect()
    peer.join()
    peer.play()
    faulty.set()
    response = peer.step(0)
    assert response.error.code == Code.INTERNAL
    assert "ZeroDivisionError('oops')" in response.error.message
    assert "in broken" in response.error.message
    assert peer.ask(leave_world={}).WhichOneof("payload") == "leave_world"


class Stubborn(Observer):
    """Makes agents that raise in one of their methods."""

    def __init__(self, method):
        self.method = method

    def join(self, world, settings, join):
        agent = join(settings)

        def broken():
            raise ZeroDivisionError("oops")

        setattr(agent, self.method, broken)
        return agent


def test_an_agent_that_raises_while_it_leaves_is_out_of_the_world():
    # D-1, D-8, D-16: requests that need a world are refused, and another one can be joined
    peer = Server(observers=[Stubborn("leave")]).connect()
    peer.join()
    assert "ZeroDivisionError('oops')" in peer.ask(leave_world={}).error.message
    assert peer.state is SessionState.UNJOINED
    for kind in ("step", "reset"):
        peer.refused(Code.FAILED_PRECONDITION, "send JoinWorld first", **{kind: {}})
    peer.join(peer.ask(create_world={}).create_world.world_name)


def test_no_reset_of_the_world_waits_for_a_sequence_whose_begin_failed():
    # D-2, D-15: whatever it failed by
    server = Server(observers=[Stubborn("begin")])
    peer, other = server.connect(), server.connect()
    peer.join()
    assert "ZeroDivisionError('oops')" in peer.ask(step={}).error.message
    assert other.ask(reset_world={}).WhichOneof("payload") == "reset_world"
