"""`bridge.core.worlds.scheduling`: callbacks, timers and coroutines under a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.core.worlds.scheduling import PendingResult, Scheduler, gather


class Turned:
    """A scheduler, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(lambda: self.now)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.scheduler.run()


def test_timers_run_when_they_are_due_and_in_order() -> None:
    turned, ran = Turned(), list[str]()
    turned.scheduler.call_later(2.0, lambda: ran.append("second"))
    turned.scheduler.call_later(1.0, lambda: ran.append("first"))
    turned.advance(0.5)
    assert ran == []
    turned.advance(0.5)
    assert ran == ["first"]
    turned.advance(5.0)
    assert ran == ["first", "second"]
    assert turned.scheduler.next_due() is None


def test_timers_that_are_set_when_it_is_their_time_wait_for_the_next_run() -> None:
    """As of a real-time world whose environment takes longer than a frame: sockets are looked at between two frames."""
    turned, ran = Turned(), list[float]()

    def step() -> None:
        turned.now += 0.02
        ran.append(turned.now)
        if len(ran) < 5:
            turned.scheduler.call_later(0.0, step)

    turned.scheduler.call_later(0.0, step)
    turned.scheduler.run()
    assert len(ran) == 1
    turned.scheduler.run()
    assert len(ran) == 2


def test_a_cancelled_timer_does_not_run_and_may_be_cancelled_again() -> None:
    turned, ran = Turned(), list[str]()
    timer = turned.scheduler.call_later(1.0, lambda: ran.append("cancelled"))
    late = turned.scheduler.call_later(1.0, lambda: ran.append("ran"))
    timer.cancel()
    timer.cancel()
    turned.advance(1.0)
    late.cancel()
    assert ran == ["ran"]


def test_cancelled_timers_are_removed_long_before_they_are_due() -> None:
    """As of a world of several agents, whose every joint step sets a timer of many seconds and cancels it."""
    turned, ran = Turned(), list[int]()
    kept = [turned.scheduler.call_later(60.0 + number, lambda number=number: ran.append(number)) for number in range(3)]
    for _ in range(10_000):
        turned.scheduler.call_later(30.0, lambda: ran.append(-1)).cancel()
        assert len(turned.scheduler.timers) <= 250
    kept[1].cancel()
    turned.advance(100.0)
    assert ran == [0, 2]
    for _ in range(10_000):  # the count stays right after timers that ran
        turned.scheduler.call_later(30.0, lambda: ran.append(-1)).cancel()
        assert len(turned.scheduler.timers) <= 250


def test_a_coroutine_goes_on_once_its_result_is_there() -> None:
    turned, pending = Turned(), PendingResult[int]()
    ended: list[Any] = []

    async def wait() -> int:
        return await pending + 1

    turned.scheduler.start(wait(), lambda result, error: ended.append((result, error)))
    turned.scheduler.run()
    assert ended == []
    pending.set_result(41)
    pending.set_result(0)  # changes nothing any more
    turned.scheduler.run()
    assert ended == [(42, None)]


def test_gather_waits_for_all_and_raises_the_first_error() -> None:
    turned = Turned()
    results = [PendingResult[int](), PendingResult[int]()]
    ended: list[Any] = []

    async def wait(pending: PendingResult[int]) -> int:
        return await pending

    async def both() -> list[int]:
        return await gather(turned.scheduler, [wait(pending) for pending in results])

    turned.scheduler.start(both(), lambda result, error: ended.append((result, error)))
    results[0].set_error(ValueError("no"))
    turned.scheduler.run()
    assert ended == []
    results[1].set_result(1)
    for _ in range(3):
        turned.scheduler.run()
    result, error = ended[0]
    assert result is None
    with pytest.raises(ValueError, match="no"):
        raise error
