"""Who may be sent how much: the defence against spoofed sources and floods. No clock, no socket.

An address that has not been proven is sent at most three bytes for each byte that came from it. It is proven when it
says something that only the receiver of our datagrams can know: its token, or its rollout's port. Addresses of the
trusted networks (loopback unless told) cannot be spoofed from outside and count as proven.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections import Counter, OrderedDict
from typing import TypeAlias

from bridge.errors import SettingError

__all__ = ["Address", "Guard", "GuardConfig"]

Address: TypeAlias = tuple[str, int]
"""An IP address as text, and a UDP port."""


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """Limits of one server, all instances together."""

    amplification: int = 3
    """Bytes sent for each byte received from an address that is not proven."""
    trusted: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    """Networks whose addresses cannot be spoofed; () trusts none."""
    max_slots_per_host: int | None = None
    """Slots that clients at one IP address may hold; None: 4, and no limit for trusted networks."""
    datagrams_per_second: float = 200.0
    """Datagrams that are read from one address and port; more are dropped. A second's worth may come at once."""
    bytes_per_second: float = 8_000_000.0
    """Bytes sent in all; a second's worth may go at once."""
    unproven_bytes_per_second: float = 64_000.0
    """The part of it that goes to addresses that are not proven."""
    max_addresses: int = 4096
    """Addresses that are remembered, of each sort; the one that was silent longest is forgotten."""

    def __post_init__(self) -> None:
        for name in ("amplification", "datagrams_per_second", "bytes_per_second", "max_addresses"):
            if not getattr(self, name) > 0:
                raise SettingError(f"expected a positive {name}, got {getattr(self, name)!r}")
        if self.max_slots_per_host is not None and self.max_slots_per_host < 1:
            raise SettingError(f"expected max_slots_per_host of 1 or more, or None, got {self.max_slots_per_host!r}")
        for network in self.trusted:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise SettingError(
                    f"expected networks such as 10.0.0.0/8 in trusted, got {network!r}: {error}"
                ) from error


class _Bucket:
    """A rate: at most a second's worth at once."""

    __slots__ = ("left", "rate", "time")

    def __init__(self, rate: float, now: float) -> None:
        self.rate, self.left, self.time = rate, rate, now

    def level(self, now: float) -> float:
        if now > self.time:
            self.left = min(self.rate, self.left + (now - self.time) * self.rate)
            self.time = now
        return self.left

    def take(self, amount: float) -> None:
        self.left -= amount


@dataclasses.dataclass(slots=True)
class _Peer:
    reads: _Bucket
    credit: int = 0


class Guard:
    """The book of bytes."""

    def __init__(self, config: GuardConfig | None = None) -> None:
        self.config = config or GuardConfig()
        self.dropped: Counter[str] = Counter()
        """Datagrams that were not read or not sent, by reason."""
        self._networks = [ipaddress.ip_network(network) for network in self.config.trusted]
        self._hosts: OrderedDict[str, bool] = OrderedDict()
        self._unproven: OrderedDict[Address, _Peer] = OrderedDict()
        self._proven: OrderedDict[Address, _Peer] = OrderedDict()
        self._all: _Bucket | None = None
        self._strangers: _Bucket | None = None

    def trusts(self, host: str) -> bool:
        """Tell whether an IP address is in a trusted network."""
        known = self._hosts.get(host)
        if known is None:
            try:
                ip = ipaddress.ip_address(host.partition("%")[0])
            except ValueError:
                known = False
            else:
                mapped = getattr(ip, "ipv4_mapped", None)
                known = any((mapped or ip) in network for network in self._networks)
            self._hosts[host] = known
            if len(self._hosts) > self.config.max_addresses:
                self._hosts.popitem(last=False)
        return known

    def slots_allowed(self, host: str) -> float:
        """Return how many slots clients at one IP address may hold."""
        if self.config.max_slots_per_host is not None:
            return self.config.max_slots_per_host
        return float("inf") if self.trusts(host) else 4

    def _peer(self, address: Address, now: float) -> _Peer:
        for table in (self._proven, self._unproven):
            if address in table:
                table.move_to_end(address)
                return table[address]
        table = self._proven if self.trusts(address[0]) else self._unproven
        peer = table[address] = _Peer(_Bucket(self.config.datagrams_per_second, now))
        if len(table) > self.config.max_addresses:
            table.popitem(last=False)
        return peer

    def heard(self, address: Address, size: int, now: float) -> bool:
        """Book a datagram that came; False: the address sends too many, drop it."""
        peer = self._peer(address, now)
        peer.credit = min(peer.credit + self.config.amplification * size, 1 << 20)
        if peer.reads.level(now) < 1:
            self.dropped["flood"] += 1
            return False
        peer.reads.take(1)
        return True

    def prove(self, address: Address) -> None:
        """Note that an address receives what is sent to it."""
        if (peer := self._unproven.pop(address, None)) is not None:
            self._proven[address] = peer
            if len(self._proven) > self.config.max_addresses:
                self._proven.popitem(last=False)

    def proven(self, address: Address) -> bool:
        """Tell whether an address has been proven, or is trusted."""
        return address in self._proven or self.trusts(address[0])

    def credit(self, address: Address) -> float:
        """Return how many bytes the address may be sent before it is proven."""
        if self.proven(address):
            return float("inf")
        peer = self._unproven.get(address)
        return peer.credit if peer else 0

    def spend(self, address: Address, size: int, now: float) -> bool:
        """Book a datagram that is about to be sent; False: do not send it."""
        if self._all is None or self._strangers is None:
            self._all = _Bucket(self.config.bytes_per_second, now)
            self._strangers = _Bucket(self.config.unproven_bytes_per_second, now)
        proven = self.proven(address)
        if not proven and self.credit(address) < size:
            self.dropped["amplification"] += 1
            return False
        if self._all.level(now) < size or (not proven and self._strangers.level(now) < size):
            self.dropped["rate"] += 1
            return False
        self._all.take(size)
        if not proven:
            self._strangers.take(size)
            self._unproven[address].credit -= size
        return True
