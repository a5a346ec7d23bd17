"""Holds the answers of a real-time world whose Steps are in flight, until the next `step` takes them.

The server answers a Step for each frame. `AnswerBuffer` hands out the newest of what came, and of the answers before it
the rewards, frames and ended episodes, and how many frames nobody saw. A single environment, and an agent of several,
is a world of one lane. It does no I/O and has no clock; time is an argument.
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

# Steps in flight beyond those that a round trip has frames, and at most.
_SPARE, _MOST = 2, 64
# Answers that are kept because lanes ended in them.
_MOST_ENDS = 2
# Seconds without an answer for which an observation is repeated: servers answer a Step within two, if they can.
_PATIENCE = 5.0
# How much of the longest round trip is still counted a round trip later.
_FADING = 0.98
_Row: TypeAlias = tuple[Array, float, int, Mapping[str, Any], bool, bool]
"""The times, reward, frames, intervention and flags (terminated, truncated) of a lane."""


class AnswerBuffer:
    """The answers of one remote.

    Args:
        uids: The UIDs of what a real-time world tells besides observations, by name.
        leaves: The UID of each tensor of an observation, and what it holds.
        lanes: The number of lanes; None: a single environment, or one agent.
        fps: The world's frames a second.
        round_trip: Seconds.
        latency: Learns from each answer what the clocks' offset is.
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
        """Calls of `step` and `reset` that wait for something to return."""
        self.in_flight = 0
        """Steps whose answers have not come."""
        self.latency = latency
        self.frame = 1.0 / fps
        """Seconds of a frame."""
        self.waits_for_all = lanes is None
        """True if what is told has an observation of every lane."""
        self.lanes = [LaneAnswers(skips=lanes is not None) for _ in range(lanes or 1)]
        """The answers of each lane."""
        self._shape = () if lanes is None else (lanes,)
        self._uids = uids
        self._leaves = leaves
        self._round_trip = round_trip
        self._error: RemoteError | None = None
        self._number = 0  # of the requests whose answers begin what was asked for last
        self._newest: tuple[pb.EnvironmentResponse, Array] | None = None  # since then, with its times
        self._handed_out: pb.EnvironmentResponse | None = None
        self._remarks: bridge_pb2.Value | None = None
        self._failures: dict[int, Any] = {}  # why lanes could not be reset, not told yet
        self._due = -math.inf
        self._heard = -math.inf

    @property
    def episodes(self) -> Array:
        """The number of the episode that each lane was told last, 0 where it is in none: int64, `[]` or `[N]`."""
        return np.array([lane.reading for lane in self.lanes], np.int64).reshape(self._shape)

    # What is to be in flight

    def _note_round_trip(self, seconds: float) -> None:
        """Learn how long a request and its answer take now; the longest ones of the last seconds count."""
        self._round_trip = max(seconds, _FADING * self._round_trip)

    @property
    def may_send(self) -> int:
        """How many more Steps are to be sent."""
        # The server tells each frame by a Step that it holds: as many as frames pass in a round trip have to be on
        # their way.
        wanted = min(_MOST, math.ceil(self._round_trip / self.frame) + _SPARE)
        return 0 if self._over else max(0, wanted - self.in_flight)

    @property
    def _over(self) -> bool:
        """True if a single environment's episode has ended: Steps in flight are refused until the next is asked for."""
        return not self._shape and self.lanes[0].over

    def begin(self, number: int, mask: Array | None = None) -> None:
        """Tell nothing of what has come of some lanes, and expect the first answer of an episode of theirs.

        Args:
            number: Answers to requests with a lower one are from before.
            mask: Which lanes begin, bools `(N,)`; None: all.
        """
        for index, lane in enumerate(self.lanes):
            if mask is None or mask[index]:
                lane.begin(number)
                self._failures.pop(index, None)
        self._number, self._newest, self._error = number, None, None
        self.asked = 0

    # What comes

    def push(self, message: pb.EnvironmentResponse, number: int, sent: float, arrived: float) -> bool:
        """Take the answer to a Step; return whether it is of use to a lane, or was overtaken by `begin` for all.

        Args:
            message: The answer.
            number: That of its request.
            sent: When the Step was sent.
            arrived: When the answer came, both in seconds of the client's clock.

        Raises:
            TensorError: It cannot be read.
            KeyError: It lacks what was asked for.
        """
        timing = self._read(message, "timing").reshape(-1, len(TIMING))
        rows = self._rows(message, timing)
        received, answered = timing[0, :2].tolist()
        self.latency.answered(sent, received, answered, arrived)
        # The server held the Step for a frame, which is no time of the network's.
        self._note_round_trip(arrived - sent - (answered - received))
        self._heard = arrived
        # After a Reset of some lanes, answers of before it still come, for the lanes that it left alone.
        if number >= self._number:
            self._newest = message, timing
        # First, because remarks and ended episodes are told once, whatever becomes of their answer.
        self._keep_remarks(message)
        for record in read_records(message.step.observations[self._uids["episodes"]], len(self.lanes)):
            self.lanes[record["lane"]].add_record(record["episode"], record)
        counts = self._error is None  # what follows a refusal is not told before it
        used = [
            row is None or lane.push(message, *row, number=number, counts=counts)
            for lane, row in zip(self.lanes, rows, strict=True)
        ]
        self._share_ends(message)
        # Infos are decoded only where a lane has no observation, or had none.
        if number >= self._number and (self._failures or None in rows):
            self._keep_failures(message, rows)
        return number >= self._number or any(used)

    def _read(self, message: pb.EnvironmentResponse, name: str) -> Array:
        return unpack_tensor(message.step.observations[self._uids[name]], name)

    def _rows(self, message: pb.EnvironmentResponse, timing: Array) -> list[_Row | None]:
        """Return what an answer says of each lane; None: it has no observation."""
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
        """Return of each lane who acted in the agent's place, and how."""
        uid = self._uids.get("info")
        if uid is None or not _tells_of_intervention(message, uid):
            return [{}] * len(self.lanes)
        info = _info(message, uid)
        return [
            split_intervention(lane_info(info, lane) if self._shape else info)[1] for lane in range(len(self.lanes))
        ]

    def _keep_failures(self, message: pb.EnvironmentResponse, rows: Sequence[_Row | None]) -> None:
        """Keep why lanes have no episode, which is said once for each attempt, until they have one."""
        info = _info(message, self._uids["info"])
        for index, row in enumerate(rows):
            if row is None:
                if "error" in (own := lane_info(info, index)):
                    self._failures[index] = own["error"]
            elif not (row[-2] or row[-1]):
                self._failures.pop(index, None)

    def _share_ends(self, newest: pb.EnvironmentResponse) -> None:
        """Put the ends that wait into one message: each holds one with the observations of all lanes otherwise."""
        ends = [None if lane.closing is None else lane.closing.observed for lane in self.lanes]
        if len({id(end.message) for end in ends if end is not None}) > _MOST_ENDS:
            shared = self._put_together([newest if end is None else end.message for end in ends])
            for end in ends:
                if end is not None:
                    end.message = shared

    def push_error(self, error: RemoteError) -> None:
        """Take the refusal of a Step, to be told in its turn; after the end of an episode every Step is refused."""
        if not self._over and self._error is None:
            self._error = error
            for lane in self.lanes:
                lane.restart()

    def _keep_remarks(self, message: pb.EnvironmentResponse) -> None:
        """Keep what infos say once, whoever is told of the answer."""
        uid = self._uids.get("info")
        if uid is None or uid not in message.step.observations:
            return
        remarks = values.remarks_of(message.step.observations[uid].uint8s.array)
        if remarks is not None:
            self._remarks = self._remarks or bridge_pb2.Value()
            if remarks.HasField("form"):  # the lists of an older one would be merged with its own
                self._remarks.ClearField("form")
            self._remarks.MergeFrom(remarks)

    # What is told

    def wait(self, now: float, *, repeats: bool) -> float:
        """Return the seconds until `take` has something to return, whatever arrives; inf: nobody knows.

        Args:
            now: The time.
            repeats: Whether an episode has begun, so that observations that were told may be told again.
        """
        if self._error is not None or self._is_ready(repeats):
            return 0.0
        patient = now - self._heard < _PATIENCE
        return max(0.0, self._due - now) if repeats and patient and self._has_enough else math.inf

    def _is_ready(self, repeats: bool) -> bool:
        """True if there is something new to tell; where nothing may be repeated, what was asked for has begun."""
        if not self._has_enough:
            return False
        return any(lane.waiting for lane in self.lanes) if repeats else self._newest is not None

    @property
    def _has_enough(self) -> bool:
        """True if there are observations to tell, new or not, of as many lanes as there have to be."""
        return not self.waits_for_all or not any(lane.missing for lane in self.lanes)

    def take(self, now: float, *, repeats: bool) -> pb.EnvironmentResponse | RemoteError | None:
        """Return what there is for a call that waits: an answer, or why there is none; None: it has to wait.

        The newest observation is told again, without a reward, once the frame's time is over in which nothing came.

        Args:
            now: The time.
            repeats: As for `wait`.
        """
        if not self.asked or self.wait(now, repeats=repeats) > 0.0:
            return None
        # From when it was due and not from now, so that delays do not add up. After a long delay from now, so that the
        # caller is not told the same several times at once.
        self._due = max(self._due, now - self.frame) + self.frame
        self.asked -= 1
        # What came before the refusal is told before it.
        if self._error is not None and not self._is_ready(repeats):
            self.asked = 0
            error, self._error = self._error, None
            return error
        return self._tell(repeats)

    def _tell(self, repeats: bool) -> pb.EnvironmentResponse | None:
        if self._newest is None:
            return None
        message, timing = self._newest
        # After a Reset of some lanes the others repeat their observation.
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
        # Last, as remarks are added to the bytes of infos that may have been written anew above.
        if self._remarks is not None:
            data = answer.step.observations[self._uids["info"]].uint8s.array
            found["info"] = np.frombuffer(values.with_remarks(data, self._remarks), np.uint8)
            self._remarks = None
        for name, array in found.items():
            _fill(answer, self._uids[name], array)
        self._handed_out = answer
        return answer

    def _with_observations(self, messages: Sequence[pb.EnvironmentResponse]) -> pb.EnvironmentResponse:
        """Return an answer with the observation and the info of lane i of `messages[i]`, to write the rest into."""
        answer = messages[0]
        if any(message is not answer for message in messages):
            return self._put_together(messages)
        if answer is self._handed_out:  # to be told again
            answer = pb.EnvironmentResponse()
            answer.CopyFrom(messages[0])
        return answer

    def _put_together(self, messages: Sequence[pb.EnvironmentResponse]) -> pb.EnvironmentResponse:
        """Return an answer with the observation and the info of lane i out of `messages[i]`."""
        answer = pb.EnvironmentResponse()
        answer.step.state = pb.RUNNING
        distinct = {id(message): message for message in messages}
        for uid, leaf in self._leaves:
            # Each message is read once, however many lanes are in it.
            arrays = {key: unpack_tensor(message.step.observations[uid]) for key, message in distinct.items()}
            _fill(answer, uid, leaf.pick_lanes([arrays[id(message)] for message in messages]))
        uid = self._uids["info"]
        infos = {key: _info(message, uid) for key, message in distinct.items()}
        picked = pick_lanes([infos[id(message)] for message in messages])
        _fill(answer, uid, np.frombuffer(values.encode(picked), np.uint8))
        return answer


def _fill(answer: pb.EnvironmentResponse, uid: int, array: Array) -> None:
    """Write an observation, in place of the one that is there."""
    tensor = answer.step.observations[uid]
    tensor.Clear()
    fill_tensor(tensor, array)


def _tells_of_intervention(message: pb.EnvironmentResponse, uid: int) -> bool:
    """True if an info may say that somebody else acted; looked for in its bytes, as few do."""
    return ACTION.encode() in message.step.observations[uid].uint8s.array


def _info(message: pb.EnvironmentResponse, uid: int) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the infos of lanes in an answer; raises TensorError where they are none."""
    info: Any = values.decode(message.step.observations[uid].uint8s.array)
    if not isinstance(info, (dict, list)):
        raise TensorError(f"expected infos that are a dict or a list, got {info!r:.80}")
    return info
