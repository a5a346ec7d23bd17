"""Reads the additional observations of a real-time world: frames, ended episodes, times."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge.core.client.realtime.latency import Latency
from bridge.core.encoding import values
from bridge.core.encoding.names import TIMING, TIMING_INDEX
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Array, unpack_tensor
from bridge.errors import UNREADABLE, PeerError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["RealtimeReader", "merge_latency", "read_records"]

_COUNTS = (
    "episode",
    "frame",
    "actions_applied",
    "actions_replaced",
    "actions_dropped",
    "overruns",
    "frames_dropped",
    "frames_skipped",
)


class RealtimeReader:
    """Reads one remote's answers.

    Args:
        url: The URL, for errors.
        uids: The UIDs of those `REALTIME_SIGNALS` that the world has.
        lanes: The number of lanes; None for a single environment.
        layout: The layout of one environment's observation.
        diagnostics: True to request times (U-11).
        in_flight: True if Steps are in flight: then times and resetting lanes are always requested.
    """

    def __init__(
        self,
        url: str,
        uids: Mapping[str, int],
        lanes: int | None,
        layout: Layout,
        diagnostics: bool,
        *,
        in_flight: bool,
    ) -> None:
        self.latency = Latency()
        self.resetting: Array | None = None
        """The lanes without an observation in the last answer; None: not requested."""
        self.told: Mapping[str, Any] | None = None
        """The `latency` in the last info of a single environment."""
        self.stale = 0
        """The number of answers of abandoned episodes."""
        self._url = url
        self._uids = dict(uids)
        self._lanes = lanes
        self._layout = layout
        self._diagnostics, self._in_flight = diagnostics, in_flight
        self._partial = lanes is not None
        self._salvaged: list[dict[str, Any]] = []
        self._times: tuple[float, float] | None = None

    def wait_for_all(self) -> None:
        """Request that each answer waits until every lane has an observation."""
        self._partial = False
        self.resetting = None

    @property
    def wanted(self) -> list[int]:
        """The UIDs to request."""
        names = ["frames", "episodes"]
        if self._diagnostics or self._in_flight:
            names.append("timing")
        if self._partial or self._in_flight:  # with Steps in flight the AnswerBuffer waits for the lanes
            names.append("resetting")
        return [self._uids[name] for name in names if name in self._uids]

    def timed(self, sent: float, arrived: float) -> None:
        """Store when the Step that is read next was sent, and when its answer arrived."""
        self._times = sent, arrived

    def salvage(self, message: pb.EnvironmentResponse) -> None:
        """Keep the ended episodes of a dropped answer: the server sends them only once."""
        with contextlib.suppress(PeerError):  # there is no caller, and the server may be given up just now
            self._salvaged += self._records(message.step.observations)

    def _records(self, observations: Mapping[int, pb.Tensor]) -> list[dict[str, Any]]:
        uid = self._uids.get("episodes")
        if uid is None or uid not in observations:
            return []
        try:
            records = read_records(observations[uid], self._lanes or 1)
            for record in records:
                if "final_obs" in record:
                    record["final_obs"] = self._layout.unpack(record["final_obs"])
            return records
        except UNREADABLE as error:
            raise PeerError(self._url, f"its ended episodes cannot be read: {error}") from error

    def extend(self, info: Any, observations: Mapping[int, pb.Tensor], now: float) -> Any:
        """Return an info with `frames`, `latency` and, if any ended, `episodes`.

        Args:
            info: The info of one environment; or a dict of arrays over the lanes; or a list with a dict for each lane.
            observations: The observations of the answer.
            now: The client's time in seconds.
        """
        frames = unpack_tensor(observations[self._uids["frames"]], "frames").reshape(self._lanes or 1)
        records, self._salvaged = [*self._salvaged, *self._records(observations)], []
        episodes: dict[int, list[dict[str, Any]]] = {}
        for record in records:
            told = {key: value for key, value in record.items() if key != "lane"}
            episodes.setdefault(record["lane"], []).append(told)
        timing = self._timing(observations)
        figures = None if timing is None else self._figures(timing.reshape(-1, len(TIMING)), now)
        if self._lanes is not None and "resetting" in self._uids and self._partial:
            resetting = unpack_tensor(observations[self._uids["resetting"]], "resetting")
            self.resetting = resetting.reshape(self._lanes).astype(np.bool_)
        if self._lanes is not None and not isinstance(info, list):
            return _extend_arrays(info, frames, episodes, figures)
        extended = []
        for lane, own in enumerate([info] if self._lanes is None else info):
            extra: dict[str, Any] = {"frames": int(frames[lane])}
            if lane in episodes:
                extra["episodes"] = episodes[lane]
            if figures is not None:
                extra["latency"] = self.told = {name: value[lane].item() for name, value in figures.items()}
            extended.append({**own, **extra})
        return extended[0] if self._lanes is None else extended

    def _timing(self, observations: Mapping[int, pb.Tensor]) -> Array | None:
        """Read the times, and update the clocks' offset."""
        uid = self._uids.get("timing")
        if uid is None or uid not in observations or not self._diagnostics:
            return None
        timing = unpack_tensor(observations[uid], "timing")
        if timing.shape[-1:] != (len(TIMING),):
            raise PeerError(self._url, f"expected {len(TIMING)} times, got the shape {list(timing.shape)}")
        first = timing.reshape(-1, len(TIMING))[0]
        # Not set for Steps in flight, whose times `AnswerBuffer` reads.
        if self._times is not None:
            sent, arrived = self._times
            self._times = None
            self.latency.answered(
                sent, float(first[TIMING_INDEX["received_at"]]), float(first[TIMING_INDEX["answered_at"]]), arrived
            )
        return timing

    def _figures(self, timing: Array, now: float) -> dict[str, Array]:
        """Return the figures of each lane from its times, `(lanes, len(TIMING))`."""
        lanes = len(timing)
        figures: dict[str, Array] = {name: np.full(lanes, value) for name, value in self.latency.figures().items()}
        observed = timing[:, TIMING_INDEX["observed_at"]].tolist()
        figures["observation_age"] = np.array(
            [self.latency.age(at, now) if math.isfinite(at) else math.nan for at in observed]
        )
        for name in ("step_time", "action_delay"):
            figures[name] = timing[:, TIMING_INDEX[name]]
        for name in _COUNTS:
            figures[name] = timing[:, TIMING_INDEX[name]].astype(np.int64)
        figures["stale"] = np.full(lanes, self.stale, np.int64)
        return figures


def read_records(tensor: pb.Tensor, lanes: int) -> list[dict[str, Any]]:
    """Return the records of ended episodes in an answer; raises TensorError if they are malformed."""
    data = tensor.uint8s.array
    records = values.decode(data) if data else []  # usually empty
    if not isinstance(records, list) or not all(
        isinstance(record, dict) and record.get("lane") in range(lanes) and isinstance(record.get("episode"), int)
        for record in records
    ):
        raise TensorError(f"expected a list of ended episodes, each with lane and episode, got {records!r:.80}")
    return records


def _extend_arrays(
    info: Mapping[str, Any],
    frames: Array,
    episodes: Mapping[int, list[dict[str, Any]]],
    figures: Mapping[str, Array] | None,
) -> dict[str, Any]:
    """Add the frames, ended episodes and times of each lane to infos in the form of arrays."""
    everywhere = np.ones(len(frames), np.bool_)
    extended = {**info, "frames": frames, "_frames": everywhere}
    if episodes:
        lists = np.full(len(frames), None, dtype=object)
        for lane, told in episodes.items():
            lists[lane] = told
        extended["episodes"] = lists
        extended["_episodes"] = np.array([item is not None for item in lists])
    if figures is not None:
        nested: dict[str, Any] = {}
        for name, value in figures.items():
            nested[name], nested[f"_{name}"] = value, everywhere.copy()
        extended["latency"], extended["_latency"] = nested, everywhere.copy()
    return extended


def merge_latency(infos: dict[str, Any], rows: list[tuple[int, Mapping[str, Any]]], num_envs: int) -> None:
    """Merge the `latency` of several slots into the infos of all, like `VectorEnv._add_info`, but all at once.

    Args:
        infos: The infos of all slots, without a `latency`; changed in place.
        rows: Pairs of a slot and its figures.
        num_envs: The number of slots.
    """
    if not rows:
        return
    slots = [slot for slot, _ in rows]
    mask = np.zeros(num_envs, np.bool_)
    mask[slots] = True
    nested: dict[str, Any] = {}
    for name, value in rows[0][1].items():
        column = np.zeros(num_envs, np.int64 if isinstance(value, int) else np.float64)
        column[slots] = [row[name] for _, row in rows]
        nested[name], nested[f"_{name}"] = column, mask.copy()
    infos["latency"], infos["_latency"] = nested, mask
