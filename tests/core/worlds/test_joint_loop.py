"""The clock of an environment of several agents, alone: no thread, no network, no time but the argument."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.core.worlds.environment import Transition
from bridge.core.worlds.realtime.joint_loop import DEFAULT, JointLoop

NAMES = ("a", "b", "c")
LENGTHS = {"a": 2, "b": 4, "c": 7}


class Drive:
    """Plays an environment of three agents, which end after 2, 4 and 7 frames; a reward is the number of the frame."""

    def __init__(self, **options: Any) -> None:
        self.loop = JointLoop(NAMES, 8.0, **options)
        self.time = 0
        self.now = 0.0
        self.seeds: list[int | None] = []
        self.actions: list[dict[str, Any]] = []
        self.failing = False
        self.players: dict[str, Any] = {}

    def do(self, job: Any) -> None:
        if self.failing:
            self.failing = False
            self.loop.failed(job, self.now, "it raised")
            return
        if job.kind == "reset":
            self.time = 0
            self.seeds.append(job.seed)
            first = {name: Transition((job.episode, 0)) for name in NAMES}
            self.loop.joint_began(job, self.now, first)
            return
        self.time += 1
        self.actions.append(dict(job.action))
        seen = {
            name: Transition((job.episode, self.time), float(self.time), self.time == LENGTHS[name])
            for name in job.action
        }
        alive = [name for name in job.action if self.time < LENGTHS[name]]
        self.loop.joint_stepped(job, self.now, 0.001, seen, alive)
        self.loop.end_deserted()

    def settle(self) -> None:
        for _ in range(10):
            jobs = self.loop.poll(self.now)
            for job in jobs:
                self.do(job)
            if not jobs:
                return
        raise AssertionError("it never comes to rest")

    def advance(self, frames: int = 1) -> None:
        for _ in range(frames):
            self.now += 1 / 8
            self.settle()

    def join(self, name: str) -> Any:
        self.players[name] = self.loop.join_as(name, True)
        self.loop.start(self.now)
        self.settle()
        return self.players[name]

    def take(self, name: str) -> Any:
        return self.loop.take(self.players[name], 0)

    def reset(self, name: str, seed: int | None = None, restart: bool = True) -> None:
        self.loop.ask(self.players[name], seed, None, restart)
        self.settle()


def test_a_frame_has_the_last_action_of_every_agent() -> None:
    """U-13: or the mark of a default one; each agent's until its own end."""
    drive = Drive()
    b = drive.join("b")
    drive.take("b")
    assert drive.loop.act(b, 0, "left", 0.0)
    drive.advance(4)
    drive.loop.act(b, 0, "late", drive.now)
    drive.advance(2)
    assert drive.actions[0] == {"a": DEFAULT, "b": "left", "c": DEFAULT}
    assert drive.actions[2] == {"b": "left", "c": DEFAULT}
    assert drive.actions[4:] == [{"a": DEFAULT, "b": DEFAULT, "c": DEFAULT}] * 2, "b alone played: it began anew"
    assert (drive.loop.actions_applied, drive.loop.actions_dropped) == (1, 1)


def test_an_action_may_be_kept_from_going_on() -> None:
    drive = Drive(may_repeat=lambda name, seen, action: seen[1] != 2)
    b = drive.join("b")
    drive.take("b")
    drive.loop.act(b, 0, "left", 0.0)
    drive.advance(4)
    assert [actions["b"] for actions in drive.actions] == ["left", "left", DEFAULT, "left"]


def test_what_a_reset_finds_under_way_is_dropped_and_counted() -> None:
    """Mistake: a late message of an older episode marked the live one done."""
    drive = Drive()
    drive.join("a")
    drive.take("a")
    drive.now += 1 / 8
    (frame,) = drive.loop.poll(drive.now)
    drive.loop.ask(drive.players["a"], 5, None, True)
    assert drive.loop.poll(drive.now) == [], "the environment is still in the frame"
    assert drive.loop.joint_stepped(frame, drive.now, 0.0, {}, []) is None
    assert drive.loop.stale == 1
    drive.settle()
    assert drive.seeds == [None, 5]
    taken = drive.take("a")
    assert taken is not None
    assert (taken.observed.observation, taken.reward) == ((2, 0), 0.0)


def test_resets_are_one_vote_and_the_last_seed_counts() -> None:
    """U-9."""
    drive = Drive()
    for name in NAMES:
        drive.join(name)
        drive.take(name)
    drive.reset("a", seed=1)
    drive.reset("b", seed=2)
    drive.reset("a")
    assert drive.seeds == [None]
    assert drive.take("a") is None, "it waits for c"
    drive.reset("c")
    assert drive.seeds == [None, 2]
    for name in NAMES:
        taken = drive.take(name)
        assert taken is not None
        assert taken.observed.observation == (2, 0)


def test_whoever_asked_first_is_not_reset_again_before_it_came_in() -> None:
    """The others' Resets come when the episode runs already that the first one's Reset began, with its seed."""
    drive = Drive()
    for name in NAMES:
        drive.join(name)
    for name in NAMES:
        drive.reset(name, seed=7 if name == "a" else None)
    assert drive.seeds == [None, 7]
    for name in NAMES:
        taken = drive.take(name)
        assert taken is not None
        assert taken.observed.observation == (2, 0)


def test_without_restart_an_agent_enters_the_running_episode_again() -> None:
    drive = Drive()
    drive.join("c")
    drive.take("c")
    drive.advance(1)
    drive.reset("c", restart=False)
    taken = drive.take("c")
    assert taken is not None
    assert (taken.observed.observation, drive.seeds) == ((1, 1), [None])


def test_a_failed_environment_is_reset_after_a_pause_and_everybody_is_told() -> None:
    drive = Drive()
    for name in ("a", "c"):
        drive.join(name)
        drive.take(name)
    drive.advance(2)
    ended = drive.take("a")
    assert ended is not None
    assert ended.terminated
    drive.failing = True
    drive.advance(1)
    cut = drive.take("c")
    assert cut is not None
    assert (cut.truncated, cut.observed.error, cut.reward) == (True, "it raised", 3.0)
    assert drive.players["a"].buffers[0].error is None, "its episode had ended before"
    assert drive.loop.environment.phase.name == "FAILED"
    drive.advance(1)
    assert drive.loop.environment.phase.name == "RUNNING"


@pytest.mark.parametrize("follows", [False, True])
def test_an_episode_that_nobody_plays_any_more_is_cut_off_if_somebody_waits(follows: bool) -> None:
    drive = Drive()
    drive.players["a"] = drive.loop.join_as("a", True, follows=follows)
    drive.loop.start(0.0)
    drive.settle()
    if not follows:
        drive.take("a")
    drive.advance(2)
    assert drive.loop.environment.episode == 2
    drive.loop.leave(drive.players["a"])
    drive.advance(6)
    assert drive.loop.environment.episode == 2, "nobody waits"
    drive.advance(1)
    assert drive.loop.environment.episode == 3


OPERATIONS = st.tuples(
    st.sampled_from(["frame", "frame", "frame", "join", "leave", "take", "take", "act", "reset", "fail"]),
    st.sampled_from(NAMES),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=60))
def test_every_reward_and_every_end_is_told_once_whatever_agents_do(operations: list[tuple[str, str]]) -> None:
    """U-4, U-5: from an agent's join on the rewards of an episode add up; nobody waits for one without players."""
    drive = Drive()
    sums: dict[tuple[int, str, int], float] = defaultdict(float)
    joins: dict[str, int] = defaultdict(int)
    joined: dict[str, tuple[int, int]] = {}
    records: dict[tuple[str, int], set[int]] = defaultdict(set)
    for what, name in operations:
        player = drive.players.get(name)
        if what == "frame":
            drive.advance()
        elif what == "fail":
            drive.failing = True
        elif what == "join" and player is None:
            joins[name] += 1
            drive.join(name)
            joined[name] = drive.loop.environment.episode, drive.time
        elif player is not None and what == "leave":
            drive.loop.leave(drive.players.pop(name))
            drive.loop.end_deserted()
        elif player is not None and what == "act":
            drive.loop.act(player, 0, what, drive.now)
        elif player is not None and what == "reset":
            drive.reset(name)
        elif player is not None and what == "take":
            entering = not player.buffers[0].reading
            taken = drive.take(name)
            if taken is not None:
                episode, time = taken.observed.observation
                assert taken.observed.episode == episode
                if not entering:
                    key = joins[name], name, episode
                    sums[key] += taken.reward
                    missed = joined[name][1] if joined[name][0] == episode else 0
                    assert sums[key] == sum(range(missed + 1, time + 1))
                    assert taken.terminated == (time == LENGTHS[name])
            for ended in player.buffers[0].take_records():
                assert ended.episode not in records[name, joins[name]]
                records[name, joins[name]].add(ended.episode)
                if ended.terminated:
                    assert ended.reward == sum(range(1, LENGTHS[name] + 1))
        assert not drive.loop.end_deserted(), "those who wait would wait for nobody"
        running = [lane.phase.name == "RUNNING" for lane in drive.loop.agent_lanes.values()]
        assert any(running) == (drive.loop.environment.phase.name == "RUNNING")
