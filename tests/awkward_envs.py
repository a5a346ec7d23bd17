"""Environments whose state lies where it is hard to find, for the tests of states."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import gc
import heapq
import io
import itertools
import mmap
import operator
import os
import queue
import random
import secrets
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.utils import EzPickle

from tests.states_envs import Walk

BUFFER = np.zeros(3)
QUEUE: collections.deque[int] = collections.deque(maxlen=5)
SETTINGS = types.SimpleNamespace(gain=0.0)
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("gain", default=0.0)
NUMBERS = itertools.count()


class Counter:
    """A singleton."""

    _only: ClassVar[Any] = None

    def __new__(cls) -> Counter:
        if cls._only is None:
            cls._only = super().__new__(cls)
            cls._only.count = 0
        return cls._only  # type: ignore[no-any-return]

    def add(self) -> int:
        self.count += 1
        return self.count


ONLY = Counter()


class CachesObservation(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._cache: dict[bytes, Any] = {}

    def step(self, action: Any) -> Any:
        observation, *rest = self.env.step(action)
        kept = self._cache.setdefault(np.round(observation).tobytes(), observation)
        return (kept + len(self._cache), *rest)


def caches_observation() -> gymnasium.Env[Any, Any]:
    return CachesObservation(Walk())


class ForwardsAll:
    """Hands on whatever it has not."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class Forwards(Walk):
    class Body:
        def __init__(self) -> None:
            self.mass = 0.0

        def eat(self, action: int) -> None:
            self.mass += action

    def make(self) -> None:
        self.body = ForwardsAll(ForwardsAll(self.Body()))

    def act(self, action: int) -> None:
        self.body.eat(action)
        self.x = self.x + self.body.mass


class ClosureSum(Walk):
    def make(self) -> None:
        total = 0.0

        def add(action: int) -> float:
            nonlocal total
            total += action
            return total

        self.add = add

    def act(self, action: int) -> None:
        self.x = self.x + self.add(action)


class LateClosure(Walk):
    """The closure's value is a number while it is looked at, and another one later."""

    def begin(self) -> None:
        gain = 0.0

        def more() -> float:
            nonlocal gain
            if self.t > 30:
                gain += 0.5
            return gain

        self.more = more

    def act(self, action: int) -> None:
        self.x = self.x + self.more()


class Thread(Walk):
    def make(self) -> None:
        self.asked: queue.Queue[Any] = queue.Queue()
        self.told: queue.Queue[float] = queue.Queue()
        self.worker = threading.Thread(target=self._work, daemon=True)
        self.worker.start()

    def _work(self) -> None:
        total = 0.0
        while (action := self.asked.get()) is not None:
            total += action
            self.told.put(total)

    def act(self, action: int) -> None:
        self.asked.put(action)
        self.x = self.x + self.told.get()

    def close(self) -> None:
        self.asked.put(None)


class ThreadLocal(Walk):
    def make(self) -> None:
        self.local = threading.local()
        self.local.total = 0

    def act(self, action: int) -> None:
        self.local.total = getattr(self.local, "total", 0) + action
        self.x = self.x + self.local.total


class Weak(Walk):
    class Node:
        value = 0.0

    def make(self) -> None:
        self.node = self.Node()
        self.weak = weakref.WeakKeyDictionary({self.node: 1.0})

    def act(self, action: int) -> None:
        self.weak[self.node] += action
        self.x = self.x + self.weak[self.node]


class Aliases(Walk):
    """Observations are a view of what the next step changes."""

    def make(self) -> None:
        self.world = np.zeros((4, 3))
        self.agent = self.world[2]
        self.flat = self.world.reshape(-1)
        self.back = self.world[::-1, ::2]

    def act(self, action: int) -> None:
        self.agent += action
        self.flat[7] *= 0.5
        self.back[0] += 0.25
        self.x = self.x + self.world.sum(axis=0)


class AliasesInList(Walk):
    def make(self) -> None:
        self.memory = np.zeros(12)
        self.parts = [self.memory[i : i + 3] for i in range(0, 12, 3)]
        self.named = {"first": self.parts[0], "all": self.memory.reshape(4, 3)}

    def act(self, action: int) -> None:
        self.parts[self.t % 4] += action
        self.named["first"][0] += 1
        self.x = self.x + self.named["all"].sum(axis=0)


class Structured(Walk):
    def make(self) -> None:
        self.table = np.zeros(5, [("mass", "f8"), ("n", "i4")])
        self.mass = self.table["mass"]
        self.record = np.rec.array(self.table)

    def act(self, action: int) -> None:
        self.mass[self.t % 5] += action
        self.record.n[0] += 1
        self.x = self.x + self.table["mass"].sum() + self.table["n"].sum()


class Masked(Walk):
    def make(self) -> None:
        self.masked = np.ma.masked_array(np.zeros(3), mask=[False, True, False])

    def act(self, action: int) -> None:
        self.masked += action
        self.masked.mask[self.t % 3] ^= True
        self.x = self.x + float(self.masked.sum() or 0.0)


class _Base:
    __slots__ = ("_a",)

    def __init__(self) -> None:
        self._a = 0.0


class _Derived(_Base):
    __slots__ = ("__b", "later")

    def __init__(self) -> None:
        super().__init__()
        self.__b = [0.0]

    def add(self, action: int) -> float:
        self._a += action
        self.__b.append(self._a)
        if len(self.__b) > 20 and not hasattr(self, "later"):
            self.later = 5.0
        return self._a + len(self.__b) + getattr(self, "later", 0.0)


class DeepSlots(Walk):
    def make(self) -> None:
        self.thing = _Derived()

    def act(self, action: int) -> None:
        self.x = self.x + self.thing.add(action)


class GeneratorFunction(Walk):
    def begin(self) -> None:
        self.course = self._run()

    def _run(self) -> Iterator[float]:
        total = 0.0
        while True:
            total += 0.1
            yield total

    def act(self, action: int) -> None:
        self.x = self.x + next(self.course)


class Cycles(Walk):
    def make(self) -> None:
        self.wheel = itertools.cycle([0.0, 1.0, 5.0])

    def act(self, action: int) -> None:
        self.x = self.x + next(self.wheel)


class ListIterator(Walk):
    def begin(self) -> None:
        self.steps = iter([float(n) for n in range(300)])

    def act(self, action: int) -> None:
        self.x = self.x + next(self.steps)


class Zipped(Walk):
    def begin(self) -> None:
        self.steps = zip(itertools.count(), map(float, range(300)))

    def act(self, action: int) -> None:
        one, other = next(self.steps)
        self.x = self.x + one * other


class HiddenGlobal(Walk):
    @property
    def gain(self) -> float:
        return SETTINGS.gain

    @gain.setter
    def gain(self, value: float) -> None:
        SETTINGS.gain = value

    def act(self, action: int) -> None:
        if self.t % 50 == 0:
            self.gain = self.gain + 1.0
        self.x = self.x + self.gain


class GlobalBuffer(Walk):
    def act(self, action: int) -> None:
        if self.t % 40 == 0:
            BUFFER[:] += action
        self.x = self.x + BUFFER


class GlobalInPlace(Walk):
    def act(self, action: int) -> None:
        if self.t == 150:
            np.add(BUFFER, 1.0, out=BUFFER)
        self.x = self.x + BUFFER


class GlobalQueue(Walk):
    def act(self, action: int) -> None:
        held = QUEUE
        if self.t == 150:
            held.append(action)
        self.x = self.x + sum(held)


class GlobalAttribute(Walk):
    def act(self, action: int) -> None:
        if self.t == 150:
            SETTINGS.gain += 1.0
        self.x = self.x + SETTINGS.gain


class GlobalBySetattr(Walk):
    def act(self, action: int) -> None:
        if self.t == 150:
            setattr(SETTINGS, "gain", SETTINGS.gain + 1.0)  # noqa: B010 - which is what is tested
        self.x = self.x + SETTINGS.gain


class GlobalByPush(Walk):
    heap: ClassVar[list[int]] = []

    def act(self, action: int) -> None:
        if self.t == 150:
            heapq.heappush(self.heap, action)
        self.x = self.x + len(self.heap)


class GlobalCount(Walk):
    def act(self, action: int) -> None:
        if self.t % 100 == 99:
            self.x = self.x + next(NUMBERS)


class ByGlobals(Walk):
    def act(self, action: int) -> None:
        if self.t == 150:
            globals()["EXTRA"] = 5.0
        self.x = self.x + globals().get("EXTRA", 0.0)


class Context(Walk):
    def act(self, action: int) -> None:
        if self.t % 60 == 0:
            CONTEXT.set(CONTEXT.get() + 1.0)
        self.x = self.x + CONTEXT.get()


class Cached(Walk):
    """A cache at the class, which fills with calls of all objects."""

    @functools.lru_cache(maxsize=8)  # noqa: B019 - which is what is tested
    def value(self, key: int) -> float:
        return key + float(self.t)

    def act(self, action: int) -> None:
        self.x = self.x + self.value(self.t // 20)


class CachedProperty(Walk):
    @functools.cached_property
    def gain(self) -> float:
        return float(self.t)

    def act(self, action: int) -> None:
        if self.t > 20:
            self.x = self.x + self.gain


class CachedFunction(Walk):
    calls = 0

    def act(self, action: int) -> None:
        self.x = self.x + _remembered(self.t // 30, self)


@functools.lru_cache(maxsize=None)  # noqa: UP033
def _remembered(key: int, env: Any) -> float:
    return float(env.t)


class Ctypes(Walk):
    def make(self) -> None:
        self.cell = (ctypes.c_double * 2)()
        self.view = np.ctypeslib.as_array(self.cell)

    def act(self, action: int) -> None:
        self.cell[0] += action
        self.view[1] += 0.5
        self.x = self.x + self.cell[0] + self.cell[1]


class Memory(Walk):
    def make(self) -> None:
        self.map = mmap.mmap(-1, 64)
        self.numbers = np.frombuffer(self.map, np.float64, 3)

    def act(self, action: int) -> None:
        self.numbers += action
        self.x = self.x + self.numbers


class MemoryFile(Walk):
    def make(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.path = Path(self.folder, "numbers")
        self.numbers = np.memmap(self.path, np.float64, "w+", shape=(3,))

    def act(self, action: int) -> None:
        self.numbers += action
        self.x = self.x + self.numbers

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
            Path(self.folder).rmdir()


class View(Walk):
    def make(self) -> None:
        self.data = bytearray(8)
        self.view = memoryview(self.data)

    def act(self, action: int) -> None:
        self.view[0] = (self.view[0] + action) % 256
        self.x = self.x + self.data[0]


class Array(Walk):
    def make(self) -> None:
        self.numbers = array.array("d", [0.0])

    def act(self, action: int) -> None:
        self.numbers[0] += action
        self.x = self.x + self.numbers[0]


class Struct(Walk):
    def make(self) -> None:
        self.form, self.data = struct.Struct("<d"), bytearray(8)

    def act(self, action: int) -> None:
        self.form.pack_into(self.data, 0, self.form.unpack(self.data)[0] + action)
        self.x = self.x + self.form.unpack(self.data)[0]


class Singleton(Walk):
    def make(self) -> None:
        self.counter = Counter()

    def act(self, action: int) -> None:
        if self.t % 30 == 0:
            self.counter.add()
        self.x = self.x + self.counter.count


class SingletonByName(Walk):
    def act(self, action: int) -> None:
        if self.t == 150:
            ONLY.add()
        self.x = self.x + ONLY.count


class ClassMutated(Walk):
    table: ClassVar[dict[str, Any]] = {"gain": 0.0}

    def act(self, action: int) -> None:
        if self.t % 70 == 0:
            self.table["gain"] += 1.0
        self.x = self.x + self.table["gain"]


class ClassMutatedByAlias(Walk):
    table: ClassVar[dict[str, Any]] = {"gain": 0.0}

    def make(self) -> None:
        self.mine = self.table

    def act(self, action: int) -> None:
        if self.t == 150:
            self.mine["gain"] += 1.0
        self.x = self.x + self.table["gain"]


class ClassMutatedDeep(Walk):
    table: ClassVar[dict[str, Any]] = {"gain": [0.0]}

    def act(self, action: int) -> None:
        held = self.table["gain"]
        if self.t == 150:
            held[0] += 1.0
        self.x = self.x + held[0]


class ClassSwapped(Walk):
    """Changes its own class."""

    def act(self, action: int) -> None:
        if self.t == 30:
            self.__class__ = ClassSwappedLater
        self.x = self.x + 1.0


class ClassSwappedLater(ClassSwapped):
    def act(self, action: int) -> None:
        self.x = self.x + 2.0


class MethodSwapped(Walk):
    """Gets another `act` as an attribute."""

    def begin(self) -> None:
        self.__dict__.pop("act", None)

    def act(self, action: int) -> None:
        self.x = self.x + 1.0
        if self.t == 30:
            self.act = types.MethodType(_later, self)  # type: ignore[method-assign]


def _later(self: Any, action: int) -> None:
    self.x = self.x + 2.0


class Meta(type):
    made = 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        Meta.made += 1
        return super().__call__(*args, **kwargs)


class OfMeta:
    def __init__(self) -> None:
        self.number = 0


class MetaState(Walk):
    class Part(OfMeta, metaclass=Meta):
        pass

    def act(self, action: int) -> None:
        if self.t % 60 == 0:
            self.part = self.Part()
        self.x = self.x + Meta.made


class DefaultArgument(Walk):
    def act(self, action: int, seen: list[int] = []) -> None:  # noqa: B006 - which is what is tested
        if self.t == 150:
            seen.append(action)
        self.x = self.x + len(seen)


class DefaultOfHelper(Walk):
    def act(self, action: int) -> None:
        self.x = self.x + _note(self.t)


def _note(t: int, *, seen: dict[str, int] = {"n": 0}) -> int:  # noqa: B006 - which is what is tested
    if t == 150:
        seen["n"] += 1
    return seen["n"]


class FunctionAttribute(Walk):
    def act(self, action: int) -> None:
        if self.t == 150:
            _marked.count += 1  # type: ignore[attr-defined]
        self.x = self.x + _marked.count  # type: ignore[attr-defined]


def _marked() -> None:
    """Holds an attribute."""


_marked.count = 0  # type: ignore[attr-defined]


class Environ(Walk):
    def act(self, action: int) -> None:
        if self.t == 150:
            os.environ["AWKWARD"] = "1"
        self.x = self.x + float(os.environ.get("AWKWARD", "0"))


class Clock(Walk):
    def noise(self) -> float:
        return time.time() % 1.0


class RareUrandom(Walk):
    def noise(self) -> float:
        return os.urandom(1)[0] / 256 if self.t == 150 else 0.0


class RareSecret(Walk):
    def noise(self) -> float:
        return secrets.randbelow(100) / 100 if self.t == 150 else 0.0


class RareUuid(Walk):
    def noise(self) -> float:
        return uuid.uuid4().int % 100 / 100 if self.t == 150 else 0.0


class System(Walk):
    def make(self) -> None:
        self.rng = random.SystemRandom()

    def noise(self) -> float:
        return self.rng.random() if self.t == 150 else 0.0


class SystemByName(Walk):
    def noise(self) -> float:
        return random.SystemRandom().random() if self.t == 150 else 0.0


class FreshGenerator(Walk):
    """Seeds a generator by the system."""

    def noise(self) -> float:
        return float(np.random.default_rng().normal()) if self.t == 150 else 0.0


class ForeignGenerator:
    """As a generator of a library in C, whose state no field shows."""

    def __init__(self) -> None:
        self._next = itertools.count(7).__next__

    def draw(self) -> float:
        return self._next() * 2654435761 % 2**32 / 2**32


class TorchLike(Walk):
    def make(self) -> None:
        self.rng = ForeignGenerator()

    def noise(self) -> float:
        return self.rng.draw()


class FilePosition(Walk):
    def make(self) -> None:
        self.file = open(__file__)  # noqa: SIM115 - open for as long as the environment is

    def act(self, action: int) -> None:
        self.x = self.x + len(self.file.readline())

    def close(self) -> None:
        self.file.close()


class FileWritten(Walk):
    def make(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.path = Path(self.folder, "log")
        self.path.write_text("")
        self.file = self.path.open("a+")

    def act(self, action: int) -> None:
        self.file.write("x")
        self.file.flush()
        self.x = self.x + self.path.stat().st_size

    def close(self) -> None:
        self.file.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
            Path(self.folder).rmdir()


class Text(Walk):
    def make(self) -> None:
        self.text = io.StringIO()

    def act(self, action: int) -> None:
        self.text.write("x" * action)
        self.x = self.x + self.text.tell()


class Database(Walk):
    def make(self) -> None:
        self.rows = sqlite3.connect(":memory:", check_same_thread=False)
        self.rows.execute("create table t (n integer)")

    def act(self, action: int) -> None:
        self.rows.execute("insert into t values (?)", (action,))
        self.x = self.x + self.rows.execute("select sum(n) from t").fetchone()[0]

    def close(self) -> None:
        self.rows.close()


class Process(Walk):
    def make(self) -> None:
        code = "import sys\nn = 0\nfor line in sys.stdin:\n    n += int(line); print(n, flush=True)"
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)

    def act(self, action: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{action}\n")
        self.process.stdin.flush()
        self.x = self.x + int(self.process.stdout.readline())

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.process.communicate(timeout=10)


class Socket(Walk):
    def make(self) -> None:
        self.one, self.other = socket.socketpair()

    def act(self, action: int) -> None:
        self.one.send(bytes(1 + action))
        if self.t % 3 == 0:
            self.x = self.x + len(self.other.recv(100))

    def close(self) -> None:
        self.one.close()
        self.other.close()


class DescriptorNumber(Walk):
    """Holds a pipe by its numbers alone."""

    def make(self) -> None:
        self.ends = os.pipe()

    def act(self, action: int) -> None:
        os.write(self.ends[1], bytes(1 + action))
        if self.t % 3 == 0:
            self.x = self.x + len(os.read(self.ends[0], 100))

    def close(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                os.close(end)


class ByIdentity(Walk):
    """Knows objects by their addresses."""

    def make(self) -> None:
        self.things = [object() for _ in range(5)]
        self.seen = {id(thing): 0 for thing in self.things}

    def act(self, action: int) -> None:
        self.seen[id(self.things[action])] += 1
        self.x = self.x + self.seen[id(self.things[0])]


class ByIdentityOfOwn(Walk):
    class Thing:
        pass

    def make(self) -> None:
        self.things = [self.Thing() for _ in range(3)]
        self.seen = {id(thing): 0 for thing in self.things}

    def act(self, action: int) -> None:
        self.seen[id(self.things[action])] += 1
        self.x = self.x + self.seen[id(self.things[0])]


class BySetOfNodes(Walk):
    def make(self) -> None:
        self.open = {_Derived() for _ in range(4)}

    def act(self, action: int) -> None:
        for number, thing in enumerate(self.open):
            self.x = self.x + number * thing.add(action)


class HashedKeys(Walk):
    """Keys of a dict whose hashes change with what they hold."""

    def make(self) -> None:
        self.table: dict[Any, float] = {(n, frozenset((n, n + 1))): 0.0 for n in range(3)}

    def act(self, action: int) -> None:
        self.table[action, frozenset((action, action + 1))] += 1.0
        self.x = self.x + self.table[0, frozenset((0, 1))]


class OwnHash(Walk):
    class Key:
        def __init__(self, n: int) -> None:
            self.n = n

        def __hash__(self) -> int:
            return hash(self.n)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, type(self)) and other.n == self.n

    def make(self) -> None:
        self.seen = {self.Key(n): 0 for n in range(3)}

    def act(self, action: int) -> None:
        self.seen[self.Key(action)] += 1
        self.x = self.x + self.seen[self.Key(0)]


@dataclasses.dataclass(frozen=True)
class _Frozen:
    position: tuple[float, ...] = (0.0,)
    memory: list[float] = dataclasses.field(default_factory=list)


class Frozen(Walk):
    def make(self) -> None:
        self.frozen = _Frozen()

    def act(self, action: int) -> None:
        self.frozen = dataclasses.replace(self.frozen, position=(self.frozen.position[0] + action,))
        self.frozen.memory.append(1.0)
        self.x = self.x + self.frozen.position[0] + len(self.frozen.memory)


class Descriptor:
    """Keeps the values of all its owners."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else self.values.get(id(owner), 0.0)

    def __set__(self, owner: Any, value: float) -> None:
        self.values[id(owner)] = value


class Described(Walk):
    gain = Descriptor()

    def act(self, action: int) -> None:
        if self.t % 30 == 0:
            self.gain = self.gain + 1.0
        self.x = self.x + self.gain


class OwnSetattr(Walk):
    """Keeps its attributes elsewhere."""

    def __init__(self) -> None:
        object.__setattr__(self, "_held", {"total": 0.0})
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__.get("_held", {})
        if name in held:
            return held[name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "total":
            self._held["total"] = value
        else:
            object.__setattr__(self, name, value)

    def act(self, action: int) -> None:
        self.total = self.total + action
        self.x = self.x + self.total


REGISTRY: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


class Registered(Walk):
    """Is known to a registry of its module."""

    def act(self, action: int) -> None:
        if self.t == 150:
            REGISTRY[self] = REGISTRY.get(self, 0.0) + 1.0
        self.x = self.x + REGISTRY.get(self, 0.0)


class EzSub(Walk, EzPickle):
    """A copy by `copy` would be a new one."""

    def __init__(self, start: float = 0.0) -> None:
        EzPickle.__init__(self, start)
        self.start = start
        Walk.__init__(self)

    def make(self) -> None:
        self.heavy = _Heavy(self.start)

    def act(self, action: int) -> None:
        self.x = self.x + self.heavy.add(action)


class _Heavy:
    """As an object of C: only its methods know what it holds."""

    def __init__(self, start: float) -> None:
        self._add = itertools.accumulate(itertools.count(start), operator.add).__next__

    def add(self, action: int) -> float:
        return self._add() + action


class Coroutine(Walk):
    def begin(self) -> None:
        self.mind = self._think()
        self.mind.send(None)

    def _think(self) -> Any:
        total = 0.0
        while True:
            total += yield total

    def act(self, action: int) -> None:
        self.x = self.x + self.mind.send(float(action))


class Exits(Walk):
    """Keeps an exit stack, and an exception."""

    def make(self) -> None:
        self.stack = contextlib.ExitStack()
        self.error: Exception | None = None

    def act(self, action: int) -> None:
        if self.t == 3:
            self.error = ValueError(self.t)
        self.x = self.x + (self.error.args[0] if self.error else 0)


class Finalized(Walk):
    class Handle:
        alive = 0

        def __init__(self) -> None:
            type(self).alive += 1

        def __del__(self) -> None:
            type(self).alive -= 1

    def begin(self) -> None:
        self.handle = self.Handle()

    def act(self, action: int) -> None:
        self.x = self.x + self.Handle.alive


class CountsObjects(Walk):
    """Looks at what there is in its process."""

    def act(self, action: int) -> None:
        self.x = (
            self.x + sum(isinstance(thing, CountsObjects) for thing in gc.get_objects()) if self.t == 33 else self.x
        )


class Interned(Walk):
    """Compares by identity what a copy makes anew."""

    ABSENT: ClassVar[Any] = object()

    def make(self) -> None:
        self.last: Any = self.ABSENT

    def act(self, action: int) -> None:
        self.x = self.x + (1.0 if self.last is self.ABSENT else 2.0)
        if self.t == 40:
            self.last = action


class SubclassOfArray(np.ndarray):
    gain: float

    def __array_finalize__(self, source: Any) -> None:
        self.gain = getattr(source, "gain", 0.0)


class OwnArray(Walk):
    def make(self) -> None:
        self.numbers = np.zeros(3).view(SubclassOfArray)
        self.numbers.gain = 1.0

    def act(self, action: int) -> None:
        self.numbers += action
        self.numbers.gain *= 1.01
        self.x = self.x + np.asarray(self.numbers) + self.numbers.gain


class Held:
    def __init__(self, env: Any) -> None:
        self.env, self.t = env, 0


class HeldElsewhere(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Its base is known to an object beside it, by a method and by a closure."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.held, self.base, self.bound, self.look = Held(env), env, env.step, lambda: env.unwrapped.t  # type: ignore[attr-defined]

    def step(self, action: Any) -> Any:
        self.held.t += self.held.env.unwrapped.t
        observation, *rest = self.bound(action)
        return (observation + self.held.t + self.look() + self.base.unwrapped.t, *rest)


def held_elsewhere() -> gymnasium.Env[Any, Any]:
    return HeldElsewhere(gymnasium.wrappers.TimeLimit(Walk(), 150))


def _surrounded() -> Any:
    rng, held = np.random.default_rng(3), [0.0]

    class Drawing(Walk):
        """Draws from a generator of the function around its class."""

        def noise(self) -> float:
            return float(rng.normal()) if self.t == 150 else 0.0

    class Keeping(Walk):
        """Changes what the function around its class holds."""

        def act(self, action: int) -> None:
            mine = held
            if self.t == 150:
                mine[0] += 1.0
            self.x = self.x + held[0]

    return Drawing, Keeping


Drawing, Keeping = _surrounded()


class Siblings(Walk):
    """Two closures share a number; the one that is copied does not write it."""

    def begin(self) -> None:
        gain = 0.0

        def write() -> None:
            nonlocal gain
            gain += 1.0

        self.write, self.read = write, lambda: gain

    def act(self, action: int) -> None:
        if self.t == 150:
            self.write()
        self.x = self.x + self.read()


class Later(Walk):
    """Makes an attribute of its class in a step."""

    def act(self, action: int) -> None:
        if self.t == 150:
            type(self).extra = 1.0  # type: ignore[attr-defined]
        self.x = self.x + getattr(self, "extra", 0.0)


AWKWARD = [
    *(Drawing, Keeping, Siblings, Later),
    *(caches_observation, Forwards, ClosureSum, LateClosure, Thread, ThreadLocal, Weak, Aliases, AliasesInList),
    *(Structured, Masked, DeepSlots, GeneratorFunction, Cycles, ListIterator, Zipped, HiddenGlobal, GlobalBuffer),
    *(GlobalInPlace, GlobalQueue, GlobalAttribute, GlobalBySetattr, GlobalByPush, GlobalCount, ByGlobals, Context),
    *(Cached, CachedProperty, CachedFunction, Ctypes, Memory, MemoryFile, View, Array, Struct, Singleton),
    *(SingletonByName, ClassMutated, ClassMutatedByAlias, ClassMutatedDeep, ClassSwapped, MethodSwapped, MetaState),
    *(DefaultArgument, DefaultOfHelper, FunctionAttribute, Environ, Clock, RareUrandom, RareSecret, RareUuid, System),
    *(SystemByName, FreshGenerator, TorchLike, FilePosition, FileWritten, Text, Database, Process, Socket),
    *(DescriptorNumber, ByIdentity, ByIdentityOfOwn, BySetOfNodes, HashedKeys, OwnHash, Frozen, Described, OwnSetattr),
    *(Registered, EzSub, Coroutine, Exits, Finalized, CountsObjects, Interned, OwnArray, held_elsewhere),
]
