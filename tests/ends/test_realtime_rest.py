"""A world that rests while nobody is in does the default action before: a robot must not stand with a motor on.

Frames come from a virtual clock that the test turns.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from pettingzoo import ParallelEnv

from bridge import RealTime, make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.core.encoding.tensors import pack_tensor
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import VirtualClock
from tests.ends.realtime import ready
from tests.peers import Stream
from tests.support import everywhere, until


class Arm(gymnasium.Env[Any, Any]):
    """Writes what it does to a file: the number of the action, or `reset`; a step of action 3 raises."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, log: str) -> None:
        self.log = Path(log)

    def _write(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{text}\n")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._write("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._write(str(action))
        if action == 3:
            raise RuntimeError("the gripper is stuck")
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def render(self) -> Any:
        return np.zeros((8, 8, 3), np.uint8)


class Arms(ParallelEnv):
    """Two arms of one robot."""

    metadata: dict[str, Any] = {"name": "arms"}  # noqa: RUF012 - as PettingZoo has it
    possible_agents = ["left", "right"]  # noqa: RUF012 - as PettingZoo has it

    def __init__(self) -> None:
        self.done: list[Any] = []

    def observation_space(self, agent: str) -> Any:
        return gymnasium.spaces.Box(-np.inf, np.inf, (1,))

    def action_space(self, agent: str) -> Any:
        return gymnasium.spaces.Discrete(4)

    def _all(self, value: Any) -> dict[str, Any]:
        return dict.fromkeys(self.agents, value)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = [*self.possible_agents]
        return self._all(np.zeros(1, np.float32)), self._all({})

    def step(self, actions: Any) -> Any:
        self.done.append(tuple(int(actions[agent]) for agent in self.agents))
        return self._all(np.zeros(1, np.float32)), self._all(0.0), self._all(False), self._all(False), self._all({})


class Robot:
    """The file of an arm, and the clock of its world."""

    def __init__(self, path: Path, clock: VirtualClock) -> None:
        self.path, self.clock = path, clock
        self.make = functools.partial(Arm, str(path))

    def done(self) -> list[str]:
        return self.path.read_text().split()

    def rests_after(self, wanted: list[str]) -> None:
        """Turn the clock until these are the last that the arm did, and then far on: nothing follows."""

        def reached() -> bool:
            self.clock.advance(0.1)
            return self.done()[-len(wanted) :] == wanted

        until(reached)
        count = len(self.done())
        self.clock.advance(5.0)
        assert self.done()[count:] == []


@pytest.fixture
def robot(tmp_path: Path, clock: VirtualClock) -> Robot:
    return Robot(tmp_path / "arm", clock)


@everywhere
def test_a_world_with_a_page_does_the_default_action_once_its_client_closes(serve: Any, robot: Robot) -> None:
    server = serve(robot.make, web=True, default_action=0)
    env = make_remote(f"{server.url}?world=")
    env.reset()
    env.step(2)
    robot.clock.advance(0.3)
    assert robot.done()[-1] == "2"
    env.close()
    robot.rests_after(["2", "0"])
    env = make_remote(f"{server.url}?world=")  # and goes on with the next
    env.reset()
    env.step(1)
    robot.clock.advance(0.1)
    assert robot.done()[-1] == "1"
    env.close()
    robot.rests_after(["1", "0"])


def test_a_world_with_a_page_does_the_default_action_once_its_client_is_cut_off(serve: Any, robot: Robot) -> None:
    server = serve(robot.make, web=True, default_action=0)
    client = Stream(server, own_connection=True)
    client.join("")
    client.ask(reset=pb.ResetRequest())
    client.ask(step=pb.StepRequest(requested_observations=[1]))
    client.ask(step=pb.StepRequest(actions={1: pack_tensor(np.int64(2))}))
    robot.clock.advance(0.3)
    assert robot.done()[-1] == "2"
    client.die()
    client.channel.close()
    robot.rests_after(["2", "0"])


def test_each_lane_does_the_default_action_before_the_world_rests(tmp_path: Path, clock: VirtualClock) -> None:
    robots = [Robot(tmp_path / name, clock) for name in ("left", "right")]
    left = iter(robots)
    realtime = RealTime(clock=clock, rest_when_empty=True)
    with serve_gym(lambda: next(left).make(), num_envs=2, fps=10, default_action=0, realtime=realtime) as server:
        envs = make_vec_remote(f"{server.url}?world=")
        envs.reset()
        ready(envs, [0, 0])
        envs.step([1, 2])
        clock.advance(0.3)
        assert [robot.done()[-1] for robot in robots] == ["1", "2"]
        envs.close()
        robots[0].rests_after(["1", "0"])
        robots[1].rests_after(["2", "0"])


def test_each_agent_does_the_default_action_before_the_world_rests(clock: VirtualClock) -> None:
    arms = Arms()
    realtime = RealTime(clock=clock, rest_when_empty=True)
    default = lambda agent, seen, space: 0  # noqa: E731
    with serve_parallel(lambda: arms, fps=10, default_action=default, realtime=realtime) as server:
        env = make_parallel_remote(f"{server.url}?world=")
        env.reset()
        env.step({"left": 1, "right": 2})
        clock.advance(0.3)
        assert arms.done[-1] == (1, 2)
        env.close()

        def stands() -> bool:
            clock.advance(0.1)
            return arms.done[-1] == (0, 0)

        until(stands)
        clock.advance(0.3)  # agents leave one after the other: a frame may have passed between
        count = len(arms.done)
        clock.advance(5.0)
        assert len(arms.done) == count


def test_a_world_whose_last_action_raised_is_reset_before_it_rests(serve: Any, robot: Robot) -> None:
    server = serve(robot.make, web=True, default_action=0)
    client = Stream(server, own_connection=True)
    client.join("")
    client.ask(reset=pb.ResetRequest())
    client.ask(step=pb.StepRequest(requested_observations=[1]))
    client.ask(step=pb.StepRequest(actions={1: pack_tensor(np.int64(3))}))
    robot.clock.advance(0.1)  # it raises, and is reset after 0.1 s: not before the clock is turned
    assert robot.done()[-1] == "3"
    client.die()
    client.channel.close()
    robot.rests_after(["3", "reset"])


def test_what_a_person_did_last_is_not_left_in_force(serve: Any, robot: Robot) -> None:
    """The trainer's action is too old, so the loop has chosen the default one; the person's stood in its place."""
    server = serve(robot.make, web=True, default_action=0, max_action_age=0.15)
    env = make_remote(f"{server.url}?world=")
    env.reset()
    env.step(2)
    robot.clock.advance(0.5)
    person = Stream(server, own_connection=True)
    person.join("", role="takeover", name="Ann")
    person.ask(step=pb.StepRequest(requested_observations=[1]))
    person.ask(step=pb.StepRequest(actions={1: pack_tensor(np.int64(1))}))
    robot.clock.advance(0.1)
    assert robot.done()[-1] == "1"
    person.die()
    person.channel.close()
    env.close()
    robot.rests_after(["1", "0"])
