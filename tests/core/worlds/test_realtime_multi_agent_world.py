"""Real-time worlds of several agents without a network: players of this process, and the clock given by the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge.core.encoding.tensors import pack_tensor
from bridge.core.worlds.realtime.multi_agent import Frame, JointClock
from bridge.errors import Code, RequestError
from bridge.testing import CountingEnv, LocalRuntime, VirtualClock
from tests.parallel_envs import NAMES, Relay
from tests.support import direct_world, everywhere, parallel_source

LONG = {"horizon": 10**6, "distances": (10**6,) * 3}


class Host:
    """A world in a runtime whose time the test turns."""

    def __init__(self, env: Any, isolation: Any = None, **options: Any) -> None:
        self.clock = VirtualClock(50.0)
        self.runtime = LocalRuntime(self.clock.now)
        source = parallel_source(env, isolation=isolation, **{"fps": 8.0, **options})
        world = direct_world(source, name="match", runtime=self.runtime).wrapped
        assert isinstance(world.pacer, JointClock)
        self.world, self.pacer = world, world.pacer
        self.frames: list[Frame] = []
        self.unsubscribe = self.pacer.subscribe(self.frames.append)

    def advance(self, frames: int) -> None:
        """Let the time of so many frames pass, and their calls return."""
        for _ in range(frames):
            self.clock.advance(1 / 8)
            self.settle()

    @property
    def idle(self) -> bool:
        return self.pacer.loop.next_due() is None

    def settle(self) -> None:
        """Let the call return that is due."""
        before = len(self.frames)
        self.runtime.run_until(lambda: len(self.frames) > before)

    def join_two(self) -> tuple[Any, Any, list[BaseException | None]]:
        """Let in ann and bob, and have ann begin; return them, and a list that gets the outcome of her first Step."""
        ann, bob = self.world.join({"agent": pack_tensor("ann")}), self.world.join({"agent": pack_tensor("bob")})
        begun: list[BaseException | None] = []
        self.runtime.scheduler.start(ann.begin(), lambda state, error: begun.append(error))
        self.runtime.scheduler.run()
        return ann, bob, begun

    def close(self) -> None:
        self.runtime.run(self.world.close())


@pytest.fixture
def host(isolation: Any) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def make(env: Any, **options: Any) -> Host:
        hosts.append(Host(env, isolation, **options))
        return hosts[-1]

    yield make
    for one in hosts:
        one.close()


@everywhere
def test_players_act_and_are_told_of_each_frame(host: Callable[..., Host]) -> None:
    """Each frame's observations, rewards and ends by agent; who has no player gets its default action."""
    here = host(lambda: Relay(horizon=3, distances=(3, 100, 100)))
    ann, bob = here.pacer.enter("ann"), here.pacer.enter("bob")
    here.pacer.begin_episode(seed=5)
    here.settle()
    (first,) = here.frames
    assert (first.episode, first.number, first.at, list(first.alive)) == (1, 0, 50.0, list(NAMES))
    local = Relay(horizon=3, distances=(3, 100, 100))
    observations, infos = local.reset(seed=5)
    for name, seen in first.transitions.items():
        np.testing.assert_equal(seen.observation, observations[name])
        assert (seen.reward, seen.ended, seen.info) == (0.0, False, infos[name])
    assert ann.act(np.int64(2))
    here.advance(3)
    if len(here.frames) == 4:
        here.settle()  # the next episode's reset, in another process
    second, third, last, renewed = here.frames[1:]
    assert [frame.number for frame in (second, third, last, renewed)] == [1, 2, 3, 0]
    assert [frame.at for frame in (second, third, last)] == [50.125, 50.25, 50.375]
    assert [frame.transitions["ann"].reward for frame in (second, third)] == [2.0, 2.0]
    assert (third.transitions["ann"].terminated, list(third.alive)) == (True, ["bob", "cyd"])
    assert set(last.transitions) == {"bob", "cyd"}
    assert last.transitions["bob"].truncated
    assert list(last.alive) == []
    assert (renewed.episode, list(renewed.alive)) == (2, list(NAMES))
    assert not here.pacer.loop.agent_lanes["ann"].unused, "its action was of the episode before"
    bob.leave()


def test_an_agent_has_one_player_at_a_time(host: Callable[..., Host]) -> None:
    here = host(lambda: Relay(**LONG))
    ann = here.pacer.enter("ann")
    assert here.pacer.enter().name == "bob"
    with pytest.raises(RequestError, match="'ann' is taken; there are still cyd") as refused:
        here.pacer.enter("ann")
    assert refused.value.code == Code.RESOURCE_EXHAUSTED
    with pytest.raises(RequestError, match="expected one of the agents ann, bob, cyd, got 'dan'"):
        here.pacer.enter("dan")
    here.pacer.begin_episode()
    here.settle()
    assert ann.act(np.int64(2))
    here.advance(1)
    ann.leave()
    ann.leave()
    assert not ann.act(np.int64(1)), "who has left acts no more"
    here.advance(1)
    assert [frame.transitions["ann"].reward for frame in here.frames[1:]] == [2.0, 0.0]
    heir = here.pacer.enter("ann")
    assert heir.act(np.int64(1)), "it is in the running episode at once"
    here.advance(1)
    assert here.frames[-1].transitions["ann"].reward == 1.0


def test_without_autoreset_each_episode_waits_for_begin(host: Callable[..., Host]) -> None:
    """The clock stands between episodes, and starts anew with each, so that no frame of a pause is made up for."""
    here = host(lambda: Relay(horizon=2), autoreset=False)
    here.pacer.start()
    assert here.pacer.loop.next_due() is None
    here.clock.advance(100.0)
    here.pacer.begin_episode(seed=1)
    here.settle()
    assert here.pacer.loop.next_due() == 150.125
    here.advance(2)
    assert [frame.number for frame in here.frames] == [0, 1, 2]
    assert here.pacer.loop.next_due() is None
    here.clock.advance(100.0)
    here.runtime.scheduler.run()
    assert len(here.frames) == 3
    here.pacer.begin_episode()
    here.settle()
    here.advance(1)
    assert [(frame.episode, frame.number, frame.at) for frame in here.frames[3:]] == [(2, 0, 250.25), (2, 1, 250.375)]
    assert here.pacer.loop.dropped == here.pacer.loop.overruns == 0


def test_begin_cuts_a_running_episode_off(host: Callable[..., Host]) -> None:
    here = host(lambda: Relay(**LONG), autoreset=False)
    here.pacer.begin_episode()
    here.settle()
    here.advance(2)
    here.pacer.begin_episode(seed=4, options={"time": 3})
    here.settle()
    assert [(frame.episode, frame.number) for frame in here.frames] == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert here.frames[-1].transitions["ann"].observation.tolist() == [0, 0, 0, 3]


def test_an_episode_that_is_ended_leaves_the_clock_standing(host: Callable[..., Host]) -> None:
    here = host(lambda: Relay(**LONG), autoreset=False)
    here.pacer.begin_episode()
    here.settle()
    here.advance(2)
    here.pacer.end_episode()
    here.pacer.end_episode()
    assert here.idle
    here.clock.advance(100.0)
    here.runtime.scheduler.run()
    assert len(here.frames) == 3
    here.pacer.begin_episode()
    here.settle()
    here.advance(1)
    assert [(frame.episode, frame.number) for frame in here.frames[3:]] == [(2, 0), (2, 1)]


@everywhere
def test_a_failure_is_told_and_ends_the_episode(host: Callable[..., Host]) -> None:
    here = host(lambda: Relay(fail_at=1), autoreset=False)
    here.pacer.begin_episode()
    here.settle()
    here.advance(2)
    failed = here.frames[-1]
    assert failed.error is not None
    assert "a shoe came off" in failed.error
    assert (failed.transitions, list(failed.alive)) == ({}, [])
    assert here.idle
    here.pacer.begin_episode()
    here.settle()
    assert (here.frames[-1].episode, here.frames[-1].error) == (2, None)


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_the_death_of_the_environments_process_is_told(host: Callable[..., Host]) -> None:
    class Dying(Relay):
        def step(self, actions: Any) -> Any:
            import os

            os._exit(3)

    here = host(Dying)
    here.pacer.begin_episode()
    here.settle()
    here.clock.advance(1 / 8)
    here.settle()
    assert here.frames[-1].error is not None
    assert "exit" in here.frames[-1].error
    assert not here.world.alive


def test_an_agent_whose_episode_is_cut_off_before_it_came_in_waits_for_the_next(host: Callable[..., Host]) -> None:
    """Its first Step was about to be answered when another agent's Reset came."""
    here = host(lambda: Relay(**LONG))
    ann, bob, begun = here.join_two()
    assert len(here.frames) == 1
    assert not begun, "its coroutine goes on with the next run of the scheduler"
    bob.reset({}, False)
    here.runtime.run_until(lambda: bool(begun))
    (observed,) = ann.observe([1]).values()
    assert observed.tolist() == [0, 0, 0, 0]
    assert [frame.episode for frame in here.frames] == [1, 2]
    ann.leave()
    bob.leave()


def test_a_client_that_hangs_up_waits_for_nothing_any_more(host: Callable[..., Host]) -> None:
    """D-16: also in the moment between the news that it waits for and its answer."""
    here = host(lambda: Relay(**LONG))
    ann, bob, begun = here.join_two()
    bob.reset({}, False)
    ann.hang_up()
    here.runtime.scheduler.run()
    (error,) = begun
    assert isinstance(error, RequestError)
    assert "the client hung up while it waited" in error.message


def test_a_listener_that_raises_stops_nobody(host: Callable[..., Host], caplog: Any) -> None:
    here = host(lambda: Relay(**LONG))

    def broken(frame: Frame) -> None:
        raise RuntimeError("oh")

    here.pacer.subscribe(broken)
    late: list[Frame] = []
    here.pacer.subscribe(late.append)()
    here.pacer.begin_episode()
    here.settle()
    here.advance(2)
    assert [frame.number for frame in here.frames] == [0, 1, 2]
    assert "a listener of the world 'match' raised" in caplog.text
    assert late == []
    here.unsubscribe()
    here.unsubscribe()


def test_a_gymnasium_environment_is_a_world_of_one_agent(host: Callable[..., Host]) -> None:
    here = host(lambda: gymnasium.wrappers.TimeLimit(CountingEnv(10**9), 2), autoreset=False)
    player = here.pacer.enter()
    assert player.name == "agent0"
    here.pacer.begin_episode(seed=3)
    here.settle()
    assert player.act(np.int64(1))
    here.advance(2)
    first, _, last = (frame.transitions["agent0"] for frame in here.frames)
    assert first.info["seed"] == 3
    assert (last.observation.tolist(), last.truncated, last.terminated) == ([1, 2], True, False)
    assert here.idle


def test_a_repeated_action_that_the_mask_forbids_gives_way_to_the_default_one(host: Callable[..., Host]) -> None:
    """U-13: an agent's last action goes on only as long as it is allowed; a new one is the agent's own business."""

    class Masked(Relay):
        def observation_space(self, agent: str) -> Any:
            box = gymnasium.spaces.Box(0, 1, (3,), np.int8)
            return gymnasium.spaces.Dict({"action_mask": box})

        def _see(self, agent: str) -> Any:
            return {"action_mask": np.array([0, 1, self.time % 2 == 0], np.int8)}

    here = host(lambda: Masked(**LONG))
    ann = here.pacer.enter("ann")
    here.pacer.begin_episode()
    here.settle()
    assert ann.act(np.int64(2))
    here.advance(3)
    ann.act(np.int64(0))
    here.advance(1)
    rewards = [frame.transitions["ann"].reward for frame in here.frames[1:]]
    assert rewards == [2.0, 1.0, 2.0, 0.0]
