"""A server without a network, and a client of it."""

import pytest

from tests.core.server.sessions.peers import Server


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def peer(server):
    return server.connect()
