"""Who may be sent how much: the defence against spoofed sources and floods. No clock, no socket.

An address is proven by its token, which is sent there and nowhere else, or by the handshake of the pre-shared key. An
address that is not proven is sent at most the larger of a kilobyte a second, as long as it says something, and three
times what it sent; and no more than four addresses of a host are. Addresses of the trusted networks (loopback unless
told) cannot be spoofed from outside and are free.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

from bridge.errors import SettingError

__all__ = ["Address", "Guard", "GuardConfig", "Outgoing"]

Address: TypeAlias = tuple[str, int]
"""An IP address as text, and a UDP port."""
Outgoing: TypeAlias = tuple[bytes, Address]
"""A datagram to send, and where to."""

_LISTENS = 5.0
"""Seconds after its last datagram for which an address that is not proven has its kilobyte a second."""
_FORGOTTEN = 15.0
"""Seconds of silence after which an address that is not proven makes room for another one of its host."""


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """Limits of one server, all instances together."""

    amplification: int = 3
    """Bytes sent for each byte received from an address that is not proven, if that is more than the next."""
    unproven_rate: float = 1000.0
    """Bytes a second sent to one address that is not proven."""
    unproven_per_host: int = 4
    """Addresses of one host that are not proven and are sent anything but an answer to a request for a token."""
    trusted: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    """Networks whose addresses cannot be spoofed; () trusts none."""
    max_slots_per_host: int | None = None
    """Slots that clients at one IP address may hold; None: 4, and no limit for trusted networks."""
    datagrams_per_second: float = 200.0
    """Datagrams that are read from one address and port, those with its token counted apart; more are dropped."""
    unproven_bytes_per_second: float = 64_000.0
    """Bytes sent to all addresses that are not proven; a second's worth may go at once."""
    max_addresses: int = 4096
    """Addresses, and hosts of those that are not proven, that are remembered; who was silent longest is forgotten."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0:
                raise SettingError(f"expected a positive {field.name}, got {value!r}")
        try:
            for network in self.trusted:
                ipaddress.ip_network(network)
        except ValueError as error:
            raise SettingError(f"expected networks such as 10.0.0.0/8 in trusted: {error}") from error


class _Bucket:
    """A rate: at most a second's worth at once."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate, self.left, self.time = rate, rate, now

    def level(self, now: float) -> float:
        if now > self.time:
            self.left = min(self.rate, self.left + (now - self.time) * self.rate)
            self.time = now
        return self.left

    def take(self, amount: float, now: float) -> bool:
        """Take from it, if there is as much in it."""
        if self.level(now) < amount:
            return False
        self.left -= amount
        return True


class _Peer:
    """The state of an address."""

    def __init__(self, config: GuardConfig, now: float) -> None:
        self.plain = _Bucket(config.datagrams_per_second, now)
        """Datagrams without its token."""
        self.own = _Bucket(config.datagrams_per_second, now)
        """Datagrams with its token: a flood of spoofed ones does not touch them."""
        self.allowance = _Bucket(config.unproven_rate, now)
        self.credit, self.heard = 0.0, now


class Guard:
    """The book of bytes; tokens are made with `secret`."""

    def __init__(self, config: GuardConfig | None = None, secret: bytes | None = None) -> None:
        self.config = config or GuardConfig()
        self.dropped: Counter[str] = Counter()
        """Datagrams that were not read, changed nothing or were not sent, by reason; lobbies and runs count here."""
        key, remember = secret if secret is not None else os.urandom(32), lru_cache(self.config.max_addresses)
        self.token: Callable[[Address], str] = remember(
            lambda address: hmac.digest(key, f"{address[0]} {address[1]}".encode(), hashlib.sha256).hex()[:12]
        )
        """Returns the token of an address, which nobody else can know."""
        self.trusts: Callable[[str], bool] = remember(self._trusts)
        """Tells whether an IP address is in a trusted network."""
        self._networks = [ipaddress.ip_network(network) for network in self.config.trusted]
        self._proven: OrderedDict[Address, _Peer] = OrderedDict()
        self._unproven: OrderedDict[str, dict[int, _Peer]] = OrderedDict()
        """Those that are not, by host and port."""
        self._strangers = _Bucket(self.config.unproven_bytes_per_second, 0.0)

    def _trusts(self, host: str) -> bool:
        try:
            # A link-local address comes with its zone, as in `fe80::1%eth0`.
            ip = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False
        # A socket for IPv6 shows IPv4's addresses as `::ffff:127.0.0.1`.
        return any((getattr(ip, "ipv4_mapped", None) or ip) in network for network in self._networks)

    def slots_allowed(self, host: str) -> float:
        """Return how many slots clients at one IP address may hold."""
        return self.config.max_slots_per_host or (math.inf if self.trusts(host) else 4)

    def _peer(self, address: Address, now: float) -> _Peer | None:
        """Return what is known of an address; None: its host has too many that are not proven."""
        host, port = address
        if self.trusts(host):
            self.prove(address)
        if address in self._proven:
            self._proven.move_to_end(address)
            return self._proven[address]
        # By host: a flood from forged ports of one host takes the place of no other one.
        peers = self._unproven.setdefault(host, {})
        self._unproven.move_to_end(host)
        if len(self._unproven) > self.config.max_addresses:
            self._unproven.popitem(last=False)
        if port not in peers:
            # Ports are free to forge, so a host with many would be sent many times the limit of an address.
            if len(peers) >= self.config.unproven_per_host:
                silent = min(peers, key=lambda other: peers[other].heard)
                if now < peers[silent].heard + _FORGOTTEN:
                    return None
                del peers[silent]
            peers[port] = _Peer(self.config, now)
        return peers[port]

    def heard(self, address: Address, datagram: bytes, now: float) -> bool:
        """Book a datagram that came; False: the address sends too many, drop it."""
        peer = self._peer(address, now)
        if peer is None:
            return True  # `answer` alone may reach it
        peer.heard = now
        peer.credit += self.config.amplification * len(datagram)
        bucket = peer.own if self.token(address).encode() in datagram else peer.plain
        if not bucket.take(1, now):
            self.dropped["flood"] += 1
            return False
        return True

    def prove(self, address: Address) -> None:
        """Note that an address receives what is sent to it."""
        if address not in self._proven:
            peers = self._unproven.get(address[0], {})
            # It keeps what it has used up of its rates: a token earns no second budget.
            self._proven[address] = peers.pop(address[1]) if address[1] in peers else _Peer(self.config, 0.0)
            if len(self._proven) > self.config.max_addresses:
                self._proven.popitem(last=False)

    def proven(self, address: Address) -> bool:
        """Tell whether an address has been proven, or is trusted."""
        return address in self._proven or self.trusts(address[0])

    def doubts(self, address: Address, datagram: bytes) -> bool:
        """Tell whether somebody else may have sent a datagram: its address is proven, and it shows no token."""
        shown = self.token(address).encode() in datagram
        return address in self._proven and not shown and not self.trusts(address[0])

    def spend(self, address: Address, size: int, now: float) -> bool:
        """Book a datagram that is about to be sent; False: do not send it."""
        return self.answer(address, size, 0, now)

    def answer(self, address: Address, size: int, received: int, now: float) -> bool:
        """Book a short answer to a datagram of `received` bytes, which any address may have; 0: what it may be sent."""
        if self.proven(address):
            return True
        allowed = float(self.config.amplification * received)
        peer = self._unproven.get(address[0], {}).get(address[1])
        # What is sent unasked, such as the lobby's changes, has the allowance of who spoke in the last seconds: silence
        # earns nothing.
        if peer is not None and not received:
            allowed = max(peer.allowance.level(min(now, peer.heard + _LISTENS)), peer.credit)
        # The common limit comes last, so that only what is really sent is taken from it.
        if size > allowed or not self._strangers.take(size, now):
            self.dropped["amplification" if size > allowed else "rate"] += 1
            return False
        if peer is not None:
            # Each byte counts against both, so that the larger of the two is the limit, and not their sum.
            peer.allowance.left -= size
            peer.credit -= size
        return True
