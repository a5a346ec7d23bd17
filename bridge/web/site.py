"""The page as a protocol at a server's port: its files, and its settings."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import http
import importlib.resources
from collections.abc import Iterable, Sequence

from bridge.core.extras import needed
from bridge.core.server.http11 import HostNames, HttpAnswer, HttpRequest
from bridge.core.server.port import Port, PortProtocol, Route
from bridge.errors import SettingError

__all__ = ["Web", "host_names", "page_protocols"]

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Web:
    """How a server shows its page: the keyword `web` of `serve_gym` and `serve_parallel`, where True means `Web()`.

    Examples:
        >>> from bridge import Web, serve_gym
        >>> with serve_gym("CartPole-v1", web=Web(play_fps=20)) as server:
        ...     print(server.web_url.startswith("http://127.0.0.1:"))
        True

    Args:
        hosts: Names under which browsers may reach the server, such as a proxy's, besides addresses, localhost and this
            machine's name. A string is split at commas.
        play_fps: In lock-step, the steps per second while a person plays or has taken over from an agent, which waits
            for the person; None: the environment's `render_fps`, or 30 if it has none.
        action_names: Names for the actions of a Discrete space, in order; a string is split at commas. LEFT, RIGHT, UP
            and DOWN are played with the arrows, FIRE with the space bar, others with a letter of their names. None: the
            names from the environment's `get_action_meanings`. In a game of several agents they apply to each agent;
            environments of several agents do not accept them.
        quality: JPEG quality of pictures, 1 to 100: from 90 each pixel has its own color, and 100 sends all pictures
            without loss, as PNG. Drawings are always sent as PNG, unless a JPEG is more than a third smaller.
    """

    hosts: str | Sequence[str] = dataclasses.field(default=(), metadata={"flat": "web_hosts"})
    play_fps: float | None = None
    action_names: str | Sequence[str] | None = None
    quality: int = 80

    def __post_init__(self) -> None:
        fits = isinstance(self.quality, int) and not isinstance(self.quality, bool)
        if not fits or not 1 <= self.quality <= 100:
            raise SettingError(f"expected quality to be an integer from 1 to 100, got {self.quality!r:.80}")


def host_names(hosts: str | Iterable[str] = ()) -> HostNames:
    """Return the names under which browsers may reach a server.

    Args:
        hosts: The user's names; a string is split at commas.

    Raises:
        SettingError: A name contains a scheme, a port or a path.
    """
    names = hosts.split(",") if isinstance(hosts, str) else list(hosts)
    for name in names if hosts else ():
        if not name or set(name) & set(":/@ "):
            raise SettingError(f"expected web_hosts to be names such as 'play.example.org', got {name!r}")
    return HostNames(names if hosts else (), "start it with web=Web(hosts={name!r}) (--web-hosts {name})")


def page_protocols() -> list[PortProtocol]:
    """Return the protocols of a server that shows the page: its files over HTTP, and WebSocket.

    Raises:
        SettingError: A required package is missing.
    """
    with needed("web=True needs the package websockets", "web"):
        from bridge.core.server.http_protocol import websocket_protocol
    routes = [_file_route(path, content, kind) for path, (content, kind) in _page_files().items()]
    return [PortProtocol(name="page", routes=routes), websocket_protocol()]


def _page_files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page: content and media type by path."""
    found: dict[str, tuple[bytes, str]] = {}
    for file in (importlib.resources.files("bridge") / "web" / "page").iterdir():
        if (kind := _KINDS.get(file.name[file.name.rfind(".") :])) is not None:
            found[f"/{file.name}"] = file.read_bytes(), kind
    # Preloaded: otherwise the browser finds scripts through other scripts, with a round trip for each of about four
    # levels.
    scripts = [f'<link rel="modulepreload" href="{path[1:]}">\n' for path in found if path.endswith(".js")]
    page, kind = found["/index.html"]
    found["/"] = found["/index.html"] = page.replace(b"</head>", "".join(scripts).encode() + b"</head>"), kind
    return found


def _file_route(path: str, content: bytes, kind: str) -> Route:
    """Return the route of a file, which is served without a token."""

    def answer(request: HttpRequest, port: Port) -> HttpAnswer:
        if "gzip" in map(str.strip, (request.field("Accept-Encoding") or "").split(",")):
            return HttpAnswer(http.HTTPStatus.OK, _compressed(content), kind, "gzip")
        return HttpAnswer(http.HTTPStatus.OK, content, kind)

    return Route(path=path, answer=answer, public=True)


@functools.cache
def _compressed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)
