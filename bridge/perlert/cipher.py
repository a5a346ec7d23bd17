"""Messages ciphered with a pre-shared key (P-26): authenticated, and no datagram is taken twice. No socket.

    HELLO      1 | nonce 12 | seal(K0, client id 16, padding 32)       client → server
    CHALLENGE  2 | nonce 12 | seal(K0, server id 16; bound to the client id)
    DATA       3 | counter 8 | seal(K1 or K2, message; bound to the counter)

`seal` is ChaCha20-Poly1305. K0 comes from the pre-shared key by HKDF-SHA256, K1 (client to server) and K2 (back) from
it and both ids, which are random and fresh: what was recorded from one connection opens in no other one, nor after a
restart. Within a connection a window of counters refuses what has been seen. A HELLO that is replayed costs nothing:
the connection that is in use stays until the new one has shown that it knows the key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from bridge.errors import SettingError
from bridge.perlert.guard import Address

__all__ = ["OVERHEAD", "ClientSeal", "Opened", "ServerSeal", "check_key"]

OVERHEAD = 25
"""Bytes that a message grows by."""

_HELLO, _CHALLENGE, _DATA = 1, 2, 3
_WINDOW = 1024
_MAX_CONNECTIONS = 4096


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
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise SettingError(
            "a pre-shared key needs the package cryptography: pip install 'gymnasium-bridge[perlert]'"
        ) from error
    return raw


def _derive(key: bytes, salt: bytes, purpose: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    # HKDF-SHA256 (RFC 5869) of one block.
    secret = hmac.new(salt or bytes(32), key, hashlib.sha256).digest()
    return ChaCha20Poly1305(hmac.new(secret, b"perlert " + purpose + b"\x01", hashlib.sha256).digest())


def _open(cipher: Any, nonce: bytes, sealed: bytes, bound: bytes) -> bytes | None:
    from cryptography.exceptions import InvalidTag

    try:
        return bytes(cipher.decrypt(nonce, sealed, bound))
    except (InvalidTag, ValueError):
        return None


class _Channel:
    """One connection's two directions, from one end's view."""

    def __init__(self, key: bytes, client: bytes, server: bytes, *, is_server: bool) -> None:
        up, down = (_derive(key, client + server, way) for way in (b"up", b"down"))
        self._out, self._in = (down, up) if is_server else (up, down)
        self.ids = (client, server)
        self._counter = 0
        self._highest = -1
        self._seen = 0

    def seal(self, message: bytes) -> bytes:
        head = bytes([_DATA]) + self._counter.to_bytes(8, "big")
        self._counter += 1
        return head + bytes(self._out.encrypt(bytes(4) + head[1:], message, head))

    def open(self, datagram: bytes) -> bytes | None:
        counter = int.from_bytes(datagram[1:9], "big")
        behind = self._highest - counter
        if behind >= _WINDOW or (behind >= 0 and self._seen >> behind & 1):
            return None  # seen, or too old to know
        message = _open(self._in, bytes(4) + datagram[1:9], datagram[9:], datagram[:9])
        if message is None:
            return None
        if behind < 0:
            self._seen = (self._seen << min(-behind, _WINDOW) | 1) & ((1 << _WINDOW) - 1)
            self._highest = counter
        else:
            self._seen |= 1 << behind
        return message


@dataclasses.dataclass(frozen=True)
class Opened:
    """What became of a datagram."""

    message: bytes | None = None
    """The message in it."""
    reply: bytes | None = None
    """What to send back; shorter than what came."""


class ServerSeal:
    """The server's end, for all clients and all of its ports.

    Args:
        key: The pre-shared key.
        random: Makes so many unguessable bytes.
    """

    def __init__(self, key: bytes, random: Callable[[int], bytes] = os.urandom) -> None:
        self._key, self._random = key, random
        self._first = _derive(key, b"", b"hello")
        self._channels: OrderedDict[Address, _Channel] = OrderedDict()
        self._pending: OrderedDict[Address, _Channel] = OrderedDict()

    def open(self, datagram: bytes, sender: Address) -> Opened:
        """Take a datagram; without the key, or seen before, it gives nothing."""
        if datagram[:1] == bytes([_HELLO]):
            return self._hello(datagram, sender)
        if datagram[:1] != bytes([_DATA]) or len(datagram) < OVERHEAD:
            return Opened()
        channel = self._channels.get(sender)
        if channel is not None and (message := channel.open(datagram)) is not None:
            self._channels.move_to_end(sender)
            return Opened(message)
        pending = self._pending.get(sender)
        if pending is not None and (message := pending.open(datagram)) is not None:
            self._channels[sender] = self._pending.pop(sender)
            self._channels.move_to_end(sender)
            if len(self._channels) > _MAX_CONNECTIONS:
                self._channels.popitem(last=False)
            return Opened(message)
        return Opened()

    def _hello(self, datagram: bytes, sender: Address) -> Opened:
        plain = _open(self._first, datagram[1:13], datagram[13:], b"hello")
        if plain is None or len(plain) != 48:
            return Opened()
        client = plain[:16]
        pending = self._pending.get(sender)
        if pending is None or pending.ids[0] != client:
            current = self._channels.get(sender)
            # A HELLO that comes again gets the same answer, so that a late one breaks nothing.
            server = current.ids[1] if current and current.ids[0] == client else self._random(16)
            if current is None or current.ids[0] != client:
                self._pending[sender] = _Channel(self._key, client, server, is_server=True)
                self._pending.move_to_end(sender)
                if len(self._pending) > _MAX_CONNECTIONS:
                    self._pending.popitem(last=False)
        else:
            server = pending.ids[1]
        nonce = self._random(12)
        sealed = self._first.encrypt(nonce, server, b"challenge" + client)
        return Opened(reply=bytes([_CHALLENGE]) + nonce + bytes(sealed))

    def seal(self, message: bytes, address: Address) -> bytes | None:
        """Return what to send; None: there is no connection with this address."""
        channel = self._channels.get(address)
        return channel.seal(message) if channel is not None else None


class ClientSeal:
    """The client's end of one connection.

    Args:
        key: The pre-shared key.
        random: Makes so many unguessable bytes.
    """

    def __init__(self, key: bytes, random: Callable[[int], bytes] = os.urandom) -> None:
        self._key, self._random = key, random
        self._first = _derive(key, b"", b"hello")
        self._id = random(16)
        self._channel: _Channel | None = None

    @property
    def ready(self) -> bool:
        """Whether the server has answered."""
        return self._channel is not None

    def hello(self) -> bytes:
        """Return the datagram to begin with; to be sent again until `ready`."""
        nonce = self._random(12)
        return bytes([_HELLO]) + nonce + bytes(self._first.encrypt(nonce, self._id + bytes(32), b"hello"))

    def open(self, datagram: bytes) -> bytes | None:
        """Return the message in a datagram; None: there is none, or it has been seen before."""
        if datagram[:1] == bytes([_CHALLENGE]) and self._channel is None:
            server = _open(self._first, datagram[1:13], datagram[13:], b"challenge" + self._id)
            if server is not None and len(server) == 16:
                self._channel = _Channel(self._key, self._id, server, is_server=False)
        elif datagram[:1] == bytes([_DATA]) and len(datagram) >= OVERHEAD and self._channel is not None:
            return self._channel.open(datagram)
        return None

    def seal(self, message: bytes) -> bytes | None:
        """Return what to send; None: the server has not answered yet."""
        return self._channel.seal(message) if self._channel is not None else None
