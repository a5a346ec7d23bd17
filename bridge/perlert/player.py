"""The client's end: through the lobby into a run, and through the run to its end. No clock, no socket.

Datagrams go in with their sender and the time, datagrams to send come out; what the user has to know is in `events`.
Everything is repeated until it has been seen to work, so any one datagram may be lost, doubled or late.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import deque

from bridge.errors import PacketError
from bridge.perlert.guard import Address, Outgoing
from bridge.perlert.player_run import PlayerEvent, PlayerRun, Stats
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.codec import parse_decimal

__all__ = ["TRANSITIONS", "Event", "Player", "PlayerConfig", "State"]

_MOST_SLOTS = 1024
_MOST_EVENTS = 1024


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
    ownership: float = 3.0
    """A slot that the lobby lists as taken, and whose registration is not confirmed for so long, is not ours."""
    repeat: float = 0.2
    """How often the action is sent again while no step comes."""
    keepalive: float = 1.0
    """How often the action is sent again while steps come."""
    silence: float = 12.0
    """Without a step for so long, the lobby is believed when it knows of no run. More than the server's linger."""


@dataclasses.dataclass
class _Claim:
    """How far we are with our slot."""

    wants_ready: bool
    former: str = ""
    """The token of our former address, until the slot is ours."""
    seq: int = 0
    """The number of the newest registration."""
    owned_at: float = -math.inf
    """When the server confirmed our slot last, or we began to ask for it."""
    confirmed: bool = False
    """Whether the lobby lists us as ready, or not, as we want to be."""
    busy: bool = False
    """Whether the last run goes on for others."""


class Player:
    """One client of one instance, of the server whose lobby has this IP address and port.

    Args:
        tag: What to be called.
        agent: The slot to take; None: the first open one that is not a spectator's.
        action: The text of the action to send at once when a run starts.
        use_profile: Offer the profile to the server.
        ready: Say that we are ready as soon as we have a slot.
        choose: Take a slot by ourselves; False: only the one that `set_agent` names.
        former: The token of a client whose slot we take over: ours, before we had another address.
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
        former: str = "",
        config: PlayerConfig | None = None,
    ) -> None:
        self.header, self.server, self.tag, self.agent = header, server, tag, agent
        self.config = config or PlayerConfig()
        self.state = State.ASKING
        self.events: deque[PlayerEvent] = deque(maxlen=_MOST_EVENTS)
        """The oldest go where nobody takes them; `Stepped.ret` still has every reward."""
        self.slots: dict[str, packet.Slot] = {}
        self.key: str | None = None
        """Our slot, or the one that we ask for."""
        self.offer: profile.Offer | None = None
        self.plain = not use_profile
        """Whether the server is known to have no profile."""
        self.said = ""
        """The last text for people."""
        self.heard_at = -math.inf
        """When the server sent something last that can be read."""
        self.port: int | None = None
        self.seq = 0
        """The number of the newest action."""
        self._run = PlayerRun(-math.inf)
        self._claim = _Claim(ready, former)
        self._default = action
        self._ports: deque[int] = deque(maxlen=16)
        """Those of the newest runs, this one's last."""
        self._action: str | None = action
        self._chooses = choose
        self._next_poll = self._next_retry = -math.inf

    @property
    def stats(self) -> Stats:
        """What was measured in this run."""
        return self._run.stats

    @property
    def token(self) -> str:
        """What the server knows us by; empty: not known, or a plain server."""
        return self.offer.token if self.offer is not None else ""

    @property
    def settled(self) -> bool:
        """Whether everything is known that the server tells before a run: its offer, or that it makes none."""
        return self.plain or (self.offer is not None and self.offer.fps is not None)

    @property
    def registered(self) -> bool:
        """Whether we have a slot."""
        return self.state not in (State.ASKING, State.REGISTERING)

    @property
    def in_run(self) -> bool:
        """Whether a run is on that we have a part in."""
        return self.state in (State.JOINING, State.PLAYING)

    # What the user asks for

    def set_default(self, text: str) -> None:
        """Set the action that is sent at once when a run starts."""
        self._default = self._action = text

    def set_agent(self, key: str | None, now: float) -> list[Outgoing]:
        """Take another slot."""
        self.agent = key
        if self.state in (State.ASKING, State.REGISTERING, State.WAITING):
            self.state, self.key, self._claim.confirmed = State.ASKING, None, False
            self._choose(now)
        return self.tick(now)

    def set_ready(self, ready: bool, now: float) -> list[Outgoing]:
        """Be ready for the next run, or no longer."""
        self._claim.wants_ready, self._claim.confirmed, self._next_retry = ready, False, now
        return self.tick(now)

    def again(self, now: float, *, ready: bool = True) -> list[Outgoing]:
        """Go for the next run, after the last one is over."""
        if self.state is State.OVER:
            self._move(Event.AGAIN)
            self._claim.wants_ready, self._claim.confirmed, self._claim.busy = ready, False, False
            self._next_poll = self._next_retry = self._claim.owned_at = now
            self._action = self._default
        return self.tick(now)

    def act(self, text: str, now: float) -> list[Outgoing]:
        """Do this from now on."""
        self._action = text
        self.seq += 1
        return self._send_action(now)

    def leave(self) -> list[Outgoing]:
        """Give the slot up; a server without the profile is told that we are not ready."""
        if self.key is None or self.state is State.ASKING:
            return []
        if self.plain or not self.token:
            return [self._say(packet.Ready(self.header, self.key, False))]
        return [self._register(self.key, "l")] * 2  # nobody will say it again

    def waits_for(self) -> str:
        """Return what is missing, for an error or a display."""
        if not self.slots:
            return f"the lobby has not answered{f', but said: {self.said}' if self.said else ''}"
        if not self.registered:
            if self.agent is not None and self.agent not in self.slots:
                return f"there is no slot {self.agent!r}; the slots are {', '.join(self.slots)}"
            if self.agent is not None and not self.slots[self.agent].open:
                return f"the slot {self.agent!r} is held by {self.slots[self.agent].tag!r}"
            if all(not slot.open for slot in self.slots.values()):
                return "no slot is open"
            return "the registration was not answered"
        if self.state is State.WAITING:
            if not self.settled:
                return "the server has confirmed the registration, and has not told its spaces yet"
            if self._claim.busy:
                return "the last run still goes on for others"
            unready = [key for key, slot in self.slots.items() if not slot.ready]
            if unready:
                return f"the simulation has not started; open or not ready: {', '.join(unready)}"
            return "the simulation has not started"
        return f"no step came from the rollout port {self.port}"

    # Input

    def receive(self, datagram: bytes, sender: Address, now: float, arrived: float | None = None) -> list[Outgoing]:
        """Take a datagram, which arrived at `arrived` (None: now); whatever it holds, nothing is raised."""
        try:
            message = packet.parse_server(datagram)
        except PacketError:
            self.stats.malformed += 1
            return []
        port = self.port if isinstance(message, packet.Step) else self.server[1]  # P-12, P-13
        if sender != (self.server[0], port) or message.header != self.header:
            self.stats.stale += 1
            return []
        self.heard_at = now
        if isinstance(message, packet.Step):
            self._on_step(message, now, now if arrived is None else arrived)
            return []
        if isinstance(message, packet.LobbyInfo):
            self._on_info(message, now)
        elif isinstance(message, packet.Registered):
            self._on_registered(message, now)
        elif isinstance(message, packet.Message):
            self._on_message(message, now)
        else:
            self._on_start(message, now)
        return self.tick(now)

    def _move(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    def _may_be_ours(self, slot: packet.Slot) -> bool:
        """Tell whether a slot is listed with our tag, which is a hint and no proof."""
        return not slot.open and profile.parse_tag(slot.tag).name == self.tag

    def _choose(self, now: float) -> None:
        key = self.agent
        if key is None and self._chooses:
            free = [slot for slot in self.slots.values() if slot.kind != "spectator"]
            free = [slot for slot in free if slot.open] or [slot for slot in free if self._may_be_ours(slot)]
            # A slot that nobody plays before one that a bot plays.
            free.sort(key=lambda slot: slot.ready)
            key = free[0].key if free else None
        slot = self.slots.get(key) if key is not None else None
        if slot is not None and (slot.open or self._claim.former or self._may_be_ours(slot)):
            self.key = key
            self._move(Event.CHOSEN)
            self._next_retry = self._claim.owned_at = now

    def _on_registered(self, message: packet.Registered, now: float) -> None:
        """Take S2, which says that a slot is ours."""
        if message.key != self.key or self.state not in (State.REGISTERING, State.WAITING):
            return
        if not self.token:
            self.plain = True  # a server with the profile confirms nothing before it has told the token
        self._own(now)

    def _own(self, now: float) -> None:
        self._claim.owned_at = now
        if self.state is State.REGISTERING:
            self._move(Event.REGISTERED)
            self._claim.former = ""
            self._claim.confirmed = False
            self._next_retry = now if self.settled else now + self.config.retry

    def _on_info(self, message: packet.LobbyInfo, now: float) -> None:
        before = dict(self.slots)
        for slot in message.slots:
            if slot.key in self.slots or len(self.slots) < _MOST_SLOTS:
                self.slots[slot.key] = slot
        if self.slots != before and not (self.events and isinstance(self.events[-1], packet.LobbyInfo)):
            self.events.append(message)
        if self.state is State.ASKING:
            self._choose(now)
        own = next((slot for slot in message.slots if slot.key == self.key), None)
        if own is None:
            return
        unconfirmed = now > self._claim.owned_at + self.config.ownership
        if self.state is State.REGISTERING:
            if not own.open and not self._claim.former and (unconfirmed or not self._may_be_ours(own)):
                self._move(Event.REFUSED)
        elif self.state is State.WAITING:
            if not self._may_be_ours(own) or (unconfirmed and not self.plain):
                self._move(Event.TAKEN_OUT)
                self._next_retry = max(self._next_retry, now)
                self._claim.owned_at = now
            else:
                self._claim.busy = self._claim.busy and own.ready
                self._claim.confirmed = own.ready == self._claim.wants_ready and not self._claim.busy
        elif self.in_run and now >= self._run.last_step + self.config.silence:
            # The lobby answers with the port while the run is on, and then with nobody ready.
            self._run.gone += not self._may_be_ours(own) or not own.ready
            if self._run.gone >= 3:
                self._lose(now)

    def _on_message(self, message: packet.Message, now: float) -> None:
        offer = None if self.plain else profile.parse_offer(message.text)
        if offer is None:
            self.said = message.text
            self.events.append(message)
            return
        alive = now < max(self._claim.owned_at + self.config.ownership, self._run.last_step + 2 * self.config.poll)
        if self.settled and offer.token != self.token and alive:
            return  # a server that began anew confirms nothing by the old one
        self._claim.seq = max(self._claim.seq, offer.seq)
        if self.offer is None:
            self._claim.owned_at = now  # from here on registrations can be confirmed
        if offer.token != self.token or not self.settled:
            self._next_retry = min(self._next_retry, now)  # return the token, or say that we are ready
        if offer.token != self.token or offer.fps is not None:
            self.offer = offer
        if offer.slot == self.key and self.state in (State.REGISTERING, State.WAITING):
            self._own(now)  # it says what S2 says

    def _on_start(self, message: packet.Start, now: float) -> None:
        if message.port in self._ports or (self.state, Event.START) not in TRANSITIONS:
            self._run.gone = 0
            self._claim.busy = self._claim.busy or self.state is State.WAITING
            return
        self._move(Event.START)
        self.port = message.port
        self._ports.append(message.port)
        self._run = PlayerRun(now)
        self.seq += 1
        self._run.next_action = now  # at once: a NAT lets steps through only after we have sent there
        self.events.append(message)

    def _on_step(self, message: packet.Step, now: float, arrived: float) -> None:
        run, stats = self._run, self.stats
        stats.received += 1
        # After the end, done=true comes again.
        if not self.in_run or (message.step, message.timestamp) in run.known:
            stats.duplicates += 1
            return
        try:
            reward = parse_decimal(message.reward)
        except PacketError:
            stats.malformed += 1
            return
        extra = None if self.plain else profile.parse_extra(message.extra)
        if self.token and (extra is None or extra.token != self.token):
            stats.stale += 1  # whoever made it cannot see what is sent to us
            return
        if not run.take(message, extra, reward, arrived):
            return
        run.last_step = now
        ack = extra.ack if extra is not None else None
        self.seq = max(self.seq, ack or 0)  # this address had another client before
        self._move(Event.DONE if message.done else Event.STEP)
        truncated = message.done and extra is not None and extra.end == "truncated"
        self.events.append(run.stepped(message.done, truncated, ack=ack))
        if message.done:
            run.next_action = math.inf

    def _lose(self, now: float) -> None:
        """The run is over and its end can no longer be had."""
        joined = self.state is State.PLAYING
        self._move(Event.GONE)
        if joined and self._run.last is not None:
            self.events.append(self._run.stepped(True, True, lost=True))
        else:
            self._claim.confirmed, self._next_retry, self._claim.owned_at = False, now, now
        self._run.next_action = math.inf

    # Output

    def _send_action(self, now: float) -> list[Outgoing]:
        run, text = self._run, self._action
        if text is None or self.port is None or not self.in_run:
            run.next_action = math.inf
            return []
        if self.token and not self.plain:
            text = profile.action_text(self.token, self.port, self.seq, text)
        run.sends(self.seq, now)
        silent = now - run.last_step > self.config.repeat or self.state is State.JOINING
        run.next_action = now + (self.config.repeat if silent else self.config.keepalive)
        return [(packet.format_message(packet.Action(self.header, text)), (self.server[0], self.port))]

    def _say(self, message: packet.ClientMessage) -> Outgoing:
        return packet.format_message(message), self.server

    def _register(self, key: str, word: str) -> Outgoing:
        claim = profile.Claim(self.tag, not self.plain)
        if self.token and not self.plain:
            self._claim.seq += 1
            claim = profile.Claim(self.tag, True, self.token, self._claim.seq, word, self._claim.former)
        return self._say(packet.Register(self.header, key, profile.format_tag(claim)))

    def _claim_slot(self, key: str) -> Outgoing:
        """Return what asks for our slot, keeps it, and says whether we are ready."""
        if self.plain and self.state is not State.REGISTERING:
            return self._say(packet.Ready(self.header, key, self._claim.wants_ready))
        ready = self._claim.wants_ready and self.settled and not self._claim.busy
        return self._register(key, "r" if ready else "w")

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due: ask, repeat, keep contact."""
        out: list[Outgoing] = []
        claims, polls = False, now >= self._next_poll
        if self.state is State.OVER:
            return out
        if self.in_run:
            if now >= self._run.next_action:
                out += self._send_action(now)
            # Without steps the lobby is asked, too: it has the port while the run is on.
            polls = polls and (now >= self._run.last_step + 2 * self.config.poll or not self.settled)
        elif now >= self._next_retry:
            self._next_retry = now + self.config.retry
            unconfirmed = not self._claim.confirmed and not self._claim.busy
            claims = self.state is State.REGISTERING or unconfirmed or not self.settled
        if polls:
            self._next_poll = now + self.config.poll
            out.append(self._say(packet.LobbyRequest(self.header)))
            claims = claims or (bool(self.token) and not self.plain)  # the slot is kept for who shows the token
        if claims and self.key is not None and self.state is not State.ASKING:
            out.append(self._claim_slot(self.key))
        return out

    def wake(self) -> float:
        """Return when `tick` is due next."""
        if self.state is State.OVER:
            return math.inf
        if self.in_run:
            silent = self._run.last_step + 2 * self.config.poll if self.settled else -math.inf
            return min(self._run.next_action, max(self._next_poll, silent))
        return min(self._next_poll, self._next_retry)
