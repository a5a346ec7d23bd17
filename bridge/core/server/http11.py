"""HTTP/1.1 for a server's routes: requests, answers, and the host names under which browsers may reach the server.

A page of another site may send requests to any server that the browser can reach, so the `Origin` must be that of the
server's own page. A site may also resolve its name to 127.0.0.1 (DNS rebinding), so that its pages seem to be the
server's own. Therefore the `Host` must be an address, or a name that the server knows.
"""

from __future__ import annotations

import dataclasses
import http
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from bridge.errors import Code, RequestError

__all__ = ["HostNames", "HttpAnswer", "HttpRequest", "check_site"]

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
_STATUSES = {
    Code.INVALID_ARGUMENT: http.HTTPStatus.BAD_REQUEST,
    Code.FAILED_PRECONDITION: http.HTTPStatus.BAD_REQUEST,
    # Raised by `HttpProtocol` for a body that is too large.
    Code.DATA_LOSS: http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Code.UNAUTHENTICATED: http.HTTPStatus.UNAUTHORIZED,
    Code.PERMISSION_DENIED: http.HTTPStatus.FORBIDDEN,
    Code.NOT_FOUND: http.HTTPStatus.NOT_FOUND,
    Code.UNIMPLEMENTED: http.HTTPStatus.NOT_IMPLEMENTED,
    Code.RESOURCE_EXHAUSTED: http.HTTPStatus.SERVICE_UNAVAILABLE,
    Code.UNAVAILABLE: http.HTTPStatus.SERVICE_UNAVAILABLE,
}


@dataclasses.dataclass(frozen=True)
class HttpRequest:
    """A request over HTTP/1.1."""

    method: str
    """`GET`, `POST` or another method, in capitals."""
    target: str
    """The path, with the query if there is one: `/worlds?all=1`."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """The header fields; `field` reads them."""
    body: bytes = b""

    @property
    def path(self) -> str:
        """The path without the query."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        """The text after the path's question mark."""
        return self.target.partition("?")[2]

    def field(self, name: str) -> str | None:
        """Return a header field by its name in any case; None: it is missing, or occurs several times."""
        try:
            value: str | None = self.fields.get(name)
        except LookupError:
            return None
        return value

    def field_values(self, name: str) -> list[str]:
        """Return all values of a header field."""
        get_all = getattr(self.fields, "get_all", None)
        if get_all is not None:
            return list(get_all(name))
        return [self.fields[name]] if name in self.fields else []


@dataclasses.dataclass(frozen=True)
class HttpAnswer:
    """An answer over HTTP/1.1."""

    status: http.HTTPStatus
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    """The media type of the body."""
    encoding: str | None = None
    """The compression of the body; None: none."""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further header fields, or replacements of the default ones."""

    @classmethod
    def of_error(cls, error: RequestError) -> HttpAnswer:
        """Return the answer for an error, with its message as text."""
        status = _STATUSES.get(error.code, http.HTTPStatus.INTERNAL_SERVER_ERROR)
        fields = {"WWW-Authenticate": "Bearer"} if error.code is Code.UNAUTHENTICATED else {}
        return cls(status, f"{error.message}\n".encode(errors="replace"), fields=fields)

    def serialize(self, *, with_body: bool = True) -> bytes:
        """Return the answer's bytes, after which the connection ends.

        Args:
            with_body: False to leave out the body, for HEAD.
        """
        fields = {**_HEADERS, "Content-Type": self.kind, "Content-Length": len(self.body), "Connection": "close"}
        if self.encoding is not None:
            fields["Content-Encoding"] = self.encoding
        if self.status is http.HTTPStatus.METHOD_NOT_ALLOWED:
            fields["Allow"] = "GET, HEAD"
        fields.update(self.fields)
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join([*lines, "", ""]).encode() + (self.body if with_body else b"")


class HostNames:
    """The host names under which browsers may reach a server, beside addresses, `localhost` and this machine's name.

    Args:
        names: Further names, such as those under which a proxy publishes the server.
        remedy: What a user can do about an unknown name; `{name}` is replaced by it.
    """

    def __init__(self, names: Iterable[str] = (), remedy: str = "") -> None:
        self._names = {"localhost", socket.gethostname().lower(), *map(str.lower, names)}
        self._remedy = remedy

    def check(self, host: str | None) -> HttpAnswer | None:
        """Return the error answer to a request for an unknown host; None: the host is known.

        Args:
            host: The header field `Host`; None: it is missing, or occurs several times.
        """
        if host is None:
            return HttpAnswer(http.HTTPStatus.BAD_REQUEST, b"expected one header field Host\n")
        name = _name_and_port(host, "http")[0]
        if name in self._names or _is_address(name):
            return None
        remedy = f", or {self._remedy.format(name=name)}" if self._remedy else ""
        text = f"This server is not known as {name!r}. Open it by its address{remedy}.\n"
        return HttpAnswer(http.HTTPStatus.MISDIRECTED_REQUEST, text.encode(errors="replace"))


def check_site(request: HttpRequest, *, websocket: bool) -> None:
    """Refuse requests from pages of other sites. Pages of this server, and programs, are accepted.

    Args:
        request: A request with a `Host` that `HostNames.check` accepts.
        websocket: True for a WebSocket request, in which browsers always send `Origin`. In other requests of a page,
            such as for an image, they may send only `Sec-Fetch-Site`.

    Raises:
        RequestError: PERMISSION_DENIED: the request is from a page of another site.
    """
    origin, host = request.field("Origin"), request.field("Host") or ""
    if origin is not None:
        # With the scheme of the page: behind a proxy that ends TLS, this server sees http where the page has https.
        scheme, _, place = origin.partition("://")
        if scheme not in _PORTS or _name_and_port(place, scheme) != _name_and_port(host, scheme):
            text = f"the page is of {origin:.60}, and {host:.60} serves its own page only"
            raise RequestError(Code.PERMISSION_DENIED, text)
    if not websocket and request.field("Sec-Fetch-Site") not in (None, "none", "same-origin"):
        text = "expected a request of a program, or of this server's own page, got one of another site's page"
        raise RequestError(Code.PERMISSION_DENIED, f"{text}; open this server's page, or ask from a program")


def _name_and_port(host: str, scheme: str) -> tuple[str, int]:
    """Return the name, in lower case and without brackets, and the port; port 0 if it cannot be read."""
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
