"""Servers and sessions of OpenEnv."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from websockets.sync.client import ClientConnection, connect

from bridge import Server


def web(server: Server) -> str:
    """The URL of a server's page, without its end."""
    assert server.web_url is not None
    return server.web_url.partition("#")[0].rstrip("/")


def openenv(server: Server) -> str:
    return web(server).replace("http", "openenv", 1)


@contextlib.contextmanager
def session(server: Server, **keywords: Any) -> Iterator[ClientConnection]:
    with connect(f"{web(server).replace('http', 'ws', 1)}/ws", **keywords) as socket_:
        yield socket_


def ask(socket_: ClientConnection, message: Any) -> Any:
    socket_.send(message if isinstance(message, (str, bytes)) else json.dumps(message))
    return json.loads(socket_.recv(20.0))
