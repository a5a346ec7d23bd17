"""Real-time worlds of several agents: `serve_parallel(fps=…)` over real connections; the test turns the clock."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.encoding.properties import read_encoded
from bridge.core.encoding.tensors import pack_tensor
from bridge.core.worlds.group import default_action
from bridge.errors import Code, EnvironmentFailedError, RefusedError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import VirtualClock, check_server
from bridge.wrappers import BlockingReset
from tests.core.encoding.served_properties import read
from tests.parallel_envs import NAMES, Relay
from tests.peers import PublicClient, Stream
from tests.support import assert_identical, everywhere, until
from tests.thread_envs import RecordingAgents, read_log

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PettingZoo's own tests import what it deprecates
    from pettingzoo.test import parallel_api_test

RUNNING, TERMINATED, INTERRUPTED = 1, 2, 3
FPS = 10.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def serve(clock: VirtualClock, isolation: Any) -> Iterator[Callable[..., bridge.Server]]:
    servers: list[bridge.Server] = []

    def start(env: Any = Relay, **options: Any) -> bridge.Server:
        servers.append(
            bridge.serve_parallel(
                env, **{"fps": FPS, "realtime": bridge.RealTime(clock=clock), "isolation": isolation, **options}
            )
        )
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def join(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Connect to the default world as one agent."""
    made: list[Any] = []

    def connect(server: bridge.Server, agent: str | None = None, **options: Any) -> Any:
        made.append(bridge.make_remote(f"{server.url}?world=", agent=agent, timeout=20, **options))
        return made[-1]

    yield connect
    for env in made:
        env.close()


class LocalWorld:
    """A model of a real-time world of a local environment, written from docs/realtime.md."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, seed: int | None = None) -> None:
        observations, infos = self.env.reset(seed=seed)
        self.over = False
        self.actions: dict[str, Any] = {}
        self.seen = dict(observations)
        self.told = {agent: (seen, 0.0, False, False, infos[agent], 0) for agent, seen in observations.items()}

    def frame(self) -> None:
        """One frame; once all agents' episodes have ended, the next begins at that time, and tells nobody of itself."""
        chosen = {
            agent: self.actions.get(agent, default_action(agent, self.seen[agent], self.env.action_space(agent)))
            for agent in self.env.agents
        }
        observations, rewards, terminations, truncations, infos = self.env.step(chosen)
        for agent, seen in () if self.over else observations.items():
            _, reward, _, _, _, frames = self.told[agent]
            self.seen[agent] = seen
            ended = terminations[agent], truncations[agent]
            self.told[agent] = (seen, reward + rewards[agent], *ended, infos[agent], frames + 1)
        if not self.env.agents:
            self.over, self.actions = True, {}
            self.seen = self.env.reset()[0]

    def step(self, actions: dict[str, Any]) -> dict[str, Any]:
        """Return each agent's step, before the frames that use the actions."""
        told = {agent: self.told[agent] for agent in actions}
        self.actions.update(actions)
        for agent, (seen, _, terminated, truncated, info, _) in told.items():
            if not (terminated or truncated):
                self.told[agent] = (seen, 0.0, False, False, info, 0)
        return told


def of_client(results: Any) -> dict[str, Any]:
    """The results of a remote step in the form of `LocalWorld.step`."""
    observations, rewards, terminations, truncations, infos = results
    told = {}
    for agent in observations:
        info = {key: value for key, value in infos[agent].items() if key not in ("latency", "episodes", "frames")}
        flags = terminations[agent], truncations[agent]
        told[agent] = (observations[agent], rewards[agent], *flags, info, infos[agent]["frames"])
    return told


@everywhere
def test_the_seed_of_all_agents_counts_once_whichever_agent_s_reset_arrives_first(
    serve: Any, clock: VirtualClock
) -> None:
    """U-3: each agent has a stream of its own, so the order in which their Resets arrive is nobody's."""
    far = bridge.make_parallel_remote(serve(fps=8.0).url, timeout=20)
    local = Relay()
    far._remotes = dict(reversed(far._remotes.items()))
    for seed in (11, None, 5):
        observations, infos = far.reset(seed=seed)
        assert_identical(observations, local.reset(seed=seed)[0])
        assert {name: info["resets"] for name, info in infos.items()} == dict.fromkeys(NAMES, local.resets)
    far.close()


@everywhere
def test_a_remote_world_gives_what_a_scripted_local_one_gives(serve: Any, clock: VirtualClock) -> None:
    """U-1, U-3, U-13, D-22: to the bit, with agents that end early, over several episodes and any number of frames."""
    settings = {"distances": (7, 12, 1000), "horizon": 9}
    far = bridge.make_parallel_remote(serve(fps=8.0).url, env_kwargs=settings, timeout=20)
    local = LocalWorld(Relay(**settings))  # type: ignore[arg-type]
    script = np.random.default_rng(3)
    for index, name in enumerate(NAMES):
        far.action_space(name).seed(index)
    for episode in range(3):
        seed = 11 if episode == 0 else None
        observations, infos = far.reset(seed=seed)
        local.reset(seed=seed)
        assert_identical(observations, local.seen)
        assert {name: info["resets"] for name, info in infos.items()} == dict.fromkeys(NAMES, local.env.resets)
        while far.agents:
            actions = {name: far.action_space(name).sample() for name in far.agents}
            mine, theirs = of_client(far.step(actions)), local.step(actions)
            assert_identical(mine, theirs)
            for _ in range(int(script.integers(0, 4))):
                clock.advance(1 / 8)  # which adds up exactly
                local.frame()
    far.close()


@everywhere
def test_the_world_goes_on_with_each_agents_last_action(serve: Any, join: Any, clock: VirtualClock) -> None:
    """U-1, U-13: nobody waits for anybody; an agent that never acted is played by its default action."""
    server = serve(lambda: Relay(horizon=1000, distances=(1000, 1000, 1000)))
    ann, cyd = join(server, "ann"), join(server, "cyd")
    ann.reset()
    cyd.reset()
    ann.step(2)
    cyd.step(np.array([3.0], np.float32))
    clock.advance(2.0)
    seen, reward, _, _, info = ann.step(1)
    assert seen.tolist() == [40.0, 0.0, 60.0, 20.0]
    assert (reward, info["frames"]) == (20 * 5.0, 20)
    assert info["latency"]["frames_skipped"] == 19
    clock.advance(0.5)
    assert cyd.step(np.array([3.0], np.float32))[0] == "at 75 after 25"
    assert ann.step(1)[0].tolist() == [45.0, 0.0, 75.0, 25.0]


def test_an_agent_that_ends_early_waits_for_the_next_episode(serve: Any, join: Any, clock: VirtualClock) -> None:
    """U-4, U-5: its end is told with its last observation; the others go on; then the next episode begins by itself."""
    env = Relay(horizon=8, distances=(4, 1000, 1000))
    server = serve(env)
    ann, bob = join(server, "ann"), join(server, "bob")
    ann.reset()
    bob.reset()
    ann.step(2)
    clock.advance(0.3)
    seen, reward, terminated, truncated, info = ann.step(2)
    assert (seen.tolist(), reward, terminated, truncated) == ([4.0, 0.0, 0.0, 2.0], 4.0, True, False)
    (record,) = info["episodes"]
    assert (record["episode"], record["return"], record["length"], record["terminated"]) == (1, 4.0, 2, True)
    begun = threading.Thread(target=ann.reset)
    begun.start()
    until_waiting(server)  # a Reset that came after the end would begin another episode
    assert bob.step(bob.action_space.sample())[4]["frames"] == 3
    assert env.resets == 1
    clock.advance(0.5)
    begun.join(20)
    assert env.resets == 2
    _, _, terminated, truncated, info = bob.step(bob.action_space.sample())
    assert (terminated, truncated, info["frames"]) == (False, True, 5)
    assert [entry["length"] for entry in info["episodes"]] == [8]


def test_a_plain_reset_after_an_end_enters_the_episode_that_has_begun_by_itself(
    serve: Any, clock: VirtualClock
) -> None:
    """D-14: else an environment of several agents would be reset twice, by its world and by its client."""
    env = Relay(horizon=3)
    far = bridge.make_parallel_remote(f"{serve(env, fps=8.0).url}?world=", wait="now", timeout=20)

    def play_to_the_end(further: int = 0) -> None:
        clock.advance(3 / 8)
        truncations = far.step({name: far.action_space(name).sample() for name in far.agents})[3]
        assert all(truncations.values())
        clock.advance(further / 8)

    for resets, seed, further in ((1, None, 0), (2, None, 0), (3, None, 1), (5, None, 0), (7, 5, 0)):
        far.reset(seed=seed)
        assert env.resets == resets
        play_to_the_end(further)
    assert env.seeds[-2:] == [5, None]
    assert far.reset()[0].keys() == set(NAMES)
    far.reset()
    assert env.resets == 9, "the agents had seen the eighth, and asked for another"
    far.close()


def test_a_reset_waits_for_the_agents_that_go_on(serve: Any, join: Any, clock: VirtualClock) -> None:
    """U-9: an agent that asks for reset leaves the episode; it ends once every player has left it."""
    env = Relay(horizon=1000, distances=(1000, 1000, 1000))
    server = serve(env)
    ann, bob = join(server, "ann"), join(server, "bob")
    ann.reset(seed=1)
    bob.reset()
    ann.step(2)
    clock.advance(0.2)
    again = threading.Thread(target=ann.reset, kwargs={"seed": 7})
    again.start()
    until_waiting(server)
    clock.advance(0.2)
    assert env.log[-1] == {"ann": 0, "bob": 0, "cyd": 0}, "who left is played by the default action"
    assert env.resets == 1
    assert bob.step(bob.action_space.sample())[4]["frames"] == 4
    bob.reset()
    again.join(20)
    assert env.seeds == [1, 7]
    assert ann.step(1)[4]["latency"]["episode"] == bob.step(bob.action_space.sample())[4]["latency"]["episode"] == 2


def until_waiting(server: bridge.Server, requests: int = 1) -> None:
    """Wait until so many requests wait for an episode to begin."""
    until(lambda: "" in server.worlds and server.status()["requests"] == requests, 20)


def test_an_agent_may_join_and_leave_in_the_midst_of_an_episode(serve: Any, join: Any, clock: VirtualClock) -> None:
    """D-16, D-22: the episode goes on; a default action stands in for who left, and its place is free again."""
    env = Relay(horizon=1000, distances=(1000, 1000, 1000))
    server = serve(
        env, default_action=lambda agent, seen, space: 1 if agent == "ann" else default_action(agent, seen, space)
    )
    ann, bob = join(server, "ann"), join(server, "bob")
    ann.reset()
    ann.step(2)
    clock.advance(0.2)
    observation, info = bob.reset(seed=99)
    assert (int(observation["place"]), info["frames"]) == (0, 0)
    bob.step({"run": np.int64(3), "lean": np.zeros(2, np.float32)})
    clock.advance(0.1)
    with pytest.raises(RefusedError, match="'ann' is taken; there are still cyd") as refused:
        join(server, "ann")
    assert refused.value.code == Code.RESOURCE_EXHAUSTED
    ann.close()
    clock.advance(0.2)
    assert [entry["ann"] for entry in env.log] == [2, 2, 2, 1, 1]
    assert [entry["bob"] for entry in env.log] == [0, 0, 3, 3, 3]
    heir = join(server, "ann")
    observation, _ = heir.reset()
    assert observation.tolist() == [8.0, 9.0, 0.0, 5.0]
    assert env.resets == 1


def test_once_the_last_who_plays_has_left_those_who_wait_begin_anew(serve: Any, join: Any, clock: VirtualClock) -> None:
    """U-4: nobody waits for an episode that only default actions play."""
    env = Relay(horizon=10**6, distances=(2, 10**6, 10**6))
    server = serve(env)
    ann, bob = join(server, "ann"), join(server, "bob")
    ann.reset()
    bob.reset()
    ann.step(2)
    clock.advance(0.2)
    assert ann.step(0)[2]
    begun = threading.Thread(target=ann.reset)
    begun.start()
    until_waiting(server)
    assert env.resets == 1
    bob.close()
    begun.join(20)
    assert env.resets == 2


def test_spectators_see_what_an_agent_sees_and_change_nothing(serve: Any, join: Any, clock: VirtualClock) -> None:
    """Spectators: any number for each agent, also while nobody plays it; their actions and resets count for nothing."""
    env = Relay(horizon=1000, distances=(1000, 1000, 1000))
    server = serve(env)
    ann = join(server, "ann")
    crowd = [join(server, name, role="spectator") for name in ("ann", "ann", "cyd", None)]
    ann.reset()
    for one in crowd:
        one.reset()
    ann.step(2)
    for one in crowd[:2]:
        one.step(1)
    clock.advance(0.3)
    crowd[0].reset(seed=5)
    seen = ann.step(2)
    for one in crowd[1], crowd[3]:
        assert_identical(one.step(0)[:4], seen[:4])
    assert crowd[2].step(np.zeros(1, np.float32))[0] == "at 0 after 3"
    assert [entry["ann"] for entry in env.log] == [2, 2, 2]
    assert env.resets == 1
    assert server.worlds == [""]
    stream = Stream(server).join(role="spectator", agent="cyd")
    described = {key: read_encoded(read(stream, f"world.{key}").read_property.value) for key in ("players", "agents")}
    assert described == {"players": ["ann"], "agents": list(NAMES)}
    assert read_encoded(read(stream, "world.fps").read_property.value) == FPS
    stream.close()


def test_resetting_the_world_reaches_every_agent(serve: Any, clock: VirtualClock) -> None:
    """D-15: each other agent is told once with INTERRUPTED; all begin the next episode, with the seed."""
    env = Relay(horizon=1000)
    server = serve(env)
    ann, bob = PublicClient(server).join(agent="ann"), PublicClient(server).join(agent="bob")
    for client in (ann, bob):
        assert client.step("reward")[0] == RUNNING
    stream = Stream(server)
    stream.send(reset_world=pb.ResetWorldRequest(settings={"seed": pb.Tensor(int64s=pb.Tensor.Int64Array(array=[4]))}))
    until_waiting(server)
    assert ann.step("reward", action=1)[0] == INTERRUPTED
    assert bob.step("reward", action__run=1, action__lean=[0.0, 0.0])[0] == INTERRUPTED
    assert stream.take().WhichOneof("payload") == "reset_world"
    assert env.seeds[-1] == 4
    for client in (ann, bob):
        assert client.step("reward")[0] == RUNNING
    for closed in (ann, bob, stream):
        closed.close()


def test_resetting_the_world_waits_for_no_agent_that_waits(serve: Any, clock: VirtualClock) -> None:
    """D-15: one that ended early is in no sequence until the next episode, which the ResetWorld begins."""
    env = Relay(horizon=1000, distances=(2, 1000, 1000))
    server = serve(env, limits=bridge.Limits(reset_world_timeout=600))
    ann, bob = PublicClient(server).join(agent="ann"), PublicClient(server).join(agent="bob")
    for client in (ann, bob):
        assert client.step("reward")[0] == RUNNING
    ann.step("reward", action=2)
    clock.advance(0.2)
    assert ann.step("reward", action=2)[0] == TERMINATED
    states: list[int] = []
    begun = threading.Thread(target=lambda: states.append(ann.step("reward")[0]))
    begun.start()
    until_waiting(server)
    stream = Stream(server)
    stream.send(reset_world=pb.ResetWorldRequest())
    until_waiting(server, 2)
    assert bob.step("reward", action__run=1, action__lean=[0.0, 0.0])[0] == INTERRUPTED
    assert stream.take().WhichOneof("payload") == "reset_world"
    begun.join(20)
    assert (states, env.resets) == ([RUNNING], 2)
    for closed in (ann, bob, stream):
        closed.close()


@everywhere
def test_an_environment_that_raises_ends_every_agents_episode(serve: Any, join: Any, clock: VirtualClock) -> None:
    """D-2: each player hears the exception once, and the next episode begins after a pause."""
    server = serve(lambda: Relay(fail_at=2))
    ann, bob = join(server, "ann"), join(server, "bob")
    ann.reset()
    bob.reset()
    clock.advance(0.3)
    for env in (ann, bob):
        with pytest.raises(EnvironmentFailedError, match="a shoe came off"):
            env.step(env.action_space.sample())
    assert ann.reset()[1]["resets"] == 2
    assert bob.reset()[1]["resets"] == 2


def test_an_episode_without_agents_is_a_failure_that_says_so(serve: Any, join: Any) -> None:
    class Empty(Relay):
        def reset(self, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.agents = []
            return {}, {}

    ann = join(serve(Empty), "ann")
    with pytest.raises(EnvironmentFailedError, match="expected agents of ann, bob, cyd to be alive, got none"):
        ann.reset()


@everywhere
def test_an_agent_without_a_part_in_an_episode_is_told_so(serve: Any, join: Any, clock: VirtualClock) -> None:
    """D-22: nobody waits for it, also where one client plays all agents; it may wait for an episode that it is in."""

    class Shifts(Relay):
        def reset(self, seed: Any = None, options: Any = None) -> Any:
            observations, infos = super().reset(seed=seed, options=options)
            self.agents = [name for name in NAMES if name != "cyd" or self.resets == 2]
            return {a: observations[a] for a in self.agents}, {a: infos[a] for a in self.agents}

    server = serve(Shifts)
    far = bridge.make_parallel_remote(server.url, timeout=20)
    assert list(far.reset()[0]) == ["ann", "bob"]
    assert set(far.step({name: far.action_space(name).sample() for name in far.agents})[0]) == {"ann", "bob"}
    far.close()
    ann, cyd = join(server, "ann"), join(server, "cyd")
    ann.reset()
    with pytest.raises(RefusedError, match="began an episode without the agent 'cyd'; Step again"):
        cyd.reset()
    entered = threading.Thread(target=cyd.reset)
    entered.start()
    until_waiting(server)
    clock.advance(0.8)  # the second episode is the first one with it
    entered.join(20)
    assert cyd.step(np.zeros(1, np.float32))[4]["latency"]["episode"] == 2


def test_agents_are_slots_of_a_vector_environment(serve: Any, clock: VirtualClock) -> None:
    """U-2, U-3, U-6: a slot for each agent."""
    log: list[dict[str, int]] = []

    class Twins(RecordingAgents):
        def step(self, actions: Any) -> Any:
            log.append({agent: int(action) for agent, action in actions.items()})
            return super().step(dict.fromkeys(actions, 0))

    server = serve(lambda: Twins(os.devnull))
    for urls in (f"{server.url}?world=", [f"{server.url}?world="] * 2):
        envs = BlockingReset(bridge.make_vec_remote(urls, agent=["bob", "ann"], timeout=20))
        log.clear()
        observations, _ = envs.reset()
        assert observations.shape == (2, 1)
        envs.step(np.array([0, 1]))
        clock.advance(0.3)
        observations, rewards, _, _, infos = envs.step(np.array([0, 1]))
        assert observations[:, 0].tolist() == [3, 3]
        assert rewards.tolist() == [3.0, 3.0]
        assert infos["frames"].tolist() == [3, 3]
        assert log == [{"ann": 1, "bob": 0}] * 3
        envs.close()
    for wrong in ([], ["ann"]):
        with pytest.raises(SettingError, match="expected agent to have a name for each of"):
            bridge.make_vec_remote([server.url] * 2, agent=wrong)


def test_with_wait_next_frame_a_step_returns_with_the_frame_that_used_its_actions() -> None:
    """U-13: one decision a frame, at the speed of the machine's clock; PettingZoo's own test passes."""
    env = Relay(horizon=40, distances=(30, 60, 1000))
    with bridge.serve_parallel(env, fps=200) as server:
        far = bridge.make_parallel_remote(server.url, wait="next_frame", diagnostics=False, timeout=20)
        far.reset()
        for _ in range(3):
            infos = far.step({name: far.action_space(name).sample() for name in far.agents})[4]
            assert all(info["frames"] >= 1 for info in infos.values())
            assert all("latency" not in info for info in infos.values())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallel_api_test(far, num_cycles=60)
        far.close()


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
def test_all_agents_show_the_token_over_either_transport(
    transport: Any, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock
) -> None:
    with bridge.serve_parallel(
        Relay, fps=FPS, realtime=bridge.RealTime(clock=clock), token="open-sesame", transport=transport
    ) as server:
        for keywords in ({"token": "open-sesame"}, {}):
            far = bridge.make_parallel_remote(server.url, transport=transport, timeout=20, **keywords)  # type: ignore[arg-type]
            assert list(far.reset()[0]) == list(NAMES)
            far.close()
            monkeypatch.setenv("BRIDGE_TOKEN", "open-sesame")
        with pytest.raises(RefusedError, match="token"):
            bridge.make_parallel_remote(server.url, token="abracadabra", timeout=20)


def test_a_turn_based_environment_plays_on_with_moves_that_are_allowed(
    serve: Any, join: Any, clock: VirtualClock
) -> None:
    """An AEC environment, by PettingZoo's conversion: neither default nor repeated actions break the rules."""
    server = serve("classic/tictactoe-v3")
    crosses, crowd = join(server, "player_1"), join(server, "player_2", role="spectator")
    crosses.reset()
    crowd.reset()
    crosses.step(4)
    clock.advance(2.0)
    _, reward, terminated, _, info = crosses.step(4)
    assert terminated
    assert reward in (0.0, 1.0), "an illegal move ends the game with -1"
    assert info["frames"] >= 5
    records = [*info["episodes"], *crosses.reset()[1].get("episodes", ())]
    assert all(record["return"] in (-1.0, 0.0, 1.0) and record["length"] >= 5 for record in records)
    assert_identical(crowd.step(0)[1], -reward)


@pytest.mark.parametrize("thread_safe", [False, True])
def test_the_environment_is_used_by_one_thread_for_its_whole_life(
    tmp_path: Any, serve: Any, join: Any, clock: VirtualClock, thread_safe: bool
) -> None:
    """The thread rule: made, reset, stepped, rendered and closed by one thread."""
    log = str(tmp_path / "log")
    server = serve(lambda **kwargs: RecordingAgents(log, **kwargs), thread_safe=thread_safe)
    far = bridge.make_parallel_remote(server.url, render_mode="rgb_array", timeout=20)
    far.reset()
    far.step({"ann": 1, "bob": 0})
    clock.advance(0.3)
    far.step({"ann": 0, "bob": 0})
    far.render()
    far.state()
    far.call("nap", 0.1)
    far.close()
    server.stop()
    records = read_log(log)
    done = {record["what"] for record in records}
    assert {"__init__", "reset", "step", "render", "state", "call", "close", "__del__"} <= done
    assert len({record["thread"] for record in records}) == 1


@everywhere
def test_there_is_no_frame_before_the_first_episode(serve: Any, join: Any) -> None:
    """D-18."""
    ann = join(serve(lambda: Relay(render_mode="rgb_array")), "ann")
    with pytest.raises(RefusedError, match="no sequence has begun"):
        ann.render()
    ann.reset()
    assert ann.render().shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missing_agent": "wait"}, "missing_agent are of lock-step, where a world waits"),
        ({"agent_timeout": 3.0}, "agent_timeout are of lock-step"),
        ({"fps": None}, "realtime: only in a real-time world; give fps= too"),
        ({"realtime": {"max_action_age": 1.0}}, r"expected realtime to be bridge.RealTime\(…\), got a dict"),
        ({"fps": 0}, "expected fps to be frames a second"),
        ({"realtime": bridge.RealTime(max_action_age=-1)}, "expected max_action_age in finite seconds"),
        ({"default_action": 3}, "expected default_action to be a callable"),
    ],
)
def test_keywords_that_do_not_apply_are_refused(serve: Any, options: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        serve(**options)


def test_settings_that_do_not_apply_are_refused(serve: Any, join: Any) -> None:
    """D-3, D-6: with a word on what they are for."""
    server = serve()
    with pytest.raises(RefusedError, match="expected the setting agent to be one of ann, bob, cyd, got 'dan'"):
        join(server, "dan")
    with pytest.raises(RefusedError, match="expected the setting role to be one of player, spectator"):
        join(server, role="judge")
    with pytest.raises(RefusedError, match="unknown CreateWorld settings num_envs"):
        bridge.make_parallel_remote(f"{server.url}?num_envs=3")
    for name in NAMES:
        join(server, name)
    with pytest.raises(RefusedError, match="all of its 3 agents are taken; join it with the setting role=spectator"):
        join(server)


@everywhere
def test_a_policy_whose_action_is_none_of_the_space_is_a_failure_that_is_told(
    serve: Any, join: Any, clock: VirtualClock
) -> None:
    ann = join(serve(agents={"bob": lambda observation: "left"}), "ann")
    ann.reset()
    clock.advance(0.1)
    with pytest.raises(EnvironmentFailedError, match=r"left|indices"):
        ann.step(1)


@pytest.mark.slow
def test_the_world_passes_the_conformance_checks() -> None:
    """By the checks that anyone can run, at the speed of the machine's clock."""
    with bridge.serve_parallel(Relay, fps=200) as server:
        report = check_server(server.url)
    assert report.ok, str(report)


def test_a_reset_with_a_bad_number_is_refused_in_words(serve: Any) -> None:
    stream = Stream(serve(fps=8.0)).join(agent="ann")
    for wrong in ("all", np.inf, [1, 2]):
        error = stream.ask(reset=pb.ResetRequest(settings={"together": pack_tensor(wrong)})).error
        assert (error.code, "expected the setting together to be an integer" in error.message) == (3, True)
        error = stream.ask(reset=pb.ResetRequest(settings={"restart": pack_tensor(wrong)})).error
        assert (error.code, "expected the setting restart to be a bool" in error.message) == (3, True)
