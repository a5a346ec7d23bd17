"""Branches: episodes that begin in the middle of others, and what led an environment to where they begin.

An environment that was put into an earlier situation goes on from a call that is recorded elsewhere: of another lane,
in another stream, or earlier in its own. That call depends on those before it, up to a reset with a seed, or up to a
call at which that environment was put elsewhere in its turn. So the way to a branch is a list of parts of streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Protocol

from bridge.core.encoding.tensors import Array
from bridge.errors import RecordingError
from bridge.recording.rows import BranchPoint

__all__ = ["Parent", "PathPart", "next_origin", "parent_of", "path_to"]


class LinkedStream(Protocol):
    """What is asked here of a `RecordedStream`, which knows this module."""

    header: Any
    title: str
    lanes: int

    def sibling(self, name: str) -> Any:
        """Return a stream of the same folder; None: there is none."""

    def column(self, name: str) -> Array:
        """Return a column of numbers."""

    def row_at(self, lane: int, call: int) -> int | None:
        """Return the newest row of a lane up to a call."""

    def lane_number(self, lane: int) -> int:
        """Return the number of a lane in its world."""

    def known_from(self, lane: int, call: int) -> tuple[int, BranchPoint | None]:
        """Return the call from which on the state of a lane is known, and where it went on from there."""


@dataclasses.dataclass(frozen=True)
class Parent:
    """Where the episode goes on from that is a branch."""

    episode: str
    """The id of the other episode; empty: it is not known."""
    step: int | None
    """The step of it after which this one goes on, 0 for its first observation; None: it is not known."""
    seed: int | None
    """By which the random generators were seeded anew; None: they went on."""
    reason: str = ""
    """Why the other episode is not known; empty: it is."""

    def facts(self) -> dict[str, Any]:
        """Return what is known of it, as JSON says it."""
        return {"episode": self.episode, "step": self.step, "seed": self.seed}

    def columns(self) -> dict[str, Any]:
        """Return what is known of it, for the metadata of an episode in a dataset."""
        found = {"parent": self.episode or "unknown", "parent_step": self.step, "parent_seed": self.seed}
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        seed = "" if self.seed is None else f" seed {self.seed}"
        return f"{self.episode} step {self.step}{seed}" if self.episode else f"unknown{seed}"


@dataclasses.dataclass(frozen=True)
class PathPart:
    """Calls of one environment that follow each other."""

    stream: Any
    """A `RecordedStream`."""
    lane: int
    first: int
    """The first call."""
    last: int
    """The last one, which may come before the first: then there is none."""
    seed: int | None
    """By which the random generators are seeded anew after the last one; None: they go on."""


def parent_of(stream: LinkedStream, point: BranchPoint) -> Parent:
    """Return which episode a branch goes on from."""
    other, reason = _recorded(stream, point)
    if other is None:
        return Parent("", None, point.seed, reason)
    row = other.row_at(point.lane, point.call)
    number = 0 if row is None else int(other.column("episode")[row])
    if row is None or not number:
        return Parent("", None, point.seed, f"rows of {point.stream} are missing")
    step, lane = int(other.column("t")[row]), other.lane_number(point.lane)
    return Parent(f"{point.stream}.{lane}.{number}", step, point.seed)


def _recorded(stream: LinkedStream, point: BranchPoint) -> tuple[LinkedStream | None, str]:
    """Return the stream that a branch goes on from; None: why there is none."""
    if not point.stream:
        return None, "what it goes on from was not recorded"
    other = stream.sibling(point.stream)
    if other is None:
        return None, f"what it goes on from is in the recording {point.stream}, which is not in this folder"
    if other.header["spaces"][0] != stream.header["spaces"][0] or other.title != stream.title:
        return None, f"what it goes on from is in {point.stream}, which is of another environment"
    if not 0 <= point.lane < other.lanes:
        return None, f"what it goes on from is the lane {point.lane} of {point.stream}, which has {other.lanes}"
    return other, ""


def path_to(stream: LinkedStream, point: BranchPoint) -> list[PathPart]:
    """Return the calls that lead an environment to where a branch begins, from a reset with a seed on.

    Args:
        stream: Has the branch.
        point: Where that goes on from.

    Raises:
        RecordingError: Some of them were not recorded, or are missing, or there is no such reset.
    """
    found: list[PathPart] = []
    keys: set[tuple[str, int, int]] = set()
    begins: BranchPoint | None = point
    while begins is not None:
        here = begins
        stream, begins = next_origin(stream, here, keys)
        keys.add((here.stream, here.lane, here.call))
        first, _ = stream.known_from(here.lane, here.call)
        # At a branch itself nothing is called.
        found.append(PathPart(stream, here.lane, first + (begins is not None), here.call, here.seed))
    return found[::-1]


def next_origin(
    stream: LinkedStream, point: BranchPoint, visited: Collection[tuple[str, int, int]]
) -> tuple[Any, BranchPoint | None]:
    """Return the stream that a branch goes on from, and where that part of it goes on from in its turn.

    Args:
        stream: Has the branch.
        point: Where that goes on from.
        visited: Those of branches that this one leads to: stream, lane and call.

    Returns:
        The other stream; and None where it was reset with a seed since.

    Raises:
        RecordingError: As `path_to`.
    """
    other, reason = _recorded(stream, point)
    if other is None:
        raise RecordingError(reason)
    if (point.stream, point.lane, point.call) in visited:  # of a file that somebody has made
        raise RecordingError(f"what it goes on from goes on from itself, in {point.stream}")
    return other, other.known_from(point.lane, point.call)[1]
