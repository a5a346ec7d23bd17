"""`bridge.testing.link` and `.clock`: the network and the time that tests hold in their hands."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bridge.testing.clock
import bridge.testing.link
from bridge.errors import SettingError
from bridge.testing import Clock, Conditions, Duplex, Link, MonotonicClock, VirtualClock


def arrivals(conditions, seed=0, packets=200, interval=0.01):
    """Send numbered packets at regular times; return [(when, number)] and the link."""
    link = Link(conditions, np.random.default_rng(seed))
    clock, out = VirtualClock(), []
    for number in range(packets):
        out += [(clock.now(), packet) for packet in link.receive(clock.now())]
        link.send(clock.now(), number)
        clock.advance(interval)
    while (when := link.next_arrival()) is not None:
        out += [(when, packet) for packet in link.receive(clock.advance_to(when))]
    return out, link


def numbers(out):
    return [number for _, number in out]


@pytest.mark.parametrize("module", [bridge.testing.clock, bridge.testing.link])
def test_the_examples_in_the_docs_run(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_a_perfect_link_delivers_everything_at_once_and_in_order():
    link = Link(Conditions(), np.random.default_rng(0))
    link.send(1.0, "a")
    link.send(1.0, "b")
    assert link.receive(1.0) == ["a", "b"]
    assert link.receive(1.0) == []
    assert link.next_arrival() is None


def test_a_delayed_packet_arrives_on_the_instant_and_not_before():
    link = Link(Conditions(delay=0.25), np.random.default_rng(0))
    link.send(1.0, "a")
    assert link.next_arrival() == 1.25
    assert link.receive(math.nextafter(1.25, 0)) == []
    assert link.in_flight == 1
    assert link.receive(1.25) == ["a"]
    assert link.in_flight == 0


def test_the_same_seed_gives_the_same_network_and_another_seed_another():
    conditions = Conditions(delay=0.05, jitter=0.1, loss=0.2, duplicate=0.1, reorder=0.1, hold=0.3)
    assert arrivals(conditions, seed=1)[0] == arrivals(conditions, seed=1)[0] != arrivals(conditions, seed=2)[0]


def test_losses_come_at_about_the_rate_asked_and_are_counted():
    out, link = arrivals(Conditions(loss=0.3), packets=2000)
    assert 480 <= link.stats.lost <= 720  # 9 standard deviations
    assert len(out) == link.stats.delivered == 2000 - link.stats.lost
    assert link.stats.sent == 2000
    assert arrivals(Conditions(loss=1.0))[0] == []


def test_a_worse_link_loses_what_a_better_one_loses_and_keeps_the_delays_of_the_rest():
    good = dict(map(reversed, arrivals(Conditions(jitter=0.1, loss=0.1))[0]))
    bad = dict(map(reversed, arrivals(Conditions(jitter=0.1, loss=0.4))[0]))
    assert set(bad) < set(good)
    assert all(good[number] == when for number, when in bad.items())


def test_duplicates_arrive_twice_and_are_counted():
    out, link = arrivals(Conditions(duplicate=1.0, jitter=0.05))
    assert sorted(numbers(out)) == sorted([*range(200), *range(200)])
    assert link.stats.duplicated == 200
    assert len({when for when, number in out if number == 7}) == 2


def test_a_held_back_packet_is_overtaken():
    out, link = arrivals(Conditions(reorder=0.2, hold=0.035))
    assert numbers(out) != sorted(numbers(out))
    assert sorted(numbers(out)) == list(range(200))
    assert 0 < link.stats.held < 200


def test_jitter_reorders_unless_the_link_is_in_order():
    assert numbers(arrivals(Conditions(jitter=0.1))[0]) != list(range(200))
    out, _ = arrivals(Conditions(jitter=0.1, reorder=0.1, hold=1.0, in_order=True))
    assert numbers(out) == list(range(200))
    assert [when for when, _ in out] == sorted(when for when, _ in out)


def test_conditions_can_change_while_packets_are_under_way():
    link = Link(Conditions(delay=1.0), np.random.default_rng(0))
    link.send(0.0, "before")
    link.conditions = Conditions(loss=1.0)
    link.send(0.5, "cut")
    link.conditions = Conditions()
    link.send(0.6, "after")
    assert link.receive(0.6) == ["after"]
    assert link.receive(1.0) == ["before"]


def test_time_that_goes_back_is_an_error():
    link = Link(Conditions(), np.random.default_rng(0))
    link.send(2.0, "a")
    for wrong in (1.0, math.nan, math.inf):
        with pytest.raises(SettingError, match="time does not go back"):
            link.receive(wrong)
    with pytest.raises(SettingError, match="time does not go back"):
        link.send(1.9, "b")


@pytest.mark.parametrize(
    ("wrong", "name"),
    [({"delay": -1}, "delay"), ({"jitter": math.inf}, "jitter"), ({"loss": 1.5}, "loss"), ({"hold": math.nan}, "hold")],
)
def test_impossible_conditions_are_errors_that_name_the_field(wrong, name):
    with pytest.raises(SettingError, match=f"expected {name}"):
        Conditions(**wrong)


def test_the_two_ways_of_a_duplex_are_independent():
    def run(noise):
        duplex = Duplex(Conditions(jitter=0.1, loss=0.2), np.random.default_rng(3), back=Conditions(delay=1.0))
        for number in range(50):
            duplex.a.send(0.0, number)
            for _ in range(noise):
                duplex.b.send(0.0, -number)
        return duplex.b.receive(10.0), duplex

    quiet, _ = run(0)
    loud, duplex = run(2)
    assert quiet == loud
    assert duplex.next_arrival() == duplex.a.next_arrival() == 1.0
    assert duplex.b.next_arrival() is None
    assert len(duplex.a.receive(10.0)) == 100
    assert duplex.next_arrival() is None


@given(
    seed=st.integers(0, 2**32 - 1),
    loss=st.floats(0, 1),
    duplicate=st.floats(0, 1),
    reorder=st.floats(0, 1),
    jitter=st.floats(0, 10),
    in_order=st.booleans(),
)
def test_nothing_is_invented_and_the_counts_add_up(seed, loss, duplicate, reorder, jitter, in_order):
    conditions = Conditions(0.01, jitter, loss, duplicate, reorder, 0.5, in_order)
    out, link = arrivals(conditions, seed, packets=30)
    stats = link.stats
    assert stats.sent == 30
    assert len(out) == stats.delivered == stats.sent - stats.lost + stats.duplicated
    assert set(numbers(out)) <= set(range(30))
    assert all(when >= number * 0.01 + 0.01 - 1e-9 for when, number in out)
    assert all(numbers(out).count(number) <= 2 for number in range(30))


def test_a_virtual_clock_moves_only_when_it_is_told_to():
    clock = VirtualClock(10.0)
    assert clock.now() == clock.now() == 10.0
    assert clock.advance(0.0) == 10.0
    assert clock.advance_to(9.0) == 10.0
    assert clock.advance_to(12.0) == 12.0
    clock.sleep(-1)
    clock.sleep(0.5)
    assert clock.now() == 12.5
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(SettingError, match="finite"):
            clock.advance(wrong)
    with pytest.raises(SettingError, match="finite"):
        clock.advance_to(math.nan)


def test_both_clocks_are_clocks_and_the_real_one_goes_forward():
    real = MonotonicClock()
    assert isinstance(real, Clock)
    assert isinstance(VirtualClock(), Clock)
    before = real.now()
    real.sleep(-1)
    real.sleep(0.002)
    assert real.now() >= before + 0.002
