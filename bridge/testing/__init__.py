"""What the tests of environments, servers and protocols need: nothing in here is used to serve or to play."""

from __future__ import annotations

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

__all__ = [
    "EVERY_SPACE",
    "CountingEnv",
    "FailingEnv",
    "SlowResetEnv",
    "SpaceEnv",
    "TestFailure",
    "digest",
    "make_info",
]
