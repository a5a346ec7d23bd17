"""What a recording holds, happened: its episodes are those that the environments wrote down themselves."""

from __future__ import annotations

import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import Recorder, make_vec_remote, serve_gym
from bridge.cli import main
from bridge.recording.episodes import load_episode
from bridge.recording.reader import read_folder
from bridge.wrappers import BlockingReset

STEPS = 80


class Diary(gymnasium.Env[Any, Any]):
    """Writes down each reset and step, in a list of its own."""

    observation_space = spaces.Box(0, 1, (3,), np.float64)
    action_space = spaces.Discrete(5)
    kept: list[list[Any]] = []  # noqa: RUF012 - of all environments, in the order of their first resets

    def __init__(self) -> None:
        self._mine: list[Any] | None = None
        self._left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self._mine is None:
            self._mine = []
            self.kept.append(self._mine)
        self._left = int(self.np_random.integers(2, 9))
        observation = self.np_random.random(3)
        self._mine.append({"observations": [observation], "actions": [], "rewards": [], "flags": []})
        return observation.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._mine is not None
        self._left -= 1
        observation, reward = self.np_random.random(3), float(self.np_random.random())
        ended = bool(self._left <= 0)
        terminated = ended and reward < 0.5
        episode = self._mine[-1]
        episode["observations"].append(observation)
        episode["actions"].append(int(action))
        episode["rewards"].append(reward)
        episode["flags"].append((terminated, ended and not terminated))
        return observation.copy(), reward, terminated, ended and not terminated, {}


def play(envs: Any, mode: str) -> None:
    envs.action_space.seed(1)
    chance = random.Random(2)
    envs.reset(seed=7)
    for _ in range(STEPS):
        _, _, terminations, truncations, _ = envs.step(envs.action_space.sample())
        ended = terminations | truncations
        if mode == "Disabled" and ended.any():
            envs.reset(options={"reset_mask": ended})
        elif chance.random() < 0.1:  # some slots in the midst of their episodes, or just ended
            mask = np.array([chance.random() < 0.5 for _ in ended])
            if mask.any():
                envs.reset(options={"reset_mask": mask})


def written(folder: Path, lanes: int) -> list[list[dict[str, Any]]]:
    """Return the episodes of each environment, as the recording tells them."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(lanes)]
    streams = sorted(read_folder(folder).streams, key=lambda stream: stream.number)
    for number, stream in enumerate(streams):
        for episode in stream.episodes():
            data = load_episode(episode)
            assert episode.length == len(data.actions)
            assert [*episode.rewards] == [*data.rewards]
            assert episode.total == data.rewards.sum()
            flags = list(zip(data.terminations.tolist(), data.truncations.tolist(), strict=True))
            if flags and episode.end not in ("terminated", "truncated"):
                flags[-1] = (False, False)  # a dataset marks the last step of what was cut off
            found[episode.lane + number].append(
                {
                    "observations": data.observations,
                    "actions": data.actions,
                    "rewards": data.rewards.tolist(),
                    "flags": flags,
                }
            )
    return found


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("kind", ["lanes", "worlds", "recorder"])
def test_episodes_are_those_that_the_environments_wrote_down(tmp_path: Path, kind: str, mode: str) -> None:
    Diary.kept.clear()
    lanes = 3 if kind == "lanes" else 1
    record = None if kind == "recorder" else tmp_path
    keywords = {} if record is None else {"record": record, "record_observations": True}
    with serve_gym(Diary, num_envs=lanes, **keywords) as server:
        remote = make_vec_remote(server.url, num_envs=3)
        envs: Any = BlockingReset(remote, autoreset_mode=mode)
        if record is None:
            envs = Recorder(envs, tmp_path, observations=True)
        play(envs, mode)
        envs.close()
    told = written(tmp_path, 3)
    assert [len(part) for part in told] == [len(part) for part in Diary.kept]
    for lane, mine in zip(told, Diary.kept, strict=True):
        for one, other in zip(lane, mine, strict=True):
            assert [*map(int, one["actions"])] == other["actions"]
            assert one["rewards"] == other["rewards"]
            assert one["flags"] == other["flags"]
            assert np.array_equal(one["observations"], other["observations"])
    assert sum(len(one["actions"]) for lane in told for one in lane) <= STEPS * 3


def test_the_name_in_a_strangers_recording_is_no_path(tmp_path: Path) -> None:
    """The recording's name is its file's; the header may say anything."""
    folder, target, outside = tmp_path / "runs", tmp_path / "target", tmp_path / "outside"
    with serve_gym("CartPole-v1", record=folder, record_observations=True) as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=1))
        envs.reset(seed=1)
        while not envs.step(np.array([1]))[2].any():
            pass
        envs.close()
    (file,) = folder.glob("*.rec")
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    for evil in (str(outside / "x"), "../../outside/x"):
        (stranger / file.name).write_bytes(renamed(file.read_bytes(), evil))
        outside.mkdir(exist_ok=True)
        assert main(["export", str(stranger), "--npz", str(target), "--unfinished"]) == 0
        assert {path.parent for path in tmp_path.rglob("*.npz")} == {target}


def renamed(data: bytes, run: str) -> bytes:
    """Return a recording whose header says another name; its checksum fits."""
    frame, start = struct.Struct("<4sII"), data.index(b"\xa9REC")
    mark, length, _ = frame.unpack_from(data, start)
    payload = data[start + frame.size : start + frame.size + length]
    text = json.dumps({**json.loads(payload[4:]), "run": run}).encode()
    changed = struct.pack("<I", len(text)) + text
    return (
        data[:start]
        + frame.pack(mark, len(changed), zlib.crc32(changed))
        + changed
        + data[start + frame.size + length :]
    )


def test_a_folder_with_a_changed_or_missing_byte_never_passes_as_verified(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "runs"
    with serve_gym("CartPole-v1", num_envs=2, record=folder) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset(seed=1)
        for _ in range(30):
            envs.step(np.array([1, 0]))
        envs.close()
    (file,) = folder.glob("*.rec")
    whole = file.read_bytes()
    assert main(["replay", str(folder), "--verify"]) == 0
    chance = random.Random(3)
    for _ in range(60):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        capsys.readouterr()
        assert main(["replay", str(folder), "--verify"]) != 0, capsys.readouterr().out
    for size in sorted(chance.randrange(16, len(whole)) for _ in range(10)):
        file.write_bytes(whole[:size])
        capsys.readouterr()
        assert main(["replay", str(folder), "--verify"]) != 0, (size, capsys.readouterr().out)
