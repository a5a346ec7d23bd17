"""Which transport a connection takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from bridge import local
from bridge.address import Address
from bridge.client.frame_transport import FrameConnection
from bridge.client.grpc_transport import open_connection, shown_token
from bridge.client.inbox import Inbox
from bridge.errors import RemoteError, SettingError

__all__ = ["Connection", "checked_transport", "connect", "disconnect"]


class Connection(Protocol):
    """A stream of requests and answers, over whatever transport."""

    @property
    def server_version(self) -> str | None:
        """The version of a Gymnasium Bridge server, None for another one; known once an answer came."""

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
) -> Connection:
    """Open a connection, without waiting.

    Args:
        address: Where to.
        inbox: Gets what comes.
        label: Makes of what came what the inbox gets.
        max_message_bytes: The largest request or answer.
        transport: `grpc` for gRPC also where the server offers a Unix socket of this machine.
    """

    def here(what: bytes | bytearray | RemoteError) -> None:
        inbox.put_here(label(what))

    server_id = None
    if address.scheme == "grpc" and transport is None:
        offer = local.find(address.host, address.port)
        if offer is not None:
            address, server_id = offer.applied(address), offer.server_id
    if address.scheme in ("unix", "tcp", "tcps"):
        if address.credentials.has_tls and not address.tls and server_id is None:
            remedy = "write tcps://" if address.scheme == "tcp" else "a Unix socket needs none, leave them out"
            raise SettingError(
                f"tls_ca, tls_certificate and tls_key are for TLS, but {address.url!r} is without: {remedy}"
            )
        token = address.credentials.token
        # A Unix socket is this machine's own, where nobody reads along.
        shown = (token.reveal() if token else None) if address.scheme == "unix" else shown_token(address)
        return FrameConnection(address, inbox, here, max_message_bytes, shown, server_id)
    connection = open_connection(address, max_message_bytes, deliver=lambda what: inbox.put(label(what)))
    inbox.expect_others(1)
    return connection


def disconnect(connection: Connection, inbox: Inbox[Any], timeout: float) -> None:
    """End a connection that `connect` made, within `timeout` seconds."""
    connection.close(timeout)
    if not isinstance(connection, FrameConnection):
        inbox.expect_others(-1)
