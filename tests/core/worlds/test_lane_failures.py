"""Lanes that fail, through a server: what a loop, its log, the server's log, observers, people and spectators see."""

import contextlib
import re
from collections import Counter

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from bridge import Episodes, Observer, make_vec_remote, serve_gym
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import EnvironmentFailedError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.peers import Stream
from tests.support import assert_identical, lane_info, until, world_of
from tests.web_envs import Paddle

TIMEOUT = 30.0


class Fault(Exception):  # noqa: N818 - it is a failure on purpose
    """Raised by an environment that is to fail."""


class OneFails(CountingEnv):
    """One that was made raises as its class says; the others do not. Their numbers are those of their first seeds.

    Args:
        failing: The seed of the one that fails.
        steps: The steps of its life that raise; None: all of them.
        resets: The resets of its life that raise.
    """

    def __init__(self, failing=1, *, steps=(), resets=(), length=5, error=None):
        super().__init__(length)
        self.failing, self.at, self.in_resets = failing, steps, resets
        self.error = error or Fault("the arm is stuck")
        self.number, self.asked, self.resets = None, 0, 0

    def reset(self, *, seed=None, options=None):
        self.number = seed if self.number is None else self.number
        self.resets += 1
        if self.number == self.failing and self.resets in self.in_resets:
            raise self.error
        return super().reset(seed=seed, options=options)[0], {}

    def step(self, action):
        self.asked += 1
        if self.number == self.failing and (self.at is None or self.asked in self.at):
            raise self.error
        return super().step(action)


def zeros(envs):
    return np.zeros(envs.num_envs, np.int64)


@contextlib.contextmanager
def blocking(make, **keywords):
    """A vector environment over the lanes of one world, reset with the seeds 0, 1 and so on."""
    with served(make, **keywords) as (envs, _):
        yield envs


@contextlib.contextmanager
def served(make, lanes=3, serve=None, transport=None, **keywords):
    """As `blocking`, and the server."""
    with serve_gym(make, num_envs=lanes, **(serve or {})) as server:
        kind = {} if transport is None else {"transport": transport}
        with contextlib.closing(
            make_vec_remote(server.url, blocking=True, timeout=TIMEOUT, **kind, **keywords)
        ) as envs:
            envs.reset(seed=0)
            yield envs, server


def errors_of(infos, lanes=3):
    return [lane_info(infos, lane).get("error") for lane in range(lanes)]


# The loop


def test_a_lane_that_does_nothing_but_fail_ends_the_loop_and_is_named():
    with blocking(lambda: OneFails(steps=None)) as envs:
        # Each second step begins its next episode.
        for _ in range(18):
            envs.step(zeros(envs))
        with pytest.raises(EnvironmentFailedError, match=r"the last 10 episodes of slot 1 ended by.*the arm is stuck"):
            envs.step(zeros(envs))
        envs.step(zeros(envs))  # who catches it and goes on has as many failures before it again


def test_an_episode_that_ends_by_itself_sets_the_count_of_its_lane_back():
    # It fails twice, plays an episode of five steps, and so on.
    fails = {number for number in range(1, 60) if number % 7 in (1, 2)}
    with blocking(lambda: OneFails(steps=fails), max_failures=3) as envs:
        truncated = sum(int(envs.step(zeros(envs))[3][1]) for _ in range(50))
        assert truncated > 6


def test_two_lanes_are_counted_apart():
    class Either(OneFails):
        def step(self, action):
            self.failing = self.number if self.number in (0, 2) else None
            return super().step(action)

    with blocking(lambda: Either(steps=None), max_failures=4) as envs:
        for _ in range(6):
            *_, truncated, _ = envs.step(zeros(envs))
            assert truncated[0] == truncated[2]
        with pytest.raises(EnvironmentFailedError, match="the last 4 episodes of slot 0"):
            envs.step(zeros(envs))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_lane_whose_resets_all_fail_ends_the_loop_by_max_failures(mode):
    with blocking(lambda: OneFails(resets=range(2, 999), length=3), autoreset_mode=mode, max_failures=5) as envs:
        for _ in range(2):
            envs.step(zeros(envs))
        others = []

        def play():
            while True:
                others.append(envs.step(zeros(envs))[0][0].tolist())

        with pytest.raises(EnvironmentFailedError, match=r"the last 5 episodes of slot 1 ended by.*the arm is stuck"):
            play()
    # The others went on meanwhile.
    assert (
        others[:4]
        == {
            "NextStep": [[1, 3], [2, 0], [2, 1], [2, 2]],
            "SameStep": [[2, 0], [2, 1], [2, 2], [3, 0]],
        }[mode]
    )
    assert len(others) == 5


def test_a_wrapper_that_drops_infos_leaves_the_count_as_it_is():
    class NoInfos(VectorWrapper):
        def step(self, actions):
            return *self.env.step(actions)[:4], {}

    def make():
        return NoInfos(SyncVectorEnv([lambda: OneFails(steps=None)] * 3))

    with serve_gym(make) as server, contextlib.closing(make_vec_remote(server.url, blocking=True)) as envs:
        envs.reset(seed=0)
        for _ in range(18):
            envs.step(zeros(envs))
        with pytest.raises(EnvironmentFailedError, match=r"of slot 1 ended by failures .* the environment failed"):
            envs.step(zeros(envs))


@pytest.mark.slow
def test_without_max_failures_the_other_lanes_go_on_for_ever():
    with blocking(lambda: OneFails(resets=range(2, 999), length=3), max_failures=None) as envs:
        rows = [envs.step(zeros(envs)) for _ in range(40)]
    assert all(row[3][1] for row in rows[3:])
    assert Counter(bool(row[2][0]) for row in rows) == {True: 10, False: 30}


def test_with_continue_a_transition_of_a_lane_that_failed_is_not_valid():
    with blocking(lambda: OneFails(steps=[2]), on_lost="continue") as envs:
        valid = [envs.step(zeros(envs))[4]["valid"].tolist() for _ in range(4)]
    assert valid == [[True] * 3, [True, False, True], [True, False, True], [True] * 3]


def test_a_masked_reset_that_fails_raises_and_can_be_asked_for_again():
    with blocking(lambda: OneFails(resets=(2, 3, 4), length=3), autoreset_mode="Disabled") as envs:
        for _ in range(3):
            *_, ended, _, _ = envs.step(zeros(envs))
        assert ended.all()
        with pytest.raises(EnvironmentFailedError, match="the arm is stuck"):
            envs.reset(options={"reset_mask": ended})
        observations, _ = envs.reset(options={"reset_mask": np.array([False, True, False])})
        assert observations.tolist() == [[2, 0], [2, 0], [2, 0]]
        assert envs.step(zeros(envs))[0].tolist() == [[2, 1]] * 3


def test_the_report_counts_the_episode_and_the_client_logs_a_line(caplog):
    with served(lambda: OneFails(steps=[2])) as (envs, server):
        *_, infos = [envs.step(zeros(envs)) for _ in range(2)][-1]
        url = server.url
        assert [report.episodes_lost for report in envs.remotes()] == [1]
        assert envs.report()["episodes_cut"] == 1
    error = errors_of(infos)[1]
    assert error.startswith(f"{url} answered INTERNAL: the environment raised Fault in step: the arm is stuck\n")
    assert errors_of(infos)[::2] == [None, None]
    told = [record.getMessage() for record in caplog.records if record.name == "bridge.core.client.slots.vector_pool"]
    assert told == ["slot 1: episode truncated: the environment raised Fault in step: the arm is stuck"]


def server_lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "bridge.core.logs"]


@pytest.mark.parametrize("serve", [{}, {"isolation": "process"}, {"thread_safe": True}], ids=str)
def test_the_server_logs_the_traceback_once_and_counts_each_failure(caplog, serve):
    with served(lambda: OneFails(steps=[1, 2, 3]), serve=serve) as (envs, server):
        for _ in range(7):
            envs.step(zeros(envs))
        status = server.status()
    (line,) = server_lines(caplog)
    assert re.match(r"world=\S* the environment raised Fault in step: the arm is stuck\n  Traceback ", line)
    assert status["failures"] == 3


def test_a_reset_that_was_tried_again_is_logged_and_counted_too(caplog):
    with served(lambda: OneFails(resets=(2, 3), length=2)) as (envs, server):
        for _ in range(3):
            assert errors_of(envs.step(zeros(envs))[-1]) == [None] * 3
        assert server.status()["failures"] == 2
    assert len(server_lines(caplog)) == 1


@pytest.mark.parametrize(
    ("serve", "transport", "scheme"),
    [
        ({"isolation": "process"}, None, "grpc"),
        ({"thread_safe": True}, None, "grpc"),
        ({}, "grpcio", "grpc"),
        ({"web": True, "port": 0}, None, "ws"),
    ],
    ids=["isolated", "thread safe", "grpcio", "websocket"],
)
def test_a_lane_fails_alone_wherever_it_runs_and_however_it_is_reached(serve, transport, scheme):
    with serve_gym(lambda: OneFails(steps=[2]), num_envs=3, **serve) as server:
        url = server.url.replace("grpc://", f"{scheme}://")
        kind = {} if transport is None else {"transport": transport}
        with contextlib.closing(make_vec_remote(url, blocking=True, timeout=TIMEOUT, **kind)) as envs:
            envs.reset(seed=0)
            found = [envs.step(zeros(envs)) for _ in range(3)]
    assert [row[0].tolist() for row in found] == [
        [[1, 1], [1, 1], [1, 1]],
        [[1, 2], [1, 1], [1, 2]],
        [[1, 3], [2, 0], [1, 3]],
    ]
    assert [row[3].tolist() for row in found] == [[False] * 3, [False, True, False], [False] * 3]
    assert "the arm is stuck" in errors_of(found[1][-1])[1]


def test_several_worlds_of_lanes_make_one_vector():
    with (
        serve_gym(lambda: OneFails(failing=1, steps=[2])) as one,
        serve_gym(lambda: OneFails(failing=4, steps=[2, 3])) as two,
    ):
        urls = [f"{one.url}?num_envs=2", f"{one.url}?num_envs=2", f"{two.url}?num_envs=3"]
        with contextlib.closing(make_vec_remote(urls, blocking=True, timeout=TIMEOUT)) as envs:
            envs.reset(seed=0)
            found = [envs.step(zeros(envs)) for _ in range(4)]
            assert [report.episodes_lost for report in envs.remotes()] == [1, 0, 2]
    assert [np.flatnonzero(row[3]).tolist() for row in found] == [[], [1, 4], [], [4]]
    errors = errors_of(found[1][-1], 7)
    assert [slot for slot, error in enumerate(errors) if error] == [1, 4]
    assert errors[4].startswith(two.url)
    assert [row[0][0].tolist() for row in found] == [[1, 1], [1, 2], [1, 3], [1, 4]]


def test_a_vector_that_waits_for_no_slot_tells_it_too():
    with serve_gym(lambda: OneFails(steps=[2]), num_envs=3) as server:
        envs = make_vec_remote(server.url, timeout=TIMEOUT)
        with contextlib.closing(envs):
            envs.reset(seed=0)
            until(lambda: all(seen is not None for seen in envs.step(zeros(envs))[0]))
            envs.reset(seed=0)
            found = []

            def failed():
                found.append(envs.step(zeros(envs)))
                return found[-1][3].any()

            until(failed)
            observations, _, _, truncated, infos = found[-1]
            assert truncated.tolist() == [False, True, False]
            assert "the arm is stuck" in infos["error"][1]
            assert observations[1] is not None
            assert envs.step(zeros(envs))[0][1].tolist()[1] == 0


def test_keyboard_interrupt_of_an_environment_ends_the_episodes_of_all_and_no_server(caplog):
    with blocking(lambda: OneFails(steps=[2], error=KeyboardInterrupt())) as envs:
        envs.step(zeros(envs))
        *_, truncated, infos = envs.step(zeros(envs))
        assert truncated.all()
        assert all("KeyboardInterrupt in step" in error for error in errors_of(infos))
        assert envs.step(zeros(envs))[0].tolist() == [[2, 0]] * 3


def test_a_constructor_that_raises_is_told_and_closes_the_lanes_before_it():
    made = []

    class Third(CountingEnv):
        def __init__(self):
            super().__init__()
            # The server makes the first one by itself, to see what it serves.
            if len(made) == 3:
                raise Fault("no licence is left")
            made.append(self)

    with serve_gym(Third) as server:
        with pytest.raises(Exception, match="no licence is left"):
            make_vec_remote(f"{server.url}?num_envs=4", blocking=True, timeout=TIMEOUT)
        until(lambda: all(env.closed for env in made[1:]))


def test_a_lane_that_cannot_be_drawn_is_told_and_ends_no_episode():
    class Undrawn(CountingEnv):
        render_mode = "rgb_array"

        def render(self):
            if self.np_random_seed == 1:
                raise Fault("no display")
            return np.zeros((2, 2, 3), np.uint8)

    with blocking(Undrawn) as envs:
        envs.step(zeros(envs))
        with pytest.raises(EnvironmentFailedError, match="Fault in render: no display"):
            envs.render()
        observations, *_, truncated, infos = envs.step(zeros(envs))
        assert observations.tolist() == [[1, 2]] * 3
        assert not truncated.any()
        assert "error" not in infos


def test_lanes_of_real_time_that_fail_are_in_the_log_of_the_server(caplog):
    with serve_gym(lambda: OneFails(steps=[3], length=10**6), num_envs=2, fps=200) as server:
        with contextlib.closing(make_vec_remote(server.url, blocking=True, timeout=TIMEOUT)) as envs:
            envs.reset(seed=0)
            until(lambda: envs.step(zeros(envs))[3][1])
        until(lambda: server.status()["failures"] == 1)
    (line,) = server_lines(caplog)
    assert "the environment raised Fault in step: the arm is stuck\n  Traceback " in line


# Counts


class Told(Observer):
    """Keeps the episodes that it is told."""

    def __init__(self):
        self.episodes = []

    def made(self, world):
        return Episodes(world.env.facts, self.episodes.append)


def test_episodes_are_counted_alike_by_observers_the_server_and_gymnasium():
    told, counted = Told(), []
    fails = {"steps": [2, 9], "resets": (4, 5, 6, 7, 8, 9), "length": 4}
    with (
        serve_gym(lambda: OneFails(**fails), num_envs=3, observers=[told]) as server,
        contextlib.closing(
            RecordEpisodeStatistics(make_vec_remote(server.url, blocking=True, timeout=TIMEOUT))
        ) as envs,
    ):
        envs.reset(seed=0)
        for _ in range(40):
            *_, infos = envs.step(zeros(envs))
            for lane in np.flatnonzero(infos.get("_episode", [])).tolist():
                episode = infos["episode"]
                counted.append((lane, float(episode["r"][lane]), int(episode["l"][lane])))
        (world,) = server.worlds
        steps = world_of(server, world).counts().episodes
    # A lane whose resets all failed was truncated in the step of its reset: Gymnasium counts that as an episode
    # without a step, nobody else does.
    empty = [one for one in counted if one[2] == 0]
    assert empty == [(1, 0.0, 0)] * 2
    expected = [one for one in counted if one[2]]
    assert Counter((one.lane, one.reward, one.length) for one in told.episodes) == Counter(expected)
    assert steps == len(expected)


# People


def test_who_watches_or_takes_over_a_lane_sees_it_fail_and_begin_anew():
    class Stuck(Paddle):
        asked = 0

        def step(self, action):
            self.asked += 1
            if self.np_random_seed == 1 and self.asked == 3:
                raise Fault("the arm is stuck")
            return super().step(action)

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve_gym(Stuck, num_envs=3, web=True))
        url = f"{server.url}?world="
        envs = stack.enter_context(contextlib.closing(make_vec_remote(url, blocking=True, timeout=TIMEOUT)))
        envs.reset(seed=0)
        looks = make_vec_remote(url, blocking=True, timeout=TIMEOUT, role="spectator", wait="now")
        viewer = stack.enter_context(contextlib.closing(looks))
        person = Stream(server, own_connection=True)
        stack.callback(person.channel.close)
        stack.callback(person.die)
        person.join("", role="takeover", lane=1, name="Dan")
        request = pb.StepRequest(actions={1: pack_tensor(np.int64(-1))}, requested_observations=[1, 2])
        assert person.ask(step=request).WhichOneof("payload") == "step"
        viewer.reset()
        found, seen = [], []
        for _ in range(6):
            found.append(envs.step(np.ones(3, np.int64)))
            assert person.ask(step=request).WhichOneof("payload") == "step"
            seen.append(viewer.step(np.ones(3, np.int64)))
    assert [bool(row[3][1]) for row in found] == [False, False, True, False, False, False]
    assert [row[3].tolist() for row in seen] == [row[3].tolist() for row in found]
    assert [row[0].tolist() for row in seen] == [row[0].tolist() for row in found]
    # The person acts before and after; the other lanes are the agent's.
    assert [row[0].reshape(-1).tolist()[::2] for row in found] == [[100 + 2 * n] * 2 for n in range(1, 7)]
    assert lane_info(found[-1][-1], 1)["intervened_by"] == "Dan"


# A training


class RaisesAtRandom(gymnasium.Wrapper):
    """One of them, which its first seed tells, raises in each twentieth of its steps and each fourth of its resets."""

    failing = 5
    raised = 0

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.random, self.number = np.random.default_rng(1), None

    def _maybe(self, part):
        if self.number == self.failing and self.random.random() < part:
            type(self).raised += 1
            raise Fault("the cable is loose")

    def reset(self, *, seed=None, options=None):
        first, self.number = self.number is None, seed if self.number is None else self.number
        self._maybe(0.0 if first else 0.25)
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        self._maybe(0.05)
        return self.env.step(action)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_beside_an_environment_that_raises_at_random_fifteen_others_play_as_without_it(mode, monkeypatch):
    def play(failing):
        """A loop whose policy is another one after each rollout; return what each step gave."""
        monkeypatch.setattr(RaisesAtRandom, "failing", failing)
        monkeypatch.setattr(RaisesAtRandom, "raised", 0)
        policies, steps = np.random.default_rng(3), []
        with blocking(RaisesAtRandom, lanes=16, autoreset_mode=mode) as envs:
            observations, _ = envs.reset(seed=0)
            for step in range(240):
                if step % 40 == 0:
                    weights = policies.standard_normal(4)
                actions = (observations @ weights > 0).astype(np.int64)
                observations, *flags, infos = envs.step(actions)
                steps.append((observations, *flags, infos))
                ended = flags[1] | flags[2]
                while mode == "Disabled" and ended.any():
                    try:
                        observations, _ = envs.reset(options={"reset_mask": ended})
                        ended = np.zeros(16, np.bool_)
                    except EnvironmentFailedError:
                        ended = np.arange(16) == failing  # the others have begun
        return steps, RaisesAtRandom.raised

    (without, none), (beside, raised) = play(None), play(5)
    assert none == 0
    assert raised > 5
    others = [lane for lane in range(16) if lane != 5]
    ends = 0
    for one, other in zip(without, beside, strict=True):
        for mine, theirs in zip(other[:4], one[:4], strict=True):
            assert mine[others].tobytes() == theirs[others].tobytes()
        for lane in others if mode == "SameStep" else ():
            assert_identical(lane_info(other[4], lane), lane_info(one[4], lane))
        ends += int((one[2] | one[3]).sum())
    assert ends > 50
