"""The policy of slots, in virtual time: what servers that hang, fail, fill, drain, return and join do to the slots."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from tests.core.client.policy_fleet import CALM, CONNECT_TIMEOUT, TICK, TIMEOUT, Fleet, Server


def received(fleet: Fleet) -> list[int]:
    return [member.record.steps_received for member in fleet.members]


def spread(fleet: Fleet) -> list[int]:
    used = Counter(fleet.of(member).server.url for member in fleet.members)
    return [used[server.url] for server in fleet.servers]


def test_slots_leave_a_server_that_hangs() -> None:
    fleet = Fleet(3, 6, 12)
    fleet.advance(2.0)
    fleet.servers[0].hangs = True
    fleet.advance(TIMEOUT + CONNECT_TIMEOUT + 5.0)
    assert spread(fleet) == [0, 3, 3]
    before = received(fleet)
    fleet.advance(5.0)
    assert all(after > count for after, count in zip(received(fleet), before, strict=True))


def test_slots_leave_a_server_whose_environment_always_raises_and_try_it_again() -> None:
    fleet = Fleet(3, 6, 12)
    fleet.advance(2.0)
    fleet.servers[0].fails = True
    fleet.advance(20.0)
    seen = []
    for _ in range(20):  # now and then a slot tries whether it still fails
        fleet.advance(0.5)
        seen.append(spread(fleet))
    assert seen.count([0, 3, 3]) > 10
    assert max(each[0] for each in seen) <= 1
    fleet.servers[0].fails = False
    fleet.advance(CALM)
    assert spread(fleet) == [2, 2, 2]


def test_slots_of_a_list_leave_a_server_that_always_raises_try_it_again_and_go_back() -> None:
    fleet = Fleet(3, 6, 12, directory=False)
    fleet.advance(2.0)
    fleet.servers[0].fails = True
    fleet.advance(20.0)
    fleet.attempts.clear()
    seen = []
    for _ in range(120):
        fleet.advance(0.5)
        seen.append(spread(fleet))
    assert seen.count([0, 3, 3]) > 80
    assert max(each[0] for each in seen) <= 1, "one slot tries it at a time"
    assert 3 <= fleet.attempts[fleet.servers[0].url] <= 13, "in pauses of 5 to 15 s"
    fleet.servers[0].fails = False
    fleet.advance(CALM)
    assert [fleet.of(member).server.url for member in fleet.members] == [f"grpc://s{i % 3}:1" for i in range(6)]
    assert not fleet.spares
    assert sum(member.record.losses for member in fleet.members) == 0


def urls(fleet: Fleet) -> list[str]:
    return [fleet.of(member).server.url for member in fleet.members]


def test_a_slot_of_a_list_waits_for_its_own_server_while_others_have_room() -> None:
    fleet = Fleet(3, 6, 12, directory=False)
    fleet.advance(2.0)
    before = urls(fleet)
    fleet.stop(fleet.servers[1])
    fleet.advance(CALM)
    assert urls(fleet) == before
    assert fleet.joined == [True, False, True] * 2
    fleet.servers[1].up = True
    fleet.advance(CALM)
    assert urls(fleet) == before
    assert all(fleet.joined)


def test_a_slot_of_a_list_that_has_lost_the_server_that_stood_in_goes_back_to_its_own() -> None:
    fleet = Fleet(2, 2, 12, directory=False)
    fleet.advance(2.0)
    before = urls(fleet)
    fleet.servers[0].fails = True
    # Now and then it tries its own server again, after pauses of random length.
    assert any((fleet.advance(1.0), urls(fleet) == [before[1]] * 2)[1] for _ in range(20))
    fleet.stop(fleet.servers[1])
    fleet.servers[0].fails = False
    fleet.advance(CALM)
    assert fleet.of(fleet.members[0]).server is fleet.servers[0]
    assert fleet.joined[0]
    fleet.servers[1].up = True
    fleet.advance(CALM)
    assert urls(fleet) == before
    assert not fleet.spares


def test_a_spare_that_the_user_named_and_a_lost_slot_swap_places_for_good() -> None:
    fleet = Fleet(2, 2, 12, directory=False, spares=1)
    fleet.advance(2.0)
    before, third = urls(fleet), fleet.servers[2].url
    fleet.stop(fleet.servers[0])
    fleet.advance(5.0)
    assert urls(fleet) == [third, before[1]]
    (spare,) = fleet.spares
    assert spare.endpoint.url == before[0]
    fleet.servers[0].up = True
    fleet.advance(CALM)
    assert (spare.ready, spare.endpoint.url) == (True, before[0]), "the lost one stands by once it is back"
    assert urls(fleet) == [third, before[1]], "no slot leaves a server that is well"
    fleet.stop(fleet.servers[1])
    fleet.advance(5.0)
    assert urls(fleet) == [third, before[0]]


def test_a_spare_that_the_user_named_takes_no_slots_of_an_environment_that_always_raises() -> None:
    """It would swap places with it: a world that only fails would stand by."""
    fleet = Fleet(2, 2, 12, directory=False, spares=1)
    fleet.advance(2.0)
    before, third = urls(fleet), fleet.servers[2].url
    fleet.servers[0].fails = True
    seen = []
    for _ in range(40):
        fleet.advance(0.5)
        seen.append(urls(fleet))
        assert third not in seen[-1]
        assert [spare.endpoint.url for spare in fleet.spares if spare.is_named] == [third]
    assert [before[1]] * 2 in seen  # it tries its own server again now and then
    fleet.servers[0].fails = False
    fleet.advance(CALM)
    assert urls(fleet) == before


def test_a_slot_leaves_a_server_of_a_list_that_drains_for_a_spare_that_the_user_named_alone() -> None:
    for spares in (0, 1):
        fleet = Fleet(2, 2, 12, directory=False, spares=spares)
        fleet.advance(2.0)
        before = urls(fleet)
        fleet.servers[0].draining = True
        fleet.advance(20.0)
        assert urls(fleet) == ([fleet.servers[2].url, before[1]] if spares else before)
        assert sum(member.record.losses for member in fleet.members) == 0


def test_slots_of_a_list_go_to_no_server_whose_environment_fails_as_theirs_does() -> None:
    fleet = Fleet(3, 6, 12, directory=False)
    fleet.advance(2.0)
    fleet.servers[0].fails = fleet.servers[1].fails = True
    for _ in range(120):
        fleet.advance(0.5)
        for number, member in enumerate(fleet.members):
            assert fleet.of(member).server in (fleet.servers[number % 3], fleet.servers[2])
    assert fleet.attempts[fleet.servers[2].url] >= 4


def test_an_answer_is_waited_for_as_much_longer_as_its_world_may_take() -> None:
    fleet = Fleet(2, 2, 12)
    fleet.advance(2.0)
    for member in fleet.members:
        member.remote.allowance = 20.0  # type: ignore[misc]
    fleet.servers[0].hangs = True
    fleet.advance(TIMEOUT + 15.0)
    assert spread(fleet) == [1, 1]
    fleet.advance(10.0)
    assert spread(fleet) == [0, 2]


def test_slots_leave_a_server_that_drains_between_two_episodes() -> None:
    fleet = Fleet(3, 6, 12)
    fleet.advance(2.0)
    fleet.servers[0].draining = True
    fleet.advance(20.0)
    assert spread(fleet) == [0, 3, 3]
    assert sum(member.record.losses for member in fleet.members) == 0
    assert sum(member.record.moves for member in fleet.members) == 2


def test_a_move_is_a_line_for_a_server_which_says_why_and_its_planned_end_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet(2, 12, 12)
    fleet.advance(2.0)
    caplog.clear()
    old, new = (server.url for server in fleet.servers)
    fleet.servers[0].draining = True
    fleet.advance(20.0)
    assert spread(fleet) == [0, 12]
    fleet.stop(fleet.servers[0])
    fleet.advance(60.0)
    said = [record.getMessage() for record in caplog.records if "shuts down" not in record.getMessage()]
    assert said[0] == f"{new} is to take over 6 slots of {old}: it drains"
    assert f"no slot is left at {old}" in said
    assert f"{old} was shut down" in said
    assert len(said) < 6, said
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and "ended" in r.getMessage()]
    assert "no longer answers" not in caplog.text


def test_a_move_off_a_server_whose_resets_fail_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet(2, 8, 12)
    fleet.advance(2.0)
    fleet.servers[0].fails = True
    fleet.advance(20.0)
    plans = [record.getMessage() for record in caplog.records if "is to take over" in record.getMessage()]
    assert plans
    assert all(plan.endswith(": every reset fails there") for plan in plans)


def restart(fleet: Fleet, server: Server, away: float, period: float) -> None:
    """Drain a server for at most `period` seconds, as SIGTERM does, and start it again `away` seconds after its end."""
    server.draining = True
    end = fleet.now + period
    while server.worlds and fleet.now < end:
        fleet.advance(TICK)
    fleet.stop(server)
    fleet.advance(away)
    server.up = True


@pytest.mark.parametrize("away", [0.4, 3.0, 20.0, 100.0])
@pytest.mark.parametrize(("servers", "between"), [(2, 0.4), (2, 7.0), (3, 0.4), (5, 2.0)])
def test_a_fleet_is_restarted_one_server_after_the_other_without_a_lost_episode(
    servers: int, between: float, away: float
) -> None:
    fleet = Fleet(servers, 2 * servers, 12)
    fleet.advance(2.0)
    for server in fleet.servers:
        before = received(fleet)
        restart(fleet, server, away, period=15.0)
        fleet.advance(between)
        assert all(after > count for after, count in zip(received(fleet), before, strict=True))
    assert sum(member.record.losses for member in fleet.members) == 0
    fleet.advance(20.0)
    assert spread(fleet) == [2] * servers


@pytest.mark.parametrize("away", [20.0, 60.0, 300.0])
def test_a_restarted_server_is_used_within_seconds_however_long_its_restart_took(away: float) -> None:
    fleet = Fleet(2, 4, 12)
    fleet.advance(2.0)
    restart(fleet, fleet.servers[0], away, period=15.0)
    assert fleet.attempts[fleet.servers[0].url] <= 8 + away / 2.5
    fleet.advance(8.0)
    assert spread(fleet)[0] > 0


def test_a_server_that_drained_is_asked_at_once_when_the_last_other_one_is_killed() -> None:
    fleet = Fleet(2, 4, 12)
    fleet.advance(2.0)
    restart(fleet, fleet.servers[0], 30.0, period=15.0)
    fleet.stop(fleet.servers[1])
    fleet.advance(1.0)
    assert spread(fleet) == [4, 0]
    assert fleet.all_play


def test_a_slot_of_a_list_is_back_within_seconds_after_a_long_restart() -> None:
    fleet = Fleet(2, 2, 12, directory=False, spares=1)
    fleet.advance(2.0)
    before = urls(fleet)
    for away in (20.0, 90.0):
        restart(fleet, fleet.servers[0], away, period=15.0)
        fleet.advance(8.0)
        assert fleet.servers[0].worlds, "a spare stands by there again"
        fleet.servers[2].draining = True
        fleet.advance(5.0)
        assert urls(fleet) == before
        fleet.stop(fleet.servers[2])
        fleet.servers[2].up = True
        fleet.advance(8.0)
    assert sum(member.record.losses for member in fleet.members) == 0


def test_a_planned_restart_is_told_in_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(2, 4, 12)
    fleet.advance(2.0)
    with caplog.at_level(logging.WARNING, "bridge.core.client.slots.endpoint"):
        restart(fleet, fleet.servers[0], 60.0, period=15.0)
        fleet.advance(8.0)
    told = [record.getMessage() for record in caplog.records if record.name == "bridge.core.client.slots.endpoint"]
    assert [text.partition(":1 ")[2] for text in told] == [
        "shuts down, and takes no further environments",
        "was started again, and answers",
    ]


def test_a_slot_leaves_a_server_that_only_fails_for_one_that_had_been_dark() -> None:
    fleet = Fleet(2, 1, 12)
    fleet.advance(2.0)
    for server in fleet.servers:
        fleet.stop(server)
    fleet.advance(10.0)
    fleet.servers[0].up = fleet.servers[0].fails = True
    fleet.advance(CALM)
    assert spread(fleet) == [1, 0]
    fleet.servers[1].up = True
    fleet.advance(CALM)
    assert spread(fleet) == [0, 1]


def test_a_server_that_joins_gets_its_share_and_loses_no_episode() -> None:
    fleet = Fleet(1, 6, 12)
    fleet.advance(2.0)
    fleet.servers.append(Server("grpc://new:1", 12))
    fleet.list_servers()
    fleet.advance(30.0)
    assert spread(fleet) == [3, 3]
    assert sum(member.record.losses for member in fleet.members) == 0


def test_a_dead_server_that_stays_listed_is_asked_again_without_a_line_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet(3, 12, 12)
    fleet.advance(2.0)
    fleet.stop(fleet.servers[1])
    fleet.advance(120.0)
    assert spread(fleet) == [6, 0, 6]
    assert fleet.attempts[fleet.servers[1].url] > 4

    def announced() -> list[str]:
        return [r.getMessage() for r in caplog.records if f"{fleet.servers[1].url} is to take over" in r.getMessage()]

    assert not announced(), "nobody answers there"
    fleet.servers[1].up = True
    fleet.advance(CALM)
    assert spread(fleet) == [4, 4, 4]
    assert any(f"{fleet.servers[1].url} answers again" in record.getMessage() for record in caplog.records)
    assert announced(), "it is up again"


def test_of_a_fleet_that_is_gone_each_server_is_asked_in_growing_pauses() -> None:
    fleet = Fleet(2, 6, 12)
    fleet.advance(2.0)
    for server in fleet.servers:
        fleet.stop(server)
    fleet.advance(20.0)
    fleet.attempts.clear()
    fleet.advance(300.0)
    assert 0 < sum(fleet.attempts.values()) <= 2 * 300 / 5
    for server in fleet.servers:
        server.up = True
    fleet.advance(CALM)
    assert spread(fleet) == [3, 3]


def test_a_full_server_is_asked_in_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(2, 8, 12)
    fleet.servers[0].room = 2
    fleet.advance(20.0)
    assert spread(fleet) == [2, 6]
    fleet.attempts.clear()
    fleet.advance(300.0)
    assert 0 < fleet.attempts[fleet.servers[0].url] <= 300 / 5
    assert len([record for record in caplog.records if "is full" in record.getMessage()]) == 1
