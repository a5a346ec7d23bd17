"""More environments whose state lies where it is hard to find; most do in step 150 what no earlier step shows."""

from __future__ import annotations

import builtins
import collections
import ctypes
import datetime
import decimal
import email.utils
import enum
import functools
import itertools
import math
import operator
import os
import queue
import random
import statistics
import string
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np

from tests import odd_module
from tests.states_envs import Walk

LATE = 150
SELDOM = 10**6
"""A step that no check comes to: what is done in it shows in the code alone."""


# Sets: their order


class SetTaken(Walk):
    """Takes numbers of a set, in its order."""

    def begin(self) -> None:
        self.open: set[int] = set()

    def act(self, action: int) -> None:
        self.open.add((self.t * 37 + action * 11) % 101)
        if self.t > 100 and self.t % 3 == 0:
            self.x = self.x + self.open.pop()


class SetGrown(Walk):
    """Goes through a set that grows."""

    def begin(self) -> None:
        self.seen: set[Any] = set()

    def key(self, action: int) -> Any:
        return (self.t * 37 + action * 11) % 1001

    def act(self, action: int) -> None:
        self.seen.add(self.key(action))
        if self.t > 60:
            self.x = self.x + sum(number * hash(item) % 97 for number, item in enumerate(self.seen))


class SetOfCells(SetGrown):
    def key(self, action: int) -> Any:
        return (self.t * 37 + action * 11) % 20, self.t % 7


class SetChurned(SetGrown):
    """A set from which is removed, too."""

    def act(self, action: int) -> None:
        super().act(action)
        if len(self.seen) > 6:
            self.seen.discard(max(self.seen))


# What looks as if nothing could change it


class IntWithFields(Walk):
    class Number(int):
        more: list[float]

    def make(self) -> None:
        self.number = self.Number(3)
        self.number.more = [0.0]

    def act(self, action: int) -> None:
        if self.t >= LATE:
            self.number.more[0] += 1.0
        self.x = self.x + self.number.more[0]


class Record(Walk):
    """A row of a structured array, by itself."""

    def make(self) -> None:
        self.table = np.zeros(3, [("mass", "f8")])
        self.row = self.table[1]

    def act(self, action: int) -> None:
        if self.t >= LATE:
            self.row["mass"] += action
        self.x = self.x + self.table["mass"].sum()


class SliceOfList(Walk):
    def make(self) -> None:
        self.part = slice([0.0], None)

    def act(self, action: int) -> None:
        if self.t >= LATE:
            self.part.start[0] += 1.0
        self.x = self.x + self.part.start[0]


class Zone(datetime.tzinfo):
    shift = 0.0


class TimeZone(Walk):
    def make(self) -> None:
        self.zone = Zone()
        self.zone.shift = 0.0

    def act(self, action: int) -> None:
        if self.t >= LATE:
            self.zone.shift += 1.0
        self.x = self.x + self.zone.shift


class Mode(enum.Enum):
    FAST = [0.0]  # noqa: RUF012 - which is what is tested


class OfMode(Walk):
    """What a member of an enum holds belongs to all."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        super().__init__()

    def act(self, action: int) -> None:
        if self.t == LATE:
            self.mode.value[0] += 1.0
        self.x = self.x + self.mode.value[0]


def of_mode() -> gymnasium.Env[Any, Any]:
    return OfMode(Mode.FAST)


class Spec(Walk):
    def make(self) -> None:
        self.spec = gymnasium.envs.registration.EnvSpec("Odd-v0", kwargs={"n": 0})

    def act(self, action: int) -> None:
        assert self.spec is not None
        if self.t >= LATE:
            self.spec.kwargs["n"] += 1
        self.x = self.x + self.spec.kwargs["n"]


class PartialWithFields(Walk):
    def make(self) -> None:
        self.part: Any = functools.partial(math.hypot, 1.0)
        self.part.count = 0

    def act(self, action: int) -> None:
        self.part.count += action
        self.x = self.x + self.part.count


class Proxy:
    __slots__ = ("_inner",)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Body:
    mass = 0.0

    def eat(self, action: int) -> None:
        self.mass += action


class BehindProxy(Walk):
    """An object that answers by another one also what its fields are."""

    def make(self) -> None:
        self.body: Any = Proxy(Body())

    def act(self, action: int) -> None:
        self.body.eat(action)
        self.x = self.x + self.body.mass


# What is reached by another name


class ImportedLate(Walk):
    def act(self, action: int) -> None:
        from tests import odd_module as module

        if self.t == LATE:
            module.counter += 1
        self.x = self.x + module.counter


class FunctionImportedLate(Walk):
    def act(self, action: int) -> None:
        from tests.odd_module import bump

        if self.t == LATE:
            bump()
        self.x = self.x + odd_module.counter


class NumpyImportedLate(Walk):
    def noise(self) -> float:
        import numpy as n

        return float(n.random.rand()) if self.t == LATE else 0.0


class SystemImportedLate(Walk):
    def noise(self) -> float:
        import os as system

        return system.urandom(1)[0] / 256 if self.t == LATE else 0.0


class SeldomName(Walk):
    def noise(self) -> float:
        return len(tempfile.mktemp()) / 256 + hash(tempfile.mktemp()) % 256 / 256 if self.t == SELDOM else 0.0


class SeldomNormal(Walk):
    def noise(self) -> float:
        return statistics.NormalDist().samples(1)[0] if self.t == SELDOM else 0.0


class SeldomMessage(Walk):
    def noise(self) -> float:
        return sum(email.utils.make_msgid().encode()) / 1024 if self.t == SELDOM else 0.0


class SeldomBytes(Walk):
    def noise(self) -> float:
        from ssl import RAND_bytes

        return RAND_bytes(1)[0] / 256 if self.t == SELDOM else 0.0


class SystemModules(Walk):
    def act(self, action: int) -> None:
        module = sys.modules["tests.odd_module"]
        if self.t == LATE:
            module.counter += 1
        self.x = self.x + module.counter


class ImportedByName(Walk):
    def noise(self) -> float:
        return float(__import__("random").random()) if self.t == LATE else 0.0


class StoredInBuiltins(Walk):
    def act(self, action: int) -> None:
        if self.t == LATE:
            builtins.odd_gain = 1.0  # type: ignore[attr-defined]
        self.x = self.x + getattr(builtins, "odd_gain", 0.0)


class StoredInLibrary(Walk):
    def act(self, action: int) -> None:
        if self.t == LATE:
            setattr(string, "odd", 1.0)  # noqa: B010 - which is what is tested
        self.x = self.x + getattr(string, "odd", 0.0)


class HoldsModule(Walk):
    def make(self) -> None:
        self.module = odd_module

    def act(self, action: int) -> None:
        if self.t == LATE:
            self.module.table["n"] += 1
        self.x = self.x + self.module.table["n"]


class HoldsClass(Walk):
    def make(self) -> None:
        self.kind: Any = type("Kind", (), {"count": 0})

    def act(self, action: int) -> None:
        if self.t == LATE:
            self.kind.count += 1
        self.x = self.x + self.kind.count


class NumpyByName(Walk):
    def noise(self) -> float:
        return float(getattr(np, "random").rand()) if self.t == LATE else 0.0  # noqa: B009 - which is what is tested


class SystemByName(Walk):
    def noise(self) -> float:
        return getattr(os, "urandom")(1)[0] / 256 if self.t == LATE else 0.0  # noqa: B009 - as above


class HoldsNumpy(Walk):
    def make(self) -> None:
        self.arrays: Any = np

    def noise(self) -> float:
        return float(self.arrays.random.rand()) if self.t == LATE else 0.0


class SeedsByNone(Walk):
    def noise(self) -> float:
        return float(np.random.default_rng(None).normal()) if self.t == LATE else 0.0


class SeedsByName(Walk):
    def noise(self) -> float:
        return random.Random(None).random() if self.t == LATE else 0.0


class SeedsByGymnasium(Walk):
    def noise(self) -> float:
        return float(gymnasium.utils.seeding.np_random()[0].normal()) if self.t == LATE else 0.0


class SamplesLate(Walk):
    """A space of its own gets its generator when it is first asked to sample."""

    def make(self) -> None:
        self.goals = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float64)

    def act(self, action: int) -> None:
        if self.t >= LATE:
            self.x = self.x + self.goals.sample()


# Functions and methods that no attribute names


class Takes(Walk):
    """Gets a function."""

    def __init__(self, function: Callable[[int], float]) -> None:
        self.functions = [function]
        super().__init__()

    def act(self, action: int) -> None:
        self.x = self.x + self.functions[0](self.t)


def _draws(t: int) -> float:
    return random.random() if t == LATE else 0.0


def _counts(t: int) -> float:
    odd_module.table["n"] += t == LATE
    return odd_module.table["n"]


def _marks(t: int) -> float:
    return 0.0


_marks.count = 0.0  # type: ignore[attr-defined]


class Marks(Takes):
    """Changes an attribute of a function that it got."""

    def act(self, action: int) -> None:
        function: Any = self.functions[0]
        if self.t == LATE:
            function.count += 1.0
        self.x = self.x + function.count


def takes_drawing() -> gymnasium.Env[Any, Any]:
    return Takes(_draws)


def takes_counting() -> gymnasium.Env[Any, Any]:
    return Takes(_counts)


def takes_lambda() -> gymnasium.Env[Any, Any]:
    return Takes(lambda t: np.random.rand() if t == LATE else 0.0)


def takes_partial() -> gymnasium.Env[Any, Any]:
    return Takes(functools.partial(_draws))


def takes_marked() -> gymnasium.Env[Any, Any]:
    return Marks(_marks)


class Model:
    def __call__(self, t: int) -> float:
        return random.random() if t == LATE else 0.0

    def __getitem__(self, t: int) -> float:
        return random.random() if t == LATE else 0.0


class CallsObject(Walk):
    def make(self) -> None:
        self.model = Model()

    def noise(self) -> float:
        return self.model(self.t)


class SubscriptsObject(CallsObject):
    def noise(self) -> float:
        return self.model[self.t]


class SetsProperty(Walk):
    def _set(self, value: float) -> None:
        if value == LATE:
            self.x = self.x + random.random()

    level = property(None, _set)

    def act(self, action: int) -> None:
        self.level = self.t


class ByMadeName(Walk):
    def act(self, action: int) -> None:
        getattr(self, f"_on_{self.t == LATE}")()

    def _on_False(self) -> None:  # noqa: N802
        pass

    def _on_True(self) -> None:  # noqa: N802
        self.x = self.x + random.random()


class ByCaller(ByMadeName):
    def act(self, action: int) -> None:
        operator.methodcaller(f"_on_{self.t == LATE}")(self)


class ByClassDict(ByMadeName):
    def act(self, action: int) -> None:
        ByMadeName.__dict__[f"_on_{self.t == LATE}"](self)


class Row(NamedTuple):
    mass: float

    def draw(self, t: int) -> float:
        return random.random() if t == LATE else 0.0


class OfRow(Walk):
    def __init__(self, row: Any) -> None:
        self.row = row
        super().__init__()

    def noise(self) -> float:
        return float(self.row.draw(self.t))


def of_row() -> gymnasium.Env[Any, Any]:
    return OfRow(Row(1.0))


class Dispatches(Walk):
    @functools.singledispatchmethod
    def draw(self, value: Any) -> float:
        return 0.0

    @draw.register
    def _(self, value: float) -> float:
        return random.random() if self.t == LATE else 0.0

    def noise(self) -> float:
        return self.draw(1.0)


class NamesGenerator(Walk):
    draw = staticmethod(random.random)
    modules: ClassVar[Any] = (random, math)

    def act(self, action: int) -> None:
        if self.t == LATE:
            self.x = self.x + self.draw() + self.modules[0].random()


# What is shared, and cannot be compared


def _numbers() -> Any:
    yield from itertools.count()


GENERATED = _numbers()
WAITING: queue.SimpleQueue[int] = queue.SimpleQueue()
WEAKLY: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
SPACE = types.SimpleNamespace(function=lambda: 0, gain=0.0)
FUNCTIONS = collections.deque([lambda: 0])
LOCAL = threading.local()
CELL = (ctypes.c_double * 1)()
VIEW = memoryview(bytearray(4))
BESIDE = Walk()
BESIDE.reset(seed=0)


class Deque(collections.deque[int]):
    pass


class Array(np.ndarray):
    gain: float


OWN_DEQUE = Deque()
OWN_ARRAY = np.zeros(3).view(Array)
OWN_ARRAY.gain = 0.0


class TakesGenerated(Walk):
    def act(self, action: int) -> None:
        if self.t == LATE:
            self.x = self.x + next(GENERATED)


class SharesQueue(Walk):
    def act(self, action: int) -> None:
        waiting = WAITING
        if self.t == LATE:
            waiting.put(1)
        self.x = self.x + waiting.qsize()


class SharesWeakly(Walk):
    def act(self, action: int) -> None:
        held = WEAKLY
        if self.t == LATE:
            held[self] = held.get(self, 0.0) + 1.0
        self.x = self.x + held.get(self, 0.0)


class SharesSpace(Walk):
    def act(self, action: int) -> None:
        held = SPACE
        if self.t == LATE:
            held.gain += 1.0
        self.x = self.x + held.gain


class SharesFunctions(Walk):
    def act(self, action: int) -> None:
        held = FUNCTIONS
        if self.t == LATE:
            held.append(lambda: 0)
        self.x = self.x + len(held)


class SharesOwnDeque(Walk):
    def act(self, action: int) -> None:
        held = OWN_DEQUE
        if self.t == LATE:
            held.append(action)
        self.x = self.x + len(held)


class SharesOwnArray(Walk):
    def act(self, action: int) -> None:
        held = OWN_ARRAY
        if self.t == LATE:
            held.gain += 1.0
        self.x = self.x + held.gain


class SharesLocal(Walk):
    def act(self, action: int) -> None:
        held = LOCAL
        if self.t == LATE:
            held.n = getattr(held, "n", 0.0) + 1.0
        self.x = self.x + getattr(held, "n", 0.0)


class SharesCell(Walk):
    def act(self, action: int) -> None:
        held = CELL
        if self.t == LATE:
            held[0] += 1.0
        self.x = self.x + held[0]


class SharesView(Walk):
    def act(self, action: int) -> None:
        held = VIEW
        if self.t == LATE:
            held[0] = (held[0] + 1) % 256
        self.x = self.x + held[0]


class SharesEnvironment(Walk):
    def act(self, action: int) -> None:
        held = BESIDE
        if self.t == LATE:
            held.step(1)
        self.x = self.x + held.x


class CountsAgents(Walk):
    """Objects of a class within the class get numbers; the first is made late."""

    class Agent:
        _numbers = itertools.count()

        def __init__(self) -> None:
            self.number = next(self._numbers)

    agent: Any = None

    def act(self, action: int) -> None:
        if self.t == LATE:
            self.agent = self.Agent()
        self.x = self.x + (0 if self.agent is None else self.agent.number)


class Precision(Walk):
    """Changes the precision of decimal numbers, which the process has once."""

    def act(self, action: int) -> None:
        if self.t == LATE:
            decimal.getcontext().prec = 5 if decimal.getcontext().prec > 5 else 28
        self.x = self.x + float(decimal.Decimal(1) / decimal.Decimal(3)) * 1e3

    def close(self) -> None:
        decimal.getcontext().prec = 28


class Folder(Walk):
    def act(self, action: int) -> None:
        if self.t > 1000:
            os.chdir("/")


class ByHash(Walk):
    """Sorts objects by their addresses."""

    class Thing:
        def __init__(self, number: int) -> None:
            self.number = number

    def make(self) -> None:
        self.things = [self.Thing(number) for number in range(6)]

    def act(self, action: int) -> None:
        if self.t > 130:
            self.x = self.x + sorted(self.things, key=hash)[0].number


# Beside what cannot be copied


class DrawsBeside(Walk):
    """What cannot be copied holds an object that draws, also for a replay."""

    class Agent:
        def draw(self, t: int) -> float:
            return random.random() if t == LATE else 0.0

    def begin(self) -> None:
        self.world: dict[str, Any] = {"count": itertools.count(), "agent": self.Agent()}

    def act(self, action: int) -> None:
        next(self.world["count"])
        self.x = self.x + self.world["agent"].draw(self.t)


class DrawsWithin(Walk):
    """An object of C calls a function that draws."""

    def begin(self) -> None:
        self.course = map(_draws, range(1, 10_000))

    def act(self, action: int) -> None:
        self.x = self.x + next(self.course)


class Rects(Walk):
    """Moves a rectangle and a vector of pygame's, which are numbers of C."""

    def make(self) -> None:
        import pygame

        self.rects = {"body": pygame.Rect(0, 0, 4, 4)}
        self.body, self.speed = self.rects["body"], pygame.math.Vector2(1, 0)

    def act(self, action: int) -> None:
        self.speed.rotate_ip(10 * action)
        self.body.move_ip(round(3 * self.speed.x), action)
        self.x = self.x + self.rects["body"].x + self.speed.y


ODD = [
    *(SetTaken, SetGrown, SetOfCells, SetChurned, IntWithFields, Record, SliceOfList, TimeZone, of_mode, Spec),
    *(PartialWithFields, BehindProxy, ImportedLate, FunctionImportedLate, NumpyImportedLate, SystemImportedLate),
    *(SystemModules, ImportedByName, StoredInBuiltins, StoredInLibrary, HoldsModule, HoldsClass, takes_drawing),
    *(takes_counting, takes_lambda, takes_partial, takes_marked, CallsObject, SubscriptsObject, SetsProperty),
    *(ByMadeName, ByCaller, ByClassDict, of_row, Dispatches, NamesGenerator, TakesGenerated, SharesQueue),
    *(SharesWeakly, SharesSpace, SharesFunctions, SharesOwnDeque, SharesOwnArray, SharesLocal, SharesCell),
    *(NumpyByName, SystemByName, HoldsNumpy, SeedsByNone, SeedsByName, SeedsByGymnasium, SamplesLate),
    *(SharesView, SharesEnvironment, CountsAgents, Precision, Folder, ByHash, DrawsBeside, DrawsWithin),
]
DRAWS_SELDOM = [SeldomName, SeldomNormal, SeldomMessage, SeldomBytes]
RIGHT = [SamplesLate, SetGrown, SetOfCells, SetChurned, Spec, PartialWithFields, BehindProxy, Rects]
"""Those of them that are copied."""
