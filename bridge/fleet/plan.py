"""Decides what a fleet does next: which servers to drain, and how few are enough. No Ray, network or clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from bridge.core.logs import counted
from bridge.errors import shown_url

__all__ = ["FleetStatus", "ServerStatus", "ports_clash", "servers_needed", "servers_to_drain", "too_few"]


_OLD = 5.0
"""Seconds after which a server's figures are marked as old; the supervisor asks once a second."""


@dataclasses.dataclass(frozen=True)
class ServerStatus:
    """The status of one server of a fleet."""

    name: str
    """The name, which stays the same when the server is restarted."""
    state: str
    """`starting` (also when restarting), `serving`, `draining`, or `stopping`."""
    url: str = dataclasses.field(default="", repr=False)
    """The URL, with the token; empty while the server starts."""
    node: str = ""
    """The address of the machine."""
    pid: int = 0
    """The process number on that machine."""
    slots: int = 1
    """The most slots that the server carries."""
    slots_used: int = 0
    """Lanes in use by clients; while the server restarts, the number from before."""
    worlds: int = 0
    """The number of worlds."""
    steps: int = 0
    """Environment steps since the server started; each lane counts."""
    episodes: int = 0
    """Finished episodes since the server started; each lane counts."""
    failures: int = 0
    """Exceptions that environments raised since the server started."""
    checks: int = 0
    """Health checks passed since the server started."""
    restarts: int = 0
    """How often the server came back with another URL."""
    problem: str = ""
    """Why the server is not serving, if known."""
    age: float = 0.0
    """The age of these figures in seconds; 0.0: the server has not reported any."""

    @property
    def active(self) -> bool:
        """True if the server counts towards the wanted number."""
        return self.state in ("starting", "serving")


@dataclasses.dataclass(frozen=True)
class FleetStatus:
    """The status of a fleet; `print` shows it as a table."""

    name: str
    """The fleet's name."""
    wanted: int
    """The wanted number of servers."""
    servers: tuple[ServerStatus, ...]
    """All servers, including those that start, drain or stop."""
    problem: str = ""
    """Why the last server could not start; empty: no server failed to start."""

    @property
    def age(self) -> float:
        """The age of the oldest server report in seconds; 0.0: no server has reported yet."""
        return max((server.age for server in self.servers), default=0.0)

    @property
    def ready(self) -> bool:
        """True if exactly the wanted number of servers exist, and all of them serve."""
        return len(self.servers) == self.wanted and all(server.state == "serving" for server in self.servers)

    @property
    def slots(self) -> int:
        """The slots that all servers can carry, including those that start."""
        return sum(server.slots for server in self.servers if server.active)

    @property
    def slots_used(self) -> int:
        """The slots that clients use."""
        return sum(server.slots_used for server in self.servers)

    def __str__(self) -> str:
        serving = sum(server.state == "serving" for server in self.servers)
        slots = f"{self.slots_used} of {self.slots} slots used"
        lines = [f"fleet {self.name!r}: {serving} of {self.wanted} servers serve, {slots}, {self.age:.1f} s ago"]
        for server in self.servers:
            where = shown_url(server.url) or server.node or "-"
            done = f"{server.slots_used}/{server.slots} slots, {counted(server.steps, 'step')}, "
            done += counted(server.episodes, "episode")
            more = [counted(server.failures, "failure")] if server.failures else []
            more += [counted(server.restarts, "restart")] if server.restarts else []
            more += [f"as of {server.age:.0f} s ago"] if server.age > _OLD else []
            more += [server.problem] if server.problem else []
            lines.append(f"  {server.name}  {server.state:<8}  {where}  {', '.join([done, *more])}")
        if self.problem:
            lines.append(f"  {self.problem}")
        return "\n".join(lines)


def ports_clash(metrics_port: int | None, servers: int, machines: int) -> str:
    """Return why the servers cannot all serve metrics at one port; "" if they can.

    Args:
        metrics_port: The requested port; None or 0: each server has its own.
        servers: The number of servers.
        machines: The number of machines.
    """
    if not metrics_port or servers <= machines:
        return ""
    return (
        f"metrics_port={metrics_port} is one port, and {servers} servers on {machines} machines need several on one of "
        "them: use metrics_port=0, which gives each a port of its own, or start no more servers than machines"
    )


def servers_needed(used: int, lanes: int, slots_per_server: int) -> int:
    """Return the lowest number of servers that carries the clients' worlds.

    Args:
        used: Slots that clients use.
        lanes: Slots of one world; a world cannot be split between servers.
        slots_per_server: The slots that one server carries.
    """
    worlds = -(-used // lanes)
    return -(-worlds // max(1, slots_per_server // lanes))


def too_few(wanted: int, status: FleetStatus, lanes: int, slots_per_server: int) -> str:
    """Return why this number of servers is too low; empty if it is enough."""
    needed = servers_needed(status.slots_used, lanes, slots_per_server)
    if wanted >= needed:
        return ""
    return (
        f"expected at least {needed} servers, since clients have {status.slots_used} slots and a server carries "
        f"{slots_per_server}, got {wanted}; close some environments, or give force=True, with which the servers that "
        "are left carry more"
    )


def servers_to_drain(servers: Iterable[ServerStatus], wanted: int) -> Sequence[str]:
    """Return the names of servers to drain: starting ones, then those with the fewest slots in use, newest first."""
    active = [server for server in servers if server.active]
    order = sorted(
        enumerate(active),
        key=lambda item: (item[1].state == "serving", item[1].slots_used, -item[0]),
    )
    return [server.name for _, server in order[: max(0, len(active) - wanted)]]
