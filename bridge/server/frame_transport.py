"""dm_env_rpc as frames over Unix and TCP sockets: a file of the server that touches the network.

One thread looks after all connections and serves them one after the other, as the lock around the environments would
have it anyway: so nothing is handed from thread to thread. Only a connection whose agent may wait (for a clock, for
other agents) gets a thread of its own once it has joined.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import queue
import selectors
import socket
import ssl
import threading
import time

from bridge.errors import Code, RequestError
from bridge.frames import HEADER, Hello, RefusedFrame, pack_frame
from bridge.logs import SafeLog
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.server.auth import Gate
from bridge.server.flight import Flight
from bridge.server.frame_connection import CHUNK, Connection, read, send_all, send_parts
from bridge.server.frame_listeners import inode, listen_tcp, listen_unix
from bridge.server.limits import ConnectionCount, Limits
from bridge.server.metrics import Metrics
from bridge.session import Hub, Session
from bridge.sockets import prepare
from bridge.tls import Tls, explain

__all__ = ["FrameTransport"]

_log = SafeLog(__name__)
_numbers = itertools.count(1)
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
# Seconds that a client has for its handshake and hello, and that one which was refused has for reading why.
_HELLO_TIMEOUT = 10.0
_LINGER = 1.0
# Clients that have not said hello, or were refused, at a time (at least): the oldest makes room for the next.
_MAX_STRANGERS = 256
# Refusals that are kept while an earlier request of the same connection waits for other agents.
_MAX_REFUSALS = 64


class FrameTransport:
    """Listens on a Unix socket, a TCP port or both, and serves a session for each connection.

    Args:
        hub: The worlds.
        limits: `max_message_bytes`, and `max_requests_in_flight` for a connection's own queue.
        count: Admits connections.
        flight: Admits requests.
        server_id: What the hello calls this server.
        unix_path: Where to make the socket; None: nowhere.
        host: The address to listen on.
        tcp_port: The port to listen on, 0: any free one; None: none.
        gate: Asks each client for the token.
        tls: What the TCP port speaks TLS with; None: it speaks none. The Unix socket never does: it is its user's own.

    Raises:
        SettingError: The path or the address cannot be listened on.
    """

    def __init__(
        self,
        hub: Hub,
        limits: Limits,
        *,
        count: ConnectionCount,
        flight: Flight,
        server_id: str,
        unix_path: str | None = None,
        host: str = "127.0.0.1",
        tcp_port: int | None = None,
        gate: Gate,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._hub = hub
        self._limits = limits
        self._hello = pack_frame(Hello(server=server_id).pack())
        self._count = count
        self._flight = flight
        self._gate = gate
        self._tls = tls
        self.metrics: Metrics | None = None
        """Where to count; None: nowhere."""
        self._guard = threading.Lock()
        self._timed: dict[Connection, float] = {}  # strangers, oldest first, and when they are cut; monotonic seconds
        self._due = math.inf  # no later than the first of those
        self._own: dict[threading.Thread, Connection] = {}
        self._connections: dict[socket.socket, Connection] = {}
        self._listeners: list[socket.socket] = []
        self._inode: tuple[int, int] | None = None
        self._stop_at: float | None = None
        self.unix_path = unix_path
        self.tcp_port: int | None = None
        self._wake, self._waker = socket.socketpair()
        try:
            if unix_path is not None:
                self._listeners.append(listen_unix(unix_path))
                self._inode = inode(unix_path)
            if tcp_port is not None:
                self._listeners.append(listen_tcp(host, tcp_port))
                self.tcp_port = self._listeners[-1].getsockname()[1]
        except BaseException:
            self._close_listeners()
            self._wake.close()
            self._waker.close()
            raise
        self._selector = selectors.DefaultSelector()
        for sock in (*self._listeners, self._wake):
            sock.setblocking(False)
            self._selector.register(sock, _READ, None)
        self._thread = threading.Thread(target=self._run, name="bridge-frames", daemon=True)
        self._thread.start()

    # The one thread

    def _run(self) -> None:
        try:
            while True:
                for key, events in self._selector.select(self._patience()):
                    connection = key.data
                    if connection is not None:
                        self._attend(connection, events)
                    elif key.fileobj is self._wake:
                        self._on_wake()
                    else:
                        self._accept(key.fileobj)  # type: ignore[arg-type]
                if self._expire():
                    return
        finally:
            for connection in list(self._connections.values()):
                self._close(connection)
            self._close_listeners()  # a stop may come between two looks at the sockets
            self._selector.close()

    def _patience(self) -> float | None:
        """Seconds until something is due; None: nothing is."""
        if not self._timed and self._stop_at is None:
            return None
        due = self._due if self._timed else math.inf
        if self._stop_at is not None:
            due = min(due, self._stop_at)
        return max(0.0, due - time.monotonic())

    def _time(self, connection: Connection, seconds: float) -> None:
        """Cut a connection after so many seconds."""
        until = time.monotonic() + seconds
        self._due = min(self._due, until) if self._timed else until
        self._timed[connection] = until

    def _expire(self) -> bool:
        """Close what is overdue; return whether it is time to end."""
        if self._timed and (now := time.monotonic()) >= self._due:
            for connection in [connection for connection, until in self._timed.items() if now >= until]:
                late = connection.tls is not None and not connection.tls.ready
                self._cut(connection, f"no {'TLS handshake' if late else 'hello'} within {_HELLO_TIMEOUT:g} s")
            self._due = min(self._timed.values(), default=math.inf)
        if self._stop_at is None:
            return False
        return not self._connections or time.monotonic() >= self._stop_at

    def _cut(self, connection: Connection, why: str) -> None:
        """Close a stranger's connection, and log it unless its refusal was logged."""
        if not connection.ending:
            _log.warning("refused %s: %s", connection.peer, why)
        self._close(connection)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(64)
        self._close_listeners()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, name = listener.accept()
        except OSError as error:  # it went again, or there are no descriptors left for it
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._timed:
                self._cut(next(iter(self._timed)), "no file descriptor is left, and it has said no hello yet")
            return
        try:
            prepare(sock)
        except OSError:  # it was reset meanwhile, which some systems tell here
            sock.close()
            return
        peer, tls = "unix", None
        if isinstance(name, tuple):
            peer = f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}"
            tls = None if self._tls is None else Tls(self._tls)
        connection = Connection(sock, peer, tls, self._limits.max_message_bytes, self._flight)
        most = max(_MAX_STRANGERS, self._limits.max_connections)  # all of them may connect at once
        if len(self._timed) >= most:
            self._cut(next(iter(self._timed)), f"{most} others have said no hello yet")
        self._connections[sock] = connection
        self._time(connection, _HELLO_TIMEOUT)
        self._selector.register(sock, _READ, connection)

    def _attend(self, connection: Connection, events: int) -> None:
        if events & _WRITE and not self._flush(connection):
            return
        if events & _READ and connection.sock.fileno() >= 0:
            self._receive(connection)

    def _receive(self, connection: Connection) -> None:
        try:
            if connection.ending:  # it was refused; what it had sent before it knew is dropped
                if not connection.sock.recv(CHUNK):
                    self._close(connection)
                return
            frames, count = read(connection)
        except BlockingIOError:
            return
        except ssl.SSLError as error:
            self._on_tls_error(connection, error)
            return
        except OSError:
            self._close(connection)
            return
        except RequestError as error:
            if connection.waiting is not None:
                self._close(connection)  # its own thread may be in the midst of an answer
            else:
                self._refuse(connection, error)
            return
        if connection.tls is not None and connection.tls.owes and connection.waiting is None:
            self._say(connection, [])
        connection.requests.extend(frames)
        self._serve(connection)
        if connection.waiting is not None:
            most = self._limits.max_requests_in_flight + _MAX_REFUSALS
            if connection.waiting.qsize() > most:
                self._close(connection)  # it sends and sends while an earlier request of it waits
                return
        if not count:
            if connection.requests or connection.out:
                connection.ending = True
                self._arrange(connection)
            else:
                self._close(connection)

    def _on_tls_error(self, connection: Connection, error: ssl.SSLError) -> None:
        """Log a client that was refused by its handshake, send it the alert, and close."""
        if connection.session is None:
            _log.warning("refused %s: no TLS handshake: %s", connection.peer, explain(error))
        if connection.waiting is not None:
            self._close(connection)  # its own thread may be in the midst of an answer
            return
        connection.requests.clear()
        self._linger(connection)
        self._say(connection, [])

    def _serve(self, connection: Connection) -> None:
        """Answer what has come, as long as the client takes the answers."""
        while connection.requests and not connection.out and connection.sock.fileno() >= 0:
            frame = connection.requests.popleft()
            session = connection.session
            if session is None:
                if not self._greet(connection, frame):
                    return
                continue
            if connection.waiting is not None:
                connection.enqueue(frame)
                continue
            if (type(frame) is not bytes or len(frame) > self._flight.room) and not self._admit(connection, frame):
                continue
            began = time.perf_counter()
            parts = session.handle_parts(frame, wait=False)
            if parts is None:
                self._detach(connection)
                connection.enqueue(frame)
                continue
            self._note(session, time.perf_counter() - began, connection.number)
            self._say(connection, self._framed(parts))

    def _admit(self, connection: Connection, frame: bytes | bytearray) -> bool:
        """Tell whether a request that is large, or comes where there is no room, may be served; else refuse it.

        One that is served here is not counted: it is the only one of all these connections.
        """
        if type(frame) is bytearray:
            connection.hold(-len(frame))
        try:
            if isinstance(frame, RefusedFrame):
                raise frame.error
            self._flight.check(len(frame))
        except RequestError as error:
            self._say(connection, self._framed([_error(error.code, error.message)]))
            return False
        return True

    def _note(self, session: Session, seconds: float, number: int) -> None:
        """Count a request, and log one that was refused."""
        if session.last_error:
            name, code = session.world_name, session.last_error
            _log.info("connection=frames-%d world=%s refused code=%s", number, name, Code.named(code))
            if self.metrics is not None:
                self.metrics.refused(code)
        elif self.metrics is not None and session.last_step is not None:
            world, steps, episodes = session.last_step
            self.metrics.stepped(world, seconds, steps, episodes)

    def _framed(self, parts: list[bytes | memoryview]) -> list[bytes | memoryview]:
        size = sum(map(len, parts))
        if size > self._limits.max_message_bytes:
            limit = self._limits.max_message_bytes
            text = f"the response has {size} bytes, more than max_message_bytes={limit}; request fewer observations"
            parts = [_error(Code.RESOURCE_EXHAUSTED, text)]
            size = len(parts[0])
        return [HEADER.pack(size), *parts]

    def _greet(self, connection: Connection, frame: bytes | bytearray) -> bool:
        """Admit a client by its first frame."""
        try:
            hello = Hello.unpack(frame)
            self._gate.check(hello.token, connection.peer)
            self._count.enter()
        except RequestError as error:
            self._refuse(connection, error)
            return False
        connection.session = Session(self._hub, hello.version)
        connection.number = next(_numbers)
        _log.info("connection=frames-%d peer=%s opened", connection.number, connection.peer)
        del self._timed[connection]
        self._say(connection, [self._hello])
        return True

    def _refuse(self, connection: Connection, error: RequestError) -> None:
        """Say why and close: nothing that follows on the stream could be read, or may be."""
        connection.requests.clear()
        if connection.session is None:
            payload = Hello(code=int(error.code), message=error.message).pack()
        else:
            payload = _error(error.code, error.message)
        self._linger(connection)
        self._say(connection, [pack_frame(payload)])

    def _linger(self, connection: Connection) -> None:
        """Read nothing more, and close a moment after what is to be said has been sent."""
        connection.ending = True
        self._time(connection, _LINGER)

    def _say(self, connection: Connection, parts: list[bytes | memoryview]) -> None:
        """Send, and keep what the socket does not take."""
        if connection.sock.fileno() < 0:
            return
        if connection.tls is not None:
            parts = [connection.tls.send(parts)]
        if not connection.out:
            small = len(parts) == 1 or sum(map(len, parts)) <= CHUNK
            data = b"".join(parts) if small else b""
            try:
                sent = connection.sock.send(data) if small else send_parts(connection.sock, parts)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._close(connection)
                return
            if small:
                if sent == len(data) and connection.events == _READ and not connection.ending:
                    return  # as nearly always
                if sent < len(data):
                    connection.out.append(memoryview(data)[sent:])
                    connection.hold(len(data) - sent)
            else:
                connection.hold(sum(map(len, parts)) - sent)
                for part in parts:
                    if sent >= len(part):
                        sent -= len(part)
                    else:
                        connection.out.append(memoryview(part)[sent:])
                        sent = 0
        else:
            connection.out.extend(map(memoryview, parts))
            connection.hold(sum(map(len, parts)))
        self._arrange(connection)

    def _flush(self, connection: Connection) -> bool:
        """Send what is kept; return whether the connection is still there."""
        try:
            while connection.out:
                sent = send_parts(connection.sock, list(connection.out))
                connection.hold(-sent)
                while sent:
                    first = connection.out[0]
                    if sent >= len(first):
                        connection.out.popleft()
                        sent -= len(first)
                    else:
                        connection.out[0] = first[sent:]
                        sent = 0
        except BlockingIOError:
            return True
        except OSError:
            self._close(connection)
            return False
        self._serve(connection)
        self._arrange(connection)
        return connection.sock.fileno() >= 0

    def _arrange(self, connection: Connection) -> None:
        """Watch for what the connection needs: room to send, or else the next request."""
        if connection.sock.fileno() < 0 or connection.sock not in self._connections:
            return
        if connection.ending and not connection.out and not connection.requests:
            if connection not in self._timed:
                self._close(connection)
                return
            # Whoever was refused is read on for a moment: closing on unread bytes would take our last words away.
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
        # No new request is read while answers wait: a client that does not read cannot make us keep without end.
        events = _WRITE if connection.out else _READ
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.sock, events, connection)

    def _close(self, connection: Connection) -> None:
        if self._connections.pop(connection.sock, None) is None:
            return
        self._timed.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        self._finish(connection)

    def _finish(self, connection: Connection) -> None:
        """End a connection's session, then close its socket, so that who sees the end sees the world gone."""
        connection.requests.clear()
        connection.out.clear()
        connection.hold(-connection.held)
        if connection.waiting is not None:
            if connection.session is not None:
                connection.session.hang_up()
            connection.waiting.put(None)  # its thread ends the session
        else:
            self._release(connection)
        connection.sock.close()

    def _release(self, connection: Connection) -> None:
        """End a connection's session, once."""
        session, connection.session = connection.session, None
        if session is not None:
            try:
                session.close()
            except RequestError:
                pass  # an environment that fails in close; there is nobody left to tell
            finally:
                self._count.leave()

    # Connections with a thread of their own

    def _detach(self, connection: Connection) -> None:
        """Give a connection whose requests may wait a thread of its own; what it sends is still read by this one."""
        connection.waiting = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._run_own, args=(connection, connection.waiting), name="bridge-connection", daemon=True
        )
        with self._guard:
            self._own[thread] = connection
        thread.start()

    def _run_own(
        self, connection: Connection, requests: queue.SimpleQueue[bytes | bytearray | RequestError | None]
    ) -> None:
        session, gone = connection.session, False
        try:
            while (request := requests.get()) is not None:
                if isinstance(request, RequestError):
                    parts: list[bytes | memoryview] = [_error(request.code, request.message)]
                else:
                    try:
                        if gone or session is None:
                            continue
                        began = time.perf_counter()
                        parts = session.handle_parts(request) or []
                        self._note(session, time.perf_counter() - began, connection.number)
                    finally:
                        self._flight.leave(len(request))
                gone = gone or not self._send_own(connection, self._framed(parts))
        finally:
            self._release(connection)
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # the thread that reads it then closes it
            with self._guard:
                self._own.pop(threading.current_thread(), None)

    def _send_own(self, connection: Connection, parts: list[bytes | memoryview]) -> bool:
        """Send from a connection's own thread; return whether the client is still there."""
        size = sum(map(len, parts))
        self._flight.hold(size)
        try:
            send_all(connection, parts)
        except (OSError, ValueError):  # ValueError: of a selector, where the socket was closed meanwhile
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # the thread that reads it then ends it
            return False
        finally:
            self._flight.hold(-size)
        return True

    # The end

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            if hasattr(self, "_selector"):
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()
        if self._inode is not None and self.unix_path is not None:
            with contextlib.suppress(OSError):
                if inode(self.unix_path) == self._inode:  # another server may have its own there by now
                    os.unlink(self.unix_path)
            self._inode = None

    def stop(self, grace: float) -> bool:
        """Refuse new connections, give open ones `grace` seconds, cut them; return whether their threads ended."""
        self._stop_at = time.monotonic() + grace
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        self._thread.join(grace + 5.0)
        with self._guard:
            own = dict(self._own)
        deadline = time.monotonic() + 5.0
        for thread in own:
            thread.join(max(0.0, deadline - time.monotonic()))
        ended = not any(thread.is_alive() for thread in (self._thread, *own))
        if ended:
            self._wake.close()
            self._waker.close()
        return ended


def _error(code: Code, message: str) -> bytes:
    return pb.EnvironmentResponse(error=pb.Status(code=int(code), message=message)).SerializeToString()
