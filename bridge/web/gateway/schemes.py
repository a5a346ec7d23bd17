"""The interface for other kinds of servers that a gateway can show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

from bridge.core.client.endpoints import Directory
from bridge.core.worlds.scheduling import Runtime
from bridge.web.gateway.servers import PublishedServer

__all__ = ["FixedServer", "GatewayScheme"]

FixedServer: TypeAlias = Callable[[Runtime], PublishedServer]
"""Makes a server that exists as long as the gateway. Called once, in the gateway's event loop."""


@dataclasses.dataclass(frozen=True)
class GatewayScheme:
    """A URL scheme whose worlds a gateway can show; passed as `serve_gateway(urls, schemes=[…])`.

    It is used only for URLs that the caller of `serve_gateway` passes.
    """

    name: str
    """The part of the URL before `://`, in lower case."""
    open: Callable[..., Directory | FixedServer]
    """A function that is called before the gateway listens, with a URL of the scheme and the given `keywords`.

    It returns a directory of dm_env_rpc servers, or a function that makes a server of another protocol. It may raise
    AddressError for an invalid URL, ConnectError for an unknown host, and SettingError for its keywords. Slow
    operations, such as name resolution, must be done here, because the gateway's event loop must not block.
    """
    keywords: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further keywords of `serve_gateway`, each with a short description.

    Their values are secrets, as bytes: `gymnasium-bridge web` reads the keyword `x` from the file in `--x-file`.
    """
