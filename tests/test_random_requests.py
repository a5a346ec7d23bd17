"""Random, reordered, truncated and garbled requests never break a session (D-1, D-2)."""

import threading

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from bridge.errors import Code
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.server.limits import Limits
from bridge.server.registry import Registry
from bridge.session import TRANSITIONS, Event, Session, State
from bridge.tensors import pack_tensor
from bridge.testing import CountingEnv
from bridge.wire import CALL_REQUEST_URL, PROPERTY_REQUEST_URL
from bridge.worlds.multi_agent import Teamwork
from bridge.worlds.multi_agent_source import ParallelSource
from bridge.worlds.source import EnvSource
from tests.parallel_envs import Relay

STEP_EVENTS = {
    pb.RUNNING: (Event.STEP_BEGAN, Event.STEP_RAN),
    pb.TERMINATED: (Event.STEP_TERMINATED,),
    pb.INTERRUPTED: (Event.STEP_INTERRUPTED,),
}
EVENTS = {
    "create_world": Event.CREATE_WORLD,
    "join_world": Event.JOIN_WORLD,
    "reset": Event.RESET,
    "leave_world": Event.LEAVE_WORLD,
    "destroy_world": Event.DESTROY_WORLD,
    "extension": Event.EXTENSION,
}

tensors = st.one_of(
    st.integers(-3, 3).map(pack_tensor),
    st.sampled_from(["", "ann", "bob", "CartPole-v1"]).map(pack_tensor),
    st.floats(width=32).map(pack_tensor),
    st.lists(st.integers(0, 255), max_size=4).map(lambda items: pack_tensor(bytes_array(items))),
    st.builds(
        lambda shape, items: pb.Tensor(shape=shape, int64s=pb.Tensor.Int64Array(array=items)),
        st.lists(st.integers(-2, 3), max_size=3),
        st.lists(st.integers(-1, 3), max_size=6),
    ),
    st.just(pb.Tensor()),
)
names = st.sampled_from(["", "", "", "nowhere", "made"])
setting_names = st.sampled_from(["seed", "options", "num_envs", "env_id", "agent", "kwargs.length", "level"])
some_settings = st.one_of(st.just({}), st.dictionaries(setting_names, tensors, max_size=2))
uids = st.integers(0, 9)
keys = st.sampled_from(["", "server", "server.version", "world", "world.name", "world.attributes.length", "nothing"])
properties = st.one_of(
    keys.map(lambda key: properties_pb2.PropertyRequest(read_property=properties_pb2.ReadPropertyRequest(key=key))),
    keys.map(lambda key: properties_pb2.PropertyRequest(list_property=properties_pb2.ListPropertyRequest(key=key))),
    st.builds(
        lambda key, value: properties_pb2.PropertyRequest(
            write_property=properties_pb2.WritePropertyRequest(key=key, value=value)
        ),
        keys,
        tensors,
    ),
    st.just(properties_pb2.PropertyRequest()),
)
calls = st.sampled_from(["length", "_secret", "nothing", "close_nothing"]).map(
    lambda name: bridge_pb2.CallRequest(name=name, lanes=[5] if name == "length" else [])
)


def bytes_array(items):
    import numpy as np

    return np.array(items, np.uint8)


def extension(url, body):
    request = pb.EnvironmentRequest()
    request.extension.type_url = url
    request.extension.value = body if isinstance(body, bytes) else body.SerializeToString()
    return request


def wrapped(member, message, **fields):
    return st.fixed_dictionaries(fields).map(lambda found: pb.EnvironmentRequest(**{member: message(**found)}))


lawful_step = st.just(
    pb.EnvironmentRequest(step=pb.StepRequest(actions={1: pack_tensor(1)}, requested_observations=[1, 2, 1]))
)
requests = st.one_of(
    lawful_step,
    lawful_step,
    st.just(pb.EnvironmentRequest(join_world=pb.JoinWorldRequest())),
    wrapped(
        "step",
        pb.StepRequest,
        actions=st.dictionaries(uids, tensors, max_size=3),
        requested_observations=st.lists(uids, max_size=3),
    ),
    wrapped("create_world", pb.CreateWorldRequest, settings=some_settings),
    wrapped("join_world", pb.JoinWorldRequest, world_name=names, settings=some_settings),
    wrapped("reset", pb.ResetRequest, settings=some_settings),
    wrapped("reset_world", pb.ResetWorldRequest, world_name=names, settings=some_settings),
    wrapped("leave_world", pb.LeaveWorldRequest),
    wrapped("destroy_world", pb.DestroyWorldRequest, world_name=names),
    properties.map(lambda body: extension(PROPERTY_REQUEST_URL, body)),
    calls.map(lambda body: extension(CALL_REQUEST_URL, body)),
    st.binary(max_size=8).map(lambda body: extension(CALL_REQUEST_URL, body)),
    st.binary(max_size=8).map(lambda body: extension("type.googleapis.com/nobody.Knows", body)),
    st.just(pb.EnvironmentRequest()),
)


@st.composite
def garbled(draw):
    """A request's bytes: whole, cut short, with a byte changed, two run together, or noise."""
    data = bytearray(draw(requests).SerializeToString())
    how = draw(st.sampled_from(["whole"] * 8 + ["cut", "changed", "noise", "joined"]))
    if how == "cut":
        data = data[: draw(st.integers(0, len(data)))]
    elif how == "changed" and data:
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    elif how == "noise":
        data = draw(st.binary(max_size=40))
    elif how == "joined":
        data += draw(requests).SerializeToString()
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
        if before is not State.RUNNING:
            assert response.step.state == pb.RUNNING
        assert session.state in allowed
    elif kind == "reset_world":
        assert session.state in (before, TRANSITIONS[before, Event.RESET_WORLD])
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
    return Registry(source, Limits(max_worlds=4), threading.RLock(), reset_world_timeout=0.001)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(playing=st.booleans(), script=st.lists(st.tuples(st.integers(0, 2), garbled()), min_size=15, max_size=50))
def test_every_request_gets_one_lawful_answer(playing, script):
    """D-1, D-2: three connections on one server; no session lands in a state that its table does not allow."""
    hub = registry(EnvSource(lambda length=3: CountingEnv(length)))
    sessions, made = [Session(hub) for _ in range(3)], []
    try:
        if playing:
            begin(sessions[0], "", made)
            check(sessions[1], pb.EnvironmentRequest(create_world=pb.CreateWorldRequest()).SerializeToString(), made)
            begin(sessions[1], made[0], made)
        for number, data in script:
            check(sessions[number], data, made)
        for session in sessions:  # whatever came, the connection is of use (D-2)
            check(session, pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()).SerializeToString(), made)
            assert session.state is State.UNJOINED
    finally:
        for session in sessions:
            session.close()
            assert session.state is State.CLOSED
        hub.close()
    assert hub.names == []


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=st.lists(st.tuples(st.integers(0, 3), garbled()), min_size=15, max_size=40))
def test_every_request_gets_one_lawful_answer_in_a_world_of_several_agents(script):
    """D-1, D-2, D-22: also where each Step waits for others that may never come."""
    hub = registry(ParallelSource(lambda **kwargs: Relay(), Teamwork("default", agent_timeout=0.001)))
    sessions, made = [Session(hub) for _ in range(4)], []
    try:
        for session in sessions[:2]:
            begin(session, "", made)
        for number, data in script:
            check(sessions[number], data, made)
    finally:
        for session in sessions:
            session.close()
        hub.close()
    assert hub.names == []
