"""An HTTP proxy for tests: it passes CONNECT and GET on to this machine, whatever host they name."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from urllib.parse import urlsplit


class ConnectProxy:
    """A proxy at a free port of loopback, in threads of its own; a context manager.

    Args:
        user: What it asks for, `user:password`; None: nothing.
        answer: The first line of its answer to everything, where it is to refuse.
    """

    def __init__(self, user: str | None = None, answer: str | None = None) -> None:
        self._fields = None if user is None else f"Basic {base64.b64encode(user.encode()).decode()}"
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://{'' if user is None else user.replace(' ', '%20') + '@'}127.0.0.1:{self.port}"
        self.asked: list[str] = []
        """The first line of each request."""
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run)]

    def __enter__(self) -> ConnectProxy:
        self._threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(20.0)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20.0)
        for sock in self._sockets:
            sock.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                self._start(self._serve, near)

    def _start(self, function: object, *arguments: socket.socket) -> None:
        thread = threading.Thread(target=function, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _serve(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                data = near.recv(1)
                if not data:
                    return
                head += data
            lines = head.decode("latin-1").split("\r\n")
            method, target, _ = lines[0].split(" ")
            self.asked.append(lines[0])
            refusal = self._answer
            if self._fields is not None and f"Proxy-Authorization: {self._fields}".lower() not in map(str.lower, lines):
                refusal = "HTTP/1.1 407 Proxy Authentication Required"
            if refusal is not None:
                near.sendall(f"{refusal}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
                near.shutdown(socket.SHUT_WR)
                return
            parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
            far = socket.create_connection(("127.0.0.1", parts.port or 80), 20.0)
            self._sockets.append(far)
            if method == "CONNECT":
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                far.sendall("\r\n".join([f"{method} {parts.path} HTTP/1.1", *lines[1:]]).encode("latin-1"))
            self._start(self._pump, far, near)
            self._pump(near, far)

    @staticmethod
    def _pump(come: socket.socket, go: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := come.recv(65536):
                go.sendall(data)
            go.shutdown(socket.SHUT_WR)
