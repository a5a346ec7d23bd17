"""The calls of a server's connections: who serves them, in what order, and in which thread."""

from __future__ import annotations

import abc
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from bridge.errors import Code, RequestError
from bridge.http2 import SMALL
from bridge.logs import SafeLog
from bridge.server.connection import Call, Connection, Request
from bridge.server.flight import Flight
from bridge.server.limits import ConnectionCount, Limits
from bridge.server.metrics import Metrics
from bridge.session import Hub, Session, error_response

__all__ = ["PREFIX", "Calls"]

_log = SafeLog(__name__)
# Seconds that a request may hold up the others; it is looked twice.
_MOMENT = 0.04
PREFIX = 5
"""What a message takes beside its bytes: so much room does even an empty one use."""
# Refusals that are kept while an earlier request of the same call waits.
_MAX_REFUSALS = 64
# A call comes back from its own thread after so many requests in a row that took less than so many seconds.
_QUICK, _QUICK_SECONDS = 64, 0.005
# Answers of a connection that are sent together, where that many requests came together, and the seconds for which the
# first of them waits; those that are not `SMALL` go by themselves.
_TOGETHER = 8
_SOON = 0.001


class Calls(abc.ABC):
    """Serves a session for each call.

    One thread, the leader, serves all calls one after the other, as the lock around the environments would have it
    anyway: nothing is handed from thread to thread. Where a request takes longer than a moment, a second thread that
    stands by takes the lead, so that everybody else is served on; the one that is held up goes on as its call's own
    thread, until the call has been quick for a while. A call whose agent may wait (for a clock, for other agents) gets
    its own thread as soon as it has joined.

    Args:
        hub: The worlds.
        limits: `max_message_bytes`, and `max_requests_in_flight` for a call's own queue.
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
        self._ready: deque[tuple[Call, Request | None]] = deque()
        self._guard = threading.Lock()
        """Held where `Call.waiting` changes, and around what follows."""
        self._busy: tuple[Call, int] | None = None
        self._serial = 0
        self._dozing = False
        self._called = threading.Event()
        self._over = threading.Event()
        self._threads: set[threading.Thread] = set()

    # What the sockets are looked after by

    @abc.abstractmethod
    def _lead(self) -> None:
        """Look after the sockets, and serve what comes, until the end or until another thread takes the lead."""

    @abc.abstractmethod
    def _flush(self, connection: Connection) -> None:
        """Send what is to be sent; by the leader."""

    @abc.abstractmethod
    def _close(self, connection: Connection) -> None:
        """Close a connection; by the leader."""

    @abc.abstractmethod
    def _ask(self, connection: Connection) -> None:
        """Have the leader look at a connection."""

    @abc.abstractmethod
    def _engaged(self, connection: Connection) -> None:
        """Take note that a connection has a call."""

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

    # Calls

    def begin(self, connection: Connection, version: str, prefix: str) -> Call:
        """Admit a call."""
        self._count.enter()
        call = Call(connection, Session(self._hub, version), f"{prefix}{next(self._numbers)}")
        connection.calls.add(call)
        self._engaged(connection)
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
        try:
            parts = session.handle_parts(request, wait=False)
        except Exception as error:
            parts = self._fault(error)
        seconds = time.perf_counter() - began
        with self._guard:  # `_end_work`, written out: every step passes here
            overtaken = self._busy is not work
            if not overtaken:
                self._busy = None
        if overtaken:
            threading.current_thread().name = "bridge-call"
            try:
                if parts is None:
                    parts = self._handle(session, request)
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
            self._detach(call, request)
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
                connection.dialect.defer(call, len(request) + PREFIX)
        return True

    def _handle(self, session: Session, request: Request) -> list[bytes | memoryview]:
        """Answer a request that may wait."""
        try:
            return session.handle_parts(request) or []
        except Exception as error:
            return self._fault(error)

    @staticmethod
    def _fault(error: Exception) -> list[bytes | memoryview]:
        """Answer a request at which a session failed: none is known; the other calls are not to pay for it."""
        _log.exception("a request was not served")
        return [error_response(RequestError(Code.INTERNAL, f"the server failed: {error!r}"))]

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
        connection.small = size <= SMALL
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
                connection.dialect.defer(call, len(request) + PREFIX)
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

    def _detach(self, call: Call, request: Request) -> None:
        """Give a call a thread of its own, for a request that may wait."""
        with self._guard:
            call.waiting = queue.SimpleQueue()
        try:
            self._start(lambda: self._run_own(call), "bridge-call")
        except RuntimeError:
            with self._guard:
                call.waiting = None
            text = "this server's system has no thread left for a request that may wait; send it again later"
            self._say(call, [error_response(RequestError(Code.RESOURCE_EXHAUSTED, text))])
        else:
            self._hand_over(call, bytes(request))

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
                    connection.dialect.resume(call, len(request) + PREFIX)
                if call.over:
                    connection.drop(request)
                    return 0.0
                connection.enter(request)
                entered = True
            if call.over:
                return 0.0
            began = time.perf_counter()
            parts = self._handle(call.session, request)
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
