"""The URL scheme of servers of dm_env_rpc, which the others stand beside."""

from __future__ import annotations

from bridge.core.client.endpoints import DIRECTORIES
from bridge.core.client.env import RemoteEnv
from bridge.core.client.schemes import Scheme
from bridge.core.client.vector_env import RemoteVectorEnv
from bridge.core.transport.address import DIALED_SCHEMES, SCHEMES

__all__ = ["CORE_SCHEMES", "SERVERS"]

SERVERS = Scheme(
    names=(*SCHEMES, *DIALED_SCHEMES),
    description="a server of dm_env_rpc",
    make_env=RemoteEnv,
    make_vector_env=RemoteVectorEnv,
    lanes=True,
)
"""A world at a server, or many."""
CORE_SCHEMES = {name: scheme for scheme in (SERVERS, *DIRECTORIES) for name in scheme.names}
"""The schemes of the core, by name."""
