"""Environments that cannot be copied are restored by replay: right, in slices, within their bounds."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, RecordEpisodeStatistics, TimeLimit

from bridge import States, make_remote, make_vec_remote, serve_gym
from bridge.errors import Code, RefusedError
from tests.states.right_or_refused import examine_replay
from tests.states_envs import GlobalGoal, KeepsClosure, KeepsFile, KeepsIterator, KeepsLock, Walk
from tests.support import assert_identical, sampled, stable_id

DEADLINE = 120.0
STEPS = 100


def box2d(name: str) -> Callable[..., gymnasium.Env[Any, Any]]:
    def make(**kwargs: Any) -> gymnasium.Env[Any, Any]:
        pytest.importorskip("Box2D")
        return gymnasium.make(name, **kwargs)

    make.__name__ = name
    return make


def wrapped() -> gymnasium.Env[Any, Any]:
    """A lander under wrappers that have states of their own, of which a reset keeps some."""
    env: Any = TimeLimit(box2d("LunarLander-v3")(), 60)
    return NormalizeObservation(RecordEpisodeStatistics(FrameStackObservation(env, 4)))


def timeless(result: Any) -> Any:
    *rest, info = result
    if "episode" in info:
        info = {**info, "episode": {key: value for key, value in info["episode"].items() if key != "t"}}
    return (*rest, info)


def played(env: Any, actions: list[Any]) -> list[Any]:
    """What an environment gives for actions, across the ends of episodes."""
    found = []
    for action in actions:
        found.append(timeless(env.step(action)))
        if found[-1][2] or found[-1][3]:
            found.append(timeless(env.reset()))
    return found


def kept(env: Any) -> None:
    """Have the actions of an environment be kept, by a save that may be too early."""
    with contextlib.suppress(RefusedError):
        env.save_state().release()


@pytest.mark.parametrize(
    ("kind", "seed", "isolation"),
    [
        ("LunarLander-v3", 3, None),
        pytest.param("LunarLander-v3", None, "process", marks=pytest.mark.slow),
        pytest.param("BipedalWalker-v3", None, None, marks=pytest.mark.repeat),
        pytest.param(wrapped, 3, None, marks=pytest.mark.slow),
        pytest.param(wrapped, None, "process", marks=pytest.mark.repeat),
        pytest.param("BipedalWalker-v3", 3, "process", marks=pytest.mark.slow),
    ],
    ids=stable_id,
)
def test_box2d_goes_on_from_its_state_bit_for_bit(kind: Any, seed: Any, isolation: Any) -> None:
    pytest.importorskip("Box2D")
    with (
        serve_gym(kind, isolation=isolation) as server,
        closing(make_remote(server.url, states=True, timeout=DEADLINE)) as env,
    ):
        env.action_space.seed(1)
        for moment in (0, 30):
            # After episodes that were played before, with what they have left behind.
            env.reset(seed=seed)
            played(env, [env.action_space.sample() for _ in range(moment)])
            observation = env.step(env.action_space.sample())[0]
            state = env.save_state()
            assert state.how == "replay"
            actions = [env.action_space.sample() for _ in range(STEPS)]
            wanted = played(env, actions)
            for _ in range(2):
                assert_identical(env.restore_state(state)[0], observation)
                assert_identical(played(env, actions), wanted)


@pytest.mark.repeat  # `.ci/run` has the other environments of Box2D
def test_a_car_goes_on_from_its_state_bit_for_bit() -> None:
    pytest.importorskip("Box2D")
    with serve_gym("CarRacing-v3") as server, closing(make_remote(server.url, states=True, timeout=DEADLINE)) as env:
        env.reset()
        actions = [env.action_space.sample() for _ in range(STEPS)]
        played(env, actions[:20])
        state = env.save_state()
        wanted = played(env, actions)
        env.restore_state(state)
        assert_identical(played(env, actions), wanted)


@pytest.mark.slow
def test_lanes_are_branches_of_one_lander_with_their_own_seeds() -> None:
    pytest.importorskip("Box2D")
    with (
        serve_gym("LunarLander-v3") as server,
        closing(make_vec_remote(server.url, num_envs=3, lanes=True, blocking=True, timeout=DEADLINE)) as envs,
    ):
        envs.reset(seed=0)
        with pytest.raises(RefusedError, match="kept from its next reset"):
            envs.save_state(slots=[1])
        envs.reset(seed=0)
        for _ in range(10):
            envs.step(np.array([0, 2, 1]))
        (state,) = envs.save_state(slots=[1])
        envs.restore_state(state, seed=5)
        first = [envs.step(np.full(3, 2))[0] for _ in range(20)]
        assert not np.array_equal(first[-1][0], first[-1][1])
        again = envs.save_state(slots=[2])  # of a branch, which has a seed of its own
        after = [envs.step(np.full(3, 2))[0][2] for _ in range(10)]
        envs.restore_state(state, seed=5)
        assert_identical([envs.step(np.full(3, 2))[0] for _ in range(20)], first)
        envs.restore_state(again[0], slots=[2])
        assert_identical([envs.step(np.full(3, 2))[0][2] for _ in range(10)], after)


class Draws(Walk):
    """Draws from spaces and other generators that it holds; with a lock, which is new in each episode, no copy is made.

    Args:
        locked: Whether it has a lock.
    """

    def __init__(self, locked: bool) -> None:
        self.locked = locked
        super().__init__()

    def begin(self) -> None:
        seeds = [int(seed) for seed in self.np_random.integers(1 << 30, size=4)]
        self.spaces = spaces.Dict(left=spaces.Box(0, 1, ()), right=spaces.Tuple([spaces.Box(0, 1, ())]))
        self.spaces.seed(seeds[0])
        self.held = {"list": [np.random.default_rng(seeds[1])], "old": np.random.RandomState(seeds[2])}
        self.python = random.Random(seeds[3])
        self.lock = threading.Lock() if self.locked else None

    def act(self, action: int) -> None:
        drawn = self.spaces.sample()
        self.x = np.array([drawn["left"] + drawn["right"][0], self.held["list"][0].random(), self.python.random()])
        self.x += self.held["old"].rand()


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.slow
def test_whatever_draws_is_seeded_in_a_replayed_branch_as_in_a_copied_one(lanes: bool) -> None:
    found = []
    for locked in (True, False):
        with (
            serve_gym(functools.partial(Draws, locked)) as server,
            closing(make_vec_remote(server.url, num_envs=3, lanes=lanes, blocking=True, states=True)) as envs,
        ):
            envs.reset(seed=1)
            # Lane 0 has a generator more: its space is asked for an element by whoever samples of the vector.
            envs.action_space.sample()
            envs.step(np.zeros(3, np.int64))
            (state,) = envs.save_state(slots=[0])
            assert state.how == ("replay" if locked else "copy")
            rows = []
            for seed in (7, 8, 7):
                slots = range(3) if lanes else [0]
                envs.restore_state(state, slots=slots, seed=seed)
                rows.append(np.array([envs.step(np.zeros(3, np.int64))[0][: len(slots)] for _ in range(5)]))
            assert_identical(rows[0], rows[2])
            assert len(np.unique(np.concatenate([rows[0][:, :1], rows[1][:, :1]])[..., 1])) == 10
            found.append(rows)
    assert_identical(found[0], found[1])


@pytest.mark.parametrize("kind", sampled([KeepsLock, KeepsIterator, KeepsClosure], 3, slow=True), ids=stable_id)
def test_what_a_reset_does_not_renew_is_replayed_from_the_start(kind: Any) -> None:
    assert examine_replay(kind) == ""


@pytest.mark.parametrize("kind", [KeepsFile, GlobalGoal], ids=stable_id)
def test_what_reaches_beyond_the_environment_is_not_replayed(kind: Any) -> None:
    assert len(examine_replay(kind).split()) > 5


class Called(KeepsClosure):
    """Is called, and changed, from outside."""

    gain = 0.0

    def push(self, force: float) -> None:
        self.x = self.x + force + self.np_random.normal()

    def act(self, action: int) -> None:
        super().act(action)
        self.x = self.x + self.gain


@pytest.mark.slow
def test_calls_and_attributes_are_replayed_too() -> None:
    with serve_gym(Called) as server, closing(make_remote(server.url, states=True, timeout=DEADLINE)) as env:
        env.reset(seed=1)
        env.step(1)
        env.push(3.5)
        env.gain = 2.0
        env.step(2)
        state = env.save_state()
        wanted = played(env, [1, 2, 0])
        env.push(9.0)
        env.restore_state(state)
        assert_identical(played(env, [1, 2, 0]), wanted)


@pytest.mark.slow
def test_more_steps_than_max_replay_steps_are_refused_by_name() -> None:
    limits = States(max_replay_steps=20)
    with serve_gym(Fragile, states=limits) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        kept(env)
        env.reset(seed=0)
        played(env, [0] * 20)
        env.save_state()
        env.step(0)
        with pytest.raises(RefusedError, match="max_replay_steps=20") as refused:
            env.save_state()
        assert refused.value.code == Code.FAILED_PRECONDITION
        env.reset()
        env.save_state()


class Fragile(Walk):
    """Holds what cannot be copied, and makes it anew in each reset."""

    def begin(self) -> None:
        self.numbers = iter([float(n) for n in range(300)])

    def act(self, action: int) -> None:
        self.x = self.x + next(self.numbers)


@pytest.mark.slow
def test_an_environment_that_its_user_holds_is_replayed_in_place() -> None:
    held = Fragile()
    with serve_gym(lambda: held) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        kept(env)
        env.reset()
        played(env, [1, 2])
        state = env.save_state()
        wanted = played(env, [0, 1])
        env.restore_state(state)
        assert held.t == 2
        assert_identical(played(env, [0, 1]), wanted)
        assert held.t == 4


@pytest.mark.slow
def test_a_replay_that_fails_in_place_ends_the_episode_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Fragile()
    with serve_gym(lambda: held) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        kept(env)
        env.reset()
        played(env, [1, 2])
        state = env.save_state()
        with monkeypatch.context() as patched:
            patched.setattr(Fragile, "reset", lambda self, **given: (np.zeros(3), {}))
            with pytest.raises(RefusedError, match="came to something else"):
                env.restore_state(state)
        with pytest.raises(RefusedError, match="could not be replayed"):
            env.step(0)
        env.reset(seed=1)
        env.step(0)


def test_who_did_not_ask_for_states_has_no_actions_kept() -> None:
    with serve_gym("CartPole-v1") as server:
        with closing(make_remote(server.url, timeout=DEADLINE)) as env:
            env.reset(seed=0)
            env.step(0)
        with closing(make_remote(server.url, states=True, timeout=DEADLINE)) as env:
            env.reset(seed=0)
            env.step(0)
            assert env.save_state().how == "copy"
    with serve_gym("CartPole-v1", states=False) as server, pytest.raises(RefusedError, match="no message 'states'"):
        make_remote(server.url, states=True, timeout=DEADLINE)
