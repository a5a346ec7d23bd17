"""The rows of `gymnasium-bridge top`: the status of servers, polled repeatedly, and the rates between two polls."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from bridge.core.client.endpoints import Directory, DnsDirectory, Endpoint, as_directory
from bridge.core.client.world.inspector import Inspector
from bridge.core.encoding.properties import read_encoded
from bridge.core.extras import needed
from bridge.core.logs import reason_of
from bridge.core.transport.address import parse_address
from bridge.core.transport.credentials import ClientCredentials
from bridge.errors import (
    BridgeError,
    Code,
    ConnectError,
    RefusedError,
    RemoteError,
    RemoteTimeoutError,
    SettingError,
    UsageError,
    shown_url,
)
from bridge.fleet.health import NOT_SERVING, check_health

__all__ = ["SERVES", "Fixed", "ServerRow", "Snapshot", "Top", "find_directory"]

SERVES = ("serving", "full")
"""The states in which a server serves its present clients."""
_AT_ONCE = 16
_HISTORY = 40
_RAY = "ray://"


@dataclasses.dataclass(frozen=True)
class ServerRow:
    """The status of one server at one time."""

    name: str
    """The name in the directory; the URL if it has none there."""
    url: str
    """The URL, without a token."""
    state: str
    """`serving`, `full` (it accepts no further client or world), `draining`, `unreachable`, `silent` (no answer in
    time), or `refused`."""
    slots: int | None = None
    """The slots that the server can carry; None: unknown."""
    slots_used: int | None = None
    """Lanes in use by clients. In this and all counts below, None means that the server has not reported it."""
    worlds: int | None = None
    """The number of worlds."""
    connections: int | None = None
    """Open connections, including that of this program."""
    steps: int | None = None
    """Environment steps since the server started; each lane counts."""
    steps_per_second: float | None = None
    """Steps per second since the last poll; None: there is no earlier poll to compare with."""
    episodes: int | None = None
    """Finished episodes since the server started; each lane counts."""
    failures: int | None = None
    """Exceptions that environments raised since the server started."""
    uptime: float | None = None
    """Seconds since the server started."""
    problem: str = ""
    """Why the server's status is unknown."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The status of all servers at one time."""

    time: float
    """Seconds since 1970."""
    target: str
    """The URL or directory of the servers, without a token."""
    servers: tuple[ServerRow, ...]
    """The servers, in the directory's order."""
    problem: str = ""
    """Why the directory cannot be read; the servers it named before are shown."""
    history: tuple[float, ...] = ()
    """Steps per second of all servers together, the newest last."""

    def total(self) -> dict[str, Any]:
        """Return the sums over all servers that have reported."""
        rates = [row.steps_per_second for row in self.servers if row.steps_per_second is not None]
        serving = [row for row in self.servers if row.state in SERVES]
        slots = [row.slots for row in serving]
        sums = {
            name: sum(getattr(row, name) or 0 for row in self.servers)
            for name in ("slots_used", "worlds", "connections", "steps", "episodes", "failures")
        }
        return {
            "servers": len(self.servers),
            "serving": len(serving),
            "draining": sum(row.state == "draining" for row in self.servers),
            "slots": None if None in slots else sum(number for number in slots if number is not None),
            **sums,
            "steps_per_second": sum(rates) if rates else None,
        }

    def as_json(self) -> dict[str, Any]:
        """Return an object that can be written as JSON."""
        servers = [dataclasses.asdict(row) for row in self.servers]
        return {
            "time": self.time,
            "target": self.target,
            "problem": self.problem,
            "servers": servers,
            "total": self.total(),
        }


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A directory with a fixed list of URLs."""

    urls: tuple[str, ...]
    """The URL of each server."""

    def endpoints(self) -> list[Endpoint]:
        """Return the servers."""
        return [Endpoint(url) for url in self.urls]


def find_directory(targets: Sequence[str]) -> Directory:
    """Return the directory that a command line names: URLs of servers, or one directory.

    Args:
        targets: URLs, or one of `file:///PATH`, `grpc+dns://HOST:PORT`, `grpcs+dns://HOST:PORT` and `ray://FLEET`.

    Raises:
        AddressError: A target cannot be read.
        SettingError: A directory is not the only target, or the fleet does not exist.
    """
    found = [_find(target) for target in targets]
    directories = [each for each in found if each is not None]
    if not directories:
        return Fixed(tuple(targets))
    if len(targets) > 1:
        raise SettingError(f"expected several URLs of servers, or one directory alone, got {', '.join(targets)}")
    return directories[0]


def _find(target: str) -> Directory | None:
    if target.startswith(_RAY):
        with needed(f"{target} is a fleet on Ray, which needs the package ray", "ray"):
            from bridge.fleet.ray import attach
        return attach(target[len(_RAY) :])
    directory = as_directory(target)
    if directory is None:
        parse_address(target)
    return directory


class Top:
    """Polls all servers of a directory.

    Args:
        directory: Lists the servers; read at each poll.
        target: The name to display.
        credentials: The credentials for the servers.
        timeout: Seconds to wait for a server's answer.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        directory: Directory,
        target: str,
        credentials: ClientCredentials | None = None,
        timeout: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._target = " ".join(shown_url(word) for word in target.split())
        self._credentials = ClientCredentials.of() if credentials is None else credentials
        # The URLs contain addresses, but certificates contain the name that was looked up.
        name = directory.server_name if isinstance(directory, DnsDirectory) else None
        if name is not None and self._credentials.tls_server_name is None:
            self._credentials = dataclasses.replace(self._credentials, tls_server_name=name)
        self._timeout = timeout
        self._clock = clock
        self._asking = False
        self._endpoints: Sequence[Endpoint] = ()
        self._inspectors: dict[str, Inspector] = {}
        self._before: dict[str, tuple[float, dict[str, Any]]] = {}
        self._history: deque[float] = deque(maxlen=_HISTORY)
        self._draining: dict[str, ServerRow] = {}
        """The last status of servers that drain."""

    def look(self) -> Snapshot:
        """Poll every server."""
        problem = ""
        try:
            # A URL that is listed twice is one server: two threads must not use its one connection.
            self._endpoints = tuple({endpoint.url: endpoint for endpoint in self._directory.endpoints()}.values())
        except (BridgeError, OSError, ValueError) as error:
            problem = reason_of(error)
            if not self._endpoints and not isinstance(error, BridgeError):
                raise ConnectError(self._target, f"the directory cannot be read: {problem}") from error
            if not self._endpoints:
                raise
        known = {endpoint.url for endpoint in self._endpoints}
        # Servers that have left the directory: our connections would keep them from ending.
        for url in set(self._inspectors) - known:
            self._forget(url)
        self._draining = {url: row for url, row in self._draining.items() if url in known}
        rows = self._rows(self._endpoints)
        rates = [row.steps_per_second for row in rows if row.steps_per_second is not None]
        if rates:
            self._history.append(sum(rates))
        return Snapshot(time.time(), self._target, rows, problem, tuple(self._history))

    def _rows(self, endpoints: Sequence[Endpoint]) -> tuple[ServerRow, ...]:
        """Poll several servers at a time, in daemon threads, so that Ctrl-C need not wait for them."""
        found: dict[int, ServerRow | BaseException] = {}
        waiting = iter(enumerate(endpoints))  # each thread takes its next server from here

        def ask() -> None:
            for index, endpoint in waiting:
                try:
                    found[index] = self._row(endpoint)
                except BaseException as error:
                    found[index] = error

        threads = [threading.Thread(target=ask, name="bridge-top", daemon=True) for _ in endpoints[:_AT_ONCE]]
        self._asking = True
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(1.0)  # a signal just before a wait without a timeout would not be noticed
        self._asking = False
        rows = [found[index] for index in range(len(endpoints))]
        for row in rows:
            if isinstance(row, BaseException):
                raise row
        return tuple(row for row in rows if isinstance(row, ServerRow))

    def _row(self, endpoint: Endpoint) -> ServerRow:
        """Poll one server; runs in a thread."""
        url = shown_url(endpoint.url)
        name = endpoint.name or url
        try:
            inspector = self._inspectors.get(endpoint.url)
            if inspector is None:
                inspector = self._inspectors[endpoint.url] = Inspector(endpoint.url, self._timeout, self._credentials)
            status = inspector.read_property("server.status")
        except UsageError:
            raise
        except RemoteError as error:
            # Make a new connection at the next poll: a late answer on this one would belong to an older request.
            self._forget(endpoint.url)
            state = _state(error)
            if state != "full" and self._drains(endpoint.url):
                return self._draining.get(endpoint.url, ServerRow(name, url, "draining", endpoint.slots))
            return ServerRow(name, url, state, endpoint.slots, problem=" ".join(_explain(error).split()))
        # A new server may serve at the URL of a drained one.
        self._draining.pop(endpoint.url, None)
        try:
            return self._read(endpoint, name, url, read_encoded(status))
        except Exception as error:  # any error of a foreign server's answer: the other servers are still shown
            problem = f"its server.status cannot be read: {error!r:.200}"
            return ServerRow(name, url, "refused", endpoint.slots, problem=problem)

    def _read(self, endpoint: Endpoint, name: str, url: str, said: dict[str, Any]) -> ServerRow:
        """Return the row of a server from its report; raise any exception if the report makes no sense."""
        now = self._clock()
        rate = self._rate(endpoint.url, now, said)
        state = "full" if said.get("full") else "serving"  # older servers do not report it
        if said["draining"] or endpoint.draining:
            state = "draining"
        counts: dict[str, Any] = {
            each: int(said[each]) for each in ("worlds", "connections", "steps", "episodes", "failures")
        }
        row = ServerRow(
            name=name,
            url=url,
            state=state,
            slots=endpoint.slots,
            slots_used=int(said["slots"]),
            steps_per_second=rate,
            **counts,
            uptime=int(said["uptime"] * 1000) / 1000,  # raises if it is infinite or NaN
        )
        # A draining server ends when its clients have left, and this connection counts as one. The next poll's
        # connection does not: a draining server admits it for properties only.
        if said["draining"]:
            self._leave(endpoint.url)
            self._draining[endpoint.url] = dataclasses.replace(row, steps_per_second=None)
        return row

    def _drains(self, url: str) -> bool:
        """Return True if a server that refuses connections is draining."""
        address = dataclasses.replace(parse_address(url), credentials=self._credentials)
        try:
            return check_health(address, self._timeout, verify=False) == NOT_SERVING
        except RefusedError:  # it has no health service: use its last report
            return url in self._draining
        except RemoteError:
            return False

    def _rate(self, url: str, now: float, said: dict[str, Any]) -> float | None:
        """Return the steps per second since the last poll."""
        before, self._before[url] = self._before.get(url), (now, said)
        if before is None or said["uptime"] < before[1]["uptime"] or now <= before[0]:
            return None  # new or restarted
        return max(0.0, float(said["steps"] - before[1]["steps"]) / (now - before[0]))

    def _forget(self, url: str) -> None:
        self._before.pop(url, None)
        self._leave(url)

    def _leave(self, url: str) -> None:
        inspector = self._inspectors.pop(url, None)
        if inspector is not None:
            with contextlib.suppress(RemoteError):
                inspector.close()

    def close(self) -> None:
        """Close the connections."""
        if self._asking:  # interrupted: threads still use the connections
            return
        for url in list(self._inspectors):
            self._forget(url)

    def __enter__(self) -> Top:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _state(error: RemoteError) -> str:
    if isinstance(error, RemoteTimeoutError):
        return "silent"
    if isinstance(error, RefusedError) and error.code == Code.RESOURCE_EXHAUSTED:
        return "full"
    return "refused" if isinstance(error, RefusedError) else "unreachable"


def _explain(error: RemoteError) -> str:
    if isinstance(error, RefusedError) and error.code in (Code.NOT_FOUND, Code.UNIMPLEMENTED):
        return "it has no property server.status: another server than Gymnasium Bridge's, or an older one"
    # The row names the server already, so the same problem of two servers is the same text.
    return str(error).removeprefix(error.url).removeprefix(":").lstrip()
