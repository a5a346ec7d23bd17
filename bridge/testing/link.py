"""A network that a test holds in its hand: loses, delays, reorders and duplicates what is sent through it.

It does no I/O and has no clock: every call says what time it is (`now`, seconds, never going back), and a seeded NumPy
Generator decides each packet's fate. So a test with minutes of bad network runs in no time, and always alike.

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
    """Seconds that every packet takes."""
    jitter: float = 0.0
    """Seconds more, each packet's own, uniformly from 0 to this. Packets overtake each other by it."""
    loss: float = 0.0
    """Probability that a packet is lost."""
    duplicate: float = 0.0
    """Probability that a packet arrives twice; the copy has a jitter of its own."""
    reorder: float = 0.0
    """Probability that a packet is held back by `hold` seconds, so that later ones overtake it."""
    hold: float = 0.0
    """Seconds that a held back packet takes in addition."""
    in_order: bool = False
    """True: nothing overtakes, as in a TCP stream: a late packet holds up those behind it."""

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
    """Given to `send`."""
    lost: int = 0
    """Sent and never to arrive."""
    duplicated: int = 0
    """Copies made."""
    held: int = 0
    """Held back to be overtaken."""
    delivered: int = 0
    """Given back by `receive`, copies too."""


class Link(Generic[T]):
    """One direction of a network.

    Each packet takes the same five random numbers whatever the conditions are, so with the same seed a worse link loses
    what a better one loses and more, and everything else keeps its delay.

    Args:
        conditions: What happens to packets. The attribute `conditions` can be set at any time; packets under way
            keep theirs. `Conditions(loss=1.0)` is a cut cable.
        generator: Where chance comes from, e.g. `numpy.random.default_rng(7)`.
    """

    def __init__(self, conditions: Conditions, generator: np.random.Generator) -> None:
        self.conditions = conditions
        self.stats = LinkStats()
        self._generator = generator
        self._under_way: list[tuple[float, int, T]] = []  # a heap by (arrival, order of sending)
        self._count = 0
        self._now = -math.inf
        self._last_arrival = -math.inf

    @property
    def in_flight(self) -> int:
        """Packets, copies too, that have not been received yet."""
        return len(self._under_way)

    def send(self, now: float, packet: T) -> None:
        """Put a packet on the link.

        Raises:
            SettingError: `now` is earlier than in the call before.
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
        """Return the packets that have arrived by now and were not returned before, in the order of their arrival.

        Raises:
            SettingError: `now` is earlier than in the call before.
        """
        self._pass_to(now)
        arrived = []
        while self._under_way and self._under_way[0][0] <= now:
            arrived.append(heapq.heappop(self._under_way)[2])
        self.stats.delivered += len(arrived)
        return arrived

    def next_arrival(self) -> float | None:
        """Return when the next packet arrives, seconds; None: nothing is under way."""
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
        """Return what has arrived at this end by now, in the order of its arrival."""
        return self.incoming.receive(now)

    def next_arrival(self) -> float | None:
        """Return when something arrives at this end next, seconds; None: nothing is under way to it."""
        return self.incoming.next_arrival()


class Duplex(Generic[T]):
    """Two ends, `a` and `b`, and a link each way.

    Each direction has a random sequence of its own, so traffic one way does not change what happens the other way.

    Args:
        conditions: What happens to packets from `a` to `b`.
        generator: Where chance comes from; the directions get children of it.
        back: What happens to packets from `b` to `a`; None: the same.

    Examples:
        A hundred packets that are sent again until they are acknowledged:

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
        """Return when something arrives at either end next, seconds; None: nothing is under way."""
        times = [time for time in (self._there.next_arrival(), self._back.next_arrival()) if time is not None]
        return min(times, default=None)
