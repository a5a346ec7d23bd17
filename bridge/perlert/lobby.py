"""The lobby of one instance: the client in each slot, who is ready, when a run starts. No clock, no socket.

Messages are passed in with their sender and the time; methods return datagrams to send. Call `tick` a few times a
second while a client is registered. When `state` is STARTING, the owner opens a rollout and calls `started` with it.
"""

from __future__ import annotations

import dataclasses
import hmac
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.core.rounds import TRANSITIONS, RoundEvent, RoundState
from bridge.errors import SettingError
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.guard import Address, Guard, Outgoing
from bridge.perlert.rollout import Rollout, RunMember

__all__ = ["Lobby", "LobbyConfig", "LobbyMember"]


@dataclasses.dataclass(frozen=True)
class LobbyConfig:
    """The start condition, and times in seconds. A run never starts while an agent's client is not ready (P-10)."""

    clients: int | None = None
    """Start when this many agents' slots are held by ready clients; None: when every slot has a client or a bot."""
    countdown: float | None = None
    """The time from the start condition to the start, announced by messages; None: 3 if a person is ready, who needs
    time to reach the keys, else 0. It runs once: a client that breaks the condition can delay the start, but not
    restart it."""
    expiry: float = 15.0
    """A registration without messages for this long is removed, except during its run."""
    patience: float = 120.0
    """A client that has kept ready clients waiting for this long since the last run, in sum, is removed, and admitted
    again after the next run."""
    coalesce: float = 0.1
    """The lobby is sent to a client at most once in this time, however often it changes."""

    def __post_init__(self) -> None:
        if self.clients is not None and (type(self.clients) is not int or self.clients < 1):
            raise SettingError(f'expected start="all" or a number of clients, 1 or more, got {self.clients!r}')
        if self.countdown is not None and not 0 <= self.countdown < math.inf:
            raise SettingError(f"expected a countdown of 0 seconds or more, got {self.countdown!r}")


@dataclasses.dataclass(slots=True, eq=False)
class LobbyMember:
    """A registered client, identified by (address, port) in the lobby of its header."""

    address: Address
    token: str = ""
    """Messages without the token do not change this registration; empty: the client does not use the profile."""
    key: str = ""
    tag: str = ""
    ready: bool = False
    is_person: bool = False
    """True if the client said that a person plays."""
    heard: float = -math.inf
    """When the last message arrived, with the token if the client has one."""
    port: int | None = None
    """The port of its run, or of an earlier run whose end it has not seen; sent in reply to any message."""
    player: RunMember | None = None
    """The client's state in that run."""
    told_at: float = -math.inf
    untold: int | None = 0
    """The first datagram of the lobby that is still to be sent to this client; None: all were sent."""


_S1_BYTES = 900
"""Bytes of a lobby datagram: less than the kilobyte that may be sent at once to an unproven address."""
_PEOPLE_COUNTDOWN = 3.0


class Lobby:
    """The lobby of one instance.

    `slots` are listed as given while no client holds them: one that is ready has a bot, which is never waited for.
    `watches` maps each spectator's slot to the key of the slot that it sees; it is never waited for, either. `offer`,
    given a token, a client's newest registration and a slot's key, returns the text with frame rate and spaces for our
    clients.

    Raises:
        SettingError: There are no slots, a key is given twice, or more clients are needed than there are slots.
        PacketError: A key or kind is not allowed by the grammar.
    """

    def __init__(
        self,
        header: packet.Header,
        slots: Sequence[packet.Slot],
        guard: Guard,
        *,
        config: LobbyConfig | None = None,
        watches: Mapping[str, str] | None = None,
        offer: Callable[[str, int, str], str] = lambda token, seq, key: profile.offer_text(token, seq=seq, slot=key),
    ) -> None:
        self.header, self.guard, self.config = header, guard, config or LobbyConfig()
        self.slots, self.watches = {slot.key: slot for slot in slots}, watches or {}
        if not slots or len(self.slots) < len(slots):
            raise SettingError(f"expected one slot or more, each key once, got {[slot.key for slot in slots]}")
        agents = len(slots) - len(self.watches)
        if (self.config.clients or 0) > agents:
            raise SettingError(f"expected a start with at most {agents} clients, got {self.config.clients}")
        self.clients: dict[Address, LobbyMember] = {}
        self.counts = guard.dropped
        self.state = RoundState.GATHERING
        self.run: Rollout | None = None
        """The current run."""
        self.port: int | None = None
        """The port of the current run."""
        self.runs: list[Rollout] = []
        """The runs whose ports are open."""
        self._offer = offer
        self._numbers: dict[Address, int] = {}
        """The newest registration number of each address, also of clients that left: a delayed one must not undo it."""
        self._out: list[Outgoing] = []
        self._written: list[bytes] = []
        self._datagrams()  # raises for slots that cannot be sent
        self._held_up: dict[Address, float] = {}
        """Seconds for which each client, or host, has kept others waiting since the last run."""
        self._charged_at = 0.0
        self._start_at = math.inf
        self._announced: int | None = None

    def holder(self, key: str) -> LobbyMember | None:
        """Return the client in a slot."""
        return next((client for client in self.clients.values() if client.key == key), None)

    def listing(self) -> dict[str, packet.Slot]:
        """Return every slot as S1 lists it."""
        found = dict(self.slots)
        for client in self.clients.values():
            found[client.key] = packet.Slot(client.key, False, found[client.key].kind, client.tag, client.ready)
        return found

    def _agents(self) -> list[LobbyMember]:
        return [client for client in self.clients.values() if client.key not in self.watches]

    def missing(self) -> str | None:
        """Return why the simulation does not start; None if it can."""
        agents, needed = self._agents(), self.config.clients
        unready = [client.key for client in agents if not client.ready]
        held = {client.key for client in agents}
        empty = [key for key, slot in self.slots.items() if not (key in held or slot.ready or key in self.watches)]
        if unready:  # P-10
            return f"not ready: {', '.join(unready)}"
        if needed is None and empty:
            return f"open: {', '.join(empty)}"
        if not agents:
            return "nobody is registered"
        return f"{len(agents)} of {needed} clients are registered" if len(agents) < (needed or 1) else None

    def _countdown(self) -> float:
        if self.config.countdown is not None:
            return self.config.countdown
        return _PEOPLE_COUNTDOWN if any(client.is_person for client in self._agents()) else 0.0

    # Input

    def handle(self, message: packet.ClientMessage, sender: Address, size: int, now: float) -> list[Outgoing]:
        """Process a message of `size` bytes, which the guard has accepted."""
        client = self.clients.get(sender)
        if isinstance(message, packet.Register):
            problem = self._register(message, sender, client, size, now)
        elif client is not None:
            problem = self._hear(message, client, now)
        elif isinstance(message, packet.LobbyRequest):
            # Nothing is stored for an unknown client.
            self._inform(LobbyMember(sender), now)  # P-7
            return self._to_send()
        else:
            problem = "not registered"  # P-15: no answer
        if problem:
            self.counts[problem] += 1
        return self.tick(now) if sender in self.clients else self._to_send()

    def _hear(self, message: packet.ClientMessage, client: LobbyMember, now: float) -> str:
        """Process a message that is not a registration; return why it is ignored, or ""."""
        # Only messages with the token keep our client registered: anybody may request the lobby with its address as
        # sender.
        if not client.token:
            client.heard = now
        asks = isinstance(message, packet.LobbyRequest)
        if asks:
            self._inform(client, now)
        if (port := self._port(client, now)) is not None:
            self._send(packet.Start(self.header, port), client, now)  # P-16: after any message in the whole rollout
        elif not isinstance(message, packet.ReadyMessage):
            return "" if asks else "action in the lobby"
        # C3 has no field for a token. Our clients declare that they are ready in the tag of C2.
        elif client.token:
            return "no token"
        elif message.key != client.key:
            self._inform(client, now)
            return "not the sender's slot"
        # P-10: nobody's readiness changes while the environment is being reset.
        elif client.ready == message.ready or self.state is RoundState.STARTING:
            self._inform(client, now)
        else:
            client.ready = message.ready
            self._alter()
        return ""

    def _port(self, client: LobbyMember, now: float) -> int | None:
        """Return the port of a client's run, or of a missed run whose end it has not seen."""
        if client.port != self.port and client.player is not None and client.player.was_told(now):
            client.port = None
        return client.port

    def _register(
        self, message: packet.Register, sender: Address, client: LobbyMember | None, size: int, now: float
    ) -> str:
        """Process a registration. The profile is used only if it contains the token; otherwise the token is sent."""
        claim, newest = profile.parse_tag(message.tag), self._numbers.get(sender, 0)
        if claim.profiled:
            token = self.guard.token(sender)
            # The token is sent to the address only, so a forged sender does not learn it. The reply is limited by the
            # size of the request, so it amplifies nothing, and it is sent even to a fifth unproven address of a host.
            if not hmac.compare_digest(claim.token, token):
                told = packet.Message(self.header, profile.offer_text(token, seq=newest))
                datagram = packet.format_message(told)
                if self.guard.answer(sender, len(datagram), size, now):
                    self._out.append((datagram, sender))
                return ""
            self.guard.prove(sender)
            if client is not None and not client.token:  # somebody used its address before
                self._take_out(client)
                client = None
            client = client or self._move(claim, sender)
            self._remember(self._numbers, sender, max(claim.seq, newest))
        # A registration without the token of a client that has one is forged, or older than the token.
        elif client is not None and client.token:
            return "no token"
        if client is not None:
            client.heard = now
        # UDP delays and duplicates. Old registrations are confirmed too: a client that restarted at this address learns
        # the current number from the confirmation.
        if claim.token and claim.seq <= newest:
            if client is not None:
                self._confirm(client, now)
            return "old registration"
        if claim.word == "l":
            if client is not None:
                self._take_out(client)
            return ""
        # Nothing changes during a run. A delayed `ready` from before the run would otherwise start the next run while
        # the client has not seen the end of this one.
        if client is None or self._port(client, now) is None:
            if problem := self._refusal(message.key, sender, client):
                self._inform(client or LobbyMember(sender), now)
                return problem
            client = self.clients[sender] = client or LobbyMember(sender, claim.token, heard=now)
            if (client.key, client.tag) != (message.key, claim.name):
                # P-8: one slot per client; P-28: the last registration counts; P-9: a new registration is not ready.
                client.key, client.tag, client.ready = message.key, claim.name, False
                self._alter()
            client.is_person = claim.word == "p"
            if claim.token and client.ready != (claim.word in "rp"):
                client.ready = not client.ready
                self._alter()
        self._confirm(client, now)
        return ""

    def _move(self, claim: profile.Claim, sender: Address) -> LobbyMember | None:
        """Return the client that returns from a new address, with the token of its former one."""
        for client in self.clients.values():
            if client.token and hmac.compare_digest(client.token, claim.former):
                old = client.address
                del self.clients[old]
                client.address, client.token, client.untold = sender, claim.token, 0
                self.clients[sender] = client
                # It may be in the current run, and continues there from the new address.
                for run in self.runs:
                    run.move(old, sender, claim.token)
                return client
        return None

    def _take_out(self, client: LobbyMember) -> None:
        del self.clients[client.address]
        for run in self.runs:
            run.move(client.address, None)
        self._alter()

    def _refusal(self, key: str, sender: Address, client: LobbyMember | None) -> str:
        """Return why a client may not have a slot, or "". Called before it leaves its old slot."""
        # Not counting itself: a client at the limit of its host may still change its slot.
        mine = [other for other in self.clients.values() if other.address[0] == sender[0] and other is not client]
        if key not in self.slots or self.holder(key) not in (None, client):
            return "slot not free"
        if len(mine) >= self.guard.slots_allowed(sender[0]):
            return "slots of one host"
        if self._is_out_of_patience(sender):
            return "held the others up"
        # P-10: the environment is being reset for the ready clients.
        return "starting" if self.state is RoundState.STARTING else ""

    # Output

    def _send(self, what: packet.ServerMessage | bytes, client: LobbyMember, now: float) -> bool:
        datagram = what if isinstance(what, bytes) else packet.format_message(what)
        if allowed := self.guard.spend(client.address, len(datagram), now):
            self._out.append((datagram, client.address))
        return allowed

    def _to_send(self) -> list[Outgoing]:
        out, self._out = self._out, []
        return out

    def _confirm(self, client: LobbyMember, now: float) -> None:
        """Answer a registration; during a run, with its port."""
        self._send(packet.Registered(self.header, client.key), client, now)
        if client.token:
            text = self._offer(client.token, self._numbers.get(client.address, 0), client.key)
            self._send(packet.Message(self.header, text), client, now)
        if client.port is not None:
            self._inform(client, now)  # otherwise it would repeat the registration
            self._send(packet.Start(self.header, client.port), client, now)

    def _alter(self) -> None:
        self._written = []
        for client in self.clients.values():
            client.untold = 0

    def _datagrams(self) -> list[bytes]:
        """Return this version of the lobby: all slots, in as many S1 as needed."""
        if not self._written:
            self._written = packet.format_lobby(self.header, self.listing().values(), _S1_BYTES)
        return self._written

    def _inform(self, client: LobbyMember, now: float) -> None:
        """Send S1; if the guard refuses some datagrams, they follow later."""
        if client.untold is None and now < client.told_at + self.config.coalesce:
            self.counts["told just now"] += 1  # others may send requests with its address as sender
            return
        begin, client.told_at, client.untold = client.untold or 0, now, None
        for number, datagram in enumerate(self._datagrams()[begin:], begin):
            if not self._send(datagram, client, now):
                self.counts["partial"] += 1
                client.untold = number
                return

    def _say(self, text: str, now: float) -> None:
        # The text may be an exception's, with lone surrogates, and truncation may split a character.
        shown = text.encode("utf-8", "replace")[: packet.MAX_MESSAGE - 200].decode("utf-8", "ignore")
        for client in self.clients.values():
            self._send(packet.Message(self.header, shown), client, now)

    def say(self, text: str, now: float) -> list[Outgoing]:
        """Send a text message to every registered client."""
        self._say(text, now)
        return self._to_send()

    def _remember(self, notes: dict[Address, Any], address: Address, note: Any) -> None:
        """Store a note for an address, which outlives its client. If there are too many, drop the oldest note."""
        notes.pop(address, None)
        notes[address] = note
        if len(notes) > self.guard.config.max_addresses:
            del notes[next(iter(notes))]

    # Time

    def _culprit(self, address: Address) -> Address:
        """Return what is held responsible for an address: its host, unless that is this machine."""
        return address if self.guard.trusts(address[0]) else (address[0], 0)

    def _is_out_of_patience(self, address: Address) -> bool:
        """Return True if a client has kept the others waiting for too long, whatever else it did."""
        return self._held_up.get(self._culprit(address), 0.0) >= self.config.patience - 1e-6

    def _expire(self, now: float) -> None:
        """Remove clients that were silent, or kept ready ones waiting, for too long."""
        here = [client for client in self.clients.values() if self._port(client, now) is None]
        agents = [client for client in here if client.key not in self.watches]
        idlers = [client for client in agents if not client.ready]
        # Nobody waits: nobody is ready, or the environment is being reset, or a run is in progress.
        if len(idlers) == len(agents) or self.state not in (RoundState.GATHERING, RoundState.COUNTDOWN):
            idlers = []
        # Counted once per host: the time does not grow with the number of its clients.
        for culprit in {self._culprit(client.address) for client in idlers}:
            self._remember(self._held_up, culprit, self._held_up.get(culprit, 0.0) + now - self._charged_at)
        self._charged_at = now
        for client in here:
            silent = now >= client.heard + self.config.expiry
            if silent or (client in idlers and self._is_out_of_patience(client.address)):
                self.counts["expired"] += 1
                self._take_out(client)

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due: end, expire, start, send, announce."""
        # The end of a run is handled first: the rest applies to the lobby that gathers for the next run.
        if self.run is not None and not self.run.running:
            self._follow(RoundEvent.ROUND_ENDED)
            self._gather(now)
        self._expire(now)
        why = self.missing()
        if self.state is RoundState.GATHERING and why is None:
            self._follow(RoundEvent.COMPLETE)
            # A delayed countdown continues.
            self._start_at, self._announced = min(self._start_at, now + self._countdown()), None
        elif self.state is RoundState.COUNTDOWN and why is not None:
            self._follow(RoundEvent.INCOMPLETE)
            self._say(f"The start is put off: {why}", now)
        # Nobody is ready any more, so a new countdown keeps nobody waiting.
        if self.state is RoundState.GATHERING and not any(client.ready for client in self._agents()):
            self._start_at = math.inf
        starting = self.state is RoundState.COUNTDOWN and now >= self._start_at
        # The lobby is sent before the start, even during a flood of messages.
        for client in self.clients.values():
            if client.untold is not None and (starting or now >= client.told_at + self.config.coalesce):
                self._inform(client, now)
            if self.state is RoundState.RUNNING and client.ready and client.key in self.watches:
                self._let_in(client, now)
        if starting:
            self._follow(RoundEvent.COUNTDOWN_OVER)
            self._say("Simulation will start...", now)
        # Once per second, though ticks are ten times as frequent. The millionth allows for rounding of times.
        elif self.state is RoundState.COUNTDOWN and self._announced != (left := math.ceil(self._start_at - now - 1e-6)):
            self._announced = left
            self._say(f"Simulation will start in {left} s", now)
        return self._to_send()

    # The run

    def _follow(self, event: RoundEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    def started(self, run: Rollout, now: float) -> list[Outgoing]:
        """Add all ready clients to a run, and send them its port."""
        self._follow(RoundEvent.STARTED)
        self.run, self.port = run, run.port
        self.runs.append(run)
        self._held_up.clear()
        for client in self.clients.values():
            if client.ready:
                self._let_in(client, now)
        return self._to_send()

    def _let_in(self, client: LobbyMember, now: float) -> None:
        # It may have a port already: of this run, or of an earlier one whose end it has not seen.
        if client.port is None and self.run is not None:
            client.port, key = self.run.port, self.watches.get(client.key, client.key)
            client.player = RunMember(client.address, key, client.token, watching=key != client.key)
            self.run.join(client.player, now)
            self._send(packet.Start(self.header, client.port), client, now)

    def start_failed(self, reason: str, now: float) -> list[Outgoing]:
        """Return to gathering, and report the reason."""
        self._follow(RoundEvent.START_FAILED)
        self._say(f"The simulation could not start: {reason}", now)
        self._gather(now)
        return self.tick(now)

    def _gather(self, now: float) -> None:
        """Begin to gather for the next run, with nobody ready. Tell the last run's port to clients that missed it."""
        self.run, self.port, self._start_at = None, None, math.inf
        for client in self.clients.values():
            # Clients that reached the port see the end there. The others are told the port until it closes (P-16,
            # P-17).
            if client.player is None or client.player.here:
                client.port = None
            client.ready = False
            client.heard = now  # it has the whole period again to declare itself ready
        self._alter()
