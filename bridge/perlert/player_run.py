"""What a client knows of a run, measures of the network, and tells its user. No clock, no socket."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from decimal import Decimal
from typing import TypeAlias

from bridge.perlert.protocol import packet, profile

__all__ = ["PlayerEvent", "PlayerRun", "Stats", "Stepped"]

_MOST_KNOWN = 1024


@dataclasses.dataclass(frozen=True)
class Stepped:
    """What the agent sees of a step."""

    step: int
    timestamp: int
    """Milliseconds since 1970 by the server's clock."""
    observation: str
    reward: Decimal
    """The sum since the step before; rewards of lost steps are in it when the server has the profile."""
    ret: Decimal
    """The return so far."""
    done: bool
    truncated: bool = False
    lost: bool = False
    """The end was never seen; the observation is the last that was."""
    ack: int | None = None
    """The newest action that the server had applied; None: a plain server."""


PlayerEvent: TypeAlias = packet.LobbyInfo | packet.Message | packet.Start | Stepped
"""The lobby, which is in `Player.slots`, has changed; a text for people; a run's port is known; a step came."""


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


@dataclasses.dataclass
class PlayerRun:
    """What is known of the run at hand."""

    last_step: float
    """When the newest step came, or the run became known."""
    stats: Stats = dataclasses.field(default_factory=Stats)
    newest: tuple[int, int] = (-1, -1)
    known: OrderedDict[tuple[int, int], None] = dataclasses.field(default_factory=OrderedDict)
    sent_at: OrderedDict[int, float] = dataclasses.field(default_factory=OrderedDict)
    acked: int = 0
    steps: int = 0
    ret: Decimal = Decimal(0)
    told: Decimal = Decimal(0)
    """The return up to the last step that was delivered."""
    last: packet.Step | None = None
    next_action: float = math.inf
    """When an action is to be sent again."""
    gone: int = 0
    """How often the lobby knew of no run, in a row."""

    def sends(self, seq: int, now: float) -> None:
        """Note that an action is sent."""
        self.stats.sent += 1
        if seq not in self.sent_at:
            self.sent_at[seq] = now
            if len(self.sent_at) > _MOST_KNOWN:
                self.sent_at.popitem(last=False)

    def take(self, message: packet.Step, extra: profile.Extra | None, reward: Decimal, arrived: float) -> bool:
        """Take a step that was not known; return whether it is newer than all others."""
        stats, order = self.stats, (message.step, message.timestamp)
        self.known[order] = None
        if len(self.known) > _MOST_KNOWN:
            self.known.popitem(last=False)
        self.steps += 1
        if extra is None:
            self.ret += reward  # a late step's reward, too: it is in no other one
        if order < self.newest:
            stats.reordered += 1
            return False
        self.newest, self.last, self.gone = order, message, 0
        stats.arrival(message.timestamp, arrived)
        if extra is not None:
            self.ret = extra.ret
            stats.lost = max(0, extra.sent - self.steps)
            stats.actions_lost = max(0, stats.sent - extra.got)
            if extra.ack > self.acked:
                self.acked = extra.ack
                if (sent := self.sent_at.get(extra.ack)) is not None:
                    stats.round_trip(arrived - sent)
        return True

    def stepped(self, done: bool, truncated: bool, *, lost: bool = False, ack: int | None = None) -> Stepped:
        """Return what is told of the newest step."""
        step, before = self.last, self.told
        assert step is not None
        self.told = self.ret
        times = step.step, step.timestamp
        return Stepped(*times, step.observation, self.ret - before, self.ret, done, truncated, lost, ack)
