"""What a lobby keeps: its slots and clients, what it tells of them, who held others up, and the countdown."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from bridge.perlert.guard import Address, Guard
from bridge.perlert.protocol import packet

__all__ = ["Board", "Client", "Countdown", "Patience", "SlotConfig", "listed", "missing"]

BOT_TAG = "cpu"
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


def listed(slot: SlotConfig, client: Client | None) -> packet.Slot:
    """Return a slot as S1 lists it, with the client that holds it."""
    if client is not None:
        return packet.Slot(slot.key, False, slot.kind, client.tag, client.ready)
    return packet.Slot(slot.key, True, slot.kind, BOT_TAG if slot.bot else "", slot.bot)


def missing(slots: Sequence[SlotConfig], clients: Sequence[Client], needed: int | None) -> str | None:
    """Return why the simulation does not start; None: it can.

    Args:
        slots: The agents'.
        clients: Those in these slots.
        needed: How many; None: one for every slot without a bot.
    """
    reasons = []
    if unready := [client.key for client in clients if not client.ready]:  # P-10
        reasons.append(f"not ready: {', '.join(unready[:8])}{'…' if len(unready) > 8 else ''}")
    held = {client.key for client in clients}
    empty = [slot.key for slot in slots if slot.key not in held and not slot.bot]
    if needed is not None:
        if len(clients) < needed:
            reasons.append(f"{len(clients)} of {needed} clients are registered")
    elif empty:
        reasons.append(f"open: {', '.join(empty[:8])}{'…' if len(empty) > 8 else ''}")
    elif not clients:
        reasons.append("nobody is registered")
    return "; ".join(reasons) or None


class Board:
    """The lobby as S1, written once for each of its versions."""

    def __init__(self, header: packet.Header) -> None:
        self._header = header
        self.version = 1
        self._datagrams: list[bytes] = []

    def alter(self) -> None:
        """Begin another version."""
        self.version += 1
        self._datagrams = []

    def datagrams(self, listing: Callable[[], Sequence[packet.Slot]]) -> list[bytes]:
        """Return the datagrams of this version."""
        if not self._datagrams:
            room = _S1_BYTES - len(str(self._header).encode())
            size, group = 0, list[packet.Slot]()
            for slot in listing():
                length = len(packet.slot_text(slot).encode()) + 1
                if group and size + length > room:
                    self._write(group)
                    size, group = 0, []
                size += length
                group.append(slot)
            self._write(group)
        return self._datagrams

    def _write(self, group: Sequence[packet.Slot]) -> None:
        self._datagrams.append(packet.format_message(packet.LobbyInfo(self._header, tuple(group))))


class Patience:
    """How long each client, or host, has held the others up since the last run, whatever it did in between."""

    def __init__(self, limit: float, guard: Guard) -> None:
        self._limit, self._guard = limit, guard
        self._spent: dict[Address, float] = {}
        self._counted_at = 0.0

    def _culprit(self, address: Address) -> Address:
        """Return who is to answer for an address: its host, where that is not this machine."""
        return address if self._guard.trusts(address[0]) else (address[0], 0)

    def charge(self, idlers: Sequence[Client], now: float) -> None:
        """Count the time since the last call against some clients."""
        for culprit in {self._culprit(client.address) for client in idlers}:
            self._spent[culprit] = self._spent.get(culprit, 0.0) + max(0.0, now - self._counted_at)
        self._counted_at = now

    def is_over(self, address: Address) -> bool:
        """Tell whether a client has held the others up too long."""
        return self._spent.get(self._culprit(address), 0.0) >= self._limit - 1e-6

    def ends_at(self, client: Client) -> float:
        """Return when it will have, if it goes on."""
        return self._counted_at + self._limit - self._spent.get(self._culprit(client.address), 0.0)

    def clear(self) -> None:
        """Forgive everybody."""
        self._spent.clear()


class Countdown:
    """When the simulation starts, and what those who wait are told. It is counted once, however often it is put off.

    Args:
        seconds: From everybody's being ready to the start.
        explain: How often clients that wait are told what for; 0: never.
    """

    def __init__(self, seconds: float, explain: float) -> None:
        self._seconds, self._explain = seconds, explain
        self._start_at = math.inf
        self._announced: int | None = None
        self._explained_at = -math.inf

    def begin(self, now: float) -> None:
        """Count, unless it is being counted."""
        self._announced = None
        if self._start_at == math.inf:
            self._start_at = now + self._seconds

    def end(self) -> None:
        """Count anew next time."""
        self._start_at = math.inf

    def is_over(self, now: float) -> bool:
        """Tell whether the simulation may start."""
        return now >= self._start_at

    def announcement(self, now: float) -> str | None:
        """Return what to say while it is counted."""
        seconds = math.ceil(self._start_at - now - 1e-6)
        if seconds == self._announced:
            return None
        self._announced = seconds
        return f"Simulation will start in {seconds} s"

    def explanation(self, why: str | None, anyone_waits: bool, now: float) -> str | None:
        """Return what to say while it is not."""
        if why is None or not anyone_waits or not self._explain:
            self._explained_at = -math.inf
            return None
        first = self._explained_at == -math.inf
        if now < self._explained_at + self._explain:
            return None
        self._explained_at = now
        return None if first else f"Waiting: {why}"

    def wake(self, counting: bool) -> float:
        """Return when there is something to say next."""
        if counting and self._announced is not None:
            return self._start_at - max(self._announced - 1, 0)
        return self._explained_at + self._explain if self._explained_at > -math.inf else math.inf
