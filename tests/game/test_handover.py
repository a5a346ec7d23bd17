"""What passes between the thread of a program and its server, where the server is slow."""

from __future__ import annotations

import numpy as np

from bridge.game.handover import Choice, News, ProgramEnd

AGENTS = ("red", "blue")


def test_a_picture_stays_where_frames_without_one_are_put_together_with_it():
    handover = ProgramEnd({"agent": 0})
    handover.notify = lambda: None
    for number in range(9):
        frame = np.full((2, 2, 3), number, np.uint8) if number < 7 else None
        news = News(0.0, rewards={"agent": 1.0}, frame=frame, alive=["agent"])
        handover.exchange(news, begins=False, timeout=None)
    read = list(iter(handover.read, None))
    assert read[-1].frame[0, 0, 0] == 6
    assert sum(news.rewards["agent"] for news in read) == 9.0


def test_where_nobody_reads_the_newest_news_alone_are_kept():
    handover = ProgramEnd({"agent": 0})
    for number in range(9):
        handover.exchange(News(0.0, rewards={"agent": number}, alive=["agent"]), begins=False, timeout=None)
    assert [news.rewards["agent"] for news in iter(handover.read, None)] == [8]


def passed(handover, names=("agent",), **more):
    """Pass what a frame led to that is worth 1 to each agent."""
    values = dict.fromkeys(names, 1.0)
    return handover.exchange(
        News(0.0, observations=dict(values), rewards=values, alive=list(more.pop("alive", names)), **more), False, None
    )


def test_no_agent_is_told_frames_in_which_it_was_not():
    handover = ProgramEnd(dict.fromkeys(AGENTS, 0))
    handover.notify = lambda: None
    for number in range(40):
        passed(handover, AGENTS if 10 <= number < 25 else ("red",), alive=AGENTS if 10 <= number < 24 else ("red",))
    frames, alive, read = dict.fromkeys(AGENTS, 0), ["red"], list(iter(handover.read, None))
    for news in read:
        for name in alive:
            frames[name] += news.frames
        alive = news.alive
    assert frames == {"red": 40, "blue": 14}
    assert sum(news.rewards["red"] for news in read) == 40


def test_of_too_many_rounds_the_oldest_are_left_out_as_a_whole_and_their_frames_are_counted():
    handover = ProgramEnd({"agent": 0})
    handover.notify = lambda: None
    for _ in range(30):
        passed(handover, first=True, frames=0)
        passed(handover)
        passed(handover, alive=())
    read = list(iter(handover.read, None))
    assert len(read) <= 16
    assert read[0].first
    assert read[0].skipped + sum(news.frames for news in read) == 60
    assert sum(news.first for news in read) * 2 == sum(news.frames for news in read), "of each round all is told"


def test_no_frame_of_a_long_round_is_left_out_whatever_the_program_took():
    handover = ProgramEnd({"agent": 0})
    handover.notify = lambda: None
    passed(handover, first=True, frames=0)
    for number in range(100):
        handover.offer(Choice({"agent": 0}, number=number + 1))
        passed(handover)
    read = list(iter(handover.read, None))
    assert len(read) <= 16
    assert sum(news.frames for news in read) == sum(news.rewards["agent"] for news in read) - 1 == 100


def test_frames_that_are_put_together_have_the_newest_info_and_all_who_acted_in_the_agents_place():
    handover = ProgramEnd({"agent": 0})
    handover.notify = lambda: None
    for number in range(20):
        by_keys = {"intervention": True, "intervened_by": "window", "intervene_action": number}
        passed(handover, infos={"agent": {"number": number, **(by_keys if number % 2 else {})}})
    passed(handover)  # no info: that of the frame before is not its own
    *read, last = iter(handover.read, None)
    frames = range(20 - last.frames + 1, 20)
    assert len(read) < 10
    assert last.infos["agent"] == {
        "intervention": True,
        "intervened_by": "window",
        "intervene_action": 19,
        "intervened_frames": sum(number % 2 for number in frames),
    }


def test_what_waits_is_bounded_also_where_an_agent_comes_and_goes_in_each_frame():
    handover = ProgramEnd(dict.fromkeys(AGENTS, 0))
    handover.notify = lambda: None
    for number in range(100):
        passed(handover, AGENTS[: 1 + number % 2])
    read = list(iter(handover.read, None))
    assert len(read) <= 16
    assert sum(news.frames for news in read) == sum(news.rewards["red"] for news in read) == 100


def test_the_rate_of_a_program_is_that_of_its_frames_and_not_of_what_its_rounds_take_to_begin():
    handover, now = ProgramEnd({"agent": 0}), 0.0
    handover.notify = lambda: None
    handover.exchange(News(now, frames=0, alive=["agent"]), begins=True, timeout=None)
    assert handover.rate(30.0) == 30.0, "it is not known yet"
    for _ in range(3):
        now += 2.0  # a level is loaded
        handover.exchange(News(now, frames=0, first=True, alive=["agent"]), begins=False, timeout=None)
        for _ in range(3):
            now += 0.02
            handover.exchange(News(now, alive=["agent"]), begins=False, timeout=None)
            assert handover.rate(30.0) == 50.0
    now += 60.0  # a menu
    handover.exchange(News(now, alive=["agent"]), begins=False, timeout=None)
    assert handover.rate(30.0) == 50.0
    for _ in range(9):
        now += 2.0
        handover.exchange(News(now, alive=["agent"]), begins=False, timeout=None)
    assert handover.rate(30.0) == 0.5
