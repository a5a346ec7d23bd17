"""Parse URLs.

`grpc://HOST:PORT`, `grpcs://HOST:PORT` (TLS) or bare `HOST:PORT`. An optional path is the environment id
(`grpc://host:50051/ALE/Pong-v5`), query parameters are CreateWorld settings (`?num_envs=8`), and `?world=NAME` joins
an existing world.

With `?compression=zstd` the server compresses its answers.

`?token=…` is the token that the client sends. A server that made its own token prints such a URL. No message shows it.

`ws://HOST` and `wss://HOST` (TLS) are the same over WebSocket, at port 80 or 443 unless the URL has a port. The path
is the environment id here too; the WebSocket itself always uses the path of the gRPC method.

`unix:///PATH` is gRPC over a Unix socket of this machine. The path is that of the socket, so the environment id is
given by the query parameter `env_id`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
import warnings
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from bridge.core.extras import provided
from bridge.core.transport.credentials import TOKEN_VARIABLE, ClientCredentials, Token
from bridge.core.transport.messages import Compression, checked_compression
from bridge.core.transport.service import HELLO
from bridge.errors import AddressError, SettingError, shown_url
from bridge.version import __version__

__all__ = ["SCHEMES", "SERVER_SCHEMES", "Address", "is_loopback", "parse_address", "scheme_of", "secret_url"]
__all__ += ["shown_token", "withheld"]

SCHEMES = ("grpc", "grpcs", "ws", "wss", "unix")
_UNIX_PATH = 107
"""The longest path in bytes on Linux; other systems allow a few less."""
_DIALED, _DIALED_WEBSOCKET = "dialed", "dialed+ws"
SERVER_SCHEMES = (*SCHEMES, _DIALED, _DIALED_WEBSOCKET)
"""Also the URLs of servers that have dialed in, which a listener of this process makes."""
_OF_DIRECTORIES = (
    ", which the servers of a directory have; another scheme is used only for a URL that your own call names"
)
_DEFAULT_PORTS = {"ws": 80, "wss": 443}
_INSTEAD = {"tcp": "grpc", "tcps": "grpcs", "http": "grpc", "https": "grpcs"}
_HAS_USER = "it holds a user name or password"
_NO_SLASHES = re.compile(
    # A host may have the name of a scheme: `grpc:50051`.
    rf"(?i:(?P<scheme>{'|'.join((*SCHEMES, *_INSTEAD))}))(?::/?|//)(?!/|\d+(?:[/?]|$))(?P<rest>.+)"
)


@dataclasses.dataclass(frozen=True)
class Address:
    """The parts of a URL."""

    url: str
    """The URL as it was given, without its token, because messages show it."""
    scheme: str
    """One of `SCHEMES`."""
    host: str
    """A host name or an IP address; IPv6 without its brackets; empty for `unix`."""
    port: int
    """A TCP port, 1 to 65535; 0 for `unix`."""
    env_id: str | None = None
    """The environment that the path names."""
    world: str | None = None
    """The existing world to join; None: create one."""
    settings: tuple[tuple[str, str], ...] = ()
    """The other query parameters, in order, as text."""
    path: str = ""
    """The socket's path for `unix`."""
    credentials: ClientCredentials = dataclasses.field(default_factory=ClientCredentials)
    """The credentials for the server, from keyword arguments and the URL's token."""
    compression: Compression | None = None
    """The compression that the server is asked for; None: no compression."""
    client_version: str = __version__
    """The version of this package that the client reports; empty for a client of another package."""

    @property
    def hello(self) -> list[tuple[str, str]]:
        """The metadata by which servers of this package recognise a client of this package."""
        return [(HELLO, self.client_version)] if self.client_version else []

    @property
    def tls(self) -> bool:
        """True if the connection is encrypted, and the server is authenticated."""
        return self.scheme in ("grpcs", "wss")

    @property
    def dialed(self) -> bool:
        """True if the server has dialed in: `host` is its name, and `port` the number of the listener."""
        return self.scheme in (_DIALED, _DIALED_WEBSOCKET)

    @property
    def websocket(self) -> bool:
        """True if the connection uses WebSocket."""
        return self.scheme in (*_DEFAULT_PORTS, _DIALED_WEBSOCKET)

    @property
    def server_name(self) -> str:
        """With TLS: the name or address that the server's certificate must contain."""
        return self.credentials.tls_server_name or self.host

    @property
    def authority(self) -> str:
        """The server's name in gRPC's header fields: the name of its certificate, if one was given, and the port."""
        name = self.credentials.tls_server_name
        if self.path:
            # gRPC's own clients send this for a Unix socket.
            return "localhost"
        return self.target if name is None else f"{name.encode('idna').decode()}:{self.port}"

    @property
    def target(self) -> str:
        """The name of the server as gRPC writes it: `host:port`, or `unix:` and a path.

        An IPv6 address is written in brackets; a name with non-ASCII letters is written as in DNS.
        """
        if self.path:
            return f"unix:{quote(self.path)}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host.encode('idna').decode()}:{self.port}"

    def with_credentials(self, given: ClientCredentials) -> Address:
        """Return this address with the credentials of keywords, and with the URL's token if it has one.

        Raises:
            SettingError: A keyword gives another token than the URL.
        """
        return dataclasses.replace(self, credentials=given.with_token_of(self.credentials, self.url))

    def check_tls(self, url: str | None = None) -> None:
        """Raise SettingError if the credentials are for TLS, but the URL is without TLS.

        Args:
            url: The URL as the user wrote it; None: this address's.
        """
        if self.credentials.has_tls and not self.tls:
            url = url or self.url
            remedy = "a Unix socket needs none, leave them out" if self.path else f"write {scheme_of(url)}s://"
            raise SettingError(f"tls= is for URLs with TLS, but {url!r} is without: {remedy}")


def scheme_of(url: Any) -> str:
    """Return the scheme of a URL in lower case; `grpc` if it has none, or is no URL."""
    # Only before the query, which may contain another URL.
    scheme, colon, _ = url.strip().partition("?")[0].partition("://") if isinstance(url, str) else ("", "", "")
    return scheme.lower() if colon else "grpc"


def parse_address(url: str, *, listed: bool = False) -> Address:
    """Read a URL.

    Args:
        url: The URL.
        listed: Whether the URL came from a directory, and not from the user's own call. The error for an unsupported
            scheme says so.

    Raises:
        AddressError: The URL has another scheme, no host, no port, or a part that has no meaning.
    """
    if not isinstance(url, str):
        raise AddressError(str(url), f"it is of type {type(url).__name__}, not a string")
    text = url.strip()
    url = shown_url(url)
    if not text:
        raise AddressError(url, "it is empty")
    if "://" not in text.partition("?")[0]:
        _check_slashes(url, text)
        text = f"grpc://{text}"
    try:
        parts = urlsplit(text)
        if "@" in parts.netloc:  # checked first: no other message may show a password
            user = f"{parts.netloc.rpartition('@')[0]}@"
            raise AddressError(url.replace(user, "…@"), _HAS_USER)
        # `port` is parsed here, and raises ValueError if it is no number.
        port = _DEFAULT_PORTS.get(parts.scheme) if parts.port is None else parts.port
    except AddressError:
        raise
    except ValueError as error:
        hint = "; an IPv6 address stands in brackets: grpc://[::1]:50051" if text.count(":") > 2 else ""
        raise AddressError(url, f"{error}{hint}") from error
    if (new := _INSTEAD.get(parts.scheme)) is not None:
        raise AddressError(url, f"{parts.scheme}:// is not supported; use {new}://{url.partition('://')[2]}")
    if parts.scheme not in SERVER_SCHEMES:
        more = _OF_DIRECTORIES if listed else provided("other_schemes")()
        raise AddressError(url, f"the scheme {parts.scheme!r} is none of {', '.join(SCHEMES)}{more}")
    local = parts.scheme == "unix"
    if local and (parts.netloc or not parts.path.strip("/")):
        raise AddressError(url, "a Unix socket is named by its absolute path: unix:///PATH, with three slashes")
    if local and (size := len(os.fsencode(unquote(parts.path)))) > _UNIX_PATH:
        text = f"the path of a Unix socket has at most {_UNIX_PATH} bytes, got {size}: make it in another folder"
        raise AddressError(url, text)
    if not local:
        _check_host(url, parts, port)
    if parts.fragment:
        raise AddressError(url, "what follows # has no meaning; a token is given by ?token=, or by token=")
    settings = _read_query(url, parts.query)
    world = settings.pop("world", None)
    try:
        compression = checked_compression(settings.pop("compression", None))
        credentials = ClientCredentials(token=Token(settings.pop("token")) if "token" in settings else None)
    except SettingError as error:
        raise AddressError(url, f"in its query, {error}") from None
    env_id = (settings.pop("env_id", None) if local else unquote(parts.path.lstrip("/"))) or None
    if world is not None and (env_id or settings):
        raise AddressError(url, "?world=NAME joins a world that exists, so an environment or settings cannot be given")
    path = unquote(parts.path) if local else ""
    rest = tuple(settings.items())
    return Address(
        url, parts.scheme, parts.hostname or "", port or 0, env_id, world, rest, path, credentials, compression
    )


def _check_slashes(url: str, text: str) -> None:
    """Raise AddressError if a scheme is written without its `://`: `grpc:host:50051`, `grpc//host:50051`."""
    found = _NO_SLASHES.fullmatch(text)
    if found is not None:
        scheme, rest = found["scheme"].lower(), found["rest"]
        if "@" in rest:
            raise AddressError(url.replace(f"{rest.rpartition('@')[0]}@", "…@"), _HAS_USER)
        new = f"{_INSTEAD.get(scheme, scheme)}://{'/' if scheme == 'unix' else ''}{shown_url(rest)}"
        raise AddressError(url, f"no :// follows its scheme, {scheme}; write {new}")


def _check_host(url: str, parts: SplitResult, port: int | None) -> None:
    """Raise AddressError if a URL has no host and port that a client can connect to."""
    if not parts.hostname:
        raise AddressError(url, "it names no host")
    if port is None:
        alone = parts.hostname.isdecimal()
        hint = f"it has a port alone, no host; for this machine write grpc://localhost:{parts.hostname}"
        raise AddressError(url, hint if alone else "it names no port")
    try:
        parts.hostname.encode("idna")
    except UnicodeError as error:
        problem = f"the host {parts.hostname!r} is no name: between dots, a name has 1 to 63 letters, digits or hyphens"
        raise AddressError(url, problem) from error
    if port == 0:
        raise AddressError(url, "port 0 is for servers; a client needs the port that the server printed")


def _read_query(url: str, query: str) -> dict[str, str]:
    """Return the parameters of a query; raise AddressError if it is malformed."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise AddressError(url, f"the query {shown_url(f'?{query}')[1:]!r} is not of the form name=value&…") from error
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise AddressError(url, f"the query gives {name!r} twice")
    return dict(pairs)


def secret_url(url: str) -> str:
    """Return a URL for storage: if it has a token, its `repr` omits the token."""
    return url if shown_url(url) == url else _SecretUrl(url)


class _SecretUrl(str):
    """A URL with a token, which `repr` omits."""

    def __repr__(self) -> str:
        return repr(shown_url(self))


def is_loopback(host: str) -> bool:
    """True if an address can be reached only from this machine."""
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def shown_token(address: Address) -> str | None:
    """Return the token to send; None: there is none, or it is the environment's and would travel unencrypted."""
    held, token = address.credentials, address.credentials.token
    # Nobody else can read a Unix socket or loopback. But a server that dials in may call itself localhost.
    if token is None or address.tls or address.scheme == "unix" or (is_loopback(address.host) and not address.dialed):
        return None if token is None else token.reveal()
    if held.from_environment:  # the variable names no server, so it may be meant for another one
        return None
    text = f"the token travels unencrypted to {address.host}; use a server with TLS, and grpcs://"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return token.reveal()


def withheld(address: Address) -> str:
    """Return a note in brackets that the environment's token was not sent to a server; "": it was, or there is none."""
    if not address.credentials.from_environment or shown_token(address) is not None:
        return ""
    return f" ({TOKEN_VARIABLE} is not sent unencrypted to another machine: use grpcs:// or wss://, or pass token=)"
