"""The clock of a real-time world and its lane buffers, alone: no thread, no network, no time but the argument."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.core.worlds.environment import Job, Transition
from bridge.core.worlds.realtime.frame_loop import LaneLoop
from bridge.errors import SettingError


class Drive:
    """Plays the environments of a loop: episodes of `length` frames with reward 1, observations (episode, frame)."""

    def __init__(self, lanes: int = 1, fps: float = 10.0, length: int = 5, **options: object) -> None:
        self.loop = LaneLoop(lanes, fps, "default", **options)  # type: ignore[arg-type]
        self.length = length
        self.steps = [0] * lanes
        self.actions: list[object] = []
        self.held: set[int] = set()
        self.waiting: list[Job] = []
        self.now = 0.0

    def do(self, job: Job) -> None:
        lane = job.lane
        if job.kind == "reset":
            self.steps[lane] = 0
            self.loop.began(job, self.now, Transition((job.episode, 0), info={"seed": job.seed}))
            return
        self.steps[lane] += 1
        self.actions.append(job.action)
        steps = self.steps[lane]
        self.loop.stepped(job, self.now, 0.001, Transition((job.episode, steps), 1.0, steps == self.length))

    def until(self, when: float) -> None:
        again = False
        while True:
            due = self.loop.next_due()
            at = self.now if again else when if due is None else min(when, due)
            self.now = at
            jobs = self.loop.poll(at)
            for job in jobs:
                if job.lane in self.held and job.kind == "reset":
                    self.waiting.append(job)
                else:
                    self.do(job)
            if not jobs and not again and (due is None or due > when):
                self.now = when
                return
            again = bool(jobs)  # what a frame led to happens at its time

    def player(self) -> Any:
        observer = self.loop.join(True)
        self.loop.start(self.now)
        self.until(self.now)
        for lane in range(len(self.loop.lanes)):
            self.loop.take(observer, lane)
        return observer


def test_frames_are_due_without_drift() -> None:
    # D-23: time is the world's
    """U-1: frame n is due at start + n / fps, after any number of frames."""
    drive = Drive(fps=30.0, length=10**9)
    drive.loop.start(7.0)
    drive.until(7.0 + 600.0)
    assert drive.loop.frames == 600 * 30
    assert drive.loop.next_due() == 7.0 + 18001 / 30.0
    assert drive.loop.overruns == drive.loop.dropped == 0


def test_late_frames_are_made_up_for_up_to_catch_up_and_counted() -> None:
    loop = LaneLoop(1, 10.0, None, catch_up=0.5)
    loop.start(0.0)
    loop.poll(0.1)
    for _ in range(3):
        loop.poll(0.45)  # 0.2 s, 0.3 s and 0.4 s are due: the first of them two frames late, the second one
    assert (loop.frames, loop.overruns, loop.dropped) == (4, 2, 0)
    assert loop.next_due() == 0.5


def test_frames_that_are_too_late_are_dropped_and_counted() -> None:
    loop = LaneLoop(1, 10.0, None, catch_up=0.25)
    loop.start(0.0)
    loop.poll(2.05)  # due at 0.1 s
    assert (loop.frames, loop.overruns, loop.dropped) == (1, 1, 19)
    assert loop.next_due() == pytest.approx(2.1)
    assert loop.frames + loop.dropped == 20, "every tick of the clock is either a frame or counted as dropped"


def test_a_frame_uses_the_latest_action_again_and_again() -> None:
    # D-23
    """U-13: an agent that thinks too long does not stop the world; its last action goes on."""
    drive = Drive(length=100)
    observer = drive.player()
    drive.until(0.1)
    drive.loop.act(observer, 0, "a", 0.15)
    drive.until(0.4)
    drive.loop.act(observer, 0, "b", 0.45)
    drive.loop.act(observer, 0, "c", 0.46)
    drive.until(0.6)
    assert drive.actions == ["default", "a", "a", "a", "c", "c"]
    assert (drive.loop.actions_applied, drive.loop.actions_replaced) == (2, 1)
    assert drive.loop.default_frames == 1
    assert drive.loop.lanes[0].action_delay == pytest.approx(0.04)


def test_an_action_that_is_too_old_gives_way_to_the_default() -> None:
    """U-13: a declared age ends an action."""
    drive = Drive(length=100, max_action_age=0.25)
    observer = drive.player()
    drive.loop.act(observer, 0, "a", 0.05)
    drive.until(0.5)
    assert drive.actions == ["a", "a", "a", "default", "default"]


def test_an_action_does_not_reach_into_the_next_episode() -> None:
    """U-5: the action given for a slot that is resetting is not applied, and neither is an old one."""
    drive = Drive(length=2)
    observer = drive.player()
    drive.loop.act(observer, 0, "a", 0.0)
    drive.until(0.2)  # the episode ends here, its agent does not know yet
    assert not drive.loop.act(observer, 0, "late", 0.25)
    drive.until(0.4)
    assert drive.actions == ["a", "a", "default", "default"]
    assert drive.loop.actions_dropped == 1


def test_episodes_end_and_begin_by_themselves() -> None:
    """U-4: nobody calls reset."""
    drive = Drive(length=5)
    drive.player()
    drive.until(1.7)
    assert drive.loop.lanes[0].episode == 4
    assert drive.steps == [2]


def test_every_end_is_told_once_however_far_behind_the_agent_is() -> None:
    """Mistake: a client two episodes behind silently lost the middle one."""
    drive = Drive(length=3)
    observer = drive.player()
    drive.until(0.1)
    assert drive.loop.take(observer, 0).reward == 1.0  # type: ignore[union-attr]
    drive.until(1.0)  # 10 frames: episodes 1, 2 and 3 are over, 4 is in its first frame
    taken = drive.loop.take(observer, 0)
    assert taken is not None
    assert (taken.observed.observation, taken.terminated, taken.reward, taken.frames) == ((1, 3), True, 2.0, 2)
    records = observer.buffers[0].take_records()
    assert [(r.episode, r.reward, r.length, r.observation) for r in records] == [
        (1, 3.0, 3, (1, 3)),
        (2, 3.0, 3, (2, 3)),
        (3, 3.0, 3, (3, 3)),
    ]
    first = drive.loop.take(observer, 0)
    assert first is not None
    assert (first.observed.observation, first.reward, first.frames, first.terminated) == ((4, 1), 0.0, 0, False)
    assert observer.buffers[0].take_records() == []
    drive.until(1.1)
    after = drive.loop.take(observer, 0)
    assert after is not None
    assert (after.reward, after.frames) == (2.0, 2), "the frame before the first Step is counted in the next one"


def test_the_rewards_that_an_agent_sees_are_the_return_of_its_episode() -> None:
    """Mistake: rewards between two steps were summed but their count not told."""
    drive = Drive(length=7)
    observer = drive.player()
    total = frames = 0.0
    for when in (0.1, 0.3, 0.35, 0.6, 0.7):
        drive.until(when)
        taken = drive.loop.take(observer, 0)
        assert taken is not None
        total, frames = total + taken.reward, frames + taken.frames
    assert (total, frames) == (7.0, 7)
    assert taken.terminated


def test_frames_skipped_are_those_that_the_agent_never_saw() -> None:
    """U-11."""
    drive = Drive(length=100)
    observer = drive.player()
    for when in (0.1, 0.3, 0.35, 0.8):
        drive.until(when)
        drive.loop.take(observer, 0)
    assert observer.buffers[0].frames_skipped == 0 + 1 + 0 + 4


def test_what_comes_of_an_episode_that_was_given_up_is_dropped_and_counted() -> None:
    """Mistake: a late message of an older episode marked the live one done."""
    drive = Drive(length=1)  # a frame that is under way would end its episode
    observer = drive.player()
    drive.now = 0.1
    (frame,) = drive.loop.poll(0.1)
    drive.loop.ask_reset(0, seed=3)
    observer.buffers[0].abandon()
    assert drive.loop.poll(0.1) == [], "the environment is still in the frame"
    drive.do(frame)
    assert drive.loop.stale == 1
    (reset,) = drive.loop.poll(0.1)
    assert (reset.kind, reset.seed) == ("reset", 3)
    drive.do(reset)
    taken = drive.loop.take(observer, 0)
    assert taken is not None
    assert not taken.terminated
    assert taken.observed.observation == (reset.episode, 0)
    assert observer.buffers[0].take_records() == []


def test_a_reset_that_is_asked_for_twice_is_done_for_the_later_one() -> None:
    """U-9: further resets are allowed at any time, also while one is under way."""
    drive = Drive()
    drive.loop.join(True)
    drive.loop.start(0.0)
    drive.loop.ask_reset(0, seed=1)
    (first,) = drive.loop.poll(0.0)
    drive.loop.ask_reset(0, seed=2)
    drive.do(first)
    assert drive.loop.lanes[0].phase.value == "resetting"
    assert drive.loop.stale == 1
    (second,) = drive.loop.poll(0.0)
    assert second.seed == 2
    drive.do(second)
    assert drive.loop.lanes[0].phase.value == "running"


def test_a_reward_after_the_end_changes_no_episode() -> None:
    """Mistake: a reward that arrived after `done` revived the finished episode and ended it twice."""
    drive = Drive(length=2)
    observer = drive.player()
    drive.until(0.2)
    job = Job(0, 1, "step")
    drive.loop.stepped(job, 0.2, 0.0, Transition((1, 3), 100.0, True))
    taken = drive.loop.take(observer, 0)
    assert taken is not None
    assert (taken.reward, taken.terminated, taken.observed.observation) == (2.0, True, (1, 2))
    assert [record.episode for record in observer.buffers[0].take_records()] == [1]
    assert drive.loop.stale == 1
    following = drive.loop.take(observer, 0)
    assert following is not None
    assert not following.terminated


def test_a_slow_reset_holds_up_no_other_lane() -> None:
    """U-6: and in U-5 the resetting lane has no observation."""
    drive = Drive(lanes=2, length=3)
    observer = drive.player()
    drive.held = {0}
    drive.until(1.0)
    assert drive.loop.take(observer, 0).terminated  # type: ignore[union-attr]
    assert drive.loop.take(observer, 0) is None
    assert drive.loop.lanes[1].frames == 10
    assert drive.loop.lanes[0].frames == 3
    drive.do(drive.waiting.pop())
    drive.held.clear()
    drive.until(1.1)
    assert drive.loop.take(observer, 0).observed.observation == (2, 1)  # type: ignore[union-attr]


def test_an_agent_that_joins_late_is_told_only_of_what_it_saw() -> None:
    drive = Drive(length=4)
    drive.player()
    drive.until(0.3)
    late = drive.loop.join(False)
    assert drive.loop.take(late, 0).observed.observation == (1, 3)  # type: ignore[union-attr]
    drive.until(0.4)
    taken = drive.loop.take(late, 0)
    assert taken is not None
    assert (taken.reward, taken.frames, taken.terminated) == (1.0, 1, True)
    (record,) = late.buffers[0].take_records()
    assert (record.reward, record.length) == (4.0, 4), "the return is the episode's, whoever saw it"


def test_a_spectator_acts_on_nothing() -> None:
    drive = Drive(length=100)
    drive.player()
    spectator = drive.loop.join(False)
    drive.loop.take(spectator, 0)
    assert not drive.loop.act(spectator, 0, "mine", 0.05)
    drive.until(0.2)
    assert drive.actions == ["default", "default"]


def test_a_player_that_leaves_takes_its_action_along() -> None:
    drive = Drive(length=100)
    observer = drive.player()
    drive.loop.act(observer, 0, "a", 0.0)
    drive.until(0.1)
    drive.loop.leave(observer)
    drive.until(0.2)
    assert drive.actions == ["a", "default"]


def test_an_action_that_no_frame_uses_is_counted_whatever_ends_its_episode() -> None:
    drive = Drive(length=100)
    observer = drive.player()
    job = drive.loop.poll(0.1)[0]
    drive.loop.act(observer, 0, "a", 0.1)
    drive.loop.failed(job, 0.1, "RuntimeError: x")
    assert drive.loop.actions_dropped == 1
    observer.buffers[0].abandon()
    drive.until(0.5)
    drive.loop.take(observer, 0)
    drive.loop.act(observer, 0, "b", 0.5)
    drive.loop.ask_reset(0)
    assert drive.loop.actions_dropped == 2
    observer.buffers[0].abandon()
    drive.until(0.5)
    drive.loop.take(observer, 0)
    drive.loop.act(observer, 0, "c", 0.5)
    drive.loop.leave(observer)
    assert drive.loop.actions_dropped == 3
    assert drive.loop.actions_applied == 0


def test_a_failure_cuts_the_episode_off_once_and_is_tried_again_with_growing_pauses() -> None:
    drive = Drive(length=100)
    observer = drive.player()
    drive.now = 0.1
    (job,) = drive.loop.poll(0.1)
    drive.loop.failed(job, 0.1, "it raised")
    taken = drive.loop.take(observer, 0)
    assert taken is not None
    assert (taken.truncated, taken.terminated, taken.observed.error) == (True, False, "it raised")
    assert taken.observed.observed_at == 0.0, "when its last observation was made, and not when the environment raised"
    assert drive.loop.take(observer, 0) is None
    assert drive.loop.poll(0.15) == []
    (again,) = drive.loop.poll(0.2)
    assert again.kind == "reset"
    drive.loop.failed(again, 0.2, "again")
    assert observer.buffers[0].error == "again"
    assert [job.kind for job in drive.loop.poll(0.35)] == [], "the pause has doubled"
    assert [job.kind for job in drive.loop.poll(0.4)] == ["reset"]


def test_the_newest_records_alone_keep_their_final_observations_and_infos() -> None:
    drive = Drive(length=1)
    observer = drive.player()
    drive.until(2.0)
    records = observer.buffers[0].take_records()
    assert [record.episode for record in records] == list(range(1, 21))
    kept = [record.observation is not None for record in records]
    assert kept == [False] * 12 + [True] * 8


@pytest.mark.parametrize("fps", [0, -1, float("nan"), "30", True, 1e9])
def test_a_frame_rate_out_of_range_is_an_error(fps: object) -> None:
    with pytest.raises(SettingError, match="expected fps to be frames a second"):
        LaneLoop(1, fps, None)  # type: ignore[arg-type]


def test_a_world_that_rests_stands_while_nobody_is_in_and_makes_up_for_nothing():
    drive = Drive(fps=10.0, length=100, rest_when_empty=True)
    drive.loop.start(drive.now)
    drive.until(1.0)
    assert (drive.loop.frames, drive.loop.lanes[0].phase.value) == (0, "idle"), "nobody has come yet"
    player = drive.player()
    drive.until(2.0)
    assert drive.loop.frames == 10
    watcher = drive.loop.join(False)
    drive.loop.leave(player)
    drive.until(3.0)
    assert drive.loop.frames == 20, "somebody watches"
    drive.loop.leave(watcher)
    drive.until(60.0)
    assert drive.loop.frames == 21, "one more, with the default action"
    drive.player()
    drive.until(61.0)
    assert (drive.loop.frames, drive.loop.dropped, drive.loop.overruns) == (31, 0, 0)
    assert drive.steps == [31], "the episode went on"


def test_the_last_frame_before_a_rest_applies_the_default_action_to_each_lane():
    """A robot must not go on with the last action of a client that died."""
    drive = Drive(lanes=2, fps=10.0, length=100, rest_when_empty=True)
    player = drive.player()
    drive.until(1.0)
    for lane in range(2):
        drive.loop.act(player, lane, f"move {lane}", drive.now)
    drive.until(1.5)
    assert drive.actions[-2:] == ["move 0", "move 1"]
    slow = drive.loop.lanes[1]
    slow.busy = True  # its step takes long
    drive.loop.leave(player)
    drive.until(1.75)
    assert drive.actions[-2:] == ["default", "default"], "of the lane that is free"
    slow.busy = False
    drive.until(60.0)
    assert drive.actions[-3:] == ["default"] * 3
    assert drive.steps == [18, 16]
    assert drive.loop.next_due() is None


@pytest.mark.parametrize("leaves_first", [True, False], ids=["in the default frame", "in the client's own"])
def test_a_step_that_failed_is_followed_by_a_reset_before_a_rest(leaves_first):
    """What a robot did of the action nobody knows: its `reset` makes it safe."""
    drive = Drive(fps=10.0, length=100, rest_when_empty=True)
    player = drive.player()
    drive.until(1.0)
    drive.loop.act(player, 0, "move", drive.now)
    if leaves_first:
        drive.loop.leave(player)
    (job,) = drive.loop.poll(1.1)
    assert (job.kind, job.action) == ("step", "default" if leaves_first else "move")
    drive.loop.failed(job, 1.1, "stuck")
    if not leaves_first:
        drive.loop.leave(player)
    assert drive.loop.next_due() is not None, "a timer is set, which the reset needs"
    drive.until(60.0)
    assert drive.loop.lanes[0].phase.value == "running", "it was reset"
    assert drive.loop.next_due() is None, "and rests"
