"""The worlds of one server: made, found, joined and destroyed by name, from any connection."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.properties import ENCODED, NUMBER, TEXT, Property, PropertyTree
from bridge.server.limits import Limits
from bridge.version import __version__
from bridge.worlds.base import Agent, Lock, World

__all__ = ["Registry", "WorldSource"]

DEFAULT_WORLD = ""


class WorldSource(Protocol):
    """Makes the worlds of a server."""

    @property
    def SETTINGS(self) -> Sequence[str]:  # noqa: N802 - a constant of its class
        """The CreateWorld settings that it takes."""

    @property
    def env_ids(self) -> list[str]:
        """The environment ids that a client may name."""

    @property
    def title(self) -> str:
        """What to call it to a person."""

    @property
    def apart(self) -> bool:
        """Whether its worlds are called at the same time, under locks of their own."""

    def make_world(self, name: str, settings: Mapping[str, pb.Tensor], lock: Lock) -> World:
        """Build the world that CreateWorld settings ask for."""


@dataclasses.dataclass
class _Entry:
    """A world and whom it belongs to."""

    world: World
    owner: object | None
    """The connection that created it, as long as it is there."""
    joined_by_owner: bool = False
    idle_since: float | None = None
    """When it was first seen without agents, in monotonic seconds."""


class Registry:
    """All worlds of a server; the hub of its sessions.

    A world goes by DestroyWorld, or with the connection that created and joined it, unless others are in it then. So
    what a dead client leaves behind is gone, and a world that was created for others to join stays.

    Args:
        source: Makes the worlds.
        limits: How many there may be.
        lock: Held around every call of an environment.
        idle_timeout: Seconds after which a world without agents goes, by `reap`; None: never.
        reset_world_timeout: Seconds that a ResetWorld waits for the other agents.
    """

    def __init__(
        self,
        source: WorldSource,
        limits: Limits,
        lock: Lock,
        *,
        idle_timeout: float | None = None,
        reset_world_timeout: float = 60.0,
    ) -> None:
        self._idle_timeout = idle_timeout
        self._reset_world_timeout = reset_world_timeout
        self.unix_path: str | None = None
        """Where this server listens on a Unix socket."""
        self._source = source
        self._limits = limits
        self._environments = lock
        self._guard = threading.Lock()
        self._entries: dict[str, _Entry | None] = {}
        self._default = threading.Lock()
        self._closed = False

    @property
    def apart(self) -> bool:
        """Whether its worlds are called at the same time, so that each connection may wait for its own."""
        return self._source.apart

    @property
    def names(self) -> list[str]:
        """The names of the worlds that there are; the default one only once somebody joined it."""
        with self._guard:
            return [name for name, entry in self._entries.items() if entry is not None]

    @property
    def worlds(self) -> list[World]:
        """The worlds that there are."""
        with self._guard:
            return [entry.world for entry in self._entries.values() if entry is not None]

    def create_world(self, settings: Mapping[str, pb.Tensor], owner: object) -> str:
        """Make a world with a name that nobody else has (D-3)."""
        name = f"world-{secrets.token_hex(8)}"
        with self._guard:
            self._refuse_if_closed()
            count = sum(other != DEFAULT_WORLD for other in self._entries)
            if count >= self._limits.max_worlds:
                raise RequestError(
                    Code.RESOURCE_EXHAUSTED,
                    f"this server has max_worlds={self._limits.max_worlds} worlds already; destroy one first",
                )
            self._entries[name] = None  # holds the place while the environment is built
        try:
            world = self._source.make_world(name, settings, self._environments)
        except BaseException:
            with self._guard:
                del self._entries[name]
            raise
        with self._guard:
            if not self._closed:
                self._entries[name] = _Entry(world, owner)
        if self._closed:  # the server stopped while the environment was built
            _end(world)
            self._refuse_if_closed()
        return name

    def find_world(self, name: str) -> World:
        """Return a world; the default one is made when it is first asked for (D-4)."""
        if name == DEFAULT_WORLD:
            return self._find_default()
        with self._guard:
            entry = self._entries.get(name)
        if entry is None:
            raise self._unknown(name)
        return entry.world

    def _find_default(self) -> World:
        with self._default:
            with self._guard:
                self._refuse_if_closed()
                entry = self._entries.get(DEFAULT_WORLD)
            if entry is not None and not entry.world.alive:
                entry.world.close()
                entry = None
            if entry is None:
                entry = _Entry(self._source.make_world(DEFAULT_WORLD, {}, self._environments), None)
                with self._guard:
                    self._entries[DEFAULT_WORLD] = entry
            return entry.world

    def joined(self, world: World, owner: object) -> None:
        """Note whether a world's creator joined it."""
        with self._guard:
            entry = self._entries.get(world.name)
            if entry is None:
                return
            entry.idle_since = None
            if entry.owner is owner:
                entry.joined_by_owner = True

    def left(self, world: World, owner: object) -> None:
        """Nothing changes: the world goes on without its agent (D-16)."""

    def destroy_world(self, name: str) -> None:
        """End a world; agents that are in it get an error on their next Step (D-17)."""
        with self._guard:
            entry = self._entries.get(name)
            if entry is None:
                raise self._unknown(name)
            del self._entries[name]
        entry.world.resets.close()
        entry.world.close()

    def reset_world(
        self, name: str, settings: Mapping[str, pb.Tensor], agent: Agent | None, gone: Callable[[], bool]
    ) -> None:
        """Begin a new sequence for every agent of a world (D-15)."""
        self.find_world(name).reset(settings, agent, gone, self._reset_world_timeout)

    def wake(self) -> None:
        """Let whoever waits in a world look again."""
        with self._guard:
            worlds = [entry.world for entry in self._entries.values() if entry is not None]
        for world in worlds:
            world.resets.wake()

    def reap(self, now: float) -> list[str]:
        """Destroy the worlds that no agent has been in for `idle_timeout` seconds.

        Args:
            now: Monotonic seconds. A world's time without agents counts from the first call that finds it so.

        Returns:
            The names of those that went.
        """
        if self._idle_timeout is None:
            return []
        idle: list[tuple[str, _Entry]] = []
        with self._guard:
            for name, entry in self._entries.items():
                if entry is None:
                    continue
                if entry.world.agents:
                    entry.idle_since = None
                elif entry.idle_since is None:
                    entry.idle_since = now
                elif now - entry.idle_since >= self._idle_timeout:
                    idle.append((name, entry))
        gone = []
        for name, entry in idle:
            try:
                if not entry.world.retire():
                    continue
            except RequestError:
                pass  # its environment raised in close(), and there is nobody to tell; it is gone all the same
            gone.append(name)
            with self._guard:
                if self._entries.get(name) is entry:
                    del self._entries[name]
        return gone

    def disconnected(self, owner: object) -> None:
        """Destroy the worlds that nobody but this connection used."""
        with self._guard:
            mine = {name: entry for name, entry in self._entries.items() if entry is not None and entry.owner is owner}
            gone = []
            for name, entry in mine.items():
                entry.owner = None
                if entry.joined_by_owner and (not entry.world.agents or not entry.world.alive):
                    gone.append(entry.world)
                    del self._entries[name]
        for world in gone:
            _end(world)

    def drain(self) -> None:
        """Make no more worlds; those that there are go on."""
        self._closed = True

    def close(self) -> None:
        """Destroy every world and make no more."""
        with self._guard:
            self._closed = True
            entries = [entry for entry in self._entries.values() if entry is not None]
            self._entries.clear()
        for entry in entries:
            entry.world.resets.close()
            _end(entry.world)

    def properties(self) -> PropertyTree:
        """Return the tree below `server`."""
        limits = [
            Property(f"server.limits.{name}", NUMBER, name.replace("_", " "), partial(getattr, self._limits, name))
            for name in (field.name for field in dataclasses.fields(self._limits))
        ]
        return PropertyTree(
            [
                Property("server.name", TEXT, "what serves", lambda: "gymnasium-bridge"),
                Property("server.version", TEXT, "the server's version", lambda: __version__),
                Property(
                    "server.environments",
                    ENCODED,
                    "the environment ids that CreateWorld may name",
                    lambda: self._source.env_ids,
                ),
                Property(
                    "server.settings",
                    ENCODED,
                    "the settings that CreateWorld takes",
                    lambda: [*self._source.SETTINGS, "kwargs.NAME"],
                ),
                Property(
                    "server.unix_path",
                    TEXT,
                    "the Unix socket that clients on the same machine may use; empty: there is none",
                    lambda: self.unix_path or "",
                ),
                Property("server.worlds", NUMBER, "the number of worlds now", lambda: len(self.names)),
                *limits,
            ]
        )

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RequestError(Code.UNAVAILABLE, "this server is stopping; connect to another one")

    def _unknown(self, name: str) -> RequestError:
        return RequestError(
            Code.NOT_FOUND,
            f"there is no world {name!r}; create one with CreateWorld, or join the default world, whose name is empty",
        )


def _end(world: World) -> None:
    """Close a world where nobody waits for an answer; one that fails must not keep others open."""
    try:
        world.close()
    except RequestError as error:
        warnings.warn(f"the world {world.name!r} did not close: {error}", RuntimeWarning, stacklevel=2)
