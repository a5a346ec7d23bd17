"""A simulated network for tests: it loses, delays, reorders and duplicates packets.

It does no I/O and has no clock: every call gets the time (`now`, in seconds, never decreasing), and a seeded NumPy
Generator decides what happens to each packet. So a test with minutes of bad network runs at once, and is reproducible.

Examples:
    >>> import numpy as np
    >>> from bridge.testing import Conditions, Link, VirtualClock
    >>> clock = VirtualClock()
    >>> link = Link(Conditions(delay=0.05), np.random.default_rng(0))
    >>> link.send(clock.now(), b"hello")
    >>> link.receive(clock.now())
    []
    >>> link.next_arrival()
    0.05
    >>> link.receive(clock.advance_to(link.next_arrival()))
    [b'hello']
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import Generic, TypeVar

import numpy as np

from bridge.errors import SettingError

__all__ = ["Conditions", "Duplex", "End", "Link", "LinkStats"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The faults of a link. The default is a perfect link.

    Raises:
        SettingError: A time is negative or not finite, or a probability is not in 0 to 1.
    """

    delay: float = 0.0
    """Seconds until a packet arrives."""
    jitter: float = 0.0
    """The most additional seconds, drawn uniformly for each packet. Packets may overtake each other."""
    loss: float = 0.0
    """The probability that a packet is lost."""
    duplicate: float = 0.0
    """The probability that a packet arrives twice; the copy has its own jitter."""
    reorder: float = 0.0
    """The probability that a packet is held back for `hold` seconds, so that later ones overtake it."""
    hold: float = 0.0
    """Additional seconds for a packet that is held back."""
    in_order: bool = False
    """True if no packet overtakes another, as in a TCP stream: a late packet delays those behind it."""

    def __post_init__(self) -> None:
        for name in ("delay", "jitter", "hold"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise SettingError(f"expected {name} in finite seconds, 0 or more, got {value}")
        for name in ("loss", "duplicate", "reorder"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise SettingError(f"expected {name} as a probability from 0 to 1, got {value}")


@dataclasses.dataclass
class LinkStats:
    """The counters of a link, in packets."""

    sent: int = 0
    """Packets passed to `send`."""
    lost: int = 0
    """Packets that will never arrive."""
    duplicated: int = 0
    """Copies made."""
    held: int = 0
    """Packets held back."""
    delivered: int = 0
    """Packets returned by `receive`, including copies."""


class Link(Generic[T]):
    """One direction of a network.

    Each packet uses the same number of random values under all conditions. So with the same seed a worse link loses all
    packets that a better one loses, and more, and the other packets keep their delays.

    Args:
        conditions: The faults. The attribute `conditions` can be changed at any time; packets in flight keep theirs.
            `Conditions(loss=1.0)` is a cut cable.
        generator: The source of random values, such as `numpy.random.default_rng(7)`.
    """

    def __init__(self, conditions: Conditions, generator: np.random.Generator) -> None:
        self.conditions = conditions
        self.stats = LinkStats()
        self._generator = generator
        self._under_way: list[tuple[float, int, T]] = []  # a heap of (arrival, sending order)
        self._count = 0
        self._now = -math.inf
        self._last_arrival = -math.inf

    @property
    def in_flight(self) -> int:
        """The number of packets, including copies, that have not been received yet."""
        return len(self._under_way)

    def send(self, now: float, packet: T) -> None:
        """Put a packet on the link.

        Raises:
            SettingError: `now` is earlier than in a previous call.
        """
        self._pass_to(now)
        lost, held, twice, wait, copy_wait = self._generator.random(5).tolist()
        conditions = self.conditions
        self.stats.sent += 1
        if lost < conditions.loss:
            self.stats.lost += 1
            return
        base = now + conditions.delay
        hold = 0.0
        if held < conditions.reorder:
            self.stats.held += 1
            hold = conditions.hold
        self._put(base + hold + wait * conditions.jitter, packet)
        if twice < conditions.duplicate:
            self.stats.duplicated += 1
            self._put(base + copy_wait * conditions.jitter, packet)

    def receive(self, now: float) -> list[T]:
        """Return the packets that have arrived since the last call, in the order of arrival.

        Raises:
            SettingError: `now` is earlier than in a previous call.
        """
        self._pass_to(now)
        arrived = []
        while self._under_way and self._under_way[0][0] <= now:
            arrived.append(heapq.heappop(self._under_way)[2])
        self.stats.delivered += len(arrived)
        return arrived

    def next_arrival(self) -> float | None:
        """Return when the next packet arrives, in seconds; None if none is in flight."""
        return self._under_way[0][0] if self._under_way else None

    def _put(self, arrival: float, packet: T) -> None:
        if self.conditions.in_order:
            arrival = max(arrival, self._last_arrival)
        self._last_arrival = max(self._last_arrival, arrival)
        self._count += 1
        heapq.heappush(self._under_way, (arrival, self._count, packet))

    def _pass_to(self, now: float) -> None:
        if not (now >= self._now and math.isfinite(now)):
            raise SettingError(f"expected now to be {self._now} or later, got {now}: time does not go back")
        self._now = now


class End(Generic[T]):
    """One end of a `Duplex`: sends to the other end and receives from it."""

    def __init__(self, outgoing: Link[T], incoming: Link[T]) -> None:
        self.outgoing, self.incoming = outgoing, incoming

    def send(self, now: float, packet: T) -> None:
        """Send a packet to the other end."""
        self.outgoing.send(now, packet)

    def receive(self, now: float) -> list[T]:
        """Return the packets that have arrived at this end since the last call, in the order of arrival."""
        return self.incoming.receive(now)

    def next_arrival(self) -> float | None:
        """Return when the next packet arrives at this end, in seconds; None if none is in flight."""
        return self.incoming.next_arrival()


class Duplex(Generic[T]):
    """Two ends, `a` and `b`, with a link in each direction.

    Each direction has its own random sequence, so traffic in one does not affect the other.

    Args:
        conditions: The faults from `a` to `b`.
        generator: The source of random values; each direction gets a child of it.
        back: The faults from `b` to `a`; None: the same.

    Examples:
        Send a hundred packets, each repeated until it is acknowledged:

        >>> from bridge.testing import VirtualClock
        >>> clock = VirtualClock()
        >>> conditions = Conditions(delay=0.02, jitter=0.03, loss=0.3, duplicate=0.1)
        >>> duplex = Duplex(conditions, np.random.default_rng(0))
        >>> unacknowledged, delivered = set(range(100)), set()
        >>> while unacknowledged:
        ...     for number in sorted(unacknowledged):
        ...         duplex.a.send(clock.now(), number)
        ...     now = clock.advance(0.1)
        ...     for number in duplex.b.receive(clock.now()):
        ...         delivered.add(number)
        ...         duplex.b.send(clock.now(), number)
        ...     now = clock.advance(0.1)
        ...     unacknowledged -= set(duplex.a.receive(clock.now()))
        >>> delivered == set(range(100))
        True
    """

    def __init__(
        self, conditions: Conditions, generator: np.random.Generator, *, back: Conditions | None = None
    ) -> None:
        there, again = generator.spawn(2)
        self._there: Link[T] = Link(conditions, there)
        self._back: Link[T] = Link(conditions if back is None else back, again)
        self.a: End[T] = End(self._there, self._back)
        self.b: End[T] = End(self._back, self._there)

    def next_arrival(self) -> float | None:
        """Return when the next packet arrives at either end, in seconds; None if none is in flight."""
        times = [time for time in (self._there.next_arrival(), self._back.next_arrival()) if time is not None]
        return min(times, default=None)
