"""A client's connection over gRPC: the only file of the client that touches the network.

Answers are handed to `deliver` by gRPC's own thread as they arrive, so that one queue can wait for many connections,
with a deadline, and nothing blocks in a read.
"""

from __future__ import annotations

import ipaddress
import queue
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import grpc

from bridge.address import Address
from bridge.client.relay import RelayConnection
from bridge.client.remedies import remedy
from bridge.credentials import TOKEN_VARIABLE
from bridge.errors import Code, ConnectError, ConnectionLostError, RefusedError, RemoteError, SettingError
from bridge.forks import forget_in_child, leak, must_relay, note_grpc_in_use
from bridge.version import __version__
from bridge.wire import HELLO, METHOD, SERVICE

__all__ = ["KEEPALIVE", "GrpcConnection", "open_connection", "shown_token"]

KEEPALIVE = 20.0
"""Seconds without a sign of the server after which it is asked for one; it then has half of them for it."""
# Other servers than ours hang up on who asks them more often than every five minutes. Which kind it is, a first
# connection tells; the second one asks ours as often as it should.
_KEEPALIVE_UNKNOWN = 310.0
_ours: set[str] = set()


class _Channels:
    """One channel for all connections of this process to one target, closed with the last of them."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._open: dict[tuple[Any, ...], tuple[grpc.Channel, int]] = {}

    def acquire(self, key: tuple[Any, ...], make: Callable[[], grpc.Channel]) -> grpc.Channel:
        with self._guard:
            channel, users = self._open.get(key, (None, 0))
            if channel is None:
                channel = make()
            self._open[key] = (channel, users + 1)
            return channel

    def release(self, key: tuple[Any, ...]) -> None:
        with self._guard:
            channel, users = self._open.pop(key)
            if users > 1:
                self._open[key] = (channel, users - 1)
                return
        channel.close()

    def after_fork(self) -> None:
        """Leave the channels to the parent process."""
        for channel, _ in self._open.values():
            leak(channel)
        self._guard, self._open = threading.Lock(), {}


_channels = _Channels()
forget_in_child(_channels)


class GrpcConnection:
    """A stream of requests and answers.

    Args:
        address: Where to connect to.
        deliver: Called with each answer's bytes, from another thread, and at the end of the stream once with the
        RemoteError
            that says why; it must not block.
        max_message_bytes: The largest request or answer.
    """

    def __init__(
        self,
        address: Address,
        deliver: Callable[[bytes | RemoteError], None],
        max_message_bytes: int,
    ) -> None:
        note_grpc_in_use()
        self._url = address.url
        self._deliver = deliver
        self._max_message_bytes = max_message_bytes
        self._answered = False
        self._closing = False
        self._released = False
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._scheme = address.scheme
        credentials = address.credentials
        self._withheld = _withholds(address)
        self._target = address.target
        keepalive = KEEPALIVE if address.target in _ours else _KEEPALIVE_UNKNOWN
        self._key = (address.scheme, address.target, max_message_bytes, credentials, keepalive)
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.keepalive_time_ms", int(keepalive * 1000)),  # finds connections that are half open
            ("grpc.keepalive_timeout_ms", int(KEEPALIVE * 500)),
            ("grpc.http2.ping_timeout_ms", int(KEEPALIVE * 500)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.enable_http_proxy", 0),  # an environment is reached directly
        ]
        channel = _channels.acquire(self._key, lambda: _open_channel(address, options))
        process = channel.stream_stream(f"/{SERVICE}/{METHOD}", None, self._on_answer)
        metadata = ((HELLO, __version__), *_metadata(address))  # U-12
        self._call = process(iter(self._requests.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name=f"bridge-client {address.target}", daemon=True)
        self._reader.start()
        self._inherited = False
        forget_in_child(self)

    def after_fork(self) -> None:
        """In a forked process: leave the stream to the parent process, whoever still holds this."""
        leak(self)
        self._inherited = True

    @property
    def server_version(self) -> str | None:
        """The version of a Gymnasium Bridge server, None for another one; known once an answer came."""
        if not self._answered:
            return None
        version = dict(self._call.initial_metadata()).get(HELLO)
        if version is not None:
            _ours.add(self._target)
        return version.decode() if isinstance(version, bytes) else version

    def send(self, request: bytes) -> None:
        """Send a request; it is on its way when this returns.

        Raises:
            SettingError: It is larger than `max_message_bytes`.
        """
        if len(request) > self._max_message_bytes:
            raise SettingError(
                f"a request of {len(request)} bytes is larger than max_message_bytes={self._max_message_bytes}"
            )
        if self._inherited:
            raise ConnectionLostError(self._url, "this process was forked, and the connection is its parent's")
        self._requests.put(request)

    def _on_answer(self, data: bytes) -> bytes:
        # gRPC calls this in its own thread as soon as the answer is there: a thread less on its way to who waits.
        self._answered = True
        self._deliver(data)
        return data

    def _read(self) -> None:
        """Ask gRPC for one answer after the other until the stream ends, and say how it ended."""
        try:
            for _ in self._call:
                pass
            ending: RemoteError = ConnectionLostError(self._url, "the server ended the stream")
        except grpc.RpcError as error:
            ending = self._explain(error)
        self._requests.put(None)  # ends gRPC's thread that takes from the queue
        if not self._closing:
            self._deliver(ending)

    def _explain(self, error: grpc.RpcError) -> RemoteError:
        code, details = error.code(), error.details() or "no details"
        if code is grpc.StatusCode.UNAVAILABLE and not self._answered:
            return ConnectError(
                self._url,
                f"no connection: {details}. {remedy(self._scheme, details)}",
            )
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return ConnectionLostError(self._url, f"the connection was lost: {details}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ConnectError(self._url, f"a gRPC server is there, but it does not speak dm_env_rpc: {details}")
        if code is grpc.StatusCode.UNAUTHENTICATED and self._withheld:
            details += f" ({TOKEN_VARIABLE} is not sent unencrypted to another machine: use grpcs://, or pass token=)"
        return RefusedError(self._url, f"the stream was ended: {details}", int(Code[code.name]))

    def finish(self) -> None:
        """Say that no request follows; those sent before are served."""
        self._closing = True
        self._requests.put(None)

    def close(self, timeout: float) -> None:
        """End the stream. Waits for the server at most `timeout` seconds, then cuts it."""
        if self._inherited or sys.is_finalizing():
            return  # at the interpreter's end gRPC's threads stand still: a wait for them would have no end
        self.finish()
        self._reader.join(timeout)
        if self._reader.is_alive():
            self._call.cancel()  # type: ignore[no-untyped-call]
            self._reader.join(5.0)
        if not self._released:
            self._released = True
            _channels.release(self._key)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _withholds(address: Address) -> bool:
    """Whether the token is kept back: it was given for any server there is, and would travel for all to read."""
    held = address.credentials
    return held.token is not None and held.from_environment and not address.tls and not _is_loopback(address.host)


def shown_token(address: Address) -> str | None:
    """Return the token that is shown to a server; None: there is none, or it is not for everybody to read."""
    token = address.credentials.token
    if token is None or _withholds(address):
        return None
    if not address.tls and not _is_loopback(address.host):
        warnings.warn(
            f"the token travels unencrypted to {address.host}; use a server with TLS, and {address.scheme}s://",
            RuntimeWarning,
            stacklevel=2,
        )
    return token.reveal()


def _metadata(address: Address) -> tuple[tuple[str, str], ...]:
    token = shown_token(address)
    return () if token is None else (("authorization", f"Bearer {token}"),)


def _open_channel(address: Address, options: list[tuple[str, Any]]) -> grpc.Channel:
    held = address.credentials
    if address.scheme == "grpcs":
        credentials = grpc.ssl_channel_credentials(held.tls_ca, held.tls_key, held.tls_certificate)
        return grpc.secure_channel(address.target, credentials, options=options)
    if held.has_tls:
        raise SettingError(
            f"tls_ca, tls_certificate and tls_key are for TLS, but {address.url!r} is without: write grpcs://"
        )
    return grpc.insecure_channel(address.target, options=options)


def open_connection(
    address: Address, max_message_bytes: int, *, deliver: Callable[[bytes | RemoteError], None]
) -> GrpcConnection | RelayConnection:
    """Connect, by a process of its own where this one was forked from one that had used gRPC."""
    if must_relay():
        return RelayConnection(open_connection, (address, max_message_bytes), address.url, deliver, max_message_bytes)
    return GrpcConnection(address, deliver, max_message_bytes)
