"""`serve_gateway`: show the worlds of other servers on one page."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.core.client.endpoints import Directory, Endpoint, as_directory
from bridge.core.extras import provided
from bridge.core.keywords import grouped, unknown_keyword
from bridge.core.server.auth import ServingKeywords, ServingOptions
from bridge.core.server.core_server import CoreServer
from bridge.core.server.limits import CoreLimits, checked_limits
from bridge.core.transport.address import parse_address
from bridge.core.transport.credentials import ClientCredentials
from bridge.errors import SettingError
from bridge.web.gateway.gateway import Gateway
from bridge.web.gateway.schemes import FixedServer, GatewayScheme
from bridge.web.site import host_names, page_protocols

__all__ = ["serve_gateway"]

_DIRECTORY_TIMEOUT = 10.0


class _OneServer:
    """A directory with a single server."""

    def __init__(self, url: str) -> None:
        parse_address(url)
        self._endpoint = Endpoint(url)

    def endpoints(self) -> list[Endpoint]:
        """Return the server."""
        return [self._endpoint]


@grouped(ServingOptions, None, **{name: provided("groups")[name] for name in ("limits", "auth", "tls")})
def serve_gateway(
    urls: str | Sequence[str],
    *,
    web_hosts: str | Sequence[str] = (),
    limits: CoreLimits | None = None,
    upstream: ClientCredentials | None = None,
    note: Callable[[], str] = str,
    schemes: Sequence[GatewayScheme] | None = None,
    **keywords: Any,
) -> CoreServer:
    """Show the worlds of other servers on one page, at one port for HTTP, WebSocket and gRPC.

    Examples:
        >>> from bridge import serve_gym
        >>> from bridge.web.gateway import serve_gateway
        >>> with serve_gym("CartPole-v1") as server, serve_gateway(server.url) as gateway:
        ...     print(gateway.web_url.startswith("http://127.0.0.1:"))
        True

    Args:
        urls: The servers: URLs like `grpc://HOST:PORT`, directories (`file:///PATH`, `grpc+dns://HOST:PORT`), and URLs
            of `schemes`: fleets on Ray (`ray://FLEET`), and PERLERT lobbies (`perlert://HOST:PORT/NAME:NUMBER`).
        web_hosts: Names under which browsers may reach the gateway, such as a proxy's, besides addresses, localhost and
            this machine's name. A string is split at commas.
        limits: The gateway's limits. Only `max_connections`, `max_message_bytes`, `max_requests_in_flight`,
            `max_queued_bytes` and `drain_timeout` apply. None: the defaults of `Limits`.
        upstream: The credentials for the servers; a URL may contain its own token. None: no credentials; the
            environment variable `BRIDGE_TOKEN` is for the gateway's own clients. They are never sent to a client.
        note: Returns a text that the page shows above the worlds, such as intermediate results. The server's thread
            calls it about once a second for each page.
        schemes: Other kinds of servers, by URL scheme. None: those of this package. Their keywords are accepted here,
            too: `perlert_key`, the pre-shared key of PERLERT lobbies.
        keywords: The fields of `bridge.core.server.auth.ServingOptions`, which the signature lists.

    Returns:
        The server: `.web_url`, `.wait()`, `.stop()`, or a `with` block.

    Raises:
        AddressError: A URL cannot be read.
        SettingError: A keyword is out of its range, a directory cannot be read or is empty, the port is in use.
        ConnectError: The host of a PERLERT lobby has no address.
        TypeError: A keyword is unknown.
    """
    targets = [urls] if isinstance(urls, str) else [*urls]
    if not targets:
        raise SettingError("expected the URLs of servers, got none")
    own = {name: keywords.pop(name) for name in ServingKeywords.__annotations__.keys() & keywords.keys()}
    directories, others = _open(targets, provided("gateway_schemes") if schemes is None else schemes, keywords)
    options, limits = ServingOptions(**own), checked_limits(limits)
    security = options.security()
    gateway = Gateway(directories, upstream or ClientCredentials(), others, limits.max_message_bytes, note)
    gateway.read_directories(time.monotonic(), _DIRECTORY_TIMEOUT)
    server: CoreServer = provided("server")(
        gateway,
        host=options.host,
        port=options.port,
        limits=limits,
        security=security,
        metrics_port=options.metrics_port,
        metrics_host=options.metrics_host,
        insecure=options.insecure,
        protocols=page_protocols(),
        hosts=host_names(web_hosts),
        sessions=gateway,
    )
    if options.start:
        server.start()
    return server


def _open(
    urls: Sequence[str], schemes: Sequence[GatewayScheme], keywords: Mapping[str, Any]
) -> tuple[list[Directory], list[FixedServer]]:
    """Return the directories for URLs, and the functions that make servers outside the directories.

    Raises:
        AddressError, ConnectError, SettingError: As in `serve_gateway`, and as raised by the schemes.
        TypeError: No scheme has such a keyword.
    """
    known = [name for scheme in schemes for name in scheme.keywords]
    for name in keywords:
        if name not in known:
            raise unknown_keyword("serve_gateway", name, [*inspect.signature(serve_gateway).parameters, *known])
    of_name = {scheme.name: scheme for scheme in schemes}
    directories: list[Directory] = []
    others: list[FixedServer] = []
    for url in urls:
        scheme = of_name.get(url.partition("://")[0])
        if scheme is None:
            directories.append(as_directory(url) or _OneServer(url))
            continue
        opened = scheme.open(url, **{name: value for name, value in keywords.items() if name in scheme.keywords})
        if isinstance(opened, Directory):
            directories.append(opened)
        else:
            others.append(opened)
    return directories, others
