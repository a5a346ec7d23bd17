"""The trainer's end: it listens, and is a directory of the servers that have dialed in."""

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
"""Of callers: the seconds that they have to ask to be let in."""
_MOST = 64
"""Callers at a time that have not been let in; the oldest goes for a further one."""
_SPARES = 4
"""WebSockets of a name that wait at a time, for the sessions to come; the oldest goes for a further one."""
_numbers = itertools.count(1)


class _Caller(ConnectionProtocol):
    """A connection that has not been let in.

    Args:
        connection: What asks.
        let_in: Called with its request; raises RequestError.
    """

    def __init__(self, connection: Connection, let_in: Callable[[handshake.Asked, Connection], None]) -> None:
        super().__init__(connection)
        self._let_in = let_in
        self._data = b""
        self._request: handshake.Asked | None = None

    def receive_data(self, data: bytes) -> None:
        """Take bytes; raises RequestError where they are no request, or the caller may not come in."""
        self._data += data
        self._request = handshake.read_request(self._data)
        if self._request is not None:
            self._let_in(self._request, self._connection)

    def refuse(self, error: RequestError) -> None:
        """Say why it is not let in."""
        if error.code is not Code.UNAUTHENTICATED:  # what compares tokens has logged that
            _refusals.warning("refused %s: %s", self._connection.peer, error.message)
        self._connection.outgoing.append(handshake.refusal(error, self._request))

    def connection_lost(self) -> None:
        """Free everything."""
        del self._connection, self._let_in


@dataclasses.dataclass
class _Server:
    """The connections that servers of one name have dialed."""

    scheme: str
    """Of its endpoint: `dialed` for gRPC, whose one connection carries all sessions, or `dialed+ws`: one for each."""
    waiting: list[Dialed] = dataclasses.field(default_factory=list)
    """Those that no connection has, the newest last."""
    taken: list[socket.socket] = dataclasses.field(default_factory=list)
    """Those that connections have."""

    def look(self) -> bool:
        """Forget the connections that have ended; return whether there is one."""
        for dialed in self.waiting:
            if not _waits(dialed.sock):
                dialed.sock.close()
        self.waiting = [dialed for dialed in self.waiting if dialed.sock.fileno() >= 0]
        self.taken = [sock for sock in self.taken if sock.fileno() >= 0]
        return bool(self.waiting or self.taken)


def _waits(sock: socket.socket) -> bool:
    """Return whether a server waits to be asked: it has not hung up, nor spoken before."""
    try:
        # A server speaks only once it is asked. So an end of the stream and early bytes both tell that it is of no use.
        sock.recv(1, socket.MSG_PEEK)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


class _DialPort:
    """The port of a `DialListener`, and the servers that have dialed in.

    It is another object than the listener, because its thread keeps it: so a listener that nobody holds any more is
    collected, and these sockets are not collected with it, before they are closed.

    Args:
        host: The address to listen on.
        port: The port; 0: any free one.
        security: The token that servers have to show, and TLS.
    """

    def __init__(self, host: str, port: int, security: Security) -> None:
        self._gate = Gate(security.token)
        self._changed = threading.Condition()
        self._servers: dict[str, _Server] = {}
        """Those that have dialed in, by name."""
        self.closed = False
        """True if it listens no longer."""
        context = security.context("http/1.1")
        self._loop = EventLoop()
        self._connections = Connections(
            self._loop, _LIMITS, Admission(_LIMITS), lambda caller: _Caller(caller, self._let_in), context, None, _MOST
        )
        try:
            self.port = self._connections.listen(host, port)
            """The port that it listens on."""
        except BaseException:
            self._loop.close()
            raise
        self.number = next(_numbers)
        """The number by which URLs name it."""
        listeners[self.number] = self.take
        self._thread = threading.Thread(target=self._loop.run, name="bridge-listener", daemon=True)
        self._thread.start()
        forget_in_child(self)

    def after_fork(self) -> None:
        """In a forked process: leave the sockets to the parent process."""
        self._changed = threading.Condition()  # the parent's thread may have held the former one
        self.closed, self._servers = True, {}
        listeners.pop(self.number, None)

    def wait(self, timeout: float) -> list[Endpoint]:
        """Wait for the first server, at most `timeout` seconds; return those that have dialed in."""
        with self._changed:
            self._changed.wait_for(lambda: self._names() or self.closed, timeout)
            names = self._names()
            return [Endpoint(f"{self._servers[name].scheme}://{name}:{self.number}", name) for name in names]

    def _names(self) -> list[str]:
        self._servers = {name: server for name, server in self._servers.items() if server.look()}
        return sorted(self._servers)

    def take(self, name: str) -> Dialed | None:
        """Give the socket of a server to a connection; None: it has not dialed in, or other connections have it."""
        with self._changed:
            server = self._servers.get(name)
            if server is None or not server.look() or not server.waiting:
                return None
            found = server.waiting.pop()
            server.taken.append(found.sock)
            return found

    def close(self) -> None:
        """Listen no longer; servers that wait are let go. May be called twice."""
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
        with self._changed:  # a trainer's thread may be about to take one
            for server in self._servers.values():
                while server.waiting:
                    server.waiting.pop().sock.close()

    # In the event loop

    def _let_in(self, asked: handshake.Asked, connection: Connection) -> None:
        """Let a server in; raises RequestError where it may not come."""
        self._gate.check(asked.token, connection.peer)
        origin = asked.origin
        # Any page that a browser of this machine shows can reach its loopback. Without a token only its own pages may.
        if origin is not None and not self._gate.asks and not is_loopback(urlsplit(origin).hostname or ""):
            text = f"a page of {origin!r:.80} needs a token: start the listener with token=, and have the page show it"
            raise RequestError(Code.PERMISSION_DENIED, text)
        if problem := handshake.problem_of_name(asked.name):
            raise RequestError(Code.INVALID_ARGUMENT, problem)
        # Before it is detached, with which its output would be dropped.
        connection.outgoing.append(asked.opening)
        # Let in: what it took until now is not charged as a visit, which would delay others.
        connection.role = "client"
        connection.flush()
        # It was closed while the answer was sent: the server has gone again.
        if not self._connections.detach(connection):
            return
        scheme, most = ("dialed+ws", _SPARES) if asked.key is not None else ("dialed", 1)
        with self._changed:
            self._names()  # those of other names that have hung up are closed, whoever looks for them
            server = self._servers.setdefault(asked.name, _Server(scheme))
            # A server that was started again may dial by the other protocol. What waits of the former one is of no use.
            before = server.waiting if server.scheme == scheme else []
            dialed = Dialed(connection.sock, connection.tls, asked.version)
            kept = [*before, dialed][-most:]
            # Chosen before a trainer's thread can take one of those that are kept, which then waits no more either.
            displaced = [one for one in server.waiting if one not in kept]
            # A page has many connections, any other server one. What is left of one that has hung up is gone by now.
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
    """Waits for servers that dial in; a directory for `make_vec_remote`.

    The servers that dial in are its clients, which show the token. One that is dropped without `close` gives its port
    back, too.

    Args:
        url: `listen://HOST:PORT`; port 0: any free one.
        timeout: Seconds that `endpoints` waits for the first server.
        keywords: Those of `bridge.core.server.auth.ServerAccess`, which the signature lists.

    Raises:
        AddressError: The URL cannot be read.
        SettingError: The port is in use, there is no token beyond loopback, a certificate cannot be used.
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
        """The port that it listens on."""
        self.number = self._port.number
        """The number by which the URLs of its servers name it."""

    def __repr__(self) -> str:
        return f"DialListener(port={self.port})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a DialListener cannot be copied to another process, to which no server has dialed: make one there, at a "
            "port of its own"
        )

    def endpoints(self) -> list[Endpoint]:
        """Return the servers that have dialed in; waits for the first one."""
        return self._port.wait(self._timeout)

    def wait_for_first(self, timeout: float) -> None:
        """Wait until a server has dialed in.

        Args:
            timeout: Seconds, of which those that `endpoints` waits are enough.

        Raises:
            ConnectError: None has within them.
        """
        timeout = min(timeout, self._timeout)
        if not self._port.wait(timeout):
            text = f"no server has dialed in within {timeout:g} s: is it started with `--dial`?"
            raise ConnectError(self._url, text, unavailable=True)

    def close(self) -> None:
        """Listen no longer; servers that wait are let go. May be called twice."""
        self._port.close()

    def __del__(self) -> None:
        if "_port" in self.__dict__ and not self._port.closed:  # else __init__ has raised, or nothing is open
            end_apart(self._port.close)


@contextlib.contextmanager
def first_dialed(url: str, timeout: float, **access: Unpack[AccessKeywords]) -> Iterator[str]:
    """Listen, and give the URL of the first server that dials in, while the context lasts.

    Args:
        url: `listen://HOST:PORT`; any other URL is given as it is.
        timeout: Seconds to wait for a server.
        access: Those of `DialListener`.

    Raises:
        ConnectError: No server dials in.
        AddressError, SettingError: As of `DialListener`.
    """
    if not url.strip().startswith("listen://"):
        yield url
        return
    with contextlib.closing(DialListener(url.strip(), timeout=timeout, **access)) as listener:
        listener.wait_for_first(timeout)
        yield listener.endpoints()[0].url


class ListeningVectorEnv(OwningVectorEnv):
    """Slots on servers that dial in, as `RemoteVectorEnv` gives them.

    Args:
        url: `listen://HOST:PORT`.
        timeout: Seconds to wait for any answer, and for the first server.
        keywords: Those of `make_vec_remote`, of which `DialListener` gets its own.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT, **keywords: Any) -> None:
        # A server that dials in shows the token to this end, so that the slots on it have none to show.
        access = given_access(keywords)
        for name in access:
            del keywords[name]
        listener = DialListener(url, timeout=timeout, **access)
        super().__init__(listener.close, listener, timeout=timeout, **keywords)
