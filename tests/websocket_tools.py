"""WebSocket for tests: the public library's client as a gRPC channel, and a hand that sends what no client should."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import struct

from websockets.frames import Close, Opcode
from websockets.sync.client import connect

from bridge.pb import dm_env_rpc_pb2 as pb

TIMEOUT = 20.0
PATH = "/dm_env_rpc.v1.Environment/Process"
SUBPROTOCOL = "dm_env_rpc.v1"
KEY = "dGhlIHNhbXBsZSBub25jZQ=="


class WebSocketChannel:
    """A channel for the public dm_env_rpc library, whose calls go over the public WebSocket library."""

    def __init__(self, port):
        self._port = port
        self._open = contextlib.ExitStack()

    def stream_stream(self, path, request_serializer, response_deserializer, **_):
        assert path == PATH

        pack, unpack = request_serializer or bytes, response_deserializer or bytes

        def call(requests, **_):
            opening = connect(f"ws://127.0.0.1:{self._port}{path}", subprotocols=[SUBPROTOCOL], max_size=None)
            socket = self._open.enter_context(opening)
            for request in requests:
                socket.send(pack(request))
                yield unpack(socket.recv(TIMEOUT))

        return call

    def close(self):
        self._open.close()


def token_subprotocol(token):
    """Return the subprotocol that shows a token (docs/protocol.md)."""
    return "bridge.token." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")


def frame(opcode, data=b"", *, fin=True, flags=0, masked=True):
    """Return a frame of WebSocket."""
    size = len(data)
    first = int(opcode) | (0x80 if fin else 0) | flags
    bit = 0x80 if masked else 0
    if size < 126:
        head = bytes((first, size | bit))
    elif size < 65536:
        head = struct.pack("!BBH", first, 126 | bit, size)
    else:
        head = struct.pack("!BBQ", first, 127 | bit, size)
    if not masked:
        return head + data
    mask = os.urandom(4)
    return head + mask + bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))


def handshake(host, *, path=PATH, **fields):
    """Return the request of a WebSocket; fields that are None are left out."""
    named = {
        "Host": host,
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": KEY,
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Protocol": SUBPROTOCOL,
        **{name.replace("_", "-"): value for name, value in fields.items()},
    }
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items() if value is not None)]
    return "\r\n".join([*lines, "", ""]).encode()


class Hand:
    """A socket, and what comes over it, frame by frame."""

    def __init__(self, server, sock=None):
        self.host = f"127.0.0.1:{server.port}"
        self.sock = socket.create_connection(("127.0.0.1", server.port)) if sock is None else sock
        self.sock.settimeout(TIMEOUT)
        self._rest = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def send(self, data):
        self.sock.sendall(data)

    def head(self):
        """Return the status and the rest of the header of an HTTP answer."""
        while b"\r\n\r\n" not in self._rest:
            self._more()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        return int(head.split()[1]), head.decode()

    def body(self):
        """Return all that comes until the server closes."""
        while self._more(end=True):
            pass
        found, self._rest = self._rest, b""
        return found

    def open(self, **fields):
        """Open a WebSocket."""
        self.send(handshake(self.host, **fields))
        status, head = self.head()
        assert status == 101, head
        return self

    def _more(self, *, end=False):
        data = self.sock.recv(65536)
        assert data or end, f"the server closed after {self._rest!r:.200}"
        self._rest += data
        return bool(data)

    def _take(self, count):
        while len(self._rest) < count:
            self._more()
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def frame(self):
        """Return the next frame: its opcode and its data."""
        first, size = self._take(2)
        assert first & 0x80, "the server sends no fragments"
        if size == 126:
            (size,) = struct.unpack("!H", self._take(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", self._take(8))
        return Opcode(first & 15), self._take(size)

    def _frame_but_pings(self):
        # A client that a busy machine keeps quiet for long is pinged.
        while (found := self.frame())[0] is Opcode.PING:
            pass
        return found

    def closed(self):
        """Return the code and the reason of the close frame that comes next; then the server closes the socket."""
        opcode, data = self._frame_but_pings()
        assert opcode is Opcode.CLOSE, (opcode, data)
        close = Close.parse(data)
        assert self.body() == b""
        return close.code, close.reason

    def ask(self, **payload):
        """Send a request; return its answer."""
        self.send(frame(Opcode.BINARY, request(**payload)))
        return self.answer()

    def answer(self):
        """Return the next answer."""
        opcode, data = self._frame_but_pings()
        assert opcode is Opcode.BINARY, (opcode, data)
        return pb.EnvironmentResponse.FromString(data)


def request(**payload):
    """Return a serialized request."""
    return pb.EnvironmentRequest(**payload).SerializeToString()
