"""The simulator's end: it dials the trainer, again and again, and has its server serve on what it gets."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import threading
import time
from email.message import Message
from typing import TYPE_CHECKING

from bridge.core.back_off import pause
from bridge.core.extras import install_command, is_installed
from bridge.core.logs import SafeLog
from bridge.core.transport.address import parse_address, shown_token, withheld
from bridge.core.transport.credentials import ClientCredentials
from bridge.core.transport.http_proxies import HttpProxy, connect_tcp, find_proxy
from bridge.core.transport.service import HELLO
from bridge.core.transport.sockets import prepare
from bridge.core.transport.tls import Tls, client_context, explain
from bridge.dial.handshake import PATH, PROTOCOL, pack_head, problem_of_name, read_head
from bridge.errors import AddressError, BridgeError, SettingError
from bridge.version import __version__

if TYPE_CHECKING:
    from bridge.core.server.core_server import CoreServer

__all__ = ["Dialing"]

_log = SafeLog(__name__)
_TIMEOUT = 20.0
_CHUNK = 4096
# A trainer that is started again waits for no server longer than that.
_LONGEST_PAUSE = 2.0
# `stop` waits no longer for a trainer that says nothing: Ctrl-C ends a server soon, and this thread ends by itself.
_END_TIMEOUT = 1.0
# A connection that ends sooner counts as a failure, after which the pause grows.
_SHORT = 1.0
# Seconds from the first use of a WebSocket to the next one, in which it is seen whether the first bytes closed it.
_SETTLE = 0.02


class Dialing:
    """Keeps a connection to a trainer, on which a server serves; of WebSockets one more than there are sessions.

    It goes through the proxy of `https_proxy` (with TLS) or `http_proxy`, unless `no_proxy` excepts the trainer or it
    is on this machine.

    Args:
        server: The server.
        url: `grpc://HOST:PORT` or `ws://HOST:PORT`, with TLS `grpcs://` or `wss://`; `?token=…` is what the trainer
            expects.
        credentials: The token, and what the trainer's certificate is known by.
        name: The server's name at the trainer; None: of this machine and process.

    Raises:
        AddressError: The URL cannot be read.
        SettingError: The name is none, or the package that WebSockets need is missing.
    """

    def __init__(self, server: CoreServer, url: str, credentials: ClientCredentials, name: str | None = None) -> None:
        address = parse_address(url)
        if address.path or address.dialed or address.env_id or address.settings:
            form = "grpc://HOST:PORT or ws://HOST:PORT, with TLS grpcs:// or wss://"
            raise AddressError(url, "a trainer that waits has neither path nor settings", form)
        self._name = name or f"{socket.gethostname()[:40]}-{os.getpid()}-{server.port}"
        if problem := problem_of_name(self._name):
            raise SettingError(problem)
        if address.websocket and not is_installed("websockets"):
            raise SettingError(f"{address.scheme}:// needs the package websockets: {install_command('web')}")
        self._address = address.with_credentials(credentials)
        self._address.check_tls()
        self._token = shown_token(self._address)
        # Else a proxy that ends TLS might choose HTTP/2, in which there is no upgrade.
        self._tls = client_context(self._address.credentials, "http/1.1") if address.tls else None
        self._server = server
        self._said = ""
        self._proxy: HttpProxy | None = None
        self._stopped, self._wanted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="bridge-dialing", daemon=True)

    def start(self) -> None:
        """Begin to dial. The server serves already."""
        self._thread.start()

    def stop(self) -> None:
        """Dial no more. The connections that there are belong to the server, which closes them."""
        self._stopped.set()
        self._wanted.set()
        if self._thread.ident is not None:
            self._thread.join(_END_TIMEOUT)

    def _run(self) -> None:
        failures = 0
        while not (self._stopped.is_set() or self._server.draining):
            try:
                failed = self._serve_once()
            except (OSError, BridgeError) as error:
                failed, text = True, explain(error) if isinstance(error, ssl.SSLError) else str(error)
                text += ("" if self._proxy is None else self._proxy.note) + withheld(self._address)
                if self._stopped.is_set():
                    return
                if text != self._said:  # one line where the trainer is away for hours
                    _log.warning("cannot dial %s, and try again: %s", self._address.url, text)
                self._said = text
            failures = failures + 1 if failed else 0
            if failures:
                self._stopped.wait(min(pause(failures), _LONGEST_PAUSE))

    def _serve_once(self) -> bool:
        """Make one connection, and wait until a further one is wanted; return whether this one ended soon.

        Raises:
            OSError: It cannot be made, or the trainer refuses.
        """
        # New ones each time: a WebSocket of an earlier turn that ends must not ask for a further one.
        self._wanted = wanted = threading.Event()
        lost = threading.Event()

        def on_end() -> None:
            lost.set()
            wanted.set()

        stream, websocket = self._dial()
        # `stop` came while the trainer was dialed, and the server would serve on after it.
        if self._stopped.is_set():
            stream.sock.close()
            return False
        # Who was told of the failures is told that they are over.
        (_log.warning if self._said else _log.info)("dialed %s as %s", self._address.url, self._name)
        self._said = ""
        began = time.monotonic()
        self._server.serve_on(
            stream.sock, self._address.target, stream.tls, stream.received, on_end, websocket, wanted.set
        )
        wanted.wait()
        soon = time.monotonic() < began + _SHORT
        return lost.wait(_SETTLE) and soon

    def _dial(self) -> tuple[_HandshakeConnection, str | None]:
        """Connect, and ask to be let in. Raises OSError where that fails, or is refused.

        What the stream has received followed the answer: a trainer that has been waiting begins to speak at once. The
        text is, of a WebSocket, the version of this package at the trainer; None: it is gRPC.
        """
        address = self._address
        # Looked up each time: a server may dial for days, and its program may change the environment.
        self._proxy = None
        self._proxy = find_proxy(address.host, address.port, ["https" if address.tls else "http"])
        # The handshake blocks, within this timeout for each call: it has a thread of its own.
        sock = connect_tcp(address.host, address.port, _TIMEOUT, self._proxy)
        try:
            stream = _HandshakeConnection(
                sock, None if self._tls is None else Tls(self._tls, self._address.server_name)
            )
            version = self._ask(stream)
            # Not blocking from here on: the server's event loop has it.
            prepare(sock)
        except BaseException:
            sock.close()
            raise
        return stream, version

    def _ask(self, stream: _HandshakeConnection) -> str | None:
        """Ask to be let in; return the version at the trainer, as `_dial`. Raises OSError where it refuses."""
        fields = {"Host": self._address.target, "Connection": "Upgrade", "Upgrade": PROTOCOL, "Name": self._name}
        fields |= {HELLO: __version__, **({} if self._token is None else {"Authorization": f"Bearer {self._token}"})}
        key = base64.b64encode(os.urandom(16)).decode()
        if self._address.websocket:
            fields |= {"Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key}
            fields["Sec-WebSocket-Protocol"] = PROTOCOL
        stream.send(pack_head(f"GET {PATH} HTTP/1.1", fields))
        line, answered = stream.read_head()
        if line.split(" ")[1:2] != ["101"]:
            text = stream.received.decode(errors="replace").strip().partition("\n")[0]
            raise OSError(f"it answered {line[:80]!r}{f': {text[:300]!r}' if text else ''}")
        if not self._address.websocket:
            return None
        from websockets.protocol import OPEN, Protocol, Side
        from websockets.utils import accept_key

        from bridge.core.transport.websocket import LOGGER

        # A cache or a proxy that answers 101 by itself cannot know it (RFC 6455).
        if answered.get("Sec-WebSocket-Accept") != accept_key(key):
            raise OSError("it speaks no WebSocket as it should")
        # A refusal comes after a handshake that succeeded, as browsers need it: it may be here already.
        websocket = Protocol(Side.CLIENT, state=OPEN, logger=LOGGER)
        websocket.receive_data(stream.received)
        if (close := websocket.close_rcvd) is not None:
            raise OSError(f"it closed the WebSocket with {close.code}: {close.reason}")
        return answered.get(HELLO, "")


class _HandshakeConnection:
    """A connection before the roles are swapped, by blocking calls, which raise OSError as its socket does.

    Args:
        sock: Its socket.
        tls: TLS over it, which begins with the handshake; None: there is none.
    """

    def __init__(self, sock: socket.socket, tls: Tls | None = None) -> None:
        self.sock, self.tls = sock, tls
        self.received = b""
        """The bytes that have come, without TLS."""
        if tls is not None:
            # This makes the first message of the handshake, for `send`.
            tls.receive(b"")
            self.send()
            while not tls.ready:
                self._receive()

    def send(self, data: bytes = b"") -> None:
        """Send bytes, after what TLS has to send."""
        self.sock.sendall(data if self.tls is None else self.tls.send([data]))

    def read_head(self) -> tuple[str, Message]:
        """Wait for an answer; return its first line and header fields. Raises RequestError where they have no end."""
        while (found := read_head(self.received)) is None:
            self._receive()
        line, fields, self.received = found
        return line, fields

    def _receive(self) -> None:
        data = self.sock.recv(_CHUNK)
        if not data:
            raise OSError("it closed the connection without an answer")
        self.received += data if self.tls is None else self.tls.receive(data)
        if self.tls is not None and self.tls.has_output:
            self.send()
