"""The client's end: through the lobby into a run, and through the run to its end. No clock, no socket.

Datagrams go in with their sender and the time, datagrams to send come out; what the user has to know is in `events`.
Everything is repeated until it has been seen to work, so any one datagram may be lost, doubled or late.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from typing import TypeAlias

from bridge.errors import PacketError
from bridge.perlert import packet, profile
from bridge.perlert.codec import parse_decimal
from bridge.perlert.guard import Address
from bridge.perlert.lobby import Outgoing
from bridge.perlert.stats import Stats

__all__ = ["TRANSITIONS", "Event", "LobbyChanged", "Player", "PlayerConfig", "RunStarted", "Said", "State", "Stepped"]


class State(enum.Enum):
    """Where the client is."""

    ASKING = "asking"
    REGISTERING = "registering"
    WAITING = "waiting"
    JOINING = "joining"
    PLAYING = "playing"
    OVER = "over"


class Event(enum.Enum):
    """What moves it on."""

    CHOSEN = "there is a slot to take"
    REFUSED = "the slot is somebody else's"
    REGISTERED = "the slot is ours"
    TAKEN_OUT = "the slot is no longer ours"
    START = "the lobby told a rollout port that is new"
    STEP = "a step came"
    DONE = "a step with done=true came"
    GONE = "the lobby knows of no run, and no step came"
    AGAIN = "the user wants the next run"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.ASKING, Event.CHOSEN): State.REGISTERING,
    (State.REGISTERING, Event.REFUSED): State.ASKING,
    (State.REGISTERING, Event.REGISTERED): State.WAITING,
    (State.REGISTERING, Event.START): State.JOINING,
    (State.WAITING, Event.TAKEN_OUT): State.REGISTERING,
    (State.WAITING, Event.START): State.JOINING,
    (State.JOINING, Event.START): State.JOINING,
    (State.JOINING, Event.STEP): State.PLAYING,
    (State.JOINING, Event.DONE): State.OVER,
    (State.JOINING, Event.GONE): State.WAITING,
    (State.PLAYING, Event.STEP): State.PLAYING,
    (State.PLAYING, Event.DONE): State.OVER,
    (State.PLAYING, Event.GONE): State.OVER,
    (State.OVER, Event.AGAIN): State.WAITING,
}


@dataclasses.dataclass(frozen=True)
class PlayerConfig:
    """Times of a client, in seconds."""

    poll: float = 1.0
    """How often the lobby is asked."""
    retry: float = 0.4
    """How often a registration or a ready that has not been confirmed is sent again."""
    offers: int = 8
    """Registrations without an offer of the profile after which we are ready without one."""
    repeat: float = 0.2
    """How often the action is sent again while no step comes."""
    keepalive: float = 1.0
    """How often the action is sent again while steps come."""
    silence: float = 12.0
    """Without a step for so long, the lobby is believed when it knows of no run. More than the server's linger."""


@dataclasses.dataclass(frozen=True)
class LobbyChanged:
    """The lobby was told anew."""

    slots: tuple[packet.Slot, ...]


@dataclasses.dataclass(frozen=True)
class Said:
    """The server said something to people."""

    text: str


@dataclasses.dataclass(frozen=True)
class RunStarted:
    """A run's port is known."""

    port: int


@dataclasses.dataclass(frozen=True)
class Stepped:
    """What the agent sees of a step, and everything it was rewarded since the one before."""

    step: int
    timestamp: int
    """Milliseconds since 1970 by the server's clock."""
    observation: str
    reward: Decimal
    """The sum since the last one of these; rewards of lost steps are in it when the server has the profile."""
    ret: Decimal
    """The return so far."""
    done: bool
    truncated: bool = False
    lost: bool = False
    """The end was never seen; the observation is the last that was."""
    ack: int | None = None
    """The newest action that the server had applied; None: a plain server."""


PlayerEvent: TypeAlias = LobbyChanged | Said | RunStarted | Stepped


class Player:
    """One client of one instance.

    Args:
        header: Which instance.
        server: IP address and port of the lobby.
        tag: What to be called.
        agent: The slot to take; None: the first open one that is not a spectator's.
        action: The text of the action to send at once when a run starts.
        use_profile: Offer the profile to the server.
        ready: Say that we are ready as soon as we have a slot.
        choose: Take a slot by ourselves; False: only the one that `set_agent` names.
        config: Times.
    """

    def __init__(
        self,
        header: packet.Header,
        server: Address,
        *,
        tag: str,
        agent: str | None = None,
        action: str | None = None,
        use_profile: bool = True,
        ready: bool = True,
        choose: bool = True,
        config: PlayerConfig | None = None,
    ) -> None:
        self.header, self.server, self.tag, self.agent = header, server, tag, agent
        self.config = config or PlayerConfig()
        self.state = State.ASKING
        self.events: deque[PlayerEvent] = deque()
        self.slots: dict[str, packet.Slot] = {}
        self.key: str | None = None
        """Our slot, or the one that we ask for."""
        self.offer: profile.Offer | None = None
        self.stats = Stats()
        self.counts: Counter[str] = Counter()
        """Datagrams that changed nothing, by reason, over all runs."""
        self.port: int | None = None
        self.seq = 0
        """The number of the newest action."""
        self._use_profile, self._wants_ready, self._default = use_profile, ready, action
        self._old_ports: deque[int] = deque(maxlen=16)
        self._action: str | None = action
        self._chooses = choose
        self._offers_asked = 0
        self._confirmed = False
        self._busy = False
        self._gone = 0
        self._next_poll = self._next_retry = -math.inf
        self._next_action = math.inf
        self._last_step = -math.inf
        self._newest: tuple[int, int] = (-1, -1)
        self._known: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._sent_at: OrderedDict[int, float] = OrderedDict()
        self._acked = 0
        self._steps = 0
        self._ret = self._told = Decimal(0)
        self._last: packet.Step | None = None

    @property
    def settled(self) -> bool:
        """Whether everything is known that the server tells before a run: its offer, or that it makes none."""
        return self._done_offering()

    # What the user asks for

    def set_default(self, text: str) -> None:
        """Set the action that is sent at once when a run starts."""
        self._default = self._action = text

    def set_agent(self, key: str | None, now: float) -> list[Outgoing]:
        """Take another slot."""
        self.agent = key
        if self.state in (State.ASKING, State.REGISTERING, State.WAITING):
            self.state, self.key, self._confirmed = State.ASKING, None, False
            self._choose(now)
        return self.tick(now)

    def set_ready(self, ready: bool, now: float) -> list[Outgoing]:
        """Be ready for the next run, or no longer."""
        self._wants_ready, self._confirmed, self._next_retry = ready, False, now
        return self.tick(now)

    def again(self, now: float, *, ready: bool = True) -> list[Outgoing]:
        """Go for the next run, after the last one is over."""
        if self.state is State.OVER:
            self._move(Event.AGAIN)
            self._wants_ready, self._confirmed, self._busy = ready, False, False
            self._next_poll = self._next_retry = now
            self._action = self._default
        return self.tick(now)

    def act(self, text: str, now: float) -> list[Outgoing]:
        """Do this from now on."""
        self._action = text
        self.seq += 1
        return self._send_action(now)

    def leave(self) -> list[Outgoing]:
        """Say that we are not ready, so that no run starts with us; the registration expires."""
        if self.key is None or self.state is State.ASKING:
            return []
        return [(packet.format_message(packet.Ready(self.header, self.key, False)), self.server)]

    def waits_for(self) -> str:
        """Return what is missing, for an error or a display."""
        if not self.slots:
            return "the lobby has not answered"
        if self.state in (State.ASKING, State.REGISTERING):
            if self.agent is not None and self.agent not in self.slots:
                return f"there is no slot {self.agent!r}; the slots are {', '.join(self.slots)}"
            if self.agent is not None and not self._mine(self.slots[self.agent]) and not self.slots[self.agent].open:
                return f"the slot {self.agent!r} is held by {self.slots[self.agent].tag!r}"
            if all(not slot.open for slot in self.slots.values()):
                return "no slot is open"
            return "the registration was not answered"
        if self.state is State.WAITING:
            if self._busy:
                return "the last run still goes on for others"
            unready = [key for key, slot in self.slots.items() if not slot.ready]
            if unready:
                return f"the simulation has not started; open or not ready: {', '.join(unready)}"
            return "the simulation has not started"
        return f"no step came from the rollout port {self.port}"

    # Input

    def receive(self, datagram: bytes, sender: Address, now: float) -> list[Outgoing]:
        """Take a datagram; whatever it holds, nothing is raised."""
        if sender[0] != self.server[0] or not (
            sender[1] == self.server[1] or sender[1] == self.port or sender[1] in self._old_ports
        ):
            return self._drop("stale", "another sender")
        try:
            message = packet.parse_server(datagram)
        except PacketError:
            return self._drop("malformed", "malformed")
        if message.header != self.header:
            return self._drop("stale", "another instance")
        if isinstance(message, packet.Step):
            if sender[1] != self.port or self.state not in (State.JOINING, State.PLAYING):
                if sender[1] == self.port:
                    self.stats.received += 1
                    self.stats.duplicates += 1  # done=true again
                    return []
                return self._drop("stale", "an older run")
            return self._on_step(message, now)
        if sender[1] != self.server[1]:  # P-12
            return self._drop("stale", "not the lobby's port")
        if isinstance(message, packet.LobbyInfo):
            self._on_info(message, now)
        elif isinstance(message, packet.Registered):
            if message.key == self.key and self.state is State.REGISTERING:
                self._registered(now)
        elif isinstance(message, packet.Message):
            self._on_message(message, now)
        else:
            self._on_start(message, now)
        return self.tick(now)

    def _drop(self, counter: str, reason: str) -> list[Outgoing]:
        self.counts[reason] += 1
        setattr(self.stats, counter, getattr(self.stats, counter) + 1)
        return []

    def _move(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    def _mine(self, slot: packet.Slot) -> bool:
        return not slot.open and slot.tag in (self.tag, profile.profile_tag(self.tag))

    def _choose(self, now: float) -> None:
        key = self.agent
        if key is None and self._chooses:
            free = [slot for slot in self.slots.values() if slot.open and slot.kind != "spectator"]
            # A slot that nobody plays before one that a bot plays.
            free.sort(key=lambda slot: slot.ready)
            key = free[0].key if free else None
        if key is not None and key in self.slots and (self.slots[key].open or self._mine(self.slots[key])):
            self.key = key
            self._move(Event.CHOSEN)
            self._next_retry = now

    def _registered(self, now: float) -> None:
        self._move(Event.REGISTERED)
        self._confirmed = False
        self._next_retry = now + (0 if self._done_offering() else self.config.retry)

    def _on_info(self, message: packet.LobbyInfo, now: float) -> None:
        before = dict(self.slots)
        self.slots.update((slot.key, slot) for slot in message.slots)
        if self.slots != before:
            self.events.append(LobbyChanged(tuple(self.slots.values())))
        if self.state is State.ASKING:
            self._choose(now)
        own = next((slot for slot in message.slots if slot.key == self.key), None)
        if own is None:
            return
        if self.state is State.REGISTERING:
            if self._mine(own):
                self._registered(now)
            elif not own.open:
                self._move(Event.REFUSED)
                self.slots[own.key] = own
        elif self.state is State.WAITING:
            if not self._mine(own):
                self._move(Event.TAKEN_OUT)
                self._next_retry = max(self._next_retry, now)
            else:
                self._busy = self._busy and own.ready
                self._confirmed = own.ready == self._wants_ready and not self._busy
        elif self.state in (State.JOINING, State.PLAYING) and now >= self._last_step + self.config.silence:
            # The lobby answers with the port while the run is on, and then with nobody ready.
            self._gone += not self._mine(own) or not own.ready
            if self._gone >= 3:
                self._lose(now)

    def _on_message(self, message: packet.Message, now: float) -> None:
        offer = profile.parse_offer(message.text) if self._use_profile else None
        if offer is None:
            self.events.append(Said(message.text))
        elif self.offer is None or not self.offer.complete or offer.complete:
            if self.offer is None or not self.offer.complete:  # return the token, or say that we are ready
                self._next_retry = min(self._next_retry, now)
            self.offer = offer

    def _on_start(self, message: packet.Start, now: float) -> None:
        if message.port in self._old_ports:
            self._busy = self._busy or self.state is State.WAITING
            self.counts["an older run's start"] += 1
            return
        if message.port == self.port or (self.state, Event.START) not in TRANSITIONS:
            self._gone = 0
            return
        self._move(Event.START)
        if self.port is not None:
            self._old_ports.append(self.port)
        self.port = message.port
        self.stats = Stats()
        self._newest, self._acked, self._steps, self._gone = (-1, -1), 0, 0, 0
        self._known.clear()
        self._sent_at.clear()
        self._ret = self._told = Decimal(0)
        self._last = None
        self._last_step = now
        self.seq += 1
        self._next_action = now  # at once: a NAT lets steps through only after we have sent there
        self.events.append(RunStarted(message.port))

    def _on_step(self, message: packet.Step, now: float) -> list[Outgoing]:
        stats = self.stats
        stats.received += 1
        order = (message.step, message.timestamp)
        if order in self._known:
            stats.duplicates += 1
            return []
        try:
            reward = parse_decimal(message.reward)
        except PacketError:
            return self._drop("malformed", "malformed")
        extra = profile.parse_extra(message.extra) if self._use_profile else None
        if extra is not None and extra.token is not None and self.offer is None:
            self.offer = profile.Offer(extra.token)
        self._known[order] = None
        if len(self._known) > 1024:
            self._known.popitem(last=False)
        self._steps += 1
        if extra is None:
            self._ret += reward  # a late step's reward, too: it is in no other one
        if order < self._newest:
            stats.reordered += 1
            return []
        self._newest = order
        self._last_step = now
        self._gone = 0
        stats.arrival(message.timestamp, now)
        if extra is not None:
            self._ret = extra.ret
            stats.lost = max(0, extra.sent - self._steps)
            stats.actions_lost = max(0, stats.sent - extra.got)
            if extra.ack > self._acked:
                self._acked = extra.ack
                if (sent := self._sent_at.get(extra.ack)) is not None:
                    stats.round_trip(now - sent)
        self._last = message
        self._move(Event.DONE if message.done else Event.STEP)
        self.events.append(
            Stepped(
                message.step,
                message.timestamp,
                message.observation,
                self._ret - self._told,
                self._ret,
                message.done,
                truncated=message.done and extra is not None and extra.end == "truncated",
                ack=extra.ack if extra is not None else None,
            )
        )
        self._told = self._ret
        if message.done:
            self._ended()
        return []

    def _ended(self) -> None:
        if self.port is not None:
            self._old_ports.append(self.port)
        self._next_action = math.inf

    def _lose(self, now: float) -> None:
        """The run is over and its end can no longer be had."""
        if self.state is State.JOINING:
            self._move(Event.GONE)
            self._confirmed, self._next_retry = False, now
        else:
            self._move(Event.GONE)
            assert self._last is not None
            self.events.append(
                Stepped(
                    *(self._last.step, self._last.timestamp, self._last.observation, self._ret - self._told, self._ret),
                    done=True,
                    truncated=True,
                    lost=True,
                )
            )
            self._told = self._ret
        self._ended()

    # Output

    def _token(self) -> str | None:
        return self.offer.token if self.offer is not None else None

    def _done_offering(self) -> bool:
        complete = self.offer is not None and self.offer.complete
        return not self._use_profile or complete or self._offers_asked >= self.config.offers

    def _send_action(self, now: float) -> list[Outgoing]:
        if self._action is None or self.port is None or self.state not in (State.JOINING, State.PLAYING):
            return []
        token = self._token()
        text = profile.action_text(token, self.seq, self._action) if token else self._action
        datagram = packet.format_message(packet.Action(self.header, text))
        if self.seq not in self._sent_at:
            self._sent_at[self.seq] = now
            if len(self._sent_at) > 1024:
                self._sent_at.popitem(last=False)
        self.stats.sent += 1
        silent = now - self._last_step > self.config.repeat or self.state is State.JOINING
        self._next_action = now + (self.config.repeat if silent else self.config.keepalive)
        return [(datagram, (self.server[0], self.port))]

    def _register(self) -> Outgoing:
        assert self.key is not None
        tag = profile.profile_tag(self.tag, self._token()) if self._use_profile else self.tag
        self._offers_asked += self.state is State.WAITING
        return packet.format_message(packet.Register(self.header, self.key, tag)), self.server

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due: ask, repeat, keep contact."""
        out: list[Outgoing] = []
        if self.state is State.OVER:
            return out
        if self.state in (State.JOINING, State.PLAYING):
            if now >= self._next_action:
                out += self._send_action(now)
                if not out:
                    self._next_action = math.inf
            # Without steps the lobby is asked, too: it has the port while the run is on.
            polls = now >= self._last_step + 2 * self.config.poll
        else:
            polls = True
            if now >= self._next_retry:
                out += self._retry(now)
        if polls and now >= self._next_poll:
            self._next_poll = now + self.config.poll
            out.append((packet.format_message(packet.LobbyRequest(self.header)), self.server))
        return out

    def _retry(self, now: float) -> list[Outgoing]:
        self._next_retry = now + self.config.retry
        if self.state is State.REGISTERING:
            return [self._register()]
        if self.state is State.WAITING:
            if not self._done_offering():
                return [self._register()]
            if not self._confirmed and not self._busy and self.key is not None:
                return [(packet.format_message(packet.Ready(self.header, self.key, self._wants_ready)), self.server)]
        return []

    def wake(self) -> float:
        """Return when `tick` is due next."""
        if self.state is State.OVER:
            return math.inf
        if self.state in (State.JOINING, State.PLAYING):
            return min(self._next_action, max(self._next_poll, self._last_step + 2 * self.config.poll))
        return min(self._next_poll, self._next_retry)
