"""The life of a slot, without input or output: a table of its link, one of its episode, and the data that goes with it.

The link says where its world is. It is *offline* while the world has no connection, *connecting* until the world is
joined, and then *joined*. A world that stands by as a spare has nothing but a link.

The episode is *idle* until the next one is asked for, and *resetting* from then on until the first observation, after
which it has *begun*. Once that observation was handed to the user it is *running*; an action makes it *stepping*, until
the answer has come: *answered*. The answer that ends an episode, once handed out, leaves it *ended*: its next step
begins another episode.

Of a world of lanes, some may begin their next episodes while the others are in the midst of theirs: *renewing*, and
*renewed* once the answer is here. What tells these from *resetting* and *begun* is that a loss then cuts episodes.

An episode whose world was lost, or refused a step, in the midst of it is *cut*: it has an end to tell that the user
does not know yet. Its world is connected again meanwhile, because a training may compute for minutes between two steps;
but no episode begins before the end was told.

The two meet in two rules. The end of a connection, and a move, are events of the link that end the episode: `ENDINGS`
has what each is to the episode. And only in a joined world does something happen to an episode, but for the end of a
cut one, which is told wherever its world is. So without a joined world an episode is idle or cut, and nothing else.
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

# Resets that fail in a row, after which the environment counts as one that always fails.
_RESET_ATTEMPTS = 3


class LinkState(enum.Enum):
    """Where a slot's world is."""

    OFFLINE = "offline"
    CONNECTING = "connecting"
    JOINED = "joined"

    __hash__ = object.__hash__  # Enum's own is a Python function


class LinkEvent(enum.Enum):
    """An event that changes where a slot's world is."""

    CONNECT = "connection begun"
    JOINED = "world joined"
    LOST = "connection lost, or given up"
    MOVE = "moved to a world that is joined"
    MOVE_AHEAD = "moved to a world that is being joined"

    __hash__ = object.__hash__


# The policy connects and moves (CONNECT, MOVE, MOVE_AHEAD). The remote's session says JOINED and LOST. A pair without a
# row is a mistake of this package, and raises KeyError; so it is in the other table.
#
# Every state takes LOST, also that without a connection: a call that gives up late worlds does not look which of them
# the keepalive thread has found to be lost already. The next episode may begin elsewhere, if the server drains or
# fails: so JOINED has MOVE and MOVE_AHEAD. Only a spare that stands ready takes over the slots of a lost world: so
# OFFLINE has no MOVE_AHEAD.
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
    """How far a slot's episode is."""

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
    """An event that changes how far a slot's episode is."""

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

# The stepper asks (BEGIN, RENEW, STEP) and hands results out (HANDED, END, TOLD). The remote's session answers (ANSWER,
# FAILED). The policy moves (MOVED).
#
# A user may call reset() at any time: so every state but CUT takes BEGIN. It gives up what runs there, and no episode
# counts as cut, because the user ended it. The next episode may begin elsewhere: so MOVED stands beside each BEGIN.
#
# Every state takes FAILED. In the midst of an episode it leads to CUT, which takes no BEGIN and no MOVED: if the next
# episode began before the end of this one was told, a trainer would join both into one. Where nothing is asked, as in
# IDLE, no refusal is expected: the session drops those of what was given up. But what one server says must never end
# the training of the others.
#
# END is for single environments. Lanes begin their next episodes by themselves: so RENEWED has no END.
EPISODES: Mapping[tuple[EpisodeState, EpisodeEvent], EpisodeState] = {
    (_S.IDLE, _E.BEGIN): _S.RESETTING,
    (_S.IDLE, _E.FAILED): _S.IDLE,
    (_S.IDLE, _E.MOVED): _S.IDLE,
    # reset() was called again before the first observation came. The session drops the answer to the older Reset.
    (_S.RESETTING, _E.BEGIN): _S.RESETTING,
    (_S.RESETTING, _E.ANSWER): _S.BEGUN,
    (_S.RESETTING, _E.FAILED): _S.IDLE,
    (_S.RESETTING, _E.MOVED): _S.IDLE,
    (_S.BEGUN, _E.BEGIN): _S.RESETTING,
    (_S.BEGUN, _E.HANDED): _S.RUNNING,
    (_S.BEGUN, _E.END): _S.ENDED,  # the first observation of an episode may be its last
    (_S.BEGUN, _E.FAILED): _S.IDLE,  # nobody has seen that the episode had begun
    (_S.BEGUN, _E.MOVED): _S.IDLE,
    (_S.RUNNING, _E.BEGIN): _S.RESETTING,
    (_S.RUNNING, _E.RENEW): _S.RENEWING,  # a reset with a mask, or SAME_STEP, where some lanes ended
    (_S.RUNNING, _E.STEP): _S.STEPPING,
    (_S.RUNNING, _E.FAILED): _S.CUT,  # in real time an action may be refused by itself
    (_S.RUNNING, _E.MOVED): _S.IDLE,
    (_S.STEPPING, _E.BEGIN): _S.RESETTING,
    (_S.STEPPING, _E.ANSWER): _S.ANSWERED,
    (_S.STEPPING, _E.FAILED): _S.CUT,  # if its environment raised, the world stays, and the episode does not
    (_S.STEPPING, _E.MOVED): _S.IDLE,
    (_S.ANSWERED, _E.BEGIN): _S.RESETTING,
    (_S.ANSWERED, _E.HANDED): _S.RUNNING,
    (_S.ANSWERED, _E.END): _S.ENDED,
    (_S.ANSWERED, _E.FAILED): _S.CUT,
    (_S.ANSWERED, _E.MOVED): _S.IDLE,
    (_S.ENDED, _E.BEGIN): _S.RESETTING,
    (_S.ENDED, _E.FAILED): _S.IDLE,  # between two episodes nothing is cut
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
"""What an event of the link is to the episode; the others are nothing to it."""

SETTLED = frozenset({_S.BEGUN, _S.RUNNING, _S.ANSWERED, _S.ENDED, _S.RENEWED, _S.CUT})
"""There is nothing to wait for: an observation is here, the news of a cut is, or nothing was asked."""
ASKED = frozenset({_S.RESETTING, _S.RENEWING, _S.STEPPING})
"""An answer is outstanding, which may be late."""
STEPPED = frozenset({_S.STEPPING, _S.ANSWERED})
"""A step's answer is outstanding, or was not taken."""


class SlotState(enum.IntEnum):
    """The state of a slot, as the user is told; `infos["slot_state"]` holds these numbers."""

    CONNECTING = 0
    """Its remote is being connected."""
    RESETTING = 1
    """Its next episode was asked for and has not begun."""
    RUNNING = 2
    """It is in an episode, or has just ended one."""
    LOST = 3
    """Its remote is gone; it is connected again after a while."""


# Events that drop the answer that is here, and so make a step lost.
_DROPS = frozenset({EpisodeEvent.BEGIN, EpisodeEvent.RENEW, EpisodeEvent.FAILED, EpisodeEvent.MOVED})

# A cut slot reads as what its world is: the end that is not told yet is in the flags of the next step.
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
    """What a spare is for: it stands by for the slots of an endpoint, because of a reason."""

    reason: Reason
    place: str = ""
    """The key of the endpoint; empty: any."""


BREAKER_LOSSES = 5
"""Losses of a connection that had been made, within `BREAKER_WINDOW`, after which a remote is left alone."""
BREAKER_WINDOW = 60.0
"""Seconds."""
BREAKER_REST = 30.0
"""Seconds for which it is left alone."""


@dataclasses.dataclass(frozen=True)
class RemoteReport:
    """The state of one remote, and the cost of its failures since the vector environment was made."""

    url: str
    """Its URL."""
    slots: tuple[int, ...]
    """The slots that it fills; none: it is a spare."""
    state: str
    """`connecting`, `resetting`, `running`, `lost`, `resting` (it went too often), or `spare` (ready to take over)."""
    away: float | None
    """Seconds since it went; None: it is there."""
    reason: str | None
    """The reason of its last loss, or of the last failed attempt to connect; None: there was none."""
    losses: int
    """The number of connections that were made and then lost."""
    returns: int
    """The number of times that it came back."""
    seconds_away: float
    """Seconds that it was away altogether, the present absence included."""
    episodes_lost: int
    """Episodes that were cut off, a lane each."""
    steps_asked: int
    """Steps that were sent to it, a lane each."""
    steps_received: int
    """Steps whose results were handed out."""
    steps_lost: int
    """Steps whose results never came: asked = received + lost + those outstanding."""
    moves: int
    """The number of moves of its slots to another server, because theirs drained, always failed, or had too many."""
    episodes_moved: int
    """Episodes of lanes that such a move truncated; none of them is in `episodes_lost`."""
    by_server: Mapping[str, tuple[int, float]]
    """The losses and the seconds away by the URL of the server that was lost: a slot may be at another one since."""


@dataclasses.dataclass
class RemoteRecord:
    """The counters of the remotes that a member had one after the other, and their circuit breaker."""

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
    """The time when it went, or first could not be reached; monotonic seconds. None: it is there."""
    rests_until: float = 0.0
    """The time until which it is left alone; monotonic seconds."""
    _past: float = 0.0  # seconds of the absences that are over
    _away_from: str = ""  # the URL of the server that it is away from, or was last
    _losses_of: Counter[str] = dataclasses.field(default_factory=Counter)
    _past_of: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    _recent: deque[float] = dataclasses.field(default_factory=deque)

    def lost(self, now: float, pause: float, reason: str, *, url: str, established: bool) -> float:
        """Count a loss of the remote, or an attempt to connect that failed.

        Args:
            now: The time.
            pause: Seconds until the next attempt, unless the breaker opens.
            reason: Why.
            url: The URL of the server that it was at, or was to connect to.
            established: Whether there was a connection.

        Returns:
            When to try again.
        """
        self.reason = reason
        # Attempts that fail while it is away do not begin another absence.
        if self.away_since is None:
            self.away_since, self._away_from = now, url
        # Only connections that were made count: to a server that is not there, the growing pauses are enough. One that
        # takes each connection and loses it would be joined again and again, as each episode that begins ends the row
        # of failures.
        if established:
            self.losses += 1
            self._losses_of[url] += 1
            self._recent.append(now)
            while self._recent and now - self._recent[0] > BREAKER_WINDOW:
                self._recent.popleft()
            if len(self._recent) >= BREAKER_LOSSES:
                # After the rest it has as many losses again.
                self._recent.clear()
                self.rests_until = now + BREAKER_REST
        return max(now + pause, self.rests_until)

    def back(self, now: float) -> None:
        """End the absence, if there is one: the remote answers."""
        if self.away_since is not None:
            self._past += now - self.away_since
            self._past_of[self._away_from] += now - self.away_since
            self.away_since = None
            self.returns += 1

    def report(self, now: float, url: str, slots: tuple[int, ...], state: str) -> RemoteReport:
        """Return what there is to say."""
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
"""The counters of a remote; `RemoteReport` says what each of them counts."""


@dataclasses.dataclass(eq=False)
class Member:
    """One remote, the slots that it fills, and their state: `link` and `episode`, which only methods of it assign."""

    remote: Remote
    endpoint: Endpoint
    """Where its world is, or is connected next."""
    start: int
    """Its first slot; of a spare it says nothing."""
    lanes: int
    """The number of its slots."""
    home: ListedEndpoint | None = None
    """The endpoint that it is pinned to, of a list; None: it may be at any of its kind, of a directory."""
    single: bool = True
    """True if it is a single environment rather than lanes, as far as is known."""
    link: LinkState = LinkState.OFFLINE
    """Where its world is."""
    episode: EpisodeState = EpisodeState.IDLE
    """How far its episode is."""
    slots: slice = dataclasses.field(init=False)
    """Its slots in a batch."""
    stands_by: StandBy | None = None
    """What this spare is for; None: it fills slots."""
    record: RemoteRecord = dataclasses.field(default_factory=RemoteRecord)
    """What its failures, and those of its earlier remotes, have cost."""
    deadline: float = 0.0
    """The time from which on an outstanding answer is late; monotonic seconds."""
    silent_until: float = 0.0
    """The time until which a server that is silent is waited for if there are others; monotonic seconds."""
    answer: StepAnswered | None = None
    """A Step's answer that has come and was not handed out yet."""
    last: StepAnswered | None = None
    """The last Step's answer that was handed out."""
    seeds: Sequence[int | None] = ()
    """The seed of each slot, by the last reset with one."""
    episodes: int = 0
    """Episodes that were asked for since."""
    reseeds: bool = False
    """True if its world is another one than the one that got the seeds."""
    settings: Mapping[str, pb.Tensor] | None = None
    """The settings of the Reset that begins its next episode; None: it needs none."""
    error: RemoteError | None = None
    """The reason why it was lost, or why its episode was cut; None: there is none, or an observation came since."""
    refusal: RemoteError | None = None
    """The refusal of its last Reset or Step; None: it was not refused, or it has another world since."""
    complaint: str = ""
    """The last message to the user about a world that does not fit."""
    failures: int = 0
    """Attempts in a row to connect or to reset that failed."""
    retry_at: float = 0.0
    """The time of the next attempt; monotonic seconds."""
    lost_at: float | None = None
    """The time when its user's loop lost it, monotonic seconds; None: it has an observation since, or never had one.
    Unlike `record.away_since` it says nothing of a spare, or of a server that did not answer after a move."""

    def __post_init__(self) -> None:
        self.place(self.start, self.lanes)

    def place(self, start: int, lanes: int) -> None:
        """Fill `lanes` slots from `start` on."""
        self.start, self.lanes, self.slots = start, lanes, slice(start, start + lanes)

    def handle_link(self, event: LinkEvent) -> None:
        """Feed an event to the link's table, and to the episode's what it ends there."""
        # Both are looked up before one changes: an event that is not possible changes nothing.
        link, ending = LINKS[self.link, event], ENDINGS.get(event)
        if ending is not None:
            self._follow(ending)
        self.link = link

    def handle(self, event: EpisodeEvent) -> None:
        """Feed an event to the episode's table."""
        if self.link is not LinkState.JOINED and event is not EpisodeEvent.TOLD:
            raise KeyError(self.link, event)
        self._follow(event)

    def _follow(self, event: EpisodeEvent) -> None:
        """Change the state of the episode, and count a step whose result nobody will have."""
        following = EPISODES[self.episode, event]
        if event in _DROPS:
            if self.episode in STEPPED:
                self.record.steps_lost += self.lanes
            if self.answer is not None:
                # In real time it may hold the records of ended episodes, which the server sends once.
                self.remote.salvage(self.answer.message)
                self.answer = None
        self.episode = following

    # What each step does, as `handle` would, in fewer calls

    def step(self, request: bytes, deadline: float) -> None:
        """Send a Step that `StepWriter` wrote."""
        self.episode = EPISODES[self.episode, EpisodeEvent.STEP]
        self.deadline = deadline
        self.record.steps_asked += self.lanes
        self.remote.send_step(request)

    def take(self, answer: StepAnswered) -> None:
        """Keep an answer until it is handed out."""
        self.episode = EPISODES[self.episode, EpisodeEvent.ANSWER]
        self.answer = answer

    def handed(self) -> None:
        """Forget the answer, which was handed out; it says whether the episode has ended."""
        answer = self.answer
        assert answer is not None, "the table lets nobody hand out what has not come"
        # BEGUN and RENEWED hold the answers to Resets, which `steps_asked` does not count.
        if self.episode is EpisodeState.ANSWERED:
            self.record.steps_received += self.lanes
        self.episode = EPISODES[self.episode, EpisodeEvent.END if answer.ended else EpisodeEvent.HANDED]
        # An observation shows that its world is well again, whatever it was lost by.
        self.last, self.answer, self.error = answer, None, None

    def renewed(self, answer: StepAnswered, *, together: bool) -> None:
        """Keep how lanes began their next episodes in the Step that was handed out last.

        Args:
            answer: The answer to that Step, with how they began.
            together: Whether these are all of its lanes.
        """
        self.last, answer.reader.begun = answer, None
        self.episodes += together

    # What its failures cost

    def back(self, now: float) -> float | None:
        """End its absence, if there is one: its remote answers.

        Returns:
            For how many seconds its slots were without an episode; None: the user knows of no absence.
        """
        self.record.back(now)
        since, self.lost_at = self.lost_at, None
        return None if since is None else now - since

    def seconds_away(self, now: float) -> float | None:
        """Return for how long its remote has not answered; None: it is there."""
        since = self.record.away_since
        return None if since is None else now - since

    def report(self, now: float) -> RemoteReport:
        """Say how its remote is."""
        stands_by = self.stands_by is not None
        slots = () if stands_by else tuple(range(self.start, self.start + self.lanes))
        state = "spare" if stands_by and self.ready else self.state.name.lower()
        return self.record.report(now, self.remote.url, slots, state)

    # What it is

    @property
    def state(self) -> SlotState:
        """The state of its slots, as the user is told."""
        if self.link is LinkState.JOINED:
            return _STATE_OF[self.episode]
        return SlotState.LOST if self.link is LinkState.OFFLINE else SlotState.CONNECTING

    @property
    def ready(self) -> bool:
        """True if it is in a world whose next episode nobody has asked for yet; so a spare stands ready."""
        return self.link is LinkState.JOINED and self.episode is EpisodeState.IDLE

    @property
    def waits(self) -> bool:
        """True if an answer is outstanding, which may be late."""
        return self.link is LinkState.CONNECTING or self.episode in ASKED

    @property
    def fails_every_reset(self) -> bool:
        """True if its environment raised in each of the last attempts to reset it."""
        # Settings that are refused are no sign of a broken environment: `permanent_error` raises those at once.
        return isinstance(self.refusal, EnvironmentFailedError) and self.failures >= _RESET_ATTEMPTS

    @property
    def away(self) -> bool:
        """True if its remote was lost, which its loop was told, and has no observation since."""
        return self.lost_at is not None and self.episode not in SETTLED

    @property
    def kind(self) -> Kind:
        """The kind of its endpoint: it never goes to one of another."""
        return self.endpoint.kind

    @property
    def is_displaced(self) -> bool:
        """True if it is pinned to another endpoint than the one that it is at."""
        return self.home is not None and not self.is_at(self.home)

    def is_displaced_from(self, endpoint: Endpoint) -> bool:
        """Tell whether it is pinned to an endpoint, and at another one."""
        return self.home is not None and self.home.key == endpoint.key and self.is_displaced

    @property
    def may_leave(self) -> bool:
        """True if its next episode may begin elsewhere, because every reset fails where it is."""
        # Who lists a server that fails from the start is told so: of a list, only what has worked before moves.
        return self.fails_every_reset and (self.home is None or self.last is not None)

    @property
    def is_named(self) -> bool:
        """True for a spare that the user named: it stays when it is lost, and swaps places with what it takes over."""
        return self.stands_by is not None and self.stands_by.reason is Reason.NAMED

    def serves(self, member: Member) -> bool:
        """Tell whether this spare, once it is joined, could take over the slots of a member."""
        if self.stands_by is None or self.lanes != member.lanes:
            return False
        # Its spaces are compared when it is joined. What is alike beyond that, the user knows who named it.
        if self.is_named:
            return True
        return self.kind == member.kind and (member.home is None or self.is_at(member.home))

    def suits(self, member: Member) -> bool:
        """Tell whether this spare stands ready to take over the slots of a member."""
        # `single` counts, because a world of one lane, unlike an environment, begins its next episodes by itself.
        return self.ready and self.single == member.single and self.serves(member)

    def betters(self, member: Member) -> bool:
        """Tell whether this spare suits a member that could stay where it is, and is better off here."""
        if member.home is not None:
            better = member.is_displaced and self.is_at(member.home)
        else:
            better = self.stands_by == StandBy(Reason.EVEN_OUT, member.endpoint.key)
        return better and self.suits(member)

    def is_at(self, endpoint: Endpoint) -> bool:
        """Tell whether its world is at an endpoint."""
        return self.endpoint.key == endpoint.key

    @property
    def title(self) -> str:
        """Its slots, as a person calls them."""
        if self.stands_by is not None:
            return f"spare {self.remote.url}"
        return f"slot {self.start}" if self.lanes == 1 else f"slots {self.start} to {self.start + self.lanes - 1}"
