"""Steps in flight in real-time worlds that are far away, in virtual time: what `step` tells, and how old it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from bridge.core.encoding.tensors import unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from tests.far_network import ROUGH, STEADY, FarNetwork, Telling
from tests.support import sampled

FRAME = 1 / 60
Make = Callable[..., FarNetwork]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[FarNetwork] = []

    def make(lengths: tuple[int, ...] = (10**6,), **more: Any) -> FarNetwork:
        made.append(FarNetwork(monkeypatch, lambda now: Telling(lengths, now), **more))
        return made[-1]

    yield make
    for item in made:
        item.close()


def env_of(net: FarNetwork) -> Telling:
    return net.made[-1]


def test_each_frame_is_told_once_and_as_soon_as_it_has_come(network: Make) -> None:
    net = network(skew=5000.0)
    remote = net.remote()
    net.begin(remote)
    began, frames = net.clock.now(), []
    for _ in range(600):
        observation, reward, _, _, info = net.step(remote)
        if info["frames"]:
            frames.append(int(observation[1]))
            assert reward == observation[1]
            assert net.clock.now() + 5000.0 - observation[3] <= 0.04 + 0.001
    assert frames == list(range(1, len(frames) + 1))
    assert 600 / (net.clock.now() - began) >= 55
    assert len(frames) >= 590, "observations are told again only while the first ones are on their way"


def test_an_action_takes_effect_within_half_a_round_trip_and_a_frame(network: Make) -> None:
    net = network()
    remote = net.remote()
    net.begin(remote)
    sent = {}
    for number in range(1, 301):
        sent[number] = net.clock.now()
        net.step(remote, number)
    net.run_for(0.2)
    first: dict[int, float] = {}
    for _, action, at in env_of(net).applied:
        first.setdefault(action, at)
    late = [first[number] - at for number, at in sent.items() if number in first]
    assert len(late) >= 250
    assert max(late) <= 0.04 + FRAME + 0.001


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(3), 3))
def test_a_rough_network_keeps_the_rate_the_age_and_the_actions(network: Make, seed: int) -> None:
    """B-14, by the world's own clock: ±30 ms, and 2 % of the packets stall their stream for 200 ms."""
    net = network(conditions=ROUGH, skew=-300.0, seed=seed)
    remote = net.remote()
    net.begin(remote)
    for _ in range(300):  # until the clocks' offset is known
        net.step(remote)
    began, ages, errors, sent = net.clock.now(), [], [], {}
    for number in range(1, 1801):
        sent[number] = net.clock.now()
        observation, _, _, _, info = net.step(remote, number)
        ages.append(net.clock.now() - 300.0 - observation[3])
        errors.append(abs(info["latency"]["observation_age"] - ages[-1]))
    assert 1800 / (net.clock.now() - began) >= 55
    assert np.median(ages) <= 0.04 + 1.5 * FRAME
    assert max(errors) <= 0.005
    first: dict[int, float] = {}
    for _, action, at in env_of(net).applied:
        first.setdefault(action, at + 300.0)
    late = [first[number] - at for number, at in sent.items() if number in first]
    assert np.median(late) <= 0.04 + FRAME


@pytest.mark.slow
@pytest.mark.parametrize(
    ("think", "conditions"), sampled([(0.3, STEADY), (0.0, ROUGH), (0.0, STEADY), (0.05, STEADY), (0.4, ROUGH)], 4)
)
def test_rewards_ends_and_skipped_frames_add_up_however_slow_the_client_is(
    network: Make, think: float, conditions: Any
) -> None:
    net = network((7, 40, 1, 3, 90), conditions=conditions)
    remote = net.remote()
    entered: dict[int, list[float]] = {}
    told: dict[int, dict[str, Any]] = {}
    ended: list[int] = []
    seen: set[tuple[int, int]] = set()
    observation, reward, terminated, _, info = net.begin(remote)
    for _ in range(200):
        episode, frame = int(observation[0]), int(observation[1])
        rewards = entered.setdefault(episode, [])
        rewards.append(reward)
        if len(rewards) == 1:
            assert (reward, info["frames"], terminated) == (0.0, 0, False), "the first of an episode tells no reward"
        if frame:
            seen.add((episode, frame))
        for record in info.get("episodes", ()):
            assert record["episode"] not in told, "each end is told exactly once"
            told[record["episode"]] = record
        if terminated:
            assert sum(rewards) == told[episode]["return"] == sum(range(told[episode]["length"] + 1))
            assert frame == told[episode]["length"], "the last observation is never skipped"
            ended.append(episode)
        lengths = [(7, 40, 1, 3, 90)[number % 5] for number in range(episode - 1)]
        assert info["latency"]["frames_skipped"] + len(seen) == sum(lengths) + frame
        net.run_for(think)
        observation, reward, terminated, _, info = net.step(remote)
    assert sorted(told) == list(range(1, max(told) + 1))
    assert [episode for episode in entered if episode in told] == ended
    assert len(ended) >= 4


def test_a_client_slower_than_the_world_has_nothing_pile_up(network: Make) -> None:
    net = network((50,), conditions=ROUGH)
    remote = net.remote()
    net.begin(remote)
    ages = []
    for _ in range(30):
        net.run_for(0.7)
        observation, _, terminated, *_ = net.step(remote)
        if not terminated:  # the end of an episode is told, however old it is
            ages.append(net.clock.now() - observation[3])
        answers = remote.answers
        assert answers is not None
        assert answers.in_flight <= 64
        assert len(answers.lanes[0].waiting) <= 2
    assert max(stream.most_waiting for stream in net.streams) <= 64
    assert np.median(ages) <= 0.04 + 1.5 * FRAME


def test_a_client_that_takes_nothing_is_sent_no_more_than_it_asked_for(network: Make, monkeypatch: Any) -> None:
    net = network()
    remote = net.remote()
    net.begin(remote)
    net.step(remote)
    answers = remote.answers
    assert answers is not None
    asked = answers.in_flight
    net.taking = False
    net.run_for(5.0)
    assert len([number for _, number, *_ in net.poller.items if number > 0]) == asked + 1, "and the action's"
    assert asked <= 10


def test_the_last_action_goes_on_while_the_network_stalls(network: Make) -> None:
    net = network()
    remote = net.remote()
    net.begin(remote)
    for _ in range(60):
        net.step(remote, 7)
    link = net.streams[0].duplex.a.outgoing
    link.conditions = type(link.conditions)(delay=1.0)
    frames = len(env_of(net).applied)
    steps = 0
    while net.clock.now() < 105.0 and len(env_of(net).applied) < frames + 50:
        net.step(remote, 8)
        steps += 1
    assert {action for _, action, _ in env_of(net).applied[frames:]} == {7}
    assert steps >= 45, "step does not wait for the network"


def test_of_many_actions_on_a_stalled_stream_the_newest_counts(network: Make) -> None:
    net = network()
    remote = net.remote()
    net.begin(remote)
    outgoing = net.streams[-1].duplex.a.outgoing
    outgoing.conditions = type(outgoing.conditions)(delay=2.0)
    for number in range(1, 151):
        net.step(remote, number)
    assert remote.answers is not None
    assert outgoing.in_flight <= 64 + remote.answers.in_flight
    net.run_for(5.0)
    assert env_of(net).applied[-1][1] == 150


def test_a_step_is_not_told_the_same_for_ever(network: Make) -> None:
    """A server that is gone is noticed: the observation is told again for 5 s, and then the step's timeout runs."""
    net = network()
    remote = net.remote()
    net.begin(remote)
    net.step(remote)
    for stream in net.streams:
        stream.duplex.b.outgoing.conditions = type(STEADY)(loss=1.0)
    end = net.clock.now() + 4.0
    while net.clock.now() < end:
        net.step(remote)
    net.clock.advance(2.0)
    answers = remote.answers
    assert answers is not None
    assert answers.wait(net.clock.now(), repeats=True) == float("inf")


def test_an_action_for_an_episode_that_is_over_is_not_applied_to_the_next(network: Make) -> None:
    """U-5."""
    net = network((30,))
    remote = net.remote()
    observation = net.begin(remote)[0]
    for _ in range(300):
        observation = net.step(remote, int(observation[0]))[0]
    assert {(episode, action) for episode, action, _ in env_of(net).applied if action} == {
        (episode, episode) for episode in range(1, env_of(net).episode + 1)
    } - {(env_of(net).episode, env_of(net).episode)} | {
        (episode, action) for episode, action, _ in env_of(net).applied[-5:] if action
    }
    assert net.loop.actions_dropped > 5


def test_a_reset_ends_the_episode_and_nothing_of_it_is_told_after(network: Make) -> None:
    net = network((100,), conditions=ROUGH)
    remote = net.remote()
    seen: set[tuple[int, int]] = set()
    for number in range(1, 12):
        observation, reward, _, _, info = net.begin(remote)
        episode = int(observation[0])
        assert (reward, info["frames"]) == (0.0, 0)
        total, before = 0.0, -1
        for _ in range(7 * number):
            frame = int(observation[1])
            assert int(observation[0]) == episode
            assert frame >= before
            assert total == sum(range(frame + 1)) or before < 0 < frame
            seen |= {(episode, frame)} if frame else set()
            before = frame
            observation, reward, terminated, _, info = net.step(remote)
            total += reward
            assert not terminated
    passed = net.loop.lanes[0].frames
    assert info["latency"]["stale"] > 0
    behind = passed - info["latency"]["frames_skipped"] - len(seen)
    assert 0 <= behind <= 30, "those on their way"


def test_all_goes_over_one_stream(network: Make) -> None:
    net = network()
    remote = net.remote()
    net.begin(remote)
    for number in range(1, 100):
        net.step(remote, number)
    net.run_for(0.3)
    assert env_of(net).applied[-1][1] == 99
    assert len(net.streams) == 1


def test_at_a_server_that_applies_actions_in_their_turn_each_step_waits_for_its_answer(network: Make) -> None:
    """Older servers of this package have no `world.episode_uid`."""

    def without(answer: bytes) -> bytes:
        message = pb.EnvironmentResponse.FromString(answer)
        body = properties_pb2.PropertyResponse.FromString(message.extension.value)
        value = unpack_tensor(body.read_property.value) if body.HasField("read_property") else np.zeros(())
        if value.shape == () and value.dtype == np.int64 and value == 2:
            message.error.code = int(Code.NOT_FOUND)
        return message.SerializeToString()

    net = network()
    net.rewrite = without
    remote = net.remote()
    assert remote.answers is None
    net.rewrite = bytes
    net.begin(remote)
    for number in range(1, 11):
        observation, _, _, _, info = net.step(remote, number)
        assert observation[2] == number - 1, "the frames while the action was on its way"
        assert info["latency"]["round_trip"] == pytest.approx(0.08, abs=0.001)
    assert len(net.streams) == 1


@pytest.mark.parametrize("wait", ["now", "next_frame"])
def test_what_a_step_waits_for_can_still_be_chosen(network: Make, wait: str) -> None:
    net = network()
    remote = net.remote(join_settings={"wait": wait})
    assert remote.answers is None
    net.begin(remote)
    began = net.clock.now()
    for number in range(1, 11):
        observation = net.step(remote, number)[0]
        if wait == "next_frame":
            assert observation[2] == number, "the frame that used the action"
    assert net.clock.now() - began >= 10 * 0.08


def test_a_world_that_is_near_answers_each_step_by_itself(network: Make) -> None:
    net = network(conditions=type(STEADY)(delay=0.002))
    assert net.remote().answers is None
    assert len(net.streams) == 1


def test_a_spectator_sees_each_frame_and_changes_nothing(network: Make) -> None:
    net = network()
    player = net.remote(url="grpc://virtual:1/?world=")
    net.begin(player)
    for _ in range(60):
        net.step(player, 5)
    watcher = net.remote(url="grpc://virtual:1/?world=", join_settings={"role": "spectator"})
    net.begin(watcher)
    frames = []
    for _ in range(120):
        observation, _, _, _, info = net.step(watcher, 6)
        frames += [int(observation[1])] if info["frames"] else []
    assert frames == list(range(frames[0], frames[0] + len(frames)))
    assert len(frames) >= 110
    assert {action for _, action, _ in env_of(net).applied} <= {0, 5}
    assert info["latency"]["round_trip"] == pytest.approx(0.08, abs=0.001)


def test_a_world_is_left_whose_connection_another_thread_ends_meanwhile(network: Make) -> None:
    """The garbage collector closes environments that were dropped, in whichever thread it runs."""
    net = network()
    remote = net.remote()
    (stream,) = net.streams
    stream.on_send = lambda: remote.finish(0.0)
    remote.leave()
    assert stream.closed
