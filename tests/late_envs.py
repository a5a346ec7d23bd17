"""Environments that do only late, after any check of theirs has ended, what shows whether their state was right."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import pkgutil
import random
import types
from typing import Any

import numpy as np
from gymnasium import spaces

from tests.states_envs import Walk

LATE = 5000


class Late(Walk):
    """Counts its steps across its episodes."""

    n = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n += 1
        return super().step(action)

    @property
    def late(self) -> bool:
        return self.n > LATE


class Attributes(dict[str, Any]):
    """A dict whose items are its attributes, as many settings are."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class OwnDict(Late):
    """Writes an attribute, and reads the item that it is."""

    def make(self) -> None:
        self.settings = Attributes(gain=0.0)

    def act(self, action: int) -> None:
        if self.late:
            self.settings.gain += 1.0
        self.x = self.x + self.settings["gain"]


class Body:
    """Has attributes, its own or given ones."""

    def __init__(self, fields: dict[str, Any] | None = None) -> None:
        if fields is not None:
            self.__dict__ = fields
        self.speed = 0.0


class VarsOfBody(Late):
    """Writes the attributes of an object by the dict that they are in."""

    def make(self) -> None:
        self.body = Body()
        self.view = vars(self.body)

    def act(self, action: int) -> None:
        if self.late:
            self.view["speed"] += 1.0
        self.x = self.x + self.body.speed


class VarsFirst(VarsOfBody):
    """Has the dict before the object."""

    def make(self) -> None:
        body = Body()
        self.view = vars(body)
        self.body = body


class OneForTwo(VarsOfBody):
    """Has two objects whose attributes are the same ones."""

    def make(self) -> None:
        self.view = {}
        self.body, self.other = Body(self.view), Body(self.view)

    def act(self, action: int) -> None:
        if self.late:
            self.other.speed += 1.0
        self.x = self.x + self.body.speed


class VarsOfItself(Late):
    """Writes its attributes by the dict that they are in."""

    gain = 0.0

    def make(self) -> None:
        self.gain = 0.0
        self.view = vars(self)

    def act(self, action: int) -> None:
        if self.late:
            self.view["gain"] += 1.0
        self.x = self.x + self.gain


class Place(tuple[int, ...]):
    """A tuple that has attributes."""

    weight = 5.0


class OfTuple(Late):
    """Reads an attribute of a tuple."""

    def make(self) -> None:
        self.place = Place((1, 2))
        self.place.weight = 1.0

    def act(self, action: int) -> None:
        if self.late:
            self.x = self.x + self.place.weight


class OfMissing(Late):
    """Asks whether a value is an object of the standard library that stands for none."""

    def make(self) -> None:
        self.cell: Any = [dataclasses.MISSING]

    def act(self, action: int) -> None:
        if self.late and self.cell[0] is dataclasses.MISSING:
            self.x = self.x + 1


class ReadOnly(Late):
    """Has an array that cannot be written, and a part of it that can."""

    def make(self) -> None:
        self.whole = np.zeros(4)
        self.part = self.whole[1:]
        self.whole.flags.writeable = False

    def act(self, action: int) -> None:
        if self.late:
            self.part[0] += 1
            try:
                self.whole[1] = 9.0
            except ValueError:
                self.x = self.x + self.whole[1]


class ReadOnlyPart(ReadOnly):
    """Has the part first."""

    def make(self) -> None:
        whole = np.zeros(4)
        self.part = whole[1:]
        self.whole = whole
        whole.flags.writeable = False


class InClosure(Late):
    """Writes an array that a function of its own reads."""

    def make(self) -> None:
        held = self.held = self.holds()
        self.peek = lambda: held[0]

    def holds(self) -> Any:
        return np.zeros(3)

    def act(self, action: int) -> None:
        if self.late:
            self.held[0] += 1
        self.x = self.x + self.peek()


class PartInClosure(InClosure):
    """Has a part of the array."""

    def act(self, action: int) -> None:
        if self.late:
            self.part[0] += 1
        self.x = self.x + self.peek()

    def holds(self) -> Any:
        whole = np.zeros(3)
        self.part = whole[:2]
        return whole[:1]


class ListInClosure(InClosure):
    """Has a list."""

    def holds(self) -> Any:
        return [0.0]


class SpaceInClosure(Late):
    """Draws from a space that a function of its own holds."""

    def make(self) -> None:
        space = spaces.Box(0, 1, (), np.float64, seed=5)
        self.roll = lambda: float(space.sample())

    def act(self, action: int) -> None:
        if self.late:
            self.x = self.x + self.roll()


class DrawsAtLast(Late):
    """Makes a surface, where it has none yet."""

    def act(self, action: int) -> None:
        if self.late and not hasattr(self, "screen"):
            import pygame

            self.screen = pygame.Surface((4, 4))
        if self.late:
            self.screen.fill((1, 2, 3))


class Paints(Late):
    """Draws what is new alone, and asks what it has painted before."""

    def make(self) -> None:
        import pygame

        self.canvas, self.place = pygame.Surface((9, 9)), [0, 0]

    def act(self, action: int) -> None:
        self.place = [(self.place[0] + action) % 9, (self.place[1] + (action == 1)) % 9]
        if self.late and self.canvas.get_at(self.place)[0]:
            self.x = self.x + 1
        self.canvas.set_at(self.place, (255, 255, 255) if self.t % 3 else (0, 0, 0))


class PaintsInList(Paints):
    """Has two canvases, and reads one by an array."""

    def make(self) -> None:
        import pygame

        self.canvases, self.place = {"a": pygame.Surface((9, 9)), "b": pygame.Surface((9, 8))}, [0, 0]

    @property
    def canvas(self) -> Any:  # type: ignore[override]
        return self.canvases["a"]

    def act(self, action: int) -> None:
        import pygame

        super().act(action)
        if self.late:
            self.x = self.x + pygame.surfarray.array3d(self.canvas).mean()


class PaintsAtLast(Paints):
    """Has its canvas only when it paints."""

    def make(self) -> None:
        self.canvas: Any = None
        self.place = [0, 0]

    def act(self, action: int) -> None:
        import pygame

        if self.late:
            self.canvas = self.canvas or pygame.Surface((9, 9))
            super().act(action)


class Functions(Late):
    """Has functions of NumPy's."""

    def make(self) -> None:
        self.squash, self.sum, self.none = np.tanh, np.sum, object()

    def act(self, action: int) -> None:
        self.x = self.squash(self.x) + self.sum(self.x)


class OfFunction(Late):
    """Has a function of NumPy's that calls one of Python's, which counts."""

    def make(self) -> None:
        self.calls = 0
        self.squash = np.frompyfunc(self._squash, 1, 1)

    def _squash(self, value: float) -> float:
        self.calls += 1
        return value + self.calls if self.late else value

    def act(self, action: int) -> None:
        self.x = self.squash(self.x).astype(np.float64)


class Vectorized(Late):
    """Has a method whose function is an object."""

    def make(self) -> None:
        self.squash = types.MethodType(np.vectorize(_squashed), self)
        self.numbers = iter(range(10**6))

    def act(self, action: int) -> None:
        self.x = self.x + self.squash(next(self.numbers))


def _squashed(env: Any, number: int) -> float:
    return number / 1000.0


class ModuleDict(Late):
    """Draws from what all share, by a name in a dict."""

    def act(self, action: int) -> None:
        if self.late:
            self.x = self.x + np.__dict__["ran" + "dom"].normal()


class ModuleVars(Late):
    """The same, by `vars`."""

    def act(self, action: int) -> None:
        if self.late:
            self.x = self.x + vars(np)["ran" + "dom"].normal()


class Reduces(Late):
    """The same, by a function that gets `getattr`."""

    def act(self, action: int) -> None:
        if self.late:
            self.x = self.x + functools.reduce(getattr, ["random", "normal"], np)()  # type: ignore[arg-type, operator]


class Evaluates(Late):
    """The same, by a text."""

    def act(self, action: int) -> None:
        if self.late:
            self.x = self.x + builtins.eval("__import__('random').random()")


class Resolves(Late):
    """The same, by a name that is looked up."""

    def act(self, action: int) -> None:
        if self.late:
            self.x = self.x + pkgutil.resolve_name("random:random")()


# Seeds of the system


class SeedsResets(Late):
    """Makes a generator at each reset, without a seed where it gets none; its episodes are long."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.rng = np.random.default_rng(seed)
        return super().reset(seed=seed)

    def begin(self) -> None:
        self.x = self.rng.normal(size=3)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, self.late, False, info


class SeedsBySystem(Late):
    """Makes a generator without a seed, once."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng()

    def noise(self) -> float:
        return float(self.rng.normal())


class SeedsByClass(Late):
    """Makes another environment, of a class that it holds."""

    def make(self) -> None:
        self.kind = SeedsBySystem
        self.inner = self.kind()

    def act(self, action: int) -> None:
        if self.late:
            self.inner = self.kind()
        self.x = self.x + self.inner.noise()


class SeedsResetsOfRandom(SeedsResets):
    """The same, with a generator of the module `random`."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=0 if seed is None else seed)
        self.x[0] = random.Random(seed).random()
        return self.x.copy(), {}


# Attributes that all environments share


class Level:
    """Settings, and an object of them."""

    number = 1


LEVEL, NAMED = Level(), types.SimpleNamespace(number=1)


class RaisesOwn(Late):
    number = 1

    def act(self, action: int) -> None:
        if self.late:
            self.__class__.number += 1
        self.x = self.x * self.number


class RaisesByType(RaisesOwn):
    def act(self, action: int) -> None:
        if self.late:
            type(self).number = self.number + 1
        self.x = self.x * self.number


class RaisesByMethod(RaisesOwn):
    @classmethod
    def raised(cls) -> None:
        cls.number += 1

    def act(self, action: int) -> None:
        if self.late:
            self.raised()
        self.x = self.x * self.number


class RaisesOther(Late):
    def act(self, action: int) -> None:
        if self.late:
            Level.number += 1
        self.x = self.x * Level.number


class RaisesObject(Late):
    def act(self, action: int) -> None:
        if self.late:
            LEVEL.number += 1
        self.x = self.x * LEVEL.number


class RaisesNamed(Late):
    def act(self, action: int) -> None:
        if self.late:
            NAMED.number = action
        self.x = self.x * NAMED.number


class SetsOwn(RaisesOwn):
    def act(self, action: int) -> None:
        if self.late:
            setattr(type(self), "number", self.number + 1)  # noqa: B010 - what is tested
        self.x = self.x * self.number


class SetsByClass(RaisesOwn):
    def act(self, action: int) -> None:
        if self.late:
            setattr(self.__class__, "number", self.number + 1)  # noqa: B010 - what is tested
        self.x = self.x * self.number


class SetsOther(RaisesOther):
    def act(self, action: int) -> None:
        if self.late:
            setattr(Level, "number", action)  # noqa: B010 - what is tested
        self.x = self.x * Level.number


CHANGES_LATE = [
    *(RaisesOwn, RaisesByType, RaisesByMethod, RaisesOther, RaisesObject, RaisesNamed),
    *(SetsOwn, SetsByClass, SetsOther),
]

RIGHT = [
    *(OwnDict, VarsOfBody, VarsFirst, OneForTwo, OfTuple, OfMissing, ReadOnly, ReadOnlyPart, DrawsAtLast, Functions),
    *(Paints, PaintsInList, PaintsAtLast),
]
"""Those that are copied."""
LATES = [
    *(
        *RIGHT,
        VarsOfItself,
        InClosure,
        PartInClosure,
        ListInClosure,
        SpaceInClosure,
        OfFunction,
        Vectorized,
        ModuleDict,
    ),
    *(ModuleVars, Reduces, Evaluates, Resolves),
]
