"""The simulator's end: it dials the trainer, again and again, and has its server serve on what it gets."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bridge.dial import handshake
from bridge.errors import AddressError, BridgeError, SettingError
from bridge.logs import SafeLog
from bridge.transport.address import Address, parse_address
from bridge.transport.credentials import ClientCredentials
from bridge.transport.sockets import prepare
from bridge.transport.tls import Tls, client_context, explain
from bridge.transport.token import shown_token

if TYPE_CHECKING:
    from bridge.server.server import Server

__all__ = ["Dialing"]

_log = SafeLog(__name__)
_TIMEOUT = 20.0
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 10.0


class Dialing:
    """Keeps a connection to a trainer, on which a server serves.

    Args:
        server: The server.
        url: `grpc://HOST:PORT` or, with TLS, `grpcs://`; `?token=…` is what the trainer expects.
        credentials: The token, and what the trainer's certificate is known by.
        name: The server's name at the trainer; None: of this machine and process.

    Raises:
        AddressError: The URL cannot be read.
        SettingError: The name is none.
    """

    def __init__(self, server: Server, url: str, credentials: ClientCredentials, name: str | None = None) -> None:
        address = parse_address(url)
        if address.scheme not in ("grpc", "grpcs") or address.env_id or address.settings or urlsplit(url).query == "?":
            raise AddressError(url, "expected the trainer's grpc://HOST:PORT or grpcs://HOST:PORT")
        self._name = name or f"{socket.gethostname()[:40]}-{os.getpid()}-{server.port}"
        if not handshake.NAME.fullmatch(self._name):
            raise SettingError(f"expected a name of letters, digits, dots and dashes, got {self._name!r}")
        held = credentials.with_token_of(address.credentials, address.url)
        self._address = Address(address.url, address.scheme, address.host, address.port, credentials=held)
        self._token = shown_token(self._address)
        self._tls = client_context(held, "http/1.1") if address.tls else None
        self._server = server
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="bridge-dialing", daemon=True)

    def start(self) -> None:
        """Begin to dial. The server serves already."""
        self._thread.start()

    def stop(self) -> None:
        """Dial no more. The connection that there is belongs to the server, which closes it."""
        self._stopped.set()
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(_TIMEOUT)

    def _run(self) -> None:
        pause, said = _FIRST_PAUSE, ""
        while not (self._stopped.is_set() or self._server.draining):
            try:
                sock, tls, received = self._dial()
            except (OSError, BridgeError) as error:
                text = explain(error) if isinstance(error, ssl.SSLError) else str(error)
                if text != said:  # one line where the trainer is away for hours
                    _log.warning("cannot dial %s, and try again: %s", self._address.url, text)
                said = text
                self._stopped.wait(pause)
                pause = min(2 * pause, _LAST_PAUSE)
                continue
            _log.info("dialed %s as %s", self._address.url, self._name)
            said = ""
            self._ended.clear()
            began = time.monotonic()
            if self._stopped.is_set():
                sock.close()
                return
            self._server.serve_on(sock, self._address.target, tls, received, self._ended.set)
            self._ended.wait()
            pause = _FIRST_PAUSE if time.monotonic() - began > 1.0 else min(2 * pause, _LAST_PAUSE)
            self._stopped.wait(pause)

    def _dial(self) -> tuple[socket.socket, Tls | None, bytes]:
        """Connect, and ask to be let in. Raises OSError where that fails, or is refused.

        The bytes are what followed the answer: a trainer that has been waiting begins to speak at once.
        """
        sock = socket.create_connection((self._address.host, self._address.port), _TIMEOUT)
        try:
            tls = None if self._tls is None else Tls(self._tls, self._address.server_name)
            plain = b"" if tls is None else tls.receive(b"")
            while tls is not None and not tls.ready:
                sock.sendall(tls.send())
                plain = tls.receive(_received(sock))
            words = handshake.request(self._address.target, self._name, self._token)
            sock.sendall(words if tls is None else tls.send([words]))
            while not (end := handshake.end_of_head(plain)):
                data = _received(sock)
                plain += data if tls is None else tls.receive(data)
                if len(plain) > handshake.MAX_HEAD:
                    raise OSError("what is there is no trainer that waits for servers: its answer has no end")
            problem = handshake.answer(plain[:end], plain[end:])
            if problem:
                raise OSError(problem)
            prepare(sock)
        except BaseException:
            sock.close()
            raise
        return sock, tls, plain[end:]


def _received(sock: socket.socket) -> bytes:
    data = sock.recv(handshake.MAX_HEAD)
    if not data:
        raise OSError("it closed the connection without an answer")
    return data
