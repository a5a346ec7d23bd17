"""What fails in a real-time world: a reset, a step, an observer, one of several lanes; and what goes on.

Frames come from a virtual clock that the test turns.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import (
    Listener,
    Observer,
    make_remote,
    make_vec_remote,
)
from bridge.core.encoding import values
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import (
    Code,
    EnvironmentFailedError,
    RequestError,
)
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import (
    CountingEnv,
    FailingEnv,
    LocalRuntime,
    VirtualClock,
)
from bridge.wrappers import BlockingReset
from tests.ends.realtime import LONG, Player, counting, ready
from tests.support import direct_world, everywhere, gym_source


@everywhere
def test_a_crash_of_one_slot_is_that_slots_alone(serve: Any, clock: VirtualClock) -> None:
    """Mistake: one crash raised for the whole vector."""
    crashing = iter([lambda: FailingEnv(fail_in_step=2, length=LONG), counting()])
    servers = [serve(next(crashing)), serve(next(crashing))]
    envs = make_vec_remote([server.url for server in servers])
    envs.reset()
    ready(envs, [0, 0])
    clock.advance(0.3)
    rows, _, terminations, truncations, infos = envs.step([0, 0])
    assert rows[0] is None
    assert rows[1].tolist() == [1, 3]
    assert truncations.tolist() == [True, False]
    assert not terminations.any()
    assert "TestFailure" in infos["error"][0]
    clock.advance(0.5)
    rows, _, _, truncations, _ = ready(envs, [0, 0])
    assert rows[0][0] > 1
    assert not truncations.any()
    envs.close()


@pytest.mark.parametrize("wait", ["now", "next_frame"])
def test_a_step_after_one_that_a_failure_refused_waits_for_the_next_episode(wait: str) -> None:
    env = FailingEnv(fail_in_step=2, fail_in_reset=2, length=LONG)
    player = Player(lambda: env, 10.0, wait)
    player.advance(0.2)
    player.step()
    assert "step 2 fails on purpose" in str(player.outcomes.pop()[1])
    player.step()
    assert player.outcomes == []
    player.advance(0.2)
    assert "reset 2 fails on purpose" in str(player.outcomes.pop()[1])
    player.step()
    player.advance(0.5)
    assert player.outcomes == [(pb.RUNNING, None)]
    assert player.agent.observe([1])[1][0] == 2
    player.world.close()


def test_steps_in_flight_behind_one_that_a_failure_refused_enter_no_episode() -> None:
    player = Player(lambda: FailingEnv(fail_in_step=2, length=LONG), 10.0, "new_frame")
    player.advance(0.2)
    player.step()
    assert "step 2 fails on purpose" in str(player.outcomes.pop()[1])
    player.step()
    assert player.outcomes.pop()[1].code == Code.FAILED_PRECONDITION
    player.world.close()


def test_a_reset_world_interrupts_an_agent_whose_last_step_a_failure_refused() -> None:
    player = Player(lambda: FailingEnv(fail_in_step=2, length=LONG), 10.0, "now")
    player.advance(0.2)
    player.step()
    assert "step 2 fails on purpose" in str(player.outcomes.pop()[1])
    player.agent.interrupt()
    uids = {spec.name: uid for uid, spec in player.agent.observations.items()}
    told = player.agent.observe(list(uids.values()))
    assert told[uids["observation"]].tolist() == [1, 0]
    assert (told[uids["reward"]], told[uids["truncated"]]) == (0.0, True)
    player.world.close()


class Taking(CountingEnv):
    """Takes what it has read out of the options."""

    def __init__(self) -> None:
        super().__init__(LONG)
        self.levels: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.levels.append((options or {}).pop("level", None))
        if len(self.levels) == 1:
            raise OSError("the level is still loading")
        return super().reset(seed=seed)


def test_each_reset_gets_all_options_although_another_takes_them_out() -> None:
    """Of each lane, and where one is tried again."""
    clock = VirtualClock()
    made = [Taking(), Taking()]
    factory = iter(made)
    source = gym_source(lambda: next(factory), fps=10.0, num_envs=2)
    world = direct_world(source, runtime=LocalRuntime(clock.now))
    agent = world.join({})
    options = np.frombuffer(values.encode({"level": 3}), np.uint8)
    agent.reset({"options": pack_tensor(options)}, False)
    for _ in range(3):
        clock.advance(0.1)
        world.runtime.scheduler.run()
    assert [env.levels for env in made] == [[3, 3], [3, 3]]
    world.close()


class Scaling(CountingEnv):
    """Doubles its action where it is, and keeps what it got."""

    def __init__(self) -> None:
        super().__init__(LONG, action_space=gymnasium.spaces.Box(-1, 1, (1,), np.float64))
        self.got: list[float] = []

    def step(self, action: Any) -> Any:
        self.got.append(float(action[0]))
        action *= 2
        return super().step(0)


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_action_goes_on_as_it_came_whatever_the_environment_makes_of_it(
    serve: Any, clock: VirtualClock, lanes: int
) -> None:
    """U-13: so does the default one, which is of all lanes and episodes."""
    made = [Scaling() for _ in range(lanes)]
    factory = iter(made)
    default = np.array([0.25])
    server = serve(lambda: next(factory), num_envs=lanes, default_action=default, max_action_age=0.25)
    envs = make_vec_remote(server.url)
    envs.reset()
    ready(envs, np.zeros((lanes, 1)))
    envs.step(np.full((lanes, 1), 0.5))
    clock.advance(0.4)
    assert [env.got for env in made] == [[0.5, 0.5, 0.25, 0.25]] * lanes
    assert default == [0.25]
    envs.close()


class Odd(CountingEnv):
    """Its `reset` returns None, or its `step` an array as reward."""

    def __init__(self, method: str) -> None:
        super().__init__(LONG)
        self.method = method

    def reset(self, **more: Any) -> Any:
        return None if self.method == "reset" else super().reset(**more)

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return (observation, np.array([reward]), *rest) if self.method == "step" else (observation, reward, *rest)


@everywhere
def test_what_no_reset_returns_is_a_failure_that_is_told(serve: Any) -> None:
    env = make_remote(serve(lambda: Odd("reset")).url, timeout=20.0)
    with pytest.raises(EnvironmentFailedError, match=r"reset\(\) of .* returned None, expected \(observation, info\)"):
        env.reset()
    env.close()


def test_what_an_observer_raises_is_told_in_the_log_of_the_server(
    serve: Any, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Listener):
        def stepped(self, lane: int | None, action: object, result: Any) -> Any:
            raise OSError("the disk is full")

    class Watching(Observer):
        def made(self, world: Any) -> Listener:
            return Failing()

    env = make_remote(serve(counting(), observers=[Watching()]).url, timeout=20.0)
    env.reset()
    clock.advance(0.1)
    env.step(0)  # it is the observer's fault, which ends nobody's episode
    assert any("Watching failed at stepped" in text and "the disk is full" in text for text in caplog.messages)
    env.close()


def test_an_observation_that_is_not_of_the_space_is_the_environment_s_failure_in_lanes_too(
    serve: Any, clock: VirtualClock
) -> None:
    class Wide(CountingEnv):
        def step(self, action: Any) -> Any:
            return np.zeros(3, np.int64), *super().step(action)[1:]

    envs = make_vec_remote(serve(lambda: Wide(LONG), num_envs=2).url)
    envs.reset()
    ready(envs, [0, 0])
    clock.advance(0.1)
    assert "the environment raised ValueError in step" in envs.step([0, 0])[4]["error"][0]
    envs.close()


def test_an_array_of_one_number_is_a_reward(serve: Any, clock: VirtualClock) -> None:
    env = make_remote(serve(lambda: Odd("step")).url, timeout=20.0)
    env.reset()
    clock.advance(0.2)
    assert env.step(0)[1] == 1.0 + 2.0
    env.close()


@everywhere
def test_a_crash_of_one_lane_is_that_lanes_alone(serve: Any, clock: VirtualClock) -> None:
    """Mistake: one crash raised for the whole vector; here within a world."""
    made = iter([FailingEnv(fail_in_step=2, length=LONG), CountingEnv(LONG)])
    envs = make_vec_remote(serve(lambda: next(made), num_envs=2).url)
    envs.reset()
    ready(envs, [0, 0])
    clock.advance(0.2)
    rows, rewards, terminations, truncations, infos = envs.step([0, 0])
    assert truncations.tolist() == [True, False]
    assert not terminations.any()
    assert rewards.tolist() == [1.0, 3.0]
    assert "TestFailure" in infos["n"][0]["error"]
    assert "error" not in infos["n"][1]
    assert envs.step([0, 0])[0][0] is None, "it pauses before it tries again"
    clock.advance(0.5)
    rows = ready(envs, [0, 0])[0]
    assert rows[0][0] == 2
    envs.close()


def test_an_environment_that_fails_in_every_reset_is_an_error_of_blocking_reset(serve: Any) -> None:
    class Broken(CountingEnv):
        def reset(self, **more: Any) -> Any:
            raise ValueError("no cartridge")

    envs = BlockingReset(make_vec_remote(serve(lambda: Broken()).url), timeout=20.0)
    with pytest.raises(EnvironmentFailedError, match="no cartridge"):
        envs.reset()
    envs.close()


def test_resets_that_fail_count_as_no_episodes() -> None:
    clock = VirtualClock()
    runtime = LocalRuntime(clock.now)
    world = direct_world(gym_source(lambda: FailingEnv(fail_in_reset=1), fps=10.0), runtime=runtime)
    agent = world.join({})
    with pytest.raises(RequestError, match="reset 1 fails on purpose"):
        agent.begin()
    agent.reset({}, False)
    agent.begin()
    assert (world.counts().steps, world.counts().episodes) == (0, 0)
    agent.reset({}, True)
    agent.begin()
    assert (world.counts().steps, world.counts().episodes) == (0, 1)
    world.close()
