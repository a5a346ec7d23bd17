"""Observers of a user's own: told of worlds, of what environments return, and of who joins."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers.vector import RecordEpisodeStatistics

import bridge
from bridge import Episode, Episodes, Listener, Observer, make_remote, make_vec_remote, serve_gym
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code, RemoteError, RequestError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, Inspector
from bridge.wrappers import BlockingReset
from tests.peers import Stream
from tests.support import until
from tests.trick_envs import TrickEnv

PATIENCE = 20.0


class Told(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.worlds: list[str] = []
        self.episodes: list[Episode] = []
        self.joined: list[dict[str, Any]] = []
        self.ended = threading.Event()
        self.closed = threading.Event()

    def made(self, world: Any) -> Listener:
        self.worlds.append(world.name)
        return Episodes(world.env.facts, self._end)

    def _end(self, episode: Episode) -> None:
        self.episodes.append(episode)
        self.ended.set()

    def join(self, world: Any, settings: Mapping[str, Any], join: Any) -> Any:
        self.joined.append(dict(settings))
        return join({name: value for name, value in settings.items() if name != "colour"})

    def describe(self, world: Any) -> Mapping[str, Any]:
        return {"colour": "blue"}

    def counts(self, worlds: Any) -> Mapping[str, float]:
        return {"finished": float(len(self.episodes))}

    def close(self) -> None:
        self.closed.set()


def test_the_episodes_of_lanes_are_those_that_the_client_counts() -> None:
    told, counted = Told(), []
    with serve_gym("CartPole-v1", num_envs=3, observers=[told]) as server:
        envs = RecordEpisodeStatistics(BlockingReset(make_vec_remote(server.url)))
        envs.reset(seed=0)
        envs.action_space.seed(0)
        for _ in range(150):
            *_, infos = envs.step(envs.action_space.sample())
            for lane in np.flatnonzero(infos.get("_episode", [])).tolist():
                episode = infos["episode"]
                counted.append((lane, float(episode["r"][lane]), int(episode["l"][lane])))
        envs.close()
    assert len(counted) > 6
    assert [(episode.lane, episode.reward, episode.length) for episode in told.episodes] == counted
    assert told.closed.is_set()


def test_an_observer_is_told_in_real_time_though_nobody_watches() -> None:
    told = Told()
    with serve_gym(lambda: CountingEnv(length=4), fps=200, observers=[told]) as server:
        env = make_remote(server.url)
        env.reset(seed=0)
        assert told.ended.wait(PATIENCE)
        env.close()
    assert told.episodes[0].length == 4


def test_an_observer_takes_settings_of_its_own_and_adds_to_what_the_server_tells() -> None:
    told = Told()
    with serve_gym(lambda: CountingEnv(length=2), observers=[told]) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        env.step(env.action_space.sample())
        env.step(env.action_space.sample())
        status = server.status()
        with Inspector(server.url, PATIENCE) as inspector:
            page = json.loads(str(unpack_tensor(inspector.read_property("server.web"))[()]))
        env.close()
    assert status["finished"] == 1.0
    assert [world["colour"] for world in page["worlds"]] == ["blue"]
    assert len(told.joined) == len(told.worlds) == 1


class Doubled(Listener):
    """Acts in the agent's place, and tells the world of another reward."""

    async def acting(self, lane: int | None, action: object) -> object:
        return 0

    def stepped(self, lane: int | None, action: object, result: Any) -> Any:
        assert action == 0
        observation, reward, *rest = result
        return observation, 2.0 * reward, *rest


class Doubling(Observer):
    def made(self, world: Any) -> Listener:
        return Doubled()


def test_a_listener_may_act_in_the_agent_s_place_and_change_what_the_world_is_told() -> None:
    local = gymnasium.make("CartPole-v1")
    local.reset(seed=3)
    with serve_gym("CartPole-v1", observers=[Doubling()]) as server:
        env = make_remote(server.url)
        env.reset(seed=3)
        for _ in range(5):
            expected, reward, *_ = local.step(0)
            observation, doubled, *_ = env.step(1)
            np.testing.assert_array_equal(observation, expected)
            assert doubled == 2.0 * reward
        env.close()


class Strict(Observer):
    """Looks at who has joined before it refuses."""

    refuses = True

    def join(self, world: Any, settings: Mapping[str, Any], join: Any) -> Any:
        agent = join(settings)
        if self.refuses and agent.unwrapped.observations:
            raise RequestError(Code.PERMISSION_DENIED, "not today")
        return agent


@pytest.mark.parametrize("settings", [{}, {"frame": "png"}], ids=["plain", "with pictures"])
def test_a_client_that_an_observer_refuses_after_it_has_joined_leaves_its_seat(settings: dict[str, str]) -> None:
    strict = Strict()
    request = pb.JoinWorldRequest(settings={name: pack_tensor(value) for name, value in settings.items()})
    with serve_gym("CartPole-v1", web=True, observers=[strict]) as server:
        client = Stream(server, own_connection=True)
        assert client.ask(join_world=request).error.message == "not today"
        assert server.status()["viewers"] == 0
        strict.refuses = False
        assert client.ask(join_world=request).WhichOneof("payload") == "join_world"
        client.die()
        client.channel.close()


class Broken(Observer):
    def close(self) -> None:
        raise RuntimeError("the disk is full")


def test_an_observer_that_does_not_close_keeps_no_other_open(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    with serve_gym("CartPole-v1", observers=[Broken(), told]):
        pass
    assert told.closed.is_set()
    assert "the disk is full" in caplog.text


class Closing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Sets an event when it is closed."""

    def __init__(self, closed: threading.Event) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.closed = closed

    def close(self) -> None:
        super().close()
        self.closed.set()


class Raising(Observer):
    """Its listener raises at the end of a world, and so does what it does in the event loop."""

    class Over(Listener):
        def over(self, error: RequestError) -> None:
            raise RuntimeError("the listener does not end")

    def start(self, background: Any) -> None:
        self.background = background
        self.worked = threading.Event()

    def made(self, world: Any) -> Listener:
        def done(result: object) -> None:
            self.worked.set()
            raise RuntimeError("the result is of no use")

        self.background.submit(int, done)
        return self.Over()


def test_an_observer_that_does_not_start_leaves_no_port_and_no_socket_behind(tmp_path: Path) -> None:
    class Broken(Observer):
        def start(self, helper: Any) -> None:
            raise ValueError("no room")

    path = tmp_path / "s"
    for _ in range(2):
        with pytest.raises(ValueError, match="no room"):
            serve_gym("CartPole-v1", unix_path=str(path) if hasattr(socket, "AF_UNIX") else None, observers=[Broken()])
        assert not path.exists()


@pytest.mark.faulty
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("fps", [None, 100])
def test_an_observer_that_ends_its_thread_ends_no_server(error: type[BaseException], fps: float | None) -> None:
    class Ends(Observer):
        """Lets one world alone, ends the thread as the second one is made, and as the third one begins."""

        worlds = 0

        def made(self, world: Any) -> Listener | None:
            self.worlds += 1
            if self.worlds == 2:
                raise error("enough")
            return Began() if self.worlds == 3 else None

        def close(self) -> None:
            raise error("enough")

    class Began(Listener):
        def began(self, lane: Any, result: Any, mask: Any) -> None:
            raise error("enough")

    with serve_gym("CartPole-v1", fps=fps, observers=[Ends()]) as server:
        url = f"{server.url}/CartPole-v1"
        first = make_remote(url)
        first.reset()
        with pytest.raises(RemoteError, match="enough"):
            make_remote(url)
        third = make_remote(url)
        with pytest.raises(RemoteError, match="enough"):
            third.reset()
        first.step(first.action_space.sample())
        first.close()
        third.close()
        until(lambda: not server.worlds)


@pytest.mark.parametrize("how", ["another does not start", "the port of metrics is taken", "it never serves"])
def test_an_observer_of_a_server_that_does_not_serve_is_closed(how: str) -> None:
    class Broken(Observer):
        def start(self, helper: Any) -> None:
            raise ValueError("no room")

    told, never = Told(), Told()
    if how == "it never serves":
        serve_gym("CartPole-v1", observers=[told], start=False).stop()
    elif how == "another does not start":
        with pytest.raises(ValueError, match="no room"):
            serve_gym("CartPole-v1", observers=[told, Broken(), never])
    else:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SettingError, match="metrics_port"):
            serve_gym("CartPole-v1", observers=[told], metrics_port=taken.getsockname()[1])
    assert told.closed.is_set()
    assert not never.closed.is_set()


@pytest.mark.faulty
def test_an_observer_that_raises_ends_no_world_and_keeps_no_environment_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed, observer = threading.Event(), Raising()
    with serve_gym(lambda: Closing(closed), observers=[observer]) as server:
        env = make_remote(server.url, timeout=20)
        assert observer.worked.wait(20)
        env.reset(seed=1)
        env.step(0)
        env.close()
        assert closed.wait(20)
    assert "the result is of no use" in caplog.text


@pytest.mark.faulty
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process")
def test_a_default_world_is_made_anew_though_an_observer_raised_at_the_end_of_the_last() -> None:
    with serve_gym(TrickEnv, isolation="process", observers=[Raising()]) as server:
        url = f"{server.url}/?world="
        with make_remote(url, timeout=20) as env:
            env.reset(seed=1)
            os.kill(env.call("pid"), signal.SIGKILL)
            with pytest.raises(RemoteError, match="ended by SIGKILL"):
                env.step(0)
        with make_remote(url, timeout=20) as env:
            env.reset(seed=1)


class Keeping(Observer):
    def keep(self, world: Any, agent: Any) -> bool:
        raise RuntimeError("nobody knows whether to keep it")


@pytest.mark.faulty
def test_a_seat_is_free_again_though_an_observer_raised_as_its_client_was_lost(
    streams: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_gym(CountingEnv, observers=[Keeping()]) as server:
        lost = streams(server).join()
        lost.close()
        until(lambda: not server.connections)
        streams(server).join()
        until(lambda: "the observer Keeping failed at keep: RuntimeError" in caplog.text)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_several_agents_have_a_return_each(shape: tuple[int, ...]) -> None:
    pytest.importorskip("pettingzoo")
    from tests.parallel_envs import Relay

    class Shaped(Relay):
        def step(self, actions: Any) -> Any:
            observations, rewards, *rest = super().step(actions)
            return observations, {agent: np.full(shape, reward) for agent, reward in rewards.items()}, *rest

    told = Told()
    with bridge.serve_parallel(Shaped, observers=[told]) as server:
        env = bridge.make_parallel_remote(server.url)
        env.reset(seed=0)
        sums = dict.fromkeys(env.agents, 0.0)
        while env.agents:
            _, rewards, _, _, _ = env.step({agent: env.action_space(agent).sample() for agent in env.agents})
            for agent, reward in rewards.items():
                sums[agent] += reward.item()  # it has the shape that the environment gave it
        env.close()
    (episode,) = told.episodes
    assert dict(episode.agents) == pytest.approx(sums)
    assert episode.reward == pytest.approx(sum(sums.values()))


class Fails(Observer):
    """Raises in one of its methods, or of its listener's, each time."""

    def __init__(self, method: str, wrong: object = None) -> None:
        self.method, self.wrong = method, wrong

        def fail(*args: Any, **kwargs: Any) -> Any:
            if wrong is not None:
                return wrong
            raise ValueError(f"{method} is broken")

        async def fail_later(*args: Any) -> Any:
            return fail()

        self.listener = Listener()
        of_whom: Any = self.listener if hasattr(Listener, method) else self
        setattr(of_whom, method, fail_later if method == "acting" else fail)

    def made(self, world: Any) -> Listener:
        return self.listener


@pytest.mark.faulty
@pytest.mark.parametrize("method", ["began", "acting", "stepped", "over", "describe", "counts"])
@pytest.mark.parametrize("fps", [None, 100])
def test_an_observer_that_raises_ends_nobodys_episode(
    method: str, fps: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    told = f"the observer Fails failed at {method}: ValueError"
    with serve_gym(lambda: CountingEnv(length=10**6), fps=fps, observers=[Fails(method)]) as server:
        env = make_remote(f"{server.url}/?world=", timeout=PATIENCE)
        for _ in range(2):
            env.reset(seed=1)
            for _ in range(2):
                _, _, terminated, truncated, _ = env.step(env.action_space.sample())
                assert (terminated, truncated) == (False, False)
        with Inspector(server.url, PATIENCE) as inspector:
            assert inspector.read_property("server.web") is not None
        assert server.status()["worlds"] == 1
        if method != "over":
            until(lambda: env.step(env.action_space.sample()) and told in caplog.text)
        env.close()
    until(lambda: told in caplog.text)
    # In full for the first time, and then as a count.
    assert caplog.text.count(f"ValueError: {method} is broken") == 1


@pytest.mark.faulty
@pytest.mark.parametrize("method", ["made", "join"])
def test_an_observer_that_fails_as_it_lets_a_client_in_refuses_it_by_its_name(method: str) -> None:
    with serve_gym("CartPole-v1", observers=[Fails(method)]) as server:
        with pytest.raises(RemoteError, match=f"the observer Fails failed at {method}: ValueError"):
            make_remote(server.url)
        until(lambda: not server.worlds)


@pytest.mark.faulty
@pytest.mark.parametrize(("method", "wrong"), [("stepped", 5), ("describe", [1]), ("counts", "many")])
def test_what_an_observer_returns_of_another_type_is_left_out(
    method: str, wrong: object, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_gym("CartPole-v1", observers=[Fails(method, wrong)]) as server:
        with make_remote(f"{server.url}/?world=", timeout=PATIENCE) as env:
            env.reset(seed=1)
            assert len(env.step(0)) == 5
            assert server.status()["worlds"] == 1
            with Inspector(server.url, PATIENCE) as inspector:
                assert inspector.read_property("server.web") is not None
        until(lambda: "TypeError: expected it to return" in caplog.text)
    assert f"the observer Fails failed at {method}: TypeError" in caplog.text


@pytest.mark.faulty
@pytest.mark.parametrize("method", ["made", "join"])
def test_a_client_is_told_what_an_observer_should_have_returned(method: str) -> None:
    told = f"the observer Fails failed at {method}: TypeError.*expected it to return"
    with serve_gym("CartPole-v1", observers=[Fails(method, 5)]) as server, pytest.raises(RemoteError, match=told):
        make_remote(server.url)


@pytest.mark.faulty
@pytest.mark.parametrize("method", ["began", "acting", "stepped"])
def test_a_listener_stops_an_agent_by_a_request_error(method: str) -> None:
    class Stops(Listener):
        def refuse(self, *args: Any) -> Any:
            raise RequestError(Code.PERMISSION_DENIED, "not in this world")

        async def refuse_later(self, *args: Any) -> Any:
            self.refuse()

    listener = Stops()
    setattr(listener, method, listener.refuse_later if method == "acting" else listener.refuse)

    class Stopping(Observer):
        def made(self, world: Any) -> Listener:
            return listener

    with serve_gym("CartPole-v1", observers=[Stopping()]) as server:
        env = make_remote(server.url, timeout=PATIENCE)
        if method != "began":
            env.reset(seed=1)
        with pytest.raises(RemoteError, match="not in this world"):
            env.step(0) if method != "began" else env.reset(seed=1)
        env.close()


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_episode_whose_beginning_was_not_seen_is_left_out(lanes: int) -> None:
    class Late(Observer):
        """Listens from the fifth step of the world on, as a page that is opened then."""

        def __init__(self) -> None:
            self.found: list[Episode] = []
            self.steps = 0

        def made(self, world: Any) -> Listener:
            self.episodes = Episodes(world.env.facts, self.found.append)
            late = self

            class Listens(Listener):
                def began(self, lane: int | None, result: Any, mask: Any) -> None:
                    if late.steps > 4:
                        late.episodes.began(lane, result, mask)

                def stepped(self, lane: int | None, action: object, result: Any) -> Any:
                    late.steps += 1
                    return late.episodes.stepped(lane, action, result) if late.steps > 4 else result

            return Listens()

    late = Late()
    with serve_gym(lambda: CountingEnv(6), num_envs=lanes, observers=[late]) as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=lanes), autoreset_mode="SameStep")
        envs.reset(seed=0)
        for _ in range(20):
            envs.step(np.zeros(lanes, np.int64))
        envs.close()
    assert late.found
    assert {episode.length for episode in late.found} == {6}
    assert len({episode.reward for episode in late.found}) == 1
