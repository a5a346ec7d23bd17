"""Random, reordered, truncated and garbled requests never break a session (D-1, D-2)."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from bridge import Limits
from bridge.core.encoding.names import CALL_REQUEST_URL, PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor
from bridge.core.server.session import TRANSITIONS, SessionEvent, SessionState
from bridge.errors import Code
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.parallel_envs import Relay
from tests.support import direct_registry, direct_session, gym_source, parallel_source

STEP_EVENTS = {
    pb.RUNNING: (SessionEvent.STEP_BEGAN, SessionEvent.STEP_RAN),
    pb.TERMINATED: (SessionEvent.STEP_TERMINATED,),
    pb.INTERRUPTED: (SessionEvent.STEP_INTERRUPTED,),
}
EVENTS = {
    "create_world": SessionEvent.CREATE_WORLD,
    "join_world": SessionEvent.JOIN_WORLD,
    "reset": SessionEvent.RESET,
    "leave_world": SessionEvent.LEAVE_WORLD,
    "destroy_world": SessionEvent.DESTROY_WORLD,
    "extension": SessionEvent.EXTENSION,
}

NUMBER, TEXT, BYTES = pack_tensor(1), pack_tensor("ann"), pack_tensor(np.array([1, 255], np.uint8))
EMPTY = pb.Tensor()
ODD = pb.Tensor(shape=[-1, -1], int64s=pb.Tensor.Int64Array(array=[1, 2]))
SETTINGS = [
    {},
    {},
    {"seed": NUMBER},
    {"seed": pack_tensor(-1)},
    {"seed": TEXT},
    {"seed": EMPTY},
    {"options": BYTES},
    {"level": NUMBER},
    {"num_envs": pack_tensor(2)},
    {"num_envs": ODD},
    {"kwargs.length": pack_tensor(2)},
    {"kwargs.width": NUMBER},
    {"agent": TEXT},
    {"agent": NUMBER},
]
NAMES = ["", "", "nowhere"]
ACTIONS = [{}, {1: NUMBER}, {1: NUMBER}, {1: pack_tensor(7)}, {9: NUMBER}, {1: TEXT}, {1: pack_tensor([1])}, {1: ODD}]
WANTED = [[], [1], [1, 2, 1], [99]]
KEYS = ["", "server", "server.version", "world", "world.name", "world.attributes.length", "world.attributes.no", "no"]


def extension(url, body):
    request = pb.EnvironmentRequest()
    request.extension.type_url = url
    request.extension.value = body if isinstance(body, bytes) else body.SerializeToString()
    return request


def property_requests():
    for key in KEYS:
        yield properties_pb2.PropertyRequest(read_property={"key": key})
        yield properties_pb2.PropertyRequest(list_property={"key": key})
        for value in (NUMBER, BYTES, EMPTY):
            yield properties_pb2.PropertyRequest(write_property={"key": key, "value": value})
    yield properties_pb2.PropertyRequest()


def pools():
    """Requests of each kind, lawful ones and others."""
    yield [pb.EnvironmentRequest(create_world=pb.CreateWorldRequest(settings=s)) for s in SETTINGS]
    for name in NAMES:
        yield [pb.EnvironmentRequest(join_world=pb.JoinWorldRequest(world_name=name, settings=s)) for s in SETTINGS]
        yield [pb.EnvironmentRequest(reset_world=pb.ResetWorldRequest(world_name=name, settings=s)) for s in SETTINGS]
    for _ in range(8):
        yield [
            pb.EnvironmentRequest(step=pb.StepRequest(actions=actions, requested_observations=wanted))
            for actions in ACTIONS
            for wanted in WANTED
        ]
    for _ in range(2):
        yield [pb.EnvironmentRequest(reset=pb.ResetRequest(settings=s)) for s in SETTINGS]
        yield [extension(PROPERTY_REQUEST_URL, body) for body in property_requests()]
    yield [
        pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()),
        pb.EnvironmentRequest(destroy_world=pb.DestroyWorldRequest()),
        pb.EnvironmentRequest(destroy_world=pb.DestroyWorldRequest(world_name="nowhere")),
    ]
    yield [
        extension(CALL_REQUEST_URL, bridge_pb2.CallRequest(name="length")),
        extension(CALL_REQUEST_URL, bridge_pb2.CallRequest(name="length", lanes=[5])),
        extension(CALL_REQUEST_URL, bridge_pb2.CallRequest(name="_secret")),
        extension(CALL_REQUEST_URL, bridge_pb2.CallRequest(name="nothing")),
        extension(CALL_REQUEST_URL, b"\xff\xff"),
        extension(PROPERTY_REQUEST_URL, b"\x0a\xff"),
        extension("type.googleapis.com/nobody.Knows", b""),
        pb.EnvironmentRequest(),
    ]


POOLS = [[request.SerializeToString() for request in pool] for pool in pools()]


def garbled(rng):
    """A request's bytes: mostly whole, else cut short, with a byte changed, two run together, or noise."""
    data = bytearray(rng.choice(rng.choice(POOLS)))
    how = rng.choice(["whole"] * 12 + ["cut", "changed", "joined", "noise"])
    if how == "cut":
        return bytes(data[: rng.randint(0, len(data))])
    if how == "changed" and data:
        data[rng.randrange(len(data))] = rng.randrange(256)
    elif how == "joined":
        data += rng.choice(rng.choice(POOLS))
    elif how == "noise":
        return bytes(rng.randrange(256) for _ in range(rng.randrange(40)))
    return bytes(data)


def check(session, data, made):
    """Give a session a request; hold its answer and its state against the table."""
    before = session.state
    answer = session.handle(data)
    assert isinstance(answer, bytes)
    response = pb.EnvironmentResponse.FromString(answer)
    kind = response.WhichOneof("payload")
    event(f"{before.name} {kind}")
    if kind == "error":
        assert response.error.code in set(Code) - {Code.OK}
        assert response.error.code != Code.INTERNAL, response.error.message
        assert response.error.message
        assert session.state is before, "a failed request is a no-op (D-2)"
        return
    asked = pb.EnvironmentRequest.FromString(data).WhichOneof("payload")
    assert kind == asked, "the answer is of the request's kind (D-1)"
    if kind == "step":
        allowed = [TRANSITIONS[before, e] for e in STEP_EVENTS[response.step.state] if (before, e) in TRANSITIONS]
        if before is not SessionState.RUNNING:
            assert response.step.state == pb.RUNNING
        assert session.state in allowed
    elif kind == "reset_world":
        assert session.state in (before, TRANSITIONS[before, SessionEvent.RESET_WORLD])
    else:
        assert session.state is TRANSITIONS[before, EVENTS[kind]]
    if kind == "create_world":
        made.append(response.create_world.world_name)


def begin(session, world, made):
    """Join and begin a sequence."""
    for request in (
        pb.EnvironmentRequest(join_world=pb.JoinWorldRequest(world_name=world)),
        pb.EnvironmentRequest(step=pb.StepRequest()),
    ):
        check(session, request.SerializeToString(), made)


def registry(source):
    return direct_registry(source, Limits(max_worlds=4, reset_world_timeout=0.001))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(playing=st.booleans(), seed=st.integers(0, 2**32))
def test_every_request_gets_one_lawful_answer(playing, seed):
    """D-1, D-2: three connections on one server; no session lands in a state that its table does not allow."""
    hub = registry(gym_source(lambda length=3: CountingEnv(length)))
    sessions, made, rng = [direct_session(hub) for _ in range(3)], [], random.Random(seed)
    try:
        if playing:
            begin(sessions[0], "", made)
            check(sessions[1], pb.EnvironmentRequest(create_world=pb.CreateWorldRequest()).SerializeToString(), made)
            begin(sessions[1], made[0], made)
        for _ in range(60):
            check(rng.choice(sessions), garbled(rng), made)
        for session in sessions:  # whatever came, the connection is of use (D-2)
            check(session, pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()).SerializeToString(), made)
            assert session.state is SessionState.UNJOINED
    finally:
        for session in sessions:
            session.close()
            assert session.state is SessionState.CLOSED
        hub.close()
    assert hub.names == []


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
@pytest.mark.slow
def test_every_request_gets_one_lawful_answer_in_a_world_of_several_agents(seed):
    """D-1, D-2, D-22: also where each Step waits for others that may never come."""
    hub = registry(parallel_source(lambda **kwargs: Relay(), missing_agent="default", agent_timeout=0.001))
    sessions, made, rng = [direct_session(hub) for _ in range(4)], [], random.Random(seed)
    try:
        for session in sessions[:2]:
            begin(session, "", made)
        for _ in range(60):
            check(rng.choice(sessions), garbled(rng), made)
    finally:
        for session in sessions:
            session.close()
        hub.close()
    assert hub.names == []
