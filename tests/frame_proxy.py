"""A proxy that speaks HTTP/2 frames for tests: it cuts streams and grants fewer of them than the server behind it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading

DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, ACK, END_HEADERS = 1, 1, 4
MAX_CONCURRENT_STREAMS = 3
REFUSED_STREAM, CANCEL = 7, 8
PREFACE = 24  # bytes that a client sends before its first frame


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


class Connection:
    """A client's connection, and that to the server."""

    def __init__(self, client: socket.socket, port: int) -> None:
        self.client, self.server = client, socket.create_connection(("127.0.0.1", port))
        self.streams: list[int] = []
        """The streams that the client has opened, in their order."""
        self.gone: set[int] = set()
        """Those of them that were cut or refused here."""
        self.refused: list[int] = []
        """Those of which the client is not told yet: a server's settings come first."""
        self.settled = False
        self._preface = PREFACE
        self._from = {self.client: b"", self.server: b""}

    def frames(self, sock: socket.socket) -> list[tuple[bytes, int, int, int]]:
        """Receive; return the frames that are complete: their bytes, kind, flags and stream. Raises EOFError."""
        if not (came := sock.recv(1 << 16)):
            raise EOFError
        data, found = self._from[sock] + came, []
        if sock is self.client and self._preface:
            cut = min(self._preface, len(data))
            self.server.sendall(data[:cut])
            data, self._preface = data[cut:], self._preface - cut
        while len(data) >= 9 and len(data) >= (size := 9 + int.from_bytes(data[:3], "big")):
            kind, flags, stream = struct.unpack(">BBI", data[3:9])
            found.append((data[:size], kind, flags, stream))
            data = data[size:]
        self._from[sock] = data
        return found

    def close(self) -> None:
        self.client.close()
        self.server.close()


class FrameProxy:
    """Passes the frames between clients and a server, a thread for all.

    Args:
        port: The server's port.
        streams: How many streams a connection may have at a time, in place of what the server grants; the next ones
            are refused. None: as the server says.
        announced: Whether clients are told so before, in the settings.
    """

    def __init__(self, port: int, streams: int | None = None, *, announced: bool = True) -> None:
        self._behind, self._most, self._announced = port, streams, announced
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections: list[Connection] = []
        """Those that are open."""
        self.accepted = 0
        """How many there were."""
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="frame-proxy", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def reset_stream(self, code: int) -> None:
        """Reset the first stream of the only connection, with an error code of HTTP/2."""
        self._cut(RST_STREAM, 0, struct.pack(">I", code))

    def end_stream(self, **trailers: str) -> None:
        """End that stream, by trailers or without."""
        # Literals, of which no table of header fields keeps anything.
        fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in trailers.items()]
        block = b"".join(b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in fields)
        self._cut(HEADERS if fields else DATA, END_STREAM | (END_HEADERS if fields else 0), block)

    def _cut(self, kind: int, flags: int, payload: bytes) -> None:
        (connection,) = self.connections
        stream = connection.streams.pop(0)
        with self._lock:
            connection.gone.add(stream)
            connection.client.sendall(frame(kind, flags, stream, payload))
            connection.server.sendall(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.data in self.connections:
                        self._pass(selector, key.data, key.fileobj)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        connection = Connection(self._listener.accept()[0], self._behind)
        self.connections.append(connection)
        self.accepted += 1
        for sock in (connection.client, connection.server):
            selector.register(sock, selectors.EVENT_READ, connection)

    def _pass(self, selector: selectors.BaseSelector, connection: Connection, sock: socket.socket) -> None:
        try:
            for data, kind, flags, stream in connection.frames(sock):
                with self._lock:
                    if sock is connection.server:
                        self._to_client(connection, data, kind, flags, stream)
                    else:
                        self._to_server(connection, data, kind, stream)
        except (OSError, EOFError):
            for each in (connection.client, connection.server):
                selector.unregister(each)
            self.connections.remove(connection)
            connection.close()

    def _to_client(self, connection: Connection, data: bytes, kind: int, flags: int, stream: int) -> None:
        if stream in connection.gone:
            return
        if kind == SETTINGS and not flags & ACK and self._most is not None:
            connection.settled = True
        if connection.settled and self._announced and kind == SETTINGS and not flags & ACK:
            kept = [data[at : at + 6] for at in range(9, len(data), 6)]
            kept = [item for item in kept if item[:2] != struct.pack(">H", MAX_CONCURRENT_STREAMS)]
            kept.append(struct.pack(">HI", MAX_CONCURRENT_STREAMS, self._most))
            data = frame(SETTINGS, 0, 0, b"".join(kept))
        connection.client.sendall(data)
        self._tell_refusals(connection)

    def _tell_refusals(self, connection: Connection) -> None:
        while connection.settled and connection.refused:
            refusal = frame(RST_STREAM, 0, connection.refused.pop(0), struct.pack(">I", REFUSED_STREAM))
            connection.client.sendall(refusal)

    def _to_server(self, connection: Connection, data: bytes, kind: int, stream: int) -> None:
        if stream in connection.gone:
            return
        connection.server.sendall(data)
        if kind == HEADERS and stream not in connection.streams:
            if self._most is None or len(connection.streams) < self._most:
                connection.streams.append(stream)
                return
            # The server has seen the header fields, which its table may keep, but answers for nothing.
            connection.gone.add(stream)
            connection.refused.append(stream)
            connection.server.sendall(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))
            self._tell_refusals(connection)

    def __enter__(self) -> FrameProxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(20.0)
        for connection in self.connections:
            connection.close()
        for sock in (self._listener, self._wake, self._woken):
            sock.close()
