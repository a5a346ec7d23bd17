"""What has arrived of a real-time environment whose Steps are in flight, until the next `step` takes it.

The server answers a Step for each frame. `Feed` keeps the newest answer, and adds up what those before it told: rewards
and frames, ended episodes, and the frames whose observation nobody saw. An answer that ends an episode is never left
out. It does no I/O and has no clock; time is an argument.
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
from bridge.encoding.tensors import pack_tensor, unpack_tensor
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
# How much of the longest round trip is still counted a round trip later.
_FADING = 0.98


def pays(round_trip: float, fps: float) -> bool:
    """Whether a round trip is so long that Steps in flight bring more frames than one after the other."""
    return round_trip * fps > 0.5


@dataclasses.dataclass
class _Arrived:
    """An answer, or several that were put together."""

    message: pb.EnvironmentResponse
    """The newest."""
    reward: float
    """The sum of all."""
    frames: int
    """Of how many frames that is."""
    ended: bool
    """Whether it ends the episode."""
    first: bool
    """Whether it is the first one of an episode."""
    observed_at: float
    """When the observation was made, seconds of the server's clock."""
    skipped: int
    """Frames whose observation the server never sent."""
    shows_frame: bool
    """Whether its observation is of a frame, and was in no answer before; of a first one the next one says."""
    unseen: int = 0
    """Frames whose observation was in the answers that were left out."""

    def joined(self, new: _Arrived) -> _Arrived:
        """Put it together with the answer that follows it."""
        return dataclasses.replace(
            new,
            reward=self.reward + new.reward,
            frames=self.frames + new.frames,
            unseen=self.unseen + self.lost_by(new),
        )

    def lost_by(self, new: _Arrived) -> int:
        """Return 1 where nobody sees a frame because an answer is told without this one, which came before it."""
        return int(self.shows_frame and self.observed_at != new.observed_at)


class Feed:
    """The answers of one remote, of a single environment or of one agent.

    Args:
        uids: The UIDs of what a real-time world tells besides observations, by name.
        fps: The world's frames a second.
        round_trip: Seconds.
        latency: Learns from each answer what the clocks' offset is.
    """

    def __init__(self, uids: Mapping[str, int], fps: float, round_trip: float, latency: Latency) -> None:
        self.asked = 0
        """Calls of `step` and `reset` that wait for something to return."""
        self.in_flight = 0
        """Steps whose answers have not come."""
        self.episode = 0
        """The number of the episode that was told last."""
        self.latency = latency
        self.frame = 1.0 / fps
        """Seconds of a frame."""
        self._uids = uids
        self._round_trip = round_trip
        self._queue: deque[_Arrived | RemoteError] = deque()  # at most three: a first one, a newest one, an end
        self._newest: _Arrived | None = None  # of this episode, whether it was told or not
        self._dropped: _Arrived | None = None  # that came last of those that nobody is told
        self._told: pb.EnvironmentResponse | None = None
        self._unseen = 0
        self._records: list[dict[str, object]] = []
        self._due = -math.inf
        self._heard = -math.inf

    # What is to be in flight

    def note_round_trip(self, seconds: float) -> None:
        """Learn how long a request and its answer take now; the longest ones of the last seconds count."""
        self._round_trip = max(seconds, _FADING * self._round_trip)

    @property
    def room(self) -> int:
        """How many more Steps are to be sent."""
        wanted = min(_MOST, math.ceil(self._round_trip / self.frame) + _SPARE)
        return 0 if self._over else max(0, wanted - self.in_flight)

    @property
    def _over(self) -> bool:
        """Whether the episode has ended: the next one has to be asked for, and Steps in flight are refused."""
        return self._newest is not None and self._newest.ended

    def begin(self) -> None:
        """Tell nothing of what has come, and expect the first answer of an episode after what `drop` takes."""
        for item in self._queue:
            if isinstance(item, _Arrived):
                self._unseen += item.unseen
                self._drop(item)
        self._queue.clear()
        self._newest = self._told = None
        self.asked = 0

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
        item = self._read(message, self._newest)
        received, answered = unpack_tensor(message.step.observations[self._uids["timing"]])[:2].tolist()
        self.latency.offset.sample(sent, received, answered, arrived)
        if self._dropped is not None:
            self._unseen += self._dropped.lost_by(item)
            self._dropped = None
        self._heard, self._newest = arrived, item
        last = self._queue[-1] if self._queue else None
        # The first one tells no reward, and the last one is to be seen.
        if isinstance(last, _Arrived) and not (last.ended or last.first):
            self._keep_records(last.message)
            self._queue[-1] = last.joined(item)
        else:
            self._queue.append(item)

    def drop(self, message: pb.EnvironmentResponse) -> None:
        """Take the answer to a Step from before `begin`; raises as `push`."""
        self._drop(self._read(message, self._dropped))

    def _drop(self, item: _Arrived) -> None:
        if self._dropped is not None:
            self._unseen += self._dropped.lost_by(item)
        self._keep_records(item.message)
        self._dropped = item

    def push_error(self, error: RemoteError) -> None:
        """Take the refusal of a Step, to be told in its turn; after the end of an episode every Step is refused."""
        if not self._over:
            self._newest = None
            self._queue.append(error)

    def _read(self, message: pb.EnvironmentResponse, before: _Arrived | None) -> _Arrived:
        observations, uids = message.step.observations, self._uids
        frames = int(unpack_tensor(observations[uids["frames"]])[()])
        timing = unpack_tensor(observations[uids["timing"]])
        item = _Arrived(
            message,
            float(unpack_tensor(observations[uids["reward"]])[()]),
            frames,
            message.step.state != pb.RUNNING,
            before is None,
            float(timing[_INDEX["observed_at"]]),
            int(timing[_INDEX["frames_skipped"]]),
            before is not None and frames > 0,
        )
        if before is not None and item.observed_at == before.observed_at:
            item.shows_frame = False
        elif before is not None and before.first:
            # Of the frames told after a first answer, those that are not new had passed when the episode was entered.
            before.shows_frame = frames > item.skipped - before.skipped + 1
        return item

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
        self.asked -= 1
        if not self._queue:
            return self._repeated()
        item = self._queue.popleft()
        if isinstance(item, RemoteError):
            self.asked = 0
            return item
        self._tell(item)
        return item.message

    def _tell(self, item: _Arrived) -> None:
        """Write into an answer what is told with it."""
        self._unseen += item.unseen
        observations, uids = item.message.step.observations, self._uids
        timing = unpack_tensor(observations[uids["timing"]]).copy()
        timing[_INDEX["frames_skipped"]] += self._unseen
        for name, value in (("reward", item.reward), ("frames", item.frames), ("timing", timing)):
            observations[uids[name]].CopyFrom(pack_tensor(value))
        if self._records:
            self._keep_records(item.message)
            data = np.frombuffer(values.encode(self._records), np.uint8)
            observations[uids["episodes"]].CopyFrom(pack_tensor(data))
            self._records = []
        self.episode = int(timing[_INDEX["episode"]])
        self._told = item.message

    def _repeated(self) -> pb.EnvironmentResponse:
        """Return the answer that was told last as if nothing had happened since."""
        message = pb.EnvironmentResponse()
        if self._told is not None:
            message.CopyFrom(self._told)
        nothing = {"reward": 0.0, "frames": 0, "episodes": np.zeros(0, np.uint8)}
        for name, value in nothing.items():
            message.step.observations[self._uids[name]].CopyFrom(pack_tensor(value))
        return message
