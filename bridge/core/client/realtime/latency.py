"""How far behind an agent is: round trips, ages of observations and the offset of two clocks, from monotonic times.

No clock of the other end is trusted to agree with this one. What is known of their offset is an interval that surely
holds it, from the fact that a request arrives after it was sent and before its answer was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from bridge.core.samples import Samples
from bridge.errors import SettingError

__all__ = ["DRIFT", "ClockOffset", "Latency"]

DRIFT = 1e-4
"""Seconds a second by which two monotonic clocks may run apart."""


class ClockOffset:
    """The interval that holds `server clock - client clock`, in seconds.

    Each answered request bounds it; the interval is what all of them leave, widened by the clocks' drift since. Where
    nothing is left, a clock was set back or the server is another one: the newest answer alone counts then.
    """

    def __init__(self, drift: float = DRIFT) -> None:
        self.low, self.high = -math.inf, math.inf
        self._at = 0.0
        self._drift = drift

    def sample(self, sent: float, received: float, answered: float, arrived: float) -> None:
        """Learn from a request: sent and arrived by the client's clock, received and answered by the server's.

        Raises:
            SettingError: An answer arrived before its request was sent.
        """
        if arrived < sent or answered < received:
            raise SettingError(
                f"expected sent <= arrived and received <= answered, got {sent}, {arrived} and {received}, {answered}"
            )
        low, high = answered - arrived, received - sent
        wider = self._drift * max(0.0, arrived - self._at)
        self._at = arrived
        left = max(self.low - wider, low), min(self.high + wider, high)
        if left[0] > left[1]:
            left = low, high
        self.low, self.high = left

    @property
    def middle(self) -> float:
        """The best guess."""
        return (self.low + self.high) / 2.0


class Latency:
    """The times of one connection."""

    def __init__(self) -> None:
        self.offset = ClockOffset()
        self.round_trips = Samples()
        self.ages = Samples()
        self._round_trip = math.nan

    def answered(self, sent: float, received: float, answered: float, arrived: float) -> None:
        """A Step was answered; the arguments are those of `ClockOffset.sample`."""
        self.offset.sample(sent, received, answered, arrived)
        # The time that the server kept the request is not the network's.
        self._round_trip = max(0.0, (arrived - sent) - (answered - received))
        self.round_trips.add(self._round_trip)

    def age(self, observed: float, now: float) -> float:
        """Return how old an observation of the server's time `observed` is at the client's time `now`, seconds.

        NaN, which is not counted, while that is unknown: before the first answered Step.
        """
        # The middle may be wrong by half the interval, and nothing is younger than now. Of a NaN, `max` returns the
        # first argument.
        age = max(now + self.offset.middle - observed, 0.0)
        if math.isfinite(age):
            self.ages.add(age)
        return age

    def figures(self) -> dict[str, float]:
        """Return what belongs to the connection rather than to a slot."""
        return {
            "round_trip": self._round_trip,
            "clock_offset_low": self.offset.low,
            "clock_offset_high": self.offset.high,
        }

    def summary(self) -> Mapping[str, Mapping[str, float]]:
        """Return percentiles."""
        return {"round_trip": self.round_trips.summary(), "observation_age": self.ages.summary()}
