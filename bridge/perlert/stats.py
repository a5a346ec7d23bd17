"""What a client measures of the network, from one run's datagrams."""

from __future__ import annotations

import dataclasses

__all__ = ["Stats"]


@dataclasses.dataclass
class Stats:
    """Counters and times of one client's run. Times are seconds; None: not known (yet, or from a plain peer)."""

    sent: int = 0
    """Actions sent, repeated ones included."""
    received: int = 0
    """Steps received, duplicates included."""
    duplicates: int = 0
    """Steps that came again."""
    reordered: int = 0
    """Steps that came after a newer one; they are not delivered, their rewards are."""
    lost: int | None = None
    """Steps that were sent to us and have not come, by the server's count."""
    actions_lost: int | None = None
    """Actions that have not reached the server (more than it counted, whenever the last step was sent)."""
    malformed: int = 0
    """Datagrams outside of the grammar, or longer than the receive buffer."""
    stale: int = 0
    """Datagrams of an older run, another instance or another sender: dropped."""
    rtt: float | None = None
    """From an action to the arrival of the first step that acknowledges it, smoothed; the wait for the next frame is
    in it."""
    rtt_last: float | None = None
    rtt_min: float | None = None
    jitter: float | None = None
    """Mean deviation of the transit time between two steps (as RFC 3550, 6.4.1)."""
    delay: float | None = None
    """The newest step's transit time above the smallest one seen in this run."""
    _transit: float | None = dataclasses.field(default=None, repr=False)
    _shortest: float | None = dataclasses.field(default=None, repr=False)

    def round_trip(self, seconds: float) -> None:
        """Note an action's round trip."""
        self.rtt_last = seconds
        self.rtt_min = seconds if self.rtt_min is None else min(self.rtt_min, seconds)
        self.rtt = seconds if self.rtt is None else self.rtt + (seconds - self.rtt) / 8

    def arrival(self, timestamp: int, arrived: float) -> None:
        """Note when a step arrived that was sent at `timestamp` (milliseconds of the server's clock)."""
        transit = arrived - timestamp / 1000
        if self._transit is not None:
            change = abs(transit - self._transit)
            self.jitter = (self.jitter or 0.0) + (change - (self.jitter or 0.0)) / 16
        self._transit = transit
        self._shortest = transit if self._shortest is None else min(self._shortest, transit)
        self.delay = transit - self._shortest

    def as_dict(self) -> dict[str, int | float | None]:
        """Return the values by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.name.startswith("_")}
