"""Recordings as they are read back: the streams of a folder, and their episodes."""

from __future__ import annotations

import base64
import binascii
import bisect
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.encoding import values
from bridge.encoding.space_json import space_from_json
from bridge.encoding.spaces import Layout
from bridge.encoding.tensors import Array
from bridge.errors import RecordingError, TensorError, UsageError
from bridge.recording.columns import Kind, unpack_sample
from bridge.recording.files import SUFFIX, Damage, Record, read_records

__all__ = ["Episode", "Folder", "Reset", "Stream", "open_episode", "read_folder", "read_newest"]


@dataclasses.dataclass(frozen=True)
class Reset:
    """What the environment was reset with."""

    seed: Any
    """An integer, one for each lane, or None."""
    options: Any
    """A dict, or None."""
    mask: Sequence[bool] | None
    """Which lanes were reset; None: all."""
    unknown_options: bool = False
    """Whether options were given that could not be recorded."""

    def seeds(self, lanes: int) -> bool:
        """Whether it seeds every lane."""
        if self.mask is not None and not all(self.mask):
            return False
        given = self.seed if isinstance(self.seed, list) else [self.seed] * lanes
        return all(seed is not None for seed in given)

    def seed_of(self, lane: int) -> int | None:
        """Return the seed of a lane; None: none, or it was not reset."""
        if self.mask is not None and not self.mask[lane]:
            return None
        if isinstance(self.seed, list):
            seed = self.seed[lane]
            return None if seed is None else int(seed)
        return None if self.seed is None else int(self.seed) + lane


@dataclasses.dataclass(frozen=True)
class Episode:
    """An episode of one environment, or of one lane: rows from `start` up to `stop`.

    Lanes that are stepped together share a stream. A row in which only other lanes were reset lies between these, and
    belongs to none of their episodes: `rows` leaves it out.
    """

    stream: Stream
    lane: int
    number: int
    """Of the lane, from 1."""
    start: int
    """The row of its first observation."""
    stop: int
    """The row after its last one."""
    end: str
    """How it ended: `terminated`, `truncated`, `reset` (cut off), `failed`, `closed`, `running` or `lost`."""
    incomplete: bool
    """Whether rows of it are missing or damaged."""

    @property
    def id(self) -> str:
        """Its name: recording, stream, lane and number."""
        return f"{self.stream.run}-{self.stream.number}.{self.stream.lane_number(self.lane)}.{self.number}"

    @functools.cached_property
    def rows(self) -> Array:
        """The rows of its observations: int64, `(length + 1,)`; the first one begins it, the others are its steps."""
        rows: Array = np.arange(self.start, self.stop)
        kinds = self.stream.column("kind")[rows - self.stream.first]
        own: Array = rows[(kinds == Kind.STEP) | (rows == self.start)]
        return own

    @property
    def length(self) -> int:
        """Its steps."""
        return len(self.rows) - 1

    def step_of(self, row: int) -> int:
        """Return the step of a row, or of the episode's last row before it: 0 for the first observation.

        A row before the episode has a negative number.
        """
        return row - self.start if row < self.start else int(np.searchsorted(self.rows, row, "right")) - 1

    @property
    def rewards(self) -> Array:
        """The reward of each step: `(length,)`, `(length, agents)` or of the reward space."""
        return self.column("reward")[1:]

    @property
    def total(self) -> float:
        """The sum of its rewards; with several agents, of all of them."""
        return float(self.rewards.sum())

    @property
    def players(self) -> list[str]:
        """Who acted in it, in the order of their first actions."""
        found: dict[str, None] = {}
        for name in self.chosen(self.stream.players(self.start, self.stop, self.lane))[1:]:
            found.update(dict.fromkeys([name] if isinstance(name, str) else name.values()))
        return [name for name in found if name]

    @property
    def seed(self) -> int | None:
        """The seed of the reset that it began with; None: it began by itself, or without a seed."""
        reset = self.stream.resets.get(self.start)
        return None if reset is None else reset.seed_of(self.lane)

    @property
    def started(self) -> float:
        """When it began, seconds of the epoch."""
        return float(self.stream.column("time")[self.start - self.stream.first])

    @property
    def seconds(self) -> float:
        """From its first observation to its last."""
        times = self.stream.column("time")[self.start - self.stream.first : self.stop - self.stream.first]
        return float(times[-1] - times[0])

    def chosen(self, values: Iterable[Any]) -> list[Any]:
        """Of values for all rows from `start` up to `stop`, return those of the episode's own rows."""
        own = set(self.rows.tolist())
        return [value for row, value in zip(range(self.start, self.stop), values, strict=True) if row in own]

    def column(self, name: str) -> Array:
        """Return a column at the episode's rows, of its lane."""
        rows: Array = self.stream.column(name)[self.rows - self.stream.first]
        return rows[:, self.lane] if self.stream.kind == "lanes" else rows


class Stream:
    """What went through one environment, one world of lanes, or one environment of several agents.

    Args:
        header: The record `world`.
        records: The records of its rows, in order; those between may be missing.
        lost: Where rows were lost: the row before which, and how many.
        closed: Whether the environment was closed in order.
        changed: Whether the checksum of the record `world` does not fit.
        run: The recording, by the names of its files. What the header says of it is a stranger's text, and this becomes
            the name of files.
        damage: What of the recording's files could not be read.
    """

    def __init__(
        self,
        header: Mapping[str, Any],
        records: Sequence[Record],
        lost: Sequence[tuple[int, int]],
        closed: bool,
        changed: bool,
        run: str,
        damage: Sequence[Damage],
    ) -> None:
        self.header = header
        self.records = records
        self.closed = closed
        self.changed = changed
        """Whether what is said of the environment is not what was written."""
        self.run = run
        self.damage = damage
        self.number = int(header["stream"])
        self.kind = str(header["kind"])
        """`env`, `lanes` or `agents`."""
        self.lanes = int(header.get("lanes", 1))
        self.agents: list[str] = list(header.get("agents", ()))
        self.first = int(records[0].header["first_row"]) if records else 0
        """The first row that is there."""
        last = records[-1].header if records else {"first_row": 0, "rows": 0}
        self.stop = int(last["first_row"]) + int(last["rows"])
        """The row after the last."""
        self.gaps = list(lost)
        at = self.first
        for record in records:
            if int(record.header["first_row"]) > at:
                self.gaps.append((at, int(record.header["first_row"]) - at))
            at = int(record.header["first_row"]) + int(record.header["rows"])
        self.damaged = [
            (int(record.header["first_row"]), int(record.header["first_row"]) + int(record.header["rows"]))
            for record in records
            if record.damaged
        ]
        """Rows of records whose checksum does not fit, from and up to."""
        self._firsts = [int(record.header["first_row"]) for record in records]
        self._columns: dict[str, Array] = {}
        self.resets = self._read_resets()
        """What the environment was reset with, by row."""

    def lane_number(self, lane: int) -> int:
        """Return the number of a lane in its world, which may have several streams."""
        return int(self.header.get("lane", lane))

    @property
    def title(self) -> str:
        """What the environment is called."""
        return str(self.header.get("env_id") or self.header.get("title") or "?")

    @property
    def spaces(self) -> list[tuple[Any, Any]]:
        """Observation and action space: of one environment, or of each agent."""
        try:
            return [(space_from_json(pair[0]), space_from_json(pair[1])) for pair in self.header["spaces"]]
        except (UsageError, IndexError, TypeError) as error:
            raise RecordingError(f"the spaces of the recording {self.run} cannot be read: {error}") from error

    @property
    def has_observations(self) -> bool:
        """Whether observations were recorded."""
        return bool(self.header.get("observations"))

    def layouts(self) -> list[tuple[Layout, Layout]]:
        """Return how observations and actions are cut into columns: of the environment, or of each agent."""
        lanes = self.lanes if self.kind == "lanes" else None
        return [(Layout(one, "observation", lanes), Layout(two, "action", lanes)) for one, two in self.spaces]

    def column(self, name: str) -> Array:
        """Return a column of all rows from `first` to `stop`; rows that are missing are zeros."""
        if name not in self._columns:
            parts: list[Array] = []
            at = self.first
            for record in self.records:
                part = record.column(name)
                gap = int(record.header["first_row"]) - at
                if gap > 0:
                    parts.append(np.zeros((gap, *part.shape[1:]), part.dtype))
                parts.append(part)
                at = int(record.header["first_row"]) + int(record.header["rows"])
            self._columns[name] = np.concatenate(parts) if parts else np.zeros(0)
        return self._columns[name]

    def has_column(self, name: str) -> bool:
        """Whether every row has this column."""
        return bool(self.records) and all(name in record.columns for record in self.records)

    def _read_resets(self) -> dict[int, Reset]:
        found = {}
        for record in self.records:
            for item in record.header["resets"]:
                try:
                    options = values.decode(_bytes(item["options"])) if "options" in item else None
                except TensorError as error:
                    raise RecordingError(f"the options of a reset of {self.run} cannot be read: {error}") from error
                row = int(record.header["first_row"]) + int(item["row"])
                found[row] = Reset(item["seed"], options, item.get("mask"), "unknown_options" in item)
        return found

    def calls(self) -> dict[int, list[tuple[str, bytes]]]:
        """Return the calls and writes before each row, as their requests' bytes."""
        found: dict[int, list[tuple[str, bytes]]] = {}
        for record in self.records:
            for index, kind, data in record.header["calls"]:
                found.setdefault(int(record.header["first_row"]) + int(index), []).append((kind, _bytes(data)))
        return found

    def players(self, start: int, stop: int, lane: int = 0) -> Iterator[Any]:
        """Say who acted in rows: a text, or one for each agent that acted.

        Args:
            start: The first row.
            stop: The row after the last.
            lane: Of lanes that are stepped together, which one is meant.
        """
        for record, index in self._rows(start, stop):
            by = record.column("by") if record is not self._last_by[0] else self._last_by[1]
            self._last_by = (record, by)
            names = record.header["players"]
            if self.kind != "agents":
                yield names[int(by[index, lane] if by.ndim > 1 else by[index])]
                continue
            acted = self.column("acted")[int(record.header["first_row"]) + index - self.first]
            yield {agent: names[int(by[index, i])] for i, agent in enumerate(self.agents) if acted[i]}

    _last_by: tuple[Any, Any] = (None, None)

    def _rows(self, start: int, stop: int) -> Iterator[tuple[Record, int]]:
        for record in self.records[max(0, bisect.bisect_right(self._firsts, start) - 1) :]:
            if int(record.header["first_row"]) >= stop:
                return
            first, count = int(record.header["first_row"]), int(record.header["rows"])
            for row in range(max(start, first), min(stop, first + count)):
                yield record, row - first

    def samples(self, name: str, start: int, stop: int) -> Iterator[Any]:
        """Return the actions or observations of rows, as the environment took or gave them.

        Args:
            name: `action` or `observation`.
            start: The first row.
            stop: The row after the last.

        Returns:
            For each row the sample, or a dict of those of the agents that have one.

        Raises:
            RecordingError: They were not recorded, or cannot be read.
        """
        layouts = [pair[0 if name == "observation" else 1] for pair in self.layouts()]
        cached: tuple[Any, dict[str, Array]] = (None, {})
        prefixes = [f"{number}:" for number in range(len(self.agents))] if self.kind == "agents" else [""]
        for record, index in self._rows(start, stop):
            if record is not cached[0]:
                wanted = [item for item in record.columns if item.partition(":")[2].startswith(name)]
                wanted += [item for item in record.columns if item.startswith(name)]
                cached = record, {item: record.column(item) for item in wanted}
            if not cached[1]:
                raise RecordingError(f"the recording {self.run} has no {name}s")
            try:
                if self.kind != "agents":
                    yield unpack_sample(layouts[0], cached[1], index)
                    continue
                there = self.column("seen" if name == "observation" else "acted")
                row = int(record.header["first_row"]) + index - self.first
                yield {
                    agent: unpack_sample(layouts[number], cached[1], index, prefixes[number])
                    for number, agent in enumerate(self.agents)
                    if there[row, number]
                }
            except (TensorError, KeyError) as error:
                raise RecordingError(f"an {name} of {self.run} cannot be read: {error}") from error

    # Episodes

    def begins(self) -> Array:
        """Return in which rows an episode begins, for each lane: bool, `(rows, lanes)`."""
        kind = self.column("kind")
        ended = self._ended()
        found = np.zeros((len(kind), self.lanes), np.bool_)
        for row, reset in self.resets.items():
            if kind[row - self.first] == Kind.RESET:
                found[row - self.first] = True if reset.mask is None else reset.mask
        if self.kind == "lanes":
            # A finished lane begins anew in the next step (NEXT_STEP); only other lanes are reset in between.
            steps = (kind == Kind.STEP)[:, None]
            number = np.arange(len(kind))[:, None]
            newest = np.maximum.accumulate(np.where(steps | found, number, -1))[:-1]
            over = (newest >= 0) & np.take_along_axis(ended, np.maximum(newest, 0), 0)
            found[1:] |= over & steps[1:]
        return found

    def _ended(self) -> Array:
        """Return in which rows an episode ended by itself, for each lane."""
        if self.kind == "agents":
            ended: Array = ~np.any(self.column("alive"), axis=1, keepdims=True).astype(np.bool_)
            return ended
        both = self.column("terminated") | self.column("truncated")
        return both.reshape(len(both), self.lanes)

    def episodes(self) -> list[Episode]:
        """Return the episodes of all lanes, in the order of their beginnings."""
        if not self.records:
            return []
        begins, ended, kind = self.begins(), self._ended(), self.column("kind")
        found: list[Episode] = []
        for lane in range(self.lanes):
            starts = np.flatnonzero(begins[:, lane]).tolist()
            limits = [*starts[1:], len(kind)] if starts else []  # the reset may be damaged
            numbers = self._numbers(lane, begins[:, lane])
            for start, limit in zip(starts, limits, strict=True):
                found.append(self._episode(lane, int(numbers[start]), start, limit, ended[:, lane], kind))
        return sorted(found, key=lambda episode: (episode.start, episode.lane))

    def _numbers(self, lane: int, begins: Array) -> Array:
        """Return the number of the episode that each row is of, as the writer counted."""
        numbers = np.zeros(len(begins), np.int64)
        for record in self.records:
            at = int(record.header["first_row"]) - self.first
            rows = slice(at, at + int(record.header["rows"]))
            numbers[rows] = int(record.header["episodes"][lane]) + np.cumsum(begins[rows])
        return numbers

    def _episode(self, lane: int, number: int, start: int, limit: int, ended: Array, kind: Array) -> Episode:
        """Return the episode that begins in a row; `start` and `limit` count from the first row that is there."""
        over = np.flatnonzero(ended[start + 1 : limit])
        failed = np.flatnonzero(kind[start + 1 : limit] >= Kind.FAILED_STEP)
        first = self.first
        lost = min((at - first for at, count in self.gaps if start < at - first <= limit), default=None)
        stop, end = limit, "reset"
        if limit == len(kind):
            end = "closed" if self.closed else "running"
        if len(over):
            row = start + 1 + int(over[0])
            stop, end = row + 1, "truncated"
            if self.kind == "agents":
                terminated = bool(self.column("terminated")[row].any())
            else:
                terminated = bool(self.column("terminated").reshape(len(kind), -1)[row, lane])
            end = "terminated" if terminated else "truncated"
        if len(failed) and start + 1 + failed[0] < stop:
            stop, end = start + 1 + int(failed[0]), "failed"
        if lost is not None and lost < stop:
            stop, end = lost, "lost"
        elif lost is not None and end in ("reset", "closed", "running") and lost == stop:
            end = "lost"
        torn = any(a - first < stop and b - first > start for a, b in self.damaged)
        return Episode(self, lane, number, start + first, stop + first, end, end == "lost" or torn)

    def seeded_row(self, row: int) -> int | None:
        """Return the newest row up to this one in which all lanes were reset with a seed; None: there is none.

        Rows that are missing after it make it worthless, and it is None then.
        """
        kind = self.column("kind")
        rows = [
            at
            for at, reset in self.resets.items()
            if at <= row and kind[at - self.first] == Kind.RESET and reset.seeds(self.lanes)
        ]
        if not rows or any(max(rows) < at <= row for at, _ in self.gaps):
            return None
        return max(rows)

    def whole_from(self, row: int) -> int | None:
        """Return the stream's very first row where that is a seeded reset and nothing is missing up to a row."""
        first = self.resets.get(0)
        if self.first or first is None or not first.seeds(self.lanes) or any(at <= row for at, _ in self.gaps):
            return None
        return 0


@dataclasses.dataclass(frozen=True)
class Folder:
    """The recordings of a folder."""

    streams: Sequence[Stream]
    damage: Sequence[Damage]
    """What could not be read, and was skipped."""

    def episodes(self) -> list[Episode]:
        """Return all episodes, in the order of their beginnings."""
        found = [episode for stream in self.streams for episode in stream.episodes()]
        return sorted(found, key=lambda episode: episode.started)


def read_folder(folder: str | Path) -> Folder:
    """Read the recordings of a folder, or of one file of it.

    Raises:
        RecordingError: There is no recording.
    """
    path = Path(folder)
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        lacks = "which has none" if path.is_dir() else "which does not exist"
        raise RecordingError(f"expected a folder with recordings, files *{SUFFIX}, got {path}, {lacks}")
    return _read_files(files)


def read_newest(folder: str | Path, count: int) -> Folder:
    """Read so many of the newest files of a folder that they hold this many episodes, or all files.

    Raises:
        RecordingError: There is no recording.
    """
    files = sorted(Path(folder).glob(f"*{SUFFIX}"), key=_written_at)
    number = 1
    while number < len(files):
        found = _read_files(files[-number:])
        if len(found.episodes()) >= count:
            return found
        number *= 2
    return read_folder(folder)


def _written_at(file: Path) -> tuple[float, str]:
    """Return when a file was written last; 0 where it was deleted meanwhile."""
    try:
        return file.stat().st_mtime, file.name
    except OSError:
        return 0.0, file.name


def _read_files(files: Sequence[Path]) -> Folder:
    worlds: dict[tuple[str, int], Record] = {}
    records: dict[tuple[str, int], list[Record]] = {}
    lost: dict[tuple[str, int], list[tuple[int, int]]] = {}
    closed: set[tuple[str, int]] = set()
    damage: list[Damage] = []
    for file in files:
        run = file.name.partition(".")[0]
        for record in read_records(file):
            if isinstance(record, Damage):
                damage.append(record)
                continue
            problem = _problem_of(record)
            if problem:
                damage.append(Damage(file, record.offset, sum(one["bytes"] for one in record.listed), False, problem))
                continue
            key = run, int(record.header["stream"])
            if record.type == "world":
                if key not in worlds or worlds[key].damaged:
                    worlds[key] = record
            elif record.type == "rows":
                records.setdefault(key, []).append(record)
            elif record.type == "lost":
                lost.setdefault(key, []).append((int(record.header["first_row"]), int(record.header["rows"])))
            elif record.type == "end":
                closed.add(key)
    streams = [
        Stream(
            world.header,
            [one for one in records.get(key, ()) if one.columns],
            lost.get(key, ()),
            key in closed,
            world.damaged,
            key[0],
            [one for one in damage if one.path.name.partition(".")[0] == key[0]],
        )
        for key, world in worlds.items()
    ]
    return Folder(streams, damage)


_WANTED: Mapping[str, Mapping[str, type]] = {
    "world": {"run": str, "stream": int, "kind": str, "spaces": list},
    "rows": {
        "stream": int,
        "first_row": int,
        "rows": int,
        "episodes": list,
        "players": list,
        "resets": list,
        "calls": list,
        "errors": dict,
    },
    "lost": {"stream": int, "first_row": int, "rows": int},
    "end": {"stream": int},
}
_COLUMNS = ("kind", "time", "by", "reward", "terminated", "truncated", "hash")


def _problem_of(record: Record) -> str:
    """Say what a record lacks, as one may whose bytes were changed; empty: nothing."""
    header, wanted = record.header, _WANTED.get(record.type)
    if wanted is None:
        return f"a record of the unknown type {record.type!r:.40}"
    for name, kind in wanted.items():
        if not isinstance(header.get(name), kind) or (kind is int and header[name] < 0):
            return f"a record {record.type!r} whose {name!r} is {header.get(name)!r:.40}"
    if record.type == "world" and header["kind"] not in ("env", "lanes", "agents"):
        return f"a record 'world' of the unknown kind {header['kind']!r:.40}"
    if record.damaged and record.type in ("lost", "end"):
        return f"a record {record.type!r} whose checksum does not fit"
    if record.type != "rows" or not header["rows"]:
        return ""
    shapes = {column["name"]: column["shape"] for column in record.listed}
    short = [name for name in _COLUMNS if not shapes.get(name) or shapes[name][0] != header["rows"]]
    try:
        for item in header["resets"]:
            inside = 0 <= item["row"] < header["rows"] and isinstance(item["seed"], (int, list, type(None)))
            if not inside or not isinstance(item.get("mask", []), list):
                short.append("resets")
        kinds = record.column("kind")
        if np.flatnonzero((kinds == Kind.RESET) | (kinds == Kind.FAILED_RESET)).tolist() != [
            item["row"] for item in header["resets"]
        ]:
            short.append("resets")
        for row, kind, data in header["calls"]:
            if not 0 <= row <= header["rows"] or kind not in ("call", "write") or not isinstance(data, str):
                short.append("calls")
        if len(record.column("by")) and int(record.column("by").max()) >= len(header["players"]):
            short.append("players")
        for name in (*_COLUMNS, "acted", "seen", "alive"):
            if name in shapes:
                record.column(name)
    except (KeyError, TypeError, ValueError, RecordingError) as error:
        return f"a record of rows that cannot be read: {error}"
    return f"a record of rows with unfit {', '.join(short)}" if short else ""


def open_episode(path: str | Path) -> Episode:
    """Find an episode by `FOLDER/ID`; a file of a recording has one episode alone, or its ID after the file's folder.

    Raises:
        RecordingError: There is no such episode.
    """
    given = Path(path)
    if given.is_dir():
        raise RecordingError(
            f"expected one episode, FOLDER/EPISODE with an id that `bridge runs {given}` lists, got the folder {given}"
        )
    name, _, numbers = given.name.rpartition("-")
    files = sorted(given.parent.glob(f"{name}.*{SUFFIX}")) if name else []
    if not files:
        raise RecordingError(
            f"expected FOLDER/EPISODE with an id that `bridge runs {given.parent}` lists, got {given}: no recording "
            f"there begins with {name or given.name!r}"
        )
    for stream in _read_files(files).streams:
        for episode in stream.episodes():
            if episode.id == given.name:
                return episode
    raise RecordingError(f"the recording {name} in {given.parent} has no episode {numbers}; `bridge runs` lists them")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except (binascii.Error, TypeError) as error:
        raise RecordingError(f"expected base64 in a recording, got {text!r:.40}") from error
