"""The table of an endpoint, when one in trouble is tried again, and where a slot may go."""

from __future__ import annotations

import itertools
import pickle
from typing import Any
from urllib.parse import urlsplit

import pytest

from bridge.core.client.slots.endpoint import (
    TRANSITIONS,
    EndpointEvent,
    EndpointRecord,
    EndpointState,
    Load,
    Placement,
    change_of,
    event_of,
)
from bridge.errors import Code, ConnectError, EnvironmentFailedError, PeerError, RefusedError
from tests.core.client.policy_fleet import member_at, request_of

WELL = (EndpointState.UNTRIED, EndpointState.UP)


def doubling(failures: int) -> float:
    return 2.0**failures


def test_the_table_has_every_pair_of_state_and_event() -> None:
    assert set(TRANSITIONS) == set(itertools.product(EndpointState, EndpointEvent))


@pytest.mark.parametrize("state", EndpointState, ids=lambda state: state.name)
def test_trouble_leads_out_of_every_state_that_is_well(state: EndpointState) -> None:
    for event in (EndpointEvent.NO_ROOM, EndpointEvent.RAISED, EndpointEvent.GONE, EndpointEvent.REFUSES):
        assert TRANSITIONS[state, event] not in WELL
    restarts = state in (EndpointState.DRAINING, EndpointState.ENDED)
    assert TRANSITIONS[state, EndpointEvent.GONE] is (EndpointState.ENDED if restarts else EndpointState.DARK)
    assert TRANSITIONS[state, EndpointEvent.DRAINS] is EndpointState.DRAINING


def test_only_an_observation_shows_that_an_environment_fails_no_more() -> None:
    assert TRANSITIONS[EndpointState.FAILING, EndpointEvent.JOINED] is EndpointState.FAILING
    assert TRANSITIONS[EndpointState.FAILING, EndpointEvent.OBSERVED] is EndpointState.UP


def test_each_change_of_state_reads_as_a_sentence_about_the_server() -> None:
    changes = {(before, after) for (before, _), after in TRANSITIONS.items() if before is not after}
    for before, after in changes:
        text = change_of(before, after)
        assert text.split()[0] in {"does", "no", "is", "answers", "answers,", "has", "accepts", "was", "shuts"}, text
        # The names of states are our own words.
        assert not {"dark", "up", "untried", "failing", "refused", "draining", "ended"} & {
            *text.replace(",", "").split()
        }
    assert change_of(EndpointState.UP, EndpointState.DARK) == "no longer answers"
    assert change_of(EndpointState.UNTRIED, EndpointState.DARK) == "does not answer"
    assert change_of(EndpointState.DARK, EndpointState.UP) == "answers again"
    assert change_of(EndpointState.FULL, EndpointState.UP) == "has room again"


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        (EndpointEvent.GONE, "answers"),
        (EndpointEvent.NO_ROOM, "has room"),
        (EndpointEvent.RAISED, "answers, and its environment works"),
        (EndpointEvent.REFUSES, "accepts this client"),
    ],
)
def test_again_is_said_only_of_a_server_that_was_up_before(trouble: EndpointEvent, text: str) -> None:
    url = "grpc://host:1"
    placement = Placement.of_list([request_of(url)])
    for said in (text, f"{text} again"):
        assert placement.handle(url, trouble, 0.0, "why") == ""
        ways = [placement.handle(url, event, 1.0, "why") for event in (EndpointEvent.JOINED, EndpointEvent.OBSERVED)]
        assert [way for way in ways if way] == [said]


def test_the_pauses_grow_and_those_who_fail_together_count_as_one() -> None:
    record = EndpointRecord()
    for now in (0.0, 0.5, 1.0):  # worlds that were tried together
        record.handle(EndpointEvent.GONE, now, doubling)
    assert (record.failures, record.retry_at) == (1, 2.0)
    assert not record.may_try(1.9)
    assert record.may_try(2.0)
    record.tried(2.0, 10.0)
    assert not record.may_try(3.0), "one attempt at a time"
    record.handle(EndpointEvent.GONE, 3.0, doubling)
    assert (record.failures, record.retry_at) == (2, 7.0)
    assert record.may_try(7.0), "the attempt has ended before its time was over"
    record.handle(EndpointEvent.JOINED, 7.0, doubling)
    record.handle(EndpointEvent.OBSERVED, 7.0, doubling)
    assert (record.failures, record.may_try(7.0)) == (0, True)


def test_a_server_that_drained_is_asked_for_its_next_one_after_pauses_of_a_few_seconds() -> None:
    record = EndpointRecord()
    for now in (0.0, 0.5, 0.9):  # it is looked for again and again
        record.handle(EndpointEvent.DRAINS, now, doubling)
    record.handle(EndpointEvent.RAISED, 0.95, doubling)  # its worlds go on, and may fail
    assert (record.may_try(0.9), record.may_try(1.0)) == (False, True), "nobody sees its end: then it is asked"
    pauses = []
    for _ in range(6):
        asked = record.retry_at
        record.handle(EndpointEvent.GONE, asked, doubling)
        pauses.append(record.retry_at - asked)
    assert pauses == [2.0, 4.0, 5.0, 5.0, 5.0, 5.0]


def test_the_worlds_that_a_drained_server_takes_with_it_count_as_one_failure() -> None:
    record = EndpointRecord()
    record.handle(EndpointEvent.GONE, 0.0, doubling)
    record.handle(EndpointEvent.JOINED, 3.0, doubling)
    record.handle(EndpointEvent.DRAINS, 3.0, doubling)
    for now in (3.5, 3.6):
        record.handle(EndpointEvent.GONE, now, doubling)
    assert (record.failures, record.retry_at) == (1, 5.5), "what failed before it drained was another server"


def test_only_an_endpoint_whose_server_drained_may_be_hurried() -> None:
    for event, hurried in ((EndpointEvent.DRAINS, True), (EndpointEvent.GONE, False), (EndpointEvent.NO_ROOM, False)):
        record = EndpointRecord()
        record.handle(event, 0.0, doubling)
        record.hurry(0.5)
        assert record.may_try(0.5) is hurried, event


def test_who_is_well_comes_first_and_the_last_to_fail_last() -> None:
    records = [EndpointRecord() for _ in range(3)]
    records[0].handle(EndpointEvent.GONE, 5.0, doubling)
    records[1].handle(EndpointEvent.NO_ROOM, 3.0, doubling)
    assert sorted(records, key=lambda record: record.rank) == [records[2], records[1], records[0]]
    records[0].handle(EndpointEvent.JOINED, 9.0, doubling)
    assert records[0].rank == records[2].rank, "one that is up again is as good as one that never failed"


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (ConnectError("a:1", "no"), EndpointEvent.GONE),
        (RefusedError("a:1", "stopping", Code.UNAVAILABLE), EndpointEvent.GONE),
        (RefusedError("a:1", "full", Code.RESOURCE_EXHAUSTED), EndpointEvent.NO_ROOM),
        (RefusedError("a:1", "no such environment", Code.NOT_FOUND), EndpointEvent.REFUSES),
        (PeerError("a:1", "other spaces"), EndpointEvent.REFUSES),
        (EnvironmentFailedError("a:1", "ValueError", Code.INTERNAL), EndpointEvent.RAISED),
    ],
    ids=lambda value: value.name if isinstance(value, EndpointEvent) else type(value).__name__,
)
def test_what_an_error_says_of_an_endpoint(error: ConnectError, event: EndpointEvent) -> None:
    assert event_of(error) is event


# A list of URLs, whose endpoints slots are pinned to

URLS = ("grpc://a:1", "grpc://b:1", "grpc://c:1", "grpc://d:1/Other-v0")


def placement(*requests: Any) -> Placement:
    """The placement of a list; by itself of `URLS`, the last of which is of another environment."""
    return Placement.of_list(requests or [request_of(url, f"the path {urlsplit(url).path!r}") for url in URLS])


def test_where_a_slot_may_go_at_once_nothing_speaks_against_the_server() -> None:
    places = placement()
    a, b, c, _ = places.watch.endpoints
    slot = member_at(a)
    assert places.choose_well(Load([slot, member_at(b)]), slot, 0.0) is c, "the one with fewer slots, and of its kind"
    assert places.choose_well(Load([slot]), slot, 0.0, up=True) is None, "nobody has joined there"
    for endpoint in (b, c):
        places.handle(endpoint.key, EndpointEvent.JOINED, 0.0, "")
    assert places.choose_well(Load([slot]), slot, 0.0, up=True) is b
    assert places.choose_well(Load([slot, member_at(b, failures=1)]), slot, 0.0) is c, "there a reset has just failed"
    places.handle(c.key, EndpointEvent.GONE, 0.0, "")
    assert places.choose_well(Load([slot, member_at(b, failures=1)]), slot, 0.0) is None
    assert places.any_well(slot)
    places.handle(b.key, EndpointEvent.RAISED, 0.0, "")
    assert not places.any_well(slot), "the last one is of another kind"


def test_a_server_that_slots_of_a_list_have_left_is_tried_by_one_at_a_time_and_after_a_pause(caplog: Any) -> None:
    places = placement()
    key = places.watch.endpoints[0].key
    assert places.may_try(key, 0.0, 10.0)
    places.handle(key, EndpointEvent.RAISED, 0.0, "ValueError")
    assert not places.may_try(key, 1.0, 10.0)
    assert places.may_try(key, 20.0, 10.0)
    assert not places.may_try(key, 21.0, 10.0), "one is under way"
    assert not places.handle(key, EndpointEvent.JOINED, 22.0, ""), "its resets may fail as before"
    assert places.handle(key, EndpointEvent.OBSERVED, 23.0, ""), "it is well again"
    assert places.may_try(key, 23.0, 10.0)
    assert not caplog.records, "the slots of a list tell by themselves what they lose"


def test_a_copy_has_seen_nothing_of_the_servers() -> None:
    places = placement()
    key = places.watch.endpoints[0].key
    places.handle(key, EndpointEvent.GONE, 1e9, "")  # by the clock of a machine that runs for years
    copied = pickle.loads(pickle.dumps(places))
    assert (places.may_try(key, 5.0, 10.0), copied.may_try(key, 5.0, 10.0)) == (False, True)
    assert [endpoint.key for endpoint in copied.watch.endpoints] == list(URLS)


def test_only_listed_urls_of_one_kind_replace_each_other_and_a_world_that_exists_is_of_its_own() -> None:
    own, second, level = placement(
        *(request_of(f"grpc://{host}:1", kind) for host, kind in (("own", "a"), ("second", "a"), ("level", "another")))
    ).watch.endpoints
    assert own.kind == second.kind != level.kind
    worlds = [request_of(f"grpc://{host}:1?world=arena", None) for host in ("a", "b")]
    agents = [request_of("grpc://a:1?world=arena", None, agent) for agent in ("red", "blue")]
    endpoints = placement(*worlds, *worlds, *agents).watch.endpoints
    assert len(endpoints) == 4, "each once"
    assert len({endpoint.kind for endpoint in endpoints}) == 4
