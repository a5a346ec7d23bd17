"""The table of a lane of a real-time world."""

from __future__ import annotations

import itertools

from bridge.core.worlds.realtime.loop_lane import TRANSITIONS, LaneEvent, Phase


def test_every_phase_is_reached_and_left() -> None:
    assert {phase for phase, _ in TRANSITIONS} == set(Phase)
    assert {event for _, event in TRANSITIONS} == set(LaneEvent)
    assert set(TRANSITIONS.values()) == set(Phase) - {Phase.IDLE}
    for phase, event in itertools.product(Phase, LaneEvent):
        if event is LaneEvent.BEGAN:
            assert ((phase, event) in TRANSITIONS) == (phase is Phase.RESETTING)
