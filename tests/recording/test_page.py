"""The server's side of the page's Record and Replay: the switch, the list of episodes, and worlds that show them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import any_pb2

from bridge import Auth, make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from bridge.recording.reader import read_folder
from bridge.recording.replay import verify
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.inside import limit_replays, list_recordings_again_after
from tests.parallel_envs import Relay
from tests.peers import Stream
from tests.places import ROOT
from tests.support import everywhere, until, world_of
from tests.web_envs import Paddle

pytestmark = pytest.mark.slow


class Page(Stream):
    """A request as the page sends it."""

    def read(self, key: str) -> str:
        request = properties_pb2.PropertyRequest()
        request.read_property.key = key
        answer = self._extend(request)
        assert answer.WhichOneof("payload") == "extension", answer
        value = properties_pb2.PropertyResponse.FromString(answer.extension.value).read_property.value
        return str(unpack_tensor(value))

    def write(self, key: str, text: str) -> pb.Status:
        """Write a property; return the error, which is empty where there is none."""
        request = properties_pb2.PropertyRequest()
        request.write_property.key = key
        request.write_property.value.CopyFrom(pack_tensor(text))
        return self._extend(request).error

    def _extend(self, request: properties_pb2.PropertyRequest) -> Any:
        return self.ask(extension=any_pb2.Any(type_url=PROPERTY_REQUEST_URL, value=request.SerializeToString()))

    def worlds(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.read("server.web"))["worlds"]
        return found

    def episodes(self, least: int = 1) -> list[dict[str, Any]]:
        """The episodes that the server lists, once it has read so many that have steps."""
        lists: list[dict[str, Any]] = []

        def there() -> bool:
            lists.append(json.loads(self.read("server.recordings")))
            assert lists[-1]["problem"] == ""
            return not lists[-1]["reading"] and sum(item["steps"] > 0 for item in lists[-1]["episodes"]) >= least

        until(there, 60)
        found: list[dict[str, Any]] = lists[-1]["episodes"]
        return found

    def show(self, episode: str) -> Any:
        """Ask for a world that shows an episode."""
        settings = {"replay": pack_tensor(episode)}
        return self.ask(create_world=pb.CreateWorldRequest(settings=settings))


@pytest.fixture(autouse=True)
def read_again_soon(monkeypatch):
    list_recordings_again_after(monkeypatch, 0.05)


@pytest.fixture
def page():
    opened: list[Stream] = []

    def make(server: Any, token: str | None = None) -> Page:
        opened.append(Page(server, own_connection=True, token=token))
        return opened[-1]

    yield make
    for stream in opened:
        stream.die()
        stream.channel.close()


def play(url: str, steps: int, seed: int | None = 7, **keywords: Any) -> None:
    env = make_remote(url, **keywords)
    env.reset(seed=seed)
    for _ in range(steps):
        *_, terminated, truncated, _ = env.step(1)
        if terminated or truncated:
            env.reset()
    env.close()


# The switch


@everywhere
def test_whoever_may_play_switches_the_recording_of_a_world(page, tmp_path, isolation):
    with serve_gym(lambda: CountingEnv(5), record=tmp_path, isolation=isolation, web=True) as server:
        env = make_remote(f"{server.url}?world=")
        one = page(server).join("", role="spectator")
        assert (one.read("world.recording"), one.worlds()[0]["recording"]) == ("on", True)
        env.reset(seed=1)
        for _ in range(7):  # an episode, and two steps of the next
            if any(env.step(0)[2:4]):
                env.reset()
        assert one.write("world.recording", "off").code == 0
        assert (one.read("world.recording"), one.worlds()[0]["recording"]) == ("off", False)
        for _ in range(6):
            if any(env.step(0)[2:4]):
                env.reset()
        assert one.write("world.recording", "on").code == 0
        env.reset(seed=2)
        for _ in range(5):
            env.step(0)
        error = one.write("world.recording", "perhaps")
        assert (error.code, "written as on or off" in error.message) == (Code.INVALID_ARGUMENT, True)
        env.close()
    episodes = read_folder(tmp_path).episodes()
    assert [(episode.end, episode.incomplete) for episode in episodes] == [
        ("terminated", False),
        ("lost", True),
        ("terminated", False),
    ]
    assert episodes[2].seed == 2


def test_rows_of_an_episode_whose_beginning_was_not_recorded_are_no_episode(page, tmp_path):
    with serve_gym("CartPole-v1", record=tmp_path) as server:
        env = make_remote(f"{server.url}?world=")
        one = page(server).join("", role="spectator")
        one.write("world.recording", "off")
        env.reset(seed=1)
        one.write("world.recording", "on")
        env.step(0)
        env.close()
    (stream,) = read_folder(tmp_path).streams
    assert stream.episodes() == []


def test_each_kind_of_world_has_the_switch_and_calls_are_recorded_while_it_is_off(page, tmp_path):
    with serve_gym(Paddle, num_envs=2, fps=50, record=tmp_path / "real time") as server:
        envs = BlockingReset(make_vec_remote(f"{server.url}?world="))
        envs.reset(seed=1)
        one = page(server).join("", role="spectator")
        assert one.write("world.recording", "off").code == 0
        assert one.read("world.recording") == "off"
        envs.close()
    with serve_parallel(Relay, record=tmp_path / "agents") as server:
        remote = make_parallel_remote(f"{server.url}?world=")
        one = page(server).join("", role="spectator")
        assert one.write("world.recording", "off").code == 0
        remote.reset(seed=3)
        remote.close()
    assert read_folder(tmp_path / "agents").episodes() == []
    with serve_gym("CartPole-v1", record=tmp_path / "calls") as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=1)
        one = page(server).join("", role="spectator")
        one.write("world.recording", "off")
        env.step(0)
        env.set_wrapper_attr("gravity", 1.0)
        one.write("world.recording", "on")
        env.reset(seed=2)
        env.step(0)
        env.close()
    first, second = read_folder(tmp_path / "calls").episodes()
    assert first.end == "lost"
    assert verify(second, allow_calls=True).ok, "the attribute that was set meanwhile is set again"


def test_a_token_for_looking_on_neither_switches_nor_shows_nor_steers(page, tmp_path):
    tokens = {"token": "for-players", "auth": Auth(watch_token="for-watchers")}
    with serve_gym(Paddle, record=tmp_path, web=True, **tokens) as server:
        play(f"{server.url}?world=", 3, token="for-players")
        guest = page(server, "for-watchers").join("", role="spectator")
        player = page(server, "for-players")
        episode = player.episodes()[0]["episode"]
        refusals = [guest.write("world.recording", "off"), guest.show(episode).error]
        assert player.worlds()[0]["recording"] is True
        world = player.show(episode).create_world.world_name
        other = page(server, "for-watchers").join(world, role="spectator")
        assert json.loads(other.read("world.replay"))["episode"] == episode, "but it may watch"
        refusals.append(other.write("world.replay", "{}"))
        assert [error.code for error in refusals] == [Code.PERMISSION_DENIED] * 3


def test_a_server_that_records_nothing_has_neither_switch_nor_list(page):
    with serve_gym(Paddle, web=True) as server:
        env = make_remote(f"{server.url}?world=")
        one = page(server).join("", role="spectator")
        assert one.write("world.recording", "on").code == Code.NOT_FOUND
        described = json.loads(one.read("server.web"))
        assert (described["records"], described["worlds"][0]["recording"]) == (False, None)
        env.close()


# The list


def test_the_newest_episodes_are_listed_with_what_keeps_one_from_being_shown(page, tmp_path):
    with serve_gym(lambda: CountingEnv(5), record=tmp_path, web=True) as server:
        one = page(server)
        assert one.episodes(0) == []
        play(server.url, 5, player="person:Ann")
        play(server.url, 5, seed=None)
        listed = [item for item in one.episodes(2) if item["steps"] == 5]
        first = next(item for item in listed if item["players"] == ["person:Ann"])
        other = next(item for item in listed if item["players"] == ["agent"])
        assert listed.index(other) < listed.index(first), "the newest first"
        assert (first["end"], first["return"], first["obstacle"]) == ("terminated", 15.0, "")
        assert "no reset with a seed" in other["obstacle"]


def test_as_many_of_the_newest_files_are_read_as_the_episodes_need(tmp_path):
    for number in range(4):
        with serve_gym(lambda: CountingEnv(5), record=tmp_path) as server:
            play(server.url, 15, seed=number)
    assert len(list(tmp_path.glob("*.parquet"))) == 4
    assert len(read_folder(tmp_path, 1).streams) == 1
    assert len(read_folder(tmp_path, 5).streams) == 2
    assert len(read_folder(tmp_path, 1000).streams) == 4


# Worlds that show an episode


@pytest.fixture
def shown(page, tmp_path):
    """A server that shows an episode of 40 steps; the page that watches, and the world's name."""
    with serve_gym(Paddle, record=tmp_path, web=True) as server:
        play(server.url, 40)
        one = page(server)
        facts = one.episodes()[0]
        name = one.show(facts["episode"]).create_world.world_name
        assert name, "the world was made"
        one.join(name, role="spectator", frame="png")
        yield server, one, name


def state(one: Page) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(one.read("world.replay"))
    return found


def steer(one: Page, **wanted: Any) -> None:
    assert one.write("world.replay", json.dumps(wanted)).code == 0


def test_an_episode_is_shown_as_a_world_with_pause_seek_and_speed(shown):
    _, one, name = shown
    (world,) = [world for world in one.worlds() if world["name"] == name]
    assert (world["title"], world["seats"], world["recording"]) == ("Paddle", {}, None)
    assert world["replay"]["length"] == 40
    one.ask(step=pb.StepRequest())
    steer(one, paused=True)
    until(lambda: state(one)["paused"])
    steer(one, position=12)
    until(lambda: state(one)["position"] == 12 and not state(one)["seeking"])
    steer(one, speed=4, paused=False)
    until(lambda: state(one)["position"] == 40)
    until(lambda: state(one)["paused"], 20)
    steer(one, speed=0.25, paused=False)  # from its beginning, for some seconds
    until(lambda: 0 < state(one)["position"] < 40)


def test_the_observations_are_those_that_were_recorded_and_nobody_plays(shown, tmp_path):
    server, one, name = shown
    watcher = make_remote(f"{server.url}?world={name}", role="spectator")
    steer(one, paused=True)
    steer(one, position=9)
    observation, _ = watcher.reset()
    until(lambda: watcher.step(0)[0].tolist() == [118])
    assert one.ask(step=pb.StepRequest()).step.state == pb.RUNNING
    for role in ("player", "takeover"):
        packed = {"role": pack_tensor(role)}
        answer = Page(server, own_connection=True)
        error = answer.ask(join_world=pb.JoinWorldRequest(world_name=name, settings=packed)).error
        assert error.code == Code.FAILED_PRECONDITION, error
        answer.die()
        answer.channel.close()
    watcher.close()
    assert len(read_folder(tmp_path).episodes()) == 1, "a replay is not recorded"
    assert observation.dtype == np.int64


SCRIPT = """
import sys
from bridge import serve_gym
from tests.web_envs import Paddle
class Slow(Paddle):
    pass
print("started", flush=True)
server = serve_gym(Slow, web=True, record=sys.argv[1])
print(server.url, flush=True)
server.wait(grace=0.0)
"""


@pytest.mark.slow
def test_the_script_of_a_server_is_not_run_again_for_a_replay(page, tmp_path):
    """It has no `if __name__ == "__main__"`, and its environment is a class of its own."""
    script = tmp_path / "served.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "runs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        url = process.stdout.readline().strip()
        play(url, 5)
        one = page(type("Server", (), {"url": url}))
        name = one.show(one.episodes()[0]["episode"]).create_world.world_name
        one.join(name, role="spectator", frame="png")
        answer = one.ask(step=pb.StepRequest())
        assert answer.step.state == pb.RUNNING, answer
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (out, process.returncode) == ("", 0), err
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
        process.stderr.close()


@pytest.mark.slow
def test_what_does_not_steer_is_refused(shown):
    _, one, _ = shown
    for text in ["", "[]", '{"pause": true}', '{"paused": 1}', '{"position": true}', '{"speed": 0}']:
        error = one.write("world.replay", text)
        assert (error.code, "expected world.replay" in error.message) == (Code.INVALID_ARGUMENT, True), text


@pytest.mark.slow
def test_a_replay_goes_when_nobody_looks_at_it_and_there_are_only_so_many(shown, page, monkeypatch):
    server, one, name = shown
    limit_replays(monkeypatch, 2, lingers=2.0)
    other = page(server)
    episode = other.episodes()[0]["episode"]
    # One that nobody joins goes too.
    never = other.show(episode).create_world.world_name
    assert never
    error = other.show(episode).error
    assert (error.code, "shows 2 recorded episodes already" in error.message) == (Code.RESOURCE_EXHAUSTED, True)
    until(lambda: never not in server.worlds)
    process = world_of(server, name).env.inner.inner.process
    one.die()
    until(lambda: name not in server.worlds)
    until(lambda: process.pid is None, 20)
    again = other.show(episode)
    assert again.create_world.world_name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("episode", "code", "said"),
    [
        ("../secret", Code.INVALID_ARGUMENT, "the id of an episode"),
        ("20261122T140501-3fa9c1-1.0.17", Code.FAILED_PRECONDITION, "this episode cannot be shown: expected FOLDER"),
    ],
)
def test_an_episode_that_is_not_there_is_said(page, tmp_path, episode, code, said):
    with serve_gym(Paddle, record=tmp_path, web=True) as server:
        one = page(server)
        error = one.show(episode).error
        assert (error.code, said in error.message) == (code, True), error
        assert server.worlds == []
        for _ in range(5):
            assert one.show(episode).error.code == code, "and it takes no place"


def test_an_episode_without_a_seed_is_said_to_be_none_to_show(page, tmp_path):
    with serve_gym(Paddle, record=tmp_path, web=True) as server:
        play(server.url, 3, seed=None)
        one = page(server)
        error = one.show(one.episodes()[0]["episode"]).error
        assert error.code == Code.FAILED_PRECONDITION
        assert "no reset with a seed" in error.message


@pytest.mark.slow
def test_environments_of_several_agents_and_of_lanes_are_shown(page, tmp_path: Path):
    with serve_gym("CartPole-v1", num_envs=2, record=tmp_path / "lanes", web=True) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset(seed=1)
        for _ in range(30):
            envs.step(np.ones(2, np.int64))
        envs.close()
        one = page(server)
        episode = next(item["episode"] for item in one.episodes(2) if ".1." in item["episode"])
        name = one.show(episode).create_world.world_name
        one.join(name, role="spectator", frame="png")
        answer = one.ask(step=pb.StepRequest())
        assert answer.step.state == pb.RUNNING, answer
    with serve_parallel("butterfly/pistonball-v6", record=tmp_path / "agents", web=True) as server:
        remote = make_parallel_remote(server.url)
        remote.reset(seed=3)
        for _ in range(3):
            remote.step({agent: remote.action_space(agent).sample() for agent in remote.agents})
        remote.close()
        one = page(server)
        name = one.show(one.episodes()[0]["episode"]).create_world.world_name
        one.join(name, role="spectator")
        answer = one.ask(step=pb.StepRequest())
        assert answer.step.state == pb.RUNNING, answer
