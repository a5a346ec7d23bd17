"""Lanes that fail: each fails alone, and as a world of its own would."""

import contextlib
import copy
import re
import types
from collections import OrderedDict

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.core.worlds.lane_vector import with_lanes_of_ours
from bridge.errors import EnvironmentFailedError, RequestError, ResetNeededError
from bridge.testing import CountingEnv
from tests.core.worlds.lane_tools import MODES, Objectives, in_each_mode
from tests.support import assert_identical, lane_info, sampled


class Fault(Exception):  # noqa: N818 - it is a failure on purpose
    """Raised by an environment that is to fail."""


class Weird(BaseException):
    """As some libraries have them: it is no Exception."""


def raise_it(error):
    def fault(env, result):
        # What it saw last must be told as it was, though the environment goes on writing into its array.
        env.seen[...] = 77
        raise error

    return fault


def gives(index, value):
    """A result with one part replaced: 0 the observation, 1 the reward, 2 and 3 the flags, -1 the info."""

    def fault(env, result):
        parts = list(result)
        parts[index] = value
        return tuple(parts)

    return fault


def nothing_but(value):
    return lambda env, result: value


class Faulty(gymnasium.Env):
    """Ends and raises as its plan says; which plan is its own tells the first seed that it gets.

    Args:
        plans: By that seed the faults, by `("reset", n)` or `("step", n)`, counted over the environment's life from 1.
            "all" for n: each of them from the second one on.
        space: Its observation space.
    """

    action_space = spaces.Discrete(4)

    def __init__(self, plans, space=None):
        self.observation_space = spaces.Box(0, 1e6, (3,), np.float32) if space is None else space
        self.plans, self.plan, self.counts = plans, None, {"reset": 0, "step": 0}
        self.seen = np.zeros(3, np.float32)

    def _observe(self):
        if isinstance(self.observation_space, spaces.Box) and self.observation_space.shape == (3,):
            self.seen[:] = self.counts["reset"], self.steps, self.np_random.integers(100)
            return self.seen
        space = copy.deepcopy(self.observation_space)
        space.seed(int(self.np_random.integers(2**31)))
        return space.sample()

    def _faulty(self, where, result):
        self.counts[where] += 1
        number = self.counts[where]
        fault = self.plan.get((where, number)) or (self.plan.get((where, "all")) if number > 1 else None)
        return fault(self, result) if fault else result

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.plan = self.plans.get(seed, {}) if self.plan is None else self.plan
        self.length, self.steps = int(self.np_random.integers(3, 7)), 0
        return self._faulty("reset", (self._observe(), {"resets": self.counts["reset"] + 1}))

    def step(self, action):
        self.steps += 1
        over, reward = self.steps >= self.length, float(self.np_random.random())
        ends = over and self.length % 2 == 0, over and self.length % 2 == 1
        return self._faulty("step", (self._observe(), reward, *ends, {"steps": self.steps, "third": self.steps / 3}))


FAULTS = {
    "raises": raise_it(Fault("on purpose")),
    "raises what is no Exception": raise_it(Weird("on purpose")),
    "exits": raise_it(SystemExit(3)),
    "stops": raise_it(StopIteration()),
    "no observation": gives(0, None),
    "an observation of another shape": gives(0, np.zeros(4, np.float32)),
    "a batch of one": gives(0, np.zeros((1, 3), np.float32)),
    "a complex observation": gives(0, np.array([1j, 2, 3])),
    "a text": gives(0, "abc"),
    "nothing": nothing_but(None),
}


OF_STEPS = {
    "no reward": gives(1, None),
    "a text as reward": gives(1, "a"),
    "two rewards": gives(1, np.zeros(2)),
    "rewards of agents": gives(1, (1.0, 2.0)),
    "a dict of rewards": gives(1, {"a": 1.0}),
    "two flags": gives(2, np.array([True, False])),
    "no element as flag": gives(3, np.zeros(0)),
    "four values": lambda env, result: result[:4],
    "six values": lambda env, result: (*result, 1),
    "an info of another type": gives(-1, [1]),
    "a text as info": gives(-1, "x"),
}


LANES = [10, 20, 30]
"""The seeds of the lanes."""


PLACES = {
    "the first step": ("step", 1),
    "a step within": ("step", 3),
    "a step that ends an episode": ("step", 6),
}


def faulty_lanes(plans, mode, space=None):
    return with_lanes_of_ours(SyncVectorEnv([lambda: Faulty(plans, space)] * 3, autoreset_mode=mode), None)


def played(envs, steps=16):
    """What each call gave."""
    found, ended = [envs.reset(seed=LANES)], np.zeros(3, np.bool_)
    for step in range(steps):
        if envs.autoreset_mode is AutoresetMode.DISABLED and ended.any():
            found.append(envs.reset(options={"reset_mask": ended}))
        found.append(envs.step(np.full(3, step % 4)))
        ended = found[-1][2] | found[-1][3]
    envs.close()
    return found


def lanes_of(result, envs):
    """What a call gave of each lane: its observation, reward and flags, and its info without `error`."""
    observations, *middle, infos = result
    rows = zip(iterate(envs.observation_space, observations), *middle, strict=True)
    return [(*row, {**lane_info(infos, lane), "error": None}) for lane, row in enumerate(rows)]


def by_step(results):
    """The results of steps alone: whether a lane is to be reset between them differs where another one failed."""
    return [result for result in results if len(result) == 5]


@in_each_mode
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", [*FAULTS, *OF_STEPS])
def test_the_lanes_beside_one_that_fails_are_those_of_a_run_without_it(mode, place, fault):
    envs = faulty_lanes({20: {PLACES[place]: {**FAULTS, **OF_STEPS}[fault]}}, mode)
    results, expected = by_step(played(envs)), by_step(played(faulty_lanes({}, mode)))
    for result, other in zip(results, expected, strict=True):
        for lane in (0, 2):
            assert_identical(lanes_of(result, envs)[lane], lanes_of(other, envs)[lane])
    # Until it fails, the lane is that of the other run, too; then it is truncated with what it observed last.
    number = PLACES[place][1]
    steps = [place for place, (*_, infos) in enumerate(results) if "error" in lane_info(infos, 1) or (
        "error" in lane_info(infos, 1).get("final_info", {}))]  # fmt: skip
    assert len(steps) == 1
    at = steps[0]
    for before in range(at):
        assert_identical(lanes_of(results[before], envs)[1], lanes_of(expected[before], envs)[1])
    observations, rewards, terminated, truncated, infos = results[at]
    assert (rewards[1], terminated[1], truncated[1]) == (0.0, False, True)
    before = results[at - 1][0][1] if at else None
    last = lane_info(infos, 1)["final_obs"] if mode is AutoresetMode.SAME_STEP else observations[1]
    assert at + 1 >= number
    if before is not None:
        assert_identical(np.asarray(last), before)


@in_each_mode
def test_two_lanes_may_fail_at_once_and_all_of_them_in_steps_one_after_the_other(mode):
    fault = FAULTS["raises"]
    for plans, count in (
        ({10: {("step", 2): fault}, 30: {("step", 2): fault}}, 2),
        ({seed: {("step", 2): fault} for seed in LANES}, 3),
        ({20: {("step", number): fault for number in (2, 3, 4)}}, 3),
        ({20: {("step", "all"): gives(0, None)}}, 4),
    ):
        envs = faulty_lanes(plans, mode)
        results, expected = by_step(played(envs)), by_step(played(faulty_lanes({}, mode)))
        errors = sum("error" in str(lane_info(infos, lane)) for *_, infos in results for lane in range(3))
        assert errors >= count
        for result, other in zip(results, expected, strict=True):
            for lane in set(range(3)) - {LANES.index(seed) for seed in plans}:
                assert_identical(lanes_of(result, envs)[lane], lanes_of(other, envs)[lane])


@in_each_mode
@pytest.mark.parametrize("fault", FAULTS)
def test_a_reset_that_fails_twice_is_tried_again_at_once(mode, fault):
    plans = {20: {("reset", number): FAULTS[fault] for number in (2, 3)}}
    if fault not in ("raises", "raises what is no Exception", "exits", "stops"):
        plans = {20: {key: nothing_but((None, {})) for key in plans[20]}}
    envs = faulty_lanes(plans, mode)
    results = played(envs)
    assert not envs.failed
    assert len(envs.retried) == 2
    assert not any("error" in str(infos) for *_, infos in results)
    # Its second episode began in the third attempt.
    assert 4 in {int(result[0][1][0]) for result in results}


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode.name)
def test_a_lane_whose_resets_all_fail_is_truncated_in_each_step(mode):
    envs = faulty_lanes({20: {("reset", "all"): FAULTS["raises"]}}, mode)
    results, expected = by_step(played(envs)), by_step(played(faulty_lanes({}, mode)))
    for result, other in zip(results, expected, strict=True):
        for lane in (0, 2):
            assert_identical(lanes_of(result, envs)[lane], lanes_of(other, envs)[lane])
    truncated = np.array([result[3][1] for result in results])
    first = int(np.argmax(truncated | np.array([result[2][1] for result in results])))
    assert truncated[first + 1 :].all()
    assert {tuple(result[0][1]) for result in results[first:]} == {tuple(results[first][0][1])}
    assert all("Fault in reset: on purpose" in str(lane_info(result[-1], 1)) for result in results[first + 1 :])


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode.name)
def test_where_no_lane_can_begin_the_call_raises(mode):
    # Nobody's episode is lost by it, and a client then looks for another server.
    class Spoilt(CountingEnv):
        spoilt = False

        def reset(self, **keywords):
            if self.spoilt:
                raise Fault("no such map")
            return super().reset(**keywords)

    envs = with_lanes_of_ours(SyncVectorEnv([lambda: Spoilt(2)] * 2, autoreset_mode=mode), None)
    envs.reset()
    Spoilt.spoilt = True
    for _ in range(2):
        ended = envs.step(np.zeros(2, np.int64))[2]
    assert ended.all()
    with pytest.raises(RequestError, match="Fault in reset: no such map"):
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(RequestError, match="Fault in reset: no such map"):
        envs.reset()
    Spoilt.spoilt = False
    assert envs.reset()[0].tolist() == [[2, 0], [2, 0]]
    assert envs.step(np.zeros(2, np.int64))[0].tolist() == [[2, 1], [2, 1]]
    envs.close()


def test_in_the_mode_same_step_no_transition_leads_from_an_episode_to_the_next_one():
    plans = {20: {("reset", number): FAULTS["raises"] for number in (2, 3, 4)}}
    envs = faulty_lanes(plans, AutoresetMode.SAME_STEP)
    results = by_step(played(envs))
    told = [(lane_info(infos, 1), bool(ends[1] or cut[1])) for _, _, ends, cut, infos in results]
    (at,) = [place for place, (info, _) in enumerate(told) if "error" in info]
    assert told[at][1]
    assert "error" not in told[at][0]["final_info"]  # the episode ended by itself
    after, over = told[at + 1]
    assert over
    assert "Fault in reset" in after["final_info"]["error"]
    assert_identical(np.asarray(after["final_obs"]), np.asarray(told[at][0]["final_obs"]))
    assert results[at + 1][0][1][:2].tolist() == [4, 0]  # the first observation of its second episode


def test_a_lane_that_failed_in_the_mode_disabled_waits_for_its_reset():
    envs = faulty_lanes({20: {("step", 1): FAULTS["raises"]}}, AutoresetMode.DISABLED)
    envs.reset(seed=LANES)
    envs.step(np.zeros(3, np.int64))
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"but \[1\] have ended; reset them first"):
        envs.step(np.zeros(3, np.int64))
    envs.reset(options={"reset_mask": np.array([False, True, False])})
    assert envs.step(np.zeros(3, np.int64))[0][:, :2].tolist() == [[1, 2], [2, 1], [1, 2]]
    envs.close()


def test_before_its_first_observation_a_lane_cannot_fail_alone():
    envs = faulty_lanes({20: {("reset", number): FAULTS["raises"] for number in (1, 2, 3)}}, AutoresetMode.NEXT_STEP)
    with pytest.raises(Fault, match="on purpose"):
        envs.reset(seed=LANES)
    observations, _ = envs.reset(seed=LANES)
    assert observations[:, 1].tolist() == [0, 0, 0]
    envs.close()


def test_ctrl_c_is_no_failure_of_a_lane():
    envs = faulty_lanes({20: {("step", 1): raise_it(KeyboardInterrupt())}}, AutoresetMode.NEXT_STEP)
    envs.reset(seed=LANES)
    with pytest.raises(KeyboardInterrupt):
        envs.step(np.zeros(3, np.int64))
    observations, _ = envs.reset()
    assert observations[:, :2].tolist() == [[1, 0]] * 3
    envs.close()


WRONG = {
    "dict, a key missing": (spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 1, (2,))), {"a": 1}),
    "dict, a list": (spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 1, (2,))), [1, 2]),
    "dict, a leaf": (spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 1, (2,))), {"a": 1, "b": np.zeros(3)}),
    "tuple, too short": (spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,)))), (1,)),
    "discrete, an array": (spaces.Discrete(5), np.array([3])),
    "discrete, a text": (spaces.Discrete(5), "3"),
    "multi discrete": (spaces.MultiDiscrete([3, 3]), np.zeros(3, np.int64)),
    "text, a number": (spaces.Text(5), 3),
    "text, bytes": (spaces.Text(5), b"ab"),
    "sequence, an item": (spaces.Sequence(spaces.Box(0, 1, (2,))), (np.zeros(3, np.float32),)),
    "sequence, none": (spaces.Sequence(spaces.Discrete(3)), None),
    "graph": (spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)), 3),
    "one of, another index": (spaces.OneOf((spaces.Discrete(3), spaces.Text(4))), (2, 1)),
    "integers, too large": (spaces.Box(-9, 9, (2,), np.int8), np.array([1, 300])),
    "integers, fractions": (spaces.Box(0, 9, (2,), np.uint8), np.array([0.5, 1.0])),
}


@in_each_mode
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_observation_of_any_space_ends_its_lane_alone(mode, name):
    space, wrong = WRONG[name]
    envs = faulty_lanes({20: {("step", 2): gives(0, wrong)}}, mode, space)
    results, expected = by_step(played(envs)), by_step(played(faulty_lanes({}, mode, space)))
    told = lane_info(results[1][-1], 1)
    assert "observation" in str(told.get("error") or told["final_info"]["error"])
    last = list(iterate(envs.observation_space, results[0][0]))[1]
    now = list(iterate(envs.observation_space, results[1][0]))[1]
    assert_identical(told["final_obs"] if mode is AutoresetMode.SAME_STEP else now, last)
    for result, other in zip(results, expected, strict=True):
        for lane in (0, 2):
            assert_identical(lanes_of(result, envs)[lane], lanes_of(other, envs)[lane])


@in_each_mode
@pytest.mark.parametrize(
    ("space", "given"),
    [
        (spaces.Box(0, 255, (2,), np.uint8), np.array([1, 255])),
        (spaces.Box(0, 255, (2,), np.uint8), [3, 4]),
        (spaces.Discrete(5), 3.0),
        (spaces.Dict(a=spaces.Box(0, 255, (2,), np.uint8), b=spaces.Text(4)), {"a": np.array([1, 2]), "b": "x"}),
        (spaces.Dict(a=spaces.Box(0, 255, (2,), np.uint8)), {"a": np.array([1, 2])}),
        (spaces.MultiBinary(2), np.array([True, False])),
    ],
    ids=str,
)
def test_an_observation_of_another_dtype_is_converted_where_nothing_is_lost(mode, space, given):
    # As of a single environment. NumPy does not write int64 into uint8 by itself.
    envs = faulty_lanes({20: {("step", 2): gives(0, given)}, 30: {("reset", 1): gives(0, given)}}, mode, space)
    results = played(envs)
    assert not any("error" in str(infos) for *_, infos in results)
    rows = list(iterate(envs.observation_space, by_step(results)[1][0]))
    first = list(iterate(envs.observation_space, results[0][0]))
    for row in (rows[1], first[2]):
        for mine, theirs in zip(*(part.values() if isinstance(part, dict) else [part] for part in (row, given)),
                                strict=True):  # fmt: skip
            assert np.array_equal(mine, theirs)


class OneNumber(Objectives):
    """Its reward is a number in place of the two that it promises."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, 1.0, *rest


def test_a_wrong_array_reward_ends_its_lane_alone():
    envs = with_lanes_of_ours(SyncVectorEnv([Objectives, OneNumber]), Objectives.reward_space)
    envs.reset()
    _, rewards, _, truncated, infos = envs.step(np.zeros(2, np.int64))
    assert (rewards.tolist(), truncated.tolist()) == ([[1, -1], [0, 0]], [False, True])
    assert "the environment's reward is not of its reward_space" in infos["error"][1]
    envs.close()


def test_a_number_in_place_of_an_array_reward_is_an_error_of_a_single_environment_too():
    with serve_gym(OneNumber) as server, make_remote(server.url) as env:
        env.reset()
        with pytest.raises(EnvironmentFailedError, match="the environment's reward is not of its reward_space"):
            env.step(0)


@pytest.mark.parametrize("info", [None, OrderedDict(a=1), types.MappingProxyType({"a": 1}), {}], ids=repr)
def test_an_info_may_be_none_or_any_mapping(info):
    envs = faulty_lanes({20: {("step", 1): gives(-1, info)}}, AutoresetMode.NEXT_STEP)
    results = played(envs)
    assert not any("error" in infos for *_, infos in results)
    assert lane_info(results[1][-1], 1) == dict(info or {})


def test_an_info_that_contains_itself_is_no_failure():
    info = {"a": 1}
    info["self"] = info
    envs = faulty_lanes({20: {("step", 1): gives(-1, info)}}, AutoresetMode.NEXT_STEP)
    envs.reset(seed=LANES)
    _, infos = envs.step_lanes(np.zeros(3, np.int64))[3:]
    assert infos[1]["a"] == 1
    assert not envs.failed
    envs.close()


# Failures: beside separate worlds


def remote_play(plans, mode, *, lanes, steps=14, space=None, serve=None, **keywords):
    """What each call of BlockingReset gave; three worlds, or a world of three lanes."""
    number = {"num_envs": 3} if lanes else {}
    with serve_gym(lambda: Faulty(plans, space), **number, **(serve or {})) as server:
        envs = make_vec_remote(
            server.url, num_envs=None if lanes else 3, blocking=True, autoreset_mode=mode, timeout=30, **keywords
        )
        try:
            return plain([envs.reset(seed=LANES), *stepped(envs, mode, steps)])
        finally:
            envs.close()


def stepped(envs, mode, steps):
    found, ended = [], np.zeros(3, np.bool_)
    for step in range(steps):
        try:
            if mode is AutoresetMode.DISABLED and ended.any():
                found.append(envs.reset(options={"reset_mask": ended}))
            found.append(envs.step(np.full(3, step % 4)))
            ended = found[-1][2] | found[-1][3]
        except (EnvironmentFailedError, ResetNeededError) as error:
            found.append(str(error).partition("\n")[0])
    return found


def plain(value):
    """Comparable: without addresses, tracebacks, and the order of keys."""
    if isinstance(value, str):
        return re.sub(r"grpc://[\d.:]+", "URL", value.partition("\n")[0])
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return plain(value.tolist()) if isinstance(value, np.ndarray) and value.dtype == object else value


@in_each_mode
@pytest.mark.parametrize("fault", sampled([*FAULTS, *list(OF_STEPS)[:9]], 3))
@pytest.mark.parametrize("place", sampled(PLACES, 3, 1))
def test_a_lane_that_fails_is_told_as_a_world_of_its_own(mode, place, fault, recwarn):
    plans = {20: {PLACES[place]: {**FAULTS, **OF_STEPS}[fault]}}
    assert_identical(remote_play(plans, mode, lanes=True), remote_play(plans, mode, lanes=False))


@in_each_mode
@pytest.mark.parametrize(
    "plans",
    sampled(
        [
            {10: {("step", 3): FAULTS["raises"]}, 20: {("step", 3): OF_STEPS["no reward"]}},
            {seed: {("step", 4): FAULTS["exits"]} for seed in LANES},
            {20: {("step", number): FAULTS["raises"] for number in (2, 3, 4, 5)}},
            {20: {("reset", 2): FAULTS["raises"]}},
            {20: {("reset", number): FAULTS["raises"] for number in (2, 3)}, 10: {("reset", 2): FAULTS["nothing"]}},
        ],
        2,
        slow=True,
    ),
    ids=["two", "all", "in steps one after the other", "a reset", "two attempts"],
)
def test_lanes_that_fail_are_told_as_worlds_of_their_own(mode, plans):
    assert_identical(remote_play(plans, mode, lanes=True), remote_play(plans, mode, lanes=False))


@pytest.mark.parametrize(
    "plans",
    [
        {},
        {20: {("step", 3): FAULTS["raises"]}, 30: {("step", 3): OF_STEPS["two flags"]}},
        {20: {("step", 3): FAULTS["no observation"], ("reset", 3): FAULTS["nothing"]}},
        {seed: {("step", 4): FAULTS["exits"]} for seed in LANES},
    ],
    ids=["none", "two", "a step and a reset", "all"],
)
def test_served_lanes_that_begin_anew_in_the_same_step_are_told_as_worlds_too(plans, recwarn):
    def make():
        return SyncVectorEnv([lambda: Faulty(plans)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)

    with serve_gym(make) as server:
        envs = make_vec_remote(server.url, blocking=True, autoreset_mode="SameStep", timeout=30)
        with contextlib.closing(envs):
            found = plain([envs.reset(seed=LANES), *stepped(envs, AutoresetMode.SAME_STEP, 14)])
    assert_identical(found, remote_play(plans, AutoresetMode.SAME_STEP, lanes=False))


@pytest.mark.parametrize("name", sampled(WRONG, 4))
def test_a_wrong_observation_is_told_as_of_a_world_of_its_own(name, recwarn):
    space, wrong = WRONG[name]
    plans = {20: {("step", 2): gives(0, wrong)}}
    mode = AutoresetMode.NEXT_STEP
    assert_identical(
        remote_play(plans, mode, lanes=True, space=space), remote_play(plans, mode, lanes=False, space=space)
    )
