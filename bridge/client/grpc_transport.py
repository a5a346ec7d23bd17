"""A client's connection over gRPC: the only file of the client that touches the network.

Answers are handed to `deliver` by gRPC's own thread as they arrive, so that one queue can wait for many connections,
with a deadline, and nothing blocks in a read.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import grpc

from bridge.address import Address
from bridge.errors import Code, ConnectError, ConnectionLostError, RefusedError, RemoteError, SettingError
from bridge.wire import HELLO, METHOD, SERVICE

__all__ = ["GrpcConnection"]


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


_channels = _Channels()


class GrpcConnection:
    """A stream of requests and answers.

    Args:
        address: Where to connect to.
        deliver: Called with each answer's bytes, from another thread, and at the end of the stream once with the
        RemoteError
            that says why; it must not block.
        max_message_bytes: The largest request or answer.
        closed: Called when `close` is done; nothing is delivered after it.
    """

    def __init__(
        self,
        address: Address,
        deliver: Callable[[bytes | RemoteError], None],
        max_message_bytes: int,
        closed: Callable[[], None] | None = None,
    ) -> None:
        if address.scheme != "grpc":
            raise SettingError(f"the scheme {address.scheme} of {address.url!r} is not served yet; use grpc://")
        self._url = address.url
        self._deliver = deliver
        self._closed = closed
        self._max_message_bytes = max_message_bytes
        self._answered = False
        self._closing = False
        self._released = False
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._key = (address.target, max_message_bytes)
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.enable_http_proxy", 0),  # an environment is reached directly
        ]
        channel = _channels.acquire(self._key, lambda: grpc.insecure_channel(address.target, options=options))
        process = channel.stream_stream(f"/{SERVICE}/{METHOD}", None, self._on_answer)
        self._call = process(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, name=f"bridge-client {address.target}", daemon=True)
        self._reader.start()

    @property
    def server_version(self) -> str | None:
        """The version of a Gymnasium Bridge server, None for another one; known once an answer came."""
        if not self._answered:
            return None
        version = dict(self._call.initial_metadata()).get(HELLO)
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
                f"no connection: {details}. Is the server running there, and its port reachable from this machine?",
            )
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return ConnectionLostError(self._url, f"the connection was lost: {details}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ConnectError(self._url, f"a gRPC server is there, but it does not speak dm_env_rpc: {details}")
        return RefusedError(self._url, f"the stream was ended: {details}", int(Code[code.name]))

    def finish(self) -> None:
        """Say that no request follows; those sent before are served."""
        self._closing = True
        self._requests.put(None)

    def close(self, timeout: float) -> None:
        """End the stream. Waits for the server at most `timeout` seconds, then cuts it."""
        self.finish()
        self._reader.join(timeout)
        if self._reader.is_alive():
            self._call.cancel()  # type: ignore[no-untyped-call]
            self._reader.join(5.0)
        if not self._released:
            self._released = True
            _channels.release(self._key)
            if self._closed is not None:
                self._closed()
