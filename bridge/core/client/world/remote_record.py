"""The record of each remote of a vector environment: its losses, since when, their cost; when to try again.

Nothing here waits or connects; `now` is monotonic seconds.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

__all__ = ["BREAKER_LOSSES", "BREAKER_REST", "BREAKER_WINDOW", "COUNTS", "RemoteRecord", "RemoteReport"]

BREAKER_LOSSES = 5
"""Losses of a connection that had been made, within `BREAKER_WINDOW`, after which a remote is left alone."""
BREAKER_WINDOW = 60.0
"""Seconds."""
BREAKER_REST = 30.0
"""Seconds for which it is left alone."""


@dataclasses.dataclass(frozen=True)
class RemoteReport:
    """The state of one remote, and the cost of its failures since the vector environment was made."""

    url: str
    """Its URL."""
    slots: tuple[int, ...]
    """The slots that it fills; none: it is a spare."""
    state: str
    """`connecting`, `resetting`, `running`, `lost`, `resting` (it went too often), or `spare` (ready to take over)."""
    away: float | None
    """Seconds since it went; None: it is there."""
    reason: str | None
    """The reason of its last loss, or of the last failed attempt to connect; None: there was none."""
    losses: int
    """The number of connections that were made and then lost."""
    returns: int
    """The number of times that it came back."""
    seconds_away: float
    """Seconds that it was away altogether, the present absence included."""
    episodes_lost: int
    """Episodes that were cut off, a lane each."""
    steps_asked: int
    """Steps that were sent to it, a lane each."""
    steps_received: int
    """Steps whose results were handed out."""
    steps_lost: int
    """Steps whose results never came: asked = received + lost + those outstanding."""
    moves: int
    """The number of moves of its slots to another server, because theirs drained, always failed, or had too many."""
    episodes_moved: int
    """Episodes of lanes that such a move truncated; none of them is in `episodes_lost`."""


@dataclasses.dataclass
class RemoteRecord:
    """The counters of one remote, and its circuit breaker."""

    moves: int = 0
    losses: int = 0
    returns: int = 0
    episodes_lost: int = 0
    episodes_moved: int = 0
    steps_asked: int = 0
    steps_received: int = 0
    steps_lost: int = 0
    reason: str | None = None
    away_since: float | None = None
    rests_until: float = 0.0
    _past: float = 0.0
    _recent: deque[float] = dataclasses.field(default_factory=deque)

    def lost(self, now: float, pause: float, reason: str, *, established: bool) -> float:
        """Take note that the remote went, or that an attempt to connect failed.

        Args:
            now: The time.
            pause: Seconds until the next attempt, unless the breaker opens.
            reason: Why.
            established: Whether there was a connection.

        Returns:
            When to try again.
        """
        self.reason = reason
        # Attempts that fail while it is away do not begin another absence.
        if self.away_since is None:
            self.away_since = now
        # Only connections that were made count: to a server that is not there, the growing pauses are enough. One that
        # takes each connection and loses it would be joined again and again, as each episode that begins ends the row
        # of failures.
        if established:
            self.losses += 1
            self._recent.append(now)
            while self._recent and now - self._recent[0] > BREAKER_WINDOW:
                self._recent.popleft()
            if len(self._recent) >= BREAKER_LOSSES:
                # After the rest it has as many losses again.
                self._recent.clear()
                self.rests_until = now + BREAKER_REST
        return max(now + pause, self.rests_until)

    def back(self, now: float) -> None:
        """Take note that it answers."""
        if self.away_since is not None:
            self._past += now - self.away_since
            self.away_since = None
            self.returns += 1

    def report(self, now: float, url: str, slots: tuple[int, ...], state: str) -> RemoteReport:
        """Return what there is to say."""
        away = None if self.away_since is None else now - self.away_since
        state = "resting" if state == "lost" and now < self.rests_until else state
        counts: dict[str, Any] = {name: getattr(self, name) for name in COUNTS}
        return RemoteReport(url, slots, state, away, self.reason, seconds_away=self._past + (away or 0.0), **counts)


COUNTS = tuple(field.name for field in dataclasses.fields(RemoteRecord) if field.type == "int")
"""The counters of a remote; `RemoteReport` says what each of them counts."""
