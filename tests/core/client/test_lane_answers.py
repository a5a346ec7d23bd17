"""`bridge.core.client.realtime.lane_answers`: which answers of a lane count, and which frames nobody was shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bridge.core.client.realtime.lane_answers import LaneAnswers
from bridge.core.encoding.names import TIMING
from bridge.pb import dm_env_rpc_pb2 as pb


class Answers(LaneAnswers):
    """The answers of one lane, as a server gives them."""

    def __init__(self, *, skips: bool = True) -> None:
        super().__init__(skips=skips)
        self.message = pb.EnvironmentResponse()
        self.timing = np.zeros(len(TIMING))

    def arrives(
        self, episode: int, at: float, frames: int, skipped: int, *, ends: bool = False, number: int = 0
    ) -> bool:
        """An answer of an episode, with an observation of some time."""
        self.message = pb.EnvironmentResponse(step=pb.StepResponse(state=pb.TERMINATED if ends else pb.RUNNING))
        told = {"episode": episode, "observed_at": at, "frames_skipped": skipped}
        self.timing = np.array([told.get(name, 0) for name in TIMING], np.float64)
        return self.push(self.message, self.timing, float(frames), frames, {}, ends, False, number=number)

    def told(self, *, pops: bool = True) -> Any:
        """Return the episode and the time of what is told, its frames and state, and the frames that nobody saw."""
        missing = self.missing
        told = self.tell(self.message, self.timing, pops=pops)
        figures = dict(zip(TIMING, told.observed.timing.tolist(), strict=True))
        if missing:
            return None, figures["frames_skipped"]
        assert self.reading == (0 if told.terminated else figures["episode"])
        assert (told.observed.message.step.state == pb.TERMINATED) == told.terminated
        return (figures["episode"], figures["observed_at"], told.frames, told.terminated), figures["frames_skipped"]


def test_whether_a_first_observation_is_of_a_frame_is_learned_from_what_follows() -> None:
    """Frames 1 and 2 had passed when the episode was entered; the server never showed the first."""
    answers = Answers()
    assert answers.arrives(1, 10.0, 0, 1)
    assert answers.arrives(1, 10.1, 3, 1)  # tells of frames 1 to 3
    assert answers.told() == ((1, 10.1, 0, False), 2), "the first and the second"
    assert answers.arrives(1, 10.1, 0, 1)
    assert answers.told() == ((1, 10.1, 3, False), 2)
    answers.begin(1)
    assert answers.told() == (None, 2)


def test_a_first_observation_of_a_frame_that_was_told_is_not_counted() -> None:
    answers = Answers()
    answers.arrives(1, 10.0, 0, 0)  # as it turns out, of the first frame
    assert answers.told() == ((1, 10.0, 0, False), 0)
    answers.arrives(1, 10.3, 4, 2)  # frames 1 to 4, of which the server showed neither 2 nor 3
    assert answers.told() == ((1, 10.3, 4, False), 2)
    answers.arrives(1, 10.4, 1, 2)
    answers.arrives(1, 10.5, 1, 2)
    assert answers.told() == ((1, 10.5, 2, False), 3)


def test_a_first_observation_of_a_reset_is_no_frame() -> None:
    answers = Answers()
    answers.arrives(1, 10.0, 0, 0)
    answers.arrives(1, 10.2, 2, 1)
    assert answers.told() == ((1, 10.2, 0, False), 1), "the server skipped the first"
    answers.arrives(2, 10.2, 0, 1)  # the same moment, but another episode
    assert answers.told() == ((2, 10.2, 0, False), 1)
    answers.arrives(2, 10.3, 1, 1)
    assert answers.told() == ((2, 10.3, 1, False), 1)


@pytest.mark.parametrize("skips", [False, True])
def test_an_end_without_a_further_frame_is_another_answer_than_the_observation_before(skips: bool) -> None:
    """As after a ResetWorld: the end repeats the observation that waits, or was told, which ends nothing itself."""
    answers = Answers(skips=skips)
    answers.arrives(1, 10.0, 0, 0)
    answers.arrives(1, 10.1, 1, 0)
    if skips:
        assert answers.told()[0] == (1, 10.1, 0, False)
    answers.arrives(1, 10.1, 0, 0, ends=True)
    assert answers.told(pops=not skips) == ((1, 10.1, 0, False), 0), "told again, where nothing new may be told"
    assert answers.told() == ((1, 10.1, 1, True), 0)
    assert answers.told()[0] is None


def test_an_episode_that_ended_before_anything_was_told_is_left_out_of_lanes_alone() -> None:
    lane, single = Answers(), Answers(skips=False)
    for answers in (lane, single):
        answers.arrives(1, 10.0, 0, 0)
        answers.arrives(1, 10.1, 1, 0)
        answers.arrives(1, 10.2, 1, 0, ends=True)
        assert answers.over
    assert lane.told() == (None, 2)
    assert single.told() == ((1, 10.1, 0, False), 0)
    assert single.told() == ((1, 10.2, 2, True), 0)
    assert single.told()[0] is None


def test_an_end_of_which_nothing_came_before_is_told_of_a_single_environment() -> None:
    """As of a Step after a failure, whose sequence a ResetWorld ends."""
    answers = Answers(skips=False)
    answers.arrives(1, 10.0, 0, 0, ends=True)
    assert answers.told()[0] == (1, 10.0, 0, True)


def test_answers_to_requests_from_before_a_beginning_are_counted_and_not_told() -> None:
    answers = Answers()
    answers.arrives(1, 10.0, 0, 0)
    answers.told()
    answers.begin(5)
    assert not answers.arrives(1, 10.1, 1, 0, number=4)
    assert answers.told() == (None, 1)
    assert answers.arrives(2, 10.2, 0, 0, number=5)
    assert answers.told() == ((2, 10.2, 0, False), 1)


def test_no_answer_is_kept_for_an_episode_that_is_over() -> None:
    """Each has the observations of all lanes: one that takes long to reset would keep them all."""
    answers = Answers()
    for episode, take in ((1, False), (2, True)):
        answers.arrives(episode, 10.0, 0, 0)
        if take:
            answers.told()
        answers.arrives(episode, 10.1, 1, 0, ends=True)
        if take:
            answers.told()
        assert answers.missing
        assert answers.last is None or not answers.last.message.ByteSize()
