"""Tools for testing environments, servers and protocols. Nothing here is needed to serve or to train."""

from __future__ import annotations

from bridge.clock import Clock, MonotonicClock
from bridge.testing.clock import VirtualClock
from bridge.testing.conformance import REQUIREMENTS, check_server
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
from bridge.testing.proxy import Proxy
from bridge.testing.report import CheckResult, Report, Status
from bridge.testing.runtime import LocalRuntime

__all__ = [
    "EVERY_SPACE",
    "REQUIREMENTS",
    "CheckResult",
    "Clock",
    "Conditions",
    "CountingEnv",
    "Duplex",
    "End",
    "FailingEnv",
    "Link",
    "LinkStats",
    "LocalRuntime",
    "MonotonicClock",
    "Proxy",
    "Report",
    "SlowResetEnv",
    "SpaceEnv",
    "Status",
    "TestFailure",
    "VirtualClock",
    "check_server",
    "digest",
    "make_info",
]
