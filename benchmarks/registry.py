"""The measurements, and what each is compared with.

A *subject* is one thing that does some work. Its function is a context manager that sets it up (servers in processes
of their own, worlds joined) and gives a function `measure(seconds)`: it works for about that long and returns one
number in the subject's unit. Subjects of one *group* do comparable work and are timed in turns.

A *goal* holds one subject against another of its group, by the median over the rounds of their ratio in that round.

A subject is of this package (`ours`), of somebody else (`peer`), or a `floor`: the same environments and as many bytes
over a bare Unix socket, which nothing that has two processes can beat.

To add some, write a module in `benchmarks/subjects/`; every module there is imported.

    @subject("lanes-64-unix", "64 lanes in one world over a Unix socket", group="cartpole-64")
    def lanes_unix() -> Iterator[Measure]:
        with ServerProcess("CartPole-v1", "--num-envs", "64") as server:
            ...
            yield measure

    goal("B-1", "lanes-64-grpc", against="sync-64", at_least=0.8)
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

__all__ = ["GOALS", "STEPS", "SUBJECTS", "Goal", "Kind", "Measure", "Subject", "goal", "load", "subject"]

Measure = Callable[[float], float]

STEPS = "env steps/s"
Kind = Literal["ours", "peer", "floor"]


@dataclass(frozen=True)
class Subject:
    """One thing that is measured."""

    name: str
    title: str
    group: str
    unit: str
    higher_is_better: bool
    kind: Kind
    open: Callable[[], AbstractContextManager[Measure]]


@dataclass(frozen=True)
class Goal:
    """A ratio that is wanted: of a subject to another one, or to a number in its unit."""

    id: str
    of: str
    against: str | float | None
    at_least: float | None
    at_most: float | None

    @property
    def text(self) -> str:
        bounds = [f"≥ {self.at_least:g}"] if self.at_least is not None else []
        bounds += [f"≤ {self.at_most:g}"] if self.at_most is not None else []
        return " and ".join(bounds)

    def met(self, ratio: float) -> bool:
        return (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)


SUBJECTS: dict[str, Subject] = {}
GOALS: list[Goal] = []


def subject(
    name: str,
    title: str,
    *,
    group: str,
    unit: str = STEPS,
    higher_is_better: bool = True,
    kind: Kind = "ours",
) -> Callable[[Callable[[], Iterator[Measure]]], Callable[[], AbstractContextManager[Measure]]]:
    """Register a generator function that sets up, yields a `Measure`, and cleans up."""

    def register(function: Callable[[], Iterator[Measure]]) -> Callable[[], AbstractContextManager[Measure]]:
        if name in SUBJECTS:
            raise ValueError(f"there are two subjects named {name!r}")
        manager = contextmanager(function)
        SUBJECTS[name] = Subject(name, title, group, unit, higher_is_better, kind, manager)
        return manager

    return register


def goal(
    id: str,
    of: str,
    *,
    against: str | float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    """Register a goal; `against=None` holds the subject's own number against the bounds."""
    GOALS.append(Goal(id, of, against, at_least, at_most))


def load() -> None:
    """Import every module of subjects, and check that goals name subjects that there are, in one group."""
    package = importlib.import_module("benchmarks.subjects")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"benchmarks.subjects.{module.name}")
    for item in GOALS:
        named = [item.of] + ([item.against] if isinstance(item.against, str) else [])
        unknown = [name for name in named if name not in SUBJECTS]
        if unknown:
            raise ValueError(f"the goal {item.id} names {', '.join(unknown)}, which no module registers")
        if len({SUBJECTS[name].group for name in named}) > 1:
            raise ValueError(f"the goal {item.id} compares subjects of different groups: {', '.join(named)}")
