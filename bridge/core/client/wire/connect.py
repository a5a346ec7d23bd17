"""How a client connects: by our own HTTP/2, or by grpcio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from bridge.core.client.wire.call import ClientCall, Deliver
from bridge.core.client.wire.connection import connection_to
from bridge.core.client.wire.dialer import known_targets
from bridge.core.client.wire.poller import Poller
from bridge.core.transport.address import Address, is_loopback
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
        shared: Whether there are others to the same place. On this machine they go over the same socket, which costs
            a fraction of what a socket each does. Another machine's name may stand for many, over which sockets of
            their own are spread.
        together: Whether all of them have to reach the same server, whatever its name stands for: they share a socket.

    Raises:
        SettingError: The credentials are for TLS, and the address is without, or they cannot be used; this platform has
            no Unix sockets.
    """
    local = address.scheme == "unix"
    address.check_tls()
    if local:
        known_targets(address)  # raises where there are no Unix sockets
    if transport == "grpcio":
        if address.websocket:
            raise SettingError(
                f"transport='grpcio' speaks gRPC alone, but {address.url!r} is for WebSocket: leave it out"
            )
        from bridge.core.client.wire.grpcio_transport import GrpcioCall  # loads grpcio, which nothing else needs

        return GrpcioCall(address, poller, deliver, max_message_bytes)
    near = local or is_loopback(address.host)
    # A server that has dialed in has made one connection, for all that goes there.
    shared = not address.websocket and (together or address.dialed or (shared and near))
    return ClientCall(connection_to(address, poller, max_message_bytes, shared=shared), address.url, deliver)
