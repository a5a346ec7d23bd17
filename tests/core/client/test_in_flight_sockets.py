"""Steps in flight over sockets: vectors, lanes, several agents, wrappers, copies, forks, and the end."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import bridge
from bridge.core.encoding.tensors import pack_tensor
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import Proxy
from bridge.wrappers import BlockingReset, Throttle
from tests.far_network import Telling
from tests.inside import remotes_of
from tests.parallel_envs import Relay
from tests.peers import Stream
from tests.support import sampled, until

pytestmark = pytest.mark.slow

LENGTHS = (11, 60, 4)


@pytest.fixture
def far() -> Iterator[Any]:
    """Serves behind a proxy that takes 40 ms each way; gives its URL."""
    opened: list[Any] = []

    def serve(
        env: Any = lambda: Telling(LENGTHS), make: Any = bridge.serve_gym, server: Any = None, **more: Any
    ) -> Any:
        server = server or make(env, fps=60, **more)
        proxy = Proxy(server.port)
        proxy.delay = 0.04
        opened.extend((proxy, server))
        return f"grpc://127.0.0.1:{proxy.port}", proxy

    yield serve
    for item in opened:
        item.stop() if hasattr(item, "stop") else item.close()


def feeds(envs: Any) -> list[Any]:
    return [remote.answers for remote in remotes_of(envs)]


def check_returns(envs: Any, steps: int, think: float = 0.0) -> None:
    """Play, and check that each slot's rewards add up to the returns of its episodes, each of which is told once."""
    count = envs.num_envs
    sums, told = np.zeros(count), [dict[int, float]() for _ in range(count)]
    ends, last = [0] * count, [0] * count
    envs.reset(seed=0)
    fresh = np.ones(count, np.bool_)
    for number in range(steps):
        time.sleep(think)
        observations, rewards, terminations, truncations, infos = envs.step(np.full(count, number % 7))
        assert not truncations.any()
        sums += rewards
        for slot in range(count):
            for record in (infos["episodes"][slot] or ()) if "episodes" in infos else ():
                assert record["episode"] not in told[slot]
                told[slot][record["episode"]] = record["return"]
            if observations[slot] is None:
                assert (rewards[slot], terminations[slot]) == (0.0, False)
                continue
            episode = int(observations[slot][0])
            if fresh[slot] and number:
                assert (rewards[slot], episode > last[slot]) == (0.0, True)
            last[slot] = episode
            fresh[slot] = terminations[slot]
            if terminations[slot]:
                assert sums[slot] == told[slot][episode]
                ends[slot] += 1
                sums[slot] = 0.0
    for slot in range(count):
        assert ends[slot] >= 2
        assert sorted(told[slot]) == list(range(1, len(told[slot]) + 1))


@pytest.mark.parametrize("think", [0.0, 0.05])
def test_the_slots_of_a_vector_get_all_rewards(far: Any, think: float) -> None:
    url, _ = far()
    envs = BlockingReset(bridge.make_vec_remote(url, num_envs=2))
    assert all(feeds(envs))
    check_returns(envs, 150 if not think else 60, think)
    envs.close()


@pytest.mark.parametrize(
    ("server", "client", "scheme"),
    [
        ({"transport": "grpcio"}, {}, "grpc"),
        pytest.param({"transport": "grpcio"}, {"transport": "grpcio"}, "grpc", marks=pytest.mark.repeat),
        ({}, {"transport": "grpcio"}, "grpc"),
        ({"web": True}, {}, "ws"),
    ],
    ids=["a server on grpcio", "both on grpcio", "a client on grpcio", "WebSocket"],
)
def test_steps_are_in_flight_over_every_transport(
    far: Any, server: dict[str, Any], client: dict[str, Any], scheme: str
) -> None:
    url, _ = far(**server)
    envs = BlockingReset(bridge.make_vec_remote(url.replace("grpc", scheme), num_envs=2, **client))
    assert all(feeds(envs))
    check_returns(envs, 150)
    envs.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_the_lanes_of_a_world_get_all_rewards(far: Any, mode: AutoresetMode) -> None:
    url, _ = far(num_envs=3)
    envs = BlockingReset(bridge.make_vec_remote(url), autoreset_mode=mode)
    assert all(feeds(envs))
    if mode is AutoresetMode.NEXT_STEP:
        check_returns(envs, 150)
    else:
        check_same_step_returns(envs, 150)
    envs.close()


def check_same_step_returns(envs: Any, steps: int) -> None:
    """As `check_returns`, where the first observation of an episode comes with the end of the one before."""
    sums, told = np.zeros(envs.num_envs), [dict[int, float]() for _ in range(envs.num_envs)]
    ends = np.zeros(envs.num_envs, np.int64)
    envs.reset(seed=0)
    for _ in range(steps):
        observations, rewards, terminations, _, infos = envs.step(np.zeros(envs.num_envs, np.int64))
        sums += rewards
        for slot in range(envs.num_envs):
            for part in (infos.get("final_info", {}), infos):
                for record in (part["episodes"][slot] or ()) if "episodes" in part else ():
                    assert record["episode"] not in told[slot]
                    told[slot][record["episode"]] = record["return"]
            if terminations[slot]:
                final = infos["final_obs"][slot]
                assert sums[slot] == told[slot][int(final[0])]
                assert observations[slot][0] > final[0]
                sums[slot] = 0.0
        ends += terminations
    assert (ends >= 2).all()
    assert all(sorted(own) == list(range(1, len(own) + 1)) for own in told)


def test_lanes_without_an_observation_read_none_and_the_others_go_on(far: Any) -> None:
    """U-2, U-5."""
    url, _ = far(num_envs=3)
    envs = bridge.make_vec_remote(url)
    check_returns(envs, 150)
    envs.close()


def test_a_person_takes_over_one_lane(far: Any) -> None:
    server = bridge.serve_gym(lambda: Telling((10**6,)), fps=60, num_envs=3)
    url, _ = far(server=server)
    envs = BlockingReset(bridge.make_vec_remote(f"{url}?world="))
    assert all(feeds(envs))
    envs.reset()
    person = Stream(server, own_connection=True)
    person.join(role="takeover", lane=1, name="Ann")
    person.ask(step=pb.StepRequest())
    person.ask(step=pb.StepRequest(actions={1: pack_tensor(77)}))

    def stands_in() -> bool:
        observations, _, _, _, infos = envs.step(np.array([4, 5, 6]))
        taken = observations[:, 2].tolist() == [4, 77, 6]
        return taken and infos["_intervention"].tolist() == [False, True, False]

    until(stands_in)
    person.die()
    person.channel.close()
    until(lambda: envs.step(np.array([4, 5, 6]))[0][:, 2].tolist() == [4, 5, 6])
    envs.close()


@pytest.mark.parametrize("lanes", sampled([1, 3], 2, 1, slow=True))
def test_throttle_takes_what_is_in_flight(far: Any, lanes: int) -> None:
    url, _ = far(num_envs=lanes)
    envs = BlockingReset(Throttle(bridge.make_vec_remote(url)))
    assert all(feeds(envs))
    check_returns(envs, 150)
    envs.close()


def test_a_single_environment_and_its_infos(far: Any) -> None:
    url, _ = far()
    env = bridge.make_remote(url)
    observation, _ = env.reset(seed=1)
    first, total = int(observation[0]), 0.0
    terminated = False
    while not terminated:
        observation, reward, terminated, truncated, info = env.step(3)
        total += reward
        assert int(observation[0]) == first
        assert not truncated
    assert total == info["episodes"][-1]["return"]
    observation, info = env.reset()
    assert int(observation[0]) > first
    assert env.get_attr("lengths") == LENGTHS
    frames = [step.observation[1] for step in env.rollout([1] * 40, window=4)]
    assert len(frames) == 40
    env.reset()
    env.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "bridge-keepalive"]


def test_without_diagnostics_there_are_no_times(far: Any) -> None:
    url, _ = far(lambda: Telling((10**6,)))
    env = bridge.make_remote(url, diagnostics=False)
    env.reset()
    for _ in range(20):
        assert "latency" not in env.step(1)[4]
    env.close()


def test_several_agents_of_one_client(far: Any) -> None:
    url, _ = far(lambda: Relay(distances=(7, 12, 1000), horizon=200), bridge.serve_parallel)
    env = bridge.make_parallel_remote(url)
    assert all(remote.answers for remote in env._remotes.values())
    env.reset(seed=0)
    totals = dict.fromkeys(env.agents, 0.0)
    for _ in range(60):
        if not env.agents:
            break
        _, rewards, _, _, infos = env.step({name: env.action_space(name).sample() for name in env.agents})
        for name, reward in rewards.items():
            totals[name] += reward
            for record in infos[name].get("episodes", ()):
                assert record["return"] == pytest.approx(totals[name])
    env.close()


def test_a_copy_and_a_forked_process_have_streams_of_their_own(far: Any) -> None:
    url, _ = far(lambda: Telling((10**6,)))
    env = bridge.make_remote(url)
    env.reset()
    env.step(1)
    copy = pickle.loads(pickle.dumps(env))
    copy.reset()
    assert copy.step(2)[0].shape == (4,)
    copy.close()
    child = os.fork()
    if child == 0:
        try:
            env.reset()
            for _ in range(5):
                env.step(1)
            env.close()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(5):
        env.step(1)
    env.close()


@pytest.mark.parametrize("lanes", sampled([1, 3], 2, 1, slow=True))
def test_a_lost_connection_ends_the_episodes_once_and_comes_back(far: Any, lanes: int) -> None:
    url, proxy = far(lambda: Telling((10**6,)), num_envs=lanes)
    envs = bridge.make_vec_remote(url)
    envs.reset()
    actions = np.ones(lanes, np.int64)

    def all_there() -> bool:
        return all(row is not None for row in envs.step(actions)[0])

    until(all_there)
    proxy.cut()
    truncations = np.zeros(lanes, np.bool_)
    while not truncations.any():
        truncations = envs.step(actions)[3]
    assert truncations.all()
    until(all_there, 30.0)
    assert all(feeds(envs))
    for _ in range(20):
        _, _, terminations, truncations, _ = envs.step(actions)
        assert not (terminations | truncations).any()
    envs.close()


def test_a_single_environment_says_that_its_connection_was_lost(far: Any) -> None:
    url, proxy = far(lambda: Telling((10**6,)))
    env = bridge.make_remote(url, timeout=20.0)
    env.reset()
    env.step(1)
    proxy.cut()
    steps = (env.step(1) for _ in range(1000))
    with pytest.raises(bridge.errors.ConnectionLostError):
        deque(steps, maxlen=0)
    env.reset()
    env.step(1)
    env.close()
