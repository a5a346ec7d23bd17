"""Datasets of LeRobot: the files, columns and numbers that version 3.0 of its format has, read by others' libraries."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import av
import gymnasium
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces

from bridge import Recording, make_parallel_remote, make_remote, serve_gym, serve_parallel
from bridge.cli import main
from bridge.errors import SettingError
from bridge.recording.episodes import load_episode
from bridge.recording.exports import export_minari
from bridge.recording.lerobot import export_lerobot
from bridge.recording.reader import RecordedEpisode, read_folder

# Of LeRobot's own code, `lerobot.datasets`: the columns that every dataset has, and its templates of paths.
OWN = {"timestamp": "float", "frame_index": "int64", "episode_index": "int64", "index": "int64", "task_index": "int64"}
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
INFO = {
    "codebase_version": str, "robot_type": type(None), "total_episodes": int, "total_frames": int, "total_tasks": int,
    "chunks_size": int, "data_files_size_in_mb": int, "video_files_size_in_mb": int, "fps": (int, float),
    "splits": dict, "data_path": str, "video_path": (str, type(None)), "features": dict,
}  # fmt: skip
STATISTICS = ["min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99"]


class Painter(gymnasium.Env[Any, Any]):
    """Its observations are pictures of one colour, a brighter one with each step."""

    observation_space = spaces.Box(0, 255, (32, 48, 3), np.uint8)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    metadata: dict[str, Any] = {"render_modes": [], "render_fps": 20}  # noqa: RUF012 - Gymnasium's own
    steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.picture(), {}

    def picture(self) -> Any:
        return np.full((32, 48, 3), 20 + 20 * self.steps, np.uint8)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.picture(), 0.5, self.steps == 8, False, {}


COLOURS = spaces.Box(0, 255, (16, 16, 3), np.uint8)


class Robot(Painter):
    """Three cameras, one of them a level lower, and numbers of several kinds."""

    observation_space = spaces.Dict(  # type: ignore[assignment]
        {
            "pixels": spaces.Dict({"top": Painter.observation_space, "wrist": COLOURS}),
            "agent_pos": spaces.Box(-1e3, 1e3, (3,), np.float32),
            "environment_state": spaces.Box(-1e3, 1e3, (2,), np.float32),
            "arm": spaces.Dict(
                {
                    "hand camera": spaces.Box(0, 255, (20, 30, 3), np.uint8),
                    "gripper": spaces.Discrete(9),
                    "matrix": spaces.Box(-1e3, 1e3, (2, 2), np.float64),
                }
            ),
            "many": spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(2)]),
        }
    )

    def picture(self) -> Any:
        grey, number = 20 + 20 * self.steps, self.steps / 3
        return {
            "pixels": {"top": super().picture(), "wrist": np.full((16, 16, 3), grey + 1, np.uint8)},
            "agent_pos": np.array([number, -number, 1], np.float32),
            "environment_state": np.array([number, 7], np.float32),
            "arm": {
                "hand camera": np.full((20, 30, 3), grey + 2, np.uint8),
                "gripper": np.int64(self.steps),
                "matrix": np.full((2, 2), number),
            },
            "many": (np.int64(1), np.array([0, 1], np.int8)),
        }


def record(folder: Path, env: Any, episodes: int = 3, **options: Any) -> list[RecordedEpisode]:
    kwargs = {"render_mode": "rgb_array"} if options.get("frames") else None
    with serve_gym(env, record=Recording(folder, observations=True, **options), env_kwargs=kwargs) as server:
        remote = make_remote(server.url)
        remote.action_space.seed(1)
        for seed in range(episodes):
            remote.reset(seed=seed)
            over = False
            while not over:
                *_, terminated, truncated, _ = remote.step(remote.action_space.sample())
                over = terminated or truncated
        remote.close()
    return read_folder(folder).episodes()


def check(root: Path) -> tuple[dict[str, Any], pa.Table, list[dict[str, Any]]]:
    """Hold a dataset against the schema of the format; return its info, its frames and its episodes."""
    info = json.loads((root / "meta/info.json").read_text("utf-8"))
    assert {name: isinstance(info[name], kind) for name, kind in INFO.items()} == dict.fromkeys(INFO, True)
    assert (info["codebase_version"], info["data_path"]) == ("v3.0", DATA_PATH)
    films = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    assert info["video_path"] == (VIDEO_PATH if films else None)
    assert info["splits"] == {"train": f"0:{info['total_episodes']}"}
    frames = pq.read_table(root / DATA_PATH.format(chunk_index=0, file_index=0))
    expected = {}
    for name, feature in info["features"].items():
        assert set(feature) >= {"dtype", "shape", "names"}
        assert "/" not in name
        if feature["dtype"] != "video":
            plain = {"bool": pa.bool_(), "string": pa.string()}
            kind = plain.get(feature["dtype"]) or pa.from_numpy_dtype(feature["dtype"])
            expected[name] = kind if feature["shape"] == [1] else pa.list_(kind, feature["shape"][0])
    assert {field.name: field.type for field in frames.schema} == expected
    assert {name: str(expected[name]) for name in OWN} == OWN
    assert frames["index"].to_pylist() == list(range(info["total_frames"]))
    tasks = pandas.read_parquet(root / "meta/tasks.parquet")
    assert list(tasks.columns) == ["task_index"]
    assert tasks["task_index"].tolist() == list(range(info["total_tasks"]))
    stats = json.loads((root / "meta/stats.json").read_text("utf-8"))
    # As LeRobot's `compute_episode_stats`, which leaves out texts.
    numbers = {name: feature for name, feature in info["features"].items() if feature["dtype"] != "string"}
    assert set(stats) == set(numbers)
    for name, feature in numbers.items():
        assert sorted(stats[name]) == sorted(STATISTICS)
        shape = (3, 1, 1) if feature["dtype"] == "video" else tuple(feature["shape"])
        assert {np.shape(stats[name][key]) for key in STATISTICS if key != "count"} == {shape}
    episodes = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    at = 0
    for number, row in enumerate(episodes):
        assert (row["episode_index"], row["tasks"]) == (number, tasks.index.tolist())
        assert (row["dataset_from_index"], row["dataset_to_index"]) == (at, at + row["length"])
        for part in ("data", "meta/episodes", *(f"videos/{name}" for name in films)):
            assert (row[f"{part}/chunk_index"], row[f"{part}/file_index"]) == (0, 0)
        for name in films:
            times = [row[f"videos/{name}/{end}_timestamp"] for end in ("from", "to")]
            assert times == pytest.approx([at / info["fps"], (at + row["length"]) / info["fps"]])
        own = frames.slice(at, row["length"])
        assert own["frame_index"].to_pylist() == list(range(row["length"]))
        assert set(own["episode_index"].to_pylist()) == {number}
        assert own["timestamp"].to_pylist() == pytest.approx([step / info["fps"] for step in range(row["length"])])
        assert {f"stats/{name}/{key}" for name in numbers for key in STATISTICS} <= set(row)
        at += row["length"]
    assert (at, len(episodes)) == (info["total_frames"], info["total_episodes"])
    return info, frames, episodes


def film_of(root: Path, info: dict[str, Any], name: str) -> list[np.ndarray]:
    """The pictures of a dataset's film, by PyAV."""
    path = root / VIDEO_PATH.format(video_key=name, chunk_index=0, file_index=0)
    with av.open(str(path)) as container:
        (stream,) = container.streams.video
        told = info["features"][name]
        assert [stream.height, stream.width, 3] == told["shape"]
        assert float(stream.average_rate) == told["info"]["video.fps"] == info["fps"]
        pictures = []
        for number, frame in enumerate(container.decode(stream)):
            assert frame.time == pytest.approx(number / info["fps"], abs=1e-4)
            pictures.append(frame.to_ndarray(format="rgb24"))
    return pictures


def test_numbers_are_those_of_the_recording(tmp_path, capsys):
    recorded = record(tmp_path / "runs", "CartPole-v1")
    command = ["export", str(tmp_path / "runs"), "--lerobot", str(tmp_path / "set"), "--task", "balance", "--fps", "50"]
    assert main(command) == 0
    assert "3 episodes" in capsys.readouterr().out
    info, frames, rows = check(tmp_path / "set")
    assert (info["fps"], info["total_episodes"], rows[0]["tasks"]) == (50, 3, ["balance"])
    seen, acted = np.array(frames["observation.state"].to_pylist(), np.float32), frames["action"].to_pylist()
    for row, episode in zip(rows, recorded, strict=True):
        data, own = load_episode(episode), slice(row["dataset_from_index"], row["dataset_to_index"])
        assert seen[own].tobytes() == np.stack(data.observations[:-1]).tobytes()
        assert acted[own] == [int(action) for action in data.actions]
        assert frames["next.done"].to_pylist()[own] == [False] * (len(data.actions) - 1) + [True]
        assert row["stats/observation.state/max"] == pytest.approx(seen[own].max(0).tolist())
    stats = json.loads((tmp_path / "set/meta/stats.json").read_text("utf-8"))["observation.state"]
    assert stats["mean"] == pytest.approx(seen.astype(float).mean(0).tolist())
    assert stats["std"] == pytest.approx(seen.astype(float).std(0).tolist())
    assert stats["count"] == [len(seen)]


def test_a_frame_says_who_chose_its_action_and_an_episode_how_it_ended(tmp_path):
    with serve_gym("CartPole-v1", record=Recording(tmp_path / "runs", observations=True)) as server:
        for name in ("agent:PPO", "person:Ann"):
            remote = make_remote(server.url, player=name)
            remote.reset(seed=0)
            while not remote.step(0)[2]:
                pass
            remote.close()
    export_lerobot(read_folder(tmp_path / "runs").episodes(), tmp_path / "set")
    _, frames, episodes = check(tmp_path / "set")
    lengths = [row["length"] for row in episodes]
    assert frames["by"].to_pylist() == ["agent:PPO"] * lengths[0] + ["person:Ann"] * lengths[1]
    assert [(row["by"], row["end"]) for row in episodes] == [("agent:PPO", "terminated"), ("person:Ann", "terminated")]


def test_pictures_become_a_film(tmp_path):
    recorded = record(tmp_path / "runs", Painter, episodes=2)
    (root,) = export_lerobot(recorded, tmp_path / "set")
    info, frames, _ = check(root)
    assert info["fps"] == 20
    assert frames["action"].type == pa.list_(pa.float32(), 2)
    pictures = film_of(root, info, "observation.image")
    assert len(pictures) == info["total_frames"] == 16
    for number, picture in enumerate(pictures):
        assert np.abs(picture.astype(int) - (20 + 20 * (number % 8))).max() <= 4
    stats = json.loads((root / "meta/stats.json").read_text("utf-8"))["observation.image"]
    assert np.ravel(stats["min"]).tolist() == pytest.approx([20 / 255] * 3)
    assert np.ravel(stats["mean"]).tolist() == pytest.approx([90 / 255] * 3)


@pytest.mark.slow
def test_recorded_frames_become_a_film_beside_the_numbers(tmp_path):
    recorded = record(tmp_path / "runs", "CartPole-v1", episodes=1, frames=True)
    (root,) = export_lerobot(recorded, tmp_path / "set")
    info, frames, _ = check(root)
    assert {"observation.state", "observation.image"} <= set(info["features"])
    assert len(film_of(root, info, "observation.image")) == len(frames)


def test_several_agents_give_a_dataset_each(tmp_path):
    with serve_parallel(
        importlib.import_module("mpe2.simple_tag_v3"), record=Recording(tmp_path / "runs", observations=True)
    ) as server:
        env = make_parallel_remote(server.url)
        env.reset(seed=1)
        while env.agents:
            env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        env.close()
    episodes = read_folder(tmp_path / "runs").episodes()
    roots = export_lerobot(episodes, tmp_path / "set")
    assert [root.name for root in roots] == episodes[0].stream.agents
    for root in roots:
        check(root)


@pytest.mark.parametrize("name", ["..", "../../x", "/tmp/x", "C:\\x"])
def test_the_name_of_an_agent_in_a_strangers_recording_is_no_path(tmp_path, name):
    """The header of a recording is a stranger's text: its run, its environment and its agents may have any name."""
    tag = importlib.import_module("mpe2.simple_tag_v3")
    with serve_parallel(tag, record=Recording(tmp_path / "in" / "runs", observations=True)) as server:
        env = make_parallel_remote(server.url)
        env.reset(seed=1)
        while env.agents:
            env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        first = env.possible_agents[0]
        env.close()
    (file,) = (tmp_path / "in" / "runs").glob("*.parquet")
    table = pq.read_table(file)
    header = json.loads(table.schema.metadata[b"bridge"])
    header["agents"][header["agents"].index(first)] = name
    header["run"] = header["world"] = name
    table = table.replace_schema_metadata({b"bridge": json.dumps(header).encode()})
    with pa.ipc.new_stream(stream := io.BytesIO(), table.schema) as writer:
        writer.write_table(table)
    data = stream.getvalue()
    hostile = tmp_path / "in" / "hostile" / "20200101T000000-ffffff.1.000001.arrow"
    hostile.parent.mkdir()
    hostile.write_bytes(data)
    hostile.with_name(hostile.name + ".sums").write_text(f"0 {len(data)} {hashlib.sha256(data).hexdigest()}\n")
    before = set(tmp_path.rglob("*"))
    roots = export_lerobot(read_folder(hostile.parent).episodes(), tmp_path / "out" / "set")
    assert all(root.resolve().parent == tmp_path / "out" / "set" for root in roots)
    written = set(tmp_path.rglob("*")) - before - {tmp_path / "out"}
    assert all(path.is_relative_to(tmp_path / "out" / "set") for path in written)


def test_a_robots_cameras_are_films_and_its_numbers_one_state(tmp_path):
    recorded = record(tmp_path / "runs", Robot, episodes=2)
    export_lerobot(recorded, tmp_path / "set")
    info, frames, rows = check(tmp_path / "set")
    seen = {name: feature for name, feature in info["features"].items() if name.startswith("observation.")}
    assert {name: feature["dtype"] for name, feature in seen.items()} == {
        "observation.images.top": "video",
        "observation.images.wrist": "video",
        "observation.images.arm.hand_camera": "video",
        "observation.state": "float64",
        "observation.environment_state": "float32",
    }
    assert seen["observation.state"]["names"] == [
        "agent_pos_0", "agent_pos_1", "agent_pos_2", "arm.gripper", "arm.matrix_0", "arm.matrix_1",
        "arm.matrix_2", "arm.matrix_3", "many.0", "many.1_0", "many.1_1",
    ]  # fmt: skip
    at = 0
    for row, episode in zip(rows, recorded, strict=True):
        for one in load_episode(episode).observations[:-1]:
            arm, many = one["arm"], one["many"]
            state = [*one["agent_pos"], arm["gripper"], *arm["matrix"].ravel(), many[0], *many[1]]
            assert frames["observation.state"][at].as_py() == [float(value) for value in state]
            assert frames["observation.environment_state"][at].as_py() == pytest.approx(one["environment_state"])
            at += 1
        assert at == row["dataset_to_index"]
    for number, name in enumerate(("top", "wrist", "arm.hand_camera")):
        film = film_of(tmp_path / "set", info, f"observation.images.{name}")
        assert len(film) == at
        means = [picture.mean() for picture in film[:8]]
        assert means == pytest.approx([20 + 20 * step + number for step in range(8)], abs=4), name


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"depth": spaces.Box(0, 1, (4, 4, 1), np.float32)}, r"'depth' of the shape \(4, 4, 1\) .* leave 'depth' out"),
        ({"eye": spaces.Dict({"grey": spaces.Box(0, 255, (8, 8), np.uint8)})}, r"'eye.grey' of the shape \(8, 8\)"),
        ({"order": spaces.Text(5)}, "'order' of Text: .*FilterObservation"),
        (
            {"a b": COLOURS, "a_b": COLOURS},
            "'a b' and the observation 'a_b' would both be observation.images.a_b",
        ),
        ({"pixels": spaces.Dict({"top": COLOURS}), "top": COLOURS}, "would both be observation.images.top"),
    ],
)
def test_a_part_of_a_dict_that_has_no_feature_is_named_with_what_to_do(tmp_path, parts, said):
    class Odd(Painter):
        observation_space = spaces.Dict(parts)

        def picture(self):
            return self.observation_space.sample()

    recorded = record(tmp_path / "runs", Odd, episodes=1)
    with pytest.raises(SettingError, match=said):
        export_lerobot(recorded, tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_what_the_format_has_no_place_for_is_said_and_leaves_nothing_behind(tmp_path):
    recorded = record(tmp_path / "runs", Talker, episodes=1)
    with pytest.raises(SettingError, match="no feature for observations of Text"):
        export_lerobot(recorded, tmp_path / "set")
    assert not (tmp_path / "set").exists()
    (tmp_path / "set").mkdir()
    with pytest.raises(SettingError, match="expected a folder that does not exist yet"):
        export_lerobot(recorded, tmp_path / "set")
    assert (tmp_path / "set").exists()


class Talker(Painter):
    """Its observations are texts."""

    observation_space = spaces.Text(5)  # type: ignore[assignment]

    def picture(self) -> Any:
        return "hello"


class Clock(Painter):
    """Its observations are the seconds of an epoch, which float32 has no room for, and smaller numbers."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def picture(self) -> Any:
        return np.array([1.8e9 + self.steps, self.steps / 3, 1.8e9 + 0.5])


@pytest.mark.parametrize("infos", [False, True])
def test_an_export_says_that_infos_are_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, infos: bool) -> None:
    episodes = record(tmp_path / "runs", "CartPole-v1", episodes=1, infos=infos)
    said: list[str] = []
    export_lerobot(episodes, tmp_path / "dataset", say=said.append)
    if importlib.util.find_spec("minari") is not None:
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
        export_minari(episodes, "cartpole/one-v0", say=said.append)
    assert [line.endswith("; without the recorded infos") for line in said] == [infos] * len(said)


def test_numbers_that_lerobot_will_round_away_are_told(tmp_path: Path) -> None:
    said: list[str] = []
    export_lerobot(record(tmp_path / "runs", Clock), tmp_path / "dataset", say=said.append)
    warned = [line for line in said if line.startswith("warning")]
    # Not of the number that stays as it is, and thirds are close enough.
    assert len(warned) == 1
    assert "so 'observation_0' of observation.state up to 7 off, of numbers that differ by 7 at most" in warned[0]


# Its own loader, where that is installed

FILMS = {
    "top": lambda seen: seen["pixels"]["top"],
    "wrist": lambda seen: seen["pixels"]["wrist"],
    "arm.hand_camera": lambda seen: seen["arm"]["hand camera"],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the loader's own packages
@pytest.mark.parametrize("fps", [None, 1, 12, 60, 30000 / 1001])
def test_lerobot_reads_every_frame_as_it_was_recorded(tmp_path: Path, fps: float | None) -> None:
    loader = pytest.importorskip("lerobot.datasets.lerobot_dataset", reason="needs LeRobot's own loader: lerobot")
    episodes = record(tmp_path / "runs", Robot)
    (root,) = export_lerobot(episodes, tmp_path / "dataset", fps=fps, task="lift")
    dataset = loader.LeRobotDataset("me/robot", root=root, video_backend="pyav")
    assert (dataset.num_episodes, len(dataset), dataset.fps) == (3, 24, fps or 20)
    frames = iter(range(len(dataset)))
    for number, episode in enumerate(episodes):
        data = load_episode(episode)
        for step, (seen, action) in enumerate(zip(data.observations[:-1], data.actions, strict=True)):
            frame = dataset[next(frames)]
            _check(frame, seen)
            np.testing.assert_array_equal(frame["action"], action)
            told = [frame[name].item() for name in ("episode_index", "frame_index", "next.reward", "next.done")]
            assert told == [number, step, 0.5, step == 7]
            assert (frame["task"], frame["by"]) == ("lift", "agent")
    # One episode by itself, and frames with those before them.
    rate = dataset.fps
    before = {"observation.images.top": [-1 / rate, 0.0], "observation.state": [-1 / rate, 0.0]}
    part = loader.LeRobotDataset("me/robot", root=root, episodes=[1], delta_timestamps=before, video_backend="pyav")
    seen = load_episode(episodes[1]).observations
    for step in range(1, 8):
        top = part[step]["observation.images.top"].numpy()
        for at in (0, 1):
            np.testing.assert_allclose(top[at].transpose(1, 2, 0) * 255, seen[step - 1 + at]["pixels"]["top"], atol=4)


def _check(frame: Any, seen: Any) -> None:
    """Hold the observations of a frame against those that were recorded."""
    arm, (one, two) = seen["arm"], seen["many"]
    numbers = [seen["agent_pos"], [arm["gripper"]], arm["matrix"].reshape(-1), [one], two]
    # Its loader makes float32 of float64.
    np.testing.assert_array_equal(frame["observation.state"], np.concatenate(numbers).astype(np.float32))
    np.testing.assert_array_equal(frame["observation.environment_state"], seen["environment_state"])
    for name, picture_of in FILMS.items():
        picture = frame[f"observation.images.{name}"].numpy().transpose(1, 2, 0) * 255
        np.testing.assert_allclose(picture, picture_of(seen), atol=4)
