"""Steps in flight in real-time worlds of lanes that are far away, in virtual time: what `step` tells of each lane."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from bridge.core.encoding import values
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import PeerError, RefusedError
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.far_network import ROUGH, STEADY, FarNetwork, Telling
from tests.realtime_tools import read_batch
from tests.support import direct_session, lane_info, sampled

FRAME = 1 / 60
LANES = 3
# Lane i's episodes are as long as these, in turn, from the i-th on.
LENGTHS = (7, 40, 1, 3, 90)


class Lane(Telling):
    """An environment whose next resets may fail."""

    failures = 0

    def reset(self, **keywords: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise ValueError("not now")
        return super().reset(**keywords)


class Lanes(FarNetwork):
    """A world of lanes whose episodes end at different frames, and a remote that plays all of them."""

    def __init__(self, monkeypatch: Any, lengths: tuple[int, ...] = LENGTHS, **more: Any) -> None:
        made = itertools.count()

        def make(now: Callable[[], float]) -> Lane:
            return Lane(tuple(np.roll(lengths, -next(made)).tolist()), now)

        super().__init__(monkeypatch, make, num_envs=more.pop("num_envs", LANES), **more)

    @property
    def stepped(self) -> list[Lane]:
        """The lanes' environments."""
        return self.made[-self.world.env.facts.num_envs :]

    def stream(self) -> Any:
        """A session of another client, without a network."""
        return direct_session(self.registry, "test")

    def join(self, *, partial: bool = False, **request: Any) -> Any:
        remote = self.remote(**request)
        if not partial:
            remote.session.wait_for_all()
        return remote

    def act(self, remote: Any, actions: Any) -> Any:
        """Step with an action for each lane; return what is told: a row each, and rewards, flags and infos."""
        remote.send_step(remote.world.writer.write_columns([np.asarray(actions)], 0))
        return self._told(remote)

    def reset(self, remote: Any, mask: Any = None, **settings: Any) -> Any:
        if mask is not None:
            settings["reset_mask"] = np.array(mask)
        remote.begin({key: pack_tensor(value) for key, value in settings.items()})
        return self._told(remote)

    def _told(self, remote: Any) -> Any:
        self.take()
        self.run_until(lambda: bool(self.answers))
        answer: Any = self.answers.pop(0)
        if getattr(answer, "error", None) is not None:
            raise answer.error
        _, batch, info = read_batch(remote, answer.message)
        return batch.columns[0], batch.rewards, batch.terminations, batch.truncations, info


Make = Callable[..., Lanes]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Lanes] = []

    def make(*lengths: int, **more: Any) -> Lanes:
        made.append(Lanes(monkeypatch, lengths or LENGTHS, **more))
        return made[-1]

    yield make
    for item in made:
        item.close()


class Book:
    """Adds up what is told of one lane, and checks it."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths
        self.records: dict[int, dict[str, Any]] = {}
        self.ended: list[int] = []
        self.entered: list[int] = []
        self._rewards = 0.0
        self._frames = 0
        self._seen: set[tuple[int, int]] = set()
        self._in = False
        self.cuts = False

    def length(self, episode: int) -> int:
        return self._lengths[(episode - 1) % len(self._lengths)]

    def cut_off(self) -> None:
        """The running episode is given up."""
        self._in = False
        self.cuts = True

    def take(self, row: Any, reward: float, terminated: bool, info: Any, lane: int, *, resetting: bool = False) -> None:
        for record in (info["episodes"][lane] or ()) if "episodes" in info else ():
            assert record["episode"] not in self.records, "each end is told exactly once"
            assert record["return"] == sum(range(record["length"] + 1))
            self.records[record["episode"]] = record
        frames = int(info["frames"][lane])
        if resetting:
            assert (reward, frames, terminated) == (0.0, 0, False)
            return
        episode, frame = int(row[0]), int(row[1])
        if not self._in:
            assert (reward, frames, terminated) == (0.0, 0, False), "the first of an episode tells no reward"
            assert not self.entered or episode > self.entered[-1]
            self.entered.append(episode)
            self._rewards, self._frames, self._in = 0.0, 0, True
        assert episode == self.entered[-1]
        self._rewards += reward
        self._frames += frames
        if frame:
            self._seen.add((episode, frame))
        if terminated:
            assert self._rewards == self.records[episode]["return"]
            assert (frame, self._frames) == (self.length(episode),) * 2, "the last observation is never skipped"
            self.ended.append(episode)
            self._in = False
        if not self.cuts:
            passed = sum(map(self.length, range(1, episode))) + frame
            assert info["latency"]["frames_skipped"][lane] + len(self._seen) == passed


def books(net: Lanes) -> list[Book]:
    return [Book(env.lengths) for env in net.stepped]


@pytest.mark.slow
def test_each_frame_of_each_lane_is_told_once_and_as_soon_as_it_has_come(network: Make) -> None:
    net = network(10**6, skew=5000.0)
    remote = net.join()
    assert remote.answers is not None
    net.reset(remote)
    began, frames = net.clock.now(), []
    for _ in range(600):
        rows, rewards, _, _, info = net.act(remote, [0] * LANES)
        assert (info["frames"] == info["frames"][0]).all()
        if info["frames"][0]:
            frames.append(int(rows[0][1]))
            assert rewards.tolist() == rows[:, 1].tolist() == [frames[-1]] * LANES
            assert net.clock.now() + 5000.0 - rows[0][3] <= 0.04 + 0.001
            assert np.allclose(info["latency"]["observation_age"], 0.04, atol=0.005)
    assert frames == list(range(1, len(frames) + 1))
    assert 600 / (net.clock.now() - began) >= 55
    assert len(frames) >= 590, "observations are told again only while the first ones are on their way"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_rough_network_keeps_the_rate_the_age_and_the_actions_of_lanes(network: Make, seed: int) -> None:
    """B-14, by the world's own clock: ±30 ms, and 2 % of the packets stall their stream for 200 ms."""
    net = network(10**6, num_envs=8, conditions=ROUGH, skew=-300.0, seed=seed)
    remote = net.join()
    net.reset(remote)
    for _ in range(200):  # until the clocks' offset is known
        net.act(remote, [0] * 8)
    began, ages, errors, sent = net.clock.now(), [], [], {}
    for number in range(1, 401):
        sent[number] = net.clock.now()
        rows, _, _, _, info = net.act(remote, [8 * number + lane for lane in range(8)])
        ages.append(net.clock.now() - 300.0 - rows[0][3])
        errors.append(abs(info["latency"]["observation_age"] - ages[-1]).max())
    assert 400 / (net.clock.now() - began) >= 55
    assert np.median(ages) <= 0.04 + 1.5 * FRAME
    assert max(errors) <= 0.005
    for lane, env in enumerate(net.stepped):
        first: dict[int, float] = {}
        for _, action, at in env.applied:
            assert not action or action % 8 == lane
            first.setdefault(action // 8, at + 300.0)
        late = [first[number] - at for number, at in sent.items() if number in first]
        assert np.median(late) <= 0.04 + FRAME


@pytest.mark.slow
@pytest.mark.parametrize("partial", sampled([False, True], 2))
@pytest.mark.parametrize(
    ("think", "steps", "conditions"), [(0.0, 240, STEADY), (0.05, 100, ROUGH), (0.3, 60, STEADY), (1.3, 25, ROUGH)]
)
def test_what_is_told_of_each_lane_adds_up_however_slow_the_client_is(
    network: Make, think: float, steps: int, conditions: Any, partial: bool
) -> None:
    net = network(conditions=conditions)
    remote = net.join(partial=partial)
    told = books(net)
    result = net.reset(remote)
    for _ in range(steps):
        rows, rewards, terminations, truncations, info = result
        assert not truncations.any()
        resetting = remote.realtime.resetting if partial else np.zeros(LANES, np.bool_)
        for lane, book in enumerate(told):
            book.take(rows[lane], rewards[lane], terminations[lane], info, lane, resetting=resetting[lane])
        net.run_for(think)
        result = net.act(remote, [0] * LANES)
    for book in told:
        assert sorted(book.records) == list(range(1, max(book.records) + 1))
        assert [episode for episode in book.entered if episode in book.records] == book.ended
        assert len(book.ended) >= 4


def test_a_client_slower_than_the_world_has_nothing_pile_up(network: Make) -> None:
    net = network(10, 25, 4, 18, 30, 41, 37, 29, num_envs=8, conditions=ROUGH)
    remote = net.join()
    net.reset(remote)
    ages = []
    for _ in range(20):
        net.run_for(0.7)
        kept = {id(shown.message) for lane in remote.answers.lanes for shown in lane.waiting}
        assert len(kept) <= 3, "two with ends, and the newest"
        rows, _, terminations, *_ = net.act(remote, [0] * 8)
        ages += (net.clock.now() - rows[~terminations, 3]).tolist()
        assert remote.answers.in_flight <= 64
        assert all(len(lane.waiting) <= 2 for lane in remote.answers.lanes)
    assert max(stream.most_waiting for stream in net.streams) <= 64
    assert np.median(ages) <= 0.04 + 1.5 * FRAME


def test_a_reset_of_some_lanes_leaves_the_others_as_they_are(network: Make) -> None:
    """U-9, with answers of old and new episodes in one message."""
    net = network(conditions=ROUGH)
    remote = net.join()
    told = books(net)
    result = net.reset(remote)
    for number in range(160):
        rows, rewards, terminations, truncations, info = result
        assert not truncations.any()
        for lane, book in enumerate(told):
            book.take(rows[lane], rewards[lane], terminations[lane], info, lane)
        if terminations.any() and number % 2:  # as BlockingReset with SAME_STEP
            result = net.reset(remote, terminations, restart=False)
        elif number % 20 == 10:
            mask = [True, False, False]
            told[0].cut_off()
            result = net.reset(remote, mask)
        else:
            net.run_for(0.03 * (number % 3))
            result = net.act(remote, [0] * LANES)
    assert all(len(book.ended) >= 4 for book in told)


def test_the_episodes_that_run_are_entered_in_a_world_that_was_just_joined(network: Make) -> None:
    """As after a loss while BlockingReset waits for next episodes with SAME_STEP."""
    net = network(10**6)
    remote = net.join()
    rows, rewards, _, _, _ = net.reset(remote, restart=False)
    assert (rows[:, 0].tolist(), rewards.tolist()) == ([1] * LANES, [0.0] * LANES)
    frames = [net.act(remote, [0] * LANES)[0][:, 1].tolist() for _ in range(20)]
    assert frames[-1] >= [10] * LANES


def test_a_reset_that_is_refused_leaves_a_world_that_can_be_reset(network: Make) -> None:
    net = network(10**6)
    remote = net.join()
    net.reset(remote)
    with pytest.raises(RefusedError, match="unknown Reset settings"):
        net.reset(remote, mask=[True, False, False], nonsense=1)
    rows, rewards, _, _, _ = net.reset(remote)
    assert (rows[:, 0].tolist(), rewards.any()) == ([2] * LANES, False)
    for _ in range(30):
        rows = net.act(remote, [0] * LANES)[0]
    assert (rows[:, 1] >= 20).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timing", np.zeros((LANES - 1, 13))),
        ("timing", np.full((LANES, 13), np.inf)),
        ("timing", np.zeros(7)),
        ("frames", np.zeros((2, 2), np.int64)),
        ("resetting", np.zeros(1, np.bool_)),
        ("reward", np.array(["a"] * LANES)),
        ("episodes", np.frombuffer(values.encode([{"lane": LANES, "episode": 1}]), np.uint8)),
        ("episodes", np.frombuffer(values.encode([{"lane": 0}]), np.uint8)),
        ("episodes", np.frombuffer(values.encode(5), np.uint8)),
        ("info", np.frombuffer(b"\xff\xff", np.uint8)),
    ],
)
def test_an_answer_that_cannot_be_read_loses_the_server(network: Make, name: str, value: Any) -> None:
    net = network(10**6)
    remote = net.join()
    net.reset(remote)
    net.run_for(0.1)
    uid = next(uid for uid, spec in remote.session.world.specs.observations.items() if spec.name == name)
    stream = net.streams[0]
    deliver = stream.deliver

    def spoil(data: Any) -> None:
        message = pb.EnvironmentResponse.FromString(bytes(data))
        message.step.observations[uid].CopyFrom(pack_tensor(value))
        deliver(message.SerializeToString())

    stream.deliver = spoil
    steps = (net.act(remote, [0] * LANES) for _ in range(10))
    with pytest.raises(PeerError, match="cannot be read"):
        deque(steps, maxlen=0)


def test_a_reset_ends_all_episodes_and_nothing_of_them_is_told_after(network: Make) -> None:
    net = network(100, conditions=ROUGH)
    remote = net.join()
    for number in range(1, 8):
        rows, rewards, _, _, info = net.reset(remote)
        assert not rewards.any()
        assert not info["frames"].any()
        episodes, totals = rows[:, 0].copy(), np.zeros(LANES)
        for _ in range(7 * number):
            rows, rewards, terminations, _, info = net.act(remote, [0] * LANES)
            totals += rewards
            assert rows[:, 0].tolist() == episodes.tolist()
            assert totals.tolist() == (rows[:, 1] * (rows[:, 1] + 1) / 2).tolist()
            assert not terminations.any()
    assert info["latency"]["stale"][0] > 0


def test_the_last_actions_of_all_lanes_go_on_while_the_network_stalls(network: Make) -> None:
    net = network(10**6)
    remote = net.join()
    net.reset(remote)
    for _ in range(30):
        net.act(remote, [7, 8, 9])
    link = net.streams[0].duplex.a.outgoing
    link.conditions = type(link.conditions)(delay=1.0)
    frames = len(net.stepped[0].applied)
    steps = 0
    while len(net.stepped[0].applied) < frames + 50:
        net.act(remote, [1, 2, 3])
        steps += 1
    for lane, env in enumerate(net.stepped):
        assert {action for _, action, _ in env.applied[frames:]} == {7 + lane}
    assert steps >= 45, "step does not wait for the network"


def test_an_action_is_applied_in_the_episode_of_its_lane_alone(network: Make) -> None:
    """U-5, with ends at different frames."""
    net = network(30, 11, 17)
    remote = net.join()
    rows = net.reset(remote)[0]
    for _ in range(200):
        rows = net.act(remote, rows[:, 0].astype(np.int64))[0]
    for env in net.stepped:
        assert {action - episode for episode, action, _ in env.applied if action} == {0}
        assert len({episode for episode, action, _ in env.applied if action}) >= 8
    assert net.loop.actions_dropped > 5


def test_a_lane_that_takes_long_to_reset_reads_as_resetting_and_delays_no_other(network: Make) -> None:
    """U-5, U-6."""
    net = network(20, 10**6, 10**6)
    remote = net.join(partial=True)
    net.reset(remote)
    net.stepped[0].failures = 3
    began, frames, missing = net.clock.now(), [], 0
    for _ in range(150):
        rows, rewards, terminations, _, info = net.act(remote, [5] * LANES)
        frames += [int(rows[1][1])] if info["frames"][1] else []
        resetting = remote.realtime.resetting
        assert not resetting[1:].any()
        missing += int(resetting[0])
        if resetting[0]:
            assert (rewards[0], info["frames"][0], terminations[0]) == (0.0, 0, False)
    assert 35 <= missing <= 60, "0.7 s: it is tried again after 0.1, 0.2 and 0.4 s"
    assert frames == list(range(frames[0], frames[0] + len(frames)))
    assert 150 / (net.clock.now() - began) >= 55


def test_each_failed_reset_of_a_lane_is_told_however_many_answers_are_left_out(network: Make) -> None:
    net = network(20, 10**6, 10**6)
    remote = net.join(partial=True)
    net.reset(remote)
    net.stepped[0].failures = 3
    errors = 0
    for _ in range(30):
        net.run_for(0.05)
        _, _, _, truncations, info = net.act(remote, [0] * LANES)
        failed = [("error" in lane_info(info, lane)) for lane in range(LANES)]
        assert not any(failed[1:])
        assert not truncations.any()
        errors += failed[0]
    assert errors == 3


def test_reset_world_truncates_all_lanes_and_their_next_episodes_follow(network: Make) -> None:
    """D-15: nobody has to send a Reset; the Steps in flight begin the next episodes."""
    net = network(10**6)
    remote = net.join()
    net.reset(remote)
    for _ in range(20):
        net.act(remote, [0] * LANES)
    other = net.stream()
    request = pb.EnvironmentRequest(reset_world=pb.ResetWorldRequest(world_name=net.world.name))
    net.runtime.scheduler.start(other.wrapped.answer(request), lambda answer, error: None)
    for _ in range(60):
        rows, _, _, truncations, _ = net.act(remote, [0] * LANES)
        assert truncations.all() == truncations.any()
        if truncations.any():
            break
    assert truncations.all()
    assert rows[:, 0].tolist() == [1] * LANES
    rows, rewards, _, truncations, _ = net.act(remote, [0] * LANES)
    assert (rows[:, 0].tolist(), rewards.tolist(), truncations.any()) == ([2] * LANES, [0.0] * LANES, False)
    for _ in range(20):
        rows = net.act(remote, [0] * LANES)[0]
    assert (rows[:, 1] > 10).all()
    other.close()


@pytest.mark.parametrize("wait", ["now", "next_frame"])
def test_what_a_step_of_lanes_waits_for_can_still_be_chosen(network: Make, wait: str) -> None:
    net = network(10**6)
    remote = net.join(join_settings={"wait": wait})
    assert remote.answers is None
    net.reset(remote)
    began = net.clock.now()
    for number in range(1, 11):
        rows = net.act(remote, [number, 100 + number, 200 + number])[0]
        if wait == "next_frame":
            assert rows[:, 2].tolist() == [number, 100 + number, 200 + number]
    assert net.clock.now() - began >= 10 * 0.08


def test_the_trajectory_of_each_lane_is_that_of_a_world_that_is_near(network: Make) -> None:
    """Which observations are seen may differ, but not what they are, nor the rewards up to each of them."""
    told = []
    for near in (True, False):
        net = network(conditions=type(STEADY)(delay=0.002) if near else STEADY)
        remote = net.join(join_settings={"wait": "next_frame"} if near else {})
        assert (remote.answers is None) is near
        result, sums = net.reset(remote), np.zeros(LANES)
        found: dict[tuple[int, float, float], tuple[float, bool]] = {}
        for _ in range(250):
            rows, rewards, terminations, _, info = result
            sums += rewards
            for lane in np.flatnonzero(info["frames"]).tolist():
                episode, frame = rows[lane, :2].tolist()
                found[lane, episode, frame] = sums[lane], terminations[lane]
            sums[terminations] = 0.0
            result = net.act(remote, [0] * LANES)
        told.append(found)
    here, there = told
    both = set(here) & set(there)
    assert len(both) >= 500
    assert {key: here[key] for key in both} == {key: there[key] for key in both}
