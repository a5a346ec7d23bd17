"""The pool of a vector environment: it waits for answers, and executes the decisions of the slots' policy.

A pool has members; each is a remote with the slots that it fills. The caller's thread drives the sockets during calls.
Between calls the keepalive thread, which all pools of the process share, drives them and reconnects lost members.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bridge.core.client.endpoints import Endpoint
from bridge.core.client.slots import policy
from bridge.core.client.slots.endpoint import EndpointEvent, Placement
from bridge.core.client.slots.members import SlotMembers
from bridge.core.client.slots.pool import Pool
from bridge.core.client.slots.resets import further_seeds, reset_settings
from bridge.core.client.slots.slot import EpisodeEvent, EpisodeState, LinkEvent, LinkState, Member
from bridge.core.client.wire import keepalive
from bridge.core.client.world.remote import Delivery
from bridge.core.client.world.session_states import Event, Joined, Lost, Refused, Replied, StepAnswered
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.encoding.seeds import pack_seed
from bridge.core.encoding.tensors import Array
from bridge.core.logs import LimitedLog, SafeLog
from bridge.errors import ConnectionLostError, PeerError, RemoteError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["TRUNCATED", "Question", "VectorPool"]

# If we did not poll for this many seconds, deadlines are extended by the gap: nobody else is to blame.
_POLL_GAP = 1.0
# Seconds between two checks of lost members, between calls.
_AWAY_PERIOD = 0.1
# The states in which lanes outside of a reset's mask are in episodes that the user knows of.
_IN_EPISODES = frozenset({EpisodeState.RUNNING, EpisodeState.RENEWING, EpisodeState.RENEWED})

_log = SafeLog(__name__)
TRUNCATED = "truncated: "
"""The prefix of a note about a truncated episode; the reason follows."""
_MOST_RANGES = 8  # the most ranges of slots, such as "0 to 3", in a log line


@dataclasses.dataclass
class Question:
    """Outstanding requests for a property or a method call."""

    purpose: str
    slots: Sequence[int]
    """The asked slots, in the order of the results."""
    lanes: Mapping[Member, list[int]]
    """The lanes of these slots in each world."""
    missing: dict[Member, None]
    """The worlds that have not answered."""
    answers: dict[Member, pb.EnvironmentResponse] = dataclasses.field(default_factory=dict)
    """The received answers."""
    failure: RemoteError | None = None
    """The first refusal or loss."""

    def take(self, member: Member, event: Replied | Lost) -> None:
        """Store the answer of a world, or its loss."""
        if member in self.missing:
            del self.missing[member]
            self.failure = self.failure or event.error
            if isinstance(event, Replied):
                self.answers[member] = event.message


class VectorPool(Pool):
    """The remotes of a vector environment, which answer, fail and reconnect independently.

    Args:
        timeout: Seconds to wait for any answer.
        placement: Chooses the endpoints of worlds.
        connect_timeout: Seconds within which a server must send something, if others may take its slots.
    """

    def __init__(self, timeout: float, placement: Placement, connect_timeout: float) -> None:
        super().__init__(timeout)
        self.members = SlotMembers(self.poller)
        """The members that fill slots, and the spares."""
        self.policy = policy.SlotPolicy(self.members.filling, self.members.spares, placement, timeout, connect_timeout)
        """Decides where worlds are, and when failed ones are tried again."""
        self.has_errors = False
        """True if a member may have an error."""
        self.step_timeout: float | None = None
        """Seconds after which a world that has not answered a Step is cut; None: `timeout`."""
        self.stalled = 0.0
        """Seconds for which calls waited for lost slots."""
        self.handing_out = False
        """True while results are handed out. Each is handed out once, so an interrupt meanwhile loses some of them."""
        self.started = False
        """True after the first reset: from then on, members that come back begin episodes by themselves."""
        self.polled_at = time.monotonic()
        """The time when events were handled last, in monotonic seconds."""
        self.notes: dict[str, list[int]] = {}
        """Slots by the note to log about them: the loss of one server may concern hundreds of slots."""
        self._log = LimitedLog(__name__, burst=10, rate=1 / 30)
        self.closed = False
        """True if the environment is closed."""
        self.question: Question | None = None
        """The outstanding question; None: there is none."""

    # Copies and forked processes

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, whose remotes connect anew."""
        own = self.timeout, self.placement, self.policy.connect_timeout
        kept = {"step_timeout": self.step_timeout, "closed": self.closed}
        return {"own": own, "kept": kept, "moves": self.poller.watches_health, "members": self.members.kept()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["own"])  # type: ignore[misc]
        self.__dict__.update(state["kept"])
        if state["moves"]:
            self.enable_moves()
        self.members.restore(state["members"])

    def after_fork(self) -> None:
        """Leave the connections to the parent process. The next `check_deadlines` makes new ones."""
        state = self.__getstate__()
        for remote in self.members.of:
            # Before they are replaced: closing one of these connections would close it for the parent process.
            remote.disown()
        self.__setstate__(state)

    def enable_moves(self) -> None:
        """Watch for draining servers from now on. Called before the first connection."""
        self.policy.look_at = 0.0
        self.poller.watches_health = True

    # Connecting

    def connect(self, member: Member, request: WorldRequest | None = None, endpoint: Endpoint | None = None) -> Member:
        """Start to connect a member, without waiting; return the member.

        Args:
            member: The member. Its current connection or attempt is closed first.
            request: The new world; None: the same world again.
            endpoint: The endpoint of the new world; None: the same endpoint.
        """
        if member.link is not LinkState.OFFLINE:
            self._leave(member)
            member.remote.close(0.0)
            member.handle_link(LinkEvent.LOST)
        if request is not None:
            self.members.replace_remote(member, request)
        member.endpoint = endpoint or member.endpoint
        # Not in `__init__`, because a copy or a forked process has connections only from now on.
        keepalive.add(self)
        now = time.monotonic()
        member.deadline = now + self.timeout
        member.silent_until = now + self.patience
        member.handle_link(LinkEvent.CONNECT)
        try:
            member.remote.open()
        except BaseException:  # after KeyboardInterrupt no answer comes, and calls would wait until the timeout
            self.lose_interrupted(member, "it connected")
            raise
        return member

    def stand_in(self, member: Member) -> Endpoint | None:
        """Start to connect a member whose server is missing to one where others have joined; return its endpoint."""
        endpoint = self.policy.stand_in(member, time.monotonic())
        if endpoint is not None:
            self.connect(member, self.placement.request_for(endpoint), endpoint)
        return endpoint

    @property
    def placement(self) -> Placement:
        """Chooses the endpoints of worlds."""
        return self.policy.placement

    @property
    def patience(self) -> float:
        """Seconds within which a server must send something, if others may take its slots."""
        # A `timeout` shorter than `connect_timeout` limits this too.
        return min(self.policy.connect_timeout, self.timeout)

    # Decisions of the policy

    def check_deadlines(self, now: float) -> None:
        """Retry members that are due, and give up late answers."""
        if not self.closed:
            self.execute(self.policy.check(now))

    def has_spare(self, member: Member) -> bool:
        """Return True if a spare is ready to take over a member's slots."""
        return self.policy.ready_spare(member) is not None

    def everybody(self) -> list[Member]:
        """Return the members that fill slots, and then the spares."""
        return self.policy.everybody()

    @property
    def moves(self) -> bool:
        """True if slots may move to other servers."""
        return self.policy.moves

    @property
    def lanes_leave(self) -> bool:
        """True if a world of lanes has to move."""
        return self.policy.lanes_leave

    def move_lanes(self, member: Member) -> None:
        """Move a stepped world of lanes away from a draining server, if a replacement is ready."""
        self.execute(self.policy.after_step(member, time.monotonic()))

    def execute(self, decisions: Iterable[policy.Decision]) -> None:
        """Execute decisions of the policy in order."""
        for decision in decisions:
            match decision:
                case policy.Connect(member, request, endpoint):
                    self.connect(member, request, endpoint)
                case policy.AddSpare(request, endpoint, lanes, stands_by):
                    self.connect(self.members.add(request, endpoint, lanes=lanes, stands_by=stands_by))
                case policy.DropSpare(spare):
                    self.members.drop(spare)
                # Keep the spare, because the user named it. It reconnects later.
                case policy.Disconnect(spare):
                    spare.remote.close(0.0)
                    spare.handle_link(LinkEvent.LOST)
                case policy.TakeOver(member, spare):
                    self._take_over(member, spare)
                case policy.Begin(member):
                    self.begin(member, member.settings)
                case policy.GiveUp(member):
                    self.give_up(member)

    def _take_over(self, member: Member, spare: Member) -> None:
        """Swap the worlds of a member and a spare, then drop the spare unless the user named it."""
        self._leave(member)
        lost = member.link is LinkState.OFFLINE
        member.handle_link(LinkEvent.MOVE if spare.ready else LinkEvent.MOVE_AHEAD)
        self.members.swap_worlds(member, spare)
        member.deadline = spare.deadline
        member.reseeds = True
        # A spare of the policy is dropped. A spare that the user named swaps places with the slots: the lost remote
        # becomes the spare once it is back, as `spares=` documents.
        if not spare.is_named:
            self.members.drop(spare)
            return
        member.home, spare.home = spare.home, member.home
        member.record, spare.record = spare.record, member.record
        # A draining one keeps its connection until the `Disconnect` that follows.
        if lost:
            spare.handle_link(LinkEvent.LOST)

    def _leave(self, member: Member) -> None:
        """Clear the last refusal, and fail a pending call, before a member leaves its world."""
        member.refusal = None
        if self.question is not None:
            error = ConnectionLostError(member.remote.url, f"its {member.title} moved to another server; call again")
            self.question.take(member, Lost(error, established=True))

    def give_up(self, member: Member) -> None:
        """End a connection whose answer is late."""
        purpose, waited = "a reset", self.timeout
        if member.link is LinkState.CONNECTING:
            purpose = "join a world"
            if member.remote.silent:
                waited = self.patience
        elif member.episode is EpisodeState.STEPPING:
            purpose, waited = "a step", min(waited, self.step_timeout or waited)
        self.lose(member, member.remote.give_up(member.remote.late(f"to {purpose}", waited)))

    def begin(self, member: Member, settings: Mapping[str, pb.Tensor] | None, *, reset: bool = True) -> None:
        """Ask for a member's next episode, or for those of lanes in a mask. The member may move to another server."""
        now, remote = time.monotonic(), member.remote
        if settings is not None and "reset_mask" in settings:
            if member.episode in _IN_EPISODES:
                member.settings, member.deadline = settings, now + self.timeout
                member.handle(EpisodeEvent.RENEW)
                remote.begin(settings)
                return
            # No lane has a running episode, because the world is new or all episodes were cut: ignore the mask.
            if member.ready:
                settings = {key: value for key, value in settings.items() if key != "reset_mask"}
        member.settings = settings
        if self.policy.moves or member.may_leave:
            self.execute(self.policy.before_episode(member, now))
            # If the member has moved, the episode begins in the new world, perhaps once it is joined.
            if member.remote is not remote:
                return
        member.deadline = now + self.timeout
        member.episodes += 1
        if settings is not None and "seed" in settings:
            member.reseeds = False
        elif member.reseeds:
            # This world did not get the user's seed, so without one of its own its episodes would differ in each run.
            seeds = further_seeds(member.seeds, member.start, member.episodes)
            if seeds is not None and remote.realtime is None:
                seed = seeds[0] if member.single and seeds[0] is not None else seeds
                settings, reset = {**(settings or {}), "seed": pack_seed(seed)}, True
        member.handle(EpisodeEvent.BEGIN)
        remote.begin(settings, reset=reset)

    def renew_in_step(self, member: Member, chosen: Array, lanes: list[int]) -> bool:
        """Begin the next episodes of lanes from the answer that ended their last ones, if it contains both.

        Args:
            member: The member, whose last answer was handed out.
            chosen: The lanes whose episodes ended, bools.
            lanes: The numbers of these lanes.

        Returns:
            False if the lanes have to be reset by a request.
        """
        if member.last is None:
            return False
        event = member.remote.begun_in_step(member.last.message, lanes)
        if event is None:
            return False
        # From here on, continue as if the lanes had been reset by a request.
        together = len(lanes) == len(chosen)
        if together:
            member.episodes += 1
            member.handle(EpisodeEvent.BEGIN)
        else:
            member.handle(EpisodeEvent.RENEW)
        if not isinstance(event, StepAnswered):
            member.settings = reset_settings(reset_mask=None if together else chosen)
        self.handle(event, member)
        return True

    # Answers

    def _handle_all(self, items: deque[Delivery]) -> None:
        """Handle all deliveries in the queue."""
        member_of, remote = self.members.of, None
        try:
            while items:
                remote = items[0][0]  # before `popleft`, in case an interrupt follows it
                _, number, what, arrived = items.popleft()
                member = member_of.get(remote)
                event = remote.receive(number, what, arrived)
                if event is None or member is None:
                    continue  # no event, or the remote no longer belongs to a member
                if type(event) is StepAnswered and member.episode is EpisodeState.STEPPING:  # the usual case
                    member.take(event)
                else:
                    self.handle(event, member)
        # After KeyboardInterrupt an answer may be lost between `popleft` and its handling. Calls would wait for it
        # until the timeout.
        except BaseException:
            if remote in member_of:
                self.lose_interrupted(member_of[remote], "its answer was read")
            raise

    def lose_interrupted(self, member: Member, what: str) -> None:
        """Give up a connection after an interrupt: a request may not be sent, or an answer may be lost."""
        error = ConnectionLostError(member.remote.url, f"a call was interrupted while {what}")
        self.lose(member, member.remote.give_up(error))

    def handle(self, event: Event, member: Member) -> None:
        """Update a member after an event of its remote."""
        now = time.monotonic()
        if isinstance(event, StepAnswered):
            member.take(event)
            if member.episode in (EpisodeState.BEGUN, EpisodeState.RENEWED):
                self._begun(member, now)
        elif isinstance(event, Joined):
            self._joined(member, now)
        elif isinstance(event, Refused):
            self.has_errors = True
            member.error = member.refusal = event.error
            member.handle(EpisodeEvent.FAILED)
            # At the server the episode goes on after a refused Step (D-2). For the user it is truncated, so drop the
            # answers to other requests for it.
            member.remote.abandon_episode()
            self.policy.refused(member, event.error, now)
        elif isinstance(event, Replied):
            # This may happen between calls: the answer to `call_async`.
            if self.question is not None:
                self.question.take(member, event)
        elif isinstance(event, Lost):
            self.lose(member, event)

    def note(self, what: str, start: int, lanes: int = 1) -> None:
        """Add a note about slots, for `tell_notes` to log."""
        self.notes.setdefault(what, []).extend(range(start, start + lanes))

    def tell_notes(self) -> None:
        """Log the notes, with one line for all slots with the same note."""
        notes, self.notes = self.notes, {}
        for what, found in notes.items():
            slots, at = sorted(set(found)), 0
            said: list[str] = []
            while at < len(slots) and len(said) < _MOST_RANGES:
                first = last = slots[at]
                while at < len(slots) and slots[at] <= last + 1:
                    last, at = slots[at], at + 1
                said.append(str(first) if first == last else f"{first} to {last}")
            more = f" and {len(slots) - at} more" if at < len(slots) else ""
            of = "" if not what.startswith(TRUNCATED) else "episode " if len(slots) == 1 else "episodes "
            self._log.warning("%s %s%s: %s%s", "slot" if len(slots) == 1 else "slots", ", ".join(said), more, of, what)

    def _begun(self, member: Member, now: float) -> None:
        """After the first observation of an episode, clear earlier failures and note that a lost slot is back."""
        member.failures, member.settings, member.refusal = 0, None, None
        # Lanes begin later episodes by themselves, without a Reset that could carry a seed.
        member.reseeds = member.reseeds and member.single
        self.policy.endpoint_event(member, EndpointEvent.OBSERVED, now)
        away = member.back(now)
        if away is not None:
            self.note(f"back after {away:.0f} s", member.start, member.lanes)

    def _joined(self, member: Member, now: float) -> None:
        """Mark a world as joined: a spare is ready, a slot asks for its next episode."""
        self.policy.endpoint_event(member, EndpointEvent.JOINED, now)
        member.handle_link(LinkEvent.JOINED)
        member.single, member.refusal = member.remote.single, None
        if member.stands_by is not None:
            # Only now we know how many slots a spare of the user can fill. Other spares were made for certain slots.
            if member.is_named:
                member.place(member.start, member.remote.slots)
            if self._fits(member, "it is no spare"):
                member.failures = 0
                member.back(now)
        elif not self.started:
            return  # the first reset asks for the episodes
        elif self._fits(member, "it came back as another environment"):
            member.reseeds = True
            # After a cut, the next episode begins only after the step that reports the cut.
            if member.ready:
                self.begin(member, member.settings)

    def _fits(self, member: Member, complaint: str) -> bool:
        """Return True if a joined world has the spaces of the others and its expected slots; otherwise lose it."""
        try:
            self.members.check_spaces(member)
            # Another server may have taken the port of a killed one.
            if self.members.at and member.remote.slots != member.lanes:
                raise SettingError(f"expected {member.lanes} environments in its world, got {member.remote.slots}")
        except SettingError as error:
            text = f"{complaint}: {error}"
            # With a directory the change of the endpoint's state is logged instead.
            if member.home is not None and text != member.complaint:
                member.complaint = text
                _log.warning("%s: %s", member.title, text)
            # This counts as a failed attempt, not as a loss, so it does not open the circuit breaker.
            lost = member.remote.give_up(PeerError(member.remote.url, text))
            self.lose(member, Lost(lost.error, established=False))
            return False
        return True

    def lose(self, member: Member, event: Lost) -> None:
        """Mark a member as lost. `check_deadlines` reconnects it after a pause."""
        self.has_errors = True
        if self.question is not None:
            self.question.take(member, event)
        now = time.monotonic()
        member.refusal = None
        # The error of a cut episode is kept until its end was reported.
        if member.episode is not EpisodeState.CUT:
            member.error = event.error
        member.handle_link(LinkEvent.LOST)
        # A moving slot that gets no answer at its next server does not count as away.
        if member.stands_by is None and event.established and member.lost_at is None and member.last is not None:
            member.lost_at = now
        self.policy.lost(member, event.error, now, established=event.established)

    def abandon_question(self) -> None:
        """Drop later answers to the current question: they must not be taken for answers to the next one."""
        question, self.question = self.question, None
        for member in () if question is None else question.missing:
            member.remote.abandon_questions()

    def _extend_deadlines(self, now: float) -> float:
        """If we did not poll for a while, extend the deadlines by the gap; return the gap."""
        # After a suspension of the process all deadlines have passed, although the answers may be here already.
        missed, self.polled_at = max(0.0, now - self.polled_at - _POLL_GAP), now
        if missed:
            for member in self.everybody():
                member.deadline += missed
        return missed

    def drain(self, wait: float = 0.0) -> None:
        """Handle messages that have arrived; if there are none, wait for up to `wait` seconds."""
        items = self.poller.ready(wait)
        self._extend_deadlines(time.monotonic())
        while items:
            self._handle_all(items)
            items = self.poller.ready(0.0)

    def _work_between_calls(self) -> None:
        """Handle messages that have arrived, and reconnect lost members."""
        self.drain()
        # Before the first reset no episode was asked for; that reset reconnects members that were lost until then.
        if self.started:
            self.check_deadlines(time.monotonic())
        if self.closed:  # by the garbage collector, during this method
            self.close_all(0.0)

    def poll_nowait(self) -> float:
        """Do the work between calls like `Pool`; return a short pause while worlds are away."""
        wait = super().poll_nowait()
        away = any(member.link is not LinkState.JOINED for member in self.everybody())
        return min(_AWAY_PERIOD, wait) if away else wait

    # Gathering

    def gather(self, enough: Callable[[], bool], deadline: float) -> bool:
        """Handle deliveries until `enough()` or the deadline; return the last result of `enough()`."""
        now = time.monotonic()
        done = enough()
        # Even without a wait, handle messages that have arrived: losses, or first observations of other slots.
        if done or now >= deadline:
            self.drain()
            done = enough()
        # `check_deadlines` looks at all slots, so limit its rate: after each answer it would take n² time.
        check_at = now + 0.02
        while not done:
            now = time.monotonic()
            if now - self.polled_at > _POLL_GAP:
                deadline += self._extend_deadlines(now)
            self.polled_at = now
            if now >= check_at or now >= deadline:
                self.check_deadlines(now)
                check_at = now + 0.02
            if now >= deadline:
                # Slots have the same deadline, so `check_deadlines` has just given up a hung server. Its slots are now
                # cut, and so settled.
                return enough()
            # Wake up regularly for retries and late answers.
            self._handle_all(self.poller.ready(min(deadline - now, 0.1)))
            done = enough()
        return True

    def raise_permanent_error(self) -> None:
        """Raise an error that waiting cannot fix, if there is one."""
        error = self.policy.permanent_error()
        if error is not None:
            raise error
        self.has_errors = any(member.error is not None for member in self.members.filling)

    def close_all(self, timeout: float) -> None:
        """Leave all worlds and disconnect, within `timeout` seconds in total."""
        # Set this first, so that the keepalive thread does not reconnect.
        self.closed = True
        keepalive.remove(self)
        self.close([member.remote for member in self.everybody()], timeout)
