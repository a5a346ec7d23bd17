"""Opens a call to a server, over the transport that was chosen: our own HTTP/2, a WebSocket, or the library grpcio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from bridge.core.client.wire.connection import ClientCall, Deliver, open_call
from bridge.core.client.wire.dialer import known_targets
from bridge.core.client.wire.poller import Poller
from bridge.core.transport.address import Address
from bridge.errors import SettingError

if TYPE_CHECKING:
    from bridge.core.client.wire.grpcio_transport import GrpcioCall

__all__ = ["TRANSPORTS", "AnyCall", "Transport", "checked_transport", "connect"]

Transport: TypeAlias = Literal["http2", "grpcio"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
"""The ways to connect: our own HTTP/2, or the library grpcio."""
AnyCall: TypeAlias = "ClientCall | GrpcioCall"
"""A stream of requests and answers, over whatever transport."""


def checked_transport(transport: Any) -> str:
    """Return a choice of transport, or raise SettingError where it is none."""
    if transport not in TRANSPORTS:
        raise SettingError(f"expected transport to be one of {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
    return str(transport)


def connect(
    address: Address,
    poller: Poller[Any],
    deliver: Deliver,
    max_message_bytes: int,
    transport: str = "http2",
    *,
    shared: bool = False,
    together: bool = False,
) -> AnyCall:
    """Open a connection, without waiting.

    Args:
        address: Where to.
        poller: Looks after the socket.
        deliver: Called with each answer's bytes, and at the end of the stream once with the RemoteError that says why;
            puts what its owner waits for into the poller. With grpcio it is called in a thread of the transport's own.
        max_message_bytes: The largest request or answer.
        transport: One of `TRANSPORTS`.
        shared: As for `open_call`.
        together: As for `open_call`.

    Raises:
        SettingError: The credentials are for TLS, and the address is without, or they cannot be used; this platform has
            no Unix sockets.
    """
    address.check_tls()
    if address.scheme == "unix":
        known_targets(address)  # raises where there are no Unix sockets
    if transport == "grpcio":
        if address.websocket:
            raise SettingError(
                f"transport='grpcio' speaks gRPC alone, but {address.url!r} is for WebSocket: leave it out"
            )
        from bridge.core.client.wire.grpcio_transport import GrpcioCall  # loads grpcio, which nothing else needs

        return GrpcioCall(address, poller, deliver, max_message_bytes)
    return open_call(address, poller, deliver, max_message_bytes, shared=shared, together=together)
