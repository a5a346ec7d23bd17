"""One environment as a world, beside the same environment played directly."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge.core.encoding import values
from bridge.core.encoding.properties import read_encoded
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code, RequestError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, FailingEnv, LocalRuntime, SpaceEnv
from tests.support import TAXI, assert_identical, direct_world, gym_source, layout_of


def world_of(env):
    return direct_world(gym_source(lambda: env))


def names(agent):
    return {spec.name: uid for uid, spec in agent.observations.items()}


def look(agent, *wanted):
    uids = names(agent)
    found = agent.observe([uids[name] for name in wanted])
    return [np.asarray(found[uids[name]])[()] for name in wanted]


def info_of(agent):
    return values.decode(look(agent, "info")[0].tobytes())


def encoded(value):
    return pack_tensor(np.frombuffer(values.encode(value), np.uint8))


def refusal(function, *args):
    with pytest.raises(RequestError) as caught:
        function(*args)
    return caught.value


def same(one, other):
    return values.encode(one) == values.encode(other)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", TAXI, "Blackjack-v1", "FrozenLake-v1"])
def test_a_world_plays_as_its_environment_does(env_id):
    # D-13, D-21
    local, agent = gymnasium.make(env_id), world_of(gymnasium.make(env_id)).join({})
    agent.reset({"seed": pack_tensor(3)}, False)
    layout, actions = layout_of(local.observation_space, "observation"), layout_of(local.action_space, "action")
    wanted = [spec.name for spec in layout.specs]
    local.action_space.seed(0)
    observation, info = local.reset(seed=3)
    assert agent.begin() == pb.RUNNING
    ended = False
    for _ in range(300):
        assert_identical(layout.unpack([np.asarray(part) for part in look(agent, *wanted)]), observation)
        assert same(info_of(agent), info)
        if ended:
            observation, info = local.reset()
            assert agent.begin() == pb.RUNNING
            assert look(agent, "reward", "discount", "terminated", "truncated") == [0.0, 1.0, False, False]
            ended = False
            continue
        action = local.action_space.sample()
        observation, reward, terminated, truncated, info = local.step(action)
        state = agent.step(dict(zip(agent.actions, actions.pack_action(action), strict=True)))
        ended = terminated or truncated
        assert state == (pb.TERMINATED if terminated else pb.INTERRUPTED if truncated else pb.RUNNING)
        expected = [float(reward), float(not terminated), terminated, truncated]
        assert look(agent, "reward", "discount", "terminated", "truncated") == expected


def test_the_environment_gets_actions_as_it_gets_them_locally():
    seen = []

    class Watching(CountingEnv):
        def step(self, action):
            seen.append(action)
            return super().step(action)

    space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (2,), np.float16), c=spaces.Text(3))
    agent = world_of(Watching(action_space=space)).join({})
    agent.begin()
    action = {"a": 2, "b": [0.5, -0.5], "c": "abc"}
    agent.step(dict(zip(agent.actions, layout_of(space, "action").pack_action(action), strict=True)))
    assert list(seen[0]) == ["a", "b", "c"]
    assert type(seen[0]["a"]) is np.int64
    assert seen[0]["b"].dtype == np.float16
    assert seen[0]["b"].flags.writeable
    assert type(seen[0]["c"]) is str


def test_seed_and_options_reach_the_reset_once():
    agent = world_of(SpaceEnv()).join({})
    agent.reset({"seed": pack_tensor(3), "options": encoded({"level": [1, None]})}, False)
    agent.begin()
    assert info_of(agent)["options"] == {"level": [1, None]}
    agent.begin()
    assert "options" not in info_of(agent)


def test_one_agent_sits_at_a_time():
    # D-6
    world = world_of(CountingEnv())
    agent = world.join({})
    assert world.agents == 1
    assert refusal(world.join, {}).code == Code.RESOURCE_EXHAUSTED
    agent.leave()
    assert world.agents == 0
    other = world.join({})
    agent.leave()  # of one that left already
    assert world.agents == 1
    other.leave()


def test_every_call_of_the_environment_is_made_by_its_executor():
    calls = []

    class Executor:
        depth = 0

        async def run(self, function, *args):
            self.depth += 1
            try:
                return function(*args)
            finally:
                self.depth -= 1

        def close(self):
            pass

    executor = Executor()

    class Watching(CountingEnv):
        render_mode = "ansi"
        attribute = 1

        def reset(self, **kwargs):
            calls.append(executor.depth)
            return super().reset(**kwargs)

        def step(self, action):
            calls.append(executor.depth)
            return super().step(action)

        def render(self):
            calls.append(executor.depth)
            return "picture"

        def close(self):
            calls.append(executor.depth)
            super().close()

        def method(self):
            return executor.depth

    runtime = LocalRuntime()
    runtime.executor = executor
    world = direct_world(gym_source(Watching), runtime=runtime)
    agent = world.join({})
    agent.begin()
    agent.step({1: np.int64(0)})
    request = properties_pb2.PropertyRequest()
    request.read_property.key = "world.frame"
    assert agent.properties().runs_environment(request)
    assert read_encoded(agent.answer_property(request).read_property.value) == ["picture"]
    assert values.from_value(agent.call(bridge_pb2.CallRequest(name="method")).results[0]) == 1
    world.close()
    assert calls == [1, 1, 1, 1]


def test_what_the_environment_raises_is_told_with_its_traceback():
    # D-2
    agent = world_of(FailingEnv(fail_in_step=1)).join({})
    agent.begin()
    error = refusal(agent.step, {1: np.int64(0)})
    assert error.code == Code.INTERNAL
    assert "the environment raised TestFailure in step: step 1 fails on purpose" in error.message
    assert "envs.py" in error.message
    assert agent.step({1: np.int64(0)}) == pb.RUNNING


def test_an_environment_that_exits_does_not_end_the_server():
    class Exiting(CountingEnv):
        def step(self, action):
            raise SystemExit(3)

    agent = world_of(Exiting()).join({})
    agent.begin()
    assert "SystemExit in step" in refusal(agent.step, {1: np.int64(0)}).message


def test_a_closed_world_refuses_and_closes_its_environment_once():
    # D-17
    env = CountingEnv()
    world = world_of(env)
    agent = world.join({})
    agent.begin()
    world.close()
    assert env.closed
    env.closed = False
    world.close()
    assert not env.closed
    for call in (agent.begin, lambda: agent.step({1: np.int64(0)})):
        error = refusal(call)
        assert error.code == Code.FAILED_PRECONDITION
        assert "'w' was destroyed; leave, and create or join another" in error.message


def test_an_info_that_does_not_travel_is_left_out_and_noted_once():
    class Chatty(CountingEnv):
        def step(self, action):
            observation, *rest, _ = super().step(action)
            return observation, *rest, {"good": 1, "engine": object()}

    agent = world_of(Chatty()).join({})
    agent.begin()
    agent.step({1: np.int64(0)})
    info, notes, _ = values.decode_info(look(agent, "info")[0].tobytes())
    assert info == {"good": 1}
    assert len(notes) == 1
    assert "info['engine'] is of type object" in notes[0]
    agent.step({1: np.int64(0)})
    assert values.decode_info(look(agent, "info")[0].tobytes()) == ({"good": 1}, [], values.UNCHANGED)


def test_properties_describe_the_environment():
    # D-18
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    agent = world_of(env).join({})
    tree = agent.properties()

    def read(name):
        return unpack_tensor(tree.read(f"world.{name}"))[()]

    assert (read("name"), read("env_id"), read("num_envs"), read("render_mode")) == ("w", "CartPole-v1", 0, "rgb_array")
    assert json.loads(read("action_space")) == {"type": "Discrete", "n": 2, "start": 0, "dtype": "int64"}
    assert json.loads(read("observation_space"))["type"] == "Box"
    assert read_encoded(tree.read("world.metadata")) == env.metadata
    facts = read_encoded(tree.read("world.spec"))
    assert (facts["id"], facts["max_episode_steps"], facts["reward_threshold"]) == ("CartPole-v1", 500, 475.0)
    agent.begin()
    (frame,) = read_encoded(tree.read("world.frame"))
    assert (frame == env.render()).all()
    env.close()


def test_attributes_are_read_and_written_through_the_wrappers():
    env = gymnasium.make("CartPole-v1")
    tree = world_of(env).join({}).properties()
    assert read_encoded(tree.read("world.attributes.gravity")) == [9.8]
    tree.write("world.attributes.gravity", encoded([3.7]))
    assert env.unwrapped.gravity == 3.7
    error = refusal(tree.write, "world.attributes.gravity", encoded(1.0))
    assert error.code == Code.INVALID_ARGUMENT
    assert "expected a list of 1 values, one a lane, got 1.0" in error.message
    for name in ("_np_random", "__class__"):
        assert refusal(tree.read, f"world.attributes.{name}").code == Code.PERMISSION_DENIED
        assert refusal(tree.write, f"world.attributes.{name}", encoded([1])).code == Code.PERMISSION_DENIED


def test_methods_are_called_with_arguments_by_the_codec():
    class Calculator(CountingEnv):
        def add(self, a, *, b):
            return a + b

        def secret(self):
            return object()

    agent = world_of(Calculator()).join({})

    def call(name, *args, **kwargs):
        request = bridge_pb2.CallRequest(name=name, args=values.to_value(list(args)).list)
        request.kwargs.CopyFrom(values.to_value(kwargs).dict)
        return [values.from_value(result) for result in agent.call(request).results]

    (total,) = call("add", np.array([1, 2]), b=np.array([3, 4]))
    assert total.tolist() == [4, 6]
    assert refusal(call, "_add").code == Code.PERMISSION_DENIED
    assert "TypeError" in refusal(call, "add", 1).message
    error = refusal(call, "secret")
    assert error.code == Code.INVALID_ARGUMENT
    assert "result of secret cannot be sent" in error.message
    bad = bridge_pb2.CallRequest(name="add", kwargs=bridge_pb2.Value.Dict(keys=["a"]))
    assert refusal(agent.call, bad).code == Code.INVALID_ARGUMENT


def test_a_custom_space_of_numbers_cannot_be_served():
    env = CountingEnv()
    env.observation_space = spaces.Space((2,), np.float32)
    with pytest.raises(RequestError, match="TransformObservation"):
        world_of(env)
