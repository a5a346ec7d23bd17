"""One instance's lobby: who is in which slot, who is ready, when the simulation starts. No clock, no socket.

Messages go in with their sender and the time, datagrams to send come out; `wake()` says when `tick` wants to be called.
When `state` is STARTING, the owner opens a rollout and calls `started` with its port, and `run_ended` when it is over.
"""

from __future__ import annotations

import dataclasses
import enum
import hmac
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from bridge.errors import SettingError
from bridge.perlert.guard import Address, Guard
from bridge.perlert.lobby_parts import Board, Client, Countdown, Patience, SlotConfig, listed, missing
from bridge.perlert.protocol import packet, profile

__all__ = ["TRANSITIONS", "Event", "Lobby", "LobbyConfig", "Outgoing", "StartPolicy", "State"]

Outgoing: TypeAlias = tuple[bytes, Address]

_MOST_LEFT = 256


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
class StartPolicy:
    """When the simulation starts. Never while a client in an agent's slot is not ready (P-10)."""

    clients: int | None = None
    """Start when so many agents' slots are held by ready clients; None: when every slot has a client or a bot."""
    countdown: float = 0.0
    """Seconds from then to the start, announced by messages. They are counted once: who breaks the condition can put
    the start off, and begins no new countdown."""

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
    """A client that was not ready for so long in all while another one was, since the last run, is taken out and let
    in again after the next one."""
    coalesce: float = 0.1
    """The lobby is sent to all clients at most once in so many seconds, however often it changes."""
    explain: float = 5.0
    """How often clients that wait are told what for; 0: never."""


class Lobby:
    """The lobby of one instance.

    Args:
        header: Which instance.
        slots: At least one.
        guard: The book of bytes, shared by all of a server.
        policy: When to start.
        config: Times.
        offer: Given a token, a client's newest registration and a slot's key, the text that a client of ours is told
            (frame rate, spaces); None: no profile.
        moved: Called with the old and the new address of a client that came back from another one, and with None as
            the new one for a client that left.

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
        policy: StartPolicy | None = None,
        config: LobbyConfig | None = None,
        offer: Callable[[str, int, str], str] | None = None,
        moved: Callable[[Address, Client | None], None] = lambda old, client: None,
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
        self.state = State.GATHERING
        self.clients: dict[Address, Client] = {}
        self.counts: Counter[str] = Counter()
        """Datagrams that changed nothing, by reason."""
        self.port: int | None = None
        self._offer, self._moved = offer, moved
        self._board = Board(header)
        self._informed = 1
        """The version of which all clients were told, or at least begun to be."""
        self._told_at = -math.inf
        self._left: OrderedDict[Address, int] = OrderedDict()
        self._patience = Patience(self.config.patience, guard)
        self._countdown = Countdown(self.policy.countdown, self.config.explain)

    # What is the case

    def holder(self, key: str) -> Client | None:
        """Return the client in a slot."""
        return next((client for client in self.clients.values() if client.key == key), None)

    def listing(self) -> dict[str, packet.Slot]:
        """Return every slot as S1 lists it."""
        held = {client.key: client for client in self.clients.values()}
        return {key: listed(slot, held.get(key)) for key, slot in self.slots.items()}

    def _agents(self) -> list[Client]:
        """Return the clients in agents' slots; spectators count for nothing."""
        return [client for client in self.clients.values() if self.slots[client.key].watches is None]

    def missing(self) -> str | None:
        """Return why the simulation does not start; None: it can."""
        agents = [slot for slot in self.slots.values() if slot.watches is None]
        return missing(agents, self._agents(), self.policy.clients)

    # Input

    def handle(self, message: packet.ClientMessage, sender: Address, size: int, now: float) -> list[Outgoing]:
        """Take a message of `size` bytes, which the guard has booked."""
        client = self.clients.get(sender)
        out: list[Outgoing] = []
        if isinstance(message, packet.Register):
            self._register(message, sender, client, size, now, out)
            return out + self.tick(now)
        if isinstance(message, packet.LobbyRequest) and client is None:
            self._inform(sender, now, out, None)  # P-7
            return out
        if client is not None and not client.token:
            client.heard = now
        if client is not None and client.port is not None:
            if isinstance(message, packet.LobbyRequest):
                self._inform(sender, now, out, client)
            self._send(packet.Start(self.header, client.port), client, now, out)  # P-16, and for the whole rollout
        elif isinstance(message, packet.LobbyRequest):
            self._inform(sender, now, out, client)
        elif not isinstance(message, packet.Ready):
            self.counts["action in the lobby"] += 1
        elif client is None:
            self.counts["not registered"] += 1  # P-15: no answer
        elif client.token:
            self.counts["no token"] += 1
        elif message.key != client.key:
            self.counts["not the sender's slot"] += 1
            self._inform(sender, now, out, client)
        elif client.ready != message.ready and self.state is not State.STARTING:
            client.ready = message.ready
            self._board.alter()
        else:
            self._inform(sender, now, out, client)
        return out + self.tick(now)

    def _register(
        self,
        message: packet.Register,
        sender: Address,
        client: Client | None,
        size: int,
        now: float,
        out: list[Outgoing],
    ) -> None:
        """Take a registration: with the profile only if it returns the token, which is told otherwise."""
        claim = profile.parse_tag(message.tag)
        if not claim.profiled or self._offer is None:
            if client is not None and client.token:
                self.counts["no token"] += 1
                return
            if client is not None:
                client.heard = now
            if client is not None and client.port is not None:
                self._send(packet.Start(self.header, client.port), client, now, out)
            else:
                self._take_slot(message.key, profile.Claim(claim.name), sender, client, now, out)
            return
        token = self.guard.token(sender)
        if not hmac.compare_digest(claim.token, token):
            newest = client.seq if client is not None else self._left.get(sender, 0)
            told = packet.format_message(packet.Message(self.header, profile.offer_text(token, seq=newest)))
            if self.guard.answer(sender, len(told), size, now):
                out.append((told, sender))
            return
        self.guard.prove(sender)
        self._claim(message.key, claim, sender, client, now, out)

    def _claim(
        self, key: str, claim: profile.Claim, sender: Address, client: Client | None, now: float, out: list[Outgoing]
    ) -> None:
        """Take the registration of a client that is authenticated."""
        if client is not None and not client.token:  # somebody used its address before
            del self.clients[sender]
            self._moved(sender, None)
            self._board.alter()
            client = None
        newest = client.seq if client is not None else self._left.get(sender, 0)
        if client is None and claim.former:
            client = self._move(claim, sender, now)
        if client is not None:
            client.heard = now
        if claim.seq <= newest:
            self.counts["old registration"] += 1
            if client is not None and claim.seq < newest:  # a client that began anew counts on from there
                self._tell_offer(client, now, out)
                return
        elif claim.word == "l":
            self._leave(sender, claim.seq)
            return
        elif client is not None and client.port is not None:
            client.seq = claim.seq
        else:
            client = self._take_slot(key, claim, sender, client, now, out)
        if client is None:
            return
        if client.port is not None:
            self._send(packet.Registered(self.header, client.key), client, now, out)
            self._tell_offer(client, now, out)
            self._inform(sender, now, out, client)
            self._send(packet.Start(self.header, client.port), client, now, out)
        elif client.told != self._board.version or claim.seq <= newest:
            self._inform(sender, now, out, client)

    def _move(self, claim: profile.Claim, sender: Address, now: float) -> Client | None:
        """Return the client that comes back with the token of its former address, at its new one."""
        for client in self.clients.values():
            if client.token and hmac.compare_digest(client.token, claim.former):
                old = client.address
                del self.clients[old]
                client.address, client.token, client.seq, client.action_seq = sender, claim.token, claim.seq, 0
                client.told = client.part = 0
                self.clients[sender] = client
                self._moved(old, client)
                return client
        return None

    def _leave(self, sender: Address, seq: int) -> None:
        self._left[sender] = seq  # a registration that comes late must not undo it
        self._left.move_to_end(sender)
        if len(self._left) > _MOST_LEFT:
            self._left.popitem(last=False)
        if self.clients.pop(sender, None) is not None:
            self._moved(sender, None)
            self._board.alter()

    def _take_slot(
        self, key: str, claim: profile.Claim, sender: Address, client: Client | None, now: float, out: list[Outgoing]
    ) -> Client | None:
        """Put a client into a slot, and answer; None: it is refused, and keeps the slot that it has."""
        slot, holder = self.slots.get(key), self.holder(key)
        mine = sum(1 for other in self.clients.values() if other.address[0] == sender[0] and other is not client)
        # Whether the new slot is free is looked at before the old one is left.
        if slot is None or (holder is not None and holder is not client):
            reason = "slot not free"
        elif mine >= self.guard.slots_allowed(sender[0]):
            reason = "slots of one host"
        elif self._patience.is_over(sender):
            reason = "held the others up"
        elif self.state is State.STARTING:  # P-10: the environment is being reset for those who are ready
            reason = "starting"
        else:
            reason = ""
        if reason:
            self.counts[reason] += 1
            self._inform(sender, now, out, client)
            return None
        ready = claim.word == "r"
        if client is None or (client.key, client.tag) != (key, claim.name):
            # P-8: one slot a client; P-28: the last registration counts; P-9: it is not ready.
            self.clients.pop(sender, None)
            old = client
            client = self.clients[sender] = Client(sender, key, claim.name, False, now, claim.token)
            client.action_seq = old.action_seq if old is not None else 0
            self._board.alter()
        if claim.token:
            client.seq = claim.seq
            if client.ready != ready:
                client.ready = ready
                self._board.alter()
        self._send(packet.Registered(self.header, client.key), client, now, out)
        if claim.token:
            self._tell_offer(client, now, out)
        return client

    def _tell_offer(self, client: Client, now: float, out: list[Outgoing]) -> None:
        if self._offer is not None:
            text = self._offer(client.token, client.seq, client.key)
            self._send(packet.Message(self.header, text), client, now, out)

    # Output

    def _send(self, message: packet.ServerMessage, client: Client, now: float, out: list[Outgoing]) -> None:
        datagram = packet.format_message(message)
        if self.guard.spend(client.address, len(datagram), now):
            out.append((datagram, client.address))

    def _inform(self, address: Address, now: float, out: list[Outgoing], client: Client | None) -> None:
        """Send S1: all slots, in as many datagrams as it takes; where the guard stops it, the rest follows later."""
        datagrams = self._board.datagrams(lambda: list(self.listing().values()))
        begin = client.part if client is not None and client.part < len(datagrams) else 0
        if client is not None and begin == 0:
            if client.told == self._board.version and now < client.told_at + self.config.coalesce:
                self.counts["told just now"] += 1  # whoever else may be asking in its name
                return
            client.told_at = now
        for number in range(begin, len(datagrams)):
            if not self.guard.spend(address, len(datagrams[number]), now):
                self.counts["partial"] += 1
                if client is not None:
                    client.part = number
                return
            out.append((datagrams[number], address))
        if client is not None:
            client.part, client.told = 0, self._board.version

    def say(self, text: str, now: float) -> list[Outgoing]:
        """Send a message for people to every registered client."""
        out: list[Outgoing] = []
        shown = text.encode("utf-8", "replace")[: packet.MAX_MESSAGE - 200].decode("utf-8", "ignore")
        for client in self.clients.values():
            self._send(packet.Message(self.header, shown), client, now, out)
        return out

    # Time

    def _follow(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    def _idlers(self) -> list[Client]:
        """Return the clients that hold others up, who are ready."""
        agents = [client for client in self._agents() if client.port is None]
        return [client for client in agents if not client.ready] if any(client.ready for client in agents) else []

    def _expire(self, now: float) -> None:
        """Take out who was silent, or held the others up, for too long."""
        idlers = self._idlers() if self.state in (State.GATHERING, State.COUNTDOWN) else []
        self._patience.charge(idlers, now)
        for client in list(self.clients.values()):
            late = client.port is None and now >= client.heard + self.config.expiry
            if late or (client in idlers and self._patience.is_over(client.address)):
                del self.clients[client.address]
                self.counts["expired"] += 1
                self._board.alter()

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due: expire, start, tell, announce."""
        out: list[Outgoing] = []
        self._expire(now)
        why = self.missing() if self.state in (State.GATHERING, State.COUNTDOWN) else None
        anyone_waits = any(client.ready for client in self._agents())
        if self.state is State.GATHERING and why is None:
            self._follow(Event.COMPLETE)
            self._countdown.begin(now)
        elif self.state is State.COUNTDOWN and why is not None:
            self._follow(Event.INCOMPLETE)
            out += self.say(f"The start is put off: {why}", now)
        if self.state is State.GATHERING and not anyone_waits:
            self._countdown.end()
        starting = self.state is State.COUNTDOWN and self._countdown.is_over(now)
        # The lobby is told before the start, in a storm too; otherwise at most every `coalesce` seconds.
        if self._behind() and (starting or now >= self._told_at + self.config.coalesce):
            for client in self.clients.values():
                if client.told != self._board.version:
                    self._inform(client.address, now, out, client)
            self._informed, self._told_at = self._board.version, now
        said: str | None
        if starting:
            self._follow(Event.COUNTDOWN_OVER)
            said = "Simulation will start..."
        elif self.state is State.COUNTDOWN:
            said = self._countdown.announcement(now)
        else:
            said = self._countdown.explanation(why, anyone_waits, now)
        return out + (self.say(said, now) if said else [])

    def _behind(self) -> bool:
        """Tell whether somebody is still to be told of the lobby."""
        return self._informed != self._board.version or any(client.part for client in self.clients.values())

    def wake(self) -> float:
        """Return when `tick` is due next; infinity: when something comes."""
        times = [client.heard + self.config.expiry for client in self.clients.values() if client.port is None]
        times += [self._patience.ends_at(client) for client in self._idlers()]
        if self._behind():
            times.append(self._told_at + self.config.coalesce)
        times.append(self._countdown.wake(self.state is State.COUNTDOWN))
        return min(times, default=math.inf)

    # The run

    def started(self, port: int, now: float) -> list[Outgoing]:
        """Tell all clients that are ready the rollout's port."""
        self._follow(Event.STARTED)
        self.port = port
        self._patience.clear()
        self._countdown.end()
        out: list[Outgoing] = []
        for client in self.clients.values():
            if client.ready:
                out += self.joined(client, now)
        return out

    def joined(self, client: Client, now: float) -> list[Outgoing]:
        """Let a client into the run that is on."""
        client.port = self.port
        out: list[Outgoing] = []
        if self.port is not None:
            self._send(packet.Start(self.header, self.port), client, now, out)
        return out

    def start_failed(self, reason: str, now: float) -> list[Outgoing]:
        """Go back to gathering, everybody not ready, and say why."""
        self._follow(Event.START_FAILED)
        return self.say(f"The simulation could not start: {reason}", now) + self._gather(now)

    def run_ended(self, now: float, missed: Collection[Address] = ()) -> list[Outgoing]:
        """Go back to gathering for the next run, everybody not ready.

        Args:
            now: The time.
            missed: The clients that have not been at the run's port yet; they are told it until `settled`.
        """
        self._follow(Event.RUN_ENDED)
        for client in self.clients.values():
            if client.address not in missed:
                client.port = None
        self.port = None
        return self._gather(now)

    def settled(self, address: Address, port: int) -> None:
        """Note that a client that missed a run has reached its port, or no longer can."""
        client = self.clients.get(address)
        if client is not None and client.port == port and port != self.port:
            client.port = None

    def _gather(self, now: float) -> list[Outgoing]:
        self._countdown.end()
        self._patience.charge((), now)
        for client in self.clients.values():
            client.ready = False
            client.heard = now  # the time to say that it is ready again
        self._board.alter()
        return self.tick(now)
