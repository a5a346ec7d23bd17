"""The calls of a server, one session each: requests are served in their order, one of a call at a time."""

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
"""Ends with an answer, in parts."""
Arrive: TypeAlias = Callable[[Request, bool], Callable[[], Answering] | None]
"""Tells a session of a request that has to wait, and whether only begun Steps wait before it: `Session.arrive`."""
# Answers of a connection that are sent together, where that many requests came together, and the seconds for which the
# first of them waits. A `send` may wake the client's process, which takes longer than a step of CartPole: to send 16 at
# a time took this server 11 % more processor time for 64 CartPoles.
_TOGETHER = 64
_SOON = 0.001
# How many of many requests are answered by themselves, the last ones: the client reads the answers before them while
# these are made.
_LAST = 16
# Requests of a call that may wait, and what each of them takes beside its bytes: empty ones would else wait for free.
_MAX_WAITING = 1000
_OVERHEAD = 100
# Calls of a server that has `max_connections` already which may read properties, and do nothing else.
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
    """Bytes that were flushed, and that the client did not take yet."""

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        """Send an answer with the next flush; return whether the client has room for all of it."""

    def flush(self) -> None:
        """Send what waits in `outgoing`."""
        return None

    def is_blocked(self, call: Call) -> bool:
        """True if the client does not take the answers of a call for now."""
        return False

    def defer(self, call: Call, size: int) -> None:
        """Let the client send `size` bytes less, for a request that waits, until `resume`."""
        return None

    def resume(self, call: Call, size: int) -> None:
        """Take back a `defer`."""
        return None

    def finish(self, call: Call, error: RequestError | None) -> None:
        """End a call: as it should, or for a reason."""

    def hold(self, size: int) -> None:
        """Count bytes that wait."""
        return None

    def drop(self, request: Request | None) -> None:
        """Give back what a request counts that has been received."""
        return None


class ServedSession(Protocol):
    """Answers the requests of a call: `Session`, or a class that takes its place."""

    last_step: tuple[World, Agent, int] | None
    last_error: int
    last_reason: str
    last_failure: str | None

    @property
    def world_name(self) -> str | None:
        """The world that it is in; None: none."""

    def handle(self, data: Request) -> Coroutine[Any, Any, list[bytes | memoryview]]:
        """Answer a request, one at a time."""

    def answer_lost(self) -> None:
        """Take note that an error is sent in place of the last answer."""

    def hang_up(self) -> None:
        """End what the request at hand waits for: the client is gone."""

    def close(self) -> None:
        """Take note that the stream ended. Again: nothing."""


class Call:
    """One stream of requests: a session.

    Args:
        client: The connection that it came over.
        session: What answers.
        name: For the log.
    """

    def __init__(self, client: Client, session: ServedSession, name: str) -> None:
        self.client = client
        self.session = session
        self.handle: Callable[[Request], Answering] = session.handle
        """Answers a request."""
        self.arrive: Arrive | None = getattr(session, "arrive", None)
        """Tells the session of a request that has to wait, as `Session.arrive`; None: it need not know."""
        self.refuse: Callable[[RequestError], bytes] = error_response
        """Makes the answer to a request that was refused before, or at which the server failed."""
        self.stepping = session if isinstance(session, Session) else None
        """Reads and answers Steps that are made in a row with those of other calls; None: `handle` answers all."""
        self.name = name
        self.stream: Any = None
        """The number or object by which the client's protocol knows it."""
        self.requests: deque[Request | None] = deque()
        """Those that wait for an earlier one, or for the client to take answers; None: no more follow."""
        self.arrived: dict[int, Callable[[], Answering]] = {}
        """Of waiting requests that the session has begun with: what answers each in its turn, by its `id`."""
        self.released = False
        """True if one that waited is to be served next."""
        self.busy = False
        """True if a request of it is being served."""
        self.over = False
        """True if nothing more is said."""
        self.concluded = False
        """True if its session is closed."""
        self.places: ConnectionCount | None = None
        """The account that has counted it."""
        self.limited = False
        """True if its requests are at the expense of its connection: those of a viewer, or of an operator."""
        self.refusal: RequestError | None = None
        """The error for a client that asks for more than properties, if there is no place for it; None: there is one.
        """
        self.compression: str | None = None
        """The compression of its answers; None: they are not compressed."""
        self.compressing = False
        """True if an answer is being compressed, and sent after that."""
        self.blocked = False
        """True if the client has no room for the last answer."""
        self.unsent = 0
        """Bytes of that answer, which count until it has."""

    def translate(
        self,
        handle: Callable[[Request], Answering],
        refuse: Callable[[RequestError], bytes],
    ) -> None:
        """Have another protocol's messages translated: `handle` and `refuse` take the place of the session's own."""
        self.handle, self.refuse, self.arrive, self.stepping = handle, refuse, None, None


# A request that is served by a step in a row with others: its call, its bytes, their number and when it began to be
# served, and what to call in the thread of the environments, with its argument.
_Step = tuple[Call, bytes, tuple[int, float], tuple[Callable[[Any], Any], Any]]


class Calls:
    """Serves a session for each call.

    Args:
        hub: The worlds.
        limits: `max_message_bytes`.
        count: Admits calls.
        viewers: Admits calls of clients that may only watch: they take no places of those that act.
        admission: Admits requests.
        scheduler: Goes on with requests that wait.
        serving: The thread of the environments.
        cut: Closes the connection of a client after a fault of this server.
        charge: Counts the processor time of a request of a viewer or an operator, or of one that is invalid; of the
            server's time, its client may use the share that is given.
        open_session: Makes what answers a call; None: a `Session`.
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
        """Where to count; None: nowhere."""
        self.freed: Callable[[], None] = lambda: None
        """Called where memory was freed that may be much, and not in an ordinary step."""
        self._numbers = itertools.count(1)
        self.ready: deque[tuple[Call, Request | None]] = deque()
        """Requests that have come, in their order."""
        self._unflushed: dict[Client, None] = {}
        self._served: Client | None = None
        self._turns = 0
        """How often requests were served, those of viewers and operators apart; `turns` of a client are its own."""
        self._steps: deque[_Step] = deque()
        """Those that are made in a row now, and were not answered yet."""
        self._results: deque[tuple[Any, BaseException | None]] = deque()
        """What the first of them have returned, or raised. The serving thread appends to it while it has not the loop.
        """

    # Clients that join and leave

    def open(self, client: Client, version: str, *, may_act: bool = True) -> Call:
        """Admit a call, of a client that says it has this version, and that may act or only watch.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are as many as there may be; UNAVAILABLE: the server is stopping.
        """
        places, refusal = self._count if may_act else self._viewers, None
        try:
            # Before a place is taken: a server that drains is to say so, also where it is full.
            self._hub.check_open()
            places.enter()
        except RequestError as error:
            if not may_act or self._operators.full:
                self._note_refusal(f"peer={client.peer}", int(error.code), error.message)
                raise
            # An operator's tools only read properties. A server that is full or drains lets a few in: whoever could
            # not see what it does would take it for dead.
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
        """Queue a request behind those that came before; None: the client sends no more."""
        call.client.unserved += 1
        self.ready.append((call, request))

    def abandon(self, call: Call, error: RequestError | None = None) -> None:
        """End a call; send `error` as its status if there is one. A request that is being served goes on."""
        if call.over:
            return
        if error is not None:
            call.client.finish(call, error)
        call.over = True
        # What waits is dropped now. With a request that is served, `_finish` does so once that ends.
        if not call.busy:
            self._release(call)
        # Not closed yet: its request may be in a call of the environment. The None, which closes it, waits for that.
        call.session.hang_up()
        self.receive(call, None)

    def unblock(self, call: Call) -> None:
        """Go on with a call whose client may take answers again."""
        client = call.client
        # Its `_finish` calls this again.
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
        """Queue the first of a call's waiting requests. Of a call that is over, drop all of them."""
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
            # Only now may the client send as many bytes again: so what waits is bounded.
            call.client.resume(call, len(request) + PREFIX)
            if type(request) is bytes:
                # A bytearray was counted when its memory was taken, and is given back by `drop`.
                call.client.hold(-len(request) - _OVERHEAD)
        return request

    # Serving

    def serve_ready(self) -> None:
        """Serve the requests that have come, or some where they take long."""
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
                # One that comes alone, as of a client with one environment, is served in fewer calls by itself.
                steps = self._read_steps(client, min(row, most - together)) if len(ready) > 1 else []
                if steps:
                    count = self._serve_steps(steps)
                    # Few more than were made: what goes back is to be read again.
                    row = 2 * count
                else:
                    call, request = ready.popleft()
                    if call.limited:
                        self._serve_limited(call, request)
                    else:
                        self._serve(call, request)
            # None is known of ours; another package may speak with the client. Other connections are not to pay for it.
            except (Exception, SystemExit):
                self._cut_for_fault(client)
            together += count
            # The request waits, was dropped, or its answer is compressed first.
            if not client.outgoing:
                continue
            now = time.monotonic()
            # An answer waits only for others of its own connection: that to a single request is sent at once.
            full = together >= most or now - since > _SOON or not client.joins_answers
            if full or not ready or ready[0][0].client is not client:
                # A joint step has answers for all its agents: those of the others follow in a moment.
                if self._scheduler.ready and len(client.calls) > 1:
                    self._flush_later(client)
                else:
                    client.flush()
                # A client that sends Steps without end would else keep the loop from the sockets of all others.
                if now > until:
                    break
                together, since = 0, now
        self._served = None

    def _cut_for_fault(self, client: Client) -> None:
        _log.exception("peer=%s cut: a fault of this server", client.peer)
        self._cut(client)

    def _flush_later(self, client: Client) -> None:
        """Send what waits for a client, together with what is answered until then."""
        if not self._unflushed:
            self._scheduler.call_soon(self._flush_all)
        self._unflushed[client] = None

    def _flush_all(self) -> None:
        while self._unflushed:
            self._unflushed.popitem()[0].flush()

    def flush_served(self) -> None:
        """Send the answers that wait for one that takes long."""
        self._answer_steps()
        if self._served is not None:
            self._served.flush()

    # Steps of many environments, such as those of the single worlds of one client, come together. They are made in a
    # row, and answered after that. The loop is handed over once for all of them, and environments and server each find
    # what they need in the processor's caches: 64 CartPoles take a quarter less processor time than with each answered
    # before the next is stepped.

    def _read_steps(self, client: Client, most: int) -> list[_Step]:
        """Take the next requests of a client from `ready`, at most so many, as far as they are Steps to make in a row.

        Raises nothing: what is to be refused is left for `_serve`.
        """
        ready, admission, serving, steps = self.ready, self._admission, self._serving, list[_Step]()
        if client.unsent or not serving.is_free:
            return steps
        began, room = time.perf_counter(), admission.max_bytes - admission.bytes
        for _ in range(min(most, len(ready), admission.max_requests - admission.requests)):
            call, request = ready[0]
            # Whatever is not as in nearly every step is left for `_serve`, which sees to it.
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
        """Make steps in a row, and answer them; return how many. What was not begun goes back to `ready`."""
        made = len(steps)
        self._steps.extend(steps)
        try:
            self._serving.run_in_row([make for _, _, _, make in steps], self._results, _SOON)
            self._answer_steps()
        finally:  # after an interrupt too: each result belongs to the first of the steps that are left
            while len(self._steps) > len(self._results):
                made -= 1
                self._put_back(self._steps.pop())
        return made

    def _put_back(self, step: _Step) -> None:
        """Let a request be the next one of `ready` again: its step was not begun."""
        call, request, _, _ = step
        self._admission.requests -= 1
        self._admission.bytes -= len(request)
        call.busy = False
        # Its client has gone meanwhile.
        if call.over:
            self._release(call)
            return
        # Further ones of this call may have come meanwhile: this one is before them.
        call.released = bool(call.requests)
        call.client.unserved += 1
        self.ready.appendleft((call, request))

    def _answer_steps(self) -> None:
        """Answer the steps that have been made: while one takes long, the deputy does so."""
        steps, results, admission, most = self._steps, self._results, self._admission, self._limits.max_message_bytes
        while results:
            (call, _, admitted, _), (result, error) = steps.popleft(), results.popleft()
            client, session = call.client, call.stepping
            assert session is not None, "`_read_steps` has asked it"
            try:
                parts = session.answer_step(result, error)
                size = len(parts[0])
                # Whatever is not as in nearly every step is left for `_finish`.
                if session.last_error or len(parts) > 1 or size > most or call.over or call.requests or self.metrics:
                    self._finish(call, admitted, parts)
                else:
                    admission.requests -= 1
                    admission.bytes -= admitted[0]
                    call.busy = False
                    has_room = client.answer(call, parts, size)
                    if not has_room:
                        self._block(call, size)
                # A large one refers to the environment's memory, so that it is sent before the next step.
                if not client.joins_answers:
                    client.flush()
            # As in `serve_ready`.
            except (Exception, SystemExit):
                self._cut_for_fault(client)

    def _serve_limited(self, call: Call, request: Request | None) -> None:
        """Serve a request at the expense of its connection.

        Training is what a server is for. What a viewer asks for is not charged less than the frames of a stranger:
        else four of them that step without end would take nearly all of a trainer's time.
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
        """Count the processor time of a message, if others need the server too.

        Else it takes time from nobody: a fork of many lanes is its client's work, as Steps are.
        """
        # What others have sent meanwhile was not read yet: so those count who were served since its last message.
        beside = self._turns - client.turns
        before, client.turns_beside = client.turns_beside, beside
        if seconds > 0.0 and (beside != before or any(call.client is not client for call, _ in self.ready)):
            self._charge(client, seconds, MESSAGE_SHARE)

    def _serve(self, call: Call, request: Request | None) -> None:
        """Serve one request, or have it wait for its turn."""
        client = call.client
        client.unserved -= 1
        # One that waited has been taken out of `call.requests`, in which those behind it still are.
        first, call.released = call.released or not call.requests, False
        if request is not None and call.over:  # its client is gone
            client.drop(request)
        # A session handles one request at a time (D-1). Nothing is served for a client that does not take its answers:
        # they would be kept without end.
        elif call.busy or not first or (not call.over and (call.blocked or client.unsent)):
            self._defer(call, request, first=first)
        # Behind all requests: those that came before a half-close are served.
        elif request is None:
            self._conclude(call)
        else:
            if type(request) is not bytes:
                client.drop(request)  # it counts as one that is served from now on
            begun = call.arrived.pop(id(request), None) if call.arrived else None
            try:
                if isinstance(request, RefusedMessage):
                    raise request.error
                # Compared here, and not by `check`: that would be a call more in every step.
                size, admission = len(request), self._admission
                if admission.requests >= admission.max_requests or admission.bytes + size > admission.max_bytes:
                    admission.check(size)
            except RequestError as error:
                # An answer like any other, in its turn: the stream goes on (D-2).
                self._note_refusal(_place(call), int(error.code), error.message)
                self._finish(call, None, [call.refuse(error)])
                return
            admission.requests += 1
            admission.bytes += size
            admitted = size, time.perf_counter()
            coroutine = call.handle(request) if begun is None else begun()
            # Before `send`: while that is in an environment's call, the deputy may receive more requests.
            call.busy = True
            try:
                # Nearly every request is served here. Only one that waits for a result goes through the scheduler.
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
        # To a call that is over only the None comes, which ends it.
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
            # It waits for the client alone, so `unblock` is to be called once that takes its answers.
            call.client.blocked_calls.add(call)

    def _arrive(self, call: Call, arrive: Arrive, request: Request, *, first: bool) -> None:
        """Tell the session of a request that has to wait."""
        # A request stays the same object while it waits, so its `id` is no other one's.
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
        """Answer a request; with whatever goes with it, the answer is sent by the next flush.

        Args:
            call: Its call.
            admitted: Its size, and when it began to be served; None: it was refused before.
            parts: The answer.
        """
        if admitted is not None:
            size, began = admitted
            self._admission.requests -= 1
            self._admission.bytes -= size
            call.busy = False
            # Asked here, so that a step without metrics costs no call.
            if call.session.last_error or self.metrics is not None:
                self._record(call, time.perf_counter() - began)
        if not call.over:
            client, limit = call.client, self._limits.max_message_bytes
            size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
            # An error takes its place, so that the stream goes on.
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
        """Count a request, and log one that was refused."""
        session = call.session
        if session.last_error:
            self._note_refusal(_place(call), session.last_error, session.last_reason)
            if session.last_failure is not None:
                self.failures.add(session.world_name, session.last_failure)
                session.last_failure = None
        elif self.metrics is not None and session.last_step is not None:
            self.metrics.stepped(seconds)

    def _note_refusal(self, place: str, code: int, reason: str) -> None:
        """Count and log a request that was refused, or a connection, which the log names by `place`."""
        # As Python writes it: what a client has sent must not look like a line of the log.
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
        # Also where the session failed to close: else each such call would take a place for ever.
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
    """Return how the log names a call and the world that it is in."""
    return f"connection={call.name} world={call.session.world_name}"


def _fault(call: Call, error: BaseException) -> list[bytes | memoryview]:
    """Answer a request at which a session failed: none is known; the other calls are not to pay for it."""
    _log.error("a request was not served", exc_info=error)
    return [call.refuse(RequestError(Code.INTERNAL, f"the server failed: {error!r}"))]
