"""One instance's lobby: who is in which slot, who is ready, when the simulation starts. No clock, no socket.

Datagrams go in with their sender and the time, datagrams to send come out; `wake()` says when `tick` wants to be
called. When `state` is STARTING, the owner opens a rollout and calls `started` with its port, and `run_ended` when it
is over.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from bridge.errors import PacketError, SettingError
from bridge.perlert import packet, profile
from bridge.perlert.guard import Address, Guard

__all__ = ["TRANSITIONS", "Client", "Event", "Lobby", "LobbyConfig", "Outgoing", "SlotConfig", "StartPolicy", "State"]

Outgoing: TypeAlias = tuple[bytes, Address]


class State(enum.Enum):
    """Where the lobby is."""

    GATHERING = "gathering"
    COUNTDOWN = "countdown"
    STARTING = "starting"
    RUNNING = "running"


class Event(enum.Enum):
    """What moves it on."""

    COMPLETE = "everybody needed is registered and ready"
    INCOMPLETE = "somebody left, came or is no longer ready"
    COUNTDOWN_OVER = "the countdown is over"
    STARTED = "the rollout's port is open"
    START_FAILED = "the environment could not be reset"
    RUN_ENDED = "the run is over"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.GATHERING, Event.COMPLETE): State.COUNTDOWN,
    (State.COUNTDOWN, Event.INCOMPLETE): State.GATHERING,
    (State.COUNTDOWN, Event.COUNTDOWN_OVER): State.STARTING,
    (State.STARTING, Event.STARTED): State.RUNNING,
    (State.STARTING, Event.START_FAILED): State.GATHERING,
    (State.RUNNING, Event.RUN_ENDED): State.GATHERING,
}


@dataclasses.dataclass(frozen=True)
class SlotConfig:
    """One slot of the lobby."""

    key: str
    kind: str = "agent"
    bot: bool = False
    """Whether the server plays it until a client takes it: listed open and ready, and never waited for."""
    bot_tag: str = "cpu"
    """The tag of a slot that a bot plays."""
    watches: str | None = None
    """A spectator's slot: the key of the slot whose steps it sees."""


@dataclasses.dataclass(frozen=True)
class StartPolicy:
    """When the simulation starts. Never while a registered client is not ready (P-10), whatever stands here."""

    clients: int | None = None
    """Start when so many agents' slots are held by ready clients; None: when every slot has a client or a bot."""
    countdown: float = 0.0
    """Seconds from then to the start, announced by messages; it stops when the condition breaks."""

    def __post_init__(self) -> None:
        if self.clients is not None and self.clients < 1:
            raise SettingError(f"expected a start with 1 client or more, got {self.clients!r}")
        if not 0 <= self.countdown < math.inf:
            raise SettingError(f"expected a countdown of 0 seconds or more, got {self.countdown!r}")


@dataclasses.dataclass(frozen=True)
class LobbyConfig:
    """Times of a lobby, in seconds."""

    expiry: float = 15.0
    """A registration that was silent for so long is taken out, except during its run."""
    patience: float = 120.0
    """A client that is not ready for so long, while another one is, is taken out: nobody can hold the others up."""
    coalesce: float = 0.1
    """The lobby is sent to all clients at most once in so many seconds, however often it changes."""
    explain: float = 5.0
    """How often clients that wait are told what for; 0: never."""
    starting: str = "Simulation will start..."
    """The message right before the start."""


@dataclasses.dataclass(slots=True)
class Client:
    """A registered client. It is known by (address, port) in the lobby of its header."""

    address: Address
    key: str
    tag: str
    ready: bool
    heard: float
    """When it last said something."""
    profiled: bool = False
    """Whether it asked for the profile."""
    token: str = ""
    unready_since: float = 0.0
    """When it last became not ready."""
    playing: bool = False
    """Whether it takes part in the run that is on."""
    owed: int | None = None
    """The port of a run that ended before the client reached it: told again until it has seen its end there."""
    stale: bool = True
    """Whether the lobby has changed since the client was last sent all of it."""


class Lobby:
    """The lobby of one instance.

    Args:
        header: Which instance.
        slots: At least one.
        guard: The book of bytes, shared by all of a server.
        new_token: Makes an unguessable token of 8 to 32 lower-case hexadecimal digits.
        policy: When to start.
        config: Times.
        offer: Given a token and a slot's key, the complete text that a client of ours is told (frame rate, spaces);
            None: no profile.

    Raises:
        SettingError: No slots, one key twice, or more clients needed than there are slots.
        PacketError: A key or kind that the grammar does not allow.
    """

    def __init__(
        self,
        header: packet.Header,
        slots: Sequence[SlotConfig],
        guard: Guard,
        *,
        new_token: Callable[[], str],
        policy: StartPolicy | None = None,
        config: LobbyConfig | None = None,
        offer: Callable[[str, str], str] | None = None,
    ) -> None:
        self.header, self.guard = header, guard
        self.policy, self.config = policy or StartPolicy(), config or LobbyConfig()
        self.slots = {slot.key: slot for slot in slots}
        if not slots or len(self.slots) < len(slots):
            raise SettingError(f"expected one slot or more, each key once, got {[slot.key for slot in slots]}")
        agents = [slot for slot in slots if slot.watches is None]
        if self.policy.clients is not None and self.policy.clients > len(agents):
            raise SettingError(f"expected a start with at most {len(agents)} clients, got {self.policy.clients}")
        packet.check_label(header.name, "name")
        for slot in slots:
            packet.check_label(slot.key, "key")
            packet.check_label(slot.kind, "kind", empty=True)
            packet.check_label(slot.bot_tag, "tag", empty=True)
        self.state = State.GATHERING
        self.clients: dict[Address, Client] = {}
        self.counts: Counter[str] = Counter()
        """Datagrams that changed nothing, by reason."""
        self.port: int | None = None
        self._new_token, self._offer = new_token, offer
        self._turn = 0
        self._changed = False
        self._told_at = -math.inf
        self._start_at = math.inf
        self._announced: int | None = None
        self._explained_at = -math.inf
        self._start_size = len(packet.format_message(packet.Start(header, 65535)))

    # What is the case

    def holder(self, key: str) -> Client | None:
        """Return the client in a slot."""
        return next((client for client in self.clients.values() if client.key == key), None)

    def listing(self) -> dict[str, packet.Slot]:
        """Return every slot as S1 lists it."""
        held = {client.key: client for client in self.clients.values()}
        listed = {}
        for key, slot in self.slots.items():
            if (client := held.get(key)) is not None:
                listed[key] = packet.Slot(key, False, slot.kind, client.tag, client.ready)
            elif slot.bot:
                listed[key] = packet.Slot(key, True, slot.kind, slot.bot_tag, True)
            else:
                listed[key] = packet.Slot(key, True, slot.kind, "", False)
        return listed

    def missing(self) -> str | None:
        """Return why the simulation does not start; None: it can."""
        unready = [client.key for client in self.clients.values() if not client.ready]
        agents = [key for key, slot in self.slots.items() if slot.watches is None]
        held = {client.key for client in self.clients.values()}
        playing = [key for key in agents if key in held]
        reasons = []
        if unready:  # P-10
            reasons.append(f"not ready: {', '.join(unready[:8])}{'…' if len(unready) > 8 else ''}")
        if self.policy.clients is not None:
            if len(playing) < self.policy.clients:
                reasons.append(f"{len(playing)} of {self.policy.clients} clients are registered")
        else:
            empty = [key for key in agents if key not in held and not self.slots[key].bot]
            if empty:
                reasons.append(f"open: {', '.join(empty[:8])}{'…' if len(empty) > 8 else ''}")
            elif not playing:
                reasons.append("nobody is registered")
        return "; ".join(reasons) or None

    # Input

    def receive(self, datagram: bytes, sender: Address, now: float) -> list[Outgoing]:
        """Take a datagram that came to the lobby's port; whatever it holds, nothing is raised."""
        if not self.guard.heard(sender, len(datagram), now):
            return []
        try:
            message = packet.parse_client(datagram)
        except PacketError:
            self.counts["malformed"] += 1
            return []
        return self.handle(message, sender, now)

    def handle(self, message: packet.ClientMessage, sender: Address, now: float) -> list[Outgoing]:
        """Take a message that the guard has already booked."""
        if message.header != self.header:
            self.counts["other instance"] += 1
            return []
        client = self.clients.get(sender)
        if client is not None:
            client.heard = now
        out: list[Outgoing] = []
        port = self._start_port(client)
        if client is not None and port is not None:
            if isinstance(message, packet.LobbyRequest):
                self._inform(client.address, now, out, client)
            self._send(packet.Start(self.header, port), client, now, out)  # P-16, and for the whole rollout
            return out + self.tick(now)
        if isinstance(message, packet.LobbyRequest):
            self._inform(sender, now, out, client)  # P-7
        elif isinstance(message, packet.Register):
            self._register(message, sender, client, now, out)
        elif isinstance(message, packet.Ready):
            if client is None:
                self.counts["not registered"] += 1  # P-15: no answer
            elif message.key != client.key:
                self.counts["not the sender's slot"] += 1
                self._inform(sender, now, out, client)
            elif client.ready != message.ready:
                client.ready = message.ready
                client.unready_since = now
                self._alter()
            else:
                self._inform(sender, now, out, client)
        else:
            self.counts["action in the lobby"] += 1
        return out + self.tick(now)

    def _register(
        self, message: packet.Register, sender: Address, client: Client | None, now: float, out: list[Outgoing]
    ) -> None:
        tag, profiled, token = profile.split_tag(message.tag)
        slot = self.slots.get(message.key)
        holder = self.holder(message.key)
        mine = sum(1 for other in self.clients.values() if other.address[0] == sender[0] and other is not client)
        # Whether the new slot is free is looked at before the old one is left.
        if slot is None or (holder is not None and holder is not client):
            self.counts["slot not free"] += 1
            self._inform(sender, now, out, client)
            return
        if mine >= self.guard.slots_allowed(sender[0]):
            self.counts["slots of one host"] += 1
            self._inform(sender, now, out, client)
            return
        if client is None or (client.key, client.tag) != (message.key, tag):
            # P-8: one slot a client; P-28: the last registration counts; P-9: it is not ready.
            old = self.clients.pop(sender, None)
            since = old.unready_since if old and not old.ready else now
            client = Client(sender, message.key, tag, False, now, token=old.token if old else "", unready_since=since)
            self.clients[sender] = client
            self._alter()
        client.profiled = profiled
        if profiled and not client.token:
            client.token = self._new_token()
        if token is not None and token == client.token:
            self.guard.prove(sender)
        self._send(packet.Registered(self.header, client.key), client, now, out, reserve=True)
        if profiled and self._offer is not None:
            text = (
                self._offer(client.token, client.key) if self.guard.proven(sender) else profile.offer_text(client.token)
            )
            self._send(packet.Message(self.header, text), client, now, out, reserve=True)

    def _alter(self) -> None:
        self._changed = True
        for client in self.clients.values():
            client.stale = True

    # Output

    def _send(
        self, message: packet.ServerMessage, client: Client, now: float, out: list[Outgoing], *, reserve: bool = False
    ) -> bool:
        datagram = packet.format_message(message)
        # What an unproven client may be sent must last for its S4.
        if reserve and self.guard.credit(client.address) < len(datagram) + self._start_size:
            self.guard.dropped["amplification"] += 1
            return False
        if not self.guard.spend(client.address, len(datagram), now):
            return False
        out.append((datagram, client.address))
        return True

    def _start_port(self, client: Client | None) -> int | None:
        """Return the port that a client's contact is answered with; None: there is no run for it."""
        if client is None:
            return None
        return self.port if client.playing else client.owed

    def _inform(self, address: Address, now: float, out: list[Outgoing], client: Client | None) -> None:
        """Send S1: all slots, in as many datagrams as it takes; to an unproven address, those that it may be sent."""
        slots = list(self.listing().values())
        if client is not None:  # its own slot first, for the case that the rest does not fit
            slots.sort(key=lambda slot: slot.key != client.key)
        reserve = self._start_size if client is not None else 0
        room = self.guard.credit(address) - reserve
        if math.isfinite(room) and slots:  # another part each time
            start = 1 if client is not None else 0
            turn = start + self._turn % max(len(slots) - start, 1)
            slots = slots[:start] + slots[turn:] + slots[start:turn]
        header = len(str(self.header).encode())
        sent = 0
        while sent < len(slots):
            limit = min(packet.MAX_MESSAGE, room)
            size, count = header, 0
            for slot in slots[sent:]:
                size += len(_slot_bytes(slot)) + 1
                if size > limit:
                    break
                count += 1
            if not count:
                break
            datagram = packet.format_message(packet.LobbyInfo(self.header, tuple(slots[sent : sent + count])))
            if not self.guard.spend(address, len(datagram), now):
                break
            out.append((datagram, address))
            room -= len(datagram)
            sent += count
        if sent < len(slots):
            self.counts["partial"] += 1
            self._turn += sent
        elif client is not None:
            client.stale = False

    def _tell_all(self, now: float, out: list[Outgoing]) -> None:
        for client in self.clients.values():
            if client.stale:
                self._inform(client.address, now, out, client)
        self._changed = False
        self._told_at = now

    def say(self, text: str, now: float) -> list[Outgoing]:
        """Send a message for people to every registered client."""
        out: list[Outgoing] = []
        shown = text.encode("utf-8", "replace")[: packet.MAX_MESSAGE - 200].decode("utf-8", "ignore")
        for client in self.clients.values():
            self._send(packet.Message(self.header, shown), client, now, out, reserve=True)
        return out

    # Time

    def _move(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    def _expiries(self) -> list[tuple[Client, float]]:
        """Return when each client that is in no run will be taken out, as it is now."""
        anyone = any(client.ready for client in self.clients.values())
        return [
            (
                client,
                min(
                    client.heard + self.config.expiry,
                    client.unready_since + self.config.patience if anyone and not client.ready else math.inf,
                ),
            )
            for client in self.clients.values()
            if not client.playing
        ]

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due: expire, start, tell, announce."""
        out: list[Outgoing] = []
        for client, at in self._expiries():
            if now >= at:
                del self.clients[client.address]
                self.counts["expired"] += 1
                self._alter()
        why = self.missing() if self.state in (State.GATHERING, State.COUNTDOWN) else None
        if self.state is State.GATHERING and why is None:
            self._move(Event.COMPLETE)
            self._start_at, self._announced = now + self.policy.countdown, None
        elif self.state is State.COUNTDOWN and why is not None:
            self._move(Event.INCOMPLETE)
            self._start_at = math.inf
            out += self.say(f"The start is called off: {why}", now)
        starting = self.state is State.COUNTDOWN and now >= self._start_at
        # The lobby is told before the start, in a storm too; otherwise at most every `coalesce` seconds.
        if self._changed and (starting or now >= self._told_at + self.config.coalesce):
            self._tell_all(now, out)
        if starting:
            self._move(Event.COUNTDOWN_OVER)
            out += self.say(self.config.starting, now)
        elif self.state is State.COUNTDOWN:
            seconds = math.ceil(self._start_at - now - 1e-6)
            if seconds != self._announced:
                self._announced = seconds
                out += self.say(f"Simulation will start in {seconds} s", now)
        elif why is not None and self.config.explain and any(client.ready for client in self.clients.values()):
            if now >= self._explained_at + self.config.explain:
                if self._explained_at > -math.inf:
                    out += self.say(f"Waiting: {why}", now)
                self._explained_at = now
        else:
            self._explained_at = -math.inf
        return out

    def wake(self) -> float:
        """Return when `tick` is due next; infinity: when something comes."""
        times = [math.inf]
        times += [at for _, at in self._expiries()]
        if self._changed:
            times.append(self._told_at + self.config.coalesce)
        if self.state is State.COUNTDOWN and self._announced is not None:
            times.append(self._start_at - max(self._announced - 1, 0))
        if self._explained_at > -math.inf:
            times.append(self._explained_at + self.config.explain)
        return min(times)

    # The run

    def started(self, port: int, now: float) -> list[Outgoing]:
        """Tell all registered clients the rollout's port."""
        self._move(Event.STARTED)
        self.port = port
        out: list[Outgoing] = []
        for client in self.clients.values():
            client.playing = True
            self._send(packet.Start(self.header, port), client, now, out)
        return out

    def start_failed(self, reason: str, now: float) -> list[Outgoing]:
        """Go back to gathering, everybody not ready, and say why."""
        self._move(Event.START_FAILED)
        return self.say(f"The simulation could not start: {reason}", now) + self._gather(now)

    def joined(self, client: Client, now: float) -> list[Outgoing]:
        """Let a client that registered meanwhile into the run that is on."""
        client.playing = True
        out: list[Outgoing] = []
        if self.port is not None:
            self._send(packet.Start(self.header, self.port), client, now, out)
        return out

    def run_ended(self, now: float, missed: Collection[Address] = ()) -> list[Outgoing]:
        """Go back to gathering for the next run, everybody not ready.

        Args:
            now: The time.
            missed: The clients that have not been at the run's port yet; they are told it until `settled`.
        """
        self._move(Event.RUN_ENDED)
        for client in self.clients.values():
            if client.playing and client.address in missed:
                client.owed = self.port
        self.port = None
        return self._gather(now)

    def settled(self, address: Address, port: int) -> None:
        """Note that a client has reached the port that it was owed, or no longer can."""
        client = self.clients.get(address)
        if client is not None and client.owed == port:
            client.owed = None

    def _gather(self, now: float) -> list[Outgoing]:
        for client in self.clients.values():
            client.ready = client.playing = False
            client.heard = client.unready_since = now  # the time to say that it is ready again
        if self.clients:
            self._alter()
        return self.tick(now)


def _slot_bytes(slot: packet.Slot) -> bytes:
    status, ready = "open" if slot.open else "close", "ready" if slot.ready else "not_ready"
    return f"{slot.key}={status},{slot.kind},{slot.tag},{ready}".encode()
