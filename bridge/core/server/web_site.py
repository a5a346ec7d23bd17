"""Serves browsers without a token: the files of the page. Decides which browsers are let in.

A page of another site may open a WebSocket to any server that the browser reaches, so the `Origin` must be that of the
server's own page. A site may also have its name resolve to 127.0.0.1 (DNS rebinding), so that its pages seem to be the
server's own: the `Host` must be an address, or a name that the server knows.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import http
import importlib.resources
import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal
from urllib.parse import urlsplit

from bridge.errors import Code, RequestError, SettingError

__all__ = ["HttpAnswer", "OpenEnvOptions", "Web", "WebSite", "page_files"]

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}
_PORTS = {"http": 80, "https": 443}


@dataclasses.dataclass(frozen=True)
class HttpAnswer:
    """An answer over HTTP/1.1."""

    status: http.HTTPStatus
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    """Its media type."""
    encoding: str | None = None
    """What the body is compressed by; None: it is not."""

    def serialize(self, *, with_body: bool = True) -> bytes:
        """Return the bytes, after which the connection ends.

        Args:
            with_body: Whether the body goes along: not to HEAD.
        """
        fields = {**_HEADERS, "Content-Type": self.kind, "Content-Length": len(self.body), "Connection": "close"}
        if self.encoding is not None:
            fields["Content-Encoding"] = self.encoding
        if self.status is http.HTTPStatus.METHOD_NOT_ALLOWED:
            fields["Allow"] = "GET, HEAD"
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join([*lines, "", ""]).encode() + (self.body if with_body else b"")


def page_files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page: content and media type by path."""
    found: dict[str, tuple[bytes, str]] = {}
    for file in (importlib.resources.files("bridge") / "web" / "page").iterdir():
        if (kind := _KINDS.get(file.name[file.name.rfind(".") :])) is not None:
            found[f"/{file.name}"] = file.read_bytes(), kind
    # Else the browser learns of a script from another one, a round trip later, some four deep.
    scripts = [f'<link rel="modulepreload" href="{path[1:]}">\n' for path in found if path.endswith(".js")]
    page, kind = found["/index.html"]
    found["/"] = found["/index.html"] = page.replace(b"</head>", "".join(scripts).encode() + b"</head>"), kind
    return found


@functools.cache
def _compressed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Web:
    """How a server shows its page: `web=` of `serve_gym` and `serve_parallel`, where True stands for `Web()`.

    Examples:
        >>> from bridge import Web, serve_gym
        >>> with serve_gym("CartPole-v1", web=Web(play_fps=20)) as server:
        ...     print(server.web_url.startswith("http://127.0.0.1:"))
        True

    Args:
        hosts: Names under which browsers may reach the server, beside addresses, localhost and this machine's name:
            those under which a proxy publishes it; as one string: with commas between them.
        play_fps: In lock-step, the steps a second at which people play, and take over from agents, who wait for them;
            None: the environment's `render_fps`, or 30 where it has none.
        action_names: What people are told that the actions of a Discrete space are called, in their order; as one
            string: with commas between them. LEFT, RIGHT, UP and DOWN are played by the arrows, FIRE by the space bar,
            others by a letter of their names. None: the names that the environment's `get_action_meanings` returns.
            Environments of several agents take none.
        quality: Of pictures as JPEG, 1 to 100: from 90 on each pixel has its own color, and 100 sends all pictures
            without loss, as PNG. Those that are smaller without loss, as most drawings are, are sent so in any case.
    """

    hosts: str | Sequence[str] = ()
    play_fps: float | None = None
    action_names: str | Sequence[str] | None = None
    quality: int = 80

    def __post_init__(self) -> None:
        fits = isinstance(self.quality, int) and not isinstance(self.quality, bool)
        if not fits or not 1 <= self.quality <= 100:
            raise SettingError(f"expected quality to be an integer from 1 to 100, got {self.quality!r:.80}")

    @classmethod
    def of(cls, web: bool | Web) -> Web | None:
        """Return what the keyword `web` stands for; None: there is no page.

        Raises:
            SettingError: It is something else.
        """
        if not isinstance(web, (bool, Web)):
            raise SettingError(f"expected web to be True, False or bridge.Web(…), got {web!r:.80}")
        return web if isinstance(web, Web) else cls() if web else None


@dataclasses.dataclass(frozen=True)
class OpenEnvOptions:
    """How a server speaks OpenEnv."""

    name: str
    """The environment's name in `/metadata`."""
    pictures: bool
    """True if pictures travel as PNGs."""

    @classmethod
    def of(cls, openenv: bool | Literal["png"], name: str, *, web: bool, single: bool) -> OpenEnvOptions | None:
        """Read the keyword `openenv` of `serve_gym`; None: the server does not speak it.

        Raises:
            SettingError: It is something else, or OpenEnv cannot be spoken with the other keywords.
        """
        if openenv not in (False, True, "png"):
            raise SettingError(f"expected openenv to be True, False or 'png', got {openenv!r}")
        if not openenv:
            return None
        if not web:
            raise SettingError("openenv is spoken over WebSocket: give web=True too")
        if not single:
            raise SettingError(
                "an OpenEnv session is one environment that waits for each action: leave num_envs and fps out, or "
                "openenv"
            )
        return cls(name, openenv == "png")


class WebSite:
    """The files of a server's page, and the names under which browsers may reach it.

    Args:
        files: The content and the media type of each file, by its path.
        hosts: Names of the server beside addresses, `localhost` and the name of this machine: those under which a
            proxy publishes it; a string holds them with commas between them.
        openenv: How the server speaks OpenEnv, too; None: it does not.

    Raises:
        SettingError: One of the names has a scheme, a port or a path.
    """

    def __init__(
        self,
        files: Mapping[str, tuple[bytes, str]],
        hosts: str | Iterable[str] = (),
        openenv: OpenEnvOptions | None = None,
    ) -> None:
        self.openenv = openenv
        self._files = files
        self._hosts = {"localhost", socket.gethostname().lower()}
        for host in hosts.split(",") if isinstance(hosts, str) else hosts:
            if not host or set(host) & set(":/@ "):
                raise SettingError(f"expected web_hosts to be names such as 'play.example.org', got {host!r}")
            self._hosts.add(host.lower())

    def answer(self, method: str, path: str, encodings: str) -> HttpAnswer:
        """Answer a request for a file; `encodings` is the header field `Accept-Encoding`."""
        if method not in ("GET", "HEAD"):
            return HttpAnswer(http.HTTPStatus.METHOD_NOT_ALLOWED, b"expected GET or HEAD\n")
        if (found := self._files.get(path.partition("?")[0])) is None:
            return HttpAnswer(http.HTTPStatus.NOT_FOUND, b"there is no such file here\n")
        if "gzip" in map(str.strip, encodings.split(",")):
            return HttpAnswer(http.HTTPStatus.OK, _compressed(found[0]), found[1], "gzip")
        return HttpAnswer(http.HTTPStatus.OK, *found)

    def check_host(self, host: str | None) -> HttpAnswer | None:
        """Return the refusal of a request for another host; None: it may be for this one."""
        if host is None:
            return HttpAnswer(http.HTTPStatus.BAD_REQUEST, b"expected one header field Host\n")
        name = _name_and_port(host, "http")[0]
        if name in self._hosts or _is_address(name):
            return None
        text = (
            f"This server is not known as {name!r}. Open it by its address, or start it with web=Web(hosts={name!r}) "
            f"(--web-hosts {name}).\n"
        )
        return HttpAnswer(http.HTTPStatus.MISDIRECTED_REQUEST, text.encode(errors="replace"))

    @staticmethod
    def check_origin(origin: str | None, host: str) -> None:
        """Let a page in that is this server's own, and a client that is no browser.

        Args:
            origin: The header field `Origin`; None: there is none, as of clients that are no browsers.
            host: The header field `Host`.

        Raises:
            RequestError: PERMISSION_DENIED: the page is of another site.
        """
        if origin is None:
            return
        # By the page's own scheme: behind a proxy that ends TLS, this server sees http where the page has https.
        scheme, _, place = origin.partition("://")
        if scheme in _PORTS and _name_and_port(place, scheme) == _name_and_port(host, scheme):
            return
        text = f"the page is of {origin:.60}, and {host:.60} serves its own page only"
        raise RequestError(Code.PERMISSION_DENIED, text)


def _name_and_port(host: str, scheme: str) -> tuple[str, int]:
    """Return the name, in small letters and without brackets, and the port; port 0 where it cannot be read."""
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname or "", parts.port or _PORTS[scheme]
    except ValueError:
        return "", 0


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
