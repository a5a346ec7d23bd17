"""What serves the connections of a server: the only file of it that waits for the network.

One thread, the leader, looks after all sockets and serves all calls one after the other, as the lock around the
environments would have it anyway: nothing is handed from thread to thread. Where a request takes longer than a moment,
a second thread that stands by takes the lead, so that everybody else is served on; the one that is held up goes on as
its call's own thread, until the call has been quick for a while. A call whose agent may wait (for a clock, for other
agents) gets its own thread as soon as it has joined.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import math
import queue
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable

from bridge.errors import Code, RequestError
from bridge.logs import SafeLog
from bridge.server.connection import Call, Connection, Dialect, Request
from bridge.server.flight import Flight
from bridge.server.limits import ConnectionCount, Limits
from bridge.server.metrics import Metrics
from bridge.session import Hub, Session, error_response
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
# Refusals that are kept while an earlier request of the same call waits.
_MAX_REFUSALS = 64
# Seconds that a request may hold up the others; it is looked twice.
_MOMENT = 0.04
# A call comes back from its own thread after so many requests in a row that took less than so many seconds.
_QUICK, _QUICK_SECONDS = 64, 0.005
# Seconds between two looks for clients that went without a word.
_TEND = 5.0
_CHUNK = 65536
# How often a connection is read, unheard, before it is closed.
_LAST_READS = 64
# What a message takes beside its bytes: so much room does even an empty one use.
_PREFIX = 5
# Answers of a connection that are sent together, where that many requests came together, and the seconds for which the
# first of them waits; larger ones go by themselves.
_TOGETHER = 8
_SOON = 0.001
_SMALL = 16384


@dataclasses.dataclass(frozen=True)
class _Listener:
    sock: socket.socket
    speak: Callable[[Connection], Dialect]
    tls: ssl.SSLContext | None
    closed: Callable[[], None] | None


class Transport:
    """Serves a session for each call on its connections, from `start` to `stop`.

    Args:
        hub: The worlds.
        limits: `max_message_bytes`, `max_connections`, and `max_requests_in_flight` for a call's own queue.
        count: Admits calls.
        flight: Admits requests.
    """

    def __init__(self, hub: Hub, limits: Limits, *, count: ConnectionCount, flight: Flight) -> None:
        self._hub = hub
        self._limits = limits
        self._count = count
        self.flight = flight
        """What is being served."""
        self.metrics: Metrics | None = None
        """Where to count; None: nowhere."""
        self._numbers = itertools.count(1)
        self._listeners: dict[socket.socket, _Listener] = {}
        self._connections: dict[socket.socket, Connection] = {}
        self._idle: dict[Connection, None] = {}
        """Those without a call, oldest first."""
        self._timed: dict[Connection, float] = {}
        """Those that are cut at some time; monotonic seconds."""
        self._due = math.inf  # no later than the first of those
        self._tend_at = 0.0
        self._ready: deque[tuple[Call, Request | None]] = deque()
        self._stop_at: float | None = None
        self._draining = False
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._asked: deque[Connection] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, _READ, None)
        # Who leads
        self._guard = threading.Lock()
        """Held where `Call.waiting` changes, and around what follows."""
        self._busy: tuple[Call, int] | None = None
        self._serial = 0
        self._dozing = False
        self._called = threading.Event()
        self._over = threading.Event()
        self._threads: set[threading.Thread] = set()

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

    def _start(self, run: Callable[[], None], name: str) -> None:
        def thread() -> None:
            try:
                run()
            finally:
                with self._guard:
                    self._threads.discard(threading.current_thread())

        started = threading.Thread(target=thread, name=name, daemon=True)
        with self._guard:
            self._threads.add(started)
        try:
            started.start()
        except BaseException:
            with self._guard:
                self._threads.discard(started)
            raise

    # Who leads

    def _begin_work(self, call: Call, size: int = 0) -> tuple[Call, int]:
        """Note that the leader may be held up by a call from now on; return what `_end_work` takes."""
        work = call, size
        with self._guard:
            self._serial += 1
            self._busy = work
            dozing, self._dozing = self._dozing, False
        if dozing:
            self._called.set()
        return work

    def _end_work(self, work: tuple[Call, int]) -> bool:
        """Note that the leader is back; return whether another thread has taken the lead."""
        with self._guard:
            overtaken = self._busy is not work
            if not overtaken:
                self._busy = None
        return overtaken

    def _stand_by(self) -> None:
        """Take the lead where the leader is held up."""
        seen = -1
        while not self._over.wait(_MOMENT):
            with self._guard:
                if self._over.is_set():
                    return
                if self._busy is not None and self._serial == seen:
                    call, size = self._busy
                    self._busy = None
                    self.flight.hold_up(size)
                    call.waiting = queue.SimpleQueue()
                    break
                seen = self._serial
                if self._busy is not None:
                    continue
                self._dozing = True
                self._called.clear()
            self._called.wait()
        else:
            return
        try:
            self._start(self._stand_by, "bridge-standby")
        except RuntimeError:  # the system has no thread left; somebody has to lead all the same
            _log.exception("nobody stands by: a slow request holds up the others from now on")
        self._ask(call.connection)  # answers to requests that came together with this one may wait there
        self._lead()

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
                    connection.dialect.resume(call, len(request) + _PREFIX)
                self._ready.appendleft((call, request))

    def _flush(self, connection: Connection) -> None:
        """Send what is to be sent, and watch for what the connection needs next."""
        with connection.lock:
            try:
                connection.flush()
            except OSError:
                self._close(connection)
                return
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

    # Calls

    def begin(self, connection: Connection, version: str, prefix: str) -> Call:
        """Admit a call."""
        self._count.enter()
        call = Call(connection, Session(self._hub, version), f"{prefix}{next(self._numbers)}")
        connection.calls.add(call)
        self._timed.pop(connection, None)
        self._idle.pop(connection, None)
        _log.info("connection=%s peer=%s opened", call.name, connection.peer)
        return call

    def push(self, call: Call, request: Request | None) -> None:
        """Have a request served once those before it were; None: no more follow."""
        self._ready.append((call, request))

    def abandon(self, call: Call, error: RequestError | None = None) -> None:
        """End a call; with its connection's lock held."""
        if call.over:
            return
        if error is not None:
            call.connection.dialect.finish(call, error)
        call.over = True
        call.room.set()
        call.session.hang_up()
        self._ready.append((call, None))

    def _serve_ready(self) -> bool:
        """Serve the requests that have come, or some where they take long; return whether this thread still leads."""
        ready = self._ready
        together, since = 0, time.monotonic()
        until = since + _MOMENT
        while ready:
            call, request = ready.popleft()
            connection = call.connection
            try:
                if not self._serve(call, request):
                    return False
            except Exception:  # none is known; the other connections are not to pay for it
                _log.exception("peer=%s cut: a fault of this server", connection.peer)
                self._close(connection)
            together += 1
            if not connection.fresh:
                continue
            now = time.monotonic()
            full = together >= _TOGETHER or now - since > _SOON or not connection.small
            if full or not ready or ready[0][0].connection is not connection:
                self._flush(connection)
                if now > until:
                    break
                together, since = 0, now
        return True

    def _serve(self, call: Call, request: Request | None) -> bool:
        """Serve one request, or leave it to the call's own thread; return whether this thread still leads."""
        connection = call.connection
        if request is not None and call.over:  # its client is gone
            connection.drop(request)
            return True
        if call.waiting is not None and self._hand_over(call, request):
            return True
        if request is None:
            return self._conclude(call)
        if (connection.out or call.pending or call.requests) and self._stall(call, request):
            return True
        if type(request) is not bytes or len(request) > self.flight.room:
            try:
                connection.check(request)
            except RequestError as error:
                self._say(call, [error_response(error)])
                return True
        session = call.session
        work = self._begin_work(call, len(request))
        began = time.perf_counter()
        parts = self._handle(session, request, wait=False)
        seconds = time.perf_counter() - began
        if self._end_work(work):
            threading.current_thread().name = "bridge-call"
            try:
                if parts is None:
                    parts = self._handle(session, request, wait=True) or []
            finally:
                self.flight.leave(len(request))
            try:
                self._note(call, seconds)
                self._send_own(call, parts)
            except Exception:
                self._give_up(connection)
            self._run_own(call)
            return False
        if parts is None:
            with self._guard:
                call.waiting = queue.SimpleQueue()
            self._hand_over(call, bytes(request))
            self._start(lambda: self._run_own(call), "bridge-call")
            return True
        if session.last_error or self.metrics is not None:
            self._note(call, seconds)
        self._say(call, parts)
        return True

    def _stall(self, call: Call, request: Request | None) -> bool:
        """Keep a request back where the client does not take its answers; return whether it does not."""
        connection = call.connection
        with connection.lock:  # another thread may just have sent the last of them
            if not (connection.out or call.pending or call.requests):
                return False
            call.requests.append(request)
            connection.stalled.add(call)
            if request is not None:
                connection.dialect.defer(call, len(request) + _PREFIX)
        return True

    @staticmethod
    def _handle(session: Session, request: Request, *, wait: bool) -> list[bytes | memoryview] | None:
        try:
            return session.handle_parts(request, wait=wait)
        except Exception as error:  # none is known that comes to here; the other calls are not to pay for it
            _log.exception("a request was not served")
            problem = RequestError(Code.INTERNAL, f"the server failed: {error!r}")
            return [error_response(problem)]

    def _note(self, call: Call, seconds: float) -> None:
        """Count a request, and log one that was refused."""
        session = call.session
        if session.last_error:
            name, code = session.world_name, session.last_error
            _log.info("connection=%s world=%s refused code=%s", call.name, name, Code.named(code))
            if self.metrics is not None:
                self.metrics.refused(code)
        elif self.metrics is not None and session.last_step is not None:
            world, steps, episodes = session.last_step
            self.metrics.stepped(world, seconds, steps, episodes)

    def _say(self, call: Call, parts: list[bytes | memoryview]) -> None:
        """Give an answer to the connection; with whatever goes with it, it is sent by the next flush."""
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        if size > self._limits.max_message_bytes:
            limit = self._limits.max_message_bytes
            text = f"the response has {size} bytes, more than max_message_bytes={limit}; request fewer observations"
            parts = [error_response(RequestError(Code.RESOURCE_EXHAUSTED, text))]
            size = len(parts[0])
        connection = call.connection
        connection.small = size <= _SMALL
        if connection.small and len(parts) > 1:
            parts = [b"".join(parts)]  # what they show of the environment may change before they are sent
        with connection.lock:
            if call.over:
                return
            if not connection.dialect.answer(call, parts, size):
                call.pending = size
                connection.hold(size)
                connection.stalled.add(call)

    def _conclude(self, call: Call) -> bool:
        """End a call that has no thread of its own; return whether this thread still leads."""
        connection = call.connection
        if call.concluded:
            return True
        if not call.over and self._stall(call, None):
            return True
        call.concluded = True
        work = self._begin_work(call)
        self._release(call)
        overtaken = self._end_work(work)
        self._depart(call)
        if overtaken:
            self.flight.leave(0)
            self._ask(connection)
        else:
            self._flush(connection)
        return not overtaken

    def _release(self, call: Call) -> None:
        """Close a call's session."""
        try:
            call.session.close()
        except RequestError:
            pass  # an environment that fails in close; there is nobody left to tell
        except Exception:
            _log.exception("connection=%s was not closed as it should", call.name)
        finally:
            _log.info("connection=%s peer=%s closed", call.name, call.connection.peer)
            self._count.leave()

    def _depart(self, call: Call) -> None:
        """Say the last words of a call whose session is closed."""
        connection = call.connection
        with connection.lock:
            connection.calls.discard(call)
            connection.stalled.discard(call)
            connection.hold(-call.pending)
            call.pending = 0
            for request in call.requests:
                connection.drop(request)
            call.requests.clear()
            if not call.over:
                call.over = True
                connection.dialect.finish(call, None)

    # Calls with a thread of their own

    def _hand_over(self, call: Call, request: Request | None) -> bool:
        """Give a request to its call's own thread; return whether it still has one."""
        connection = call.connection
        with connection.lock, self._guard:
            waiting = call.waiting
            if waiting is None:
                return False
            if request is None:
                waiting.put(None)
            elif connection.dialect.throttles:
                connection.dialect.defer(call, len(request) + _PREFIX)
                waiting.put(request)
            else:
                try:
                    connection.enter(request)
                    waiting.put(request)
                except RequestError as error:
                    waiting.put(error)
        if not connection.dialect.throttles and waiting.qsize() > self._limits.max_requests_in_flight + _MAX_REFUSALS:
            self._close(connection)  # it sends and sends while an earlier request of it waits
        return True

    def _run_own(self, call: Call) -> None:
        """Serve a call until it ends, or has been quick for long enough to go back to the leader."""
        waiting = call.waiting
        if waiting is None:
            return
        quick = 0
        while (request := waiting.get()) is not None:
            try:
                seconds = self._serve_own(call, request)
            except Exception:
                self._give_up(call.connection)
                continue
            quick = quick + 1 if seconds < _QUICK_SECONDS else 0
            if quick >= _QUICK and not call.session.may_wait:
                with self._guard:
                    if waiting.empty():
                        call.waiting = None
                        return
        self._release(call)
        self._depart(call)
        self._ask(call.connection)

    def _give_up(self, connection: Connection) -> None:
        """Have a connection closed after a fault in a call's own thread: none is known. Its calls end."""
        _log.exception("peer=%s cut: a fault of this server", connection.peer)
        connection.broken = True
        self._ask(connection)

    def _serve_own(self, call: Call, request: Request | RequestError) -> float:
        """Serve a request in its call's own thread; return the seconds that it took."""
        connection = call.connection
        if isinstance(request, RequestError):
            self._send_own(call, [error_response(request)])
            return 0.0
        seconds, entered = 0.0, not connection.dialect.throttles
        try:
            if not entered:
                with connection.lock:
                    connection.dialect.resume(call, len(request) + _PREFIX)
                if call.over:
                    connection.drop(request)
                    return 0.0
                connection.enter(request)
                entered = True
            if call.over:
                return 0.0
            began = time.perf_counter()
            parts = self._handle(call.session, request, wait=True) or []
            seconds = time.perf_counter() - began
            self._note(call, seconds)
        except RequestError as error:
            parts = [error_response(error)]
        finally:
            if entered:
                self.flight.leave(len(request))
        self._send_own(call, parts)
        return seconds

    def _send_own(self, call: Call, parts: list[bytes | memoryview]) -> None:
        """Send an answer from its call's own thread, however long the client takes to read."""
        connection = call.connection
        self._say(call, parts)
        while True:
            with connection.lock:
                try:
                    connection.flush()
                except OSError:
                    connection.broken = True
                done = connection.broken or call.over or not (connection.out or call.pending)
                if not done:
                    call.room.clear()
                    connection.stalled.add(call)
                ask = connection.broken or bool(connection.out) or bool(connection.fresh) or not done
            if ask:
                self._ask(connection)
            if done:
                return
            call.room.wait()

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
