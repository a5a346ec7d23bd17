"""The second stream of an agent in real time, and Steps that are held, as any client of the protocol sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf import any_pb2

from bridge import RealTime
from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from bridge.testing import VirtualClock
from tests.far_network import Telling
from tests.support import direct_registry, direct_session, gym_source


class Player:
    """A stream of a client that is in a world with one environment, and what it knows."""

    def __init__(self, registry: Any, **settings: str) -> None:
        self.session, self.runtime = direct_session(registry), registry.runtime
        packed = {key: pack_tensor(value) for key, value in settings.items()}
        joined = self.ask(pb.EnvironmentRequest(join_world=pb.JoinWorldRequest(settings=packed)))
        assert joined.WhichOneof("payload") == "join_world", joined
        specs = joined.join_world.specs
        self.uids = {spec.name: uid for uid, spec in specs.observations.items()}
        self.actions = {spec.name: uid for uid, spec in specs.actions.items()}

    def ask(self, request: pb.EnvironmentRequest) -> pb.EnvironmentResponse:
        return pb.EnvironmentResponse.FromString(self.session.handle(request.SerializeToString()))

    def start(self, request: pb.EnvironmentRequest) -> list[pb.EnvironmentResponse]:
        """Ask without a wait; the answer is in the list once it is there."""
        answers: list[pb.EnvironmentResponse] = []
        asked = self.session.wrapped.answer(request)
        self.runtime.scheduler.start(asked, lambda answer, error: answers.append(answer))
        self.runtime.scheduler.run()
        return answers

    def step(self, *wanted: str, **actions: int) -> pb.EnvironmentRequest:
        packed = {self.actions[name]: pack_tensor(value) for name, value in actions.items()}
        uids = [self.uids[name] for name in wanted]
        return pb.EnvironmentRequest(step=pb.StepRequest(actions=packed, requested_observations=uids))

    def seen(self, answer: pb.EnvironmentResponse, name: str) -> Any:
        return unpack_tensor(answer.step.observations[self.uids[name]])

    def property(self, **fields: Any) -> pb.EnvironmentResponse:
        body = any_pb2.Any(
            type_url=PROPERTY_REQUEST_URL, value=properties_pb2.PropertyRequest(**fields).SerializeToString()
        )
        return self.ask(pb.EnvironmentRequest(extension=body))

    def seat(self) -> str:
        answer = self.property(read_property=properties_pb2.ReadPropertyRequest(key="world.seat"))
        body = properties_pb2.PropertyResponse.FromString(answer.extension.value)
        return str(unpack_tensor(body.read_property.value)[()])

    def write_wait(self, wait: str) -> pb.EnvironmentResponse:
        return self.property(
            write_property=properties_pb2.WritePropertyRequest(key="world.wait", value=pack_tensor(wait))
        )


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(10.0)


@pytest.fixture
def registry(clock: VirtualClock) -> Iterator[Any]:
    made = direct_registry(gym_source(lambda: Telling((5,), clock.now), fps=10.0, realtime=RealTime(clock=clock)))
    yield made
    made.close()


def test_the_action_of_the_second_stream_is_applied_while_the_first_one_waits(
    registry: Any, clock: VirtualClock
) -> None:
    player = Player(registry, wait="new_frame")
    assert player.ask(player.step("observation")).step.state == pb.RUNNING
    acting = Player(registry, seat=player.seat())
    acting.ask(acting.step("timing"))
    waiting = player.start(player.step("observation", "frames"))
    answer = acting.ask(acting.step("timing", action=7, episode=1))
    assert acting.seen(answer, "timing").tolist() == [10.0, 10.0]
    assert not waiting
    clock.advance(0.1)
    assert player.seen(waiting[0], "observation")[:3].tolist() == [1, 1, 7]
    assert player.seen(waiting[0], "frames") == 1
    clock.advance_to(10.35)
    late = player.ask(player.step("observation", "frames"))
    assert player.seen(late, "frames") == 2, "a frame has passed that it was not told of: there is nothing to wait for"


def test_an_action_for_another_episode_than_the_running_one_is_dropped(registry: Any, clock: VirtualClock) -> None:
    player = Player(registry, wait="new_frame")
    player.ask(player.step("observation"))
    acting = Player(registry, seat=player.seat())
    acting.ask(acting.step("timing"))
    acting.ask(acting.step("timing", action=7, episode=2))
    clock.advance(0.1)
    answer = player.ask(player.step("observation", "timing"))
    assert player.seen(answer, "observation")[2] == 0
    assert player.seen(answer, "timing")[9] == 1


def test_steps_that_were_sent_before_the_end_was_seen_begin_no_episode(registry: Any, clock: VirtualClock) -> None:
    player = Player(registry)
    wrote = player.write_wait("new_frame")
    assert wrote.WhichOneof("payload") == "extension"
    player.ask(player.step("observation"))
    clock.advance(1.0)
    assert player.ask(player.step("observation")).step.state == pb.TERMINATED
    for _ in range(3):
        refused = player.ask(player.step("observation"))
        assert refused.error.code == Code.FAILED_PRECONDITION
        assert "send Reset" in refused.error.message
    player.ask(pb.EnvironmentRequest(reset=pb.ResetRequest(settings={"restart": pack_tensor(False)})))
    assert player.ask(player.step("observation")).step.state == pb.RUNNING


def test_what_a_second_stream_cannot_do_is_said(registry: Any) -> None:
    player = Player(registry)
    player.ask(player.step("observation"))
    stranger = direct_session(registry)
    join = pb.JoinWorldRequest(settings={"seat": pack_tensor("guessed")})
    answer = pb.EnvironmentResponse.FromString(
        stranger.handle(pb.EnvironmentRequest(join_world=join).SerializeToString())
    )
    assert answer.error.code == Code.NOT_FOUND
    assert "world.seat" in answer.error.message
    acting = Player(registry, seat=player.seat())
    acting.ask(acting.step("timing"))
    refused = acting.ask(pb.EnvironmentRequest(reset=pb.ResetRequest()))
    assert refused.error.code == Code.FAILED_PRECONDITION
    lacking = acting.ask(acting.step("timing", action=1))
    assert lacking.error.code == Code.INVALID_ARGUMENT
    assert "'episode'" in lacking.error.message
    wrong = player.write_wait("tomorrow")
    assert wrong.error.code == Code.INVALID_ARGUMENT
    assert "new_frame" in wrong.error.message
    player.session.close()
    gone = acting.ask(acting.step("timing", action=1, episode=1))
    assert gone.error.code == Code.FAILED_PRECONDITION
    assert "left" in gone.error.message


def test_frames_that_nobody_was_told_of_are_counted_over_unseen_episodes(registry: Any, clock: VirtualClock) -> None:
    player = Player(registry)
    player.ask(player.step("observation"))
    clock.advance(2.3)
    ended = player.ask(player.step("observation", "timing"))
    assert (ended.step.state, player.seen(ended, "timing")[12]) == (pb.TERMINATED, 4)
    frames = int(player.seen(ended, "timing")[6])
    first = player.ask(player.step("observation", "timing"))
    episode, frame = player.seen(first, "observation")[:2].tolist()
    passed = 5 * (episode - 1) + frame
    assert frames == 23
    assert episode > 2
    assert player.seen(first, "timing")[12] == passed - 1 - (frame > 0)
    clock.advance(0.1)
    newest = player.ask(player.step("observation", "timing"))
    assert player.seen(newest, "timing")[12] == passed - 1 - (frame > 0)


def test_the_numbers_of_lanes_are_those_of_their_episodes(clock: VirtualClock) -> None:
    source = gym_source(lambda: Telling((5,), clock.now), num_envs=2, fps=10.0, realtime=RealTime(clock=clock))
    registry = direct_registry(source)
    player = Player(registry, wait="new_frame")
    player.ask(player.step("observation"))
    acting = Player(registry, seat=player.seat())
    acting.ask(acting.step("timing"))
    waiting = player.start(player.step("observation", "frames"))
    actions = {acting.actions["action"]: pack_tensor([3, 4]), acting.actions["episode"]: pack_tensor([1, 2])}
    acting.ask(pb.EnvironmentRequest(step=pb.StepRequest(actions=actions)))
    assert not waiting
    clock.advance(0.1)
    assert player.seen(waiting[0], "observation")[:, 2].tolist() == [3, 0]
    assert np.array_equal(player.seen(waiting[0], "frames"), [1, 1])
    registry.close()
