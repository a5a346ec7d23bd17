"""A server's recordings, read by a reader that was written from the documentation alone, and damaged files."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pandas
import pytest
from gymnasium import spaces

from bridge import Recording, make_remote, make_vec_remote, serve_gym
from bridge.errors import EnvironmentFailedError, SettingError
from bridge.recording.reader import read_folder
from bridge.testing import CountingEnv, FailingEnv
from bridge.wrappers import BlockingReset
from tests.recording_reader import episodes_of, hash_of, read_run
from tests.support import everywhere, minigrid


def play(url: str, episodes: int, seed: int | None = 7, **keywords: object) -> list[list[tuple]]:
    """Play episodes by a fixed policy; return what the client saw: action, observation, reward, flags of each step."""
    env = make_remote(url, **keywords)
    env.action_space.seed(3)
    seen = []
    for number in range(episodes):
        observation, _ = env.reset(seed=seed if number == 0 else None)
        steps = [(None, observation, 0.0, False, False)]
        while not (steps[-1][3] or steps[-1][4]):
            action = env.action_space.sample()
            observation, reward, terminated, truncated, _ = env.step(action)
            steps.append((action, observation, reward, terminated, truncated))
        seen.append(steps)
    env.close()
    return seen


@everywhere
def test_a_reader_written_from_the_page_reads_what_the_client_saw(tmp_path, isolation):
    with serve_gym("CartPole-v1", record=Recording(tmp_path, observations=True), isolation=isolation) as server:
        seen = play(server.url, 4, player="person:Ann")
    streams = read_run(tmp_path)
    assert list(streams) == [1]
    header, rows = streams[1]
    assert (header["format"], header["kind"], header["env_id"], header["observations"]) == (
        2,
        "env",
        "CartPole-v1",
        True,
    )
    assert header["versions"]["gymnasium"] == gymnasium.__version__
    episodes = episodes_of(rows)
    assert len(episodes) == 4
    for episode, steps in zip(episodes, seen, strict=True):
        assert [row["reward"] for row in episode] == [None, *(step[2] for step in steps[1:])]
        assert [row["terminated"] for row in episode] == [step[3] for step in steps]
        assert [row["truncated"] for row in episode] == [step[4] for step in steps]
        assert [row["action"] for row in episode] == [None, *(int(step[0]) for step in steps[1:])]
        assert [row["t"] for row in episode] == list(range(len(steps)))
        assert [row["by"] for row in episode] == [None, *["person:Ann"] * (len(steps) - 1)]
        for row, step in zip(episode, steps, strict=True):
            assert np.array(row["observation"], np.float32).tobytes() == step[1].tobytes()
        assert (np.diff([row["time"] for row in episode]) >= 0).all()
    assert json.loads(rows[0]["event"]) == {"seed": 7}


def test_pandas_reads_a_recording(tmp_path):
    with serve_gym("CartPole-v1", record=Recording(tmp_path, observations=True)) as server:
        seen = play(server.url, 2)
    table = pandas.read_parquet(next(tmp_path.glob("*.parquet")))
    steps = table[table.kind == 0]
    assert steps.groupby("episode").reward.sum().tolist() == [float(len(one) - 1) for one in seen]
    assert np.stack(steps.observation)[-1].tobytes() == seen[1][-1][1].tobytes()


def test_without_observations_their_hashes_are_recorded_alone(tmp_path):
    with serve_gym("CartPole-v1", record=tmp_path) as server:
        seen = play(server.url, 1)
    _, rows = read_run(tmp_path)[1]
    (episode,) = episodes_of(rows)
    assert "observation" not in episode[0]
    assert [row["hash"] for row in episode] == [hash_of(step[1]) for step in seen[0]]


def test_the_columns_of_a_dict_are_named_as_on_the_wire_and_texts_are_texts(tmp_path):
    with serve_gym(minigrid, record=Recording(tmp_path, observations=True)) as server:
        env = make_remote(server.url)
        observation, _ = env.reset(seed=1)
        env.step(0)
        env.close()
    _, rows = read_run(tmp_path)[1]
    assert rows[0]["observation.image"] == observation["image"].ravel().tolist()
    assert rows[0]["observation.mission"] == observation["mission"]


def test_lanes_are_one_stream_with_a_column_entry_for_each(tmp_path):
    with serve_gym("CartPole-v1", num_envs=3, record=Recording(tmp_path, observations=True)) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        first, _ = envs.reset(seed=5)
        envs.action_space.seed(1)
        rewards = [envs.step(envs.action_space.sample())[1] for _ in range(60)]
        envs.close()
    header, rows = read_run(tmp_path)[1]
    assert (header["kind"], header["lanes"]) == ("lanes", 3)
    given = {(row["call"], row["lane"]): row for row in rows if row["kind"] <= 1}
    for call, each in enumerate(rewards, 1):
        for lane in range(3):
            row = given[call, lane]
            assert row["reward"] == (each[lane] if row["kind"] == 0 else None)
    assert np.array([given[0, lane]["observation"] for lane in range(3)], np.float32).tobytes() == first.tobytes()
    episodes = read_folder(tmp_path).episodes()
    assert {episode.lane for episode in episodes} == {0, 1, 2}
    ended = sum(row["terminated"] or row["truncated"] for row in rows)
    assert sum(episode.end == "terminated" for episode in episodes) == ended > 0
    for episode in episodes:
        assert episode.rewards.tolist() == [1.0] * episode.length


def test_what_the_environment_raises_ends_its_episode_in_the_recording(tmp_path):
    with serve_gym(FailingEnv, env_kwargs={"fail_in_step": 3}, record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        env.step(0)
        env.step(0)
        with pytest.raises(EnvironmentFailedError, match="TestFailure"):
            env.step(0)
        env.close()
    (episode,) = read_folder(tmp_path).episodes()
    assert episode.end == "failed"
    _, rows = read_run(tmp_path)[1]
    assert any(row["kind"] == 2 and "TestFailure" in row["event"] for row in rows)


def test_calls_and_attributes_that_a_client_sets_are_recorded(tmp_path):
    with serve_gym(CountingEnv, record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        env.set_wrapper_attr("color", "red")
        env.step(env.action_space.sample())
        env.close()
    _, rows = read_run(tmp_path)[1]
    assert [json.loads(row["event"])["what"] for row in rows if row["kind"] == 17] == ["write"]


class Network(gymnasium.Env):
    """Its observation is one graph, into which it writes the number of the step."""

    observation_space = spaces.Graph(spaces.Box(0, 100, (1,)), None)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.graph = spaces.GraphInstance(np.zeros((2, 1), np.float32), None, None)

    def reset(self, *, seed=None, options=None):
        self.graph.nodes[:] = 0
        return self.graph, {}

    def step(self, action):
        self.graph.nodes[:] += 1
        return self.graph, 0.0, False, False, {}


def test_a_graph_that_its_environment_writes_over_is_recorded_as_it_was(tmp_path):
    with serve_gym(Network, record=Recording(tmp_path, observations=True)) as server:
        env = make_remote(server.url)
        env.reset()
        for _ in range(5):
            env.step(0)
        env.close()
    ((episode,), (stream,)) = read_folder(tmp_path).episodes(), read_folder(tmp_path).streams
    assert [graph.nodes[0, 0] for graph in stream.samples("observation", episode.own)] == [0, 1, 2, 3, 4, 5]


class Takes(gymnasium.Env):
    """Writes into the actions that it is given."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Box(0, 100, (2,), np.int64)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        action[:] = 0
        return 1, 0.0, False, False, {}


def test_an_action_that_its_environment_writes_over_is_recorded_as_it_was(tmp_path):
    with serve_gym(Takes, record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset()
        for number in range(1, 6):
            env.step(np.full(2, number))
        env.close()
    ((episode,), (stream,)) = read_folder(tmp_path).episodes(), read_folder(tmp_path).streams
    assert [action.tolist() for action in stream.samples("action", episode.own[1:])] == [[n, n] for n in range(1, 6)]


def test_options_travel_into_the_recording(tmp_path):
    with serve_gym(CountingEnv, record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset(seed=1, options={"level": (1, 2.5)})
        env.close()
    (stream,) = read_folder(tmp_path).streams
    assert stream.resets[0].options == {"level": (1, 2.5)}


def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serve_gym("CartPole-v1") as server:
        play(server.url, 1)
    assert list(tmp_path.iterdir()) == []


def test_what_is_recorded_is_said_in_one_place(tmp_path):
    with pytest.raises(TypeError, match=r"give record=Recording\(observations=…\)"):
        serve_gym("CartPole-v1", record=tmp_path, record_observations=True)
    with pytest.raises(SettingError, match=r"expected record to be a folder, or bridge.Recording\(folder, …\), got 5"):
        serve_gym("CartPole-v1", record=5)
    with pytest.raises(SettingError, match=r"expected record to be a folder, .* got ''"):
        serve_gym("CartPole-v1", record="")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"cannot record into .*file"):
        serve_gym("CartPole-v1", record=tmp_path / "file" / "runs")


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_that_is_none_is_refused(tmp_path, limit):
    with pytest.raises(SettingError, match="expected max_bytes to be a positive number of bytes"):
        Recording(tmp_path, max_bytes=limit)
