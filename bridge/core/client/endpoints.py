"""The servers that the URLs of a user's call lead to: schemes, and directories of servers that come and go.

A `Scheme` defines what `make_remote` and `make_vec_remote` do with its URLs. The core has the schemes of its own
servers and directories; features and other packages add theirs.

A directory has one method, `endpoints`. It is called in a thread of its own, every few seconds and after each loss, so
it may block. If it raises, or returns an empty list, the last known endpoints stay.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable
from urllib.parse import unquote, urlsplit, urlunsplit

from bridge.core.logs import SafeLog, reason_of
from bridge.core.ownership import forget_in_child
from bridge.core.transport.address import Address, parse_address, scheme_of
from bridge.errors import AddressError, RemoteTimeoutError, SettingError, shown_url

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

    from bridge.core.client.world.world_request import WorldRequest

__all__ = ["DNS_SCHEMES", "Directory", "DnsDirectory", "Endpoint", "EndpointWatch", "FileDirectory", "Kind"]
__all__ += ["ListedEndpoint", "ListedEndpoints", "Scheme"]

_NAME = re.compile(r"[a-z][a-z0-9+.-]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """A URL scheme: what `make_remote` and `make_vec_remote` do with its URLs.

    Another package adds a scheme by an entry point for each of its names, in the group `gymnasium_bridge.schemes`:

        [project.entry-points."gymnasium_bridge.schemes"]
        named = "bridge_named:SCHEME"

    Its functions get URLs with the scheme in lower case and without surrounding spaces, and the keywords of the user's
    call that differ from their defaults: those of `make_remote` and `make_vec_remote`, and the scheme's own. A keyword
    that a function does not accept is a TypeError of the user's call, which names it. They may raise errors of
    `bridge.errors`: AddressError for an invalid URL, SettingError for a keyword, ConnectError if no server answers. A
    URL may contain a token, `?token=…`, which errors and logs must not repeat: AddressError omits it.

    A scheme is used only for URLs in a user's call, never for a URL from a directory, a server, a page or a file:
    nobody else may cause the import of a package.

    Args:
        names: The names before `://`, each in lower case.
        description: A short description of its URLs, for errors and lists: "a slot in a lobby".
        make_env: `make_env(url, **keywords)` returns a `gymnasium.Env`, as `make_remote` does; None: its URLs are not
            for `make_remote`.
        make_vector_env: `make_vector_env(urls, **keywords)` returns a `gymnasium.vector.VectorEnv`, as
            `make_vec_remote` does. `urls` is a list of one or more URLs, all of this scheme: a list that mixes schemes
            is refused before.
            None: `make_directory`, if there is one; else each slot has an environment of `make_env`, all of them behind
            a server in this process. Then `make_env` is called by several threads, with the same keywords as for
            `make_remote`, except `wait_for_server`.
        make_directory: `make_directory(url, **own_keywords)` returns a `bridge.Directory` of dm_env_rpc servers, which
            `make_vec_remote` watches while they come and go. Such a URL is given alone, not in a list. The keywords of
            `make_vec_remote` are for its servers, and `make_directory` gets the scheme's own. If the directory has a
            method `close`, it is called when the environment is closed. Its endpoints may have only URLs of the core's
            schemes.
        keywords: The further keywords of its functions, beyond those of `make_remote` and `make_vec_remote`, each with
            its meaning. Users give keywords of another package's scheme as `scheme_options={…}`.
        blocking: True if `make_vec_remote(…, blocking=True)` accepts its URLs. Then `make_vector_env` must return a
            `bridge.RemoteVectorEnv`, which is wrapped in a `bridge.wrappers.BlockingReset`.
        lanes: True if it supports worlds of many lanes: `make_vector_env` gets the keyword `lanes`, and
            `waits_for_all=True` if each step waits for all slots, so that lanes are as good as worlds;
            `RemoteVectorEnv` takes both. False: `lanes=True` is refused, and neither keyword is passed on.

    Raises:
        SettingError: A name is invalid, or the scheme has no function, or two that exclude each other.
    """

    names: tuple[str, ...]
    description: str
    make_env: Callable[..., gymnasium.Env[Any, Any]] | None = None
    make_vector_env: Callable[..., VectorEnv[Any, Any, Any]] | None = None
    make_directory: Callable[..., Directory] | None = None
    keywords: Mapping[str, str] = dataclasses.field(default_factory=dict)
    blocking: bool = True
    lanes: bool = False

    def __post_init__(self) -> None:
        wrong = [name for name in self.names if not _NAME.fullmatch(name)]
        if isinstance(self.names, str) or not self.names or wrong:
            raise SettingError(
                "expected names=(…,) with what stands before ://, lower-case letters, digits, +, - and ., got "
                f"{self.names!r:.80}"
            )
        if self.make_vector_env is not None and self.make_directory is not None:
            raise SettingError(f"expected make_vector_env or make_directory for {self.names[0]}://, got both")
        if [self.make_env, self.make_vector_env, self.make_directory] == [None] * 3:
            raise SettingError(f"expected make_env, make_vector_env or make_directory for {self.names[0]}://, got none")


__all__ += ["as_directory", "kind_of", "open_dns", "open_file"]

_log = SafeLog(__name__)
_PERIOD = 5.0
_DNS = {"grpc+dns": "grpc", "grpcs+dns": "grpcs"}
DNS_SCHEMES = tuple(_DNS)
"""The schemes for a host name whose addresses are one server each."""


Kind: TypeAlias = tuple[Any, ...]
"""The environment, settings and agent of a URL, on any server."""


def kind_of(address: Address) -> Kind:
    """Return the kind of a URL: the environment of its path, and the settings or the world of its query."""
    return address.env_id, address.settings, address.world


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A server in a directory."""

    url: str
    """The server's URL, as for `make_remote`."""
    name: str = ""
    """A name that stays the same when the URL changes; empty: the URL."""
    draining: bool = False
    """True if the server accepts no more worlds."""
    slots: int | None = None
    """The number of slots that the server can carry; None: unknown."""

    def __repr__(self) -> str:
        return f"Endpoint({shown_url(self.url)!r}, name={self.name!r}, draining={self.draining}, slots={self.slots})"

    @functools.cached_property
    def kind(self) -> Kind:
        """The environment, settings and agent of its URL. Only endpoints of one kind can replace each other."""
        return kind_of(parse_address(self.url, listed=True))

    @functools.cached_property
    def key(self) -> str:
        """The key that distinguishes it from other endpoints."""
        return self.name or self.url


@runtime_checkable
class Directory(Protocol):
    """An object that knows the servers."""

    def endpoints(self) -> Sequence[Endpoint]:
        """Return the current servers. May block, and may raise OSError or ValueError."""
        ...


@runtime_checkable
class WaitingDirectory(Protocol):
    """A directory that is empty until the first server dials in."""

    def wait_for_first(self, timeout: float) -> None:
        """Wait for the first server, for at most `timeout` seconds. Raises ConnectError, which says what to do."""
        ...


@dataclasses.dataclass(frozen=True)
class FileDirectory:
    """A text file with one URL per line, which may be rewritten at any time; `#` begins a comment.

    Useful for processes of a batch system that share a folder, or for a mounted ConfigMap.
    """

    path: str
    """The file."""

    def __str__(self) -> str:
        return f"file://{self.path}"

    def endpoints(self) -> list[Endpoint]:
        """Read the file.

        Raises:
            OSError: The file cannot be read.
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
    """All addresses of a host name, such as a headless Service of Kubernetes."""

    url: str
    """`grpc+dns://HOST:PORT` or, with TLS, `grpcs+dns://HOST:PORT`; path and query as for `grpc://`."""
    resolve: Callable[..., Any] = socket.getaddrinfo
    """Resolves the name, with the arguments and results of `socket.getaddrinfo`."""

    def __repr__(self) -> str:
        return f"DnsDirectory({shown_url(self.url)!r})"

    def __str__(self) -> str:
        return shown_url(self.url)

    @property
    def server_name(self) -> str | None:
        """With TLS: the name in the certificates, unless `TLS(server_name=…)` is given; None: no TLS."""
        parts = urlsplit(self.url)
        return parts.hostname if _DNS[parts.scheme] == "grpcs" else None

    def endpoints(self) -> list[Endpoint]:
        """Resolve the name.

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
    """Return the directory of a URL `file:///PATH`; raise AddressError if the URL is invalid."""
    path = url.strip().partition("://")[2]
    if not path.startswith("/"):
        raise AddressError(url, "a file of URLs is named by its absolute path: file:///PATH, with three slashes")
    return FileDirectory(unquote(path))


def open_dns(url: str) -> DnsDirectory:
    """Return the directory of a URL of `DNS_SCHEMES`; raise AddressError if the URL is invalid."""
    _, _, rest = url.strip().partition("://")
    parse_address(f"{_DNS[scheme_of(url)]}://{rest}")
    return DnsDirectory(url.strip())


def as_directory(urls: Any) -> Directory | None:
    """Return the directory given to `make_vec_remote`: an object, `file://…` or `grpc[s]+dns://…`; None: no directory.

    Raises:
        AddressError: The URL of a directory is invalid.
    """
    if not isinstance(urls, str):
        return urls if isinstance(urls, Directory) else None
    scheme = scheme_of(urls)
    if scheme == "file":
        return open_file(urls)
    return open_dns(urls) if scheme in DNS_SCHEMES else None


class EndpointWatch:
    """The last list of a directory, which is read in a thread of its own.

    Args:
        directory: The directory.
        period: Seconds between two readings.
    """

    pinned = False
    """False: a slot may use any of the endpoints."""

    def __init__(self, directory: Directory, period: float = _PERIOD) -> None:
        self.directory = directory
        self.endpoints: tuple[Endpoint, ...] = ()
        """The endpoints, in the directory's order."""
        self.draining: frozenset[str] = frozenset()
        """The keys of endpoints that accept no more worlds."""
        self._period = period
        # So that the first `poll` is due, whatever the clock says.
        self._read_at = -float("inf")
        self._lock = threading.Lock()
        self._reading: threading.Thread | None = None
        self._problem: Exception | None = None
        forget_in_child(self)

    def after_fork(self) -> None:
        """Start a new reading thread when needed: a forked process does not have the parent's."""
        self._lock, self._reading = threading.Lock(), None

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory, "period": self._period}

    def __setstate__(self, state: dict[str, Any]) -> None:
        EndpointWatch.__init__(self, state["directory"], state["period"])

    @property
    def title(self) -> str:
        """The directory's name, for errors."""
        return str(self.directory)

    @property
    def may_fill(self) -> bool:
        """True if the last reading found no endpoint, or nothing was read: there may be some later."""
        return self._problem is None or isinstance(self._problem, OSError)

    def poll(self, now: float, *, soon: bool = False) -> None:
        """Read the directory if it is due, without waiting for it.

        Args:
            now: Monotonic seconds.
            soon: True if a server was lost, which makes it due earlier.
        """
        # Each lost slot sets `soon`: if a whole fleet is lost, it is read after a tenth of the period.
        if now < self._read_at + (self._period / 10 if soon else self._period):
            return
        # The pool's thread and the reading thread both change `_reading`.
        with self._lock:
            if self._reading is not None:
                return
            self._read_at = now
            # In a thread, because a name server or a network file system that hangs would delay every slot. A daemon,
            # because such a call cannot be ended.
            thread = threading.Thread(target=self._read, name="bridge-directory", daemon=True)
            # Stored only when it runs: if the system has no thread left, the next call tries again.
            thread.start()
            self._reading = thread

    def wait(self, now: float, timeout: float) -> tuple[Endpoint, ...]:
        """Read the directory for the first time, and return its endpoints.

        Raises:
            SettingError: The directory cannot be read, or has no endpoint.
            RemoteTimeoutError: It does not answer within `timeout` seconds.
            ConnectError: No server has dialed in within `timeout`.
        """
        # A listener has no server until one dials in. Its own error is better than a timeout of the reading.
        if isinstance(self.directory, WaitingDirectory):
            self.directory.wait_for_first(timeout)
        self.poll(now, soon=True)
        thread = self._reading
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                raise RemoteTimeoutError(self.title, f"the directory did not answer within {timeout:g} s")
        # Only the first reading is reported in this way. Later ones leave the last endpoints, and are logged.
        if self._problem is not None:
            text = f"the directory {self.title} cannot be read: {self._reason(self._problem)}"
            raise SettingError(text) from self._problem
        if not self.endpoints:
            raise SettingError(f"expected a directory with at least one endpoint, got none from {self.title}")
        return self.endpoints

    def _reason(self, error: Exception) -> str:
        """Return why the directory cannot be read, without the path of its file, which is in the title."""
        path = self.directory.path if isinstance(self.directory, FileDirectory) else ""
        return reason_of(error).removeprefix(f"{path}: ")

    def _read(self) -> None:
        try:
            found = tuple(self.directory.endpoints())
            for endpoint in found:  # an invalid one raises here, not in a user's step
                parse_address(endpoint.url, listed=True)
            # An empty list changes nothing: the file may be being written, and no slot could use the list.
            if found:
                self.endpoints = found
                self.draining = frozenset(endpoint.key for endpoint in found if endpoint.draining)
                self._problem = None
        except Exception as error:  # whatever a user's directory raises: the last endpoints stay
            if self.endpoints and str(error) != str(self._problem):
                _log.warning(
                    "the directory %s cannot be read, its endpoints stay as they were: %s",
                    self.title,
                    self._reason(error),
                )
            self._problem = error
        finally:
            with self._lock:
                self._reading = None


@dataclasses.dataclass(frozen=True)
class ListedEndpoint(Endpoint):
    """A URL of a list, with the world requested there."""

    request: WorldRequest = dataclasses.field(kw_only=True, repr=False)
    """The world, for each slot that is pinned to it."""

    @classmethod
    def of(cls, request: WorldRequest) -> ListedEndpoint:
        """Return the endpoint of a request."""
        url, agent = request.address.url, request.agent
        # Agents of one world have a URL in common, but each joins by itself.
        return cls(url, "" if agent is None else f"{url} as {agent}", request=request)

    @functools.cached_property
    def kind(self) -> Kind:
        """The environment, settings and agent. Only endpoints of one kind can replace each other."""
        # An existing world is on one server: no other endpoint is of its kind.
        return self.request.kind or ("world", self.key)


class ListedEndpoints:
    """The endpoints of a list of URLs, with the interface of `EndpointWatch`.

    Args:
        endpoints: One for each URL.
    """

    title = "the list of URLs"
    """The name of the source, for errors."""
    pinned = True
    """True: each slot belongs to one of the endpoints."""
    draining: frozenset[str] = frozenset()
    """The keys of endpoints that accept no more worlds. A list does not tell."""

    def __init__(self, endpoints: Sequence[ListedEndpoint]) -> None:
        self.endpoints = tuple({endpoint.key: endpoint for endpoint in endpoints}.values())
        """The endpoints, each once, in the order of the list."""

    def poll(self, now: float, *, soon: bool = False) -> None:
        """Do nothing: a list never changes."""
