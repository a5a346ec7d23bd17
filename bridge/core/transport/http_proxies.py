"""HTTP proxies from environment variables: choose the proxy for a server, and open the tunnel through it.

`http_proxy`, `https_proxy` and `no_proxy` are read as `curl` and `urllib` read them, also in capitals; `no_proxy` may
also contain networks, such as `10.0.0.0/8`. A server on this machine is never reached through a proxy, because the
proxy would look for it on its own loopback.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import ipaddress
import queue
import socket
import threading
import time
import urllib.request
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from bridge.errors import SettingError

__all__ = [
    "HttpProxy",
    "ProxyError",
    "ProxyHandler",
    "connect_tcp",
    "find_grpc_proxy",
    "find_proxy",
    "grpc_options",
    "is_unavailable",
]

_DEFAULT_PORT = 80
_MAX_HEAD = 1 << 16
# Seconds that the look-up of a name may take. Behind a proxy there may be no name server that answers.
_LOOK_UP_TIMEOUT = 2.0
# A proxy's statuses if the server behind it is down.
_UNAVAILABLE = (502, 503, 504)


class ProxyError(OSError):
    """A proxy cannot be used, or does not reach the server; `unavailable` is true if the server may start later."""

    def __init__(self, reason: str, *, unavailable: bool = False) -> None:
        super().__init__(reason)
        self.unavailable = unavailable


@dataclasses.dataclass(frozen=True)
class HttpProxy:
    """An HTTP proxy."""

    host: str
    """Its host."""
    port: int
    """Its port."""
    variable: str
    """The environment variable, or the system's setting, that names the proxy."""
    user: str | None = dataclasses.field(default=None, repr=False)
    """The user and the password for the proxy, `user:password`; None: it needs none."""

    @property
    def authority(self) -> str:
        """The proxy's host and port, as messages show them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def note(self) -> str:
        """The end of an error's text: the proxy that was used, and how to bypass it."""
        return f" (through the proxy {self.authority} of {self.variable}; no_proxy names servers reached without it)"


def find_proxy(host: str, port: int, kinds: Iterable[str]) -> HttpProxy | None:
    """Return the proxy for a server; None: it is reached without one.

    Args:
        host: The server's host.
        port: The server's port.
        kinds: The variables to read, in order; the first that is set counts. `http` stands for `http_proxy`.

    Raises:
        SettingError: The variable does not hold the URL of an HTTP proxy.
    """
    found = urllib.request.getproxies()
    kind = next((kind for kind in kinds if found.get(kind)), None)
    if kind is None or _is_exempt(host, port):
        return None
    text, name = found[kind], f"{kind}_proxy"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        number, proxy_host = parts.port, parts.hostname
    except ValueError as error:
        raise SettingError(f"expected {name} to be http://HOST:PORT: {error}") from None
    if parts.scheme != "http" or not proxy_host:
        scheme = f", got one of {parts.scheme}://" if proxy_host else ""
        raise SettingError(
            f"expected {name} to name an HTTP proxy, http://HOST:PORT{scheme}; no_proxy={host} does without"
        )
    user = None if parts.username is None else f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return HttpProxy(proxy_host, _DEFAULT_PORT if number is None else number, name, user)


def find_grpc_proxy(host: str, port: int) -> HttpProxy | None:
    """Return the proxy that grpcio should use, as `find_proxy`: by gRPC's own rule, with or without TLS.

    A Unix socket has no host, and is reached without a proxy.
    """
    return find_proxy(host, port, ("grpc", "https", "http")) if host else None


def grpc_options(proxy: HttpProxy | None) -> dict[str, Any]:
    """Return the options of a grpcio channel that uses the given proxy, or none.

    Without them, grpcio would use the proxy also for loopback, and it does not read `NO_PROXY` in capitals.
    """
    if proxy is None:
        return {"grpc.enable_http_proxy": 0}
    user, _, password = (proxy.user or "").partition(":")
    shown = "" if proxy.user is None else f"{quote(user, safe='')}:{quote(password, safe='')}@"
    return {"grpc.http_proxy": f"http://{shown}{proxy.authority}"}


def connect_tcp(host: str, port: int, timeout: float, proxy: HttpProxy | None = None) -> socket.socket:
    """Return a blocking socket that is connected to a server, directly or through a proxy.

    Args:
        host: The server's host, which the proxy looks up if there is one.
        port: The server's port.
        timeout: Seconds for the whole connection; the socket keeps it as its timeout.
        proxy: The proxy; None: connect directly.

    Raises:
        ProxyError: The proxy cannot be reached, or refuses.
        TimeoutError: The proxy or the server did not answer in time.
        OSError: Without a proxy: as `socket.create_connection`.
    """
    if proxy is None:
        return socket.create_connection((host, port), timeout)
    deadline = time.monotonic() + timeout
    try:
        sock = socket.create_connection((proxy.host, proxy.port), timeout)
    except TimeoutError:
        raise
    except OSError as error:
        raise ProxyError(f"no connection to the proxy: {error.strerror or error}") from None
    try:
        _open_tunnel(sock, host, port, proxy, deadline)
        sock.settimeout(timeout)
    except BaseException:
        sock.close()
        raise
    return sock


def is_unavailable(error: BaseException) -> bool:
    """True if an attempt to connect failed, but may succeed when the server has started."""
    if isinstance(error, ProxyError):
        return error.unavailable
    return isinstance(error, (ConnectionRefusedError, socket.gaierror))


def _open_tunnel(sock: socket.socket, host: str, port: int, proxy: HttpProxy, deadline: float) -> None:
    """Connect a socket to a server through a proxy. Raises ProxyError if the proxy refuses."""
    target = f"[{host}]:{port}" if ":" in host else f"{host.encode('idna').decode()}:{port}"
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.user is not None:
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(proxy.user.encode()).decode()}")
    sock.sendall("\r\n".join([*lines, "", ""]).encode())
    head = b""
    # One byte at a time: the bytes after the head are the server's, and are read by the socket's next user.
    while not head.endswith(b"\r\n\r\n"):
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            byte = sock.recv(1)
        except TimeoutError:
            raise
        except OSError as error:
            raise ProxyError(f"the proxy ended the connection: {error.strerror or error}") from None
        head += byte
        if not byte or len(head) > _MAX_HEAD:
            raise ProxyError("the proxy gave no readable answer to CONNECT: is it one for HTTP?")
    line = head.partition(b"\r\n")[0].decode(errors="replace")
    status = line.split(" ")[1:2]
    if status != ["200"]:
        unavailable = status in [[str(code)] for code in _UNAVAILABLE]
        raise ProxyError(f"the proxy answered {line[:80]!r}", unavailable=unavailable)


class ProxyHandler(urllib.request.ProxyHandler):
    """The proxies of the environment for `urllib`, with the exceptions of `find_proxy`, also after a redirection."""

    def proxy_open(self, req: urllib.request.Request, proxy: str, type: str) -> Any:
        """Send a request through its proxy, or leave it to the handlers of direct connections."""
        parts = urlsplit(f"//{req.host}")
        default = 443 if type == "https" else _DEFAULT_PORT
        if _is_exempt(parts.hostname or "", default if parts.port is None else parts.port):
            return None
        return super().proxy_open(req, proxy, type)


def _is_exempt(host: str, port: int) -> bool:
    """True if a server is reached without a proxy, because it is on this machine or in `no_proxy`."""
    address = _ip_address(host)
    if address is None:
        if host == "localhost" or host.endswith(".localhost"):
            return True
    elif address.is_loopback or address.is_unspecified:  # connecting to 0.0.0.0 connects to this machine
        return True
    at = f"[{host}]:{port}" if address is not None and address.version == 6 else f"{host}:{port}"
    if urllib.request.proxy_bypass(at):
        return True
    if address is not None:
        return _is_listed(address)
    return _is_name_of_loopback(host)


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host as an IP address, IPv4 if it is mapped into IPv6; None: it is a name."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return mapped or address
    return None


def _is_listed(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """True if `no_proxy` contains an address or its network. `urllib` does not support networks."""
    for part in urllib.request.getproxies().get("no", "").split(","):
        with contextlib.suppress(ValueError):
            if address in ipaddress.ip_network(part.strip().strip("[]"), strict=False):
                return True
    return False


@functools.lru_cache(maxsize=1024)
def _is_name_of_loopback(host: str) -> bool:
    """True if a name resolves to loopback only, as this machine's own may; False if the look-up takes too long."""
    found: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found.put(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError):
            found.put([])

    threading.Thread(target=look_up, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        addresses = [_ip_address(str(target[0])) for *_, target in found.get(timeout=_LOOK_UP_TIMEOUT)]
        return bool(addresses) and all(address is not None and address.is_loopback for address in addresses)
    return False
