"""Wrappers for loops over remotes that do not wait."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from bridge import RealTime, Server, make_vec_remote, serve_gym
from bridge.errors import InvalidActionError, ResetNeededError, SettingError
from bridge.testing import CountingEnv, SlowResetEnv, VirtualClock
from bridge.wrappers import ActionHistory, BlockingReset, SkipResetting, Throttle
from tests.inside import remotes_of, stepper_of
from tests.support import world_of

LONG = 10**9


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def serve(clock: VirtualClock) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(env: Any = CountingEnv, fps: float = 10.0, **more: Any) -> Server:
        servers.append(serve_gym(env, fps=fps, realtime=RealTime(clock=clock), **more))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


class ArrivedClock(VirtualClock):
    """Stands still until what was sent has arrived, as it would on a quick network."""

    arrived: Callable[[], bool] = staticmethod(lambda: True)

    def sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + 10.0
        while not self.arrived():
            assert time.monotonic() < deadline, "the action did not arrive"
            threading.Event().wait(0.001)
        super().sleep(seconds)


class Recording(CountingEnv):
    """Keeps the actions that frames used."""

    def __init__(self, length: int = LONG) -> None:
        super().__init__(length)
        self.seen: list[int] = []

    def step(self, action: Any) -> Any:
        self.seen.append(int(action))
        return super().step(action)


def test_throttle_sends_at_once_and_asks_at_the_frames_end() -> None:
    """Mistake: throttling surfaced rewards and dones one step late."""
    made: list[Recording] = []

    def make() -> Recording:
        made.append(Recording(6))
        return made[-1]

    clock = ArrivedClock()
    with serve_gym(make, fps=10.0, realtime=RealTime(clock=clock)) as server:
        envs = BlockingReset(Throttle(make_vec_remote(server.url), fps=5.0, clock=clock))
        observations, _ = envs.reset(seed=0)
        assert observations.tolist() == [[1, 0]]
        world: Any = world_of(server, server.worlds[0])
        clock.arrived = lambda: world.pacer.loop.lanes[0].unused
        results = [envs.step(np.array([action])) for action in (1, 0, 1)]
        assert made[0].seen == [1, 1, 0, 0, 1, 1], "each action is used in the very frames of its step"
        assert [result[0].tolist() for result in results] == [[[1, 2]], [[1, 4]], [[1, 6]]]
        assert [result[1].tolist() for result in results] == [[3.0], [7.0], [11.0]]
        assert [bool(result[2][0]) for result in results] == [False, False, True], (
            "the end shows in the step that it is in"
        )
        assert [result[4]["frames"].tolist() for result in results] == [[2], [2], [2]]
        envs.close()


def test_throttle_counts_frames_without_drift_and_reports_late_ones(serve: Any, clock: VirtualClock) -> None:
    throttle = Throttle(make_vec_remote(serve(lambda: CountingEnv(LONG)).url), clock=clock)
    assert throttle.fps == 10.0, "the worlds' own"
    envs = BlockingReset(throttle)
    envs.reset()
    start = clock.now()
    _, _, _, _, infos = envs.step(np.array([0]))
    assert clock.now() == pytest.approx(start + 0.1)
    assert infos["late"].tolist() == [0.0]
    clock.advance(0.03)  # the agent thinks a little
    envs.step(np.array([0]))
    assert clock.now() == pytest.approx(start + 0.2)
    clock.advance(0.25)  # and too long
    _, _, _, _, infos = envs.step(np.array([0]))
    assert infos["late"][0] == pytest.approx(0.15)
    assert clock.now() == pytest.approx(start + 0.45), "a late step does not wait"
    envs.step(np.array([0]))
    assert clock.now() == pytest.approx(start + 0.5), "and the frames' grid is the same as before"
    assert throttle.late == 1
    envs.close()


def test_throttle_paces_the_bare_environment_and_lock_step_worlds_too(clock: VirtualClock) -> None:
    with serve_gym(lambda: Recording(LONG)) as server:
        with pytest.raises(SettingError, match="expected fps="):
            Throttle(envs := make_vec_remote(server.url))
        throttle = Throttle(envs, fps=20.0, clock=clock)
        throttle.reset()
        deadline = time.monotonic() + 10.0
        while throttle.step([1])[0][0] is None:
            assert time.monotonic() < deadline
        before = clock.now()
        (row,), _, _, _, infos = throttle.step([1])
        assert row.tolist() == [1, 1], "in lock-step a step is a step"
        assert clock.now() == pytest.approx(before + 0.05)
        assert infos["late"].tolist() == [0.0]
        throttle.close()


@pytest.mark.parametrize("lanes", [False, True])
def test_send_brings_its_actions_to_the_world_under_a_throttle_too(
    serve: Any, clock: VirtualClock, lanes: bool
) -> None:
    made: list[Recording] = []

    def make() -> Recording:
        made.append(Recording(LONG))
        return made[-1]

    more = {"num_envs": 2, "vectorization_mode": "sync"} if lanes else {}
    envs = BlockingReset(Throttle(make_vec_remote(serve(make, **more).url, num_envs=2), clock=clock))
    envs.reset()
    before = sum(len(env.seen) for env in made)
    envs.send(np.array([1, 1]), [0, 1])
    waiting = {0, 1}
    while waiting:
        waiting.difference_update(envs.recv(len(waiting))[0].tolist())
    clock.advance(0.2)
    seen = [action for env in made for action in env.seen]
    assert seen[before:].count(1) == 4, "each of both worlds used it for two frames"
    envs.close()


def test_the_latency_of_blocking_loops_is_summed_up_as_that_of_others(serve: Any, clock: VirtualClock) -> None:
    envs = BlockingReset(Throttle(make_vec_remote(serve().url, num_envs=2), clock=clock))
    envs.reset()
    envs.step(np.array([0, 0]))
    assert [one["round_trip"]["count"] > 0 for one in envs.latency_summary()] == [True, True]
    envs.close()


@pytest.mark.parametrize("fps", [0, -1.0, "10", float("inf"), True])
def test_throttle_refuses_a_frame_rate_that_is_none(serve: Any, fps: Any) -> None:
    envs = make_vec_remote(serve().url)
    with pytest.raises(SettingError, match="expected fps to be a positive number"):
        Throttle(envs, fps=fps)
    envs.close()


def test_wrappers_refuse_what_is_no_remote() -> None:
    local = SyncVectorEnv([CountingEnv])
    for wrapper in (BlockingReset, Throttle, SkipResetting):
        with pytest.raises(SettingError, match="expected what make_vec_remote returns"):
            wrapper(local)  # type: ignore[arg-type]
    local.close()


def test_ordinary_gymnasium_code_runs_on_blocking_reset_of_throttle() -> None:
    """Acceptance 4, by the machine's clock, with Gymnasium's own wrappers."""
    with serve_gym("CartPole-v1", fps=200.0, num_envs=2) as lanes, serve_gym("CartPole-v1", fps=200.0) as single:
        envs: Any = BlockingReset(Throttle(make_vec_remote([lanes.url, single.url])))
        envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
        envs = gymnasium.wrappers.vector.TransformReward(envs, lambda rewards: rewards * 2.0)
        observations, _ = envs.reset(seed=1)
        assert envs.observation_space.contains(observations)
        ends = 0
        lengths: list[int] = []
        deadline = time.monotonic() + 30.0
        while ends < 6 and time.monotonic() < deadline:
            observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
            assert observations.shape == (3, 4)
            assert observations.dtype == np.float32
            assert rewards.shape == terminations.shape == truncations.shape == (3,)
            ended = terminations | truncations
            ends += int(ended.sum())
            lengths += infos["episode"]["l"][ended].tolist() if ended.any() else []
        assert ends >= 6
        assert all(length >= 1 for length in lengths)
        envs.close()


def test_action_history_shows_the_last_actions_and_forgets_them_with_the_episode() -> None:
    envs = ActionHistory(SyncVectorEnv([lambda: CountingEnv(3), lambda: CountingEnv(LONG)]), 2)
    assert envs.single_observation_space == spaces.Dict(
        {"observation": CountingEnv().observation_space, "actions": spaces.MultiDiscrete([2, 2])}
    )
    observations, _ = envs.reset(seed=0)
    assert envs.observation_space.contains(observations)
    assert observations["actions"].tolist() == [[0, 0], [0, 0]]
    seen = []
    for _ in range(5):
        observations = envs.step(np.array([1, 1]))[0]
        assert envs.observation_space.contains(observations)
        seen.append(observations["actions"].tolist())
    assert [first for first, _ in seen] == [[0, 1], [1, 1], [1, 1], [0, 0], [0, 1]], "the fourth step begins an episode"
    assert [second for _, second in seen] == [[0, 1], *[[1, 1]] * 4]
    envs.close()


def test_action_history_follows_the_same_step_mode() -> None:
    envs = ActionHistory(SyncVectorEnv([lambda: CountingEnv(2)], autoreset_mode=AutoresetMode.SAME_STEP), 1)
    envs.reset()
    seen = [envs.step(np.array([1]))[0]["actions"].tolist() for _ in range(3)]
    assert seen == [[[1]], [[0]], [[1]]], "the observation of the second step is the next episode's first"
    envs.close()


def test_action_history_flattens_for_plain_networks() -> None:
    envs = ActionHistory(gymnasium.make_vec("Pendulum-v1", num_envs=2, vectorization_mode="sync"), 3, flatten=True)
    observations, _ = envs.reset(seed=0)
    assert envs.single_observation_space.shape == (3 + 3,)
    assert observations.dtype == np.float32
    assert envs.observation_space.contains(observations)
    observations = envs.step(np.array([[0.5], [-1.5]], np.float32))[0]
    assert observations[:, 3:].tolist() == [[0.0, 0.0, 0.5], [0.0, 0.0, -1.5]]
    envs.close()
    discrete = ActionHistory(gymnasium.make_vec("CartPole-v1", num_envs=1, vectorization_mode="sync"), 2, flatten=True)
    discrete.reset(seed=0)
    assert discrete.step(np.array([1]))[0][0, 4:].tolist() == [1.0, 0.0, 0.0, 1.0], "one-hot"
    discrete.close()


@pytest.mark.parametrize("flatten", [False, True])
def test_action_history_takes_a_batch_of_tuples_for_one_whatever_its_values(flatten: bool) -> None:
    class Outside(CountingEnv):
        """Its observations are beyond the bounds of its space."""

        def __init__(self) -> None:
            super().__init__()
            self.observation_space: Any = spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)))

        def reset(self, **given: Any) -> Any:
            return (np.array([5.0, 5.0], np.float32), np.int64(1)), {}

        def step(self, action: Any) -> Any:
            return self.reset()[0], 0.0, False, False, {}

    envs = ActionHistory(SyncVectorEnv([Outside] * 3), 1, flatten=flatten)
    envs.reset()
    observations = envs.step(np.array([1, 0, 1]))[0]
    if flatten:
        assert observations.tolist() == [[5, 5, 0, 1, 0, *last] for last in ([0, 1], [1, 0], [0, 1])]
    else:
        assert observations["observation"][0].tolist() == [[5, 5]] * 3
        assert observations["actions"].tolist() == [[1], [0], [1]]
    envs.close()


def test_action_history_leaves_none_slots_none(serve: Any, clock: VirtualClock) -> None:
    envs = ActionHistory(make_vec_remote(serve(lambda: CountingEnv(LONG)).url), 2)
    assert envs.reset()[0][0] is None
    deadline = time.monotonic() + 10.0
    while (row := envs.step(np.array([1]))[0][0]) is None:
        assert time.monotonic() < deadline
    assert row["actions"].tolist() == [0, 0], "the actions given while it was resetting were not applied"
    clock.advance(0.1)
    row = envs.step(np.array([1]))[0][0]
    assert row["actions"].tolist() == [0, 1]
    assert row["observation"].tolist() == [1, 1]
    envs.close()


@pytest.mark.parametrize("length", [0, -1, 1.5, True])
def test_action_history_refuses_a_length_that_is_none(length: Any) -> None:
    local = SyncVectorEnv([CountingEnv])
    with pytest.raises(SettingError, match="expected length"):
        ActionHistory(local, length)
    local.close()


def test_action_history_refuses_spaces_that_it_cannot_stack() -> None:
    local = SyncVectorEnv([lambda: CountingEnv(action_space=spaces.Text(3))])
    with pytest.raises(SettingError, match="expected an action space that is Box, Discrete"):
        ActionHistory(local)
    local.close()


def test_skip_resetting_gives_only_the_slots_that_are_ready() -> None:
    release = threading.Event()
    with (
        serve_gym(lambda: SlowResetEnv(release, deadline=60.0, length=LONG), fps=200.0, thread_safe=True) as slow,
        serve_gym(lambda: CountingEnv(LONG), fps=200.0) as quick,
    ):
        envs = SkipResetting(make_vec_remote([slow.url, quick.url]))
        with pytest.raises(ResetNeededError):
            envs.step([])
        result = envs.reset(seed=0)
        deadline = time.monotonic() + 10.0
        while result.slots.tolist() != [1]:
            result = envs.step(envs.sample(len(result.slots)))
            assert time.monotonic() < deadline
        assert result.observations.shape == (1, 2)
        assert result.rewards.shape == (2,)
        with pytest.raises(InvalidActionError, match=r"expected 1 actions, one for each ready slot \[1\], got 2"):
            envs.step(np.array([0, 0]))
        release.set()
        while result.slots.tolist() != [0, 1]:
            result = envs.step(envs.sample(len(result.slots)))
            assert time.monotonic() < deadline
        assert result.observations.shape == (2, 2)
        envs.close()


def test_a_throttled_environment_can_be_unpickled_attributes_first() -> None:
    """`__getattr__` must not recurse before there is an environment."""
    with pytest.raises(AttributeError):
        _ = Throttle.__new__(Throttle).anything
    assert pickle.dumps(Throttle)


def test_a_copy_paces_and_waits_as_the_original(serve: Any) -> None:
    envs = BlockingReset(Throttle(make_vec_remote(serve(lambda: CountingEnv(LONG), num_envs=2).url), fps=100.0))
    copied = pickle.loads(pickle.dumps(envs))
    assert copied.reset(seed=0)[0].tolist() == [[1, 0], [1, 0]]
    assert copied.env.fps == 100.0
    assert stepper_of(copied).pacer is not None
    assert remotes_of(copied)[0].realtime._partial is False
    copied.close()
    envs.close()


@pytest.mark.parametrize("lanes", [1, 2])
def test_blocking_reset_gives_same_step_in_real_time_too(serve: Any, clock: VirtualClock, lanes: int) -> None:
    """U-10: the final observation in `final_obs`, and the next episode's first in the same step."""
    remote = make_vec_remote(serve(lambda: CountingEnv(3), num_envs=lanes).url)
    envs = BlockingReset(remote, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=0)
    clock.advance(0.3)
    observations, rewards, terminations, _, infos = envs.step(np.zeros(lanes, np.int64))
    assert observations.tolist() == [[2, 0]] * lanes
    assert terminations.all()
    assert rewards.tolist() == [6.0] * lanes
    assert [row.tolist() for row in infos["final_obs"]] == [[1, 3]] * lanes
    envs.close()


def test_an_episode_that_ends_while_other_lanes_begin_anew_is_told(serve: Any, clock: VirtualClock) -> None:
    lengths = itertools.cycle((3, 4))
    url = serve(lambda: CountingEnv(next(lengths)), num_envs=2).url
    envs = BlockingReset(make_vec_remote(url), autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=0)
    clock.advance(0.3)
    stepper = stepper_of(envs)
    begin_next = stepper._begin_next

    def later(*given: Any) -> None:
        stepper._begin_next = begin_next
        clock.advance(0.1)
        begin_next(*given)

    stepper._begin_next = later
    _, _, terminations, _, infos = envs.step(np.zeros(2, np.int64))
    (other,) = np.flatnonzero(~terminations)
    assert [record["length"] for record in infos["episodes"][other]] == [4]
    assert envs.step(np.zeros(2, np.int64))[2].tolist() == (~terminations).tolist()
    envs.close()
