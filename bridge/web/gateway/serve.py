"""`serve_gateway`: the worlds of other servers on one page."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.core.client.endpoints import Directory, Endpoint, as_directory
from bridge.core.keywords import grouped, unknown_keyword
from bridge.core.provided import provided
from bridge.core.server.auth import Auth, Security
from bridge.core.server.limits import CoreLimits, checked_limits
from bridge.core.server.server import CoreServer
from bridge.core.transport.address import parse_address
from bridge.core.transport.credentials import TLS, ClientCredentials, TokenLike
from bridge.errors import SettingError
from bridge.web.gateway.gateway import Gateway
from bridge.web.gateway.schemes import FixedServer, GatewayScheme
from bridge.web.site import host_names, page_protocols

__all__ = ["serve_gateway"]

_DIRECTORY_TIMEOUT = 10.0


class _OneServer:
    """A directory that always names one server."""

    def __init__(self, url: str) -> None:
        parse_address(url)
        self._endpoint = Endpoint(url)

    def endpoints(self) -> list[Endpoint]:
        """Return it."""
        return [self._endpoint]


@grouped(**{name: provided("groups")[name] for name in ("limits", "auth", "tls")})
def serve_gateway(
    urls: str | Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: TokenLike | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    auth: Auth | None = None,
    web_hosts: str | Sequence[str] = (),
    limits: CoreLimits | None = None,
    metrics_port: int | None = None,
    upstream: ClientCredentials | None = None,
    note: Callable[[], str] = str,
    schemes: Sequence[GatewayScheme] | None = None,
    start: bool = True,
    **keywords: Any,
) -> CoreServer:
    """Show the worlds of other servers on one page, at one port that speaks HTTP, WebSocket and gRPC.

    Examples:
        >>> from bridge import serve_gym
        >>> from bridge.web.gateway import serve_gateway
        >>> with serve_gym("CartPole-v1") as server, serve_gateway(server.url) as gateway:
        ...     print(gateway.web_url.startswith("http://127.0.0.1:"))
        True

    Args:
        urls: The servers: `grpc://HOST:PORT` and the like, directories of them (`file:///PATH`,
            `grpc+dns://HOST:PORT`), and URLs of `schemes`: fleets on Ray (`ray://FLEET`), and PERLERT lobbies
            (`perlert://HOST:PORT/NAME:NUMBER`).
        host: The address to listen on. Beyond loopback, a gateway that is given neither a token nor
            `TLS(client_ca=…)` makes a token, which its URL carries.
        port: The port to listen on; 0: any free port.
        token: The secret that each client of the gateway must send; None: the one in `token_file`, else in the
            environment variable `BRIDGE_TOKEN`; if there is none, see `host`.
        token_file: A file that contains the token.
        tls: The gateway's certificate and key, with which the port speaks TLS only, and the CA of its clients'
            certificates; None: no TLS.
        auth: Who else may come in: viewers, or anybody; None: as `Auth` has it.
        web_hosts: Names under which browsers may reach the gateway, beside addresses, localhost and this machine's
            name: those under which a proxy publishes it; as one string: with commas between them.
        limits: What the gateway holds at most. `max_connections`, `max_message_bytes`, `max_requests_in_flight`,
            `max_queued_bytes` and `drain_timeout` apply. None: as `Limits` has it.
        metrics_port: Serve metrics for Prometheus at this port, by HTTP without TLS or token; 0: any free port;
            None: no metrics.
        upstream: What is shown to the servers; a URL may hold a token of its own. None: nothing, also where the
            environment variable `BRIDGE_TOKEN` is set, which is the gateway's own. It never reaches a client.
        note: Returns a text that the page shows above the worlds, such as results so far. The server's thread calls it,
            about once a second for each page.
        schemes: What else can be shown, by the beginning of a URL. None: what this package has.
        start: Serve in a background thread at once. False: listen, and serve when `start()` or `run()` of the server
            is called.
        keywords: Those of `schemes`: `perlert_key`, the pre-shared key of PERLERT lobbies.

    Returns:
        The server: `.web_url`, `.wait()`, `.stop()`, or a `with` block.

    Raises:
        AddressError: A URL cannot be read.
        SettingError: A keyword is out of its range, a directory cannot be read or is empty, the port is in use.
        ConnectError: The host of a PERLERT lobby has no address.
        TypeError: There is no such keyword.
    """
    targets = [urls] if isinstance(urls, str) else [*urls]
    if not targets:
        raise SettingError("expected the URLs of servers, got none")
    directories, others = _open(targets, provided("gateway_schemes") if schemes is None else schemes, keywords)
    limits = checked_limits(limits)
    security = Security.of(token, token_file, tls, auth)
    gateway = Gateway(directories, upstream or ClientCredentials(), others, limits.max_message_bytes, note)
    gateway.read_directories(time.monotonic(), _DIRECTORY_TIMEOUT)
    server: CoreServer = provided("server")(
        gateway,
        host=host,
        port=port,
        limits=limits,
        security=security,
        metrics_port=metrics_port,
        insecure=auth is not None and auth.insecure,
        protocols=page_protocols(),
        hosts=host_names(web_hosts),
        sessions=gateway,
    )
    if start:
        server.start()
    return server


def _open(
    urls: Sequence[str], schemes: Sequence[GatewayScheme], keywords: Mapping[str, Any]
) -> tuple[list[Directory], list[FixedServer]]:
    """Return the directories that URLs stand for, and what makes the servers that no directory names.

    Raises:
        AddressError, ConnectError, SettingError: As of `serve_gateway`, and as the schemes raise them.
        TypeError: A keyword is of no scheme.
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
