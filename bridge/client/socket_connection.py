"""A client's connection over a socket of its own: no thread, the owner's inbox looks after the socket.

What is spoken over it, frames or gRPC, is a `Dialect`: bytes in and messages out, without a socket.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import ssl
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from bridge.address import Address
from bridge.client import keepalive
from bridge.client.inbox import Inbox
from bridge.client.remedies import remedy
from bridge.errors import ConnectError, ConnectionLostError, RemoteError, SettingError
from bridge.forks import forget_in_child
from bridge.sockets import prepare
from bridge.tls import Tls, client_context, explain

__all__ = ["Dialect", "SocketConnection"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_CHUNK = 65536
# Seconds that `send` waits for a server that takes nothing off the socket before the rest is left to `Inbox.get`.
_STALL = 5.0


class Dialect(Protocol):
    """What is spoken over a connection."""

    answered: bool
    """Whether the server is known to speak it."""
    ending: RemoteError | None
    """How the server ended the stream; None: it has not."""

    @property
    def alpn(self) -> str | None:
        """How TLS names it; None: not at all."""

    @property
    def half_closes(self) -> bool:
        """Whether the end of the socket's stream is what says that no request follows."""

    @property
    def quiet(self) -> float | None:
        """Seconds without a sign of the server after which it is asked for one; None: it cannot be asked."""

    @property
    def server_version(self) -> str | None:
        """The version of a server of this package; None: not known, or another server."""

    @property
    def owed(self) -> bytes:
        """What is to be sent by itself; reading it takes it."""

    def opening(self) -> bytes:
        """Return what is said first."""

    def pack(self, request: bytes) -> bytes:
        """Take a request; return what is to be sent now."""

    def finish(self) -> bytes:
        """Return what says that no request follows."""

    def ping(self) -> bytes:
        """Return what asks for a sign."""

    @property
    def space(self) -> memoryview | None:
        """Where the next bytes go, to be received into and told to `filled`; None: any, to `feed`."""

    def filled(self, count: int) -> list[bytes | bytearray]:
        """Take note that bytes are in `space`; return the answers that they complete."""

    def feed(self, data: bytes) -> list[bytes | bytearray]:
        """Take bytes; return the answers that they complete. Raises RemoteError where they cannot be read."""

    def cut_off(self) -> str:
        """Say what the end of the stream means now."""


class SocketConnection:
    """A stream of requests and answers; used by one thread, the one that takes from `inbox`.

    Args:
        address: Where to; with TLS where its scheme says so.
        dialect: What to speak.
        inbox: Looks after the socket.
        deliver: Called with each answer's bytes, and at the end of the stream once with the RemoteError that says why.
        max_message_bytes: The largest request.

    Raises:
        SettingError: The certificates cannot be used.
    """

    def __init__(
        self,
        address: Address,
        dialect: Dialect,
        inbox: Inbox[Any],
        deliver: Callable[[bytes | bytearray | RemoteError], None],
        max_message_bytes: int,
    ) -> None:
        self._url, self._scheme = address.url, address.scheme
        self._dialect = dialect
        self._inbox = inbox
        self._deliver = deliver
        self._max_message_bytes = max_message_bytes
        self._ended = False
        self._closing = False
        self._finished = False
        self._inherited = False
        self._connecting = True
        self._watched = 0
        self._heard = time.monotonic()
        self._silent = True
        self._asked: float | None = None
        self._out = bytearray(dialect.opening())
        self._early = bytearray()
        """What is to be said once TLS has shaken hands."""
        self._tls: Tls | None = None
        if address.tls:
            self._tls = Tls(client_context(address.credentials, dialect.alpn), address.host)
            self._tls.receive(b"")
            self._early, self._out = self._out, bytearray(self._tls.send())
        self._sock: socket.socket | None = None
        self._candidates: list[tuple[int, Any]] = []
        forget_in_child(self)
        with inbox.guard:
            try:
                self._candidates = _candidates(address)
            except OSError as error:
                self._end(ConnectError(self._url, f"the host {address.host!r} is not known: {error}"))
                return
            if dialect.quiet is not None:
                inbox.attend(self)
            self._connect_next(None)

    def after_fork(self) -> None:
        """In a forked process: leave the stream to the parent process."""
        self._inherited = True

    @property
    def server_version(self) -> str | None:
        """The version of a Gymnasium Bridge server, None for another one; known once an answer came."""
        return self._dialect.server_version

    @property
    def silent(self) -> bool:
        """Whether not a byte has come yet."""
        return self._silent

    @property
    def dialect(self) -> str:
        """The name of what is spoken."""
        return type(self._dialect).__name__

    # Connecting

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
        return ConnectError(self._url, f"no connection: {details.rstrip('.')}. {remedy(self._scheme, details)}")

    def _sealed(self, tls: Tls, data: bytes) -> bytes:
        """Return what goes over the wire for a piece of the stream."""
        if tls.ready:
            return tls.send((data,))
        self._early += data
        return b""

    def _opened(self, tls: Tls, data: bytes) -> list[bytes | bytearray]:
        """Return the answers that bytes of the wire complete; what TLS itself says to them is added to `_out`."""
        plain = tls.receive(data) if data else b""
        if tls.ready and self._early:
            early, self._early = self._early, bytearray()
            self._out += tls.send((bytes(early),))
        elif tls.owes:
            self._out += tls.send()
        dialect = self._dialect
        answers: list[bytes | bytearray] = []
        while plain and (space := dialect.space) is not None:
            count = min(len(space), len(plain))
            space[:count] = plain[:count]
            answers += dialect.filled(count)
            plain = plain[count:]
        return answers + dialect.feed(plain) if plain else answers

    # The socket

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
            ConnectionLostError: This process was forked from the one that the connection belongs to.
        """
        if len(request) > self._max_message_bytes:
            raise SettingError(
                f"a request of {len(request)} bytes is larger than max_message_bytes={self._max_message_bytes}"
            )
        if self._inherited:
            raise ConnectionLostError(self._url, "this process was forked, and the connection is its parent's")
        with self._inbox.guard:
            if self._sock is not None:  # else how it ended was delivered
                self._say(self._dialect.pack(request))

    def _say(self, data: bytes) -> None:
        """Send a piece of the stream, at once where there is room."""
        sock = self._sock
        if sock is None or not data:
            return
        if self._tls is not None:
            data = self._sealed(self._tls, data)
        if self._out or self._connecting:
            self._out += data
            return
        try:
            sent = sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lost(error)
            return
        if sent < len(data):
            self._out += memoryview(data)[sent:]
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
        self._flush()  # watches for room where there is none

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
        sock, dialect = self._sock, self._dialect
        if sock is None:
            return
        try:
            if self._tls is not None:
                data = sock.recv(_CHUNK)
                count = len(data)
                answers = self._opened(self._tls, data)
            elif (space := dialect.space) is None:
                data = sock.recv(_CHUNK)
                count = len(data)
                answers = dialect.feed(data)
            else:
                count = sock.recv_into(space)
                answers = dialect.filled(count)
        except BlockingIOError:
            return
        except RemoteError as error:  # some of them are OSErrors too
            self._end(error)
            return
        except OSError as error:
            self._lost(error)
            return
        self._heard = time.monotonic()
        self._silent = self._silent and not count
        for answer in answers:
            self._deliver(answer)
        if dialect.ending is not None:
            self._end(dialect.ending)
            return
        owed = dialect.owed
        if owed:
            self._out += owed if self._tls is None else self._sealed(self._tls, owed)
        if self._out and not self._connecting:
            self._flush()
        if not count and not self._ended:
            why = dialect.cut_off()
            self._end(ConnectionLostError(self._url, why) if dialect.answered else self._unmet(why))

    def tend(self) -> None:
        """Ask for a sign of a server that has been quiet; give up one that gave none."""
        quiet, now = self._dialect.quiet, time.monotonic()
        if quiet is None or self._connecting or self._sock is None:
            return
        if self._asked is not None and self._heard < self._asked:
            patience = keepalive.KEEPALIVE / 2
            if now - self._asked > patience:
                self._end(
                    ConnectionLostError(
                        self._url,
                        f"the connection was lost: no answer to a keepalive ping within {patience:g} s",
                    )
                )
        elif now - self._heard > quiet:
            self._asked = now
            self._say(self._dialect.ping())

    # The end

    def _lost(self, error: OSError) -> None:
        if isinstance(error, (BrokenPipeError, ConnectionResetError)) and not self._dialect.answered:
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
            if self._dialect.answered
            else self._unmet(reason)
        )

    def _last_words(self) -> ssl.SSLError | None:
        """Read why a server refused that closed before it took our first request."""
        sock, dialect = self._sock, self._dialect
        if sock is None:
            return None
        try:
            data = sock.recv(_CHUNK)
            if self._tls is not None:
                self._opened(self._tls, data)
            else:
                dialect.feed(data)
        except ssl.SSLError as error:
            return error
        except RemoteError as error:
            self._end(error)
        except OSError:
            return None
        if dialect.ending is not None:
            self._end(dialect.ending)
        return None

    def _end(self, ending: RemoteError) -> None:
        """Close the socket and say why, once."""
        if self._ended:
            return
        self._drop()
        if not self._closing:
            self._deliver(ending)

    def _drop(self) -> None:
        sock, self._sock = self._sock, None
        self._ended = True
        if self._dialect.quiet is not None:
            self._inbox.dismiss(self)
        if sock is not None:
            self._inbox.forget(sock)
            sock.close()

    def finish(self) -> None:
        """Say that no request follows; those sent before are served."""
        self._closing = True
        if self._finished or self._inherited:
            return
        with self._inbox.guard:
            self._finished = True
            self._say(self._dialect.finish())
            if not self._out and not self._early:
                self._shut()

    def _shut(self) -> None:
        if self._sock is not None and self._dialect.half_closes:
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                self._drop()

    def close(self, timeout: float) -> None:
        """End the stream. Waits for the server at most `timeout` seconds, then cuts it."""
        if self._inherited:
            return
        self.finish()
        self._deliver = _ignore
        deadline = time.monotonic() + timeout
        with self._inbox.guard:
            if self._sock is not None and timeout > 0 and not self._connecting and not sys.is_finalizing():
                with selectors.DefaultSelector() as selector:
                    selector.register(self._sock, _READ)
                    while self._sock is not None and (wait := deadline - time.monotonic()) > 0:
                        selector.modify(self._sock, _READ | (_WRITE if self._out else 0))
                        for _, events in selector.select(wait):
                            if events & _WRITE:
                                self._flush()
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
