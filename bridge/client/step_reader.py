"""Reads the answer to a Step: observation, reward, terminated, truncated and info."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from bridge.client.realtime import RealtimeReader
from bridge.encoding import values
from bridge.encoding.spaces import Column, Layout
from bridge.encoding.step_codec import StepAnswer
from bridge.encoding.tensors import Array, Spec, unpack_tensor
from bridge.errors import PeerError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["SIGNALS", "Batch", "StepMessage", "StepReader", "Transition"]

SIGNALS = ("reward", "terminated", "truncated", "info")
"""The observations that are asked for after those of the observation space, in this order."""
StepMessage: TypeAlias = pb.EnvironmentResponse | StepAnswer
"""The answer to a Step: read by protobuf, or matched without it."""
Transition: TypeAlias = tuple[Any, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated and info of a single environment."""


@dataclasses.dataclass
class Batch:
    """One step's results over all slots, while they come in."""

    columns: list[Column]
    rewards: Array
    terminations: Array
    truncations: Array

    @classmethod
    def empty(cls, layout: Layout, size: int) -> Batch:
        """Make one of `size` slots: rewards 0.0, flags False, and observations that are not initialized."""
        return cls(layout.columns(size), np.zeros(size), np.zeros(size, np.bool_), np.zeros(size, np.bool_))


class StepReader:
    """Reads the answers of one remote.

    Args:
        url: For errors.
        layout: Of the observations.
        leaves: The UID and spec of each of the layout's leaves.
        uids: The UIDs of the observations that carry signals, by name.
        realtime: Reads what only a real-time world answers; None: this is none.
    """

    def __init__(
        self,
        url: str,
        layout: Layout,
        leaves: Sequence[tuple[int, Spec]],
        uids: Mapping[str, int],
        realtime: RealtimeReader | None,
    ) -> None:
        self._url = url
        self._layout = layout
        self._leaves = tuple(leaves)
        self._uids = uids
        self._realtime = realtime
        # Whether an observation is the very array of its tensor.
        self._is_array = layout.is_array
        self.lanes = layout.lanes
        self.wanted = [uid for uid, _ in leaves] + [uids[name] for name in SIGNALS if name in uids]
        """The UIDs to ask for, but for those of a real-time world."""

    def read(self, message: StepMessage, now: float) -> Transition:
        """Return what a single environment answered; the arrays belong to the caller.

        Args:
            message: Its answer.
            now: The client's time, seconds.

        Raises:
            PeerError: An observation is missing, or not of its spec.
        """
        try:
            if isinstance(message, StepAnswer):
                *arrays, reward, _, truncated = message.template.values(message.data, message.start)
                # They may share memory with the message; protobuf's are the caller's already.
                if self._is_array:
                    observation = np.array(arrays[0])
                else:
                    observation = self._layout.unpack([np.array(array) for array in arrays])
                info = {} if message.info == values.EMPTY_DICT else self.read_info(message)
                return observation, reward, message.state == pb.TERMINATED, truncated, info
            tensors, reward, terminated, truncated, info = self._read_tensors(message, now)
            return self._layout.unpack(tensors), float(reward), bool(terminated), bool(truncated), info
        except (TensorError, KeyError, ValueError) as error:
            raise PeerError(self._url, f"its observations cannot be read: {error}") from error

    def read_into(self, message: StepMessage, batch: Batch, slot: int, now: float) -> Any:
        """Write an answer into a batch, from `slot` on.

        Returns:
            The info: a dict of one environment, or of arrays over the lanes.

        Raises:
            PeerError: An observation is missing, or not of its spec.
        """
        try:
            if isinstance(message, StepAnswer):
                *tensors, reward, terminated, truncated = message.arrays()
                if self.lanes is None:
                    terminated = np.asarray(message.state == pb.TERMINATED)
                info: Any = self.read_info(message)
            else:
                tensors, reward, terminated, truncated, info = self._read_tensors(message, now)
            for index, array in enumerate(tensors):
                self._layout.write(batch.columns, index, slot, array)
            stop = slot + (self.lanes or 1)
            batch.rewards[slot:stop] = reward
            batch.terminations[slot:stop] = terminated
            batch.truncations[slot:stop] = truncated
        except (TensorError, KeyError, ValueError) as error:
            raise PeerError(self._url, f"its observations cannot be read: {error}") from error
        return info

    def read_rows(self, answers: Sequence[StepAnswer], batch: Batch, slots: Any) -> None:
        """Write what single environments answered by the same template into a batch, but for the infos.

        Args:
            answers: Of this remote and others like it.
            batch: Where to; its columns are arrays.
            slots: The answers' slots: a slice, or their numbers.

        Raises:
            TensorError: An observation of one of them is not of its space.
        """
        *arrays, rewards, _, truncations = StepAnswer.stack(answers)
        for index, array in enumerate(arrays):
            self._layout.write_rows(batch.columns, index, slots, array)
        batch.rewards[slots] = rewards
        batch.terminations[slots] = np.array([answer.state for answer in answers]) == pb.TERMINATED
        batch.truncations[slots] = truncations

    def read_info(self, answer: StepAnswer) -> Any:
        """Return the info that came with an answer.

        Raises:
            PeerError: It cannot be read.
        """
        try:
            return {} if answer.info is None else values.decode(answer.info)
        except TensorError as error:
            raise PeerError(self._url, f"its info cannot be read: {error}") from error

    def _read_tensors(self, message: pb.EnvironmentResponse, now: float) -> tuple[list[Array], Any, Any, Any, Any]:
        """Return the observation's tensors, and reward, terminated, truncated and info."""
        observations, state = message.step.observations, message.step.state
        for uid, spec in self._leaves:
            if uid not in observations:
                raise PeerError(self._url, f"its answer lacks the observation {spec.name!r} (UID {uid})")
        tensors = [spec.read(observations[uid]) for uid, spec in self._leaves]
        signals = {name: observations[uid] for name, uid in self._uids.items() if uid in observations}
        reward = unpack_tensor(signals["reward"], "reward") if "reward" in signals else 0.0
        truncated: Any = state == pb.INTERRUPTED
        terminated: Any = state == pb.TERMINATED
        if self.lanes is not None:
            terminated = unpack_tensor(signals["terminated"], "terminated")
            truncated = unpack_tensor(signals["truncated"], "truncated")
        elif "truncated" in signals:  # an episode can end in both ways at once, of which the state tells one
            truncated |= bool(unpack_tensor(signals["truncated"], "truncated"))
        info = values.decode(signals["info"].uint8s.array) if "info" in signals else {}
        if self._realtime is not None:
            info = self._realtime.extend(info, observations, now)
        return tensors, reward, terminated, truncated, info
