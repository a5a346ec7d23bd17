"""The life of a slot: one table, without input or output, and the data that goes with a state.

A slot is *offline* while its world has no connection, and *connecting* until the world is joined. It is *idle* in a
world whose next episode is still to be asked for, and *resetting* from then on until the first observation, after which
it has *begun*. Once that observation was handed to the user it is *running*; an action makes it *stepping*, until the
answer has come: *answered*. The answer that ends an episode, once handed out, leaves it *ended*: its next step begins
another episode.

Of a world of lanes, some may begin their next episodes while the others are in the midst of theirs: *renewing*, and
*renewed* once the answer is here. What tells these from *resetting* and *begun* is that a loss then cuts episodes.

A slot whose world was lost, or which refused a step, in the midst of an episode has an end to tell that the user does
not know yet. Its world is connected again meanwhile, because a training may compute for minutes between two steps; but
no episode begins before the end was told. So there are three more states: *cut offline*, *cut connecting*, *cut idle*.

A world that stands by as a spare goes through the first three states alone.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bridge.errors import EnvironmentFailedError, RemoteError

if TYPE_CHECKING:
    from bridge.core.client.endpoints import Kind
    from bridge.core.client.world.remote import Remote
    from bridge.core.client.world.session_states import StepAnswered
    from bridge.core.client.world.world_request import WorldRequest
    from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = [
    "CONNECTING",
    "CUT",
    "JOINED",
    "OFFLINE",
    "SETTLED",
    "SPARE",
    "STEPPED",
    "TRANSITIONS",
    "WAITING",
    "Member",
    "SlotEvent",
    "SlotPhase",
    "SlotState",
]

SPARE = -1
"""In place of a first slot: a world that stands by."""
# Resets that fail in a row, after which the environment counts as one that always fails.
_RESET_ATTEMPTS = 3


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


class SlotPhase(enum.Enum):
    """A state of the table. `SlotState` is what the user is told of it."""

    OFFLINE = "offline"
    CONNECTING = "connecting"
    IDLE = "idle"
    RESETTING = "resetting"
    BEGUN = "begun"
    RUNNING = "running"
    STEPPING = "stepping"
    ANSWERED = "answered"
    ENDED = "ended"
    RENEWING = "renewing"
    RENEWED = "renewed"
    CUT_OFFLINE = "cut offline"
    CUT_CONNECTING = "cut connecting"
    CUT_IDLE = "cut idle"

    __hash__ = object.__hash__  # Enum's own is a Python function, and the table is looked up in each step


class SlotEvent(enum.Enum):
    """An event that changes the state."""

    CONNECT = "connection begun"
    JOINED = "world joined"
    BEGIN = "episode asked for"
    RENEW = "episodes of some lanes asked for"
    STEP = "action sent"
    ANSWER = "answer received"
    HANDED = "answer handed out"
    END = "end of the episode handed out"
    REFUSED = "reset or step refused"
    LOST = "connection lost, or given up"
    TOLD = "cut episode told, or given up by a reset"
    MOVE = "moved to a world that is joined"
    MOVE_AHEAD = "moved to a world that is being joined"

    __hash__ = object.__hash__


_P, _E = SlotPhase, SlotEvent

# The stepper asks (BEGIN, RENEW, STEP) and hands results out (HANDED, END, TOLD). The remote's session answers (JOINED,
# ANSWER, REFUSED, LOST). The policy connects and moves (CONNECT, MOVE, MOVE_AHEAD). A pair without a row is a mistake
# of this package, and raises KeyError.
#
# A user may call reset() at any time: so every state of a joined world takes BEGIN. It gives up what runs there, and no
# episode counts as cut, because the user ended it. The next episode may begin elsewhere, if the server drains or fails:
# so MOVE and MOVE_AHEAD stand beside each BEGIN. Only a spare that stands ready takes over the slots of a lost world:
# so OFFLINE has no MOVE_AHEAD.
#
# Every state takes LOST, also those without a connection: a call that gives up late worlds does not look which of them
# the keepalive thread has found to be lost already. In the middle of an episode LOST and REFUSED lead to a cut state.
# Those take no BEGIN and no MOVE: if the next episode began before the end of this one was told, a trainer would join
# both into one.
#
# Every state of a joined world takes REFUSED. Where nothing is asked, as in IDLE, none is expected: the session drops
# refusals of what was given up. But what one server says must never end the training of the others.
#
# END is for single environments. Lanes begin their next episodes by themselves: so RENEWED has no END.
TRANSITIONS: Mapping[tuple[SlotPhase, SlotEvent], SlotPhase] = {
    (_P.OFFLINE, _E.CONNECT): _P.CONNECTING,
    (_P.OFFLINE, _E.LOST): _P.OFFLINE,  # it was lost while a call still waited for it
    (_P.OFFLINE, _E.MOVE): _P.IDLE,  # a spare takes over
    (_P.CONNECTING, _E.JOINED): _P.IDLE,
    (_P.CONNECTING, _E.LOST): _P.OFFLINE,
    (_P.IDLE, _E.BEGIN): _P.RESETTING,
    (_P.IDLE, _E.REFUSED): _P.IDLE,
    (_P.IDLE, _E.LOST): _P.OFFLINE,
    (_P.IDLE, _E.MOVE): _P.IDLE,
    (_P.IDLE, _E.MOVE_AHEAD): _P.CONNECTING,
    # reset() was called again before the first observation came. The session drops the answer to the older Reset.
    (_P.RESETTING, _E.BEGIN): _P.RESETTING,
    (_P.RESETTING, _E.ANSWER): _P.BEGUN,
    (_P.RESETTING, _E.REFUSED): _P.IDLE,
    (_P.RESETTING, _E.LOST): _P.OFFLINE,
    (_P.RESETTING, _E.MOVE): _P.IDLE,
    (_P.RESETTING, _E.MOVE_AHEAD): _P.CONNECTING,
    (_P.BEGUN, _E.BEGIN): _P.RESETTING,
    (_P.BEGUN, _E.HANDED): _P.RUNNING,
    (_P.BEGUN, _E.END): _P.ENDED,  # the first observation of an episode may be its last
    (_P.BEGUN, _E.REFUSED): _P.IDLE,
    (_P.BEGUN, _E.LOST): _P.OFFLINE,  # nobody has seen that the episode had begun
    (_P.BEGUN, _E.MOVE): _P.IDLE,
    (_P.BEGUN, _E.MOVE_AHEAD): _P.CONNECTING,
    (_P.RUNNING, _E.BEGIN): _P.RESETTING,
    (_P.RUNNING, _E.RENEW): _P.RENEWING,  # a reset with a mask, or SAME_STEP, where some lanes ended
    (_P.RUNNING, _E.STEP): _P.STEPPING,
    (_P.RUNNING, _E.REFUSED): _P.CUT_IDLE,  # in real time an action may be refused by itself
    (_P.RUNNING, _E.LOST): _P.CUT_OFFLINE,
    (_P.RUNNING, _E.MOVE): _P.IDLE,
    (_P.RUNNING, _E.MOVE_AHEAD): _P.CONNECTING,
    (_P.STEPPING, _E.BEGIN): _P.RESETTING,
    (_P.STEPPING, _E.ANSWER): _P.ANSWERED,
    (_P.STEPPING, _E.REFUSED): _P.CUT_IDLE,  # its environment raised: the world stays, the episode does not
    (_P.STEPPING, _E.LOST): _P.CUT_OFFLINE,
    (_P.STEPPING, _E.MOVE): _P.IDLE,
    (_P.STEPPING, _E.MOVE_AHEAD): _P.CONNECTING,
    (_P.ANSWERED, _E.BEGIN): _P.RESETTING,
    (_P.ANSWERED, _E.HANDED): _P.RUNNING,
    (_P.ANSWERED, _E.END): _P.ENDED,
    (_P.ANSWERED, _E.REFUSED): _P.CUT_IDLE,
    (_P.ANSWERED, _E.LOST): _P.CUT_OFFLINE,
    (_P.ANSWERED, _E.MOVE): _P.IDLE,
    (_P.ANSWERED, _E.MOVE_AHEAD): _P.CONNECTING,
    (_P.ENDED, _E.BEGIN): _P.RESETTING,
    (_P.ENDED, _E.REFUSED): _P.IDLE,
    (_P.ENDED, _E.LOST): _P.OFFLINE,  # between two episodes nothing is cut
    (_P.ENDED, _E.MOVE): _P.IDLE,
    (_P.ENDED, _E.MOVE_AHEAD): _P.CONNECTING,
    (_P.RENEWING, _E.BEGIN): _P.RESETTING,
    # reset() was called for other lanes before these had begun. The answer to the later Reset is for all lanes.
    (_P.RENEWING, _E.RENEW): _P.RENEWING,
    (_P.RENEWING, _E.ANSWER): _P.RENEWED,
    (_P.RENEWING, _E.REFUSED): _P.CUT_IDLE,
    (_P.RENEWING, _E.LOST): _P.CUT_OFFLINE,
    (_P.RENEWING, _E.MOVE): _P.IDLE,
    (_P.RENEWING, _E.MOVE_AHEAD): _P.CONNECTING,
    (_P.RENEWED, _E.BEGIN): _P.RESETTING,
    (_P.RENEWED, _E.RENEW): _P.RENEWING,
    (_P.RENEWED, _E.HANDED): _P.RUNNING,
    (_P.RENEWED, _E.REFUSED): _P.CUT_IDLE,
    (_P.RENEWED, _E.LOST): _P.CUT_OFFLINE,
    (_P.RENEWED, _E.MOVE): _P.IDLE,
    (_P.RENEWED, _E.MOVE_AHEAD): _P.CONNECTING,
    (_P.CUT_OFFLINE, _E.CONNECT): _P.CUT_CONNECTING,
    (_P.CUT_OFFLINE, _E.LOST): _P.CUT_OFFLINE,
    (_P.CUT_OFFLINE, _E.TOLD): _P.OFFLINE,
    (_P.CUT_CONNECTING, _E.JOINED): _P.CUT_IDLE,
    (_P.CUT_CONNECTING, _E.LOST): _P.CUT_OFFLINE,
    (_P.CUT_CONNECTING, _E.TOLD): _P.CONNECTING,
    (_P.CUT_IDLE, _E.REFUSED): _P.CUT_IDLE,
    (_P.CUT_IDLE, _E.LOST): _P.CUT_OFFLINE,
    (_P.CUT_IDLE, _E.TOLD): _P.IDLE,
}

CUT = frozenset({_P.CUT_OFFLINE, _P.CUT_CONNECTING, _P.CUT_IDLE})
"""An episode was cut, and nobody was told yet."""
SETTLED = frozenset({_P.BEGUN, _P.RUNNING, _P.ANSWERED, _P.ENDED, _P.RENEWED}) | CUT
"""There is nothing to wait for: an observation is here, the news of a cut is, or nothing was asked."""
WAITING = frozenset({_P.CONNECTING, _P.CUT_CONNECTING, _P.RESETTING, _P.RENEWING, _P.STEPPING})
"""An answer is outstanding, which may be late."""
OFFLINE = frozenset({_P.OFFLINE, _P.CUT_OFFLINE})
"""There is no connection."""
CONNECTING = frozenset({_P.CONNECTING, _P.CUT_CONNECTING})
"""A connection is being made."""
JOINED = frozenset(SlotPhase) - OFFLINE - CONNECTING
"""It is in a world."""
STEPPED = frozenset({_P.STEPPING, _P.ANSWERED})
"""A step's answer is outstanding, or was not taken."""

# Events that drop the answer that is here, and so make a step lost.
_DROPS = frozenset({_E.BEGIN, _E.RENEW, _E.REFUSED, _E.LOST, _E.MOVE, _E.MOVE_AHEAD})

# A cut slot reads as what its world is: the end that is not told yet is in the flags of the next step.
_STATE_OF: Mapping[SlotPhase, SlotState] = {
    **dict.fromkeys(SlotPhase, SlotState.RUNNING),
    **dict.fromkeys(OFFLINE, SlotState.LOST),
    **dict.fromkeys(CONNECTING, SlotState.CONNECTING),
    **dict.fromkeys((_P.IDLE, _P.CUT_IDLE, _P.RESETTING, _P.RENEWING), SlotState.RESETTING),
}


@dataclasses.dataclass(eq=False)
class Member:
    """One remote, the slots that it fills, and their state. `handle` alone assigns it."""

    remote: Remote
    start: int
    """Its first slot; `SPARE`: it stands by."""
    lanes: int
    """The number of its slots."""
    endpoint: str | None = None
    """The key of its endpoint in a directory; None: there is none."""
    kind: Kind | None = None
    """The kind of its endpoints: it never goes to one of another; None: to any."""
    single: bool = True
    """True if it is a single environment rather than lanes, as far as is known."""
    phase: SlotPhase = SlotPhase.OFFLINE
    slots: slice = dataclasses.field(init=False)
    """Its slots in a batch."""
    relieves: str | None = None
    """The place whose slot this spare is for. In a directory, the key of the endpoint that has too many slots; of a
    list, the URL of the server that the slot goes back to. None: it is for any slot, or this is no spare."""
    home: WorldRequest | None = None
    """The world that the user listed, while this one at another server stands in for it; None: this is it."""
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
    away_since: float | None = None
    """The time when its remote was lost, monotonic seconds; None: it has an observation since, or never had one."""

    def __post_init__(self) -> None:
        self.place(self.start, self.lanes)

    def place(self, start: int, lanes: int) -> None:
        """Let it fill `lanes` slots from `start` on."""
        self.start, self.lanes, self.slots = start, lanes, slice(start, start + lanes)

    def handle(self, event: SlotEvent) -> None:
        """Take an event: change the state as the table says, and count a step whose result nobody will have."""
        # Before the state changes: the old one says whether a step was outstanding.
        if event in _DROPS:
            if self.phase in STEPPED:
                self.remote.record.steps_lost += self.lanes
            if self.answer is not None:
                # In real time it may hold the records of ended episodes, which the server sends once.
                self.remote.salvage(self.answer.message)
                self.answer = None
        self.phase = TRANSITIONS[self.phase, event]

    # What each step does, as `handle` would, in fewer calls

    def step(self, request: bytes, deadline: float) -> None:
        """Send a Step that `JoinedWorld` wrote."""
        self.phase = TRANSITIONS[self.phase, SlotEvent.STEP]
        self.deadline = deadline
        self.remote.record.steps_asked += self.lanes
        self.remote.send_step(request)

    def take(self, answer: StepAnswered) -> None:
        """Keep an answer until it is handed out."""
        self.phase = TRANSITIONS[self.phase, SlotEvent.ANSWER]
        self.answer = answer

    def handed(self, *, ended: bool) -> None:
        """Take note that the answer was handed out, and whether it ended the episode."""
        # BEGUN and RENEWED hold the answers to Resets, which `steps_asked` does not count.
        if self.phase is SlotPhase.ANSWERED:
            self.remote.record.steps_received += self.lanes
        self.phase = TRANSITIONS[self.phase, SlotEvent.END if ended else SlotEvent.HANDED]
        # An observation shows that its world is well again, whatever it was lost by.
        self.last, self.answer, self.error = self.answer, None, None

    @property
    def state(self) -> SlotState:
        """The state of its slots, as the user is told."""
        return _STATE_OF[self.phase]

    @property
    def fails_every_reset(self) -> bool:
        """True if its environment raised in each of the last attempts to reset it."""
        # Settings that are refused are no sign of a broken environment: `permanent_error` raises those at once.
        return isinstance(self.refusal, EnvironmentFailedError) and self.failures >= _RESET_ATTEMPTS

    @property
    def away(self) -> bool:
        """True if its remote was lost, which its loop was told, and has no observation since."""
        return self.away_since is not None and self.phase not in SETTLED

    @property
    def title(self) -> str:
        """Its slots, as a person calls them."""
        return f"slot {self.start}" if self.lanes == 1 else f"slots {self.start} to {self.start + self.lanes - 1}"
