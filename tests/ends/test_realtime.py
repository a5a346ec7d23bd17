"""Real-time worlds as a user has them: `serve_gym(fps=…)` and `make_vec_remote` over real connections.

Frames come from a virtual clock that the test turns, so nothing sleeps; only what is about slow resets runs by the
machine's clock, and waits for events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import GraphInstance

import bridge
from bridge import (
    RealTime,
    SlotState,
    make_remote,
    make_vec_remote,
    serve_gym,
)
from bridge.core.encoding import values
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import (
    RefusedError,
    RemoteTimeoutError,
    ResetNeededError,
    SettingError,
)
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import (
    CountingEnv,
    Inspector,
    Proxy,
    SlowResetEnv,
    VirtualClock,
    check_server,
)
from bridge.wrappers import BlockingReset
from tests.ends.realtime import LONG, Player, counting, ready
from tests.inside import pool_of
from tests.support import everywhere, read_property, until


@everywhere
def test_the_world_goes_on_while_nobody_calls_step(serve: Any, clock: VirtualClock) -> None:
    """U-1, U-13: and the count of frames is told, which the original did not."""
    envs = make_vec_remote(serve(counting()).url)
    envs.reset(seed=0)
    ready(envs, [0])
    clock.advance(2.0)
    (row,), rewards, terminations, truncations, infos = envs.step([0])
    assert row.tolist() == [1, 20]
    assert (rewards[0], infos["frames"][0]) == (sum(range(21)), 20)
    assert not terminations.any()
    assert not truncations.any()
    assert infos["latency"]["frames_skipped"][0] == 19
    envs.close()


def test_reset_returns_at_once_with_none(serve: Any) -> None:
    """U-2, U-3, U-7."""
    envs = make_vec_remote(serve(counting()).url, num_envs=3)
    observations, infos = envs.reset(seed=0)
    assert observations == (None, None, None)
    assert len(infos["n"]) == 3
    assert infos["slot_state"].tolist() == [SlotState.RESETTING] * 3
    observations, rewards, terminations, truncations, infos = ready(envs, [0, 0, 0])
    assert len(observations) == len(rewards) == len(terminations) == len(truncations) == len(infos["n"]) == 3
    assert [info["seed"] for info in infos["n"]] == [0, 1, 2]
    envs.close()


def test_step_before_reset_is_an_error(serve: Any) -> None:
    """U-8."""
    envs = make_vec_remote(serve(counting()).url)
    with pytest.raises(ResetNeededError, match=r"expected reset\(\) before the first step"):
        envs.step([0])
    envs.close()


@everywhere
def test_an_episode_ends_and_the_next_begins_without_reset(serve: Any, clock: VirtualClock) -> None:
    """U-4. Mistake: the terminal observation was never delivered."""
    envs = make_vec_remote(serve(counting(5)).url)
    envs.reset()
    ready(envs, [0])
    clock.advance(0.7)
    (row,), rewards, terminations, truncations, infos = envs.step([0])
    assert (row.tolist(), rewards[0], terminations[0], truncations[0]) == ([1, 5], 15.0, True, False)
    (record,) = infos["episodes"][0]
    assert (record["episode"], record["return"], record["length"]) == (1, 15.0, 5)
    (row,), rewards, terminations, _, infos = ready(envs, [0])
    assert (row.tolist(), rewards[0], terminations[0]) == ([2, 2], 0.0, False)
    assert "episodes" not in infos
    envs.close()


@everywhere
def test_a_plain_reset_after_an_end_enters_the_episode_that_has_begun_by_itself(
    serve: Any, clock: VirtualClock
) -> None:
    """D-14: else a robot would be reset twice, by its world and by its controller."""
    with make_remote(serve(counting(3)).url, wait="now") as env:

        def play_to_the_end() -> None:
            clock.advance(0.3)
            assert env.step(0)[2]

        assert env.reset()[0].tolist() == [1, 0]
        play_to_the_end()
        assert env.reset()[0].tolist() == [2, 0]
        assert env.reset()[0].tolist() == [3, 0], "the agent has seen the second one, and asked for another"
        play_to_the_end()
        clock.advance(0.1)
        assert env.reset()[0].tolist() == [5, 0], "a frame of the fourth had passed"
        play_to_the_end()
        assert env.reset(seed=7)[1]["seed"] == 7, "the sixth had begun without it"


class ReusedGraphEnv(CountingEnv):
    """Gives the same graph in all steps, and changes its arrays; so it does in its infos."""

    def __init__(self) -> None:
        super().__init__(3)
        self.observation_space: Any = gymnasium.spaces.Graph(gymnasium.spaces.Box(0, 100, (1,)), None)
        self.graph = GraphInstance(np.zeros((2, 1), np.float32), None, None)
        self.told: Any = {"graph": self.graph, "nodes": np.array([None]), "names": set()}
        self.told["nodes"][0] = self.graph.nodes

    def reset(self, **keywords: Any) -> Any:
        super().reset(**keywords)
        self.graph.nodes[...] = 0
        self.told["names"].clear()
        return self.graph, self.told

    def step(self, action: Any) -> Any:
        self.graph.nodes[...] += 1
        self.told["names"].add(len(self.told["names"]))
        return self.graph, *super().step(action)[1:4], self.told


def test_what_an_environment_changes_later_is_told_as_it_was(serve: Any, clock: VirtualClock) -> None:
    env = make_remote(serve(ReusedGraphEnv).url)
    env.reset()
    clock.advance(0.3)  # a step that ends the episode, and the next one's reset
    observation, _, terminated, _, info = env.step(0)
    assert terminated
    seen = observation.nodes, info["graph"][0], info["nodes"][0]
    assert [array.tolist() for array in seen] == [[[3.0], [3.0]]] * 3
    assert info["names"] == {0, 1, 2}
    env.close()


class BadSecondEndEnv(CountingEnv):
    """Its second episode ends with an info that does not travel."""

    def step(self, action: Any) -> Any:
        *told, info = super().step(action)
        return *told, {"bad": object()} if (self.episode, self.steps) == (2, self.length) else info


def test_what_a_final_info_lacks_is_told_though_no_step_saw_it(serve: Any, clock: VirtualClock) -> None:
    env = make_remote(serve(lambda: BadSecondEndEnv(3)).url)
    env.reset()
    clock.advance(0.8)  # within the third episode
    with pytest.warns(RuntimeWarning, match="'bad'"):
        _, _, terminated, _, info = env.step(0)
    assert terminated
    assert [record["final_info"] for record in info["episodes"]] == [{}, {}]
    env.close()


def test_time_limits_count_from_each_beginning(serve: Any, clock: VirtualClock) -> None:
    """Mistake: time limits counted from the last explicit reset, ignoring automatic ones."""

    def limited() -> gymnasium.Env[Any, Any]:
        return gymnasium.wrappers.TimeLimit(CountingEnv(LONG), 4)

    envs = make_vec_remote(serve(limited).url)
    envs.reset()
    ready(envs, [0])
    clock.advance(2.0)
    _, _, terminations, truncations, infos = envs.step([0])
    assert (terminations[0], truncations[0]) == (False, True)
    records = infos["episodes"][0]
    assert [record["length"] for record in records] == [4] * 5
    assert all(record["truncated"] and not record["terminated"] for record in records)
    envs.close()


@everywhere
def test_reset_is_allowed_at_any_time_and_names_slots(serve: Any, clock: VirtualClock) -> None:
    """U-9."""
    envs = make_vec_remote(serve(counting()).url, num_envs=2)
    envs.reset(seed=0)
    ready(envs, [0, 0])
    clock.advance(0.5)
    envs.reset(seed=7, options={"reset_mask": np.array([False, True])})
    rows, _, _, _, infos = ready(envs, [0, 0])
    assert rows[0].tolist() == [1, 5]
    assert rows[1].tolist() == [2, 0]
    assert infos["n"][1]["seed"] == 8
    envs.close()


def test_a_resetting_slot_is_none_and_holds_up_nobody() -> None:
    """U-5, U-6."""
    release = threading.Event()
    made: list[SlowResetEnv] = []

    def slow() -> SlowResetEnv:
        made.append(SlowResetEnv(release, free_resets=1, length=LONG, deadline=60.0))
        return made[-1]

    with (
        serve_gym(slow, fps=200.0, thread_safe=True) as one,
        serve_gym(counting(), fps=200.0) as other,
    ):
        envs = make_vec_remote([one.url, other.url])
        envs.reset()
        made[0].length = made[0].steps + 100  # the episode that has begun here ends, however long that took
        assert made[0].in_reset.wait(10.0)
        seen = 0
        deadline = time.monotonic() + 10.0
        ended = False
        while seen < 20 and time.monotonic() < deadline:
            rows, rewards, terminations, truncations, infos = envs.step([1, 1])
            if ended:
                assert rows[0] is None
                assert (rewards[0], terminations[0], truncations[0]) == (0.0, False, False)
                assert infos["slot_state"].tolist() == [SlotState.RESETTING, SlotState.RUNNING]
                seen += infos["frames"][1] > 0
            ended = ended or bool(terminations[0])
        assert seen == 20, "the other slot's frames passed while one was resetting"
        release.set()
        rows = ready(envs, [1, 1])[0]
        assert rows[0][0] == 2
        envs.close()


def test_a_lane_that_resets_slowly_is_none_and_the_other_lanes_go_on() -> None:
    """U-5, U-6 within one world of lanes."""
    release = threading.Event()
    made: list[SlowResetEnv] = []

    def lane() -> SlowResetEnv:
        first = not made
        made.append(SlowResetEnv(release, free_resets=1 if first else LONG, length=3 if first else LONG, deadline=60.0))
        return made[-1]

    with serve_gym(lane, num_envs=2, fps=200.0, thread_safe=True) as server:
        envs = make_vec_remote(server.url)
        envs.reset(seed=0)
        assert made[0].in_reset.wait(10.0)
        seen = 0
        deadline = time.monotonic() + 10.0
        while seen < 20 and time.monotonic() < deadline:
            rows, rewards, terminations, _, infos = envs.step([1, 1])
            if rows[0] is None:
                assert (rewards[0], terminations[0], infos["frames"][0]) == (0.0, False, 0)
                if rows[1] is not None:
                    assert infos["slot_state"].tolist() == [SlotState.RESETTING, SlotState.RUNNING]
                    seen += infos["frames"][1] > 0
        assert seen == 20
        release.set()
        rows = ready(envs, [1, 1])[0]
        assert rows[0][0] >= 2  # of its next episodes, which are short
        assert rows[1][0] == 1
        envs.close()


@everywhere
def test_lanes_end_each_by_itself(serve: Any, clock: VirtualClock) -> None:
    """U-4 for lanes: final observation and return on the same step, the beginning on the next."""
    lengths = iter([3, LONG])
    envs = make_vec_remote(serve(lambda: CountingEnv(next(lengths)), num_envs=2).url)
    envs.reset(seed=5)
    _, _, _, _, infos = ready(envs, [0, 0])
    assert [info["seed"] for info in infos["n"]] == [5, 6]
    clock.advance(0.4)
    rows, rewards, terminations, _, infos = envs.step([0, 0])
    assert [row.tolist() for row in rows] == [[1, 3], [1, 4]]
    assert rewards.tolist() == [6.0, 10.0]
    assert terminations.tolist() == [True, False]
    assert infos["episodes"][0][0]["return"] == 6.0
    assert infos["_episodes"].tolist() == [True, False]
    assert infos["frames"].tolist() == [3, 4]
    rows, rewards, terminations, _, _ = envs.step([0, 0])
    assert [row.tolist() for row in rows] == [[2, 1], [1, 4]]
    assert rewards.tolist() == [0.0, 0.0]
    envs.close()


@everywhere
def test_lanes_are_reset_by_a_mask_and_the_others_keep_their_mail(serve: Any, clock: VirtualClock) -> None:
    """U-9 for lanes."""
    envs = make_vec_remote(serve(counting(), num_envs=3).url)
    envs.reset(seed=0)
    ready(envs, [0, 0, 0])
    clock.advance(0.3)
    envs.reset(seed=[None, 9, None], options={"reset_mask": np.array([False, True, False])})
    rows, _, _, _, infos = ready(envs, [0, 0, 0])
    assert [row.tolist() for row in rows] == [[1, 3], [2, 0], [1, 3]]
    clock.advance(0.1)
    rows, rewards, _, _, infos = envs.step([0, 0, 0])
    assert infos["frames"].tolist() == [4, 1, 4], "what passed before the reset of another lane is not lost"
    assert rewards.tolist() == [10.0, 1.0, 10.0]
    envs.close()


def test_blocking_reset_waits_for_every_slot_and_lane(serve: Any, clock: VirtualClock) -> None:
    """U-10."""
    single, lanes = serve(counting(5)), serve(counting(5), num_envs=2)
    envs = BlockingReset(make_vec_remote([single.url, lanes.url]))
    observations, _ = envs.reset(seed=0)
    assert observations.tolist() == [[1, 0]] * 3
    for _ in range(5):
        clock.advance(0.2)
        observations, rewards, terminations, truncations, infos = envs.step([0, 0, 0])
        assert observations.shape == (3, 2)
        assert rewards.shape == terminations.shape == truncations.shape == (3,)
        assert infos["frames"].shape == (3,)
    envs.close()


def test_blocking_reset_names_the_urls_that_are_slow() -> None:
    """U-10: with a deadline."""
    release = threading.Event()
    with (
        serve_gym(lambda: SlowResetEnv(release, deadline=60.0), fps=100.0, thread_safe=True) as slow,
        serve_gym(counting(), fps=100.0) as quick,
    ):
        envs = BlockingReset(make_vec_remote([quick.url, slow.url]), timeout=0.3)
        with pytest.raises(RemoteTimeoutError, match=r"no observation within 0.3 s") as caught:
            envs.reset()
        assert caught.value.url == slow.url
        release.set()
        envs.close()


def test_versions_are_known_at_both_ends(serve: Any) -> None:
    """U-12: a remote is versioned."""
    server = serve(counting())
    envs = make_vec_remote(server.url)
    assert envs.server_versions == (bridge.__version__,)
    envs.close()
    assert read_property(server.url, "connection.client_version") == bridge.__version__


@everywhere
def test_diagnostics_are_in_infos_and_properties_and_can_be_switched_off(serve: Any, clock: VirtualClock) -> None:
    """U-11."""
    server = serve(counting())
    envs = make_vec_remote(server.url)
    envs.reset()
    ready(envs, [0])
    clock.advance(0.5)
    envs.step([1])
    clock.advance(0.5)
    latency = envs.step([0])[4]["n"][0]["latency"]
    assert set(latency) == {
        "round_trip",
        "clock_offset_low",
        "clock_offset_high",
        "observation_age",
        "step_time",
        "action_delay",
        "episode",
        "frame",
        "actions_applied",
        "actions_replaced",
        "actions_dropped",
        "overruns",
        "frames_dropped",
        "frames_skipped",
        "stale",
    }
    assert latency["frame"] == 10
    assert latency["action_delay"] == pytest.approx(0.1)
    assert latency["actions_applied"] == 1, "no frame has used the second one yet"
    (summary,) = envs.latency_summary()
    assert summary["round_trip"]["count"] == 3
    assert {"p50", "p90", "p99", "max"} <= set(summary["observation_age"])
    envs.close()

    env = make_remote(server.url, diagnostics=False)
    env.reset()
    clock.advance(0.5)
    info = env.step(0)[4]
    assert info == {"frames": 5}
    with Inspector(server.url, 20.0) as inspector:
        settings = {"role": pack_tensor("spectator")}
        inspector.ask("join_world", pb.JoinWorldRequest(world_name=server.worlds[0], settings=settings))
        statistics, timing = (
            values.decode(unpack_tensor(inspector.read_property(key)).tobytes())
            for key in ("world.realtime", "world.timing")
        )
    assert statistics["frames"] == 5
    assert {"p50", "p90", "p99", "max"} <= set(statistics["step_time"])
    assert (timing["step"]["count"], timing["reset"]["count"]) == (statistics["step_time"]["count"], 1)
    env.close()


def test_a_single_remote_env_plays_in_real_time_too(serve: Any, clock: VirtualClock) -> None:
    env = make_remote(serve(counting(5)).url)
    assert env.fps == 10.0
    env.reset(seed=0)
    clock.advance(0.3)
    observation, reward, terminated, _, info = env.step(0)
    assert (observation.tolist(), reward, terminated, info["frames"]) == ([1, 3], 6.0, False, 3)
    clock.advance(0.3)
    observation, reward, terminated, _, info = env.step(0)
    assert (observation.tolist(), reward, terminated, info["frames"]) == ([1, 5], 9.0, True, 2)
    observation, info = env.reset(seed=1)
    assert observation.tolist() == [3, 0]
    assert info["seed"] == 1
    env.close()


def test_lock_step_worlds_have_no_frame_rate(serve: Any) -> None:
    with serve_gym(CountingEnv) as server:
        envs = make_vec_remote(server.url)
        assert envs.fps is None
        envs.reset()
        assert "frames" not in ready(envs, [0])[4]
        envs.close()


@everywhere
def test_one_agent_plays_and_the_others_look_on(serve: Any, clock: VirtualClock) -> None:
    """An agent may join a running world."""
    server = serve(counting(5))
    player = make_vec_remote(f"{server.url}?world=")
    with pytest.raises(RefusedError, match="role=spectator"):
        make_vec_remote(f"{server.url}?world=")
    player.reset(seed=0)
    ready(player, [0])
    clock.advance(0.2)
    watcher = make_vec_remote(f"{server.url}?world=", role="spectator")
    watcher.reset(seed=99)
    (row,), rewards, _, _, _ = ready(watcher, [0])
    assert row.tolist() == [1, 2], "its reset changed nothing"
    clock.advance(0.2)
    assert watcher.step([1])[0][0].tolist() == [1, 4]
    (row,), rewards, _, _, infos = player.step([0])
    assert (row.tolist(), rewards[0], infos["frames"][0]) == ([1, 4], 10.0, 4)
    clock.advance(0.1)
    for envs in (player, watcher):
        (row,), _, terminations, _, _ = envs.step([0])
        assert (row.tolist(), terminations[0]) == ([1, 5], True)
    player.close()
    clock.advance(1.0)
    heir = make_vec_remote(f"{server.url}?world=")
    heir.reset()
    assert ready(heir, [0])[0][0][0] > 2, "the world went on without a player, and has a seat for another"
    heir.close()
    watcher.close()


@everywhere
def test_a_reset_of_the_player_cuts_off_the_episode_that_a_spectator_sees(serve: Any, clock: VirtualClock) -> None:
    server = serve(counting())
    player = make_vec_remote(f"{server.url}?world=")
    player.reset()
    ready(player, [0])
    watcher = make_vec_remote(f"{server.url}?world=", role="spectator")
    watcher.reset()
    ready(watcher, [0])
    clock.advance(0.2)
    player.reset()
    ready(player, [0])
    (row,), rewards, terminations, truncations, infos = watcher.step([0])
    assert (row.tolist(), rewards[0], terminations[0], truncations[0]) == ([1, 2], 3.0, False, True)
    assert "episodes" not in infos, "it did not finish"
    assert ready(watcher, [0])[0][0].tolist() == [2, 0]
    player.close()
    watcher.close()


def test_wait_next_frame_gives_one_decision_a_frame(serve: Any, clock: VirtualClock) -> None:
    envs = make_vec_remote(serve(counting()).url, wait="next_frame")
    envs.reset()
    ready(envs, [0])
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(envs.step([1])), name="bridge-test-step")
    thread.start()
    deadline = time.monotonic() + 10.0
    while not results and time.monotonic() < deadline:
        clock.advance(0.1)  # the first frame after the Step arrives lets it go
        thread.join(0.02)
    thread.join(10.0)
    (row,), _, _, _, infos = results[0]
    assert infos["frames"][0] == row[1] >= 1
    assert infos["latency"]["actions_applied"][0] == 1, "the frame that it waited for used its action"
    envs.close()


class GatedEnv(CountingEnv):
    """Observes the action of its last step; once `closed`, a step waits until it is `opened`."""

    def __init__(self) -> None:
        super().__init__(LONG)
        self.closed_at, self.waits, self.opened = LONG, threading.Event(), threading.Event()

    def step(self, action: Any) -> Any:
        _, reward, *ends = super().step(action)
        if self.steps > self.closed_at:
            self.waits.set()
            assert self.opened.wait(60.0)
        return np.array([int(action), self.steps]), reward, *ends


@pytest.mark.parametrize("lanes", [1, 2])
def test_wait_next_frame_waits_for_a_frame_that_used_the_action_and_not_for_one_under_way(lanes: int) -> None:
    """U-13: the frame under way has the action before; what comes of an action would be told a step late."""
    made: list[GatedEnv] = []

    def make() -> GatedEnv:
        made.append(GatedEnv())
        return made[-1]

    with serve_gym(make, fps=200.0, thread_safe=True, num_envs=lanes) as server:
        envs = make_vec_remote(server.url, wait="next_frame")
        envs.reset()
        actions = [0] * envs.num_envs
        ready(envs, actions)
        env = made[-1]
        env.closed_at = env.steps
        assert env.waits.wait(60.0)
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(envs.step([1] * envs.num_envs)), name="bridge-test")
        thread.start()
        until(lambda: server.status()["requests"] == 1)
        env.closed_at = LONG
        env.opened.set()
        thread.join(60.0)
        (observations, *_) = results[0]
        assert [row[0] for row in observations] == [1] * envs.num_envs
        envs.close()


def test_wait_next_frame_waits_as_long_as_a_frame_of_the_world_takes() -> None:
    player = Player(CountingEnv, 0.05, "next_frame")
    player.step()
    player.advance(19.0)
    assert player.outcomes == []
    player.advance(2.0)
    assert player.outcomes == [(pb.RUNNING, None)]
    player.world.close()


@pytest.mark.parametrize(("setting", "value"), [("role", "owner"), ("wait", "forever")])
def test_an_unknown_role_or_wait_names_the_choices(serve: Any, setting: str, value: str) -> None:
    server = serve(counting())
    with pytest.raises(RefusedError, match=f"expected the setting {setting} to be one of"):
        make_vec_remote(server.url, **{setting: value})


def test_the_default_action_is_declared(serve: Any, clock: VirtualClock) -> None:
    seen: list[int] = []

    class Watching(CountingEnv):
        def step(self, action: Any) -> Any:
            seen.append(int(action))
            return super().step(action)

    envs = make_vec_remote(serve(lambda: Watching(LONG), default_action=1, max_action_age=0.15).url)
    envs.reset()
    ready(envs, [0])
    clock.advance(0.1)
    envs.step([0])
    clock.advance(0.3)
    assert seen == [1, 0, 1, 1]
    envs.close()


def test_real_time_keywords_without_fps_and_bad_ones_are_errors() -> None:
    with pytest.raises(SettingError, match="give fps= too"):
        serve_gym(CountingEnv, default_action=1)
    with pytest.raises(SettingError, match="expected fps"):
        serve_gym(CountingEnv, fps=0)
    for timeout in (None, 0, "1"):
        with pytest.raises(SettingError, match="expected reset_timeout to be a positive number of seconds, got"):
            serve_gym(CountingEnv, fps=10, realtime=RealTime(reset_timeout=timeout))  # type: ignore[arg-type]
    with (
        serve_gym(CountingEnv, fps=10, default_action=7) as server,
        pytest.raises(RefusedError, match="default_action"),
    ):
        make_vec_remote(server.url)
    with (
        serve_gym("CartPole-v1", fps=10, num_envs=2, vectorization_mode="vector_entry_point") as server,
        pytest.raises(RefusedError, match="vectorization_mode='sync'"),
    ):
        make_vec_remote(server.url)


def test_a_world_goes_with_its_client(serve: Any, clock: VirtualClock) -> None:
    """Mistake: `close()` left remotes running; and so does the client's death."""
    made: list[CountingEnv] = []

    def make() -> CountingEnv:
        made.append(CountingEnv(LONG))
        return made[-1]

    server = serve(make)
    envs = make_vec_remote(server.url)
    envs.reset()
    ready(envs, [0])
    assert len(server.worlds) == 1
    envs.close()
    wait_for(lambda: not server.worlds and made[0].closed)
    proxy = Proxy(server.port)
    dying = make_vec_remote(f"grpc://127.0.0.1:{proxy.port}")
    dying.reset()
    ready(dying, [0])
    proxy.close()  # the connection is cut, nothing is said
    wait_for(lambda: not server.worlds and made[1].closed)
    clock.advance(1.0)
    assert made[1].steps == 0, "and its clock stands"
    dying.close()


def test_a_world_that_is_closed_in_a_reset_closes_its_environment_after_it() -> None:
    release = threading.Event()
    made: list[SlowResetEnv] = []

    def make() -> SlowResetEnv:
        made.append(SlowResetEnv(release, deadline=60.0))
        return made[-1]

    with serve_gym(make, fps=50.0, thread_safe=True) as server:
        envs = make_vec_remote(server.url)
        envs.reset()
        assert made[0].in_reset.wait(10.0)
        server.stop()
        assert not made[0].closed
        release.set()
        wait_for(lambda: made[0].closed)
        envs.close()


def test_a_lost_remote_is_truncated_once_and_then_none(clock: VirtualClock) -> None:
    """A lost remote is never an exception for the whole vector."""
    first = serve_gym(counting(), fps=10.0, realtime=RealTime(clock=clock))
    second = serve_gym(counting(), fps=10.0, realtime=RealTime(clock=clock))
    envs = make_vec_remote([first.url, second.url])
    envs.reset()
    ready(envs, [0, 0])
    first.stop()
    deadline = time.monotonic() + 10.0
    truncated = 0
    while not truncated and time.monotonic() < deadline:
        rows, _, _, truncations, infos = envs.step([0, 0])
        truncated += int(truncations[0])
        assert rows[1] is not None
    assert truncated == 1
    assert infos["error"][0]
    for _ in range(3):
        rows, rewards, _, truncations, infos = envs.step([0, 0])
        assert rows[0] is None
        assert rewards[0] == 0.0
        assert not truncations[0]
        assert infos["slot_state"][0] in (SlotState.LOST, SlotState.CONNECTING)
    envs.close()
    second.stop()


def test_a_loop_over_slots_that_are_all_none_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pacing without busy waiting when all slots are None."""
    release = threading.Event()
    with serve_gym(lambda: SlowResetEnv(release, deadline=60.0), fps=100.0, thread_safe=True) as server:
        envs = make_vec_remote(server.url)
        envs.reset()
        waits: list[float] = []
        pool = pool_of(envs)
        gather = pool.gather

        def watched(enough: Any, deadline: float) -> None:
            waits.append(deadline - time.monotonic())
            gather(enough, deadline)

        monkeypatch.setattr(pool, "gather", watched)
        assert envs.step([0])[0] == (None,)
        assert waits[-1] > 0.005, "the step waited a moment for an observation"
        release.set()
        envs.close()


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not done():
        assert time.monotonic() < deadline, "it did not happen within 10 s"
        threading.Event().wait(0.005)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_real_time_world_keeps_to_the_protocol(lanes: int) -> None:
    """All of dm_env_rpc, by the conformance checks; a player's seat is one, so D-22 is none of its."""
    with serve_gym("CartPole-v1", fps=300.0, num_envs=lanes) as server:
        report = check_server(server.url)
        assert report.ok, str(report)


def test_latencies_are_merged_as_gymnasium_merges_infos(serve: Any, clock: VirtualClock) -> None:
    """U-11: the quick way gives what `VectorEnv._add_info` gives, slot by slot."""
    envs = make_vec_remote([serve(counting()).url] * 3)
    envs.reset()
    ready(envs, [0, 0, 0])
    clock.advance(0.2)
    infos = envs.step([0, 1, 0])[4]
    expected: dict[str, Any] = {}
    for slot, own in enumerate(infos["n"]):
        expected = envs._add_info(expected, {"latency": own["latency"]}, slot)
    assert set(infos["latency"]) == set(expected["latency"])
    for name, column in expected["latency"].items():
        np.testing.assert_array_equal(infos["latency"][name], column)
        assert infos["latency"][name].dtype == column.dtype
    assert infos["_latency"].tolist() == [True] * 3
    envs.close()
