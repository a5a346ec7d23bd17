"""The connections of a server: accepting, reading and writing on events of the loop, keepalive, and closing."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from bridge.core.logs import LimitedLog, SafeLog
from bridge.core.server.calls import Call, Calls
from bridge.core.server.connection import CHUNK, Connection, ConnectionProtocol
from bridge.core.server.event_loop import READ, WRITE, EventLoop
from bridge.core.server.limits import SHARE, Admission, CoreLimits, FairShare, ProcessorAccount
from bridge.core.server.serving import HelperThread
from bridge.core.transport.sockets import has_hung_up, listen_tcp, listen_unix, prepare
from bridge.core.worlds.scheduling import Timer
from bridge.errors import RequestError

if TYPE_CHECKING:
    from bridge.core.server.inflation import Inflation
    from bridge.core.transport.tls import Tls

__all__ = ["Connections"]

_log = SafeLog(__name__)
_refusals = LimitedLog(__name__)
# The alerts of a client that does not trust the certificate, or reached the server by a name that it does not hold.
_DISTRUST = {
    "SSLV3_ALERT_BAD_CERTIFICATE",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
    "TLSV1_ALERT_UNKNOWN_CA",
}
# Seconds that a refused client has for reading the reason.
_LINGER = 1.0
# Seconds that a client has for reading a last answer, such as a file over HTTP.
_LONG_LINGER = 30.0
# The least limit of connections without a call, unless `max_idle` is given.
_MAX_IDLE = 256
# Seconds between two checks for clients that vanished without closing their connection.
_KEEPALIVE = 5.0
# Seconds between two checks whether the client of a connection with delayed reading is still there.
_PROBE = 0.5
# The shortest pause in seconds for a connection that has used too much. The cost of a loop turn itself is not measured,
# so there should be few pauses.
_LEAST_PAUSE = 0.01
# How often a closing connection is read, and the bytes dropped, before it is closed.
_LAST_READS = 64


@dataclasses.dataclass(frozen=True)
class _Listener:
    sock: socket.socket
    tls: ssl.SSLContext | None
    closed: Callable[[], None] | None


class Connections:
    """All connections of a server.

    Args:
        loop: Watches the sockets.
        limits: `max_connections` and `hello_timeout`.
        admission: Counts the bytes that wait.
        speak: Makes the protocol of a connection.
        tls: The SSLContext for TCP ports; None: no TLS.
        unix_path: The path of a Unix socket to listen on, too; None: no Unix socket.
        max_idle: The most connections without a call at a time. The oldest makes room for a new one.

    Raises:
        SettingError: The server cannot listen on the Unix socket.
    """

    def __init__(
        self,
        loop: EventLoop,
        limits: CoreLimits,
        admission: Admission,
        speak: Callable[[Connection], ConnectionProtocol],
        tls: ssl.SSLContext | None,
        unix_path: str | None,
        max_idle: int | None = None,
    ) -> None:
        self.failed_handshakes = 0
        """The number of failed TLS handshakes."""
        self._loop = loop
        self._limits = limits
        self._max_idle = max_idle or max(_MAX_IDLE, limits.max_connections)  # all clients may connect at once
        self._admission = admission
        self._speak = speak
        self.calls: Calls
        self._listeners: list[_Listener] = []
        self.all: dict[socket.socket, Connection] = {}
        """The open connections, by socket."""
        self._idle: dict[Connection, None] = {}
        """The connections without a call, oldest first."""
        self._keepalive: Timer | None = None
        self._share = FairShare()
        self.call_later = loop.scheduler.call_later
        """Calls a function in some seconds, unless the timer that it returns is cancelled."""
        self.helper = HelperThread(loop.scheduler)
        """The thread for work that takes processor time, such as compression."""
        self.inflations: deque[Inflation] = deque()
        """Compressed requests that are being inflated, one after the other."""
        self._tls = tls
        if unix_path is not None:
            sock, remove = listen_unix(unix_path)
            self._watch(sock, None, remove)

    def counts(self) -> dict[str, float]:
        """Return the values of connections in `Server.status`. May be called by any thread."""
        charged = {f"charged_{role}": seconds for role, seconds in self._share.charged.items()}
        return {"sockets": len(self.all), "throttled": self._share.waiting, **charged}

    # Called by the protocols

    def open(self, client: Connection, version: str, *, may_act: bool = True) -> Call:
        """Admit a call."""
        call = self.calls.open(client, version, may_act=may_act)
        if may_act or client.role == "stranger":
            client.role = "client" if may_act else "viewer"
        self._stop_timer(client)
        self._idle.pop(client, None)
        return call

    def settled(self, connection: Connection) -> None:
        """Note that a client speaks HTTP/2. It may stay without a call."""
        if not connection.ending:
            self._stop_timer(connection)

    # Accepting

    def listen(self, host: str, port: int) -> int:
        """Listen on a TCP port of all addresses of a host; return the port.

        Raises:
            SettingError: The port is in use, or the address is not of this machine.
        """
        socks = listen_tcp(host, port)
        for sock in socks:
            self._watch(sock, self._tls, None)
        return int(socks[0].getsockname()[1])

    def _watch(self, sock: socket.socket, tls: ssl.SSLContext | None, closed: Callable[[], None] | None) -> None:
        sock.setblocking(False)
        listener = _Listener(sock, tls, closed)
        self._listeners.append(listener)
        # Otherwise accepting is paused, and `_accept_again` starts this listener, too.
        if self._share.visits.timer is None:
            self._accept_from(listener)

    def _accept_from(self, listener: _Listener) -> None:
        self._loop.register(listener.sock, READ, lambda events: self._accept(listener))

    def stop_listening(self) -> None:
        """Accept no more connections. A second call does nothing."""
        visits = self._share.visits
        if visits.timer is not None:
            visits.timer.cancel()
            visits.timer = None
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            self._loop.unregister(listener.sock)
            # A forked process has the socket, too: without this, clients would connect to it and wait.
            with contextlib.suppress(OSError):
                listener.sock.shutdown(socket.SHUT_RDWR)
            listener.sock.close()
            if listener.closed is not None:
                listener.closed()

    def _accept(self, listener: _Listener) -> None:
        began = time.thread_time()
        try:
            sock, name = listener.sock.accept()
        except OSError as error:  # the client has gone, or there are no file descriptors left
            # Without a descriptor the new client cannot even be refused. A connection without a call is the least loss.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if self._idle:
                    self._cut(next(iter(self._idle)), "no file descriptor is left, and it has no call")
                else:
                    self._accept_later(_PROBE)  # otherwise each turn of the loop would try in vain
            return
        try:
            prepare(sock)
        except OSError:  # it was reset meanwhile; some systems report it here
            sock.close()
            return
        peer, tls = "unix", None
        if isinstance(name, tuple):
            peer = f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}"
            if listener.tls is not None:
                from bridge.core.transport.tls import Tls

                tls = Tls(listener.tls)
        connection = self._add(sock, peer, tls)
        self._close_after(connection, self._limits.hello_timeout)
        connection.speak(self._speak(connection))
        # HTTP/2's SETTINGS are sent before the client speaks. Over TLS they wait for the handshake.
        if tls is None:
            connection.flush()
        connection.account.spent = seconds = time.thread_time() - began
        self._share.charged["stranger"] += seconds

    def serve_on(
        self,
        sock: socket.socket,
        peer: str,
        tls: Tls | None,
        received: bytes,
        speak: Callable[[Connection], ConnectionProtocol],
        ended: Callable[[], None],
    ) -> None:
        """Serve on a connection that this end made; `ended` is called when it is closed.

        `received` are the bytes that arrived already.
        """
        connection = self._add(sock, peer, tls)
        connection.ended = ended
        connection.speak(speak(connection))
        try:
            # These bytes came with the handshake's answer: the socket does not become readable for them.
            connection.protocol.receive_data(received)
        except RequestError as error:
            connection.protocol.refuse(error)
            self._linger(connection)
        connection.flush()

    def _add(self, sock: socket.socket, peer: str, tls: Tls | None) -> Connection:
        # The oldest, not the new one: otherwise connections that are only held open would keep all clients out.
        if len(self._idle) >= self._max_idle:
            self._cut(next(iter(self._idle)), f"{self._max_idle} others have no call either")
        account = ProcessorAccount(self._share, time.monotonic())
        connection = Connection(self, sock, peer, tls, self._admission, account)
        self.all[sock] = connection
        self._share.connections = len(self.all)
        self._idle[connection] = None
        if self._keepalive is None:
            self._keepalive = self.call_later(_KEEPALIVE, self._check_keepalive)
        self._loop.register(sock, READ, partial(self._on_events, connection))
        return connection

    # Processor time

    def charge_request(self, connection: Connection, seconds: float, share: float = SHARE) -> None:
        """Charge processor time in which a request was served.

        Receiving it was not charged, and sending the answer, which takes about as long, is not measured.
        """
        self._charge(connection, seconds + 2 * min(self._share.worth, seconds), share)
        # Read only as many of its requests as can be served soon, because those of others wait behind them.
        connection.account.productive = False

    def _charge(self, connection: Connection, seconds: float, share: float = SHARE) -> None:
        """Charge processor time that brought no request, and delay reading the connection if it was too much."""
        self._share.charged[connection.role] += seconds
        account = connection.account
        wait = account.charge(seconds, time.monotonic(), share=share)
        # The connection was closed in the turn that is charged, so delaying its own account has no effect.
        if connection.closed and connection.role == "stranger":
            self._charge_visit(seconds)
        if not wait or connection.closed:
            return
        if account.timer is None:  # otherwise another request that arrived with this one was charged before
            self._share.waiting += 1
            pause = min(max(wait, _LEAST_PAUSE), _PROBE)
            account.timer = self.call_later(pause, lambda: self._read_again(connection))
            connection.flush()  # before it may be closed, which `arrange` does if nothing is left to send
            if not connection.closed:
                self.arrange(connection)

    def _charge_visit(self, seconds: float) -> None:
        """Charge the time of a connection that was closed without a call, and delay accepting if it was too much.

        New connections wait in the system meanwhile. So clients that connect endlessly do not slow running calls.
        """
        visits = self._share.visits
        wait = visits.charge(seconds, time.monotonic(), alone=True)
        if wait:
            self._accept_later(min(max(wait, _LEAST_PAUSE), _PROBE))

    def _accept_later(self, seconds: float) -> None:
        """Accept no connection for some seconds; new ones wait in the system."""
        visits = self._share.visits
        if visits.timer is None and self._listeners:
            for listener in self._listeners:
                self._loop.unregister(listener.sock)
            visits.timer = self.call_later(seconds, self._accept_again)

    def _accept_again(self) -> None:
        visits = self._share.visits
        visits.timer = None
        # Thousands of connections that are closed together delay others only for the pause that they have caused.
        visits.until = min(visits.until, time.monotonic())
        for listener in self._listeners:
            self._accept_from(listener)

    def _read_again(self, connection: Connection) -> None:
        """Read a connection again if it is time, and its client is still there. If it is closed, end its pause."""
        account = connection.account
        if account.timer is None:
            return
        # The timer is not due yet if the connection was closed.
        account.timer.cancel()
        now = time.monotonic()
        if not connection.closed:
            self._probe(connection, now)
            if connection.closed:  # the caller has closed it
                return
            # Timers run for at most `_PROBE` seconds, so that a client that has closed is found soon.
            if now < account.until:
                account.timer = self.call_later(min(account.until - now, _PROBE), lambda: self._read_again(connection))
                return
        account.timer = None
        self._share.waiting -= 1
        if not connection.closed:
            self.arrange(connection)

    def _probe(self, connection: Connection, now: float) -> None:
        """Close a connection whose client has closed it, and drop the bytes that it had sent.

        If reading is delayed, a client may have megabytes in its own system, which come before the sign that it closed.
        If it gets no answers, nothing else shows that it is gone, and all of these bytes would be read. So it is sent a
        ping: the system of a client that has closed answers with a reset, which arrives at once. A client that is still
        there is never closed here, however slow or busy it is, and need not answer.
        """
        if connection.unsent:  # these bytes already wait for the client, or a reset
            return
        if has_hung_up(connection.sock):
            self.close(connection)
        elif not connection.ending and now - connection.account.probed >= _PROBE:
            connection.account.probed = now
            connection.protocol.ping()
            connection.flush()

    # Time

    def _close_after(self, connection: Connection, seconds: float) -> None:
        self._stop_timer(connection)
        connection.timer = self.call_later(seconds, lambda: self._expire(connection))

    def _stop_timer(self, connection: Connection) -> None:
        if connection.timer is not None:
            connection.timer.cancel()
            connection.timer = None

    def _expire(self, connection: Connection) -> None:
        connection.timer = None
        late = connection.tls is not None and not connection.tls.ready
        self._cut(connection, f"no {'TLS handshake' if late else 'hello'} within {self._limits.hello_timeout:g} s")

    def _check_keepalive(self) -> None:
        """Send pings to clients that were quiet, and close those that did not answer."""
        self._keepalive = None
        if self.all:
            self._keepalive = self.call_later(_KEEPALIVE, self._check_keepalive)
        now = time.monotonic()
        for connection in list(self.all.values()):
            if connection.protocol.check_keepalive(now):
                connection.flush()
            else:
                _log.info("peer=%s lost: no sign of life", connection.peer)
                self.close(connection)

    # Reading and writing

    def _on_events(self, connection: Connection, events: int) -> None:
        """Read and write as the socket allows, and charge processor time that is not for requests."""
        if connection.closed:
            return
        account = connection.account
        # Asking the system for the processor time would cost each request more than a hundredth of its time. A clock is
        # cheap, and shows which turns are worth it.
        measured = not account.productive or connection.ending
        if measured:
            before, at, began = connection.unserved, time.monotonic(), time.thread_time()
        try:
            if events & WRITE:
                connection.drain()
            # While requests of a connection are still to be served, nothing more is read: they would pile up.
            if events & READ and not connection.unserved:
                # After a refusal, the bytes that the client had sent before it knew are dropped.
                count = len(connection.sock.recv(CHUNK)) if connection.ending else connection.receive()
                if not count:
                    self.close(connection)
            if connection.blocked_calls and not connection.unsent:
                for call in list(connection.blocked_calls):
                    self.calls.unblock(call)
        except BlockingIOError:
            pass
        # Before OSError, its base class: the TLS alert with the reason has yet to be sent.
        except ssl.SSLError as error:
            if not connection.calls:
                self.failed_handshakes += 1
            if not connection.calls and not connection.closed:
                from bridge.core.transport.tls import explain

                hint = ""
                if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
                    hint = ". The client speaks no TLS: its URL must begin with grpcs://"
                elif error.reason in _DISTRUST:
                    hint = ". The client does not accept this server's certificate: its own error says why"
                _refusals.warning("refused %s: no TLS handshake: %s%s", connection.peer, explain(error), hint)
            self._linger(connection)
        except OSError:
            self.close(connection)
        except RequestError as error:
            if not connection.closed:
                connection.protocol.refuse(error)
            self._linger(connection)
        except (Exception, SystemExit):  # the protocol may be another package's
            _log.exception("peer=%s cut: a fault of this server", connection.peer)
            self.close(connection)
        # After most requests there is nothing to send yet: their answers are flushed when they are served.
        if connection.outgoing or connection.tls is not None or connection.events != READ or connection.ending:
            connection.flush()
        if measured:
            # After the flush: the answers to a flood are charged too.
            seconds = time.thread_time() - began
            self._share.note_turn(seconds, time.monotonic() - at)
            served = max(0, connection.unserved - before) * self._share.worth
            self._charge(connection, max(0.0, seconds - served))
        elif not account.productive:
            self._charge(connection, account.excess)

    def arrange(self, connection: Connection) -> None:
        """Watch for the event that the connection needs: room to send, or else the next request."""
        if not connection.calls and not connection.ending:
            # A connection that had no call before keeps its place among the oldest.
            self._idle.setdefault(connection)
            http = connection.protocol.http
            if connection.protocol.finished or (http is not None and http.goaway_sent):
                self._linger(connection)
        if connection.ending and not connection.unsent and not connection.calls:
            if connection.timer is None:
                self.close(connection)
                return
            # A refused client is read for a moment longer: closing with unread bytes would discard our last bytes.
            if not connection.shut:
                connection.shut = True
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_WR)
        # No new request is read while answers wait: a client that does not read must not fill the memory.
        reads = connection.account.timer is None and not connection.paused
        events = WRITE if connection.unsent else READ if reads else 0
        if events != connection.events:
            connection.events = events
            self._loop.modify(connection.sock, events, partial(self._on_events, connection))

    # Closing

    def _cut(self, connection: Connection, why: str) -> None:
        """Close a connection that has no call, and log it unless its refusal was logged."""
        if not connection.ending:
            _refusals.warning("refused %s: %s", connection.peer, why)
        self.close(connection)

    def _linger(self, connection: Connection) -> None:
        """Read nothing more, end the calls, and close a moment after the last bytes have been sent."""
        if connection.closed:
            return
        connection.ending = True
        for call in list(connection.calls):
            self.calls.abandon(call)
        self._close_after(connection, _LONG_LINGER if connection.protocol.finished else _LINGER)

    def detach(self, connection: Connection) -> bool:
        """Release a connection without closing its socket; its calls end. Return False if it was closed before."""
        if self.all.pop(connection.sock, None) is None:
            return False
        self._share.connections = len(self.all)
        # All at once, before it is marked as closed: `hold` ignores the bytes that its calls release later.
        connection.hold(-connection.held)
        # Before the calls end: their last bytes have no socket any more.
        connection.closed = connection.ending = True
        self._stop_timer(connection)
        self._idle.pop(connection, None)
        self._loop.unregister(connection.sock)
        connection.unsent.clear()
        connection.outgoing.clear()
        for call in list(connection.calls):
            self.calls.abandon(call)
        connection.protocol.connection_lost()
        # So that it does not count any longer as a connection that waits for its share.
        self._read_again(connection)
        return True

    def close(self, connection: Connection) -> None:
        """Close a connection at once; its calls end."""
        if self.detach(connection):
            if connection.role == "stranger":
                self._charge_visit(connection.account.spent)
            connection.sock.close()
            del connection.protocol, connection.answer  # they refer to the connection
            if connection.ended is not None:
                connection.ended()

    @property
    def clients(self) -> int:
        """The number of connections with an open call, or whose client still takes the last answers of one.

        A client that was refused and only reads properties does not keep a draining server from ending.
        """
        return sum(
            bool(connection.unsent) or any(call.refusal is None for call in connection.calls)
            for connection in self.all.values()
        )

    def drain(self, grace: float) -> None:
        """Tell all clients that no more calls are accepted; open calls continue, whatever the grace.

        New connections are still accepted, so that their clients get an error, and health checks an answer.
        """
        del grace
        for connection in list(self.all.values()):
            connection.protocol.drain()
            connection.flush()

    def close_all(self, error: RequestError) -> None:
        """End all calls with an error, and close all connections."""
        self.stop_listening()
        for connection in list(self.all.values()):
            for call in list(connection.calls):
                self.calls.abandon(call, error)
            connection.flush()
            with contextlib.suppress(OSError):  # closing with unread bytes would discard our last bytes
                for _ in range(_LAST_READS):
                    if len(connection.sock.recv(CHUNK)) < CHUNK:
                        break
            self.close(connection)
        if self._keepalive is not None:
            self._keepalive.cancel()
        self.helper.close()
