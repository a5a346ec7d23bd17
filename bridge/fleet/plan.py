"""Decides what a fleet does next: which servers are given up, and how few are enough. No Ray, no network, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from bridge.core.logs import counted
from bridge.errors import shown_url

__all__ = ["FleetStatus", "ServerStatus", "ports_clash", "servers_needed", "servers_to_drain", "too_few"]


_OLD = 5.0
"""Seconds after which a server's figures are marked as old; it is asked once a second."""


@dataclasses.dataclass(frozen=True)
class ServerStatus:
    """One server of a fleet."""

    name: str
    """Stays the same when the server is started anew."""
    state: str
    """`starting` (also: anew), `serving`, `draining`, or `stopping`."""
    url: str = dataclasses.field(default="", repr=False)
    """Its URL, with the token; empty while it starts."""
    node: str = ""
    """The address of its machine."""
    pid: int = 0
    """The number of its process there."""
    slots: int = 1
    """The slots that it can carry."""
    slots_used: int = 0
    """Lanes of its worlds that a client is in; those it had, while it starts anew."""
    worlds: int = 0
    """Its worlds."""
    steps: int = 0
    """Steps of its environments since it started, a lane each."""
    episodes: int = 0
    """Episodes that ended since it started, a lane each."""
    failures: int = 0
    """How often an environment raised since it started."""
    checks: int = 0
    """Health checks that it passed since it started."""
    restarts: int = 0
    """How often it was seen to come back at another URL."""
    problem: str = ""
    """Why it is not serving, where that is known."""
    age: float = 0.0
    """Seconds since it said this, when the status was made; 0.0: it has said nothing yet."""

    @property
    def active(self) -> bool:
        """True if it counts as one that is wanted."""
        return self.state in ("starting", "serving")


@dataclasses.dataclass(frozen=True)
class FleetStatus:
    """How a fleet is; `print` it for a table."""

    name: str
    """The fleet's name."""
    wanted: int
    """How many servers there should be."""
    servers: tuple[ServerStatus, ...]
    """Those that there are, with those that start, drain and stop."""
    problem: str = ""
    """Why the last server could not start; empty: none failed to."""

    @property
    def age(self) -> float:
        """Seconds since the servers said this: those of the one that was silent for longest; 0.0: none has yet."""
        return max((server.age for server in self.servers), default=0.0)

    @property
    def ready(self) -> bool:
        """True if as many servers serve as are wanted, and none is left of those that are not."""
        return len(self.servers) == self.wanted and all(server.state == "serving" for server in self.servers)

    @property
    def slots(self) -> int:
        """The slots that its servers can carry, those that start included."""
        return sum(server.slots for server in self.servers if server.active)

    @property
    def slots_used(self) -> int:
        """The slots that clients have."""
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
    """Say why servers cannot all serve their metrics at one port; "": they can.

    Args:
        metrics_port: What was asked for; None or 0: each has another one.
        servers: How many servers.
        machines: On how many machines.
    """
    if not metrics_port or servers <= machines:
        return ""
    return (
        f"metrics_port={metrics_port} is one port, and {servers} servers on {machines} machines need several on one of "
        "them: use metrics_port=0, which gives each a port of its own, or start no more servers than machines"
    )


def servers_needed(used: int, lanes: int, slots_per_server: int) -> int:
    """Return how few servers carry the worlds that clients have.

    Args:
        used: Slots that clients have.
        lanes: Slots of one world, which is on one server.
        slots_per_server: What a server carries.
    """
    worlds = -(-used // lanes)
    return -(-worlds // max(1, slots_per_server // lanes))


def too_few(wanted: int, status: FleetStatus, lanes: int, slots_per_server: int) -> str:
    """Return why so few servers are refused; empty: they are enough."""
    needed = servers_needed(status.slots_used, lanes, slots_per_server)
    if wanted >= needed:
        return ""
    return (
        f"expected at least {needed} servers, since clients have {status.slots_used} slots and a server carries "
        f"{slots_per_server}, got {wanted}; close some environments, or give force=True, with which the servers that "
        "are left carry more"
    )


def servers_to_drain(servers: Iterable[ServerStatus], wanted: int) -> Sequence[str]:
    """Return the names of those to give up: such as start first, then those with the fewest slots, the newest first."""
    active = [server for server in servers if server.active]
    order = sorted(
        enumerate(active),
        key=lambda item: (item[1].state == "serving", item[1].slots_used, -item[0]),
    )
    return [server.name for _, server in order[: max(0, len(active) - wanted)]]
