"""What a gateway shows beside servers of dm_env_rpc: the interface by which other kinds of servers plug in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

from bridge.core.client.endpoints import Directory
from bridge.core.worlds.scheduling import Runtime
from bridge.web.gateway.servers import PublishedServer

__all__ = ["FixedServer", "GatewayScheme"]

FixedServer: TypeAlias = Callable[[Runtime], PublishedServer]
"""Makes a server that stays as long as the gateway; called once, in the gateway's event loop, which it may use."""


@dataclasses.dataclass(frozen=True)
class GatewayScheme:
    """A URL scheme whose worlds a gateway can show: `serve_gateway(urls, schemes=[…])` takes some.

    A scheme is used only for URLs that the caller of `serve_gateway` gives.
    """

    name: str
    """What stands before `://`, in lower case."""
    open: Callable[..., Directory | FixedServer]
    """Called with a URL of the scheme, and with those of `keywords` that were given, before the gateway listens.

    Returns a directory of servers of dm_env_rpc, or what makes a server of another protocol. It may raise AddressError
    for a URL that cannot be read, ConnectError for a host that is not there, and SettingError for its keywords. What
    takes time, such as looking up a name, belongs here: the event loop of the gateway must not wait.
    """
    keywords: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further keywords of `serve_gateway`, by name, each with what it is, in a few words.

    They are secrets, as bytes: `gymnasium-bridge web` reads the keyword `x` from the file that `--x-file` names.
    """
