"""Access control: which clients may connect, and which may change an environment. All transports use it.

Only a client that has a world alone may change its environment by methods and attributes. All others read: the server
answers their calls as look-ups, which call nothing. A look-up returns an attribute's value, or says that the name is a
method's. So every kind of read request works for them.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import ssl

from bridge.core.encoding.names import CALL_REQUEST_URL, NAMES, PROPERTY_REQUEST_URL
from bridge.core.encoding.properties import PropertyTree
from bridge.core.logs import LimitedLog
from bridge.core.transport.address import is_loopback
from bridge.core.transport.credentials import (
    Access,
    AccessKeywords,
    Token,
    TokenLike,
    checked_tls,
    read_pem,
    read_token,
    warn_of_readers,
)
from bridge.errors import Code, RequestError, SettingError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = [
    "Auth",
    "Gate",
    "ListenKeywords",
    "ListenOptions",
    "Security",
    "ServerAccess",
    "ServingKeywords",
    "ServingOptions",
    "as_look",
    "attribute_in",
    "no_message",
    "no_right",
    "refuse_acting",
    "refuse_method",
    "refuse_requests",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auth:
    """Further access options of a server: `auth=` of `serve_gym` and `serve_parallel`.

    The keywords `token`, `token_file` and `tls` are for clients, too; these are only for servers.

    Examples:
        >>> from bridge import Auth, serve_gym
        >>> with serve_gym("CartPole-v1", token="of-trainers", auth=Auth(watch_token="of-viewers")) as server:
        ...     pass

    Args:
        watch_token: A second secret, for clients that may only watch; None: there are no such clients.
        watch_token_file: A file that contains the watch token.
        insecure: Ask for no token beyond loopback either: every client that reaches the port is accepted, with a
            warning.
        shared_control: Let all clients in a world call methods of its environment and set its attributes: spectators,
            viewers, and agents that share the world with other clients. False: they only read attributes.
    """

    watch_token: TokenLike | None = dataclasses.field(default=None, repr=False)
    watch_token_file: str | os.PathLike[str] | None = None
    insecure: bool = False
    shared_control: bool = False


@dataclasses.dataclass(frozen=True)
class Security:
    """How a server is protected: tokens and certificates."""

    token: Token | None = None
    """The secret that each client must send; None: every client that reaches the port is accepted."""
    watch_token: Token | None = dataclasses.field(default=None, kw_only=True)
    """The secret of clients that may only watch; None: there are no such clients."""
    tls_certificate: bytes | None = dataclasses.field(default=None, repr=False)
    """PEM: the server's certificate, and those between it and its CA; None: no TLS."""
    tls_key: bytes | None = dataclasses.field(default=None, repr=False)
    """PEM: the certificate's key."""
    tls_client_ca: bytes | None = dataclasses.field(default=None, repr=False)
    """PEM: the CA that must have signed each client's certificate; None: clients need none."""
    generated: bool = False
    """True if the server made the token."""
    shared_control: bool = dataclasses.field(default=False, kw_only=True)
    """True if clients that watch, or share a world, may also call methods and set attributes of environments."""

    @property
    def tls(self) -> bool:
        """True if connections are encrypted, and the server is authenticated."""
        return self.tls_certificate is not None

    def context(self, *alpn: str) -> ssl.SSLContext | None:
        """Return the SSLContext for the server's sockets; None: no TLS.

        Args:
            alpn: The names of the protocols inside TLS, the preferred one first.

        Raises:
            SettingError: The certificate and its key cannot be used.
        """
        if self.tls_certificate is None or self.tls_key is None:
            return None
        from bridge.core.transport.tls import server_context

        return server_context(self.tls_certificate, self.tls_key, self.tls_client_ca, *alpn)

    def for_host(self, host: str, *, insecure: bool) -> Security:
        """Return the protection of a server that listens on an address: with a generated token, if it has none.

        Args:
            host: The address that the server listens on.
            insecure: True if the server needs no token, even if other machines can reach it.

        Raises:
            SettingError: There is a watch token, and no other token.
        """
        if insecure or is_loopback(host) or self.authenticates:
            if self.watch_token is not None and self.token in (None, self.watch_token):
                raise SettingError(
                    "watch_token lets clients in that may only watch: expected another token for the others, got "
                    f"{'none' if self.token is None else 'the same'}; give token or token_file"
                )
            return self
        return dataclasses.replace(self, token=Token(secrets.token_hex(32)), generated=True)

    @property
    def query(self) -> str:
        """The text to append to the server's URL: the token, if the server made it."""
        return f"?token={self.token.reveal()}" if self.token is not None and self.generated else ""

    @property
    def authenticates(self) -> bool:
        """True if unknown clients are refused."""
        return self.token is not None or self.tls_client_ca is not None

    def missing(self) -> str:
        """Return what a server that others can reach lacks, for a warning; empty: nothing."""
        lacks = [] if self.tls else ["TLS"]
        lacks += [] if self.authenticates else ["token"]
        return " and ".join(lacks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerAccess(Access):
    """The credentials that a listening port requires, and those that it shows to clients.

    Args:
        tls: The certificate and key of this server, `TLS(certificate=…, key=…)`: its port then speaks only TLS. With
            `client_ca`, clients need a certificate of that CA. None: no TLS.
    """

    def security(self) -> Security:
        """Read the keywords, and return the protection that they describe.

        Raises:
            SettingError: A file cannot be read, a value is given twice, needs another one that is missing, or is for
                clients.

        Warns:
            RuntimeWarning: Other users of this machine can read the token's file.
        """
        tls = checked_tls(self.tls)
        if tls.ca is not None or tls.server_name is not None:
            raise SettingError(
                "tls=TLS(ca=…) and server_name are for clients, which check the server's certificate; the CA that "
                "must have signed the clients' certificates is tls=TLS(client_ca=…)"
            )
        if self.tls is not None and tls.certificate is None:
            raise SettingError(
                "a server speaks TLS with a certificate of its own, and none is given: expected "
                "tls=TLS(certificate=…, key=…); `gymnasium-bridge cert` makes them"
            )
        security = Security(
            read_token(self.token, self.token_file),
            read_pem("certificate", tls.certificate),
            read_pem("key", tls.key),
            read_pem("client_ca", tls.client_ca),
        )
        if self.token_file is not None:
            warn_of_readers(self.token_file)
        return security


class ListenKeywords(AccessKeywords, total=False):
    """The keywords of `ListenOptions`, for type checkers."""

    host: str
    port: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListenOptions(ServerAccess):
    """The address and port that a server listens on.

    Args:
        host: The address to listen on: `0.0.0.0` for every IPv4 address of this machine, `::` for IPv6 too. If the
            address is not loopback, and neither a token nor `TLS(client_ca=…)` is given, the server makes a token,
            which clients need.
        port: The port to listen on, 0 for any free port.
    """

    host: str = "127.0.0.1"
    port: int = 0


class ServingKeywords(ListenKeywords, total=False):
    """The keywords of `ServingOptions`, for type checkers."""

    auth: Auth | None
    metrics_port: int | None
    metrics_host: str | None
    start: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingOptions(ListenOptions):
    """The options of every server, whether its worlds are its own or those of other servers.

    Args:
        auth: Further access options, for viewers or for servers without a token; None: the defaults of `Auth`.
        metrics_port: The port for Prometheus metrics, over HTTP without TLS or token; 0: any free port; None: no
            metrics.
        metrics_host: The address of `metrics_port`, such as 127.0.0.1 or that of an internal network; None: `host`.
        start: Serve in a background thread at once. False: listen now, and serve when `start()` or `run()` of the
            server is called.
    """

    auth: Auth | None = None
    metrics_port: int | None = None
    metrics_host: str | None = None
    start: bool = True

    @property
    def insecure(self) -> bool:
        """True if no token is required beyond loopback either."""
        return self.auth is not None and self.auth.insecure

    def security(self) -> Security:
        """Read the keywords, and return the protection that they describe; raises and warns as in `ServerAccess`."""
        if not isinstance(self.auth, (Auth, type(None))):
            raise SettingError(f"expected auth to be bridge.Auth(…), got a {type(self.auth).__name__}")
        security = super().security()
        if self.auth is None:
            return security
        given, file = self.auth.watch_token, self.auth.watch_token_file
        # The token of the environment variable is not for viewers.
        watch_token = None if given is None and file is None else read_token(given, file, name="watch_token")
        return dataclasses.replace(security, watch_token=watch_token, shared_control=self.auth.shared_control)


class Gate:
    """Checks the token of each client. A transport calls `check` before it accesses any world.

    Args:
        token: The token that clients must send; None: they need none.
        watch_token: The token of clients that may only watch; None: there are no such clients.
    """

    def __init__(self, token: Token | None, watch_token: Token | None = None) -> None:
        self._token = token
        self._watch_token = watch_token
        self.asks = token is not None
        """True if clients must send a token."""
        self.refused = 0
        """The number of refused clients."""
        self._log = LimitedLog(__name__)

    def check(self, shown: str | None, peer: str) -> bool:
        """Accept a client, or log and raise. Return True if it may do more than watch.

        Args:
            shown: The token that the client sent; None: none.
            peer: The client's address, for the log.

        Raises:
            RequestError: UNAUTHENTICATED: the client sent no token, or a wrong one.
        """
        if self._token is None or self._token.equals(shown):
            return True
        if self._watch_token is not None and self._watch_token.equals(shown):
            return False
        self.refused += 1
        problem = "the token is wrong" if shown else "a token is required, and none was sent"
        self._log.warning("refused %s: %s", peer, problem)
        raise RequestError(
            Code.UNAUTHENTICATED,
            f"{problem}; pass token=… or token_file=…, or set the environment variable BRIDGE_TOKEN",
        )

    @staticmethod
    def bearer(header: str | bytes | None) -> str | None:
        """Return the token of an `authorization` header, `Bearer TOKEN`; None: it contains none."""
        text = header.decode("ascii", errors="replace") if isinstance(header, bytes) else header or ""
        # HTTP compares the names of authentication schemes without regard to case.
        scheme, _, token = text.partition(" ")
        return token.strip() or None if scheme.lower() == "bearer" else None


_ATTRIBUTES = "world.attributes"
# Requests of the protocol, whose order the server checks. Called as methods, they would bypass the server's state and
# recordings.
_REQUESTS = ("reset", "step", "close")


def no_right(name: str) -> RequestError:
    """Return the error for a call of a method, or a write to an attribute, that is not allowed."""
    return RequestError(
        Code.PERMISSION_DENIED,
        f"{name!r} may not be called or set by who watches, or shares a world with others: they read attributes; use a "
        "world of your own, or have the server started with auth=Auth(shared_control=True)",
    )


def no_message(name: str) -> RequestError:
    """Return the error for a message of a feature, or of another package, that is not allowed."""
    return RequestError(
        Code.PERMISSION_DENIED,
        f"a message {name!r} is for who plays, and has a world alone: not for who watches, or shares one with others; "
        "use a world of your own",
    )


def refuse_requests(name: str) -> None:
    """Raise PERMISSION_DENIED if a name is that of a protocol request, which must not be called or set."""
    if name in _REQUESTS:
        text = f"{name!r} is no attribute to call or set; call {name}() of the remote environment"
        raise RequestError(Code.PERMISSION_DENIED, text)


def attribute_in(asked: properties_pb2.PropertyRequest, tree: PropertyTree) -> str | None:
    """Return the environment's attribute that a property request reads or writes; None: another property."""
    above, _, name = (asked.read_property.key or asked.write_property.key).rpartition(".")
    known = any(family.key == above for family in tree.families)
    return name if above == _ATTRIBUTES and known and name else None


def as_look(request: bridge_pb2.CallRequest) -> bridge_pb2.CallRequest:
    """Return the look-up request for the method or attribute that another request would call."""
    return bridge_pb2.CallRequest(name=request.name, lanes=request.lanes, look=True)


def refuse_method(request: bridge_pb2.CallRequest, response: bridge_pb2.CallResponse) -> None:
    """Raise PERMISSION_DENIED if a request that was answered as a look-up was to call a method."""
    if response.is_method and not request.look:
        raise no_right(request.name)


def refuse_acting(kind: str, request: pb.EnvironmentRequest, costs: bool, *, shared_control: bool = False) -> None:
    """Raise PERMISSION_DENIED if a request does more than watch. The Steps of a spectator change nothing.

    Calls are allowed here, because they are answered as look-ups.

    Args:
        kind: The kind of the request.
        request: The request.
        costs: True if it is a request for a property that runs code of an environment.
        shared_control: True if the request may set attributes.
    """
    # Steps and Resets are a spectator's, because the client could not join in another role.
    allowed = kind in ("step", "reset", "leave_world")
    if kind == "join_world":
        role = request.join_world.settings["role"] if "role" in request.join_world.settings else pb.Tensor()
        allowed = list(role.strings.array) == ["spectator"]
    elif kind == "extension" and request.extension.type_url == CALL_REQUEST_URL:
        allowed = True
    elif kind == "extension" and request.extension.type_url == PROPERTY_REQUEST_URL:
        asked = properties_pb2.PropertyRequest.FromString(request.extension.value)
        if asked.WhichOneof("payload") == "write_property":
            allowed = shared_control and asked.write_property.key.startswith(f"{_ATTRIBUTES}.")
        else:
            # Names take many bytes, and are useless to a client that calls nothing.
            allowed = not costs and asked.read_property.key != NAMES
    if not allowed:
        raise RequestError(
            Code.PERMISSION_DENIED,
            "this token is for watching; to play, or to make or change anything, ask for the other token",
        )
