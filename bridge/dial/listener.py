"""The trainer's end: it listens, and is a directory of the servers that have dialed in."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from bridge.client.endpoints import Endpoint
from bridge.client.options import TIMEOUT
from bridge.client.vector_env import OwningVectorEnv
from bridge.client.wire.dialed import Dialed, listeners
from bridge.dial import handshake
from bridge.errors import AddressError, Code, ConnectError, RequestError, SettingError
from bridge.forks import forget_in_child
from bridge.logs import LimitedLog, SafeLog
from bridge.server.auth import Gate, Security
from bridge.server.listeners import listen_tcp
from bridge.transport.address import is_loopback
from bridge.transport.credentials import TLS, TokenLike
from bridge.transport.sockets import prepare
from bridge.transport.tls import Tls, explain

__all__ = ["DialListener", "ListeningVectorEnv", "first_dialed"]

_log, _refusals = SafeLog(__name__), LimitedLog(__name__)
_HELLO = 10.0
"""Seconds that a caller has to ask to be let in."""
_MOST = 64
"""Callers at a time that have not been let in; the oldest goes for a further one."""
_LOOK = 0.5
_SPARES = 4
"""WebSockets of a name that wait at a time, for the sessions to come; the oldest goes for a further one."""
_numbers = itertools.count(1)


class _Caller(handshake.HandshakeConnection):
    """A connection that was accepted, and has not been let in."""

    def __init__(self, sock: socket.socket, peer: str, tls: Tls | None) -> None:
        super().__init__(sock, tls)
        self.peer = peer
        self.until = time.monotonic() + _HELLO


@dataclasses.dataclass
class _Server:
    """What one name has dialed."""

    scheme: str
    """Of its endpoint: `dialed` for gRPC, whose one connection carries all sessions, or `dialed+ws`: one for each."""
    waiting: list[Dialed] = dataclasses.field(default_factory=list)
    """Those that no connection has, the newest last."""
    taken: list[socket.socket] = dataclasses.field(default_factory=list)
    """Those that connections have."""

    @property
    def there(self) -> bool:
        """True if it has a connection that is open."""
        self.taken = [sock for sock in self.taken if sock.fileno() >= 0]
        return bool(self.waiting or self.taken)


class DialListener:
    """Waits for servers that dial in; a directory for `make_vec_remote`.

    Args:
        url: `listen://HOST:PORT`; port 0: any free one.
        token: What servers have to show; None: that of `token_file`, or of the environment variable `BRIDGE_TOKEN`.
        token_file: A file that holds it.
        tls: The trainer's certificate and key, `TLS(certificate=…, key=…)`; None: no TLS.
        timeout: Seconds that `endpoints` waits for the first server.

    Raises:
        AddressError: The URL cannot be read.
        SettingError: The port is in use, there is no token beyond loopback, a certificate cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        token: TokenLike | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls: TLS | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        parts = urlsplit(url)
        try:
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise AddressError(url, str(error)) from error
        if parts.scheme != "listen" or not host or port is None or parts.path.strip("/") or parts.query:
            raise AddressError(url, "expected listen://HOST:PORT, with the address of this machine to listen on")
        security = Security.of(token, token_file, tls)
        if security.for_host(host, insecure=False) is not security:
            raise SettingError(f"{url!r} is open to other machines: give token=, which each server has to show")
        self._gate, self._tls = Gate(security.token), security.context("http/1.1")
        self._timeout = timeout
        self._changed = threading.Condition()
        self._servers: dict[str, _Server] = {}
        """Those that have dialed in, by name."""
        self._callers: dict[socket.socket, _Caller] = {}
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._socks = listen_tcp(host, port)
        for sock in self._socks:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, self._accept)
        self.port = int(self._socks[0].getsockname()[1])
        """The port that it listens on."""
        self.number = next(_numbers)
        listeners[self.number] = self._take
        self._thread = threading.Thread(target=self._run, name="bridge-listener", daemon=True)
        self._thread.start()
        forget_in_child(self)

    def __repr__(self) -> str:
        return f"DialListener(port={self.port})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a DialListener cannot be copied to another process, to which no server has dialed: make one there, at a "
            "port of its own"
        )

    def after_fork(self) -> None:
        """In a forked process: leave the sockets to the parent process."""
        self._changed = threading.Condition()  # the parent's thread may have held the former one
        self._closed, self._servers = True, {}
        listeners.pop(self.number, None)

    def endpoints(self) -> list[Endpoint]:
        """Return the servers that have dialed in; waits for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: self._names() or self._closed, self._timeout)
            names = self._names()
            return [Endpoint(f"{self._servers[name].scheme}://{name}:{self.number}", name) for name in names]

    def _names(self) -> list[str]:
        self._servers = {name: server for name, server in self._servers.items() if server.there}
        return sorted(self._servers)

    def _take(self, name: str) -> Dialed | None:
        """Give the socket of a server to a connection; None: it has not dialed in, or other connections have it."""
        with self._changed:
            server = self._servers.get(name)
            if server is None or not server.waiting:
                return None
            found = server.waiting.pop()
            self._selector.unregister(found.sock)
            server.taken.append(found.sock)
            return found

    def close(self) -> None:
        """Listen no longer; servers that wait are let go. May be called twice."""
        listeners.pop(self.number, None)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # The thread

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(_LOOK):
                try:
                    key.data(key.fileobj)
                except OSError:
                    self._drop(key.fileobj)
            now = time.monotonic()
            for caller in [caller for caller in self._callers.values() if caller.until < now]:
                self._refuse(caller, f"no request within {_HELLO:g} s")
        with self._changed:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _accept(self, listening: Any) -> None:
        try:
            sock, name = listening.accept()
            prepare(sock)
        except OSError:
            return
        if len(self._callers) >= _MOST:
            self._refuse(next(iter(self._callers.values())), f"{_MOST} others have not been let in either")
        self._callers[sock] = _Caller(sock, f"{name[0]}:{name[1]}", None if self._tls is None else Tls(self._tls))
        self._selector.register(sock, selectors.EVENT_READ, self._receive)

    def _receive(self, sock: Any) -> None:
        caller = self._callers.get(sock)
        if caller is None:  # it spoke in the same turn of the selector in which it had to go for a further caller
            return
        try:
            goes_on = caller.receive()
            head = caller.take_head()
        except BlockingIOError:
            return
        except ssl.SSLError as error:
            self._refuse(caller, f"no TLS handshake: {explain(error)}")
        except OSError as error:
            self._refuse(caller, str(error))
        else:
            if head:
                self._answer(caller, head)
            elif not goes_on:
                self._refuse(caller, "it sent no request")

    def _answer(self, caller: _Caller, head: bytes) -> None:
        asked = None
        try:
            asked = handshake.read_request(head)
            self._check(asked, caller.peer)
        except RequestError as error:
            with contextlib.suppress(OSError):
                caller.send(handshake.refusal(error, asked))
            self._refuse(caller, error.message)
            return
        caller.send(asked.opening)
        del self._callers[caller.sock]
        self._selector.modify(caller.sock, selectors.EVENT_READ, self._drop)  # it speaks no word until it is asked
        self._let_in(asked, Dialed(caller.sock, caller.tls, asked.version))
        _log.info("%s dialed in from %s", asked.name, caller.peer)

    def _check(self, asked: handshake.Asked, peer: str) -> None:
        """Raise RequestError unless a server may come in."""
        self._gate.check(asked.token, peer)
        origin = asked.origin
        # Any page that a browser of this machine shows can reach its loopback. Without a token only its own pages may.
        if origin is not None and not self._gate.asks and not is_loopback(urlsplit(origin).hostname or ""):
            text = f"a page of {origin!r:.80} needs a token: start the listener with token=, and have the page show it"
            raise RequestError(Code.PERMISSION_DENIED, text)
        handshake.check_name(asked.name)

    def _let_in(self, asked: handshake.Asked, dialed: Dialed) -> None:
        scheme, most = ("dialed+ws", _SPARES) if asked.key is not None else ("dialed", 1)
        with self._changed:
            server = self._servers.setdefault(asked.name, _Server(scheme))
            before = server.waiting
            server.waiting = [*(before if server.scheme == scheme else []), dialed][-most:]
            server.scheme = scheme
            self._changed.notify_all()
        for left in before:
            if left not in server.waiting:
                self._forget(left.sock)

    def _refuse(self, caller: _Caller, why: str) -> None:
        _refusals.warning("refused %s: %s", caller.peer, why)
        self._drop(caller.sock)

    def _drop(self, sock: Any) -> None:
        """Let a caller go, or a server that has hung up while it waited."""
        self._callers.pop(sock, None)
        with self._changed:
            for server in self._servers.values():
                server.waiting = [dialed for dialed in server.waiting if dialed.sock is not sock]
                if sock in server.taken:  # a connection took it a moment ago
                    return
        self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()


@contextlib.contextmanager
def first_dialed(url: str, timeout: float, **credentials: Any) -> Iterator[str]:
    """Listen, and give the URL of the first server that dials in, while the context lasts.

    Args:
        url: `listen://HOST:PORT`; any other URL is given as it is.
        timeout: Seconds to wait for a server.
        credentials: `token`, `token_file` and `tls` of `DialListener`.

    Raises:
        ConnectError: No server dials in.
        AddressError, SettingError: As of `DialListener`.
    """
    if not url.strip().startswith("listen://"):
        yield url
        return
    with contextlib.closing(DialListener(url.strip(), timeout=timeout, **credentials)) as listener:
        found = listener.endpoints()
        if not found:
            raise ConnectError(url, f"no server has dialed in within {timeout:g} s: is it started with `--dial`?")
        yield found[0].url


class ListeningVectorEnv(OwningVectorEnv):
    """Slots on servers that dial in, as `RemoteVectorEnv` gives them.

    Args:
        url: `listen://HOST:PORT`.
        token: What servers have to show, as of `DialListener`.
        token_file: A file that holds it.
        tls: The trainer's certificate and key, as of `DialListener`.
        timeout: Seconds to wait for any answer, and for the first server.
        keywords: Those of `make_vec_remote`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: TokenLike | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls: TLS | None = None,
        timeout: float = TIMEOUT,
        **keywords: Any,
    ) -> None:
        listener = DialListener(url, token=token, token_file=token_file, tls=tls, timeout=timeout)
        super().__init__(listener.close, listener, timeout=timeout, **keywords)
