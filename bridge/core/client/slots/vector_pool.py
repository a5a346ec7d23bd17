"""The pool of a vector environment: it waits for answers, and executes what the slots' policy decides.

A pool has members, each a remote and the slots that it fills. The caller's thread drives the sockets inside calls; the
keepalive thread that all pools of the process share drives them in between, and connects again what was lost.
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
# Seconds between two looks at what was lost, between calls.
_AWAY_PERIOD = 0.1
# Lanes outside of a reset's mask go on with episodes that the user knows of.
_IN_EPISODES = frozenset({EpisodeState.RUNNING, EpisodeState.RENEWING, EpisodeState.RENEWED})

_log = SafeLog(__name__)
TRUNCATED = "truncated: "
"""How a note of an episode that ended so begins; the reason follows."""
_MOST_RANGES = 8  # of slots, such as "0 to 3", in a line of the log


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


class VectorPool(Pool):
    """The remotes of a vector environment, which come, go and answer by themselves.

    Args:
        timeout: Seconds to wait for any answer.
        placement: Knows where worlds may be.
        connect_timeout: Seconds within which a server has to say anything, where others may take its slots.
    """

    def __init__(self, timeout: float, placement: Placement, connect_timeout: float) -> None:
        super().__init__(timeout)
        self.members = SlotMembers(self.poller)
        """Who fills which slots, and who stands by."""
        self.policy = policy.SlotPolicy(self.members.filling, self.members.spares, placement, timeout, connect_timeout)
        """Decides where worlds are, and when what failed is tried again."""
        self.has_errors = False
        """True if a member may have an error."""
        self.step_timeout: float | None = None
        """Seconds after which a world that has not answered a Step is cut; None: as any answer."""
        self.stalled = 0.0
        """Seconds for which calls waited for slots whose remotes were lost."""
        self.handing_out = False
        """True while results are handed out. Each is handed out once: after an interrupt some of them are lost."""
        self.started = False
        """True if there was a first reset, since which lost members come back and begin episodes by themselves."""
        self.polled_at = time.monotonic()
        """The time when events were handled last, monotonic seconds."""
        self.notes: dict[str, list[int]] = {}
        """The slots of which something is to be logged, by what it is: one server may take hundreds along."""
        self._log = LimitedLog(__name__, burst=10, rate=1 / 30)
        self.closed = False
        """True if the environment is closed."""
        self.question: Question | None = None
        """The question whose answers were not taken yet; None: there is none."""

    # Copies and forked processes

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: its remotes connect anew."""
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
        """Leave the connections to the parent process; the next `check_deadlines` makes some."""
        state = self.__getstate__()
        for remote in self.members.of:
            # Before they are replaced: an end of one of these connections would end it for the parent process.
            remote.disown()
        self.__setstate__(state)

    def enable_moves(self) -> None:
        """Look for servers that drain from now on; called before the first one is connected."""
        self.policy.look_at = 0.0
        self.poller.watches_health = True

    # Connecting

    def connect(self, member: Member, request: WorldRequest | None = None, endpoint: Endpoint | None = None) -> Member:
        """Start to connect a member, without waiting for it; return it.

        Args:
            member: Who; a connection that it has, or is making, is given up.
            request: The world to connect to instead of its own; None: the same again.
            endpoint: Where that world is; None: at the same endpoint.
        """
        if member.link is not LinkState.OFFLINE:
            self._leave(member)
            member.remote.close(0.0)
            member.handle_link(LinkEvent.LOST)
        if request is not None:
            self.members.replace_remote(member, request)
        member.endpoint = endpoint or member.endpoint
        # Here and not in `__init__`: a copy, and a forked process, have connections only from now on.
        keepalive.add(self)
        now = time.monotonic()
        member.deadline = now + self.timeout
        member.silent_until = now + self.patience
        member.handle_link(LinkEvent.CONNECT)
        try:
            member.remote.open()
        except BaseException:  # KeyboardInterrupt: nothing would come, and it would be waited for until the timeout
            self.lose_interrupted(member, "it connected")
            raise
        return member

    def stand_in(self, member: Member) -> Endpoint | None:
        """Start to connect a member whose server is not there where others have joined; return where, None: nowhere."""
        endpoint = self.policy.stand_in(member, time.monotonic())
        if endpoint is not None:
            self.connect(member, self.placement.request_for(endpoint), endpoint)
        return endpoint

    @property
    def placement(self) -> Placement:
        """Knows where worlds may be."""
        return self.policy.placement

    @property
    def patience(self) -> float:
        """Seconds within which a server has to say anything, where others may take its slots."""
        # With a short `timeout`, who is silent until then is passed over as well: others may have room.
        return min(self.policy.connect_timeout, self.timeout)

    # Decisions of the policy

    def check_deadlines(self, now: float) -> None:
        """Try again what is due, and give up what is late."""
        if not self.closed:
            self.execute(self.policy.check(now))

    def has_spare(self, member: Member) -> bool:
        """Tell whether a spare stands ready to take over a member's slots."""
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
        """True if a world of lanes is to change over."""
        return self.policy.lanes_leave

    def move_lanes(self, member: Member) -> None:
        """Move a world of lanes that was stepped off a server that drains, if a replacement stands ready."""
        self.execute(self.policy.after_step(member, time.monotonic()))

    def execute(self, decisions: Iterable[policy.Decision]) -> None:
        """Execute decisions of the policy, one after the other."""
        for decision in decisions:
            match decision:
                case policy.Connect(member, request, endpoint):
                    self.connect(member, request, endpoint)
                case policy.AddSpare(request, endpoint, lanes, stands_by):
                    self.connect(self.members.add(request, endpoint, lanes=lanes, stands_by=stands_by))
                case policy.DropSpare(spare):
                    self.members.drop(spare)
                # It is not dropped: the user named it, and it is connected again later.
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
        """Swap the worlds of a member and a spare; the one that was left goes, unless it stands by from then on."""
        self._leave(member)
        lost = member.link is LinkState.OFFLINE
        member.handle_link(LinkEvent.MOVE if spare.ready else LinkEvent.MOVE_AHEAD)
        self.members.swap_worlds(member, spare)
        member.deadline = spare.deadline
        member.reseeds = True
        # What the policy gave is left for good. A spare that the user named and the slots swap places: the lost remote
        # stands by once it is back, as `spares=` says.
        if not spare.is_named:
            self.members.drop(spare)
            return
        member.home, spare.home = spare.home, member.home
        member.record, spare.record = spare.record, member.record
        # One that drains still has its connection: `Disconnect` follows, and ends it.
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
        """Ask for a member's next episode, or for those of the lanes of a mask; on another server if its own drains."""
        now, remote = time.monotonic(), member.remote
        if settings is not None and "reset_mask" in settings:
            if member.episode in _IN_EPISODES:
                member.settings, member.deadline = settings, now + self.timeout
                member.handle(EpisodeEvent.RENEW)
                remote.begin(settings)
                return
            # It is new, or the episodes of all its lanes were cut: there is none that goes on, whatever a mask says.
            if member.ready:
                settings = {key: value for key, value in settings.items() if key != "reset_mask"}
        member.settings = settings
        if self.policy.moves or member.may_leave:
            self.execute(self.policy.before_episode(member, now))
            # It has moved. The episode has begun there, or begins once that world is joined.
            if member.remote is not remote:
                return
        member.deadline = now + self.timeout
        member.episodes += 1
        if settings is not None and "seed" in settings:
            member.reseeds = False
        elif member.reseeds:
            # Its world is not the one that got the user's seed: what it draws would be another with each run.
            seeds = further_seeds(member.seeds, member.start, member.episodes)
            if seeds is not None and remote.realtime is None:
                seed = seeds[0] if member.single and seeds[0] is not None else seeds
                settings, reset = {**(settings or {}), "seed": pack_seed(seed)}, True
        member.handle(EpisodeEvent.BEGIN)
        remote.begin(settings, reset=reset)

    def renew_in_step(self, member: Member, chosen: Array, lanes: list[int]) -> bool:
        """Take how the lanes that ended began their next episodes, where the server told it with their ends.

        Args:
            member: Whose last answer was handed out.
            chosen: Its lanes whose episodes ended, bools.
            lanes: Their numbers.

        Returns:
            Whether it did; else they are to be reset.
        """
        if member.last is None:
            return False
        event = member.remote.begun_in_step(member.last.message, lanes)
        if event is None:
            return False
        # From here on all is as if they had been reset by a request of their own.
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
        """Handle all deliveries that are here."""
        member_of, remote = self.members.of, None
        try:
            while items:
                remote = items[0][0]  # before it is taken, for an interrupt right after that
                _, number, what, arrived = items.popleft()
                member = member_of.get(remote)
                event = remote.receive(number, what, arrived)
                if event is None or member is None:
                    continue  # it means nothing, or its remote was moved away from
                if type(event) is StepAnswered and member.episode is EpisodeState.STEPPING:  # as nearly always
                    member.take(event)
                else:
                    self.handle(event, member)
        # KeyboardInterrupt: an answer that was taken and not handled would be waited for until the timeout.
        except BaseException:
            if remote in member_of:
                self.lose_interrupted(member_of[remote], "its answer was read")
            raise

    def lose_interrupted(self, member: Member, what: str) -> None:
        """Give up a connection of which nobody knows whether a request was sent, or an answer was taken."""
        error = ConnectionLostError(member.remote.url, f"a call was interrupted while {what}")
        self.lose(member, member.remote.give_up(error))

    def handle(self, event: Event, member: Member) -> None:
        """Change a member by an event of its remote."""
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
            # At the server the episode goes on after a refused Step (D-2). Here it ends: the user is told that it was
            # truncated, so what else was asked of it is dropped.
            member.remote.abandon_episode()
            self.policy.refused(member, event.error, now)
        elif isinstance(event, Replied):
            # Between calls too: it may be the answer to `call_async`.
            if self.question is not None:
                self.question.take(member, event)
        elif isinstance(event, Lost):
            self.lose(member, event)

    def note(self, what: str, start: int, lanes: int = 1) -> None:
        """Have `tell_notes` log something of slots."""
        self.notes.setdefault(what, []).extend(range(start, start + lanes))

    def tell_notes(self) -> None:
        """Log what was noted, a line for all slots of which the same is to be told."""
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
        """Clear what failed before the first observation of an episode, and log that a lost slot is back."""
        member.failures, member.settings, member.refusal = 0, None, None
        # Lanes begin their further episodes by themselves, without a Reset that could hold a seed.
        member.reseeds = member.reseeds and member.single
        self.policy.endpoint_event(member, EndpointEvent.OBSERVED, now)
        away = member.back(now)
        if away is not None:
            self.note(f"back after {away:.0f} s", member.start, member.lanes)

    def _joined(self, member: Member, now: float) -> None:
        """Mark a world as joined: a spare stands ready, a slot asks for its next episode."""
        self.policy.endpoint_event(member, EndpointEvent.JOINED, now)
        member.handle_link(LinkEvent.JOINED)
        member.single, member.refusal = member.remote.single, None
        if member.stands_by is not None:
            # What the user named says itself how many slots it can fill. Any other one was made for certain slots.
            if member.is_named:
                member.place(member.start, member.remote.slots)
            if self._fits(member, "it is no spare"):
                member.failures = 0
                member.back(now)
        elif not self.started:
            return  # the first reset asks for the episodes
        elif self._fits(member, "it came back as another environment"):
            member.reseeds = True
            # One whose cut was not told yet waits: its next episode begins after the step that tells it.
            if member.ready:
                self.begin(member, member.settings)

    def _fits(self, member: Member, complaint: str) -> bool:
        """Tell whether what was joined has the spaces of the others, and its own slots; where not, it is lost."""
        try:
            self.members.check_spaces(member)
            # Another program may have got the port of a server that was killed.
            if self.members.at and member.remote.slots != member.lanes:
                raise SettingError(f"expected {member.lanes} environments in its world, got {member.remote.slots}")
        except SettingError as error:
            text = f"{complaint}: {error}"
            # Of a directory the change of the endpoint's state is told.
            if member.home is not None and text != member.complaint:
                member.complaint = text
                _log.warning("%s: %s", member.title, text)
            # No loss: it counts as an attempt that failed, and does not open the circuit breaker.
            lost = member.remote.give_up(PeerError(member.remote.url, text))
            self.lose(member, Lost(lost.error, established=False))
            return False
        return True

    def lose(self, member: Member, event: Lost) -> None:
        """Mark a member as lost; `check_deadlines` connects it again after a pause."""
        self.has_errors = True
        if self.question is not None:
            self.question.take(member, event)
        now = time.monotonic()
        member.refusal = None
        # Else an episode's end is still to be told, with what that was lost by.
        if member.episode is not EpisodeState.CUT:
            member.error = event.error
        member.handle_link(LinkEvent.LOST)
        # A slot that moves is not away: it has left one server by itself, and the next did not answer.
        if member.stands_by is None and event.established and member.lost_at is None and member.last is not None:
            member.lost_at = now
        self.policy.lost(member, event.error, now, established=event.established)

    def abandon_question(self) -> None:
        """Drop the answers to the question that are still to come: they must not be taken for those to the next one."""
        question, self.question = self.question, None
        for member in () if question is None else question.missing:
            member.remote.abandon_questions()

    def _extend_deadlines(self, now: float) -> float:
        """If we did not poll for a while, extend the deadlines by the gap; return it."""
        # A process that stood still finds all deadlines over, though the answers may be here already.
        missed, self.polled_at = max(0.0, now - self.polled_at - _POLL_GAP), now
        if missed:
            for member in self.everybody():
                member.deadline += missed
        return missed

    def drain(self, wait: float = 0.0) -> None:
        """Handle what has come; where nothing has, wait at most so many seconds for it."""
        items = self.poller.ready(wait)
        self._extend_deadlines(time.monotonic())
        while items:
            self._handle_all(items)
            items = self.poller.ready(0.0)

    def _work_between_calls(self) -> None:
        """Take what has come, and connect what was lost."""
        self.drain()
        # Nobody has asked for episodes before the first reset, which connects what was lost until then.
        if self.started:
            self.check_deadlines(time.monotonic())
        if self.closed:  # meanwhile, by the garbage collector
            self.close_all(0.0)

    def poll_nowait(self) -> float:
        """Do what is due between calls, as `Pool` does; look again soon while worlds are away."""
        wait = super().poll_nowait()
        away = any(member.link is not LinkState.JOINED for member in self.everybody())
        return min(_AWAY_PERIOD, wait) if away else wait

    # Gathering

    def gather(self, enough: Callable[[], bool], deadline: float) -> bool:
        """Handle deliveries until `enough`, or until the deadline; return whether it is enough."""
        now = time.monotonic()
        done = enough()
        # Nobody waits then, but what has come is handled: it may be a loss, or the first observation of another slot.
        if done or now >= deadline:
            self.drain()
            done = enough()
        # The check goes through all slots: after each answer, a step of n slots would make n checks of n slots.
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
                # The deadlines of slots are those of whoever gathers, so a hung server has just been given up above:
                # its slots have an end to tell, and nothing is missing any more.
                return enough()
            # Wakes for what is due in between: a retry, or an answer that is late.
            self._handle_all(self.poller.ready(min(deadline - now, 0.1)))
            done = enough()
        return True

    def raise_permanent_error(self) -> None:
        """Raise what no waiting mends."""
        error = self.policy.permanent_error()
        if error is not None:
            raise error
        self.has_errors = any(member.error is not None for member in self.members.filling)

    def close_all(self, timeout: float) -> None:
        """Leave all worlds and disconnect, within `timeout` seconds in all."""
        # First, so that the keepalive thread connects nothing again.
        self.closed = True
        keepalive.remove(self)
        self.close([member.remote for member in self.everybody()], timeout)
