"""`bridge.core.client.realtime.latency`: how far two clocks are apart, and how old what is seen is."""

import math

import pytest

from bridge.core.client.realtime.latency import ClockOffset, Latency
from bridge.errors import SettingError


def test_the_clock_offset_is_an_interval_that_holds_the_truth() -> None:
    """U-11: from monotonic times alone; delays differ by direction, so a guess would be wrong."""
    offset = ClockOffset(drift=0.0)
    truth = 1000.0
    for there, kept, back in ((0.5, 0.2, 0.1), (0.05, 0.0, 0.4), (0.3, 0.1, 0.02)):
        sent = 10.0
        offset.sample(sent, sent + there + truth, sent + there + kept + truth, arrived := sent + there + kept + back)
        assert offset.low <= truth <= offset.high
        assert arrived > sent
    assert offset.high - offset.low == pytest.approx(0.07), "the best of each direction"


def test_the_clock_offset_is_recalibrated_as_clocks_drift_or_jump() -> None:
    """U-11."""
    offset = ClockOffset(drift=1e-3)
    offset.sample(0.0, 100.01, 100.01, 0.02)
    narrow = offset.high - offset.low
    offset.sample(100.0, 200.5, 200.5, 101.0)  # a bad sample, much later: the old knowledge has worn
    assert offset.high - offset.low > narrow + 0.15
    offset.sample(101.0, 5000.0, 5000.0, 101.1)  # a clock was set
    assert (offset.low, offset.high) == (pytest.approx(4898.9), pytest.approx(4899.0))
    with pytest.raises(SettingError, match="sent <= arrived"):
        offset.sample(2.0, 1.0, 1.0, 1.0)


def test_a_round_trip_leaves_out_what_the_server_kept() -> None:
    """U-11: a first Step that waited for a reset says nothing of the network."""
    latency = Latency()
    latency.answered(0.0, 50.1, 55.1, 5.3)
    assert latency.figures()["round_trip"] == pytest.approx(0.3)
    assert latency.age(55.0, 5.5) == pytest.approx(5.5 + latency.offset.middle - 55.0)
    assert latency.summary()["round_trip"]["count"] == 1


def test_an_age_is_unknown_and_not_counted_before_the_first_answer() -> None:
    latency = Latency()
    assert math.isnan(latency.age(55.0, 5.5))
    assert latency.summary()["observation_age"]["count"] == 0
    latency.answered(0.0, 50.1, 50.1, 0.2)
    assert latency.age(50.1, 0.3) == pytest.approx(0.2, abs=0.1)
    assert latency.summary()["observation_age"]["count"] == 1
