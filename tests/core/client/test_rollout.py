"""Steps sent ahead of their answers (D-25), and what they cost a server whose client does not read."""

import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import bridge
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import (
    AlreadyPendingError,
    ConnectionLostError,
    EnvironmentFailedError,
    InvalidActionError,
    ResetNeededError,
    SettingError,
)
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, FailingEnv
from tests.peers import Stream
from tests.support import assert_identical


@pytest.fixture
def env():
    with bridge.serve_gym(lambda: CountingEnv(4)) as server:
        env = bridge.make_remote(server.url, timeout=20)
        yield env
        env.close()


def test_a_rollout_yields_what_single_steps_yield_across_ends_of_episodes():
    """D-25, D-9, D-1: in order, and the Step after an end begins the next episode, its action ignored."""
    with bridge.serve_gym("CartPole-v1") as server:
        ahead, single = (bridge.make_remote(server.url, timeout=20) for _ in range(2))
        rng = np.random.default_rng(3)
        actions = [int(action) for action in rng.integers(0, 2, 300)]
        assert_identical(ahead.reset(seed=1), single.reset(seed=1))
        ended, ends = False, 0
        for sent, got in zip(actions, ahead.rollout(actions, window=16), strict=True):
            assert got.action == sent
            assert got.first == ended
            if ended:
                assert (got.reward, got.terminated, got.truncated) == (0.0, False, False)
                observation, _ = single.reset()  # the environment goes on with its own random numbers
                assert_identical(got.observation, observation)
            else:
                assert_identical(tuple(got[1:6]), single.step(sent))
            ended = got.terminated or got.truncated
            ends += ended
        assert ends > 5
        ahead.close()
        single.close()


def test_requests_of_all_kinds_sent_ahead_get_one_answer_each_in_their_order():
    """D-1, D-2, D-25: over the network, errors among them, and nothing more than that."""
    step = {"step": {"actions": {1: pack_tensor(0)}}}
    unknown = {"extension": {"type_url": "type.googleapis.com/x.Y"}}
    nowhere = {"world_name": "nowhere"}
    asked = [
        *(("error", {}), ("error", step), ("join_world", {"join_world": {}}), ("step", step), ("step", step)),
        *(("error", {"step": {"requested_observations": [99]}}), ("reset", {"reset": {}}), ("step", step)),
        *(("error", {"join_world": {}}), ("create_world", {"create_world": {}}), ("reset_world", {"reset_world": {}})),
        *(("step", step), ("error", unknown), ("leave_world", {"leave_world": {}}), ("error", {"reset": {}})),
        *(("error", {"destroy_world": nowhere}), ("destroy_world", {"destroy_world": {"world_name": ""}})),
        *(("join_world", {"join_world": {}}), ("step", step)),
    ]
    with bridge.serve_gym(lambda: CountingEnv(4)) as server:
        stream = Stream(server)
        for _, payload in asked:
            stream.send(**payload)
        assert [stream.take().WhichOneof("payload") for _ in asked] == [kind for kind, _ in asked]
        stream.requests.put(None)
        assert list(stream.call) == []
        stream.close()


@pytest.mark.parametrize("window", [1, 3, 500])
def test_no_more_than_the_window_is_on_its_way(env, window):
    """D-25: an action is taken from the iterable only when there is room for its Step."""
    taken, answered, most = 0, 0, 0

    def actions():
        nonlocal taken, most
        for _ in range(40):
            taken += 1
            most = max(most, taken - answered)
            yield 0

    env.reset()
    for _ in env.rollout(actions(), window=window):
        answered += 1
    assert answered == 40
    assert most == min(window, 40)


def test_a_rollout_begins_an_episode_where_none_runs_and_leaves_it_to_step(env):
    """D-9: without a reset its first action is ignored; after its end, step() goes on."""
    steps = list(env.rollout([0, 1, 0]))
    assert [step.first for step in steps] == [True, False, False]
    assert [step.observation.tolist() for step in steps] == [[1, 0], [1, 1], [1, 2]]
    assert env.step(0)[0].tolist() == [1, 3]
    assert list(env.rollout([])) == []
    assert [step.terminated for step in env.rollout([0])] == [True]
    with pytest.raises(ResetNeededError, match="has ended"):
        env.step(0)


def test_a_rollout_that_is_given_up_needs_a_reset_and_its_late_answers_are_dropped(env):
    env.reset()
    rollout = env.rollout([0] * 50, window=20)
    next(rollout)
    rollout.close()
    with pytest.raises(ResetNeededError, match="given up"):
        env.step(0)
    observation, _ = env.reset()
    assert observation[1] == 0
    assert env.step(0)[0][1] == 1


def test_nothing_else_is_asked_while_a_rollout_is_under_way(env):
    env.reset()
    rollout = env.rollout([0] * 50, window=20)
    next(rollout)
    for call in (lambda: env.step(0), env.render, lambda: env.call("length"), lambda: env.rollout([0])):
        with pytest.raises(AlreadyPendingError, match="under way"):
            call()
    env.reset()
    with pytest.raises(AlreadyPendingError, match="ended"):
        next(rollout)
    assert env.step(0)[0][1] == 1


def test_a_bad_action_or_window_is_told(env):
    env.reset()
    with pytest.raises(SettingError, match="window"):
        env.rollout([0], window=0)
    rollout = env.rollout([0, 7], window=1)
    assert next(rollout).observation[1] == 1
    with pytest.raises(InvalidActionError):
        next(rollout)
    assert env.step(0)[0][1] == 2  # nothing was on its way


def test_an_error_of_the_environment_ends_the_rollout_and_the_environment_is_of_use():
    """D-2."""
    with bridge.serve_gym(lambda: FailingEnv(fail_in_step=3, length=10)) as server:
        env = bridge.make_remote(server.url, timeout=20)
        env.reset()
        got = []
        with pytest.raises(EnvironmentFailedError, match="TestFailure"):
            got.extend(env.rollout([0] * 8, window=8))
        assert env.reset()[0][1] == 0
        assert env.step(0)[0][1] == 1
        env.close()


def test_a_server_that_goes_ends_the_rollout():
    server = bridge.serve_gym(lambda: CountingEnv(4))
    env = bridge.make_remote(server.url, timeout=20)
    env.reset()
    rollout = env.rollout([0] * 10_000, window=4)
    next(rollout)
    server.stop()
    with pytest.raises(ConnectionLostError):
        list(rollout)
    env.close()


class Big(gymnasium.Env):
    """A large observation; counts the steps of all."""

    steps = 0
    stepped = threading.Condition()
    observation_space = spaces.Box(0, 255, (200_000,), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(200_000, np.uint8), {}

    def step(self, action):
        with Big.stepped:
            Big.steps += 1
            Big.stepped.notify_all()
        return np.full(200_000, Big.steps % 256, np.uint8), 0.0, False, False, {}


@pytest.mark.slow
def test_a_client_that_sends_and_does_not_read_stops_at_the_streams_flow_control():
    """D-25: the server works no further ahead than the transport takes, and then answers everything in order."""
    Big.steps, total = 0, 1000
    with bridge.serve_gym(Big) as server:
        stream = Stream(server).join()
        step = pb.StepRequest(actions={1: pack_tensor(0)}, requested_observations=[1])
        for _ in range(total + 1):
            stream.send(step=step)

        def stalled():
            with Big.stepped:
                return not Big.stepped.wait_for(lambda before=Big.steps: Big.steps > before, 1.0) and Big.steps

        while not stalled():
            pass
        ahead = Big.steps
        assert 0 < ahead <= 100, f"{ahead} answers of 0.2 MB wait for a client that reads none"
        assert stream.take().step.state == pb.RUNNING
        for number in range(1, total + 1):
            answer = stream.take().step
            assert unpack_tensor(answer.observations[1])[0] == number % 256
        stream.close()
