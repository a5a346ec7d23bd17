"""Hundreds of slots over several servers in one pool. What a slot costs is measured by `benchmarks/slots.py`."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from bridge import Endpoint, make_vec_remote, serve_gym
from bridge.wrappers import BlockingReset
from tests.planned_env import Episodes, Planned

SERVERS, SLOTS = 8, 256


class Listed:
    """A directory whose list the test changes."""

    def __init__(self, *urls: str) -> None:
        self.listed = [Endpoint(url, slots=SLOTS // SERVERS) for url in urls]

    def endpoints(self) -> list[Endpoint]:
        return list(self.listed)


@pytest.mark.slow
def test_many_slots_are_spread_stepped_and_moved() -> None:
    with ExitStack() as stack:
        servers: list[Any] = [stack.enter_context(serve_gym(Planned)) for _ in range(SERVERS + 1)]
        *first, new = servers
        directory = Listed(*(server.url for server in first))
        envs = BlockingReset(make_vec_remote(directory, num_envs=SLOTS))
        assert set(Counter(envs.env.urls).values()) == {SLOTS // SERVERS}
        episodes = Episodes(envs)
        for _ in range(10):
            episodes.step()
        directory.listed.append(Endpoint(new.url, slots=SLOTS // SERVERS))
        first[0].drain(600.0)
        deadline = time.monotonic() + 60.0
        while first[0].url in envs.env.urls:
            assert time.monotonic() < deadline
            episodes.step()
        assert Counter(envs.env.urls) == dict.fromkeys((server.url for server in servers[1:]), SLOTS // SERVERS)
        episodes.check_counts()
        assert not np.any(episodes.lost)
        envs.close()
