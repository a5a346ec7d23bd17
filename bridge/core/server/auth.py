"""Who may come in, and who may change an environment: what every transport asks of a client before it serves it.

An environment is changed by its methods and attributes only by whoever has its world alone. All others read: a request
to call is served for them as a look, which calls nothing. It gives an attribute's value, or says that the name is a
method's. So they read by whatever request their client sends.
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
    """Who may come in: `auth=` of `serve_gym` and `serve_parallel`, beside `token`, `token_file` and `tls`.

    Those three are the keywords of clients, too; a server alone has these.

    Examples:
        >>> from bridge import Auth, serve_gym
        >>> with serve_gym("CartPole-v1", token="of-trainers", auth=Auth(watch_token="of-viewers")) as server:
        ...     pass

    Args:
        watch_token: A second secret, for clients that may watch and do nothing else; None: there are none.
        watch_token_file: A file that contains the watch token.
        insecure: Ask for no token beyond loopback either: whoever reaches the port is let in, with a warning.
        shared_control: Let everybody in a world call methods of its environment and set its attributes: spectators,
            viewers, and agents that share the world with those of other clients. False: these only read attributes.
    """

    watch_token: TokenLike | None = dataclasses.field(default=None, repr=False)
    watch_token_file: str | os.PathLike[str] | None = None
    insecure: bool = False
    shared_control: bool = False


@dataclasses.dataclass(frozen=True)
class Security:
    """How a server is protected."""

    token: Token | None = None
    """The secret that each client must send; None: anyone who reaches the port is let in."""
    watch_token: Token | None = dataclasses.field(default=None, kw_only=True)
    """The secret of clients that may watch, and do nothing else; None: there are none."""
    tls_certificate: bytes | None = dataclasses.field(default=None, repr=False)
    """PEM: the server's certificate and those between it and its authority; None: no TLS."""
    tls_key: bytes | None = dataclasses.field(default=None, repr=False)
    """PEM: the certificate's key."""
    tls_client_ca: bytes | None = dataclasses.field(default=None, repr=False)
    """PEM: the CA that must have signed each client's certificate; None: clients need none."""
    generated: bool = False
    """True if the server has made the token."""
    shared_control: bool = dataclasses.field(default=False, kw_only=True)
    """True if also who watches, or shares a world, may call methods and set attributes of environments."""

    @property
    def tls(self) -> bool:
        """True if what travels is encrypted, and the server proves who it is."""
        return self.tls_certificate is not None

    def context(self, *alpn: str) -> ssl.SSLContext | None:
        """Return what a socket speaks TLS with; None: it speaks none.

        Args:
            alpn: The names of what is spoken within, the preferred one first.

        Raises:
            SettingError: The certificate and its key cannot be used.
        """
        if self.tls_certificate is None or self.tls_key is None:
            return None
        from bridge.core.transport.tls import server_context

        return server_context(self.tls_certificate, self.tls_key, self.tls_client_ca, *alpn)

    def for_host(self, host: str, *, insecure: bool) -> Security:
        """Return how a server that listens there is protected: with a token of its own, where it has none.

        Args:
            host: The address that it listens on.
            insecure: Whether it goes without a token though others reach it.

        Raises:
            SettingError: There is a token for watching, and no other one.
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
        """The text to append to the server's URL: the token, if the server has made it."""
        return f"?token={self.token.reveal()}" if self.token is not None and self.generated else ""

    @property
    def authenticates(self) -> bool:
        """True if a stranger is refused."""
        return self.token is not None or self.tls_client_ca is not None

    def missing(self) -> str:
        """Say what a server that others can reach lacks; empty: nothing."""
        lacks = [] if self.tls else ["TLS"]
        lacks += [] if self.authenticates else ["token"]
        return " and ".join(lacks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerAccess(Access):
    """What a port that listens asks of its clients, and what they know it by.

    Args:
        tls: The certificate and key of this end, `TLS(certificate=…, key=…)`: its port speaks TLS only. With a
            `client_ca`, clients need a certificate of that CA. None: no TLS.
    """

    def security(self) -> Security:
        """Return what the keywords say, read.

        Raises:
            SettingError: Something cannot be read, is given twice, is of no use without what is missing, or is for
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
    """The keywords that make `ListenOptions`, for type checkers."""

    host: str
    port: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListenOptions(ServerAccess):
    """Where a server listens.

    Args:
        host: The address to listen on: `0.0.0.0` for every IPv4 address of this machine, `::` for IPv6 too. Beyond
            loopback, a server that is given neither a token nor `TLS(client_ca=…)` makes a token, which clients need.
        port: The port to listen on, 0 for any free port.
    """

    host: str = "127.0.0.1"
    port: int = 0


class ServingKeywords(ListenKeywords, total=False):
    """The keywords that make `ServingOptions`, for type checkers."""

    auth: Auth | None
    metrics_port: int | None
    metrics_host: str | None
    start: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingOptions(ListenOptions):
    """What a server has, whether its worlds are its own or those of other servers.

    Args:
        auth: Who else may come in: viewers, or anybody; None: as `Auth` has it.
        metrics_port: Serve metrics for Prometheus at this port, by HTTP without TLS or token; 0: any free port;
            None: no metrics.
        metrics_host: The address of `metrics_port`, such as 127.0.0.1 or that of a network of the operator's; None:
            that of `host`.
        start: Serve in a background thread at once. False: listen, and serve when `start()` or `run()` of the server
            is called.
    """

    auth: Auth | None = None
    metrics_port: int | None = None
    metrics_host: str | None = None
    start: bool = True

    @property
    def insecure(self) -> bool:
        """Whether no token is asked for beyond loopback either."""
        return self.auth is not None and self.auth.insecure

    def security(self) -> Security:
        """Return what the keywords say, read; raises and warns as that of `ServerAccess`."""
        if not isinstance(self.auth, (Auth, type(None))):
            raise SettingError(f"expected auth to be bridge.Auth(…), got a {type(self.auth).__name__}")
        security = super().security()
        if self.auth is None:
            return security
        given, file = self.auth.watch_token, self.auth.watch_token_file
        # The environment's token is not for those who watch.
        watch_token = None if given is None and file is None else read_token(given, file, name="watch_token")
        return dataclasses.replace(security, watch_token=watch_token, shared_control=self.auth.shared_control)


class Gate:
    """Asks each client for the token. A transport calls `check` before it touches any world.

    Args:
        token: What clients have to show; None: they are let in without.
        watch_token: What clients show that may only watch; None: there are none.
    """

    def __init__(self, token: Token | None, watch_token: Token | None = None) -> None:
        self._token = token
        self._watch_token = watch_token
        self.asks = token is not None
        """True if clients have to show a token."""
        self.refused = 0
        """How often a client was refused."""
        self._log = LimitedLog(__name__)

    def check(self, shown: str | None, peer: str) -> bool:
        """Let a client in, or log and raise; return whether it may do more than watch.

        Args:
            shown: The token that it showed; None: none.
            peer: Where it is, for the log.

        Raises:
            RequestError: UNAUTHENTICATED: it showed no token, or another one.
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
        """Return the token of an `authorization` header, `Bearer TOKEN`; None: it holds none."""
        text = header.decode("ascii", errors="replace") if isinstance(header, bytes) else header or ""
        # HTTP compares names of schemes without regard to case.
        scheme, _, token = text.partition(" ")
        return token.strip() or None if scheme.lower() == "bearer" else None


_ATTRIBUTES = "world.attributes"
# Requests of the protocol, in an order that the server keeps. As methods they would go past it, and past recordings.
_REQUESTS = ("reset", "step", "close")


def no_right(name: str) -> RequestError:
    """Return the refusal of a call of a method, or of a write to an attribute."""
    return RequestError(
        Code.PERMISSION_DENIED,
        f"{name!r} may not be called or set by who watches, or shares a world with others: they read attributes; use a "
        "world of your own, or have the server started with auth=Auth(shared_control=True)",
    )


def no_message(name: str) -> RequestError:
    """Return the refusal of a message of a feature, or of another package."""
    return RequestError(
        Code.PERMISSION_DENIED,
        f"a message {name!r} is for who plays, and has a world alone: not for who watches, or shares one with others; "
        "use a world of your own",
    )


def refuse_requests(name: str) -> None:
    """Raise PERMISSION_DENIED where a name is that of a request of the protocol, which nobody calls or sets."""
    if name in _REQUESTS:
        text = f"{name!r} is no attribute to call or set; call {name}() of the remote environment"
        raise RequestError(Code.PERMISSION_DENIED, text)


def attribute_in(asked: properties_pb2.PropertyRequest, tree: PropertyTree) -> str | None:
    """Return the name of the environment's attribute that a request reads or writes; None: it does something else."""
    above, _, name = (asked.read_property.key or asked.write_property.key).rpartition(".")
    known = any(family.key == above for family in tree.families)
    return name if above == _ATTRIBUTES and known and name else None


def as_look(request: bridge_pb2.CallRequest) -> bridge_pb2.CallRequest:
    """Return the request that only looks at what another one would call."""
    return bridge_pb2.CallRequest(name=request.name, lanes=request.lanes, look=True)


def refuse_method(request: bridge_pb2.CallRequest, response: bridge_pb2.CallResponse) -> None:
    """Raise PERMISSION_DENIED where a request that was served as a look was to call a method."""
    if response.is_method and not request.look:
        raise no_right(request.name)


def refuse_acting(kind: str, request: pb.EnvironmentRequest, costs: bool, *, shared_control: bool = False) -> None:
    """Raise PERMISSION_DENIED where a request does more than watch; the Steps of a spectator change nothing.

    A call is let through: whoever serves it does so as a look.

    Args:
        kind: Of the request.
        request: The request.
        costs: Whether it is a request for a property that runs code of an environment.
        shared_control: Whether it may set attributes.
    """
    # Steps and Resets are a spectator's: it could join in no other role.
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
            # Names are many bytes, and of no use to who calls nothing.
            allowed = not costs and asked.read_property.key != NAMES
    if not allowed:
        raise RequestError(
            Code.PERMISSION_DENIED,
            "this token is for watching; to play, or to make or change anything, ask for the other token",
        )
