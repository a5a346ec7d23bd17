"""The calls of a server, one session each. The requests of a call are served in order, one at a time."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from google.protobuf.message import DecodeError

from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.core.logs import FailureLog, SafeLog
from bridge.core.server.limits import MESSAGE_SHARE, SHARE, Admission, ConnectionCount, CoreLimits
from bridge.core.server.registry import Registry
from bridge.core.server.serving import MOMENT, ServingThread
from bridge.core.server.session import Session, error_response
from bridge.core.transport.messages import PREFIX, RefusedMessage
from bridge.core.worlds.base import Agent, World
from bridge.core.worlds.scheduling import Scheduler
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb

if TYPE_CHECKING:
    from bridge.core.server.metrics import Metrics

__all__ = ["Answering", "Arrive", "Call", "Calls", "Client", "Request", "ServedSession"]

_log = SafeLog(__name__)
Request = bytes | bytearray
Answering: TypeAlias = Coroutine[Any, Any, list[bytes | memoryview]]
"""Returns an answer, in parts."""
Arrive: TypeAlias = Callable[[Request, bool], Callable[[], Answering] | None]
"""Tells a session of a request that has to wait, and whether only begun Steps wait before it: `Session.arrive`."""
# The most answers of a connection that are sent together, if as many requests came together, and the seconds that the
# first of them may wait. A `send` may wake the client's process, which takes longer than a step of CartPole: sending 16
# at a time took this server 11 % more processor time for 64 CartPoles.
_TOGETHER = 64
_SOON = 0.001
# The last answers of many, which are sent separately: the client reads the answers before them while these are made.
_LAST = 16
# The most waiting requests of a call, and the overhead of each in bytes, so that empty requests do not wait for free.
_MAX_WAITING = 1000
_OVERHEAD = 100
# The most calls beyond `max_connections`; they may only read properties.
_OPERATORS = 8


class Client(Protocol):
    """The connection of a call, as calls see it."""

    peer: str
    calls: set[Call]
    blocked_calls: set[Call]
    unserved: int
    turns: int
    turns_beside: int
    joins_answers: bool

    outgoing: Any
    """Bytes that wait for `flush`."""
    unsent: Any
    """Bytes that were flushed, but not yet taken by the client."""

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send an answer with the next flush. Return True if the client has room for all of it."""

    def flush(self) -> None:
        """Send the bytes in `outgoing`."""
        return None

    def is_blocked(self, call: Call) -> bool:
        """True if the client does not take the answers of a call for now."""
        return False

    def defer(self, call: Call, size: int) -> None:
        """Reduce the bytes that the client may send by `size`, for a waiting request, until `resume`."""
        return None

    def resume(self, call: Call, size: int) -> None:
        """Undo a `defer`."""
        return None

    def finish(self, call: Call, error: RequestError | None) -> None:
        """End a call, with `error` as its status if given."""

    def hold(self, size: int) -> None:
        """Count `size` more waiting bytes."""
        return None

    def drop(self, request: Request | None) -> None:
        """Release the bytes that were counted for a received request."""
        return None


class ServedSession(Protocol):
    """Answers the requests of a call: `Session`, or a class in its place."""

    last_step: tuple[World, Agent, int] | None
    last_error: int
    last_reason: str
    last_failure: str | None

    @property
    def world_name(self) -> str | None:
        """The name of the world that the session is in; None: none."""

    def handle(self, data: Request) -> Coroutine[Any, Any, list[bytes | memoryview]]:
        """Answer a request. Requests are answered one at a time."""

    def answer_lost(self) -> None:
        """Note that an error is sent in place of the last answer."""

    def hang_up(self) -> None:
        """Cancel the wait of the current request, because the client is gone."""

    def close(self) -> None:
        """Note that the stream has ended. A second call does nothing."""


class Call:
    """One stream of requests, with its session.

    Args:
        client: The connection of the call.
        session: The session that answers the requests.
        name: The call's name for the log.
    """

    def __init__(self, client: Client, session: ServedSession, name: str) -> None:
        self.client = client
        self.session = session
        self.handle: Callable[[Request], Answering] = session.handle
        """Answers a request."""
        self.arrive: Arrive | None = getattr(session, "arrive", None)
        """Tells the session of a request that has to wait, as `Session.arrive`; None: the session does not need it."""
        self.refuse: Callable[[RequestError], bytes] = error_response
        """Makes the answer to a request that was refused before, or for which the server failed."""
        self.stepping = session if isinstance(session, Session) else None
        """Reads and answers Steps that are made in a row with those of other calls; None: `handle` answers all."""
        self.name = name
        self.stream: Any = None
        """The number or object that identifies the call in the client's protocol."""
        self.requests: deque[Request | None] = deque()
        """Requests that wait for an earlier one, or for the client to take answers; None: no more follow."""
        self.arrived: dict[int, Callable[[], Answering]] = {}
        """For waiting requests that the session has begun, by `id`: the function that answers each in its turn."""
        self.released = False
        """True if a request that waited is to be served next."""
        self.busy = False
        """True if a request of the call is being served."""
        self.over = False
        """True if nothing more is sent."""
        self.concluded = False
        """True if the session is closed."""
        self.places: ConnectionCount | None = None
        """The count that includes this call."""
        self.limited = False
        """True if its requests are charged to its connection: those of a viewer, or of an operator."""
        self.refusal: RequestError | None = None
        """The error for requests other than for properties, if there is no place for the client; None: there is one.
        """
        self.compression: str | None = None
        """The compression of the answers; None: they are not compressed."""
        self.compressing = False
        """True if an answer is being compressed. It is sent afterwards."""
        self.blocked = False
        """True if the client has no room for the last answer."""
        self.unsent = 0
        """Bytes of that answer, which are counted until the client has room."""

    def translate(
        self,
        handle: Callable[[Request], Answering],
        refuse: Callable[[RequestError], bytes],
    ) -> None:
        """Translate another protocol's messages: `handle` and `refuse` replace the session's own."""
        self.handle, self.refuse, self.arrive, self.stepping = handle, refuse, None, None


# A request that is served by a step in a row with others: its call, its bytes, their number and the time when serving
# began, and the function to call in the environments' thread, with its argument.
_Step = tuple[Call, bytes, tuple[int, float], tuple[Callable[[Any], Any], Any]]


class Calls:
    """Serves a session for each call.

    Args:
        hub: The worlds.
        limits: The server's limits; `max_message_bytes` is used.
        count: Admits calls.
        viewers: Admits calls of clients that may only watch. They take no places of the others.
        admission: Admits requests.
        scheduler: Continues waiting requests.
        serving: The thread of the environments.
        cut: Closes the connection of a client after a fault of this server.
        charge: Charges a client the processor time of a request of a viewer or an operator, or of an invalid one. Its
            last argument is the share of the server's time that the client may use.
        open_session: Makes the session of a call; None: a `Session`.
    """

    def __init__(
        self,
        hub: Registry,
        limits: CoreLimits,
        *,
        count: ConnectionCount,
        viewers: ConnectionCount,
        admission: Admission,
        scheduler: Scheduler,
        serving: ServingThread,
        cut: Callable[[Any], None],
        charge: Callable[[Any, float, float], None],
        open_session: Callable[[Registry, str, bool], ServedSession] | None = None,
    ) -> None:
        self._open_session = open_session or Session
        self._hub = hub
        self._limits = limits
        self._count, self._viewers = count, viewers
        self._operators = ConnectionCount(_OPERATORS, "operators")
        self._admission = admission
        self._scheduler = scheduler
        self._serving = serving
        self.failures = FailureLog(scheduler.call_later)
        """The log of the errors of environments."""
        self._cut = cut
        self._charge = charge
        self.metrics: Metrics | None = None
        """Counts requests; None: no metrics."""
        self.freed: Callable[[], None] = lambda: None
        """Called when much memory may have been freed, except in an ordinary step."""
        self._numbers = itertools.count(1)
        self.ready: deque[tuple[Call, Request | None]] = deque()
        """Requests that have arrived, in order."""
        self._unflushed: dict[Client, None] = {}
        self._served: Client | None = None
        self._turns = 0
        """The number of requests served, except those of viewers and operators; a client's `turns` are its own."""
        self._steps: deque[_Step] = deque()
        """Steps of the current row that were not answered yet."""
        self._results: deque[tuple[Any, BaseException | None]] = deque()
        """The results of the first of these steps. The serving thread appends to it while it does not have the loop.
        """

    # Clients that connect and leave

    def open(self, client: Client, version: str, *, may_act: bool = True) -> Call:
        """Admit a call. `version` is the version that the client reports; `may_act` is False if it may only watch.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are too many calls; UNAVAILABLE: the server is stopping.
        """
        places, refusal = self._count if may_act else self._viewers, None
        try:
            # Before a place is taken, so that a draining server says so, even if it is full.
            self._hub.check_open()
            places.enter()
        except RequestError as error:
            if not may_act or self._operators.full:
                self._note_refusal(f"peer={client.peer}", int(error.code), error.message)
                raise
            # An operator's tools only read properties. A server that is full or drains admits a few: otherwise an
            # operator would think that it is dead.
            places, refusal = self._operators, error
            places.enter()
        session = self._open_session(self._hub, version, may_act)
        if isinstance(session, Session):
            # Older clients of this package do not say that the agents of one connection are theirs.
            session.connection = client
            session.charge = partial(self._charge_message, client)
        call = Call(client, session, str(next(self._numbers)))
        call.places, call.refusal = places, refusal
        call.limited = not may_act or refusal is not None
        client.calls.add(call)
        _log.info("connection=%s peer=%s opened", call.name, client.peer)
        return call

    def receive(self, call: Call, request: Request | None) -> None:
        """Queue a request behind earlier ones; None: the client sends no more."""
        call.client.unserved += 1
        self.ready.append((call, request))

    def abandon(self, call: Call, error: RequestError | None = None) -> None:
        """End a call, with `error` as its status if given. A request that is being served continues."""
        if call.over:
            return
        if error is not None:
            call.client.finish(call, error)
        call.over = True
        # Waiting requests are dropped now. If a request is being served, `_finish` drops them after it.
        if not call.busy:
            self._release(call)
        # Not closed yet, because its request may be in a call of the environment. The None, which closes it, waits for
        # that.
        call.session.hang_up()
        self.receive(call, None)

    def unblock(self, call: Call) -> None:
        """Continue a call whose client may take answers again."""
        client = call.client
        # If it is busy, its `_finish` calls this again.
        if call.busy:
            return
        if not call.over and client.is_blocked(call):
            client.blocked_calls.add(call)
            return
        self._unblocked(call)
        self._release(call)

    def _unblocked(self, call: Call) -> None:
        call.blocked = False
        call.client.blocked_calls.discard(call)
        call.client.hold(-call.unsent)
        call.unsent = 0
        self.freed()

    def _release(self, call: Call) -> None:
        """Queue the first waiting request of a call. If the call is over, drop all of them."""
        if call.over:
            while call.requests:
                call.client.drop(self._take_waiting(call))
            self.receive(call, None)
        elif call.requests and not call.released:
            call.released = True
            call.client.unserved += 1
            # Ahead of the requests that came together with the client's new window, which are younger.
            self.ready.appendleft((call, self._take_waiting(call)))

    def _take_waiting(self, call: Call) -> Request | None:
        if (request := call.requests.popleft()) is not None:
            # Only now may the client send as many bytes again, so that waiting bytes are bounded.
            call.client.resume(call, len(request) + PREFIX)
            if type(request) is bytes:
                # A bytearray was counted when its memory was allocated, and is released by `drop`.
                call.client.hold(-len(request) - _OVERHEAD)
        return request

    # Serving

    def serve_ready(self) -> None:
        """Serve the requests that have arrived, or only some if they take long."""
        ready = self.ready
        together, since = 0, time.monotonic()
        until, row = since + MOMENT, _TOGETHER
        while ready:
            if not together:
                most = min(_TOGETHER, len(ready) - _LAST) if len(ready) >= 2 * _LAST else _TOGETHER
            call = ready[0][0]
            client, count = call.client, 1
            self._served = client
            if not call.limited:
                self._turns += 1
                client.turns += 1
            try:
                # A single request, as from a client with one environment, is served in fewer calls by itself.
                steps = self._read_steps(client, min(row, most - together)) if len(ready) > 1 else []
                if steps:
                    count = self._serve_steps(steps)
                    # Read few more than were made, because the others are put back and read again.
                    row = 2 * count
                else:
                    call, request = ready.popleft()
                    if call.limited:
                        self._serve_limited(call, request)
                    else:
                        self._serve(call, request)
            # No such fault of this package is known, but other packages may serve the client. Other connections go on.
            except (Exception, SystemExit):
                self._cut_for_fault(client)
            together += count
            # The request waits, was dropped, or its answer is compressed first.
            if not client.outgoing:
                continue
            now = time.monotonic()
            # Answers wait only for others of the same connection: the answer to a single request is sent at once.
            full = together >= most or now - since > _SOON or not client.joins_answers
            if full or not ready or ready[0][0].client is not client:
                # A joint step has answers for all its agents: those of the others follow in a moment.
                if self._scheduler.ready and len(client.calls) > 1:
                    self._flush_later(client)
                else:
                    client.flush()
                # Otherwise a client that sends endless Steps would keep the loop from all other sockets.
                if now > until:
                    break
                together, since = 0, now
        self._served = None

    def _cut_for_fault(self, client: Client) -> None:
        _log.exception("peer=%s cut: a fault of this server", client.peer)
        self._cut(client)

    def _flush_later(self, client: Client) -> None:
        """Send the waiting answers of a client soon, together with those made until then."""
        if not self._unflushed:
            self._scheduler.call_soon(self._flush_all)
        self._unflushed[client] = None

    def _flush_all(self) -> None:
        while self._unflushed:
            self._unflushed.popitem()[0].flush()

    def flush_served(self) -> None:
        """Send the answers that wait while an environment's call takes long."""
        self._answer_steps()
        if self._served is not None:
            self._served.flush()

    # Steps of many environments, such as those of one client's single worlds, arrive together. They are made in a row,
    # and answered afterwards. The loop is handed over once for all of them, and both environments and server find their
    # data in the processor's caches: 64 CartPoles take a quarter less processor time than if each were answered before
    # the next is stepped.

    def _read_steps(self, client: Client, most: int) -> list[_Step]:
        """Take up to `most` of a client's next requests from `ready`, while they are Steps that can be made in a row.

        Raises nothing: a request to refuse is left for `_serve`.
        """
        ready, admission, serving, steps = self.ready, self._admission, self._serving, list[_Step]()
        if client.unsent or not serving.is_free:
            return steps
        began, room = time.perf_counter(), admission.max_bytes - admission.bytes
        for _ in range(min(most, len(ready), admission.max_requests - admission.requests)):
            call, request = ready[0]
            # Everything unusual is left for `_serve`, which handles it.
            if call.busy or call.over or call.blocked or call.limited or call.requests or call.released:
                break
            if type(request) is not bytes or call.stepping is None or call.client is not client:
                break
            size = len(request)
            if size > room or (make := call.stepping.read_step(request, serving)) is None:
                break
            ready.popleft()
            room -= size
            call.busy = True
            steps.append((call, request, (size, began), make))
        client.unserved -= len(steps)
        admission.requests += len(steps)
        admission.bytes = admission.max_bytes - room
        return steps

    def _serve_steps(self, steps: list[_Step]) -> int:
        """Make steps in a row, and answer them; return their number. Steps that were not begun go back to `ready`."""
        made = len(steps)
        self._steps.extend(steps)
        try:
            self._serving.run_in_row([make for _, _, _, make in steps], self._results, _SOON)
            self._answer_steps()
        finally:  # after an interrupt too: the results belong to the first of the remaining steps
            while len(self._steps) > len(self._results):
                made -= 1
                self._put_back(self._steps.pop())
        return made

    def _put_back(self, step: _Step) -> None:
        """Put a request back as the next one of `ready`, because its step was not begun."""
        call, request, _, _ = step
        self._admission.requests -= 1
        self._admission.bytes -= len(request)
        call.busy = False
        # The client has gone meanwhile.
        if call.over:
            self._release(call)
            return
        # More requests of this call may have come meanwhile. This one is before them.
        call.released = bool(call.requests)
        call.client.unserved += 1
        self.ready.appendleft((call, request))

    def _answer_steps(self) -> None:
        """Answer the steps that were made. While a step takes long, the deputy does this."""
        steps, results, admission, most = self._steps, self._results, self._admission, self._limits.max_message_bytes
        while results:
            (call, _, admitted, _), (result, error) = steps.popleft(), results.popleft()
            client, session = call.client, call.stepping
            assert session is not None, "`_read_steps` has asked it"
            try:
                parts = session.answer_step(result, error)
                size = len(parts[0])
                # Everything unusual is left for `_finish`.
                if session.last_error or len(parts) > 1 or size > most or call.over or call.requests or self.metrics:
                    self._finish(call, admitted, parts)
                else:
                    admission.requests -= 1
                    admission.bytes -= admitted[0]
                    call.busy = False
                    has_room = client.answer(call, parts, size)
                    if not has_room:
                        self._block(call, size)
                # A large answer refers to the environment's memory, so it is sent before the next step.
                if not client.joins_answers:
                    client.flush()
            # As in `serve_ready`.
            except (Exception, SystemExit):
                self._cut_for_fault(client)

    def _serve_limited(self, call: Call, request: Request | None) -> None:
        """Serve a request, and charge its connection for it.

        The server's main task is training. A viewer's requests are charged like a stranger's frames: otherwise four
        viewers that step endlessly would take nearly all of a trainer's time.
        """
        began = time.thread_time()
        try:
            if call.refusal is not None and request is not None and not _asks_for_property(request):
                # `_serve`, which drops the request, counts it as served.
                self._note_refusal(_place(call), int(call.refusal.code), call.refusal.message)
                self.abandon(call, call.refusal)
            self._serve(call, request)
        finally:
            self._charge(call.client, time.thread_time() - began, SHARE)

    def _charge_message(self, client: Client, seconds: float) -> None:
        """Charge the processor time of a message, if other clients need the server too.

        Otherwise it takes time from nobody: a fork of many lanes is its client's work, as Steps are.
        """
        # Requests that others sent meanwhile were not read yet, so count those served since the client's last message.
        beside = self._turns - client.turns
        before, client.turns_beside = client.turns_beside, beside
        if seconds > 0.0 and (beside != before or any(call.client is not client for call, _ in self.ready)):
            self._charge(client, seconds, MESSAGE_SHARE)

    def _serve(self, call: Call, request: Request | None) -> None:
        """Serve one request, or queue it until its turn."""
        client = call.client
        client.unserved -= 1
        # A request that waited was taken out of `call.requests`, which still has those behind it.
        first, call.released = call.released or not call.requests, False
        if request is not None and call.over:  # the client is gone
            client.drop(request)
        # A session handles one request at a time (D-1). Nothing is served for a client that does not take its answers,
        # because the answers would pile up.
        elif call.busy or not first or (not call.over and (call.blocked or client.unsent)):
            self._defer(call, request, first=first)
        # Behind all requests: those before a half-close are served.
        elif request is None:
            self._conclude(call)
        else:
            if type(request) is not bytes:
                client.drop(request)  # from now on it counts as a served request
            begun = call.arrived.pop(id(request), None) if call.arrived else None
            try:
                if isinstance(request, RefusedMessage):
                    raise request.error
                # Compared here, not by `check`, to save a call in every step.
                size, admission = len(request), self._admission
                if admission.requests >= admission.max_requests or admission.bytes + size > admission.max_bytes:
                    admission.check(size)
            except RequestError as error:
                # An answer like any other, in its turn: the stream continues (D-2).
                self._note_refusal(_place(call), int(error.code), error.message)
                self._finish(call, None, [call.refuse(error)])
                return
            admission.requests += 1
            admission.bytes += size
            admitted = size, time.perf_counter()
            coroutine = call.handle(request) if begun is None else begun()
            # Before `send`: while an environment's call runs there, the deputy may receive more requests.
            call.busy = True
            try:
                # Nearly every request ends here. Only one that waits for a result continues in the scheduler.
                pending = coroutine.send(None)
            except StopIteration as stop:
                if call.session.last_error == Code.INVALID_ARGUMENT:
                    # An invalid request serves nobody, and checking it can take long, for example reset options with
                    # thousands of values. Without a charge, a client that repeats it takes all the server's time.
                    self._charge(client, time.perf_counter() - admitted[1], SHARE)
                self._finish(call, admitted, stop.value)
            except Exception as error:
                self._finish(call, admitted, _fault(call, error))
            else:
                self._go_on_later(call, admitted, coroutine, pending)

    def _defer(self, call: Call, request: Request | None, *, first: bool) -> None:
        """Keep a request until those before it are answered, and the client has taken the answers."""
        # A call that is over gets only the None, which ends it.
        if len(call.requests) >= _MAX_WAITING and not call.over:
            call.client.drop(request)
            text = f"{_MAX_WAITING} requests of this call wait already; take the answers before you send more"
            self.abandon(call, RequestError(Code.RESOURCE_EXHAUSTED, text))
            return
        if request is not None and call.arrive is not None and not isinstance(request, RefusedMessage):
            self._arrive(call, call.arrive, request, first=first)
        if first:
            # It has waited before, and goes back in front of those behind it.
            call.requests.appendleft(request)
        else:
            call.requests.append(request)
        if request is not None:
            call.client.defer(call, len(request) + PREFIX)
            if type(request) is bytes:
                call.client.hold(len(request) + _OVERHEAD)
        if not call.busy:
            # It waits only for the client, so `unblock` must be called when the client takes its answers.
            call.client.blocked_calls.add(call)

    def _arrive(self, call: Call, arrive: Arrive, request: Request, *, first: bool) -> None:
        """Tell the session of a request that has to wait."""
        # A waiting request stays the same object, so no other one has its `id`.
        if id(request) not in call.arrived:
            begun = arrive(request, first or len(call.arrived) == len(call.requests))
            if begun is not None:
                call.arrived[id(request)] = begun

    def _go_on_later(self, call: Call, admitted: tuple[int, float], coroutine: Any, pending: Any) -> None:
        """Finish a request that waits for a result once the result is there."""

        def done(parts: list[bytes | memoryview] | None, error: BaseException | None) -> None:
            self._finish(call, admitted, parts if error is None else _fault(call, error))
            # Not flushed at once: one joint step ends the requests of many agents, often on one connection.
            self._flush_later(call.client)

        self._scheduler.start_after(pending, coroutine, done)

    def _finish(self, call: Call, admitted: tuple[int, float] | None, parts: Any) -> None:
        """Answer a request. The next flush sends the answer, together with others.

        Args:
            call: The request's call.
            admitted: The size of the request, and when serving began; None: it was refused before.
            parts: The answer.
        """
        if admitted is not None:
            size, began = admitted
            self._admission.requests -= 1
            self._admission.bytes -= size
            call.busy = False
            # Checked here, so that a step without metrics costs no call.
            if call.session.last_error or self.metrics is not None:
                self._record(call, time.perf_counter() - began)
        if not call.over:
            client, limit = call.client, self._limits.max_message_bytes
            size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
            # An error takes the answer's place, so that the stream continues.
            if size > limit:
                text = f"the response has {size} bytes, more than max_message_bytes={limit}; request fewer observations"
                parts = [call.refuse(RequestError(Code.RESOURCE_EXHAUSTED, text))]
                call.session.answer_lost()
                size = len(parts[0])
            if not client.answer(call, parts, size):
                self._block(call, size)
        if call.requests:
            self.unblock(call)

    def _block(self, call: Call, size: int) -> None:
        """Count the memory of a call's answer until the client has a window for it."""
        call.blocked, call.unsent = True, size
        call.client.hold(size)
        call.client.blocked_calls.add(call)

    def _record(self, call: Call, seconds: float) -> None:
        """Count a request in the metrics, and log it if it was refused."""
        session = call.session
        if session.last_error:
            self._note_refusal(_place(call), session.last_error, session.last_reason)
            if session.last_failure is not None:
                self.failures.add(session.world_name, session.last_failure)
                session.last_failure = None
        elif self.metrics is not None and session.last_step is not None:
            self.metrics.stepped(seconds)

    def _note_refusal(self, place: str, code: int, reason: str) -> None:
        """Count and log a refused request, or a refused connection, which the log names by `place`."""
        # Escaped as by `repr`: text from a client must not look like a line of the log.
        first = f"{reason.partition(chr(10))[0]:.400}"
        _log.info("%s refused code=%s reason=%r", place, Code.named(code), first)
        if self.metrics is not None:
            self.metrics.refused(code)

    def _conclude(self, call: Call) -> None:
        """Close the session of a call, and end the call."""
        if call.concluded:
            return
        call.concluded = True
        client = call.client
        try:
            call.session.close()
        except (Exception, KeyboardInterrupt, SystemExit):
            _log.exception("connection=%s was not closed as it should", call.name)
        _log.info("connection=%s peer=%s closed", call.name, client.peer)
        # Also if the session failed to close: otherwise each such call would take a place for ever.
        if call.places is not None:
            call.places.leave()
        self.freed()
        client.calls.discard(call)
        self._unblocked(call)
        while call.requests:
            client.drop(self._take_waiting(call))
        if not call.over:
            call.over = True
            client.finish(call, None)
        self._flush_later(client)


def _asks_for_property(request: Request) -> bool:
    try:
        extension = pb.EnvironmentRequest.FromString(bytes(request)).extension
    except DecodeError:
        return False
    return extension.type_url == PROPERTY_REQUEST_URL


def _place(call: Call) -> str:
    """Return the log's name for a call and its world."""
    return f"connection={call.name} world={call.session.world_name}"


def _fault(call: Call, error: BaseException) -> list[bytes | memoryview]:
    """Return the answer to a request for which a session failed. No such fault is known; other calls continue."""
    _log.error("a request was not served", exc_info=error)
    return [call.refuse(RequestError(Code.INTERNAL, f"the server failed: {error!r}"))]
