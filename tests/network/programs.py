"""Programs that several tests run on their machines."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import bridge
from bridge.wrappers import BlockingReset

PORT = 50051


def serve(env: Any = "CartPole-v1", keywords: dict[str, Any] | None = None) -> Iterator[str]:
    """Serve to the network, IPv4 and IPv6; yield the URL, then serve until a signal or the machine's end."""
    warnings.filterwarnings("ignore", "listening on", RuntimeWarning)  # no strangers are on a test's network
    with bridge.serve_gym(
        env, **{"host": "::", "port": PORT, "auth": bridge.Auth(insecure=True), **(keywords or {})}
    ) as server:
        yield server.url
        server.wait()


def steps(url: str, count: int, **keywords: Any) -> int:
    """Make some steps; return how many."""
    env = bridge.make_remote(url, **keywords)
    env.reset(seed=0)
    made = 0
    for _ in range(count):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        made += 1
        if terminated or truncated:
            env.reset()
    env.close()
    return made


def vector_shape(urls: Any, slots: int, **keywords: Any) -> tuple[int, ...]:
    """Make a vector environment, reset it and step it; return the shape of its observations."""
    envs = BlockingReset(bridge.make_vec_remote(urls, num_envs=slots, **keywords))
    envs.reset(seed=0)
    for _ in range(5):
        observations, *_ = envs.step(envs.action_space.sample())
    envs.close()
    return tuple(observations.shape)
