"""The gRPC service and the metadata that both ends must agree on; remedies for errors of connecting."""

from __future__ import annotations

import http
import re

from bridge.errors import Code

__all__ = ["HELLO", "METHOD", "ROOM", "SERVICE", "code_of_status", "is_absent", "is_stopping", "remedy"]

SERVICE = "dm_env_rpc.v1.Environment"
"""The public service. Its only method is a bidirectional stream."""

ROOM = "gymnasium_bridge.Room"
"""The service name of health checks that ask if a server accepts another client. gRPC has no status for "full"."""

METHOD = "Process"
"""The name of the method."""

HELLO = "gymnasium-bridge"
"""The key of the response metadata by which a client recognises a server of this package, and its version."""

# gRPC's mapping for the HTTP status of an answer without a grpc-status, extended for WebSocket handshakes. Such answers
# come from proxies: 502 to 504 if there is no server behind them.
_BY_HTTP_STATUS = {
    http.HTTPStatus.BAD_REQUEST: Code.INTERNAL,
    http.HTTPStatus.UNAUTHORIZED: Code.UNAUTHENTICATED,
    http.HTTPStatus.FORBIDDEN: Code.PERMISSION_DENIED,
    http.HTTPStatus.MISDIRECTED_REQUEST: Code.PERMISSION_DENIED,  # from our server, for a Host that it does not know
    http.HTTPStatus.NOT_FOUND: Code.UNIMPLEMENTED,
    http.HTTPStatus.UPGRADE_REQUIRED: Code.UNIMPLEMENTED,
    http.HTTPStatus.TOO_MANY_REQUESTS: Code.UNAVAILABLE,
    http.HTTPStatus.BAD_GATEWAY: Code.UNAVAILABLE,
    http.HTTPStatus.SERVICE_UNAVAILABLE: Code.UNAVAILABLE,
    http.HTTPStatus.GATEWAY_TIMEOUT: Code.UNAVAILABLE,
}


def code_of_status(status: int) -> Code:
    """Return the status code for the HTTP status with which a call or a handshake was refused."""
    return _BY_HTTP_STATUS.get(status, Code.UNKNOWN)  # type: ignore[call-overload, no-any-return]


_CLIENT = (
    "perhaps it asks for a client's certificate, and none came, or one that has expired or is of another authority: "
    "pass tls=TLS(certificate=…, key=…)"
)
_REFUSED = f"A server is there and refused: {_CLIENT}"
_PLAIN = "The port is there but speaks no TLS: use {plain}://, or serve with tls=TLS(certificate=…, key=…)"
_OTHER_NAME = (
    "The server's certificate is not for this name: connect to a name that it holds, or pass that as "
    "tls=TLS(server_name=…)"
)
# Searched in this order: OpenSSL's text for a wrong name or an expired certificate also contains
# `certificate_verify_failed`, which is therefore last.
_REMEDIES = {
    "the port speaks tls": "Use {tls}://",
    "no grpc server": "Another program answers there: is this the URL that the server printed for {scheme}://?",
    "no websocket server": (
        'Serve with protocols=["websocket"] (--protocol websocket), or is another program there? For gRPC, write '
        "{grpc}://"
    ),
    "wrong_version_number": _PLAIN,
    "packet length too long": _PLAIN,
    "record layer failure": _PLAIN,
    "certificate has expired": "The server's certificate has expired: renew it (`gymnasium-bridge cert` makes one)",
    "hostname verification": _OTHER_NAME,
    "certificate is not valid for": _OTHER_NAME,
    "certificate_verify_failed": (
        "The server's certificate is not signed by a CA that is trusted here: pass that CA's certificate as "
        "tls=TLS(ca=…)"
    ),
    "alert certificate": _REFUSED,
    "alert bad certificate": _REFUSED,
    "alert unknown ca": _REFUSED,
    "alert unsupported certificate": _REFUSED,
}
_GRPC = {"ws": "grpc", "wss": "grpcs"}
_TLS = re.compile("ssl|tls|certificate|handshake")
_CLOSED = re.compile("socket closed|connection reset|broken pipe|end of tcp|closed the connection|alert|unwrap failed")


def is_absent(details: str) -> bool:
    """True if an error text of gRPC means that no server is there, not that a server of another kind is."""
    said = details.lower()
    return not (_TLS.search(said) or _CLOSED.search(said) or any(sign in said for sign in _REMEDIES))


def is_stopping(details: str) -> bool:
    """True if an error text is from a server of this package that is stopping, and accepts no more clients."""
    return "server is stopping" in details


def remedy(scheme: str, details: str) -> str:
    """Return what the user can do about an error.

    Args:
        scheme: The URL's scheme.
        details: The error text of gRPC, OpenSSL or the system.
    """
    said, plain = details.lower(), scheme.removesuffix("s")
    for sign, text in _REMEDIES.items():
        if sign in said:
            return text.format(scheme=scheme, grpc=_GRPC.get(scheme, scheme), plain=plain, tls=f"{plain}s")
    if _CLOSED.search(said):
        if scheme == f"{plain}s":
            return f"A server is there and closed the connection: {_CLIENT}"
        question = "is it a gRPC server?" if scheme == "unix" else f"does it speak TLS? Then use {plain}s://"
        return f"Something is there and closed the connection: {question}"
    return "Is the server running there, and its port reachable from this machine?"
