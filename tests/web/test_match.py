"""A match's state, with the time as an argument: seats, ready, the countdown, rounds and results."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bridge.core.rounds import TRANSITIONS, RoundEvent, RoundState
from bridge.errors import SettingError
from bridge.web.watching.match import Match, MatchOptions, Order, display_name

NOBODY: dict[str, float] = {}


def match(*people: str, seats: str = "abc", **options: float) -> Match:
    """A match with some people in its first seats."""
    made = Match(dict.fromkeys(seats, "random"), MatchOptions(**{"countdown": 3.0, "patience": 60.0, **options}))
    for seat, name in zip(seats, people, strict=False):
        made.take(seat, f"person:{name}")
    return made


def running(*people: str, **options: float) -> Match:
    """A match whose first round runs with some people, at second 3."""
    made = match(*people, **options)
    for seat, _ in zip("abc", people, strict=False):
        made.set_ready(seat, True)
    made.tick(0.0)
    assert made.tick(made.wake()) is Order.BEGIN
    made.started()
    return made


def ready(one: Match) -> dict[str, bool]:
    return {seat["seat"]: seat["ready"] for seat in one.describe(0.0, NOBODY)["seats"]}


# The start


def test_a_round_begins_a_countdown_after_all_people_are_ready():
    one = match("Ann", "Ben")
    assert one.tick(0.0) is None
    assert (one.state, one.wake()) == (RoundState.GATHERING, math.inf)
    one.set_ready("a", True)
    assert one.tick(10.0) is None
    assert one.missing(10.0) == ["b"]
    one.set_ready("b", True)
    assert one.tick(12.0) is None
    assert (one.state, one.wake()) == (RoundState.COUNTDOWN, 15.0)
    assert one.describe(13.5, NOBODY)["countdown"] == 1.5
    assert one.tick(14.9) is None
    assert one.tick(15.0) is Order.BEGIN
    assert one.tick(15.0) is None, "it is ordered once"
    one.started()
    assert (one.state, one.round) == (RoundState.RUNNING, 1)
    assert [one.is_playing(seat) for seat in "abc"] == [True, True, False]


def test_without_a_countdown_it_begins_at_once():
    one = match("Ann", countdown=0.0)
    one.set_ready("a", True)
    assert one.tick(5.0) is Order.BEGIN


def test_programs_are_always_ready_and_play_without_people_too():
    one = match()
    assert one.tick(0.0) is None
    assert one.wake() == math.inf, "nobody is there"
    one.take("b", "agent:PPO")
    one.tick(1.0)
    assert (one.state, one.wake()) == (RoundState.COUNTDOWN, 4.0)
    one.set_ready("b", False)
    assert one.tick(4.0) is Order.BEGIN


def test_who_comes_in_the_countdown_puts_the_start_off_and_it_is_counted_once():
    one = match("Ann")
    one.set_ready("a", True)
    one.tick(0.0)
    one.take("b", "person:Ben")
    assert one.tick(1.0) is None
    assert one.state is RoundState.GATHERING
    one.set_ready("b", True)
    one.tick(2.0)
    assert (one.state, one.wake()) == (RoundState.COUNTDOWN, 3.0)
    one.set_ready("b", False)
    assert one.tick(2.5) is None
    one.set_ready("b", True)
    assert one.tick(20.0) is Order.BEGIN, "the countdown was over long ago"


def test_a_countdown_ends_with_the_last_one_who_was_ready():
    one = match("Ann")
    one.set_ready("a", True)
    one.tick(0.0)
    one.leave("a")
    assert one.tick(1.0) is None
    assert (one.state, one.wake()) == (RoundState.GATHERING, math.inf)
    one.take("a", "person:Ann")
    one.set_ready("a", True)
    one.tick(10.0)
    assert one.wake() == 13.0, "a new one begins"


def test_nobody_can_hold_up_those_who_are_ready_for_longer_than_their_patience():
    """One who is never ready, one who comes and goes, and one who changes their mind all the time."""
    never = match("Ann", "Ben")
    never.set_ready("a", True)
    never.tick(0.0)
    assert never.wake() == 60.0
    never.tick(60.0)
    assert (never.state, never.wake()) == (RoundState.COUNTDOWN, 63.0)
    assert never.tick(63.0) is Order.BEGIN
    never.started()
    assert [never.is_playing(seat) for seat in "ab"] == [True, False]

    for flips in (True, False):
        one = match("Ann", "Ben")
        one.set_ready("a", True)
        now, order = 0.0, None
        while order is None:
            now += 0.25
            if flips:
                one.set_ready("b", int(now * 4) % 2 == 0)
            elif int(now * 4) % 2:
                one.leave("b")
            else:
                one.take("b", "person:Ben")
            order = one.tick(now)
            assert now < 64.0
        assert order is Order.BEGIN


def test_who_is_ready_again_after_nobody_was_waits_anew():
    one = match("Ann", "Ben")
    one.set_ready("a", True)
    one.tick(0.0)
    one.set_ready("a", False)
    one.tick(59.0)
    one.set_ready("a", True)
    one.tick(59.5)
    assert one.wake() == 119.5


# The round


def test_a_result_stands_with_returns_and_winners_until_all_who_played_are_ready_again():
    one = running("Ann", "Ben")
    one.ended({"a": 1.0, "b": 3.0, "c": -2.0})
    assert one.state is RoundState.GATHERING
    assert one.result == {
        "round": 1,
        "seats": [
            {"seat": "a", "name": "Ann", "kind": "person", "return": 1.0},
            {"seat": "b", "name": "Ben", "kind": "person", "return": 3.0},
            {"seat": "c", "name": "random", "kind": "policy", "return": -2.0},
        ],
        "winners": ["b"],
        "error": None,
    }
    assert ready(one) == dict.fromkeys("abc", False)
    assert one.tick(10.0) is None
    one.set_ready("a", True)
    one.tick(11.0)
    assert one.result is not None
    one.leave("b")
    one.tick(12.0)
    assert one.tick(15.0) is Order.BEGIN, "those who left are not waited for"
    assert one.result is not None, "while the environment is reset it is still to be read"
    one.started()
    assert (one.result, one.round) == (None, 2)


@pytest.mark.parametrize(
    ("returns", "winners"),
    [
        ({"a": 1.0, "b": 1.0}, []),
        ({"a": 2.0}, []),
        ({}, []),
        ({"a": 2.0, "b": 2.0, "c": 0.0}, ["a", "b"]),
        ({"a": 0.1 + 0.2, "b": 0.3, "c": 0.0}, ["a", "b"]),
        ({"a": math.nan, "b": -1.0}, ["b"]),
        ({"a": math.inf, "b": -1.0}, ["a"]),
    ],
)
def test_winners_have_the_highest_return_where_not_all_have_it(returns, winners):
    one = running("Ann", "Ben")
    one.ended(returns)
    assert one.result is not None
    assert one.result["winners"] == winners
    assert all(seat["return"] is None or np.isfinite(seat["return"]) for seat in one.result["seats"])


def test_who_leaves_a_round_is_played_by_a_policy_and_the_others_go_on():
    one = running("Ann", "Ben")
    one.leave("b")
    assert one.tick(5.0) is None
    assert (one.state, one.is_playing("b")) == (RoundState.RUNNING, False)
    one.ended({"a": 0.0, "b": 1.0, "c": 0.0})
    assert one.result is not None
    assert one.result["seats"][1] == {"seat": "b", "name": "random", "kind": "policy", "return": 1.0}


def test_a_round_that_all_have_left_is_cut_off_without_a_result():
    one = running("Ann", "Ben")
    one.leave("a")
    one.leave("b")
    assert one.tick(5.0) is Order.END
    one.ended(None)
    assert (one.state, one.result, one.tick(5.0), one.wake()) == (RoundState.GATHERING, None, None, math.inf)


def test_who_comes_in_a_round_plays_in_the_next_one():
    one = running("Ann")
    one.take("b", "person:Ben")
    assert one.tick(5.0) is None
    one.set_ready("b", True)
    assert one.tick(6.0) is None, "the round of others is not cut off"
    assert one.wake() == math.inf
    assert not one.is_playing("b")
    shown = one.describe(6.0, {"a": 1.5})["seats"][1]
    assert (shown["name"], shown["kind"], shown["taken_by"], shown["ready"]) == ("random", "policy", "Ben", True)
    one.ended({"a": 1.0, "b": 0.0, "c": 0.0})
    assert one.result is not None
    assert one.result["seats"][1]["name"] == "random"
    assert ready(one) == {"a": False, "b": True, "c": False}
    one.set_ready("a", True)
    one.tick(10.0)
    assert one.tick(13.0) is Order.BEGIN
    assert one.is_playing("b")


def test_a_round_of_programs_alone_is_cut_off_for_people_who_are_ready():
    one = match()
    one.take("a", "agent")
    one.tick(0.0)
    assert one.tick(3.0) is Order.BEGIN
    one.started()
    one.take("b", "person:Ben")
    one.take("c", "person:Cyd")
    assert one.tick(4.0) is None
    one.set_ready("b", True)
    assert one.tick(5.0) is None
    assert one.wake() == 65.0
    assert one.tick(65.0) is Order.END, "nor can the third one hold the second one up"
    one = running("Ann")
    one.take("b", "agent")
    one.leave("a")
    assert one.tick(5.0) is Order.END, "the program came in its midst, and does not play"


def test_who_stands_down_keeps_the_seat_for_the_next_round():
    one = running("Ann", "Ben")
    one.stand_down("b")
    one.set_ready("b", True)
    assert one.tick(5.0) is None
    assert not one.is_playing("b")
    one.ended({"a": 0.0, "b": 1.0})
    assert ready(one)["b"]


# Failures


def test_a_failed_start_is_told_and_people_have_to_be_ready_again():
    one = match("Ann")
    one.set_ready("a", True)
    one.tick(0.0)
    assert one.tick(3.0) is Order.BEGIN
    one.failed("ValueError: no map", 3.0)
    assert one.state is RoundState.GATHERING
    assert one.result == {"round": 0, "seats": [], "winners": [], "error": "ValueError: no map"}
    assert not ready(one)["a"]
    assert one.tick(4.0) is None


def test_programs_alone_do_not_begin_failing_rounds_without_a_pause():
    one = match(countdown=0.0)
    one.take("a", "agent")
    pauses, now = [], 0.0
    for _ in range(8):
        began = now
        if one.tick(now) is None:
            now = one.wake()
            assert one.tick(now) is Order.BEGIN
        pauses.append(now - began)
        one.started()
        one.failed("broken", now)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


# Words


@pytest.mark.parametrize(
    ("player", "shown"),
    [
        ("person:Ann", ("person", "Ann")),
        ("agent:PPO", ("agent", "PPO")),
        ("agent", ("agent", "agent")),
        ("person", ("person", "person")),
        ("person:a:b", ("person", "a:b")),
        ("person:  A\u2028\u00a0n ", ("person", "A n")),
        ("person:\u202eevil\u200b\x85", ("person", "evil")),
        ("person:\u202e", ("person", "person")),
        ("person:" + "x" * 64, ("person", "x" * 32)),
        ("person:Zoë 李 🦊", ("person", "Zoë 李 🦊")),
    ],
)
def test_names_are_shown_without_what_is_invisible_and_bounded(player, shown):
    assert display_name(player) == shown


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"countdown": -1}, "countdown in seconds"),
        ({"countdown": "3"}, "countdown"),
        ({"patience": math.nan}, "patience"),
        ({"patience": True}, "patience"),
        ({"patience": 3601}, "from 0 to 3600"),
    ],
)
def test_times_out_of_range_are_refused(options, text):
    with pytest.raises(SettingError, match=text):
        MatchOptions(**options).check()


def test_every_state_is_left_and_every_event_leads_somewhere():
    assert {state for state, _ in TRANSITIONS} == set(RoundState)
    assert {event for _, event in TRANSITIONS} == set(RoundEvent)
