"""The calls of a server over the grpcio library, `transport="grpcio"`: the same sessions, in grpcio's threads."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import grpc

from bridge.core.server.auth import Gate, Security
from bridge.core.server.calls import Call, Calls, Client
from bridge.core.server.limits import CoreLimits
from bridge.core.server.serving import HelperThread
from bridge.core.transport.service import HELLO, METHOD, ROOM, SERVICE
from bridge.core.transport.sockets import listen_unix
from bridge.core.worlds.scheduling import Scheduler
from bridge.errors import Code, ListenError, RequestError
from bridge.version import __version__

__all__ = ["GrpcioTransport"]

_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_FAULT = RequestError(Code.INTERNAL, "the server failed")
_LAST_WORDS = 1.0  # seconds after a drain in which `close_all` sends why calls end, before grpcio cancels them
_SPARE_THREADS = 8  # for health checks, and calls that are refused
# The most requests, and bytes of them, that a call may read ahead of its answers. A client of ours sends at most 128
# ahead, and `Calls` ends a call when 1,000 wait.
_AHEAD, _AHEAD_BYTES = 256, 1 << 22
# If grpcio has not taken this many bytes of a call's answers, no more of its requests are served.
_MOST_UNSENT = 1 << 20


class _RequestsAhead:
    """The requests of a call that were read and not yet answered."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._over = False

    def add(self, size: int) -> None:
        """Count a request that was read."""
        with self._changed:
            self._sizes.append(size)
            self._bytes += size

    def wait(self) -> None:
        """Wait until another request may be read, or the call is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or (len(self._sizes) < _AHEAD and self._bytes < _AHEAD_BYTES))

    def answered(self) -> None:
        """Count the oldest request as answered."""
        with self._changed:
            self._bytes -= self._sizes.popleft()
            self._changed.notify()

    def end(self) -> None:
        """End the wait, because the call is over."""
        with self._changed:
            self._over = True
            self._changed.notify()


class _Client(Client):
    """The client of one call."""

    joins_answers = False
    outgoing = ()

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.calls: set[Call] = set()
        self.blocked_calls: set[Call] = set()
        self.unserved = self.turns = self.turns_beside = 0
        self.unsent = False
        """True if so many bytes of answers wait that no more requests are served."""
        self.requests = _RequestsAhead()
        self.answers: queue.SimpleQueue[bytes | RequestError | None] = queue.SimpleQueue()
        # Bytes of answers made and sent. The event loop's thread writes the first, the sending thread the second.
        self._made = self._sent = 0

    def answer(self, call: Call, parts: list[bytes | memoryview], size: int) -> bool:
        self._made += size
        self.unsent = self._made - self._sent > _MOST_UNSENT
        self.answers.put(b"".join(parts))
        return True

    def sent(self, size: int) -> bool:
        """Count an answer that grpcio has taken; return True if `unblock` must be called in the event loop."""
        self._sent += size
        # Answers made meanwhile are still to be sent, and this is called again after them: no call stays blocked.
        left = self._made - self._sent
        return left <= _MOST_UNSENT < left + size

    def unblock(self) -> None:
        """Check again whether answers wait."""
        self.unsent = self._made - self._sent > _MOST_UNSENT

    def is_blocked(self, call: Call) -> bool:
        return self.unsent

    def finish(self, call: Call, error: RequestError | None) -> None:
        self.answers.put(error)


class GrpcioTransport:
    """All calls of a server.

    Raises:
        SettingError: It cannot listen as the arguments of `bridge.core.server.core_server.CoreServer` say.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limits: CoreLimits,
        security: Security,
        unix_path: str | None,
        has_room: Callable[[], bool],
    ) -> None:
        self._post = scheduler.call_soon_threadsafe
        self.gate, self._security = Gate(security.token, security.watch_token), security
        self.failed_handshakes = 0
        """Always 0: grpcio does not report them."""
        self.calls: Calls
        self.helper = HelperThread(scheduler)
        """The thread for work that takes processor time, such as compression."""
        self.all: set[_Client] = set()
        """The clients of the open calls."""
        # grpcio needs a thread for each open stream. With fewer, the next client would hang instead of being refused.
        most = limits.max_connections + limits.max_viewers + _SPARE_THREADS
        self._threads = ThreadPoolExecutor(most, "grpcio")
        # Requests are read in other threads than answers are sent in: an action is applied when it arrives, while the
        # answer to the Step before it is held until there is a new frame.
        self._readers = ThreadPoolExecutor(most, "grpcio-read")
        size = limits.max_message_bytes
        # gRPC's own limit of 4 MiB breaks large observations.
        options = [("grpc.max_receive_message_length", size), ("grpc.max_send_message_length", size)]
        # Without SO_REUSEPORT, which grpcio sets on Linux: two servers at one port would share the clients.
        self._server = grpc.server(self._threads, options=[*options, ("grpc.so_reuseport", 0)])
        methods = {METHOD: grpc.stream_stream_rpc_method_handler(self._process)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        self._health: Any = None
        with contextlib.suppress(ImportError):  # it needs the extra `ops`
            from grpc_health.v1 import health, health_pb2_grpc

            self._health = health.HealthServicer()
            for name in (SERVICE, ROOM):
                self._health.set(name, 1)  # SERVING; "" is set from the start
            check = self._health.Check

            def check_room(request: Any, context: Any) -> Any:
                self._health.set(ROOM, 1 if has_room() else 2)  # 2: NOT_SERVING
                return check(request, context)

            self._health.Check = check_room
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if unix_path is not None:
            # grpcio would take the path from a server that listens there.
            sock, remove = listen_unix(unix_path)
            remove()
            sock.close()
            self._listen(f"unix:{unix_path}", "unix_path", None)
            os.chmod(unix_path, 0o600)

    def listen(self, host: str, port: int) -> int:
        """Listen on a TCP port, and start serving; return the port."""
        credentials = None
        if self._security.tls_certificate is not None:
            pairs = [(self._security.tls_key or b"", self._security.tls_certificate)]
            ca = self._security.tls_client_ca
            credentials = grpc.ssl_server_credentials(pairs, ca, require_client_auth=ca is not None)
        host = host or "::"
        try:
            return self._listen(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "port", credentials)
        finally:
            self._server.start()  # also after an error: `stop` before `start` would leave the Unix socket open

    def _listen(self, address: str, setting: str, credentials: grpc.ServerCredentials | None) -> int:
        add = self._server.add_insecure_port
        try:
            return int(add(address) if credentials is None else self._server.add_secure_port(address, credentials))
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {address} ({setting}): {error}. Is it in use?") from error

    def charge_request(self, client: Any, seconds: float, share: float) -> None:
        """Do nothing: grpcio reads its connections itself, and cannot delay any."""

    def _process(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serve a call, in one of grpcio's threads."""
        client, headers = _Client(context.peer()), dict(context.invocation_metadata())
        opened: Future[Call] = Future()

        def over() -> None:
            # Not in the event loop, which may have ended: a waiting thread would keep the process from ending.
            opened.cancel()
            client.requests.end()
            client.answers.put(None)
            self._post(lambda: self._close(client))

        # `add_callback` returns False, and never calls the function, if the call is over already.
        if not context.add_callback(over):
            return
        try:
            may_act = self.gate.check(Gate.bearer(headers.get("authorization")), client.peer)
            self._post(lambda: self._open(client, str(headers.get(HELLO, "")), opened, may_act))
            call = opened.result()
        except RequestError as error:
            context.abort(_STATUS[int(error.code)], error.message)
        except CancelledError:
            return
        context.send_initial_metadata(((HELLO, __version__),))
        self._readers.submit(self._read, call, client, requests)
        while isinstance(answer := client.answers.get(), bytes):
            yield answer
            if client.sent(len(answer)):
                self._post(lambda: self._unblock(call, client))
            client.requests.answered()
        if answer is not None:
            context.abort(_STATUS[int(answer.code)], answer.message)

    def _read(self, call: Call, client: _Client, requests: Iterator[bytes]) -> None:
        """Pass on the requests of a call as they arrive. Runs in a thread of its own."""
        receive: Callable[[bytes | None], None] = lambda data: self._post(lambda: self.calls.receive(call, data))  # noqa: E731
        try:
            with contextlib.suppress(grpc.RpcError):  # the client has cancelled the call
                for request in requests:
                    client.requests.add(len(request))
                    receive(request)
                    client.requests.wait()
        finally:
            receive(None)

    def _unblock(self, call: Call, client: _Client) -> None:
        client.unblock()
        self.calls.unblock(call)

    def _open(self, client: _Client, version: str, opened: Future[Call], may_act: bool) -> None:
        if not opened.set_running_or_notify_cancel():
            return
        try:
            call = self.calls.open(client, version, may_act=may_act)
        except RequestError as error:
            opened.set_exception(error)
        else:
            self.all.add(client)
            opened.set_result(call)

    def _close(self, client: _Client) -> None:
        self.all.discard(client)
        self.close(client, None)

    def counts(self) -> dict[str, float]:
        """Return the connection values of `Server.status`. grpcio shows no sockets, so open calls are counted."""
        return {"sockets": len({client.peer for client in tuple(self.all)}), "throttled": 0}

    @property
    def clients(self) -> int:
        """The number of connections with an open call."""
        return len({client.peer for client in self.all})

    def close(self, client: Any, error: RequestError | None = _FAULT) -> None:
        """End the call of a client, after a fault of this server or for another reason."""
        for call in list(client.calls):
            self.calls.abandon(call, error)

    def drain(self, grace: float) -> None:
        """Tell clients that no more calls are accepted; open calls continue. grpcio also closes the ports."""
        if self._health is not None:
            self._health.enter_graceful_shutdown()
        self._server.stop(grace + _LAST_WORDS)

    def close_all(self, error: RequestError) -> None:
        """End all calls with an error."""
        for client in list(self.all):
            self.close(client, error)
        self.all.clear()
        self.helper.close()

    def stop_listening(self) -> None:
        """Close the ports. Called by the thread that stops the server."""
        self._server.stop(0.2).wait(5.0)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
