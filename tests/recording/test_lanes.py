"""The recordings of lanes that fail: each ends its own episode, as a single environment that raises does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from bridge import Recorder, Recording, make_vec_remote, serve_gym
from bridge.errors import EnvironmentFailedError
from bridge.recording.episodes import load_episode
from bridge.recording.exports import export_minari
from bridge.recording.reader import RecordedEpisode, read_folder
from bridge.recording.replay import verify, verify_stream
from bridge.recording.selection import Selection
from bridge.testing import CountingEnv
from tests.recording_reader import read_run
from tests.support import everywhere


class Fails(CountingEnv):
    """Raises in some steps and resets of its life, where its first seed is 1."""

    def __init__(self, steps: Any = (), resets: Any = (), length: int = 4) -> None:
        super().__init__(length)
        self.at, self.in_resets, self.first, self.asked, self.resets = tuple(steps), tuple(resets), None, 0, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.first = seed if self.first is None else self.first
        self.resets += 1
        if self.first == 1 and self.resets in self.in_resets:
            raise ValueError("no such map")
        return super().reset(seed=seed)[0], {}

    def step(self, action: Any) -> Any:
        self.asked += 1
        if self.first == 1 and self.asked in self.at:
            raise ValueError("the arm is stuck")
        return super().step(action)


@contextlib.contextmanager
def playing(folder: Path, make: Any, number: int | None = None, **keywords: Any) -> Iterator[Any]:
    """Serve environments and record them; a vector of them, of so many worlds, reset with the seeds 0, 1 and so on."""
    with contextlib.ExitStack() as stack:
        recording = Recording(folder, observations=True, infos=True)
        server = stack.enter_context(serve_gym(make, record=recording, **keywords))
        made = make_vec_remote(server.url, num_envs=number, blocking=True, lanes=False, **mode_of(make))
        envs = stack.enter_context(contextlib.closing(made))
        envs.reset(seed=0)
        yield envs


def play(envs: Any, steps: int) -> None:
    for step in range(steps):
        envs.step(np.full(envs.num_envs, step % 2))


def record(folder: Path, make: Any, steps: int = 14, **keywords: Any) -> list[RecordedEpisode]:
    """Play the three lanes of a world, and return their recorded episodes."""
    lanes: dict[str, Any] = {} if make in SAME_STEP else {"num_envs": 3}
    with playing(folder, make, **lanes, **keywords) as envs:
        play(envs, steps)
    return read_folder(folder).episodes()


def mode_of(make: Any) -> dict[str, Any]:
    return {"autoreset_mode": "SameStep"} if make in SAME_STEP else {}


def same_step(**faults: Any) -> Any:
    """Lanes that begin anew in the step that ends them."""

    def make() -> SyncVectorEnv:
        return SyncVectorEnv([lambda: Fails(**faults)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)

    SAME_STEP.append(make)
    return make


SAME_STEP: list[Any] = []


def told(episodes: list[RecordedEpisode], lane: int) -> list[tuple[int, str, int]]:
    """Number, end and length of the episodes of a lane."""
    return [(one.number, one.end, one.length) for one in episodes if one.lane == lane]


@everywhere
def test_a_lane_that_raises_ends_its_episode_as_failed(tmp_path: Path, isolation: Any) -> None:
    episodes = record(tmp_path, lambda: Fails(steps=[2, 8]), isolation=isolation)
    assert told(episodes, 1) == [(1, "failed", 1), (2, "terminated", 4), (3, "failed", 1), (4, "closed", 3)]
    assert told(episodes, 0) == [(number, "terminated", 4) for number in (1, 2, 3)]
    failed = [one for one in episodes if one.end == "failed"]
    assert [np.array(load_episode(one).observations).tolist() for one in failed] == [[[1, 0], [1, 1]], [[3, 0], [3, 1]]]
    assert all(verify(one, lambda: Fails(steps=[2, 8])).ok for one in episodes)
    _, rows = read_run(tmp_path)[1]
    events = [(row["lane"], json.loads(row["event"])["error"]) for row in rows if row["kind"] == 2]
    assert [lane for lane, _ in events] == [1, 1]
    assert all("the arm is stuck" in error for _, error in events)
    assert all(row["reward"] is None and row["observation"] is None for row in rows if row["kind"] == 2)


def test_a_single_environment_that_raises_has_the_same_episodes(tmp_path: Path) -> None:
    faults: dict[str, Any] = {"steps": [2, 8]}
    lanes = record(tmp_path / "lanes", lambda: Fails(**faults))
    with playing(tmp_path / "worlds", lambda: Fails(**faults), 2) as envs:
        play(envs, 14)
    worlds = read_folder(tmp_path / "worlds").episodes()
    alone = [one for one in worlds if any(other.end == "failed" for other in one.stream.episodes())]
    assert [(one.end, one.length) for one in alone] == [(one.end, one.length) for one in lanes if one.lane == 1]
    for one, other in zip(alone, [one for one in lanes if one.lane == 1], strict=True):
        assert np.array_equal(load_episode(one).observations, load_episode(other).observations)
        assert one.rewards.tolist() == other.rewards.tolist()


def test_a_lane_whose_resets_all_fail_is_in_no_episode_meanwhile(tmp_path: Path) -> None:
    def make() -> Fails:
        return Fails(resets=range(3, 9))  # two steps of three attempts each

    episodes = record(tmp_path, make, steps=18)
    assert told(episodes, 1) == [*((number, "terminated", 4) for number in (1, 2, 3)), (4, "closed", 1)]
    assert told(episodes, 2)[:3] == [(number, "terminated", 4) for number in (1, 2, 3)]
    assert all(one.length for one in episodes)
    assert [result.ok for result in verify_stream(episodes[0].stream, make)] == [True] * len(episodes)  # type: ignore[union-attr]
    _, rows = read_run(tmp_path)[1]
    assert [(row["lane"], row["call"], row["event"]) for row in rows if row["kind"] == 3] == [
        (1, 10, None), (1, 11, None),
    ]  # fmt: skip


def test_lanes_that_begin_anew_in_the_same_step_are_recorded_alike(tmp_path: Path) -> None:
    make = same_step(steps=[2, 8], resets=range(4, 10))
    episodes = record(tmp_path, make)
    # Of its fourth episode no reset goes well for three attempts, twice.
    assert told(episodes, 1) == [
        (1, "failed", 1), (2, "terminated", 4), (3, "failed", 1), (4, "terminated", 4), (5, "closed", 0),
    ]  # fmt: skip
    assert told(episodes, 0) == [*((number, "terminated", 4) for number in (1, 2, 3)), (4, "closed", 2)]
    done = list(verify_stream(episodes[0].stream, make))
    assert [str(result) for result in done if not result.ok] == []  # type: ignore[union-attr]


def test_a_masked_reset_that_fails_ends_the_episode_of_that_lane(tmp_path: Path) -> None:
    def make() -> Fails:
        return Fails(resets=(2, 3, 4), length=9)

    with playing(tmp_path, make, num_envs=2) as envs:
        play(envs, 1)
        with pytest.raises(EnvironmentFailedError, match="no such map"):
            envs.reset(options={"reset_mask": np.array([False, True])})
        play(envs, 3)
    episodes = read_folder(tmp_path).episodes()
    assert told(episodes, 0) == [(1, "closed", 4)]
    assert told(episodes, 1) == [(1, "reset", 1), (2, "closed", 2)]
    assert all(verify(one, make).ok for one in episodes)


def test_a_replay_that_raises_where_the_recording_did_not_says_so_and_the_other_way_round(tmp_path: Path) -> None:
    episodes = record(tmp_path / "fails", lambda: Fails(steps=[2]))
    # The step that raised is no part of its episode, but the next one of the lane depends on it.
    found = verify(next(one for one in episodes if one.lane == 1 and one.number == 2), Fails)
    assert "the environment raised when it was recorded, not now" in found.difference
    episodes = record(tmp_path / "runs", lambda: Fails())
    found = verify(next(one for one in episodes if one.lane == 1), lambda: Fails(steps=[2]))
    assert "now it raised: the environment raised ValueError in step: the arm is stuck" in found.difference


def test_datasets_have_no_step_that_raised_and_no_empty_episode(tmp_path: Path, monkeypatch: Any) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    episodes = record(tmp_path / "runs", lambda: Fails(steps=[3], resets=range(4, 7)))
    chosen = Selection(complete=False).of(episodes)
    export_minari(chosen, "test/lanes-v0", env=lambda: Fails(steps=[3], resets=range(4, 7)))
    dataset = minari.load_dataset("test/lanes-v0")
    found = [(one.observations.tolist(), len(one.actions)) for one in dataset.iterate_episodes()]
    assert all(len(observations) == length + 1 > 1 for observations, length in found)
    assert [[1, 0], [1, 1], [1, 2]] in [observations for observations, _ in found]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_the_client_s_recorder_ends_the_episode_of_the_lane_alone(tmp_path: Path, mode: Any) -> None:
    with serve_gym(lambda: Fails(steps=[2], resets=range(4, 7)), num_envs=3) as server:
        remote = make_vec_remote(server.url, blocking=True, autoreset_mode=mode)
        with contextlib.closing(Recorder(remote, tmp_path, observations=True)) as envs:
            envs.reset(seed=0)
            for _ in range(14):
                envs.step(np.zeros(3, np.int64))
    streams = [[(one.end, one.length) for one in stream.episodes()] for stream in read_folder(tmp_path).streams]
    assert streams[1][:3] == [("failed", 1), ("terminated", 4), ("terminated", 4)]
    assert streams[0] == streams[2]
    assert {end for end, _ in streams[0] if end != "closed"} == {"terminated"}
    assert all(length for stream in streams for end, length in stream if end != "closed")
