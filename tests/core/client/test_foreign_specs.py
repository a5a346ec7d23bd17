"""Our client on servers with specs and answers of every kind, written on the public messages (D-24)."""

import warnings

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import tensor_utils
from google.protobuf import any_pb2, struct_pb2

import bridge
from bridge.errors import Code, ConnectionLostError, EnvironmentFailedError, InvalidActionError, PeerError, RefusedError
from tests.scripted_server import EndStream, Refuse, ScriptedServer

REWARD = pb.TensorSpec(name="reward", dtype=pb.DOUBLE)
ACTION = pb.TensorSpec(name="action", dtype=pb.INT64, min={"int64s": {"array": [0]}}, max={"int64s": {"array": [3]}})


def specs(actions=None, **observations):
    """Specs with UIDs from 10 on; `a__b` is nested."""
    named = {
        uid: pb.TensorSpec(name=name.replace("__", "."), **fields)
        for uid, (name, fields) in enumerate(observations.items(), start=10)
    }
    return pb.ActionObservationSpecs(actions=actions or {1: ACTION}, observations={**named, 2: REWARD})


def pack(value, dtype=None):
    return tensor_utils.pack_tensor(value, dtype=dtype)


ZERO = {2: pack(0.0)}


@pytest.fixture
def remote():
    made = []

    def make(server):
        made.append(bridge.make_remote(server.url, timeout=20))
        return made[-1]

    yield make
    for env in made:
        env.close()


def message(**fields):
    content = struct_pb2.Struct()
    content.update(fields)
    packed = any_pb2.Any()
    packed.Pack(content)
    return packed


def test_proto_tensors_arrive_as_messages_and_go_as_messages(remote):
    """D-19, D-24: scalars and arrays of them, nested too."""
    tensor = pb.Tensor(shape=[2])
    tensor.protos.array.extend([message(x=1), message(x=2)])
    single = pb.Tensor()
    single.protos.array.append(message(name="goal"))
    layout = specs(
        {5: pb.TensorSpec(name="order", dtype=pb.PROTO)},
        scene__objects={"dtype": pb.PROTO, "shape": [-1]},
        scene__goal={"dtype": pb.PROTO},
    )
    with ScriptedServer(layout, {**ZERO, 10: tensor, 11: single}) as server:
        env = remote(server)
        objects = env.observation_space["scene"]["objects"]
        assert "PROTO of shape [-1]" in repr(objects)
        observation, _ = env.reset()
        assert env.observation_space.contains(observation)
        content = struct_pb2.Struct()
        assert observation["scene"]["objects"][1].Unpack(content)
        assert content["x"] == 2
        assert observation["scene"]["goal"].Unpack(content)
        assert content["name"] == "goal"
        env.step({"order": content})
        got = struct_pb2.Struct()
        assert server.steps[-1].actions[5].protos.array[0].Unpack(got)
        assert got == content
        with pytest.raises(InvalidActionError):
            env.step({"order": 3})
        env.step(env.action_space.sample())


@pytest.mark.parametrize("shape", [(-1,), (2, -1), (-1, 2), (3, -1, 2)])
def test_a_variable_dimension_may_be_any_one(remote, shape):
    """D-24: read at every length, written at every length, within the scalar range."""
    vary = {"dtype": pb.FLOAT, "shape": shape, "min": {"floats": {"array": [-1]}}, "max": {"floats": {"array": [1]}}}
    action = pb.TensorSpec(name="action", **vary)
    sizes = [4, 0, 1]

    def step(request, number):
        size = sizes[min(number, 3) - 1]
        array = np.full([size if n < 0 else n for n in shape], 0.5, np.float32)
        return pb.StepResponse(state=1, observations={10: pack(array), 2: pack(1.5)})

    with ScriptedServer(specs({1: action}, observation=vary), step=step) as server:
        env = remote(server)
        axis = shape.index(-1)
        observation, _ = env.reset()
        assert np.shape(observation)[axis] == 4
        for size in sizes[1:]:
            array = np.full([size + 1 if n < 0 else n for n in shape], 0.25, np.float32)
            observation, reward, *_ = env.step(array)
            assert np.shape(observation)[axis] == size
            assert reward == 1.5
            sent = tensor_utils.unpack_tensor(server.steps[-1].actions[1])
            np.testing.assert_array_equal(sent, array)
        assert env.action_space.contains(env.action_space.sample())
        for bad in (array * 9, array[..., None]):
            with pytest.raises(InvalidActionError):
                env.step(bad)


def test_text_in_two_dimensions_is_a_tensor_space(remote):
    """D-24."""
    board = np.array([["x", "o"], ["", "ü"]], object)
    with ScriptedServer(
        specs(observation={"dtype": pb.STRING, "shape": [2, 2]}), {**ZERO, 10: pack(board.astype(str))}
    ) as server:
        env = remote(server)
        observation, _ = env.reset()
        assert observation.tolist() == board.tolist()
        assert env.observation_space.contains(observation)
        assert not env.observation_space.contains(np.array([["x", "o"]], object))
        assert env.observation_space.contains(env.observation_space.sample())


def test_a_missing_reward_is_zero_and_is_said_once(remote):
    """D-24: also where the client connects a second time."""
    bare = pb.ActionObservationSpecs(actions={1: ACTION}, observations={9: pb.TensorSpec(name="seen", dtype=pb.INT32)})

    def lose_the_third(request, number):
        if number == 3:
            raise EndStream
        return server.running(request)

    with ScriptedServer(bare, {9: pack(np.int32(7))}, step=lose_the_third) as server:
        with pytest.warns(RuntimeWarning, match="no observation named reward: every reward is") as said:
            env = remote(server)
        assert len(said) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            env.reset()
            assert env.step(0)[1] == 0.0
            with pytest.raises(ConnectionLostError):
                env.step(0)
            env.reset()
            assert env.step(0)[0] == {"seen": 7}


def test_new_uids_at_a_reset_are_taken(remote):
    """D-7, D-14, D-24: the same specs under other numbers; the episode begins with the seed that was asked for."""
    seen = {"dtype": pb.INT32}
    before = specs(observation=seen)
    after = pb.ActionObservationSpecs(
        actions={77: ACTION}, observations={5: pb.TensorSpec(name="observation", **seen), 6: REWARD}
    )
    values = {10: pack(np.int32(1)), 2: pack(0.0), 5: pack(np.int32(2)), 6: pack(0.5)}

    def step(request, number):
        current = after if server.resets else before
        for uid in (*request.requested_observations, *request.actions):
            if uid not in current.observations and uid not in current.actions:
                raise Refuse(int(Code.INVALID_ARGUMENT), f"unknown UID {uid}")
        return pb.StepResponse(state=1, observations={uid: values[uid] for uid in request.requested_observations})

    with ScriptedServer(before, step=step, reset=lambda *_: pb.ResetResponse(specs=after)) as server:
        env = remote(server)
        assert env.reset(seed=4)[0] == 2
        assert [tensor_utils.unpack_tensor(request.settings["seed"]) for request in server.resets] == [4, 4]
        assert env.step(1)[:2] == (2, 0.5)
        assert list(server.steps[-1].actions) == [77]
        env.reset()
        assert len(server.resets) == 3


def test_specs_that_change_at_a_reset_are_told_one_by_one(remote):
    """D-14, D-24: what was, what is, what came and what went."""
    before = specs(observation={"dtype": pb.INT32}, map={"dtype": pb.FLOAT, "shape": [4]})
    after = specs(map={"dtype": pb.FLOAT, "shape": [5]}, extra={"dtype": pb.BOOL})
    with ScriptedServer(
        before,
        {**ZERO, 10: pack(np.int32(1)), 11: pack(np.zeros(4, np.float32))},
        reset=lambda _, number: pb.ResetResponse(specs=before if number == 1 else after),
    ) as server:
        env = remote(server)
        env.reset()
        with pytest.raises(PeerError) as told:
            env.reset()
        for part in (
            "the observation 'observation' is gone",
            "the observation 'map' was FLOAT of shape [4], and is FLOAT of shape [5]",
            "the observation 'extra' is new",
        ):
            assert part in str(told.value)


def test_uids_that_change_for_ever_are_an_error_and_no_loop(remote):
    """D-7: nothing hangs."""
    first = 100

    def reset(request, number):
        fresh = pb.ActionObservationSpecs(actions={1: ACTION}, observations={2: REWARD})
        fresh.observations[first + number].CopyFrom(pb.TensorSpec(name="observation", dtype=pb.INT32))
        return pb.ResetResponse(specs=fresh)

    def step(request, number):
        return pb.StepResponse(state=1, observations={uid: pack(np.int32(0)) for uid in request.requested_observations})

    with ScriptedServer(specs(observation={"dtype": pb.INT32}), step=step, reset=reset) as server:
        env = remote(server)
        with pytest.raises(PeerError, match="other UIDs at every Reset"):
            env.reset()


@pytest.mark.parametrize("code", [code for code in Code if code])
def test_an_error_of_every_code_is_raised_with_its_name_and_the_connection_goes_on(remote, code):
    """D-2, D-24."""

    def step(request, number):
        if number == 2:
            raise Refuse(int(code), "the winch is stuck")
        return server.running(request)

    with ScriptedServer(specs(observation={"dtype": pb.INT32}), {**ZERO, 10: pack(np.int32(5))}, step) as server:
        env = remote(server)
        env.reset()
        with pytest.raises(RefusedError, match=f"answered {code.name}: the winch is stuck") as refused:
            env.step(0)
        assert refused.value.code == code
        assert isinstance(refused.value, EnvironmentFailedError) == (code is Code.INTERNAL)
        assert env.step(0)[0] == 5


def test_an_error_of_a_code_that_is_none_is_still_an_error(remote):
    """D-24."""

    def step(request, number):
        raise Refuse(4711, "")

    with ScriptedServer(specs(observation={"dtype": pb.INT32}), step=step) as server:
        env = remote(server)
        with pytest.raises(RefusedError, match="code 4711: no message"):
            env.reset()


@pytest.mark.parametrize("when", ["reset", "step"])
def test_a_stream_that_ends_is_an_error_and_the_next_reset_connects_again(remote, when):
    """D-24."""

    def step(request, number):
        if number == (1 if when == "reset" else 2):
            raise EndStream
        return server.running(request)

    with ScriptedServer(specs(observation={"dtype": pb.INT32}), {**ZERO, 10: pack(np.int32(5))}, step) as server:
        env = remote(server)
        if when == "step":
            env.reset()
        with pytest.raises(ConnectionLostError, match="the server ended the stream"):
            env.reset() if when == "reset" else env.step(0)
        assert env.reset()[0] == 5
        assert env.step(0)[0] == 5
