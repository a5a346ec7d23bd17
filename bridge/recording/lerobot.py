"""Export episodes as a LeRobot dataset, version 3.0 of the format: Parquet for numbers, mp4 for pictures.

Each step is a frame: the observation before the action, the action, and its reward. The last observation of an episode
belongs to no action and is left out, as in LeRobot's own recordings.

Dict observations are converted like a robot's in LeRobot: each camera is a video `observation.images.NAME`, and all
numbers together are `observation.state`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from bridge.core.encoding.spaces import is_picture
from bridge.core.encoding.tensors import Array
from bridge.core.extras import imported_from
from bridge.core.logs import counted
from bridge.errors import RecordingError, SettingError
from bridge.recording.episodes import EpisodeData, facts_of, has_frames, observed_rows
from bridge.recording.exports import (
    Said,
    datasets_of,
    even,
    name_of_agent,
    quiet,
    rate_of,
    told_branches,
    told_infos,
    write_film,
)
from bridge.recording.reader import RecordedEpisode

with imported_from("recordings need pyarrow", "record"):
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["export_lerobot"]

_VERSION = "v3.0"
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
_DATA, _VIDEO = f"data/{_FILE}.parquet", f"videos/{{video_key}}/{_FILE}.mp4"
_FIRST = {"chunk_index": 0, "file_index": 0}
_STATE, _IMAGE, _ACTION = "observation.state", "observation.image", "action"
_ENVIRONMENT = "environment_state"
"""The key for numbers that LeRobot keeps separate from the robot's own, as `observation.environment_state`."""
_OF_CAMERAS = ("pixels", "images", "cameras")
"""Keys of a Dict of cameras that are not included in the cameras' names."""
_BY = "by"
"""The player of the action, a text: LeRobot computes no statistics of texts."""
_NUMBERS = {"next.reward": "float32", "next.done": "bool", "next.truncated": "bool", "timestamp": "float32",
            "frame_index": "int64", "episode_index": "int64", "index": "int64", "task_index": "int64"}  # fmt: skip
_QUANTILES = {f"q{percent:02}": percent / 100 for percent in (1, 10, 50, 90, 99)}
_SAMPLED_PICTURES = 100
"""The most pictures of an episode from which its statistics are computed."""


def export_lerobot(
    episodes: Sequence[RecordedEpisode],
    folder: str | Path,
    *,
    env: Any = None,
    fps: float | None = None,
    task: str | None = None,
    say: Said = quiet,
    allow_calls: bool = False,
    finite: bool = False,
) -> list[Path]:
    """Write episodes as a LeRobot dataset; with several agents one for each, in folders with their names.

    Observations and actions keep all bits; rewards become float32. LeRobot's loader converts float64 to float32: a
    message names columns in which this rounding exceeds a hundredth of their variation. Color observations become a
    video (H.264), which is lossy; if frames were recorded, they do, too. A video's height and width are even: an odd
    last row or column is repeated. Pictures of other forms, such as uint16 depth, are written as numbers.

    In Dict observations, also nested ones, each color picture is `observation.images.NAME`. All numbers, concatenated
    in the order of the space, are `observation.state`, with the dtype that can hold all of them; those below
    `environment_state` are `observation.environment_state`. NAME is the key, or the keys joined by dots, without
    `pixels`, `images` and `cameras` if these contain several cameras.

    `by` is the player of a frame's action; `meta/episodes` contains `end` and, as `by`, all players.

    Args:
        episodes: Episodes of one environment.
        folder: The dataset's folder, which must not exist yet.
        env: As for `export_minari`.
        fps: Frames per second; None: those of the real-time world, or of the environment's metadata, or 30.
        task: The task in words; None: the name of the environment.
        say: Called with a line of text for each dataset.
        allow_calls: As for `Replay`.
        finite: True to leave out episodes with NaN or infinities, which are refused otherwise.

    Returns:
        The folders.

    Raises:
        SettingError: PyAV is not installed, the folder exists, or LeRobot has no feature for a space.
        RecordingError: The episodes are of several environments, contain NaN or infinities, or their observations are
            not available.
    """
    root = Path(folder)
    if root.exists():
        raise SettingError(f"expected a folder that does not exist yet, got {root}; give another, or remove it")
    written = []
    try:
        for agent, data in datasets_of(episodes, env, allow_calls, finite=finite, say=say):
            path = root if agent is None else root / name_of_agent(agent)
            # `name_of_agent` replaces many characters by `_`, so two agents could get the same folder.
            if path in written:
                raise RecordingError(f"the agent {agent!r} has the folder {path} of another; rename one of them")
            dataset = _Dataset(path, data, rate_of(episodes[0], fps), task or episodes[0].stream.title)
            dataset.write()
            written.append(path)
            told = f"{told_infos(data)}{told_branches(data, 'row')}"
            say(f"{path}: {counted(len(data), 'episode')}, {counted(dataset.frames, 'frame')}{told}")
            for told in dataset.rounded:
                say(f"warning: {path}: {told}")
    except BaseException:  # an incomplete dataset would look like a complete one
        shutil.rmtree(root, ignore_errors=True)
        raise
    return written


class _Dataset:
    """A dataset that is being written.

    Args:
        root: Its folder.
        data: The data of one agent, for each episode.
        fps: Frames per second.
        task: The task in words.
    """

    def __init__(self, root: Path, data: Sequence[EpisodeData], fps: float, task: str) -> None:
        self._root, self._data, self._fps, self._task = root, data, fps, task
        first = data[0]
        self._acted = first.action_space
        self._parts = _parts_of(first.observation_space)
        self._films = [name for name, leaves in self._parts.items() if leaves[0].is_picture]
        """The features that are videos."""
        self._of_frames = not self._films and all(one.agent is None and has_frames(one.episode) for one in data)
        if self._of_frames:
            self._films = [_IMAGE]
        self.frames = sum(len(one.actions) for one in data)
        """The number of frames in all episodes."""
        self.rounded: list[str] = []
        """A message for each column that LeRobot's loader will round too much."""
        self._features = self._describe()

    def _describe(self) -> dict[str, dict[str, Any]]:
        """Return the features: the dtype and shape of each column."""
        found = {_ACTION: _feature_of(self._acted, "actions")}
        found.update({name: _joined_feature(leaves) for name, leaves in self._parts.items() if name not in self._films})
        for name in self._films:
            height, width = even(next(self._pictures(self._data[0], name))).shape[:2]
            names = ["height", "width", "channels"]
            film = {"video.height": height, "video.width": width, "video.channels": 3, "video.codec": "h264",
                    "video.pix_fmt": "yuv420p", "video.fps": self._fps, "video.is_depth_map": False,
                    "has_audio": False}  # fmt: skip
            found[name] = {"dtype": "video", "shape": [height, width, 3], "names": names, "info": film}
        found[_BY] = {"dtype": "string", "shape": [1], "names": None}
        return {**found, **{name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in _NUMBERS.items()}}

    def write(self) -> None:
        """Write all files."""
        columns = [self._columns(number, one) for number, one in enumerate(self._data)]
        self.rounded = [
            text
            for name, column in columns[0].items()
            if column.dtype == np.float64
            for text in _rounded(self._features[name], name, np.concatenate([one[name] for one in columns]))
        ]
        index = 0
        for one in columns:
            # `write_film` reads the first argument before `enumerate` changes it.
            one["index"] = np.arange(index, index := index + len(one["index"]))
        tables = [pa.table({name: _cells(column) for name, column in one.items()}) for one in columns]
        self._save(_DATA.format(**_FIRST), pa.concat_tables(tables))
        stats = [{name: _statistics(column) for name, column in one.items() if name != _BY} for one in columns]
        for name in self._films:
            for data, found in zip(self._data, stats, strict=True):
                found[name] = _picture_statistics(self._pictures(data, name), len(data.actions))
            # Two frames per keyframe, as LeRobot writes: a reader seeks to any frame.
            pictures = (picture for one in self._data for picture in self._pictures(one, name))
            write_film(self._path(_VIDEO.format(video_key=name, **_FIRST)), pictures, self._fps, keyframes=2)
        self._save(f"meta/episodes/{_FILE.format(**_FIRST)}.parquet", self._episodes(stats))
        self._save("meta/tasks.parquet", _tasks_of(self._task))
        self._save_json("meta/stats.json", _joined(stats))
        self._save_json("meta/info.json", self._info())

    def _columns(self, number: int, one: EpisodeData) -> dict[str, Array]:
        """Return the columns of an episode's frames."""
        steps = np.arange(len(one.actions))
        found = {
            name: _joined_rows(leaves, one.observations[:-1])
            for name, leaves in self._parts.items()
            if name not in self._films
        }
        if one.rewards.ndim > 1:
            raise SettingError("LeRobot has no feature for rewards that are arrays")
        with np.errstate(over="ignore"):  # it becomes an infinity, which is refused below
            rewards = one.rewards.astype(np.float32)
        found.update({_ACTION: _rows(self._acted, one.actions), "next.reward": rewards})
        for name, column in found.items():
            _check_finite(name, column, one.episode.id)
        return {
            **found, _BY: np.array(one.by, np.str_),
            "next.done": one.terminations | one.truncations, "next.truncated": one.truncations,
            "timestamp": (steps / self._fps).astype(np.float32), "frame_index": steps,
            "episode_index": np.full_like(steps, number), "index": steps, "task_index": np.zeros_like(steps),
        }  # fmt: skip

    def _episodes(self, stats: Sequence[Mapping[str, Mapping[str, Any]]]) -> pa.Table:
        """Return a row for each episode: where its frames are, and their statistics."""
        rows, at = [], 0
        for number, (one, found) in enumerate(zip(self._data, stats, strict=True)):
            length = len(one.actions)
            row: dict[str, Any] = {"episode_index": number, "tasks": [self._task], "length": length,
                                   "dataset_from_index": at, "dataset_to_index": at + length}  # fmt: skip
            if any(each.episode.parent is not None for each in self._data):
                # All columns in each row: pyarrow takes the columns of a table from its first row.
                row.update({"parent": None, "parent_step": None, "parent_seed": None})
            row.update(facts_of(one))
            for part in ("data", "meta/episodes", *(f"videos/{film}" for film in self._films)):
                row.update({f"{part}/{name}": value for name, value in _FIRST.items()})
            for film in self._films:
                for name, frame in (("from", at), ("to", at + length)):
                    row[f"videos/{film}/{name}_timestamp"] = frame / self._fps
            row.update({f"stats/{name}/{key}": v for name, each in found.items() for key, v in each.items()})
            rows.append(row)
            at += length
        return pa.Table.from_pylist(rows)

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": _VERSION, "robot_type": None, "total_episodes": len(self._data),
            "total_frames": self.frames, "total_tasks": 1, "chunks_size": 1000, "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 500, "fps": self._fps, "splits": {"train": f"0:{len(self._data)}"},
            "data_path": _DATA, "video_path": _VIDEO if self._films else None, "features": self._features,
        }  # fmt: skip

    def _pictures(self, one: EpisodeData, film: str) -> Iterator[Array]:
        """Yield the picture before each action of an episode."""
        if not self._of_frames:
            (leaf,) = self._parts[film]
            yield from map(leaf.of, one.observations[:-1])
            return
        # The last frame belongs to no action.
        for step, _, frame in observed_rows(one.episode, frames=True):
            if step < len(one.actions) and frame is not None:
                yield frame()

    def _path(self, name: str) -> Path:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _save(self, name: str, table: pa.Table) -> None:
        pq.write_table(table, self._path(name), compression="snappy")

    def _save_json(self, name: str, value: Any) -> None:
        self._path(name).write_text(json.dumps(value, indent=4), "utf-8")


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An array in the observations."""

    keys: tuple[str | int, ...]
    """Its path in Dict and Tuple spaces; empty: it is the whole observation."""
    space: Space[Any]

    @property
    def is_picture(self) -> bool:
        """True if it becomes a video."""
        return is_picture(self.space)

    @property
    def title(self) -> str:
        """Return its name for error messages."""
        return f"the observation {'.'.join(map(str, self.keys))!r}" if self.keys else "observations"

    def of(self, sample: Any) -> Any:
        """Return its value in an observation."""
        for key in self.keys:
            sample = sample[key]
        return sample


def _parts_of(space: Space[Any]) -> dict[str, list[_Leaf]]:
    """Return the leaves of each observation feature: one for a video, any number for numbers.

    Raises:
        SettingError: LeRobot has no feature for a leaf, or two cameras would have the same name.
    """
    found: dict[str, list[_Leaf]] = {}
    for leaf in _leaves_of(space, ()):
        if not leaf.is_picture:
            _check_numbers(leaf)
            apart = len(leaf.keys) > 0 and leaf.keys[0] == _ENVIRONMENT
            found.setdefault(f"observation.{_ENVIRONMENT}" if apart else _STATE, []).append(leaf)
            continue
        keys = leaf.keys[1:] if len(leaf.keys) > 1 and leaf.keys[0] in _OF_CAMERAS else leaf.keys
        # The name becomes a folder, and LeRobot refuses slashes.
        name = ".".join(re.sub(r"[^A-Za-z0-9_-]+", "_", str(key)) for key in keys)
        name = f"observation.images.{name}" if keys else _IMAGE
        if name in found:
            both = f"{found[name][0].title} and {leaf.title}"
            raise SettingError(f"{both} would both be {name}: give the cameras names of letters, digits, _ and -")
        found[name] = [leaf]
    return found


def _leaves_of(space: Space[Any], keys: tuple[str | int, ...]) -> Iterator[_Leaf]:
    """Yield the parts of a space that are neither Dict nor Tuple, in order."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _leaves_of(part, (*keys, key))
    elif isinstance(space, spaces.Tuple):
        for at, part in enumerate(space.spaces):
            yield from _leaves_of(part, (*keys, at))
    else:
        yield _Leaf(keys, space)


def _check_numbers(leaf: _Leaf) -> None:
    """Raise SettingError if a leaf of a Dict cannot be part of the state: a picture that is not in color, or a text."""
    shape = leaf.space.shape or ()
    # Bytes with two axes are a gray picture, whose pixels do not belong in the state.
    if leaf.keys and (len(shape) > 2 or (len(shape) == 2 and leaf.space.dtype == np.uint8)):
        raise SettingError(
            f"LeRobot has no feature for {leaf.title} of the shape {shape} and dtype {leaf.space.dtype}: "
            "expected pictures as uint8 (height, width, 3), and other numbers of one or two axes. "
            + _LEAVE_OUT.format(leaf.keys[0])
        )
    if leaf.keys and not isinstance(leaf.space, _NUMERIC):
        raise SettingError(
            f"LeRobot has no feature for {leaf.title} of {type(leaf.space).__name__}: expected Box, Discrete, "
            "MultiDiscrete or MultiBinary. " + _LEAVE_OUT.format(leaf.keys[0])
        )


_NUMERIC = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_LEAVE_OUT = (
    "Change it where the environment is made, as by gymnasium.wrappers.TransformObservation, or leave {!r} out by "
    "gymnasium.wrappers.FilterObservation"
)


def _joined_feature(leaves: Sequence[_Leaf]) -> dict[str, Any]:
    """Return the feature of concatenated numbers."""
    if not leaves[0].keys:
        return _feature_of(leaves[0].space, "observations")
    names = []
    for leaf in leaves:
        title, size = ".".join(map(str, leaf.keys)), int(np.prod(leaf.space.shape or (1,)))
        names += [title] if size == 1 else [f"{title}_{at}" for at in range(size)]
    return {"dtype": str(_dtype_of(leaves)), "shape": [len(names)], "names": names}


def _dtype_of(leaves: Sequence[_Leaf]) -> np.dtype[Any]:
    """Return the dtype that can hold the numbers of all leaves."""
    return np.result_type(*(np.dtype(leaf.space.dtype) for leaf in leaves))


_EXACT = 2**53
"""Up to this integer, float64 is exact."""


def _joined_rows(leaves: Sequence[_Leaf], samples: Sequence[Any]) -> Array:
    """Return samples as an array with one row each, in which the leaves are concatenated."""
    parts = [np.asarray([leaf.of(one) for one in samples], leaf.space.dtype) for leaf in leaves]
    dtype = _dtype_of(leaves)
    for leaf, part in zip(leaves, parts, strict=True):
        if part.dtype.kind in "iu" and dtype.kind == "f" and ((part > _EXACT) | (part < -_EXACT)).any():
            raise RecordingError(
                f"{leaf.title} has numbers of {part.dtype} that {dtype} would round, which all numbers of "
                f"'observation.state' have together: expected at most {_EXACT}, got {part.max()}; count from the first "
                "step, or in larger units. " + _LEAVE_OUT.format(leaf.keys[0])
            )
    return _as_rows(np.concatenate([part.reshape(len(samples), -1) for part in parts], axis=1, dtype=dtype))


def _feature_of(space: Space[Any], what: str) -> dict[str, Any]:
    """Return the feature of a space of numbers: one axis, for any shape.

    Raises:
        SettingError: The space is of another kind.
    """
    if not isinstance(space, _NUMERIC):
        raise SettingError(
            f"LeRobot has no feature for {what} of {type(space).__name__}: expected Box, Discrete, MultiDiscrete or "
            "MultiBinary; wrap the environment where it is made, as by gymnasium.wrappers.FlattenObservation"
        )
    size = int(np.prod(space.shape or (1,)))
    return {"dtype": str(space.dtype), "shape": [size], "names": [f"{what[:-1]}_{at}" for at in range(size)]}


def _rows(space: Space[Any], samples: Sequence[Any]) -> Array:
    """Return samples as an array with one row each; a single number is a row."""
    return _as_rows(np.asarray(samples, space.dtype).reshape(len(samples), -1))


def _as_rows(found: Array) -> Array:
    """Return rows in the form of the format, which reads a feature of shape (1,) as a number and not as a list."""
    return found[:, 0] if found.shape[1] == 1 else found


def _check_finite(name: str, column: Array, episode: str) -> None:
    """Raise RecordingError if a column contains NaN or infinity.

    LeRobot normalizes with means, which a single such value spoils for the whole dataset: training would see only NaN.
    """
    if column.dtype.kind == "f" and not (fine := np.isfinite(column.reshape(len(column), -1)).all(axis=1)).all():
        raise RecordingError(
            f"{episode}: expected finite numbers, got a NaN or an infinity in {name} of "
            f"{counted((~fine).sum(), 'frame')}, first in frame {np.argmin(fine)}. LeRobot normalizes by means, "
            "which it would make NaN for all: leave "
            "such episodes out (finite=True), or replace it where the environment is made, as by "
            "gymnasium.wrappers.TransformObservation"
        )


def _rounded(feature: Mapping[str, Any], name: str, column: Array) -> Iterator[str]:
    """Yield a message for each float64 column that loses most of its variation when LeRobot reads it as float32."""
    values = column.reshape(len(column), -1)
    with np.errstate(over="ignore"):  # gives an infinity, which is far off
        off = np.abs(values.astype(np.float32) - values).max(0)
    spread = np.ptp(values, axis=0)
    for at in np.flatnonzero((off > spread / 100) & (spread > 0)).tolist():
        yield (
            f"LeRobot reads float64 as float32, and so {feature['names'][at]!r} of {name} up to {off[at]:.2g} off, of "
            f"numbers that differ by {spread[at]:.2g} at most; count from the first step, or in larger units, where "
            "the environment is made, as by gymnasium.wrappers.TransformObservation"
        )


def _cells(column: Array) -> pa.Array:
    """Return a column; with several numbers per row, its cells are lists of fixed size."""
    flat = pa.array(column.reshape(-1))
    return flat if column.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, column.shape[1])


def _tasks_of(task: str) -> pa.Table:
    """Return the table with the one task; pandas uses the text as the index, as LeRobot expects."""
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": plain, "metadata": None}
        for name, kind, plain in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    told = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
    return pa.table({"task_index": [0], "task": [task]}).replace_schema_metadata({"pandas": json.dumps(told)})


def _statistics(column: Array) -> dict[str, list[Any]]:
    """Return the statistics with which LeRobot normalizes a column, per element."""
    values = column.reshape(len(column), -1).astype(np.float64)
    quantiles = np.quantile(values, list(_QUANTILES.values()), axis=0)
    return {
        "min": values.min(0).tolist(), "max": values.max(0).tolist(), "mean": values.mean(0).tolist(),
        "std": values.std(0).tolist(), "count": [len(values)], **dict(zip(_QUANTILES, quantiles.tolist(), strict=True)),
    }  # fmt: skip


def _picture_statistics(pictures: Iterator[Array], count: int) -> dict[str, list[Any]]:
    """Return statistics of a sample of `count` pictures by channel, `(3, 1, 1)`, for values from 0 to 1."""
    chosen = set(np.linspace(0, count - 1, min(count, _SAMPLED_PICTURES)).round().astype(int).tolist())
    sampled = [picture.reshape(-1, 3) for at, picture in enumerate(pictures) if at in chosen]
    found = _statistics(np.concatenate(sampled) / 255.0)
    return {key: [len(chosen)] if key == "count" else [[[v]] for v in value] for key, value in found.items()}


def _joined(stats: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the statistics over all episodes; quantiles are averages over episodes, as in LeRobot."""
    found: dict[str, dict[str, Any]] = {}
    for name in stats[0]:
        each = {key: np.array([one[name][key] for one in stats]) for key in stats[0][name]}
        count = each["count"].reshape(-1, *[1] * (each["mean"].ndim - 1))
        mean = (each["mean"] * count).sum(0) / count.sum()
        # The total variance is the one within the episodes plus that of their means.
        variance = ((each["std"] ** 2 + (each["mean"] - mean) ** 2) * count).sum(0) / count.sum()
        joined = {"min": each["min"].min(0), "max": each["max"].max(0), "mean": mean, "std": np.sqrt(variance)}
        joined.update({key: (each[key] * count).sum(0) / count.sum() for key in _QUANTILES})
        found[name] = {**{key: value.tolist() for key, value in joined.items()}, "count": [int(count.sum())]}
    return found
