"""The client's session, by bytes alone: against the server's session, and against answers written here."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import bridge.core.client.world.client_session as module
from bridge.core.client.world.client_session import ClientSession
from bridge.core.client.world.extensions import property_request, property_value
from bridge.core.client.world.session_states import Joined, Lost, Refused, Replied, StepAnswered
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.encoding.names import PROPERTY_RESPONSE_URL
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import Code, ConnectionLostError, PeerError, RefusedError, RemoteTimeoutError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from bridge.testing import CountingEnv
from tests.support import direct_registry, direct_session, gym_source

NOW = 100.0


class Pair:
    """A client's session and a server's, joined by lists of messages."""

    def __init__(self, env: Any = None, url: str = "grpc://virtual:1") -> None:
        self.registry = direct_registry(gym_source(env or (lambda: CountingEnv(3))))
        self.server = direct_session(self.registry, "test")
        self.client = ClientSession(WorldRequest.of(url, max_message_bytes=1 << 20))
        self.client.server_version = "test"

    def turn(self) -> list[Any]:
        """Pass messages on until there are none; return the events."""
        events = []
        while requests := self.client.data_to_send():
            for request in requests:
                event = self.client.receive(self.server.handle(request), NOW)
                events += [] if event is None else [event]
        return events

    def join(self) -> None:
        self.client.connect(NOW)
        (event,) = self.turn()
        assert isinstance(event, Joined)

    def act(self, action: int = 1) -> None:
        world = self.client.world
        assert world is not None
        columns = [gymnasium.vector.utils.batch_space(world.info.action_space, 1).sample() * 0 + action]
        self.client.step(world.writer.write_columns(columns, 0), NOW)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def joined(*, foreign: bool = False) -> ClientSession:
    """A session in a world of a server that is written here."""
    session = ClientSession(WorldRequest.of("grpc://virtual:1", max_message_bytes=1 << 20))
    session.connect(NOW)
    session.receive(answer(create_world=pb.CreateWorldResponse(world_name="w")), NOW)
    assert isinstance(session.receive(answer(join_world=pb.JoinWorldResponse(specs=board())), NOW), Joined)
    session.data_to_send()
    return session


def board() -> pb.ActionObservationSpecs:
    """The specs of a world."""
    specs = pb.ActionObservationSpecs()
    specs.actions[1].name, specs.actions[1].dtype = "paddle", pb.INT8
    specs.observations[1].name, specs.observations[1].dtype = "board", pb.FLOAT
    specs.observations[2].name, specs.observations[2].dtype = "reward", pb.DOUBLE
    return specs


def answer(**kind: Any) -> bytes:
    return pb.EnvironmentResponse(**kind).SerializeToString()


def refusal(code: Code = Code.INVALID_ARGUMENT) -> bytes:
    response = pb.EnvironmentResponse()
    response.error.code, response.error.message = int(code), "no"
    return response.SerializeToString()


def test_a_session_joins_plays_and_leaves_by_bytes_alone(pair: Pair) -> None:
    client = pair.client
    assert client.state.value == "offline"
    pair.join()
    assert client.state.value == "joined"
    assert client.info is not None
    assert client.info.action_space == CountingEnv(3).action_space
    client.begin({}, NOW)
    assert client.state.value == "resetting"
    assert [type(event) for event in pair.turn()] == [StepAnswered]
    states = []
    for _ in range(4):
        pair.act()
        (event,) = pair.turn()
        assert isinstance(event, StepAnswered)
        states.append(client.state.value)
    assert states == ["running", "running", "ended", "running"], "the Step after an end begins anew"
    client.ask(property_request("world.env_id"), NOW)
    (reply,) = pair.turn()
    assert isinstance(reply, Replied)
    assert isinstance(property_value(reply.message, "url", False), str)
    client.leave(NOW)
    pair.turn()
    assert not pair.registry.names
    lost = client.connection_lost(ConnectionLostError("url", "gone"))
    assert lost.established
    assert client.state.value == "lost"


@pytest.mark.parametrize(("url", "made"), [("grpc://virtual:1", True), ("grpc://virtual:1?world=w", False)])
def test_only_a_world_that_was_made_for_a_client_is_destroyed_when_it_leaves(url: str, made: bool) -> None:
    # D-5
    session = ClientSession(WorldRequest.of(url, max_message_bytes=1 << 20))
    session.connect(NOW)
    if made:
        session.receive(answer(create_world=pb.CreateWorldResponse(world_name="w")), NOW)
    specs = pb.ActionObservationSpecs()
    specs.observations[1].name, specs.observations[1].dtype = "reward", pb.DOUBLE
    assert isinstance(session.receive(answer(join_world=pb.JoinWorldResponse(specs=specs)), NOW), Joined)
    session.data_to_send()
    session.leave(NOW)
    kinds = [pb.EnvironmentRequest.FromString(data).WhichOneof("payload") for data in session.data_to_send()]
    assert kinds == ["leave_world", "destroy_world"][: 1 + made]


def test_a_server_that_refuses_to_create_worlds_has_one_to_join() -> None:
    session = ClientSession(WorldRequest.of("grpc://virtual:1", max_message_bytes=1 << 20))
    session.connect(NOW)
    session.data_to_send()
    assert session.receive(refusal(Code.UNIMPLEMENTED), NOW) is None
    (request,) = session.data_to_send()
    assert pb.EnvironmentRequest.FromString(request).join_world.world_name == ""
    assert session.state.value == "joining"


def test_a_refused_join_is_a_loss_of_what_was_not_established() -> None:
    session = ClientSession(WorldRequest.of("grpc://virtual:1?world=w", max_message_bytes=1 << 20))
    session.connect(NOW)
    event = session.receive(refusal(), NOW)
    assert isinstance(event, Lost)
    assert isinstance(event.error, RefusedError)
    assert not event.established
    session.connect(NOW)
    assert session.state.value == "joining"


# Lanes where they are as good as worlds


def asking(version: str | None = "1.0") -> ClientSession:
    """A session that has just connected, and would rather have a world of four lanes."""
    request = WorldRequest.of("grpc://virtual:1?kwargs.gravity=1", max_message_bytes=1 << 20, lanes_if_alike=4)
    session = ClientSession(request)
    session.server_version = version
    session.connect(NOW)
    return session


def sent(session: ClientSession) -> list[tuple[str, int | None]]:
    """The kinds of the requests that it sends, and the lanes that a CreateWorld asks for."""
    found = []
    for data in session.data_to_send():
        request = pb.EnvironmentRequest.FromString(data)
        settings = request.create_world.settings
        lanes = settings["num_envs"].int64s.array[0] if "num_envs" in settings else None
        found.append((str(request.WhichOneof("payload")), lanes))
    return found


def says(value: Any) -> bytes:
    """The answer to a question for a property."""
    body = properties_pb2.PropertyResponse()
    body.read_property.value.CopyFrom(pack_tensor(value))
    response = pb.EnvironmentResponse()
    response.extension.type_url, response.extension.value = PROPERTY_RESPONSE_URL, body.SerializeToString()
    return response.SerializeToString()


LEFT = answer(leave_world=pb.LeaveWorldResponse())
MADE = answer(create_world=pb.CreateWorldResponse(world_name="w"))


def test_a_server_that_agrees_to_lanes_is_asked_for_them_and_again_after_a_loss() -> None:
    session = asking()
    assert session.asking
    assert sent(session) == [("leave_world", None)]
    assert session.receive(LEFT, NOW) is None
    assert sent(session) == [("extension", None)]
    assert session.receive(says(4), NOW) is None
    assert sent(session) == [("create_world", 4)]
    assert session.agreed_on_lanes
    assert not session.asking
    session.receive(MADE, NOW)
    session.server_version = None  # so that no property of the world is read
    assert isinstance(session.receive(answer(join_world=pb.JoinWorldResponse(specs=board())), NOW), Joined)
    assert session.request.lanes_if_alike is None
    session.connection_lost(ConnectionLostError("grpc://virtual:1", "gone"))
    sent(session)
    session.connect(NOW)
    assert sent(session) == [("create_world", 4)]


@pytest.mark.parametrize(
    "said",
    [says(3), says(0), says(-1), says("many"), says([4, 4]), says(True), refusal(), LEFT, b""],
    ids=["fewer", "none", "negative", "text", "two", "true", "refused", "another answer", "empty"],
)
def test_whatever_else_a_server_says_of_lanes_a_world_for_each_slot_is_made(said: bytes) -> None:
    session = asking()
    session.receive(LEFT, NOW)
    sent(session)
    session.receive(said, NOW)
    assert sent(session) == [("create_world", None)]
    assert not session.agreed_on_lanes


@pytest.mark.parametrize("left", [LEFT, refusal(), MADE], ids=["answered", "refused", "nonsense"])
def test_another_server_is_asked_for_no_property_whatever_it_says_to_leave_world(left: bytes) -> None:
    session = asking(None)
    session.receive(left, NOW)
    assert sent(session)[1:] == [("create_world", None)]


def test_where_lanes_cannot_be_made_a_world_for_each_slot_is() -> None:
    session = asking()
    for said in (LEFT, says(4096), refusal(Code.INTERNAL)):
        assert session.receive(said, NOW) is None
    assert sent(session) == [("leave_world", None), ("extension", None), ("create_world", 4), ("create_world", None)]
    event = session.receive(refusal(Code.INTERNAL), NOW)
    assert isinstance(event, Lost)
    assert isinstance(event.error, RefusedError)


def test_where_lanes_cannot_be_joined_their_world_is_destroyed_first() -> None:
    session = asking()
    for said in (LEFT, says(4), MADE, refusal()):
        assert session.receive(said, NOW) is None
    assert sent(session)[2:] == [("create_world", 4), ("join_world", None), ("destroy_world", None)]
    assert session.receive(answer(destroy_world=pb.DestroyWorldResponse()), NOW) is None
    assert session.receive(MADE, NOW) is None
    assert sent(session) == [("create_world", None), ("join_world", None)]
    assert isinstance(session.receive(refusal(), NOW), Lost)


def test_a_stream_that_ends_at_any_question_leaves_a_session_that_asks_again() -> None:
    answers = [LEFT, says(4), refusal(), MADE]
    for count in range(len(answers) + 1):
        session = asking()
        for said in answers[:count]:
            session.receive(said, NOW)
        assert not session.connection_lost(ConnectionLostError("grpc://virtual:1", "gone")).established
        sent(session)
        session.connect(NOW)
        assert sent(session) == [("leave_world", None)]


def test_a_server_of_ours_that_refuses_a_property_cannot_be_used() -> None:
    session = ClientSession(WorldRequest.of("grpc://virtual:1?world=w", max_message_bytes=1 << 20))
    session.server_version = "1.0"
    session.connect(NOW)
    assert session.receive(answer(join_world=pb.JoinWorldResponse()), NOW) is None
    event = session.receive(refusal(), NOW)
    assert isinstance(event, Lost)
    assert isinstance(event.error, RefusedError)


def test_answers_of_an_abandoned_episode_mean_nothing(pair: Pair) -> None:
    pair.join()
    client = pair.client
    client.begin({}, NOW)
    pair.turn()
    pair.act()
    late = [pair.server.handle(request) for request in client.data_to_send()]
    client.abandon_episode()
    assert client.state.value == "joined"
    client.begin({}, NOW)
    assert [client.receive(data, NOW) for data in late] == [None]
    assert client.state.value == "resetting"
    assert [type(event) for event in pair.turn()] == [StepAnswered]


def test_answers_to_abandoned_questions_mean_nothing(pair: Pair) -> None:
    pair.join()
    client = pair.client
    client.ask(property_request("world.env_id"), NOW)
    client.abandon_questions()
    client.ask(property_request("world.num_envs"), NOW)
    (reply,) = pair.turn()
    assert isinstance(reply, Replied)
    assert property_value(reply.message, "url", False) == 0


def test_a_refused_step_leaves_the_episode_running_and_a_refused_reset_leaves_none() -> None:
    session = joined()
    assert session.world is not None
    session.begin({}, NOW)
    event = session.receive(refusal(), NOW)
    assert isinstance(event, Refused)
    assert session.state.value == "joined"
    assert session.receive(answer(step=pb.StepResponse(state=pb.RUNNING)), NOW) is None, "the Step after it is stale"
    session.begin({}, NOW, reset=False)
    assert isinstance(session.receive(answer(step=pb.StepResponse(state=pb.RUNNING)), NOW), StepAnswered)
    session.step(session.world.writer.first_step, NOW)
    assert isinstance(session.receive(refusal(), NOW), Refused)
    assert session.state.value == "running"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xff", "no EnvironmentResponse"),
        (answer(step=pb.StepResponse()), "an answer to no request"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_lost(data: bytes, said: str) -> None:
    session = joined()
    event = session.receive(data, NOW)
    assert isinstance(event, Lost)
    assert isinstance(event.error, PeerError)
    assert said in str(event.error)
    assert event.established
    assert session.receive(data, NOW) is None, "what comes after the loss is dropped"


def test_every_cut_of_a_join_leaves_a_session_that_can_connect_again() -> None:
    for count in itertools.count():
        pair = Pair()
        pair.client.connect(NOW)
        for _ in range(count):
            for request in pair.client.data_to_send():
                pair.client.receive(pair.server.handle(request), NOW)
        done = pair.client.state.value == "joined"
        assert pair.client.connection_lost(ConnectionLostError("url", "cut")).established == done
        again = direct_session(pair.registry, "test")
        pair.server = again
        pair.join()
        if done:
            return


def test_a_session_that_is_given_up_leaves_its_world_and_expects_nothing_more() -> None:
    session = joined()
    session.begin({}, NOW)
    session.leave(NOW)
    event = session.connection_lost(RemoteTimeoutError("url", "late"))
    assert event == Lost(event.error, True)
    kinds = [pb.EnvironmentRequest.FromString(data).WhichOneof("payload") for data in session.data_to_send()]
    assert kinds == ["reset", "step", "leave_world", "destroy_world"]
    assert session.receive(pb.EnvironmentResponse().SerializeToString(), NOW) is None


def test_a_request_that_is_too_large_is_not_sent_and_gets_no_answer() -> None:
    session = joined()
    settings = {"large": pb.Tensor(uint8s={"array": bytes(1 << 20)})}
    with pytest.raises(SettingError, match="larger than max_message_bytes"):
        session.ask(pb.EnvironmentRequest(reset=pb.ResetRequest(settings=settings)), NOW)
    assert session.data_to_send() == []
    assert isinstance(session.receive(pb.EnvironmentResponse().SerializeToString(), NOW), Lost)  # an answer to nothing


def test_a_request_without_a_world_says_so() -> None:
    session = ClientSession(WorldRequest.of("grpc://virtual:1", max_message_bytes=1 << 20))
    with pytest.raises(PeerError, match="there is no connection"):
        session.begin({}, NOW)


@pytest.mark.parametrize("name", ["client_session", "session_states", "join_sequence", "joined_world", "steps"])
def test_the_session_imports_nothing_that_waits(name: str) -> None:
    tree = ast.parse((Path(module.__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    assert not names & {"socket", "selectors", "threading", "asyncio", "time", "queue", "bridge.core.clock"}
    assert not {each for each in names if "poller" in each or "connect" in each}
