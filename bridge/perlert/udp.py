"""The only file with sockets: the server's loop and the client's port."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from bridge.errors import ClosedError, ConnectError, SettingError
from bridge.perlert.cipher import ClientSeal, ServerSeal
from bridge.perlert.guard import Address
from bridge.perlert.host import Host, Send
from bridge.perlert.packet import MAX_DATAGRAM

__all__ = ["ClientPort", "ServerLoop"]

CLIENT_BUFFER = 1472
"""Bytes; a foreign server may fill an Ethernet frame."""
_BATCH = 64
_UNREACHABLE = {errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EMSGSIZE}


def _address(raw: tuple[object, ...]) -> Address:
    return str(raw[0]), int(raw[1])  # type: ignore[call-overload]


class _Reader:
    """Reads datagrams into one fixed buffer, as small as it can be (P-19), and drops those that were cut."""

    def __init__(self, size: int) -> None:
        # One byte more than may come: a datagram that fills it was longer, or is one byte too long.
        self._buffer = bytearray(size + 1)

    def read(self, sock: socket.socket) -> tuple[bytes | None, Address] | None:
        """Return (datagram or None when it was too long, sender); None: nothing is there."""
        try:
            size, raw = sock.recvfrom_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            if error.errno in _UNREACHABLE:  # of an earlier datagram of ours; on some systems, a cut one
                return None, ("", 0)
            raise
        if size == len(self._buffer):
            return None, _address(raw)
        return bytes(self._buffer[:size]), _address(raw)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingError(f"expected a host name or IP address to bind to, got {host!r}: {error}") from error
    try:
        sock.setblocking(False)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise SettingError(
            f"cannot bind to {host}:{port}: {error}; choose another host or port, e.g. port=0"
        ) from error
    return sock


class ServerLoop:
    """Runs a host on real sockets, in one thread.

    Args:
        host: The IP address or name to bind to.
        port: The lobby's port; 0: any free one.
        seal: The pre-shared key's end; None: plain messages.

    Raises:
        SettingError: The address cannot be bound.
    """

    def __init__(self, host: str, port: int, seal: ServerSeal | None) -> None:
        self.bind_host, self._seal = host, seal
        self.counts: Counter[str] = Counter()
        """Datagrams dropped here, by reason."""
        self._selector = selectors.DefaultSelector()
        self._lobby = _bind(host, port)
        self.port: int = self._lobby.getsockname()[1]
        self._rollouts: dict[int, socket.socket] = {}
        self._reader = _Reader(MAX_DATAGRAM)
        self._selector.register(self._lobby, selectors.EVENT_READ, None)
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, "wake")
        self._deadline: float | None = None
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """What ended the loop, if something did."""
        self.finished = threading.Event()

    def open_port(self) -> int:
        """Open a rollout port; called by the host, in the loop's thread."""
        sock = _bind(self.bind_host, 0)
        port: int = sock.getsockname()[1]
        self._rollouts[port] = sock
        self._selector.register(sock, selectors.EVENT_READ, port)
        return port

    def close_port(self, port: int) -> None:
        """Close a rollout port."""
        sock = self._rollouts.pop(port)
        self._selector.unregister(sock)
        sock.close()

    def start(self, host: Host, on_close: Callable[[], None]) -> None:
        """Begin, in the background. `on_close` is called at the end, in the loop's thread."""
        self._thread = threading.Thread(target=self._main, args=(host, on_close), name="perlert", daemon=True)
        self._thread.start()

    def stop(self, grace: float) -> None:
        """End the loop: at once when no run is on, otherwise when it is over, at most `grace` seconds from now."""
        self._deadline = time.monotonic() + grace
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def join(self, timeout: float | None) -> bool:
        """Wait for the loop's end; return whether it came."""
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def close_unstarted(self) -> None:
        """Close the sockets of a loop that was never started."""
        self._close()

    def _main(self, host: Host, on_close: Callable[[], None]) -> None:
        try:
            self._run(host)
        except BaseException as error:  # kept for whoever waits: `PerlertServer.wait` raises it
            self.failure = error
        finally:
            try:
                on_close()
            finally:
                self._close()
                self.finished.set()

    def _close(self) -> None:
        self._selector.close()
        for sock in (self._lobby, self._wakeup, self._waker, *self._rollouts.values()):
            sock.close()

    def _run(self, host: Host) -> None:
        while True:
            now = time.monotonic()
            if self._deadline is not None and (not host.running or now >= self._deadline):
                self._send(host.stop(now))
                self._settle(host, now + 1.0)
                return
            wake = host.wake()
            if wake <= now:
                self._send(host.tick(now))
                wake = host.wake()
            if self._deadline is not None:
                wake = min(wake, self._deadline)
            timeout = None if wake == math.inf else max(0.0, wake - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.data == "wake":
                    with contextlib.suppress(BlockingIOError):
                        self._wakeup.recv(64)
                else:
                    self._drain(host, key.fileobj, key.data)  # type: ignore[arg-type]

    def _settle(self, host: Host, deadline: float) -> None:
        """Send the last steps that the rate still holds back."""
        while host.owes and (now := time.monotonic()) < deadline:
            time.sleep(max(0.0, min(host.wake(), deadline) - now))
            self._send(host.tick(time.monotonic()))

    def _drain(self, host: Host, sock: socket.socket, port: int | None) -> None:
        # A flood must not keep the frames waiting.
        for _ in range(_BATCH):
            got = self._reader.read(sock)
            if got is None:
                return
            datagram, sender = got
            if datagram is None:
                self.counts["cut"] += 1
                continue
            if self._seal is not None:
                now = time.monotonic()
                if not host.guard.heard(sender, len(datagram), now):
                    continue
                opened = self._seal.open(datagram, sender)
                if opened.reply is not None and host.guard.spend(sender, len(opened.reply), now):
                    self._put(sock, opened.reply, sender)
                if opened.message is None:
                    self.counts["not sealed"] += opened.reply is None
                    continue
                host.guard.prove(sender)  # it has the key and our challenge
                datagram = opened.message
            self._send(host.receive(port, datagram, sender, time.monotonic()))

    def _send(self, out: list[Send]) -> None:
        for port, datagram, address in out:
            sock = self._lobby if port is None else self._rollouts.get(port)
            sealed = self._seal.seal(datagram, address) if self._seal is not None else datagram
            if sock is not None and sealed is not None:
                self._put(sock, sealed, address)

    def _put(self, sock: socket.socket, datagram: bytes, address: Address) -> None:
        try:
            sock.sendto(datagram, address)
        except OSError:  # a full buffer, no route: as good as lost on the way
            self.counts["not sent"] += 1


class ClientPort:
    """The client's one source port (P-11).

    Args:
        url: For errors.
        host: The server's name or IP address.
        port: The server's lobby port.
        seal: The pre-shared key's end; None: plain messages.

    Raises:
        ConnectError: The name has no address.
    """

    def __init__(self, url: str, host: str, port: int, seal: ClientSeal | None = None) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            # IPv4 first: `localhost` may name both, and servers are bound to 127.0.0.1 unless told.
            family, kind, protocol, _, address = min(found, key=lambda item: item[0] != socket.AF_INET)
            self._socket = socket.socket(family, kind, protocol)
        except OSError as error:
            raise ConnectError(url, f"the host {host!r} has no address: {error}") from error
        self._socket.setblocking(False)
        wide = "0.0.0.0" if family == socket.AF_INET else "::"
        self._socket.bind((address[0] if ipaddress.ip_address(address[0]).is_loopback else wide, 0))
        self.server = _address(address)
        self.cut = 0
        """Datagrams that were longer than the receive buffer."""
        self._reader = _Reader(CLIENT_BUFFER)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._seal = seal
        self._hello_at = -math.inf
        self._held: deque[tuple[bytes, Address]] = deque(maxlen=4)
        self._closed = False

    def fileno(self) -> int:
        """Return the socket's number, to wait for it together with others."""
        return self._socket.fileno()

    def send(self, out: list[tuple[bytes, Address]]) -> None:
        """Send; what the network does not take is as good as lost on the way."""
        if self._closed:
            raise ClosedError("expected an open environment, got a closed one; make a new one")
        for datagram, address in out:
            if self._seal is not None:
                sealed = self._seal.seal(datagram)
                if sealed is None:
                    self._held.append((datagram, address))  # until the server has answered
                    now = time.monotonic()
                    if now < self._hello_at + 0.3:
                        continue
                    self._hello_at = now
                    # The messages themselves are repeated until they work; so is this.
                    sealed, address = self._seal.hello(), self.server
                datagram = sealed
            with contextlib.suppress(OSError):
                self._socket.sendto(datagram, address)

    def wait(self, timeout: float) -> None:
        """Wait for a datagram, at most so many seconds."""
        self._selector.select(max(0.0, timeout))

    def read(self) -> tuple[bytes, Address] | None:
        """Return (message, sender) of a datagram that is there; None: none is."""
        if self._closed:
            raise ClosedError("expected an open environment, got a closed one; make a new one")
        while (got := self._reader.read(self._socket)) is not None:
            datagram, sender = got
            if datagram is None:
                self.cut += 1
                continue
            if self._seal is not None:
                message = self._seal.open(datagram)
                if self._held and self._seal.ready:
                    held, self._held = list(self._held), deque(maxlen=4)
                    self.send(held)
                if message is None:
                    continue
                datagram = message
            return datagram, sender
        return None

    def close(self) -> None:
        """Close; may be called twice."""
        if not self._closed:
            self._closed = True
            self._selector.close()
            self._socket.close()
