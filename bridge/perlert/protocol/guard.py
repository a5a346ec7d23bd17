"""Limits on what is sent to each address: the defence against forged senders and floods. No clock, no socket.

An address is proven by its token, which is sent only there, or by the handshake of the pre-shared key. An unproven
address that sends messages gets at most a kilobyte per second or three times what it sent, whichever is larger, and
only four unproven addresses of a host get anything. Addresses in trusted networks (by default loopback) cannot be
forged from outside and have no limits.
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
"""A datagram to send, and its destination."""

_LISTENS = 5.0
"""Seconds after its last datagram for which an unproven address gets its kilobyte per second."""
_FORGOTTEN = 15.0
"""Seconds of silence after which an unproven address makes room for another one of its host."""


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """The limits of one server, for all instances together."""

    amplification: int = 3
    """Bytes sent for each byte received from an unproven address, if that is more than `unproven_rate`."""
    unproven_rate: float = 1000.0
    """Bytes per second sent to one unproven address."""
    unproven_per_host: int = 4
    """Unproven addresses per host that get more than replies to requests for a token."""
    trusted: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    """Networks whose addresses cannot be forged; () trusts none."""
    max_slots_per_host: int | None = None
    """Slots that clients at one IP address may hold; None: 4, and no limit for trusted networks."""
    datagrams_per_second: float = 200.0
    """Datagrams read from one address and port; those with its token count separately. Further ones are dropped."""
    unproven_bytes_per_second: float = 64_000.0
    """Bytes sent to all unproven addresses; a second's worth may be sent at once."""
    max_addresses: int = 4096
    """Addresses, and hosts of unproven ones, that are remembered; the one silent for longest is forgotten first."""

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
    """A rate limit that allows bursts of a second's worth."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate, self.left, self.time = rate, rate, now

    def level(self, now: float) -> float:
        if now > self.time:
            self.left = min(self.rate, self.left + (now - self.time) * self.rate)
            self.time = now
        return self.left

    def take(self, amount: float, now: float) -> bool:
        """Take an amount if it is available; return whether it was."""
        if self.level(now) < amount:
            return False
        self.left -= amount
        return True


class _Peer:
    """The state of an address."""

    def __init__(self, config: GuardConfig, now: float) -> None:
        self.plain = _Bucket(config.datagrams_per_second, now)
        """The rate of datagrams without its token."""
        self.own = _Bucket(config.datagrams_per_second, now)
        """The rate of datagrams with its token, which a flood of forged ones does not use up."""
        self.allowance = _Bucket(config.unproven_rate, now)
        self.credit, self.heard = 0.0, now


class Guard:
    """The accounts of all addresses. Tokens are made with `secret`."""

    def __init__(self, config: GuardConfig | None = None, secret: bytes | None = None) -> None:
        self.config = config or GuardConfig()
        self.dropped: Counter[str] = Counter()
        """Datagrams that were dropped, ignored or not sent, by reason; lobbies and runs count theirs here, too."""
        key, remember = secret if secret is not None else os.urandom(32), lru_cache(self.config.max_addresses)
        self.token: Callable[[Address], str] = remember(
            lambda address: hmac.digest(key, f"{address[0]} {address[1]}".encode(), hashlib.sha256).hex()[:12]
        )
        """Returns the token of an address, which nobody else can compute."""
        self.trusts: Callable[[str], bool] = remember(self._trusts)
        """Returns True if an IP address is in a trusted network."""
        self._networks = [ipaddress.ip_network(network) for network in self.config.trusted]
        self._proven: OrderedDict[Address, _Peer] = OrderedDict()
        self._unproven: OrderedDict[str, dict[int, _Peer]] = OrderedDict()
        """Unproven addresses, by host and port."""
        self._strangers = _Bucket(self.config.unproven_bytes_per_second, 0.0)

    def _trusts(self, host: str) -> bool:
        try:
            # A link-local address has a zone, as in `fe80::1%eth0`.
            ip = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False
        # An IPv6 socket shows IPv4 addresses as `::ffff:127.0.0.1`.
        return any((getattr(ip, "ipv4_mapped", None) or ip) in network for network in self._networks)

    def slots_allowed(self, host: str) -> float:
        """Return how many slots the clients at one IP address may hold."""
        return self.config.max_slots_per_host or (math.inf if self.trusts(host) else 4)

    def _peer(self, address: Address, now: float) -> _Peer | None:
        """Return the state of an address; None if its host has too many unproven ones."""
        host, port = address
        if self.trusts(host):
            self.prove(address)
        if address in self._proven:
            self._proven.move_to_end(address)
            return self._proven[address]
        # Grouped by host: a flood from forged ports of one host cannot displace another host.
        peers = self._unproven.setdefault(host, {})
        self._unproven.move_to_end(host)
        if len(self._unproven) > self.config.max_addresses:
            self._unproven.popitem(last=False)
        if port not in peers:
            # Ports are easy to forge, so a host with many would be sent many times the limit of an address.
            if len(peers) >= self.config.unproven_per_host:
                silent = min(peers, key=lambda other: peers[other].heard)
                if now < peers[silent].heard + _FORGOTTEN:
                    return None
                del peers[silent]
            peers[port] = _Peer(self.config, now)
        return peers[port]

    def heard(self, address: Address, datagram: bytes, now: float) -> bool:
        """Account for a received datagram; return False if it must be dropped because the address sends too many."""
        peer = self._peer(address, now)
        if peer is None:
            return True  # only `answer` may send to it
        peer.heard = now
        peer.credit += self.config.amplification * len(datagram)
        bucket = peer.own if self.token(address).encode() in datagram else peer.plain
        if not bucket.take(1, now):
            self.dropped["flood"] += 1
            return False
        return True

    def prove(self, address: Address) -> None:
        """Record that an address receives what is sent to it."""
        if address not in self._proven:
            peers = self._unproven.get(address[0], {})
            # It keeps its used-up rates: a token does not give it a second budget.
            self._proven[address] = peers.pop(address[1]) if address[1] in peers else _Peer(self.config, 0.0)
            if len(self._proven) > self.config.max_addresses:
                self._proven.popitem(last=False)

    def proven(self, address: Address) -> bool:
        """Return True if an address is proven or trusted."""
        return address in self._proven or self.trusts(address[0])

    def doubts(self, address: Address, datagram: bytes) -> bool:
        """Return True if a datagram may be forged: its address is proven, but the token is missing."""
        shown = self.token(address).encode() in datagram
        return address in self._proven and not shown and not self.trusts(address[0])

    def spend(self, address: Address, size: int, now: float) -> bool:
        """Account for a datagram to send; return False if it must not be sent."""
        return self.answer(address, size, 0, now)

    def answer(self, address: Address, size: int, received: int, now: float) -> bool:
        """Account for a short reply to a datagram of `received` bytes, which any address may get; 0: unsolicited."""
        if self.proven(address):
            return True
        allowed = float(self.config.amplification * received)
        peer = self._unproven.get(address[0], {}).get(address[1])
        # Unsolicited messages, such as changes of the lobby, are allowed for addresses that sent something recently:
        # silence earns no allowance.
        if peer is not None and not received:
            allowed = max(peer.allowance.level(min(now, peer.heard + _LISTENS)), peer.credit)
        # The common limit is checked last, so that only what is sent is taken from it.
        if size > allowed or not self._strangers.take(size, now):
            self.dropped["amplification" if size > allowed else "rate"] += 1
            return False
        if peer is not None:
            # Each byte counts against both limits, so that the larger one applies, not their sum.
            peer.allowance.left -= size
            peer.credit -= size
        return True
