"""Datasets of LeRobot as its own loader reads them; skipped where `lerobot` is not installed."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.recording.episodes import load_episode
from bridge.recording.lerobot import export_lerobot
from tests.recording.test_lerobot import Robot, record

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    loader = pytest.importorskip("lerobot.datasets.lerobot_dataset", reason="needs LeRobot's own loader: lerobot")
    importlib.import_module("torch")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FILMS = {
    "top": lambda seen: seen["pixels"]["top"],
    "wrist": lambda seen: seen["pixels"]["wrist"],
    "arm.hand_camera": lambda seen: seen["arm"]["hand camera"],
}


@pytest.mark.parametrize("fps", [None, 1, 12, 60, 30000 / 1001])
def test_lerobot_reads_every_frame_as_it_was_recorded(tmp_path: Path, fps: float | None) -> None:
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
