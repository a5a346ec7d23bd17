"""A server of a match whose clock the test turns, and its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import bridge
from bridge import RealTime
from bridge.testing import VirtualClock
from tests.parallel_envs import Relay
from tests.web.matches.clients import FPS, Client, still


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def serve(clock: VirtualClock, isolation: Any) -> Iterator[Callable[..., bridge.Server]]:
    servers: list[bridge.Server] = []

    def start(env: Any = Relay, **options: Any) -> bridge.Server:
        given = {
            "fps": FPS,
            "realtime": RealTime(clock=clock),
            "isolation": isolation,
            "match": True,
            "agents": still,
            **options,
        }
        servers.append(bridge.serve_parallel(env, **given))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def connect(server: bridge.Server) -> Client:
        made.append(Client(server, own_connection=True))
        return made[-1]

    yield connect
    for one in made:
        one.die()
        one.channel.close()
