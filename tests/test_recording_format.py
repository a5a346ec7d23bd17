"""What a server records, read by a reader that was written from the documentation alone, and damaged files."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from bridge import make_remote, make_vec_remote, serve_gym
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
    with serve_gym("CartPole-v1", record=tmp_path, record_observations=True, isolation=isolation) as server:
        seen = play(server.url, 4, player="person:Ann")
    streams = read_run(tmp_path)
    assert list(streams) == [1]
    world, records = streams[1]
    assert (world["kind"], world["env_id"], world["observations"]) == ("env", "CartPole-v1", True)
    assert world["versions"]["gymnasium"] == gymnasium.__version__
    episodes = episodes_of(records)
    assert len(episodes) == 4
    for episode, steps in zip(episodes, seen, strict=True):
        assert episode["reward"].tolist() == [step[2] for step in steps]
        assert episode["terminated"].tolist() == [step[3] for step in steps]
        assert episode["truncated"].tolist() == [step[4] for step in steps]
        assert episode["action"][1:].tolist() == [int(step[0]) for step in steps[1:]]
        for row, step in enumerate(steps):
            assert episode["observation"][row].tobytes() == step[1].tobytes()
            assert episode["hash"][row].tobytes() == hash_of(step[1])
        assert (np.diff(episode["time"]) >= 0).all()
    header, columns = records[0]
    assert header["resets"][0] == {"row": 0, "seed": 7}
    assert all(header["players"][by] == "person:Ann" for by in columns["by"][columns["kind"] == 0])


def test_without_observations_their_hashes_are_recorded_alone(tmp_path):
    with serve_gym("CartPole-v1", record=tmp_path) as server:
        seen = play(server.url, 1)
    _, records = read_run(tmp_path)[1]
    (episode,) = episodes_of(records)
    assert "observation" not in episode
    assert [row.tobytes() for row in episode["hash"]] == [hash_of(step[1]) for step in seen[0]]


def test_the_columns_of_a_dict_are_named_as_on_the_wire_and_texts_are_encoded_values(tmp_path):
    with serve_gym(minigrid, record=tmp_path, record_observations=True) as server:
        env = make_remote(server.url)
        observation, _ = env.reset(seed=1)
        env.step(0)
        env.close()
    _, records = read_run(tmp_path)[1]
    columns = records[0][1]
    assert columns["observation.image"][0].tobytes() == observation["image"].tobytes()
    lengths = columns["observation.mission.lengths"]
    first = columns["observation.mission.bytes"][: lengths[0]].tobytes()
    assert observation["mission"].encode() in first


def test_lanes_are_one_stream_with_a_column_entry_for_each(tmp_path):
    with serve_gym("CartPole-v1", num_envs=3, record=tmp_path, record_observations=True) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        first, _ = envs.reset(seed=5)
        envs.action_space.seed(1)
        rewards = [envs.step(envs.action_space.sample())[1] for _ in range(60)]
        envs.close()
    world, records = read_run(tmp_path)[1]
    assert (world["kind"], world["lanes"]) == ("lanes", 3)
    reward = np.concatenate([columns["reward"] for _, columns in records])
    assert reward[1:].tolist() == [row.tolist() for row in rewards]
    assert records[0][1]["observation"][0].tobytes() == first.tobytes()
    assert records[0][1]["hash"][0].tobytes() == hash_of(first)
    episodes = read_folder(tmp_path).episodes()
    assert {episode.lane for episode in episodes} == {0, 1, 2}
    ended = sum(int((columns["terminated"] | columns["truncated"]).sum()) for _, columns in records)
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
    _, records = read_run(tmp_path)[1]
    assert any("TestFailure" in text for header, _ in records for text in header["errors"].values())


def test_calls_and_attributes_that_a_client_sets_are_recorded(tmp_path):
    with serve_gym(CountingEnv, record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        env.set_wrapper_attr("color", "red")
        env.step(env.action_space.sample())
        env.close()
    _, records = read_run(tmp_path)[1]
    assert [call[1] for header, _ in records for call in header["calls"] if call[1] == "write"] == ["write"]


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


def test_keywords_of_a_recording_without_a_folder_are_refused():
    for keywords in ({"record_observations": True}, {"record_frames": True}, {"record_limit": 5}):
        with pytest.raises(SettingError, match="give record= too"):
            serve_gym("CartPole-v1", **keywords)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"cannot record into .*file"):
        serve_gym("CartPole-v1", record=tmp_path / "file" / "runs")


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_that_is_none_is_refused(tmp_path, limit):
    with pytest.raises(SettingError, match="expected record_limit to be a positive number of bytes"):
        serve_gym("CartPole-v1", record=tmp_path, record_limit=limit)
