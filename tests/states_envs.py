"""Environments that are easy and hard to save, for the tests of states."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import tempfile
import threading
import weakref
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import EzPickle
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, RecordEpisodeStatistics, TimeLimit

GENERATOR = np.random.default_rng(0)
TABLE = {"a": [1, 2, 3]}
count = 0


class Walk(gymnasium.Env[Any, Any]):
    """Walks at random; subclasses add something of their own in `make`, `begin`, `noise` and `act`."""

    observation_space = spaces.Box(-1e6, 1e6, (3,), np.float64)
    action_space = spaces.Discrete(3)

    def __init__(self, **kwargs: Any) -> None:
        self.x, self.t = np.zeros(3), 0
        self.make()

    def make(self) -> None:
        """Make what the subclass has."""

    def begin(self) -> None:
        """Begin an episode."""

    def noise(self) -> float:
        return float(self.np_random.normal())

    def act(self, action: int) -> None:
        """Change what the subclass has."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.t = self.np_random.normal(size=3), 0
        self.begin()
        return self.x.copy(), {"t": 0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.x = self.x * 0.9 + action + 0.01 * self.noise()
        self.act(int(action))
        return self.x.copy(), float(self.x.sum()), self.t >= 200, False, {"t": self.t}


# Right


class OwnGenerator(Walk):
    def make(self) -> None:
        self.rng = np.random.default_rng(5)

    def noise(self) -> float:
        return float(self.rng.normal())


class OwnRandom(Walk):
    def make(self) -> None:
        self.rng, self.old = random.Random(5), np.random.RandomState(6)

    def noise(self) -> float:
        return self.rng.gauss(0, 1) + float(self.old.normal())


class SharedBits(Walk):
    def make(self) -> None:
        bits = np.random.PCG64(3)
        self.one, self.other = np.random.Generator(bits), np.random.Generator(bits)

    def noise(self) -> float:
        return float(self.one.normal() + self.other.normal())


class Ez(Walk, EzPickle):
    def __init__(self, **kwargs: Any) -> None:
        EzPickle.__init__(self, **kwargs)
        Walk.__init__(self)


class CopiesItself(Walk):
    def __deepcopy__(self, memo: Any) -> CopiesItself:
        return self


class CopiesAnew(Walk):
    def __deepcopy__(self, memo: Any) -> CopiesAnew:
        return type(self)()


class Views(Walk):
    def make(self) -> None:
        self.whole = np.asfortranarray(np.zeros((2, 3)))
        self.row, self.turned = self.whole[1], self.whole.T[::2]

    def act(self, action: int) -> None:
        self.row += action
        self.turned += 0.1
        self.x = self.x + self.whole.sum()


class SameList(Walk):
    def make(self) -> None:
        self.numbers = [0]
        self.named: dict[str, Any] = {"numbers": self.numbers, "self": self}
        self.numbers.append(self.numbers)  # type: ignore[arg-type]

    def act(self, action: int) -> None:
        self.numbers[0] += action
        self.x = self.x + self.named["numbers"][0]


class Methods(Walk):
    def make(self) -> None:
        self.sum, self.calls = 0, {1: self.add}
        self.twice = functools.partial(self.add, 2)
        self.look = lambda: self.sum

    def add(self, *numbers: int) -> None:
        self.sum += sum(numbers)

    def act(self, action: int) -> None:
        self.calls[1](action)
        self.twice(action)
        self.x = self.x + self.look()


class _Thing:
    __slots__ = ("__hidden", "number", "owner")

    def __init__(self, owner: Any) -> None:
        self.number, self.__hidden, self.owner = 0, 1.0, owner

    def add(self, action: int) -> float:
        self.number += action
        self.__hidden *= 1.01
        return self.number + self.__hidden + self.owner.t


class Slots(Walk):
    def make(self) -> None:
        self.thing = _Thing(self)

    def act(self, action: int) -> None:
        self.x = self.x + self.thing.add(action)


class Containers(Walk):
    def make(self) -> None:
        self.last = collections.deque([0.0] * 3, maxlen=3)
        self.seen: Any = collections.defaultdict(list)
        self.counts: Any = collections.Counter()
        self.order: Any = collections.OrderedDict()
        self.keys = [_Thing(self) for _ in range(3)]
        self.by_key = dict.fromkeys(self.keys, 0)

    def act(self, action: int) -> None:
        self.last.append(float(action))
        self.seen[action].append(self.t)
        self.counts[action] += 1
        self.order[action] = 1
        self.order.move_to_end(action)
        self.by_key[self.keys[action]] += 1
        self.x = self.x + sum(self.last) + len(self.seen[action]) + next(iter(self.order)) + self.by_key[self.keys[0]]


class Inner(Walk):
    def make(self) -> None:
        self.inner = gymnasium.make("CartPole-v1")

    def begin(self) -> None:
        self.inner.reset(seed=3)

    def act(self, action: int) -> None:
        self.x = self.x + self.inner.step(action % 2)[0][:3]

    def close(self) -> None:
        self.inner.close()


class Spawns(Walk):
    def act(self, action: int) -> None:
        if self.t % 10 == 0:
            (child,) = self.np_random.spawn(1)
            self.x = self.x + child.normal()


class TwoNames(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Holds its base under two names."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.base: Any = env.unwrapped
        self.steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation, *rest = self.env.step(action)
        return (observation + self.base.t + self.steps, *rest)


def two_names() -> gymnasium.Env[Any, Any]:
    return TwoNames(gymnasium.wrappers.TimeLimit(Walk(), 77))


# Refused


class ClassGenerator(Walk):
    rng = np.random.default_rng(3)

    def noise(self) -> float:
        return float(self.rng.normal())


class ModuleGenerator(Walk):
    def noise(self) -> float:
        return float(GENERATOR.normal())


class GlobalRandom(Walk):
    def noise(self) -> float:
        return random.random()


class GlobalGoal(Walk):
    """Draws its goal where no comparison of steps sees it."""

    def begin(self) -> None:
        self.goal = random.choice([1, 2, 3])


class GlobalAtLast(Walk):
    def noise(self) -> float:
        return float(np.random.normal()) if self.t == 199 else 0.0


class GlobalByImport(Walk):
    def noise(self) -> float:
        from random import random as draw

        return draw() if self.t > 190 else 0.0


class HoldsModule(Walk):
    def make(self) -> None:
        self.rng = np.random

    def noise(self) -> float:
        return float(self.rng.normal())


class HoldsDraw(Walk):
    def make(self) -> None:
        self.draw = random.random

    def noise(self) -> float:
        return self.draw()


class ClassCount(Walk):
    total = 0

    def act(self, action: int) -> None:
        type(self).total += 1
        self.x = self.x + type(self).total * 1e-3


class ClassList(Walk):
    seen: list[int] = []  # noqa: RUF012 - shared by all objects, which is what is tested

    def act(self, action: int) -> None:
        if self.t == 150:
            self.seen.append(action)
        self.x = self.x + len(self.seen)


class ModuleTable(Walk):
    def act(self, action: int) -> None:
        if self.t == 150:
            TABLE["a"].append(action)


class ModuleCount(Walk):
    def act(self, action: int) -> None:
        global count
        if self.t == 150:
            count += 1


class KeepsFile(Walk):
    def make(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the environment is

    def close(self) -> None:
        self.file.close()


class KeepsLock(Walk):
    def make(self) -> None:
        self.lock = threading.Lock()


class KeepsIterator(Walk):
    def make(self) -> None:
        self.numbers = itertools.count()

    def act(self, action: int) -> None:
        self.x = self.x + next(self.numbers)


class KeepsWeakly(Walk):
    def make(self) -> None:
        self.itself = weakref.ref(self)


class KeepsClosure(Walk):
    def make(self) -> None:
        held = [0]

        def add(action: int) -> int:
            held[0] += action
            return held[0]

        self.add = add

    def act(self, action: int) -> None:
        self.x = self.x + self.add(action)


class KeepsSet(Walk):
    def make(self) -> None:
        self.things = {_Thing(self) for _ in range(5)}


class Foreign(Walk):
    def make(self) -> None:
        self.memory = bytearray(24)
        self.numbers = np.frombuffer(self.memory, np.float64)


RIGHT = [
    *(Walk, OwnGenerator, OwnRandom, SharedBits, Ez, CopiesItself, CopiesAnew, Views, SameList, Methods, Slots),
    *(Containers, Inner, Spawns, two_names),
]
REFUSED = [
    *(ClassGenerator, ModuleGenerator, GlobalRandom, GlobalGoal, GlobalAtLast, GlobalByImport, HoldsModule, HoldsDraw),
    *(ClassCount, ClassList, ModuleTable, ModuleCount, KeepsFile, KeepsLock, KeepsIterator, KeepsWeakly, KeepsClosure),
    *(KeepsSet, Foreign),
]


def wrapped() -> gymnasium.Env[Any, Any]:
    """CartPole under wrappers that have states of their own."""
    env: Any = TimeLimit(gymnasium.make("CartPole-v1"), 30)
    return NormalizeObservation(RecordEpisodeStatistics(FrameStackObservation(env, 4)))
