"""Spectators of worlds in lock-step: they receive what the environment returns to its players.

A spectator is an agent of the world's own kind, with a mirror as its environment. The mirror returns what the world's
environment returned to a player.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bridge.core.encoding.properties import PropertyTree
from bridge.core.encoding.tensors import Array
from bridge.core.worlds.base import Agent
from bridge.core.worlds.environment import EnvironmentProxy, Result
from bridge.core.worlds.hosts import refuse_private
from bridge.core.worlds.lock_step import LockStep
from bridge.core.worlds.scheduling import PendingResult
from bridge.core.worlds.world import EnvWorld
from bridge.errors import Code, RequestError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.web.watching.shared_steps import SharedSteps, Stretch

if TYPE_CHECKING:
    from bridge.web.watching.watch import Watch

__all__ = ["Mirror", "Spectator"]

BEGIN_TIMEOUT = 60.0
"""Seconds for which a spectator waits for an episode."""
STEP_TIMEOUT = 10.0
"""Seconds after which a spectator's Step returns, although nothing happened."""


class Mirror(EnvironmentProxy):
    """Returns what a world's environment returned to its players; unseen rewards are added up.

    Args:
        world: The world.
        steps: The results of the world's environment.
        waits: True if `step` waits for a new step of the world.
    """

    def __init__(self, world: EnvWorld, steps: SharedSteps, waits: bool) -> None:
        self._world = world
        self._steps = steps
        self._waits = waits
        EnvironmentProxy.__init__(self, world.env)
        self._lanes = self.facts.num_envs
        self._unseen: Stretch | None = None
        """The first steps that it has not returned; None: it is in no episode."""
        self._error: RequestError | None = None
        self.notes, self.failures, self.retried = [], {}, []

    def hang_up(self, error: RequestError) -> None:
        """Cancel a wait with an error."""
        self._error = self._error or error
        if (pending := self._steps.waiting.pop(self, None)) is not None:
            pending.set_result(None)

    def leave(self) -> None:
        """Stop watching. May be called twice."""
        unseen, self._unseen = self._unseen, None
        if unseen is not None:
            self._steps.leave(unseen)

    def _refuse_if_over(self) -> None:
        error = self._error or self._steps.error
        if error is not None:
            raise error

    async def _wait(self, seconds: float) -> bool:
        """Wait for a change; return True if there was one."""
        pending = self._steps.waiting[self] = PendingResult[None]()
        # The waiting result is None for a change and for a timeout, so the cause is recorded separately.
        expired = list[bool]()

        def expire() -> None:
            expired.append(True)
            pending.set_result(None)

        timer = self._world.scheduler.call_later(seconds, expire)
        try:
            await pending
        finally:
            timer.cancel()
            self._steps.waiting.pop(self, None)
        self._refuse_if_over()
        return not expired

    # Calls of the agent

    async def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Result:
        """Wait until an episode runs, and return its newest observation and info."""
        self.leave()
        self._refuse_if_over()
        while self._steps.newest is None or not self._steps.running:
            if not await self._wait(BEGIN_TIMEOUT):
                raise RequestError(
                    Code.DEADLINE_EXCEEDED,
                    f"nobody began an episode in this world within {BEGIN_TIMEOUT:g} s; Step again once somebody plays",
                )
        self._unseen = self._steps.begin()
        return self._steps.newest

    async def step(self, action: object, lane: int | None = None) -> Result:
        """Return everything since the last call as one transition; the action is ignored."""
        self._refuse_if_over()
        # Checked before waiting: steps since the last call are returned at once.
        transition = self._look()
        if transition is None and self._waits:
            await self._wait(STEP_TIMEOUT)
            transition = self._look()
        if transition is not None:
            return transition
        observation = None if self._steps.newest is None else self._steps.newest[0]
        if self._lanes is None:
            return observation, 0.0, False, False, {}
        nothing = np.zeros(self._lanes, np.bool_)
        return observation, np.zeros(self._lanes), nothing, nothing, {}

    def _look(self) -> Result | None:
        """Return the steps that were not returned yet as one transition; None if there are none."""
        if self._unseen is None:
            return None
        transition: Result | None = self._steps.look(self._unseen)
        if transition is not None:
            self.leave()
            self._unseen = self._steps.begin()
        return transition


class Spectator(Agent):
    """An agent that sees the results of a world in lock-step; its actions and resets have no effect.

    In a world of several agents it has no observations of its own.

    Args:
        world: The world to watch.
        watch: Provides the results of the world's environment.
        wait: What its Steps wait for: `next_frame` for the next step of the world, `now` for nothing.
    """

    def __init__(self, world: EnvWorld, watch: Watch, wait: str) -> None:
        self._world = world
        self._agent: Agent | None = None
        self._mirror: Mirror | None = None
        """Its view of the environment; None: the world has several agents."""
        self.actions, self.observations = {}, {}
        if not world.env.facts.agents:
            self._mirror = Mirror(world, watch.shared_steps, wait != "now")
            self._agent = EnvWorld(world.name, self._mirror, world.scheduler, LockStep()).join({})
            self.actions, self.observations = self._agent.actions, self._agent.observations

    def reset(self, settings: Mapping[str, pb.Tensor], running: bool) -> None:
        """Leave the watched episode; the next Step enters the episode that runs then."""
        if self._agent is not None:
            self._agent.reset(settings, running)

    async def begin(self) -> int:
        """Wait until an episode runs."""
        self._world.refuse_if_over()
        return pb.RUNNING if self._agent is None else await self._agent.begin()

    async def step(self, actions: Mapping[int, Array]) -> int:
        """Return what happened; actions are ignored."""
        self._world.refuse_if_over()
        return pb.RUNNING if self._agent is None else await self._agent.apply(None)

    def interrupt(self) -> None:
        """End the sequence."""
        if self._agent is not None:
            self._agent.interrupt()

    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return observations of the last transition."""
        return {} if self._agent is None else self._agent.observe(uids)

    @property
    def plays(self) -> bool:
        """Always False: it watches."""
        return False

    @property
    def watches(self) -> bool:
        """Always True."""
        return True

    def follow_names(self, names: str) -> None:
        """Send the names of attributes with the info after a reset changes them; the client has read `names`."""
        if self._agent is not None:
            self._agent.follow_names(names)

    def properties(self) -> PropertyTree:
        """Return the properties of the world."""
        return self._world.properties()

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Forward a request for a property."""
        self._world.refuse_if_over()
        return await self._world.env.answer_property(request)

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Forward a call; the session only passes calls that spectators may make."""
        refuse_private(request.name)
        self._world.refuse_if_over()
        return await self._world.env.call(request)

    def hang_up(self) -> None:
        """Cancel its wait."""
        if self._mirror is not None:
            self._mirror.hang_up(RequestError(Code.CANCELLED, "the client hung up while it waited"))

    def leave(self) -> None:
        """Stop watching; it has no seat in the world."""
        if self._mirror is not None:
            self._mirror.leave()
