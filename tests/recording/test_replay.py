"""A recording is a proof: over 20 environments and all kinds of worlds the replay is what was recorded, bit for bit."""

from __future__ import annotations

import io
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces

from bridge import (
    RealTime,
    Recording,
    TimeAction,
    make_parallel_remote,
    make_remote,
    make_vec_remote,
    serve_gym,
    serve_parallel,
)
from bridge.errors import EnvironmentFailedError, RecordingError, RefusedError, SettingError
from bridge.perlert import make_perlert_env, serve_perlert
from bridge.recording.episodes import load_episode, observed_rows
from bridge.recording.reader import RecordedEpisode, read_folder
from bridge.recording.replay import Replay, Verification, replayed_from, verify, verify_stream
from bridge.testing import CountingEnv, FailingEnv, Proxy, VirtualClock
from bridge.wrappers import BlockingReset
from tests.parallel_envs import Relay
from tests.recording.changes import change, forge
from tests.recording.environments import Noisy
from tests.recording_reader import read_run
from tests.support import NO_BOX2D, everywhere, import_box2d, minigrid, play_vector, pong, sampled, until, world_of

HAS_BOX2D = import_box2d()

SINGLE = [
    "CartPole-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Pendulum-v1",
    "FrozenLake-v1",
    "Taxi-v4",
    "Blackjack-v1",
    "CliffWalking-v1",
    *(["LunarLander-v3", "BipedalWalker-v3"] if HAS_BOX2D else []),
    "Ant-v5",
    "HalfCheetah-v5",
    "Hopper-v5",
    "InvertedPendulum-v5",
]


def play(url: str, steps: int, **keywords: Any) -> None:
    """Step by random actions; the first episode is seeded, the others begin by themselves."""
    env = make_remote(url, **keywords)
    env.action_space.seed(11)
    env.reset(seed=7)
    for _ in range(steps):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    env.close()


def check_all(folder: Path, env: Any = None, least: int = 1, **keywords: Any) -> list[RecordedEpisode]:
    """Verify every episode of a folder; return them."""
    found = read_folder(folder)
    assert not found.damage
    episodes = found.episodes()
    assert len(episodes) >= least
    for episode in episodes:
        done = verify(episode, env, **keywords)
        assert done.ok, str(done)
        assert done.rows >= episode.length + 1
    for stream in found.streams:  # the same in one pass
        passed = list(verify_stream(stream, env, **keywords))
        assert len(passed) == len(stream.episodes())
        assert all(isinstance(done, Verification) and done.ok for done in passed), [str(done) for done in passed]
    return episodes


@pytest.mark.parametrize("env_id", sampled(SINGLE, 4))
@pytest.mark.usefixtures("in_tmp_path")
def test_what_an_environment_did_is_verified(tmp_path, env_id):
    with serve_gym(env_id, record=tmp_path) as server:
        play(server.url, 120)
    check_all(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("make", [pong, minigrid], ids=["Atari", "MiniGrid"])
def test_environments_of_a_callable_are_verified_by_naming_it(tmp_path, make):
    with serve_gym(make, record=tmp_path) as server:
        play(server.url, 60)
    check_all(tmp_path, make)
    (episode, *_) = read_folder(tmp_path).episodes()
    with pytest.raises(SettingError, match=rf"name what makes it, for example --env tests.support:{make.__name__}$"):
        verify(episode)


@pytest.mark.skipif(not HAS_BOX2D, reason=NO_BOX2D)
@pytest.mark.slow
def test_box2d_with_pictures_as_observations_is_verified(tmp_path):
    with serve_gym("CarRacing-v3", record=tmp_path) as server:
        play(server.url, 15)
    check_all(tmp_path)


@everywhere
@pytest.mark.parametrize("mode", sampled(["sync", "async", "vector_entry_point"], 3))
def test_lanes_are_verified_together(tmp_path, isolation, mode):
    if mode == "async" and isolation:
        pytest.skip("a process in a process")
    with serve_gym("CartPole-v1", num_envs=3, vectorization_mode=mode, record=tmp_path, isolation=isolation) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        play_vector(envs, 80, seed=5)
    episodes = check_all(tmp_path, least=6)
    assert {episode.lane for episode in episodes} == {0, 1, 2}


def test_lanes_that_are_reset_one_by_one_are_verified(tmp_path):
    with serve_gym("CartPole-v1", num_envs=3, record=tmp_path) as server:
        envs = BlockingReset(make_vec_remote(server.url), autoreset_mode="Disabled")
        envs.action_space.seed(2)
        envs.reset(seed=5)
        for _ in range(60):
            *_, terminations, truncations, _ = envs.step(envs.action_space.sample())
            ended = terminations | truncations
            if ended.any():
                envs.reset(options={"reset_mask": ended})
        envs.close()
    check_all(tmp_path, least=4)


@pytest.mark.slow
@pytest.mark.parametrize("fps", sampled([30.0, None], 2), ids=["real time", "lock-step"])
def test_environments_of_several_agents_are_verified(tmp_path, fps):
    clock = VirtualClock() if fps else None
    realtime = None if clock is None else RealTime(clock=clock)
    with serve_parallel("butterfly/pistonball-v6", fps=fps, realtime=realtime, record=tmp_path) as server:
        env = make_parallel_remote(server.url)
        env.reset(seed=3)
        for _ in range(25):
            if clock is not None:
                clock.advance(1 / 30)
            env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        env.close()
    episodes = check_all(tmp_path)
    assert episodes[0].length >= 20


@pytest.mark.parametrize("maker", ["mpe2.simple_tag_v3", "pettingzoo.classic.tictactoe_v3", "tests.parallel_envs"])
def test_other_environments_of_several_agents_are_verified(tmp_path, maker):
    if maker == "pettingzoo.classic.tictactoe_v3":
        pytest.importorskip(maker)
    module = pytest.importorskip(maker)
    source: Any = Relay if maker.startswith("tests") else module
    with serve_parallel(source, record=tmp_path) as server:
        env = make_parallel_remote(server.url)
        observations, _ = env.reset(seed=3)
        for _ in range(12):
            actions = {agent: legal(env, agent, observations[agent]) for agent in env.agents}
            observations, *_ = env.step(actions)
            if not env.agents:
                observations, _ = env.reset()
        env.close()
    check_all(tmp_path, source)


def legal(env: Any, agent: str, observation: Any) -> Any:
    """An action of an agent that its mask allows, where it has one."""
    mask = observation.get("action_mask") if isinstance(observation, dict) else None
    if mask is None or not np.any(mask):
        return env.action_space(agent).sample()
    return np.int64(np.flatnonzero(mask)[0])


@everywhere
def test_a_real_time_world_records_which_action_each_frame_applied_and_by_whom(tmp_path, isolation):
    clock = VirtualClock()
    with serve_gym(
        "CartPole-v1", fps=10, realtime=RealTime(clock=clock), record=tmp_path, default_action=0, isolation=isolation
    ) as server:
        env = make_remote(server.url, player="person:Ann", wait="now")
        env.reset(seed=4)
        clock.advance(0.2)  # two frames of the default action
        env.step(1)
        clock.advance(0.2)  # two of Ann's
        env.close()
    (episode,) = check_all(tmp_path)
    data = load_episode(episode)
    assert data.by[:4] == ["default", "default", "person:Ann", "person:Ann"]
    assert [int(action) for action in data.actions[:4]] == [0, 0, 1, 1]
    ((_, rows),) = read_run(tmp_path).values()
    steps = [row for row in rows if row["kind"] == 0][:4]
    assert [row["clock"] for row in steps] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert np.isnan([row["acted_at"] for row in steps[:2]]).all()
    assert [row["acted_at"] for row in steps[2:]] == pytest.approx([0.2, 0.2])
    assert episode.players == ["default", "person:Ann"]


def test_a_person_who_takes_over_from_an_agent_is_told_apart(tmp_path):
    clock = VirtualClock()
    with serve_gym(
        CountingEnv, env_kwargs={"length": 100}, fps=10, realtime=RealTime(clock=clock), record=tmp_path
    ) as server:
        agent = make_remote(f"{server.url}?world=", player="agent:PPO")
        agent.reset(seed=4)
        agent.step(1)
        clock.advance(0.3)
        agent.close()
        until(lambda: not world_of(server).agents)
        person = make_remote(f"{server.url}?world=", player="person:Ann")
        person.reset(options={})
        person.step(0)
        clock.advance(0.3)
        person.close()
    players = {name for episode in read_folder(tmp_path).episodes() for name in episode.players}
    assert {"agent:PPO", "person:Ann"} <= players


def test_lanes_of_a_real_time_world_behind_a_slow_network_are_verified(tmp_path):
    with (
        serve_gym("CartPole-v1", num_envs=2, fps=120, record=tmp_path) as server,
        Proxy(server.port) as proxy,
    ):
        proxy.delay = 0.02
        envs = BlockingReset(make_vec_remote(f"grpc://127.0.0.1:{proxy.port}"))
        play_vector(envs, 25, seed=9)
    found = read_folder(tmp_path)
    assert sorted(stream.header["lane"] for stream in found.streams) == [0, 1]
    episodes = check_all(tmp_path, least=2)
    names = {name for episode in episodes for name in episode.players}
    assert names <= {"agent", "default"}


def test_a_world_of_perlert_is_recorded_and_verified(tmp_path):
    with (
        serve_perlert("CartPole-v1", fps=100, seed=5, record=tmp_path) as server,
        make_perlert_env(server.url) as env,
    ):
        env.reset()
        for _ in range(10):
            *_, terminated, truncated, _ = env.step(1)
            if terminated or truncated:
                break
    (episode, *_) = check_all(tmp_path)
    assert episode.stream.kind == "agents"
    assert any(name.startswith("agent") for name in episode.players)


@pytest.mark.slow
def test_processes_write_files_of_their_own(tmp_path):
    with serve_gym("CartPole-v1", processes=2, record=tmp_path) as server:
        envs = BlockingReset(make_vec_remote(server.urls))
        play_vector(envs, 30, seed=9)
    found = read_folder(tmp_path)
    assert len({stream.run for stream in found.streams}) == 2
    check_all(tmp_path, least=2)


def test_array_rewards_and_actions_with_time_are_verified(tmp_path):
    with serve_gym("CartPole-v1", time_action=TimeAction(most=4), record=tmp_path) as server:
        play(server.url, 20)
    check_all(tmp_path)


def test_attributes_that_were_set_are_set_again(tmp_path):
    with serve_gym("CartPole-v1", record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        env.set_wrapper_attr("gravity", 1.0)
        for _ in range(5):
            env.step(1)
        env.close()
    (episode,) = read_folder(tmp_path).episodes()
    with pytest.raises(RecordingError, match="1 calls of methods and attributes were recorded, which would run here"):
        verify(episode)
    (told,) = verify_stream(episode.stream)
    assert "--allow-calls" in str(told)
    check_all(tmp_path, allow_calls=True)


class Skips(CountingEnv):
    """Counts on when it is told to skip, and raises then."""

    def skip(self, steps: int) -> None:
        self.steps += steps
        raise RuntimeError("on purpose")

    @property
    def level(self) -> int:
        return self.steps

    @level.setter
    def level(self, value: int) -> None:
        self.skip(value)


@pytest.mark.parametrize("fps", [None, 10])
def test_a_call_that_raised_is_made_again(tmp_path, fps):
    """It may have changed the environment before."""
    clock = VirtualClock()
    keywords = {} if fps is None else {"fps": fps, "realtime": RealTime(clock=clock)}
    with serve_gym(Skips, env_kwargs={"length": 20}, record=tmp_path, **keywords) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        with pytest.raises(EnvironmentFailedError, match="on purpose"):
            env.get_wrapper_attr("skip")(3)
        with pytest.raises(EnvironmentFailedError, match="on purpose"):
            env.set_wrapper_attr("level", 2)
        if fps is not None:
            clock.advance(0.1)
        env.step(0)
        env.close()
    (episode, *_) = check_all(tmp_path, Skips, allow_calls=True)
    assert [kind for calls in episode.stream.calls.values() for kind, _ in calls] == ["call", "write"]


def test_a_step_that_raised_raises_again(tmp_path):
    with serve_gym(FailingEnv, env_kwargs={"fail_in_step": 3}, record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        env.step(0)
        env.step(0)
        with pytest.raises(EnvironmentFailedError, match="fails on purpose"):
            env.step(0)
        env.reset(seed=1)
        env.step(0)
        env.close()
    episodes = check_all(tmp_path, FailingEnv, least=2)
    assert episodes[0].end == "failed"


def test_a_reset_that_raised_in_real_time_is_recorded_and_the_world_goes_on(tmp_path):
    clock = VirtualClock()
    arguments = {"fail_in_reset": 2, "length": 3}
    with serve_gym(FailingEnv, env_kwargs=arguments, fps=10, realtime=RealTime(clock=clock), record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        clock.advance(3.0)
        env.close()
    episodes = check_all(tmp_path, FailingEnv, least=3)
    (stream,) = read_folder(tmp_path).streams
    assert not stream.gaps
    assert any(row["kind"] == 3 for _, rows in read_run(tmp_path).values() for row in rows), "the reset that raised"
    assert episodes[0].end == "terminated"


class Broken(CountingEnv):
    """Its second step returns something else than a step does."""

    def step(self, action: Any) -> Any:
        result = super().step(action)
        return result if self.steps != 2 else result[:3]


def test_a_step_that_returns_nonsense_marks_its_episode_incomplete(tmp_path):
    with serve_gym(Broken, record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        env.step(0)
        with pytest.raises(EnvironmentFailedError):
            env.step(0)
        env.reset(seed=1)
        env.step(0)
        env.close()
    first, second = read_folder(tmp_path).episodes()
    assert (first.end, first.incomplete, second.incomplete) == ("lost", True, False)
    with pytest.raises(RecordingError, match="rows of it were lost"):
        verify(first, Broken)


# What is not as it was recorded


def test_an_environment_that_does_not_follow_its_seed_is_named_at_its_first_step(tmp_path):
    with serve_gym(Noisy, record=tmp_path) as server:
        play(server.url, 5)
    (episode,) = read_folder(tmp_path).episodes()
    done = verify(episode, Noisy)
    assert not done.ok
    assert done.step == 1
    assert re.search(r"step 1: the observation differs: its hash was [0-9a-f]{16}, and is [0-9a-f]{16}", str(done))


def test_an_episode_without_a_seed_before_it_says_so(tmp_path):
    with serve_gym("CartPole-v1", record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset()
        env.step(0)
        env.close()
    (episode,) = read_folder(tmp_path).episodes()
    with pytest.raises(RecordingError, match="no reset with a seed was recorded before it"):
        verify(episode)


def recorded_cartpole(folder: Path, *, observations: bool = True) -> Path:
    """Record some episodes of CartPole; return the file."""
    with serve_gym("CartPole-v1", record=Recording(folder, observations=observations)) as server:
        play(server.url, 100)
    (file,) = folder.glob("*.parquet")
    return file


@pytest.mark.parametrize("column", ["action", "reward", "terminated", "hash", "observation"])
def test_one_changed_cell_is_found_and_its_step_is_named(tmp_path, column):
    change(recorded_cartpole(tmp_path, observations=column != "hash"), column, 5)
    episode = read_folder(tmp_path).episodes()[0]
    done = verify(episode)
    assert not done.ok
    assert done.step == 5, str(done)
    assert "step 5" in str(done)


def test_one_changed_byte_is_found_before_it_is_parsed(tmp_path):
    file = recorded_cartpole(tmp_path)
    data = bytearray(file.read_bytes())
    data[len(data) // 4] ^= 1
    file.write_bytes(data)
    found = read_folder(tmp_path)
    assert "are not those that were written" in str(found.damage[0])


def test_a_replay_yields_what_the_environment_gives(tmp_path):
    recorded_cartpole(tmp_path)
    episode = read_folder(tmp_path).episodes()[0]
    with Replay(episode.stream) as replay:
        rows = [row for _, row in replay.calls(episode.start, episode.stop)]
    recorded = load_episode(episode).observations
    assert [row.observation.tobytes() for row in rows] == [one.tobytes() for one in recorded]


class Pictures(gymnasium.Env[Any, Any]):
    """A megabyte each."""

    observation_space = spaces.Box(0, 255, (1 << 20,), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1 << 20, np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1 << 20, np.uint8), 0.0, False, False, {}


@pytest.mark.slow
def test_what_is_compared_at_once_takes_as_little_memory_as_what_is_written_at_once(tmp_path):
    with serve_gym(Pictures, record=tmp_path) as server:
        play(server.url, 100)
    (episode,) = read_folder(tmp_path).episodes()
    episode.stream.samples("action", episode.own)  # the file is read before: that is another matter
    tracemalloc.start()
    try:
        assert verify(episode, Pictures).ok
        assert sum(1 for _ in observed_rows(episode, Pictures)) == 101
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def lines_run(function: Any) -> int:
    """Return how many lines of Python a call runs, those of its callees and loops among them."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_where_an_episode_is_replayed_from_costs_the_same_in_a_recording_of_any_length(tmp_path):
    lines = []
    for number in (20, 200):
        with serve_gym(CountingEnv, record=tmp_path / str(number)) as server:
            env = make_remote(server.url)
            for seed in range(number):
                env.reset(seed=seed)
                env.step(0)
            env.close()
        *_, last = read_folder(tmp_path / str(number)).episodes()
        assert replayed_from(last) == last.start
        lines.append(lines_run(lambda last=last: replayed_from(last)))
    assert lines[0] == lines[1]


def test_a_recording_calls_nothing_that_it_names(tmp_path):
    """The id is registered here for something else: it is not made, and the entry point of the file is not called."""
    with serve_gym("CartPole-v1", record=tmp_path) as server:
        play(server.url, 5)
    (file,) = tmp_path.glob("*.parquet")
    table = pq.read_table(file)
    name = b"gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    header = table.schema.metadata[b"bridge"]
    assert name in header
    table = table.replace_schema_metadata({b"bridge": header.replace(name, b"os:system")})
    with pa.ipc.new_stream(stream := io.BytesIO(), table.schema) as writer:
        writer.write_table(table)
    forge(file, stream.getvalue())
    episode = read_folder(tmp_path).episodes()[0]
    with pytest.raises(SettingError, match="a recording imports nothing by itself"):
        verify(episode)


def test_one_pass_names_the_episodes_that_differ_and_goes_on_at_the_next_seed(tmp_path):
    with serve_gym("CartPole-v1", record=tmp_path) as server:
        env = make_remote(server.url)
        for seed in (1, None, 2):
            env.reset(seed=seed)
            for step in range(4):
                env.step(step % 2)
        env.close()
    (file,) = tmp_path.glob("*.parquet")
    change(file, "reward", 3)
    (stream,) = read_folder(tmp_path).streams
    first, second, third = verify_stream(stream)
    assert isinstance(first, Verification)
    assert isinstance(second, Verification)
    assert isinstance(third, Verification)
    assert (first.step, third.ok) == (3, True)
    assert second.step == -2
    assert "2 calls before the episode, which it depends on: reward differs" in str(second)


@pytest.mark.slow
def test_frames_are_recorded_of_lanes_in_real_time_and_of_several_agents(tmp_path):
    clock = VirtualClock()
    with serve_gym(
        "CartPole-v1",
        num_envs=2,
        env_kwargs={"render_mode": "rgb_array"},
        fps=10,
        realtime=RealTime(clock=clock),
        record=Recording(tmp_path / "lanes", frames=True),
    ) as server:
        envs = make_vec_remote(server.url)
        envs.reset(seed=1)
        clock.advance(0.5)
        envs.close()
    streams = read_folder(tmp_path / "lanes").streams
    assert len(streams) == 2
    frames = [[np.load(io.BytesIO(row["frame"])) for row in rows if row["frame"]]
              for _, rows in read_run(tmp_path / "lanes").values()]  # fmt: skip
    assert all(frame.shape == (400, 600, 3) for lane in frames for frame in lane)
    assert frames[0][-1].tobytes() != frames[1][-1].tobytes(), "each lane has its own picture"
    with serve_parallel(
        "butterfly/pistonball-v6",
        env_kwargs={"render_mode": "rgb_array"},
        record=Recording(tmp_path / "agents", frames=True),
    ) as server:
        env = make_parallel_remote(server.url)
        env.reset(seed=1)
        env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        env.close()
    ((_, rows),) = read_run(tmp_path / "agents").values()
    assert np.load(io.BytesIO(rows[0]["frame"])).shape[2] == 3


def test_a_call_that_is_written_without_a_step_is_verified(tmp_path, caplog):
    with serve_gym("CartPole-v1", num_envs=2, record=tmp_path) as server:
        envs = make_vec_remote(server.url)
        envs.reset(seed=1)
        until(lambda: list(tmp_path.glob("*.arrow")) and read_folder(tmp_path).episodes())  # so the call is on its own
        size = next(tmp_path.glob("*.arrow")).stat().st_size
        envs.set_attr("gravity", 5.0)
        until(lambda: next(tmp_path.glob("*.arrow")).stat().st_size > size or caplog.text)
        for _ in range(5):
            envs.step([1, 1])
        envs.close()
    assert caplog.text == ""
    check_all(tmp_path, least=2, allow_calls=True)


def test_lanes_in_threads_of_their_own_are_recorded_and_verified(tmp_path):
    clock = VirtualClock()
    with serve_gym(
        "CartPole-v1", num_envs=2, thread_safe=True, fps=10, realtime=RealTime(clock=clock), record=tmp_path
    ) as server:
        envs = make_vec_remote(server.url)
        envs.reset(seed=1)
        clock.advance(3.0)
        envs.set_attr("gravity", 5.0)
        clock.advance(1.0)
        envs.close()
    check_all(tmp_path, least=2, allow_calls=True)


def test_a_difference_says_that_the_oldest_calls_were_deleted(tmp_path):
    """`CountingEnv` counts its episodes, which a reset does not set back."""
    with serve_gym(CountingEnv, record=Recording(tmp_path, max_bytes=30_000)) as server:
        env = make_remote(server.url)
        for _ in range(400):
            env.reset(seed=1)
            for _ in range(3):
                env.step(0)
        env.close()
    (stream,) = read_folder(tmp_path).streams
    assert stream.first > 0
    assert f"may depend on the {stream.first} calls before" in str(verify(stream.episodes()[-1], CountingEnv))


@pytest.mark.parametrize("player", ["", "robot", "person:", "person:" + "x" * 65, "agent:a\nb"])
def test_a_player_that_is_none_is_refused_by_every_kind_of_world(player):
    expected = "expected the setting player to be agent or person"
    for keywords in ({}, {"num_envs": 2}, {"fps": 10.0}):
        with serve_gym("CartPole-v1", **keywords) as server:
            with pytest.raises(RefusedError, match=expected):
                make_vec_remote(server.url, player=player)
            make_vec_remote(server.url, player="person:Ann").close()
    with serve_parallel(Relay) as server:
        with pytest.raises(RefusedError, match=expected):
            make_parallel_remote(server.url, player=player)
        make_parallel_remote(server.url, player="agent").close()


def test_in_a_lock_step_world_of_several_agents_each_action_is_somebodys(tmp_path):
    with serve_parallel(Relay, missing_agent="default", agent_timeout=5.0, record=tmp_path) as server:
        world = make_parallel_remote(server.url)  # has the world made, and shows its agents
        agents = list(world.possible_agents)
        world.close()
        ann = make_remote(f"{server.url}?world=", agent=agents[0], player="person:Ann")
        ann.reset(seed=1)
        ann.step(ann.action_space.sample())
        ann.close()
    (rows,) = [rows for _, rows in read_run(tmp_path).values() if any(row["kind"] == 0 for row in rows)]
    names = {agents[row["lane"]]: row["by"] for row in rows if row["call"] == 1 and row["acted"]}
    assert names[agents[0]] == "person:Ann"
    assert set(names.values()) - {"person:Ann"} <= {"default"}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".sums"], ids=["the file", "the digests"])
def test_whatever_byte_is_changed_the_recording_reads_or_says_why_and_never_passes_for_whole(tmp_path, suffix):
    """One bit of any byte of a file, or of its digests: it is damage that is said."""
    recorded = recorded_cartpole(tmp_path)
    (file,) = tmp_path.glob(f"{recorded.name}{suffix}")
    whole = file.read_bytes()
    generator = np.random.default_rng(5)
    for _ in range(150):
        at, bit = int(generator.integers(len(whole))), int(generator.integers(8))
        data = bytearray(whole)
        data[at] ^= 1 << bit
        file.write_bytes(bytes(data))
        found = read_folder(tmp_path)
        assert found.damage, (at, bit)
        for stream in found.streams:
            assert all(isinstance(done, RecordingError) or done.ok for done in verify_stream(stream))
    for size in generator.integers(len(whole), size=50).tolist():
        file.write_bytes(whole[:size])
        assert read_folder(tmp_path).damage, size


@pytest.mark.parametrize("unattended", [False, True])
def test_episodes_that_nobody_plays_are_recorded_only_where_that_is_asked_for(tmp_path, unattended):
    clock = VirtualClock()
    record = Recording(tmp_path, unattended=unattended)
    settings: dict[str, Any] = {"fps": 10, "realtime": RealTime(clock=clock), "env_kwargs": {"length": 5}}
    with serve_gym(CountingEnv, record=record, **settings) as server:
        person = make_remote(f"{server.url}?world=", player="person:Ann", wait="now")
        person.reset(seed=4)
        person.step(1)
        clock.advance(0.2)
        person.close()
        until(lambda: not world_of(server).agents)
        clock.advance(3.0)  # the rest of Ann's episode, and five that nobody plays
        person = make_remote(f"{server.url}?world=", player="person:Bob", wait="now")
        person.reset(seed=5)
        person.step(1)
        clock.advance(0.5)
        person.close()
    episodes = read_folder(tmp_path).episodes()
    played = [episode for episode in episodes if episode.seed is not None]
    assert [(episode.seed, episode.length, episode.end) for episode in played] == [
        (4, 5, "terminated"),
        (5, 5, "terminated"),
    ]
    assert [episode.players[-1] for episode in played] == ["default", "person:Bob"]
    others = [episode for episode in episodes if episode.seed is None and episode.players == ["default"]]
    assert len(others) >= 5 if unattended else not others
    done = verify(played[0], CountingEnv)  # it counts its episodes, so that Bob's depends on those left out
    assert done.ok, str(done)


@pytest.mark.parametrize("web", [False, True])
def test_a_world_with_a_page_rests_while_nobody_is_in_it(web):
    clock = VirtualClock()
    with serve_gym("CartPole-v1", fps=10, realtime=RealTime(clock=clock), web=web) as server:
        env = make_remote(f"{server.url}?world=", wait="now")
        env.reset(seed=4)
        clock.advance(0.2)
        env.close()
        until(lambda: not world_of(server).agents)
        before = world_of(server).clock_frames
        clock.advance(2.0)
        # The last frame before the rest applies the default action.
        assert world_of(server).clock_frames - before == (1 if web else 20)
        env = make_remote(f"{server.url}?world=", role="spectator", wait="now")
        env.reset()
        before = world_of(server).clock_frames
        clock.advance(2.0)
        assert world_of(server).clock_frames - before == 20, "who watches keeps it going"
        env.close()
