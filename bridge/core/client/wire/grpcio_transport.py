"""A client's connection by the library grpcio, in place of our own HTTP/2: `transport="grpcio"`.

grpcio has its own threads for each connection, and a thread of this module reads the answers and posts them to the
poller. No other module of the client imports grpcio. A forked process cannot use inherited connections.
"""

from __future__ import annotations

import queue
import ssl
import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc

from bridge.core.client.wire.grpc_client import FOREIGN_KEEPALIVE_INTERVAL, call_error
from bridge.core.client.wire.poller import Poller
from bridge.core.ownership import forget_in_child
from bridge.core.transport.address import Address, shown_token
from bridge.core.transport.http_proxies import HttpProxy, find_grpc_proxy, grpc_options
from bridge.core.transport.service import HELLO, METHOD, SERVICE
from bridge.core.transport.sockets import PATIENCE
from bridge.core.transport.tls import client_context
from bridge.errors import Code, ConnectionLostError, RemoteError, SettingError

__all__ = ["GrpcioCall"]


class GrpcioCall:
    """One stream of requests and answers, over a channel of its own.

    Args:
        address: The server; its scheme says whether there is TLS.
        poller: Woken after each delivery.
        deliver: Called with each answer, and at the end of the stream once with the RemoteError that ended it; in a
            thread of this call.
        most: The largest request or answer, in bytes.

    Raises:
        SettingError: The certificates cannot be used, or grpcio has no such compression.
    """

    draining = False
    """True if the server has said that it accepts no more calls. Always False, because grpcio does not report it."""

    def __init__(
        self, address: Address, poller: Poller[Any], deliver: Callable[[bytes | RemoteError], None], most: int
    ) -> None:
        self._address = address
        self._poller, self._deliver, self._most = poller, deliver, most
        self._finished = self._closed = self._inherited = False
        self.server_version: str | None = None
        self.silent = True
        token = shown_token(address)
        metadata = (*address.hello, *(() if token is None else (("authorization", f"Bearer {token}"),)))
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        if address.compression == "zstd":
            raise SettingError("grpcio cannot read zstd: use compression='gzip', or transport='http2'")
        compression = grpc.Compression.NoCompression if address.compression is None else grpc.Compression.Gzip
        self._proxy = None if address.scheme == "unix" else find_grpc_proxy(address.host, address.port)
        self._channel = _channel(address, most, self._proxy)
        # Requests and answers are bytes already: `bytes` serializes neither.
        method = self._channel.stream_stream(f"/{SERVICE}/{METHOD}", bytes, bytes)
        self._call: Any = method(iter(self._requests.get, None), metadata=metadata, compression=compression)
        # The answers arrive in a thread of their own, which must wake a thread that waits in the poller.
        poller.add_poster()
        self._reader = threading.Thread(target=self._read, name="bridge-grpcio", daemon=True)
        self._reader.start()
        forget_in_child(self)

    def after_fork(self) -> None:
        """In a forked process: leave the connection to the parent process."""
        self._inherited = True

    def send(self, request: bytes) -> None:
        """Send a request; raises SettingError if it is larger than `max_message_bytes`."""
        if len(request) > self._most:
            raise SettingError(f"a request of {len(request)} bytes is larger than max_message_bytes={self._most}")
        # grpcio's threads are not in a forked process, so a request would stay in the queue.
        if self._inherited:
            raise ConnectionLostError(self._address.url, "this process was forked, and the connection is its parent's")
        self._requests.put(request)

    def finish(self) -> None:
        """Declare that no request follows; those sent before are served."""
        if not (self._finished or self._inherited):
            self._finished = True
            self._requests.put(None)

    def close(self, timeout: float) -> None:
        """End the stream. Wait for the server for at most `timeout` seconds, then cancel the call."""
        if self._closed or self._inherited:
            return
        self.finish()
        self._closed = True
        # The garbage collector may close a connection in any thread, even the one that reads. At the interpreter's end
        # grpcio's threads are frozen, and waiting for them would never end.
        waits = self._reader is not threading.current_thread() and not sys.is_finalizing()
        if waits:
            self._reader.join(timeout)
        # Ends the reader's wait for the next answer. Otherwise a server that never ends its stream would keep one
        # thread for each client.
        self._call.cancel()
        if waits:
            self._reader.join(1.0)
        self._channel.close()
        self._poller.remove_poster()

    def _read(self) -> None:
        """Post the answers, and the end of the stream."""
        answered, code, details = False, int(Code.OK), ""
        try:
            fields = dict(self._call.initial_metadata() or ())
            self.server_version, self.silent = fields.get(HELLO), not fields
            for answer in self._call:
                answered, self.silent = True, False
                if not self._closed:
                    self._deliver(answer)
                    self._poller.wake()
        except grpc.RpcError:
            code, details = self._call.code().value[0], self._call.details() or ""
            if self._proxy is not None and not answered:
                details += self._proxy.note
        # After `finish`, the end of the call is not reported.
        if not self._finished:
            self._deliver(call_error(self._address.url, self._address, code, details, answered=answered))
            self._poller.wake()


def _channel(address: Address, most: int, proxy: HttpProxy | None) -> grpc.Channel:
    options: dict[str, Any] = {
        **grpc_options(proxy),
        "grpc.max_receive_message_length": most,
        "grpc.max_send_message_length": most,
        # The interval for other packages' servers, because a channel's options are fixed before the server is known.
        "grpc.keepalive_time_ms": int(FOREIGN_KEEPALIVE_INTERVAL * 1000),
        "grpc.keepalive_timeout_ms": int(PATIENCE * 1000),
        "grpc.use_local_subchannel_pool": 1,  # a channel that failed to connect must not delay others
    }
    if not address.tls:
        return grpc.insecure_channel(address.target, tuple(options.items()))
    held = address.credentials
    if held.tls_server_name is not None:
        options["grpc.ssl_target_name_override"] = held.tls_server_name
    trusted = client_context(held, "h2").get_ca_certs(binary_form=True)  # SettingError if a file cannot be read
    roots = "".join(map(ssl.DER_cert_to_PEM_cert, trusted)).encode() or None  # None: grpcio's own
    credentials = grpc.ssl_channel_credentials(roots, held.tls_key, held.tls_certificate)
    return grpc.secure_channel(address.target, credentials, tuple(options.items()))
