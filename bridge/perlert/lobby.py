"""One instance's lobby: who is in which slot, who is ready, when the simulation starts. No clock, no socket.

Messages go in with their sender and the time, datagrams to send come out; `wake()` says when `tick` wants to be called.
When `state` is STARTING, the owner opens a rollout and calls `started` with its port, and `run_ended` when it is over.
"""

from __future__ import annotations

import dataclasses
import enum
import hmac
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from bridge.errors import SettingError
from bridge.perlert.guard import Address, Guard
from bridge.perlert.protocol import packet, profile
from bridge.perlert.roster import Client, Outgoing, Roster, SlotConfig

__all__ = ["TRANSITIONS", "Event", "Lobby", "LobbyConfig", "State"]


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
class LobbyConfig:
    """When the simulation starts, and times in seconds. It never starts while an agent's client is not ready (P-10)."""

    clients: int | None = None
    """Start when so many agents' slots are held by ready clients; None: when every slot has a client or a bot."""
    countdown: float = 0.0
    """From then to the start, announced by messages. It is counted once: who breaks the condition can put the start
    off, and begins no new countdown."""
    expiry: float = 15.0
    """A registration that was silent for so long is taken out, except during its run."""
    patience: float = 120.0
    """A client that was not ready for so long in all while another one was, since the last run, is taken out and let
    in again after the next one."""
    coalesce: float = 0.1
    """The lobby is sent to all clients at most once in so many seconds, however often it changes."""
    explain: float = 5.0
    """How often clients that wait are told what for; 0: never."""

    def __post_init__(self) -> None:
        if self.clients is not None and not self.clients >= 1:
            raise SettingError(f"expected a start with 1 client or more, got {self.clients!r}")
        if not 0 <= self.countdown < math.inf:
            raise SettingError(f"expected a countdown of 0 seconds or more, got {self.countdown!r}")


_MOST_LEFT = 256
_BEFORE = (State.GATHERING, State.COUNTDOWN)


class Lobby(Roster):
    """The lobby of one instance.

    Args:
        header: Which instance.
        slots: At least one.
        guard: The book of bytes, shared by all of a server.
        config: When to start, and times.
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
        config: LobbyConfig | None = None,
        offer: Callable[[str, int, str], str] | None = None,
        moved: Callable[[Address, Client | None], None] = lambda old, client: None,
    ) -> None:
        self.config = config or LobbyConfig()
        super().__init__(header, slots, guard, self.config.coalesce)
        agents = sum(slot.watches is None for slot in slots)
        if (self.config.clients or 0) > agents:
            raise SettingError(f"expected a start with at most {agents} clients, got {self.config.clients}")
        self.state = State.GATHERING
        self.port: int | None = None
        self._offer, self._moved = offer, moved
        self._left: OrderedDict[Address, int] = OrderedDict()
        self._informed, self._informed_at = self._version, -math.inf
        # How long each client, or host, has held the others up since the last run.
        self._held_up: dict[Address, float] = {}
        self._charged_at = 0.0
        # The countdown, and when who waits is told what for; infinite: not now.
        self._start_at = self._explain_at = math.inf
        self._announced: int | None = None

    def missing(self) -> str | None:
        """Return why the simulation does not start; None: it can."""
        return self._missing(self.config.clients)

    # Input

    def handle(self, message: packet.ClientMessage, sender: Address, size: int, now: float) -> list[Outgoing]:
        """Take a message of `size` bytes, which the guard has booked."""
        client = self.clients.get(sender)
        if isinstance(message, packet.Register):
            problem = self._register(message, sender, client, size, now)
        elif isinstance(message, packet.LobbyRequest) and client is None:
            self._inform(sender, now, None)  # P-7
            return self._to_send()
        elif client is None:
            problem = "not registered"  # P-15: no answer
        else:
            problem = self._hear(message, client, now)
        if problem:
            self.counts[problem] += 1
        return self.tick(now)

    def _hear(self, message: packet.ClientMessage, client: Client, now: float) -> str:
        """Take what a client says beside registering; return why it counts for nothing, if it does not."""
        if not client.token:
            client.heard = now
        asks = isinstance(message, packet.LobbyRequest)
        if asks:
            self._inform(client.address, now, client)
        if client.port is not None:
            self._send(packet.Start(self.header, client.port), client, now)  # P-16, and for the whole rollout
        elif not isinstance(message, packet.Ready):
            return "" if asks else "action in the lobby"
        elif client.token:
            return "no token"
        elif message.key == client.key and client.ready != message.ready and self.state is not State.STARTING:
            client.ready = message.ready
            self._alter()
        else:
            self._inform(client.address, now, client)
            return "" if message.key == client.key else "not the sender's slot"
        return ""

    def _register(self, message: packet.Register, sender: Address, client: Client | None, size: int, now: float) -> str:
        """Take a registration: with the profile only if it returns the token, which is told otherwise."""
        claim = profile.parse_tag(message.tag)
        if not claim.profiled or self._offer is None:
            if client is not None and client.token:
                return "no token"
            if client is not None:
                client.heard = now
            if client is None or client.port is None:
                return self._take_slot(message.key, profile.Claim(claim.name), sender, client, now)
            self._send(packet.Start(self.header, client.port), client, now)
            return ""
        token = self.guard.token(sender)
        if hmac.compare_digest(claim.token, token):
            self.guard.prove(sender)
            return self._claim(message.key, claim, sender, client, now)
        newest = client.seq if client is not None else self._left.get(sender, 0)
        told = packet.format_message(packet.Message(self.header, profile.offer_text(token, seq=newest)))
        if self.guard.answer(sender, len(told), size, now):
            self._out.append((told, sender))
        return ""

    def _claim(self, key: str, claim: profile.Claim, sender: Address, client: Client | None, now: float) -> str:
        """Take the registration of a client that is authenticated."""
        if client is not None and not client.token:  # somebody used its address before
            self._take_out(client)
            client = None
        newest = client.seq if client is not None else self._left.get(sender, 0)
        if client is None and claim.former:
            client = self._move(claim, sender)
        if client is not None:
            client.heard = now
        if claim.seq <= newest:
            if client is not None and claim.seq < newest:  # a client that began anew counts on from there
                self._tell_offer(client, now)
                return "old registration"
        elif claim.word == "l":
            self._leave(sender, client, claim.seq)
            return ""
        elif client is None or client.port is None:
            if problem := self._take_slot(key, claim, sender, client, now):
                return problem
            client = self.clients[sender]
        else:
            client.seq = claim.seq
        if client is not None and client.port is not None:
            self._send(packet.Registered(self.header, client.key), client, now)
            self._tell_offer(client, now)
            self._inform(sender, now, client)
            self._send(packet.Start(self.header, client.port), client, now)
        elif client is not None and (client.told != self._version or claim.seq <= newest):
            self._inform(sender, now, client)
        return "old registration" if claim.seq <= newest else ""

    def _move(self, claim: profile.Claim, sender: Address) -> Client | None:
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

    def _leave(self, sender: Address, client: Client | None, seq: int) -> None:
        self._left[sender] = seq  # a registration that comes late must not undo it
        self._left.move_to_end(sender)
        if len(self._left) > _MOST_LEFT:
            self._left.popitem(last=False)
        if client is not None:
            self._take_out(client)

    def _take_out(self, client: Client) -> None:
        del self.clients[client.address]
        self._moved(client.address, None)
        self._alter()

    def _refusal(self, key: str, sender: Address, client: Client | None) -> str:
        """Return why a client may not have a slot, if it may not."""
        holder = self.holder(key)
        mine = sum(1 for other in self.clients.values() if other.address[0] == sender[0] and other is not client)
        if key not in self.slots or (holder is not None and holder is not client):
            return "slot not free"
        if mine >= self.guard.slots_allowed(sender[0]):
            return "slots of one host"
        if self._is_out_of_patience(sender):
            return "held the others up"
        # P-10: the environment is being reset for those who are ready.
        return "starting" if self.state is State.STARTING else ""

    def _take_slot(self, key: str, claim: profile.Claim, sender: Address, client: Client | None, now: float) -> str:
        """Put a client into a slot, and answer. If it is refused, return why; it keeps the slot that it has."""
        # Whether the new slot is free is looked at before the old one is left.
        if reason := self._refusal(key, sender, client):
            self._inform(sender, now, client)
            return reason
        if client is None or (client.key, client.tag) != (key, claim.name):
            # P-8: one slot a client; P-28: the last registration counts; P-9: it is not ready.
            self.clients.pop(sender, None)
            done = client.action_seq if client is not None else 0
            client = Client(sender, key, claim.name, False, now, claim.token, action_seq=done)
            self.clients[sender] = client
            self._alter()
        if claim.token:
            client.seq = claim.seq
            if client.ready != (claim.word == "r"):
                client.ready = claim.word == "r"
                self._alter()
        self._send(packet.Registered(self.header, client.key), client, now)
        if claim.token:
            self._tell_offer(client, now)
        return ""

    def _tell_offer(self, client: Client, now: float) -> None:
        if self._offer is not None:
            text = self._offer(client.token, client.seq, client.key)
            self._send(packet.Message(self.header, text), client, now)

    # Time

    def _follow(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    def _idlers(self) -> list[Client]:
        """Return the clients that hold others up, who are ready."""
        agents = [client for client in self._agents() if client.port is None]
        held_up = self.state in _BEFORE and any(client.ready for client in agents)
        return [client for client in agents if not client.ready] if held_up else []

    def _culprit(self, address: Address) -> Address:
        """Return who is to answer for an address: its host, where that is not this machine."""
        return address if self.guard.trusts(address[0]) else (address[0], 0)

    def _is_out_of_patience(self, address: Address) -> bool:
        """Tell whether a client has held the others up too long, whatever it did in between."""
        return self._held_up.get(self._culprit(address), 0.0) >= self.config.patience - 1e-6

    def _expire(self, now: float) -> None:
        """Take out who was silent, or held the others up, for too long."""
        idlers = self._idlers()
        for culprit in {self._culprit(client.address) for client in idlers}:
            self._held_up[culprit] = self._held_up.get(culprit, 0.0) + max(0.0, now - self._charged_at)
        self._charged_at = now
        for client in list(self.clients.values()):
            late = client.port is None and now >= client.heard + self.config.expiry
            if late or (client in idlers and self._is_out_of_patience(client.address)):
                del self.clients[client.address]
                self.counts["expired"] += 1
                self._alter()

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due: expire, start, tell, announce."""
        self._expire(now)
        why = self.missing() if self.state in _BEFORE else None
        anyone_waits = any(client.ready for client in self._agents())
        if self.state is State.GATHERING and why is None:
            self._follow(Event.COMPLETE)
            # A countdown that was put off goes on.
            self._start_at, self._announced = min(self._start_at, now + self.config.countdown), None
        elif self.state is State.COUNTDOWN and why is not None:
            self._follow(Event.INCOMPLETE)
            self._say(f"The start is put off: {why}", now)
        if self.state is State.GATHERING and not anyone_waits:
            self._start_at = math.inf
        starting = self.state is State.COUNTDOWN and now >= self._start_at
        # The lobby is told before the start, in a storm too; otherwise at most every `coalesce` seconds.
        if self._behind() and (starting or now >= self._informed_at + self.config.coalesce):
            for client in self.clients.values():
                if client.told != self._version:
                    self._inform(client.address, now, client)
            self._informed, self._informed_at = self._version, now
        if starting:
            self._follow(Event.COUNTDOWN_OVER)
            self._say("Simulation will start...", now)
        else:
            self._announce(why if anyone_waits else None, now)
        return self._to_send()

    def _announce(self, why: str | None, now: float) -> None:
        """Say when it starts, or now and then why it does not."""
        seconds = math.ceil(self._start_at - now - 1e-6) if self.state is State.COUNTDOWN else None
        if seconds is not None and seconds != self._announced:
            self._announced = seconds
            self._say(f"Simulation will start in {seconds} s", now)
            return
        explains = why is not None and self.config.explain > 0
        due = explains and now >= self._explain_at
        if due or not explains or self._explain_at == math.inf:
            self._explain_at = now + self.config.explain if explains else math.inf
        if due:
            self._say(f"Waiting: {why}", now)

    def _behind(self) -> bool:
        """Tell whether somebody is still to be told of the lobby."""
        return self._informed != self._version or any(client.part for client in self.clients.values())

    def wake(self) -> float:
        """Return when `tick` is due next; infinity: when something comes."""
        times = [client.heard + self.config.expiry for client in self.clients.values() if client.port is None]
        for client in self._idlers():
            held_up = self._held_up.get(self._culprit(client.address), 0.0)
            times.append(self._charged_at + self.config.patience - held_up)
        if self._behind():
            times.append(self._informed_at + self.config.coalesce)
        if self.state is State.COUNTDOWN and self._announced is not None:
            times.append(self._start_at - max(self._announced - 1, 0))
        return min([*times, self._explain_at])

    # The run

    def started(self, port: int, now: float) -> list[Outgoing]:
        """Tell all clients that are ready the rollout's port."""
        self._follow(Event.STARTED)
        self.port = port
        self._held_up.clear()
        self._start_at = math.inf
        for client in self.clients.values():
            if client.ready:
                self._let_in(client, now)
        return self._to_send()

    def joined(self, client: Client, now: float) -> list[Outgoing]:
        """Let a client into the run that is on."""
        self._let_in(client, now)
        return self._to_send()

    def _let_in(self, client: Client, now: float) -> None:
        client.port = self.port
        if client.port is not None:
            self._send(packet.Start(self.header, client.port), client, now)

    def start_failed(self, reason: str, now: float) -> list[Outgoing]:
        """Go back to gathering, everybody not ready, and say why."""
        self._follow(Event.START_FAILED)
        self._say(f"The simulation could not start: {reason}", now)
        return self._gather(now)

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
        self._start_at, self._charged_at = math.inf, now
        for client in self.clients.values():
            client.ready = False
            client.heard = now  # the time to say that it is ready again
        self._alter()
        return self.tick(now)
