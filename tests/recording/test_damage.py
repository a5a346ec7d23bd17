"""Damaged files: each flip and each cut is told, or changes nothing that is read; the rest is read."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import Recording, make_remote, serve_gym
from bridge.cli import main
from bridge.recording.reader import Folder, read_folder
from tests.support import sampled, until


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two sealed streams, and of one whose server was still running."""
    runs, folder = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("copy")
    with serve_gym("CartPole-v1", record=Recording(runs, observations=True, infos=True)) as server:
        for seed in range(3):
            env = make_remote(server.url)
            for _ in range(2):
                env.reset(seed=seed)
                for step in range(6):
                    env.step(step % 2)
            if seed == 2:
                until(lambda: any(runs.glob("*.arrow")) and len(contents(read_folder(runs))) == 6)
                shutil.copytree(runs, folder, dirs_exist_ok=True)
            env.close()
    assert sorted(path.suffix for path in folder.iterdir()) == [".arrow", ".parquet", ".parquet", *[".sums"] * 3]
    return folder


def contents(found: Folder) -> dict[str, Any]:
    """The description of each episode in a folder."""
    told = {}
    for stream in found.streams:
        for episode in stream.episodes():
            rows = episode.own
            told[episode.id] = (
                episode.end, episode.length, episode.rewards.tobytes(), episode.seed, episode.players, episode.started,
                stream.samples("action", rows), np.stack(stream.samples("observation", rows)).tobytes(),
                stream.infos(rows),
            )  # fmt: skip
    return told


def damage(chosen: random.Random, data: bytes) -> bytes:
    """Flip a bit or cut the end off."""
    at = chosen.randrange(len(data))
    if chosen.random() < 0.3:
        return data[:at]
    return data[:at] + bytes([data[at] ^ 1 << chosen.randrange(8)]) + data[at + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("part", sampled(range(4), 4))
def test_each_flip_and_each_cut_is_told_or_changes_nothing(recorded, tmp_path, capsys, part):
    folder = shutil.copytree(recorded, tmp_path / "runs")
    whole = contents(read_folder(folder))
    assert len(whole) == 6
    chosen, told = random.Random(part), 0
    files = sorted(folder.iterdir())
    for number in range(250):
        path = chosen.choice(files)
        data = path.read_bytes()
        path.write_bytes(damage(chosen, data))
        stem = path.name.removesuffix(".sums").rpartition(".")[0].rpartition(".")[0].replace(".", "-")
        found = read_folder(folder)
        seen = contents(found)
        others = {name: facts for name, facts in whole.items() if not name.startswith(f"{stem}.")}
        assert len(others) == 4
        assert {name: seen.get(name) for name in others} == others, "the other streams are read"
        if found.damage:
            told += 1
        else:
            assert seen == whole, f"flip or cut {number} of {path.name} goes unseen"
        if number % 50 == 0:
            assert main(["replay", str(folder), "--verify"]) == (1 if found.damage else 0)
        path.write_bytes(data)
    capsys.readouterr()
    assert told > 200
    assert contents(read_folder(folder)) == whole
