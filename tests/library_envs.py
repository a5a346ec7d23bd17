"""Environments that compute by well-known libraries, and hold their objects."""

from __future__ import annotations

import array
import itertools
import types
from typing import Any

import gymnasium
import numpy as np
import pandas as pd
import scipy.integrate
import scipy.linalg
import scipy.sparse
import scipy.stats
from PIL import Image, ImageDraw

from tests.states_envs import Walk

LATE = 150
PRICES = pd.DataFrame({"price": np.arange(1000.0), "name": ["a", "b"] * 500}, pd.date_range("2026-01-01", periods=1000))


class Solves(Walk):
    def act(self, action: int) -> None:
        self.x[0] = scipy.integrate.solve_ivp(lambda t, y: action - y, (0, 0.1), [self.x[0]]).y[0, -1]


class Inverts(Walk):
    def act(self, action: int) -> None:
        self.x = scipy.linalg.solve(np.eye(3) * 2, self.x) + action


class Multiplies(Walk):
    def make(self) -> None:
        self.matrix = scipy.sparse.csr_matrix(np.eye(3) * 0.9)

    def act(self, action: int) -> None:
        self.matrix.data[0] += 0.001 * action
        self.x = self.matrix @ self.x


class Table(Walk):
    """Reads a table, as those who trade do."""

    def __init__(self, prices: pd.DataFrame = PRICES) -> None:
        self.prices = prices
        self.names = prices["name"]
        self.values = prices["price"].to_numpy()
        super().__init__()

    def act(self, action: int) -> None:
        self.when = self.prices.index[self.t]
        self.x[0] += self.prices.iloc[self.t].price + self.values[self.t] + self.when.day
        self.x[1] += self.names.iloc[self.t] == "a"


class OwnTable(Table):
    def __init__(self) -> None:
        super().__init__(PRICES.copy())


class Settings(Walk):
    """Keeps its numbers in a namespace, and in one of a class of its own."""

    class Own(types.SimpleNamespace):
        """Has a method."""

        def add(self, number: int) -> None:
            self.total += number

    def make(self) -> None:
        self.of = types.SimpleNamespace(total=0, within=self.Own(total=0))
        self.same = self.of.within

    def act(self, action: int) -> None:
        self.of.total += action
        self.of.within.add(action + 1)
        self.x[0] += self.of.total + self.same.total


class Numbers(Walk):
    def make(self) -> None:
        self.numbers = array.array("d", [0.0])
        self.again = [self.numbers]

    def act(self, action: int) -> None:
        self.numbers.append(action)
        self.x[0] += sum(self.again[0][-9:]) + len(self.again[0])


class Resets:
    """Is set as an attribute of its objects, and read of their own fields, as in a graph of networkx."""

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)["edges"] = value


class Graph:
    edges: Any = Resets()

    def __init__(self) -> None:
        self.edges = {}

    def add(self, edge: int) -> None:
        self.edges[edge] = self.edges.get(edge, 0) + 1


class Graphs(Walk):
    def begin(self) -> None:
        self.graph = Graph()

    def act(self, action: int) -> None:
        self.graph.add(action)
        self.x[0] += self.graph.edges[action]


COPIED = [Solves, Inverts, Multiplies, Table, OwnTable, Settings, Numbers, Graphs]


class Writes(Table):
    """Changes a table that it makes for each episode."""

    def begin(self) -> None:
        self.counts = pd.DataFrame({"count": np.zeros(3)})

    def act(self, action: int) -> None:
        self.counts.loc[action, "count"] += 1
        self.x[0] += self.counts["count"].iloc[0]


class WritesByPart(Walk):
    """Changes a table by an array that is a part of it."""

    def begin(self) -> None:
        self.counts = pd.DataFrame({"count": np.zeros(3)})
        self.part = self.counts["count"].to_numpy().view()

    def act(self, action: int) -> None:
        if self.t > LATE:
            self.part.flags.writeable = True
            self.part[action] += 1
        self.x[0] += self.counts["count"].sum()


class Market:
    def __init__(self) -> None:
        self.counts = pd.DataFrame({"count": np.zeros(3)})


class WritesWithin(Walk):
    """The same, with the table in an object."""

    def begin(self) -> None:
        self.market = Market()
        self.part = self.market.counts["count"].to_numpy().view()

    def act(self, action: int) -> None:
        if self.t > LATE:
            self.part.flags.writeable = True
            self.part[action] += 1
        self.x[0] += self.market.counts["count"].sum()


class Cells(Walk):
    """Changes what lies in the cells of a table."""

    def begin(self) -> None:
        self.lists = pd.DataFrame({"list": [[0], [0], [0]]})

    def act(self, action: int) -> None:
        if self.t > LATE:
            self.lists["list"].iloc[action].append(self.t)
        self.x[0] += sum(map(len, self.lists["list"]))


class Attributed(Walk):
    """Keeps a number in the attributes of a table."""

    def begin(self) -> None:
        self.counts = pd.DataFrame({"count": np.zeros(3)})

    def act(self, action: int) -> None:
        if self.t > LATE:
            self.counts.attrs["n"] = self.counts.attrs.get("n", 0) + action
        self.x[0] += self.counts.attrs.get("n", 0)


class Draws(Walk):
    """Draws on a picture."""

    def begin(self) -> None:
        self.picture = Image.new("L", (8, 8))

    def act(self, action: int) -> None:
        ImageDraw.Draw(self.picture).point((action, self.t % 8), 200)
        self.x[0] += np.asarray(self.picture).sum()


RIGHT_OR_REFUSED = [Writes, WritesByPart, WritesWithin, Cells, Attributed, Draws]


class SamplesTable(Walk):
    def make(self) -> None:
        self.prices = PRICES.copy()

    def act(self, action: int) -> None:
        if self.t == LATE:
            self.x[0] += self.prices.sample(1).price.iloc[0]


class DrawsNormal(Walk):
    def act(self, action: int) -> None:
        if self.t == LATE:
            self.x[0] += scipy.stats.norm.rvs()


class DrawsMatrix(Walk):
    def act(self, action: int) -> None:
        if self.t == LATE:
            self.x[0] += scipy.sparse.random(3, 3, 0.5).sum()


DRAW_LATE = [SamplesTable, DrawsNormal, DrawsMatrix]


class FirstStep(Walk):
    """Has attributes from the first step of its first episode on, which count across episodes."""

    n = 0

    def begin(self) -> None:
        self.numbers = itertools.count()  # is not copied

    def act(self, action: int) -> None:
        self.n += 1
        if not hasattr(self, "first"):
            self.first = action + 1
        self.x[0] += next(self.numbers) + self.n + self.first


class FirstStepWithin(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The same in slots of a wrapper."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        super().__init__(FirstStep())

    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        self.total: float = getattr(self, "total", 0.0) + float(reward)
        return (observation + self.total, self.total, *rest)
