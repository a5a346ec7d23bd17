"""The members of a vector environment: each a remote, the slots that it fills, and where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bridge.client.remote import Remote, SlotState
from bridge.client.session import ONLINE, State
from bridge.client.step_reader import StepMessage, StepReader
from bridge.errors import EnvironmentFailedError, RemoteError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["SPARE", "Member"]

_RESET_ATTEMPTS = 3
SPARE = -1
"""In place of a first slot: a remote that stands by."""


@dataclasses.dataclass(eq=False)
class Member:
    """One remote, the slots that it fills, and where they are."""

    remote: Remote
    start: int
    """Its first slot; `SPARE`: it stands by."""
    lanes: int
    """The number of its slots."""
    endpoint: str | None = None
    """The key of its endpoint in a directory; None: there is none."""
    slots: slice = dataclasses.field(init=False)
    """Its slots in a batch."""
    answer: StepMessage | None = None
    """A Step's answer that has come and was not handed out yet."""
    last: tuple[StepMessage, StepReader] | None = None
    """The last Step's answer that was handed out, and what reads it: that of the world that it came from."""
    stepping: bool = False
    """Whether the outstanding answer is that of an action."""
    in_episode: bool = False
    """Whether an episode's observation has been handed out and its end has not."""
    settings: Mapping[str, pb.Tensor] | None = None
    """Of the Reset that its next episode begins with."""
    error: RemoteError | None = None
    """Why it is lost, or why its episode was cut off."""
    refused: bool = False
    """Whether `error` is a refusal of its last Reset or Step, rather than the reason of a lost connection."""
    failures: int = 0
    """Attempts in a row to connect or to reset that failed."""
    retry_at: float = 0.0
    """When to try again; monotonic seconds."""
    away_since: float | None = None
    """When its remote was lost, monotonic seconds; None: its slots have an observation, or wait for their first."""

    def __post_init__(self) -> None:
        self.place(self.start, self.lanes)

    def place(self, start: int, lanes: int) -> None:
        """Let it fill `lanes` slots from `start` on."""
        self.start, self.lanes, self.slots = start, lanes, slice(start, start + lanes)

    def abandon_step(self) -> None:
        """Count the step whose result nobody will be handed."""
        if self.stepping:
            self.remote.record.steps_lost += self.lanes
            self.stepping = False

    @property
    def fails_every_reset(self) -> bool:
        """Whether its environment raised in each of the last attempts to reset it."""
        return self.refused and isinstance(self.error, EnvironmentFailedError) and self.failures >= _RESET_ATTEMPTS

    @property
    def state(self) -> SlotState:
        """Where its slots are."""
        state = self.remote.session.state
        if state is State.RUNNING or state is State.ENDED:
            return SlotState.RUNNING
        if state is State.JOINED or state is State.RESETTING:
            return SlotState.RESETTING
        return SlotState.LOST if state is State.LOST or state is State.OFFLINE else SlotState.CONNECTING

    @property
    def connected(self) -> bool:
        """Whether it is in a world."""
        return self.remote.session.state in ONLINE

    @property
    def idle(self) -> bool:
        """Whether it is in a world, and its next episode is still to be asked for."""
        return self.remote.session.state is State.JOINED

    @property
    def ended(self) -> bool:
        """Whether its last answer ended the episode."""
        return self.remote.session.state is State.ENDED

    @property
    def title(self) -> str:
        """Its slots, as a person calls them."""
        last = self.start + self.lanes - 1
        return f"slot {self.start}" if self.lanes == 1 else f"slots {self.start} to {last}"

    @property
    def away(self) -> bool:
        """Whether its remote was lost, which its loop was told, and has no observation since."""
        return self.away_since is not None and self.answer is None and not self.cut_off

    @property
    def single(self) -> bool:
        """Whether it is a single environment rather than lanes."""
        info = self.remote.session.info
        return info is not None and info.lanes is None

    @property
    def waiting(self) -> bool:
        """Whether an answer to an action is outstanding."""
        return self.stepping and self.answer is None and self.state is SlotState.RUNNING

    @property
    def cut_off(self) -> bool:
        """Whether its episode was cut off and nobody was told yet."""
        return self.error is not None and self.in_episode

    @property
    def settled(self) -> bool:
        """Whether there is nothing to wait for: an observation, the news of a cut-off, or nothing was asked."""
        if self.answer is not None or self.cut_off:
            return True
        return self.state is SlotState.RUNNING and not self.stepping
