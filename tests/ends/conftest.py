"""Servers of real-time worlds whose frames come from a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bridge import RealTime, Server, serve_gym
from bridge.testing import CountingEnv, VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def serve(clock: VirtualClock, isolation: Any) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(env: Any = CountingEnv, fps: float = 10.0, max_action_age: float | None = None, **more: Any) -> Server:
        realtime = RealTime(clock=clock, max_action_age=max_action_age)
        servers.append(serve_gym(env, fps=fps, realtime=realtime, isolation=isolation, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
