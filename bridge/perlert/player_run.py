"""The client's state in a run, and its measurements of the network. No clock, no socket."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, deque
from decimal import Decimal

from bridge.errors import PacketError
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.codec import parse_decimal

__all__ = ["PlayerRun", "Stats", "Stepped"]

_MOST_KNOWN = 1024


@dataclasses.dataclass(frozen=True)
class Stepped:
    """A step, as the agent gets it."""

    step: int
    timestamp: int
    """Milliseconds since 1970 on the server's clock."""
    observation: str
    reward: Decimal
    """The sum since the previous step; if the server has the profile, it includes the rewards of lost steps."""
    ret: Decimal
    """The return so far."""
    done: bool
    truncated: bool = False
    lost: bool = False
    """True if the end was not received; the observation is then the last received one."""
    ack: int | None = None
    """The newest action that the server had applied; None: the server does not use the profile."""


@dataclasses.dataclass
class Stats:
    """Counters and times of one client's run. Times are in seconds; None: unknown, as from a peer without profile."""

    sent: int = 0
    """Actions sent, including repetitions."""
    received: int = 0
    """Steps received, including duplicates."""
    duplicates: int = 0
    """Duplicate steps."""
    reordered: int = 0
    """Steps that arrived after a newer one. They are not delivered, but their rewards are."""
    lost: int | None = None
    """Steps that the server has sent to us and that did not arrive."""
    actions_lost: int | None = None
    """Actions that did not reach the server; more than the server counted when the last step was sent."""
    malformed: int = 0
    """Malformed datagrams, or datagrams longer than the receive buffer."""
    stale: int = 0
    """Dropped datagrams of an older run, another instance or another sender."""
    rtt: float | None = None
    """Smoothed time from an action to the first step that acknowledges it, including the wait for the frame."""
    rtt_last: float | None = None
    rtt_min: float | None = None
    jitter: float | None = None
    """Mean deviation of the transit time between two steps (RFC 3550, section 6.4.1)."""
    delay: float | None = None
    """The transit time of the newest step minus the smallest one in this run."""
    _transit: float | None = dataclasses.field(default=None, repr=False)
    _shortest: float = dataclasses.field(default=math.inf, repr=False)

    def round_trip(self, seconds: float) -> None:
        """Record the round-trip time of an action."""
        self.rtt_last = seconds
        self.rtt_min = seconds if self.rtt_min is None else min(seconds, self.rtt_min)
        # The weights of TCP's smoothed round-trip time (RFC 6298).
        self.rtt = seconds if self.rtt is None else self.rtt + (seconds - self.rtt) / 8

    def arrival(self, timestamp: int, arrived: float) -> None:
        """Record the arrival of a step that was sent at `timestamp` (milliseconds on the server's clock)."""
        transit = arrived - timestamp / 1000
        if self._transit is not None:
            before = self.jitter or 0.0
            self.jitter = before + (abs(transit - self._transit) - before) / 16
        self._transit, self._shortest = transit, min(transit, self._shortest)
        self.delay = transit - self._shortest

    def as_dict(self) -> dict[str, int | float | None]:
        """Return the values by name."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


@dataclasses.dataclass
class PlayerRun(Stats):
    """The state of the current run, with its measurements."""

    _known: OrderedDict[tuple[int, int], None] = dataclasses.field(default_factory=OrderedDict)
    _unacked: deque[tuple[int, float]] = dataclasses.field(default_factory=lambda: deque(maxlen=_MOST_KNOWN))
    """Unacknowledged actions: their numbers, and when each was first sent."""
    _newest: packet.Step | None = None
    _taken: int = 0
    _ret: Decimal = Decimal(0)
    _told: Decimal = Decimal(0)
    """The return up to the last delivered step."""

    def sends(self, seq: int, now: float) -> None:
        """Record that an action is sent."""
        self.sent += 1
        if not self._unacked or self._unacked[-1][0] < seq:
            self._unacked.append((seq, now))

    def take(self, message: packet.Step, extra: profile.Extra | None, arrived: float) -> Stepped | None:
        """Process a step; return it for delivery, or None if it is a duplicate, late, or its reward is not a number."""
        order = message.step, message.timestamp
        # Identified by step and time: a server without the profile may send the same STEP each time.
        if order in self._known:
            self.duplicates += 1
            return None
        try:
            reward = parse_decimal(message.reward)
        except PacketError:
            self.malformed += 1
            return None
        self._known[order] = None
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        self._taken += 1
        if extra is None:
            self._ret += reward  # a late step's reward is in no other step
        # An older observation is useless. Its reward was added above, or is in the return of a newer step.
        if self._newest is not None and order < (self._newest.step, self._newest.timestamp):
            self.reordered += 1
            return None
        self._newest = message
        self.arrival(message.timestamp, arrived)
        if extra is None:
            return self.stepped(message.done)
        self._ret = extra.ret
        self.lost = max(0, extra.sent - self._taken)
        self.actions_lost = max(0, self.sent - extra.got)
        while self._unacked and self._unacked[0][0] <= extra.ack:
            seq, sent_at = self._unacked.popleft()
            # Only the acknowledged action had been applied when this step was made; earlier ones were replaced or lost.
            if seq == extra.ack:
                self.round_trip(arrived - sent_at)
        return self.stepped(message.done, truncated=message.done and extra.end == "truncated", ack=extra.ack)

    def stepped(self, done: bool, *, truncated: bool = False, lost: bool = False, ack: int | None = None) -> Stepped:
        """Return the newest step for delivery."""
        step, before = self._newest, self._told
        assert step is not None
        self._told = self._ret
        times, rewards = (step.step, step.timestamp), (self._ret - before, self._ret)
        return Stepped(*times, step.observation, *rewards, done, truncated, lost, ack)
