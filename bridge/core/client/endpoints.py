"""Directories: where the servers of a vector environment are, while they come and go.

A directory has one method, `endpoints`. It is read in a thread of its own, every few seconds and after each loss, so
it may block. What it raises, or a list without an endpoint, leaves what was known before.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable
from urllib.parse import unquote, urlsplit, urlunsplit

from bridge.core.logs import SafeLog
from bridge.core.ownership import forget_in_child
from bridge.core.transport.address import Address, parse_address, scheme_of
from bridge.errors import AddressError, RemoteTimeoutError, SettingError, shown_url

__all__ = ["DNS_SCHEMES", "Directory", "DnsDirectory", "Endpoint", "EndpointWatch", "FileDirectory", "Kind"]
__all__ += ["as_directory", "kind_of", "open_dns", "open_file"]

_log = SafeLog(__name__)
_PERIOD = 5.0
_DNS = {"grpc+dns": "grpc", "grpcs+dns": "grpcs"}
DNS_SCHEMES = tuple(_DNS)
"""The schemes of a host name, of which each address is a server."""


Kind: TypeAlias = tuple[Any, ...]
"""The environment, settings and agent of a URL, on any server."""


def kind_of(address: Address) -> Kind:
    """Return what a URL asks for: the environment of its path, and the settings or the world of its query."""
    return address.env_id, address.settings, address.world


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A server in a directory."""

    url: str
    """Its URL, as for `make_remote`."""
    name: str = ""
    """The name that stays the same when its URL changes; empty: the URL."""
    draining: bool = False
    """True if it takes no further worlds."""
    slots: int | None = None
    """How many slots it can carry; None: not known."""

    def __repr__(self) -> str:
        return f"Endpoint({shown_url(self.url)!r}, name={self.name!r}, draining={self.draining}, slots={self.slots})"

    @functools.cached_property
    def kind(self) -> Kind:
        """The environment, settings and agent of its URL; only endpoints of one kind replace each other."""
        return kind_of(parse_address(self.url, listed=True))

    @property
    def key(self) -> str:
        """The key that tells it from other endpoints."""
        return self.name or self.url


@runtime_checkable
class Directory(Protocol):
    """Knows the servers."""

    def endpoints(self) -> Sequence[Endpoint]:
        """Return the servers that there are now. May block, and may raise OSError or ValueError."""
        ...


@runtime_checkable
class WaitingDirectory(Protocol):
    """A directory that is empty until the first server comes by itself."""

    def wait_for_first(self, timeout: float) -> None:
        """Wait for the first server, at most so many seconds. Raises ConnectError, which says what to do."""
        ...


@dataclasses.dataclass(frozen=True)
class FileDirectory:
    """A text file with a URL a line, which may be rewritten at any time; `#` begins a comment.

    It serves where processes of a batch system share a folder, or where a ConfigMap is mounted.
    """

    path: str
    """The file."""

    def endpoints(self) -> list[Endpoint]:
        """Read the file.

        Raises:
            OSError: It cannot be read.
            AddressError: A line is no URL.
        """
        found: list[Endpoint] = []
        for number, line in enumerate(Path(self.path).read_text(encoding="utf-8-sig").splitlines(), start=1):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            try:
                parse_address(text, listed=True)
            except AddressError as error:
                raise AddressError(text, f"{error.reason} (line {number} of {self.path})") from None
            found.append(Endpoint(text))
        return found


@dataclasses.dataclass(frozen=True)
class DnsDirectory:
    """Every address of a host name, such as a headless Service of Kubernetes."""

    url: str
    """`grpc+dns://HOST:PORT` or, with TLS, `grpcs+dns://HOST:PORT`; path and query as for `grpc://`."""
    resolve: Callable[..., Any] = socket.getaddrinfo
    """Looks the name up, with the arguments and results of `socket.getaddrinfo`."""

    def __repr__(self) -> str:
        return f"DnsDirectory({shown_url(self.url)!r})"

    @property
    def server_name(self) -> str | None:
        """With TLS: the name in the certificates, unless `TLS(server_name=…)` is given; None: there is no TLS."""
        parts = urlsplit(self.url)
        return parts.hostname if _DNS[parts.scheme] == "grpcs" else None

    def endpoints(self) -> list[Endpoint]:
        """Look the name up.

        Raises:
            OSError: The name does not resolve.
        """
        parts = urlsplit(self.url)
        found = self.resolve(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        # Each address once, in the resolver's order.
        addresses = dict.fromkeys(str(target[0]) for _, _, _, _, target in found)
        urls = []
        for address in addresses:
            host = f"[{address}]" if ":" in address else address
            urls.append(urlunsplit((_DNS[parts.scheme], f"{host}:{parts.port}", parts.path, parts.query, "")))
        return [Endpoint(url) for url in urls]


def open_file(url: str) -> FileDirectory:
    """Return the directory of a URL `file:///PATH`, or raise AddressError where it is none."""
    path = url.strip().partition("://")[2]
    if not path.startswith("/"):
        raise AddressError(url, "a file of URLs is named by its absolute path: file:///PATH, with three slashes")
    return FileDirectory(unquote(path))


def open_dns(url: str) -> DnsDirectory:
    """Return the directory of a URL of `DNS_SCHEMES`, or raise AddressError where it cannot be read."""
    _, _, rest = url.strip().partition("://")
    parse_address(f"{_DNS[scheme_of(url)]}://{rest}")
    return DnsDirectory(url.strip())


def as_directory(urls: Any) -> Directory | None:
    """Return the directory that `make_vec_remote` was given: an object, `file://…` or `grpc[s]+dns://…`; None: none.

    Raises:
        AddressError: The URL of a directory cannot be read.
    """
    if not isinstance(urls, str):
        return urls if isinstance(urls, Directory) else None
    scheme = scheme_of(urls)
    if scheme == "file":
        return open_file(urls)
    return open_dns(urls) if scheme in DNS_SCHEMES else None


class EndpointWatch:
    """The last list of a directory, read in a thread of its own.

    Args:
        directory: What to read.
        period: Seconds between two readings.
    """

    def __init__(self, directory: Directory, period: float = _PERIOD) -> None:
        self.directory = directory
        self.endpoints: tuple[Endpoint, ...] = ()
        """The endpoints, in the directory's order."""
        self.draining: frozenset[str] = frozenset()
        """The keys of those that take no further worlds."""
        self._period = period
        # So that the first `poll` is due, whatever the clock says.
        self._read_at = -float("inf")
        self._lock = threading.Lock()
        self._reading: threading.Thread | None = None
        self._problem: Exception | None = None
        forget_in_child(self)

    def after_fork(self) -> None:
        """Read by a thread of this process: the one that read is not in it."""
        self._lock, self._reading = threading.Lock(), None

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory, "period": self._period}

    def __setstate__(self, state: dict[str, Any]) -> None:
        EndpointWatch.__init__(self, state["directory"], state["period"])

    @property
    def may_fill(self) -> bool:
        """True if the last reading found no endpoint, or nothing to read: later there may be some."""
        return self._problem is None or isinstance(self._problem, OSError)

    def poll(self, now: float, *, soon: bool = False) -> None:
        """Read the directory if it is due, without waiting for it.

        Args:
            now: Monotonic seconds.
            soon: Whether it is due because something was lost.
        """
        # Each slot that is lost asks for `soon`: of a fleet that is lost, there is a reading in a tenth of the period.
        if now < self._read_at + (self._period / 10 if soon else self._period):
            return
        # The pool's thread and the reading one both change `_reading`.
        with self._lock:
            if self._reading is not None:
                return
            self._read_at = now
            # A name server, or a network's file system, that hangs would hold up every slot otherwise. A daemon,
            # because nothing could end such a call.
            thread = threading.Thread(target=self._read, name="bridge-directory", daemon=True)
            # Kept only once it runs: where the system has no thread left, the next call tries again.
            thread.start()
            self._reading = thread

    def wait(self, now: float, timeout: float) -> tuple[Endpoint, ...]:
        """Read the directory for the first time, and return its endpoints.

        Raises:
            SettingError: It cannot be read, or names no endpoint.
            RemoteTimeoutError: It does not answer within `timeout` seconds.
            ConnectError: No server has dialed in within them.
        """
        # Of a listener nothing comes as long as nobody dials. It says so better than a reading that has no end.
        if isinstance(self.directory, WaitingDirectory):
            self.directory.wait_for_first(timeout)
        self.poll(now, soon=True)
        thread = self._reading
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                raise RemoteTimeoutError(repr(self.directory), f"the directory did not answer within {timeout:g} s")
        # Only the first reading is reported so. Later ones leave what was known, and are logged.
        if self._problem is not None:
            raise SettingError(f"the directory {self.directory!r} cannot be read: {self._problem}") from self._problem
        if not self.endpoints:
            raise SettingError(f"expected a directory with at least one endpoint, got none from {self.directory!r}")
        return self.endpoints

    def _read(self) -> None:
        try:
            found = tuple(self.directory.endpoints())
            for endpoint in found:  # what is none raises here, and not in somebody's step
                parse_address(endpoint.url, listed=True)
            # An empty list changes nothing: it may be of a file that is being written, and no slot could go anywhere by
            # it.
            if found:
                self.endpoints = found
                self.draining = frozenset(endpoint.key for endpoint in found if endpoint.draining)
                self._problem = None
        except Exception as error:  # whatever a user's directory raises: what was known before stays
            if self.endpoints and str(error) != str(self._problem):
                _log.warning(
                    "the directory %r cannot be read, its endpoints stay as they were: %s", self.directory, error
                )
            self._problem = error
        finally:
            with self._lock:
                self._reading = None
