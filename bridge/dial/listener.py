"""The trainer's end: listens, and is a directory of the servers that have dialed in."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bridge.core.client.endpoints import Endpoint
from bridge.core.client.envs.vector_env import OwningVectorEnv
from bridge.core.client.options import TIMEOUT
from bridge.core.client.wire.dialed import Dialed, listeners
from bridge.core.keywords import grouped_class
from bridge.core.logs import LimitedLog, SafeLog
from bridge.core.ownership import end_apart, forget_in_child
from bridge.core.server.auth import Gate, Security, ServerAccess
from bridge.core.server.connection import Connection, ConnectionProtocol
from bridge.core.server.connections import Connections
from bridge.core.server.event_loop import EventLoop
from bridge.core.server.limits import Admission, CoreLimits
from bridge.core.transport.address import is_loopback
from bridge.core.transport.credentials import TLS, AccessKeywords, given_access
from bridge.dial import handshake
from bridge.errors import AddressError, Code, ConnectError, RequestError, SettingError, shown_url

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DialListener", "ListeningVectorEnv", "first_dialed"]

_log, _refusals = SafeLog(__name__), LimitedLog(__name__)
_URL = "listen://HOST:PORT, with the address of this machine to listen on"
_LIMITS = CoreLimits(hello_timeout=10.0)
"""Limits for callers: the seconds within which they must ask for admission."""
_MOST = 64
"""The most callers at a time that are not admitted yet; a further one replaces the oldest."""
_SPARES = 4
"""The most WebSockets of one name that wait for sessions at a time; a further one replaces the oldest."""
_numbers = itertools.count(1)


class _Caller(ConnectionProtocol):
    """A connection that is not admitted yet.

    Args:
        connection: The caller's connection.
        let_in: Called with the caller's request; raises RequestError.
    """

    def __init__(self, connection: Connection, let_in: Callable[[handshake.Asked, Connection], None]) -> None:
        super().__init__(connection)
        self._let_in = let_in
        self._data = b""
        self._request: handshake.Asked | None = None

    def receive_data(self, data: bytes) -> None:
        """Receive bytes; raise RequestError if they are not a request, or the caller is refused."""
        self._data += data
        self._request = handshake.read_request(self._data)
        if self._request is not None:
            self._let_in(self._request, self._connection)

    def refuse(self, error: RequestError) -> None:
        """Tell the caller why it is refused."""
        if error.code is not Code.UNAUTHENTICATED:  # the comparison of tokens has logged it already
            _refusals.warning("refused %s: %s", self._connection.peer, error.message)
        self._connection.outgoing.append(handshake.refusal(error, self._request))

    def connection_lost(self) -> None:
        """Free all resources."""
        del self._connection, self._let_in


@dataclasses.dataclass
class _Server:
    """The connections that servers of one name have opened."""

    scheme: str
    """The scheme of its endpoint: `dialed` (gRPC, one connection for all sessions) or `dialed+ws` (one for each)."""
    waiting: list[Dialed] = dataclasses.field(default_factory=list)
    """Connections that no client connection uses yet, the newest last."""
    taken: list[socket.socket] = dataclasses.field(default_factory=list)
    """Sockets that client connections use."""

    def look(self) -> bool:
        """Forget the connections that have ended; return True if any is left."""
        for dialed in self.waiting:
            if not _waits(dialed.sock):
                dialed.sock.close()
        self.waiting = [dialed for dialed in self.waiting if dialed.sock.fileno() >= 0]
        self.taken = [sock for sock in self.taken if sock.fileno() >= 0]
        return bool(self.waiting or self.taken)


def _waits(sock: socket.socket) -> bool:
    """Return True if the server still waits for a request: it has neither hung up nor sent bytes."""
    try:
        # A server speaks only when it is asked. So both an end of the stream and early bytes show that it is unusable.
        sock.recv(1, socket.MSG_PEEK)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


class _DialPort:
    """The port of a `DialListener`, and the servers that have dialed in.

    A separate object, because its thread keeps it alive: a listener without references can then be collected, and its
    sockets are not collected before they are closed.

    Args:
        host: The address to listen on.
        port: The port; 0: any free one.
        security: The token that servers must send, and TLS.
    """

    def __init__(self, host: str, port: int, security: Security) -> None:
        self._gate = Gate(security.token)
        self._changed = threading.Condition()
        self._servers: dict[str, _Server] = {}
        """The servers that have dialed in, by name."""
        self.closed = False
        """True if it no longer listens."""
        context = security.context("http/1.1")
        self._loop = EventLoop()
        self._connections = Connections(
            self._loop, _LIMITS, Admission(_LIMITS), lambda caller: _Caller(caller, self._let_in), context, None, _MOST
        )
        try:
            self.port = self._connections.listen(host, port)
            """The port on which it listens."""
        except BaseException:
            self._loop.close()
            raise
        self.number = next(_numbers)
        """The number that identifies it in URLs."""
        listeners[self.number] = self.take
        self._thread = threading.Thread(target=self._loop.run, name="bridge-listener", daemon=True)
        self._thread.start()
        forget_in_child(self)

    def after_fork(self) -> None:
        """Leave the sockets to the parent process, after a fork."""
        self._changed = threading.Condition()  # a thread of the parent may have held the old lock
        self.closed, self._servers = True, {}
        listeners.pop(self.number, None)

    def wait(self, timeout: float) -> list[Endpoint]:
        """Wait at most `timeout` seconds for the first server; return those that have dialed in."""
        with self._changed:
            self._changed.wait_for(lambda: self._names() or self.closed, timeout)
            names = self._names()
            return [Endpoint(f"{self._servers[name].scheme}://{name}:{self.number}", name) for name in names]

    def _names(self) -> list[str]:
        self._servers = {name: server for name, server in self._servers.items() if server.look()}
        return sorted(self._servers)

    def take(self, name: str) -> Dialed | None:
        """Return a waiting connection of a server; None if it has not dialed in, or all its connections are in use."""
        with self._changed:
            server = self._servers.get(name)
            if server is None or not server.look() or not server.waiting:
                return None
            found = server.waiting.pop()
            server.taken.append(found.sock)
            return found

    def close(self) -> None:
        """Stop listening, and close the connections that wait. May be called twice."""
        listeners.pop(self.number, None)
        with self._changed:
            closed, self.closed = self.closed, True
            self._changed.notify_all()
        # Only the first caller stops the thread and closes what it uses.
        if closed:
            return
        self._loop.interrupt()
        self._thread.join()
        self._connections.close_all(RequestError(Code.UNAVAILABLE, "the trainer listens no longer"))
        self._loop.close()
        with self._changed:  # a trainer's thread may be taking a connection
            for server in self._servers.values():
                while server.waiting:
                    server.waiting.pop().sock.close()

    # In the event loop

    def _let_in(self, asked: handshake.Asked, connection: Connection) -> None:
        """Admit a server; raise RequestError if it is refused."""
        self._gate.check(asked.token, connection.peer)
        origin = asked.origin
        # Any web page in a browser on this machine can reach loopback ports. Without a token, only local pages are
        # admitted.
        if origin is not None and not self._gate.asks and not is_loopback(urlsplit(origin).hostname or ""):
            text = f"a page of {origin!r:.80} needs a token: start the listener with token=, and have the page show it"
            raise RequestError(Code.PERMISSION_DENIED, text)
        if problem := handshake.problem_of_name(asked.name):
            raise RequestError(Code.INVALID_ARGUMENT, problem)
        # Sent before the socket is detached, which would drop pending output.
        connection.outgoing.append(asked.opening)
        # An admitted server's handshake does not count as a visit of an unknown client, which would delay others.
        connection.role = "client"
        connection.flush()
        # The port was closed while the response was sent, so the connection is closed.
        if not self._connections.detach(connection):
            return
        scheme, most = ("dialed+ws", _SPARES) if asked.key is not None else ("dialed", 1)
        with self._changed:
            self._names()  # also closes connections of other names that have hung up
            server = self._servers.setdefault(asked.name, _Server(scheme))
            # A restarted server may dial with the other protocol; connections of the previous one are useless.
            before = server.waiting if server.scheme == scheme else []
            dialed = Dialed(connection.sock, connection.tls, asked.version)
            kept = [*before, dialed][-most:]
            # Decided before a trainer's thread can take one of the kept connections, which would then not be waiting
            # any more.
            displaced = [one for one in server.waiting if one not in kept]
            # A page has many connections, any other server has one. Those that have hung up were removed above.
            used_twice = scheme == "dialed" and bool(server.taken or displaced)
            server.waiting, server.scheme = kept, scheme
            self._changed.notify_all()
        for one in displaced:
            one.sock.close()
        _log.info("%s dialed in from %s", asked.name, connection.peer)
        if used_twice:
            _log.warning(
                "the name %s is in use already, and a server from %s has dialed in by it too, which gets no slot while "
                "the other one is there: give each server a --dial-name of its own",
                asked.name,
                connection.peer,
            )


@grouped_class(ServerAccess, tls=TLS)
class DialListener:
    """A listener for servers that dial in; a directory for `make_vec_remote`.

    The servers that dial in connect as clients, and must send the token. A listener that is garbage-collected without
    `close` also frees its port.

    Args:
        url: `listen://HOST:PORT`; port 0: any free one.
        timeout: Seconds for which `endpoints` waits for the first server.
        keywords: The keywords of `bridge.core.server.auth.ServerAccess`, which the signature lists.

    Raises:
        AddressError: The URL cannot be read.
        SettingError: The port is in use, a token is missing beyond loopback, or a certificate cannot be used.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT, **keywords: Unpack[AccessKeywords]) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise AddressError(url, str(error), _URL) from error
        if parts.scheme != "listen" or not host or port is None or parts.path.strip("/") or parts.query:
            raise AddressError(url, "it has no address to listen on, or more than that", _URL)
        security = ServerAccess(**keywords).security()
        if security.for_host(host, insecure=False) is not security:
            raise SettingError(f"{url!r} is open to other machines: give token=, which each server has to show")
        self._timeout, self._url = timeout, shown_url(url)
        self._port = _DialPort(host, port, security)
        self.port = self._port.port
        """The port on which it listens."""
        self.number = self._port.number
        """The number that identifies it in the URLs of its servers."""

    def __repr__(self) -> str:
        return f"DialListener(port={self.port})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a DialListener cannot be copied to another process, to which no server has dialed: make one there, at a "
            "port of its own"
        )

    def endpoints(self) -> list[Endpoint]:
        """Return the servers that have dialed in; wait for the first one."""
        return self._port.wait(self._timeout)

    def wait_for_first(self, timeout: float) -> None:
        """Wait until a server has dialed in.

        Args:
            timeout: Seconds; the timeout of `endpoints` is a good value.

        Raises:
            ConnectError: No server has dialed in within the timeout.
        """
        timeout = min(timeout, self._timeout)
        if not self._port.wait(timeout):
            text = f"no server has dialed in within {timeout:g} s: is it started with `--dial`?"
            raise ConnectError(self._url, text, unavailable=True)

    def close(self) -> None:
        """Stop listening, and close the connections that wait. May be called twice."""
        self._port.close()

    def __del__(self) -> None:
        if "_port" in self.__dict__ and not self._port.closed:  # False if __init__ raised, or the port is closed
            end_apart(self._port.close)


@contextlib.contextmanager
def first_dialed(url: str, timeout: float, **access: Unpack[AccessKeywords]) -> Iterator[str]:
    """Listen, and yield the URL of the first server that dials in; listen until the context ends.

    Args:
        url: `listen://HOST:PORT`; any other URL is yielded unchanged.
        timeout: Seconds to wait for a server.
        access: Access keywords of `DialListener`.

    Raises:
        ConnectError: No server dials in.
        AddressError, SettingError: As for `DialListener`.
    """
    if not url.strip().startswith("listen://"):
        yield url
        return
    with contextlib.closing(DialListener(url.strip(), timeout=timeout, **access)) as listener:
        listener.wait_for_first(timeout)
        yield listener.endpoints()[0].url


class ListeningVectorEnv(OwningVectorEnv):
    """Slots on servers that dial in, as in `RemoteVectorEnv`.

    Args:
        url: `listen://HOST:PORT`.
        timeout: Seconds to wait for any response, and for the first server.
        keywords: Keywords of `make_vec_remote`; those of `DialListener` are passed to it.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT, **keywords: Any) -> None:
        # A server that dials in sends its token to this end, so this end's slots need none.
        access = given_access(keywords)
        for name in access:
            del keywords[name]
        listener = DialListener(url, timeout=timeout, **access)
        super().__init__(listener.close, listener, timeout=timeout, **keywords)
