"""`bridge.states.graph`: all that an environment is, put back into another one of its kind, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, RecordEpisodeStatistics, TimeLimit

from bridge.states.graph import restore, take
from tests.states_envs import Walk
from tests.support import TAXI, assert_identical, chosen, minigrid, pong, stable_id

STEPS = 100


def wrapped() -> gymnasium.Env[Any, Any]:
    """CartPole under wrappers that have states of their own."""
    env: Any = TimeLimit(gymnasium.make("CartPole-v1"), 30)
    return NormalizeObservation(RecordEpisodeStatistics(FrameStackObservation(env, 4)))


def atari(game: str) -> Callable[..., gymnasium.Env[Any, Any]]:
    def make(**kwargs: Any) -> gymnasium.Env[Any, Any]:
        pytest.importorskip("ale_py")
        pong().close()  # registers the games
        return gymnasium.make(f"ALE/{game}-v5", **kwargs)

    make.__name__ = game
    return make


def drawn() -> gymnasium.Env[Any, Any]:
    pytest.importorskip("pygame")
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    env.reset(seed=0)
    env.render()
    return env


KINDS = ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", TAXI, "Blackjack-v1", wrapped, drawn, minigrid, atari("Pong"),
         atari("MsPacman"), atari("Breakout"), "Hopper-v5", "Ant-v5", "Humanoid-v5"]  # fmt: skip


def made(kind: Any) -> gymnasium.Env[Any, Any]:
    if isinstance(kind, str):
        if "-v5" in kind:
            pytest.importorskip("mujoco")
        return gymnasium.make(kind)
    return kind()  # type: ignore[no-any-return]


def timeless(result: Any) -> Any:
    """A result without the time that an episode took."""
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


@pytest.mark.parametrize(
    ("kind", "moment"),
    chosen(itertools.product(KINDS, [17, 0]), lambda kind, moment: kind is KINDS[0] or moment == 17),
    ids=stable_id,
)
def test_a_copy_goes_on_bit_for_bit_beside_its_original(kind: Any, moment: int) -> None:
    with closing(made(kind)) as env, closing(made(kind)) as other:
        env.reset(seed=3)
        other.reset(seed=4)
        env.action_space.seed(5)
        played(env, [env.action_space.sample() for _ in range(moment)])
        played(other, [env.action_space.sample() for _ in range(5)])
        actions = [env.action_space.sample() for _ in range(STEPS)]
        snapshot, _ = take(env)
        wanted = played(env, actions)
        restore(snapshot, other)
        restore(snapshot, env)
        mine, theirs = [], []
        for action in actions:  # in turns: neither moves the other
            mine += played(env, [action])
            theirs += played(other, [action])
        assert_identical(mine, wanted)
        assert_identical(theirs, wanted)


@pytest.mark.parametrize("game", ["Pong", "Breakout"])
@pytest.mark.slow
def test_sticky_actions_repeat_what_they_would_have_repeated(game: str) -> None:
    # A quarter of all states repeats an action in the next frame that `cloneState` does not have.
    make = atari(game)
    with closing(make()) as env, closing(make()) as other:
        env.reset(seed=1)
        other.reset(seed=2)
        draws = np.random.default_rng(0)
        for _ in range(60):
            for each in (env, other):
                played(each, draws.integers(env.action_space.n, size=draws.integers(1, 4)).tolist())
            snapshot, _ = take(env)
            actions = draws.integers(env.action_space.n, size=3).tolist()
            restore(snapshot, other)
            wanted = played(env, actions)
            assert_identical(played(other, actions), wanted)


def test_a_model_that_was_changed_is_a_part_of_the_state() -> None:
    pytest.importorskip("mujoco")
    with closing(made("Hopper-v5")) as env, closing(made("Hopper-v5")) as other:
        env.reset(seed=0)
        other.reset(seed=1)
        model = env.unwrapped.model
        model.body_mass[1] *= 2
        model.opt.gravity[2] = -5
        snapshot, _ = take(env)
        actions = [env.action_space.sample() for _ in range(20)]
        wanted = played(env, actions)
        restore(snapshot, other)
        assert_identical(played(other, actions), wanted)


def test_the_generators_of_a_branch_are_those_of_a_reset_with_its_seed() -> None:
    env = Walk()
    env.reset(seed=0)
    snapshot, _ = take(env)
    restore(snapshot, env, seed=7)
    assert env.np_random_seed == 7
    assert env.np_random.normal() == np.random.default_rng(7).normal()


class Aliased(Walk):
    """Knows its generator by another name, too, and by that one first."""

    def make(self) -> None:
        self.rng: np.random.Generator | None = None

    def begin(self) -> None:
        self.rng = self.np_random


def test_the_generator_of_a_reset_may_have_another_name_too() -> None:
    env = Aliased()
    env.reset(seed=0)
    snapshot, _ = take(env)
    restore(snapshot, env, seed=7)
    assert env.rng is env.np_random
    assert env.np_random.normal() == np.random.default_rng(7).normal()
