"""Advice for a connection that failed, by the error of the library below."""

from __future__ import annotations

import re

__all__ = ["is_absent", "remedy"]

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
# `certificate_verify_failed`, so that comes after them.
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
    "certificate has expired": "The server's certificate has expired: renew it (`bridge cert` makes one)",
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
    """Return whether an error text of gRPC says that nobody is there, rather than somebody who speaks otherwise."""
    said = details.lower()
    return not (_TLS.search(said) or _CLOSED.search(said) or any(sign in said for sign in _REMEDIES))


def remedy(scheme: str, details: str) -> str:
    """Say what to do.

    Args:
        scheme: The URL's.
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
