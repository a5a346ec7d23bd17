"""Whose turn it is: one thread at a time, and asynchronous calls in pairs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import NoReturn

import pytest

from bridge.core.client.turns import CallOrder, ConflictDetector
from bridge.errors import (
    AlreadyPendingError,
    ClosedError,
    ConcurrentUseError,
    ConnectionLostError,
    NothingPendingError,
    RemoteTimeoutError,
)
from tests.support import until

URL = "grpc://nowhere:1"


@dataclasses.dataclass
class Pool:
    """What calls are made of, without any."""

    closed: bool = False
    started: bool = True
    handing_out: bool = False
    question: object | None = None

    def abandon_question(self) -> None:
        self.question = None


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def order(pool: Pool) -> CallOrder:
    return CallOrder(pool, threading.Lock())


def begin(order: CallOrder, call: str) -> None:
    with order:
        order.check(call)
        order.pending = call


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def gather() -> NoReturn:
        raise error

    return gather


def test_an_asynchronous_call_lets_no_other_begin_until_it_was_waited_for(order: CallOrder) -> None:
    begin(order, "step")
    for other in ("step", "reset", "call of close"):
        with pytest.raises(AlreadyPendingError, match=f"{other} while a step is pending; call step_wait first"), order:
            order.check(other)
    assert order.wait("step", lambda number: number + 1, 1) == 2
    with pytest.raises(NothingPendingError, match="expected step_async before step_wait"):
        order.wait("step", lambda: None)
    begin(order, "reset")


@pytest.mark.parametrize("error", [RemoteTimeoutError(URL, "late"), KeyboardInterrupt()], ids=["timeout", "interrupt"])
def test_a_wait_that_timed_out_or_was_interrupted_goes_on_in_another_or_is_given_up_by_a_reset(
    order: CallOrder, error: BaseException
) -> None:
    begin(order, "step")
    with pytest.raises(type(error)):
        order.wait("step", raising(error))
    with pytest.raises(AlreadyPendingError, match="call step_wait again, or reset"), order:
        order.check("step")
    assert order.wait("step", lambda: "here") == "here"
    begin(order, "step")
    with pytest.raises(type(error)):
        order.wait("step", raising(error))
    begin(order, "reset")
    assert order.pending == "reset"


def test_a_wait_that_another_error_ended_is_over(order: CallOrder) -> None:
    begin(order, "step")
    with pytest.raises(ConnectionLostError):
        order.wait("step", raising(ConnectionLostError(URL, "gone")))
    begin(order, "step")


def test_a_call_that_is_given_up_before_its_wait_leaves_a_reset_free(order: CallOrder) -> None:
    order.cancel()
    begin(order, "step")  # nothing was pending
    order.cancel()
    with pytest.raises(AlreadyPendingError), order:
        order.check("step")
    begin(order, "reset")


@pytest.mark.parametrize("handing_out", [True, False])
def test_results_that_an_interrupt_lost_need_a_reset(order: CallOrder, pool: Pool, handing_out: bool) -> None:
    begin(order, "step")

    def gather() -> NoReturn:
        pool.handing_out = handing_out
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        order.wait("step", gather)
    assert pool.started is not handing_out
    assert order.pending == (None if handing_out else "step")


def test_a_call_whose_answers_are_late_is_given_up_by_any_other(order: CallOrder, pool: Pool) -> None:
    begin(order, "call")
    pool.question = "what?"
    with pytest.raises(RemoteTimeoutError):
        order.wait("call", raising(RemoteTimeoutError(URL, "late")))
    assert order.pending == "call"
    begin(order, "step")
    assert pool.question is None


def test_a_call_whose_late_worlds_were_lost_is_over(order: CallOrder) -> None:
    begin(order, "call")
    with pytest.raises(RemoteTimeoutError):
        order.wait("call", raising(RemoteTimeoutError(URL, "late")))
    assert order.pending is None


def test_a_closed_environment_says_so_to_each_call(order: CallOrder, pool: Pool) -> None:
    begin(order, "step")
    pool.closed = True
    with pytest.raises(ClosedError, match="step_wait on a closed vector environment"):
        order.wait("step", lambda: None)
    with pytest.raises(ClosedError, match="reset on a closed vector environment"), order:
        order.check("reset")


def test_a_second_thread_is_refused_and_whoever_holds_the_turn_is_waited_for() -> None:
    turn, entered, refused = threading.Lock(), threading.Event(), list[str]()
    detector = ConflictDetector("environment", turn)

    def enter() -> None:
        with detector:
            entered.set()

    turn.acquire()
    first = threading.Thread(target=enter)
    first.start()
    until(lambda: not detector.free)  # it is inside, and waits for the turn
    assert not entered.is_set()
    try:
        enter()
    except ConcurrentUseError as error:
        refused.append(str(error))
    turn.release()
    assert entered.wait(20.0)
    first.join(20.0)
    assert "another thread is using this environment" in refused[0]
    enter()
