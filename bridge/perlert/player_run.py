"""The client's state of a run, and its measurements of the network. No clock, no socket."""

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
    """A step, as the agent sees it."""

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
    """From an action to the arrival of the first step that acknowledges it, smoothed; with the wait for the frame."""
    rtt_last: float | None = None
    rtt_min: float | None = None
    jitter: float | None = None
    """Mean deviation of the transit time between two steps (as RFC 3550, 6.4.1)."""
    delay: float | None = None
    """The newest step's transit time above the smallest one seen in this run."""
    _transit: float | None = dataclasses.field(default=None, repr=False)
    _shortest: float = dataclasses.field(default=math.inf, repr=False)

    def round_trip(self, seconds: float) -> None:
        """Note an action's round trip."""
        self.rtt_last = seconds
        self.rtt_min = seconds if self.rtt_min is None else min(seconds, self.rtt_min)
        # The weights of TCP's smoothed round trip (RFC 6298).
        self.rtt = seconds if self.rtt is None else self.rtt + (seconds - self.rtt) / 8

    def arrival(self, timestamp: int, arrived: float) -> None:
        """Note when a step arrived that was sent at `timestamp` (milliseconds of the server's clock)."""
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
    """The state of the current run, and the measurements in it."""

    _known: OrderedDict[tuple[int, int], None] = dataclasses.field(default_factory=OrderedDict)
    _unacked: deque[tuple[int, float]] = dataclasses.field(default_factory=lambda: deque(maxlen=_MOST_KNOWN))
    """Numbers of actions, and when each was sent first."""
    _newest: packet.Step | None = None
    _taken: int = 0
    _ret: Decimal = Decimal(0)
    _told: Decimal = Decimal(0)
    """The return up to the last step that was delivered."""

    def sends(self, seq: int, now: float) -> None:
        """Note that an action is sent."""
        self.sent += 1
        if not self._unacked or self._unacked[-1][0] < seq:
            self._unacked.append((seq, now))

    def take(self, message: packet.Step, extra: profile.Extra | None, arrived: float) -> Stepped | None:
        """Take a step; return it as it is delivered, or None: it came twice, or late, or its reward is no number."""
        order = message.step, message.timestamp
        # By step and time: a server of the draft may send the same STEP each time.
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
            self._ret += reward  # a late step's reward, too: it is in no other one
        # An older observation is of no use any more. Its reward was added above, or is in the return of a newer step.
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
            # Only the action that is acknowledged was applied when this step was made; those before it were replaced or
            # lost.
            if seq == extra.ack:
                self.round_trip(arrived - sent_at)
        return self.stepped(message.done, truncated=message.done and extra.end == "truncated", ack=extra.ack)

    def stepped(self, done: bool, *, truncated: bool = False, lost: bool = False, ack: int | None = None) -> Stepped:
        """Return what is told of the newest step."""
        step, before = self._newest, self._told
        assert step is not None
        self._told = self._ret
        times, rewards = (step.step, step.timestamp), (self._ret - before, self._ret)
        return Stepped(*times, step.observation, *rewards, done, truncated, lost, ack)
