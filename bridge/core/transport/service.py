"""The gRPC service and the metadata that both ends must agree on."""

from __future__ import annotations

import http

from bridge.errors import Code

__all__ = ["HELLO", "METHOD", "ROOM", "SERVICE", "code_of_status"]

SERVICE = "dm_env_rpc.v1.Environment"
"""The public service, whose one method is a bidirectional stream."""

ROOM = "gymnasium_bridge.Room"
"""Named in a health check, it asks whether a server takes a further client: gRPC has no word for a full server."""

METHOD = "Process"
"""The one method."""

HELLO = "gymnasium-bridge"
"""The key of the response metadata by which a client knows a server of this package, and its version."""

# As gRPC maps the status of an answer without a grpc-status, and those of WebSocket's handshakes besides. Such answers
# come from proxies: 502 to 504 where no server is behind.
_BY_HTTP_STATUS = {
    http.HTTPStatus.BAD_REQUEST: Code.INTERNAL,
    http.HTTPStatus.UNAUTHORIZED: Code.UNAUTHENTICATED,
    http.HTTPStatus.FORBIDDEN: Code.PERMISSION_DENIED,
    http.HTTPStatus.MISDIRECTED_REQUEST: Code.PERMISSION_DENIED,  # our server, for a Host that it does not know
    http.HTTPStatus.NOT_FOUND: Code.UNIMPLEMENTED,
    http.HTTPStatus.UPGRADE_REQUIRED: Code.UNIMPLEMENTED,
    http.HTTPStatus.TOO_MANY_REQUESTS: Code.UNAVAILABLE,
    http.HTTPStatus.BAD_GATEWAY: Code.UNAVAILABLE,
    http.HTTPStatus.SERVICE_UNAVAILABLE: Code.UNAVAILABLE,
    http.HTTPStatus.GATEWAY_TIMEOUT: Code.UNAVAILABLE,
}


def code_of_status(status: int) -> Code:
    """Return the status code that an HTTP status stands for, by which a call or a handshake was refused."""
    return _BY_HTTP_STATUS.get(status, Code.UNKNOWN)  # type: ignore[call-overload, no-any-return]
