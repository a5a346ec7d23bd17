"""The public `dm-env-rpc` client plays on our server, beside a local copy of the environment (issue 2; D-13, D-21)."""

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_adaptor, error, spec_manager, tensor_utils
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public
from gymnasium import spaces

from bridge import serve_gym
from bridge.testing import CountingEnv
from tests.peers import PublicClient
from tests.support import assert_identical, sampled

ALL = dm_env_adaptor.AutoObservations.REQUEST_ALL_OBSERVATIONS


@pytest.fixture(scope="module")
def server():
    with serve_gym(["CartPole-v1", "Pendulum-v1", "Taxi-v4", "Blackjack-v1"]) as server:
        yield server


@pytest.fixture
def client(server):
    client = PublicClient(server)
    yield client
    client.close()


def played(env, adaptor, connection, steps, seed, action_name="action"):
    """Play both side by side; return how often each kind of end came.

    Every transition is held against the local one: observation, step type, reward, discount.
    """
    ends = {"terminated": 0, "truncated": 0, "both": 0, "reset": 0}
    connection.send(public.ResetRequest(settings={"seed": tensor_utils.pack_tensor(seed)}))
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    step = adaptor.step({})
    first = True
    for index in range(steps):
        assert_identical(np.asarray(step.observation["observation"]), np.asarray(observation))
        if first:
            assert step.step_type is dm_env.StepType.FIRST
            assert step.reward is None
            assert step.discount is None
            first = False
        if step.last() or index % 701 == 700:
            observation, _ = env.reset()
            if step.last():
                step = adaptor.step({action_name: env.action_space.sample()})  # D-9: this action is ignored
            else:
                step = adaptor.reset()
                ends["reset"] += 1
            first = True
            continue
        action = env.action_space.sample()
        step = adaptor.step({action_name: action})
        observation, reward, terminated, truncated, _ = env.step(action)
        assert step.reward == reward
        assert type(step.reward) is np.float64 or np.asarray(step.reward).dtype == np.float64
        assert step.discount == (0.0 if terminated else 1.0)  # D-21
        assert step.last() == (terminated or truncated)
        if step.last():
            ends["both" if terminated and truncated else "terminated" if terminated else "truncated"] += 1
    return ends


@pytest.mark.parametrize(
    ("env_id", "limit", "expected"),
    sampled(
        [
            ("CartPole-v1", 15, {"terminated", "truncated"}),
            ("CartPole-v1", 500, {"terminated"}),
            ("Pendulum-v1", 200, {"truncated"}),
            ("Taxi-v4", 200, {"truncated"}),
        ],
        4,
        slow=3,
    ),
)
def test_the_public_client_plays_as_the_environment_plays_locally(server, client, env_id, limit, expected):
    local = gymnasium.make(env_id, max_episode_steps=limit)
    adaptor, world = dm_env_adaptor.create_and_join_world(
        client.connection,
        create_world_settings={"env_id": env_id, "kwargs.max_episode_steps": limit},
        join_world_settings={},
    )
    assert world in server.worlds
    ends = played(local, adaptor, client.connection, 2000, seed=11)
    assert {kind for kind, count in ends.items() if count and kind not in ("reset", "both")} == expected
    assert sum(ends.values()) > 8
    adaptor.close()
    local.close()


def test_truncation_is_interrupted_with_discount_one_and_termination_terminated_with_zero(client):
    # D-13, D-21, on the wire
    client.join(
        client.send(
            public.CreateWorldRequest(
                settings={
                    "env_id": tensor_utils.pack_tensor("CartPole-v1"),
                    "kwargs.max_episode_steps": tensor_utils.pack_tensor(12),
                }
            )
        ).world_name,
        gymnasium=True,
    )
    seen = set()
    wanted = ("reward", "discount", "terminated", "truncated")
    before = public.TERMINATED
    for index in range(400):
        # Left all the time ends by termination in about ten steps, left and right by truncation.
        state, got = client.step(*wanted, action=0 if index < 200 else index % 2)
        assert state == public.RUNNING or before == public.RUNNING  # never two ends in a row
        if state == public.TERMINATED:
            assert (got["terminated"], got["discount"]) == (True, 0.0)
        elif state == public.INTERRUPTED:
            assert (got["terminated"], got["truncated"], got["discount"]) == (False, True, 1.0)
        else:
            assert (got["terminated"], got["truncated"], got["discount"]) == (False, False, 1.0)
        seen.add(state)
        before = state
    assert seen == {public.RUNNING, public.TERMINATED, public.INTERRUPTED}


def test_the_public_client_reads_our_specs(client):
    adaptor, _ = dm_env_adaptor.create_and_join_world(
        client.connection,
        create_world_settings={"env_id": "Pendulum-v1"},
        join_world_settings={"gymnasium": True},
        requested_observations=["observation", "reward", "discount"],
    )
    action = adaptor.action_spec()["action"]
    assert (action.shape, action.dtype, action.minimum, action.maximum) == ((1,), np.float32, -2.0, 2.0)
    observation = adaptor.observation_spec()["observation"]
    assert (observation.shape, observation.dtype) == ((3,), np.float32)
    assert adaptor.reward_spec().dtype == np.float64
    discount = adaptor.discount_spec()
    assert (discount.minimum, discount.maximum) == (0.0, 1.0)
    adaptor.close()


def test_nested_spaces_are_nested_for_the_public_client():
    # D-7
    space = spaces.Dict(arm=spaces.Dict(left=spaces.Discrete(2), right=spaces.Box(-1, 1, (2,))), name=spaces.Text(3))
    seen = []

    class Nested(CountingEnv):
        def __init__(self):
            super().__init__(action_space=space)

        def step(self, action):
            seen.append(action)
            return super().step(action)

    with serve_gym(Nested) as server:
        client = PublicClient(server)
        adaptor, _ = dm_env_adaptor.create_and_join_world(client.connection, {}, {})
        adaptor.reset()
        right = np.array([0.5, -0.5], np.float32)
        step = adaptor.step({"action": {"arm": {"left": 1, "right": right}, "name": "abc"}})
        assert step.reward == 1.0
        assert_identical(seen, [{"arm": {"left": 1, "right": right}, "name": "abc"}])
        adaptor.close()
        client.close()


def test_blackjacks_tuple_is_played(client):
    adaptor, _ = dm_env_adaptor.create_and_join_world(client.connection, {"env_id": "Blackjack-v1"}, {})
    local = gymnasium.make("Blackjack-v1")
    client.send(public.ResetRequest(settings={"seed": tensor_utils.pack_tensor(2)}))
    local.action_space.seed(2)
    observation, _ = local.reset(seed=2)
    step = adaptor.step({})
    for _ in range(300):
        got = step.observation["observation"]
        assert tuple(got[str(index)] for index in range(3)) == tuple(observation)
        if step.last():
            observation, _ = local.reset()
            step = adaptor.step({})
            continue
        action = local.action_space.sample()
        step = adaptor.step({"action": action})
        observation, reward, terminated, *_ = local.step(action)
        assert (step.reward, step.discount, step.last()) == (reward, 1.0 - terminated, terminated)
    adaptor.close()


def test_a_world_of_lanes_is_played_by_the_public_client():
    with serve_gym("CartPole-v1", num_envs=3) as server:
        client = PublicClient(server)
        adaptor, _ = dm_env_adaptor.create_and_join_world(
            client.connection, {}, {}, requested_observations=["observation", "reward", "terminated", "truncated"]
        )
        local = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
        client.send(public.ResetRequest(settings={"seed": tensor_utils.pack_tensor(5)}))
        observations, _ = local.reset(seed=5)
        local.action_space.seed(0)
        step = adaptor.step({})
        for _ in range(200):
            assert_identical(step.observation["observation"], observations)
            actions = local.action_space.sample()
            step = adaptor.step({"action": actions})
            observations, rewards, terminations, truncations, _ = local.step(actions)
            assert_identical(step.reward, rewards)
            assert_identical(step.observation["terminated"], terminations)
            assert_identical(step.observation["truncated"], truncations)
            assert step.mid()
        client.close()
        local.close()


def test_an_error_leaves_the_public_clients_connection_usable(client):
    # D-2
    with pytest.raises(error.DmEnvRpcError, match="is not served here; this server has CartPole-v1") as caught:
        dm_env_adaptor.create_and_join_world(client.connection, {"env_id": "Nope-v0"}, {})
    assert caught.value.code == 5
    adaptor, _ = dm_env_adaptor.create_and_join_world(client.connection, {"env_id": "CartPole-v1"}, {})
    adaptor.reset()
    uid = spec_manager.SpecManager(adaptor._dm_env_rpc_specs.actions).name_to_uid("action")
    with pytest.raises(error.DmEnvRpcError, match="got 7, which is above the maximum"):
        client.send(public.StepRequest(actions={uid: tensor_utils.pack_tensor(7)}))
    assert adaptor.step({"action": 1}).mid()
    adaptor.close()


def test_the_public_client_compresses_and_broadcasts():
    # D-11: what the public library packs with try_compress, a single element for three
    with serve_gym(lambda: CountingEnv(action_space=spaces.Box(-1, 1, (3,)))) as server:
        client = PublicClient(server).join()
        client.step("reward")
        uid, spec = client.actions["action"]
        assert tensor_utils.data_type_to_np_type(spec.dtype) == np.float32
        packed = tensor_utils.pack_tensor(np.full(3, 0.5, np.float32), try_compress=True)
        assert (len(packed.floats.array), list(packed.shape)) == (1, [3])
        assert client.send(public.StepRequest(actions={uid: packed})).state == public.RUNNING
        client.close()
