"""Branches: episodes that begin in the middle of others, and the calls that lead an environment to that point.

An environment that was put into an earlier situation continues after a recorded call of another lane, another stream,
or its own past. The state after that call depends on the calls before it, back to a reset with a seed or to a call at
which that environment was itself put elsewhere. So the path to a branch is a list of parts of streams.
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
    """The part of `RecordedStream`'s interface that this module uses; that module imports this one."""

    header: Any
    title: str
    lanes: int

    def sibling(self, name: str) -> Any:
        """Return a stream of the same folder; None if there is none."""

    def column(self, name: str) -> Array:
        """Return a column of numbers."""

    def row_at(self, lane: int, call: int) -> int | None:
        """Return the newest row of a lane up to a call."""

    def lane_number(self, lane: int) -> int:
        """Return the number of a lane in its world."""

    def known_from(self, lane: int, call: int) -> tuple[int, BranchPoint | None]:
        """Return the first call from which a lane's state is reproducible, and the point that it continued, if any."""


@dataclasses.dataclass(frozen=True)
class Parent:
    """The point at which a branch continues another episode."""

    episode: str
    """The id of the other episode; empty: unknown."""
    step: int | None
    """The step of that episode after which this one continues, 0 for its first observation; None: unknown."""
    seed: int | None
    """The seed with which the random generators were seeded again; None: they were not."""
    reason: str = ""
    """Why the other episode is unknown; empty: it is known."""

    def facts(self) -> dict[str, Any]:
        """Return the known facts as values for JSON."""
        return {"episode": self.episode, "step": self.step, "seed": self.seed}

    def columns(self) -> dict[str, Any]:
        """Return the known facts for the metadata of an episode in a dataset."""
        found = {"parent": self.episode or "unknown", "parent_step": self.step, "parent_seed": self.seed}
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        seed = "" if self.seed is None else f" seed {self.seed}"
        return f"{self.episode} step {self.step}{seed}" if self.episode else f"unknown{seed}"


@dataclasses.dataclass(frozen=True)
class PathPart:
    """Consecutive calls of one environment."""

    stream: Any
    """A `RecordedStream`."""
    lane: int
    first: int
    """The first call."""
    last: int
    """The last call; before the first one if the part is empty."""
    seed: int | None
    """The seed with which the random generators are seeded again after the last call; None: they are not."""


def parent_of(stream: LinkedStream, point: BranchPoint) -> Parent:
    """Return the episode that a branch continues."""
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
    """Return the stream that a branch continues; None: why it is missing."""
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
    """Return the calls that lead an environment to the beginning of a branch, starting with a seeded reset.

    Args:
        stream: The stream with the branch.
        point: The point at which the branch continues.

    Raises:
        RecordingError: Some calls were not recorded or are missing, or there is no seeded reset.
    """
    found: list[PathPart] = []
    keys: set[tuple[str, int, int]] = set()
    begins: BranchPoint | None = point
    while begins is not None:
        here = begins
        stream, begins = next_origin(stream, here, keys)
        keys.add((here.stream, here.lane, here.call))
        first, _ = stream.known_from(here.lane, here.call)
        # The call at which a branch begins is not made.
        found.append(PathPart(stream, here.lane, first + (begins is not None), here.call, here.seed))
    return found[::-1]


def next_origin(
    stream: LinkedStream, point: BranchPoint, visited: Collection[tuple[str, int, int]]
) -> tuple[Any, BranchPoint | None]:
    """Return the stream that a branch continues, and the point that that part itself continues.

    Args:
        stream: The stream with the branch.
        point: The point at which the branch continues.
        visited: The points of branches that led here: stream, lane and call.

    Returns:
        The other stream, and the point; None for the point if it was reset with a seed since.

    Raises:
        RecordingError: As for `path_to`.
    """
    other, reason = _recorded(stream, point)
    if other is None:
        raise RecordingError(reason)
    if (point.stream, point.lane, point.call) in visited:  # possible only in a manipulated file
        raise RecordingError(f"what it goes on from goes on from itself, in {point.stream}")
    return other, other.known_from(point.lane, point.call)[1]
