"""Behaviour cloning from recorded episodes: a network that learns from a dataset plays as well as who was recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from bridge import Recording, make_remote, serve_gym
from bridge.recording.exports import export_minari
from bridge.recording.lerobot import export_lerobot
from bridge.recording.reader import RecordedEpisode, read_folder

torch.set_num_threads(1)
STEPS = 200
Data = tuple[np.ndarray, np.ndarray]


def demonstrator(observation: np.ndarray) -> int:
    """Balance the pole."""
    return int(observation @ (0.1, 0.3, 3.0, 1.0) > 0)


def play(env: gymnasium.Env[Any, Any], policy: Callable[[np.ndarray], int], seed: int) -> float:
    """Return the return of an episode."""
    observation, _ = env.reset(seed=seed)
    total, over = 0.0, False
    while not over and total < STEPS:
        observation, reward, terminated, truncated, _ = env.step(policy(observation))
        total, over = total + float(reward), terminated or truncated
    return total


def from_minari(episodes: list[RecordedEpisode], folder: Path) -> Data:
    export_minari(episodes, "cartpole/demonstrator-v0")
    found = list(minari.load_dataset("cartpole/demonstrator-v0").iterate_episodes())
    return np.concatenate([one.observations[:-1] for one in found]), np.concatenate([one.actions for one in found])


def from_lerobot(episodes: list[RecordedEpisode], folder: Path) -> Data:
    """Read a dataset as `LeRobotDataset` does: by the paths and features that its info names."""
    export_lerobot(episodes, folder)
    info = json.loads((folder / "meta/info.json").read_text("utf-8"))
    frames = pq.read_table(folder / info["data_path"].format(chunk_index=0, file_index=0))
    (size,) = info["features"]["observation.state"]["shape"]
    seen = frames["observation.state"].combine_chunks().flatten().to_numpy().reshape(-1, size)
    return seen, frames["action"].to_numpy()


@pytest.mark.parametrize("load", [from_minari, from_lerobot])
def test_a_clone_reaches_the_return_of_who_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[list[RecordedEpisode], Path], Data]
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    recording = Recording(tmp_path / "runs", observations=True)
    with serve_gym("CartPole-v1", record=recording) as server, make_remote(server.url) as env:
        demonstrated = [play(env, demonstrator, seed) for seed in range(8)]
    assert min(demonstrated) == STEPS
    seen, acted = load(read_folder(tmp_path / "runs").episodes(), tmp_path / "lerobot")
    assert len(seen) == len(acted) == sum(demonstrated)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    observations, actions = torch.as_tensor(np.array(seen)), torch.as_tensor(np.array(acted))
    for _ in range(300):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(observations), actions)
        loss.backward()
        optimizer.step()

    def clone(observation: np.ndarray) -> int:
        with torch.no_grad():
            return int(network(torch.as_tensor(observation)).argmax())

    with gymnasium.make("CartPole-v1") as env:
        cloned = [play(env, clone, 1000 + number) for number in range(8)]
    assert np.mean(cloned) >= np.mean(demonstrated)
