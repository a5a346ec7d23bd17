"""What makes records of rows, in the writer's thread."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from bridge.encoding import values
from bridge.encoding.spaces import Layout
from bridge.encoding.tensors import Array
from bridge.errors import TensorError
from bridge.recording.columns import HASH_BYTES, Kind, Row, hash_of, hashes_of, pack_samples
from bridge.recording.files import pack_record
from bridge.worlds.rewards import Rewards

__all__ = ["AgentsEncoder", "Encoder", "as_text"]


def as_text(value: Any) -> str:
    """Return a value of the values codec as text; raises TensorError where it has no such form."""
    return base64.b64encode(values.encode(value)).decode("ascii")


class Encoder:
    """Makes records of the rows of one environment, or of lanes that are stepped together.

    Args:
        facts: What the record `world` says.
        spaces: Observation and action space of one environment.
        lanes: How many are stepped at once; None: one, without lanes.
        reward_space: Of array rewards; None: they are numbers.
        observations: Whether observations are recorded.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        spaces: tuple[Space[Any], Space[Any]],
        lanes: int | None,
        reward_space: Space[Any] | None,
        observations: bool,
    ) -> None:
        self._lost = 0
        self._facts = facts
        self._lanes = lanes
        self._keeps = observations
        self._observations = Layout(spaces[0], "observation", lanes)
        self._actions = Layout(spaces[1], "action", lanes)
        self._reward = Rewards(reward_space, lanes).spec
        self._first_row = 0
        self._before = (0, 0)
        self._begun = np.zeros(lanes or 1, np.int64)
        self._over = np.zeros(lanes or 1, np.bool_)

    def describe(self) -> bytes:
        """Return the record that says what the source is."""
        return pack_record({"type": "world", **self._facts})

    def encode(self, rows: Sequence[Row]) -> bytes:
        """Return records of rows, after one that says how many were lost since the last."""
        parts: list[bytes] = []
        batch: list[Row] = []
        calls: list[list[Any]] = []

        def flush() -> None:
            if batch or calls:
                parts.append(self._rows(batch, calls))
                batch.clear()
                calls.clear()

        self._before = (self._first_row, self._lost)
        if self._lost:
            parts.append(self._lose(self._lost))
            self._lost = 0
        for row in rows:
            if row.kind < Kind.LOST:
                batch.append(row)
                continue
            if row.kind == Kind.CALL:
                kind, data = row.action
                calls.append([len(batch), kind, base64.b64encode(data).decode("ascii")])
                continue
            flush()
            parts.append(self._lose(row.action) if row.kind == Kind.LOST else self._end(row))
        flush()
        return b"".join(parts)

    def is_urgent(self, rows: Sequence[Row]) -> bool:
        """Whether an episode ended in one of the rows, or the environment was closed."""
        return any(self._ends(row) for row in rows)

    def _ends(self, row: Row) -> bool:
        return row.kind > Kind.RESET or bool(np.any(row.terminated) or np.any(row.truncated))

    def give_up(self, rows: Sequence[Row]) -> None:
        """Count rows as lost that `encode` was called with last: it failed, or what it returned was not written."""
        self._first_row, self._lost = self._before
        self._lost += sum(row.action if row.kind == Kind.LOST else row.kind < Kind.LOST for row in rows)

    def _lose(self, count: int) -> bytes:
        header = {"type": "lost", "stream": self._facts["stream"], "first_row": self._first_row, "rows": count}
        self._first_row += count
        self._over = np.zeros_like(self._over)
        return pack_record(header)

    def _end(self, row: Row) -> bytes:
        return pack_record({"type": "end", "stream": self._facts["stream"], "time": row.time, "row": self._first_row})

    def _rows(self, rows: list[Row], calls: list[list[Any]]) -> bytes:
        header: dict[str, Any] = {
            "type": "rows",
            "stream": self._facts["stream"],
            "first_row": self._first_row,
            "rows": len(rows),
            "episodes": self._begun.tolist(),
            "calls": list(calls),
            "resets": [_reset(index, row) for index, row in enumerate(rows) if row.kind in (1, 3)],
            "errors": {str(index): row.error for index, row in enumerate(rows) if row.error},
        }
        columns: dict[str, Array] = {
            "kind": np.array([row.kind for row in rows], np.uint8),
            "time": np.array([row.time for row in rows], np.float64),
        }
        self._fill(header, columns, rows)
        if any(row.moment is not None for row in rows):
            moments = [row.moment or (np.nan, 0, np.nan) for row in rows]
            columns["clock"] = np.array([moment[0] for moment in moments], np.float64)
            columns["frame_number"] = np.array([moment[1] for moment in moments], np.int64)
            columns["acted_at"] = np.array([moment[2] for moment in moments], np.float64)
        columns.update(_frames(rows, self._lanes))
        self._first_row += len(rows)
        return pack_record(header, columns)

    def _fill(self, header: dict[str, Any], columns: dict[str, Array], rows: list[Row]) -> None:
        """Add the columns of actions, observations, rewards and flags, and count the episodes."""
        players: dict[str, int] = {}
        if any(isinstance(row.by, list) for row in rows):  # a person took over from the agent of some lanes
            each = [row.by if isinstance(row.by, list) else [row.by] * (self._lanes or 1) for row in rows]
            numbers: list[Any] = [[players.setdefault(name, len(players)) for name in names] for names in each]
        else:
            numbers = [players.setdefault(row.by, len(players)) for row in rows]
        columns["by"] = np.array(numbers, np.uint16)
        header["players"] = list(players)
        columns.update(pack_samples(self._actions, [row.action for row in rows]))
        shape = (len(rows),) if self._lanes is None else (len(rows), self._lanes)
        columns["reward"] = _rewards(rows, self._reward.dtype, self._reward.shape)
        columns["terminated"] = _flags([row.terminated for row in rows], shape)
        columns["truncated"] = _flags([row.truncated for row in rows], shape)
        observations = [row.observation for row in rows]
        columns["hash"] = hashes_of(self._observations, observations)
        if self._keeps:
            columns.update(pack_samples(self._observations, observations))
        self._count(rows, (columns["terminated"] | columns["truncated"]).reshape(len(rows), self._lanes or 1))

    def _count(self, rows: list[Row], ended: Array) -> None:
        """Count the episodes that begin: at a reset, and in the row after the last of a lane's episode."""
        if not rows:
            return
        begins = np.zeros(ended.shape, np.bool_)
        if self._lanes is not None:
            over = self._over
            for index, row in enumerate(rows):
                if row.kind == Kind.STEP:
                    begins[index], over = over, ended[index]
                elif row.kind == Kind.RESET:
                    begins[index] = reset = _lanes_of(row)
                    over = over & ~reset  # the others stay as they are
            self._over = over.copy()
        else:
            begins[:] = [[row.kind == Kind.RESET] for row in rows]
        self._begun = self._begun + begins.sum(axis=0)


class AgentsEncoder(Encoder):
    """Makes records of the rows of an environment of several agents.

    Args:
        facts: What the record `world` says.
        spaces: Observation and action space of each agent, by its name.
        observations: Whether observations are recorded.
    """

    def __init__(
        self, facts: Mapping[str, Any], spaces: Mapping[str, tuple[Space[Any], Space[Any]]], observations: bool
    ) -> None:
        first = next(iter(spaces.values()))
        super().__init__(facts, first, None, None, observations)
        self._agents = list(spaces)
        self._layouts = [(Layout(pair[0], "observation"), Layout(pair[1], "action")) for pair in spaces.values()]

    def _ends(self, row: Row) -> bool:
        return row.kind > Kind.RESET or not row.alive

    def _fill(self, header: dict[str, Any], columns: dict[str, Array], rows: list[Row]) -> None:
        count = len(self._agents)
        shape = (len(rows), count)
        players: dict[str, int] = {}
        by = columns["by"] = np.zeros(shape, np.uint16)
        columns["reward"] = np.zeros(shape, np.float64)
        for name in ("acted", "seen", "alive", "terminated", "truncated"):
            columns[name] = np.zeros(shape, np.bool_)
        columns["hash"] = np.zeros((*shape, HASH_BYTES), np.uint8)
        for index, row in enumerate(rows):
            for number, agent in enumerate(self._agents):
                by[index, number] = players.setdefault((row.by or {}).get(agent, ""), len(players))
                columns["alive"][index, number] = agent in row.alive
                columns["acted"][index, number] = agent in (row.action or ())
                columns["seen"][index, number] = agent in (row.observation or ())
                if agent in (row.observation or ()):
                    data = hash_of(self._layouts[number][0], row.observation[agent])
                    columns["hash"][index, number] = np.frombuffer(data, np.uint8)
                for name, part in (
                    ("reward", row.reward),
                    ("terminated", row.terminated),
                    ("truncated", row.truncated),
                ):
                    if part and agent in part:
                        columns[name][index, number] = part[agent]
        header["players"] = list(players)
        for number, agent in enumerate(self._agents):
            observations, actions = self._layouts[number]
            columns.update(pack_samples(actions, [(row.action or {}).get(agent) for row in rows], f"{number}:"))
            if self._keeps:
                seen = [(row.observation or {}).get(agent) for row in rows]
                columns.update(pack_samples(observations, seen, f"{number}:"))
        over: Array = ~np.any(columns["alive"], axis=1, keepdims=True).astype(np.bool_)
        self._count(rows, over)


def _mask(row: Row) -> Any:
    """Which lanes a reset is of; None: all."""
    return row.options.get("reset_mask") if isinstance(row.options, Mapping) else None


def _lanes_of(row: Row) -> Any:
    """Return which lanes a reset is of: a bool array `(lanes,)`, or True for all."""
    mask = _mask(row)
    return np.bool_(True) if mask is None else np.asarray(mask, np.bool_)


def _reset(index: int, row: Row) -> dict[str, Any]:
    """Return what the header says of a reset."""
    several = isinstance(row.seed, (list, tuple))
    seeds = [None if seed is None else int(seed) for seed in (row.seed if several else [row.seed])]
    found: dict[str, Any] = {"row": index, "seed": seeds if several else seeds[0]}
    mask = _mask(row)
    if mask is not None:
        found["mask"] = np.asarray(mask, np.bool_).tolist()
    if row.options is not None:
        try:
            found["options"] = as_text(row.options)
        except TensorError as error:
            found["unknown_options"] = str(error)
    return found


def _rewards(rows: list[Row], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return the column of rewards; NaN for what is no number."""
    column: Array = np.zeros((len(rows), *shape), dtype)
    for index, row in enumerate(rows):
        try:
            column[index] = row.reward
        except (TypeError, ValueError):
            column[index] = np.nan
    return column


def _flags(flags: list[Any], shape: tuple[int, ...]) -> Array:
    """Return a column of bools; a single one stands for all lanes."""
    column: Array = np.zeros(shape, np.bool_)
    for index, flag in enumerate(flags):
        if flag is not False:
            column[index] = flag
    return column


def _frames(rows: list[Row], lanes: int | None) -> dict[str, Array]:
    """Return the columns of what `render` gave, where the frames are of one shape."""
    frames = [None if row.frame is None or any(part is None for part in row.frame) else row.frame for row in rows]
    first = next((frame for frame in frames if frame is not None), None)
    if first is None:
        return {}
    shape = np.shape(first[0])
    column = np.zeros((len(rows), len(first), *shape), np.asarray(first[0]).dtype)
    there = np.zeros(len(rows), np.bool_)
    for index, frame in enumerate(frames):
        if frame is not None and all(np.shape(part) == shape for part in frame):
            column[index], there[index] = np.stack(frame), True
    return {"has_frame": there, "frame": column if lanes is not None else column[:, 0]}
