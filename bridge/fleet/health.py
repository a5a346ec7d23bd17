"""A client of gRPC's health service, for probes: it imports little, so it starts fast."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from typing import Any

from bridge.core.client.wire.dialer import known_targets
from bridge.core.extras import install_command
from bridge.core.transport.address import Address
from bridge.core.transport.frames import HeadersReceived, Http2Error, StreamEnded, StreamReset
from bridge.core.transport.http2 import Http2
from bridge.core.transport.messages import MessageReader, pack_prefix
from bridge.core.transport.service import ROOM, remedy
from bridge.core.transport.tls import client_context
from bridge.errors import (
    Code,
    ConnectError,
    ConnectionLostError,
    RefusedError,
    RemoteError,
    RemoteTimeoutError,
)

__all__ = ["NOT_SERVING", "SERVING", "check_health", "has_room"]

SERVING = "SERVING"
"""The server accepts new worlds."""
NOT_SERVING = "NOT_SERVING"
"""The server answers, but accepts no new worlds."""
# HealthCheckResponse: field 1, a varint.
_ANSWERS = {b"\x08\x01": SERVING, b"\x08\x02": NOT_SERVING}
_PATH = "/grpc.health.v1.Health/Check"
_MAX_BYTES = 4096


def has_room(address: Address, timeout: float, *, verify: bool = True) -> bool:
    """Ask whether a server accepts a further connection and a world for it.

    A server that does not report this is not Gymnasium Bridge's, and is assumed to. For arguments and errors see
    `check_health`.
    """
    try:
        return check_health(address, timeout, verify=verify, service=ROOM) != NOT_SERVING
    except RefusedError as error:
        if error.code == Code.NOT_FOUND:
            return True
        raise


def check_health(address: Address, timeout: float, *, verify: bool = True, service: str = "") -> str:
    """Return the health status of a server.

    Args:
        address: The server; its token is not needed.
        timeout: Seconds for the whole check.
        verify: With TLS, whether to verify the server's certificate. A probe on the same machine need not.
        service: The name of the service to check; empty: the whole server.

    Returns:
        `SERVING`, or `NOT_SERVING` for a server that drains or stops.

    Raises:
        ConnectError, ConnectionLostError: No server answers at the address.
        RemoteTimeoutError: The check took more than `timeout` seconds.
        RefusedError: The server has no health service, or refuses the call.
        SettingError: The credentials cannot be used.
    """
    deadline = time.monotonic() + timeout
    url = address.url
    address.check_tls()
    try:
        with closing(_connect(address, timeout, verify)) as sock:
            return _ask(sock, address, deadline, service)
    except RemoteError:  # some of them are OSErrors too
        raise
    except TimeoutError as error:
        raise RemoteTimeoutError(url, f"no answer to a health check within {timeout:g} s") from error
    except OSError as error:
        details = error.strerror or str(error)
        raise ConnectError(url, f"no connection: {details}. {remedy(address.scheme, details)}") from error


def _connect(address: Address, timeout: float, verify: bool) -> socket.socket:
    if address.scheme == "unix":
        ((family, path),) = known_targets(address) or []
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(timeout)
        try:
            sock.connect(path)
        except BaseException:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((address.host, address.port), timeout)
    if not address.tls:
        return sock
    try:
        context = client_context(address.credentials, "h2", verify=verify)
        return context.wrap_socket(sock, server_hostname=address.server_name)
    except BaseException:
        sock.close()
        raise


def _ask(sock: socket.socket, address: Address, deadline: float, service: str) -> str:
    http = Http2(client=True)
    stream = http.open_stream(
        [
            (":method", "POST"),
            (":scheme", "https" if address.tls else "http"),
            (":path", _PATH),
            (":authority", address.authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
    )
    stream.reader = MessageReader(_MAX_BYTES)
    name = service.encode()
    request = b"\x0a" + bytes([len(name)]) + name if name else b""  # HealthCheckRequest: field 1, a string
    http.send_data(stream, [pack_prefix(0, len(request)), request], 5 + len(request))
    http.end_stream(stream)
    while True:
        # One deadline for the whole check: a peer that sends single bytes would restart a timeout for each read.
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        sock.sendall(b"".join(http.data_to_send()))
        data = sock.recv(65536)
        if not data:
            raise ConnectionLostError(address.url, "it closed the connection without an answer")
        try:
            events = http.receive_data(data)
        except Http2Error as error:
            raise ConnectError(address.url, f"no gRPC server: {error}. {remedy(address.scheme, str(error))}") from error
        for _, event in events:
            said = _read(address.url, event)
            if said is not None:
                return said


def _read(url: str, event: Any) -> str | None:
    """Return the status that an event reports; None if it reports none."""
    if isinstance(event, (bytes, bytearray)):
        # proto3 omits a field with the value 0: an empty message is the status UNKNOWN.
        return _ANSWERS.get(bytes(event), f"status {bytes(event).hex() or 'UNKNOWN'}")
    if isinstance(event, HeadersReceived):
        if event.fields.get(":status", "200") != "200" and "grpc-status" not in event.fields:
            raise ConnectError(url, f"the answer has the HTTP status {event.fields[':status']}, as of a proxy")
        # Headers that end the stream are the whole response and must contain a status. If more follows, the first
        # headers contain none.
        code = event.fields.get("grpc-status", "0" if not event.end_stream else "2")
        if code == str(int(Code.UNIMPLEMENTED)):
            text = f"it has no health service; servers of this package have it with: {install_command('ops')}"
            raise RefusedError(url, text, Code.UNIMPLEMENTED)
        if event.end_stream or code != "0":
            number = int(code) if code.isascii() and code.isdigit() and len(code) < 3 else int(Code.UNKNOWN)
            raise RefusedError(url, event.fields.get("grpc-message", "") or Code.named(number), number)
        return None
    if isinstance(event, (StreamReset, StreamEnded)):
        raise ConnectionLostError(url, "it ended the call without an answer")
    raise ConnectError(url, f"its answer is no health status: {event!r:.80}")
