"""`bridge.core.server.session`: one call's protocol, without a network; what clients rely on, request by request."""

import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import MessageForm, MessagePart, Observer, SessionMessage
from bridge.core.encoding import values
from bridge.core.encoding.names import CALL_REQUEST_URL, CALL_RESPONSE_URL, PROPERTY_REQUEST_URL, PROPERTY_RESPONSE_URL
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.core.server.session import TRANSITIONS, SessionEvent, SessionState
from bridge.errors import Code
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, FailingEnv, SpaceEnv
from tests.support import direct_registry, direct_session, gym_source, stable_id, typed_discrete

KINDS = ("create_world", "join_world", "step", "reset", "reset_world", "leave_world", "destroy_world", "extension")


class Server:
    """The worlds of a server without a network; `envs` are those that were made, in order."""

    def __init__(self, make=CountingEnv, observers=(), messages=(), **kwargs):
        self.envs = []

        def factory(**settings):
            env = make(**settings)
            self.envs.append(env)
            return env

        self.registry = direct_registry(gym_source(factory, **kwargs), observers=observers, messages=messages)

    def connect(self):
        return Peer(direct_session(self.registry))


class Peer:
    """A client that speaks bytes to a session, and reads by the names of the specs."""

    def __init__(self, session):
        self.session = session
        self.actions, self.observations = {}, {}

    @property
    def state(self):
        return self.session.state

    def ask(self, **fields):
        request = pb.EnvironmentRequest(**fields)
        response = pb.EnvironmentResponse.FromString(self.session.handle(request.SerializeToString()))
        kind = response.WhichOneof("payload")
        assert kind in ("error", request.WhichOneof("payload"))  # D-1: of its kind, or an error
        if kind != "error":
            for specs in (response.join_world.specs, response.reset.specs):
                if specs.observations:
                    self.actions = {spec.name: uid for uid, spec in specs.actions.items()}
                    self.observations = {spec.name: uid for uid, spec in specs.observations.items()}
        return response

    def refused(self, code, *parts, **fields):
        """Send a request that must fail with this code, these words, and no change of state (D-2)."""
        before = self.state
        response = self.ask(**fields)
        assert response.WhichOneof("payload") == "error", response
        assert response.error.code == code, response.error
        for part in parts:
            assert part in response.error.message
        assert self.state is before
        return response.error.message

    def join(self, name="", **settings):
        settings = {"gymnasium": pack_tensor(True), **settings}
        response = self.ask(join_world={"world_name": name, "settings": settings})
        assert response.WhichOneof("payload") == "join_world", response
        return response.join_world.specs

    def step(self, action=0, wanted=("observation",), **more):
        """A Step with the action `action`; None sends none."""
        actions = {} if action is None else {self.actions["action"]: pack_tensor(action)}
        step = {"actions": actions, "requested_observations": [self.observations.get(name, 999) for name in wanted]}
        return self.ask(step={**step, **more})

    def play(self, action=0, wanted=("observation", "reward", "discount")):
        """A Step that must succeed: the state's name and the observations asked for."""
        response = self.step(action, wanted)
        assert response.WhichOneof("payload") == "step", response.error.message
        uids = [self.observations[name] for name in wanted]
        got = [unpack_tensor(response.step.observations[uid]).tolist() for uid in uids]
        return (pb.EnvironmentStateType.Name(response.step.state), *got)

    def property(self, **fields):
        data = properties_pb2.PropertyRequest(**fields).SerializeToString()
        return self.ask(extension={"type_url": PROPERTY_REQUEST_URL, "value": data})


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def peer(server):
    return server.connect()


# The table


class Moves(MessagePart):
    """Says that the environment is in another situation."""

    def answer(self, request):
        # Also where no episode runs: what may be gone on from is for the part to say.
        self.stage.place(0, self.stage.whole.observation_space.sample(), {})
        return b""


MOVES = SessionMessage(MessageForm("moves", "tests.Moves", "tests.Moved", places=True), part=Moves)
ENDING = {SessionState.TERMINATED: False, SessionState.INTERRUPTED: True}
STEPS = {SessionEvent.STEP_BEGAN, SessionEvent.STEP_RAN, SessionEvent.STEP_TERMINATED, SessionEvent.STEP_INTERRUPTED}


def brought_to(state, length=1):
    """A connection in a state, by requests alone; beside it a world `other` that nobody is in."""
    server = Server(lambda: CountingEnv(length, truncates=ENDING.get(state, False)), messages=[MOVES])
    peer = server.connect()
    other = server.connect().ask(create_world={}).create_world.world_name
    if state is SessionState.UNJOINED:
        return server, peer, other
    if state is SessionState.CLOSED:
        peer.session.close()
        return server, peer, other
    peer.join()
    if state is not SessionState.JOINED:
        peer.step()
    if state in ENDING:
        peer.step()
    assert peer.state is state
    return server, peer, other


@pytest.mark.parametrize("state", SessionState)
@pytest.mark.parametrize("event", SessionEvent)
def test_every_pair_of_state_and_event_is_as_the_table_says(state, event):
    # D-6, D-8, D-13, D-14, D-15, D-16: a pair that is not in the table is refused with FAILED_PRECONDITION
    lengths = {SessionEvent.STEP_RAN: 9, SessionEvent.STEP_TERMINATED: 1, SessionEvent.STEP_INTERRUPTED: 1}
    length = lengths.get(event, 1) if state is SessionState.RUNNING else 1
    server, peer, other = brought_to(state, length)
    if event is SessionEvent.STEP_INTERRUPTED and state is SessionState.RUNNING:
        server.envs[-1].truncates = True
    if event is SessionEvent.END:
        peer.session.close()
        assert peer.state is SessionState.CLOSED
        assert state is SessionState.CLOSED or TRANSITIONS[state, event] is SessionState.CLOSED
        return
    own = other if peer.session.world_name is None else peer.session.world_name
    request = {
        SessionEvent.CREATE_WORLD: {"create_world": {}},
        SessionEvent.JOIN_WORLD: {"join_world": {"world_name": other}},
        SessionEvent.RESET: {"reset": {}},
        SessionEvent.RESET_WORLD: {"reset_world": {"world_name": own}},
        SessionEvent.LEAVE_WORLD: {"leave_world": {}},
        SessionEvent.DESTROY_WORLD: {"destroy_world": {"world_name": other}},
        SessionEvent.PLACED: {"extension": {"type_url": MOVES.form.request_url, "value": b""}},
        SessionEvent.EXTENSION: {
            "extension": {
                "type_url": PROPERTY_REQUEST_URL,
                "value": properties_pb2.PropertyRequest(list_property={"key": ""}).SerializeToString(),
            }
        },
    }.get(event)
    if request is None:
        allowed = {after for (before, step), after in TRANSITIONS.items() if before is state and step in STEPS}
        response = peer.step() if peer.actions else peer.ask(step={})
        if not allowed:
            assert response.error.code == Code.FAILED_PRECONDITION
            assert peer.state is state
        elif (state, event) in TRANSITIONS:
            assert response.WhichOneof("payload") == "step"
            assert peer.state is TRANSITIONS[state, event]
        else:  # another of the four outcomes of a Step
            assert peer.state in allowed
        return
    response = peer.ask(**request)
    if (state, event) not in TRANSITIONS:
        assert response.error.code == Code.FAILED_PRECONDITION
        if event is SessionEvent.PLACED and state is SessionState.UNJOINED:
            assert "a message 'moves' needs a world" in response.error.message
            return
        event = SessionEvent.EXTENSION if event is SessionEvent.PLACED else event
        assert f"{event.value} is not possible in the state {state.value}" in response.error.message
        assert peer.state is state
    else:
        assert not response.HasField("error"), response.error.message
        assert peer.state is TRANSITIONS[state, event]


def test_the_table_leads_from_the_first_state_to_every_other_and_ends_in_closed():
    reached, before = {SessionState.UNJOINED}, set()
    while reached != before:
        before = set(reached)
        reached |= {after for (state, _), after in TRANSITIONS.items() if state in reached}
    assert reached == set(SessionState)
    assert not [pair for pair in TRANSITIONS if pair[0] is SessionState.CLOSED]
    assert all(
        TRANSITIONS[state, SessionEvent.END] is SessionState.CLOSED
        for state in SessionState
        if state is not SessionState.CLOSED
    )


def test_the_table_holds_what_the_protocol_says_and_no_more():
    # D-6, D-8, D-9, D-13, D-14, D-15, D-16
    said = {}
    idle = {SessionState.JOINED, SessionState.TERMINATED, SessionState.INTERRUPTED}
    for state in {SessionState.UNJOINED, SessionState.RUNNING} | idle:
        said |= {
            (state, event): state
            for event in (SessionEvent.CREATE_WORLD, SessionEvent.DESTROY_WORLD, SessionEvent.EXTENSION)
        }
        said |= {
            (state, SessionEvent.LEAVE_WORLD): SessionState.UNJOINED,
            (state, SessionEvent.END): SessionState.CLOSED,
        }
        said[state, SessionEvent.RESET_WORLD] = SessionState.INTERRUPTED if state is SessionState.RUNNING else state
    said[SessionState.UNJOINED, SessionEvent.JOIN_WORLD] = SessionState.JOINED
    said |= {(state, SessionEvent.STEP_BEGAN): SessionState.RUNNING for state in idle}
    said |= {(state, SessionEvent.RESET): state for state in idle} | {
        (SessionState.RUNNING, SessionEvent.RESET): SessionState.INTERRUPTED
    }
    said |= {(state, SessionEvent.PLACED): SessionState.RUNNING for state in {SessionState.RUNNING} | idle}
    said[SessionState.RUNNING, SessionEvent.STEP_RAN] = SessionState.RUNNING
    said[SessionState.RUNNING, SessionEvent.STEP_TERMINATED] = SessionState.TERMINATED
    said[SessionState.RUNNING, SessionEvent.STEP_INTERRUPTED] = SessionState.INTERRUPTED
    assert said == TRANSITIONS


def test_no_two_states_in_a_row_are_not_running():
    # D-13
    ended = {SessionState.TERMINATED, SessionState.INTERRUPTED}
    for (state, event), after in TRANSITIONS.items():
        if state in ended and event in STEPS:
            assert after is SessionState.RUNNING


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


class WildEnv(gymnasium.Env):
    """Its step returns what the test says."""

    observation_space = spaces.Dict(
        a=spaces.Box(0, 1, (2,)),
        g=spaces.Graph(spaces.Discrete(2), None),
        t=spaces.Text(3),
        s=spaces.Sequence(spaces.Text(2)),
    )
    action_space = spaces.Discrete(2)
    result = None

    def good(self):
        return {**self.observation_space.sample()}

    def reset(self, *, seed=None, options=None):
        return self.good(), {}

    def step(self, action):
        return self.result


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "TypeError in step"),
        ((1, 2), "ValueError in step"),
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


# D-3, D-4, D-5: worlds


def test_created_worlds_have_unique_names_and_are_joined_from_any_connection(server):
    # D-3
    first, second = server.connect(), server.connect()
    names = [peer.ask(create_world={}).create_world.world_name for peer in (first, second, first)]
    assert len({*names, ""}) == 4
    second.join(names[0])
    assert second.play()[0] == "RUNNING"


def test_unknown_and_invalid_settings_of_create_world_are_errors(peer):
    # D-3
    peer.refused(
        Code.INVALID_ARGUMENT,
        "unknown CreateWorld settings flavour; the settings here are: env_id",
        create_world={"settings": {"flavour": pack_tensor("sweet")}},
    )
    for tensor in (pack_tensor("four"), pack_tensor(0), pack_tensor([1, 2]), pack_tensor(1.0), pb.Tensor()):
        peer.refused(Code.INVALID_ARGUMENT, "num_envs", create_world={"settings": {"num_envs": tensor}})
    encoded = pack_tensor(np.frombuffer(values.encode([1]), np.uint8))
    peer.refused(Code.INVALID_ARGUMENT, "kwargs to be a dict", create_world={"settings": {"kwargs": encoded}})


def test_the_default_world_is_joined_without_create_world(server, peer):
    # D-4
    assert not server.envs
    peer.join("")
    assert len(server.envs) == 1
    assert peer.play() == ("RUNNING", [1, 0], 0.0, 1.0)


def test_worlds_are_independent_of_each_other(server):
    # D-5
    peers = [server.connect() for _ in range(3)]
    for peer in peers:
        peer.join(peer.ask(create_world={}).create_world.world_name)
    for count, peer in enumerate(peers, 1):
        for _ in range(count):
            peer.play()
    assert [peer.play()[1] for peer in peers] == [[1, 1], [1, 2], [1, 3]]
    peers[0].refused(Code.INVALID_ARGUMENT, step={"actions": {1: pack_tensor(9)}})
    peers[1].session.close()
    assert peers[2].play()[1] == [1, 4]


# D-6, D-7: joining


def test_joining_twice_an_unknown_world_a_full_world_and_invalid_settings_are_errors(server, peer):
    # D-6
    peer.refused(Code.NOT_FOUND, "no world 'nope'; create one with CreateWorld", join_world={"world_name": "nope"})
    peer.refused(
        Code.INVALID_ARGUMENT,
        "unknown JoinWorld settings team; the settings here are: none",
        join_world={"settings": {"team": pack_tensor("red")}},
    )
    peer.join()
    beside = peer.ask(create_world={}).create_world.world_name
    for name in ("", beside):
        peer.refused(
            Code.FAILED_PRECONDITION, "in a world already; send LeaveWorld first", join_world={"world_name": name}
        )
    other = server.connect()
    other.join(beside)  # the join that was refused took no seat
    other.ask(leave_world={})
    assert peer.play()[0] == "RUNNING"
    other.refused(Code.RESOURCE_EXHAUSTED, "full: it has 1 agent of at most 1", join_world={})
    assert other.ask(create_world={}).create_world.world_name


def test_specs_and_uids_are_stable_until_leave_or_reset(peer):
    # D-7: over the ends of episodes too
    specs = peer.join()
    assert [peer.play()[0] for _ in range(13)].count("TERMINATED") == 2
    again = peer.ask(reset={}).reset.specs
    assert again == specs
    for side in (specs.actions, specs.observations):
        names = [spec.name for spec in side.values()]
        assert len(names) == len(set(names))
    assert set(peer.observations) == {"observation", "reward", "discount", "terminated", "truncated", "info"}


# D-8, D-9, D-10, D-11, D-12: steps


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


class Looked:
    """A number that is known only once somebody asks for it."""

    def __init__(self, look):
        self.look = look

    def __array__(self, dtype=None, copy=None):
        return np.array(self.look(), dtype)


class Told(gymnasium.Env):
    """Gives observations and infos as they are."""

    action_space = spaces.Discrete(2)

    def __init__(self, observation_space, observe, info=None):
        self.observation_space, self.observe, self.info = observation_space, observe, info or {}

    def reset(self, *, seed=None, options=None):
        return self.observe(), self.info

    def step(self, action):
        return self.observe(), 1.0, False, False, self.info


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


# D-13, D-14, D-21: ends and resets


@pytest.mark.parametrize(
    ("terminated", "truncated", "state", "discount"),
    [
        (True, False, "TERMINATED", 0.0),
        (False, True, "INTERRUPTED", 1.0),
        (True, True, "TERMINATED", 0.0),
        (False, False, "RUNNING", 1.0),
    ],
)
def test_ends_are_told_apart(terminated, truncated, state, discount):
    # D-13, D-21: the discount is 0.0 only when terminated
    server = Server(WildEnv)
    peer = server.connect()
    peer.join()
    peer.play(None, [])
    env = server.envs[0]
    env.result = (env.good(), 2.5, terminated, truncated, {})
    assert peer.play(0, ["reward", "discount", "terminated", "truncated"]) == (
        *(state, 2.5, discount),
        *(terminated, truncated),
    )
    assert peer.play(0, [])[0] == "RUNNING"


def test_an_episode_begins_by_itself_after_an_end_with_reward_zero(server, peer):
    # D-9, D-13
    peer.join()
    seen = [peer.play() for _ in range(13)]
    assert seen[0] == ("RUNNING", [1, 0], 0.0, 1.0)
    assert seen[5] == ("TERMINATED", [1, 5], 5.0, 0.0)
    assert seen[6] == ("RUNNING", [2, 0], 0.0, 1.0)
    assert seen[12] == ("RUNNING", [3, 0], 0.0, 1.0)
    assert server.envs[-1].episode == 3


def seed_of(peer):
    """The seed that the environment's last reset was given."""
    response = peer.ask(step={"requested_observations": [peer.observations["info"]]})
    return values.decode(unpack_tensor(response.step.observations[peer.observations["info"]]).tobytes())["seed"]


def test_reset_ends_the_sequence_and_resets_the_environment_once(server, peer):
    # D-14
    peer.join()
    peer.play()
    peer.play()
    specs = peer.ask(reset={"settings": {"seed": pack_tensor(5)}}).reset.specs
    assert specs.observations
    assert peer.state is SessionState.INTERRUPTED
    assert server.envs[-1].episode == 1
    assert seed_of(peer) == 5
    assert server.envs[-1].episode == 2


def test_reset_without_settings_in_a_non_running_state_is_a_no_op(server, peer):
    # D-14: also where settings wait already
    peer.join()
    peer.ask(reset={"settings": {"seed": pack_tensor(5)}})
    peer.ask(reset={})
    assert peer.state is SessionState.JOINED
    assert seed_of(peer) == 5
    assert server.envs[-1].episode == 1
    while peer.play()[0] == "RUNNING":
        pass
    assert peer.ask(reset={}).reset.specs.observations
    assert peer.state is SessionState.TERMINATED
    assert seed_of(peer) is None
    assert server.envs[-1].episode == 2


def test_reset_while_running_forgets_settings_of_before(peer):
    peer.join()
    peer.ask(reset={"settings": {"seed": pack_tensor(5)}})
    assert seed_of(peer) == 5
    peer.ask(reset={"settings": {"seed": pack_tensor(6)}})
    peer.ask(reset={"settings": {"seed": pack_tensor(np.uint8(7))}})
    assert seed_of(peer) == 7
    peer.ask(reset={})
    assert seed_of(peer) is None


def test_a_seed_is_kept_when_the_reset_of_the_environment_fails():
    # D-2: the Step that failed can be sent again
    peer = Server(lambda: FailingEnv(fail_in_reset=1)).connect()
    peer.join()
    peer.ask(reset={"settings": {"seed": pack_tensor(5)}})
    peer.refused(Code.INTERNAL, step={})
    assert seed_of(peer) == 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sed": pack_tensor(1)}, "unknown Reset settings sed; the settings here are: seed, options"),
        ({"seed": pack_tensor(-1)}, "non-negative integer scalar"),
        ({"seed": pack_tensor(1.0)}, "non-negative integer scalar"),
        ({"seed": pack_tensor([1])}, "non-negative integer scalar"),
        ({"seed": pack_tensor("one")}, "non-negative integer scalar"),
        ({"seed": pb.Tensor()}, "'seed' holds nothing"),
        ({"options": pack_tensor(1)}, "'options' as uint8 bytes"),
        ({"options": pack_tensor(np.uint8([255]))}, "expected an encoded value"),
        ({"options": pack_tensor(np.frombuffer(values.encode([1]), np.uint8))}, "options to be a dict, got list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reset_settings_that_are_wrong_are_errors(settings, words, peer):
    # D-2, D-14
    peer.join()
    peer.ask(reset={"settings": {"seed": pack_tensor(5)}})
    peer.refused(Code.INVALID_ARGUMENT, words, reset={"settings": settings})
    assert seed_of(peer) == 5


# D-16, D-17: leaving and destroying


def test_leave_when_not_joined_is_a_success_and_join_works_again_afterwards(server, peer):
    # D-16
    assert peer.ask(leave_world={}).WhichOneof("payload") == "leave_world"
    name = peer.ask(create_world={}).create_world.world_name
    for round_ in (1, 2):
        peer.join(name)
        assert peer.play()[1] == [round_, 0]
        peer.ask(leave_world={})
        assert peer.state is SessionState.UNJOINED
    other = server.connect()
    other.join(name)  # leaving does not destroy the world
    assert len(server.envs) == 1


def test_destroy_of_the_own_or_an_unknown_world_is_an_error(peer):
    # D-17
    name = peer.ask(create_world={}).create_world.world_name
    peer.join(name)
    peer.refused(Code.FAILED_PRECONDITION, "send LeaveWorld before DestroyWorld", destroy_world={"world_name": name})
    peer.ask(leave_world={})
    assert peer.ask(destroy_world={"world_name": name}).WhichOneof("payload") == "destroy_world"
    peer.refused(Code.NOT_FOUND, f"no world {name!r}", destroy_world={"world_name": name})
    peer.refused(Code.NOT_FOUND, f"no world {name!r}", join_world={"world_name": name})


def test_agents_of_a_destroyed_world_get_an_error_on_their_next_step(server, peer):
    # D-17
    name = peer.ask(create_world={}).create_world.world_name
    peer.join(name)
    peer.play()
    server.connect().ask(destroy_world={"world_name": name})
    assert server.envs[0].closed
    peer.refused(
        Code.FAILED_PRECONDITION,
        "was destroyed; send LeaveWorld, and create or join another",
        step={"actions": {1: pack_tensor(0)}},
    )
    assert peer.ask(leave_world={}).WhichOneof("payload") == "leave_world"
    peer.join()
    assert peer.play()[0] == "RUNNING"


# D-18 and the extension


def test_world_properties_are_there_after_join_only(peer):
    # D-18
    def listed():
        answer = properties_pb2.PropertyResponse.FromString(peer.property(list_property={"key": ""}).extension.value)
        return [spec.spec.name for spec in answer.list_property.values]

    assert "server" in listed()
    assert "world" not in listed()
    peer.refused(
        Code.NOT_FOUND,
        "no property 'world.name'",
        extension={"type_url": PROPERTY_REQUEST_URL, "value": b"\n\x0c\n\nworld.name"},
    )
    peer.join()
    assert {"server", "world"} <= set(listed())
    response = peer.property(read_property={"key": "world.num_envs"})
    assert response.extension.type_url == PROPERTY_RESPONSE_URL
    peer.ask(leave_world={})
    assert "world" not in listed()


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
