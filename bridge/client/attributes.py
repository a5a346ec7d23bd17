"""Attributes, methods and properties of the environments behind a vector environment, by slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from bridge.client.members import Member
from bridge.client.session import property_value
from bridge.client.vector_pool import VectorPool
from bridge.encoding import values
from bridge.errors import PeerError, RefusedError, SettingError, TensorError
from bridge.pb import bridge_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["SlotAttributes", "call_results"]


class SlotAttributes:
    """Reads, sets and calls what the environments of a pool's slots have. The caller holds the turn.

    Args:
        pool: Of the environments.
    """

    def __init__(self, pool: VectorPool) -> None:
        self._pool = pool

    def begin_call(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], slots: Sequence[int] | None = None
    ) -> None:
        """Ask for a call of a method in some slots, or in all; `call_results` waits for the results."""
        lanes = self._lanes_of(range(self._pool.num_envs) if slots is None else slots)

        def send(member: Member) -> None:
            chosen = lanes[member.start]
            member.remote.call(name, args, kwargs, () if len(chosen) == member.lanes else chosen)

        self._ask(f"call of {name}", lanes, send)

    def call_results(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the results of `begin_call` in all slots, one a slot."""
        answers = self._pool.replies(timeout)
        return tuple(result for member, message in answers for result in call_results(message, member.remote.url))

    def call_at(
        self, slots: Sequence[int], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Call a method in some slots; return the results in the order of `slots`."""
        lanes = self._lanes_of(slots)
        self.begin_call(name, args, kwargs, slots)
        found: dict[int, Any] = {}
        for member, message in self._pool.replies():
            results = call_results(message, member.remote.url)
            for lane, result in zip(lanes[member.start], results, strict=True):
                found[member.start + lane] = result
        return tuple(found[slot] for slot in slots)

    def set(self, name: str, items: Sequence[Any], slots: Sequence[int] | None = None) -> None:
        """Set an attribute in the worlds of some slots, or of all.

        Args:
            name: The attribute.
            items: A value for every slot.
            slots: Slots of the worlds to set; all lanes of a world are set together.
        """
        lanes = self._lanes_of(range(self._pool.num_envs) if slots is None else slots)

        def send(member: Member) -> None:
            member.remote.write_property(f"world.attributes.{name}", list(items[member.slots]))

        self._ask(f"setting of {name}", lanes, send)
        self._pool.replies()

    def splits_worlds(self, slots: Sequence[int]) -> bool:
        """Tell whether some slots are not all the lanes of their worlds."""
        lanes = self._lanes_of(slots)
        return any(len(lanes[member.start]) < member.lanes for member in self._pool.members if member.start in lanes)

    def read_property(self, key: str) -> list[tuple[Member, Any]]:
        """Read a property of every world; return each world's value."""
        self._ask(key, self._lanes_of(range(self._pool.num_envs)), lambda member: member.remote.read_property(key))
        return [(member, property_value(message, member.remote.url, True)) for member, message in self._pool.replies()]

    def wrapper_classes(self) -> tuple[list[str], ...]:
        """Return the classes of each slot's wrappers as `module:name`, base classes too; none where nobody can tell."""
        try:
            names = self.read_property("world.wrappers")
        except RefusedError:
            return ([],) * self._pool.num_envs
        return tuple(found for member, found in names for _ in range(member.lanes))

    def _ask(self, purpose: str, lanes: Mapping[int, list[int]], send: Callable[[Member], None]) -> None:
        self._pool.ask_members(purpose, [member for member in self._pool.members if member.start in lanes], send)

    def _lanes_of(self, slots: Sequence[int]) -> dict[int, list[int]]:
        """Return the lanes of each member, by its first slot, that are among some slots."""
        pool = self._pool
        for slot in slots:
            if not 0 <= slot < pool.num_envs:
                raise SettingError(f"expected slots from 0 to {pool.num_envs - 1}, got {slot!r}")
        chosen = set(slots)
        lanes = {
            member.start: [lane for lane in range(member.lanes) if member.start + lane in chosen]
            for member in pool.members
        }
        return {start: found for start, found in lanes.items() if found}


def call_results(message: pb.EnvironmentResponse, url: str) -> list[Any]:
    """Return the results of a method call, one a lane.

    Raises:
        PeerError: They cannot be read.
    """
    try:
        response = bridge_pb2.CallResponse.FromString(message.extension.value)
        return [values.from_value(result) for result in response.results]
    except (TensorError, DecodeError, ValueError) as error:
        raise PeerError(url, f"the result of a call cannot be read: {error}") from error
