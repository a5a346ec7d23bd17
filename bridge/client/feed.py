"""What has arrived of a real-time world whose Steps are in flight, until the next `step` takes it.

The server answers a Step for each frame. `Feed` keeps the newest answer, and adds up what those before it told: rewards
and frames, ended episodes, and the frames whose observation nobody saw. An answer that ends an episode is never left
out, and the first one of an episode tells no reward. It does no I/O and has no clock; time is an argument.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping

import numpy as np

from bridge.client.latency import Latency
from bridge.encoding import values
from bridge.encoding.names import TIMING
from bridge.encoding.tensors import Array, pack_tensor, unpack_tensor
from bridge.errors import RemoteError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["Feed", "pays"]

_INDEX = {name: index for index, name in enumerate(TIMING)}
# Steps in flight.
_SPARE, _MOST = 2, 64
# Ended episodes that wait for the next step, and those of them that keep their final observation.
_MOST_RECORDS, _MOST_FINALS = 65536, 8
# Seconds without an answer for which an observation is repeated: servers answer a Step within two, if they can.
_PATIENCE = 5.0


def pays(round_trip: float, fps: float) -> bool:
    """Whether a round trip is so long that Steps in flight bring more frames than one after the other."""
    return round_trip * fps > 0.5


@dataclasses.dataclass(eq=False)
class _Arrived:
    """An answer, or several that were put together. Arrays have an element for each lane."""

    message: pb.EnvironmentResponse
    """The newest."""
    reward: Array
    """To be told with it; of a lane whose first observation it is: with the next one."""
    frames: Array
    """As `reward`."""
    ended: Array
    """Lanes whose episode it ends."""
    first: Array
    """Lanes whose episode begins with it, for the one who is told."""
    resetting: Array
    """Lanes without an observation."""
    timing: Array
    """`(lanes, len(TIMING))`."""
    shows_frame: Array
    """Lanes whose newest observation is of a frame, and was in no answer before; of a first one the next one says."""

    unseen: Array
    """Frames before it whose observation nobody is told."""

    def of(self, name: str) -> Array:
        """Return a column of the times."""
        column: Array = self.timing[:, _INDEX[name]]
        return column


class Feed:
    """The answers of one remote.

    Args:
        uids: The UIDs of what a real-time world tells besides observations, by name.
        lanes: The number of lanes; None: a single environment, or one agent of several.
        fps: The world's frames a second.
        round_trip: Seconds.
        latency: Learns from each answer what the clocks' offset is.
    """

    def __init__(
        self, uids: Mapping[str, int], lanes: int | None, fps: float, round_trip: float, latency: Latency
    ) -> None:
        self.asked = 0
        """Calls of `step` and `reset` that wait for something to return."""
        self.in_flight = 0
        """Steps whose answers have not come."""
        self.episodes: Array = np.zeros(lanes or 1, np.int64)
        """The number of the episode that was told last, of each lane; 0: it ended, or there is none."""
        self.latency = latency
        self._uids = uids
        self._lanes = lanes
        self.frame = 1.0 / fps
        """Seconds of a frame."""
        self._round_trip = round_trip
        self._queue: deque[_Arrived | RemoteError] = deque()
        self._newest: _Arrived | None = None  # that arrived, whether it was told or not
        self._told: pb.EnvironmentResponse | None = None
        self._carried = np.zeros(lanes or 1), np.zeros(lanes or 1, np.int64)
        self._unseen = np.zeros(lanes or 1, np.int64)
        self._dropped: _Arrived | None = None  # that came last of those that nobody is told
        self._records: list[dict[str, object]] = []
        self._due = -math.inf
        self._heard = -math.inf

    # What is to be in flight

    def note_round_trip(self, seconds: float) -> None:
        """Learn how long a request and its answer take now; the longest ones of the last seconds count."""
        self._round_trip = max(seconds, 0.98 * self._round_trip)

    @property
    def room(self) -> int:
        """How many more Steps are to be sent."""
        wanted = min(_MOST, math.ceil(self._round_trip / self.frame) + _SPARE)
        # Of answers that cannot be put together there are no more than were in flight.
        return max(0, wanted - max(0, len(self._queue) - 2) - self.in_flight)

    def begin(self) -> None:
        """Tell nothing of what has come, and expect the first answer of an episode after what `drop` takes."""
        for item in self._queue:
            if isinstance(item, _Arrived):
                self._unseen += item.unseen
                self._drop(item)
        self._queue.clear()
        self._told = None
        self.asked = 0
        for array in self._carried:
            array[...] = 0

    # What comes

    def push(self, message: pb.EnvironmentResponse, sent: float, arrived: float) -> None:
        """Take the answer to a Step.

        Args:
            message: The answer.
            sent: When the Step was sent.
            arrived: When the answer came, both in seconds of the client's clock.

        Raises:
            TensorError: It cannot be read.
            KeyError: It lacks what was asked for.
        """
        item = self._read(message)
        received, answered = item.timing[0, :2].tolist()
        self.latency.offset.sample(sent, received, answered, arrived)
        if self._dropped is not None:
            self._unseen += self._is_lost(self._dropped, item)
            item.first |= ~item.resetting
            self._dropped = None
        self._heard, self._newest = arrived, item
        self._forget_unseen_episode(item)
        last = self._queue[-1] if self._queue else None
        if isinstance(last, _Arrived) and not (last.ended.any() or (last.first & item.ended).any()):
            self._queue[-1] = self._joined(last, item)
        else:
            self._queue.append(item)

    def drop(self, message: pb.EnvironmentResponse) -> None:
        """Take the answer to a Step from before `begin`; raises as `push`."""
        item = self._read(message)
        self._newest = item
        self._drop(item)

    def _drop(self, item: _Arrived) -> None:
        if self._dropped is not None:
            self._unseen += self._is_lost(self._dropped, item)
        self._keep_records(item.message)
        self._dropped = item

    def push_error(self, error: RemoteError) -> None:
        """Take the refusal of a Step, to be told in its turn."""
        self._newest = None
        self._queue.append(error)

    def _read(self, message: pb.EnvironmentResponse) -> _Arrived:
        observations, uids, count = message.step.observations, self._uids, self._lanes or 1
        ended = np.full(count, message.step.state != pb.RUNNING)
        if self._lanes is not None:
            ended = unpack_tensor(observations[uids["terminated"]]) | unpack_tensor(observations[uids["truncated"]])
        resetting = np.zeros(count, np.bool_)
        if "resetting" in uids and uids["resetting"] in observations:
            resetting = unpack_tensor(observations[uids["resetting"]])
        before = self._newest
        first = (np.ones(count, np.bool_) if before is None else before.ended | before.resetting) & ~resetting
        frames = np.atleast_1d(unpack_tensor(observations[uids["frames"]]))
        timing = unpack_tensor(observations[uids["timing"]]).reshape(count, len(TIMING))
        item = _Arrived(
            message,
            np.atleast_1d(unpack_tensor(observations[uids["reward"]])).astype(np.float64),
            frames,
            ended,
            first,
            resetting,
            timing,
            (frames > 0) & ~first,
            np.zeros(count, np.int64),
        )
        if before is not None:
            changed = item.of("observed_at") != before.of("observed_at")
            item.shows_frame &= changed
            # Of the frames told after a first answer, those that are not new had passed when the episode was entered.
            new = item.of("frames_skipped") - before.of("frames_skipped") + 1
            before.shows_frame |= before.first & changed & (frames > new)
        return item

    def _joined(self, old: _Arrived, new: _Arrived) -> _Arrived:
        """Put an answer together with the one that follows it, which ends none of the episodes that began in it."""
        self._keep_records(old.message)
        return dataclasses.replace(
            new,
            reward=old.reward + new.reward,
            frames=old.frames + new.frames,
            first=old.first | new.first,
            unseen=old.unseen + new.unseen + self._is_lost(old, new),
        )

    def _is_lost(self, old: _Arrived, new: _Arrived) -> Array:
        """Lanes where an observation of a frame is not told, because the next one is."""
        lost: Array = old.shows_frame & (old.of("observed_at") != new.of("observed_at"))
        return lost

    def _forget_unseen_episode(self, item: _Arrived) -> None:
        """Drop an episode that began and ended before anybody was told, as the server does: its return is kept."""
        if self._lanes is not None or not item.first.any() or len(self._queue) < 2:
            return
        begin, end = self._queue[-2], self._queue[-1]
        if isinstance(begin, _Arrived) and isinstance(end, _Arrived) and begin.first.any() and end.ended.any():
            item.unseen += begin.unseen + end.unseen + self._is_lost(begin, end) + end.shows_frame
            for dropped in (begin, end):
                self._keep_records(dropped.message)
            self._queue.pop()
            self._queue.pop()

    def _keep_records(self, message: pb.EnvironmentResponse) -> None:
        data = message.step.observations[self._uids["episodes"]].uint8s.array
        if data:
            self._records += values.decode(data)
            del self._records[:-_MOST_RECORDS]
            for record in self._records[:-_MOST_FINALS]:
                record.pop("final_obs", None)
                record.pop("final_info", None)

    # What is told

    def wait(self, now: float, *, repeats: bool) -> float:
        """Return the seconds until `take` has something to return, whatever arrives; inf: nobody knows.

        Args:
            now: The time.
            repeats: Whether the observation that was told last may be told again.
        """
        if self._queue:
            return 0.0
        patient = now - self._heard < _PATIENCE
        return max(0.0, self._due - now) if repeats and self._told is not None and patient else math.inf

    def take(self, now: float, *, repeats: bool) -> pb.EnvironmentResponse | RemoteError | None:
        """Return what there is for a call that waits: an answer, or why there is none; None: it has to wait.

        The newest observation is told again, without a reward, once the frame's time is over in which nothing came.

        Args:
            now: The time.
            repeats: As for `wait`.
        """
        if not self.asked or self.wait(now, repeats=repeats) > 0.0:
            return None
        self._due = max(self._due, now - self.frame) + self.frame
        if not self._queue:
            self.asked -= 1
            return self._repeated()
        item = self._queue.popleft()
        if isinstance(item, RemoteError):
            self.asked = 0
            return item
        self.asked -= 1
        self._tell(item)
        return item.message

    def _tell(self, item: _Arrived) -> None:
        """Write into an answer what is told with it."""
        reward, frames = self._carried
        begins = item.first & ~item.ended
        told = np.where(begins, 0.0, item.reward + reward), np.where(begins, 0, item.frames + frames)
        self._carried = np.where(begins, item.reward, 0.0), np.where(begins, item.frames, 0)
        self._unseen += item.unseen
        timing = item.timing.copy()
        timing[:, _INDEX["frames_skipped"]] += self._unseen
        observations = item.message.step.observations
        for name, array in zip(("reward", "frames", "timing"), (*told, timing), strict=True):
            observations[self._uids[name]].CopyFrom(pack_tensor(array if self._lanes is not None else array[0]))
        if self._records:
            self._keep_records(item.message)
            data = np.frombuffer(values.encode(self._records), np.uint8)
            observations[self._uids["episodes"]].CopyFrom(pack_tensor(data))
            self._records = []
        gone = item.ended | item.resetting
        self.episodes = np.where(gone, 0, item.of("episode")).astype(np.int64)
        self._told = item.message

    def _repeated(self) -> pb.EnvironmentResponse:
        """Return the answer that was told last as if nothing had happened since; lanes that ended have none yet."""
        message = pb.EnvironmentResponse()
        if self._told is not None:
            message.CopyFrom(self._told)
        observations, uids = message.step.observations, self._uids
        for name in ("reward", "frames"):
            observations[uids[name]].CopyFrom(pack_tensor(np.zeros_like(unpack_tensor(observations[uids[name]]))))
        observations[uids["episodes"]].CopyFrom(pack_tensor(np.zeros(0, np.uint8)))
        if self._lanes is not None and "resetting" in uids and uids["resetting"] in observations:
            names = ("terminated", "truncated", "resetting")
            gone = np.logical_or.reduce([unpack_tensor(observations[uids[name]]) for name in names])
            for name, array in zip(names, (np.zeros_like(gone), np.zeros_like(gone), gone), strict=True):
                observations[uids[name]].CopyFrom(pack_tensor(array))
        return message
