"""Name resolution: the socket addresses that a URL stands for, in the order in which they are tried.

A name is looked up in a thread of its own, because `getaddrinfo` blocks, for as long as the resolver's timeouts say.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from bridge.core.forks import forget_in_child
from bridge.core.transport.address import Address
from bridge.errors import SettingError

__all__ = ["Target", "interleave", "known_targets", "look_up"]

Target: TypeAlias = tuple[int, Any]
"""An address family, and a socket address of it."""
_Done: TypeAlias = "Callable[[tuple[Target, ...] | OSError], None]"


def known_targets(address: Address) -> tuple[Target, ...] | None:
    """Return the targets of a Unix socket's path or a numeric host; None: the host is a name, which `look_up` takes.

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
    # In the resolver's order, a host whose IPv6 leads nowhere would be tried at each of those addresses before IPv4.
    rounds = itertools.zip_longest(*families.values())
    return tuple(target for each in rounds for target in each if target is not None)


def _targets(host: str, port: int, flags: int = 0) -> tuple[Target, ...]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return tuple((family, target) for family, _, _, _, target in found)


class _Resolver:
    """Looks names up, each in a thread; who asks for a name that is being looked up gets the same answer."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, int], tuple[threading.Thread, list[_Done]]] = {}
        """The look-ups under way: the thread of each, and who waits for it."""

    def look_up(self, host: str, port: int, done: _Done) -> None:
        """Look a name up, and call `done`, mostly in another thread, with the targets, or with the error."""
        with self._lock:
            # A daemon: neither `close` nor the end of the program waits for the resolver's timeouts.
            thread = threading.Thread(target=self._run, args=(host, port), name="bridge-resolver", daemon=True)
            asked, waiting = self._asked.setdefault((host, port), (thread, []))
            waiting.append(done)
            # Slots of one name connect together: one thread asks for all of them. After an interrupt it may be one that
            # was never started.
            if asked.is_alive():
                return
            self._asked[host, port] = thread, waiting
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left now; whoever asks later asks anew
            self._tell(host, port, OSError(str(error)))

    def _run(self, host: str, port: int) -> None:
        # A tuple, because several dialers wait for the same look-up and each goes through the addresses by itself: from
        # a list, the first dialer would take the addresses of all others.
        found: tuple[Target, ...] | OSError
        try:
            found = interleave(_targets(host, port))
        except OSError as error:
            found = error
        self._tell(host, port, found)

    def _tell(self, host: str, port: int, found: tuple[Target, ...] | OSError) -> None:
        with self._lock:
            # Taken out before they are told: who asks meanwhile would join a list that nobody reads any more.
            _, waiting = self._asked.pop((host, port), (None, ()))
        for done in waiting:
            done(found)

    def after_fork(self) -> None:
        """Begin anew in the forked process, where the threads are not."""
        self._start()


_resolver = _Resolver()
forget_in_child(_resolver)
look_up = _resolver.look_up
