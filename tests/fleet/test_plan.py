"""The plan of a fleet: how few servers are enough, and which are given up."""

from __future__ import annotations

import dataclasses

import pytest

from bridge.fleet.plan import FleetStatus, ServerStatus, ports_clash, servers_needed, servers_to_drain, too_few


def server(name: str, used: int = 0, state: str = "serving", **more: object) -> ServerStatus:
    return ServerStatus(name, state, slots=16, slots_used=used, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("used", "lanes", "slots", "needed"),
    [(0, 1, 8, 0), (1, 1, 8, 1), (8, 1, 8, 1), (9, 1, 8, 2), (64, 16, 16, 4), (17, 16, 32, 1), (33, 16, 40, 2)],
)
def test_worlds_are_not_split_over_servers(used: int, lanes: int, slots: int, needed: int) -> None:
    assert servers_needed(used, lanes, slots) == needed


def test_one_port_for_metrics_is_refused_where_servers_share_a_machine() -> None:
    for port, servers, machines in ((None, 9, 1), (0, 9, 1), (19555, 2, 2), (19555, 1, 1)):
        assert ports_clash(port, servers, machines) == ""
    assert "metrics_port=19555 is one port, and 2 servers on 1 machines" in ports_clash(19555, 2, 1)


def test_too_few_servers_are_refused_with_both_numbers() -> None:
    status = FleetStatus("cart", 4, (server("a", 16), server("b", 16), server("c", 8), server("d")))
    assert too_few(3, status, 1, 16) == ""
    assert "expected at least 3 servers, since clients have 40 slots" in too_few(2, status, 1, 16)


def test_servers_that_start_go_first_and_then_those_with_the_fewest_slots_the_newest_first() -> None:
    servers = [
        server("old", 2),
        server("idle", 0),
        server("busy", 9),
        server("idle too", 0),
        server("new", 2),
        server("late", 4, "starting"),
        server("gone", 0, "draining"),
    ]
    assert servers_to_drain(servers, 6) == []
    assert servers_to_drain(servers, 3) == ["late", "idle too", "idle"]
    assert servers_to_drain(servers, 1) == ["late", "idle too", "idle", "new", "old"]


def test_a_status_tells_what_serves_and_shows_no_token() -> None:
    url = "grpc://10.0.0.7:50051?token=hidden"
    status = FleetStatus(
        "cart", 2, (server("cart/server-0", 16, url=url), server("cart/server-1", 0, "draining", problem="it is slow"))
    )
    assert not status.ready
    text = str(status)
    assert text.splitlines()[0] == "fleet 'cart': 1 of 2 servers serve, 16 of 16 slots used, 0.0 s ago"
    assert "grpc://10.0.0.7:50051" in text
    assert "it is slow" in text
    assert "hidden" not in text + repr(status)
    both = (server("a"), server("b"))
    assert FleetStatus("cart", 2, both).ready
    assert not FleetStatus("cart", 1, both).ready


def test_a_status_tells_how_old_its_figures_are() -> None:
    fresh, stale = (dataclasses.replace(server(f"cart/server-{age}", 1), age=age) for age in (0.4, 42.0))
    status = FleetStatus("cart", 2, (fresh, stale))
    assert status.age == 42.0
    lines = str(status).splitlines()
    assert lines[0].endswith("slots used, 42.0 s ago")
    assert ["as of 42 s ago" in line for line in lines[1:]] == [False, True]
    assert FleetStatus("cart", 0, ()).age == 0.0
