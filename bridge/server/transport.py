"""The sockets of a server: the only file of it that waits for the network."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable

from bridge.errors import Code, RequestError
from bridge.logs import SafeLog
from bridge.server.calls import PREFIX, Calls
from bridge.server.connection import Connection, Dialect
from bridge.server.flight import Flight
from bridge.server.limits import ConnectionCount, Limits
from bridge.session import Hub
from bridge.sockets import prepare
from bridge.tls import Tls, explain

__all__ = ["Transport"]

_log = SafeLog(__name__)
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
# Seconds that a client has to begin to speak, and that one which was refused has for reading why.
_HELLO_TIMEOUT = 10.0
_LINGER = 1.0
# Connections without a call at a time (at least): the oldest makes room for the next.
_MAX_IDLE = 256
# Seconds between two looks for clients that went without a word.
_TEND = 5.0
_CHUNK = 65536
# How often a connection is read, unheard, before it is closed.
_LAST_READS = 64


@dataclasses.dataclass(frozen=True)
class _Listener:
    sock: socket.socket
    speak: Callable[[Connection], Dialect]
    tls: ssl.SSLContext | None
    closed: Callable[[], None] | None


class Transport(Calls):
    """Looks after a server's sockets, and serves what comes over them, from `start` to `stop`.

    Args:
        hub: The worlds.
        limits: As for `Calls`, and `max_connections`.
        count: Admits calls.
        flight: Admits requests.
    """

    def __init__(self, hub: Hub, limits: Limits, *, count: ConnectionCount, flight: Flight) -> None:
        super().__init__(hub, limits, count=count, flight=flight)
        self._listeners: dict[socket.socket, _Listener] = {}
        self._connections: dict[socket.socket, Connection] = {}
        self._idle: dict[Connection, None] = {}
        """Those without a call, oldest first."""
        self._timed: dict[Connection, float] = {}
        """Those that are cut at some time; monotonic seconds."""
        self._due = math.inf  # no later than the first of those
        self._tend_at = 0.0
        self._stop_at: float | None = None
        self._draining = False
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._asked: deque[Connection] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, _READ, None)

    def listen(
        self,
        sock: socket.socket,
        speak: Callable[[Connection], Dialect],
        tls: ssl.SSLContext | None,
        closed: Callable[[], None] | None = None,
    ) -> None:
        """Serve whoever connects to a socket; before `start`.

        Args:
            sock: It listens.
            speak: Makes what a connection speaks.
            tls: What TLS is spoken with; None: none is.
            closed: Called when nobody listens there any more.
        """
        sock.setblocking(False)
        self._listeners[sock] = _Listener(sock, speak, tls, closed)
        self._selector.register(sock, _READ, None)

    def start(self) -> None:
        """Begin to serve."""
        self._start(self._lead, "bridge-server")
        self._start(self._stand_by, "bridge-standby")

    def _lead(self) -> None:
        while self._serve_ready():
            behind = bool(self._ready)
            # Of a connection whose requests are still to be served nothing more is read: they would grow without end.
            unserved = {call.connection for call, _ in self._ready}
            for key, events in self._selector.select(0 if behind else self._patience()):
                if key.data is not None:
                    self._attend(key.data, events & ~_READ if key.data in unserved else events)
                elif key.fileobj is self._wake:
                    self._on_wake()
                elif key.fileobj in self._listeners:
                    self._accept(self._listeners[key.fileobj])
                if self._ready and not behind and not self._serve_ready():
                    return
            if self._expire():
                while self._ready:
                    if not self._serve_ready():
                        return
                self._selector.close()
                with self._guard:
                    self._over.set()
                    self._called.set()
                return

    # Connections

    def _patience(self) -> float | None:
        """Seconds until something is due; None: nothing is."""
        due = self._due if self._timed else math.inf
        if self._connections:
            due = min(due, self._tend_at)
        if self._stop_at is not None:
            due = min(due, self._stop_at)
        return None if due == math.inf else max(0.0, due - time.monotonic())

    def _time(self, connection: Connection, seconds: float) -> None:
        """Cut a connection after so many seconds."""
        until = time.monotonic() + seconds
        self._due = min(self._due, until) if self._timed else until
        self._timed[connection] = until

    def _expire(self) -> bool:
        """Close what is overdue; return whether all is over."""
        now = time.monotonic()
        if self._timed and now >= self._due:
            for connection in [connection for connection, until in self._timed.items() if now >= until]:
                late = connection.tls is not None and not connection.tls.ready
                self._cut(connection, f"no {'TLS handshake' if late else 'hello'} within {_HELLO_TIMEOUT:g} s")
            self._due = min(self._timed.values(), default=math.inf)
        if now >= self._tend_at:
            self._tend_at = now + _TEND
            for connection in list(self._connections.values()):
                self._tend(connection, now)
        if self._stop_at is None:
            return False
        if now < self._stop_at and self._connections:
            return False
        error = RequestError(Code.UNAVAILABLE, "the server was stopped")
        for connection in list(self._connections.values()):
            with connection.lock:
                for call in list(connection.calls):
                    self.abandon(call, error)
            self._flush(connection)
            with contextlib.suppress(OSError):  # closing on unread bytes would take our last words away
                for _ in range(_LAST_READS):
                    if len(connection.sock.recv(_CHUNK)) < _CHUNK:
                        break
            self._close(connection)
        return True

    def _tend(self, connection: Connection, now: float) -> None:
        with connection.lock:
            stays = connection.dialect.tend(now)
        if stays:
            self._flush(connection)
        else:
            _log.info("peer=%s lost: no sign of life", connection.peer)
            self._close(connection)

    def _cut(self, connection: Connection, why: str) -> None:
        """Close a connection that has no call, and log it unless its refusal was logged."""
        if not connection.ending:
            _log.warning("refused %s: %s", connection.peer, why)
        self._close(connection)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        while self._asked:
            connection = self._asked.popleft()
            if connection.broken:
                self._close(connection)
            else:
                self._flush(connection)
        if self._stop_at is not None and not self._draining:
            self._draining = True
            self._close_listeners()
            for connection in list(self._connections.values()):
                with connection.lock:
                    connection.dialect.drain()
                    if not connection.calls:
                        self._linger(connection)
                self._flush(connection)

    def _ask(self, connection: Connection) -> None:
        """Have the leader look at a connection."""
        self._asked.append(connection)
        with contextlib.suppress(OSError):  # it is full: the leader will look
            self._waker.send(b"\0")

    def _accept(self, listener: _Listener) -> None:
        try:
            sock, name = listener.sock.accept()
        except OSError as error:  # it went again, or there are no descriptors left for it
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if self._idle:
                    self._cut(next(iter(self._idle)), "no file descriptor is left, and it has no call")
                else:
                    time.sleep(0.01)  # until one is; the listener stays ready all the time
            return
        try:
            prepare(sock)
        except OSError:  # it was reset meanwhile, which some systems tell here
            sock.close()
            return
        peer, tls = "unix", None
        if isinstance(name, tuple):
            peer = f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}"
            tls = None if listener.tls is None else Tls(listener.tls)
        most = max(_MAX_IDLE, self._limits.max_connections)  # all of them may connect at once
        if len(self._idle) >= most:
            self._cut(next(iter(self._idle)), f"{most} others have no call either")
        connection = Connection(sock, peer, tls, self.flight)
        self._connections[sock] = connection
        self._idle[connection] = None
        self._time(connection, _HELLO_TIMEOUT)
        self._selector.register(sock, _READ, connection)
        with connection.lock:
            connection.dialect = listener.speak(connection)
        if connection.fresh and tls is None:
            self._flush(connection)

    def _engaged(self, connection: Connection) -> None:
        self._timed.pop(connection, None)
        self._idle.pop(connection, None)

    def settled(self, connection: Connection) -> None:
        """Take note that a client speaks the connection's language: it may stay without a call."""
        if not connection.ending:
            self._timed.pop(connection, None)

    def _attend(self, connection: Connection, events: int) -> None:
        """Read and write what a socket has and takes."""
        with connection.lock:
            try:
                if events & _WRITE:
                    connection.drain()
                if events & _READ and not connection.closed:
                    self._receive(connection)
                if connection.stalled and not connection.out:
                    self._unblock(connection)
            except BlockingIOError:
                pass
            except ssl.SSLError as error:
                if not connection.calls:
                    _log.warning("refused %s: no TLS handshake: %s", connection.peer, explain(error))
                self._linger(connection)
            except OSError:
                self._close(connection)
            except RequestError as error:
                connection.dialect.refuse(error)
                self._linger(connection)
            except Exception:
                _log.exception("peer=%s cut: a fault of this server", connection.peer)
                self._close(connection)
            if connection.fresh or connection.tls is not None or connection.events != _READ or connection.ending:
                self._flush(connection)

    def _receive(self, connection: Connection) -> None:
        if connection.ending:  # it was refused; what it had sent before it knew is dropped
            if not connection.sock.recv(_CHUNK):
                self._close(connection)
        elif not connection.receive():
            connection.eof = True
            if not connection.dialect.ended():
                self._close(connection)
            else:
                self._arrange(connection)

    def _linger(self, connection: Connection) -> None:
        """Read nothing more, end the calls, and close a moment after what is to be said has been sent."""
        connection.ending = True
        for call in list(connection.calls):
            self.abandon(call)
        self._time(connection, _LINGER)

    def _unblock(self, connection: Connection) -> None:
        """Go on with calls whose client takes answers again."""
        for call in list(connection.stalled):
            if connection.dialect.blocked(call):
                continue
            connection.stalled.discard(call)
            connection.hold(-call.pending)
            call.pending = 0
            call.room.set()
            while call.requests:  # they were here before what came with the room
                request = call.requests.pop()
                if request is not None:
                    connection.dialect.resume(call, len(request) + PREFIX)
                self._ready.appendleft((call, request))

    def _flush(self, connection: Connection) -> None:
        """Send what is to be sent, and watch for what the connection needs next."""
        with connection.lock:
            try:
                connection.flush()
            except OSError:
                self._close(connection)
                return
            unusual = connection.out or connection.ending or connection.eof or not connection.calls
            if unusual or connection.events != _READ:
                self._arrange(connection)

    def _arrange(self, connection: Connection) -> None:
        """Watch for what the connection needs: room to send, or else the next request."""
        if connection.closed:
            return
        if connection.ending and not connection.out and not connection.calls:
            if connection.eof or connection not in self._timed:
                self._close(connection)
                return
            # Whoever was refused is read on for a moment: closing on unread bytes would take our last words away.
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
        # No new request is read while answers wait: a client that does not read cannot make us keep without end.
        if not connection.calls and not connection.ending:
            self._idle.setdefault(connection)
            if self._draining:
                self._linger(connection)
                self._arrange(connection)
                return
        events = _WRITE if connection.out else 0 if connection.eof else _READ
        if events == connection.events:
            return
        if not connection.events:
            self._selector.register(connection.sock, events, connection)
        elif events:
            self._selector.modify(connection.sock, events, connection)
        else:
            self._selector.unregister(connection.sock)
        connection.events = events

    def _close(self, connection: Connection) -> None:
        with connection.lock:
            if self._connections.pop(connection.sock, None) is None:
                return
            connection.hold(-connection.held)
            connection.closed = connection.ending = True
            self._timed.pop(connection, None)
            self._idle.pop(connection, None)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection.sock)
            for call in list(connection.calls):
                self.abandon(call)
            connection.out.clear()
            connection.sock.close()

    # The end

    def _close_listeners(self) -> None:
        for sock, listener in self._listeners.items():
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()
            if listener.closed is not None:
                listener.closed()
        self._listeners.clear()

    def stop(self, grace: float) -> bool:
        """Take no new calls, give open ones `grace` seconds, end them; return whether all threads ended."""
        self._stop_at = time.monotonic() + grace
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        deadline = self._stop_at + 5.0
        while True:
            with self._guard:
                thread = next(iter(self._threads), None)
            if thread is None:
                break
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return False
        self._close_listeners()  # where it was never started
        self._selector.close()
        self._wake.close()
        self._waker.close()
        return True
