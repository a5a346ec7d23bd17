"""dm_env_rpc over gRPC: the only file of the server that touches the network."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from bridge.errors import Code, RequestError, SettingError
from bridge.logs import SafeLog
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.server.auth import Gate, Security
from bridge.server.flight import Flight
from bridge.server.grpc_services import add_services
from bridge.server.limits import ConnectionCount, Limits
from bridge.server.metrics import Metrics
from bridge.session import Hub, Session
from bridge.version import __version__
from bridge.wire import HELLO, METHOD, SERVICE

__all__ = ["GrpcTransport"]

_OPEN = Security()
_log = SafeLog(__name__)


class _ThreadPerCall(concurrent.futures.Executor):
    """Runs each call in a daemon thread of its own.

    gRPC keeps a thread for each open stream; a pool of fixed size would let the next client hang without a word.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Start a thread for the call."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # it belongs to whoever holds the future
                future.set_exception(error)
            finally:
                with self._guard:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="bridge-connection", daemon=True)
        with self._guard:
            self._threads.add(thread)
        thread.start()
        return future

    def join(self, timeout: float) -> bool:
        """Wait for all threads; return whether they ended within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._guard:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


class _Bouncer(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls of whatever service without the token; health alone tells strangers how it is."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def intercept_service(self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails) -> Any:
        """Look at a call's metadata before it reaches its handler."""
        headers = dict(details.invocation_metadata or ())
        shown = Gate.bearer(headers.get("authorization"))
        if self._gate(shown) or details.method.startswith("/grpc.health."):
            return continuation(details)

        def refuse(requests: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            try:
                self._gate.check(shown, context.peer())
            except RequestError as error:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)


class GrpcTransport:
    """Listens, and serves a session for each stream.

    Args:
        hub: The worlds.
        host: The address to listen on.
        port: The port to listen on; 0: any free one.
        limits: `max_message_bytes`.
        count: Admits connections.
        security: Certificates, and the token.
        flight: Admits requests; None: those of this transport alone count.

    Raises:
        SettingError: The address cannot be listened on.
    """

    def __init__(
        self,
        hub: Hub,
        host: str,
        port: int,
        limits: Limits,
        count: ConnectionCount,
        security: Security = _OPEN,
        flight: Flight | None = None,
    ) -> None:
        self._hub = hub
        self._limits = limits
        self._count = count
        self._flight = Flight(limits) if flight is None else flight
        self._threads = _ThreadPerCall()
        self.metrics: Metrics | None = None
        """Where to count; None: nowhere."""
        self._numbers = itertools.count(1)
        options = [
            ("grpc.max_receive_message_length", limits.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),  # clients look for half-open connections
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_time_ms", 20_000),  # and so do we, for clients that went without a word
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.so_reuseport", 0),  # a port that is in use is an error, not a share of its connections
        ]
        interceptors = [_Bouncer(Gate(security.token))]
        self._server = grpc.server(self._threads, options=options, interceptors=interceptors)  # type: ignore[arg-type]
        handler = grpc.stream_stream_rpc_method_handler(self._process)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._listen(target, security)
        except RuntimeError as error:
            raise SettingError(
                f"cannot listen on {target}: is the port in use, or the address not of this machine? "
                "port=0 takes any free one"
            ) from error
        self._health = add_services(self._server)
        self._server.start()

    def _listen(self, target: str, security: Security) -> int:
        if security.tls_certificate is None or security.tls_key is None:
            return self._server.add_insecure_port(target)
        security.context()  # gRPC itself says to nobody what is wrong with them
        credentials = grpc.ssl_server_credentials(
            [(security.tls_key, security.tls_certificate)],
            security.tls_client_ca,
            require_client_auth=security.tls_client_ca is not None,
        )
        return self._server.add_secure_port(target, credentials)

    def _process(self, requests: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            self._count.enter()
        except RequestError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        number = next(self._numbers)
        _log.info("connection=%d peer=%s opened", number, context.peer())
        version = dict(context.invocation_metadata() or ()).get(HELLO, "")
        session = Session(self._hub, version if isinstance(version, str) else version.decode(errors="replace"))
        context.add_callback(session.hang_up)  # a request that waits for others ends with its client
        try:
            context.send_initial_metadata(((HELLO, __version__),))
            for request in requests:
                began = time.perf_counter()
                response = self._serve(session, request)
                self._note(session, time.perf_counter() - began, number)
                size = len(response)
                self._flight.hold(size)
                try:
                    yield response  # comes back once it is sent
                finally:
                    self._flight.hold(-size)
        except grpc.RpcError:
            return  # the client cancelled, or is gone
        finally:
            try:
                session.close()
            finally:
                _log.info("connection=%d peer=%s closed", number, context.peer())
                self._count.leave()

    def _serve(self, session: Session, request: bytes) -> bytes:
        try:
            self._flight.enter(len(request))
        except RequestError as error:
            status = pb.Status(code=int(error.code), message=error.message)
            return pb.EnvironmentResponse(error=status).SerializeToString()
        try:
            response = session.handle(request)
        finally:
            self._flight.leave(len(request))
        return response if len(response) <= self._limits.max_message_bytes else self._too_large(len(response))

    def _note(self, session: Session, seconds: float, number: int) -> None:
        if session.last_error:
            name, code = session.world_name, session.last_error
            _log.info("connection=%d world=%s refused code=%s", number, name, Code.named(code))
            if self.metrics is not None:
                self.metrics.refused(code)
        elif self.metrics is not None and session.last_step is not None:
            world, steps, episodes = session.last_step
            self.metrics.stepped(world, seconds, steps, episodes)

    def _too_large(self, size: int) -> bytes:
        limit = self._limits.max_message_bytes
        text = f"the response has {size} bytes, more than max_message_bytes={limit}; request fewer observations"
        error = pb.Status(code=int(Code.RESOURCE_EXHAUSTED), message=text)
        return pb.EnvironmentResponse(error=error).SerializeToString()

    def stop(self, grace: float) -> bool:
        """Refuse new connections, give open ones `grace` seconds, cut them; return whether their threads ended."""
        if self._health is not None:
            self._health.stop()
        self._server.stop(grace).wait(grace + 5.0)
        return self._threads.join(5.0)
