"""The loops that several subjects share: step until the time is over, count, divide."""

from __future__ import annotations

import time
from typing import Any

from gymnasium.vector import VectorEnv

from benchmarks.registry import Measure

__all__ = ["vector_stepping"]


def vector_stepping(envs: VectorEnv[Any, Any, Any]) -> Measure:
    """Reset a vector environment and return a measure of its env steps per second.

    Actions are sampled beforehand: sampling 64 of them costs as much as stepping 64 CartPoles.
    """
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(64)]
    envs.reset(seed=0)

    def measure(seconds: float) -> float:
        count = 0
        start = time.perf_counter()
        end = start + seconds
        while (now := time.perf_counter()) < end:
            envs.step(actions[count % len(actions)])
            count += 1
        return count * envs.num_envs / (now - start)

    return measure
