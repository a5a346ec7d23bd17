"""What tests of real-time worlds share: environments that count, steps until there is something, and a player."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from bridge import RemoteVectorEnv
from bridge.core.encoding.tensors import pack_tensor
from bridge.testing import CountingEnv, LocalRuntime, VirtualClock
from tests.support import direct_world, gym_source

LONG = 10**9


def counting(length: int = LONG, **more: Any) -> Callable[[], CountingEnv]:
    return lambda: CountingEnv(length, **more)


def ready(envs: RemoteVectorEnv, actions: Any) -> tuple[Any, ...]:
    """Step until every slot has an observation; at most for 10 s."""
    deadline = time.monotonic() + 10.0
    while True:
        result = envs.step(actions)
        if all(row is not None for row in result[0]):
            return result
        assert time.monotonic() < deadline, "no observation came"


class Player:
    """The player of a world without a server, in its first episode; the time is the test's."""

    def __init__(self, env: Callable[[], gymnasium.Env[Any, Any]], fps: float, wait: str) -> None:
        self.clock = VirtualClock()
        self.runtime = LocalRuntime(self.clock.now)
        self.world = direct_world(gym_source(env, fps=fps), runtime=self.runtime)
        self.agent = self.world.join({"wait": pack_tensor(wait)})
        self.agent.begin()
        self.outcomes: list[Any] = []
        """The state and the error of each Step that was answered."""

    def step(self) -> None:
        coroutine = self.agent.wrapped.step({1: np.int64(1)})
        self.runtime.scheduler.start(coroutine, lambda *outcome: self.outcomes.append(outcome))

    def advance(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            self.runtime.scheduler.run()
            self.runtime.run_until(lambda: not self.runtime.scheduler.ready)
