"""The state of a slot: one table for its link, one for its episode, and the related data. Without I/O.

The link is the connection to the slot's world. It is *offline* without a connection, *connecting* until the world is
joined, and then *joined*. A spare has only a link.

The episode is *idle* until the next one is asked for, then *resetting* until the first observation arrives, then
*begun*. Once that observation was returned to the user it is *running*. An action makes it *stepping*; when the answer
arrives it is *answered*. After the last answer of an episode was returned it is *ended*: the next step begins another
episode.

In a world of lanes, some lanes may begin their next episodes while others go on: *renewing*, and *renewed* once the
answer is here. Unlike in *resetting* and *begun*, a loss then cuts running episodes.

An episode is *cut* if its world was lost or refused a step in the middle, and the user does not know of this end yet.
Its world reconnects meanwhile, because a trainer may compute for minutes between two steps. But no episode begins
before the user was told of the end.

Two rules connect the tables. First, the end of a connection and a move are events of the link that also end the
episode: `ENDINGS` maps them to events of the episode. Second, an episode changes only while its world is joined, except
that the end of a cut episode may be reported at any time. So without a joined world an episode is idle or cut.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.errors import EnvironmentFailedError, RemoteError

if TYPE_CHECKING:
    from bridge.core.client.endpoints import Endpoint, Kind, ListedEndpoint
    from bridge.core.client.world.remote import Remote
    from bridge.core.client.world.session_states import StepAnswered
    from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = [
    "ASKED",
    "BREAKER_LOSSES",
    "BREAKER_REST",
    "BREAKER_WINDOW",
    "COUNTS",
    "ENDINGS",
    "EPISODES",
    "LINKS",
    "SETTLED",
    "STEPPED",
    "EpisodeEvent",
    "EpisodeState",
    "LinkEvent",
    "LinkState",
    "Member",
    "Reason",
    "RemoteRecord",
    "RemoteReport",
    "SlotState",
    "StandBy",
]

# Failed resets in a row after which the environment counts as one that always fails.
_RESET_ATTEMPTS = 3


class LinkState(enum.Enum):
    """The state of a slot's connection to its world."""

    OFFLINE = "offline"
    CONNECTING = "connecting"
    JOINED = "joined"

    __hash__ = object.__hash__  # Enum's own is a Python function


class LinkEvent(enum.Enum):
    """An event of a slot's link."""

    CONNECT = "connection begun"
    JOINED = "world joined"
    LOST = "connection lost, or given up"
    MOVE = "moved to a world that is joined"
    MOVE_AHEAD = "moved to a world that is being joined"

    __hash__ = object.__hash__


# CONNECT, MOVE and MOVE_AHEAD come from the policy, JOINED and LOST from the remote's session. In both tables a pair
# without a row is a bug in this package, and raises KeyError.
#
# Every state accepts LOST, even OFFLINE: a call that gives up late worlds does not check whether the keepalive thread
# has already found them to be lost. JOINED accepts MOVE and MOVE_AHEAD, because the next episode may begin at another
# server if this one drains or fails. OFFLINE does not accept MOVE_AHEAD, because only a ready spare takes over the
# slots of a lost world.
LINKS: Mapping[tuple[LinkState, LinkEvent], LinkState] = {
    (LinkState.OFFLINE, LinkEvent.CONNECT): LinkState.CONNECTING,
    (LinkState.OFFLINE, LinkEvent.LOST): LinkState.OFFLINE,  # it was lost while a call still waited for it
    (LinkState.OFFLINE, LinkEvent.MOVE): LinkState.JOINED,  # a spare takes over
    (LinkState.CONNECTING, LinkEvent.JOINED): LinkState.JOINED,
    (LinkState.CONNECTING, LinkEvent.LOST): LinkState.OFFLINE,
    (LinkState.JOINED, LinkEvent.LOST): LinkState.OFFLINE,
    (LinkState.JOINED, LinkEvent.MOVE): LinkState.JOINED,
    (LinkState.JOINED, LinkEvent.MOVE_AHEAD): LinkState.CONNECTING,
}


class EpisodeState(enum.Enum):
    """The state of a slot's episode."""

    IDLE = "idle"
    RESETTING = "resetting"
    BEGUN = "begun"
    RUNNING = "running"
    STEPPING = "stepping"
    ANSWERED = "answered"
    ENDED = "ended"
    RENEWING = "renewing"
    RENEWED = "renewed"
    CUT = "cut"

    __hash__ = object.__hash__  # Enum's own is a Python function, and the table is looked up in each step


class EpisodeEvent(enum.Enum):
    """An event of a slot's episode."""

    BEGIN = "episode asked for"
    RENEW = "episodes of some lanes asked for"
    STEP = "action sent"
    ANSWER = "answer received"
    HANDED = "answer handed out"
    END = "end of the episode handed out"
    FAILED = "refused, or connection lost"
    MOVED = "moved to another world"
    TOLD = "end told, or given up by a reset"

    __hash__ = object.__hash__


_S, _E = EpisodeState, EpisodeEvent

# BEGIN, RENEW and STEP come from the stepper's requests; HANDED, END and TOLD from the results that it returns. ANSWER
# and FAILED come from the remote's session, MOVED from the policy.
#
# A user may call reset() at any time, so every state except CUT accepts BEGIN. The running episode does not count as
# cut, because the user ended it. Every state with BEGIN also accepts MOVED, because the next episode may begin
# elsewhere.
#
# Every state accepts FAILED. During an episode it leads to CUT, which accepts no BEGIN and no MOVED: if the next
# episode began before the user was told of this end, a trainer would join the two episodes. In states without a
# request, such as IDLE, no refusal is expected, because the session drops answers to abandoned requests. Such a state
# accepts FAILED anyway: one server must never end the training of the others.
#
# END is for single environments only. Lanes begin their next episodes by themselves, so RENEWED has no END.
EPISODES: Mapping[tuple[EpisodeState, EpisodeEvent], EpisodeState] = {
    (_S.IDLE, _E.BEGIN): _S.RESETTING,
    (_S.IDLE, _E.FAILED): _S.IDLE,
    (_S.IDLE, _E.MOVED): _S.IDLE,
    # reset() was called again before the first observation arrived. The session drops the answer to the older Reset.
    (_S.RESETTING, _E.BEGIN): _S.RESETTING,
    (_S.RESETTING, _E.ANSWER): _S.BEGUN,
    (_S.RESETTING, _E.FAILED): _S.IDLE,
    (_S.RESETTING, _E.MOVED): _S.IDLE,
    (_S.BEGUN, _E.BEGIN): _S.RESETTING,
    (_S.BEGUN, _E.HANDED): _S.RUNNING,
    (_S.BEGUN, _E.END): _S.ENDED,  # the first observation of an episode may be its last
    (_S.BEGUN, _E.FAILED): _S.IDLE,  # the user has not seen this episode yet
    (_S.BEGUN, _E.MOVED): _S.IDLE,
    (_S.RUNNING, _E.BEGIN): _S.RESETTING,
    (_S.RUNNING, _E.RENEW): _S.RENEWING,  # a reset with a mask, or SAME_STEP, where some lanes ended
    (_S.RUNNING, _E.STEP): _S.STEPPING,
    (_S.RUNNING, _E.FAILED): _S.CUT,  # in real time an action is sent, and may be refused, without a Step
    (_S.RUNNING, _E.MOVED): _S.IDLE,
    (_S.STEPPING, _E.BEGIN): _S.RESETTING,
    (_S.STEPPING, _E.ANSWER): _S.ANSWERED,
    (_S.STEPPING, _E.FAILED): _S.CUT,  # if the environment raised, the episode ends, and the world stays
    (_S.STEPPING, _E.MOVED): _S.IDLE,
    (_S.ANSWERED, _E.BEGIN): _S.RESETTING,
    (_S.ANSWERED, _E.HANDED): _S.RUNNING,
    (_S.ANSWERED, _E.END): _S.ENDED,
    (_S.ANSWERED, _E.FAILED): _S.CUT,
    (_S.ANSWERED, _E.MOVED): _S.IDLE,
    (_S.ENDED, _E.BEGIN): _S.RESETTING,
    (_S.ENDED, _E.FAILED): _S.IDLE,  # there is no episode to cut
    (_S.ENDED, _E.MOVED): _S.IDLE,
    (_S.RENEWING, _E.BEGIN): _S.RESETTING,
    # reset() was called for other lanes before these had begun. The answer to the later Reset is for all lanes.
    (_S.RENEWING, _E.RENEW): _S.RENEWING,
    (_S.RENEWING, _E.ANSWER): _S.RENEWED,
    (_S.RENEWING, _E.FAILED): _S.CUT,
    (_S.RENEWING, _E.MOVED): _S.IDLE,
    (_S.RENEWED, _E.BEGIN): _S.RESETTING,
    (_S.RENEWED, _E.RENEW): _S.RENEWING,
    (_S.RENEWED, _E.HANDED): _S.RUNNING,
    (_S.RENEWED, _E.FAILED): _S.CUT,
    (_S.RENEWED, _E.MOVED): _S.IDLE,
    (_S.CUT, _E.FAILED): _S.CUT,
    (_S.CUT, _E.TOLD): _S.IDLE,
}

ENDINGS: Mapping[LinkEvent, EpisodeEvent] = {
    LinkEvent.LOST: EpisodeEvent.FAILED,
    LinkEvent.MOVE: EpisodeEvent.MOVED,
    LinkEvent.MOVE_AHEAD: EpisodeEvent.MOVED,
}
"""The event of the episode for each event of the link. Other events of the link do not change the episode."""

SETTLED = frozenset({_S.BEGUN, _S.RUNNING, _S.ANSWERED, _S.ENDED, _S.RENEWED, _S.CUT})
"""The states with nothing to wait for: an observation or the news of a cut is here, or there is no request."""
ASKED = frozenset({_S.RESETTING, _S.RENEWING, _S.STEPPING})
"""The states with an outstanding answer, which may be late."""
STEPPED = frozenset({_S.STEPPING, _S.ANSWERED})
"""The states in which the answer to a step is outstanding or was not handed out."""


class SlotState(enum.IntEnum):
    """The state of a slot, as users see it; `infos["slot_state"]` holds these numbers."""

    CONNECTING = 0
    """Its remote is connecting."""
    RESETTING = 1
    """Its next episode was asked for and has not begun."""
    RUNNING = 2
    """It is in an episode, or has just ended one."""
    LOST = 3
    """Its remote is gone, and will reconnect after a pause."""


# Events that drop a received answer, so that a step is lost.
_DROPS = frozenset({EpisodeEvent.BEGIN, EpisodeEvent.RENEW, EpisodeEvent.FAILED, EpisodeEvent.MOVED})

# A cut slot shows the state of its world. The flags of the next step report its end.
_STATE_OF: Mapping[EpisodeState, SlotState] = {
    **dict.fromkeys(EpisodeState, SlotState.RUNNING),
    **dict.fromkeys(
        (EpisodeState.IDLE, EpisodeState.CUT, EpisodeState.RESETTING, EpisodeState.RENEWING), SlotState.RESETTING
    ),
}


class Reason(enum.Enum):
    """Why a spare stands by."""

    NAMED = "the user named it, in case a slot loses its server"
    LEAVE = "slots have to leave the server"
    EVEN_OUT = "the server has more slots than others"
    GO_BACK = "slots of it are elsewhere, and it may be well again"


class StandBy(NamedTuple):
    """The purpose of a spare: it stands by for the slots of an endpoint, for a reason."""

    reason: Reason
    place: str = ""
    """The key of the endpoint; empty: any."""


BREAKER_LOSSES = 5
"""The circuit breaker opens after this many losses of established connections within `BREAKER_WINDOW`."""
BREAKER_WINDOW = 60.0
"""The window of the circuit breaker, in seconds."""
BREAKER_REST = 30.0
"""Seconds without attempts after the circuit breaker has opened."""


@dataclasses.dataclass(frozen=True)
class RemoteReport:
    """The state of one remote, and the cost of its failures since the vector environment was made."""

    url: str
    """Its URL."""
    slots: tuple[int, ...]
    """The slots that it fills; empty for a spare."""
    state: str
    """`connecting`, `resetting`, `running`, `lost`, `resting` (lost too often), or `spare` (ready to take over)."""
    away: float | None
    """Seconds since it was lost; None: it is connected."""
    reason: str | None
    """The reason for its last loss or its last failed attempt to connect; None: there was none."""
    losses: int
    """The number of established connections that were lost."""
    returns: int
    """The number of times that it came back."""
    seconds_away: float
    """The total seconds that it was away, including the current absence."""
    episodes_lost: int
    """Episodes that were cut off; each lane counts."""
    steps_asked: int
    """Steps that were sent to it; each lane counts."""
    steps_received: int
    """Steps whose results were handed out."""
    steps_lost: int
    """Steps without a result: asked = received + lost + outstanding."""
    moves: int
    """The number of moves of its slots to another server, because their server drained, failed or was crowded."""
    episodes_moved: int
    """Episodes of lanes that such a move truncated; `episodes_lost` does not include them."""
    by_server: Mapping[str, tuple[int, float]]
    """The losses and the seconds away, by the URL of the lost server: a slot may be at another server now."""


@dataclasses.dataclass
class RemoteRecord:
    """The counters of a member's successive remotes, and their circuit breaker."""

    moves: int = 0
    losses: int = 0
    returns: int = 0
    episodes_lost: int = 0
    episodes_moved: int = 0
    steps_asked: int = 0
    steps_received: int = 0
    steps_lost: int = 0
    reason: str | None = None
    away_since: float | None = None
    """The time when it was lost, or first could not be reached, in monotonic seconds; None: it is connected."""
    rests_until: float = 0.0
    """The time until which there are no attempts, in monotonic seconds."""
    _past: float = 0.0  # the total seconds of past absences
    _away_from: str = ""  # the URL of the server of the current or last absence
    _losses_of: Counter[str] = dataclasses.field(default_factory=Counter)
    _past_of: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    _recent: deque[float] = dataclasses.field(default_factory=deque)

    def lost(self, now: float, pause: float, reason: str, *, url: str, established: bool) -> float:
        """Count a loss of the remote or a failed attempt to connect.

        Args:
            now: The time.
            pause: Seconds until the next attempt, unless the breaker opens.
            reason: The reason.
            url: The URL of the server.
            established: True if there was a connection.

        Returns:
            The time of the next attempt.
        """
        self.reason = reason
        # Failed attempts during an absence do not begin another one.
        if self.away_since is None:
            self.away_since, self._away_from = now, url
        # Only established connections count: for a missing server the growing pauses are enough. A server that accepts
        # connections and loses them would be joined again and again, because each begun episode resets the failures.
        if established:
            self.losses += 1
            self._losses_of[url] += 1
            self._recent.append(now)
            while self._recent and now - self._recent[0] > BREAKER_WINDOW:
                self._recent.popleft()
            if len(self._recent) >= BREAKER_LOSSES:
                # Start counting from zero after the rest.
                self._recent.clear()
                self.rests_until = now + BREAKER_REST
        return max(now + pause, self.rests_until)

    def back(self, now: float) -> None:
        """End the current absence, if any, because the remote answers."""
        if self.away_since is not None:
            self._past += now - self.away_since
            self._past_of[self._away_from] += now - self.away_since
            self.away_since = None
            self.returns += 1

    def report(self, now: float, url: str, slots: tuple[int, ...], state: str) -> RemoteReport:
        """Return a report."""
        away = None if self.away_since is None else now - self.away_since
        state = "resting" if state == "lost" and now < self.rests_until else state
        counts: dict[str, Any] = {name: getattr(self, name) for name in COUNTS}
        seconds = dict(self._past_of)
        if away is not None:
            seconds[self._away_from] = seconds.get(self._away_from, 0.0) + away
        servers = {each: (self._losses_of[each], seconds.get(each, 0.0)) for each in {*self._losses_of, *seconds}}
        return RemoteReport(
            url, slots, state, away, self.reason, seconds_away=self._past + (away or 0.0), by_server=servers, **counts
        )


COUNTS = tuple(field.name for field in dataclasses.fields(RemoteRecord) if field.type == "int")
"""The names of the counters; `RemoteReport` documents them."""


@dataclasses.dataclass(eq=False)
class Member:
    """One remote, the slots that it fills, and their state. Only its own methods assign `link` and `episode`."""

    remote: Remote
    endpoint: Endpoint
    """The endpoint of its current or next world."""
    start: int
    """Its first slot; meaningless for a spare."""
    lanes: int
    """The number of its slots."""
    home: ListedEndpoint | None = None
    """The endpoint of a list that it is pinned to; None: it may use any endpoint of its kind in the directory."""
    single: bool = True
    """True if it is a single environment and not lanes, as far as known."""
    link: LinkState = LinkState.OFFLINE
    """The state of its link."""
    episode: EpisodeState = EpisodeState.IDLE
    """The state of its episode."""
    slots: slice = dataclasses.field(init=False)
    """Its slots, as a slice of a batch."""
    stands_by: StandBy | None = None
    """The purpose of a spare; None: it fills slots."""
    record: RemoteRecord = dataclasses.field(default_factory=RemoteRecord)
    """The counters of its failures, including those of its earlier remotes."""
    deadline: float = 0.0
    """The time from which on an outstanding answer is late, in monotonic seconds."""
    silent_until: float = 0.0
    """The time until which to wait for a silent server if there are other servers, in monotonic seconds."""
    answer: StepAnswered | None = None
    """The received answer to a Step that was not handed out yet."""
    last: StepAnswered | None = None
    """The answer that was handed out last."""
    seeds: Sequence[int | None] = ()
    """The seed of each slot, from the last reset with seeds."""
    episodes: int = 0
    """The number of episodes since that reset."""
    reseeds: bool = False
    """True if another world got the seeds, so that this one needs new ones."""
    settings: Mapping[str, pb.Tensor] | None = None
    """The settings of the Reset for its next episode; None: no Reset is needed."""
    error: RemoteError | None = None
    """Why it was lost or its episode was cut; None: there was no error since the last observation."""
    refusal: RemoteError | None = None
    """The refusal of its last Reset or Step; None: it was not refused, or its world has changed since."""
    complaint: str = ""
    """The last warning about a world that does not fit."""
    failures: int = 0
    """Failed attempts in a row to connect or to reset."""
    retry_at: float = 0.0
    """The time of the next attempt, in monotonic seconds."""
    lost_at: float | None = None
    """The time when the user's loop lost it, in monotonic seconds; None: it has an observation since, or never had one.
    Unlike `record.away_since`, it is not set for a spare, nor if a server did not answer after a move."""

    def __post_init__(self) -> None:
        self.place(self.start, self.lanes)

    def place(self, start: int, lanes: int) -> None:
        """Fill `lanes` slots from `start` on."""
        self.start, self.lanes, self.slots = start, lanes, slice(start, start + lanes)

    def handle_link(self, event: LinkEvent) -> None:
        """Apply an event to the link, and the corresponding event, if any, to the episode."""
        # Look up both before changing either: an illegal event must change nothing.
        link, ending = LINKS[self.link, event], ENDINGS.get(event)
        if ending is not None:
            self._follow(ending)
        self.link = link

    def handle(self, event: EpisodeEvent) -> None:
        """Apply an event to the episode."""
        if self.link is not LinkState.JOINED and event is not EpisodeEvent.TOLD:
            raise KeyError(self.link, event)
        self._follow(event)

    def _follow(self, event: EpisodeEvent) -> None:
        """Change the state of the episode, and count a step whose result is dropped."""
        following = EPISODES[self.episode, event]
        if event in _DROPS:
            if self.episode in STEPPED:
                self.record.steps_lost += self.lanes
            if self.answer is not None:
                # In real time the answer may contain records of ended episodes, which the server sends only once.
                self.remote.salvage(self.answer.message)
                self.answer = None
        self.episode = following

    # The events of each step: like `handle`, with fewer calls

    def step(self, request: bytes, deadline: float) -> None:
        """Send a Step written by `StepWriter`."""
        self.episode = EPISODES[self.episode, EpisodeEvent.STEP]
        self.deadline = deadline
        self.record.steps_asked += self.lanes
        self.remote.send_step(request)

    def take(self, answer: StepAnswered) -> None:
        """Store an answer until it is handed out."""
        self.episode = EPISODES[self.episode, EpisodeEvent.ANSWER]
        self.answer = answer

    def handed(self) -> None:
        """Update the state after the answer was handed out."""
        answer = self.answer
        assert answer is not None, "the table permits this only after an answer"
        # In BEGUN and RENEWED the answer is to a Reset, which `steps_asked` does not count.
        if self.episode is EpisodeState.ANSWERED:
            self.record.steps_received += self.lanes
        self.episode = EPISODES[self.episode, EpisodeEvent.END if answer.ended else EpisodeEvent.HANDED]
        # An observation shows that the world works again.
        self.last, self.answer, self.error = answer, None, None

    def renewed(self, answer: StepAnswered, *, together: bool) -> None:
        """Store that lanes began their next episodes in the Step that was handed out last.

        Args:
            answer: The answer to that Step, with the first observations.
            together: True if these are all lanes of the member.
        """
        self.last, answer.reader.begun = answer, None
        self.episodes += together

    # Absences and reports

    def back(self, now: float) -> float | None:
        """End the current absence, if any, because its remote answers.

        Returns:
            The seconds that its slots were without an episode; None: there was no absence that the user knows of.
        """
        self.record.back(now)
        since, self.lost_at = self.lost_at, None
        return None if since is None else now - since

    def seconds_away(self, now: float) -> float | None:
        """Return the seconds since its remote was lost; None: it is connected."""
        since = self.record.away_since
        return None if since is None else now - since

    def report(self, now: float) -> RemoteReport:
        """Return a report on its remote."""
        stands_by = self.stands_by is not None
        slots = () if stands_by else tuple(range(self.start, self.start + self.lanes))
        state = "spare" if stands_by and self.ready else self.state.name.lower()
        return self.record.report(now, self.remote.url, slots, state)

    # Derived properties

    @property
    def state(self) -> SlotState:
        """The state of its slots, as users see it."""
        if self.link is LinkState.JOINED:
            return _STATE_OF[self.episode]
        return SlotState.LOST if self.link is LinkState.OFFLINE else SlotState.CONNECTING

    @property
    def ready(self) -> bool:
        """True if its world is joined and no episode was asked for; a ready spare is in this state."""
        return self.link is LinkState.JOINED and self.episode is EpisodeState.IDLE

    @property
    def waits(self) -> bool:
        """True if an answer, which may be late, is outstanding."""
        return self.link is LinkState.CONNECTING or self.episode in ASKED

    @property
    def fails_every_reset(self) -> bool:
        """True if its environment raised in each of the last attempts to reset it."""
        # Refused settings do not mean a broken environment: `permanent_error` raises them at once.
        return isinstance(self.refusal, EnvironmentFailedError) and self.failures >= _RESET_ATTEMPTS

    @property
    def away(self) -> bool:
        """True if its remote was lost while the user's loop ran, and has given no observation since."""
        return self.lost_at is not None and self.episode not in SETTLED

    @property
    def kind(self) -> Kind:
        """The kind of its endpoint. It never moves to an endpoint of another kind."""
        return self.endpoint.kind

    @property
    def is_displaced(self) -> bool:
        """True if it is not at the endpoint that it is pinned to."""
        return self.home is not None and not self.is_at(self.home)

    def is_displaced_from(self, endpoint: Endpoint) -> bool:
        """Return True if it is pinned to `endpoint` and not there."""
        return self.home is not None and self.home.key == endpoint.key and self.is_displaced

    @property
    def may_leave(self) -> bool:
        """True if its next episode may begin elsewhere, because every reset fails at its server."""
        # A pinned slot moves only if its server has worked before: a server of a list that fails from the start is an
        # error for the user.
        return self.fails_every_reset and (self.home is None or self.last is not None)

    @property
    def is_named(self) -> bool:
        """True for a spare that the user named: it stays when it is lost, and swaps places with what it takes over."""
        return self.stands_by is not None and self.stands_by.reason is Reason.NAMED

    def serves(self, member: Member) -> bool:
        """Return True if this spare, once joined, can take over the slots of a member."""
        if self.stands_by is None or self.lanes != member.lanes:
            return False
        # Spaces are compared at the join. Beyond that, trust the user who named the spare.
        if self.is_named:
            return True
        return self.kind == member.kind and (member.home is None or self.is_at(member.home))

    def suits(self, member: Member) -> bool:
        """Return True if this spare is ready to take over the slots of a member."""
        # Compare `single`: a world with one lane begins its next episodes by itself, a single environment does not.
        return self.ready and self.single == member.single and self.serves(member)

    def betters(self, member: Member) -> bool:
        """Return True if this spare is a better place for a member that could also stay."""
        if member.home is not None:
            better = member.is_displaced and self.is_at(member.home)
        else:
            better = self.stands_by == StandBy(Reason.EVEN_OUT, member.endpoint.key)
        return better and self.suits(member)

    def is_at(self, endpoint: Endpoint) -> bool:
        """Return True if its world is at `endpoint`."""
        return self.endpoint.key == endpoint.key

    @property
    def title(self) -> str:
        """Its slots, for messages."""
        if self.stands_by is not None:
            return f"spare {self.remote.url}"
        return f"slot {self.start}" if self.lanes == 1 else f"slots {self.start} to {self.start + self.lanes - 1}"
