"""A server over real sockets, and a door at which steps of its environments can be held."""

import pytest

from bridge import serve_gym
from tests.core.server.http2.envs import Door, long
from tests.support import until


@pytest.fixture
def door():
    door = Door()
    yield door
    door.open.set()


@pytest.fixture
def server():
    with serve_gym(long) as server:
        yield server
        until(lambda: server.connections == 0)
        until(lambda: (server.status()["requests"], server.status()["queued_bytes"]) == (0, 0))
