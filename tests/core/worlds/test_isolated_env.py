"""Every kind of world with its environment in a process: what arrives, and what a crash ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv, VectorEnv

from bridge import (
    Limits,
    RealTime,
    Server,
    SlotState,
    errors,
    make_parallel_remote,
    make_remote,
    make_vec_remote,
    serve_gym,
    serve_parallel,
)
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import EVERY_SPACE, CountingEnv, SpaceEnv, VirtualClock
from bridge.wrappers import BlockingReset
from tests.inside import registry_of
from tests.parallel_envs import NAMES, Relay
from tests.peers import Stream
from tests.side_by_side import step_together
from tests.support import SmallNumbers, layout_of, sampled, until, world_of
from tests.trick_envs import PatientEnv, TrickEnv, TrickRelay, gone, pid_of

FAILURES = [
    ("exit", r"ended with exit code 7 in step", Code.UNAVAILABLE),
    ("segfault", r"ended by SIGSEGV in step", Code.UNAVAILABLE),
    ("loop", r"did not return from step within call_timeout=1 s", Code.DEADLINE_EXCEEDED),
]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def isolated(clock: VirtualClock) -> Iterator[Any]:
    """Serves in processes, with keywords: worlds in real time where they hold `fps`."""
    with contextlib.ExitStack() as stack:

        def serve(env: Any, **keywords: Any) -> Server:
            if "fps" in keywords:
                keywords.setdefault("realtime", RealTime(clock=clock))
            return stack.enter_context(serve_gym(env, isolation="process", **keywords))

        yield serve


@pytest.fixture
def team() -> Iterator[Any]:
    """Serves worlds of several agents in processes, with keywords."""
    with contextlib.ExitStack() as stack:
        yield lambda env, **keywords: stack.enter_context(serve_parallel(env, isolation="process", **keywords))


def every_space() -> spaces.Space[Any]:
    """All spaces in one; Gymnasium's own vector environments cannot step over those without elements."""
    empty = ("dict_empty", "tuple_empty", "tuple_of_empty_ones")
    return spaces.Dict({name: make() for name, make in EVERY_SPACE.items() if name not in empty})


@pytest.mark.parametrize("lanes", sampled([1, 3], 2))
def test_every_space_passes_through_a_process_exactly(isolated: Any, lanes: int) -> None:
    def make() -> Any:
        return SmallNumbers(SpaceEnv(every_space(), every_space()))

    local = SyncVectorEnv([make] * lanes)
    remote = BlockingReset(make_vec_remote(isolated(make, num_envs=lanes).url))
    step_together(remote, local, 5, seed=2)
    remote.close()
    local.close()


class Wrapped(VectorEnv[Any, Any, Any]):
    """A vector environment of one's own, which takes one seed, and resets all of its lanes."""

    def __init__(self) -> None:
        self.inner = SyncVectorEnv([lambda: CountingEnv(5)] * 2)
        self.num_envs = 2
        self.metadata = self.inner.metadata
        self.single_observation_space = self.inner.single_observation_space
        self.single_action_space = self.inner.single_action_space
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.inner.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        return self.inner.step(actions)


@pytest.mark.parametrize("isolation", [None, "process"])
def test_a_vector_of_ones_own_says_what_its_lanes_cannot(isolation: Any) -> None:
    with serve_gym(Wrapped, isolation=isolation) as server:
        stream = Stream(server).join()
        assert stream.ask(step=pb.StepRequest()).step.state == pb.RUNNING
        for name, value, said in (
            ("reset_mask", np.array([True, False]), "Wrapped cannot reset some of its lanes alone"),
            ("seed", np.array([5, 9]), "Wrapped takes one integer seed"),
        ):
            error = stream.ask(reset=pb.ResetRequest(settings={name: pack_tensor(value)})).error
            assert error.code == Code.INVALID_ARGUMENT
            assert said in error.message
        stream.close()
    with (
        serve_gym(Wrapped, isolation=isolation, fps=10, realtime=RealTime(clock=VirtualClock())) as server,
        pytest.raises(errors.RefusedError, match="expected vectorization_mode='sync', got Wrapped"),
    ):
        make_vec_remote(server.url)


def test_an_observation_that_is_not_of_its_space_is_told_as_such(isolated: Any) -> None:
    class Wrong(CountingEnv):
        def step(self, action: Any) -> Any:
            return ("wrong", *super().step(action)[1:])

    env = make_remote(isolated(Wrong).url)
    env.reset()
    with pytest.raises(errors.EnvironmentFailedError, match="observation is not of its observation_space"):
        env.step(0)
    env.close()


def test_a_construction_that_takes_its_time_holds_up_no_other_client(isolated: Any, tmp_path: Any) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    server = isolated(PatientEnv, unix_path=str(tmp_path / "socket"))
    made: list[Any] = []
    maker = threading.Thread(target=lambda: made.append(make_remote(server.urls[1], env_kwargs={"fifo": str(fifo)})))
    maker.start()
    writers: list[int] = []

    def entered() -> bool:
        with contextlib.suppress(OSError):  # there is no reader yet
            writers.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    try:
        until(entered)
        other = make_remote(server.urls[1], timeout=10)
        other.reset()
        assert other.step(1)[0].tolist() == [1, 1]
        other.close()
        assert not made
    finally:
        for writer in writers:
            os.close(writer)
        maker.join(20.0)
        for env in made:
            env.close()


# Real time


def begin(envs: Any, actions: Any) -> None:
    envs.reset()
    until(lambda: all(row is not None for row in envs.step(actions)[0]))


def test_a_killed_process_ends_its_real_time_world_alone(isolated: Any, clock: VirtualClock) -> None:
    server = isolated(TrickEnv, fps=10)
    envs = make_vec_remote(server.url, num_envs=2)
    begin(envs, [0, 0])
    clock.advance(1.0)
    victim, other = envs.call("pid")
    os.kill(victim, signal.SIGKILL)
    clock.advance(0.5)
    rows, _, terminations, truncations, infos = envs.step([0, 0])
    assert truncations.tolist() == [True, False]
    assert not terminations.any()
    # "in step" too, unless the server sees its end before it asks for the next step.
    assert "ended by SIGKILL (perhaps out of memory)" in infos["error"][0]
    assert rows[1].tolist() == [1, 15]
    until(lambda: all(row is not None for row in envs.step([0, 0])[0]))
    assert (envs.slot_states == SlotState.RUNNING).all()
    clock.advance(0.5)
    rows = envs.step([0, 0])[0]
    assert [row.tolist() for row in rows] == [[1, 5], [1, 20]], "the new world begins, the other one went on"
    assert gone(victim)
    assert envs.call("pid")[1] == other
    envs.close()
    until(lambda: gone(other))


@pytest.mark.parametrize(("trick", "said", "code"), FAILURES)
def test_all_who_are_in_a_real_time_world_are_told_what_its_environment_did(
    isolated: Any, clock: VirtualClock, trick: str, said: str, code: Code
) -> None:
    server = isolated(TrickEnv, fps=10, limits=Limits(call_timeout=1.0))
    player = make_vec_remote(server.url, env_kwargs={"trick": trick})
    world = registry_of(server).worlds[0]
    spectator = make_vec_remote(f"{server.url}?world={world.name}", role="spectator")
    for envs in (player, spectator):
        begin(envs, [0])
    pid = pid_of(world)
    clock.advance(1.0)
    for envs in (player, spectator):
        _, _, _, truncations, infos = envs.step([0])
        assert truncations.tolist() == [True]
        assert re.search(said, infos["error"][0])
    with pytest.raises(errors.RequestError, match=said) as caught:
        world.join({})
    assert caught.value.code == code
    assert gone(pid)
    player.close()
    spectator.close()
    until(lambda: server.worlds == [])


def test_a_slow_reset_holds_up_no_other_lane_of_a_thread_safe_world(
    isolated: Any, clock: VirtualClock, tmp_path: Any
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    server = isolated(PatientEnv, num_envs=3, fps=60, realtime=RealTime(clock=None), thread_safe=True)
    envs = make_vec_remote(server.url)
    begin(envs, [0, 0, 0])
    envs.reset(options={"fifo": str(fifo), "reset_mask": np.array([False, True, False])})
    seen: list[Any] = []

    def later() -> bool:
        rows = envs.step([0, 0, 0])[0]
        if rows[2] is not None:
            seen.append(rows[2][1])
        return rows[1] is None and rows[2] is not None and seen[-1] > seen[0] + 3

    until(later)
    with open(fifo, "w") as pipe:
        pipe.write("go on")
    until(lambda: all(row is not None for row in envs.step([0, 0, 0])[0]))
    assert envs.get_attr("where") == ("step",) * 3
    envs.close()


def test_a_real_time_world_whose_reset_never_returns_is_closed_all_the_same(isolated: Any, tmp_path: Any) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    server = isolated(PatientEnv, fps=60, realtime=RealTime(clock=None), limits=Limits(call_timeout=None))
    envs = make_vec_remote(server.url)
    begin(envs, [0])
    (pid,) = envs.call("pid")
    envs.reset(options={"fifo": str(fifo)})
    envs.step([0])
    server.stop()
    assert gone(pid)
    envs.close()


def test_a_clients_own_factory_plays_in_real_time(clock: VirtualClock) -> None:
    with serve_gym("CartPole-v1", fps=10, realtime=RealTime(clock=clock), allow_env_factories=True) as server:
        envs = make_vec_remote(server.url, env=lambda: CountingEnv(10**9))
        begin(envs, [0])
        clock.advance(0.5)
        assert envs.step([0])[0][0].tolist() == [1, 5]
        envs.close()


# Several agents


def lawful(name: str) -> dict[str, Any]:
    space = Relay().action_space(name)
    arrays = layout_of(space, "action").pack_action(space.sample())
    return {"step": pb.StepRequest(actions={uid: pack_tensor(array) for uid, array in enumerate(arrays, start=1)})}


@pytest.mark.parametrize(("trick", "said", "code"), FAILURES)
def test_each_agent_is_told_what_their_environment_did(team: Any, trick: str, said: str, code: Code) -> None:
    server = team(TrickRelay, limits=Limits(call_timeout=1.0))
    good = make_parallel_remote(server.url)
    good.reset(seed=1)
    settings = {"kwargs.trick": pack_tensor(trick)}
    maker = Stream(server)
    name = maker.ask(create_world=pb.CreateWorldRequest(settings=settings)).create_world.world_name
    pid = pid_of(world_of(server, name))
    agents = {agent: Stream(server) for agent in NAMES}
    for agent, stream in agents.items():
        stream.join(name, agent=agent)
    for step in range(4):
        for agent, stream in agents.items():
            stream.send(**(lawful(agent) if step else {"step": pb.StepRequest()}))
        answers = [stream.take() for stream in agents.values()]
        if step < 3:
            assert [answer.step.state for answer in answers] == [pb.RUNNING] * 3
    for answer in answers:
        assert answer.error.code == code
        assert re.search(said, answer.error.message)
    assert gone(pid)
    good.step({agent: good.action_space(agent).sample() for agent in NAMES})
    for stream in (*agents.values(), maker):
        stream.close()
    good.close()


def test_a_remote_of_all_agents_resets_into_a_world_made_anew(team: Any) -> None:
    env = make_parallel_remote(team(TrickRelay).url, timeout=20)
    env.reset(seed=1)
    pid = env.call("pid")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.RefusedError, match="ended by SIGKILL"):
        env.step({agent: env.action_space(agent).sample() for agent in NAMES})
    observations, _ = env.reset(seed=1)
    assert list(observations) == list(NAMES)
    assert env.call("pid") != pid
    env.close()


def test_agents_whose_names_are_numbers_keep_them_for_the_default_action(team: Any) -> None:
    class Numbered(Relay):
        def __init__(self) -> None:
            super().__init__()
            self.possible_agents = [0, 1]

        def observation_space(self, agent: int) -> Any:
            return spaces.Discrete(100)

        def action_space(self, agent: int) -> Any:
            return spaces.Discrete(3)

        def reset(self, seed: Any = None, options: Any = None) -> Any:
            self.agents = [0, 1]
            return {0: 0, 1: 0}, {0: {}, 1: {}}

        def step(self, actions: Any) -> Any:
            seen = dict.fromkeys(self.agents, actions[0] * 10 + actions[1])
            return seen, {0: 1.0, 1: 2.0}, {0: False, 1: False}, {0: False, 1: False}, {0: {}, 1: {}}

    def choose(agent: Any, observation: Any, space: Any) -> int:
        return 2 if agent == 1 else 0

    server = team(Numbered, missing_agent="default", default_action=choose)
    env = make_remote(server.url)
    env.reset()
    assert env.step(1)[0] == 12
    env.close()


def test_an_environment_that_is_made_already_cannot_be_isolated() -> None:
    with pytest.raises(errors.SettingError, match="relay_v0 is made already; give serve_parallel a callable"):
        serve_parallel(Relay(), isolation="process")
    with pytest.raises(errors.SettingError, match="give isolation='process' too"):
        serve_parallel(Relay, limits=Limits(call_timeout=3.0))
    with pytest.raises(errors.SettingError, match="cannot be pickled"):
        serve_parallel(partial(Relay, fail_at=threading.Lock()), isolation="process")
