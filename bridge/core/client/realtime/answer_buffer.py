"""Holds the answers of a real-time world with Steps in flight, until the next `step` takes them.

The server answers one Step for each frame. `AnswerBuffer` returns the newest observation, and the rewards, frames and
ended episodes of all answers since the last `step`, with the number of skipped frames. A single environment, or one
agent of several, counts as a world of one lane. The buffer has no I/O and no clock; time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from bridge.core.client.realtime.lane_answers import LaneAnswers
from bridge.core.client.realtime.latency import Latency
from bridge.core.client.realtime.reader import read_records
from bridge.core.encoding import values
from bridge.core.encoding.infos import (
    ACTION,
    lane_info,
    pick_lanes,
    split_intervention,
    with_errors,
    with_interventions,
)
from bridge.core.encoding.names import TIMING
from bridge.core.encoding.spaces import Leaf
from bridge.core.encoding.tensors import Array, fill_tensor, unpack_tensor
from bridge.errors import RemoteError, TensorError
from bridge.pb import bridge_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["AnswerBuffer"]

# Steps in flight in addition to one for each frame of a round trip, and the most Steps in flight.
_SPARE, _MOST = 2, 64
# The most answers that are kept because lanes ended in them.
_MOST_ENDS = 2
# Seconds without an answer during which an observation is repeated. Servers answer a Step within two if they can.
_PATIENCE = 5.0
# The factor by which the longest round trip fades with each round trip.
_FADING = 0.98
_Row: TypeAlias = tuple[Array, float, int, Mapping[str, Any], bool, bool]
"""The times, reward, frames, intervention and flags (terminated, truncated) of a lane."""


class AnswerBuffer:
    """The answers of one remote.

    Args:
        uids: The UIDs of the additional observations of a real-time world, by name.
        leaves: The UID and the leaf of each tensor of an observation.
        lanes: The number of lanes; None: a single environment, or one agent.
        fps: The world's frames per second.
        round_trip: The initial estimate of the round trip time, in seconds.
        latency: Updated with the times of each answer.
    """

    def __init__(
        self,
        uids: Mapping[str, int],
        leaves: Sequence[tuple[int, Leaf]],
        lanes: int | None,
        fps: float,
        round_trip: float,
        latency: Latency,
    ) -> None:
        self.asked = 0
        """Calls of `step` and `reset` that wait for a result."""
        self.in_flight = 0
        """Steps without an answer so far."""
        self.latency = latency
        self.frame = 1.0 / fps
        """The length of a frame, in seconds."""
        self.waits_for_all = lanes is None
        """True if each result must have an observation of every lane."""
        self.lanes = [LaneAnswers(skips=lanes is not None) for _ in range(lanes or 1)]
        """The answers of each lane."""
        self._shape = () if lanes is None else (lanes,)
        self._uids = uids
        self._leaves = leaves
        self._round_trip = round_trip
        self._error: RemoteError | None = None
        self._number = 0  # the number of the first request after the last `begin`
        self._newest: tuple[pb.EnvironmentResponse, Array] | None = None  # the newest answer since then, and its times
        self._handed_out: pb.EnvironmentResponse | None = None
        self._remarks: bridge_pb2.Value | None = None
        self._failures: dict[int, Any] = {}  # unreported errors of lanes that could not be reset
        self._due = -math.inf
        self._heard = -math.inf

    @property
    def episodes(self) -> Array:
        """The number of each lane's episode that was reported last; 0: none: int64, `[]` or `[N]`."""
        return np.array([lane.reading for lane in self.lanes], np.int64).reshape(self._shape)

    # Steps in flight

    def _note_round_trip(self, seconds: float) -> None:
        """Update the estimate of the round trip time: the longest of the last seconds."""
        self._round_trip = max(seconds, _FADING * self._round_trip)

    @property
    def may_send(self) -> int:
        """How many more Steps to send now."""
        # The server needs a held Step to report each frame. So there must be one Step in flight for each frame of a
        # round trip.
        wanted = min(_MOST, math.ceil(self._round_trip / self.frame) + _SPARE)
        return 0 if self._over else max(0, wanted - self.in_flight)

    @property
    def _over(self) -> bool:
        """True if a single environment's episode has ended: Steps in flight are refused until the next one begins."""
        return not self._shape and self.lanes[0].over

    def begin(self, number: int, mask: Array | None = None) -> None:
        """Drop the unreported data of some lanes, and wait for the first answers of their next episodes.

        Args:
            number: Answers to requests with a lower number belong to the previous episodes.
            mask: The lanes that begin, bools `(N,)`; None: all.
        """
        for index, lane in enumerate(self.lanes):
            if mask is None or mask[index]:
                lane.begin(number)
                self._failures.pop(index, None)
        self._number, self._newest, self._error = number, None, None
        self.asked = 0

    # Input

    def push(self, message: pb.EnvironmentResponse, number: int, sent: float, arrived: float) -> bool:
        """Store the answer to a Step; return False if it belongs to earlier episodes of all lanes.

        Args:
            message: The answer.
            number: The number of its request.
            sent: When the Step was sent, in seconds of the client's clock.
            arrived: When the answer arrived, in seconds of the client's clock.

        Raises:
            TensorError: The answer cannot be read.
            KeyError: The answer lacks a requested observation.
        """
        timing = self._read(message, "timing").reshape(-1, len(TIMING))
        rows = self._rows(message, timing)
        received, answered = timing[0, :2].tolist()
        self.latency.answered(sent, received, answered, arrived)
        # Subtract the time for which the server held the Step.
        self._note_round_trip(arrived - sent - (answered - received))
        self._heard = arrived
        # After a Reset of some lanes, answers from before it still arrive, and count for the other lanes.
        if number >= self._number:
            self._newest = message, timing
        # Keep these first: the server sends remarks and ended episodes only once, even if the answer is dropped.
        self._keep_remarks(message)
        for record in read_records(message.step.observations[self._uids["episodes"]], len(self.lanes)):
            self.lanes[record["lane"]].add_record(record["episode"], record)
        counts = self._error is None  # nothing after a refusal is reported before the refusal
        used = [
            row is None or lane.push(message, *row, number=number, counts=counts)
            for lane, row in zip(self.lanes, rows, strict=True)
        ]
        self._share_ends(message)
        # Decode infos only if a lane has, or had, no observation.
        if number >= self._number and (self._failures or None in rows):
            self._keep_failures(message, rows)
        return number >= self._number or any(used)

    def _read(self, message: pb.EnvironmentResponse, name: str) -> Array:
        return unpack_tensor(message.step.observations[self._uids[name]], name)

    def _rows(self, message: pb.EnvironmentResponse, timing: Array) -> list[_Row | None]:
        """Return the data of each lane in an answer; None: the lane has no observation."""
        numbers: list[Any] = [self._read(message, name).reshape(-1).tolist() for name in ("reward", "frames")]
        if self._shape:
            flags = [self._read(message, name).tolist() for name in ("terminated", "truncated")]
            missing = self._read(message, "resetting").tolist()
        else:
            state = message.step.state
            flags, missing = [[state == pb.TERMINATED], [state == pb.INTERRUPTED]], [False]
        rows = zip(timing, *numbers, self._interventions(message), *flags, strict=True)
        return [None if resetting else row for row, resetting in zip(rows, missing, strict=True)]

    def _interventions(self, message: pb.EnvironmentResponse) -> Sequence[Mapping[str, Any]]:
        """Return the intervention in each lane."""
        uid = self._uids.get("info")
        if uid is None or not _tells_of_intervention(message, uid):
            return [{}] * len(self.lanes)
        info = _info(message, uid)
        return [
            split_intervention(lane_info(info, lane) if self._shape else info)[1] for lane in range(len(self.lanes))
        ]

    def _keep_failures(self, message: pb.EnvironmentResponse, rows: Sequence[_Row | None]) -> None:
        """Keep the errors of lanes without an episode until they have one. The server sends each error once."""
        info = _info(message, self._uids["info"])
        for index, row in enumerate(rows):
            if row is None:
                if "error" in (own := lane_info(info, index)):
                    self._failures[index] = own["error"]
            elif not (row[-2] or row[-1]):
                self._failures.pop(index, None)

    def _share_ends(self, newest: pb.EnvironmentResponse) -> None:
        """Move unreported ends into one message. Otherwise each end keeps a message with all lanes' observations."""
        ends = [None if lane.closing is None else lane.closing.observed for lane in self.lanes]
        if len({id(end.message) for end in ends if end is not None}) > _MOST_ENDS:
            shared = self._put_together([newest if end is None else end.message for end in ends])
            for end in ends:
                if end is not None:
                    end.message = shared

    def push_error(self, error: RemoteError) -> None:
        """Store the refusal of a Step, to be reported in order. After the end of an episode, refusals are ignored."""
        if not self._over and self._error is None:
            self._error = error
            for lane in self.lanes:
                lane.restart()

    def _keep_remarks(self, message: pb.EnvironmentResponse) -> None:
        """Keep the remarks of infos, which are sent only once."""
        uid = self._uids.get("info")
        if uid is None or uid not in message.step.observations:
            return
        remarks = values.remarks_of(message.step.observations[uid].uint8s.array)
        if remarks is not None:
            self._remarks = self._remarks or bridge_pb2.Value()
            if remarks.HasField("form"):  # replace an older form: MergeFrom would join their lists
                self._remarks.ClearField("form")
            self._remarks.MergeFrom(remarks)

    # Output

    def wait(self, now: float, *, repeats: bool) -> float:
        """Return the seconds until `take` has a result even if nothing arrives; inf: unknown.

        Args:
            now: The time.
            repeats: True if an episode has begun, so that observations may be repeated.
        """
        if self._error is not None or self._is_ready(repeats):
            return 0.0
        patient = now - self._heard < _PATIENCE
        return max(0.0, self._due - now) if repeats and patient and self._has_enough else math.inf

    def _is_ready(self, repeats: bool) -> bool:
        """True if there is something new to report; without `repeats`, if the requested episode has begun."""
        if not self._has_enough:
            return False
        return any(lane.waiting for lane in self.lanes) if repeats else self._newest is not None

    @property
    def _has_enough(self) -> bool:
        """True if there are observations, new or old, of enough lanes."""
        return not self.waits_for_all or not any(lane.missing for lane in self.lanes)

    def take(self, now: float, *, repeats: bool) -> pb.EnvironmentResponse | RemoteError | None:
        """Return an answer or an error for a waiting call; None: it has to wait.

        If no answer arrived during a frame's time, the newest observation is repeated, without a reward.

        Args:
            now: The time.
            repeats: See `wait`.
        """
        if not self.asked or self.wait(now, repeats=repeats) > 0.0:
            return None
        # Count from the due time, so that delays do not add up. After a long delay count from now, so that the caller
        # does not get several repetitions at once.
        self._due = max(self._due, now - self.frame) + self.frame
        self.asked -= 1
        # Report data from before the refusal first.
        if self._error is not None and not self._is_ready(repeats):
            self.asked = 0
            error, self._error = self._error, None
            return error
        return self._tell(repeats)

    def _tell(self, repeats: bool) -> pb.EnvironmentResponse | None:
        if self._newest is None:
            return None
        message, timing = self._newest
        # After a Reset of some lanes, the others repeat their observations.
        missing = [lane.missing for lane in self.lanes]
        told = [
            lane.tell(message, row, pops=repeats or not lane.reading)
            for lane, row in zip(self.lanes, timing, strict=True)
        ]
        answer = self._with_observations([item.observed.message for item in told])
        found: dict[str, Array] = {
            "timing": np.array([item.observed.timing for item in told]).reshape(*self._shape, len(TIMING)),
            "reward": np.array([item.reward for item in told], np.float64).reshape(self._shape),
            "frames": np.array([item.frames for item in told], np.int64).reshape(self._shape),
        }
        if self._shape:
            found["terminated"] = np.array([item.terminated for item in told], np.bool_)
            found["truncated"] = np.array([item.truncated for item in told], np.bool_)
            found["resetting"] = np.array(missing, np.bool_)
        records = [record for lane in self.lanes for record in lane.take_records(after_end=True)]
        found["episodes"] = np.frombuffer(values.encode(records) if records else b"", np.uint8)
        failures = {index: reason for index, reason in self._failures.items() if missing[index]}
        if failures:
            info = with_errors(_info(answer, self._uids["info"]), failures, len(told))
            _fill(answer, self._uids["info"], np.frombuffer(values.encode(info), np.uint8))
            self._failures = {index: why for index, why in self._failures.items() if index not in failures}
        interventions = [item.intervention for item in told]
        if "info" in self._uids and (any(interventions) or _tells_of_intervention(answer, self._uids["info"])):
            info = with_interventions(_info(answer, self._uids["info"]), interventions, lanes=bool(self._shape))
            _fill(answer, self._uids["info"], np.frombuffer(values.encode(info), np.uint8))
        # Do this last: remarks are added to the bytes of infos, which may have been rewritten above.
        if self._remarks is not None:
            data = answer.step.observations[self._uids["info"]].uint8s.array
            found["info"] = np.frombuffer(values.with_remarks(data, self._remarks), np.uint8)
            self._remarks = None
        for name, array in found.items():
            _fill(answer, self._uids[name], array)
        self._handed_out = answer
        return answer

    def _with_observations(self, messages: Sequence[pb.EnvironmentResponse]) -> pb.EnvironmentResponse:
        """Return a writable answer with the observation and the info of lane i from `messages[i]`."""
        answer = messages[0]
        if any(message is not answer for message in messages):
            return self._put_together(messages)
        if answer is self._handed_out:  # a repetition must not change the answer that the caller has
            answer = pb.EnvironmentResponse()
            answer.CopyFrom(messages[0])
        return answer

    def _put_together(self, messages: Sequence[pb.EnvironmentResponse]) -> pb.EnvironmentResponse:
        """Return a new answer with the observation and the info of lane i from `messages[i]`."""
        answer = pb.EnvironmentResponse()
        answer.step.state = pb.RUNNING
        distinct = {id(message): message for message in messages}
        for uid, leaf in self._leaves:
            # Read each message once, however many lanes use it.
            arrays = {key: unpack_tensor(message.step.observations[uid]) for key, message in distinct.items()}
            _fill(answer, uid, leaf.pick_lanes([arrays[id(message)] for message in messages]))
        uid = self._uids["info"]
        infos = {key: _info(message, uid) for key, message in distinct.items()}
        picked = pick_lanes([infos[id(message)] for message in messages])
        _fill(answer, uid, np.frombuffer(values.encode(picked), np.uint8))
        return answer


def _fill(answer: pb.EnvironmentResponse, uid: int, array: Array) -> None:
    """Replace an observation in an answer."""
    tensor = answer.step.observations[uid]
    tensor.Clear()
    fill_tensor(tensor, array)


def _tells_of_intervention(message: pb.EnvironmentResponse, uid: int) -> bool:
    """True if an info may contain an intervention. Searches the bytes, because few infos contain one."""
    return ACTION.encode() in message.step.observations[uid].uint8s.array


def _info(message: pb.EnvironmentResponse, uid: int) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the infos of an answer; raises TensorError if they are malformed."""
    info: Any = values.decode(message.step.observations[uid].uint8s.array)
    if not isinstance(info, (dict, list)):
        raise TensorError(f"expected infos that are a dict or a list, got {info!r:.80}")
    return info
