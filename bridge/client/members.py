"""The members of a vector environment: connecting, waiting, losing, replacing, and what their answers hold."""

from __future__ import annotations

import dataclasses
import queue
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from bridge.client.poller import Poller
from bridge.client.remote import Delivery, Remote, SlotState
from bridge.client.session import Event, Joined, Lost, Refused, State, StepAnswered
from bridge.client.step_reader import Batch, StepMessage
from bridge.client.world_request import WorldInfo, WorldRequest
from bridge.errors import (
    ClosedError,
    PeerError,
    RemoteError,
    RemoteTimeoutError,
    SettingError,
    TensorError,
)
from bridge.logs import SafeLog
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.spaces import Layout
from bridge.step_codec import StepAnswer
from bridge.tensors import Array

__all__ = ["SPARE", "Member", "MemberVectorEnv", "Results"]

SPARE = -1
"""In place of a first slot: a remote that stands by."""
_BACKOFF = (0.1, 10.0)
# Seconds between two looks at what has come, beyond which the remotes are not to blame for what is late.
_POLL_GAP = 1.0

_log = SafeLog(__name__)


@dataclasses.dataclass
class Member:
    """One remote, the slots that it fills, and where they are."""

    remote: Remote
    start: int
    """Its first slot; `SPARE`: it stands by."""
    lanes: int
    """The number of its slots."""
    answer: StepMessage | None = None
    """A Step's answer that has come and was not handed out yet."""
    last: StepMessage | None = None
    """The last Step's answer that was handed out."""
    stepping: bool = False
    """Whether the outstanding answer is that of an action."""
    in_episode: bool = False
    """Whether an episode's observation has been handed out and its end has not."""
    settings: Mapping[str, pb.Tensor] | None = None
    """Of the Reset that its next episode begins with."""
    error: RemoteError | None = None
    """Why it is lost, or why its episode was cut off."""
    failures: int = 0
    """Attempts in a row to connect or to reset that failed."""
    retry_at: float = 0.0
    """When to try again; monotonic seconds."""

    def abandon_step(self) -> None:
        """Count the step whose result nobody will be handed."""
        if self.stepping:
            self.remote.record.steps_lost += self.lanes
            self.stepping = False

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
    def idle(self) -> bool:
        """Whether it is in a world, and its next episode is still to be asked for."""
        return self.remote.session.state is State.JOINED

    @property
    def ended(self) -> bool:
        """Whether its last answer ended the episode."""
        return self.remote.session.state is State.ENDED

    @property
    def slots(self) -> slice:
        """Its slots in a batch."""
        return slice(self.start, self.start + self.lanes)

    @property
    def single(self) -> bool:
        """Whether it is a single environment rather than lanes."""
        return self.remote.info is not None and self.remote.info.lanes is None

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


@dataclasses.dataclass
class Results:
    """What one `reset` or `step` gathered, before it is given the form that a caller wants."""

    batch: Batch
    """Columns and flags over all slots; the columns of slots that are not `valid` hold nothing."""
    valid: Array
    """Which slots have an observation, `(num_envs,)`."""
    infos: list[tuple[Member, Any]]
    """The infos as they came: a dict a slot, or of arrays over a world's lanes."""
    errors: dict[int, RemoteError]
    """Why an episode was cut off, by slot."""


class MemberVectorEnv(VectorEnv[Any, Any, Array]):
    """What a vector environment of remotes stands on: members whose remotes come, go and answer by themselves."""

    _members: list[Member]
    _spares: list[Member]
    _member_of: dict[Remote, Member]
    _poller: Poller[Delivery]
    _timeout: float
    _max_message_bytes: int
    _transport: str
    _shared: bool
    """Whether some remotes are in the same place."""
    _observation_layout: Layout
    _jitter: random.Random
    _waits_for_lanes: bool
    _question: Any
    _has_errors: bool
    """Whether a member may have an error."""
    _all_running: bool
    """Whether every slot has given what was asked of it, and is in an episode."""
    _polled_at: float
    """When it was last seen what has come."""

    def _connect_all(self, requests: list[WorldRequest], num_envs: int | None) -> None:
        """Join a world for each world_request, all at once, and further ones where `num_envs` asks for more slots."""
        if num_envs is not None and (not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 1):
            raise SettingError(f"expected num_envs to be a positive integer, got {num_envs!r}")
        places = {(world_request.address.scheme, world_request.address.target) for world_request in requests}
        self._shared = len(places) < max(len(requests), num_envs or 0)
        self._add_members(requests)
        if num_envs is None:
            return
        have = sum(member.lanes for member in self._members)
        if have < num_envs and (num_envs - have) % have == 0:
            self._add_members(requests * ((num_envs - have) // have))
        elif have != num_envs:
            lanes = ", ".join(f"{member.remote.url} ({member.lanes})" for member in self._members)
            raise SettingError(
                f"num_envs={num_envs} is no multiple of the {have} slots that the URLs give: {lanes}. "
                "A world of N lanes fills N slots"
            )

    def _add_members(self, requests: list[WorldRequest]) -> None:
        first = len(self._members)
        for world_request in requests:
            member = self._new_member(world_request, 0)
            self._members.append(member)
            self._member_of[member.remote] = member
            member.remote.open()
        new = self._members[first:]
        deadline = time.monotonic() + self._timeout
        while any(member.state is SlotState.CONNECTING for member in new):
            answer, source = self._next_answer(deadline)
            if source is None:
                late = [member.remote for member in new if member.state is SlotState.CONNECTING]
                reason = late[0].late("to join a world", self._timeout).reason
                raise RemoteTimeoutError(", ".join(remote.url for remote in late), reason)
            if answer is None:
                continue
            if isinstance(answer, Lost):
                raise answer.error
        start = self._members[first - 1].slots.stop if first else 0
        for member in new:
            member.start, member.lanes = start, member.remote.slots
            start += member.lanes
            self._check_spaces(member)

    def _new_member(self, world_request: WorldRequest, start: int) -> Member:
        return Member(
            Remote(world_request, self._poller, self._max_message_bytes, self._transport, shared=self._shared), start, 1
        )

    def _add_spare(self, world_request: WorldRequest) -> None:
        """Connect a world that stands by, without waiting for it."""
        spare = self._new_member(world_request, SPARE)
        self._spares.append(spare)
        self._member_of[spare.remote] = spare
        self._open(spare)

    def _open(self, member: Member) -> None:
        """Start to connect."""
        member.remote.session.deadline = time.monotonic() + self._timeout
        member.remote.open()

    def _replace(self, member: Member) -> bool:
        """Let a spare that stands ready take over the slots of a remote that is lost; return whether there was one."""
        for spare in self._spares:
            if spare.idle and spare.lanes == member.lanes and spare.single == member.single:
                member.remote, spare.remote = spare.remote, member.remote
                if self._waits_for_lanes:
                    member.remote.session.wait_for_all()
                self._member_of[member.remote], self._member_of[spare.remote] = member, spare
                spare.error, spare.failures = member.error, member.failures
                spare.retry_at, member.failures = member.retry_at, 0
                _log.warning("%s takes over the slots of %s", member.remote.url, spare.remote.url)
                return True
        return False

    def _check_spaces(self, member: Member) -> None:
        mine, first = member.remote.info, self._world_info()
        if mine is None or (mine.observation_space, mine.action_space) != (first.observation_space, first.action_space):
            got = (mine.observation_space, mine.action_space) if mine else None
            raise SettingError(
                f"{member.remote.url} has the spaces {got}, but {self._members[0].remote.url} has "
                f"{(first.observation_space, first.action_space)}; one vector environment takes worlds of equal spaces"
            )

    def _world_info(self) -> WorldInfo:
        world_info = self._members[0].remote.info
        if world_info is None:
            raise ClosedError("this vector environment never joined a world")
        return world_info

    # What comes in

    def _next_answer(self, deadline: float) -> tuple[Event | None, Member | None]:
        """Take one delivery; (None, None) once the deadline has passed."""
        try:
            remote, number, what = self._poller.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None, None
        return remote.receive(number, what), self._member_of[remote]

    def _next_answer_nowait(self) -> tuple[Event | None, Member | None]:
        """Take one delivery that is here already; (None, None): there is none."""
        try:
            remote, number, what = self._poller.get_nowait()
        except queue.Empty:
            return None, None
        return remote.receive(number, what), self._member_of[remote]

    def _handle(self, event: Event, member: Member) -> None:
        """Let an event change the member that it came for."""
        if member.start == SPARE:
            self._handle_spare(event, member)
        elif isinstance(event, StepAnswered):
            member.answer = event.message
            if not member.stepping:  # the first observation of an episode
                member.failures, member.settings = 0, None
                member.remote.record.back(time.monotonic())
        elif isinstance(event, Joined):
            if self._fits(member, "it came back as another environment"):
                self._begin_in_new_world(member)
        elif isinstance(event, Refused):
            self._has_errors = True
            member.error = event.error
            member.abandon_step()
            member.remote.session.abandon_episode()
            member.failures += 1
            member.retry_at = time.monotonic() + (self._pause(member.failures - 1) if member.failures > 1 else 0.0)
        elif isinstance(event, Lost):
            self._lose(member, event)

    def _fits(self, member: Member, complaint: str) -> bool:
        """Tell whether what was joined has the spaces of the others; where it has not, it is lost."""
        try:
            self._check_spaces(member)
        except SettingError as error:
            lost = member.remote.give_up(PeerError(member.remote.url, f"{complaint}: {error}"))
            self._lose(member, dataclasses.replace(lost, established=False))
            return False
        return True

    def _handle_spare(self, event: Event, spare: Member) -> None:
        """Let an event change a spare. One that is in a world stands ready."""
        if isinstance(event, Joined):
            spare.lanes = spare.remote.slots
            if self._fits(spare, "it is no spare"):
                spare.failures = 0
                spare.remote.record.back(time.monotonic())
        elif isinstance(event, Lost):
            self._lose(spare, event)

    def _lose(self, member: Member, event: Lost) -> None:
        self._has_errors = True
        member.abandon_step()
        member.error = event.error
        member.remote.salvage(member.answer)
        member.answer = None
        member.failures += 1
        member.retry_at = member.remote.record.lost(
            time.monotonic(), self._pause(member.failures), str(event.error), established=event.established
        )

    def _pause(self, failures: int) -> float:
        """Seconds until the next attempt: doubling, with jitter so that many clients do not come at once."""
        least, most = _BACKOFF
        return min(most, least * 2.0 ** min(failures - 1, 10)) * self._jitter.uniform(0.5, 1.5)

    def _begin(self, member: Member, settings: Mapping[str, pb.Tensor] | None, *, reset: bool = True) -> None:
        """Ask for a member's next episode."""
        member.abandon_step()
        member.settings = settings
        member.remote.salvage(member.answer)
        member.answer = None
        member.remote.session.deadline = time.monotonic() + self._timeout
        member.remote.begin(settings, reset=reset)

    def _begin_in_new_world(self, member: Member) -> None:
        """Ask for the first episode in a world that is new, and so has no lanes to leave as they are."""
        self._begin(member, {key: value for key, value in (member.settings or {}).items() if key != "reset_mask"})

    def _check_deadlines(self, now: float) -> None:
        """Try again what is due, and give up what is late."""
        for member in self._members:
            if member.cut_off:
                continue  # whoever steps is told first
            if member.state is SlotState.LOST:
                if self._spares and self._replace(member):
                    self._begin_in_new_world(member)
                elif now >= member.retry_at:
                    self._open(member)
            elif member.idle:
                if now >= member.retry_at:
                    self._begin(member, member.settings)
            elif not member.settled:
                self._give_up_if_late(member, now)
        for spare in self._spares:
            if spare.state is SlotState.LOST and now >= spare.retry_at:
                self._open(spare)
            elif spare.state is SlotState.CONNECTING:
                self._give_up_if_late(spare, now)

    def _give_up_if_late(self, member: Member, now: float) -> None:
        asked = {SlotState.CONNECTING: "connecting", SlotState.RESETTING: "a reset"}.get(member.state, "a step")
        lost = member.remote.tick(now, lambda: member.remote.late(f"to {asked}", self._timeout))
        if lost is not None:
            self._lose(member, lost)

    def _extend_deadlines(self, now: float) -> float:
        """If we did not poll for a while, extend the deadlines by the gap; return it."""
        missed, self._polled_at = max(0.0, now - self._polled_at - _POLL_GAP), now
        if missed:
            for member in (*self._members, *self._spares):
                member.remote.session.deadline += missed
        return missed

    def _drain(self) -> None:
        """Handle what has come, without waiting."""
        self._extend_deadlines(time.monotonic())
        while True:
            answer, member = self._next_answer(0.0)
            if member is None:
                return
            if answer is not None:
                self._handle(answer, member)

    # Gathering

    def _gather(self, enough: Callable[[], bool], deadline: float) -> bool:
        """Handle deliveries until `enough`, or until the deadline; return whether it is enough."""
        now = time.monotonic()
        done = enough()
        if done or now >= deadline:
            self._drain()
            done = enough()
        check_at = now + 0.02
        while not done:
            now = time.monotonic()
            deadline += self._extend_deadlines(now)
            if now >= check_at or now >= deadline:
                self._check_deadlines(now)
                check_at = now + 0.02
            if now >= deadline:
                return False
            # Wakes for what is due in between: a retry, or an answer that is late.
            answer, member = self._next_answer(min(deadline, now + 0.1))
            while member is not None:
                if answer is not None:
                    self._handle(answer, member)
                answer, member = self._next_answer_nowait()
            done = enough()
        return True

    def _results(self) -> Results:
        """Hand out what has come."""
        batch = Batch.empty(self._observation_layout, self.num_envs)
        results = Results(batch, np.zeros(self.num_envs, np.bool_), [], {})
        stacked = self._stack_answers(batch)
        for member in self._members:
            if member.answer is not None:
                self._hand_out(member, member.answer, results, member.start in stacked)
            elif member.error is not None:
                self._cut_off(member, results)
        self._all_running = bool(results.valid.all()) and not results.errors
        for slot, error in results.errors.items():
            if results.batch.truncations[slot]:
                _log.warning("the episode of slot %d is cut off: %s", slot, error)
        return results

    def _stack_answers(self, batch: Batch) -> set[int]:
        """Write all answers of the same template into the batch at once; return the slots of these."""
        alike: dict[Any, list[tuple[Member, StepAnswer]]] = {}
        if len(self._members) > 1 and all(isinstance(column, np.ndarray) for column in batch.columns):
            for member in self._members:
                answer = member.answer
                if type(answer) is StepAnswer and member.single:
                    alike.setdefault(answer.template, []).append((member, answer))
        done: set[int] = set()
        for group in alike.values():
            if len(group) > 1:
                slots = [member.start for member, _ in group]
                place = slice(None) if len(slots) == self.num_envs else slots
                try:
                    group[0][0].remote.reader.read_rows([answer for _, answer in group], batch, place)
                except TensorError:
                    continue  # each by itself, so that only the remotes at fault are lost
                done.update(slots)
        return done

    def _hand_out(self, member: Member, message: StepMessage, results: Results, stacked: bool) -> None:
        try:
            info = self.hand_over(member, message, results.batch, member.start, stacked=stacked)
        except RemoteError as error:
            self._lose(member, member.remote.give_up(error))
            self._cut_off(member, results)
            return
        resetting = member.remote.realtime.resetting if member.remote.realtime is not None else None
        results.valid[member.slots] = True if resetting is None else ~resetting
        results.infos.append((member, info))

    def hand_over(
        self,
        member: Member,
        message: StepMessage,
        batch: Batch,
        position: int,
        *,
        stacked: bool = False,
    ) -> Any:
        """Hand out a member's answer into a batch, from `position` on; return the info.

        Args:
            member: The member.
            message: Its answer.
            batch: Where to.
            position: The first slot in it.
            stacked: Whether all but the info is in the batch already.

        Raises:
            PeerError: The answer cannot be read.
        """
        if stacked and isinstance(message, StepAnswer):
            info = member.remote.reader.read_info(message)
        else:
            info = member.remote.reader.read_into(message, batch, position, member.remote.now())
        member.last, member.answer = message, None
        if member.stepping:
            member.remote.record.steps_received += member.lanes
        member.stepping = False
        member.error = None
        member.in_episode = not member.ended
        return info

    def _cut_off(self, member: Member, results: Results) -> None:
        """End the episode of a member whose remote failed: truncated once, and then None until it is back."""
        error = member.error
        if error is None:
            return
        for slot in range(member.start, member.start + member.lanes):
            results.errors[slot] = error
        if member.in_episode:
            member.in_episode = False
            member.remote.record.episodes_lost += member.lanes
            results.batch.truncations[member.slots] = True
