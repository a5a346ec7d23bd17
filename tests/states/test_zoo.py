"""Well-known environments, bare and wrapped: saved at the start, in the middle and one step before the end."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, RecordEpisodeStatistics

from bridge import make_remote, make_vec_remote, serve_gym
from tests.support import TAXI, assert_identical, sampled

DEADLINE = 120.0
LIMIT = 50
STEPS = 100
NAMES = {
    "gymnasium": [
        *("CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "Acrobot-v1"),
        *("FrozenLake-v1", TAXI, "CliffWalking-v1", "Blackjack-v1"),
    ],
    "minigrid": ["MiniGrid-DoorKey-5x5-v0", "MiniGrid-Dynamic-Obstacles-6x6-v0"],
    "Box2D": ["LunarLander-v3", "BipedalWalker-v3"],
    "mujoco": ["Hopper-v5", "Ant-v5", "Humanoid-v5"],
    "ale_py": ["ALE/Pong-v5", "ALE/MsPacman-v5", "ALE/Breakout-v5"],
}
"""Names of environments, by the package that each needs."""


def bare(package: str, name: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """An environment under a TimeLimit; games of ALE have sticky actions, and the ice is slippery, by default."""
    if package in ("minigrid", "ale_py"):
        importlib.import_module(package)
    env: gymnasium.Env[Any, Any] = gymnasium.make(name, max_episode_steps=LIMIT, **kwargs)
    if package == "minigrid":
        return importlib.import_module("minigrid.wrappers").ImgObsWrapper(env)  # type: ignore[no-any-return]
    return env


def wrapped(package: str, name: str) -> gymnasium.Env[Any, Any]:
    """The same under wrappers that have states of their own, some of which last beyond an episode."""
    env: Any = FrameStackObservation(bare(package, name, **({"obs_type": "ram"} if package == "ale_py" else {})), 4)
    env = RecordEpisodeStatistics(env)
    return env if env.observation_space.shape is None else NormalizeObservation(env)


class OfClass(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that a class has made, so that nobody but the server may hold it.

    BipedalWalker needs that: it has objects of C that a reset leaves, so it cannot be replayed in place.
    """

    def __init__(self, make: Callable[..., Any], package: str, name: str) -> None:
        super().__init__(make(package, name))


MAKERS = [
    functools.partial(*((OfClass, make) if name == "BipedalWalker-v3" else (make,)), package, name)
    for package, names in NAMES.items()
    for name in names
    for make in (bare, wrapped)
]


def title_of(make: functools.partial[Any] | str) -> str:
    """The id of a parameter."""
    if isinstance(make, str):
        return make
    kind = next(one for one in (bare, wrapped) if one in (make.func, *make.args))
    return f"{kind.__name__} {make.args[-1]}"


def timeless(info: Any) -> Any:
    """An info without the time that an episode took."""
    if isinstance(info.get("episode"), dict):
        info = {**info, "episode": {key: value for key, value in info["episode"].items() if key != "t"}}
    return info


class Single:
    """One environment; an episode that ends is followed by another one at once."""

    def __init__(self, url: str) -> None:
        self.env = make_remote(url, states=True, timeout=DEADLINE)
        self.space = self.env.action_space

    def reset(self) -> None:
        self.env.reset(seed=3)

    def step(self, action: Any) -> tuple[Any, bool]:
        """What a step gives, and True where it ends the episode."""
        *parts, info = self.env.step(action)
        ended = bool(parts[2] or parts[3])
        return [parts, timeless(info), *(self.env.reset() if ended else ())], ended

    def save(self) -> Any:
        return self.env.save_state()

    def branches(self, state: Any, actions: list[Any]) -> list[list[Any]]:
        """What branches of a state give."""
        self.env.restore_state(state)
        return [[self.step(action)[0] for action in actions]]


class Lanes:
    """The first of three lanes; the others do something else."""

    def __init__(self, url: str) -> None:
        self.env = make_vec_remote(url, num_envs=3, lanes=True, blocking=True, states=True, timeout=DEADLINE)
        self.space, self.beside = self.env.single_action_space, self.env.action_space
        self.beside.seed(2)

    def reset(self) -> None:
        self.env.reset(seed=3)

    def _step(self, action: Any, lanes: list[int]) -> list[Any]:
        actions = self.beside.sample()
        actions[lanes] = action
        *parts, _ = self.env.step(actions)
        return [[row(part, lane) for part in parts] for lane in lanes]

    def step(self, action: Any) -> tuple[Any, bool]:
        (found,) = self._step(action, [0])
        return found, bool(found[2] or found[3])

    def save(self) -> Any:
        return self.env.save_state(slots=[0])[0]

    def branches(self, state: Any, actions: list[Any]) -> list[list[Any]]:
        """What another lane gives while the first one goes on elsewhere, and then all of them."""
        self.env.restore_state(state, slots=[1])
        other = [self._step(action, [1])[0] for action in actions]
        self.env.restore_state(state)
        return [other, *map(list, zip(*(self._step(action, [0, 1, 2]) for action in actions), strict=True))]


def row(value: Any, lane: int) -> Any:
    """The part of a lane in a batch."""
    return tuple(row(item, lane) for item in value) if isinstance(value, tuple) else np.array(value[lane])


PLACES = ["single", "lanes", "isolated"]


@pytest.mark.parametrize(
    ("make", "place"), sampled(itertools.product(MAKERS, PLACES), len(MAKERS) * len(PLACES), slow=37), ids=title_of
)
def test_it_goes_on_bit_for_bit_from_each_part_of_an_episode(make: functools.partial[Any], place: str) -> None:
    pytest.importorskip(make.args[-2])
    given: dict[str, Any] = {"num_envs": 3} if place == "lanes" else {}
    if place == "isolated":
        given = {"isolation": "process"}
    with serve_gym(make, **given) as server:
        played = (Lanes if place == "lanes" else Single)(server.url)
        with closing(played.env):
            played.space.seed(1)
            actions = [played.space.sample() for _ in range(LIMIT + STEPS)]
            played.reset()
            length = next(number for number, action in enumerate(actions, 1) if played.step(action)[1])
            moments = {0, length // 2, length - 1}
            played.reset()
            states, told = {}, []
            for number in range(length + STEPS):
                if number in moments:
                    states[number] = played.save()
                told.append(played.step(actions[number])[0])
            for number, state in states.items():
                for branch in played.branches(state, actions[number : number + STEPS]):
                    assert_identical(branch, told[number : number + STEPS])
