"""The servers of a gateway, and the sessions that connect clients to them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bridge.core.client.endpoints import Directory, DnsDirectory, Endpoint, EndpointWatch
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.logs import SafeLog
from bridge.core.server.event_loop import EventLoop
from bridge.core.server.registry import Registry
from bridge.core.server.session import Session
from bridge.core.transport.address import parse_address
from bridge.core.transport.credentials import ClientCredentials
from bridge.core.worlds.base import World
from bridge.core.worlds.scheduling import Runtime
from bridge.errors import AddressError, Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.version import __version__
from bridge.web.gateway.gateway_session import GatewaySession
from bridge.web.gateway.loop_poller import LoopPoller
from bridge.web.gateway.schemes import FixedServer
from bridge.web.gateway.servers import EnvServer, PublishedServer

__all__ = ["Gateway"]

_log = SafeLog(__name__)
# Seconds for which the first request of a page waits for servers to answer.
_PATIENCE = 2.0


class Gateway:
    """The list of the servers. Acts as a source of worlds that has none of its own, and opens the sessions for calls.

    Args:
        directories: The directories of servers, in order.
        credentials: The credentials for the servers.
        others: Functions that make servers outside the directories.
        max_message_bytes: The largest request or response.
        note: Returns the text that the page shows above the worlds; called whenever a page requests the list of worlds.
    """

    SETTINGS = ("server",)

    def __init__(
        self,
        directories: Sequence[Directory],
        credentials: ClientCredentials,
        others: Sequence[FixedServer],
        max_message_bytes: int,
        note: Callable[[], str] = str,
    ) -> None:
        self._note = note
        self._watches = [EndpointWatch(directory) for directory in directories]
        self._credentials = credentials
        self._others = others
        self._max_message_bytes = max_message_bytes
        self._loop: EventLoop
        self._poller: LoopPoller
        self._fixed: list[PublishedServer] = []
        self._servers: dict[str, tuple[PublishedServer, ...]] = {}
        """Servers by the key of their endpoint; an empty tuple if the endpoint's URL cannot be read."""

    def read_directories(self, now: float, timeout: float) -> None:
        """Read the directories for the first time; raise like `EndpointWatch.wait`.

        Args:
            now: Monotonic seconds.
            timeout: Seconds for each directory.
        """
        for watch in self._watches:
            for endpoint in watch.wait(now, timeout):
                parse_address(endpoint.url)

    # Calls

    def attach(self, loop: EventLoop, runtime: Runtime) -> None:
        """Use this event loop from now on."""
        self._loop = loop
        self._poller = LoopPoller(loop)
        self._fixed = [make(runtime) for make in self._others]
        self._follow()

    def open(self, hub: Registry, version: str, may_act: bool) -> GatewaySession:
        """Return the session of a call."""
        own = Session(hub, version, may_act=may_act)
        return GatewaySession(self, own, version, may_act, shared_control=hub.shared_control)

    @property
    def servers(self) -> list[PublishedServer]:
        """The present servers."""
        return [*(server for found in self._servers.values() for server in found), *self._fixed]

    def _follow(self) -> None:
        """Add and remove servers as in the directories. Calls to a removed server continue."""
        now, found = self._loop.scheduler.now(), dict[str, tuple[Directory, Endpoint]]()
        for watch in self._watches:
            watch.poll(now)
            # By key: a server in two directories is shown once.
            found.update({endpoint.key: (watch.directory, endpoint) for endpoint in watch.endpoints})
        for key in [key for key in self._servers if key not in found]:
            # This ends only the gateway's own requests to the server.
            for server in self._servers.pop(key):
                server.close()
        for key, (directory, endpoint) in found.items():
            if key not in self._servers:
                self._servers[key] = self._make(directory, endpoint)

    def _make(self, directory: Directory, endpoint: Endpoint) -> tuple[PublishedServer, ...]:
        credentials = self._credentials
        if isinstance(directory, DnsDirectory) and credentials.tls_server_name is None:
            # A DNS directory returns addresses, but the servers' certificates contain the directory's host name.
            credentials = dataclasses.replace(credentials, tls_server_name=directory.server_name)
        try:
            request = WorldRequest.of(endpoint.url, credentials=credentials)
        except (AddressError, ValueError) as error:
            _log.warning("a server of %r is left out: %s", directory, error)
            # Stored as an empty tuple, so that the warning is logged once and not at each update.
            return ()
        name = endpoint.name or request.address.target
        taken = {server.name for server in self.servers}
        number = 2
        while name in taken:  # the same server twice, with different settings
            name, number = f"{endpoint.name or request.address.target} ({number})", number + 1
        return (EnvServer(name, request, self._poller, self._loop.scheduler, self._max_message_bytes),)

    # Called by sessions

    def find(self, name: str) -> tuple[PublishedServer, str]:
        """Return the server whose name is a prefix of a world's name, and the world's name on that server.

        Raises:
            RequestError: NOT_FOUND: no such server.
        """
        self._follow()  # updates the list even if no page is open, which would do so regularly
        fitting = [server for server in self.servers if name.startswith(f"{server.name}/")]
        if fitting:
            # Names of servers may contain slashes, as those of lobbies do: the longest match wins.
            server = max(fitting, key=lambda each: len(each.name))
            return server, name[len(server.name) + 1 :]
        if not name and len(self.servers) == 1:
            return self.servers[0], ""
        known = ", ".join(f"{server.name}/" for server in self.servers) or "none now"
        text = (
            f"there is no world {name!r}; names begin with that of a server: {known}; to have a world made, give the "
            "CreateWorld setting server (in a URL: ?server=NAME)"
        )
        raise RequestError(Code.NOT_FOUND, text)

    def choose(self, name: str | None) -> PublishedServer:
        """Return the server that should make a world.

        Raises:
            RequestError: NOT_FOUND: no server has this name; INVALID_ARGUMENT: no name is given, and there are several
                servers.
        """
        self._follow()
        servers = self.servers
        if name is None and len(servers) == 1:
            return servers[0]
        known = ", ".join(server.name for server in servers) or "none now"
        if name is None:
            text = f"expected the CreateWorld setting server, one of {known}"
            raise RequestError(Code.INVALID_ARGUMENT, text)
        found = next((server for server in servers if server.name == name), None)
        if found is None:
            raise RequestError(Code.NOT_FOUND, f"there is no server {name!r} behind this gateway; there are {known}")
        return found

    async def overview(self) -> str:
        """Return all worlds of all servers as JSON; wait briefly for servers that have not answered yet."""
        self._follow()
        servers = self.servers
        for server in servers:
            server.look(self._loop.scheduler.now())

        def give_up() -> None:
            for server in servers:
                server.settled.set_result(None)

        timer = self._loop.scheduler.call_later(_PATIENCE, give_up)
        for server in servers:
            # Sequential waits suffice: all requests were sent before, and `give_up` ends all of them.
            await server.settled
        timer.cancel()
        worlds = [
            {**world, "name": f"{server.name}/{world.get('name', '')}", "server": server.name}
            for server in servers
            for world in server.worlds()
        ]
        return json.dumps(
            {
                "version": __version__,
                "title": self.title,
                "note": self._note(),
                "realtime": False,
                "fps": None,
                "worlds": worlds,
                "servers": [server.describe() for server in servers],
            }
        )

    # Implements `bridge.core.server.registry.WorldSource`

    @property
    def env_ids(self) -> list[str]:
        """Empty: servers are chosen by name."""
        return []

    @property
    def title(self) -> str:
        """The name for people."""
        count = len(self.servers)
        return f"a gateway to {count} server{'' if count == 1 else 's'}"

    fps: float | None = None
    traits: Mapping[str, Any] = MappingProxyType({})

    async def make_world(self, name: str, settings: Mapping[str, pb.Tensor], runtime: Runtime) -> World:
        """Raise RequestError: worlds are made by other servers."""
        raise RequestError(Code.NOT_FOUND, "a gateway has no worlds of its own")

    async def prepare(self, runtime: Runtime) -> None:
        """Do nothing: no world is made in advance."""

    async def close(self) -> None:
        """Stop the requests to the servers."""
        for server in self.servers:
            server.close()
