"""Spectators of worlds that wait for their agents: they see what the environment returns to those who play.

A spectator has an agent of the world's own kind, whose environment is a mirror: it returns what the world's environment
returned to somebody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bridge.encoding.properties import PropertyTree
from bridge.encoding.tensors import Array
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.worlds.base import Agent
from bridge.worlds.environment import EnvironmentProxy, Result
from bridge.worlds.observers import Listener
from bridge.worlds.scheduling import PendingResult
from bridge.worlds.single import EnvAgent, EnvWorld

__all__ = ["Mirror", "Spectator"]

BEGIN_TIMEOUT = 60.0
"""Seconds that a spectator waits for an episode."""
STEP_TIMEOUT = 10.0
"""Seconds after which a spectator is told that nothing happened."""


class _MirroredWorld:
    """Stands for a world to an agent that watches.

    Args:
        world: The world.
        env: What the agent sees of its environment.
    """

    def __init__(self, world: EnvWorld, env: Mirror) -> None:
        self._world = world
        self.env = env

        self.episodes = 0
        self.properties = world.properties
        self.refuse_if_over = world.refuse_if_over

    def vacate(self, agent: EnvAgent) -> None:
        """Nothing: it has no seat in the world."""


class Mirror(Listener, EnvironmentProxy):
    """Returns what a world's environment returned to somebody else; rewards that were not seen are added up.

    Args:
        world: The world.
        waits: Whether `step` waits for something new.
    """

    def __init__(self, world: EnvWorld, waits: bool) -> None:
        self._world = world
        self._waits = waits
        EnvironmentProxy.__init__(self, world.env)
        self._lanes = self.facts.num_envs
        self._newest = world.newest
        """Observation and info of the world's running episode; None: it has none yet."""
        self._running = self._newest is not None
        self._entered = False
        self._transition: list[Any] | None = None
        """The steps to tell: observation, reward, terminated, truncated, info."""
        self._changed: PendingResult[None] = PendingResult()
        self._error: RequestError | None = None
        self.notes = []

    # What the environment does

    def began(self, lane: int | None, result: Result, mask: Array | None) -> None:
        """Take what `reset` returned."""
        self._newest, self._running = result, True
        self._wake()

    def stepped(self, lane: int | None, action: object, result: Result) -> Result:
        """Take what `step` returned."""
        observation, reward, terminated, truncated, info = result
        self._newest = observation, info
        self._running = self._lanes is not None or not (terminated or truncated)
        told = self._transition
        if self._entered and not (told is not None and self._lanes is None and (told[2] or told[3])):
            if told is not None:
                reward = told[1] + reward
                terminated, truncated = np.logical_or(told[2], terminated), np.logical_or(told[3], truncated)
            self._transition = [observation, reward, terminated, truncated, info]
        self._wake()
        return result

    def over(self, error: RequestError) -> None:
        """Note that the world has ended, or that nobody waits any longer."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        pending, self._changed = self._changed, PendingResult()
        pending.set_result(None)

    async def _wait(self, seconds: float) -> bool:
        """Wait for a change; return whether there was one."""
        pending, expired = self._changed, list[bool]()

        def expire() -> None:
            expired.append(True)
            pending.set_result(None)

        timer = self._world.scheduler.call_later(seconds, expire)
        try:
            await pending
        finally:
            timer.cancel()
        if self._error is not None:
            raise self._error
        return not expired

    # What the agent asks for

    async def reset(self, *, seed: object = None, options: object = None) -> Result:
        """Wait until an episode runs, and return its newest observation and info."""
        self._transition, self._entered = None, False
        if self._error is not None:
            raise self._error
        while self._newest is None or not self._running:
            if not await self._wait(BEGIN_TIMEOUT):
                raise RequestError(
                    Code.DEADLINE_EXCEEDED,
                    f"nobody began an episode in this world within {BEGIN_TIMEOUT:g} s; Step again once somebody plays",
                )
        self._entered = True
        return self._newest

    async def step(self, action: object) -> Result:
        """Return what happened since the last call; the action is dropped."""
        if self._error is not None:
            raise self._error
        if self._transition is None and self._waits:
            await self._wait(STEP_TIMEOUT)
        transition, self._transition = self._transition, None
        if transition is not None:
            return tuple(transition)
        observation = None if self._newest is None else self._newest[0]
        if self._lanes is None:
            return observation, 0.0, False, False, {}
        nothing = np.zeros(self._lanes, np.bool_)
        return observation, np.zeros(self._lanes), nothing, nothing, {}


class Spectator(Agent):
    """Sees what the environment of a world in lock-step returns; its actions and resets change nothing.

    Of a world of several agents it has no observations of its own.

    Args:
        world: What it looks at.
        wait: What its Steps wait for: `next_frame` for the next step of the world, `now` for nothing.
    """

    def __init__(self, world: EnvWorld, wait: str) -> None:
        self._world = world
        self._agent: EnvAgent | None = None
        self.tap: Mirror | None = None
        """The news of the environment; None: there is none."""
        self.actions, self.observations = {}, {}
        if not world.env.facts.agents:
            self.tap = Mirror(world, wait != "now")
            self._agent = world.make_agent(_MirroredWorld(world, self.tap))
            self.actions, self.observations = self._agent.actions, self._agent.observations

    def reset(self, settings: Mapping[str, pb.Tensor], running: bool) -> None:
        """Leave the episode that it looks at; the next Step enters the one that runs then."""
        if self._agent is not None:
            self._agent.reset(settings, running)

    async def begin(self) -> int:
        """Wait until an episode runs."""
        self._world.refuse_if_over()
        return pb.RUNNING if self._agent is None else await self._agent.begin()

    async def step(self, actions: Mapping[int, Array]) -> int:
        """Tell what happened; there may be actions, which are dropped."""
        self._world.refuse_if_over()
        return pb.RUNNING if self._agent is None else await self._agent.apply(None)

    def interrupt(self) -> None:
        """End the sequence."""
        if self._agent is not None:
            self._agent.interrupt()

    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return observations of the last transition."""
        return {} if self._agent is None else self._agent.observe(uids)

    def properties(self) -> PropertyTree:
        """Return the properties of the world."""
        return self._world.properties()

    def hang_up(self) -> None:
        """End its wait."""
        if self.tap is not None:
            self.tap.over(RequestError(Code.CANCELLED, "the client hung up while it waited"))

    def leave(self) -> None:
        """Nothing: it has no seat in the world."""
