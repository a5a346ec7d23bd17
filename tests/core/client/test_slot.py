"""The two tables of a slot's life, and what holds for both together; nothing but the slot assigns a state."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

import bridge
import bridge.wrappers
from bridge import Endpoint
from bridge.core.client.slots.slot import (
    ASKED,
    BREAKER_LOSSES,
    BREAKER_REST,
    BREAKER_WINDOW,
    ENDINGS,
    EPISODES,
    LINKS,
    SETTLED,
    EpisodeEvent,
    EpisodeState,
    LinkEvent,
    LinkState,
    Member,
    Reason,
    RemoteRecord,
    StandBy,
)
from bridge.errors import Code, EnvironmentFailedError, RefusedError

IN_EPISODE = {
    EpisodeState.RUNNING,
    EpisodeState.STEPPING,
    EpisodeState.ANSWERED,
    EpisodeState.RENEWING,
    EpisodeState.RENEWED,
}
Pair: TypeAlias = tuple[LinkState, EpisodeState]


class Record:
    def __init__(self) -> None:
        self.steps_asked = self.steps_received = self.steps_lost = 0


def member() -> Any:
    salvaged: list[Any] = []
    remote = SimpleNamespace(
        record=Record(), salvage=salvaged.append, send_step=lambda request: None, salvaged=salvaged
    )
    return Member(remote, Endpoint("grpc://a:1"), 0, 3)  # type: ignore[arg-type]


def answer(*, ended: bool = False) -> Any:
    return SimpleNamespace(message="message", ended=ended)


def begun() -> Any:
    """A member that has asked for its first episode."""
    one = member()
    one.handle_link(LinkEvent.CONNECT)
    one.handle_link(LinkEvent.JOINED)
    one.handle(EpisodeEvent.BEGIN)
    return one


def after(pair: Pair, event: LinkEvent | EpisodeEvent) -> Pair | None:
    """The states that an event leads to, by the member itself; None: it is not possible, and changes nothing."""
    one = member()
    one.link, one.episode = pair
    try:
        if isinstance(event, LinkEvent):
            one.handle_link(event)
        else:
            one.handle(event)
    except KeyError:
        assert (one.link, one.episode) == pair
        return None
    return one.link, one.episode


def reached() -> dict[tuple[Pair, LinkEvent | EpisodeEvent], Pair]:
    """All that may happen to a slot from its first state on: the product of the tables, as far as it is reached."""
    first = LinkState.OFFLINE, EpisodeState.IDLE
    found: dict[tuple[Pair, LinkEvent | EpisodeEvent], Pair] = {}
    seen, todo = {first}, [first]
    while todo:
        pair = todo.pop()
        for event in (*LinkEvent, *EpisodeEvent):
            following = after(pair, event)
            if following is not None:
                found[pair, event] = following
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
    return found


PRODUCT = reached()
PAIRS = sorted({pair for pair, _ in PRODUCT}, key=lambda pair: [state.name for state in pair])


def named(pair: Pair) -> str:
    return "-".join(state.name for state in pair)


@pytest.mark.parametrize(
    ("table", "states", "events"),
    [(LINKS, LinkState, LinkEvent), (EPISODES, EpisodeState, EpisodeEvent)],
    ids=["link", "episode"],
)
def test_every_state_is_reached_and_left(table: Any, states: Any, events: Any) -> None:
    assert set(table.values()) == set(states)
    assert {state for state, _ in table} == set(states)
    assert {event for _, event in table} == set(events)


def test_the_tables_together_reach_all_states_and_use_all_rows() -> None:
    assert {link for link, _ in PAIRS} == set(LinkState)
    assert {episode for _, episode in PAIRS} == set(EpisodeState)
    for (link, event), following in LINKS.items():
        found = {after[0] for (pair, each), after in PRODUCT.items() if (pair[0], each) == (link, event)}
        assert found == {following}, f"{link} {event}"
    used = {(pair[1], ENDINGS[each] if isinstance(each, LinkEvent) else each) for pair, each in PRODUCT if each in USED}
    assert used == set(EPISODES)


USED = {*ENDINGS, *EpisodeEvent}
"""The events that the episode's table has rows for."""


def test_without_a_joined_world_an_episode_is_idle_or_cut() -> None:
    apart = {episode for link, episode in PAIRS if link is not LinkState.JOINED}
    assert apart == {EpisodeState.IDLE, EpisodeState.CUT}


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[0] is not LinkState.JOINED], ids=named)
def test_without_a_joined_world_nothing_happens_to_an_episode_but_that_its_end_is_told(pair: Pair) -> None:
    possible = {event for event in EpisodeEvent if (pair, event) in PRODUCT}
    assert possible == ({EpisodeEvent.TOLD} if pair[1] is EpisodeState.CUT else set())


@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_a_loss_is_possible_everywhere_and_cuts_what_is_in_an_episode(pair: Pair) -> None:
    untold = pair[1] is EpisodeState.CUT or pair[1] in IN_EPISODE
    assert PRODUCT[pair, LinkEvent.LOST] == (LinkState.OFFLINE, EpisodeState.CUT if untold else EpisodeState.IDLE)


def test_an_end_is_told_where_there_is_one_and_once_and_the_link_stays() -> None:
    told = {pair: following for (pair, event), following in PRODUCT.items() if event is EpisodeEvent.TOLD}
    assert told == {(link, EpisodeState.CUT): (link, EpisodeState.IDLE) for link in LinkState}


@pytest.mark.parametrize("link", LinkState, ids=lambda link: link.name)
def test_no_episode_begins_before_the_end_of_the_last_one_was_told(link: LinkState) -> None:
    pair = link, EpisodeState.CUT
    for event in (EpisodeEvent.BEGIN, EpisodeEvent.RENEW, EpisodeEvent.STEP, LinkEvent.MOVE, LinkEvent.MOVE_AHEAD):
        assert (pair, event) not in PRODUCT


@pytest.mark.parametrize("episode", EpisodeState, ids=lambda episode: episode.name)
def test_in_a_world_a_request_may_be_refused_and_is_then_asked_for_again(episode: EpisodeState) -> None:
    pair = LinkState.JOINED, episode
    untold = episode is EpisodeState.CUT or episode in IN_EPISODE
    assert PRODUCT[pair, EpisodeEvent.FAILED] == (LinkState.JOINED, EpisodeState.CUT if untold else EpisodeState.IDLE)
    if episode is not EpisodeState.CUT:
        assert PRODUCT[pair, EpisodeEvent.BEGIN] == (LinkState.JOINED, EpisodeState.RESETTING)


def test_only_who_runs_is_stepped_and_only_who_is_asked_answers() -> None:
    assert [state for state, event in EPISODES if event is EpisodeEvent.STEP] == [EpisodeState.RUNNING]
    asked = {state for state, event in EPISODES if event is EpisodeEvent.ANSWER}
    assert asked == ASKED
    assert not asked & SETTLED


@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_a_spare_or_a_slot_is_ready_in_a_world_where_nothing_was_asked(pair: Pair) -> None:
    one = member()
    one.link, one.episode = pair
    assert one.ready == (pair == (LinkState.JOINED, EpisodeState.IDLE))
    assert one.waits == (pair[0] is LinkState.CONNECTING or pair[1] in ASKED)


def test_each_step_is_received_or_lost_once() -> None:
    one = begun()
    one.take(answer())
    one.handed()
    record = one.record
    assert (record.steps_asked, record.steps_received, record.steps_lost) == (0, 0, 0)
    one.step(b"", 1.0)
    one.take(answer())
    one.handed()
    assert (record.steps_asked, record.steps_received, record.steps_lost) == (3, 3, 0)
    one.step(b"", 1.0)
    one.handle_link(LinkEvent.LOST)
    one.handle(EpisodeEvent.TOLD)
    assert (record.steps_asked, record.steps_received, record.steps_lost) == (6, 3, 3)


def test_an_answer_that_nobody_is_handed_is_salvaged() -> None:
    one = begun()
    one.take(answer())
    one.handle_link(LinkEvent.LOST)
    assert one.remote.salvaged == ["message"]
    assert one.answer is None


def test_an_answer_says_whether_the_episode_goes_on() -> None:
    one = begun()
    one.take(answer())
    one.handed()
    assert one.episode is EpisodeState.RUNNING
    one.step(b"", 1.0)
    one.take(answer(ended=True))
    one.handed()
    assert one.episode is EpisodeState.ENDED


def test_a_first_observation_may_be_the_last_of_its_episode() -> None:
    one = begun()
    one.take(answer(ended=True))
    one.handed()
    assert one.episode is EpisodeState.ENDED


def test_an_environment_that_raised_in_three_resets_in_a_row_fails_always() -> None:
    one = member()
    one.refusal = EnvironmentFailedError("a:1", "ValueError", Code.INTERNAL)
    found = []
    for one.failures in range(5):
        found.append(one.fails_every_reset)
    assert found == [False, False, False, True, True]
    one.refusal = RefusedError("a:1", "a bad seed", Code.INVALID_ARGUMENT)
    assert not one.fails_every_reset


def at(endpoint: Endpoint, home: Any = None, stands_by: StandBy | None = None) -> Any:
    """A member whose world at an endpoint is joined."""
    one = Member(SimpleNamespace(url=endpoint.url), endpoint, 0, 1, home, stands_by=stands_by)  # type: ignore[arg-type]
    one.handle_link(LinkEvent.CONNECT)
    one.handle_link(LinkEvent.JOINED)
    return one


CROWDED, EMPTY, OTHER = (Endpoint(f"grpc://{url}") for url in ("crowded:1", "empty:1", "other:1/Other-v0"))
OWN, SECOND, LEVEL = (Endpoint(f"grpc://{url}") for url in ("own:1", "second:1", "level:1?level=2"))


def test_a_slot_of_a_directory_is_served_by_any_spare_of_its_kind() -> None:
    slot = at(CROWDED)
    for reason in (Reason.LEAVE, Reason.EVEN_OUT):
        assert at(EMPTY, stands_by=StandBy(reason, "grpc://third:1")).suits(slot)
        assert not at(OTHER, stands_by=StandBy(reason, CROWDED.key)).suits(slot)
    assert at(EMPTY, stands_by=StandBy(Reason.EVEN_OUT, CROWDED.key)).betters(slot)
    assert not at(EMPTY, stands_by=StandBy(Reason.EVEN_OUT, EMPTY.key)).betters(slot), "it is for those of another one"


def test_a_pinned_slot_is_served_at_its_own_server_alone_or_by_a_spare_that_the_user_named() -> None:
    at_home, away, wrong = at(OWN, OWN), at(SECOND, OWN), at(LEVEL, LEVEL)
    assert [each.is_displaced for each in (at_home, away, wrong)] == [False, True, False]
    assert [each.is_displaced_from(OWN) for each in (at_home, away, wrong)] == [False, True, False]
    back = at(OWN, stands_by=StandBy(Reason.GO_BACK, OWN.key))
    assert [back.suits(each) for each in (at_home, away, wrong)] == [True, True, False]
    assert [back.betters(each) for each in (at_home, away, wrong)] == [False, True, False], "who is there stays"
    elsewhere = at(SECOND, stands_by=StandBy(Reason.LEAVE, OWN.key))
    assert not any(elsewhere.suits(each) for each in (at_home, away, wrong))
    named = at(LEVEL, LEVEL, StandBy(Reason.NAMED))
    assert all(named.suits(each) for each in (at_home, away, wrong))
    assert not any(named.betters(each) for each in (at_home, away, wrong))
    assert [spare.is_named for spare in (back, elsewhere, named)] == [False, False, True]


def test_a_spare_suits_where_it_stands_ready_with_as_many_lanes_of_the_same_form() -> None:
    slot, spare = at(CROWDED), at(EMPTY, stands_by=StandBy(Reason.LEAVE, CROWDED.key))
    assert (spare.serves(slot), spare.suits(slot)) == (True, True)
    spare.single = False
    assert (spare.serves(slot), spare.suits(slot)) == (True, False), "a world of one lane begins episodes by itself"
    spare.single = True
    spare.handle_link(LinkEvent.LOST)
    assert (spare.serves(slot), spare.suits(slot)) == (True, False)
    spare.place(0, 2)
    assert not spare.serves(slot)
    assert not at(EMPTY).serves(slot), "it fills slots itself"


def test_an_environment_that_fails_always_is_left_where_it_has_worked_before_or_by_a_slot_of_a_directory() -> None:
    found = []
    for home in (None, OWN):
        one = at(OWN, home)
        one.refusal, one.failures = EnvironmentFailedError("a:1", "ValueError", Code.INTERNAL), 3
        found.append(one.may_leave)
        one.last = answer()
        found.append(one.may_leave)
    assert found == [True, True, False, True]


def test_a_spare_tells_by_its_title_what_it_is() -> None:
    assert at(OWN, stands_by=StandBy(Reason.GO_BACK, OWN.key)).title == "spare grpc://own:1"
    slot = at(OWN)
    slot.place(4, 2)
    assert slot.title == "slots 4 to 5"


@pytest.mark.parametrize(
    ("folders", "inside"),
    [
        (
            ("core/client/slots", "core/client/envs", "wrappers"),
            r"remote\w*(\[\w+\])?\.(session\b|world\.)",
        ),
        (("core/client/envs", "wrappers"), r"slots\w*(\(\S+\))?\.(pool|stepper)\.|\.policy\."),
    ],
    ids=["session", "pool"],
)
def test_nobody_reaches_through_a_remote_or_the_slots(folders: tuple[str, ...], inside: str) -> None:
    """Who holds a remote, or the slots, asks it by a method that says what is asked."""
    root, wrappers = Path(bridge.__file__).parent, Path(bridge.wrappers.__file__).parent
    files = [path for each in folders for path in (wrappers if each == "wrappers" else root / each).rglob("*.py")]
    assert len(files) > 10
    found = [line.strip() for path in files for line in path.read_text("utf-8").splitlines() if re.search(inside, line)]
    # In each step of a single environment a call would be a twentieth of all.
    assert [line for line in found if "a call less in each step" not in line] == []
    assert len(found) <= 1


def test_no_other_file_assigns_a_state() -> None:
    root = Path(bridge.__file__).parent / "core" / "client"
    assigns = re.compile(r"\.(link|episode)(, \S+)?(: \w+)? = ")
    found = [
        path.relative_to(root).as_posix() for path in root.rglob("*.py") if assigns.search(path.read_text("utf-8"))
    ]
    assert found == ["slots/slot.py"]


# What its failures cost


def test_the_breaker_leaves_alone_a_remote_that_goes_too_often() -> None:
    record = RemoteRecord()
    now = 100.0
    for count in range(1, BREAKER_LOSSES):
        assert record.lost(now, 0.1, "gone", url="a", established=True) == now + 0.1, count
        record.back(now + 1.0)
        now += 2.0
    assert record.lost(now, 0.1, "gone", url="a", established=True) == now + BREAKER_REST
    assert record.report(now + 1.0, "url", (0,), "lost").state == "resting"
    assert record.report(now + BREAKER_REST, "url", (0,), "lost").state == "lost"
    # Attempts that fail do not count: a server that is down is tried again as soon as the backoff says.
    fresh = RemoteRecord()
    for attempt in range(50):
        assert fresh.lost(now + attempt, 0.1, "nobody", url="a", established=False) == now + attempt + 0.1
    # Nor do losses that lie far apart.
    for visit in range(50):
        moment = now + visit * BREAKER_WINDOW / (BREAKER_LOSSES - 1.5)
        assert fresh.lost(moment, 0.1, "gone", url="a", established=True) == moment + 0.1


def test_the_time_away_adds_up_over_absences() -> None:
    record = RemoteRecord()
    record.lost(10.0, 0.1, "gone", url="a", established=True)
    record.lost(12.0, 0.1, "still nobody", url="a", established=False)
    assert record.report(13.0, "url", (), "lost").away == 3.0
    record.back(15.0)
    record.back(16.0)
    record.lost(20.0, 0.1, "gone again", url="a", established=True)
    report = record.report(21.5, "url", (), "connecting")
    assert (report.seconds_away, report.away, report.losses, report.returns) == (6.5, 1.5, 2, 1)
    assert report.reason == "gone again"


def test_losses_and_absences_are_those_of_the_server_that_was_lost() -> None:
    record = RemoteRecord()
    record.lost(10.0, 0.1, "gone", url="grpc://a", established=True)
    record.lost(11.0, 0.1, "nobody there", url="grpc://b", established=False)  # where it was to go
    record.back(12.0)  # at a third one
    assert record.report(13.0, "grpc://c", (0,), "running").by_server == {"grpc://a": (1, 2.0)}
    record.lost(20.0, 0.1, "gone", url="grpc://c", established=True)
    assert record.report(25.0, "grpc://c", (0,), "lost").by_server == {"grpc://a": (1, 2.0), "grpc://c": (1, 5.0)}
