"""A slow line: carries IP packets between two TUN devices, each in the network namespace of another machine.

What happens to a packet is decided by `bridge.testing.Link`, as in the tests in virtual time, and by the rate and the
queue in front of it, as in a modem: a packet that finds the queue full is lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np

from bridge.testing import Conditions, Link

PACKET = 65536


@dataclass(frozen=True)
class Line:
    """The delay, loss and rate of one direction of a line.

    Attributes:
        conditions: Delay, jitter, loss, duplicates and reordering.
        rate: Bytes a second; None: no limit.
        queue: The most bytes that wait for their turn where the rate is limited.
    """

    conditions: Conditions = field(default_factory=Conditions)
    rate: float | None = None
    queue: int = 65536


@dataclass
class Counts:
    """The packets of a direction so far."""

    carried: int = 0
    lost: int = 0
    """By chance."""
    dropped: int = 0
    """Because the queue was full."""


class Direction:
    """Packets from one TUN device to the other.

    Args:
        source: The device they come from.
        target: The device they go to.
        line: What happens to them.
        seed: Of what happens by chance.
    """

    def __init__(self, source: int, target: int, line: Line, seed: list[int]) -> None:
        self.source, self.target, self.line = source, target, line
        self.link: Link[bytes] = Link(line.conditions, np.random.default_rng(seed))
        self.dropped = 0
        self._waiting: list[tuple[float, bytes]] = []
        self._free_at = 0.0

    def set(self, line: Line) -> None:
        self.line, self.link.conditions = line, line.conditions

    def read(self) -> None:
        """Take what the source has."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):  # then the other direction has its turn
                self._queue(time.monotonic(), os.read(self.source, PACKET))

    def write(self) -> None:
        """Give the target what has arrived."""
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            self.link.send(now, self._waiting.pop(0)[1])
        for packet in self.link.receive(now):
            with contextlib.suppress(OSError):  # EIO: the device is down; its machine has been switched off
                os.write(self.target, packet)

    def _queue(self, now: float, packet: bytes) -> None:
        if self.line.rate is None:
            self.link.send(now, packet)
            return
        waiting = max(0.0, self._free_at - now) * self.line.rate
        if waiting + len(packet) > self.line.queue:
            self.dropped += 1
            return
        self._free_at = max(now, self._free_at) + len(packet) / self.line.rate
        self._waiting.append((self._free_at, packet))

    def next_due(self) -> float | None:
        times = [time for time in (self.link.next_arrival(),) if time is not None]
        times += [self._waiting[0][0]] if self._waiting else []
        return min(times, default=None)

    def counts(self) -> Counts:
        return Counts(self.link.stats.delivered, self.link.stats.lost, self.dropped)


def relay(lines: tuple[Line, Line], seed: int, channel: Connection, near: int, far: int) -> None:
    """Carry packets until the channel closes. It takes two lines, which hold from now on, or "counts"."""
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # a busy machine should not make the line slower than it is
    directions = Direction(far, near, lines[0], [seed, 0]), Direction(near, far, lines[1], [seed, 1])
    by_source = {direction.source: direction for direction in directions}
    while True:
        due = [when for direction in directions if (when := direction.next_due()) is not None]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([channel, *by_source], [], [], wait)
        for source in ready:
            if source in by_source:
                by_source[source].read()
        for direction in directions:
            direction.write()
        if channel in ready:
            try:
                asked = channel.recv()
            except EOFError:
                return
            if asked == "counts":
                channel.send(("yielded", tuple(direction.counts() for direction in directions)))
            else:
                for direction, line in zip(directions, asked, strict=True):
                    direction.set(line)
                channel.send(("yielded", None))
