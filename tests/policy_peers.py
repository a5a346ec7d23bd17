"""A policy server written from openpi's wire alone, with nothing of this package; and what misbehaves at either end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

METADATA = msgpack.packb({"robot": "arm"})


def array(values, dtype="<f4"):
    values = np.asarray(values, dtype)
    return {b"__ndarray__": True, b"data": values.tobytes(), b"dtype": values.dtype.str, b"shape": list(values.shape)}


def numbers(item):
    return np.frombuffer(item[b"data"], np.dtype(item[b"dtype"])).reshape(item[b"shape"])


@contextlib.contextmanager
def served(handler: Callable[[ServerConnection], None]) -> Iterator[str]:
    """The URL of a WebSocket server that gives each connection to a function."""

    def handle(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            handler(connection)

    with serve(handle, "127.0.0.1", 0, compression=None, max_size=None, close_timeout=0.2) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def bytes_served(answer: bytes) -> Iterator[str]:
    """The URL of a server that says some bytes to whoever connects and ends its stream; without any it is silent."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                kept.append(connection)
                if answer:
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"ws://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in kept:
            connection.close()


def answered(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Ask until something is so, for a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
    return False
