"""Environments that keep what they need in ways of the standard library, of NumPy and of other packages."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import functools
import heapq
import itertools
import random
import statistics
import string
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation, TransformReward

from tests.states_envs import Walk

LATE = 150


# Wrappers


class LastThree(gymnasium.ObservationWrapper[Any, Any, Any]):
    """The mean of the last three observations, of a deque."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.last: collections.deque[Any] = collections.deque(maxlen=3)

    def observation(self, observation: Any) -> Any:
        self.last.append(observation)
        return np.mean(self.last, axis=0)


def last_three() -> gymnasium.Env[Any, Any]:
    return LastThree(Walk())


class Remembers(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Has a cache of its own, in C."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.calls = 0
        self.value = functools.lru_cache(8)(self._value)

    def _value(self, key: int) -> float:
        self.calls += 1
        return float(self.calls)

    def observation(self, observation: Any) -> Any:
        return observation + self.value(int(observation[0]) % 11)


def remembers() -> gymnasium.Env[Any, Any]:
    return Remembers(Walk())


def scaled() -> gymnasium.Env[Any, Any]:
    """A reward that is scaled by what a closure has seen."""
    seen: list[float] = []

    def scale(reward: Any) -> float:
        seen.append(float(reward))
        return float(reward) / (1.0 + len(seen))

    return TransformReward(Walk(), scale)


def counted_in_closure() -> gymnasium.Env[Any, Any]:
    """Observations that a closure numbers, late."""
    count = 0

    def number(observation: Any) -> Any:
        nonlocal count
        if observation[0] > 1.0:
            count += 1
        return observation + count

    env = Walk()
    return TransformObservation(env, number, env.observation_space)


def gained() -> gymnasium.Env[Any, Any]:
    """A function that was given a number, and changes nothing."""
    gain = 0.5
    return TransformReward(Walk(), lambda reward: float(reward) * gain)


def shifted() -> gymnasium.Env[Any, Any]:
    """A function without anything of its own."""
    env = Walk()
    return TransformObservation(env, lambda observation: observation * 2 + 1, env.observation_space)


class Numbers(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Numbers observations by `itertools.count`."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.number = itertools.count()

    def observation(self, observation: Any) -> Any:
        return observation + next(self.number)


def numbers() -> gymnasium.Env[Any, Any]:
    return Numbers(Walk())


class Yields(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Gets its noise of a generator function."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.course = self._course()

    def _course(self) -> Iterator[float]:
        total = 0.0
        while True:
            total += 0.25
            yield total

    def observation(self, observation: Any) -> Any:
        return observation + next(self.course)


def yields() -> gymnasium.Env[Any, Any]:
    return Yields(Walk())


class StepsReplaced(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts a function into the place of its base's `step`."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.total = 0.0
        base: Any = env.unwrapped
        step = base.step

        def counted(action: Any) -> Any:
            self.total += 1.0
            observation, *rest = step(action)
            return (observation + self.total, *rest)

        base.step = counted


def steps_replaced() -> gymnasium.Env[Any, Any]:
    return StepsReplaced(Walk())


def shared_buffer() -> Callable[[], gymnasium.Env[Any, Any]]:
    """Makes environments that write into one buffer, which their maker has."""
    buffer, free = np.zeros((4, 3)), itertools.count()

    class Buffered(Walk):
        def make(self) -> None:
            self.row = buffer[next(free) % 4]
            self.all = buffer

        def act(self, action: int) -> None:
            if self.t > 100:
                self.row += action
            self.x = self.x + self.all.sum()

    return Buffered


def shared_space() -> Callable[[], gymnasium.Env[Any, Any]]:
    """Makes environments that draw from one space, which their maker has."""
    goals = spaces.Box(-1, 1, (3,), np.float64, seed=3)

    class Draws(Walk):
        def __init__(self, goals: Any) -> None:
            self.goals = goals
            super().__init__()

        def act(self, action: int) -> None:
            self.x = self.x + self.goals.sample()

    return lambda: Draws(goals)


def shared_generator() -> Callable[[], gymnasium.Env[Any, Any]]:
    """Makes environments that draw, late, from one generator, which their maker has."""
    rng = np.random.default_rng(3)

    class Draws(Walk):
        def __init__(self, rng: Any) -> None:
            self.rng = rng
            super().__init__()

        def noise(self) -> float:
            return float(self.rng.normal()) if self.t > 120 else 0.0

    return lambda: Draws(rng)


def shared_list() -> Callable[[], gymnasium.Env[Any, Any]]:
    """Makes environments that add to one list, late, which their maker has and they hold in an object."""
    held: list[int] = []

    class Adds(Walk):
        def __init__(self, held: list[int]) -> None:
            self.memory = types.SimpleNamespace(held=held)
            super().__init__()

        def act(self, action: int) -> None:
            if self.t % 170 == 169:
                self.memory.held.append(action)
            self.x = self.x + len(self.memory.held)

    return lambda: Adds(held)


FIRST_SHARED_BUFFER, FIRST_SHARED_SPACE = shared_buffer(), shared_space()
FIRST_SHARED_GENERATOR, FIRST_SHARED_LIST = shared_generator(), shared_list()


def of_buffer() -> gymnasium.Env[Any, Any]:
    return FIRST_SHARED_BUFFER()


def of_space() -> gymnasium.Env[Any, Any]:
    return FIRST_SHARED_SPACE()


def of_generator() -> gymnasium.Env[Any, Any]:
    return FIRST_SHARED_GENERATOR()


def of_list() -> gymnasium.Env[Any, Any]:
    return FIRST_SHARED_LIST()


# Objects


@dataclasses.dataclass(slots=True)
class Part:
    mass: float = 0.0
    trail: list[float] = dataclasses.field(default_factory=list)
    other: Any = None


class DataSlots(Walk):
    def make(self) -> None:
        self.parts = [Part(), Part(1.0)]
        self.parts[0].other = self.parts[1]
        self.parts[1].other = self.parts[0]

    def act(self, action: int) -> None:
        self.parts[action % 2].other.mass += action
        self.parts[0].trail.append(self.parts[1].mass)
        self.x = self.x + sum(self.parts[0].trail[-5:])


class Tally:
    """Says that it is a number, as a proxy does."""

    def __init__(self) -> None:
        self.value = 0.0

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return float


class Tallies(Walk):
    def make(self) -> None:
        self.tally = Tally()

    def act(self, action: int) -> None:
        if self.t > LATE:
            self.tally.value += action
        self.x = self.x + self.tally.value


class GlobalBits(Walk):
    """Draws, late, by the bits of NumPy's own generator."""

    def make(self) -> None:
        self.rng = np.random.Generator(np.random.mtrand._rand._bit_generator)

    def noise(self) -> float:
        return float(self.rng.normal()) if self.t == LATE else 0.0


class WeakPart(Walk):
    class Body:
        mass = 0.0

    def make(self) -> None:
        self.body = self.Body()
        self.seen = weakref.proxy(self.body)

    def act(self, action: int) -> None:
        self.seen.mass += action
        self.x = self.x + self.body.mass


class WeakNamed(Walk):
    def make(self) -> None:
        self.bodies = [Part(), Part()]
        self.named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.named["first"] = WeakPart.Body()

    def act(self, action: int) -> None:
        self.x = self.x + len(self.named)


class DropsWeak(Walk):
    """Counts objects that are gone once it has dropped them."""

    def make(self) -> None:
        self.bodies = [WeakPart.Body() for _ in range(3)]
        self.known = weakref.WeakSet(self.bodies)

    def act(self, action: int) -> None:
        if self.t == LATE and self.bodies:
            self.bodies.pop()
        self.x = self.x + len(self.known)


class Waits(Walk):
    """Holds locks and what threads wait for."""

    def make(self) -> None:
        self.lock, self.event, self.changed = threading.RLock(), threading.Event(), threading.Condition()

    def act(self, action: int) -> None:
        with self.lock, self.changed:
            if self.t == LATE:
                self.event.set()
            self.x = self.x + float(self.event.is_set())


class Gates(Walk):
    """Keeps its state in a semaphore."""

    def make(self) -> None:
        self.gate = threading.Semaphore(170)

    def act(self, action: int) -> None:
        free = self.gate.acquire(blocking=False)
        self.x = self.x + float(free)


class CountsReads(Walk):
    """A property that changes what it tells."""

    reads = 0

    @property
    def gain(self) -> float:
        self.reads += 1
        return self.reads * 0.5

    def act(self, action: int) -> None:
        self.x = self.x + self.gain


class CountsLooks(Walk):
    """Counts how often its attributes are read, whoever reads them."""

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        own["looks"] = own.get("looks", 0) + 1
        return object.__getattribute__(self, name)

    def act(self, action: int) -> None:
        self.x = self.x + self.__dict__["looks"] * 1e-3


class CountsWrites(Walk):
    """Counts how often its attributes are set."""

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["writes"] = self.__dict__.get("writes", 0) + 1
        object.__setattr__(self, name, value)

    def act(self, action: int) -> None:
        self.x = self.x + self.__dict__["writes"] * 1e-3


class Chained(Walk):
    def make(self) -> None:
        self.own: dict[str, float] = {}
        self.maps = collections.ChainMap(self.own, {"gain": 1.0})

    def act(self, action: int) -> None:
        self.maps["gain"] = self.maps["gain"] + action
        self.x = self.x + self.own["gain"]


class OwnContainers(Walk):
    class Items(collections.UserList[int]):
        pass

    class Table(collections.UserDict[str, int]):
        def __missing__(self, key: str) -> int:
            return 7

    def make(self) -> None:
        self.items, self.table = self.Items(), self.Table()
        self.space = argparse.Namespace(gain=0.0)

    def act(self, action: int) -> None:
        self.items.append(action)
        self.table["n"] = self.table["n"] + action
        self.space.gain += action
        self.x = self.x + sum(self.items) + self.table["n"] + self.space.gain


class HoldsView(Walk):
    """Holds the view of a dict."""

    def make(self) -> None:
        self.table = {"a": 0.0}
        self.values = self.table.values()

    def act(self, action: int) -> None:
        self.table["a"] += action
        self.x = self.x + sum(self.values)


class HoldsProxy(Walk):
    def make(self) -> None:
        self.table = {"a": 0.0}
        self.seen = types.MappingProxyType(self.table)

    def act(self, action: int) -> None:
        self.table["a"] += action
        self.x = self.x + self.seen["a"]


class Queued(Walk):
    """Events by their time, and by number where times are the same."""

    def begin(self) -> None:
        self.number, self.events = itertools.count(), list[tuple[int, int, float]]()

    def act(self, action: int) -> None:
        heapq.heappush(self.events, (self.t + action % 2, next(self.number), float(action)))
        while self.events and self.events[0][0] <= self.t:
            self.x = self.x + heapq.heappop(self.events)[2] + self.events.__len__()


class Flag(enum.Flag):
    HOT = enum.auto()
    WET = enum.auto()


class OfFlags(Walk):
    def make(self) -> None:
        self.flags, self.seen = Flag(0), set[Any]()

    def act(self, action: int) -> None:
        self.flags ^= Flag.HOT if action else Flag.WET
        self.seen.add(self.flags)
        self.x = self.x + self.flags.value + len(self.seen)


class Distributed(Walk):
    def make(self) -> None:
        self.belief, self.form = statistics.NormalDist(0.0, 1.0), string.Template("$a")

    def act(self, action: int) -> None:
        self.belief = self.belief + action
        self.x = self.x + self.belief.mean


class StoresError(Walk):
    """Keeps an error with its traceback."""

    error: Any = None

    def act(self, action: int) -> None:
        if self.t == 3:
            try:
                raise ValueError(self.t)
            except ValueError as error:
                self.error = error
        if self.error is not None:
            self.x = self.x + self.error.args[0]


class Within(Walk):
    """Is in a context that it opened."""

    def begin(self) -> None:
        self.level = 0.0
        self.context = self._raised()
        self.context.__enter__()

    @contextlib.contextmanager
    def _raised(self) -> Iterator[None]:
        self.level += 1.0
        yield
        self.level -= 1.0

    def act(self, action: int) -> None:
        if self.t == LATE:
            self.context.__exit__(None, None, None)
        self.x = self.x + self.level


class Swaps(Walk):
    """Its spaces are others later."""

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(3)
        super().__init__()

    def act(self, action: int) -> None:
        if self.t == 30:
            self.observation_space = spaces.Box(-1e7, 1e7, (3,), np.float64, seed=4)
        self.x = self.x + float(self.observation_space.high[0])


class MovesBounds(Walk):
    """Changes the bounds of its own space where they are."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1e7, 1e7, (3,), np.float64)
        super().__init__()

    def act(self, action: int) -> None:
        self.observation_space.high += action
        self.x = self.x + self.observation_space.high * 1e-7


class Registers(Walk):
    """Each object adds itself to a list of its class, which it looks at late."""

    made: ClassVar[list[Any]] = []

    def make(self) -> None:
        held = self.made
        held.append(weakref.ref(self))

    def act(self, action: int) -> None:
        if self.t > LATE:
            self.x = self.x + len(self.made)


class NumbersItself(Walk):
    """Each object has a number, by a function that its class has."""

    number = staticmethod(itertools.count().__next__)

    def make(self) -> None:
        self.own = self.number()

    def act(self, action: int) -> None:
        self.x = self.x + self.own


class LateByAlias(Walk):
    """Late in an episode, all objects of the class feel what one does."""

    table: ClassVar[dict[str, list[float]]] = {"gain": [0.0]}

    def late(self) -> bool:
        return self.t == 190

    def act(self, action: int) -> None:
        held = self.table
        if self.late():
            held["gain"][0] += 1.0
        self.x = self.x + held["gain"][0]


class LateByReset(LateByAlias):
    """A reset in three changes what all objects of the class hold."""

    resets = 0

    def begin(self) -> None:
        self.resets += 1

    def late(self) -> bool:
        return self.resets % 3 == 2 and self.t == 5


MOVES = [(0, 1), (1, 0), (1, 2)]


class Kind(enum.Enum):
    WALL = "wall"
    FREE = "free"


class ReadsTables(Walk):
    """Looks into tables of its module and of its class for what it changes in its own."""

    Number = TypeVar("Number")
    ORDER: ClassVar[list[int]] = [2, 0, 1]
    LINES: ClassVar[dict[str, list[int]]] = {"first": [0, 1], "other": [1, 2]}

    def first(self, numbers: list[Number]) -> Number:
        return numbers[0]

    def begin(self) -> None:
        self.grid, self.position, self.counts = np.zeros((3, 3)), [0, 0], dict.fromkeys(Kind, 0)

    def act(self, action: int) -> None:
        self.grid[self.ORDER[action], MOVES[action][0]] += MOVES[action][1]
        self.grid[self.LINES["first" if action else "other"]] = self.ORDER[action]
        self.position[MOVES[action][0]] += MOVES[action][1]
        self.counts[Kind.WALL if action else Kind.FREE] += self.first(self.ORDER)
        self.x = self.x + self.grid.sum() + self.position[0] + self.counts[Kind.WALL]


# NumPy


class Strided(Walk):
    """Windows over an array, which overlap."""

    def make(self) -> None:
        self.line = np.zeros(8)
        self.windows = np.lib.stride_tricks.sliding_window_view(self.line, 3)
        self.written = np.lib.stride_tricks.as_strided(self.line, (3, 2), (16, 8))

    def act(self, action: int) -> None:
        self.written[self.t % 3, action % 2] += 1.0
        self.x = self.x + self.windows[self.t % 6]


class Broadcast(Walk):
    def make(self) -> None:
        self.one = np.zeros(1)
        self.many = np.broadcast_to(self.one, (3,))

    def act(self, action: int) -> None:
        self.one += action
        self.x = self.x + self.many


class Orders(Walk):
    """Arrays of other byte orders, of times, of texts, of no axis, and of objects."""

    def make(self) -> None:
        self.big, self.when = np.zeros(3, ">f8"), np.array(["2020-01-01"], "M8[D]")
        self.names, self.none = np.array(["a", "bb"]), np.array(0.0)
        self.objects = np.array([[1], [2.0], None], dtype=object)

    def act(self, action: int) -> None:
        self.big += action
        self.when += np.timedelta64(action, "D")
        self.none += 1.0
        self.names[0] = str(self.t)[:1]
        self.objects[0].append(action)
        self.x = self.x + self.big + self.none + len(self.objects[0]) + int(self.names[0])
        self.x = self.x + self.when.astype(np.int64)[0] % 100


class NestedRecords(Walk):
    def make(self) -> None:
        self.table = np.zeros(4, [("position", "f8", (3,)), ("body", [("mass", "f4"), ("alive", "?")])])
        self.masses, self.record = self.table["body"]["mass"], np.rec.array(self.table[1:3], copy=False)

    def act(self, action: int) -> None:
        self.masses[self.t % 4] += action
        self.record.position[0] += 1.0
        self.x = self.x + self.table["position"].sum() + self.table["body"]["mass"].sum()


class HalfDrawn(Walk):
    """An old generator has the second of two normal numbers in store, and a new one half of 64 bits."""

    def make(self) -> None:
        self.old, self.new = np.random.RandomState(4), np.random.Generator(np.random.SFC64(4))
        self.bits = np.random.Generator(np.random.Philox(4))

    def noise(self) -> float:
        drawn = float(self.new.integers(0, 100, dtype=np.int32)) + float(self.bits.integers(0, 9, dtype=np.uint32))
        return float(self.old.normal()) + drawn

    def act(self, action: int) -> None:
        if action:
            self.old.normal()
            self.new.integers(0, 5, dtype=np.int32)


class Families(Walk):
    """Generators of one family: what one spawns counts for the other one."""

    def make(self) -> None:
        self.sequence = np.random.SeedSequence(8, spawn_key=(3,))
        self.one = np.random.default_rng(self.sequence)
        self.other = np.random.Generator(np.random.MT19937(self.sequence))

    def act(self, action: int) -> None:
        if self.t % 20 == 0:
            (mine,) = (self.one if action else self.other).spawn(1)
            (theirs,) = self.sequence.spawn(1)
            self.x = self.x + mine.normal() + np.random.default_rng(theirs).normal()


class ListedSeeds(Walk):
    """A sequence of seeds of a list, which it changes late."""

    def make(self) -> None:
        self.entropy = [3, 4]
        self.sequence = np.random.SeedSequence(self.entropy)

    def act(self, action: int) -> None:
        self.entropy[0] += action
        if self.t % 20 == 0:
            (seeds,) = self.sequence.spawn(1)
            self.x = self.x + np.random.default_rng(seeds).normal()


class CountedSeeds(np.random.SeedSequence):
    """Counts what it spawns."""

    spawned = 0

    def spawn(self, n_children: int) -> Any:
        self.spawned += n_children
        return super().spawn(n_children)


class OwnSeeds(Walk):
    """A sequence of seeds of a class of its own, which knows more than NumPy's."""

    def make(self) -> None:
        self.sequence = CountedSeeds(3)
        self.rng = np.random.default_rng(self.sequence)

    def act(self, action: int) -> None:
        self.rng.spawn(1)
        self.x = self.x + self.sequence.spawned


class OldSeeds(Walk):
    """Generators of the old kind: one without a sequence of seeds, and two that share their bits with a new one."""

    def make(self) -> None:
        self.alone, self.bits = np.random.RandomState(3), np.random.PCG64(4)
        self.old, self.other = np.random.RandomState(self.bits), np.random.RandomState(self.bits)
        self.new = np.random.Generator(self.bits)

    def noise(self) -> float:
        drawn = [each.normal() for each in (self.alone, self.old, self.other, self.new)]
        return float(sum(drawn)) + float(self.bits.random_raw() % 7)


class NamedGenerator(Walk):
    """A generator of the standard library that somebody has given an attribute."""

    def make(self) -> None:
        self.rng: Any = random.Random(4)
        self.rng.drawn = []

    def noise(self) -> float:
        self.rng.drawn.append(self.rng.gauss(0.0, 1.0))
        return float(sum(self.rng.drawn[-3:]))


class Polynomials(Walk):
    def make(self) -> None:
        self.line = np.polynomial.Polynomial([0.0, 1.0])
        self.old = np.poly1d([1.0, 0.0])

    def act(self, action: int) -> None:
        self.line.coef[0] += action
        self.old.coeffs[1] += action
        self.x = self.x + self.line(1.0) + self.old(1.0)


class Errors(Walk):
    """Sets how NumPy divides by zero, which the process has once."""

    def act(self, action: int) -> None:
        if self.t == 5:
            np.seterr(divide="ignore")
        self.x = self.x + float(np.geterr()["divide"] == "ignore")

    def close(self) -> None:
        np.seterr(divide="warn")


# Without a seed


class SeedsBySystem(Walk):
    """Makes generators without a seed, once: then they are as much its own as others."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.old, self.plain = np.random.default_rng(), np.random.RandomState(), random.Random()

    def noise(self) -> float:
        return float(self.rng.normal() + self.old.normal()) + self.plain.random()


class SeedsAgain(SeedsBySystem):
    """Calls its constructor again, seldom."""

    def act(self, action: int) -> None:
        if self.t == LATE:
            x, t = self.x, self.t
            self.__init__()  # type: ignore[misc]
            self.x, self.t = x, t


class SeedsAnother(Walk):
    """Makes another environment, seldom."""

    def make(self) -> None:
        self.inner = SeedsBySystem()

    def act(self, action: int) -> None:
        if self.t == LATE:
            self.inner = SeedsBySystem()
        self.x = self.x + self.inner.noise()


class SeedsLater(Walk):
    """Its constructor makes a function that makes a generator without a seed, seldom."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = lambda: float(np.random.default_rng().normal())

    def noise(self) -> float:
        return self.draw() if self.t == LATE else 0.0


SEEDS_SELDOM = [SeedsAgain, SeedsAnother, SeedsLater]

# Keys, and data in a file


@dataclasses.dataclass(frozen=True)
class Cell:
    x: int
    y: int


class Player:
    """As most objects, hashed by its address."""

    def __init__(self) -> None:
        self.cell = Cell(0, 0)


class Board(Walk):
    """Has keys with a hash of their own, and an object without."""

    def begin(self) -> None:
        self.player = Player()
        self.visits = {self.player.cell: 0}

    def act(self, action: int) -> None:
        self.player.cell = Cell(action, self.t % 4)
        self.visits[self.player.cell] = self.visits.get(self.player.cell, 0) + 1
        self.x = self.x + self.visits[self.player.cell]


class ByOwnHash(Board):
    """Calls the method that `hash` calls, late."""

    def act(self, action: int) -> None:
        self.x = self.x + (self.player.__hash__() % 97 if self.t > LATE else action)


class MappedData(Walk):
    """Reads prices of a file that it has mapped for reading."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.prices = np.load(path, mmap_mode="r")

    def begin(self) -> None:
        self.first = int(self.np_random.integers(50))
        self.seen = self.prices[self.first : self.first + 5]
        self.plain = np.asarray(self.prices)[self.first]

    def act(self, action: int) -> None:
        self.seen = self.prices[self.first + self.t :][:5]
        self.x = self.x + self.seen[action] + self.plain


def mapped_data() -> gymnasium.Env[Any, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder, "prices.npy")
        np.save(path, np.arange(900.0).reshape(300, 3))
        return MappedData(path)


class SetsByName(Walk):
    """Sets its attributes by their names, to values of a module and of a class."""

    def begin(self) -> None:
        for name in ("first", "second"):
            setattr(self, name, np.full(3, 0.5))
        setattr(self, "player", Player())  # noqa: B010 - what is tested

    def act(self, action: int) -> None:
        setattr(self, ("first", "second")[action % 2], np.full(3, self.t))
        self.x = self.x + self.first + self.second  # type: ignore[attr-defined]


CURIOUS = [
    *(last_three, remembers, scaled, counted_in_closure, gained, shifted, numbers, yields, steps_replaced, of_buffer),
    *(
        of_space,
        of_generator,
        of_list,
        DataSlots,
        WeakPart,
        WeakNamed,
        DropsWeak,
        Waits,
        Gates,
        CountsReads,
        CountsLooks,
    ),
    *(CountsWrites, Chained, OwnContainers, HoldsView, HoldsProxy, Queued, OfFlags, Distributed, StoresError, Within),
    *(Swaps, MovesBounds, Registers, NumbersItself, LateByAlias, LateByReset, Strided, Broadcast, Orders),
    *(NestedRecords, HalfDrawn, Families, ListedSeeds, OwnSeeds, OldSeeds, NamedGenerator, Polynomials, Errors),
    *(Tallies, GlobalBits, ReadsTables, SeedsBySystem, *SEEDS_SELDOM, Board, ByOwnHash, mapped_data, SetsByName),
]
RIGHT = [
    *(last_three, gained, shifted, DataSlots, CountsReads, CountsWrites, Chained, OwnContainers, OfFlags),
    *(Swaps, MovesBounds, Broadcast, Orders, HalfDrawn, Families, ListedSeeds, OldSeeds, NamedGenerator, Polynomials),
    *(Tallies, ReadsTables, SeedsBySystem, Board, mapped_data, SetsByName),
]
"""Those of them that are copied."""
