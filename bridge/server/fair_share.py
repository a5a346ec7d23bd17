"""Processor time, shared fairly: what a connection may use without a request of its own to show for it.

Requests are what a server is for, and are served as they come. Everything else that a client can send (pings,
settings, header blocks, resets, frames of no meaning) costs it nothing and this server something: each connection may
use a little of that at once, and all of them together a fixed share of the time. Who uses more is read later, and in
smaller pieces; nobody is cut for it.
"""

from __future__ import annotations

from bridge.worlds.scheduling import Timer

__all__ = ["FairShare", "ProcessorAccount"]

BURST = 0.01
"""Seconds that a connection may use at once."""
REFILL = 0.1
"""Seconds that all connections together may use a second, beyond those, in equal parts."""
SHARE = 0.15
"""The share of the time that all connections together may use which have used more than that."""


class FairShare:
    """What all connections of a server have in common."""

    def __init__(self) -> None:
        self.connections = 0
        """How many connections there are."""
        self.waiting = 0
        """How many connections wait until they are read again."""


class ProcessorAccount:
    """What one connection may use. `now` is seconds, monotonic.

    Args:
        share: That of the server.
        now: The time.
    """

    __slots__ = ("_credit", "_seen", "_share", "productive", "timer")

    def __init__(self, share: FairShare, now: float) -> None:
        self._share = share
        self._credit = BURST / 4
        self._seen = now
        self.productive = False
        """Whether what the connection sent last belonged to a request: the time for what follows is not counted."""
        self.timer: Timer | None = None
        """Has the connection read again, where it has used more than it may; None: it is read."""

    def charge(self, seconds: float, now: float) -> float:
        """Count what was used without completing a request; return the seconds for which it is not to be read."""
        refill = REFILL / max(2, self._share.connections)
        self._credit = min(BURST, self._credit + (now - self._seen) * refill) - seconds
        self._seen = now
        if self._credit > 0:
            return 0.0
        self._credit = 0.0
        return seconds * (self._share.waiting + 1) / SHARE
