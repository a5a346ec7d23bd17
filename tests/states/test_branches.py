"""Recordings of environments that were restored: branches, with their parents, which verify as any other episode."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from google.protobuf import any_pb2

from bridge import (
    Origin,
    Recorder,
    Recording,
    make_parallel_remote,
    make_remote,
    make_vec_remote,
    serve_gym,
    serve_parallel,
)
from bridge.cli import main
from tests.peers import Stream
from tests.states.herds import Fragile, Herd
from tests.states_envs import Walk, wrapped
from tests.support import assert_identical, chosen, sampled, stable_id

pytest.importorskip("pyarrow")

from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import RecordingError
from bridge.pb import properties_pb2
from bridge.recording.episodes import load_episode
from bridge.recording.player import EpisodeEnv
from bridge.recording.reader import RecordedEpisode, read_folder
from bridge.recording.replay import verify, verify_stream

DEADLINE = 60.0


def env_of(kind: Any) -> Any:
    return None if isinstance(kind, str) else kind


def verified(folder: Path, kind: Any = None) -> list[RecordedEpisode]:
    """The episodes of a folder, each verified by itself and with the others."""
    read = read_folder(folder)
    assert not read.warnings()
    for episode in read.episodes():
        done = verify(episode, env_of(kind))
        assert done.ok, done
        assert done.parent == ("" if episode.parent is None else str(episode.parent))
    for stream in read.streams:
        for done in verify_stream(stream, env_of(kind)):
            assert not isinstance(done, RecordingError), done
            assert done.ok, done
    return read.episodes()


def parents(episodes: list[RecordedEpisode]) -> list[tuple[str, int | None, int | None] | None]:
    """Of each episode the number of its parent, the step and the seed."""
    short = lambda parent: (parent.episode.partition("-")[2].partition("-")[2], parent.step, parent.seed)  # noqa: E731
    return [None if episode.parent is None else short(episode.parent) for episode in episodes]


@pytest.mark.parametrize(
    ("kind", "isolation", "observations"),
    sampled(
        [("FrozenLake-v1", None, False), (wrapped, None, True), (wrapped, "process", False), (Walk, "process", True)],
        3,
        slow=True,
    ),
    ids=["lake", "wrapped", "wrapped-isolated", "walk-isolated"],
)
def test_a_restored_episode_is_a_branch_that_knows_its_parent(
    tmp_path: Path, kind: Any, isolation: Any, observations: bool
) -> None:
    with (
        serve_gym(kind, record=Recording(tmp_path, observations=observations), isolation=isolation) as server,
        closing(make_remote(server.url, timeout=DEADLINE)) as env,
    ):
        env.reset(seed=3)
        env.step(0)
        state = env.save_state()
        for _ in range(3):
            env.step(0)
        env.restore_state(state)
        env.step(1)
        second = env.save_state()
        # A branch of a branch, of one that was seeded anew, and of one that has no steps.
        env.restore_state(second, seed=5)
        third = env.save_state()
        env.step(0)
        env.restore_state(third)
        env.step(0)
        env.restore_state(state, seed=2**64 - 1)
        env.step(1)
        # What goes on from a branch without a seed depends on it, too.
        env.reset()
        env.step(0)
    assert parents(verified(tmp_path, kind)) == [
        None,
        ("1.0.1", 1, None),
        ("1.0.2", 1, 5),
        ("1.0.3", 0, None),
        ("1.0.1", 1, 2**64 - 1),
        None,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(["FrozenLake-v1", Walk], 2, 1, slow=True), ids=stable_id)
def test_each_lane_has_a_parent_of_its_own_also_in_another_world(tmp_path: Path, kind: Any) -> None:
    with serve_gym(kind, record=tmp_path) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        env.step(2)
        single = env.save_state()
        with closing(make_vec_remote(server.url, num_envs=4, lanes=True, blocking=True, timeout=DEADLINE)) as envs:
            envs.reset(seed=7)
            for _ in range(2):
                envs.step(np.array([0, 1, 2, 0]))
            states = envs.save_state(slots=[3, 0])
            envs.step(np.zeros(4, np.int64))
            envs.restore_state([states[1], single], slots=[0, 2], seed=9)
            for action in (1, 2, 0):
                envs.step(np.full(4, action))
            envs.restore_state(states[0], seed=4)
            for action in (2, 1):
                envs.step(np.full(4, action))
            # The other way round: a single environment goes on from a lane.
            env.restore_state(states[1])
            env.step(1)
    episodes = verified(tmp_path, kind)
    found = {episode.id.partition("-")[2].partition("-")[2]: episode.parent for episode in episodes}
    branches = {key: (parent.step, parent.seed) for key, parent in found.items() if parent is not None and parent.seed}
    last = {lane: max(int(key.split(".")[2]) for key in found if key.startswith(f"2.{lane}.")) for lane in range(4)}
    forks = [episode for episode in episodes if episode.parent is not None and episode.parent.seed in range(4, 8)]
    assert [(one.lane, one.parent.seed) for one in forks if one.parent is not None] == [(i, 4 + i) for i in range(4)]
    assert last[0] >= 3
    assert {seed for _, seed in branches.values()} == {4, 5, 6, 7, 9, 11}
    assert found["1.0.2"] is not None
    assert found["1.0.2"].episode.endswith("-2.0.1")


@pytest.mark.parametrize(
    ("lanes", "blocking"),
    chosen(itertools.product([True, False], repeat=2), lambda lanes, blocking: lanes is blocking),
    ids=["lanes-blocking", "lanes-slots", "worlds-blocking", "worlds-slots"],
)
@pytest.mark.slow
def test_a_clients_recorder_records_branches_too(tmp_path: Path, lanes: bool, blocking: bool) -> None:
    with serve_gym("FrozenLake-v1") as server:
        made = make_vec_remote(server.url, num_envs=3, lanes=lanes, blocking=blocking, timeout=DEADLINE)
        with closing(Recorder(made, tmp_path)) as envs:
            envs.reset(seed=1)
            while not blocking and None in envs.step(np.array([0, 0, 0]))[0]:
                """The first observations come with steps."""
            early = made.save_state(slots=[2])
            envs.step(np.array([0, 0, 0]))
            (state,) = envs.save_state(slots=[1])
            envs.step(np.array([0, 0, 0]))
            wanted = envs.restore_state(state, slots=[0, 1], seed=3)[0]
            assert [wanted[slot] for slot in (0, 1)] == [wanted[0]] * 2
            envs.step(np.array([0, 0, 0]))
            envs.restore_state(early[0])
            envs.step(np.array([0, 0, 0]))
    found = [episode for episode in verified(tmp_path) if episode.parent is not None]
    assert len(found) == 5
    assert [one.parent.seed for one in found if one.parent is not None] == [3, 4, None, None, None]
    assert all(one.parent is not None and one.parent.episode for one in found)


@pytest.mark.slow
def test_a_parent_that_is_not_recorded_is_said_and_nothing_is_verified_by_it(tmp_path: Path) -> None:
    with serve_gym(Walk, record=tmp_path / "server") as server:
        plain = make_vec_remote(server.url, num_envs=2, lanes=True, blocking=True, timeout=DEADLINE)
        plain.reset(seed=0)
        (before,) = plain.save_state(slots=[0])
        with closing(Recorder(plain, tmp_path / "client")) as envs:
            envs.reset(seed=1)
            envs.restore_state(before)
            envs.step(np.array([0, 1]))
            envs.reset(seed=2)
            envs.step(np.array([0, 1]))
    read = read_folder(tmp_path / "client")
    for stream in read.streams:
        first, branch, last = list(verify_stream(stream, Walk))
        assert not isinstance(first, RecordingError)
        assert first.ok
        assert isinstance(branch, RecordingError)
        assert "it is a branch, and what it goes on from was not recorded" in str(branch)
        assert not isinstance(last, RecordingError)
        assert last.ok
    unknown = read.episodes()[2].parent
    assert unknown is not None
    assert (unknown.episode, unknown.step, str(unknown)) == ("", None, "unknown")
    assert verified(tmp_path / "server", Walk), "the server knows it"


@pytest.mark.slow
def test_a_parent_whose_episode_was_not_kept_is_said(tmp_path: Path) -> None:
    with (
        serve_gym(Walk, record=tmp_path) as server,
        closing(make_remote(server.url, timeout=DEADLINE)) as env,
    ):
        env.reset(seed=0)
        state = env.save_state()
        env.step(1)
        other = env.save_state()
        with closing(make_remote(server.url, timeout=DEADLINE)) as friend:
            friend.reset(seed=1)
            friend.restore_state(other)
            friend.step(0)
        env.restore_state(state)
    kept = [path for path in tmp_path.glob("*") if ".2." in path.name]
    gone = [path for path in tmp_path.glob("*") if ".2." not in path.name]
    assert kept
    for path in gone:
        path.unlink()
    _, branch = read_folder(tmp_path).episodes()
    assert branch.parent is not None
    assert "which is not in this folder" in branch.parent.reason
    with pytest.raises(RecordingError, match="it is a branch, and what it goes on from is in the recording"):
        verify(branch, Walk)


@pytest.mark.slow
def test_a_parent_of_which_the_recording_was_switched_off_is_said(tmp_path: Path) -> None:
    with serve_gym(Walk, record=tmp_path) as server:
        one = Stream(server, own_connection=True)
        with closing(make_remote(f"{server.url}?world=", timeout=DEADLINE)) as env:
            one.join("", role="spectator")

            def switch(text: str) -> None:
                request = properties_pb2.PropertyRequest()
                request.write_property.key = "world.recording"
                request.write_property.value.CopyFrom(pack_tensor(text))
                sent = any_pb2.Any(type_url=PROPERTY_REQUEST_URL, value=request.SerializeToString())
                assert one.ask(extension=sent).error.code == 0

            env.reset(seed=0)
            switch("off")
            env.step(1)
            state = env.save_state()
            switch("on")
            env.reset(seed=1)
            env.restore_state(state)
            env.step(1)
        one.die()
        one.channel.close()
    *_, whole, branch = read_folder(tmp_path).episodes()
    assert verify(whole, Walk).ok
    assert str(branch.parent) == "unknown"
    with pytest.raises(RecordingError, match="lacks rows"):
        verify(branch, Walk)


@pytest.mark.slow
def test_runs_replay_and_the_page_show_what_an_episode_goes_on_from(tmp_path: Path, capsys: Any) -> None:
    with serve_gym("FrozenLake-v1", record=tmp_path) as server, closing(make_remote(server.url)) as env:
        env.reset(seed=3)
        env.step(0)
        state = env.save_state()
        env.restore_state(state, seed=8)
        env.step(0)
    assert main(["runs", str(tmp_path)]) == 0
    head, first, second, _ = capsys.readouterr().out.splitlines()
    parent = first.split()[0]
    assert head.endswith("branch of")
    assert second.endswith(f"{parent} step 1 seed 8")
    assert "step" not in first.replace("steps", "")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["parent"] for line in lines] == [None, {"episode": parent, "step": 1, "seed": 8}]
    assert main(["replay", f"{tmp_path}/{lines[1]['episode']}", "--verify"]) == 0
    assert f"as a branch of {parent} step 1 seed 8" in capsys.readouterr().out
    # What is served, and so what the page shows, says it too.
    shown = EpisodeEnv(f"{tmp_path}/{lines[1]['episode']}")
    assert shown.steer()["parent"] == {"episode": parent, "step": 1, "seed": 8}
    shown.close()


def test_a_branch_that_was_changed_differs(tmp_path: Path) -> None:
    """Of a recording that says another parent than there was, the first observation tells."""
    with serve_gym(Walk, record=tmp_path) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=3)
        env.step(0)
        state = env.save_state()
        env.step(0)
        env.restore_state(state)
        env.step(1)
    stream = read_folder(tmp_path).streams[0]
    ((call, (point,)),) = stream.branches.items()
    assert point is not None
    stream.branches[call] = [type(point)(point.stream, 0, point.call + 1)]
    done = verify(stream.episodes()[1], Walk)
    assert done.difference.startswith("the first observation: the observation differs")
    # One that goes on from itself ends, too.
    stream = read_folder(tmp_path).streams[0]
    stream.branches[call] = [type(point)(point.stream, 0, call)]
    with pytest.raises(RecordingError, match="goes on from itself"):
        verify(stream.episodes()[1], Walk)


def test_exports_carry_the_parent_of_a_branch(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    with serve_gym("FrozenLake-v1", record=tmp_path / "runs") as server, closing(make_remote(server.url)) as env:
        env.reset(seed=3)
        env.step(0)
        state = env.save_state()
        env.restore_state(state, seed=8)
        env.step(0)
        env.reset()
    parent = read_folder(tmp_path / "runs").episodes()[0].id
    # Observations come of a replay, which plays the parent first.
    data = [load_episode(episode) for episode in read_folder(tmp_path / "runs").episodes()[:2]]
    assert_identical(data[1].observations[0], data[0].observations[-1])
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    minari = pytest.importorskip("minari")
    for form in ("hdf5", "arrow"):
        name = f"test/{form}-v0"
        command = ["export", str(tmp_path / "runs"), "--minari", name, "--unfinished", "--data-format", form]
        if main(command) != 0:
            capsys.readouterr()
            continue
        assert "1 of them are branches, whose parent is in the metadata of the episode" in capsys.readouterr().out
        told = list(minari.load_dataset(name).storage.get_episode_metadata([0, 1]))
        assert "parent" not in told[0]
        assert (told[1]["parent"], told[1]["parent_step"], told[1]["parent_seed"]) == (parent, 1, 8)
    parquet = pytest.importorskip("pyarrow.parquet")
    assert main(["export", str(tmp_path / "runs"), "--lerobot", str(tmp_path / "robot"), "--unfinished"]) == 0
    assert "1 of them are branches, whose parent is in the row of the episode" in capsys.readouterr().out
    (file,) = (tmp_path / "robot/meta/episodes").rglob("*.parquet")
    assert parquet.read_table(file)["parent"].to_pylist()[:2] == [None, parent]


def test_what_a_message_of_another_package_puts_elsewhere_is_a_branch_of_an_unknown_episode(tmp_path: Path) -> None:
    from bridge import MessageForm, MessagePart, SessionMessage

    form = MessageForm("teleport", "type.googleapis.com/t.Request", "type.googleapis.com/t.Response", places=True)

    class Teleport(MessagePart):
        def answer(self, request: bytes) -> bytes:
            env: Any = self.stage.envs[0].unwrapped
            env.x = np.zeros(3)
            self.stage.place(0, env.x.copy(), {}, Origin("") if request else None)
            return self.stage.moment.encode()

    message = SessionMessage(form, part=Teleport)
    with serve_gym(Walk, record=tmp_path, messages=[message]) as server, closing(make_remote(server.url)) as env:
        env.reset(seed=0)
        (answer,) = env.send_message(form, b"").answers
        assert answer.data.endswith(b"-1.0")
        env.step(1)
        env.send_message(form, b"x")
        env.step(1)
    first, *others = read_folder(tmp_path).episodes()
    assert verify(first, Walk).ok
    for episode in others:
        assert episode.parent is not None
        assert str(episode.parent) == "unknown"
        with pytest.raises(RecordingError, match="what it goes on from was not recorded"):
            verify(episode, Walk)


@pytest.mark.slow
def test_a_recorded_environment_of_mujoco_verifies_its_branches(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    with serve_gym("Hopper-v5", record=tmp_path) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=3)
        env.action_space.seed(1)
        for _ in range(5):
            env.step(env.action_space.sample())
        state = env.save_state()
        for _ in range(2):
            env.step(env.action_space.sample())
        env.restore_state(state, seed=4)
        for _ in range(5):
            env.step(env.action_space.sample())
    assert len(verified(tmp_path)) == 2
    assert gymnasium.spec("Hopper-v5")


class Short(Herd):
    def __init__(self) -> None:
        super().__init__(horizon=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "observations"),
    sampled(itertools.product([Short, Fragile], [False, True]), 4, 1, slow=True),
    ids=stable_id,
)
def test_branches_of_several_agents_know_their_parents_and_verify(
    tmp_path: Path, kind: Any, observations: bool
) -> None:
    with (
        serve_parallel(kind, record=Recording(tmp_path, observations=observations)) as server,
        closing(make_parallel_remote(server.url, states=True, timeout=DEADLINE)) as env,
    ):
        spaces = {agent: env.action_space(agent) for agent in env.possible_agents}

        def step(count: int) -> None:
            for _ in range(count):
                env.step({agent: spaces[agent].sample() for agent in env.agents})

        env.reset(seed=3)
        step(2)
        state = env.save_state()
        step(3)
        env.restore_state(state)
        step(1)
        env.restore_state(state, seed=7)
        step(2)
        branch = env.save_state()
        env.reset()
        step(1)
        env.restore_state(branch)
        step(1)
    assert parents(verified(tmp_path, kind)) == [None, ("1.0.1", 2, None), ("1.0.1", 2, 7), None, ("1.0.3", 2, None)]
