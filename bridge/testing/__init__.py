"""Tools for testing environments, servers and protocols. They are not needed for serving or training.

May be imported by the composition root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.core.extras import lazy_names

if TYPE_CHECKING:
    from bridge.core.client.world.inspector import Inspector
    from bridge.core.clock import Clock, MonotonicClock
    from bridge.core.transport.certificates import make_certificates
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
    from bridge.testing.server_process import ServerProcess

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
    "Inspector",
    "Link",
    "LinkStats",
    "LocalRuntime",
    "MonotonicClock",
    "Proxy",
    "Report",
    "ServerProcess",
    "SlowResetEnv",
    "SpaceEnv",
    "Status",
    "TestFailure",
    "VirtualClock",
    "check_server",
    "digest",
    "make_certificates",
    "make_info",
]

_PLACES = {
    "CheckResult": "bridge.testing.report",
    "Clock": "bridge.core.clock",
    "Conditions": "bridge.testing.link",
    "CountingEnv": "bridge.testing.envs",
    "Duplex": "bridge.testing.link",
    "EVERY_SPACE": "bridge.testing.envs",
    "End": "bridge.testing.link",
    "FailingEnv": "bridge.testing.envs",
    "Inspector": "bridge.core.client.world.inspector",
    "Link": "bridge.testing.link",
    "LinkStats": "bridge.testing.link",
    "LocalRuntime": "bridge.testing.runtime",
    "MonotonicClock": "bridge.core.clock",
    "Proxy": "bridge.testing.proxy",
    "REQUIREMENTS": "bridge.testing.conformance",
    "Report": "bridge.testing.report",
    "ServerProcess": "bridge.testing.server_process",
    "SlowResetEnv": "bridge.testing.envs",
    "SpaceEnv": "bridge.testing.envs",
    "Status": "bridge.testing.report",
    "TestFailure": "bridge.testing.envs",
    "VirtualClock": "bridge.testing.clock",
    "check_server": "bridge.testing.conformance",
    "digest": "bridge.testing.envs",
    "make_certificates": "bridge.core.transport.certificates",
    "make_info": "bridge.testing.envs",
}
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
