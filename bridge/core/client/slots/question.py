"""A question to the worlds of slots, and what they have answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from bridge.core.client.slots.slot import Member
from bridge.core.client.world.events import Lost, Replied
from bridge.errors import RemoteError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["Question"]


@dataclasses.dataclass
class Question:
    """Requests for a property or a call that are outstanding."""

    purpose: str
    slots: Sequence[int]
    """The slots that are asked, in the order of the results."""
    lanes: Mapping[Member, list[int]]
    """Their lanes in each world."""
    missing: dict[Member, None]
    """The worlds that have not answered."""
    answers: dict[Member, pb.EnvironmentResponse] = dataclasses.field(default_factory=dict)
    """The answers."""
    failure: RemoteError | None = None
    """The first refusal, or loss."""

    def take(self, member: Member, event: Replied | Lost) -> None:
        """Keep what a world has answered, or that it was lost."""
        if member in self.missing:
            del self.missing[member]
            self.failure = self.failure or event.error
            if isinstance(event, Replied):
                self.answers[member] = event.message
