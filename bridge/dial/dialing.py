"""The simulator's end: dials the trainer repeatedly, and passes each connection to its server."""

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
# The longest pause between attempts: a trainer that restarts gets its servers back within this time.
_LONGEST_PAUSE = 2.0
# `stop` waits this long for a silent trainer, so that Ctrl-C ends a server soon; the thread then ends by itself.
_END_TIMEOUT = 1.0
# A connection that ends sooner than this counts as a failure, and the next pause is longer.
_SHORT = 1.0
# Seconds from the first use of a WebSocket to dialing the next one. A connection that its first bytes closed is noticed
# then.
_SETTLE = 0.02


class Dialing:
    """The connection to a trainer on which a server serves; over WebSocket, one connection more than sessions.

    Connections go through the proxy of `https_proxy` (with TLS) or `http_proxy`, unless the trainer is listed in
    `no_proxy` or runs on this machine.

    Args:
        server: The server.
        url: `grpc://HOST:PORT` or `ws://HOST:PORT`, with TLS `grpcs://` or `wss://`; `?token=…` is the token that the
            trainer expects.
        credentials: The token, and the settings that verify the trainer's certificate.
        name: The server's name at the trainer; None: a name made of this machine's name and the process number.

    Raises:
        AddressError: The URL cannot be read.
        SettingError: The name is invalid, or the package that WebSockets need is missing.
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
        # Without this, a proxy that terminates TLS might choose HTTP/2, which has no upgrade.
        self._tls = client_context(self._address.credentials, "http/1.1") if address.tls else None
        self._server = server
        self._said = ""
        self._proxy: HttpProxy | None = None
        self._stopped, self._wanted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="bridge-dialing", daemon=True)

    def start(self) -> None:
        """Begin to dial. The server must be serving already."""
        self._thread.start()

    def stop(self) -> None:
        """Stop dialing. Open connections belong to the server, which closes them."""
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
                if text != self._said:  # log once, not at every attempt while the trainer is away
                    _log.warning("cannot dial %s, and try again: %s", self._address.url, text)
                self._said = text
            failures = failures + 1 if failed else 0
            if failures:
                self._stopped.wait(min(pause(failures), _LONGEST_PAUSE))

    def _serve_once(self) -> bool:
        """Make one connection, and wait until another one is needed; return True if this one ended soon.

        Raises:
            OSError: The connection cannot be made, or the trainer refuses it.
        """
        # New events for each connection: a WebSocket of an earlier call that ends must not request another one.
        self._wanted = wanted = threading.Event()
        lost = threading.Event()

        def on_end() -> None:
            lost.set()
            wanted.set()

        stream, websocket = self._dial()
        # `stop` was called during the attempt. Without this the server would keep serving on the new connection.
        if self._stopped.is_set():
            stream.sock.close()
            return False
        # The failures were logged, so their end is logged too.
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
        """Connect, and ask the trainer for admission. Raise OSError if that fails or is refused.

        The stream may have received bytes after the response: a trainer that was waiting speaks at once.
        The returned text is the version of this package at the trainer for a WebSocket, and None for gRPC.
        """
        address = self._address
        # The proxy is looked up each time: a server may dial for days, and its program may change the environment
        # variables.
        self._proxy = None
        self._proxy = find_proxy(address.host, address.port, ["https" if address.tls else "http"])
        # The handshake blocks, with this timeout for each call; it runs in a thread of its own.
        sock = connect_tcp(address.host, address.port, _TIMEOUT, self._proxy)
        try:
            stream = _HandshakeConnection(
                sock, None if self._tls is None else Tls(self._tls, self._address.server_name)
            )
            version = self._ask(stream)
            # Non-blocking from here on: the server's event loop uses the socket.
            prepare(sock)
        except BaseException:
            sock.close()
            raise
        return stream, version

    def _ask(self, stream: _HandshakeConnection) -> str | None:
        """Ask for admission; return what `_dial` returns of the version. Raise OSError if the trainer refuses."""
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

        # A cache or a proxy that answers 101 by itself cannot compute this value (RFC 6455).
        if answered.get("Sec-WebSocket-Accept") != accept_key(key):
            raise OSError("it speaks no WebSocket as it should")
        # Browsers need the handshake to succeed, so a refusal follows it, and may have arrived already.
        websocket = Protocol(Side.CLIENT, state=OPEN, logger=LOGGER)
        websocket.receive_data(stream.received)
        if (close := websocket.close_rcvd) is not None:
            raise OSError(f"it closed the WebSocket with {close.code}: {close.reason}")
        return answered.get(HELLO, "")


class _HandshakeConnection:
    """A blocking connection during the handshake, before the roles are swapped. Methods raise OSError like its socket.

    Args:
        sock: Its socket.
        tls: The TLS state; its handshake has not begun. None: no TLS.
    """

    def __init__(self, sock: socket.socket, tls: Tls | None = None) -> None:
        self.sock, self.tls = sock, tls
        self.received = b""
        """The received bytes, decrypted."""
        if tls is not None:
            # This produces the first message of the TLS handshake, which `send` sends.
            tls.receive(b"")
            self.send()
            while not tls.ready:
                self._receive()

    def send(self, data: bytes = b"") -> None:
        """Send bytes, after pending output of TLS."""
        self.sock.sendall(data if self.tls is None else self.tls.send([data]))

    def read_head(self) -> tuple[str, Message]:
        """Wait for a response; return its first line and header fields. Raise RequestError if they are too long."""
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
