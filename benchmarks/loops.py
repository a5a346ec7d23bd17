"""The loops that several subjects share: step until the time is over, count, divide."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, VectorEnv

from benchmarks.registry import Measure

__all__ = ["async_stepping", "sampled_actions", "stepping", "vector_stepping"]


def stepping(step: Callable[[Any], object], actions: Sequence[Any], env_steps: int) -> Measure:
    """Return a measure of env steps per second.

    Args:
        step: Steps, and waits for the result.
        actions: What it is given, one after the other, again and again.
        env_steps: Steps of environments in each call.
    """

    def measure(seconds: float) -> float:
        count = 0
        start = time.perf_counter()
        end = start + seconds
        while (now := time.perf_counter()) < end:
            step(actions[count % len(actions)])
            count += 1
        return count * env_steps / (now - start)

    return measure


def sampled_actions(space: gymnasium.Space[Any]) -> list[Any]:
    """Return actions sampled beforehand: sampling 64 of them costs as much as stepping 64 CartPoles."""
    space.seed(0)
    return [space.sample() for _ in range(64)]


def vector_stepping(envs: VectorEnv[Any, Any, Any]) -> Measure:
    """Reset a vector environment and return a measure of its env steps per second."""
    actions = sampled_actions(envs.action_space)
    envs.reset(seed=0)
    return stepping(envs.step, actions, envs.num_envs)


def async_stepping(make: Callable[[], gymnasium.Env[Any, Any]], count: int, module: str) -> Iterator[Measure]:
    """Give a measure of Gymnasium's AsyncVectorEnv.

    Args:
        make: Makes an environment.
        count: How many.
        module: What registers them.
    """
    context = multiprocessing.get_context("forkserver")  # not by a fork of this process, which runs gRPC's threads
    context.set_forkserver_preload([module, "gymnasium.vector"])
    envs = AsyncVectorEnv([make] * count, shared_memory=True, context="forkserver")
    try:
        yield vector_stepping(envs)
    finally:
        envs.close(terminate=True)
