"""A server of this process that commands look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import bridge
from bridge import serve_gym


@pytest.fixture(scope="module")
def cartpole() -> Iterator[bridge.Server]:
    with serve_gym("CartPole-v1") as server:
        yield server
