"""Round trips, ages of observations, and the offset of two clocks, from monotonic times.

The clocks of the two ends need not agree. A request arrives after it was sent, and before its answer was sent. This
gives an interval that contains the offset of the clocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from bridge.core.samples import Samples
from bridge.errors import SettingError

__all__ = ["DRIFT", "ClockOffset", "Latency"]

DRIFT = 1e-4
"""Seconds per second by which two monotonic clocks may drift apart."""


class ClockOffset:
    """The interval that contains `server clock - client clock`, in seconds.

    Each answered request gives bounds. The interval is their intersection, widened by the clocks' drift since. If the
    intersection is empty, a clock was set back or the server has changed, and only the newest answer counts.
    """

    def __init__(self, drift: float = DRIFT) -> None:
        self.low, self.high = -math.inf, math.inf
        self._at = 0.0
        self._drift = drift

    def sample(self, sent: float, received: float, answered: float, arrived: float) -> None:
        """Update the interval from a request.

        Args:
            sent: When the request was sent, by the client's clock.
            received: When the request was received, by the server's clock.
            answered: When the answer was sent, by the server's clock.
            arrived: When the answer arrived, by the client's clock.

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
        """The middle of the interval, as the best estimate."""
        return (self.low + self.high) / 2.0


class Latency:
    """The times of one connection."""

    def __init__(self) -> None:
        self.offset = ClockOffset()
        self.round_trips = Samples()
        self.ages = Samples()
        self._round_trip = math.nan

    def answered(self, sent: float, received: float, answered: float, arrived: float) -> None:
        """Record an answered Step; for the arguments see `ClockOffset.sample`."""
        self.offset.sample(sent, received, answered, arrived)
        # Without the time for which the server held the request.
        self._round_trip = max(0.0, (arrived - sent) - (answered - received))
        self.round_trips.add(self._round_trip)

    def age(self, observed: float, now: float) -> float:
        """Return the age in seconds, at the client's time `now`, of an observation from the server's time `observed`.

        Before the first answered Step the result is NaN, which is not counted.
        """
        # The middle may be wrong by half the interval, so clip negative ages. For NaN, `max` returns its first
        # argument.
        age = max(now + self.offset.middle - observed, 0.0)
        if math.isfinite(age):
            self.ages.add(age)
        return age

    def figures(self) -> dict[str, float]:
        """Return the figures of the connection."""
        return {
            "round_trip": self._round_trip,
            "clock_offset_low": self.offset.low,
            "clock_offset_high": self.offset.high,
        }

    def summary(self) -> Mapping[str, Mapping[str, float]]:
        """Return percentiles."""
        return {"round_trip": self.round_trips.summary(), "observation_age": self.ages.summary()}
