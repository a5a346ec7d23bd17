"""Which transport a connection takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from bridge import local
from bridge.address import Address, is_loopback
from bridge.client.frame_dialect import FrameDialect
from bridge.client.grpc_dialect import GrpcDialect
from bridge.client.inbox import Inbox
from bridge.client.link import Dialect, Line, Link
from bridge.client.token import shown_token
from bridge.errors import RemoteError, SettingError

__all__ = ["Connection", "checked_transport", "connect"]


class Connection(Protocol):
    """A stream of requests and answers, over whatever transport."""

    @property
    def server_version(self) -> str | None:
        """The version of a Gymnasium Bridge server, None for another one; known once an answer came."""

    @property
    def silent(self) -> bool:
        """Whether not a byte has come yet."""

    def send(self, request: bytes) -> None:
        """Send a request; SettingError where it is larger than `max_message_bytes`."""

    def finish(self) -> None:
        """Say that no request follows; those sent before are served."""

    def close(self, timeout: float) -> None:
        """End the stream, within `timeout` seconds."""


def checked_transport(transport: Any) -> str | None:
    """Return a choice of transport, or raise SettingError where it is none."""
    if transport not in (None, "grpc"):
        raise SettingError(
            f"expected transport to be None or 'grpc', got {transport!r}; unix://, tcp:// and tcps:// URLs name theirs"
        )
    return "grpc" if transport else None


def connect(
    address: Address,
    inbox: Inbox[Any],
    label: Callable[[bytes | bytearray | RemoteError], Any],
    max_message_bytes: int,
    transport: str | None = None,
    *,
    shared: bool = False,
) -> Connection:
    """Open a connection, without waiting.

    Args:
        address: Where to.
        inbox: Gets what comes.
        label: Makes of what came what the inbox gets.
        max_message_bytes: The largest request or answer.
        transport: `grpc` for gRPC also where the server offers a Unix socket of this machine.
        shared: Whether there are others to the same place. On this machine they go over the same socket, which costs
            a fraction of what a socket each does. Another machine's name may stand for many, over which sockets of
            their own are spread.
    """

    def here(what: bytes | bytearray | RemoteError) -> None:
        inbox.put(label(what))

    url, server_id = address.url, None
    if address.scheme == "grpc" and transport is None:
        offer = local.find(address.host, address.port)
        if offer is not None:
            address, server_id = offer.applied(address), offer.server_id
    if address.credentials.has_tls and not address.tls and server_id is None:
        remedy = (
            "a Unix socket needs none, leave them out" if address.scheme == "unix" else f"write {address.scheme}s://"
        )
        raise SettingError(f"tls_ca, tls_certificate and tls_key are for TLS, but {address.url!r} is without: {remedy}")
    shared = shared and (address.scheme == "unix" or is_loopback(address.host))
    key = address.scheme, address.target, address.credentials, server_id
    link: Link | None = inbox.links.get(key) if shared else None
    if link is None or not link.roomy:
        link = Link(
            address, _dialect(address, max_message_bytes, server_id, shared), inbox, max_message_bytes, shared=shared
        )
        if shared:
            inbox.links[key] = link
    return Line(link, url, here)


def _dialect(address: Address, max_message_bytes: int, server_id: str | None, shared: bool) -> Dialect:
    if shared or address.scheme in ("grpc", "grpcs"):
        return GrpcDialect(address, max_message_bytes, server_id)
    return FrameDialect(address, max_message_bytes, shown_token(address), server_id)
