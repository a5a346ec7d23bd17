"""Environments that hold their one generator in odd places, for the tests of branches with seeds."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
import types
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.states_envs import Walk


class Draws(Walk):
    """Draws by `noise` alone: a branch whose generator was missed would go on as the other ones."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x = np.zeros(3)
        return self.x.copy(), {"t": 0}


class InList(Draws):
    def make(self) -> None:
        self.all = [1, [np.random.default_rng(5)]]

    def noise(self) -> float:
        return float(self.all[1][0].normal())  # type: ignore[index]


class InDict(Draws):
    def make(self) -> None:
        self.all = {"goal": {3: np.random.RandomState(5)}}

    def noise(self) -> float:
        return float(self.all["goal"][3].normal())


class AsKey(Draws):
    def make(self) -> None:
        self.all = {random.Random(5): "luck"}

    def noise(self) -> float:
        return next(iter(self.all)).gauss(0, 1)


class InTuple(Draws):
    def make(self) -> None:
        self.all = (np.random.Generator(np.random.MT19937(5)), collections.deque([1]))

    def noise(self) -> float:
        return float(self.all[0].normal())


class InDeque(Draws):
    def make(self) -> None:
        self.all: Any = collections.deque([random.Random(5)])

    def noise(self) -> float:
        return self.all[0].gauss(0, 1)  # type: ignore[no-any-return]


class InDefault(Draws):
    def make(self) -> None:
        self.all: Any = collections.defaultdict(list)
        self.all["a"].append(np.random.default_rng(5))

    def noise(self) -> float:
        return float(self.all["a"][0].normal())


class InArray(Draws):
    def make(self) -> None:
        self.all = np.array([None, np.random.default_rng(5)], dtype=object)

    def noise(self) -> float:
        return float(self.all[1].normal())


class InNamespace(Draws):
    def make(self) -> None:
        self.all = types.SimpleNamespace(rng=np.random.default_rng(5))

    def noise(self) -> float:
        return float(self.all.rng.normal())


@dataclasses.dataclass
class Dice:
    rng: Any
    rolled: int = 0

    def roll(self) -> float:
        self.rolled += 1
        return float(self.rng.normal())


class Slotted:
    __slots__ = ("__dice",)

    def __init__(self, dice: Dice) -> None:
        self.__dice = dice

    def roll(self) -> float:
        return self.__dice.roll()


class InNested(Draws):
    def make(self) -> None:
        self.world = [Slotted(Dice(np.random.RandomState(5)))]

    def noise(self) -> float:
        return self.world[0].roll()


class InMethod(Draws):
    def make(self) -> None:
        self.roll = Dice(np.random.default_rng(5)).roll

    def noise(self) -> float:
        return self.roll()


class InPartial(Draws):
    def make(self) -> None:
        self.roll = functools.partial(Dice.roll, Dice(np.random.default_rng(5)))

    def noise(self) -> float:
        return self.roll()


class OfBits(Draws):
    def make(self) -> None:
        self.bits = np.random.PCG64(5)

    def noise(self) -> float:
        return float(self.bits.random_raw() % 1000) * 0.001


class TwoOfBits(Draws):
    def make(self) -> None:
        bits = np.random.Philox(5)
        self.first, self.second = {"a": np.random.Generator(bits)}, [np.random.Generator(bits)]

    def noise(self) -> float:
        return float(self.second[0].normal() + self.first["a"].normal())


class OldOfBits(Draws):
    def make(self) -> None:
        self.old = np.random.RandomState(np.random.PCG64(5))

    def noise(self) -> float:
        return float(self.old.normal())


class SharedOldBits(Draws):
    def make(self) -> None:
        bits = np.random.MT19937(5)
        self.old, self.new = np.random.RandomState(bits), np.random.Generator(bits)

    def noise(self) -> float:
        return float(self.old.normal() + self.new.normal())


class OwnSpace(Draws):
    def make(self) -> None:
        self.goals = spaces.Dict(
            {"a": spaces.Tuple((spaces.Discrete(9), spaces.Box(-1, 1, (2,)))), "b": spaces.Text(3)}
        )
        self.goals.seed(5)

    def noise(self) -> float:
        return float(self.goals.sample()["a"][1][0])


class ActionSpace(Draws):
    def make(self) -> None:
        self.action_space = spaces.Discrete(3, seed=5)
        self.drawn = spaces.Box(-1, 1, (1,), np.float64, seed=6)

    def noise(self) -> float:
        return float(self.drawn.sample()[0])


class InSet(Draws):
    def make(self) -> None:
        self.all = {random.Random(5)}

    def noise(self) -> float:
        return next(iter(self.all)).gauss(0, 1)


class InClosure(Draws):
    def make(self) -> None:
        rng = np.random.default_rng(5)
        self.roll = lambda: float(rng.normal())

    def noise(self) -> float:
        return self.roll()


class InDefaultArgument(Draws):
    def make(self) -> None:
        def roll(rng: Any = np.random.default_rng(5)) -> float:  # noqa: B008 - which is what is tested
            return float(rng.normal())

        self.roll = roll

    def noise(self) -> float:
        return self.roll()


class BoundMethod(Draws):
    def make(self) -> None:
        self.normal = np.random.default_rng(5).normal

    def noise(self) -> float:
        return float(self.normal())


class BoundOfPython(Draws):
    def make(self) -> None:
        self.normal = random.Random(5).gauss

    def noise(self) -> float:
        return self.normal(0, 1)


class OwnRandom(random.Random):
    """A generator of a class of its own."""


class OfOwnClass(Draws):
    def make(self) -> None:
        self.rng = OwnRandom(5)

    def noise(self) -> float:
        return self.rng.gauss(0, 1)


class InIterator(Draws):
    def make(self) -> None:
        self.roll = iter(functools.partial(np.random.default_rng(5).normal), None)

    def noise(self) -> float:
        return float(next(self.roll))


class InMap(Draws):
    def make(self) -> None:
        self.roll = map(np.random.default_rng(5).normal, itertools.repeat(0.0))

    def noise(self) -> float:
        return float(next(self.roll))


def rolls() -> Iterator[float]:
    rng = random.Random(5)
    while True:
        yield rng.gauss(0, 1)


class InGenerator(Draws):
    def make(self) -> None:
        self.roll = rolls()

    def noise(self) -> float:
        return next(self.roll)


class OfClassInList(Draws):
    all = [np.random.default_rng(5)]  # noqa: RUF012 - shared by all objects, which is what is tested

    def noise(self) -> float:
        return float(self.all[0].normal())


class Noisy(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Adds noise of its own generator, which it holds in a list."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.rngs = [random.Random(7)]

    def observation(self, observation: Any) -> Any:
        return observation + self.rngs[0].gauss(0, 1)


class Still(Draws):
    def noise(self) -> float:
        return 0.0


def of_wrapper() -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.TimeLimit(Noisy(Still()), 77)


class LateGenerator(Draws):
    """Makes its generator anew in each reset, of one that it has."""

    def make(self) -> None:
        self.first = np.random.default_rng(5)

    def begin(self) -> None:
        self.children = {"a": self.first.spawn(1)}

    def noise(self) -> float:
        return float(self.children["a"][0].normal())


class Spawning(Draws):
    """Draws from children of its generator, by which alone they differ."""

    def make(self) -> None:
        self.first = np.random.default_rng(5)

    def noise(self) -> float:
        return float(self.first.spawn(1)[0].normal())


class OfSequence(Draws):
    """Makes generators of a seed sequence."""

    def make(self) -> None:
        self.sequence = np.random.SeedSequence(5)

    def noise(self) -> float:
        return float(np.random.default_rng(self.sequence.spawn(1)[0]).normal())


class Replayed(Draws):
    """Holds what cannot be copied, and makes it anew in each reset."""

    def begin(self) -> None:
        self.numbers = iter([float(n) for n in range(300)])

    def act(self, action: int) -> None:
        self.x = self.x + next(self.numbers)


class ReplayedSpawning(Replayed, Spawning):
    """Draws from children of its generator, and is replayed."""


class ReplayedSequence(Replayed, OfSequence):
    """Has a seed sequence where it cannot be seeded anew."""


class Held(Replayed):
    """Holds its generator in something of a library, and makes it anew in each reset from its own generator."""

    def holder(self, generator: np.random.Generator) -> Any:
        raise NotImplementedError

    def begin(self) -> None:
        super().begin()
        self.held = self.holder(np.random.default_rng(int(self.np_random.integers(99))))

    def noise(self) -> float:
        return float(self.held["own"].normal())


class InProxy(Held):
    def holder(self, generator: np.random.Generator) -> Any:
        return types.MappingProxyType({"own": generator})


class InUserDict(Held):
    def holder(self, generator: np.random.Generator) -> Any:
        return collections.UserDict({"own": generator})


class InChainMap(Held):
    def holder(self, generator: np.random.Generator) -> Any:
        return collections.ChainMap({}, {"own": generator})


class InVectorize(Held):
    def holder(self, generator: np.random.Generator) -> Any:
        return np.vectorize(lambda scale: generator.normal(0, scale))

    def noise(self) -> float:
        return float(self.held(1.0))


class InCached(Held):
    def holder(self, generator: np.random.Generator) -> Any:
        return functools.lru_cache(1)(lambda number: generator.normal())

    def noise(self) -> float:
        return float(self.held(self.x[0]))


class TaskInList(Draws):
    """Holds an environment of Box2D, which is replayed, in a list."""

    def make(self) -> None:
        self.tasks = [gymnasium.make("LunarLander-v3")]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        found = super().reset(seed=seed)
        self.tasks[0].reset(seed=int(self.np_random.integers(99)))
        return found

    def noise(self) -> float:
        return float(self.tasks[0].step(2)[0][2])


SEEDED = [
    *(InList, InDict, AsKey, InTuple, InDeque, InDefault, InArray, InNamespace, InNested, InMethod, InPartial, OfBits),
    *(TwoOfBits, OldOfBits, SharedOldBits, OwnSpace, ActionSpace, of_wrapper, LateGenerator, Spawning, OfSequence),
    *(ReplayedSpawning, InClosure, BoundMethod, BoundOfPython, InIterator, InMap, InGenerator),
    *(InProxy, InUserDict, InChainMap, InVectorize, InCached, TaskInList),
]
UNSAVED = [InSet, InDefaultArgument, OfOwnClass, OfClassInList]
