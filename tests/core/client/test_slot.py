"""The table of a slot's life: what holds for every state, and that nothing but it assigns a state."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bridge
from bridge.core.client.slots import slot
from bridge.core.client.slots.slot import CUT, SETTLED, TRANSITIONS, Member, SlotEvent, SlotPhase
from bridge.errors import Code, EnvironmentFailedError, RefusedError

JOINED = frozenset(SlotPhase) - slot.OFFLINE - slot.CONNECTING
IN_EPISODE = {SlotPhase.RUNNING, SlotPhase.STEPPING, SlotPhase.ANSWERED, SlotPhase.RENEWING, SlotPhase.RENEWED}


def in_order(states: frozenset[SlotPhase]) -> list[SlotPhase]:
    """Return states in the same order in each process of the test run."""
    return [state for state in SlotPhase if state in states]


class Record:
    def __init__(self) -> None:
        self.steps_asked = self.steps_received = self.steps_lost = 0


def member() -> Any:
    salvaged: list[Any] = []
    remote = SimpleNamespace(
        record=Record(), salvage=salvaged.append, send_step=lambda request: None, salvaged=salvaged
    )
    return Member(remote, 0, 3)  # type: ignore[arg-type]


def test_every_state_is_reached_and_left() -> None:
    assert set(TRANSITIONS.values()) == set(SlotPhase)
    assert {state for state, _ in TRANSITIONS} == set(SlotPhase)
    assert {event for _, event in TRANSITIONS} == set(SlotEvent)


@pytest.mark.parametrize("state", SlotPhase, ids=lambda state: state.name)
def test_in_every_state_a_loss_is_possible_and_cuts_what_is_in_an_episode(state: SlotPhase) -> None:
    untold = state in CUT or state in IN_EPISODE
    assert TRANSITIONS[state, SlotEvent.LOST] is (SlotPhase.CUT_OFFLINE if untold else SlotPhase.OFFLINE)


def test_an_end_is_told_where_there_is_one_and_once() -> None:
    told = {state: following for (state, event), following in TRANSITIONS.items() if event is SlotEvent.TOLD}
    assert set(told) == CUT
    assert not set(told.values()) & CUT


@pytest.mark.parametrize("state", in_order(CUT), ids=lambda state: state.name)
def test_no_episode_begins_before_the_end_of_the_last_one_was_told(state: SlotPhase) -> None:
    for event in (SlotEvent.BEGIN, SlotEvent.RENEW, SlotEvent.STEP, SlotEvent.MOVE, SlotEvent.MOVE_AHEAD):
        assert (state, event) not in TRANSITIONS


@pytest.mark.parametrize("state", in_order(JOINED), ids=lambda state: state.name)
def test_in_a_world_a_request_may_be_refused_and_is_then_asked_for_again(state: SlotPhase) -> None:
    following = TRANSITIONS[state, SlotEvent.REFUSED]
    assert following is (SlotPhase.CUT_IDLE if state in IN_EPISODE or state in CUT else SlotPhase.IDLE)
    if state not in CUT:
        assert TRANSITIONS[state, SlotEvent.BEGIN] is SlotPhase.RESETTING


def test_only_who_runs_is_stepped_and_only_who_is_asked_answers() -> None:
    assert [state for state, event in TRANSITIONS if event is SlotEvent.STEP] == [SlotPhase.RUNNING]
    asked = {state for state, event in TRANSITIONS if event is SlotEvent.ANSWER}
    assert asked == {SlotPhase.STEPPING, SlotPhase.RESETTING, SlotPhase.RENEWING}
    assert not asked & SETTLED


def test_each_step_is_received_or_lost_once() -> None:
    one = member()
    for event in (SlotEvent.CONNECT, SlotEvent.JOINED, SlotEvent.BEGIN):
        one.handle(event)
    one.take(("first", None))
    one.handed(ended=False)
    record = one.remote.record
    assert (record.steps_asked, record.steps_received, record.steps_lost) == (0, 0, 0)
    one.step(b"", 1.0)
    one.take(("second", None))
    one.handed(ended=False)
    assert (record.steps_asked, record.steps_received, record.steps_lost) == (3, 3, 0)
    one.step(b"", 1.0)
    one.handle(SlotEvent.LOST)
    one.handle(SlotEvent.TOLD)
    assert (record.steps_asked, record.steps_received, record.steps_lost) == (6, 3, 3)


def test_an_answer_that_nobody_is_handed_is_salvaged() -> None:
    one = member()
    for event in (SlotEvent.CONNECT, SlotEvent.JOINED, SlotEvent.BEGIN):
        one.handle(event)
    one.take(SimpleNamespace(message="first"))
    one.handle(SlotEvent.LOST)
    assert one.remote.salvaged == ["first"]
    assert one.answer is None


def test_an_environment_that_raised_in_three_resets_in_a_row_fails_always() -> None:
    one = member()
    one.refusal = EnvironmentFailedError("a:1", "ValueError", Code.INTERNAL)
    found = []
    for one.failures in range(5):
        found.append(one.fails_every_reset)
    assert found == [False, False, False, True, True]
    one.refusal = RefusedError("a:1", "a bad seed", Code.INVALID_ARGUMENT)
    assert not one.fails_every_reset


def test_no_other_file_assigns_a_state() -> None:
    root = Path(bridge.__file__).parent / "core" / "client"
    assigns = re.compile(r"\.phase(: \w+)? = ")
    found = [
        path.relative_to(root).as_posix() for path in root.rglob("*.py") if assigns.search(path.read_text("utf-8"))
    ]
    assert found == ["slots/slot.py"]
