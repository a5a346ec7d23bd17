"""Recordings as they are read back: the streams of a folder, and their episodes."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bridge.encoding import values
from bridge.encoding.spaces import Layout
from bridge.encoding.tensors import Array
from bridge.errors import RecordingError, TensorError, UsageError
from bridge.recording.files import Damage, Loaded, SegmentFile, find_segments, load_segment, segments_of
from bridge.recording.rows import FORMAT, Columns, Kind, is_fixed

__all__ = ["Episode", "Folder", "Reset", "Stream", "open_episode", "read_folder", "read_newest"]

_INDEX = ("call", "lane", "kind", "episode", "t", "time", "reward", "terminated", "truncated", "by", "event", "alive")
_MOST_LANES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Reset:
    """The arguments of a reset."""

    seed: Any
    """An integer, one for each lane, or None."""
    options: Any
    """A dict, or None."""
    mask: Sequence[bool] | None
    """Which lanes were reset; None: all."""
    unknown_options: bool = False
    """True if options were given that could not be recorded."""

    def seeds(self, lanes: int) -> bool:
        """Return whether it seeds every lane."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class Episode:
    """An episode of one environment, of one lane, or of several agents together."""

    stream: Stream
    lane: int
    number: int
    """Of the lane, from 1."""
    own: Array
    """Where its resets and steps are among the stream's rows; of several agents those of all."""
    end: str
    """How it ended: `terminated`, `truncated`, `reset` (cut off), `failed`, `closed`, `running` or `lost`."""
    incomplete: bool
    """True if rows of it are missing."""

    @property
    def id(self) -> str:
        """Its name: recording, stream, lane and number."""
        return f"{self.stream.run}-{self.stream.number}.{self.stream.lane_number(self.lane)}.{self.number}"

    @property
    def start(self) -> int:
        """The number of the call that its first observation is of."""
        return int(self.stream.column("call")[self.own[0]])

    @property
    def stop(self) -> int:
        """The number of the call after its last step."""
        return int(self.stream.column("call")[self.own[-1]]) + 1

    @property
    def length(self) -> int:
        """Its steps."""
        return int(self.stream.column("t")[self.own[-1]])

    def step_of(self, call: int) -> int:
        """Return the step of a call, or of the newest before it: 0 for the first observation; negative: before it."""
        if call < self.start:
            return call - self.start
        calls = self.stream.column("call")[self.own]
        return int(self.stream.column("t")[self.own[np.searchsorted(calls, call, "right") - 1]])

    @property
    def rewards(self) -> Array:
        """The reward of each step: `(length,)`, `(length, agents)` or of the reward space."""
        rewards, steps = self.stream.column("reward"), self.own[self.stream.column("t")[self.own] > 0]
        if self.stream.kind != "agents":
            found: Array = rewards[steps]
            return found
        found = np.zeros((self.length, self.stream.columns.width), rewards.dtype)
        found[self.stream.column("t")[steps] - 1, self.stream.column("lane")[steps]] = rewards[steps]
        return found

    @property
    def total(self) -> float:
        """The sum of its rewards; with several agents, of all of them."""
        return float(self.rewards.sum())

    @property
    def players(self) -> list[str]:
        """Who acted in it, in the order of their first actions."""
        codes = self.stream.column("by")[self.own]
        numbers, first = np.unique(codes, return_index=True)
        names = [self.stream.names[code] for _, code in sorted(zip(first, numbers, strict=True)) if code >= 0]
        return [name for name in names if name]

    @property
    def seed(self) -> int | None:
        """The seed of the reset that it began with; None: it began by itself, or without a seed."""
        reset = self.stream.resets.get(self.start)
        return None if reset is None else reset.seed_of(self.lane)

    @property
    def started(self) -> float:
        """When it began, seconds of the epoch."""
        return float(self.stream.column("time")[self.own[0]])

    @property
    def seconds(self) -> float:
        """From its first observation to its last."""
        return float(self.stream.column("time")[self.own[-1]]) - self.started


class Stream:
    """The recorded steps of one environment, one world of lanes, or one environment of several agents.

    Args:
        run: The recording, by the names of its files. The header is a stranger's text, and this becomes file names.
        number: The stream's number in it.
        columns: Its columns.
        parts: Its segments in order, each with the rows of the index that were read of it.
        damage: What of its files could not be read.
    """

    def __init__(
        self,
        run: str,
        number: int,
        columns: Columns,
        parts: Sequence[tuple[SegmentFile, pa.Table]],
        damage: Sequence[Damage],
    ) -> None:
        self.run, self.number, self.columns, self.damage = run, number, columns, damage
        self.header, self.kind = columns.header, columns.kind
        """`kind`: `env`, `lanes` or `agents`."""
        self.lanes, self.agents = columns.lanes or 1, columns.agents
        self._parts = [file for file, _ in parts]
        self._table = pa.concat_tables([table for _, table in parts])
        self._stops = np.cumsum([len(table) for _, table in parts])
        self._columns: dict[str, Array] = {}
        self._held: dict[int, pa.RecordBatch] = {}
        self.names: list[str] = []
        """Who acted, by the numbers of the column `by`."""
        calls, kinds = self.column("call"), self.column("kind")
        self.first = int(calls[0]) if len(calls) else 0
        """The first call that is there."""
        jumps = np.flatnonzero(np.diff(calls) > 1)
        self.gaps = [(int(calls[at]) + 1, int(calls[at + 1] - calls[at] - 1)) for at in jumps.tolist()]
        """Where calls are missing: the first of them, and how many."""
        if self.first and parts[0][0].part == 1:  # else the segments before were deleted at the limit
            self.gaps.insert(0, (0, self.first))
        self.closed = bool((kinds == Kind.END).any())
        """True if the environment was closed in order."""
        self.resets, self.calls = self._read_events()
        """The resets by the numbers of their calls; and the calls of methods, kind and request, before each."""

    def lane_number(self, lane: int) -> int:
        """Return the number of a lane in its world, which may have several streams."""
        own = self.header.get("lane", lane)
        return int(own) if self.kind == "env" else lane

    @property
    def title(self) -> str:
        """The name of the environment."""
        return str(self.header.get("env_id") or self.header.get("title") or "?")[:200]

    @property
    def spaces(self) -> list[tuple[Any, Any]]:
        """Observation and action space: of one environment, or of each agent."""
        return self.columns.spaces

    @property
    def has_observations(self) -> bool:
        """True if observations were recorded."""
        return bool(self.header.get("observations"))

    def column(self, name: str) -> Array:
        """Return a column of numbers of all rows; zeros where there is none, and -1 for nobody in `by`."""
        if name not in self._columns:
            cells = self._table[name].combine_chunks()
            if name == "by":
                encoded = cells.cast(pa.string()).dictionary_encode()
                self.names = [_printable(text) for text in encoded.dictionary.to_pylist()]
                cells = encoded.indices.fill_null(-1)
            self._columns[name] = _numbers(cells, self.columns.reward.shape if name == "reward" else ())
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
                    calls.setdefault(call, []).append((str(event["what"]), _bytes(event["request"])))
                elif kind in (Kind.RESET, Kind.FAILED_RESET):
                    options = values.decode(_bytes(event["options"])) if "options" in event else None
                    given = Reset(event.get("seed"), options, event.get("mask"), "unknown_options" in event)
                    given.seeds(self.lanes), [given.seed_of(lane) for lane in range(self.lanes)]
                    resets[call] = given
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, TensorError) as error:
                raise RecordingError(f"the event of call {call} cannot be read: {error!r:.100}") from error
        return resets, calls

    def _segment(self, part: int) -> pa.RecordBatch:
        """Return the rows of a segment. The last two are held: an episode may go from one into the next."""
        if part not in self._held:
            table = pa.concat_tables(_load(self._parts[part], None).tables)
            rows = int(self._stops[part] - (self._stops[part - 1] if part else 0))
            if len(table) < rows:
                raise RecordingError(f"{self._parts[part].path.name} changed while it was read")
            (batch,) = table.slice(0, rows).combine_chunks().to_batches()  # more may have been written meanwhile
            self._held = {**dict(list(self._held.items())[-1:]), part: batch}
        return self._held[part]

    def cells(self, name: str, rows: Array) -> Iterator[tuple[Array, pa.Array]]:
        """Yield, for each segment that has some of these rows: their places, and the cells."""
        for part, places, inside in self._places(rows):
            yield places, self._segment(part)[name].take(pa.array(inside))

    def _places(self, rows: Array) -> Iterator[tuple[int, Array, Array]]:
        """Yield, for each segment that has some of these rows: its number, their places, and the rows in it."""
        parts = np.searchsorted(self._stops, rows, "right")
        if len(rows) and (parts == parts[0]).all():  # nearly always
            first = int(parts[0])
            yield first, np.arange(len(rows)), rows - (self._stops[first - 1] if first else 0)
            return
        for part in np.unique(parts).tolist():
            places = np.flatnonzero(parts == part)
            yield part, places, rows[places] - (self._stops[part - 1] if part else 0)

    def samples(self, name: str, rows: Array | Sequence[int]) -> list[Any]:
        """Return the actions or observations of rows, as the environment took or gave them; None where there is none.

        Args:
            name: `action` or `observation`.
            rows: Where they are among the stream's rows.

        Raises:
            RecordingError: They were not recorded, or cannot be read.
        """
        rows = np.asarray(rows, np.int64)
        if name == "observation" and not self.has_observations:
            raise RecordingError(f"the recording {self.run} has no observations")
        found: list[Any] = [None] * len(rows)
        kinds = self.column("kind")[rows]
        for group in self.columns.groups:
            layout = group.layouts[name]
            own = np.flatnonzero(np.isin(self.column("lane")[rows], group.members)) if self.agents else None
            chosen = np.arange(len(rows)) if own is None else own
            grids, there = [], kinds[chosen] <= (Kind.RESET if name == "observation" else Kind.STEP)
            for column, leaf in zip(group.names(name), layout.leaves, strict=True):
                shape = (len(chosen), *leaf.spec.shape) if is_fixed(leaf.spec) else (len(chosen),)
                grid: Array = np.zeros(shape, leaf.spec.dtype if is_fixed(leaf.spec) else object)
                for places, cells in self.cells(column, rows[chosen]):
                    grid[places], there[places] = _dense(cells, grid.shape[1:], grid.dtype), _given(cells)
                grids.append(grid)
            try:
                for at, sample in _unpack(layout, grids, there):
                    found[int(chosen[at])] = sample
            except (TensorError, ValueError, TypeError) as error:
                raise RecordingError(f"an {name} of {self.run} cannot be read: {error}") from error
        return found

    def infos(self, rows: Array) -> list[dict[str, Any]]:
        """Return the infos of rows; raises RecordingError where they were not recorded, or cannot be read."""
        if not self.header.get("infos"):
            raise RecordingError(f"the recording {self.run} has no infos; record them with infos=True")
        found: list[dict[str, Any]] = [{} for _ in rows]
        for places, cells in self.cells("info", rows):
            for place, data in zip(places.tolist(), cells.to_pylist(), strict=True):
                if data is not None:
                    found[place] = values.decode(data)
        return found

    def players(self, rows: Array) -> list[str]:
        """Return who acted in rows; empty: nobody."""
        return ["" if code < 0 else self.names[code] for code in self.column("by")[rows].tolist()]

    # Episodes

    @functools.cached_property
    def _episodes(self) -> list[Episode]:
        calls, kinds, lanes = self.column("call"), self.column("kind"), self.column("lane")
        numbers, agents = self.column("episode"), self.kind == "agents"
        rows = np.flatnonzero((kinds <= Kind.FAILED_STEP) & (numbers > 0))
        rows = rows[np.lexsort((rows, numbers[rows], np.zeros(len(rows)) if agents else lanes[rows]))]
        cuts = np.flatnonzero((np.diff(numbers[rows]) != 0) | ((np.diff(lanes[rows]) != 0) & (not agents))) + 1
        found = []
        for part in np.split(rows, cuts):
            if len(part) and kinds[part[0]] == Kind.RESET:
                lane = 0 if agents or self.kind == "env" else int(lanes[part[0]])
                found.append(self._episode(lane, part))
        newest: dict[int, int] = {}
        for at, episode in enumerate(found):
            newest[episode.lane] = at
        found = [
            self._unfinished(episode, newest[episode.lane] == at) if not episode.end else episode
            for at, episode in enumerate(found)
        ]
        return sorted(found, key=lambda episode: (calls[episode.own[0]], episode.lane))

    def _episode(self, lane: int, rows: Array) -> Episode:
        """Return an episode; its end is empty where no row tells it."""
        kinds, last = self.column("kind")[rows], rows[-1]
        number = int(self.column("episode")[last])
        if kinds[-1] == Kind.FAILED_STEP:
            return Episode(self, lane, number, rows[kinds < Kind.FAILED_STEP], "failed", self._lacks(rows))
        end = "terminated" if self.column("terminated")[last] else "truncated" if self.column("truncated")[last] else ""
        if self.kind == "agents":
            ends = rows[self.column("call")[rows] == self.column("call")[last]]
            end = "" if self.column("alive")[ends].any() else "truncated"
            end = (
                "terminated" if not self.column("alive")[ends].any() and self.column("terminated")[ends].any() else end
            )
        lacks = self._lacks(rows)
        return Episode(self, lane, number, rows, "lost" if lacks else end, lacks)

    def _lacks(self, rows: Array) -> bool:
        """Return whether calls are missing between rows of an episode."""
        first, last = int(self.column("call")[rows[0]]), int(self.column("call")[rows[-1]])
        return any(first < at <= last for at, _ in self.gaps)

    def _unfinished(self, episode: Episode, newest: bool) -> Episode:
        """Return an episode that no row ends, with how it ended."""
        stop = episode.stop
        later = self.column("call")[self.column("call") >= stop]
        if any(at >= stop and (not newest or at <= (later[0] if len(later) else at)) for at, _ in self.gaps):
            return dataclasses.replace(episode, end="lost", incomplete=True)
        end = "reset" if not newest else "closed" if self.closed else "running"
        return dataclasses.replace(episode, end=end)

    def episodes(self) -> list[Episode]:
        """Return the episodes of all lanes, in the order of their beginnings."""
        return self._episodes

    def seeded_call(self, call: int) -> int | None:
        """Return the newest call up to this one that reset all lanes with a seed; None: there is none.

        Calls that are missing after it make it worthless, and it is None then.
        """
        found = [at for at in self.seeded if at <= call]
        if not found or any(found[-1] < at <= call for at, _ in self.gaps):
            return None
        return found[-1]

    @functools.cached_property
    def seeded(self) -> list[int]:
        """The calls that reset all lanes with a seed."""
        kinds, calls = self.column("kind"), self.column("call")
        done = set(calls[kinds == Kind.RESET].tolist())
        return sorted(at for at, reset in self.resets.items() if at in done and reset.seeds(self.lanes))

    def is_whole_until(self, call: int) -> bool:
        """Return whether the stream begins with a seeded reset, and nothing is missing from there to a call."""
        return self.first == 0 and 0 in self.seeded and not any(at <= call for at, _ in self.gaps)


def _printable(text: str) -> str:
    return "".join(part if part.isprintable() else "?" for part in text[:200])


def _given(cells: pa.Array) -> Array:
    """Return which cells are not null."""
    found: Array = (
        cells.is_valid().to_numpy(zero_copy_only=False) if cells.null_count else np.ones(len(cells), np.bool_)
    )
    return found


def _numbers(cells: Any, shape: tuple[int, ...]) -> Array:
    """Return the cells of a column of numbers, or of lists of numbers, as an array; zeros where there is none."""
    if shape:
        return _dense(cells, shape, None)
    if cells.null_count:
        cells = cells.fill_null(False if pa.types.is_boolean(cells.type) else 0)
    found: Array = cells.to_numpy(zero_copy_only=False)
    return found


def _dense(cells: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the cells of a column as one array, zeros where there is none; texts and bytes as objects."""
    kind = cells.type
    there = _given(cells)
    if np.dtype(dtype).hasobject:
        found: Array = np.empty(len(cells), object)
        found[:] = cells.to_pylist()
        return found
    if pa.types.is_list(kind) or pa.types.is_binary(kind):
        flat = cells.flatten() if pa.types.is_list(kind) else None
        if flat is not None and dtype is None:
            dtype = flat.type.to_pandas_dtype()
        found = np.zeros((len(cells), *shape), dtype)
        if flat is not None:
            plain = flat.to_numpy(zero_copy_only=False)
        else:
            dropped = cells.drop_null()
            _, offsets, data = dropped.buffers()
            ends = np.frombuffer(offsets, np.int32)[dropped.offset : dropped.offset + len(dropped) + 1]
            size = int(ends[-1] - ends[0]) // np.dtype(dtype).itemsize if len(ends) else 0
            plain = np.frombuffer(data, dtype, size, int(ends[0])) if size else np.zeros(0, dtype)
        found[there] = plain.reshape((int(there.sum()), *shape))  # a ValueError where a stranger's lists differ
        return found
    return _numbers(cells, ())


def _unpack(layout: Layout, grids: list[Array], there: Array) -> Iterator[tuple[int, Any]]:
    """Yield the samples of rows that have one, with their places."""
    rows = np.flatnonzero(there).tolist()
    leaf = layout.leaves[0]
    plain = layout.single and (leaf.kind == "scalar" or (leaf.kind == "array" and leaf.spec.shape))
    if plain and leaf.spec.dtype == leaf.space.dtype:  # nothing to unpack
        yield from ((at, grids[0][at]) for at in rows)
        return
    for at in rows:
        arrays = []
        for leaf, grid in zip(layout.leaves, grids, strict=True):
            cell: Any = grid[at]
            if leaf.kind == "encoded":
                cell = np.frombuffer(cell, np.uint8)
            elif grid.dtype == object and leaf.kind != "text":
                cell = values.decode(cell)
            arrays.append(np.asarray(cell, object if leaf.kind == "text" else None))
        yield at, layout.unpack(arrays)


@dataclasses.dataclass(frozen=True)
class Folder:
    """The recordings of a folder."""

    streams: Sequence[Stream]
    damage: Sequence[Damage]
    """The parts that could not be read, and were skipped."""

    def warnings(self) -> list[str]:
        """Return what could not be read, a line for each file."""
        found: dict[Path, list[Damage]] = {}
        for damage in self.damage:
            found.setdefault(damage.path, []).append(damage)
        return [f"{own[0]}{f' (and {len(own) - 1} more)' if own[1:] else ''}" for own in found.values()]

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
    files, problems = find_segments(path) if path.is_dir() else (list(segments_of(path)), [])
    if not files and not problems:
        lacks = "which has none" if path.exists() else "which does not exist"
        raise RecordingError(f"expected a folder with recordings, files *.parquet and *.arrow, got {path}, {lacks}")
    return _read(files, problems)


def read_newest(folder: str | Path, count: int) -> Folder:
    """Read so many of the newest streams of a folder that they hold this many episodes, or all.

    Raises:
        RecordingError: There is no recording.
    """
    files, problems = find_segments(Path(folder))
    groups = _by_stream(files)
    newest = {key: max(_written_at(file.path) for file in own) for key, own in groups.items()}
    streams: list[Stream] = []
    missing = count
    for key in sorted(newest, key=lambda key: (newest[key], key), reverse=True):
        if missing <= 0:
            break
        found = _read(groups[key], [])
        streams.extend(found.streams)
        problems.extend(found.damage)
        missing -= sum(len(stream.episodes()) for stream in found.streams)
    if not files and not problems:
        return read_folder(folder)
    return Folder(streams, problems)


def _by_stream(files: Sequence[SegmentFile]) -> dict[tuple[str, int], list[SegmentFile]]:
    """Return the segments of each stream, in order."""
    found: dict[tuple[str, int], list[SegmentFile]] = {}
    for file in files:
        found.setdefault((file.run, file.stream), []).append(file)
    return found


def _written_at(file: Path) -> float:
    """Return when a file was written last; 0 where it was deleted meanwhile."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _read(files: Sequence[SegmentFile], problems: list[Damage]) -> Folder:
    damage, streams = list(problems), []
    for own in _by_stream(files).values():
        stream, found = _read_stream(own)
        damage.extend(found)
        if stream is not None:
            streams.append(stream)
    return Folder(streams, damage)


def _read_stream(files: Sequence[SegmentFile]) -> tuple[Stream | None, list[Damage]]:
    """Read the segments of a stream; what cannot be read of them is said."""
    damage: list[Damage] = []
    columns: Columns | None = None
    parts: list[tuple[SegmentFile, pa.Table]] = []
    last = -1
    for file in files:
        try:
            loaded = _load(file, _INDEX)
            columns = columns or _columns_of(loaded, file)
            if not loaded.schema.equals(columns.schema, check_metadata=True):
                raise RecordingError("its columns are not those of its header, or of the recording's other files")
            table = pa.concat_tables([table.select(_index(columns)) for table in loaded.tables] or
                                     [columns.schema.empty_table().select(_index(columns))])  # fmt: skip
            last = _check_rows(table, columns, last)
        except RecordingError as error:
            damage.append(Damage(file.path, _printable(str(error))))
        except (KeyError, TypeError, ValueError, OverflowError, UsageError, RecursionError, pa.ArrowException) as error:
            damage.append(Damage(file.path, _printable(f"it cannot be read: {error!r:.150}")))
        else:
            parts.append((file, table))
            damage.extend(loaded.damage)
    if columns is None or not any(len(table) for _, table in parts):
        return None, damage
    try:
        return Stream(files[0].run, files[0].stream, columns, parts, damage), damage
    except RecordingError as error:
        return None, [*damage, Damage(files[0].path, _printable(str(error)))]


def _load(file: SegmentFile, columns: Sequence[str] | None) -> Loaded:
    try:
        return load_segment(file.path, columns)
    except RecordingError:
        sealed = file.path.with_suffix(".parquet")
        if file.path.suffix == ".arrow" and not file.path.exists() and sealed.exists():  # sealed meanwhile
            return load_segment(sealed, columns)
        raise


def _columns_of(loaded: Loaded, file: SegmentFile) -> Columns:
    """Return the columns that the header of a file tells."""
    header = json.loads((loaded.schema.metadata or {}).get(b"bridge", b"null"))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        told = header.get("format") if isinstance(header, dict) else None
        raise RecordingError(f"expected a recording of format version {FORMAT}, got {told!r:.40}")
    kind, lanes, agents = header.get("kind"), header.get("lanes", 1), header.get("agents", [])
    lists = isinstance(agents, list) and all(isinstance(agent, str) for agent in agents)
    sound = kind in ("env", "lanes", "agents") and lists and bool(agents) == (kind == "agents")
    sound = sound and len(set(agents)) == len(agents) <= _MOST_LANES and isinstance(header.get("spaces"), list)
    sound = sound and isinstance(lanes, int) and 0 < lanes <= _MOST_LANES
    sound = sound and len(header["spaces"]) == max(1, len(agents))
    sound = sound and all(isinstance(header.get(key, 0), int) for key in ("lane", "stream"))
    if not sound:
        raise RecordingError(f"its header is no recording's: kind {kind!r:.40}, lanes {lanes!r:.40}")
    return Columns(header)


def _index(columns: Columns) -> list[str]:
    return [name for name in _INDEX if name in columns.schema.names]


def _check_rows(table: pa.Table, columns: Columns, last: int) -> int:
    """Raise RecordingError where rows are not in order, or name a lane that is not there; return the last call."""
    if not len(table):
        return last
    call, lane, t, kind = (
        np.asarray(table[name].combine_chunks().fill_null(-9)) for name in ("call", "lane", "t", "kind")
    )
    lanes = columns.width if columns.kind != "env" else int(columns.header.get("lane", 0)) + 1
    known = np.isin(kind, [Kind.STEP, Kind.RESET, Kind.FAILED_STEP, Kind.FAILED_RESET, Kind.CALL, Kind.END])
    sound = call[0] >= max(last, 0) and (np.diff(call) >= 0).all() and (lane >= -1).all() and (lane < lanes).all()
    sound = sound and ((lane >= 0) | (kind > Kind.LOST)).all() and known.all() and (t >= 0).all()
    if not sound:
        raise RecordingError("its rows are not in order, or name a lane or a kind that is not there")
    return int(call[-1])


def open_episode(path: str | Path) -> Episode:
    """Find an episode by `FOLDER/ID`.

    Raises:
        RecordingError: There is no such episode.
    """
    given = Path(path)
    if given.is_dir():
        raise RecordingError(
            f"expected one episode, FOLDER/EPISODE with an id that `bridge runs {given}` lists, got the folder {given}"
        )
    name, _, numbers = given.name.rpartition("-")
    stream = numbers.partition(".")[0]
    files = find_segments(given.parent)[0] if given.parent.is_dir() else []
    files = [file for file in files if file.run == name]
    if not files:
        raise RecordingError(
            f"expected FOLDER/EPISODE with an id that `bridge runs {given.parent}` lists, got {given}: no recording "
            f"there begins with {name or given.name!r}"
        )
    for found in _read([file for file in files if str(file.stream) == stream], []).streams:
        for episode in found.episodes():
            if episode.id == given.name:
                return episode
    raise RecordingError(f"the recording {name} in {given.parent} has no episode {numbers}; `bridge runs` lists them")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError) as error:
        raise RecordingError(f"expected base64 in a recording, got {text!r:.40}") from error
