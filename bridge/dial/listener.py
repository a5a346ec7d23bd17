"""The trainer's end: it listens, and is a directory of the servers that have dialed in."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import socket
import ssl
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from bridge.client.endpoints import Endpoint
from bridge.client.options import CONNECT_TIMEOUT
from bridge.client.vector_env import RemoteVectorEnv
from bridge.client.wire.dialed import Dialed, listeners
from bridge.dial import handshake
from bridge.errors import AddressError, RequestError, SettingError
from bridge.forks import forget_in_child
from bridge.logs import LimitedLog, SafeLog
from bridge.server.auth import Gate, Security
from bridge.server.listeners import listen_tcp
from bridge.transport.credentials import TLS, TokenLike
from bridge.transport.sockets import prepare
from bridge.transport.tls import Tls, explain

__all__ = ["DialListener", "ListeningVectorEnv"]

_log, _refusals = SafeLog(__name__), LimitedLog(__name__)
_HELLO = 10.0
"""Seconds that a caller has to ask to be let in."""
_MOST = 64
"""Callers at a time that have not been let in; the oldest goes for a further one."""
_LOOK = 0.5
_numbers = itertools.count(1)


class _Caller:
    """A connection that was accepted, and has not been let in."""

    def __init__(self, sock: socket.socket, peer: str, tls: Tls | None) -> None:
        self.sock, self.peer, self.tls = sock, peer, tls
        self.head = b""
        self.until = time.monotonic() + _HELLO

    def receive(self) -> bool:
        """Take what has come; return whether the connection goes on. Raises OSError as the socket does."""
        data = self.sock.recv(handshake.MAX_HEAD)
        self.head += data if self.tls is None else self.tls.receive(data)
        if self.tls is not None and self.tls.has_output:
            self.sock.send(self.tls.send())
        return bool(data)

    def send(self, data: bytes) -> None:
        """Send a few bytes, which the socket's buffer holds."""
        self.sock.send(data if self.tls is None else self.tls.send([data]))


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
        timeout: float = 60.0,
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
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: dict[str, Dialed] = {}
        """Those that wait for a call, by name."""
        self._taken: dict[str, socket.socket] = {}
        """Those that a connection has."""
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

    def after_fork(self) -> None:
        """In a forked process: leave the sockets to the parent process."""
        self._closed, self._waiting, self._taken = True, {}, {}
        listeners.pop(self.number, None)

    def endpoints(self) -> list[Endpoint]:
        """Return the servers that have dialed in; waits for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: self._names() or self._closed, self._timeout)
            return [Endpoint(f"dialed://{name}:{self.number}", name) for name in self._names()]

    def _names(self) -> list[str]:
        self._taken = {name: sock for name, sock in self._taken.items() if sock.fileno() >= 0}
        return sorted({*self._waiting, *self._taken})

    def _take(self, name: str) -> Dialed | None:
        """Give the socket of a server to a connection; None: it has not dialed in, or another connection has it."""
        with self._lock:
            found = self._waiting.pop(name, None)
            if found is not None:
                self._selector.unregister(found.sock)
                self._taken[name] = found.sock
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
        with self._lock:
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
        except BlockingIOError:
            return
        except ssl.SSLError as error:
            self._refuse(caller, f"no TLS handshake: {explain(error)}")
            return
        end = handshake.end_of_head(caller.head)
        if end:
            self._answer(caller, caller.head[:end])
        elif not goes_on or len(caller.head) > handshake.MAX_HEAD:
            self._refuse(caller, "it sent no request")

    def _answer(self, caller: _Caller, head: bytes) -> None:
        try:
            name, authorization = handshake.read_request(head)
            self._gate.check(Gate.bearer(authorization), caller.peer)
        except RequestError as error:
            with contextlib.suppress(OSError):
                caller.send(handshake.refusal(error))
            self._refuse(caller, error.message)
            return
        caller.send(handshake.ACCEPTED)
        del self._callers[caller.sock]
        self._selector.modify(caller.sock, selectors.EVENT_READ, self._drop)  # it speaks no word until it is asked
        with self._changed:
            before = self._waiting.pop(name, None)
            self._waiting[name] = Dialed(caller.sock, caller.tls)
            self._changed.notify_all()
        if before is not None:
            self._forget(before.sock)
        _log.info("%s dialed in from %s", name, caller.peer)

    def _refuse(self, caller: _Caller, why: str) -> None:
        _refusals.warning("refused %s: %s", caller.peer, why)
        self._drop(caller.sock)

    def _drop(self, sock: Any) -> None:
        """Let a caller go, or a server that has hung up while it waited."""
        self._callers.pop(sock, None)
        with self._lock:
            gone = [name for name, dialed in self._waiting.items() if dialed.sock is sock]
            for name in gone:
                del self._waiting[name]
            if sock in self._taken.values():  # a connection took it a moment ago
                return
        self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()


class ListeningVectorEnv(RemoteVectorEnv):
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
        timeout: float = 60.0,
        connect_timeout: float = CONNECT_TIMEOUT,
        **keywords: Any,
    ) -> None:
        self._listener = DialListener(url, token=token, token_file=token_file, tls=tls, timeout=timeout)
        try:
            super().__init__(self._listener, timeout=timeout, connect_timeout=connect_timeout, **keywords)
        except BaseException:
            self._listener.close()
            raise

    def close_extras(self, **kwargs: Any) -> None:
        """Leave the worlds, and listen no longer."""
        super().close_extras(**kwargs)
        self._listener.close()
