"""Writes Steps, and reads their answers: observation, reward, terminated, truncated and info."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Space

from bridge.core.client.world.world_request import WorldRequest
from bridge.core.encoding import values
from bridge.core.encoding.infos import PACE
from bridge.core.encoding.names import AttributeNames, KnownNames
from bridge.core.encoding.spaces import Column, Layout
from bridge.core.encoding.step_codec import StepAnswer, StepCodec
from bridge.core.encoding.tensors import Array, Spec, fill_tensor, unpack_tensor
from bridge.core.logs import warn
from bridge.errors import UNREADABLE, PeerError, TensorError
from bridge.pb import bridge_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

if TYPE_CHECKING:
    from bridge.core.client.realtime.reader import RealtimeReader

__all__ = ["SIGNALS", "Batch", "BegunAnswer", "StepMessage", "StepReader", "StepWriter", "Transition"]

SIGNALS = ("reward", "terminated", "truncated", "info")
"""The observations that are requested after those of the observation space, in this order."""


class BegunAnswer(NamedTuple):
    """The answer to a Step that ended episodes of lanes, after these have begun their next ones."""

    ended: pb.EnvironmentResponse | StepAnswer
    """The answer; its observations are valid for all other lanes."""
    begun: bridge_pb2.Value.Begun
    """How the ended lanes began."""


StepMessage: TypeAlias = pb.EnvironmentResponse | StepAnswer | BegunAnswer
"""The answer to a Step: read by protobuf, or matched without it."""
Transition: TypeAlias = tuple[Any, Any, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated and info of a single environment; the reward is of any type."""

_MOST_NOTES = 100
_INTEGERS = (int, np.int64, np.int32)
# The most integer actions whose Steps are remembered.
_MOST_KNOWN = 1024
# Faster than a loop in Python: it is called in each step of many slots.
_STATE = operator.attrgetter("state")


@dataclasses.dataclass
class Batch:
    """One step's results over all slots, while the answers arrive."""

    columns: list[Column]
    rewards: Array
    terminations: Array
    truncations: Array

    @classmethod
    def empty(
        cls, layout: Layout, size: int, reward_space: Space[Any] | None = None, columns: list[Column] | None = None
    ) -> Batch:
        """Make a batch of `size` slots: rewards 0.0, flags False, and uninitialized observations.

        Args:
            layout: The layout of the observations.
            size: The number of slots.
            reward_space: The reward space of one environment; None: rewards are floats.
            columns: Columns for the observations; None: new ones.
        """
        if reward_space is None:
            rewards: Array = np.zeros(size)
        else:
            rewards = np.zeros((size, *(reward_space.shape or ())), reward_space.dtype)
        return cls(columns or layout.columns(size), rewards, np.zeros(size, np.bool_), np.zeros(size, np.bool_))


class StepWriter:
    """Writes the Steps of one remote.

    Args:
        request: The world that was requested; it limits the size of a Step.
        layout: The layout of the actions.
        uids: The UID of each of the layout's leaves.
        wanted: The UIDs of the observations that Steps request.
        codec: Writes Steps without protobuf; None: protobuf does.
    """

    def __init__(
        self, request: WorldRequest, layout: Layout, uids: Sequence[int], wanted: list[int], codec: StepCodec | None
    ) -> None:
        self._request, self._layout, self._uids, self._codec = request, layout, uids, codec
        self.form = None if codec is None or layout.lanes is not None else codec.form
        """A key that is equal for remotes whose Steps `write_steps` may write together; None: it may not."""
        self._known: dict[Any, bytes] = {}
        self.ask_for(wanted)

    def ask_for(self, wanted: list[int]) -> None:
        """Request other observations from now on."""
        self._wanted = wanted
        self.first_step = pb.EnvironmentRequest(step=pb.StepRequest(requested_observations=wanted)).SerializeToString()
        """The Step without an action, with which an episode begins."""
        # Remembered Steps request the earlier observations.
        self._known.clear()

    def write_action(self, action: Any) -> bytes:
        """Return the Step with an action of a single environment. Steps with an integer are remembered.

        Raises:
            InvalidActionError: The action is not in the action space.
            SettingError: The Step is too large to be sent.
        """
        # By exact type: True and 1.0 are the same key as 1, but not the same action.
        key = action if type(action) in _INTEGERS else None
        if key is not None and (known := self._known.get(key)) is not None:
            return known
        return self._write_step(self._layout.pack_action(action), key)

    def _write_step(self, arrays: Sequence[Array], key: int | None) -> bytes:
        """Return the Step with the arrays of an action's tensors; remember it if there is a key.

        Raises:
            SettingError: The Step is too large.
        """
        data = self._codec.write_request(arrays) if self._codec is not None else None
        # The codec writes tensors of one form only; protobuf writes all other actions.
        if data is None:
            request = pb.EnvironmentRequest()
            for uid, array in zip(self._uids, arrays, strict=True):
                fill_tensor(request.step.actions[uid], array)
            request.step.requested_observations.extend(self._wanted)
            data = request.SerializeToString()
        # Here, before anything is sent or changed: a Step that is not sent gets no answer.
        if len(data) > self._request.max_message_bytes:
            raise self._request.too_large(len(data))
        if key is not None and len(self._known) < _MOST_KNOWN:
            self._known[key] = data
        return data

    def write_columns(self, columns: Sequence[Column], slot: int) -> bytes:
        """Return the Step with the actions of its slots, beginning at `slot`. Steps with an integer are remembered."""
        key, column = None, columns[0] if len(columns) == 1 and self.form is not None else None
        # Discrete actions: few differ, and each is a hashable number.
        if type(column) is np.ndarray and column.ndim == 1 and column.dtype.kind == "i":
            key = column.item(slot)
            if (known := self._known.get(key)) is not None:
                return known
        return self._write_step(self._layout.pack_columns(columns, slot), key)

    def write_steps(self, columns: Sequence[Column], slots: Sequence[int]) -> list[bytes] | None:
        """Return the Steps with the actions of some slots; None: the caller must use `write_columns`."""
        arrays = [column for column in columns if isinstance(column, np.ndarray)]
        if self._codec is None or len(arrays) < len(columns):
            return None
        if len(slots) < len(arrays[0]):
            arrays = [array[list(slots)] for array in arrays]
        # Discrete actions, as in `write_columns`: Steps that were sent before are remembered.
        keys: list[Any] | None = None
        if len(arrays) == 1 and arrays[0].ndim == 1 and arrays[0].dtype.kind == "i":
            known, keys = self._known, arrays[0].tolist()
            with contextlib.suppress(KeyError):
                return [known[key] for key in keys]
        found = self._codec.write_requests(arrays)
        # All have the same size.
        if found and len(found[0]) > self._request.max_message_bytes:
            raise self._request.too_large(len(found[0]))
        if found and keys is not None and len(self._known) < _MOST_KNOWN:
            self._known.update(zip(keys, found, strict=True))
        return found


@dataclasses.dataclass(eq=False)
class StepReader:
    """Reads the answers of one remote."""

    url: str
    """The URL of the server, for errors."""
    layout: Layout
    """The layout of the observations."""
    leaves: Sequence[tuple[int, Spec]]
    """The UID and spec of each of the layout's leaves."""
    uids: Mapping[str, int]
    """The UIDs of the observations for signals, by name."""
    realtime: RealtimeReader | None
    """Reads the signals of a real-time world; None: this is none."""
    allowance: float = 0.0
    """Seconds that a step may take longer so that a person can follow it, from the last info with a pace."""
    failed: Sequence[int] = ()
    """The lanes whose environments failed in the last answer; `error` in their infos says why."""
    begins_in_step: bool = False
    """True if the server was asked to begin the next episodes of ended lanes in the same Step."""
    begun: bridge_pb2.Value.Begun | None = None
    """How ended lanes of the last answer began their next episodes; None: the answer does not say."""
    names: KnownNames | None = None
    """The names of the environment's attributes and methods, from the join and later infos; None: they are unknown."""
    _form: Any = None
    _rewards_as: Any = None
    """The last reward in an info, whose type the following rewards have; None: they are floats, or arrays."""
    _told_reward: Any = values.UNCHANGED
    """The reward in the info of the current answer."""
    agents: Sequence[str] = ()
    """With several agents: those alive according to the last answer; empty: it does not say."""
    missing: Sequence[str] = ()
    """The parts of that answer that the environment did not return, see `StepInfo`."""
    _notes: int = 0

    def __post_init__(self) -> None:
        # True if an observation is the array of its tensor.
        self._is_array = self.layout.is_array
        self.lanes = self.layout.lanes
        self.wanted = [uid for uid, _ in self.leaves] + [self.uids[name] for name in SIGNALS if name in self.uids]
        """The UIDs to request, except those of a real-time world."""

    def read(self, message: StepMessage, now: float) -> Transition:
        """Return a single environment's answer; the caller owns the arrays.

        Args:
            message: The answer.
            now: The client's time, seconds.

        Raises:
            PeerError: An observation is missing, or does not fit its spec.
        """
        try:
            if isinstance(message, StepAnswer):
                # The info may say how the observation is built.
                info = {} if message.info == values.EMPTY_DICT else self.read_info(message)
                *arrays, reward, _, truncated = message.template.values(message.data, message.start)
                # They may share memory with the message; arrays from protobuf are the caller's already.
                if self._is_array:
                    observation = np.array(arrays[0])
                else:
                    observation = self.layout.unpack([np.array(array) for array in arrays], form=self._form)
                # A copy, for the same reason.
                if type(reward) is not float:
                    reward = np.array(reward)
                if self._rewards_as is not None:
                    reward = self._typed(reward)
                return observation, reward, message.state == pb.TERMINATED, truncated, info
            assert isinstance(message, pb.EnvironmentResponse), "only lanes begin their episodes in a step"
            tensors, reward, terminated, truncated, info = self._read_tensors(message, now)
            reward = float(reward) if np.ndim(reward) == 0 else np.array(reward)
            if self._rewards_as is not None:
                reward = self._typed(reward)
            observation = self.layout.unpack(tensors, form=self._form)
            return observation, reward, bool(terminated), bool(truncated), info
        except UNREADABLE as error:
            raise PeerError(self.url, f"its observations cannot be read: {error}") from error

    def _typed(self, number: Any) -> Any:
        """Return a reward in the environment's own type."""
        told, self._told_reward = self._told_reward, values.UNCHANGED
        if told is not values.UNCHANGED:
            # From here on floats are returned as they are.
            if type(told) is float:
                self._rewards_as = None
            return told
        if isinstance(self._rewards_as, np.ndarray):
            return np.full(self._rewards_as.shape, number, self._rewards_as.dtype)
        return type(self._rewards_as)(number)

    def take_joint(self) -> tuple[Sequence[str], Sequence[str]]:
        """Return `agents` and `missing` of the last answer, once."""
        found = self.agents, self.missing
        self.agents = self.missing = ()
        return found

    def check_begun(self, *, stepped: bool) -> None:
        """Raise PeerError if the last answer says how lanes began, but is not for a Step with actions."""
        if not stepped and self.begun is not None:
            raise PeerError(self.url, f"its observations cannot be read: {_unasked(self.take_begun())}")

    def take_begun(self) -> bridge_pb2.Value.Begun | None:
        """Return `begun` of the last answer, once."""
        begun, self.begun = self.begun, None
        return begun

    def take_remarks(self, answer: StepMessage) -> None:
        """Apply the remarks of an unread answer that matter for later ones.

        Raises:
            PeerError: The answer cannot be read.
        """
        if isinstance(answer, BegunAnswer):
            self._decode_info(answer.begun.info or values.EMPTY_DICT)
        elif isinstance(answer, StepAnswer):
            self.read_info(answer)
        elif "info" in self.uids and self.uids["info"] in answer.step.observations:
            self._decode_info(answer.step.observations[self.uids["info"]].uint8s.array)
        self._told_reward = values.UNCHANGED
        if (begun := self.take_begun()) is not None and begun.info:
            self._decode_info(begun.info)

    def read_into(self, message: StepMessage, batch: Batch, slot: int, now: float) -> Any:
        """Write an answer into a batch, beginning at `slot`.

        Returns:
            The info: a dict of one environment, or of arrays over the lanes.

        Raises:
            PeerError: An observation is missing, or does not fit its spec.
        """
        if isinstance(message, BegunAnswer):
            self._write_last(message, batch, slot)
            return self.read_begun(message.begun, batch, slot)
        try:
            if isinstance(message, StepAnswer):
                *tensors, reward, terminated, truncated = message.arrays()
                if self.lanes is None:
                    terminated = np.asarray(message.state == pb.TERMINATED)
                info: Any = self.read_info(message)
            else:
                tensors, reward, terminated, truncated, info = self._read_tensors(message, now)
            self._write_tensors(tensors, batch, slot)
            stop = slot + (self.lanes or 1)
            batch.rewards[slot:stop] = reward
            batch.terminations[slot:stop] = terminated
            batch.truncations[slot:stop] = truncated
        except UNREADABLE as error:
            raise PeerError(self.url, f"its observations cannot be read: {error}") from error
        return info

    def write_again(self, message: StepMessage, batch: Batch, slot: int) -> None:
        """Write the observations of an answer that was read before into a batch, beginning at `slot`."""
        # Only the observations: the info's remarks, which are sent once, would be applied again.
        self._write_last(message, batch, slot)
        if isinstance(message, BegunAnswer):
            self.write_rows(message.begun, batch.columns, slot)

    def _write_last(self, message: StepMessage, batch: Batch, slot: int) -> None:
        """Write the observations of an answer that was read before, as they were before lanes began again."""
        ended = message.ended if isinstance(message, BegunAnswer) else message
        if isinstance(ended, StepAnswer):
            tensors: Sequence[Array] = ended.arrays(len(self.leaves))
        else:
            tensors = [spec.read(ended.step.observations[uid]) for uid, spec in self.leaves]
        self._write_tensors(tensors, batch, slot)
        if ended is not message:
            # Observations that filled a whole column are parts of the message.
            batch.columns[:] = [column.copy() for column in batch.columns]

    def _write_tensors(self, tensors: Sequence[Array], batch: Batch, slot: int) -> None:
        for index, array in enumerate(tensors):
            self.layout.write(batch.columns, index, slot, array)

    def read_begun(self, begun: bridge_pb2.Value.Begun, batch: Batch, slot: int) -> Any:
        """Write the first observations of lanes' next episodes into a batch with the observations of all lanes.

        Args:
            begun: How the lanes began.
            batch: The batch; no other code uses its columns.
            slot: The slot of the first lane.

        Returns:
            The info, as `read_into`.

        Raises:
            PeerError: An observation is missing, or does not fit its spec.
        """
        try:
            self.write_rows(begun, batch.columns, slot)
            info = self._decode_info(begun.info or values.EMPTY_DICT)
            if self.begun is not None:
                raise _unasked(self.take_begun())
        except UNREADABLE as error:
            raise PeerError(self.url, f"how lanes began their episodes cannot be read: {error}") from error
        return info

    def write_rows(self, begun: bridge_pb2.Value.Begun, columns: list[Column], slot: int) -> None:
        """Write the first observations of lanes into columns, beginning at `slot`; raises TensorError."""
        slots, rows = [slot + lane for lane in begun.lanes], begun.rows
        if len(rows) != len(self.leaves):
            raise TensorError(f"expected rows of {len(self.leaves)} observations, got {len(rows)}")
        for index, data in enumerate(rows):
            self.layout.write_lanes(columns, index, slots, data)

    def read_rows(self, answers: Sequence[StepAnswer], batch: Batch, slots: Any) -> None:
        """Write single environments' answers of the same template into a batch, except for the infos.

        Args:
            answers: The answers of this remote and others like it.
            batch: The batch; its columns are arrays.
            slots: The answers' slots: a slice, or their numbers.

        Raises:
            TensorError: An observation is not in its space.
        """
        *arrays, rewards, _, truncations = StepAnswer.stack(answers)
        for index, array in enumerate(arrays):
            self.layout.write_rows(batch.columns, index, slots, array)
        batch.rewards[slots] = rewards
        batch.terminations[slots] = np.array(list(map(_STATE, answers))) == pb.TERMINATED
        batch.truncations[slots] = truncations

    def read_info(self, answer: StepAnswer) -> Any:
        """Return the info of an answer.

        Raises:
            PeerError: The info cannot be read.
        """
        try:
            return {} if answer.info is None else self._decode_info(answer.info)
        except TensorError as error:
            raise PeerError(self.url, f"its info cannot be read: {error}") from error

    def _decode_info(self, data: bytes) -> Any:
        """Return an info; apply the form of observations in it, and warn the user of values that were not sent."""
        if data == values.EMPTY_DICT:  # the usual case
            self.agents = self.missing = self.failed = ()
            self.begun = None
            return {}
        told = values.decode_step_info(data)
        info, notes, form, reward = told[:4]
        self.agents, self.missing, failed, self.begun = told[4:]
        self.failed = [lane for lane in failed if 0 <= lane < (self.lanes or 0)] if failed else ()
        # Otherwise it would be found when the infos of all slots are joined, and fail those of other servers too.
        if not isinstance(info, dict) and not (
            isinstance(info, list) and len(info) == self.lanes and all(isinstance(own, dict) for own in info)
        ):
            raise TensorError(f"expected a dict, or a list of one for each lane, got {info!r:.80}")
        # Sent only if it changes: it applies to the following answers.
        if form is not values.UNCHANGED:
            self._form = form
        if reward is not values.UNCHANGED:
            if not isinstance(reward, (bool, int, float, np.bool_, np.number, np.ndarray)) or np.size(reward) != 1:
                raise TensorError(f"expected a number as the reward in an info, got {reward!r:.80}")
            self._rewards_as = self._told_reward = reward
        if info:
            # It stays after the person has left: a late server then gets at most a second more.
            self.allowance = _allowance(info) or self.allowance
        # Sent only if a reset has changed them.
        if notes and isinstance(notes[-1], AttributeNames):
            self.names, notes = KnownNames(notes[-1]), notes[:-1]
        # As many as our servers send, because Python remembers warnings for the lifetime of the process.
        for note in notes[: _MOST_NOTES - self._notes]:
            warn(f"{self.url}: {note:.1000}")
        self._notes = min(_MOST_NOTES, self._notes + len(notes))
        # Last, so that remarks of an unread answer are still applied.
        if self.begun is not None and not self.begins_in_step:
            raise _unasked(self.take_begun())
        return info

    def _read_tensors(self, message: pb.EnvironmentResponse, now: float) -> tuple[list[Array], Any, Any, Any, Any]:
        """Return the observation's tensors, and reward, terminated, truncated and info."""
        observations, state = message.step.observations, message.step.state
        for uid, spec in self.leaves:
            # Checked first, because a protobuf map creates an empty tensor for a missing key.
            if uid not in observations:
                raise PeerError(self.url, f"its answer lacks the observation {spec.name!r} (UID {uid})")
        tensors = [spec.read(observations[uid]) for uid, spec in self.leaves]
        signals = {name: observations[uid] for name, uid in self.uids.items() if uid in observations}
        # Another package's server may have no reward (D-24).
        reward = unpack_tensor(signals["reward"], "reward") if "reward" in signals else 0.0
        truncated: Any = state == pb.INTERRUPTED
        terminated: Any = state == pb.TERMINATED
        if self.lanes is not None:
            terminated = unpack_tensor(signals["terminated"], "terminated")
            truncated = unpack_tensor(signals["truncated"], "truncated")
        elif "truncated" in signals:  # an episode can end in both ways at once; the state has only one
            truncated |= bool(unpack_tensor(signals["truncated"], "truncated"))
        info = self._decode_info(signals["info"].uint8s.array) if "info" in signals else {}
        if self.realtime is not None:
            info = self.realtime.extend(info, observations, now)
        return tensors, reward, terminated, truncated, info


def _unasked(begun: bridge_pb2.Value.Begun | None) -> TensorError:
    """Return the error for an answer that says how lanes began, although that was not requested."""
    lanes = [] if begun is None else list(begun.lanes)
    return TensorError(f"expected no lanes that begin anew within this answer, got the lanes {lanes!s:.80}")


def _allowance(info: Any) -> float:
    """Return the seconds between two steps at the pace in an info, at most one second; 0: it has none."""
    # All lanes of a world have the same pace.
    first = info[0] if isinstance(info, list) else info
    pace = first.get(PACE) if isinstance(first, Mapping) else None
    if isinstance(pace, np.ndarray):
        pace = pace.reshape(-1)[0].item() if pace.size else None
    return 1 / max(1.0, pace) if isinstance(pace, float) else 0.0
