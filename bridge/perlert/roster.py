"""Who is in which slot of a lobby, and what clients are told of it. No clock, no socket."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

from bridge.errors import SettingError
from bridge.perlert.guard import Address, Guard
from bridge.perlert.protocol import packet

__all__ = ["Client", "Outgoing", "Roster", "SlotConfig"]

Outgoing: TypeAlias = tuple[bytes, Address]

_BOT_TAG = "cpu"
"""The tag of a slot that a bot plays."""
_S1_BYTES = 900
"""Of one datagram of the lobby: less than the kilobyte that an address which is not proven may be sent at once."""


@dataclasses.dataclass(frozen=True)
class SlotConfig:
    """One slot of the lobby."""

    key: str
    kind: str = "agent"
    bot: bool = False
    """Whether the server plays it until a client takes it: listed open and ready, and never waited for."""
    watches: str | None = None
    """A spectator's slot: the key of the slot whose steps it sees. It is never waited for."""


@dataclasses.dataclass(slots=True)
class Client:
    """A registered client. It is known by (address, port) in the lobby of its header."""

    address: Address
    key: str
    tag: str
    ready: bool
    heard: float
    """When it last said something, with its token if it has one."""
    token: str = ""
    """Nothing without it changes this registration; empty: a client that knows the draft alone."""
    seq: int = 0
    """The newest registration that was applied."""
    action_seq: int = 0
    """The newest action of its earlier runs."""
    port: int | None = None
    """The port of the run that it is in, or has not been to the end of: told on any contact."""
    told: int = 0
    """The version of the lobby that it was told."""
    told_at: float = -math.inf
    part: int = 0
    """How many datagrams of the next version it was told."""


def _some(keys: Sequence[str]) -> str:
    return f"{', '.join(keys[:8])}{'…' if len(keys) > 8 else ''}"


class Roster:
    """The slots and clients of one instance.

    Args:
        header: Which instance.
        slots: At least one.
        guard: The book of bytes, shared by all of a server.
        coalesce: Seconds in which a client is told the same lobby once.

    Raises:
        SettingError: No slots, or one key twice.
        PacketError: A name, key or kind that the grammar does not allow.
    """

    def __init__(self, header: packet.Header, slots: Sequence[SlotConfig], guard: Guard, coalesce: float) -> None:
        self.header, self.guard = header, guard
        self.slots = {slot.key: slot for slot in slots}
        if not slots or len(self.slots) < len(slots):
            raise SettingError(f"expected one slot or more, each key once, got {[slot.key for slot in slots]}")
        self.clients: dict[Address, Client] = {}
        self.counts = guard.dropped
        self._coalesce = coalesce
        self._out: list[Outgoing] = []
        self._version = 1
        self._written: list[bytes] = []
        self._datagrams()  # refuses what cannot be sent

    def holder(self, key: str) -> Client | None:
        """Return the client in a slot."""
        return next((client for client in self.clients.values() if client.key == key), None)

    def listing(self) -> dict[str, packet.Slot]:
        """Return every slot as S1 lists it."""
        held = {client.key: client for client in self.clients.values()}
        found = {}
        for key, slot in self.slots.items():
            if (client := held.get(key)) is not None:
                found[key] = packet.Slot(key, False, slot.kind, client.tag, client.ready)
            else:
                found[key] = packet.Slot(key, True, slot.kind, _BOT_TAG if slot.bot else "", slot.bot)
        return found

    def _agents(self) -> list[Client]:
        """Return the clients in agents' slots; spectators count for nothing."""
        return [client for client in self.clients.values() if self.slots[client.key].watches is None]

    def _missing(self, needed: int | None) -> str | None:
        """Return why the simulation does not start with so many clients, or one for each slot; None: it can."""
        clients, reasons = self._agents(), []
        if unready := [client.key for client in clients if not client.ready]:  # P-10
            reasons.append(f"not ready: {_some(unready)}")
        held = {client.key for client in clients}
        empty = [slot.key for slot in self.slots.values() if slot.key not in held and not (slot.bot or slot.watches)]
        if needed is not None:
            if len(clients) < needed:
                reasons.append(f"{len(clients)} of {needed} clients are registered")
        elif empty:
            reasons.append(f"open: {_some(empty)}")
        elif not clients:
            reasons.append("nobody is registered")
        return "; ".join(reasons) or None

    def _send(self, message: packet.ServerMessage, client: Client, now: float) -> None:
        datagram = packet.format_message(message)
        if self.guard.spend(client.address, len(datagram), now):
            self._out.append((datagram, client.address))

    def _to_send(self) -> list[Outgoing]:
        """Return what is to be sent, once."""
        out, self._out = self._out, []
        return out

    def _alter(self) -> None:
        """Begin another version of the lobby."""
        self._version += 1
        self._written = []

    def _datagrams(self) -> list[bytes]:
        """Return this version of the lobby: all slots, in as many S1 as it takes."""
        if not self._written:
            size, groups = math.inf, list[list[packet.Slot]]()
            for slot in self.listing().values():
                length = len(packet.slot_text(slot).encode()) + 1
                if size + length > _S1_BYTES - len(str(self.header).encode()):
                    size = 0
                    groups.append([])
                size += length
                groups[-1].append(slot)
            self._written = [packet.format_message(packet.LobbyInfo(self.header, tuple(group))) for group in groups]
        return self._written

    def _inform(self, address: Address, now: float, client: Client | None) -> None:
        """Send S1; where the guard stops it, the rest follows later."""
        datagrams = self._datagrams()
        begin = client.part if client is not None and client.part < len(datagrams) else 0
        if client is not None and begin == 0:
            if client.told == self._version and now < client.told_at + self._coalesce:
                self.counts["told just now"] += 1  # whoever else may be asking in its name
                return
            client.told_at = now
        for number in range(begin, len(datagrams)):
            if not self.guard.spend(address, len(datagrams[number]), now):
                self.counts["partial"] += 1
                if client is not None:
                    client.part = number
                return
            self._out.append((datagrams[number], address))
        if client is not None:
            client.part, client.told = 0, self._version

    def _say(self, text: str, now: float) -> None:
        shown = text.encode("utf-8", "replace")[: packet.MAX_MESSAGE - 200].decode("utf-8", "ignore")
        for client in self.clients.values():
            self._send(packet.Message(self.header, shown), client, now)

    def say(self, text: str, now: float) -> list[Outgoing]:
        """Send a message for people to every registered client."""
        self._say(text, now)
        return self._to_send()
