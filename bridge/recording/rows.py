"""The rows of a recording: calls of an environment as columns of Arrow.

One call of the environment (a reset or a step) gives one row for each lane or agent that takes part. The encoder
arranges the calls of a batch as a grid, calls by lanes, in which it marks the cells that become rows.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import batch_space, iterate

from bridge.core.encoding import values
from bridge.core.encoding.space_json import space_from_json
from bridge.core.encoding.spaces import Layout, Leaf
from bridge.core.encoding.tensors import Array, Spec
from bridge.core.extras import imported_from
from bridge.core.worlds.rewards import Rewards, as_number
from bridge.errors import RequestError, TensorError

with imported_from("recordings need pyarrow", "record"):
    import pyarrow as pa

__all__ = [
    "DISCARDED",
    "FLAT",
    "AgentColumns",
    "BranchPoint",
    "Columns",
    "Encoder",
    "Kind",
    "LaneSamples",
    "Row",
    "as_text",
    "flat_of",
    "hash_of",
    "is_fixed",
    "of_cell",
]

FORMAT = 2
"""The version of the format, in the metadata of each file."""
# A copy of this object takes half the time of a new one.
_HASH = hashlib.blake2b(digest_size=8)
# Larger tensors are stored as bytes: lists of numbers are slow to write and to read.
_LARGEST_LIST = 1024


class Kind:
    """The values of the column `kind`."""

    # The order matters. Kinds up to FAILED_STEP belong to an episode, and rows from CALL on belong to no lane: readers
    # compare with `<=`, `<` and `>=`. The numbers in between are reserved for further kinds of rows of lanes.
    STEP = 0
    """The lane was stepped."""
    RESET = 1
    """The lane was reset, by a call or by autoreset."""
    FAILED_STEP = 2
    """The environment raised in a step, or its server was lost."""
    FAILED_RESET = 3
    """The environment raised in a reset."""
    CALL = 17
    """A method was called, or an attribute was set."""
    END = 18
    """The environment was closed."""


class Row(NamedTuple):
    """One call of an environment, in the form passed to the writer's thread."""

    kind: int
    time: float
    """Seconds since 1970."""
    by: Any = ""
    """The player: a text, or a dict with one for each agent; a list with one for each lane if they differ."""
    action: Any = None
    """An element of the environment's action space; for `CALL` a pair, else None. With several agents, this and the
    following fields up to the flags are dicts by agent."""
    observation: Any = None
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    alive: Any = ()
    """With several agents: those that continue."""
    seed: Any = None
    options: Any = None
    """The options of a reset; for a failed step, entries of its event beside the error, such as `DISCARDED`."""
    error: Any = ""
    """The exception's text; for lanes that failed separately, a dict of texts by lane."""
    moment: Any = None
    """In real time: the world's seconds, the arrival time of the action, and the frame number."""
    frame: Any = None
    """The result of `render`, a list with one entry per lane; None: not recorded."""
    info: Any = None
    """The info; for lanes a dict of arrays or a list of dicts, for several agents a dict by agent."""
    branch: Any = None
    """Set if environments continue elsewhere, which is recorded like a reset: a list with one `BranchPoint` per lane,
    None for lanes that are not affected."""


@dataclasses.dataclass(frozen=True)
class BranchPoint:
    """The point in another episode that an episode continues."""

    stream: str = ""
    """`RUN-STREAM` of the other episode; empty: it was not recorded."""
    lane: int = 0
    """The lane of the other episode."""
    call: int = 0
    """The number of its environment's last call before the branch."""
    seed: int | None = None
    """The seed with which the random generators were seeded again; None: they were not."""


DISCARDED: Mapping[str, Any] = {"discarded": True}
"""In the event of a failed step: the episode that it ends is to be ignored, because it was begun again elsewhere."""

FLAT = len(Row._fields) + 2
"""The number of entries per call in a flat list: its approximate size in bytes, its number, and the fields of its
`Row`.

The list is flat because Python's garbage collector would traverse each tuple in a list of tuples, and because a slice
with a stride is a column.
"""


def flat_of(calls: Iterable[tuple[int, Row]]) -> list[Any]:
    """Return numbered calls as a flat list."""
    return [field for number, row in calls for field in (0, number, *row)]


class LaneSamples(list[Any]):
    """A list of the lanes' observations, None for lanes without one."""


def as_text(value: Any) -> str:
    """Return a value as the text of the values codec; raise TensorError if it cannot be encoded."""
    return base64.b64encode(values.encode(value)).decode("ascii")


def is_fixed(spec: Spec) -> bool:
    """Return True if a tensor contains numbers and has a fixed shape."""
    return spec.dtype.kind in "biuf" and all(size >= 0 for size in spec.shape)


def hash_of(layout: Layout, sample: Any) -> bytes:
    """Return the hash of an observation: BLAKE2b over the little-endian bytes of its tensors in order.

    Raises:
        TensorError: The observation is not in the space.
    """
    digest = _HASH.copy()
    # Most observations are one array with the spec's dtype and shape: its memory is hashed directly, without the copies
    # of `pack` and `tobytes`.
    if layout.single and type(sample) is np.ndarray and sample.flags.c_contiguous:
        spec = layout.specs[0]
        fits = sample.dtype == spec.dtype and sample.shape == spec.shape and spec.dtype.kind in "biuf"
        if fits and spec.dtype.str[0] != ">":
            digest.update(sample.data)
            return digest.digest()
    # Rounded as in messages: an environment that returns float64 for a float32 Box is common, and accepted.
    for array, each in zip(layout.pack(sample, rounding=True), layout.specs, strict=True):
        little = array.dtype.newbyteorder("<")
        digest.update(np.ascontiguousarray(array, little).tobytes() if is_fixed(each) else values.encode(array))
    return digest.digest()


class AgentColumns:
    """The columns of lanes, or agents, with equal spaces.

    Args:
        prefix: The prefix of the columns' names; empty for the first group.
        members: The indices of the lanes or agents in the grid.
        spaces: Observation and action space.
        lanes: The number of lanes in one sample; None: a sample is of a single lane.
    """

    def __init__(
        self, prefix: str, members: Sequence[int], spaces: tuple[Space[Any], Space[Any]], lanes: int | None
    ) -> None:
        self.prefix, self.members = prefix, members
        self.layouts = {name: Layout(space, name) for name, space in zip(_SAMPLED, spaces, strict=True)}
        self.batches = {name: Layout(space, name, lanes) for name, space in zip(_SAMPLED, spaces, strict=True)}

    def names(self, name: str) -> list[str]:
        """Return the names of the columns for observations or actions."""
        return [f"{self.prefix}{leaf.name}" for leaf in self.layouts[name].leaves]


_SAMPLED = ("observation", "action")


class Columns:
    """The columns of a recording, as defined by its header.

    Args:
        header: The metadata of its files; raises like `space_from_json` if its spaces are invalid.
    """

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.header = header
        self.kind: str = header["kind"]
        self.agents: list[str] = list(header.get("agents", ()))
        self.lanes = int(header["lanes"]) if self.kind == "lanes" else None
        self.width = len(self.agents) if self.kind == "agents" else self.lanes or 1
        self.same_step = bool(header.get("same_step")) and self.kind == "lanes"
        """True if lanes that end begin their next episode in the same step; otherwise they do in the next one."""
        self.splits = self.same_step or bool(self.agents)
        """True if some lanes, or agents, may take no part in a call."""
        self.spaces = [(space_from_json(one), space_from_json(two)) for one, two in header["spaces"]]
        self.groups: list[AgentColumns] = []
        # Agents with equal spaces share columns. The JSON texts are compared, so that a reader gets the same groups
        # from the header alone.
        texts = [json.dumps(pair) for pair in header["spaces"]]
        for text in dict.fromkeys(texts):
            first = texts.index(text)
            members = [at for at, other in enumerate(texts) if other == text] if self.agents else range(self.width)
            prefix = f"{first}:" if first else ""
            self.groups.append(AgentColumns(prefix, members, self.spaces[first], self.lanes))
        reward = header.get("reward_space")
        self.reward = Rewards(None if reward is None else space_from_json(reward), None).spec
        self.schema = pa.schema(self._fields(), {b"bridge": json.dumps(dict(header)).encode()})

    def parts_of(self, row: Row) -> list[Row]:
        """Split a call into parts in which lanes, or agents, that take no part hold None in `LaneSamples`."""
        if self.agents:
            return [_by_agent(row, self.agents)]
        return _split_autoreset(row, self.width, self.spaces[0][0]) if self.same_step else [row]

    def _fields(self) -> Iterator[tuple[str, pa.DataType]]:
        yield from (("call", pa.int64()), ("lane", pa.int32()), ("kind", pa.int8()))
        yield from (("episode", pa.int64()), ("t", pa.int64()), ("time", pa.float64()))
        if self.header.get("fps"):
            yield from (("clock", pa.float64()), ("frame_number", pa.int64()), ("acted_at", pa.float64()))
        yield "by", pa.string()
        yield from self._of("action")
        yield "reward", type_of(self.reward)
        yield from (("terminated", pa.bool_()), ("truncated", pa.bool_()))
        if self.agents:
            yield from (("acted", pa.bool_()), ("seen", pa.bool_()), ("alive", pa.bool_()))
        if self.header.get("observations"):
            yield from self._of("observation")
        else:
            yield "hash", pa.binary()
        yield from ((name[:-1], pa.binary()) for name in ("infos", "frames") if self.header.get(name))
        yield "event", pa.string()

    def _of(self, name: str) -> Iterator[tuple[str, pa.DataType]]:
        for group in self.groups:
            for leaf in group.layouts[name].leaves:
                yield f"{group.prefix}{leaf.name}", type_of(leaf.spec, leaf.kind)


def type_of(spec: Spec, kind: str = "array") -> pa.DataType:
    """Return the Arrow type for the cells of a tensor."""
    if kind == "text":
        return pa.string()
    if not is_fixed(spec):
        return pa.binary()
    plain = pa.from_numpy_dtype(spec.dtype)
    if not spec.shape:
        return plain
    return pa.list_(pa.field("element", plain)) if int(np.prod(spec.shape)) <= _LARGEST_LIST else pa.binary()


def _split_autoreset(row: Row, lanes: int, space: Space[Any]) -> list[Row]:
    """Split a step that also began the next episodes of lanes whose episodes it ended (autoreset mode SAME_STEP).

    Returns:
        The step with each lane's last observation, and the reset with the first observations of the next episodes.
    """
    ended = np.broadcast_to(np.asarray(row.terminated, np.bool_) | np.asarray(row.truncated, np.bool_), (lanes,))
    if row.kind != Kind.STEP or not ended.any():
        return [row]
    infos, first = lane_infos(row.info, lanes), list[dict[str, Any]]()
    seen = LaneSamples(iterate(batch_space(space, lanes), row.observation))
    # For a lane that failed, either the step or the reset in it failed; if both did, the step's error is in its info.
    failed = row.error or {}
    unbegun = [lane for lane in failed if ended[lane] and "error" in infos[lane]]
    stepped = {lane: told for lane, told in failed.items() if lane not in unbegun}
    for lane, info in enumerate(infos):
        final_obs, final_info = info.pop("final_obs", None), info.pop("final_info", None)
        # For a lane that began anew, Gymnasium puts the reset's info at the top level, and the step's into
        # `final_info`.
        first.append({k: v for k, v in info.items() if not k.startswith("final_")} if ended[lane] else {})
        if ended[lane]:
            seen[lane] = final_obs
            infos[lane] = info if final_info is None else final_info
            if lane in unbegun and "error" in infos[lane]:
                stepped[lane] = str(infos[lane]["error"])
    step = row._replace(observation=seen, info=infos, error=stepped)
    # The mask selects the lanes with a row for the reset. The key "autoreset" keeps the row from having an event: a
    # replay would call reset() for an event, but this reset happened within step().
    return [step, Row(Kind.RESET, row.time, observation=row.observation, options={"reset_mask": ended.copy()},
                      moment=row.moment, frame=row.frame, info=first,
                      error={"autoreset": "", **{lane: failed[lane] for lane in unbegun}})]  # fmt: skip


def lane_infos(info: Any, lanes: int) -> list[dict[str, Any]]:
    """Return the info of each lane: a list, or a dict of arrays with masks `_key` in Gymnasium's form."""
    if isinstance(info, list):
        return [dict(one) for one in info]
    found: list[dict[str, Any]] = [{} for _ in range(lanes)]
    for key, value in (info or {}).items():
        if isinstance(key, str) and key.startswith("_") and key[1:] in info:
            continue
        mask = info.get(f"_{key}")
        parts: Any = lane_infos(value, lanes) if isinstance(value, Mapping) else value
        for lane in range(lanes):
            # A user's vector environment may put anything into its infos: values without one entry per lane are not
            # recorded.
            if (mask is None or mask[lane]) and np.ndim(parts) and len(parts) == lanes:
                found[lane][key] = parts[lane]
    return found


class Encoder:
    """Converts the calls of one environment, of lanes that step together, or of several agents to record batches.

    Args:
        header: The metadata of the files, from `facts_of`.
    """

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.columns = Columns(header)
        self.schema = self.columns.schema
        """The columns, with the header as metadata."""
        self.stream = int(header["stream"])
        width = self.columns.width
        self._call = 0
        # For each lane: the number of its newest episode, its steps in that episode, whether it ended and begins anew
        # in the next step, and whether the number is known. After lost calls it is unknown until the lane's next reset.
        self._begun = np.zeros(width, np.int64)
        self._t = np.zeros(width, np.int64)
        self._over = np.zeros(width, np.bool_)
        self._known = np.zeros(width, np.bool_)
        self._before = self._state()

    def _state(self) -> tuple[Any, ...]:
        # Not copied: `count` replaces these arrays, and never writes into them.
        return self._call, self._begun, self._t, self._over, self._known

    def encode(self, flat: list[Any]) -> list[pa.RecordBatch]:
        """Return calls as record batches: one for each run of consecutive calls, and one for each note.

        Args:
            flat: A flat list of the calls. Gaps in the numbers mean that calls were lost.
        """
        self._before = self._state()
        numbers, notes = np.array(flat[1::FLAT]), np.array(flat[2::FLAT]) >= Kind.CALL
        # A batch of steps has consecutive numbers, which `_encode` relies on. A note has the number of the call after
        # it, and takes none itself, so it is a separate batch.
        cuts = np.flatnonzero(notes[1:] | notes[:-1] | (np.diff(numbers) != 1)) + 1
        found: list[pa.RecordBatch] = []
        for first, last in itertools.pairwise([0, *cuts.tolist(), len(numbers)]):
            if numbers[first] != self._call:
                # The number of episodes that ended in a gap is unknown: rows belong to no episode until the next one
                # begins.
                self._call = int(numbers[first])
                self._known, self._over = np.zeros_like(self._known), np.zeros_like(self._over)
            part = flat[first * FLAT : last * FLAT]
            found.append(self._note(Row(*part[2:])) if notes[first] else self._encode(part))
        return found

    def rewind(self) -> None:
        """Undo the last call of `encode`, because it failed, or its result was not written."""
        self._call, self._begun, self._t, self._over, self._known = self._before

    def _note(self, row: Row) -> pa.RecordBatch:
        """Return the row for a call that is neither a reset nor a step."""
        event = {} if row.kind == Kind.END else {"what": row.action[0], "request": _base64(row.action[1])}
        cells: dict[str, Any] = {"call": self._call, "lane": -1, "kind": row.kind, "time": row.time}
        cells.update(episode=0, t=0, terminated=False, truncated=False, event=json.dumps(event))
        return pa.RecordBatch.from_pylist([cells], self.schema)

    def _encode(self, flat: list[Any]) -> pa.RecordBatch:
        count = len(flat) // FLAT
        numbers = np.arange(self._call, self._call + count)
        self._call += count
        fields: dict[str, Sequence[Any]] = {name: flat[at::FLAT] for at, name in enumerate(Row._fields, 2)}
        if self.columns.splits:
            parts = [self.columns.parts_of(Row(*row)) for row in zip(*fields.values(), strict=True)]
            # A step and the reset in it were one call, so they have the same number.
            numbers = np.repeat(numbers, [len(part) for part in parts])
            rows = itertools.chain.from_iterable(parts)
            fields = dict(zip(Row._fields, zip(*rows, strict=True), strict=True))
        return _Batch(self.columns, fields, numbers).build(self)

    def count(self, kinds: Array, masks: Array, ended: Array, failed: Array) -> tuple[Array, Array, Array, Array]:
        """Track the episodes through a batch.

        Args:
            kinds: The kinds of the calls.
            masks: The lanes whose episodes take part in each call, bool `(calls, lanes)`; several agents share one
                episode.
            ended: The lanes whose episodes ended in each call.
            failed: The lanes that failed separately in each call.

        Returns:
            The cells that were to begin an episode, even if that failed; the cells of lanes without an episode because
                their resets failed; the number of each cell's episode (0: unknown), and its `t`.
        """
        begins = masks & (kinds == Kind.RESET)[:, None]
        steps = kinds == Kind.STEP
        # In the mode NEXT_STEP the environment resets a lane that ended, and ignores its action: its row is a reset.
        # Each call depends on the previous one, so this is a loop; the counts below are sums over columns.
        idle = np.zeros_like(masks)
        if self.columns.lanes is not None and (failed.any() or self._over.any() or not self.columns.same_step):
            # A lane that ended begins anew in the next step, unless it was reset before. In the mode SAME_STEP a lane
            # has no episode only if the reset in its last step failed, and the next step tries again.
            over = self._over
            for at, is_step in enumerate(steps.tolist()):
                if not is_step:
                    over = (over & ~begins[at]) | (begins[at] & failed[at])
                elif self.columns.same_step:
                    idle[at] = over
                else:
                    begins[at], over = over, ended[at]
            self._over = over
        # `t` is a lane's steps since before the batch, minus those up to its newest beginning, without a loop over the
        # rows. In the mode NEXT_STEP the beginning is itself a step.
        begun = begins & ~failed
        total = self._t + np.cumsum(masks & steps[:, None] & ~failed & ~idle, axis=0)
        t = total - np.maximum.accumulate(np.where(begun, total, 0), axis=0)
        number = self._begun + np.cumsum(begun, axis=0)
        known = self._known | np.logical_or.accumulate(begun, axis=0)
        self._t, self._begun, self._known = t[-1], number[-1], known[-1]
        return begins, idle, np.where(known, number, 0), t


class _Batch:
    """The rows of a batch as a grid of calls by lanes, or by agents."""

    def __init__(self, columns: Columns, fields: dict[str, Sequence[Any]], numbers: Array) -> None:
        self.columns, self.fields, self.numbers = columns, fields, numbers
        self.shape = (len(numbers), columns.width)
        self.kinds = np.array(fields["kind"], np.int8)
        self._resets = (self.kinds == Kind.RESET) | (self.kinds == Kind.FAILED_RESET)

    def _row(self, at: int) -> Row:
        return Row(*(cells[at] for cells in self.fields.values()))

    def build(self, encoder: Encoder) -> pa.RecordBatch:
        """Return the record batch."""
        columns, kinds = self.columns, self.kinds
        acted, seen = self._given("action"), self._given("observation")
        flags = {name: self._spread(name, np.bool_) for name in ("terminated", "truncated")}
        ended = (flags["terminated"] | flags["truncated"]) & (kinds == Kind.STEP)[:, None]
        agents: dict[str, Array] = {}
        if columns.agents:
            alive = self._spread("alive", np.bool_)
            agents = {"acted": acted, "seen": seen, "alive": alive}
            masks = acted | seen | alive | self._given("reward")
            masks[~masks.any(axis=1), 0] = True  # a call without any lane still gets a row
            # Agents may be terminated one by one: their common episode continues until none is alive.
            ended = np.broadcast_to(~alive.any(axis=1, keepdims=True) & (kinds == Kind.STEP)[:, None], self.shape)
            counted = np.ones(self.shape, np.bool_)  # includes agents that enter later, or come back
        else:
            masks = counted = self._masks()
        failed = self._failed_lanes()
        begins, idle, episodes, t = encoder.count(kinds, counted, ended, failed)
        kind = np.where(begins, np.int8(Kind.RESET), kinds[:, None])
        # A lane that failed ends only its own episode, like a single environment; after a failed reset it has none.
        kind[failed] = Kind.FAILED_STEP
        kind[(failed & begins) | idle] = Kind.FAILED_RESET
        # A lane that began anew also got an action, which the environment ignored: nobody acted in its row.
        stepped, acted = masks & (kind == Kind.STEP), acted & ~begins & ~idle & masks
        seen &= masks & ~failed & ~idle
        self.masks, (call, lane) = masks, np.nonzero(masks)
        # In real time each lane of a world is a separate stream, whose rows have the lane's number in the world.
        own = int(columns.header.get("lane", 0)) if columns.kind == "env" else 0
        cells: dict[str, Any] = {
            "call": self.numbers[call], "lane": (lane + own).astype(np.int32), "kind": kind[masks],
            "episode": episodes[masks], "t": t[masks], "time": np.array(self.fields["time"])[call],
        }  # fmt: skip
        if columns.header.get("fps"):
            # A client's recorder does not know the world's clock.
            moments = np.array([moment or (np.nan, np.nan, 0) for moment in self.fields["moment"]])[call]
            cells["clock"], cells["acted_at"] = moments[:, 0], moments[:, 1]
            cells["frame_number"] = moments[:, 2].astype(np.int64)
        cells["by"] = _nullable(self._column(self.fields["by"], acted, pa.string()), acted[masks])
        cells.update(self._samples("action", acted))
        rewards = self._spread("reward", columns.reward.dtype, columns.reward.shape)
        cells["reward"] = _nullable(_array(rewards[stepped], type_of(columns.reward)), stepped[masks])
        cells.update({name: (flag & stepped)[masks] for name, flag in flags.items()})
        cells.update({name: flag[masks] for name, flag in agents.items()})
        if columns.header.get("observations"):
            cells.update(self._samples("observation", seen))
        else:
            cells["hash"] = self._column(self._hashes(), masks, pa.binary())
        if columns.header.get("infos"):
            cells["info"] = self._column(map(self._infos, self.fields["info"]), masks, pa.binary())
        if columns.header.get("frames"):
            cells["frame"] = self._column(map(_pictures, self.fields["frame"]), masks, pa.binary())
        cells["event"] = self._events(failed & (kind == Kind.FAILED_STEP))
        return pa.RecordBatch.from_arrays(
            [pa.array(cells[name]) for name in columns.schema.names], schema=columns.schema
        )

    def _masks(self) -> Array:
        """Return the lanes that take part in each call, bool `(calls, lanes)`: all, or those that a reset selects."""
        found = np.ones(self.shape, np.bool_)
        for at in np.flatnonzero(self._resets).tolist():
            mask = mask_of(self._row(at))
            if mask is not None:
                found[at] = mask
        return found

    def _failed_lanes(self) -> Array:
        """Return the lanes that failed separately in each call, bool `(calls, lanes)`."""
        found = np.zeros(self.shape, np.bool_)
        for at, error in enumerate(self.fields["error"]):
            if error and not isinstance(error, str):
                found[at, [lane for lane in error if lane != "autoreset"]] = True
        return found

    def _given(self, name: str) -> Array:
        """Return the lanes that have an action, an observation or a reward in each call, bool `(calls, lanes)`."""
        found = np.zeros(self.shape, np.bool_)
        found[:] = np.array([value is not None for value in self.fields[name]])[:, None]
        for at, value in enumerate(self.fields[name] if self.columns.splits else ()):
            if type(value) is LaneSamples:
                found[at] = [one is not None for one in value]
        return found

    def _spread(self, name: str, dtype: Any, shape: tuple[int, ...] = ()) -> Array:
        """Return a field of the calls as a grid, `(calls, lanes, *shape)`: per lane, or one value for all lanes.

        A value of another type or shape becomes NaN, or 0 if the dtype has no NaN; None becomes 0.
        """
        found: Array = np.zeros((*self.shape, *shape), dtype)
        if not self.columns.agents:
            with contextlib.suppress(
                OverflowError, TypeError, ValueError
            ):  # the usual case: all are numbers, or all have the shape
                found[:] = np.array(self.fields[name], dtype).reshape(found.shape)
                return found
        # One call at a time, so that an invalid value affects only its own cell.
        for at, value in enumerate(self.fields[name]):
            splits = type(value) is LaneSamples
            try:
                found[at] = [0 if one is None else one for one in value] if splits else value
            except (OverflowError, TypeError, ValueError):
                if found.dtype.kind == "f" and not shape and (splits or np.ndim(value) == 0):
                    found[at] = [_float(one) for one in value] if splits else _float(value)
                else:
                    found[at] = 0 if value is None or found.dtype.kind != "f" else np.nan
        return found

    def _column(self, each: Iterable[Any], present: Array, kind: pa.DataType) -> pa.Array:
        """Return the present cells as a column.

        Args:
            each: For each call, a list with one cell per lane, or the one cell for all of them.
            present: The cells that are present.
            kind: The Arrow type.
        """
        calls = list(each)
        # A value that all lanes share is converted once per call, not once per lane.
        if list not in set(map(type, calls)):
            return pa.array(calls, kind).take(pa.array(np.nonzero(present)[0]))
        lists = (cells if type(cells) is list else [cells] * self.shape[1] for cells in calls)
        return pa.array(list(itertools.compress(itertools.chain.from_iterable(lists), present.ravel().tolist())), kind)

    def _samples(self, name: str, present: Array) -> dict[str, pa.Array]:
        """Return the columns of the actions or observations that are present."""
        found: dict[str, pa.Array] = {}
        for group in self.columns.groups:
            own = present & np.isin(np.arange(self.shape[1]), group.members)
            stacked = self._stacked(group, name)
            for index, (column, leaf) in enumerate(zip(group.names(name), group.layouts[name].leaves, strict=True)):
                if stacked is None:
                    cells = self._tensors(group, name, index, own)
                else:  # few copies of pictures: that is most of the cost of recording them
                    cells = stacked.reshape(own.size, *stacked.shape[2:]) if own.all() else stacked[own]
                found[column] = _nullable(_array(cells, type_of(leaf.spec, leaf.kind)), own[self.masks])
        return found

    def _tensors(self, group: AgentColumns, name: str, index: int, own: Array) -> Any:
        """Return one tensor for each of a group's own actions or observations."""
        layout, leaf = group.layouts[name], group.layouts[name].leaves[index]
        fixed, found = is_fixed(leaf.spec), list[Any]()
        for at in np.flatnonzero(own.any(axis=1)).tolist():
            sample = self.fields[name][at]
            if self.columns.lanes is not None and type(sample) is not LaneSamples:
                column = leaf.unpack_lanes(group.batches[name].pack_leaf(index, sample), self.columns.lanes)
                each = itertools.compress(column, own[at].tolist())
                found.extend(each if fixed else (leaf.pack(one, True) for one in each))
            else:
                samples = sample if type(sample) is LaneSamples else [sample]
                found.extend(layout.pack_leaf(index, one) for one in itertools.compress(samples, own[at].tolist()))
        if not fixed:
            return [_cell(leaf, array) for array in found]
        return np.stack(found) if found else np.empty((0, *leaf.spec.shape), leaf.spec.dtype)

    def _stacked(self, group: AgentColumns, name: str) -> Array | None:
        """Return samples of one tensor as a grid, `(calls, lanes, *shape)`; None if not all have its dtype."""
        layout = group.layouts[name]
        if not layout.single or not is_fixed(spec := layout.leaves[0].spec) or self.columns.agents:
            return None
        shape = spec.shape if self.columns.lanes is None else (self.shape[1], *spec.shape)
        # Calls without a sample, such as a failed step, fill a place in the grid that `present` leaves out.
        zero = np.zeros(shape, spec.dtype)
        try:
            column = np.array([zero if sample is None else sample for sample in self.fields[name]])
        # Their shapes differ: `_tensors` reports which sample is not in its space.
        except ValueError:
            return None
        # Samples of another dtype, and lists, must be checked and rounded one by one.
        fits = column.dtype == spec.dtype and column.shape == (self.shape[0], *shape)
        return column.reshape(*self.shape, *spec.shape) if fits else None

    def _hashes(self) -> list[Any]:
        """Return the hash of each agent's observation, or that of all lanes' observations, which their rows share."""
        if self.columns.agents:
            layouts = {lane: group.layouts["observation"] for group in self.columns.groups for lane in group.members}
            return [[None if one is None else hash_of(layouts[lane], one) for lane, one in enumerate(each)]
                    for each in self.fields["observation"]]  # fmt: skip
        layout = self.columns.groups[0].batches["observation"]
        # A step that was split has no hash: the environment's batch contains the first observations of lanes that began
        # anew, and is hashed with their reset.
        return [None if seen is None or type(seen) is LaneSamples else hash_of(layout, seen)
                for seen in self.fields["observation"]]  # fmt: skip

    def _infos(self, info: Any) -> list[bytes | None]:
        infos = [info or {}] if self.columns.kind == "env" else lane_infos(info, self.shape[1])
        return [values.encode_info(one, values.Notes()) if one else None for one in infos]

    def _events(self, failed: Array) -> pa.Array:
        """Return the column `event`: the arguments of resets, and errors, in the first row of each call.

        The error of a lane that failed separately is in its own row.

        Args:
            failed: The rows of such lanes, bool `(calls, lanes)`.
        """
        raised = [bool(error) and isinstance(error, str) for error in self.fields["error"]]
        told = (self._resets | np.array(raised)) & self.masks.any(axis=1)
        rows = failed.copy()
        rows[told, self.masks[told].argmax(axis=1)] = True
        texts = [
            json.dumps({"error": self.fields["error"][at].get(lane, "")}) if failed[at, lane] else _event(self._row(at))
            for at, lane in np.argwhere(rows).tolist()
        ]
        return _nullable(pa.array(texts, pa.string()), rows[self.masks])


def _float(value: Any) -> float:
    """Return a number from an array of one element or a large integer; NaN for other values; 0.0 for None."""
    try:
        return 0.0 if value is None else as_number(value)
    except RequestError:
        return math.nan


_BY_AGENT = ("action", "observation", "reward", "terminated", "truncated")


def _by_agent(row: Row, agents: Sequence[str]) -> Row:
    """Return a call of several agents in the form of lanes, with None for agents that take no part."""

    def each(part: Any) -> Any:
        # A PettingZoo agent may be any hashable object; the header contains it as text.
        named = {str(agent): value for agent, value in (part or {}).items()}
        return LaneSamples(named.get(agent) for agent in agents)

    by = row.by if isinstance(row.by, str) else [row.by.get(agent, "") for agent in agents]
    parts = {name: each(getattr(row, name)) for name in _BY_AGENT}
    alive = {str(agent) for agent in row.alive}
    info = [one or {} for one in each(row.info)]
    return row._replace(by=by, **parts, info=info, alive=[agent in alive for agent in agents])


def _pictures(frames: Sequence[Any] | None) -> Any:
    """Return frames as `_picture` does; several agents share one."""
    found = [_picture(frame) for frame in frames or [None]]
    return found if len(found) > 1 else found[0]


def _picture(frame: Any) -> bytes | None:
    """Return a frame in NumPy's file format; None if it is not an array."""
    if not isinstance(frame, np.ndarray):
        return None
    file = io.BytesIO()
    # Nothing is ever pickled: reading an untrusted file must not execute code that it names.
    np.lib.format.write_array(file, frame, allow_pickle=False)
    return file.getvalue()


def _cell(leaf: Leaf, array: Array) -> Any:
    """Return the cell for a tensor that is not of fixed-shape numbers."""
    if leaf.kind == "text":
        return str(array[()])
    return array.tobytes() if leaf.kind == "encoded" else values.encode(array)


def of_cell(leaf: Leaf, cell: Any) -> Array:
    """Return the tensor in a cell: the inverse of `_cell`, and a copy of numbers."""
    if leaf.kind == "encoded":
        return np.frombuffer(cell, np.uint8)
    if leaf.kind == "text":
        return np.array(cell, object)
    return np.array(cell) if is_fixed(leaf.spec) else np.asarray(values.decode(cell))


def _array(cells: Any, kind: pa.DataType) -> pa.Array:
    """Return cells as a column: a list of them, or an array with one entry for each."""
    if isinstance(cells, list) or cells.ndim == 1:
        return pa.array(cells, kind)
    found = np.ascontiguousarray(cells, cells.dtype.newbyteorder("<"))
    is_list = pa.types.is_list(kind)
    size = math.prod(cells.shape[1:]) * (1 if is_list else cells.dtype.itemsize)
    # Arrow's `list` and `binary` have 32-bit offsets. The writer's batches are far smaller: 8 MiB, or one call.
    offsets = pa.array(np.arange(len(cells) + 1, dtype=np.int64) * size, pa.int32())  # raises if they are too large
    if is_list:
        return pa.ListArray.from_arrays(offsets, pa.array(found.reshape(-1)), type=kind)
    # Cells of fixed size need no copy: Arrow uses the array's memory.
    return pa.Array.from_buffers(kind, len(cells), [None, offsets.buffers()[1], pa.py_buffer(found)])


def _nullable(cells: pa.Array, there: Array) -> pa.Array:
    """Spread cells over rows: the next cell for each row that has one, null for the others."""
    return cells if there.all() else cells.take(pa.array(np.cumsum(there) - 1, mask=~there))


def mask_of(row: Row) -> Any:
    """Return the lanes that a reset selects; None: all."""
    return row.options.get("reset_mask") if isinstance(row.options, Mapping) else None


def _event(row: Row) -> str | None:
    """Return the event of a call as JSON: the arguments of a reset, or the error; None if it has none."""
    if row.kind in (Kind.FAILED_STEP, Kind.STEP):
        return json.dumps({"error": row.error, **(row.options or {})})
    if not isinstance(row.error, str) and "autoreset" in row.error:
        return None
    if row.branch is not None:
        # Unknown parts are omitted: most resets have no seed, for example.
        told = [one and {k: v for k, v in dataclasses.asdict(one).items() if v not in ("", None)} for one in row.branch]
        return json.dumps({"branch": told})
    found: dict[str, Any] = {"error": row.error} if row.error and row.kind == Kind.FAILED_RESET else {}
    several = isinstance(row.seed, (list, tuple))
    seeds = [None if seed is None else int(seed) for seed in (row.seed if several else [row.seed])]
    found["seed"] = seeds if several else seeds[0]
    mask = mask_of(row)
    if mask is not None:
        found["mask"] = np.asarray(mask, np.bool_).tolist()
    if row.options is not None:
        try:
            found["options"] = as_text(row.options)
        except TensorError as error:
            found["unknown_options"] = str(error)
    return json.dumps(found)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
