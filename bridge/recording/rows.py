"""Rows of a recording: what went through an environment, as columns of Arrow.

One call of the environment (a reset or a step) gives one row for each lane, or for each agent, that it concerned. The
encoder lays the calls of a batch out as a grid, calls by lanes, in which it marks the cells that are rows.
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
# A copy of it takes half the time of a new one.
_HASH = hashlib.blake2b(digest_size=8)
# Tensors of more elements than this are bytes in their cells, for lists of numbers are slow to write and to read.
_LARGEST_LIST = 1024


class Kind:
    """The column `kind`: what a row tells."""

    # The order counts. Kinds up to FAILED_STEP belong to an episode, and from CALL on a row is of no lane: readers
    # compare with `<=`, `<` and `>=`. The numbers between are free: for further kinds of rows of lanes.
    STEP = 0
    """The lane was stepped."""
    RESET = 1
    """It was reset, by a call or by itself (autoreset)."""
    FAILED_STEP = 2
    """The environment raised when it was stepped, or its server was lost."""
    FAILED_RESET = 3
    """The environment raised when it was reset."""
    CALL = 17
    """A method was called, or an attribute set."""
    END = 18
    """The environment was closed."""


class Row(NamedTuple):
    """One call of an environment, as it goes to the writer's thread."""

    kind: int
    time: float
    """Seconds of the epoch."""
    by: Any = ""
    """Who acted: a text, or one for each agent by name; a list of one for each lane where they differ."""
    action: Any = None
    """Of the environment's action space; for `CALL` a pair, else None. Of several agents, this and what follows up to
    the flags are by agent."""
    observation: Any = None
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    alive: Any = ()
    """With several agents: those that go on."""
    seed: Any = None
    options: Any = None
    """The options of a reset; of a failed step what its event tells besides the error, such as `DISCARDED`."""
    error: Any = ""
    """What was raised; of lanes that failed each alone a dict of texts, by lane."""
    moment: Any = None
    """In real time: the world's seconds, when the action came, and the number of the frame."""
    frame: Any = None
    """The result of `render`, a list with an entry a lane; None: it is not recorded."""
    info: Any = None
    """The info; of lanes a dict of arrays or a list of dicts, of several agents a dict by agent."""
    branch: Any = None
    """Of a reset that was none, for environments go on elsewhere: a list of one `BranchPoint` for each lane, None for
    lanes that are where they were."""


@dataclasses.dataclass(frozen=True)
class BranchPoint:
    """Where an episode goes on from, which begins in the middle of another one."""

    stream: str = ""
    """`RUN-STREAM` of the other one; empty: it was not recorded."""
    lane: int = 0
    """Its lane."""
    call: int = 0
    """The number of the last call of its environment before."""
    seed: int | None = None
    """By which the random generators were seeded anew; None: they go on."""


DISCARDED: Mapping[str, Any] = {"discarded": True}
"""In the event of a failed step: the episode that it ends is no episode, for it was begun again elsewhere."""

FLAT = len(Row._fields) + 2
"""The entries of a call in a flat list: its size in bytes of memory (about), its number, and the fields of its `Row`.

Flat, since Python's garbage collector would traverse each tuple of a list of tuples, and since a slice with a stride is
a column.
"""


def flat_of(calls: Iterable[tuple[int, Row]]) -> list[Any]:
    """Return calls, each with its number, as a flat list."""
    return [field for number, row in calls for field in (0, number, *row)]


class LaneSamples(list[Any]):
    """Observations of lanes as a list, None where a lane has none."""


def as_text(value: Any) -> str:
    """Return a value of the values codec as text; raises TensorError where it has no such form."""
    return base64.b64encode(values.encode(value)).decode("ascii")


def is_fixed(spec: Spec) -> bool:
    """Return whether a tensor is of numbers and always of one shape."""
    return spec.dtype.kind in "biuf" and all(size >= 0 for size in spec.shape)


def hash_of(layout: Layout, sample: Any) -> bytes:
    """Return the hash of an observation: BLAKE2b of the little-endian bytes of its tensors in order.

    Raises:
        TensorError: It is not of the space.
    """
    digest = _HASH.copy()
    # Most observations are one array of the spec's dtype and shape: its memory is hashed as it is, without the copies
    # of `pack` and `tobytes`.
    if layout.single and type(sample) is np.ndarray and sample.flags.c_contiguous:
        spec = layout.specs[0]
        fits = sample.dtype == spec.dtype and sample.shape == spec.shape and spec.dtype.kind in "biuf"
        if fits and spec.dtype.str[0] != ">":
            digest.update(sample.data)
            return digest.digest()
    # Rounded as on the wire: an environment that returns float64 for a float32 Box is common, and no error.
    for array, each in zip(layout.pack(sample, rounding=True), layout.specs, strict=True):
        little = array.dtype.newbyteorder("<")
        digest.update(np.ascontiguousarray(array, little).tobytes() if is_fixed(each) else values.encode(array))
    return digest.digest()


class AgentColumns:
    """Lanes, or agents, that have the same spaces, and their columns.

    Args:
        prefix: Of the columns' names; empty for the first group.
        members: Which columns of the grid they are.
        spaces: Observation and action space.
        lanes: How many lanes one sample holds; None: it is a single one.
    """

    def __init__(
        self, prefix: str, members: Sequence[int], spaces: tuple[Space[Any], Space[Any]], lanes: int | None
    ) -> None:
        self.prefix, self.members = prefix, members
        self.layouts = {name: Layout(space, name) for name, space in zip(_SAMPLED, spaces, strict=True)}
        self.batches = {name: Layout(space, name, lanes) for name, space in zip(_SAMPLED, spaces, strict=True)}

    def names(self, name: str) -> list[str]:
        """Return the names of the columns of observations or actions."""
        return [f"{self.prefix}{leaf.name}" for leaf in self.layouts[name].leaves]


_SAMPLED = ("observation", "action")


class Columns:
    """The columns of a recording of some environment, by what its header says.

    Args:
        header: The metadata of its files; raises as `space_from_json` where its spaces are none.
    """

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.header = header
        self.kind: str = header["kind"]
        self.agents: list[str] = list(header.get("agents", ()))
        self.lanes = int(header["lanes"]) if self.kind == "lanes" else None
        self.width = len(self.agents) if self.kind == "agents" else self.lanes or 1
        self.same_step = bool(header.get("same_step")) and self.kind == "lanes"
        """True if lanes that end begin anew in the same step; otherwise they do in the next."""
        self.splits = self.same_step or bool(self.agents)
        """True if lanes, or agents, may have no part in a call."""
        self.spaces = [(space_from_json(one), space_from_json(two)) for one, two in header["spaces"]]
        self.groups: list[AgentColumns] = []
        # Agents with equal spaces share columns. The texts are compared, so that a reader of the files finds the same
        # groups from the header alone.
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
        """Return a call as those that have `LaneSamples` where lanes, or agents, have no part in it."""
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
    """Return the type of Arrow of the cells of a tensor."""
    if kind == "text":
        return pa.string()
    if not is_fixed(spec):
        return pa.binary()
    plain = pa.from_numpy_dtype(spec.dtype)
    if not spec.shape:
        return plain
    return pa.list_(pa.field("element", plain)) if int(np.prod(spec.shape)) <= _LARGEST_LIST else pa.binary()


def _split_autoreset(row: Row, lanes: int, space: Space[Any]) -> list[Row]:
    """Split a step that also began the next episode of lanes that it ended (autoreset mode SAME_STEP).

    Returns:
        The step with each lane's last observation, and the reset with the first ones of the next episode.
    """
    ended = np.broadcast_to(np.asarray(row.terminated, np.bool_) | np.asarray(row.truncated, np.bool_), (lanes,))
    if row.kind != Kind.STEP or not ended.any():
        return [row]
    infos, first = lane_infos(row.info, lanes), list[dict[str, Any]]()
    seen = LaneSamples(iterate(batch_space(space, lanes), row.observation))
    # Of a lane that failed, either the step or the reset within it; of both, the step's reason is in its info.
    failed = row.error or {}
    unbegun = [lane for lane in failed if ended[lane] and "error" in infos[lane]]
    stepped = {lane: told for lane, told in failed.items() if lane not in unbegun}
    for lane, info in enumerate(infos):
        final_obs, final_info = info.pop("final_obs", None), info.pop("final_info", None)
        # Of a lane that began anew, Gymnasium has the reset's info at the top level, and the step's in `final_info`.
        first.append({k: v for k, v in info.items() if not k.startswith("final_")} if ended[lane] else {})
        if ended[lane]:
            seen[lane] = final_obs
            infos[lane] = info if final_info is None else final_info
            if lane in unbegun and "error" in infos[lane]:
                stepped[lane] = str(infos[lane]["error"])
    step = row._replace(observation=seen, info=infos, error=stepped)
    # The mask names the lanes that have a row of the reset. The key "autoreset" keeps it from having an event: a replay
    # takes an event for a call of reset(), and this one happened within step().
    return [step, Row(Kind.RESET, row.time, observation=row.observation, options={"reset_mask": ended.copy()},
                      moment=row.moment, frame=row.frame, info=first,
                      error={"autoreset": "", **{lane: failed[lane] for lane in unbegun}})]  # fmt: skip


def lane_infos(info: Any, lanes: int) -> list[dict[str, Any]]:
    """Return the info of each lane: a list, or a dict of arrays with masks `_key` as Gymnasium joins them."""
    if isinstance(info, list):
        return [dict(one) for one in info]
    found: list[dict[str, Any]] = [{} for _ in range(lanes)]
    for key, value in (info or {}).items():
        if isinstance(key, str) and key.startswith("_") and key[1:] in info:
            continue
        mask = info.get(f"_{key}")
        parts: Any = lane_infos(value, lanes) if isinstance(value, Mapping) else value
        for lane in range(lanes):
            # A vector environment of a user's own may put anything into its infos: what has no entry for each lane is
            # of no row.
            if (mask is None or mask[lane]) and np.ndim(parts) and len(parts) == lanes:
                found[lane][key] = parts[lane]
    return found


class Encoder:
    """Makes record batches of the rows of one environment, of lanes that are stepped together, or of several agents.

    Args:
        header: The metadata of the files, as `facts_of` makes it.
    """

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.columns = Columns(header)
        self.schema = self.columns.schema
        """The columns, and in their metadata what the rows are of."""
        self.stream = int(header["stream"])
        width = self.columns.width
        self._call = 0
        # Of each lane: the number of its newest episode, its steps in that, whether it ended and begins anew in the
        # next step, and whether the number is known. It is not after lost calls, until the lane's next reset.
        self._begun = np.zeros(width, np.int64)
        self._t = np.zeros(width, np.int64)
        self._over = np.zeros(width, np.bool_)
        self._known = np.zeros(width, np.bool_)
        self._before = self._state()

    def _state(self) -> tuple[Any, ...]:
        # No copies: `count` puts new arrays in their places, and writes into none.
        return self._call, self._begun, self._t, self._over, self._known

    def encode(self, flat: list[Any]) -> list[pa.RecordBatch]:
        """Return calls as record batches: one for each part without a gap, one for each call that is no reset or step.

        Args:
            flat: A flat list of the calls. Where numbers are missing, calls were lost.
        """
        self._before = self._state()
        numbers, notes = np.array(flat[1::FLAT]), np.array(flat[2::FLAT]) >= Kind.CALL
        # A batch of steps has numbers without a gap, from which `_encode` counts on. A note has the number of the call
        # after it and takes none itself, so it is a batch of its own.
        cuts = np.flatnonzero(notes[1:] | notes[:-1] | (np.diff(numbers) != 1)) + 1
        found: list[pa.RecordBatch] = []
        for first, last in itertools.pairwise([0, *cuts.tolist(), len(numbers)]):
            if numbers[first] != self._call:
                # How many episodes ended meanwhile is not known: rows are of none until the next one begins.
                self._call = int(numbers[first])
                self._known, self._over = np.zeros_like(self._known), np.zeros_like(self._over)
            part = flat[first * FLAT : last * FLAT]
            found.append(self._note(Row(*part[2:])) if notes[first] else self._encode(part))
        return found

    def rewind(self) -> None:
        """Forget the last call of `encode`: it failed, or what it returned was not written."""
        self._call, self._begun, self._t, self._over, self._known = self._before

    def _note(self, row: Row) -> pa.RecordBatch:
        """Return the row of what is neither a reset nor a step."""
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
            # A step and the reset within it were one call: they keep one number.
            numbers = np.repeat(numbers, [len(part) for part in parts])
            rows = itertools.chain.from_iterable(parts)
            fields = dict(zip(Row._fields, zip(*rows, strict=True), strict=True))
        return _Batch(self.columns, fields, numbers).build(self)

    def count(self, kinds: Array, masks: Array, ended: Array, failed: Array) -> tuple[Array, Array, Array, Array]:
        """Follow the episodes of a batch.

        Args:
            kinds: Of the calls.
            masks: The lanes whose episodes each call is a part of, bool `(calls, lanes)`: several agents share one.
            ended: Which lanes' episodes ended in it.
            failed: Which lanes failed in it, each alone.

        Returns:
            Which cells were to begin an episode, also one that failed; those of lanes that are in none, since their
            resets failed; the number of each cell's episode (0: it is not known), and its `t`.
        """
        begins = masks & (kinds == Kind.RESET)[:, None]
        steps = kinds == Kind.STEP
        # In the mode NEXT_STEP the environment ignores the action of a lane that ended and resets it: its row is a
        # reset. Each call depends on the one before, so this is a loop; the counts below are sums over columns.
        idle = np.zeros_like(masks)
        if self.columns.lanes is not None and (failed.any() or self._over.any() or not self.columns.same_step):
            # A lane that ended begins anew in the next step, unless it was reset before. In the mode SAME_STEP a lane
            # is over only where the reset within its last step failed, and the next one tries again.
            over = self._over
            for at, is_step in enumerate(steps.tolist()):
                if not is_step:
                    over = (over & ~begins[at]) | (begins[at] & failed[at])
                elif self.columns.same_step:
                    idle[at] = over
                else:
                    begins[at], over = over, ended[at]
            self._over = over
        # Steps of a lane since before the batch, less those up to its newest beginning, give `t` without a loop over
        # the rows. In the mode NEXT_STEP the beginning is a step itself.
        begun = begins & ~failed
        total = self._t + np.cumsum(masks & steps[:, None] & ~failed & ~idle, axis=0)
        t = total - np.maximum.accumulate(np.where(begun, total, 0), axis=0)
        number = self._begun + np.cumsum(begun, axis=0)
        known = self._known | np.logical_or.accumulate(begun, axis=0)
        self._t, self._begun, self._known = t[-1], number[-1], known[-1]
        return begins, idle, np.where(known, number, 0), t


class _Batch:
    """Rows as a grid of calls by lanes, or by agents."""

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
            masks[~masks.any(axis=1), 0] = True  # a call that concerned nobody is a row all the same
            # Agents may be terminated one by one: the episode of all goes on until nobody is alive.
            ended = np.broadcast_to(~alive.any(axis=1, keepdims=True) & (kinds == Kind.STEP)[:, None], self.shape)
            counted = np.ones(self.shape, np.bool_)  # also of those who enter later, or come back
        else:
            masks = counted = self._masks()
        failed = self._failed_lanes()
        begins, idle, episodes, t = encoder.count(kinds, counted, ended, failed)
        kind = np.where(begins, np.int8(Kind.RESET), kinds[:, None])
        # A lane that failed ends its episode alone, as a single environment does; one whose reset failed is in none.
        kind[failed] = Kind.FAILED_STEP
        kind[(failed & begins) | idle] = Kind.FAILED_RESET
        # A lane that began anew was given an action, too, which the environment ignored: nobody acted in its row.
        stepped, acted = masks & (kind == Kind.STEP), acted & ~begins & ~idle & masks
        seen &= masks & ~failed & ~idle
        self.masks, (call, lane) = masks, np.nonzero(masks)
        # In real time each lane of a world is a stream of its own, whose rows have the number that the world knows the
        # lane by.
        own = int(columns.header.get("lane", 0)) if columns.kind == "env" else 0
        cells: dict[str, Any] = {
            "call": self.numbers[call], "lane": (lane + own).astype(np.int32), "kind": kind[masks],
            "episode": episodes[masks], "t": t[masks], "time": np.array(self.fields["time"])[call],
        }  # fmt: skip
        if columns.header.get("fps"):
            # A client's recorder does not see the world's clock.
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
        """Return which lanes each call concerns, bool `(calls, lanes)`: all, or those that a reset names."""
        found = np.ones(self.shape, np.bool_)
        for at in np.flatnonzero(self._resets).tolist():
            mask = mask_of(self._row(at))
            if mask is not None:
                found[at] = mask
        return found

    def _failed_lanes(self) -> Array:
        """Return which lanes failed in each call, each alone, bool `(calls, lanes)`."""
        found = np.zeros(self.shape, np.bool_)
        for at, error in enumerate(self.fields["error"]):
            if error and not isinstance(error, str):
                found[at, [lane for lane in error if lane != "autoreset"]] = True
        return found

    def _given(self, name: str) -> Array:
        """Return which lanes have an action, an observation or a reward in each call, bool `(calls, lanes)`."""
        found = np.zeros(self.shape, np.bool_)
        found[:] = np.array([value is not None for value in self.fields[name]])[:, None]
        for at, value in enumerate(self.fields[name] if self.columns.splits else ()):
            if type(value) is LaneSamples:
                found[at] = [one is not None for one in value]
        return found

    def _spread(self, name: str, dtype: Any, shape: tuple[int, ...] = ()) -> Array:
        """Return a field of the calls as a grid, `(calls, lanes, *shape)`: by lane, or one value for all lanes.

        A value that does not fit is NaN, or 0 where the dtype has no NaN; None is 0.
        """
        found: Array = np.zeros((*self.shape, *shape), dtype)
        if not self.columns.agents:
            with contextlib.suppress(
                OverflowError, TypeError, ValueError
            ):  # all are numbers, or all of the shape, as nearly always
                found[:] = np.array(self.fields[name], dtype).reshape(found.shape)
                return found
        # One call at a time, so that a value that is no number costs its own cell and not the batch.
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
        """Return the cells that are present as a column.

        Args:
            each: For each call a list with a cell for each lane, or the one that all of them have.
            present: Which.
            kind: The type of Arrow.
        """
        calls = list(each)
        # A value that all lanes share is converted once for each call, and not once for each lane.
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
                else:  # pictures are copied as rarely as can be: that is most of what recording them costs
                    cells = stacked.reshape(own.size, *stacked.shape[2:]) if own.all() else stacked[own]
                found[column] = _nullable(_array(cells, type_of(leaf.spec, leaf.kind)), own[self.masks])
        return found

    def _tensors(self, group: AgentColumns, name: str, index: int, own: Array) -> Any:
        """Return one tensor of each of a group's own actions or observations."""
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
        """Return samples of one tensor as a grid, `(calls, lanes, *shape)`; None: they are not all of its dtype."""
        layout = group.layouts[name]
        if not layout.single or not is_fixed(spec := layout.leaves[0].spec) or self.columns.agents:
            return None
        shape = spec.shape if self.columns.lanes is None else (self.shape[1], *spec.shape)
        # Calls without a sample, such as a failed step, hold a place in the grid that `present` leaves out.
        zero = np.zeros(shape, spec.dtype)
        try:
            column = np.array([zero if sample is None else sample for sample in self.fields[name]])
        # Their shapes differ: `_tensors` says which sample is not of its space.
        except ValueError:
            return None
        # Samples of another dtype, or lists, have to be checked and rounded one by one.
        fits = column.dtype == spec.dtype and column.shape == (self.shape[0], *shape)
        return column.reshape(*self.shape, *spec.shape) if fits else None

    def _hashes(self) -> list[Any]:
        """Return the hash of each agent's observation, or of those of all lanes, which their rows share."""
        if self.columns.agents:
            layouts = {lane: group.layouts["observation"] for group in self.columns.groups for lane in group.members}
            return [[None if one is None else hash_of(layouts[lane], one) for lane, one in enumerate(each)]
                    for each in self.fields["observation"]]  # fmt: skip
        layout = self.columns.groups[0].batches["observation"]
        # A step that was split has no hash: the batch that the environment returned has the first observations of the
        # lanes that began anew, and is hashed with their reset.
        return [None if seen is None or type(seen) is LaneSamples else hash_of(layout, seen)
                for seen in self.fields["observation"]]  # fmt: skip

    def _infos(self, info: Any) -> list[bytes | None]:
        infos = [info or {}] if self.columns.kind == "env" else lane_infos(info, self.shape[1])
        return [values.encode_info(one, values.Notes()) if one else None for one in infos]

    def _events(self, failed: Array) -> pa.Array:
        """Return the column `event`: the arguments of resets, and what was raised, in the first row of each call.

        What a lane raised alone in a step is in its own row.

        Args:
            failed: Which rows are of such a lane, bool `(calls, lanes)`.
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
    """Return a cell's number, such as an array of one or a large integer; NaN: it is none; 0.0: there is none."""
    try:
        return 0.0 if value is None else as_number(value)
    except RequestError:
        return math.nan


_BY_AGENT = ("action", "observation", "reward", "terminated", "truncated")


def _by_agent(row: Row, agents: Sequence[str]) -> Row:
    """Return a call of several agents as one of lanes, with None for those that have no part in it."""

    def each(part: Any) -> Any:
        # An agent of PettingZoo may be any hashable object; the header knows it by its text.
        named = {str(agent): value for agent, value in (part or {}).items()}
        return LaneSamples(named.get(agent) for agent in agents)

    by = row.by if isinstance(row.by, str) else [row.by.get(agent, "") for agent in agents]
    parts = {name: each(getattr(row, name)) for name in _BY_AGENT}
    alive = {str(agent) for agent in row.alive}
    info = [one or {} for one in each(row.info)]
    return row._replace(by=by, **parts, info=info, alive=[agent in alive for agent in agents])


def _pictures(frames: Sequence[Any] | None) -> Any:
    """Return frames as `_picture` does; of several agents there is one."""
    found = [_picture(frame) for frame in frames or [None]]
    return found if len(found) > 1 else found[0]


def _picture(frame: Any) -> bytes | None:
    """Return a frame as NumPy's own format; None: it is no array."""
    if not isinstance(frame, np.ndarray):
        return None
    file = io.BytesIO()
    # A file that somebody else made must be readable without running what it names, so nothing is ever pickled.
    np.lib.format.write_array(file, frame, allow_pickle=False)
    return file.getvalue()


def _cell(leaf: Leaf, array: Array) -> Any:
    """Return the cell of a tensor that is not of numbers of one shape."""
    if leaf.kind == "text":
        return str(array[()])
    return array.tobytes() if leaf.kind == "encoded" else values.encode(array)


def of_cell(leaf: Leaf, cell: Any) -> Array:
    """Return the tensor of a cell: the way back from `_cell`, and a copy of numbers."""
    if leaf.kind == "encoded":
        return np.frombuffer(cell, np.uint8)
    if leaf.kind == "text":
        return np.array(cell, object)
    return np.array(cell) if is_fixed(leaf.spec) else np.asarray(values.decode(cell))


def _array(cells: Any, kind: pa.DataType) -> pa.Array:
    """Return cells as a column: a list of them, or an array with an entry for each."""
    if isinstance(cells, list) or cells.ndim == 1:
        return pa.array(cells, kind)
    found = np.ascontiguousarray(cells, cells.dtype.newbyteorder("<"))
    is_list = pa.types.is_list(kind)
    size = math.prod(cells.shape[1:]) * (1 if is_list else cells.dtype.itemsize)
    # Arrow's `list` and `binary` have offsets of 32 bits. The writer's batches are far below: 8 MiB, or one call.
    offsets = pa.array(np.arange(len(cells) + 1, dtype=np.int64) * size, pa.int32())  # raises where they are above that
    if is_list:
        return pa.ListArray.from_arrays(offsets, pa.array(found.reshape(-1)), type=kind)
    # Cells of one size need no copy: Arrow takes the array's memory as it is.
    return pa.Array.from_buffers(kind, len(cells), [None, offsets.buffers()[1], pa.py_buffer(found)])


def _nullable(cells: pa.Array, there: Array) -> pa.Array:
    """Return the cells as those of the rows that have one, and null for the others."""
    return cells if there.all() else cells.take(pa.array(np.cumsum(there) - 1, mask=~there))


def mask_of(row: Row) -> Any:
    """Return which lanes a reset is of; None: all."""
    return row.options.get("reset_mask") if isinstance(row.options, Mapping) else None


def _event(row: Row) -> str | None:
    """Return the event of a call as JSON: the arguments of a reset, or what was raised; None: it has none."""
    if row.kind in (Kind.FAILED_STEP, Kind.STEP):
        return json.dumps({"error": row.error, **(row.options or {})})
    if not isinstance(row.error, str) and "autoreset" in row.error:
        return None
    if row.branch is not None:
        # Without its unknown parts, as most have no seed.
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
