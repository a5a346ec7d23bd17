"""The client's state machine: through the lobby into a run, and through the run to its end. No clock or socket.

Datagrams are passed in with their sender and the time; methods return datagrams to send. `events` contains what the
user needs to know. Every message is repeated until it has had its effect, so any datagram may be lost, duplicated or
late.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import deque

from bridge.errors import PacketError
from bridge.perlert.player_run import PlayerRun, Stepped
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.guard import Address, Outgoing

__all__ = ["TRANSITIONS", "Player", "PlayerConfig", "PlayerEvent", "PlayerState"]

_MOST = 1024
"""The most slots, and events, that are kept."""


class PlayerState(enum.Enum):
    """The client's progress."""

    ASKING = "asking"
    REGISTERING = "registering"
    WAITING = "waiting"
    JOINING = "joining"
    PLAYING = "playing"
    OVER = "over"


class PlayerEvent(enum.Enum):
    """An event of a player."""

    CHOSEN = "there is a slot to take"
    REFUSED = "the slot is not ours"
    REGISTERED = "the slot is ours"
    START = "the lobby told a rollout port that is new"
    STEP = "a step came"
    DONE = "a step with done=true came"
    GONE = "the lobby knows of no run, and no step came"
    AGAIN = "the user wants the next run"


# The lobby's datagrams lead a client into a run, the run's steps lead through it, and the user (AGAIN) leads to the
# next run. UDP loses, duplicates and reorders datagrams, and registrations expire; hence the transitions that skip a
# state or go back:
# - REGISTERING to JOINING: the confirmation was lost. Only registered clients get a port, so the port confirms, too.
# - REGISTERING or WAITING to ASKING: another client has the slot, or the server has forgotten the registration.
# - JOINING to JOINING: the lobby sends a newer port before any step arrived. The run that was being joined is over.
# - JOINING to OVER: all steps were lost except the last one, which the server repeats.
# - JOINING to WAITING: the run is over, and none of its steps arrived. The user has seen none, so wait for the next
# run.
# - PLAYING to OVER by GONE: every copy of the end was lost. The user gets a truncation that is marked as `lost`.
# A START in any other state is not an error: the lobby sends the port in every reply, also of a run whose end we have
# seen. PLAYING leads only to OVER, so that no run begins before the user has seen the end of the previous one.
TRANSITIONS: dict[tuple[PlayerState, PlayerEvent], PlayerState] = {
    (PlayerState.ASKING, PlayerEvent.CHOSEN): PlayerState.REGISTERING,
    (PlayerState.REGISTERING, PlayerEvent.REFUSED): PlayerState.ASKING,
    (PlayerState.REGISTERING, PlayerEvent.REGISTERED): PlayerState.WAITING,
    (PlayerState.REGISTERING, PlayerEvent.START): PlayerState.JOINING,
    (PlayerState.WAITING, PlayerEvent.REFUSED): PlayerState.ASKING,
    (PlayerState.WAITING, PlayerEvent.START): PlayerState.JOINING,
    (PlayerState.JOINING, PlayerEvent.START): PlayerState.JOINING,
    (PlayerState.JOINING, PlayerEvent.STEP): PlayerState.PLAYING,
    (PlayerState.JOINING, PlayerEvent.DONE): PlayerState.OVER,
    (PlayerState.JOINING, PlayerEvent.GONE): PlayerState.WAITING,
    (PlayerState.PLAYING, PlayerEvent.STEP): PlayerState.PLAYING,
    (PlayerState.PLAYING, PlayerEvent.DONE): PlayerState.OVER,
    (PlayerState.PLAYING, PlayerEvent.GONE): PlayerState.OVER,
    (PlayerState.OVER, PlayerEvent.AGAIN): PlayerState.WAITING,
}


@dataclasses.dataclass(frozen=True)
class PlayerConfig:
    """Intervals and timeouts of a client, in seconds."""

    poll: float = 1.0
    """The interval at which the lobby is polled, and the action is repeated while steps arrive."""
    repeat: float = 0.3
    """The interval for repeating unanswered messages: a registration, or an action while no step arrives."""
    ownership: float = 3.0
    """A slot that the lobby lists as taken is not ours if our registration was not confirmed for this long."""
    silence: float = 12.0
    """After this long without datagrams of the run, we believe the lobby if it knows of no run. Longer than the
    server's linger."""


@dataclasses.dataclass(eq=False)
class Player:
    """One client of one instance, on the server whose lobby has this IP address and port."""

    header: packet.Header
    server: Address
    _: dataclasses.KW_ONLY
    tag: str
    """The name in the lobby."""
    agent: str | None = None
    """The slot to take; None: the first free one that is not a spectator's; empty: none."""
    action: str | None = None
    """The text of the action to send as soon as a run starts; None: none."""
    use_profile: bool = True
    """True: offer the profile. Becomes False if the server does not use it."""
    ready: bool = True
    """True if we want to be ready for the next run."""
    is_person: bool = False
    """True if a person plays, who needs a moment between being ready and the start."""
    former: str = ""
    """The token of a client whose slot we take over, or ours at a former address; empty once the slot is ours."""
    config: PlayerConfig = PlayerConfig()

    def __post_init__(self) -> None:
        self.state = PlayerState.ASKING
        self.events: deque[packet.Message | packet.Start | Stepped] = deque(maxlen=_MOST)
        """Texts, ports of runs, and steps. If they are not read, the oldest are dropped; `Stepped.ret` still includes
        every reward."""
        self.slots: dict[str, packet.Slot] = {}
        self.key: str | None = None
        """Our slot, or the one that we request."""
        self.offer: profile.Offer | None = None
        self.said = ""
        """The last text message."""
        self.heard_at = -math.inf
        """When the last readable datagram arrived from the server."""
        self.seq = 0
        """The number of the newest action."""
        self._acts: str | None = None
        """The current action in this run; None: the initial one."""
        self.stats = PlayerRun()
        """The measurements in this run."""
        self._ports: deque[int] = deque(maxlen=16)
        """The ports of the runs, the newest last."""
        self._registrations = 0
        self._owned_at = -math.inf
        """When the server last showed that the slot, or our part in a run, is ours; or when we began to request it."""
        self._confirmed = self._others_play = False
        """Whether the lobby lists our readiness correctly; whether the last run continues for others."""
        self._next_poll = self._next_word = -math.inf
        """When to poll the lobby next; when to repeat the claim to the slot or, in a run, the action."""

    @property
    def token(self) -> str:
        """The token by which the server identifies us; empty: unknown, or the server does not use the profile."""
        return self.offer.token if self.offer is not None else ""

    @property
    def port(self) -> int:
        """The port of the newest run; 0: none."""
        return self._ports[-1] if self._ports else 0

    @property
    def settled(self) -> bool:
        """True if we have received everything that the server sends before a run: its offer, or that it has none."""
        return not self.use_profile or (self.offer is not None and self.offer.fps is not None)

    @property
    def registered(self) -> bool:
        """True if we have a slot."""
        return self.state not in (PlayerState.ASKING, PlayerState.REGISTERING)

    @property
    def in_run(self) -> bool:
        """True if we take part in the current run."""
        return self.state in (PlayerState.JOINING, PlayerState.PLAYING)

    # Called by the user

    def set_agent(self, key: str | None, now: float) -> list[Outgoing]:
        """Request another slot."""
        self.agent = key
        if self.state in (PlayerState.ASKING, PlayerState.REGISTERING, PlayerState.WAITING):
            self.state, self.key = PlayerState.ASKING, None
            self._choose(now)
        return self.tick(now)

    def set_ready(self, ready: bool, now: float) -> list[Outgoing]:
        """Change whether we are ready for the next run; after a run, return to the lobby for the next one."""
        if self.state is PlayerState.OVER:
            self._move(PlayerEvent.AGAIN)
            self._acts, self._others_play, self._next_poll = None, False, now
        self.ready = ready
        self._begin_claim(now)
        return self.tick(now)

    def act(self, text: str, now: float) -> list[Outgoing]:
        """Set the action; raise PacketError and keep the previous one if it cannot be sent."""
        # Checked with the longest numbers, because later repetitions have no caller to raise to.
        packet.format_message(packet.Action(self.header, profile.action_text("0" * 12, 65535, 10**15 - 1, text)))
        self._acts = text
        self.seq += 1
        return self._send_action(now) if self.in_run else []

    def leave(self) -> list[Outgoing]:
        """Leave the slot; tell a server without the profile that we are not ready."""
        if self.state is PlayerState.ASKING:
            return []
        return [self._claim("l")] * (2 if self.token else 1)  # sent twice, because it is not repeated later

    def waits_for(self) -> str:
        """Return what the client waits for, for an error or a display."""
        if not self.slots:
            return f"the lobby has not answered{f', but said: {self.said}' if self.said else ''}"
        if self.in_run or self.state is PlayerState.OVER:
            return f"no step came from the rollout port {self.port}"
        if not self.registered:
            wanted = self.slots.get(self.agent or "")
            if self.agent and wanted is None:
                return f"there is no slot {self.agent!r}; the slots are {', '.join(self.slots)}"
            if wanted is not None and not wanted.open:
                return f"the slot {wanted.key!r} is held by {wanted.tag!r}"
            is_full = not any(slot.open for slot in self.slots.values())
            return "no slot is open" if is_full else "the registration was not answered"
        if not self.settled:
            return "the server has confirmed the registration, and has not told its spaces yet"
        if self._others_play:
            return "the last run still goes on for others"
        unready = ", ".join(key for key, slot in self.slots.items() if not slot.ready)
        why = f"; open or not ready: {unready}" if unready else ""
        return f"the simulation has not started{why}{f'; the server said: {self.said}' if self.said else ''}"

    # Input

    def receive(self, datagram: bytes, sender: Address, now: float, arrived: float | None = None) -> list[Outgoing]:
        """Process a datagram, which arrived at `arrived` (None: now); never raises."""
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
            self._on_confirmed(message.key, now)
        elif isinstance(message, packet.Message):
            self._on_message(message, now)
        else:
            self._on_start(message, now)
        return self.tick(now)

    def _move(self, event: PlayerEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    def _begin_claim(self, now: float, pause: float = 0.0) -> None:
        """Begin, after a pause, to repeat our claim until the lobby confirms it."""
        self._owned_at, self._confirmed, self._next_word = now, False, now + pause

    def _is_ours(self, slot: packet.Slot) -> bool:
        """Return True if a slot is listed with our tag, which is a hint but no proof."""
        return not slot.open and profile.parse_tag(slot.tag).name == self.tag

    def _choose(self, now: float) -> None:
        """Request the slot that the user wants, or an available one."""
        # A taken slot may be ours: with the token of a former client, or after its confirmation was lost.
        slots = [slot for slot in self.slots.values() if slot.open or self.former or self._is_ours(slot)]
        if self.agent is None:
            found = [slot for slot in slots if slot.kind != "spectator"]
        else:
            found = [slot for slot in slots if slot.key == self.agent]
        if found:
            # Our previous slot, or a slot without a player rather than one with a bot.
            self.key = min(found, key=lambda slot: (not slot.open, slot.key != self.key, slot.ready)).key
            self._move(PlayerEvent.CHOSEN)
            self._begin_claim(now)

    def _on_info(self, message: packet.LobbyInfo, now: float) -> None:
        for slot in message.slots:
            # A malicious server could list slots without end.
            if slot.key in self.slots or len(self.slots) < _MOST:
                self.slots[slot.key] = slot
            if slot.key == self.key:
                self._on_own_slot(slot, now)
        if self.state is PlayerState.ASKING:
            self._choose(now)

    def _on_own_slot(self, slot: packet.Slot, now: float) -> None:
        ours, fresh = self._is_ours(slot), now <= self._owned_at + self.config.ownership
        if self.state is PlayerState.REGISTERING:
            # A slot with our tag is ours, with the confirmation delayed or lost; or it is another client's with the
            # same tag. The time without a confirmation decides.
            if not (slot.open or self.former or (ours and fresh)):
                self._move(PlayerEvent.REFUSED)
        elif self.state is PlayerState.WAITING:
            self._confirmed = slot.ready == self.ready
            self._others_play = self._others_play and slot.ready
            # Our server confirms repeated claims. Others confirm only the first one, so there the tag has to suffice.
            if not (ours and (fresh or not self.use_profile)):
                self._move(PlayerEvent.REFUSED)
        # During a run the lobby replies with the port, and after it lists nobody as ready.
        elif self.in_run and now >= self._owned_at + self.config.silence and not (ours and slot.ready):
            if self.state is PlayerState.PLAYING:
                self.events.append(self.stats.stepped(True, truncated=True, lost=True))
            self._move(PlayerEvent.GONE)
            self._begin_claim(now)

    def _on_confirmed(self, key: str, now: float) -> None:
        """Process S2 or an offer, which confirms that a slot is ours."""
        if key != self.key or self.state not in (PlayerState.REGISTERING, PlayerState.WAITING):
            return
        self.use_profile = bool(self.token)  # a server with the profile sends the token first
        self._owned_at = now
        if self.state is PlayerState.REGISTERING:
            self._move(PlayerEvent.REGISTERED)
            self.former = ""
            # The offer with the spaces follows right after the confirmation. Before it, a message could only repeat
            # that we wait.
            self._begin_claim(now, 0.0 if self.settled else self.config.repeat)

    def _on_message(self, message: packet.Message, now: float) -> None:
        offer = profile.parse_offer(message.text) if self.use_profile else None
        if offer is None:
            self.said = message.text
            self.events.append(message)
            return
        is_new = offer.token != self.token
        if is_new and self.settled and now < self._owned_at + self.config.ownership:
            return  # a restarted server does not confirm with the old token
        self._registrations = max(self._registrations, offer.seq)
        if self.offer is None:
            self._owned_at = now  # registrations can be confirmed from here on
        if is_new or not self.settled:
            self._next_word = min(self._next_word, now)  # return the token, or declare ourselves ready
        if is_new or offer.fps is not None:
            self.offer = offer
        self._on_confirmed(offer.slot, now)

    def _on_start(self, message: packet.Start, now: float) -> None:
        # The lobby still knows us. It also says so after our end, while the run continues for others.
        if message.port == self.port:
            self._owned_at, self._others_play = now, self.state is PlayerState.WAITING
        # A delayed datagram of an earlier run must not begin that run again.
        if message.port in self._ports or (self.state, PlayerEvent.START) not in TRANSITIONS:
            return
        self._move(PlayerEvent.START)
        self._ports.append(message.port)
        self.stats = PlayerRun()
        self._owned_at = self._next_word = now  # now: a NAT lets steps in only after we have sent there
        self.seq += 1
        self.events.append(message)

    def _on_step(self, message: packet.Step, now: float, arrived: float) -> None:
        self.stats.received += 1
        extra = profile.parse_extra(message.extra) if self.use_profile else None
        if not self.in_run:
            self.stats.duplicates += 1  # done=true is repeated after the end
        elif self.token and (extra is None or extra.token != self.token):
            self.stats.stale += 1  # its sender does not know our token
        elif (step := self.stats.take(message, extra, arrived)) is not None:
            self._owned_at = now
            self.seq = max(self.seq, step.ack or 0)  # this address belonged to another client before
            self._move(PlayerEvent.DONE if step.done else PlayerEvent.STEP)
            self.events.append(step)

    # Output

    def _send_action(self, now: float) -> list[Outgoing]:
        """Send the action, if any, and schedule its repetition, sooner while no step arrives."""
        text = self.action if self._acts is None else self._acts
        if text is None:
            self._next_word = math.inf
            return []
        if self.token:
            text = profile.action_text(self.token, self.port, self.seq, text)
        self.stats.sends(self.seq, now)
        # Without steps the action requests them, and may have been lost: it is repeated at a shorter interval than
        # while they arrive.
        is_silent = now - self._owned_at > self.config.repeat or self.state is PlayerState.JOINING
        self._next_word = now + (self.config.repeat if is_silent else self.config.poll)
        return [(packet.format_message(packet.Action(self.header, text)), (self.server[0], self.port))]

    def _say(self, message: packet.ClientMessage) -> Outgoing:
        return packet.format_message(message), self.server

    def _claim(self, word: str) -> Outgoing:
        """Return the message that claims our slot, or keeps it.

        `word` says that we are `r`eady, ready as a `p`erson, only `w`ait, or `l`eave.
        """
        key = self.key or ""
        if not self.token and (word == "l" or not (self.use_profile or self.state is PlayerState.REGISTERING)):
            return self._say(packet.ReadyMessage(self.header, key, word in "rp"))
        self._registrations += bool(self.token)
        claim = profile.Claim(self.tag, self.use_profile, self.token, self._registrations, word, self.former)
        return self._say(packet.Register(self.header, key, profile.format_tag(claim)))

    def _polls_at(self) -> float:
        """Return when the lobby is polled next: in a run only while no steps arrive, for its port."""
        silent_at = self._owned_at + 2 * self.config.poll if self.in_run and self.settled else -math.inf
        return max(self._next_poll, silent_at)

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due: poll, repeat, stay registered."""
        out: list[Outgoing] = []
        claims = False
        if self.state is PlayerState.OVER:
            return out
        if now >= self._next_word and self.in_run:
            out += self._send_action(now)
        elif now >= self._next_word:
            self._next_word = now + self.config.repeat
            claims = not (self._confirmed and self.settled)
        if now >= self._polls_at():
            self._next_poll = now + self.config.poll
            out.append(self._say(packet.LobbyRequest(self.header)))
            claims = claims or bool(self.token)  # the server keeps the slot for the client with the token
        if claims and self.state is not PlayerState.ASKING:
            ready = "p" if self.is_person else "r"
            out.append(self._claim(ready if self.ready and self.settled else "w"))
        return out

    def wake(self) -> float:
        """Return when `tick` is due next."""
        return math.inf if self.state is PlayerState.OVER else min(self._polls_at(), self._next_word)
