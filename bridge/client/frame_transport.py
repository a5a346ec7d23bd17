"""A client's connection over a Unix or TCP socket, as frames: no thread, the owner's inbox looks after the socket."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from bridge.address import Address
from bridge.client.inbox import Inbox
from bridge.client.remedies import remedy
from bridge.credentials import TOKEN_VARIABLE
from bridge.errors import (
    Code,
    ConnectError,
    ConnectionLostError,
    PeerError,
    RefusedError,
    RemoteError,
    RequestError,
    SettingError,
)
from bridge.frames import HEADER, FrameReader, Hello, pack_frame
from bridge.sockets import prepare
from bridge.tls import Tls, client_context, explain

__all__ = ["FrameConnection"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_CHUNK = 65536
_ALERT = b"\x15\x03"  # how an end that speaks TLS answers to what is none
# Seconds that `send` waits for a server that takes nothing off the socket before the rest is left to `Inbox.get`.
_STALL = 5.0


class FrameConnection:
    """A stream of requests and answers; used by one thread, the one that takes from `inbox`.

    Args:
        address: A `unix`, `tcp` or `tcps` address.
        inbox: Looks after the socket.
        deliver: Called with each answer's bytes, and at the end of the stream once with the RemoteError that says why.
        max_message_bytes: The largest request or answer.
        token: Shown to the server.
        server_id: The id that the server must have; None: any.

    Raises:
        SettingError: The certificates of a `tcps` address cannot be used.
    """

    def __init__(
        self,
        address: Address,
        inbox: Inbox[Any],
        deliver: Callable[[bytes | bytearray | RemoteError], None],
        max_message_bytes: int,
        token: str | None = None,
        server_id: str | None = None,
    ) -> None:
        self._url, self._scheme = address.url, address.scheme
        self._inbox = inbox
        self._deliver = deliver
        self._max_message_bytes = max_message_bytes
        self._server_id = server_id
        self._reader = FrameReader(max_message_bytes)
        self._version: str | None = None
        self._greeted = False
        self._ended = False
        self._closing = False
        self._finished = False
        self._connecting = True
        self._watched = 0
        self._withheld = token is None and address.credentials.token is not None
        self._out = bytearray(pack_frame(Hello(token=token).pack()))
        self._early = bytearray()
        """What is to be said once the handshake is done."""
        self._tls: Tls | None = None
        if address.tls:
            self._tls = Tls(client_context(address.credentials), address.host)
            self._tls.receive(b"")
            self._early, self._out = self._out, bytearray(self._tls.send())
        self._sock: socket.socket | None = None
        self._candidates: list[tuple[int, Any]] = []
        try:
            self._candidates = _candidates(address)
        except OSError as error:
            self._end(ConnectError(self._url, f"the host {address.host!r} is not known: {error}"))
            return
        self._connect_next(None)

    @property
    def server_version(self) -> str | None:
        """The server's version; known once an answer came."""
        return self._version

    def _connect_next(self, error: OSError | None) -> None:
        """Try the next address that the host's name stands for."""
        while self._candidates:
            family, target = self._candidates.pop(0)
            if self._sock is not None:
                self._inbox.forget(self._sock)
                self._sock.close()
            try:
                self._sock = socket.socket(family, socket.SOCK_STREAM)
                prepare(self._sock)
                number = self._sock.connect_ex(target)
            except OSError as problem:  # a name or path that no socket takes
                error = problem
                continue
            if number in (0, errno.EISCONN):
                self._connecting = False
                self._watch(_READ)
                self._flush()
                return
            if number in (errno.EINPROGRESS, errno.EWOULDBLOCK):
                self._watch(_WRITE)
                return
            error = OSError(number, errno.errorcode.get(number, str(number)))
        detail = f"{error.strerror or error}" if error else "the name has no address"
        self._end(
            ConnectError(
                self._url,
                f"no connection: {detail}. Is the server running there, and does it serve this transport?",
            )
        )

    def _unmet(self, details: str) -> ConnectError:
        return ConnectError(self._url, f"no connection: {details}. {remedy(self._scheme, details)}")

    def _sealed(self, tls: Tls, data: bytes) -> bytes:
        """Return what goes over the wire for a piece of the stream."""
        if tls.ready:
            return tls.send((data,))
        self._early += data
        return b""

    def _opened(self, data: bytes) -> bytes:
        """Return the piece of the stream that came over the wire; what the handshake says to it is added to `_out`."""
        tls = self._tls
        if tls is None or not data:
            return data
        plain = tls.receive(data)
        if tls.ready and self._early:
            early, self._early = self._early, bytearray()
            self._out += tls.send((bytes(early),))
        elif tls.owes:
            self._out += tls.send()
        return plain

    def _watch(self, events: int) -> None:
        if self._sock is not None and events != self._watched:
            self._watched = events
            self._inbox.watch(self._sock, events, self._on_ready)

    def _on_ready(self, events: int) -> None:
        if self._sock is None:
            return
        if self._connecting:
            number = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self._watched = 0
                self._connect_next(OSError(number, errno.errorcode.get(number, str(number))))
                return
            self._connecting = False
            self._watch(_READ)
        if self._out:
            self._flush()
        if events & _READ:
            self._receive()

    def send(self, request: bytes) -> None:
        """Send a request; it is on its way when this returns.

        Raises:
            SettingError: It is larger than `max_message_bytes`.
        """
        if len(request) > self._max_message_bytes:
            raise SettingError(
                f"a request of {len(request)} bytes is larger than max_message_bytes={self._max_message_bytes}"
            )
        sock = self._sock
        if sock is None:
            return  # how it ended was delivered
        frame = HEADER.pack(len(request)) + request
        if self._tls is not None:
            frame = self._sealed(self._tls, frame)
        if self._out or self._connecting:
            self._out += frame
            return
        try:
            sent = sock.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lost(error)
            return
        if sent < len(frame):
            self._out += memoryview(frame)[sent:]
            self._push()

    def _push(self) -> None:
        """Send what is left, taking what comes meanwhile so that neither end waits for the other."""
        deadline = time.monotonic() + _STALL
        with selectors.DefaultSelector() as selector:
            if self._sock is None:
                return
            selector.register(self._sock, _READ | _WRITE)
            while self._out and self._sock is not None and time.monotonic() < deadline:
                for _, events in selector.select(max(0.0, deadline - time.monotonic())):
                    if events & _READ:
                        self._receive()
                    if events & _WRITE and self._sock is not None:
                        self._flush()

    def _flush(self) -> None:
        sock = self._sock
        if sock is None:
            return
        try:
            while self._out:
                with memoryview(self._out) as view:
                    sent = sock.send(view[: 1 << 20])
                del self._out[:sent]
        except BlockingIOError:
            self._watch(_READ | _WRITE)
            return
        except OSError as error:
            self._lost(error)
            return
        self._watch(_READ)
        if self._finished and not self._early:
            self._shut()

    def _receive(self) -> None:
        sock = self._sock
        if sock is None:
            return
        reader = self._reader
        space = reader.space
        data = b""
        try:
            if space is None or self._tls is not None:
                data = sock.recv(_CHUNK)
                count = len(data)
                frames = reader.feed(data) if self._tls is None else reader.take(self._opened(data))
            else:
                count = sock.recv_into(space)
                frames = reader.filled(count)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(error)
            return
        except RequestError as error:
            if self._greeted:
                self._end(PeerError(self._url, error.message))
            elif data[:2] == _ALERT:
                self._end(self._unmet("it answered by a TLS alert"))
            else:
                self._end(ConnectError(self._url, f"no server of this package: {error.message}"))
            return
        for frame in frames:
            if self._greeted:
                self._deliver(frame)
            elif not self._greet(frame):
                return
        if self._out and self._tls is not None:
            self._flush()
        if not count and not self._greeted:
            self._end(self._unmet("it closed the connection without a word"))
        elif not count:
            cut = " in the midst of a frame" if reader.partial else ""
            self._end(ConnectionLostError(self._url, f"the server ended the stream{cut}"))

    def _greet(self, frame: bytes | bytearray) -> bool:
        try:
            hello = Hello.unpack(frame)
        except RequestError as error:
            self._end(ConnectError(self._url, f"no server of this package: {error.message}"))
            return False
        if hello.code:
            hint = ""
            if hello.code == Code.UNAUTHENTICATED and self._withheld:
                hint = f" ({TOKEN_VARIABLE} is not sent unencrypted to another machine: use tcps://, or pass token=)"
            self._end(RefusedError(self._url, f"the stream was ended: {hello.message}{hint}", hello.code))
            return False
        if self._server_id is not None and hello.server != self._server_id:
            self._end(ConnectError(self._url, "another server answers at its Unix socket; use transport='grpc'"))
            return False
        self._greeted = True
        self._version = hello.version
        return True

    def _lost(self, error: OSError) -> None:
        if isinstance(error, (BrokenPipeError, ConnectionResetError)) and not self._greeted:
            error = self._last_words() or error
        if self._ended:
            return
        reason = error.strerror or str(error)
        if isinstance(error, ssl.SSLError):
            reason = explain(error)
            if self._tls is not None and self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.send(self._tls.send())  # tells the server why, for its log
        self._end(
            ConnectionLostError(self._url, f"the connection was lost: {reason}")
            if self._greeted
            else self._unmet(reason)
        )

    def _last_words(self) -> ssl.SSLError | None:
        """Read why a server refused that closed before it took our first request."""
        sock = self._sock
        if sock is None:
            return None
        try:
            for frame in self._reader.take(self._opened(sock.recv(_CHUNK))):
                self._greet(frame)
                return None
        except ssl.SSLError as error:
            return error
        except (OSError, RequestError):
            pass
        return None

    def _end(self, ending: RemoteError) -> None:
        """Close the socket and say why, once."""
        if self._ended:
            return
        self._ended = True
        self._drop()
        if not self._closing:
            self._deliver(ending)

    def _drop(self) -> None:
        sock, self._sock = self._sock, None
        self._ended = True
        if sock is not None:
            self._inbox.forget(sock)
            sock.close()

    def finish(self) -> None:
        """Say that no request follows; those sent before are served."""
        self._closing = True
        if not self._finished:
            self._finished = True
            if not self._out and not self._early:
                self._shut()

    def _shut(self) -> None:
        if self._sock is not None:
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                self._drop()

    def close(self, timeout: float) -> None:
        """End the stream. Waits for the server at most `timeout` seconds, then cuts it."""
        self.finish()
        self._deliver = _ignore
        deadline = time.monotonic() + timeout
        if self._sock is not None and timeout > 0 and not self._connecting:
            with selectors.DefaultSelector() as selector:
                selector.register(self._sock, _READ | (_WRITE if self._out else 0))
                while self._sock is not None and (wait := deadline - time.monotonic()) > 0:
                    for _, events in selector.select(wait):
                        if self._out and events & _WRITE:
                            self._flush()
                            if self._sock is not None and not self._out:
                                selector.modify(self._sock, _READ)
                        if events & _READ:
                            self._receive()
        self._drop()


def _ignore(what: bytes | bytearray | RemoteError) -> None:
    """Take what comes after the last request that anybody waits for."""


def _candidates(address: Address) -> list[tuple[int, Any]]:
    """The socket addresses to try, in order."""
    if address.scheme == "unix":
        family = getattr(socket, "AF_UNIX", None)
        if family is None:
            raise SettingError(f"this platform has no Unix sockets for {address.url!r}; use tcp://HOST:PORT")
        return [(family, address.path)]
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [(family, target) for family, _, _, _, target in found]
