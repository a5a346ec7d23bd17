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
from bridge.perlert.player_run import PlayerRun, Stepped
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.guard import Address, Outgoing

__all__ = ["TRANSITIONS", "Player", "PlayerConfig", "PlayerEvent", "PlayerState"]

_MOST = 1024
"""Slots, and events, that are kept."""


class PlayerState(enum.Enum):
    """Where the client is."""

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


# The lobby's datagrams move a client up to a run, the run's steps through it, and the user (AGAIN) to the next one. UDP
# loses, doubles and reorders datagrams, and registrations expire; hence the transitions that skip a state or go
# back:
# - REGISTERING to JOINING: the confirmation was lost. Only registered clients are told a port, so the port confirms
#   too.
# - REGISTERING or WAITING to ASKING: another client has the slot, or the server has forgotten the registration.
# - JOINING to JOINING: the lobby tells a newer port before any step came. The run that was being joined is over.
# - JOINING to OVER: all steps were lost but the last one, which the server repeats.
# - JOINING to WAITING: the run is over, and nothing of it came. The user has seen none, so the next one is waited for.
# - PLAYING to OVER by GONE: the end was lost each time that it was sent. The user is told a truncation that is `lost`.
# A START in any other state is no error: the lobby tells the port on each contact, also of a run whose end we have
# seen. From PLAYING only OVER leads on, so that no run begins before the user has seen the end of the last one.
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
    """Times of a client, in seconds."""

    poll: float = 1.0
    """How often the lobby is asked, and the action is sent again while steps come."""
    repeat: float = 0.3
    """How often what has not been answered is sent again: a registration, or an action while no step comes."""
    ownership: float = 3.0
    """A slot that the lobby lists as taken, and whose registration is not confirmed for so long, is not ours."""
    silence: float = 12.0
    """Without a word of the run for so long, the lobby is believed when it knows of none. More than the server's
    linger."""


@dataclasses.dataclass(eq=False)
class Player:
    """One client of one instance, of the server whose lobby has this IP address and port."""

    header: packet.Header
    server: Address
    _: dataclasses.KW_ONLY
    tag: str
    """The name in the lobby."""
    agent: str | None = None
    """The slot to take; None: the first open one that is not a spectator's; empty: none."""
    action: str | None = None
    """The text of the action that is sent at once when a run starts; None: none."""
    use_profile: bool = True
    """True: offer the profile; False, too, once the server is known to have none."""
    ready: bool = True
    """True if we want to be ready for the next run."""
    is_person: bool = False
    """True if a person plays, who needs a moment between being ready and the start."""
    former: str = ""
    """The token of a client whose slot we take over, ours before we had another address; until the slot is ours."""
    config: PlayerConfig = PlayerConfig()

    def __post_init__(self) -> None:
        self.state = PlayerState.ASKING
        self.events: deque[packet.Message | packet.Start | Stepped] = deque(maxlen=_MOST)
        """A text for people, a run's port, a step. The oldest go where nobody takes them; `Stepped.ret` still has every
        reward."""
        self.slots: dict[str, packet.Slot] = {}
        self.key: str | None = None
        """Our slot, or the one that we ask for."""
        self.offer: profile.Offer | None = None
        self.said = ""
        """The last text for people."""
        self.heard_at = -math.inf
        """When the server sent something last that can be read."""
        self.seq = 0
        """The number of the newest action."""
        self._acts: str | None = None
        """The action of this run; None: the one it starts with."""
        self.stats = PlayerRun()
        """The measurements of this run."""
        self._ports: deque[int] = deque(maxlen=16)
        """The ports of the runs, the newest one last."""
        self._registrations = 0
        self._owned_at = -math.inf
        """When the server last showed that the slot, or the part in a run, is ours; or when we began to ask for it."""
        self._confirmed = self._others_play = False
        """True if the lobby lists us as ready, or not, as we want to be; whether the last run goes on for others."""
        self._next_poll = self._next_word = -math.inf
        """When the lobby is asked again; when our claim to the slot, or in a run our action, is sent again."""

    @property
    def token(self) -> str:
        """The token by which the server knows us; empty: not known, or a plain server."""
        return self.offer.token if self.offer is not None else ""

    @property
    def port(self) -> int:
        """The newest run's; 0: there was none."""
        return self._ports[-1] if self._ports else 0

    @property
    def settled(self) -> bool:
        """True if everything is known that the server tells before a run: its offer, or that it makes none."""
        return not self.use_profile or (self.offer is not None and self.offer.fps is not None)

    @property
    def registered(self) -> bool:
        """True if we have a slot."""
        return self.state not in (PlayerState.ASKING, PlayerState.REGISTERING)

    @property
    def in_run(self) -> bool:
        """True if a run is on that we have a part in."""
        return self.state in (PlayerState.JOINING, PlayerState.PLAYING)

    # Called by the user

    def set_agent(self, key: str | None, now: float) -> list[Outgoing]:
        """Take another slot."""
        self.agent = key
        if self.state in (PlayerState.ASKING, PlayerState.REGISTERING, PlayerState.WAITING):
            self.state, self.key = PlayerState.ASKING, None
            self._choose(now)
        return self.tick(now)

    def set_ready(self, ready: bool, now: float) -> list[Outgoing]:
        """Be ready for the next run, or no longer; where a run is over, go for the next one."""
        if self.state is PlayerState.OVER:
            self._move(PlayerEvent.AGAIN)
            self._acts, self._others_play, self._next_poll = None, False, now
        self.ready = ready
        self._begin_claim(now)
        return self.tick(now)

    def act(self, text: str, now: float) -> list[Outgoing]:
        """Do this from now on; raises PacketError where it cannot be sent, and goes on as before."""
        # With the longest numbers: it is sent again and again, where nobody takes an error.
        packet.format_message(packet.Action(self.header, profile.action_text("0" * 12, 65535, 10**15 - 1, text)))
        self._acts = text
        self.seq += 1
        return self._send_action(now) if self.in_run else []

    def leave(self) -> list[Outgoing]:
        """Give the slot up; a server without the profile is told that we are not ready."""
        if self.state is PlayerState.ASKING:
            return []
        return [self._claim("l")] * (2 if self.token else 1)  # nobody will say it again

    def waits_for(self) -> str:
        """Return what is missing, for an error or a display."""
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
            self._on_confirmed(message.key, now)
        elif isinstance(message, packet.Message):
            self._on_message(message, now)
        else:
            self._on_start(message, now)
        return self.tick(now)

    def _move(self, event: PlayerEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    def _begin_claim(self, now: float, pause: float = 0.0) -> None:
        """After a pause say what we want of the lobby, and until it lists us so."""
        self._owned_at, self._confirmed, self._next_word = now, False, now + pause

    def _is_ours(self, slot: packet.Slot) -> bool:
        """Tell whether a slot is listed with our tag, which is a hint and no proof."""
        return not slot.open and profile.parse_tag(slot.tag).name == self.tag

    def _choose(self, now: float) -> None:
        """Ask for the slot that the user wants, or for one that can be had."""
        # A slot that is taken may be ours: by the token of a former client, or after its confirmation was lost.
        slots = [slot for slot in self.slots.values() if slot.open or self.former or self._is_ours(slot)]
        if self.agent is None:
            found = [slot for slot in slots if slot.kind != "spectator"]
        else:
            found = [slot for slot in slots if slot.key == self.agent]
        if found:
            # The one that we had, or one that nobody plays before one that a bot plays.
            self.key = min(found, key=lambda slot: (not slot.open, slot.key != self.key, slot.ready)).key
            self._move(PlayerEvent.CHOSEN)
            self._begin_claim(now)

    def _on_info(self, message: packet.LobbyInfo, now: float) -> None:
        for slot in message.slots:
            # A hostile server could tell slots without end.
            if slot.key in self.slots or len(self.slots) < _MOST:
                self.slots[slot.key] = slot
            if slot.key == self.key:
                self._on_own_slot(slot, now)
        if self.state is PlayerState.ASKING:
            self._choose(now)

    def _on_own_slot(self, slot: packet.Slot, now: float) -> None:
        ours, fresh = self._is_ours(slot), now <= self._owned_at + self.config.ownership
        if self.state is PlayerState.REGISTERING:
            # Listed with our tag it is ours, and the confirmation is on its way or lost; or it is another client's of
            # the same tag. The time without a confirmation tells.
            if not (slot.open or self.former or (ours and fresh)):
                self._move(PlayerEvent.REFUSED)
        elif self.state is PlayerState.WAITING:
            self._confirmed = slot.ready == self.ready
            self._others_play = self._others_play and slot.ready
            # A server of ours confirms what we repeat. A plain one confirms nothing after the first time: the tag has
            # to do.
            if not (ours and (fresh or not self.use_profile)):
                self._move(PlayerEvent.REFUSED)
        # The lobby answers with the port while the run is on, and then with nobody ready.
        elif self.in_run and now >= self._owned_at + self.config.silence and not (ours and slot.ready):
            if self.state is PlayerState.PLAYING:
                self.events.append(self.stats.stepped(True, truncated=True, lost=True))
            self._move(PlayerEvent.GONE)
            self._begin_claim(now)

    def _on_confirmed(self, key: str, now: float) -> None:
        """Note what S2 says, or an offer: a slot is ours."""
        if key != self.key or self.state not in (PlayerState.REGISTERING, PlayerState.WAITING):
            return
        self.use_profile = bool(self.token)  # a server with the profile tells the token first
        self._owned_at = now
        if self.state is PlayerState.REGISTERING:
            self._move(PlayerEvent.REGISTERED)
            self.former = ""
            # The offer with the spaces is sent right behind the confirmation. Until then we could only say again that
            # we wait.
            self._begin_claim(now, 0.0 if self.settled else self.config.repeat)

    def _on_message(self, message: packet.Message, now: float) -> None:
        offer = profile.parse_offer(message.text) if self.use_profile else None
        if offer is None:
            self.said = message.text
            self.events.append(message)
            return
        is_new = offer.token != self.token
        if is_new and self.settled and now < self._owned_at + self.config.ownership:
            return  # a server that began anew confirms nothing by the old one
        self._registrations = max(self._registrations, offer.seq)
        if self.offer is None:
            self._owned_at = now  # from here on registrations can be confirmed
        if is_new or not self.settled:
            self._next_word = min(self._next_word, now)  # return the token, or say that we are ready
        if is_new or offer.fps is not None:
            self.offer = offer
        self._on_confirmed(offer.slot, now)

    def _on_start(self, message: packet.Start, now: float) -> None:
        # The lobby knows us. After the end it says so too, while the run goes on for others.
        if message.port == self.port:
            self._owned_at, self._others_play = now, self.state is PlayerState.WAITING
        # A datagram of an older run that comes late must not begin it again.
        if message.port in self._ports or (self.state, PlayerEvent.START) not in TRANSITIONS:
            return
        self._move(PlayerEvent.START)
        self._ports.append(message.port)
        self.stats = PlayerRun()
        self._owned_at = self._next_word = now  # at once: a NAT lets steps through only after we have sent there
        self.seq += 1
        self.events.append(message)

    def _on_step(self, message: packet.Step, now: float, arrived: float) -> None:
        self.stats.received += 1
        extra = profile.parse_extra(message.extra) if self.use_profile else None
        if not self.in_run:
            self.stats.duplicates += 1  # after the end, done=true comes again
        elif self.token and (extra is None or extra.token != self.token):
            self.stats.stale += 1  # whoever made it cannot see what is sent to us
        elif (step := self.stats.take(message, extra, arrived)) is not None:
            self._owned_at = now
            self.seq = max(self.seq, step.ack or 0)  # this address had another client before
            self._move(PlayerEvent.DONE if step.done else PlayerEvent.STEP)
            self.events.append(step)

    # Output

    def _send_action(self, now: float) -> list[Outgoing]:
        """Send the action and have it sent again, sooner while no step comes; none: there is no default one."""
        text = self.action if self._acts is None else self._acts
        if text is None:
            self._next_word = math.inf
            return []
        if self.token:
            text = profile.action_text(self.token, self.port, self.seq, text)
        self.stats.sends(self.seq, now)
        # Without steps the action is what asks for them, and may have been lost: it is sent again sooner than while
        # they come.
        is_silent = now - self._owned_at > self.config.repeat or self.state is PlayerState.JOINING
        self._next_word = now + (self.config.repeat if is_silent else self.config.poll)
        return [(packet.format_message(packet.Action(self.header, text)), (self.server[0], self.port))]

    def _say(self, message: packet.ClientMessage) -> Outgoing:
        return packet.format_message(message), self.server

    def _claim(self, word: str) -> Outgoing:
        """Return what asks for our slot, or keeps it.

        It says that we are `r`eady, ready as a `p`erson, only `w`ait, or `l`eave.
        """
        key = self.key or ""
        if not self.token and (word == "l" or not (self.use_profile or self.state is PlayerState.REGISTERING)):
            return self._say(packet.ReadyMessage(self.header, key, word in "rp"))
        self._registrations += bool(self.token)
        claim = profile.Claim(self.tag, self.use_profile, self.token, self._registrations, word, self.former)
        return self._say(packet.Register(self.header, key, profile.format_tag(claim)))

    def _polls_at(self) -> float:
        """Return when the lobby is asked next: in a run, only without steps, because it has the port then."""
        silent_at = self._owned_at + 2 * self.config.poll if self.in_run and self.settled else -math.inf
        return max(self._next_poll, silent_at)

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due: ask, repeat, keep contact."""
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
            claims = claims or bool(self.token)  # the slot is kept for who shows the token
        if claims and self.state is not PlayerState.ASKING:
            ready = "p" if self.is_person else "r"
            out.append(self._claim(ready if self.ready and self.settled else "w"))
        return out

    def wake(self) -> float:
        """Return when `tick` is due next."""
        return math.inf if self.state is PlayerState.OVER else min(self._polls_at(), self._next_word)
