"""Encryption with a pre-shared key (P-26): messages are authenticated, and replayed datagrams are rejected. No socket.

    HELLO      1 | nonce 12 | seal(K0, client id 16, padding 32)                      client → server
    CHALLENGE  2 | nonce 12 | seal(K0, number 8, server id 16, last 16 bytes of the answered datagram; bound to the
    client id)
    UP         3 | client id 16 | number 8 | counter 8 | seal(K1, message; bound to these and the port)
    DOWN       4 | counter 8 | seal(K2, message; bound to these and the port)

`seal` is ChaCha20-Poly1305. K0 is derived from the pre-shared key with HKDF-SHA256, K1 and K2 from it and both ids. The
port is the rollout's, 0 for the lobby's: a run's datagrams cannot be opened in another run. Within a connection, a
window of counters rejects repeated datagrams.

The server stores nothing for a HELLO: the server id is a MAC of the client's address and id and of the challenge's
number, with a secret of this server. So only UP opens a connection, and only with a higher number than the last one. An
UP without a connection is answered with a CHALLENGE, like a HELLO: clients continue with it after a restart of the
server. A client accepts only the first CHALLENGE that answers its datagrams in the current connection.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections import deque
from typing import Any, NamedTuple

from bridge.core.extras import needed
from bridge.errors import SettingError
from bridge.perlert.protocol.guard import Address

__all__ = ["OVERHEAD", "UP_OVERHEAD", "ClientSeal", "Opened", "ServerSeal", "check_key"]

OVERHEAD = 25
"""Bytes added to a message of the server."""
UP_OVERHEAD = 49
"""Bytes added to a message of a client."""

_HELLO, _CHALLENGE, _UP, _DOWN = (bytes([kind]) for kind in range(1, 5))
_HEAD = 33
_WINDOW = 1024
_MAX_CONNECTIONS = 4096
"""With more connections than this the server drops all of them, as in a restart."""


def check_key(key: bytes | str) -> bytes:
    """Return the key as bytes.

    Raises:
        SettingError: It is shorter than 16 bytes, or the package `cryptography` is missing.
    """
    if not isinstance(key, bytes | str):
        raise SettingError(f"expected a key of bytes or str, got {type(key).__name__}")
    raw = key.encode() if isinstance(key, str) else key
    if len(raw) < 16:
        raise SettingError(
            f"expected a key of 16 random bytes or more, got {len(raw)}; make one with "
            'python -c "import secrets; print(secrets.token_hex(16))"'
        )
    with needed("a pre-shared key needs the package cryptography", "perlert"):
        import cryptography  # noqa: F401
    return raw


def _derive(key: bytes, salt: bytes, purpose: bytes) -> Any:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return ChaCha20Poly1305(HKDF(hashes.SHA256(), 32, salt, b"perlert " + purpose).derive(key))


def _open(cipher: Any, nonce: bytes, sealed: bytes, bound: bytes) -> bytes | None:
    from cryptography.exceptions import InvalidTag

    try:
        return bytes(cipher.decrypt(nonce, sealed, bound))
    except (InvalidTag, ValueError):
        return None


class _Channel:
    """The two directions of a connection, seen from one end; the port is a rollout's, or None."""

    def __init__(self, key: bytes, ids: bytes, *, is_server: bool) -> None:
        up, down = (_derive(key, ids, way) for way in (b"up", b"down"))
        self._out, self._in = (down, up) if is_server else (up, down)
        self._counter = 0
        self._highest = -1
        self._seen = 0

    def seal(self, head: bytes, message: bytes, port: int | None) -> bytes:
        """Return `head` with a counter, and the message sealed."""
        head += self._counter.to_bytes(8, "big")
        self._counter += 1
        # The counter is the nonce, which is never reused with this key. `head` and the port are authenticated, too.
        return head + bytes(self._out.encrypt(bytes(4) + head[-8:], message, head + (port or 0).to_bytes(2, "big")))

    def open(self, head: bytes, sealed: bytes, port: int | None) -> bytes | None:
        """Return the message; b"" if it is a repetition or too old to tell; None if it is invalid."""
        number = int.from_bytes(head[-8:], "big")
        behind = self._highest - number
        # b"" and not None: a repeated or very late datagram is not a sign of a restart, and is not answered with a
        # CHALLENGE.
        if behind >= _WINDOW or (behind >= 0 and self._seen >> behind & 1):
            return b""
        message = _open(self._in, bytes(4) + head[-8:], sealed, head + (port or 0).to_bytes(2, "big"))
        # Recorded only here: a forged datagram must not use up the counter of a genuine one.
        if message is not None:
            ahead = max(0, -behind)
            self._highest += ahead
            self._seen = self._seen << min(ahead, _WINDOW) & ((1 << _WINDOW) - 1) | 1 << self._highest - number
        return message


class Opened(NamedTuple):
    """The result of opening a datagram: its message, or the reply to send."""

    message: bytes | None = None
    reply: bytes | None = None


class ServerSeal:
    """The server's end, for all clients and all ports of the server."""

    def __init__(self, key: bytes) -> None:
        self._key, self._first = key, _derive(key, b"", b"hello")
        self._secret = os.urandom(32)
        self._number = 0
        self._channels: dict[Address, tuple[bytes, _Channel]] = {}
        """The connection of each address, with its ids: the client's id, and the number."""

    def _server_id(self, ids: bytes, sender: Address) -> bytes:
        return hmac.digest(self._secret, ids + repr(sender).encode(), hashlib.sha256)[:16]

    def _challenge(self, client_id: bytes, datagram: bytes, sender: Address) -> Opened:
        self._number += 1
        number, nonce = self._number.to_bytes(8, "big"), os.urandom(12)
        text = number + self._server_id(client_id + number, sender) + datagram[-16:]
        return Opened(reply=_CHALLENGE + nonce + bytes(self._first.encrypt(nonce, text, b"challenge" + client_id)))

    def open(self, datagram: bytes, sender: Address, port: int | None = None) -> Opened:
        """Open a datagram that arrived at the lobby's port (None) or a rollout's."""
        if datagram[:1] == _HELLO:
            plain = _open(self._first, datagram[1:13], datagram[13:], b"hello")
            # A HELLO is padded, so that the reply is no longer: with a forged sender nothing is amplified.
            return self._challenge(plain[:16], datagram, sender) if plain else Opened()
        if datagram[:1] != _UP or len(datagram) < UP_OVERHEAD:
            return Opened()
        head, ids = datagram[:_HEAD], datagram[1:25]
        last, channel = self._channels.get(sender, (bytes(24), None))
        # Numbers up to the last one belong to former connections, whose recorded datagrams must not open a connection
        # again. Numbers above `_number` belong to no challenge of this server.
        if last != ids:
            is_new = last[16:] < ids[16:] <= self._number.to_bytes(8, "big")
            channel = _Channel(self._key, ids + self._server_id(ids, sender), is_server=True) if is_new else None
        message = channel.open(head, datagram[_HEAD:], port) if channel is not None else None
        # The connection may be older than a restart of this server: the client continues with the CHALLENGE, without a
        # HELLO.
        if channel is None or message is None:
            return self._challenge(ids[:16], datagram, sender)
        # Stored only after a message was opened with its key: a HELLO uses no memory of the server.
        if last != ids:
            if len(self._channels) >= _MAX_CONNECTIONS:
                # A recorded datagram must not open a connection again.
                self._channels, self._secret = {}, os.urandom(32)
            self._channels[sender] = ids, channel
        return Opened(message or None)

    def seal(self, message: bytes, address: Address, port: int | None = None) -> bytes | None:
        """Return the datagram to send from a port; None if there is no connection with this address."""
        _, channel = self._channels.get(address, (b"", None))
        return channel.seal(_DOWN, message, port) if channel is not None else None


class ClientSeal:
    """The client's end."""

    def __init__(self, key: bytes) -> None:
        self._key, self._first = key, _derive(key, b"", b"hello")
        self._id = os.urandom(16)
        self.connected = False
        """True if the server has answered."""
        self._head = b""
        self._channel: _Channel | None = None
        self._sent: deque[bytes] = deque(maxlen=256)
        """The last 16 bytes of the newest datagrams, one of which a CHALLENGE must name."""

    def hello(self) -> bytes:
        """Return the first datagram to send."""
        nonce = os.urandom(12)
        datagram = _HELLO + nonce + bytes(self._first.encrypt(nonce, self._id + bytes(32), b"hello"))
        self._sent.append(datagram[-16:])
        return datagram

    def open(self, datagram: bytes, port: int | None = None) -> bytes | None:
        """Return the message in a datagram from the lobby (None) or a rollout's port; empty if it is a repetition."""
        kind = datagram[:1]
        if kind == _DOWN and len(datagram) >= OVERHEAD and self._channel is not None:
            return self._channel.open(datagram[:9], datagram[9:], port) or None
        if kind == _CHALLENGE:
            plain = _open(self._first, datagram[1:13], datagram[13:], b"challenge" + self._id)
            # It answers a datagram of this connection, so recorded older challenges cannot disrupt it.
            if plain is not None and plain[24:] in self._sent:
                self._head = _UP + self._id + plain[:8]
                self._channel = _Channel(self._key, self._id + plain[:24], is_server=False)
                # A second CHALLENGE for the same datagrams, or a repeated one, must not begin another connection.
                self._sent.clear()
                self.connected = True
        return None

    def seal(self, message: bytes, port: int | None = None) -> bytes:
        """Return the datagram to send: the message or, until the server has answered, a HELLO instead."""
        if self._channel is None:
            return self.hello()
        sealed = self._channel.seal(self._head, message, port)
        self._sent.append(sealed[-16:])
        return sealed
