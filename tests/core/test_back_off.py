"""Pauses between attempts."""

from __future__ import annotations

import pytest

from bridge.core.back_off import doubling_pause, pause


def test_pauses_double_up_to_the_longest() -> None:
    assert [doubling_pause(failures, 1.0, 30.0) for failures in range(1, 8)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize("failures", [1024, 1025, 10**6])
def test_any_number_of_failures_has_a_pause(failures: int) -> None:
    assert doubling_pause(failures, 0.1, 10.0) == 10.0
    assert 5.0 <= pause(failures) <= 15.0
