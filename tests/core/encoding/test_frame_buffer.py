"""`bridge.core.encoding.frame_buffer`: what a slow reader is told of a lane, against a model that keeps everything."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bridge.core.encoding.frame_buffer import FrameBuffer, Observed, Told

RECORDS, FINALS = 65_536, 8


def make(*, skips: bool = True) -> FrameBuffer[Observed, Any]:
    """Return a buffer whose records are the numbers of their episodes, negative without the final observation."""
    return FrameBuffer(lambda number: -abs(number), skips=skips)


@dataclasses.dataclass
class Episode:
    """All that passed in an episode."""

    observed: list[Observed]
    rewards: list[float]
    acted: list[int]
    flags: tuple[bool, bool] = (False, False)

    @property
    def over(self) -> bool:
        return any(self.flags)


class Model:
    """Keeps every episode whole, and works out at each `take` what is told."""

    def __init__(self, skips: bool) -> None:
        self.skips = skips
        self.episodes: dict[int, Episode] = {}
        self.passed = self.reading = self.since = 0
        self.reported: dict[int, int] = {}  # how many rewards of an episode were told, also before it was abandoned
        self.shown: set[int] = set()
        self.last: Observed | None = None
        self.recorded = 0

    @property
    def newest(self) -> Episode | None:
        return self.episodes.get(len(self.episodes))

    @property
    def running(self) -> bool:
        return self.newest is not None and not self.newest.over

    @property
    def enters(self) -> int:
        """The episode that a reader that is in none enters now; 0: none."""
        asked = len(self.episodes) > self.since and not self.skips
        return len(self.episodes) if self.running or asked else 0

    def take(self) -> Any:
        if not self.reading and not self.enters:
            return None
        if not self.reading:
            self.since = self.reading = self.enters
            own = self.episodes[self.reading]
            return self._tell(own.observed[-2 if own.over else -1], [], [], (False, False))
        own, number = self.episodes[self.reading], self.reported.get(self.reading, 0)
        self.reported[self.reading] = len(own.rewards)
        self.reading = 0 if own.over else self.reading
        return self._tell(own.observed[-1], own.rewards[number:], own.acted[number:], own.flags)

    def _tell(self, observed: Observed, rewards: list[float], acted: list[int], flags: Any) -> Any:
        self.last = observed
        if observed.of_frame:
            self.shown.add(observed.passed)
        return observed.episode, observed.passed, observed.of_frame, sum(rewards), len(rewards), sum(acted), *flags

    def skipped(self) -> int:
        return 0 if self.last is None else self.last.passed - len(self.shown)

    def tells_anew(self) -> list[Observed]:
        """Return the observations that are told for the first time, whatever they end."""
        other, found = copy.deepcopy(self), []
        while other.reading or other.enters:
            before, entering = other.last, not other.reading
            told = other.take()
            if not entering and not any(told[-2:]) and before is not None and told[1] == before.passed:
                break
            found.append(told[:3])
        return found


def figures(told: Told[Observed] | None) -> Any:
    """Return what is told, as the model does."""
    if told is None:
        return None
    seen = told.observed
    acted = told.intervention.get("intervened_frames", 0)
    place = seen.episode, seen.passed, seen.of_frame
    return *place, told.reward, told.frames, acted, told.terminated, told.truncated


OPERATIONS = st.one_of(
    st.just(("begin",)),
    st.tuples(st.just("frame"), st.integers(-3, 3), st.booleans()),
    st.tuples(st.just("frame"), st.integers(-3, 3), st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 3), st.sampled_from([(True, False), (False, True), (True, True)])),
    st.tuples(st.just("cut"), st.booleans()),
    st.just(("take",)),
    st.just(("take",)),
    st.tuples(st.just("records"), st.booleans()),
    st.just(("abandon",)),
)


@settings(max_examples=600, deadline=None)
@given(st.lists(OPERATIONS, max_size=50), st.booleans())
@example([("begin",), ("take",), ("frame", 2, False), ("take",), ("abandon",), ("take",), ("take",)], True)
def test_a_reader_is_told_what_passed_whenever_it_takes(operations: list[Any], skips: bool) -> None:
    """Each reward, end and record once, in order and of its own episode; each frame is shown, or counted as skipped."""
    buffer, model = make(skips=skips), Model(skips)
    records: list[int] = []

    def frame(reward: int, acted: bool) -> Observed:
        model.passed += 1
        own = model.episodes[len(model.episodes)]
        own.observed.append(Observed(len(model.episodes), model.passed, True))
        own.rewards.append(float(reward))
        own.acted.append(int(acted))
        return own.observed[-1]

    for what, *values in operations:
        own = model.newest
        if what == "begin" and not model.running and (skips or not (model.reading or model.enters)):
            first = Observed(len(model.episodes) + 1, model.passed, False)
            model.episodes[first.episode] = Episode([first], [], [])
            buffer.began(first)
        elif what == "frame" and model.running:
            reward, acted = values
            intervention = {"intervene_action": 0, "intervened_frames": 1} if acted else {}
            buffer.add(frame(reward, acted), reward, 1, intervention)
        elif what == "end" and model.running and own is not None:
            reward, own.flags = values
            buffer.add(frame(reward, False), reward, terminated=own.flags[0], truncated=own.flags[1])
            buffer.add_record(len(model.episodes), len(model.episodes))
        elif what == "cut" and model.running and own is not None:
            own.flags = False, True
            own.observed.append(own.observed[-1])
            buffer.add(own.observed[-1], frames=0, truncated=True)
            if values[0]:
                buffer.add_record(len(model.episodes), len(model.episodes))
        elif what == "take":
            assert figures(buffer.take()) == model.take()
        elif what == "records":
            (after_end,) = values
            told = buffer.take_records(after_end=after_end)
            waits = model.reading if model.reading and model.episodes[model.reading].over else 0
            waits = waits or (0 if model.running else model.enters)
            assert not after_end or all(abs(number) < (waits or 10**9) for number in told), "none before its end"
            assert buffer.take_records(after_end=True) == []
            records += told
        elif what == "abandon":
            if model.reading and model.episodes[model.reading].over:
                model.last = model.episodes[model.reading].observed[-1]
            elif not model.reading and not model.running and model.enters:
                assert own is not None
                model.last = own.observed[-1]
            model.reading = 0
            model.since = len(model.episodes) - model.running
            buffer.abandon()
        assert buffer.reading == model.reading
        assert buffer.frames_skipped == model.skipped()
        waiting = [(seen.episode, seen.passed, seen.of_frame) for seen in buffer.waiting]
        assert waiting == model.tells_anew()
        assert len(waiting) <= 2
    records += buffer.take_records()
    assert list(map(abs, records)) == sorted({abs(number) for number in records}), "each once, the oldest first"


@pytest.mark.parametrize("count", [FINALS, FINALS + 1, RECORDS, RECORDS + 1, RECORDS + 100])
def test_a_reader_that_takes_nothing_fills_no_memory(count: int) -> None:
    """The newest 65,536 records are kept, and of these the newest 8 whole."""
    buffer = make()
    for number in range(1, count + 1):
        buffer.began(Observed(number, number - 1, False))
        buffer.add(Observed(number, number, True), 1.0, terminated=True)
        buffer.add_record(number, number)
    told = buffer.take_records()
    assert [abs(number) for number in told] == list(range(max(1, count - RECORDS + 1), count + 1))
    assert [number > 0 for number in told] == [False] * (len(told) - FINALS) + [True] * FINALS
    assert (buffer.waiting, buffer.take_records()) == ([], [])


def test_an_episode_whose_end_was_not_told_is_left_for_the_next_one() -> None:
    """A server that breaks a sequence off tells no end: the rewards of two episodes are added up nowhere."""
    buffer = make()
    buffer.began(Observed(1, 0, False))
    buffer.take()
    buffer.add(Observed(1, 1, True), 5.0)
    buffer.began(Observed(3, 1, False))
    assert figures(buffer.take()) == (3, 1, False, 0.0, 0, 0, False, False)
    buffer.add(Observed(3, 2, True), 7.0)
    assert figures(buffer.take()) == (3, 2, True, 7.0, 1, 0, False, False)
