"""Opens a socket: resolves the host name, and connects to the first of its addresses that answers (RFC 8305)."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from bridge.core.client.wire.poller import Poller, PollerTimer
from bridge.core.ownership import forget_in_child
from bridge.core.transport.address import Address, is_loopback
from bridge.core.transport.sockets import prepare
from bridge.errors import SettingError

__all__ = ["ATTEMPT_DELAY", "Dialer", "Target", "interleave", "known_targets", "look_up"]

Target: TypeAlias = tuple[int, Any]
"""An address family, and a socket address of it."""
_Done: TypeAlias = "Callable[[tuple[Target, ...] | OSError], None]"


def known_targets(address: Address) -> tuple[Target, ...] | None:
    """Return the targets of a Unix socket's path or a numeric host; None: the host is a name, for `look_up`.

    Raises:
        SettingError: This platform has no Unix sockets.
    """
    if address.scheme == "unix":
        family = getattr(socket, "AF_UNIX", None)
        if family is None:
            raise SettingError(f"this platform has no Unix sockets for {address.url!r}; use grpc://HOST:PORT")
        return ((family, address.path),)
    try:
        # Asks no resolver, so it does not block.
        return _targets(address.host, address.port, socket.AI_NUMERICHOST)
    except OSError:
        return None


def interleave(targets: Sequence[Target]) -> tuple[Target, ...]:
    """Alternate between address families, beginning with the first one's (RFC 8305, section 4)."""
    families: dict[int, list[Target]] = {}
    for target in targets:
        families.setdefault(target[0], []).append(target)
    # In the resolver's order, all IPv6 addresses of a host without working IPv6 would be tried before IPv4.
    rounds = itertools.zip_longest(*families.values())
    return tuple(target for each in rounds for target in each if target is not None)


def _targets(host: str, port: int, flags: int = 0) -> tuple[Target, ...]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return tuple((family, target) for family, _, _, _, target in found)


class _Resolver:
    """Resolves names, each in a thread. Requests for a name that is being resolved share the answer."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, int], tuple[threading.Thread, list[_Done]]] = {}
        """The running look-ups: the thread of each, and the callbacks that wait for it."""

    def look_up(self, host: str, port: int, done: _Done) -> None:
        """Resolve a name, and call `done`, usually in another thread, with the targets or with the error."""
        with self._lock:
            # A daemon: neither `close` nor the end of the program waits for the resolver's timeouts.
            thread = threading.Thread(target=self._run, args=(host, port), name="bridge-resolver", daemon=True)
            asked, waiting = self._asked.setdefault((host, port), (thread, []))
            waiting.append(done)
            # Slots with the same name connect together: one thread resolves it for all of them. After an interrupt the
            # thread may never have been started.
            if asked.is_alive():
                return
            self._asked[host, port] = thread, waiting
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left now; a later request tries again
            self._tell(host, port, OSError(str(error)))

    def _run(self, host: str, port: int) -> None:
        # A tuple, because several dialers wait for the same look-up and each takes the addresses by itself: from a
        # list, the first dialer would take the addresses of all others.
        found: tuple[Target, ...] | OSError
        try:
            found = interleave(_targets(host, port))
        except OSError as error:
            found = error
        self._tell(host, port, found)

    def _tell(self, host: str, port: int, found: tuple[Target, ...] | OSError) -> None:
        with self._lock:
            # Removed before they are called: a later request would join a list that is not read any more.
            _, waiting = self._asked.pop((host, port), (None, ()))
        for done in waiting:
            done(found)

    def after_fork(self) -> None:
        """Start again in the forked process, which does not have the threads."""
        self._start()


_resolver = _Resolver()
forget_in_child(_resolver)
look_up = _resolver.look_up


ATTEMPT_DELAY = 0.25
"""Seconds after which the next address is tried in parallel, if the attempts so far have neither connected nor failed;
and after which a Unix socket is tried again whose server has no room for another connection."""


@dataclasses.dataclass(eq=False)
class Dialer:
    """Opens one socket, without blocking. Used with the lock held."""

    address: Address
    """The address of the server."""
    poller: Poller[Any]
    """Calls back when a socket or a timer is ready."""
    connected: Callable[[socket.socket], None]
    """Called once with the connected socket, unless `failed` or `cancel` is called."""
    failed: Callable[[str, bool], None]
    """Called once with the reason, and whether the server may still come up."""
    _resolving: bool = False
    _targets: deque[Target] = dataclasses.field(default_factory=deque)
    """The targets that were not tried yet."""
    _attempts: set[socket.socket] = dataclasses.field(default_factory=set)
    """The sockets that are connecting."""
    _timer: PollerTimer | None = None

    def start(self) -> None:
        """Begin. May call `connected` or `failed` before it returns.

        Raises:
            SettingError: This platform has no such sockets.
        """
        targets = known_targets(self.address)
        if targets is not None:
            self._targets = deque(targets)
            self._try_next()
            return
        self._resolving = True
        try:
            self.poller.add_poster()
        except OSError as error:  # no file descriptor is left: try again, as after a refused connection
            self._try_next(error)
            return
        # It is called in the resolver's thread.
        done = self.poller.call_soon_threadsafe
        look_up(self.address.host, self.address.port, lambda found: done(partial(self._resolved, found)))

    def cancel(self) -> None:
        """Cancel: close the connecting sockets, and call no callback."""
        # `getaddrinfo` cannot be cancelled: its thread continues, and `_resolved` finds that its result is not needed.
        if self._resolving:
            self._resolving = False
            self.poller.remove_poster()
        if self._timer is not None:
            self._timer.cancel()
        for sock in list(self._attempts):
            self._close(sock)
        self._targets.clear()

    def _resolved(self, found: tuple[Target, ...] | OSError) -> None:
        if not self._resolving:
            return
        self._resolving = False
        self.poller.remove_poster()
        if isinstance(found, OSError):
            remedy = "Check how it is spelled, or write the machine's address"
            self.failed(f"the host {self.address.host!r} is not known: {found}. {remedy}", True)
        else:
            self._targets = deque(found)
            self._try_next()

    def _try_next(self, error: OSError | None = None) -> None:
        """Try the next address, in parallel to those that are connecting already.

        Args:
            error: The error of the last attempt; None: it is still connecting.
        """
        # After a failed attempt, the next one does not wait for the timer.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._targets:
            family, target = self._targets.popleft()
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError as problem:  # the system does not have this address family
                error = problem
                continue
            self._attempts.add(sock)
            try:
                prepare(sock)
                number = sock.connect_ex(target)
                self.poller.watch(sock, selectors.EVENT_WRITE, partial(self._on_ready, sock))
            except OSError as problem:  # an invalid path of a socket, or no file descriptor is left for the selector
                number, error = -1, problem
            # A Unix socket connects at once.
            if number in (0, errno.EISCONN):
                self._finish(sock)
                return
            # Linux: the Unix socket's backlog is full. The socket is not connecting, though a selector would report it
            # ready, without an error. Windows has another number for EWOULDBLOCK.
            if number == errno.EAGAIN:
                self._close(sock)
                self._targets.append((family, target))
                self._timer = self.poller.call_later(ATTEMPT_DELAY, self._try_next)
                return
            # EWOULDBLOCK is Windows' name for EINPROGRESS.
            if number in (errno.EINPROGRESS, errno.EWOULDBLOCK):
                # A black hole never answers: try the next address while this one may still answer (RFC 8305, section
                # 5).
                if self._targets:
                    self._timer = self.poller.call_later(ATTEMPT_DELAY, self._try_next)
                return
            self._close(sock)
            if number > 0:
                error = OSError(number, os.strerror(number))
        # Otherwise an earlier attempt may still connect.
        if not self._attempts:
            self.cancel()
            detail = f"{error.strerror or error}" if error else "the name has no address"
            hint = " Is the server running there?"
            if error is not None and error.errno == errno.EMFILE:
                hint = " `ulimit -n` says how many this process may have, and raises it."
            # Servers listen on loopback by default: the machine is there, but the server does not listen at this
            # address.
            if error is not None and error.errno == errno.ECONNREFUSED and not is_loopback(self.address.host):
                hint += " It takes connections of other machines only with --host 0.0.0.0, or :: for IPv6 too (host=)."
            # The file of a Unix socket may not exist yet.
            absent = error is not None and error.errno in (errno.ECONNREFUSED, errno.ENOENT)
            self.failed(f"no connection: {detail}.{hint}", absent)

    def _on_ready(self, sock: socket.socket, events: int) -> None:
        # Another attempt has connected in the same round of the selector, and this one is closed. A connected attempt
        # is called again if an interrupt came before its socket was passed on.
        if sock.fileno() < 0:
            return
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number == 0:
            self._finish(sock)
        else:
            self._close(sock)
            self._try_next(OSError(number, os.strerror(number)))

    def _finish(self, sock: socket.socket) -> None:
        # Removed first, because `cancel` closes the remaining attempts. The poller continues to watch this socket for
        # its new owner.
        self._attempts.discard(sock)
        self.cancel()
        self.connected(sock)

    def _close(self, sock: socket.socket) -> None:
        self._attempts.discard(sock)
        self.poller.forget(sock)
        sock.close()
