"""`bridge.testing.envs`: tests stand on these environments, so they must hold themselves."""

import copy
import subprocess
import sys
import threading
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from bridge.errors import ResetNeededError, SettingError
from bridge.testing import EVERY_SPACE, CountingEnv, FailingEnv, SlowResetEnv, SpaceEnv, TestFailure, digest, make_info
from tests.support import sampled

# Gymnasium's own checker refuses these at the door.
REFUSED_BY_CHECK_ENV = {"dict_empty", "tuple_empty", "tuple_of_empty_ones"}
# What it warns of is what these spaces are for.
ADVICE = (
    "symmetric and normalized space|is probably too|maximum and minimum values are equal|should be an int or np.int64"
    "|is not of type|Casting input x to numpy array"
)
every_space = pytest.mark.parametrize("name", EVERY_SPACE)


def play(env, seed, steps=40):
    """A trajectory over several episodes as digests and plain values; the actions come from a seeded space."""
    actions = copy.deepcopy(env.action_space)
    actions.seed(seed)
    observation, info = env.reset(seed=seed)
    out = [(digest(observation), repr(info))]
    for _ in range(steps):
        observation, reward, terminated, truncated, info = env.step(actions.sample())
        assert env.observation_space.contains(observation)
        out.append((digest(observation), reward, terminated, truncated, repr(info)))
        if terminated or truncated:
            observation, info = env.reset()
            out.append((digest(observation), repr(info)))
    return out


@every_space
@pytest.mark.parametrize("role", ["observation", "action"])
def test_every_space_passes_the_checker_of_gymnasium(name, role):
    if name in REFUSED_BY_CHECK_ENV:
        pytest.skip("Gymnasium's check_env refuses empty composites")
    space = EVERY_SPACE[name]()
    env = SpaceEnv(space, None) if role == "observation" else SpaceEnv(None, space)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"(?s).*({ADVICE})")
        check_env(env, skip_render_check=True)


@pytest.mark.parametrize("name", sampled(EVERY_SPACE, 8, slow=4))
def test_the_same_seed_gives_the_same_trajectory_and_another_seed_another(name):
    space = EVERY_SPACE[name]
    first = play(SpaceEnv(space(), space()), seed=3)
    assert play(SpaceEnv(space(), space()), seed=3) == first
    assert play(SpaceEnv(space(), space()), seed=4) != first


def test_sampling_the_public_space_does_not_disturb_the_trajectory():
    env = SpaceEnv(spaces.Box(-1, 1, shape=(2,)), None)
    first = play(env, seed=1)
    env.observation_space.sample()
    env.reset(seed=1)
    env.observation_space.seed(9)
    assert play(env, seed=1) == first


@pytest.mark.slow
def test_trajectories_are_the_same_in_another_process_with_another_hash_seed():
    program = (
        "from bridge.testing import EVERY_SPACE, SpaceEnv, digest\n"
        "for make in EVERY_SPACE.values():\n"
        "    env = SpaceEnv(make(), make())\n"
        "    env.action_space.seed(5)\n"
        "    first = env.reset(seed=5)[0]\n"
        "    print(digest(first), env.step(env.action_space.sample())[1])\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == len(EVERY_SPACE)


def test_episodes_end_both_by_termination_and_by_truncation_and_never_by_both():
    env = SpaceEnv(min_steps=1, max_steps=4)
    ends = []
    env.reset(seed=0)
    lengths, steps = set(), 0
    for _ in range(200):
        _, _, terminated, truncated, _ = env.step(0)
        steps += 1
        if terminated or truncated:
            ends.append((terminated, truncated))
            lengths.add(steps)
            steps = 0
            env.reset()
    assert set(ends) == {(True, False), (False, True)}
    assert lengths == {1, 2, 3, 4}


def test_the_reward_tells_actions_apart_by_value_dtype_and_shape():
    assert digest(np.zeros(2, np.float32)) != digest(np.zeros(2, np.float64))
    assert digest(np.zeros(2, np.int8)) != digest(np.zeros((1, 2), np.int8))
    assert digest(np.array([1, 2])) != digest(np.array([2, 1]))
    assert digest((1, 2)) != digest([1, 2])
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})
    assert digest(1) == digest(np.int64(1)) != digest(1.0) != digest(True)
    assert digest(np.array([1.0], ">f8")) == digest(np.array([1.0], "<f8"))
    with pytest.raises(TypeError, match="object"):
        digest(object())
    rewards = []
    for action in (0, 1, 1):
        env = SpaceEnv()
        env.reset(seed=0)
        rewards.append(env.step(action)[1])
    assert rewards[0] != rewards[1] == rewards[2]


def test_infos_hold_every_kind_of_value_and_fresh_objects():
    env = SpaceEnv()
    _, info = env.reset(seed=0)
    kinds = {type(value) for value in info.values()}
    assert {int, float, str, bytes, bool, type(None), list, tuple, dict, np.ndarray} <= kinds
    assert {np.float16, np.int8, np.uint64, np.bool_} <= kinds
    assert {"int8", "uint16", "float32", "float64"} <= {
        v.dtype.name for v in info.values() if isinstance(v, np.ndarray)
    }
    assert np.isnan(info["not_finite"][0])
    assert info["not_finite"][1:] == [np.inf, -np.inf]
    again = make_info(np.random.default_rng(0), 0)
    other = make_info(np.random.default_rng(0), 0)
    assert repr(again) == repr(other)
    assert not any(again[k] is other[k] for k in again if isinstance(again[k], (list, dict, np.ndarray)))
    assert env.reset(options={"a": [1]})[1]["options"] == {"a": [1]}
    assert SpaceEnv(infos=False).reset(seed=0)[1] == {}


def test_misuse_of_a_space_env_is_an_error():
    env = SpaceEnv(max_steps=3)
    with pytest.raises(ResetNeededError, match="reset"):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(gymnasium.error.InvalidAction, match="Discrete"):
        env.step(7)
    nested = SpaceEnv(None, EVERY_SPACE["mixed"]())
    nested.reset(seed=0)
    for wrong in ({}, 3, None, (), {"camera": 1}):
        with pytest.raises(gymnasium.error.InvalidAction, match="camera"):
            nested.step(wrong)
    for _ in range(3):
        env.step(0)
    with pytest.raises(ResetNeededError, match="reset"):
        env.step(0)
    with pytest.raises(SettingError, match="min_steps"):
        SpaceEnv(min_steps=4, max_steps=3)


def test_every_space_covers_every_class_and_every_box_dtype():
    def walk(space):
        yield space
        for part in getattr(space, "spaces", ()):
            yield from walk(space.spaces[part] if isinstance(space, spaces.Dict) else part)
        for name in ("feature_space", "node_space", "edge_space"):
            if getattr(space, name, None) is not None:
                yield from walk(getattr(space, name))

    seen = [space for make in EVERY_SPACE.values() for space in walk(make())]
    names = (
        "Box Discrete MultiBinary MultiDiscrete Text Dict Tuple Sequence Graph OneOf".split()  # noqa: SIM905 - readable
    )
    assert {type(space).__name__ for space in seen} == set(names)
    dtypes = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()  # noqa: SIM905
    assert {space.dtype.name for space in seen if isinstance(space, spaces.Box)} == set(dtypes)
    assert all(make() == make() and make() is not make() for make in EVERY_SPACE.values())


def test_counting_env_counts_resets_and_steps():
    env = CountingEnv(length=2, truncates=True)
    assert env.reset()[0].tolist() == [1, 0]
    assert env.step(0)[0].tolist() == [1, 1]
    observation, reward, terminated, truncated, _ = env.step(0)
    assert (observation.tolist(), reward, terminated, truncated) == ([1, 2], 2.0, False, True)
    with pytest.raises(ResetNeededError, match="reset"):
        env.step(0)
    assert env.reset()[0].tolist() == [2, 0]
    env.close()
    assert env.closed
    env = CountingEnv(length=1)
    env.reset()
    assert env.step(0)[2:4] == (True, False)


def test_failing_env_fails_once_where_it_is_told_to():
    env = FailingEnv(fail_in_reset=2, fail_in_step=2)
    env.reset()
    env.step(0)
    with pytest.raises(TestFailure, match="step 2"):
        env.step(0)
    assert env.step(0)[0].tolist() == [1, 2]
    with pytest.raises(TestFailure, match="reset 2"):
        env.reset()
    assert env.reset()[0].tolist() == [2, 0]


def test_slow_reset_env_waits_for_the_test_and_no_longer_than_its_deadline():
    release = threading.Event()
    env = SlowResetEnv(release, free_resets=1)
    assert env.reset()[0].tolist() == [1, 0]
    results = []
    thread = threading.Thread(target=lambda: results.append(env.reset()[0].tolist()))
    thread.start()
    assert env.in_reset.wait(10)
    assert results == []
    release.set()
    thread.join(10)
    assert results == [[2, 0]]
    with pytest.raises(TestFailure, match="not released"):
        SlowResetEnv(threading.Event(), deadline=0.0).reset()
