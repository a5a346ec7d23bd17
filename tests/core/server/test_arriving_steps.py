"""Steps of real-time worlds whose actions are applied when they arrive, while Steps before them are held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bridge import RealTime, serve_gym
from bridge.core.encoding import values
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import VirtualClock
from tests.far_network import Telling
from tests.peers import Stream
from tests.support import direct_registry, direct_session, gym_source, until

EPISODE = 2
"""The UID of the further action, which `world.episode_uid` says."""


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(10.0)


@pytest.fixture
def session(clock: VirtualClock) -> Iterator[Callable[..., Waiting]]:
    made: list[Any] = []

    def join(lanes: int | None = None, wait: str = "new_frame", length: int = 5) -> Waiting:
        more = {} if lanes is None else {"num_envs": lanes}
        source = gym_source(lambda: Telling((length,), clock.now), fps=10.0, realtime=RealTime(clock=clock), **more)
        made.append(direct_registry(source))
        return Waiting(made[-1], wait)

    yield join
    for registry in made:
        registry.close()


class Waiting:
    """A session whose requests wait for each other, as `Calls` has it: `send` never waits."""

    def __init__(self, registry: Any, wait: str) -> None:
        self.registry, self.runtime = registry, registry.runtime
        self.session = direct_session(registry).wrapped
        self.answers: list[pb.EnvironmentResponse] = []
        self._waiting: list[Any] = []
        self._busy = False
        self.begun: list[bool] = []
        """For each request that had to wait whether something was done when it came."""
        self.send(join_world=pb.JoinWorldRequest(settings={"wait": pack_tensor(wait)}))
        specs = self.answers.pop().join_world.specs
        self.uids = {spec.name: uid for uid, spec in specs.observations.items()}
        assert [spec.name for spec in specs.actions.values()] == ["action"], "what foreign clients have to give"

    def send(self, **payload: Any) -> None:
        data = pb.EnvironmentRequest(**payload).SerializeToString()
        begun = None
        if self._busy:
            begun = self.session.arrive(data, all(begun for _, begun in self._waiting))
            self.begun.append(begun is not None)
        self._waiting.append((data, begun))
        self.run()

    def run(self) -> None:
        while self.runtime.scheduler.ready:
            self.runtime.scheduler.run()
        while self._waiting and not self._busy:
            self._busy = True
            data, begun = self._waiting.pop(0)
            self.runtime.scheduler.start(begun() if begun else self.session.handle(data), self._done)
            while self.runtime.scheduler.ready:
                self.runtime.scheduler.run()

    def _done(self, parts: Any, error: BaseException | None) -> None:
        assert error is None, error
        self._busy = False
        self.answers.append(pb.EnvironmentResponse.FromString(b"".join(parts)))

    def step(self, *wanted: str | int, **actions: Any) -> None:
        uids = {"action": 1, "episode": EPISODE}
        packed = {uids[name]: pack_tensor(value) for name, value in actions.items()}
        requested = [self.uids[name] if isinstance(name, str) else name for name in wanted]
        self.send(step=pb.StepRequest(actions=packed, requested_observations=requested))

    def seen(self, name: str) -> Any:
        """An observation of the oldest answer."""
        answer = self.answers.pop(0)
        assert answer.WhichOneof("payload") == "step", answer
        return unpack_tensor(answer.step.observations[self.uids[name]])


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
def test_an_action_counts_when_it_arrives_while_the_steps_before_it_are_held(
    clock: VirtualClock, transport: Any
) -> None:
    realtime = RealTime(clock=clock)
    with serve_gym(lambda: Telling((10**6,), clock.now), fps=10, realtime=realtime, transport=transport) as server:
        player, watcher = Stream(server).join(wait="new_frame"), Stream(server).join(role="spectator")
        assert player.read_property("world.episode_uid") == EPISODE
        wanted = [player.uids["observation"]]
        player.ask(step=pb.StepRequest(requested_observations=wanted))
        player.send(step=pb.StepRequest(requested_observations=wanted))  # is held: there is no new frame
        for action in (3, 7):
            player.send(step=pb.StepRequest(actions={1: pack_tensor(action)}, requested_observations=wanted))
        until(lambda: values.decode(watcher.read_property("world.realtime").tobytes())["actions_replaced"] == 1)
        clock.advance(0.1)
        assert unpack_tensor(player.take().step.observations[wanted[0]])[1:3].tolist() == [1, 7]
        player.close()
        watcher.close()


def test_the_answers_say_when_each_step_came(session: Any, clock: VirtualClock) -> None:
    player = session()
    player.step("observation")
    player.answers.clear()
    player.step("frames", "timing")
    clock.advance(0.03)
    player.step("frames", "timing", action=1)
    clock.advance(0.08)
    player.run()
    assert player.seen("timing")[:2] == pytest.approx([10.0, 10.11])
    clock.advance(0.1)
    player.run()
    assert player.seen("timing")[0] == pytest.approx(10.03)


def test_a_step_that_is_refused_changes_nothing_also_when_it_waited(session: Any, clock: VirtualClock) -> None:
    """D-2, D-10, D-11."""
    player = session()
    player.step("observation")
    player.step("observation")
    player.step(99, action=7)
    player.step("observation", action=-3)
    player.step("timing", action=4)  # it has to wait for those before it
    assert player.begun == [False, False, False]
    clock.advance(0.1)
    player.run()
    codes = [answer.error.code for answer in player.answers[2:4]]
    assert player.answers[1].WhichOneof("payload") == "step"
    assert codes == [Code.INVALID_ARGUMENT] * 2
    assert unpack_tensor(player.answers[1].step.observations[player.uids["observation"]])[2] == 0
    del player.answers[:5]
    clock.advance(0.1)
    player.step("observation")
    assert player.seen("observation")[2] == 4


def test_a_step_overtakes_no_reset(session: Any, clock: VirtualClock) -> None:
    player = session()
    player.step("observation")
    player.step("observation")
    player.send(reset=pb.ResetRequest())
    player.step("observation")
    player.step("timing", action=7)
    assert player.begun == [False, True, False], "of a Step without an action it is only noted when it came"
    clock.advance(0.1)
    player.run()
    assert [answer.WhichOneof("payload") for answer in player.answers] == ["step", "step", "reset", "step", "step"]
    clock.advance(0.1)
    player.answers.clear()
    player.step("observation")
    assert player.seen("observation")[:3].tolist() == [2, 1, 7]


@pytest.mark.parametrize(("episode", "applied"), [(1, 7), (2, 0), (0, 0)])
def test_an_action_counts_in_the_episode_that_it_names_alone(
    session: Any, clock: VirtualClock, episode: int, applied: int
) -> None:
    player = session()
    player.step("observation")
    player.step("observation")
    player.step("timing", action=7, episode=episode)
    player.answers.clear()
    clock.advance(0.1)
    player.run()
    assert player.seen("observation")[2] == applied


def test_each_lane_has_the_number_of_its_own_episode(session: Any, clock: VirtualClock) -> None:
    player = session(lanes=2)
    player.step("observation")
    player.step("observation")
    player.step("timing", action=[3, 4], episode=[1, 2])
    player.answers.clear()
    clock.advance(0.1)
    player.run()
    assert player.seen("observation")[:, 2].tolist() == [3, 0]


@pytest.mark.parametrize("wait", ["now", "next_frame"])
def test_other_clients_notice_nothing(session: Any, clock: VirtualClock, wait: str) -> None:
    """Actions that are sent ahead have a frame each with `next_frame`, and there is no further action."""
    player = session(wait=wait, length=10**6)
    player.step("observation")
    player.step("observation", action=1, episode=1)
    assert player.answers[-1].error.code == Code.INVALID_ARGUMENT
    player.answers.clear()
    for action in (1, 2, 3):
        player.step("observation", action=action)
    if wait == "now":
        assert not player.begun
        return
    assert player.begun == [False, False]
    for _ in range(3):
        clock.advance(0.11)
        player.run()
    assert [player.seen("observation")[2] for _ in range(3)] == [1, 2, 3]


def test_the_step_that_acts_alone_does_not_take_the_end_by_a_reset_of_the_world(
    session: Any, clock: VirtualClock
) -> None:
    """D-15: the end is told by a Step that is told something."""
    player = session()
    player.step("observation")
    player.answers.clear()
    other = direct_session(player.registry).wrapped
    answers: list[Any] = []
    reset = pb.EnvironmentRequest(reset_world=pb.ResetWorldRequest())
    player.runtime.scheduler.start(other.answer(reset), lambda answer, error: answers.append(answer))
    player.runtime.scheduler.run()
    player.step("timing", action=7)
    player.step("observation")
    player.runtime.scheduler.run()
    assert [answer.step.state for answer in player.answers] == [pb.RUNNING, pb.INTERRUPTED]
    assert answers[0].WhichOneof("payload") == "reset_world"
