"""What `evaluate(record=…)` records: the episodes that it counts, and nothing else."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import Recorder, make_vec_remote, serve_gym
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import RemoteError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.policies import compare, evaluate
from bridge.recording.exports import datasets_of, export_minari
from bridge.recording.reader import read_folder
from bridge.recording.replay import verify
from bridge.recording.selection import Selection
from bridge.wrappers import BlockingReset
from tests.peers import Stream
from tests.recording_reader import episodes_of, read_run
from tests.web_envs import Paddle


class Task(gymnasium.Env):
    """Ends after as many steps as the seed says; the observation has the seed, and -1 where there is none."""

    observation_space = spaces.Dict({"seed": spaces.Box(-1, 1000, (1,), np.float32), "name": spaces.Text(8)})
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.count = -1 if seed is None else seed, 0
        self.most = 40 if seed is None else 2 + 3 * seed % 11
        return self._seen(), {}

    def _seen(self):
        return {"seed": np.array([self.seed], np.float32), "name": f"t{self.count}"}

    def step(self, action):
        self.count += 1
        return self._seen(), 0.5, self.count == self.most, False, {}


def still(observations):
    return np.full((len(observations["seed"]), 2), 0.25, np.float32)


def listed(folder, found):
    """Check that a folder has the episodes of an evaluation, each once, as they were played; return them."""
    episodes = read_folder(folder).episodes()
    assert sorted(episode.seed for episode in episodes) == [episode.seed for episode in found.episodes]
    for episode in episodes:
        counted = found.episodes[episode.seed - found.episodes[0].seed]
        assert (episode.length, episode.total) == (counted.length, counted.total)
        assert (episode.end, episode.incomplete, episode.players) == ("terminated", False, ["agent"])
    assert sum(episode.length for episode in episodes) == sum(episode.length for episode in found.episodes)
    assert Selection().of(episodes) == episodes
    return episodes


@pytest.mark.parametrize(
    ("lanes", "num_envs"),
    [
        (1, 1),
        (1, 4),
        (2, 2),
        (1, 16),
        (4, None),
        (3, 6),
        (8, 16),
    ],
)
def test_as_many_episodes_are_recorded_and_exported_as_were_asked_for(lanes, num_envs, tmp_path):
    with serve_gym(Task, num_envs=lanes) as server:
        found = evaluate(server.url, still, episodes=7, seed=3, num_envs=num_envs, record=tmp_path / "runs")
    assert [episode.length for episode in found.episodes] == [2 + 3 * seed % 11 for seed in range(3, 10)]
    episodes = listed(tmp_path / "runs", found)
    ((agent, data),) = datasets_of(episodes, None, False)
    assert agent is None
    assert len(data) == 7
    for one in data:
        assert {float(seen["seed"][0]) for seen in one.observations} == {one.episode.seed}
        assert [seen["name"] for seen in one.observations] == [f"t{step}" for step in range(one.episode.length + 1)]
        assert np.array_equal(one.actions, np.full((one.episode.length, 2), 0.25, np.float32))


@pytest.mark.parametrize("num_envs", [4, 9])
def test_a_dataset_has_no_other_episodes(num_envs, tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    with serve_gym("CartPole-v1") as server:
        found = evaluate(
            server.url,
            lambda seen: (seen[:, 2] > 0).astype(int),
            episodes=6,
            num_envs=num_envs,
            record=tmp_path / "runs",
        )
    episodes = listed(tmp_path / "runs", found)
    for episode in episodes:
        assert verify(episode).ok
    (name,) = export_minari(episodes, "cartpole/evaluated-v0")
    dataset = minari.load_dataset(name)
    assert dataset.total_episodes == 6
    assert sorted(sum(episode.rewards) for episode in dataset.iterate_episodes()) == sorted(found.returns)


def test_a_slot_that_has_no_episode_left_is_not_stepped(tmp_path):
    with serve_gym(Task, record=tmp_path / "server") as server:
        found = evaluate(server.url, still, episodes=5, num_envs=8)
    episodes = [episode for episode in read_folder(tmp_path / "server").episodes() if episode.length]
    assert sorted(episode.seed for episode in episodes) == list(range(5))
    assert sum(episode.length for episode in episodes) == found.steps


def test_both_policies_of_a_comparison_are_recorded(tmp_path):
    with serve_gym(Task) as server:
        compare(server.url, still, still, episodes=3, num_envs=4, record=tmp_path)
    assert sorted(episode.seed for episode in read_folder(tmp_path).episodes()) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("spares", [False, True])
@pytest.mark.parametrize("lanes", [1, 2])
def test_an_episode_that_was_begun_again_is_recorded_once(lanes, spares, tmp_path):
    servers = [serve_gym(Task, num_envs=lanes) for _ in range(4)]
    calls = 0

    def stop_then(observations):
        nonlocal calls
        calls += 1
        if calls == 5:
            servers[0].stop(0.0)
        return still(observations)

    urls = [server.url for server in servers]
    places = {"urls": urls[:3], "spares": urls[3:]} if spares else {"urls": urls}
    found = evaluate(policy=stop_then, episodes=12, seed=3, timeout=5.0, record=tmp_path, **places)
    for server in servers:
        server.stop()
    assert found.lost
    listed(tmp_path, found)
    # The rows of what was given up are there, and say what they are.
    told = [row["event"] for _, rows in _runs(tmp_path) for row in rows if row["kind"] == 2]
    assert len(told) == len(found.lost)
    assert all('"discarded": true' in text for text in told)


def _runs(folder):
    """The streams of all recordings of a folder, which has one of each half of the slots."""
    found = []
    for run in {path.name.partition(".")[0] for path in folder.iterdir()}:
        part = folder / run
        part.mkdir()
        for path in folder.glob(f"{run}.*"):
            path.rename(part / path.name)
        found += read_run(part).values()
    return found


class RaisesOnce(Task):
    """Raises in the middle of an episode of the seed 4, the first time."""

    raised = False

    def step(self, action):
        if self.seed == 4 and self.count == 1 and not RaisesOnce.raised:
            RaisesOnce.raised = True
            raise RuntimeError("the gripper is stuck")
        return super().step(action)


@pytest.mark.parametrize(("lanes", "num_envs"), [(1, 1), (1, 3), (2, None)])
def test_an_episode_whose_environment_raised_is_recorded_as_it_was_played_again(lanes, num_envs, tmp_path):
    RaisesOnce.raised = False
    with serve_gym(RaisesOnce, num_envs=lanes) as server:
        found = evaluate(server.url, still, episodes=5, seed=2, num_envs=num_envs, record=tmp_path)
    assert len(found.lost) == 1 or lanes == 2
    assert RaisesOnce.raised
    listed(tmp_path, found)


class AlwaysRaises(Task):
    def step(self, action):
        if self.seed == 4:
            raise RuntimeError("the gripper is stuck")
        return super().step(action)


def test_an_evaluation_that_fails_leaves_what_it_had_counted(tmp_path):
    with serve_gym(AlwaysRaises) as server, pytest.raises(RemoteError, match=r"\(seed 4\)"):
        evaluate(server.url, still, episodes=6, record=tmp_path)
    assert [episode.seed for episode in read_folder(tmp_path).episodes()] == [0, 1, 2, 3]


@pytest.mark.parametrize("num_envs", [1, 4])
def test_after_ctrl_c_the_episodes_that_were_cut_are_unfinished(num_envs, tmp_path):
    calls = 0

    def interrupt(observations):
        nonlocal calls
        calls += 1
        if calls == 30:
            raise KeyboardInterrupt
        return still(observations)

    with serve_gym(Task) as server, pytest.raises(KeyboardInterrupt):
        evaluate(server.url, interrupt, episodes=50, num_envs=num_envs, record=tmp_path)
    episodes = read_folder(tmp_path).episodes()
    whole = Selection().of(episodes)
    assert whole
    assert [episode.length for episode in whole] == [2 + 3 * episode.seed % 11 for episode in whole]
    cut = [episode for episode in episodes if episode not in whole]
    assert len(cut) <= num_envs
    assert all(episode.end == "closed" for episode in cut)
    assert len({episode.seed for episode in episodes}) == len(episodes)


def test_in_real_time_as_many_are_recorded(tmp_path):
    with serve_gym(Task, fps=200.0) as server:
        found = evaluate(server.url, still, episodes=5, num_envs=3, record=tmp_path)
    episodes = read_folder(tmp_path).episodes()
    assert sorted(episode.seed for episode in episodes) == list(range(5))
    assert [len(found.episodes), {episode.end for episode in episodes}] == [5, {"terminated"}]


def test_a_reader_of_the_files_alone_sees_no_other_rows(tmp_path):
    with serve_gym(Task, num_envs=3) as server:
        found = evaluate(server.url, still, episodes=4, num_envs=3, record=tmp_path)
    rows = [each for _, stream in _runs(tmp_path) for each in episodes_of(stream)]
    assert sorted(len(each) - 1 for each in rows) == sorted(episode.length for episode in found.episodes)


def hold_left(person):
    answer = person.ask(step=pb.StepRequest(actions={1: pack_tensor(np.int64(-1))}))
    assert answer.WhichOneof("payload") == "step", answer


def test_who_took_over_is_recorded_with_what_was_executed(tmp_path):
    """Not the policy, which asked for something else."""
    with serve_gym(Paddle, env_kwargs={"length": 6}) as server:
        person = Stream(server, own_connection=True)
        calls = 0

        def act(observations):
            nonlocal calls
            calls += 1
            if calls == 3:
                person.join("", role="takeover", name="Ann")
                person.ask(step=pb.StepRequest())
            if calls >= 3:
                hold_left(person)
            return np.ones(len(observations), np.int64)

        found = evaluate(f"{server.url}?world=", act, episodes=1, record=tmp_path / "evaluation")
        person.die()
        person.channel.close()
    (episode,) = read_folder(tmp_path / "evaluation").episodes()
    corrected = found.episodes[0].corrected
    assert 0 < corrected < 6
    assert episode.players == ["agent", "person:Ann"]
    actions = episode.stream.samples("action", episode.own[1:])
    assert actions == [1] * (6 - corrected) + [-1] * corrected
    assert verify(episode, lambda: Paddle(length=6)).ok


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_recorder_records_who_took_over(mode, tmp_path):
    with serve_gym(Paddle, env_kwargs={"length": 4}, num_envs=2) as server:
        envs = BlockingReset(make_vec_remote(f"{server.url}?world="), autoreset_mode=mode)
        envs = Recorder(envs, tmp_path)
        envs.reset(seed=0)
        envs.step(np.ones(2, np.int64))
        person = Stream(server, own_connection=True)
        person.join("", role="takeover", lane=1, name="Dan")
        person.ask(step=pb.StepRequest())
        for _ in range(3):
            hold_left(person)
            envs.step(np.ones(2, np.int64))
        person.die()
        person.channel.close()
        envs.close()
    episodes = [stream.episodes()[0] for stream in read_folder(tmp_path).streams]
    assert [episode.players for episode in episodes] == [["agent"], ["agent", "person:Dan"]]
    actions = [episode.stream.samples("action", episode.own[1:]) for episode in episodes]
    assert actions == [[1, 1, 1, 1], [1, -1, -1, -1]]
