"""A short run of the chaos benchmark: servers killed and stopped while all goes on, and everything adds up."""

from __future__ import annotations

import os

import pytest

from benchmarks.chaos import run


@pytest.mark.skipif(os.name != "posix", reason="stops processes by signals")
def test_through_kills_and_stops_everything_adds_up_and_nothing_is_left() -> None:
    report = run(9.0, servers=2, slots=4, spares=1, period=0.7, seed=3)
    assert report.problems == []
    assert report.kills > 0
    assert report.stops > 0
    assert report.asked > 100
    assert report.episodes_lost > 0
