"""Races between an agent and a world that does not wait, in virtual time over a delaying link."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import Conditions, CountingEnv
from tests.realtime_tools import Network, read
from tests.support import Later, direct_registry, direct_session, gym_source

Make = Callable[..., Network]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Network] = []

    def make(env: Any = CountingEnv, fps: float = 100.0, delay: float = 0.25, **more: Any) -> Network:
        made.append(Network(monkeypatch, env, fps, Conditions(delay=delay), **more))
        return made[-1]

    yield make
    for item in made:
        item.close()


def test_a_server_that_refuses_a_world_holds_nobody_up_while_it_is_left(network: Make) -> None:
    net = network()
    remote = net.remote()
    remote.close(0.0)
    net.closings.clear()
    remote.open()
    net.refuse(remote)  # CreateWorld, after which the default world is asked for
    lost = net.refuse(remote)
    assert lost is not None
    assert not remote.connected
    assert net.closings == [0.0]


def step(net: Network, remote: Any, action: int = 0) -> Any:
    net.answers.clear()
    remote.step(action)
    net.run_until(lambda: bool(net.answers))
    return read(remote, net.answers.pop())


def begin(net: Network, remote: Any, *, reset: bool) -> Any:
    net.answers.clear()
    remote.begin({}, reset=reset)
    net.run_until(lambda: bool(net.answers))
    return read(remote, net.answers.pop())


def test_every_return_arrives_under_500_ms_of_delay_with_episodes_of_100_ms(network: Make) -> None:
    """Acceptance 3. Mistake: a client two episodes behind silently lost the middle one."""
    net = network(lambda: CountingEnv(10), fps=100.0, delay=0.5)
    remote = net.remote()
    returns: dict[int, float] = {}
    ends = 0
    transition = begin(net, remote, reset=True)
    started = net.clock.now()
    while net.clock.now() < started + 60.0:
        for record in transition[4].get("episodes", ()):
            assert record["episode"] not in returns, "each end is told exactly once"
            returns[record["episode"]] = record["return"]
            assert (record["length"], record["terminated"]) == (10, True)
        ended = transition[2] or transition[3]
        ends += ended
        transition = begin(net, remote, reset=False) if ended else step(net, remote)
    assert set(returns.values()) == {55.0}
    assert sorted(returns) == list(range(1, len(returns) + 1)), "none is missing"
    # 0.5 s are under way at the end, 5 episodes, and the last Step's 0.5 s there and 0.5 s back.
    assert len(returns) >= (60.0 - 1.5) / 0.1
    assert ends >= 25, "each round trip of 1 s shows an end, and the next one a beginning"


def test_ends_in_an_answer_that_a_reset_overtakes_are_not_lost(network: Make) -> None:
    """Mistakes: a late message of an older episode marked the live one done; and returns were lost with it."""
    net = network(lambda: CountingEnv(10), fps=100.0, delay=0.25)
    remote = net.remote()
    begin(net, remote, reset=True)
    net.run_until(net.clock.now() + 0.5)
    remote.step(0)  # its answer holds the ends of episodes, and TERMINATED
    net.run_until(net.clock.now() + 0.15)  # so that the reset comes in the midst of an episode
    remote.begin({}, reset=True)  # and nobody waits for it any more
    net.run_until(lambda: bool(net.answers))
    observation, reward, terminated, truncated, info = read(remote, net.answers.pop())
    assert (reward, terminated, truncated) == (0.0, False, False), "the end of the old episode is not the new one's"
    assert info["latency"]["stale"] == 1
    numbers = [record["episode"] for record in info["episodes"]]
    assert numbers == list(range(1, len(numbers) + 1)), "the returns in the stale answer were kept"
    assert len(numbers) >= 7
    assert observation[0] == len(numbers) + 2, "one episode was cut off by the reset, and is no finished one"


def test_the_reward_of_a_finished_episode_arrives_with_its_end(network: Make) -> None:
    """Mistakes: the terminal observation was never delivered; a reward after `done` revived the episode."""
    net = network(lambda: CountingEnv(30), fps=100.0, delay=0.01)
    remote = net.remote()
    begin(net, remote, reset=True)
    total, frames, ends = 0.0, 0, []
    for _ in range(40):
        observation, reward, terminated, _, info = step(net, remote)
        total, frames = total + reward, frames + info["frames"]
        if terminated:
            ends.append((observation.tolist(), total, frames))
            assert info["episodes"][-1]["final_obs"].tolist() == observation.tolist()
            total = frames = 0
            _, reward, terminated, truncated, info = begin(net, remote, reset=False)
            assert (reward, terminated, truncated, info["frames"]) == (0.0, False, False, 0)
    assert len(ends) >= 2
    assert [total for _, total, _ in ends] == [sum(range(31))] * len(ends), "each reward counts for its own episode"
    assert [frames for _, _, frames in ends] == [30] * len(ends)
    assert [observation[1] for observation, _, _ in ends] == [30] * len(ends)


def test_a_second_end_is_never_inferred(network: Make) -> None:
    """Mistake: a finished episode was ended twice."""
    net = network(lambda: CountingEnv(5), fps=10.0, delay=0.0)
    remote = net.remote()
    begin(net, remote, reset=True)
    net.run_until(net.clock.now() + 0.55)
    assert step(net, remote)[2]
    assert not begin(net, remote, reset=False)[2]
    assert not step(net, remote)[2]
    assert not step(net, remote)[2]


def test_an_action_that_arrives_after_its_episode_is_not_applied(network: Make) -> None:
    """U-5: 250 ms late, into an episode of 100 ms."""
    seen: list[int] = []

    class Watching(CountingEnv):
        def step(self, action: Any) -> Any:
            seen.append(int(action))
            return super().step(action)

    net = network(lambda: Watching(10), fps=100.0, delay=0.25)
    remote = net.remote()
    begin(net, remote, reset=True)
    _, _, terminated, _, info = step(net, remote, action=1)
    assert terminated
    assert set(seen) == {0}, "the default action: the agent's came too late for its episode"
    assert info["latency"]["actions_dropped"] == 1
    assert info["latency"]["actions_applied"] == 0


def test_the_clock_offset_holds_the_true_one_over_a_delaying_link(network: Make) -> None:
    """U-11: round trip, age of the observation, clock offset as an interval, frames skipped, action delay."""
    net = network(lambda: CountingEnv(10**6), fps=100.0, delay=0.05, skew=5000.0)
    remote = net.remote()
    begin(net, remote, reset=True)
    for _ in range(3):
        latency = step(net, remote)[4]["latency"]
        assert latency["clock_offset_low"] <= 5000.0 <= latency["clock_offset_high"]
        assert latency["clock_offset_high"] - latency["clock_offset_low"] == pytest.approx(0.1, abs=0.001)
        assert latency["round_trip"] == pytest.approx(0.1)
        assert latency["observation_age"] == pytest.approx(0.055, abs=0.0051), "50 ms under way, up to 10 ms old"
    assert latency["action_delay"] <= 0.01 + 1e-6
    assert latency["frames_skipped"] == pytest.approx(3 * 9, abs=2)
    assert latency["actions_applied"] == 2, "the third one's frame has not come"


def test_a_world_goes_on_while_its_agent_thinks(network: Make) -> None:
    """U-1, U-13: the lag shows in the frames."""
    net = network(lambda: CountingEnv(10**6), fps=60.0, delay=0.0)
    remote = net.remote()
    begin(net, remote, reset=True)
    net.run_until(net.clock.now() + 2.0)
    observation, _, _, _, info = step(net, remote)
    assert observation[1] == info["frames"] == 120
    assert info["latency"]["frames_skipped"] == 119


def test_reset_world_begins_anew_once_the_others_were_told(network: Make) -> None:
    """D-15 in real time: each agent's next Step is INTERRUPTED, with the rest of its rewards."""
    net = network(lambda: CountingEnv(10**6), fps=100.0, delay=0.0)
    remote = net.remote()
    begin(net, remote, reset=True)
    net.run_until(net.clock.now() + 0.1)
    other = direct_session(net.registry)
    settings = {"seed": pack_tensor(5)}
    request = pb.EnvironmentRequest(reset_world=pb.ResetWorldRequest(world_name=net.world.name, settings=settings))
    answers: list[pb.EnvironmentResponse] = []
    net.registry.runtime.scheduler.start(other.wrapped.answer(request), lambda answer, error: answers.append(answer))
    assert net.world.resets.is_due(net.session._agent.wrapped)
    assert net.loop.lanes[0].episode == 1, "nothing is reset before somebody was told"
    observation, reward, terminated, truncated, _ = step(net, remote)
    assert (observation.tolist(), reward, terminated, truncated) == ([1, 10], 55.0, False, True)
    net.registry.runtime.scheduler.run()
    assert answers[0].WhichOneof("payload") == "reset_world"
    other.close()
    observation, _, _, _, info = begin(net, remote, reset=False)
    assert observation.tolist() == [2, 0]
    assert info["seed"] == 5


def test_a_first_step_that_waits_ends_when_its_client_hangs_up() -> None:
    """Nothing hangs: a dead client's request does not wait for a slow reset."""
    registry = direct_registry(gym_source(lambda: CountingEnv(5), fps=50.0))
    runtime, session = registry.runtime, direct_session(registry)
    session.answer(pb.EnvironmentRequest(join_world=pb.JoinWorldRequest()))
    runtime.executor, answers = Later(), []
    registry.worlds[0].env.executor = runtime.executor
    request = pb.EnvironmentRequest(step=pb.StepRequest())
    runtime.scheduler.start(session.wrapped.answer(request), lambda answer, error: answers.append(answer))
    while not runtime.executor.begun:
        runtime.scheduler.run()
    assert answers == []
    session.hang_up()
    runtime.scheduler.run()
    assert answers[0].error.code == Code.CANCELLED
    session.close()
    runtime.executor.release(runtime)
    registry.close()
