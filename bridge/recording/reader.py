"""Read recordings: the streams of a folder, and their episodes."""

from __future__ import annotations

import base64
import bisect
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.encoding import values
from bridge.core.encoding.spaces import Leaf
from bridge.core.encoding.tensors import Array
from bridge.core.extras import imported_from
from bridge.errors import RecordingError, TensorError
from bridge.recording.branches import Parent, next_origin, parent_of
from bridge.recording.files import UNREADABLE, Damage, SegmentFile, find_segments, load_segment
from bridge.recording.rows import FORMAT, AgentColumns, BranchPoint, Columns, Kind, is_fixed, of_cell

with imported_from("recordings need pyarrow", "record"):
    import pyarrow as pa

__all__ = ["Folder", "RecordedEpisode", "RecordedStream", "Reset", "open_episode", "read_folder"]

# Columns read from every file. Most bytes of a recording are samples, which are read only for requested episodes.
_INDEX = ("call", "lane", "kind", "episode", "t", "time", "reward", "terminated", "truncated", "by", "event", "alive")
_MOST_LANES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Reset:
    """The arguments of a reset."""

    seed: Any
    """The argument: an integer, a list with one per lane, or None."""
    options: Any
    """A dict, or None."""
    mask: Sequence[bool] | None
    """The lanes that were reset; None: all."""
    unknown_options: bool
    """True if options were given that could not be recorded."""

    def seeds(self, lanes: int) -> list[int | None]:
        """Return the seed of each lane; None for a lane without a seed, or that was not reset."""
        given = self.seed  # Gymnasium adds the lane's number to an integer
        if not isinstance(given, list):
            given = [None if given is None else int(given) + lane for lane in range(lanes)]
        there = self.mask or [True] * lanes
        return [int(given[lane]) if there[lane] and given[lane] is not None else None for lane in range(lanes)]


# Compared by identity: `==` of fields does not work with arrays.
@dataclasses.dataclass(frozen=True, eq=False)
class RecordedEpisode:
    """An episode of one environment, of one lane, or of several agents together."""

    stream: RecordedStream
    lane: int
    number: int
    """The number of the episode in its lane, from 1."""
    own: Array
    """The indices of its resets and steps among the stream's rows; with several agents, of those of all."""
    end: str
    """How it ended: `terminated`, `truncated`, `reset` (cut off), `failed`, `closed`, `running` or `lost`."""
    incomplete: bool
    """True if rows of it are missing."""

    @property
    def id(self) -> str:
        """The id: recording, stream, lane and number."""
        return f"{self.stream.run}-{self.stream.number}.{self.stream.lane_number(self.lane)}.{self.number}"

    @property
    def start(self) -> int:
        """The number of the call that returned its first observation."""
        return int(self.stream.column("call")[self.own[0]])

    @property
    def stop(self) -> int:
        """The number of the call after its last step."""
        return int(self.stream.column("call")[self.own[-1]]) + 1

    @property
    def length(self) -> int:
        """The number of steps; with several agents, of the environment's steps."""
        # With several agents, older recordings have a number for each, and some agents leave before others.
        return int(self.stream.column("t")[self.own].max())

    def step_of(self, call: int) -> int:
        """Return the step of the newest call up to `call`: 0 for the first observation; negative: before that."""
        if call < self.start:
            return call - self.start
        calls = self.stream.column("call")[self.own]
        return int(self.stream.column("t")[self.own[np.searchsorted(calls, call, "right") - 1]])

    @property
    def rewards(self) -> Array:
        """The reward of each step: `(length,)`, `(length, agents)`, or with the shape of the reward space."""
        rewards, steps = self.stream.column("reward"), self.own[self.stream.column("t")[self.own] > 0]
        if self.stream.kind != "agents":
            found: Array = rewards[steps]
            return found
        found = np.zeros((self.length, self.stream.columns.width), rewards.dtype)
        found[self.stream.column("t")[steps] - 1, self.stream.column("lane")[steps]] = rewards[steps]
        return found

    @property
    def fps(self) -> float | None:
        """Frames per second of the world's clock, or of its program; None: it had no clock."""
        told = self.stream.header.get("fps")
        if not told or not self.stream.header.get("own_loop"):
            return None if not told else float(told)
        clock = np.unique(self.stream.cells("clock", self.own).to_numpy(zero_copy_only=False))
        gaps = np.diff(clock[np.isfinite(clock)])
        # The median ignores pauses of the program, such as in a menu.
        return round(1.0 / float(np.median(gaps)), 2) if len(gaps) else float(told)

    @property
    def total(self) -> float:
        """The sum of its rewards; with several agents, of all agents."""
        return float(self.rewards.sum())

    @property
    def players(self) -> list[str]:
        """The players that acted in it, ordered by their first actions."""
        return [name for name in dict.fromkeys(self.stream.players(self.own)) if name]

    @property
    def seed(self) -> int | None:
        """The seed of its reset; None: it began by autoreset, or without a seed."""
        reset = self.stream.resets.get(self.start)
        return None if reset is None else reset.seeds(self.stream.lanes)[self.lane]

    @functools.cached_property
    def parent(self) -> Parent | None:
        """The point of another episode that it continues, if it is a branch; None: it began with a reset."""
        points = self.stream.branches.get(self.start)
        point = None if points is None else points[self.lane]
        return None if point is None else parent_of(self.stream, point)

    @property
    def started(self) -> float:
        """When it began, in seconds since 1970."""
        return float(self.stream.column("time")[self.own[0]])

    @property
    def seconds(self) -> float:
        """The seconds from its first observation to its last."""
        return float(self.stream.column("time")[self.own[-1]]) - self.started


class RecordedStream:
    """The recorded steps of one environment, one world of lanes, or one environment of several agents.

    Args:
        run: The recording's name from its file names. The header is untrusted, and the name is used in file names.
        number: The stream's number in the recording.
        columns: Its columns.
        parts: Its segments in order, each with the index columns of its rows.
        damage: The parts of its files that could not be read.
        siblings: The streams of its folder.
    """

    def __init__(
        self,
        run: str,
        number: int,
        columns: Columns,
        parts: Sequence[tuple[SegmentFile, pa.Table]],
        damage: Sequence[Damage],
        siblings: _Siblings,
    ) -> None:
        self._siblings = siblings
        self.run, self.number, self.columns, self.damage = run, number, columns, damage
        self.header, self.kind = columns.header, columns.kind
        """`kind`: `env`, `lanes` or `agents`."""
        self.lanes, self.agents = columns.lanes or 1, columns.agents
        self.spaces = columns.spaces
        """The observation and action space of one environment, or of each agent."""
        self.title = str(self.header.get("env_id") or self.header.get("title") or "?")[:200]
        """The name of the environment."""
        self.has_observations = bool(self.header.get("observations"))
        """True if observations were recorded."""
        self._parts = [file for file, _ in parts]
        self._table = pa.concat_tables([table for _, table in parts])
        self._stops = np.cumsum([len(table) for _, table in parts])
        self._columns: dict[str, Array] = {}
        self._of_lanes: dict[int, Array] = {}
        self._lane_known: dict[int, list[tuple[int, BranchPoint | None]]] = {}
        self._held: dict[int, tuple[pa.RecordBatch, dict[str, tuple[Array, Array]]]] = {}
        self.names: list[str] = []
        """The players, by their numbers in the column `by`."""
        calls, kinds = self.column("call"), self.column("kind")
        self.first = int(calls[0]) if len(calls) else 0
        """The first available call."""
        # The rows of a call, one per lane, have the same number, as does a method call before it.
        jumps = np.flatnonzero(np.diff(calls) > 1)
        self.gaps = [(int(calls[at]) + 1, int(calls[at + 1] - calls[at] - 1)) for at in jumps.tolist()]
        """Missing calls: the number of the first one, and how many."""
        if self.first and parts[0][0].part == 1:  # otherwise earlier segments were deleted at the size limit
            self.gaps.insert(0, (0, self.first))
        self._lost = [at for at, _ in self.gaps]
        self.closed = bool((kinds == Kind.END).any())
        """True if the environment was closed properly."""
        self._discarded: set[int] = set()
        self.branches: dict[int, list[BranchPoint | None]] = {}
        """Where environments were put elsewhere, by call number: for each lane the point that it continues, or None if
        it was not affected."""
        self.resets, self.calls = self._read_events()
        """The resets, by call number; and the method calls, kind and request, before each call."""

    def lane_number(self, lane: int) -> int:
        """Return the number of a lane in its world, which may have several streams."""
        return int(self.header.get("lane", lane)) if self.kind == "env" else lane

    def column(self, name: str) -> Array:
        """Return a column of numbers of all rows; 0 for missing values, and -1 for nobody in `by`."""
        if name not in self._columns:
            cells = self._table[name].combine_chunks()
            if name == "by":
                # As indices into a list of names, not as an object per row.
                encoded = cells.cast(pa.string()).dictionary_encode()
                self.names = [_printable(text) for text in encoded.dictionary.to_pylist()]
                cells = encoded.indices.fill_null(-1)
            spec = self.columns.reward
            # Rewards may be arrays; all other index columns are numbers.
            given, places = _given(cells, spec.shape if name == "reward" else (), spec.dtype)
            self._columns[name] = np.zeros((len(places), *given.shape[1:]), given.dtype)
            self._columns[name][places >= 0] = given
        return self._columns[name]

    def _read_events(self) -> tuple[dict[int, Reset], dict[int, list[tuple[str, bytes]]]]:
        resets: dict[int, Reset] = {}
        calls: dict[int, list[tuple[str, bytes]]] = {}
        events = self._table["event"].combine_chunks()
        for at in np.flatnonzero(events.is_valid().to_numpy(zero_copy_only=False)).tolist():
            call, kind = int(self.column("call")[at]), int(self.column("kind")[at])
            try:
                event = json.loads(events[at].as_py())
                if kind == Kind.CALL:
                    calls.setdefault(call, []).append((str(event["what"]), base64.b64decode(event["request"])))
                elif kind == Kind.RESET and "branch" in event:
                    self.branches[call] = _read_branch(event["branch"], self.lanes)
                elif kind in (Kind.RESET, Kind.FAILED_RESET):
                    options = values.decode(base64.b64decode(event["options"])) if "options" in event else None
                    resets[call] = Reset(event.get("seed"), options, event.get("mask"), "unknown_options" in event)
                    resets[call].seeds(self.lanes)  # raises if it cannot be read
                elif kind == Kind.FAILED_STEP and event.get("discarded"):
                    self._discarded.add(call)
            except (*UNREADABLE, AttributeError, TensorError) as error:
                raise RecordingError(f"the event of call {call} cannot be read: {error!r:.100}") from error
        return resets, calls

    def _segment(self, part: int) -> tuple[pa.RecordBatch, dict[str, tuple[Array, Array]]]:
        """Return the rows of a segment, and the cache of `_given` for its columns.

        The last two segments are kept, because an episode may span two.
        """
        if part not in self._held:
            _, table, _ = _load(self._parts[part], None)
            rows = int(self._stops[part] - (self._stops[part - 1] if part else 0))
            if table is None or len(table) < rows:
                raise RecordingError(f"{self._parts[part].path.name} changed while it was read")
            # One batch: its columns are arrays, which `concat_arrays` needs, and not chunked arrays.
            (batch,) = table.slice(0, rows).combine_chunks().to_batches()  # more may have been written since
            self._held = {**dict(list(self._held.items())[-1:]), part: (batch, {})}
        return self._held[part]

    def _given(self, part: int, name: str, leaf: Leaf) -> tuple[Array, Array]:
        """Return the result of `_given` for a segment's column of samples."""
        batch, given = self._segment(part)
        # Cached, because the episodes of a segment are read one by one.
        if name not in given:
            fixed = is_fixed(leaf.spec)
            given[name] = _given(batch[name], leaf.spec.shape, leaf.spec.dtype if fixed else np.dtype(object))
        return given[name]

    def _inside(self, rows: Array) -> Iterator[tuple[int, Array]]:
        """Yield each segment that contains some of these rows, which must be in order, and their indices in it."""
        first, last = np.searchsorted(self._stops, rows[[0, -1]], "right").tolist() if len(rows) else (0, -1)
        for part in range(first, last + 1):
            begin = self._stops[part - 1] if part else 0
            cuts = np.searchsorted(rows, [begin, self._stops[part]]) if first < last else (0, len(rows))
            yield part, rows[cuts[0] : cuts[1]] - begin

    def cells(self, name: str, rows: Array) -> pa.Array:
        """Return the cells of a column in rows, which must be in order."""
        return pa.concat_arrays([self._segment(part)[0][name].take(pa.array(at)) for part, at in self._inside(rows)])

    def samples(self, name: str, rows: Array) -> list[Any]:
        """Return the actions or observations of rows as elements of their spaces; None for rows without one.

        Args:
            name: `action` or `observation`.
            rows: The indices of the stream's rows, in order.

        Raises:
            RecordingError: They were not recorded, or cannot be read.
        """
        if name == "observation" and not self.has_observations:
            raise RecordingError(f"the recording {self.run} has no observations")
        found: list[Any] = []
        try:
            for part, inside in self._inside(rows):
                each = [self._unpacked(part, group, name, inside) for group in self.columns.groups]
                # In a row, the columns of at most one group contain values.
                several = ([one for one in some if one is not None] for some in zip(*each, strict=True))
                found.extend(each[0] if len(each) == 1 else [(some or [None])[0] for some in several])
        # IndexError: an empty Dict or Tuple, which has no columns.
        except (TensorError, ValueError, TypeError, IndexError) as error:
            raise RecordingError(f"an {name} of {self.run} cannot be read: {error}") from error
        return found

    def _unpacked(self, part: int, group: AgentColumns, name: str, rows: Array) -> list[Any]:
        """Return the samples of rows of a segment, None for rows without one; they share no memory."""
        layout = group.layouts[name]
        given = [self._given(part, column, leaf) for column, leaf in zip(group.names(name), layout.leaves, strict=True)]
        known = np.logical_and.reduce([places[rows] >= 0 for _, places in given])
        leaf, (first, places) = layout.leaves[0], given[0]
        plain = layout.single and (leaf.kind == "scalar" or (leaf.kind == "array" and leaf.spec.shape))
        if plain and leaf.spec.dtype == leaf.space.dtype:  # nothing to convert
            found = iter(first[places[rows[known]]])
        else:
            cells = [[of_cell(leaf, cells[at]) for at in places[rows[known]].tolist()]
                     for leaf, (cells, places) in zip(layout.leaves, given, strict=True)]  # fmt: skip
            found = map(layout.unpack, zip(*cells, strict=True))
        return list(found) if known.all() else [next(found) if yes else None for yes in known.tolist()]

    def infos(self, rows: Array) -> list[dict[str, Any]]:
        """Return the infos of rows; raise RecordingError if they were not recorded, or cannot be read."""
        if not self.header.get("infos"):
            raise RecordingError(f"the recording {self.run} has no infos; record them with infos=True")
        return [{} if data is None else values.decode(data) for data in self.cells("info", rows).to_pylist()]

    @property
    def misses_frames(self) -> bool:
        """True if a client recorded it in real time; a client does not receive every frame."""
        return self.header.get("recorded_by") == "client" and bool(self.header.get("fps"))

    def players(self, rows: Array) -> list[str]:
        """Return the players that acted in rows; empty if nobody did."""
        return ["" if code < 0 else self.names[code] for code in self.column("by")[rows].tolist()]

    # Episodes

    def episodes(self) -> list[RecordedEpisode]:
        """Return the episodes of all lanes, ordered by their beginnings, without discarded ones."""
        return self._episodes

    @functools.cached_property
    def _episodes(self) -> list[RecordedEpisode]:
        kinds, numbers = self.column("kind"), self.column("episode")
        lanes = self.column("lane") if self.kind == "lanes" else np.zeros(len(kinds), np.int32)
        # The number 0 marks rows after lost calls, which belong to no known episode.
        rows = np.flatnonzero((kinds <= Kind.FAILED_STEP) & (numbers > 0))
        # The rows of different lanes are interleaved, in the order of the calls.
        rows = rows[np.lexsort((rows, numbers[rows], lanes[rows]))]
        cuts = np.flatnonzero((np.diff(numbers[rows]) != 0) | (np.diff(lanes[rows]) != 0)) + 1
        # Rows that do not begin with a reset have lost their beginning, as when the oldest file was deleted.
        parts = [part for part in np.split(rows, cuts) if len(part) and kinds[part[0]] == Kind.RESET]
        found = []
        for part, after in itertools.zip_longest(parts, parts[1:]):
            if int(self.column("call")[part[-1]]) in self._discarded:
                continue
            lane, same = int(lanes[part[0]]), after is not None and lanes[after[0]] == lanes[part[0]]
            found.append(self._episode(lane, part, int(self.column("call")[after[0]]) if same else None))
        return sorted(found, key=lambda episode: (episode.own[0], episode.lane))

    def _episode(self, lane: int, rows: Array, following: int | None) -> RecordedEpisode:
        """Return an episode; `following` is the first call of the lane's next one."""
        calls, kinds, last = self.column("call"), self.column("kind"), rows[-1]
        newest = calls[last]
        lacks = _has_between(self._lost, calls[rows[0]], newest)
        if kinds[last] == Kind.FAILED_STEP:
            # A step that raised has no outcome: it ends the episode, but is not counted as a step.
            end, rows = "failed", rows[kinds[rows] < Kind.FAILED_STEP]
        elif not (end := self._end_of(rows)):  # no row ends it
            # Calls missing between its last row and the next episode may contain its end.
            lacks = lacks or _has_between(self._lost, newest, math.inf if following is None else following - 1)
            end = "reset" if following is not None else "closed" if self.closed else "running"
        if lacks and end != "failed":
            end = "lost"
        return RecordedEpisode(self, lane, int(self.column("episode")[last]), rows, end, lacks)

    def _end_of(self, rows: Array) -> str:
        """Return how an episode ended by its last row, or with several agents by the rows of the last call."""
        last = rows[-1:]
        if self.agents:
            last = rows[self.column("call")[rows] == self.column("call")[last]]
            # Agents may end one by one; the episode ends with the last one.
            if self.column("alive")[last].any():
                return ""
        if self.column("terminated")[last].any():
            return "terminated"
        # With several agents, none is alive here, and the last ones were not terminated.
        return "truncated" if self.agents or self.column("truncated")[last].any() else ""

    def seeded_call(self, call: int) -> int | None:
        """Return the newest call up to `call` from which the state of all lanes is reproducible; None if there is none.

        That is a reset of all lanes with a seed, or a call that put all lanes elsewhere. The result is None if calls
        are missing after it, or if a branch with an unknown origin follows.
        """
        found = bisect.bisect_right(self.known, call)
        newest = self.known[found - 1] if found else None
        return None if newest is None or _has_between(self.breaks, newest, call) else newest

    def has_unknown_options(self, start: int, stop: int) -> bool:
        """Return True if options of a reset from `start` up to `stop` could not be recorded."""
        return _has_between(self._unknown, start - 1, stop - 1)

    @functools.cached_property
    def _unknown(self) -> list[int]:
        return sorted(at for at, reset in self.resets.items() if reset.unknown_options)

    # Branches

    def sibling(self, name: str) -> RecordedStream | None:
        """Return a stream of the same folder, by `RUN-STREAM`; None if there is none."""
        return self if name == f"{self.run}-{self.number}" else self._siblings.find(name)

    @functools.cached_property
    def known(self) -> list[int]:
        """The calls after which the state of all lanes is reproducible: resets with a seed, and branches."""
        whole = (at for at, points in self.branches.items() if None not in points and at not in self.unknown_branches)
        return sorted([*self.seeded, *whole])

    @functools.cached_property
    def breaks(self) -> list[int]:
        """The calls after which a replay cannot continue: before missing calls, and branches with an unknown origin."""
        return sorted([*self._lost, *self.unknown_branches])

    @functools.cached_property
    def unknown_branches(self) -> dict[int, str]:
        """The branches that cannot be replayed, by call number, with the reasons."""
        found: dict[int, str] = {}
        for call, points in self.branches.items():
            for point in dict.fromkeys(points):
                try:
                    if point is not None:
                        self._siblings.check(self, point)
                except RecordingError as error:
                    found[call] = str(error)
                    break
        return found

    def _rows_of(self, lane: int) -> Array:
        """Return the indices of a lane's resets and steps among the rows; with several agents, of those of all."""
        if lane not in self._of_lanes:
            own = self.column("kind") < Kind.CALL
            self._of_lanes[lane] = np.flatnonzero(own & (self.column("lane") == lane) if self.kind == "lanes" else own)
        return self._of_lanes[lane]

    def row_at(self, lane: int, call: int) -> int | None:
        """Return a lane's newest row up to a call; None if there is none, or rows after it are missing."""
        rows = self._rows_of(lane)
        at = int(np.searchsorted(self.column("call")[rows], call, "right")) - 1
        if at < 0 or call > int(self.column("call")[-1]):
            return None
        row = int(rows[at])
        return None if _has_between(self._lost, int(self.column("call")[row]), call) else row

    def rows_of(self, lane: int, first: int, last: int) -> Array:
        """Return the indices of a lane's resets and steps in the calls `first` to `last`."""
        rows = self._rows_of(lane)
        return rows[slice(*np.searchsorted(self.column("call")[rows], [first, last + 1]))]

    def known_from(self, lane: int, call: int) -> tuple[int, BranchPoint | None]:
        """Return the call from which a lane's state up to another call is reproducible.

        Returns:
            The call of its last reset with a seed, and None; or the call at which it was put elsewhere, and the point
                that it continues.

        Raises:
            RecordingError: There is no such call, later calls are missing, or options of a reset were not recorded.
        """
        name = f"{self.run}-{self.number}"
        if self.misses_frames:
            raise RecordingError(f"what it goes on from was recorded by a client in real time, in {name}")
        if lane not in self._lane_known:
            done = set(self.column("call")[self.column("kind") == Kind.RESET].tolist())
            seeded = {at: None for at, reset in self.resets.items()
                      if at in done and reset.seeds(self.lanes)[lane] is not None}  # fmt: skip
            placed = {at: points[lane] for at, points in self.branches.items() if points[lane] is not None}
            self._lane_known[lane] = sorted({**seeded, **placed}.items(), key=lambda item: item[0])
        found = bisect.bisect_right(self._lane_known[lane], call, key=lambda item: item[0])
        if not found:
            raise RecordingError(f"what it goes on from, in {name}, has no reset with a seed before it")
        first, point = self._lane_known[lane][found - 1]
        if self.row_at(lane, call) is None or _has_between(self._lost, first, call):
            raise RecordingError(f"what it goes on from, in {name}, lacks rows")
        if self.has_unknown_options(first, call + 1):
            raise RecordingError(f"what it goes on from, in {name}, was reset with options that could not be recorded")
        return first, point

    @functools.cached_property
    def seeded(self) -> list[int]:
        """The calls that reset all lanes with a seed."""
        kinds, calls = self.column("kind"), self.column("call")
        # A reset that raised has an event, too, but begins no episode.
        done = set(calls[kinds == Kind.RESET].tolist())
        return sorted(at for at, reset in self.resets.items() if at in done and None not in reset.seeds(self.lanes))


def _has_between(calls: Sequence[int], after: float, last: float) -> bool:
    """Return True if one of these calls, which are in order, is after `after` and not after `last`."""
    # By bisection, because it is called for each of maybe many thousand episodes.
    return bisect.bisect_right(calls, after) < bisect.bisect_right(calls, last)


def _read_branch(told: Any, lanes: int) -> list[BranchPoint | None]:
    """Return the points that lanes continue; raise TypeError or ValueError for malformed data."""
    if not isinstance(told, list) or len(told) != lanes or not any(told):
        raise ValueError(f"expected a branch for each of {lanes} lanes")
    found: list[BranchPoint | None] = []
    for one in told:
        point = None if one is None else BranchPoint(**one)
        if point is not None:
            numbers = point.lane, point.call, 0 if point.seed is None else point.seed
            if not isinstance(point.stream, str) or not all(type(number) is int for number in numbers):
                raise TypeError("expected a branch as the name of a stream and numbers")
        found.append(point)
    return found


class _Siblings:
    """The streams of a folder, each read on demand.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._streams: dict[str, RecordedStream | None] = {}
        self._checked: dict[tuple[str, int, int], str] = {}

    def add(self, stream: RecordedStream) -> None:
        """Add a stream that was read."""
        self._streams[f"{stream.run}-{stream.number}"] = stream

    def find(self, name: str) -> RecordedStream | None:
        """Return a stream by `RUN-STREAM`; None if there is none that can be read."""
        if name not in self._streams:
            self._streams[name] = None
            own = [file for file in find_segments(self._folder)[0] if f"{file.run}-{file.stream}" == name]
            if own:
                self._streams[name] = _read_stream(own, self)[0]
        return self._streams[name]

    def check(self, stream: RecordedStream, point: BranchPoint) -> None:
        """Raise RecordingError if some calls that lead to a branch are missing."""
        path: dict[tuple[str, int, int], None] = {}
        begins: BranchPoint | None = point
        reason = ""
        while begins is not None and not reason:
            key = begins.stream, begins.lane, begins.call
            if key in self._checked:  # branches of branches share most of their paths
                reason = self._checked[key]
                break
            try:
                stream, begins = next_origin(stream, begins, path)
            except RecordingError as error:
                reason = str(error)
            path[key] = None
        self._checked.update(dict.fromkeys(path, reason))
        if reason:
            raise RecordingError(reason)


def _printable(text: str) -> str:
    # An untrusted text is printed to a terminal, so its control characters are replaced.
    return "".join(part if part.isprintable() else "?" for part in text[:200])


def _given(cells: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
    """Return the non-null cells of a column as an array, and for each row the index of its cell in it, or -1.

    Texts and other bytes are objects in the array.
    """
    there = cells.is_valid().to_numpy(zero_copy_only=False)
    full = (int(there.sum()), *shape)
    if dtype.hasobject:
        found: Array = np.empty(full[0], object)
        # As objects, because NumPy's own texts and bytes lose trailing zeros.
        found[:] = cells.drop_null().to_pylist()
    elif not shape:
        found = cells.drop_null().to_numpy(zero_copy_only=False)
    elif pa.types.is_list(cells.type):
        found = cells.flatten().to_numpy(zero_copy_only=False).reshape(full)  # ValueError if lengths differ
    else:  # bytes; a null has none
        found = np.frombuffer(cells.buffers()[2] or b"", dtype, math.prod(full)).reshape(full)
    return found, np.where(there, np.cumsum(there) - 1, -1)


@dataclasses.dataclass(frozen=True)
class Folder:
    """The recordings in a folder."""

    streams: Sequence[RecordedStream]
    damage: Sequence[Damage]
    """The parts that could not be read and were skipped."""

    def warnings(self) -> list[str]:
        """Return a line for each file with parts that could not be read."""
        found: dict[Path, list[Damage]] = {}
        for damage in self.damage:
            found.setdefault(damage.path, []).append(damage)
        return [f"{own[0]}{f' (and {len(own) - 1} more)' if own[1:] else ''}" for own in found.values()]

    def episodes(self) -> list[RecordedEpisode]:
        """Return all episodes, ordered by their beginnings."""
        found = [episode for stream in self.streams for episode in stream.episodes()]
        return sorted(found, key=lambda episode: episode.started)


def read_folder(folder: str | Path, newest: int | None = None) -> Folder:
    """Read the recordings in a folder, or a single file.

    Args:
        folder: The folder, or the file.
        newest: Read the most recently written streams until they contain this many episodes; None: read all.

    Raises:
        RecordingError: There is no recording.
    """
    path = Path(folder)
    files, problems = find_segments(path)
    if not files and not problems:
        lacks = (
            "which has none: a server writes them once somebody has played" if path.exists() else "which does not exist"
        )
        raise RecordingError(f"expected a folder with recordings, files *.parquet and *.arrow, got {path}, {lacks}")
    return _read(files, problems, newest)


def _read(files: Sequence[SegmentFile], problems: list[Damage], newest: int | None = None) -> Folder:
    streams = [list(own) for _, own in itertools.groupby(files, lambda file: (file.run, file.stream))]
    if newest is not None:
        # A page lists only the last 100 episodes of a folder, which may contain many recordings: older files are not
        # read.
        streams.sort(key=lambda own: (max(_written_at(file.path) for file in own), own[0]), reverse=True)
    damage, found = list(problems), list[RecordedStream]()
    siblings = _Siblings(files[0].path.parent if files else Path())
    for own in streams:
        if newest is not None and sum(len(stream.episodes()) for stream in found) >= newest:
            break
        stream, told = _read_stream(own, siblings)
        damage.extend(told)
        found.extend([] if stream is None else [stream])
    return Folder(found, damage)


def _written_at(file: Path) -> float:
    """Return when a file was last written; 0 if it was deleted meanwhile."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _read_stream(files: Sequence[SegmentFile], siblings: _Siblings) -> tuple[RecordedStream | None, list[Damage]]:
    """Read the segments of a stream; return it, and the parts that cannot be read."""
    damage: list[Damage] = []
    columns: Columns | None = None
    parts: list[tuple[SegmentFile, pa.Table]] = []
    last = -1
    for file in files:
        try:
            schema, table, problems = _load(file, _INDEX)
            if schema is None:
                damage.extend(problems)
                continue
            # All files of a stream must have the header of the first. Another header would give its rows another
            # meaning.
            columns = columns or _columns_of(schema)
            if not schema.equals(columns.schema, check_metadata=True):
                raise RecordingError("its columns are not those of its header, or of the recording's other files")
            last = _check_rows(table, columns, last)
        except RecordingError as error:
            damage.append(Damage(file.path, _printable(str(error))))
        except UNREADABLE as error:
            damage.append(Damage(file.path, _printable(f"it cannot be read: {error!r:.150}")))
        else:
            parts.append((file, table))
            damage.extend(problems)
    if columns is None or not any(len(table) for _, table in parts):
        return None, damage
    try:
        stream = RecordedStream(files[0].run, files[0].stream, columns, parts, damage, siblings)
    except RecordingError as error:
        return None, [*damage, Damage(files[0].path, _printable(str(error)))]
    siblings.add(stream)
    return stream, damage


def _load(file: SegmentFile, columns: Sequence[str] | None) -> tuple[pa.Schema, pa.Table, list[Damage]]:
    try:
        return load_segment(file.path, columns)
    except RecordingError:
        sealed = file.path.with_suffix(".parquet")
        if file.path.suffix == ".arrow" and not file.path.exists() and sealed.exists():  # it was sealed meanwhile
            return load_segment(sealed, columns)
        raise


def _columns_of(schema: pa.Schema) -> Columns:
    """Return the columns for the header of a file."""
    header = json.loads((schema.metadata or {}).get(b"bridge", b"null"))
    told = header.get("format") if isinstance(header, dict) else None
    if told != FORMAT:
        raise RecordingError(f"expected a recording of format version {FORMAT}, got {told!r:.40}")
    kind, lanes, agents = header.get("kind"), header.get("lanes", 1), header.get("agents", [])
    lists = isinstance(agents, list) and all(isinstance(agent, str) for agent in agents)
    # The header is untrusted: without these checks `Columns` could raise other exceptions, or allocate columns for any
    # number of lanes.
    sound = kind in ("env", "lanes", "agents") and lists and bool(agents) == (kind == "agents")
    sound = sound and len(set(agents)) == len(agents) <= _MOST_LANES and isinstance(header.get("spaces"), list)
    sound = sound and isinstance(lanes, int) and 0 < lanes <= _MOST_LANES
    sound = sound and isinstance(header.get("versions", {}), dict)
    sound = sound and len(header["spaces"]) == max(1, len(agents))
    sound = sound and all(isinstance(header.get(key, 0), int) for key in ("lane", "stream"))
    if not sound:
        raise RecordingError(f"its header is no recording's: kind {kind!r:.40}, lanes {lanes!r:.40}")
    return Columns(header)


def _check_rows(table: pa.Table, columns: Columns, last: int) -> int:
    """Raise RecordingError if rows are out of order, or have an invalid lane; return the last call."""
    if not len(table):
        return last
    # -9 is invalid in each of these columns, so nulls are refused, too.
    checked = ("call", "lane", "t", "kind", "time")
    call, lane, t, kind, moment = (np.asarray(table[name].combine_chunks().fill_null(-9)) for name in checked)
    lanes = columns.width if columns.kind != "env" else int(columns.header.get("lane", 0)) + 1
    known = np.isin(kind, [Kind.STEP, Kind.RESET, Kind.FAILED_STEP, Kind.FAILED_RESET, Kind.CALL, Kind.END])
    # Rows are found by binary search in `call`, and lanes are used as indices.
    sound = call[0] >= max(last, 0) and (np.diff(call) >= 0).all() and (lane >= -1).all() and (lane < lanes).all()
    sound = sound and ((lane >= 0) | (kind >= Kind.CALL)).all() and known.all() and (t >= 0).all()
    # Times are printed as dates, for which systems support a limited range of years.
    if not sound or not (abs(moment) < 1e11).all():
        raise RecordingError("its rows are not in order, or name a lane, a kind or a time that is not there")
    _given(table["reward"].combine_chunks(), columns.reward.shape, columns.reward.dtype)  # raises if shapes differ
    return int(call[-1])


def open_episode(path: str | Path) -> RecordedEpisode:
    """Return an episode by `FOLDER/ID`.

    Raises:
        RecordingError: The episode does not exist.
    """
    given = Path(path)
    folder, (run, _, numbers) = given.parent, given.name.rpartition("-")
    files = find_segments(folder)[0]
    own = [file for file in files if file.run == run and str(file.stream) == numbers.partition(".")[0]]
    for stream in _read(own, []).streams:
        for episode in stream.episodes():
            if episode.id == given.name:
                return episode
    if given.is_dir():
        folder, got = given, f"the folder {given}"
    elif not any(file.run == run for file in files):
        got = f"{given}: no recording there begins with {run or given.name!r}"
    else:
        got = f"{given}: the recording {run} has no episode {numbers}"
    raise RecordingError(f"expected FOLDER/EPISODE with an id that `gymnasium-bridge runs {folder}` lists, got {got}")
