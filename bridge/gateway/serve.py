"""`serve_gateway`: the worlds of other servers, and PERLERT lobbies, on one page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from bridge.client.endpoints import Directory
from bridge.errors import SettingError
from bridge.fleet.top import find_directory
from bridge.gateway.gateway import FixedServer, Gateway
from bridge.keywords import grouped
from bridge.perlert.protocol.cipher import check_key
from bridge.server.auth import Auth, Security
from bridge.server.limits import Limits, checked_limits
from bridge.server.server import Server
from bridge.server.web_site import WebSite, page_files
from bridge.transport.credentials import TLS, ClientCredentials, TokenLike

__all__ = ["serve_gateway"]

_DIRECTORY_TIMEOUT = 10.0
_PERLERT = "perlert://"


@grouped(limits=Limits, auth=Auth, tls=TLS)
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
    limits: Limits | None = None,
    metrics_port: int | None = None,
    upstream: ClientCredentials | None = None,
    perlert_key: bytes | str | None = None,
    start: bool = True,
) -> Server:
    """Show the worlds of other servers on one page, at one port that speaks HTTP, WebSocket and gRPC.

    Examples:
        >>> from bridge import serve_gym
        >>> from bridge.gateway import serve_gateway
        >>> with serve_gym("CartPole-v1") as server, serve_gateway(server.url) as gateway:
        ...     print(gateway.web_url.startswith("http://127.0.0.1:"))
        True

    Args:
        urls: The servers: `grpc://HOST:PORT` and the like, directories of them (`file:///PATH`, `grpc+dns://HOST:PORT`,
            `ray://FLEET`), and PERLERT lobbies (`perlert://HOST:PORT/NAME:NUMBER`).
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
        perlert_key: The pre-shared key of PERLERT lobbies.
        start: Serve in a background thread at once. False: listen, and serve when `start()` or `run()` of the server
            is called.

    Returns:
        The server: `.web_url`, `.wait()`, `.stop()`, or a `with` block.

    Raises:
        AddressError: A URL cannot be read.
        SettingError: A keyword is out of its range, a directory cannot be read or is empty, the port is in use.
        ConnectError: The host of a PERLERT lobby has no address.
    """
    targets = [urls] if isinstance(urls, str) else [*urls]
    if not targets:
        raise SettingError("expected the URLs of servers, got none")
    others = [_lobby(url, perlert_key) for url in targets if url.startswith(_PERLERT)]
    limits = checked_limits(limits)
    security = Security.of(token, token_file, tls, auth)
    directories: list[Directory] = [find_directory([url]) for url in targets if not url.startswith(_PERLERT)]
    gateway = Gateway(directories, upstream or ClientCredentials(), others, limits.max_message_bytes)
    gateway.read_directories(time.monotonic(), _DIRECTORY_TIMEOUT)
    server = Server(
        gateway,
        host=host,
        port=port,
        limits=limits,
        security=security,
        metrics_port=metrics_port,
        insecure=auth is not None and auth.insecure,
        web=WebSite(page_files(), web_hosts),
        sessions=gateway,
    )
    if start:
        server.start()
    return server


def _lobby(url: str, key: Any) -> FixedServer:
    """Return what makes the lobby of a URL; raises AddressError, ConnectError and SettingError."""
    from bridge.gateway.lobby import LobbyServer, resolved

    name, address = resolved(url)
    if key is not None:
        check_key(key)
    return lambda runtime: LobbyServer(name, address, key, runtime)
