"""What the tests of environments, servers and protocols need: nothing in here is used to serve or to play."""

from __future__ import annotations

from bridge.testing.clock import Clock, MonotonicClock, VirtualClock
from bridge.testing.envs import (
    EVERY_SPACE,
    CountingEnv,
    FailingEnv,
    SlowResetEnv,
    SpaceEnv,
    TestFailure,
    digest,
    make_info,
)
from bridge.testing.link import Conditions, Duplex, End, Link, LinkStats

__all__ = [
    "EVERY_SPACE",
    "Clock",
    "Conditions",
    "CountingEnv",
    "Duplex",
    "End",
    "FailingEnv",
    "Link",
    "LinkStats",
    "MonotonicClock",
    "SlowResetEnv",
    "SpaceEnv",
    "TestFailure",
    "VirtualClock",
    "digest",
    "make_info",
]
