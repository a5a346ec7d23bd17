"""What tests of protocols at a server's port share: the examples of docs/plugins.md, and plain connections."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable

from bridge import Server
from tests.places import ROOT

DEADLINE = 60.0
TIMEOUT = 20.0
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))
WORLDS = EXAMPLES["bridge_worlds.py"]
EPISODES = EXAMPLES["bridge_print_episodes.py"]

Install = Callable[..., None]


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), TIMEOUT)


def read_all(sock: socket.socket) -> bytes:
    """Read until the server closes."""
    found = b""
    while data := sock.recv(65536):
        found += data
    return found


def ask(server: Server, *sent: bytes) -> bytes:
    """Send bytes, piece by piece, and read until the server closes."""
    with connect(server) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for data in sent:
            sock.sendall(data)
        return read_all(sock)


def ask_http(server: Server, request: str, *fields: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send a request; return the status and the body of the answer."""
    if body:
        fields = (*fields, f"Content-Length: {len(body)}")
    lines = [f"{request} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", *fields, "", ""]
    head, _, rest = ask(server, "\r\n".join(lines).encode() + body).partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.01)
