"""Exports: what Minari's own loader reads back is what was recorded; arrays, films, and which episodes are chosen."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import (
    Recorder,
    Recording,
    make_parallel_remote,
    make_remote,
    make_vec_remote,
    serve_gym,
    serve_parallel,
)
from bridge.cli import main
from bridge.errors import BridgeError, EnvironmentFailedError, RecordingError, SettingError
from bridge.recording.episodes import has_frames, load_episode
from bridge.recording.exports import export_minari, export_mp4, write_film
from bridge.recording.reader import read_folder
from bridge.recording.selection import Selection
from bridge.testing import EVERY_SPACE, FailingEnv, SpaceEnv
from tests.parallel_envs import Relay
from tests.support import NO_BOX2D, assert_identical, import_box2d, minigrid, play_vector, sampled, until

HAS_BOX2D = import_box2d()


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Minari, with a folder of its own for its datasets."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    return pytest.importorskip("minari")


def play(url: str, episodes: int, steps: int = 200, seed: int = 7, **keywords: Any) -> list[list[Any]]:
    """Play episodes; return what the client saw of each: observations, actions, rewards, flags."""
    env = make_remote(url, **keywords)
    env.action_space.seed(3)
    found = []
    for number in range(episodes):
        observation, _ = env.reset(seed=seed if number == 0 else None)
        seen: list[Any] = [[observation], [], [], [], []]
        for _ in range(steps):
            action = env.action_space.sample()
            observation, reward, terminated, truncated, _ = env.step(action)
            for part, item in zip(seen, (observation, action, reward, terminated, truncated), strict=True):
                part.append(item)
            if terminated or truncated:
                break
        found.append(seen)
    env.close()
    return found


@pytest.mark.parametrize("observations", [True, False], ids=["recorded", "replayed"])
@pytest.mark.parametrize("env_id", sampled(["CartPole-v1", "Pendulum-v1", "Blackjack-v1", "Taxi-v4"], 4))
def test_minari_reads_back_exactly_what_the_client_saw(tmp_path, datasets, env_id, observations):
    with serve_gym(env_id, record=Recording(tmp_path / "runs", observations=observations)) as server:
        seen = play(server.url, 4)
    episodes = read_folder(tmp_path / "runs").episodes()
    assert export_minari(episodes, "test/exact-v0") == ["test/exact-v0"]
    dataset = datasets.load_dataset("test/exact-v0")
    assert dataset.total_episodes == 4
    assert dataset.total_steps == sum(len(one[1]) for one in seen)
    assert dataset.observation_space == gymnasium.make(env_id).observation_space
    assert dataset.action_space == gymnasium.make(env_id).action_space
    for episode, one in zip(dataset.iterate_episodes(), seen, strict=True):
        assert_identical(as_rows(episode.observations), [plain(item) for item in one[0]])
        assert_identical(as_rows(episode.actions), [plain(item) for item in one[1]])
        assert episode.rewards.tolist() == one[2]
        assert episode.terminations.tolist() == one[3]
        assert episode.truncations.tolist()[:-1] == one[4][:-1]
    assert dataset.recover_environment().spec.id == env_id


def plain(item: Any) -> Any:
    return tuple(int(part) for part in item) if isinstance(item, tuple) else np.asarray(item)


def as_rows(data: Any) -> list[Any]:
    if isinstance(data, tuple):
        return [tuple(int(part[row]) for part in data) for row in range(len(data[0]))]
    return [np.asarray(row) for row in data]


@pytest.mark.skipif(not HAS_BOX2D, reason=NO_BOX2D)
def test_pictures_are_exported_without_loss(tmp_path, datasets):
    with serve_gym("CarRacing-v3", record=Recording(tmp_path / "runs", observations=True)) as server:
        ((observations, *_),) = play(server.url, 1, steps=6)
    episodes = read_folder(tmp_path / "runs").episodes()
    export_minari(episodes, "test/pictures-v0")
    (episode,) = datasets.load_dataset("test/pictures-v0").iterate_episodes()
    assert episode.observations.tobytes() == np.stack(observations).tobytes()
    assert episode.truncations.tolist() == [False] * 5 + [True], "an episode that was cut off is truncated"


def test_dicts_and_texts_come_back_exactly(tmp_path, datasets):
    with serve_gym(minigrid, record=tmp_path / "runs") as server:
        ((observations, actions, *_),) = play(server.url, 1, steps=6)
    export_minari(read_folder(tmp_path / "runs").episodes(), "test/dict-v0", env=minigrid)
    (episode,) = datasets.load_dataset("test/dict-v0").iterate_episodes()
    assert set(episode.observations) == set(observations[0])
    assert episode.observations["image"].tobytes() == np.stack([seen["image"] for seen in observations]).tobytes()
    assert list(episode.observations["mission"]) == [seen["mission"] for seen in observations]
    assert episode.actions.tolist() == [int(action) for action in actions]


def test_the_step_that_raised_is_no_part_of_a_dataset(tmp_path, datasets):
    with serve_gym(FailingEnv, env_kwargs={"fail_in_step": 3}, record=Recording(tmp_path, observations=True)) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        env.step(0)
        env.step(0)
        with pytest.raises(EnvironmentFailedError):
            env.step(0)
        env.close()
    episodes = read_folder(tmp_path).episodes()
    assert Selection().of(episodes) == [], "an episode that failed is no good one"
    export_minari(Selection(complete=False).of(episodes), "test/failed-v0")
    dataset = datasets.load_dataset("test/failed-v0")
    (episode,) = dataset.iterate_episodes()
    assert episode.observations.tolist() == [[1, 0], [1, 1], [1, 2]]
    assert episode.truncations.tolist() == [False, True]
    (told,) = dataset.storage.get_episode_metadata([0])
    assert told["end"] == "failed"


def test_an_export_says_how_many_episodes_failed(tmp_path, datasets, capsys):
    with serve_gym(FailingEnv, env_kwargs={"fail_in_step": 3}, record=Recording(tmp_path, observations=True)) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        with pytest.raises(EnvironmentFailedError):
            [env.step(0) for _ in range(3)]
        env.close()
    assert main(["export", str(tmp_path), "--minari", "test/none-v0"]) == 1
    assert "left out: 1 failed or incomplete" in (said := "".join(capsys.readouterr()))
    assert "--unfinished takes also those that failed" in said
    assert main(["export", str(tmp_path), "--minari", "test/all-v0", "--unfinished"]) == 0


def test_an_export_says_how_many_episodes_have_no_step(tmp_path, datasets):
    with serve_gym("CartPole-v1", record=Recording(tmp_path / "runs", observations=True)) as server:
        play(server.url, 1, steps=2)
        play(server.url, 1, steps=0)
    said = []
    export_minari(read_folder(tmp_path / "runs").episodes(), "test/acted-v0", say=said.append)
    assert said[0] == "left out: 1 of 2 episodes, with no step"
    assert said[1].startswith("test/acted-v0: 1 episode, 2 steps")


def test_an_export_says_that_it_needs_a_replay_as_something_was_not_recorded(tmp_path, datasets):
    """Of a robot the remedy is to record more: a replay would move it."""
    for folder in ("seen", "unseen"):
        with serve_gym(FailingEnv, record=Recording(tmp_path / folder, observations=folder == "seen")) as server:
            play(server.url, 1, steps=2)
    remedy = r"Recording\(FOLDER, {0}=True\) does, so they come from a replay, which resets and steps the environment: "
    with pytest.raises(SettingError, match="frames were not recorded, as " + remedy.format("frames")):
        export_mp4(read_folder(tmp_path / "seen").episodes(), tmp_path / "films")
    with pytest.raises(SettingError, match="observations were not recorded, as " + remedy.format("observations")):
        export_minari(read_folder(tmp_path / "unseen").episodes(), "test/unseen-v0")


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_a_dataset_of_minari_says_who_chose_each_action(tmp_path, datasets, data_format):
    with serve_gym("CartPole-v1", record=Recording(tmp_path / "runs", observations=True)) as server:
        ((_, actions, *_),) = play(server.url, 1, player="person:Ann")
    export_minari(read_folder(tmp_path / "runs").episodes(), "test/who-v0", data_format=data_format)
    dataset = datasets.load_dataset("test/who-v0")
    (episode,) = dataset.iterate_episodes()
    names = [name.decode() if isinstance(name, bytes) else str(name) for name in episode.infos["by"]]
    assert names == ["", *["person:Ann"] * len(actions)]
    (told,) = dataset.storage.get_episode_metadata([0])
    assert (told["by"], told["end"]) == ("person:Ann", "terminated")


def test_lanes_are_episodes_of_their_own(tmp_path, datasets):
    from bridge import make_vec_remote
    from bridge.wrappers import BlockingReset

    with serve_gym("CartPole-v1", num_envs=2, record=Recording(tmp_path / "runs", observations=True)) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        play_vector(envs, 80, seed=1)
    episodes = Selection().of(read_folder(tmp_path / "runs").episodes())
    export_minari(episodes, "test/lanes-v0")
    dataset = datasets.load_dataset("test/lanes-v0")
    assert dataset.total_episodes == len(episodes) >= 3
    for episode, recorded in zip(dataset.iterate_episodes(), episodes, strict=True):
        assert episode.rewards.tolist() == recorded.rewards.tolist()
        assert len(episode.observations) == recorded.length + 1
        assert (episode.terminations | episode.truncations).tolist() == [False] * (recorded.length - 1) + [True]


def test_several_agents_give_a_dataset_each(tmp_path, datasets):
    with serve_parallel(Relay, record=Recording(tmp_path / "runs", observations=True)) as server:
        env = make_parallel_remote(server.url)
        env.reset(seed=3)
        while env.agents:
            env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        agents = list(env.possible_agents)
        env.close()
    episodes = read_folder(tmp_path / "runs").episodes()
    names = export_minari(episodes, "test/relay-v1")
    assert names == [f"test/relay-{agent}-v1" for agent in agents]
    for name, agent in zip(names, agents, strict=True):
        (episode,) = datasets.load_dataset(name).iterate_episodes()
        data = load_episode(episodes[0], agent=agent)
        assert episode.rewards.tolist() == data.rewards.tolist()
        assert len(episode) == len(data.actions) > 0


def test_a_trainer_reads_the_dataset_and_learns_the_recorded_policy(tmp_path, datasets):
    """Behaviour cloning by least squares: of a policy that is a line, the data give that line back."""
    with serve_gym("CartPole-v1", record=Recording(tmp_path / "runs", observations=True)) as server:
        env = make_remote(server.url)
        for number in range(5):
            observation, _ = env.reset(seed=number)
            ended, steps = False, 0
            while not ended and steps < 200:
                observation, _, terminated, truncated, _ = env.step(expert(observation))
                ended, steps = terminated or truncated, steps + 1
        env.close()
    export_minari(read_folder(tmp_path / "runs").episodes(), "test/expert-v0")
    dataset = datasets.load_dataset("test/expert-v0")
    seen = np.concatenate([episode.observations[:-1] for episode in dataset.iterate_episodes()])
    acted = np.concatenate([episode.actions for episode in dataset.iterate_episodes()])
    weights, *_ = np.linalg.lstsq(np.c_[seen, np.ones(len(seen))], 2.0 * acted - 1.0, rcond=None)
    env = dataset.recover_environment()
    total = 0.0
    observation, _ = env.reset(seed=77)
    for _ in range(200):
        observation, reward, terminated, truncated, _ = env.step(int(np.r_[observation, 1.0] @ weights > 0))
        total += float(reward)
        if terminated or truncated:
            break
    env.close()
    assert total >= 150, "the cloned policy balances the pole as the recorded one does"


def expert(observation: Any) -> int:
    return int(3.0 * observation[2] + observation[3] + 0.1 * observation[0] + 0.3 * observation[1] > 0)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded frames", "frames of a replay"])
def test_a_film_has_a_frame_for_each_observation(tmp_path, recorded):
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    recording = Recording(tmp_path / "runs", frames=recorded, observations=recorded)
    with serve_gym("CartPole-v1", env_kwargs={"render_mode": "rgb_array"}, record=recording) as server:
        play(server.url, 1, steps=8)
    (episode,) = read_folder(tmp_path / "runs").episodes()
    assert has_frames(episode) == recorded
    (film,) = export_mp4([episode], tmp_path, fps=10)
    frames, _ = ffmpeg.count_frames_and_secs(str(film))
    assert frames == episode.length + 1


def test_a_film_of_an_environment_that_cannot_draw_says_why_in_a_line(tmp_path):
    pytest.importorskip("av")
    with serve_gym(DrawsNothing, record=Recording(tmp_path / "runs", observations=True)) as server:
        play(server.url, 1, steps=3)
    with pytest.raises(RecordingError, match=r"gives no frames: the environment raised \w+ in render: .*$") as caught:
        export_mp4(read_folder(tmp_path / "runs").episodes(), tmp_path, env=DrawsNothing)
    assert "Traceback" not in str(caught.value)


def test_a_film_that_cannot_be_finished_is_removed(tmp_path):
    pytest.importorskip("av")

    def pictures() -> Iterator[Any]:
        """More than the encoder holds back."""
        generator = np.random.default_rng(0)
        yield from (generator.integers(0, 255, (64, 64, 3), np.uint8) for _ in range(200))
        raise RecordingError("on purpose")

    with pytest.raises(RecordingError, match="on purpose"):
        write_film(tmp_path / "film.mp4", pictures(), 30)
    assert not list(tmp_path.iterdir())


class DrawsNothing(gymnasium.Env):
    """An environment whose rendering fails, though it was made to be drawn."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - Gymnasium's own
    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return 1, 0.0, False, False, {}

    def render(self) -> Any:
        raise OSError("no display")


def test_frames_that_cannot_be_rendered_are_logged_and_left_out(tmp_path, caplog):
    kwargs = {"render_mode": "rgb_array"}
    with serve_gym(DrawsNothing, env_kwargs=kwargs, record=Recording(tmp_path, frames=True)) as server:
        play(server.url, 1, steps=3)
    assert "no frames are recorded" in caplog.text
    (episode,) = read_folder(tmp_path).episodes()
    assert not has_frames(episode)


class DrawsObjects(DrawsNothing):
    """Its frames are arrays of objects, which no file may hold."""

    def render(self) -> Any:
        return np.array([None, 1])


def test_frames_that_are_no_numbers_are_left_out_and_the_steps_are_recorded(tmp_path, caplog):
    kwargs = {"render_mode": "rgb_array"}
    with serve_gym(DrawsObjects, env_kwargs=kwargs, record=Recording(tmp_path, frames=True)) as server:
        play(server.url, 1, steps=3)
    assert caplog.text.count("no frames are recorded") == 1
    (episode,) = read_folder(tmp_path).episodes()
    assert (episode.length, episode.incomplete) == (3, False)


def test_frames_without_a_render_mode_are_refused_at_the_start(tmp_path, capsys):
    said = "CartPole-v1 is made without a render mode"
    with pytest.raises(SettingError, match=said):
        serve_gym("CartPole-v1", record=Recording(tmp_path, frames=True))
    assert main(["serve", "CartPole-v1", "--port", "0", "--record", str(tmp_path), "--record-frames"]) == 2
    assert said in capsys.readouterr().err
    refusal = pytest.raises(BridgeError, match="DrawsNothing is made without a render mode")  # shows when it is made
    with serve_gym(DrawsNothing, record=Recording(tmp_path, frames=True)) as server, refusal:
        make_remote(server.url).reset()
    assert main(["serve", "tests.recording.test_exports:DrawsNothing", "--port", "0",
                 "--record", str(tmp_path), "--record-frames"]) != 0  # fmt: skip
    assert "DrawsNothing is made without a render mode" in capsys.readouterr().err


def test_episodes_are_chosen_by_who_return_environment_and_intervention(tmp_path):
    with serve_gym("CartPole-v1", record=tmp_path) as server:
        play(server.url, 2, player="person:Ann")
        play(server.url, 1, player="agent:PPO")
    with serve_gym("MountainCar-v0", record=tmp_path) as server:
        play(server.url, 1)
    episodes = read_folder(tmp_path).episodes()
    best = max(episode.total for episode in episodes)

    def chosen(**options: Any) -> int:
        return len(Selection(**options).of(episodes))

    assert chosen() == 4
    assert (chosen(who="person"), chosen(who="agent"), chosen(who="agent:*"), chosen(who="person:Bob")) == (2, 2, 1, 0)
    assert (chosen(env_id="CartPole*"), chosen(env_id="MountainCar-v0")) == (3, 1)
    assert (chosen(min_return=best), chosen(max_return=-200)) == (1, 1)
    assert (chosen(intervention=True), chosen(intervention=False)) == (0, 4)


def test_an_export_that_cannot_be_made_says_why(tmp_path, datasets):
    with serve_gym("CartPole-v1", record=tmp_path) as server:
        play(server.url, 1)
    with serve_gym("MountainCar-v0", record=tmp_path) as server:
        play(server.url, 1)
    episodes = read_folder(tmp_path).episodes()
    with pytest.raises(RecordingError, match=r"expected episodes of one environment, got .* choose one by --env-id"):
        export_minari(episodes, "test/mixed-v0")
    with pytest.raises(RecordingError, match="there are no such episodes"):
        export_minari([], "test/none-v0")
    for name in ("cartpole", "-v0", ""):
        with pytest.raises(SettingError, match=f"ends in its version, as cartpole/people-v0, got '{name}'"):
            export_minari(episodes[:1], name)
    export_minari(episodes[:1], "test/twice-v0")
    with pytest.raises(SettingError, match="Minari does not take the dataset 'test/twice-v0'"):
        export_minari(episodes[:1], "test/twice-v0")


def test_a_replay_that_differs_is_no_dataset(tmp_path, datasets):
    from tests.recording.environments import Noisy

    with serve_gym(Noisy, record=tmp_path) as server:
        play(server.url, 1, steps=4)
    with pytest.raises(RecordingError, match="the replay is not what was recorded: the observation differs"):
        export_minari(read_folder(tmp_path).episodes(), "test/noisy-v0", env=Noisy)


def test_a_dataset_recovers_the_environment_with_its_keywords(tmp_path, datasets):
    kwargs = {"map_name": "8x8", "max_episode_steps": 9, "render_mode": "rgb_array"}
    with serve_gym(
        "FrozenLake-v1", env_kwargs=kwargs, record=Recording(tmp_path / "runs", observations=True)
    ) as server:
        play(server.url, 1)
    export_minari(read_folder(tmp_path / "runs").episodes(), "test/lake-v0")
    env = datasets.load_dataset("test/lake-v0").recover_environment()
    assert env.observation_space == gymnasium.spaces.Discrete(64)
    assert (env.spec.max_episode_steps, env.render_mode) == (9, None)
    env.close()


def test_an_export_that_failed_does_not_block_its_name(tmp_path, datasets):
    with serve_gym("CartPole-v1", record=Recording(tmp_path / "runs", observations=True)) as server:
        play(server.url, 1)
    episodes = read_folder(tmp_path / "runs").episodes()
    with pytest.raises(SettingError, match="Minari does not take the dataset 'test/again-v0'"):
        export_minari(episodes, "test/again-v0", data_format="none that there is")
    export_minari(episodes, "test/again-v0")
    with pytest.raises(SettingError, match="already exists"):
        export_minari(episodes, "test/again-v0")
    assert datasets.load_dataset("test/again-v0").total_episodes == 1, "the second try leaves the first dataset alone"


@pytest.mark.parametrize("name", ["sequence_of_discrete", "graph", "one_of", "dict_int_keys", "dict_odd_keys"])
def test_spaces_that_minari_cannot_write_are_refused_by_name_and_leave_nothing(tmp_path, datasets, name):
    space = EVERY_SPACE[name]()
    with serve_gym(lambda: SpaceEnv(space), record=Recording(tmp_path / "runs", observations=True)) as server:
        play(server.url, 1)
    episodes = read_folder(tmp_path / "runs").episodes()
    for _ in range(2):  # not "already exists" either
        with pytest.raises(SettingError, match=r"does not take the dataset 'test/space-v0': (?!.*already exists)"):
            export_minari(episodes, "test/space-v0", data_format="hdf5")


class RewardsNothing(gymnasium.Env):
    """An environment whose reward is no number."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 1, float("nan"), True, False, {}


def test_an_episode_whose_return_is_no_number_is_exported_unless_a_limit_is_given(tmp_path, datasets):
    with serve_gym(RewardsNothing, record=Recording(tmp_path / "runs", observations=True)) as server:
        play(server.url, 1)
    episodes = read_folder(tmp_path / "runs").episodes()
    assert Selection(min_return=0.0).of(episodes) == Selection(max_return=0.0).of(episodes) == []
    export_minari(Selection().of(episodes), "test/nan-v0")
    (episode,) = datasets.load_dataset("test/nan-v0").iterate_episodes()
    assert np.isnan(episode.rewards).tolist() == [True]


class Sensor(gymnasium.Env[Any, Any]):
    """Its second number is broken in every other episode, in step 2; a part of a Dict, as a robot's."""

    observation_space = spaces.Dict({"arm": spaces.Tuple([spaces.Box(-np.inf, np.inf, (2,), np.float32)])})
    action_space = spaces.Discrete(2)
    episodes = steps = 0

    def __init__(self, broken: float = float("nan")) -> None:
        self.broken = broken

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes, self.steps = self.episodes + 1, 0
        return self.seen(), {}

    def seen(self) -> Any:
        bad = self.steps == 2 and self.episodes % 2 == 0
        return {"arm": (np.array([self.steps, self.broken if bad else 0], np.float32),)}

    def step(self, action):
        self.steps += 1
        return self.seen(), 0.0, self.steps == 4, False, {}


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")], ids=["nan", "inf"])
def test_what_is_not_finite_is_told_or_left_out_and_refused_where_it_spoils_the_rest(
    tmp_path, datasets, capsys, broken
):
    runs = tmp_path / "runs"
    with serve_gym(Sensor, env_kwargs={"broken": broken}, record=Recording(runs, observations=True)) as server:
        play(server.url, 3)
    episode = read_folder(runs).episodes()[1].id
    assert main(["export", str(runs), "--minari", "test/kept-v0"]) == 0
    assert f"keeps the NaN or infinities of 1 step in the episode {episode};" in "".join(capsys.readouterr())
    second = list(datasets.load_dataset("test/kept-v0").iterate_episodes())[1]
    assert_identical(second.observations["arm"][0][2, 1], np.float32(broken))
    assert main(["export", str(runs), "--lerobot", str(tmp_path / "set")]) == 1
    said = "".join(capsys.readouterr())
    assert f"{episode}: expected finite numbers, got a NaN or an infinity in observation.state of 1 frame, " in said
    assert "first in frame 2" in said
    assert not (tmp_path / "set").exists()
    assert main(["export", str(runs), "--minari", "test/finite-v0", "--finite"]) == 0
    assert "left out: 1 episode with a NaN" in (said := "".join(capsys.readouterr()))
    assert "keeps the NaN" not in said
    assert datasets.load_dataset("test/finite-v0").total_episodes == 2
    assert main(["export", str(runs), "--lerobot", str(tmp_path / "set"), "--finite"]) == 0
    assert main(["export", str(runs), "--mp4", str(tmp_path / "films"), "--finite"]) == 2


class Stamped(gymnasium.Env[Any, Any]):
    """Tells the time in nanoseconds beside a state in meters."""

    action_space = spaces.Discrete(2)

    def __init__(self, first: int, with_state: bool = True) -> None:
        stamp = {"stamp": spaces.Box(0, 2**63 - 1, (1,), np.int64)}
        self.first, self.with_state = first, with_state
        self.observation_space = spaces.Dict(
            {**stamp, "state": spaces.Box(-9, 9, (2,), np.float32)} if with_state else stamp
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.seen(), {}

    def seen(self):
        stamp = {"stamp": np.array([self.first + self.steps], np.int64)}
        return {**stamp, "state": np.zeros(2, np.float32)} if self.with_state else stamp

    def step(self, action):
        self.steps += 1
        return self.seen(), 0.0, self.steps == 4, False, {}


def test_integers_that_lerobot_would_round_are_refused_and_others_are_exact(tmp_path, capsys):
    import pyarrow.parquet as pq

    for name, arguments in (("long", {"first": 2**60}), ("short", {"first": 2**40}), ("alone", {"first": 2**60})):
        arguments = {**arguments, "with_state": name != "alone"}
        runs = tmp_path / name
        with serve_gym(Stamped, env_kwargs=arguments, record=Recording(runs, observations=True)) as server:
            play(server.url, 1)
        code = main(["export", str(runs), "--lerobot", str(tmp_path / f"{name}-set")])
        said = "".join(capsys.readouterr())
        if name == "long":
            assert code == 1
            assert "'stamp' has numbers of int64 that float64 would round" in said
            continue
        assert code == 0, said
        (file,) = (tmp_path / f"{name}-set" / "data").rglob("*.parquet")
        column = pq.read_table(file).column("observation.state").to_pylist()
        stamps = [row if name == "alone" else row[0] for row in column]
        assert [int(stamp) for stamp in stamps] == [arguments["first"] + step for step in range(4)]


def test_an_export_of_what_a_client_recorded_in_real_time_says_that_frames_are_missing(tmp_path, capsys):
    runs = tmp_path / "runs"
    with (
        serve_gym("CartPole-v1", fps=100) as server,
        contextlib.closing(
            Recorder(make_vec_remote(server.url, num_envs=1, blocking=True), runs, observations=True)
        ) as envs,
    ):
        envs.reset(seed=0)
        until(lambda: any(envs.step(np.zeros(1, np.int64))[2]))
    assert main(["export", str(runs), "--lerobot", str(tmp_path / "set")]) == 0
    assert "a client recorded 1 of the 1 episodes in real time" in "".join(capsys.readouterr())


def test_rewards_and_actions_that_are_not_finite_are_found_too(tmp_path):
    with serve_gym(RewardsNothing, record=Recording(tmp_path / "runs", observations=True)) as server:
        play(server.url, 1)
    (episode,) = read_folder(tmp_path / "runs").episodes()
    data = load_episode(episode)
    assert data.not_finite() == 1
    sound = dataclasses.replace(data, rewards=np.zeros(1))
    assert sound.not_finite() == 0
    assert dataclasses.replace(sound, actions=[np.array([0, np.inf])]).not_finite() == 1


@pytest.mark.parametrize("isolation", [None, "process"])
def test_a_film_runs_as_fast_as_the_environment_is_drawn(tmp_path, isolation):
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    more = {"isolation": isolation} if isolation else {}
    with serve_gym("CartPole-v1", env_kwargs={"render_mode": "rgb_array"}, record=tmp_path / "runs", **more) as server:
        play(server.url, 1, steps=5)
    (film,) = export_mp4(read_folder(tmp_path / "runs").episodes(), tmp_path)
    reader = ffmpeg.read_frames(str(film))
    assert next(reader)["fps"] == gymnasium.make("CartPole-v1").metadata["render_fps"] == 50
    reader.close()
