"""The URL scheme of servers of dm_env_rpc, which the others stand beside."""

from __future__ import annotations

from bridge.core.client.endpoints import DNS_SCHEMES, open_dns, open_file
from bridge.core.client.envs.env import RemoteEnv
from bridge.core.client.envs.vector_env import RemoteVectorEnv
from bridge.core.client.schemes import Scheme
from bridge.core.transport.address import SERVER_SCHEMES

__all__ = ["CORE_SCHEMES", "SERVERS"]

SERVERS = Scheme(
    names=SERVER_SCHEMES,
    description="a server of dm_env_rpc",
    make_env=RemoteEnv,
    make_vector_env=RemoteVectorEnv,
    lanes=True,
)
"""A world at a server, or many."""
_FILE = Scheme(names=("file",), description="a file with a URL a line", make_directory=open_file, lanes=True)
_DNS = Scheme(names=DNS_SCHEMES, description="every address of a host name", make_directory=open_dns, lanes=True)
CORE_SCHEMES = {name: scheme for scheme in (SERVERS, _FILE, _DNS) for name in scheme.names}
"""The schemes of the core, by name."""
