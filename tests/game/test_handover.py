"""What passes between the thread of a program and its server, where the server is slow."""

from __future__ import annotations

import numpy as np

from bridge.game.handover import News, ProgramEnd


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
