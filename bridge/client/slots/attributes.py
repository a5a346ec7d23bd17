"""Attributes, methods and properties of the environments behind a vector environment, by slot."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from bridge.client.slots.slot import CONNECTING, Member
from bridge.client.slots.vector_pool import VectorPool
from bridge.client.world.events import Lost, Replied
from bridge.client.world.extensions import property_value
from bridge.encoding import values
from bridge.errors import (
    ConnectionLostError,
    NothingPendingError,
    PeerError,
    RefusedError,
    RemoteError,
    RemoteTimeoutError,
    SettingError,
    TensorError,
)
from bridge.pb import bridge_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["SlotAttributes", "call_results", "looked_up"]


@dataclasses.dataclass
class _Question:
    """Requests for a property or a call that are outstanding."""

    purpose: str
    missing: dict[Member, None]
    """Those that have not answered."""
    answers: dict[Member, pb.EnvironmentResponse] = dataclasses.field(default_factory=dict)
    """The answers."""
    failure: RemoteError | None = None
    """The first refusal, or loss."""


class SlotAttributes:
    """Reads, sets and calls what the environments of a pool's slots have. The caller holds the turn.

    Args:
        pool: Of the environments.
    """

    def __init__(self, pool: VectorPool) -> None:
        self._pool = pool
        self._question: _Question | None = None

    @property
    def asking(self) -> bool:
        """True if a question was asked whose answers were not taken."""
        return self._question is not None

    def begin_call(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], slots: Sequence[int] | None = None
    ) -> None:
        """Ask for a call of a method in some slots, or in all; `call_results` waits for the results."""
        lanes = self._lanes_of(slots)

        def send(member: Member) -> None:
            chosen = lanes[member]
            member.remote.call(name, args, kwargs, () if len(chosen) == member.lanes else chosen)

        self._ask(f"call of {name}", lanes, send)

    def call_results(self, timeout: float | None = None, slots: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Wait for the results of `begin_call` in the same slots; return one a slot, in their order."""
        lanes, found = self._lanes_of(slots), dict[int, Any]()
        for member, message in self._replies(timeout):
            results = call_results(message, member.remote.url)
            found.update(zip((member.start + lane for lane in lanes[member]), results, strict=True))
        return tuple(found[slot] for slot in (range(self._pool.num_envs) if slots is None else slots))

    def set(self, name: str, items: Sequence[Any], slots: Sequence[int] | None = None) -> None:
        """Set an attribute in the worlds of some slots, or of all.

        Args:
            name: The attribute.
            items: A value for every slot.
            slots: Slots of the worlds to set; all lanes of a world are set together.
        """

        def send(member: Member) -> None:
            member.remote.write_property(f"world.attributes.{name}", list(items[member.slots]))

        self._ask(f"setting of {name}", self._lanes_of(slots), send)
        self._replies()

    def splits_worlds(self, slots: Sequence[int]) -> bool:
        """Tell whether some slots are not all the lanes of their worlds."""
        return any(len(lanes) < member.lanes for member, lanes in self._lanes_of(slots).items())

    def read_property(self, key: str) -> list[tuple[Member, Any]]:
        """Read a property of every world; return each world's value."""
        self._ask(key, self._pool.members, lambda member: member.remote.read_property(key))
        return [(member, property_value(message, member.remote.url, True)) for member, message in self._replies()]

    def wrapper_classes(self) -> tuple[list[str], ...]:
        """Return the classes of each slot's wrappers as `module:name`, base classes too; none where nobody can tell."""
        try:
            names = self.read_property("world.wrappers")
        except RefusedError:
            return ([],) * self._pool.num_envs
        return tuple(found for member, found in names for _ in range(member.lanes))

    def _ask(self, purpose: str, members: Collection[Member], send: Callable[[Member], None]) -> None:
        """Send a request to each of some worlds; `_replies` waits for what they answer."""
        self._pool.drain()
        for member in members:
            if not member.remote.connected or member.phase in CONNECTING:
                raise ConnectionLostError(
                    member.remote.url, f"no {purpose} while it is {member.state.name.lower()}: {member.error}"
                )
        for member in members:
            send(member)
        self._question = _Question(purpose, dict.fromkeys(members))

    def _replies(self, timeout: float | None = None) -> list[tuple[Member, pb.EnvironmentResponse]]:
        """Wait for all answers to the question; after the pool's own timeout those that are late are lost."""
        pool, question = self._pool, self._question
        if question is None:
            raise NothingPendingError("nothing was asked", "call")
        missing = question.missing
        deadline = time.monotonic() + (pool.timeout if timeout is None else timeout)
        while missing:
            event, source = pool.next_event(deadline)
            if source is None:
                raise self._late(question, timeout)
            if isinstance(event, Replied):
                if source in missing:
                    del missing[source]
                    question.answers[source] = event.message
                question.failure = question.failure or event.error
            elif event is not None:
                pool.handle(event, source)
                if isinstance(event, Lost) and source in missing:
                    del missing[source]
                    question.failure = question.failure or event.error
        self._question = None
        if question.failure is not None:
            raise question.failure
        return [(member, question.answers[member]) for member in pool.members if member in question.answers]

    def _late(self, question: _Question, timeout: float | None) -> RemoteTimeoutError:
        late = list(question.missing)
        urls = ", ".join(member.remote.url for member in late)
        if timeout is not None:
            return RemoteTimeoutError(urls, f"no answer to {question.purpose} within {timeout:g} s")
        reason = f"no answer to {question.purpose} within {self._pool.timeout:g} s"
        for member in late:
            self._pool.lose(member, member.remote.give_up(RemoteTimeoutError(member.remote.url, reason)))
        self._question = None
        return RemoteTimeoutError(urls, reason)

    def abandon(self) -> None:
        """Drop the answers that are still to come."""
        if self._question is not None:
            for member in self._question.missing:
                member.remote.session.abandon_questions()
            self._question = None

    def _lanes_of(self, slots: Iterable[int] | None) -> dict[Member, list[int]]:
        """Return the lanes of each member that are among some slots; None: all are."""
        pool = self._pool
        lanes: dict[Member, list[int]] = {}
        for slot in sorted(set(range(pool.num_envs) if slots is None else slots)):
            if not 0 <= slot < pool.num_envs:
                raise SettingError(f"expected slots from 0 to {pool.num_envs - 1}, got {slot!r}")
            member = pool.member_at[slot]
            lanes.setdefault(member, []).append(slot - member.start)
        return lanes


def looked_up(message: pb.EnvironmentResponse, url: str) -> tuple[Any, bool]:
    """Return the value of an attribute that was looked at, and whether it is a method, which has none.

    Raises:
        PeerError: The answer cannot be read.
    """
    results = call_results(message, url)
    is_method = bridge_pb2.CallResponse.FromString(message.extension.value).is_method
    if not results and not is_method:
        raise PeerError(url, "it answers with neither the value of an attribute nor that it is a method")
    return (None if is_method else results[0]), is_method


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
