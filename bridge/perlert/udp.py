"""The only module of this package with sockets: the server's ports and the client's port."""

from __future__ import annotations

import contextlib
import errno
import itertools
import selectors
import socket
import struct
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from bridge.core.logs import SafeLog
from bridge.core.server.event_loop import READ
from bridge.core.transport.sockets import check_listening
from bridge.errors import ConnectError, SettingError
from bridge.perlert.protocol.cipher import ClientSeal, ServerSeal
from bridge.perlert.protocol.guard import Address
from bridge.perlert.protocol.packet import MAX_DATAGRAM

__all__ = ["MOST_WAITING", "ClientPort", "ServerPorts", "receive"]

_log = SafeLog(__name__)
CLIENT_BUFFER = 1472
"""Bytes; a server of another package may fill an Ethernet frame."""
MOST_WAITING = 1024
"""The most datagrams that a client reads at once: more than a socket's buffer holds, so the newest is among them."""
_BATCH = 64
_UNREACHABLE = {errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH}
_LINUX = sys.platform.startswith("linux")
# Python defines these constants of Linux only since version 3.14.
_TELL_ASKED = {socket.AF_INET: (socket.IPPROTO_IP, getattr(socket, "IP_PKTINFO", 8))}
_TELL_ASKED[socket.AF_INET6] = socket.IPPROTO_IPV6, getattr(socket, "IPV6_RECVPKTINFO", 49)
_SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)
_MAX_PEERS = 4096

_Ancillary = list[tuple[int, int, bytes]]


def receive(sock: socket.socket, size: int) -> tuple[bytes | None, Address, _Ancillary] | None:
    """Read a datagram into a fixed buffer (P-19).

    Returns:
        The datagram, or None if it was longer than `size` bytes; its sender; and ancillary data of the system. None if
        no datagram is waiting.
    """
    while True:
        try:
            if hasattr(sock, "recvmsg"):
                datagram, ancillary, flags, raw = sock.recvmsg(size, 128)
                return None if flags & socket.MSG_TRUNC else datagram, (raw[0], raw[1]), ancillary
            datagram, raw = sock.recvfrom(size)  # on Windows, a datagram that is too long is an error
            return datagram, (raw[0], raw[1]), []
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                return None, ("", 0), []
            if error.errno not in _UNREACHABLE:  # otherwise caused by an earlier datagram of ours
                raise


def _bind(host: str, port: int) -> socket.socket:
    check_listening(host, port)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.socket(family, kind, protocol))
            sock.setblocking(False)
            sock.bind(address)
            if _LINUX and address[0] in ("0.0.0.0", "::"):  # to reply from the address that was contacted
                sock.setsockopt(*_TELL_ASKED[family], 1)
            stack.pop_all()
            return sock
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name, such as "a..b"
        raise SettingError(
            f"cannot bind to {host}:{port}: {error}; expected a host name or IP address of this machine, and a free "
            "port, e.g. port=0"
        ) from error


class ServerPorts:
    """The ports of the lobby and the rollouts. Replies are sent from the address that the client contacted.

    Raises:
        SettingError: The address cannot be bound.
    """

    def __init__(self, host: str, port: int, seal: ServerSeal | None) -> None:
        self.bind_host, self._seal = host, seal
        self.counts: Counter[str] = Counter()
        """Datagrams dropped by this object, by reason."""
        lobby = _bind(host, port)
        self.port: int = lobby.getsockname()[1]
        self._sockets: dict[int | None, socket.socket] = {None: lobby}
        self._asked: OrderedDict[Address, tuple[int, int, bytes]] = OrderedDict()
        """For each client, our address that it contacted, as an argument for `sendmsg`."""

    def attach(self, loop: Any, host: Any) -> None:
        """Let an `EventLoop` watch the ports, and pass datagrams to a `Host`."""
        self._loop, self._host = loop, host
        loop.register(self._sockets[None], READ, lambda events: self._drain(None))

    def open_port(self) -> int:
        """Open a rollout port, and return its number."""
        sock = _bind(self.bind_host, 0)
        port: int = sock.getsockname()[1]
        self._sockets[port] = sock
        self._loop.register(sock, READ, lambda events: self._drain(port))
        return port

    def close_port(self, port: int | None) -> None:
        """Close a port."""
        sock = self._sockets.pop(port)
        self._loop.unregister(sock)
        sock.close()

    def close(self) -> None:
        """Close all ports."""
        for port in list(self._sockets):
            self.close_port(port)

    def _drain(self, port: int | None) -> None:
        """Process the datagrams of a port, but only so many that a flood does not delay the frames."""
        for _ in range(_BATCH):
            # A message may have closed this port.
            if (sock := self._sockets.get(port)) is None or (got := receive(sock, MAX_DATAGRAM)) is None:
                return
            datagram, sender, ancillary = got
            if datagram is None:
                self.counts["cut"] += 1
                continue
            try:
                # A forged datagram must not change the address from which a client's steps are sent.
                if ancillary and not self._host.guard.doubts(sender, datagram):
                    self._note_asked(sender, ancillary)
                if (message := self._opened(sock, port, datagram, sender)) is not None:
                    if self._seal is not None:
                        self._note_asked(sender, ancillary)
                    self._host.receive(port, message, sender)
            except Exception:  # an error of ours must cost one datagram, not the server
                self.counts["failed"] += 1
                _log.exception("a datagram from %s was not handled", sender)

    def _note_asked(self, sender: Address, ancillary: _Ancillary) -> None:
        for level, kind, data in ancillary:  # P-12: reply from the address that was contacted
            # For IPv4 it is (interface, local address, destination); the interface is left to the system.
            self._asked[sender] = level, kind, bytes(4) + data[4:] if level == socket.IPPROTO_IP else data
            self._asked.move_to_end(sender)
            if len(self._asked) > _MAX_PEERS:
                self._asked.popitem(last=False)

    def _opened(self, sock: socket.socket, port: int | None, datagram: bytes, sender: Address) -> bytes | None:
        """Return the decrypted message; reply to a datagram without a connection if its sender has the key."""
        if self._seal is None:
            return datagram
        guard, now = self._host.guard, self._host.now()
        message, reply = self._seal.open(datagram, sender, port)
        if message is not None:
            guard.prove(sender)  # the sender has the key and has received our challenge
        elif guard.heard(sender, datagram, now):
            self.counts["not sealed"] += reply is None
            if reply is not None and guard.answer(sender, len(reply), len(datagram), now):
                self._put(sock, reply, sender)
        return message

    def send(self, port: int | None, message: bytes, address: Address) -> None:
        """Send a message from a port."""
        sock = self._sockets.get(port)
        sealed = self._seal.seal(message, address, port) if self._seal is not None else message
        if sock is not None and sealed is not None:
            self._put(sock, sealed, address)

    def _put(self, sock: socket.socket, datagram: bytes, address: Address) -> None:
        try:
            # On a machine with several addresses, the routing table would choose another source address, and the client
            # ignores datagrams from that.
            if (asked := self._asked.get(address)) is not None:
                sock.sendmsg([datagram], [asked], 0, address)
            else:
                sock.sendto(datagram, address)
        except OSError:  # a full buffer or no route: treated like a loss on the way
            self.counts["not sent"] += 1


class ClientPort:
    """The client's single source port (P-11), for a server's host and lobby port; `url` is used in errors.

    Raises:
        ConnectError: The host name has no address.
    """

    def __init__(self, url: str, host: str, port: int, seal: ClientSeal | None = None) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            # Prefer IPv4: `localhost` may have both, and servers bind to 127.0.0.1 by default.
            family, kind, protocol, _, address = min(found, key=lambda item: item[0] != socket.AF_INET)
            self._socket = socket.socket(family, kind, protocol)
        except OSError as error:
            text = f"the host {host!r} has no address: {error}"
            raise ConnectError(url, text, unavailable=isinstance(error, socket.gaierror)) from error
        self._socket.setblocking(False)
        if _LINUX:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.bind(("127.0.0.1" if str(address[0]).startswith("127.") else "", 0))
        self.server: Address = (str(address[0]), int(address[1]))
        self.cut = 0
        """Received datagrams that were longer than the buffer."""
        self.closed = False
        self._seal = seal
        self._held: deque[tuple[bytes, Address]] = deque(maxlen=4)
        """Datagrams to send after the server has answered our HELLO."""

    def fileno(self) -> int:
        """Return the socket's file descriptor, to wait for it together with others."""
        return self._socket.fileno()

    def _rollout(self, address: Address) -> int | None:
        return None if address[1] == self.server[1] else address[1]

    def send(self, out: Iterable[tuple[bytes, Address]]) -> None:
        """Send datagrams; errors of the network are treated like a loss on the way."""
        for message, address in out:
            # `seal` returns a HELLO instead. Without keeping them here, the first messages would be sent only when
            # their repetition is due.
            if self._seal is not None and not self._seal.connected:
                self._held.append((message, address))
            sealed = message if self._seal is None else self._seal.seal(message, self._rollout(address))
            with contextlib.suppress(OSError):
                self._socket.sendto(sealed, address)

    def wait(self, timeout: float) -> None:
        """Wait for a datagram, at most `timeout` seconds."""
        # Windows has no `poll`. Elsewhere, `select` does not support file descriptors from 1,024.
        selector = getattr(selectors, "PollSelector", selectors.SelectSelector)()
        with contextlib.suppress(ValueError):  # another thread has closed it
            selector.register(self._socket, READ)
            selector.select(max(0.0, timeout))

    def read(self) -> tuple[bytes, Address, float] | None:
        """Return a received message, its sender, and its age in seconds; None if none is waiting."""
        waiting = iter(lambda: receive(self._socket, CLIENT_BUFFER), None)
        for datagram, sender, ancillary in itertools.islice(waiting, MOST_WAITING):
            self.cut += datagram is None
            if datagram is not None and self._seal is not None:
                datagram = self._seal.open(datagram, self._rollout(sender))
                if self._held and self._seal.connected:
                    held, self._held = self._held, deque(maxlen=4)
                    self.send(held)
            if datagram is not None:
                return datagram, sender, _age(ancillary)
        return None

    def close(self) -> None:
        """Close the socket; may be called twice."""
        self.closed = True
        self._socket.close()


def _age(ancillary: _Ancillary) -> float:
    """Return how long ago a datagram arrived, by the system's timestamp; 0 if there is none."""
    for _, _, data in ancillary:
        # A `struct timespec`, from SO_TIMESTAMPNS.
        if len(data) == 16:  # only differences between two readings of the same clock are used
            seconds, nanoseconds = struct.unpack("=qq", data)
            age: float = time.clock_gettime(time.CLOCK_REALTIME) - seconds - nanoseconds / 1e9
            return max(0.0, min(60.0, age))
    return 0.0
