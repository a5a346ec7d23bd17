"""`bridge.core.samples`: figures of the last values."""

import pytest

from bridge.core.samples import Samples


def test_percentiles_are_of_the_last_samples() -> None:
    """U-11: percentiles, not means."""
    samples = Samples(capacity=100)
    assert samples.summary()["count"] == 0
    for value in range(1000):
        samples.add(value)
    summary = samples.summary()
    assert (summary["count"], summary["max"], samples.last) == (1000, 999, 999)
    assert summary["p50"] == pytest.approx(949.5)
    assert summary["p99"] > summary["p90"] > summary["p50"]
