"""What the URLs of a user's call lead to: schemes, and directories of servers that come and go.

A `Scheme` says what `make_remote` and `make_vec_remote` do with URLs of it, whoever has it. The core has those of its
own servers and directories; features and other packages add theirs.

A directory has one method, `endpoints`. It is read in a thread of its own, every few seconds and after each loss, so
it may block. What it raises, or a list without an endpoint, leaves what was known before.
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

    Another package adds one by an entry point for each of its names, in the group `gymnasium_bridge.schemes`:

        [project.entry-points."gymnasium_bridge.schemes"]
        named = "bridge_named:SCHEME"

    Its functions get URLs with the scheme in lower case and no spaces around, and the keywords of the user's call that
    differ from their defaults: those of `make_remote` and `make_vec_remote`, and its own ones. A keyword that a
    function does not take is a TypeError of the user's call, which names it. They may raise errors of `bridge.errors`:
    AddressError for a URL that cannot be read, SettingError for a keyword, ConnectError where nobody answers. A URL may
    hold a token, `?token=…`, which errors and logs must not repeat: AddressError leaves it out.

    A scheme is used for URLs that a user's call names, and never for one that a directory, a server, a page or a file
    gives: nobody else can have a package imported.

    Args:
        names: What stands before `://`, each in lower case.
        description: What its URLs are, in a few words, for errors and lists: "a slot in a lobby".
        make_env: `make_env(url, **keywords)` returns what `make_remote` does, a `gymnasium.Env`; None: its URLs are not
            for `make_remote`.
        make_vector_env: `make_vector_env(urls, **keywords)` returns what `make_vec_remote` does, a
            `gymnasium.vector.VectorEnv`. `urls` is a list of one URL or more, all of this scheme: one that is mixed
            with URLs of other schemes is refused before. None: `make_directory`, if there is one; else each slot has an
            environment of `make_env`, all of them behind a server in this process. Then `make_env` is called by several
            threads, and gets the keywords that it does for `make_remote`, but for `wait_for_server`.
        make_directory: `make_directory(url, **own_keywords)` returns a `bridge.Directory` of servers of dm_env_rpc,
            which `make_vec_remote` watches while they come and go; such a URL is given alone, not in a list. The
            keywords of `make_vec_remote` are for its servers, and it gets its own ones. If it has a method `close`,
            that is called once the environment is closed. Its endpoints have URLs of the core's schemes alone.
        keywords: The keywords beyond those of `make_remote` and `make_vec_remote` that its functions take, each with
            what it means. Users give those of another package as `scheme_options={…}`.
        blocking: Whether `make_vec_remote(…, blocking=True)` takes its URLs. For that, `make_vector_env` has to return
            a `bridge.RemoteVectorEnv`, around which there is a `bridge.wrappers.BlockingReset` then.
        lanes: Whether it can have worlds of many lanes. True: `make_vector_env` gets the keyword `lanes`, and
            `waits_for_all=True` where each step waits for every slot, so that lanes are as good as worlds;
            `RemoteVectorEnv` takes both. False: `lanes=True` is refused, and neither is handed on.

    Raises:
        SettingError: A name is none, or it makes nothing.
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

    @functools.cached_property
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

    def __str__(self) -> str:
        return f"file://{self.path}"

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

    def __str__(self) -> str:
        return shown_url(self.url)

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

    pinned = False
    """False: a slot may be at any of the endpoints."""

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
    def title(self) -> str:
        """The directory, for errors."""
        return str(self.directory)

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
                raise RemoteTimeoutError(self.title, f"the directory did not answer within {timeout:g} s")
        # Only the first reading is reported so. Later ones leave what was known, and are logged.
        if self._problem is not None:
            text = f"the directory {self.title} cannot be read: {self._reason(self._problem)}"
            raise SettingError(text) from self._problem
        if not self.endpoints:
            raise SettingError(f"expected a directory with at least one endpoint, got none from {self.title}")
        return self.endpoints

    def _reason(self, error: Exception) -> str:
        """Return why the directory cannot be read; the path of its file is in the title."""
        path = self.directory.path if isinstance(self.directory, FileDirectory) else ""
        return reason_of(error).removeprefix(f"{path}: ")

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
    """A URL of a list, with what is asked for there."""

    request: WorldRequest = dataclasses.field(kw_only=True, repr=False)
    """The world, for each slot that is pinned to it."""

    @classmethod
    def of(cls, request: WorldRequest) -> ListedEndpoint:
        """Return the endpoint of a request."""
        url, agent = request.address.url, request.agent
        # Agents of one world have a URL in common, and each joins it by itself.
        return cls(url, "" if agent is None else f"{url} as {agent}", request=request)

    @functools.cached_property
    def kind(self) -> Kind:
        """The environment, settings and agent; only endpoints of one kind replace each other."""
        # A world that exists already is in one place: nothing else is of its kind.
        return self.request.kind or ("world", self.key)


class ListedEndpoints:
    """The endpoints of a list of URLs, as `EndpointWatch` has those of a directory.

    Args:
        endpoints: One for each URL.
    """

    title = "the list of URLs"
    """What has them, for errors."""
    pinned = True
    """True: each slot belongs to one of them."""
    draining: frozenset[str] = frozenset()
    """The keys of those that take no further worlds: a list does not say."""

    def __init__(self, endpoints: Sequence[ListedEndpoint]) -> None:
        self.endpoints = tuple({endpoint.key: endpoint for endpoint in endpoints}.values())
        """The endpoints, each once, in the order of the list."""

    def poll(self, now: float, *, soon: bool = False) -> None:
        """Do nothing: a list never changes."""
