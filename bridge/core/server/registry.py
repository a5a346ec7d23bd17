"""The worlds of one server: made, found, joined and destroyed by name, from any connection."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from bridge.core.encoding.properties import ENCODED, NUMBER, TEXT, Property, PropertyTree
from bridge.core.logs import SafeLog
from bridge.core.server.limits import CoreLimits
from bridge.core.server.messages import ServedMessages
from bridge.core.worlds.base import Agent, World
from bridge.core.worlds.messages import SessionMessage
from bridge.core.worlds.observers import Listener, ObservedEnv, Observer, describe_fault
from bridge.core.worlds.resets import ResetOrder
from bridge.core.worlds.scheduling import PendingResult, Runtime
from bridge.core.worlds.settings import Settings
from bridge.core.worlds.world import env_world
from bridge.errors import Code, RequestError
from bridge.version import __version__

__all__ = ["Overview", "Registry", "WorldSource", "WorldUser"]

T = TypeVar("T")
_log = SafeLog(__name__)
DEFAULT_WORLD = ""

_MOST_LISTED = 200
"""Environments that the overview names."""
_UNKNOWN: Mapping[str, Any] = {"viewers": 0, "returns": {}, "fps": None, "lanes": None, "begun": True}
"""What the overview has of every world, if neither the world nor an observer has more."""


@dataclasses.dataclass(frozen=True)
class Overview:
    """What the overview of a server shows, as JSON, to every client that asks for it."""

    lists_worlds: bool = False
    """True if clients may see the worlds that others made, and who is in them; else the default world alone."""
    server: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What it has of a server whose source of worlds says nothing else in its `traits`."""
    world: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What it has of a world that says nothing else by `describe`."""


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
        """Its name, as a person reads it."""

    @property
    def fps(self) -> float | None:
        """Frames a second of its worlds; None: they are in lock-step."""

    @property
    def traits(self) -> Mapping[str, Any]:
        """What is true of all its worlds, for the overview, as JSON has it."""

    async def make_world(self, name: str, settings: Settings, runtime: Runtime) -> World:
        """Build the world that CreateWorld settings ask for."""

    async def prepare(self, runtime: Runtime) -> object:
        """Make the environment of the first world ahead, and return it."""

    async def close(self) -> None:
        """Close what was made ahead, where no world has taken it."""


class WorldUser(Protocol):
    """A client's session, as the registry knows it: who is in a world, and who has made it."""

    client_key: str
    """By which a client's sessions are known to be its own; empty: it has not said one."""
    connection: object
    """What carries the session."""

    @property
    def plays(self) -> bool:
        """True if it takes part in a world, and does not only watch."""

    def end_placed(self) -> None:
        """End its sequence: the environment was put into another situation, and its next Step begins one there."""


@dataclasses.dataclass
class _Entry:
    """A world and whom it belongs to."""

    world: World
    owner: WorldUser | None
    """The connection that created it, as long as it is there."""
    goes_with_owner: bool = False
    """True if its creator joined it, or made it for nobody else."""
    idle_since: float | None = None
    """When it was first seen without agents, in monotonic seconds."""
    abandoned: bool = False
    """True if its creator is gone, who alone knew its name, unless others were told of it."""


_OVERVIEW = Overview()


class Registry:
    """All worlds of a server; the hub of its sessions.

    A world goes by DestroyWorld, or with the connection that created and joined it, unless others are in it then. So
    what a dead client leaves behind is gone, and a world that was created for others to join stays for
    `abandoned_timeout`. Clients of this package create worlds for themselves alone: those go with them joined or not.

    All methods are called by the thread that runs the event loop, apart from `names` and `drain`, which any may call.

    Args:
        source: Makes the worlds.
        limits: How many there may be, `idle_timeout`, `abandoned_timeout` and `reset_world_timeout`.
        runtime: Runs the calls of environments, and what waits.
        unix_path: Where this server listens on a Unix socket; None: nowhere.
        overview: What clients see of all worlds.
        shared_control: Whether also who watches, or shares a world, may call methods and set attributes of
            environments.
        observers: Are told of the worlds, and let agents in; the first is asked first.
        messages: What else is served in a session.
    """

    def __init__(
        self,
        source: WorldSource,
        limits: CoreLimits,
        runtime: Runtime,
        *,
        unix_path: str | None = None,
        overview: Overview = _OVERVIEW,
        shared_control: bool = False,
        observers: Sequence[Observer] = (),
        messages: ServedMessages | Sequence[SessionMessage] = (),
    ) -> None:
        self._observers = observers
        if not isinstance(messages, ServedMessages):
            messages = ServedMessages(messages, runtime.scheduler)
        self.messages = messages
        """The messages of features, and of other packages."""
        self._overview = overview
        self.shared_control = shared_control
        """True if also who watches, or shares a world, may change environments by attributes and methods."""
        self._inside: dict[World, list[WorldUser]] = {}
        """The sessions that are in each world."""
        self._unix_path = unix_path
        self._source = source
        self._limits = limits
        self._runtime = runtime
        self._entries: dict[str, _Entry | None] = {}
        self._default: PendingResult[None] | None = None
        """Done once the default world is made, or could not be."""
        self._unfinished: set[PendingResult[None]] = set()
        """The worlds that are being made or closed."""
        self._closed = False
        self._began = time.monotonic()
        self._past_steps = self._past_episodes = 0
        """Of worlds that went."""
        self.note_failure: Callable[[str, str], None] = lambda name, message: None
        """Logs what an environment raised where no request is refused for it: the world's name, and the message."""
        self.counted: Callable[[], dict[str, float]] = dict
        """Counts what the other parts of the server do, for `status`."""
        self.freed: Callable[[], None] = lambda: None
        """Called once a world is closed, whose memory may have been much."""

    @property
    def names(self) -> list[str]:
        """The names of the worlds that there are; the default one only once somebody joined it."""
        # A copy, for other threads ask while the event loop adds and removes worlds.
        return [name for name, entry in list(self._entries.items()) if entry is not None]

    @property
    def worlds(self) -> list[World]:
        """The worlds that there are."""
        return [entry.world for entry in list(self._entries.values()) if entry is not None]

    def status(self) -> dict[str, Any]:
        """Return what the server does, as the property `server.status` says it. May be called by any thread."""
        worlds = self.worlds
        found = [(world, world.counts()) for world in worlds]
        return {
            "uptime": time.monotonic() - self._began,
            "draining": self._closed,
            "worlds": len(found),
            "viewers": 0,
            "slots": sum(counts.lanes for world, counts in found if world.agents),
            "steps": self._past_steps + sum(counts.steps for _, counts in found),
            "episodes": self._past_episodes + sum(counts.episodes for _, counts in found),
            **self.counted(),
            **self._counts_of_observers(worlds),
        }

    def _counts_of_observers(self, worlds: Sequence[World]) -> Mapping[str, float]:
        nothing: Mapping[str, float] = {}
        found = [self._ask(observer, "counts", worlds, otherwise=nothing) for observer in self._observers]
        return {name: value for counts in found for name, value in counts.items()}

    def _retire(self, world: World) -> None:
        """Keep the counts of a world that goes."""
        counts = world.counts()
        self._past_steps += counts.steps
        self._past_episodes += counts.episodes

    @property
    def has_room(self) -> bool:
        """True if a further client may have a world of its own, or be the first in the default one."""
        # With `max_worlds=0` all clients join the default world, whose own agents are the bound.
        return not self._limits.max_worlds or self._used < self._limits.max_worlds

    @property
    def _used(self) -> int:
        """How many worlds are in use: all that clients made, and the default one while somebody plays in it."""
        default = self._entries.get(DEFAULT_WORLD)
        made = len(self._entries) - (default is not None)
        return made + (default is not None and default.world.has_players)

    def _refuse_another(self) -> RequestError:
        return RequestError(
            Code.RESOURCE_EXHAUSTED,
            f"this server has max_worlds={self._limits.max_worlds} worlds in use, and serves no further client: close "
            "an environment of yours, wait until another client leaves, start the server with a larger max_worlds, or "
            "use another server",
        )

    async def create_world(self, settings: Settings, owner: WorldUser, *, for_others: bool = True) -> str:
        """Make a world with a name that nobody else has (D-3).

        Args:
            settings: Of CreateWorld.
            owner: The connection that asks.
            for_others: Whether it stays for others to join where its owner goes without having joined it.
        """
        self.check_open()
        if not self._limits.max_worlds:
            text = (
                "this server has its default world alone (max_worlds=0): join that, with `?world=` in the URL; "
                "a server with a larger max_worlds makes others"
            )
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)
        if not self.has_room:
            raise self._refuse_another()
        # Not a number: who knows the name of a world can join and destroy it.
        name = f"world-{secrets.token_hex(8)}"
        self._entries[name] = None  # holds the place while the environment is built
        try:
            with self._awaited():
                world = await self._make_world(name, settings)
        except BaseException:
            self._entries.pop(name, None)
            raise
        self._entries[name] = _Entry(world, owner, goes_with_owner=not for_others)
        # Nobody has joined it yet: one that `lingers` waits from here on.
        self._linger(world)
        return name

    @contextlib.contextmanager
    def _awaited(self) -> Iterator[PendingResult[None]]:
        """Have `close` wait for what is done within: an environment that is being made is to be closed, too."""
        pending: PendingResult[None] = PendingResult()
        self._unfinished.add(pending)
        try:
            yield pending
        finally:
            self._unfinished.discard(pending)
            pending.set_result(None)

    async def _make_world(self, name: str, settings: Settings) -> World:
        world = await self._source.make_world(name, settings, self._runtime)
        world.report_failure = lambda message: self.note_failure(name, message)
        try:
            self.check_open()  # it was built while the server stopped
            for observer in self._observers:
                listener = self._listener_of(observer, world)
                if listener is not None and (own := env_world(world)) is not None:
                    own.env = ObservedEnv(own.env, listener, observer, world.report_failure)
        except BaseException:
            await self._end(world)
            raise
        return world

    def _listener_of(self, observer: Observer, world: World) -> Listener | None:
        """Have an observer note a new world; raises RequestError, which names the observer, where that fails."""
        try:
            listener: object = observer.made(world)
            if listener is not None and not isinstance(listener, Listener):
                raise TypeError(f"expected it to return a bridge.Listener or None, got {listener!r:.80}")
        except RequestError:
            raise
        except Exception as error:
            raise self._refusal_of(observer, "made", error) from error
        return listener

    def _join_by(
        self, observer: Observer, world: World, join: Callable[[Settings], Agent], settings: Settings
    ) -> Agent:
        """Have an observer let an agent in; raises RequestError, which names the observer, where that fails."""
        not_its_own: list[Exception] = []

        def go_on(settings: Settings) -> Agent:
            try:
                return join(settings)
            except Exception as error:
                not_its_own.append(error)
                raise

        try:
            agent: object = observer.join(world, settings, go_on)
            if not isinstance(agent, Agent):
                raise TypeError(f"expected it to return the agent that joined, got {agent!r:.80}")
        except Exception as error:
            if isinstance(error, RequestError) or error in not_its_own:
                raise
            raise self._refusal_of(observer, "join", error) from error
        return agent

    @staticmethod
    def _refusal_of(observer: Observer, method: str, error: Exception) -> RequestError:
        """Return what a client is told where an observer fails that decides about it; the log has it, too."""
        return RequestError(Code.INTERNAL, describe_fault(observer, method, error))

    def _ask(self, observer: Observer, method: str, *args: object, otherwise: T) -> T:
        """Call a method of an observer; return `otherwise`, and log why, where it fails or returns another type.

        May be called by any thread.
        """
        try:
            answer: object = getattr(observer, method)(*args)
            if not isinstance(answer, Mapping if isinstance(otherwise, Mapping) else type(otherwise)):
                raise TypeError(f"expected it to return a {type(otherwise).__name__}, got {answer!r:.80}")
        except Exception as error:
            fault = describe_fault(observer, method, error)
            self._runtime.scheduler.call_soon_threadsafe(lambda: self.note_failure(DEFAULT_WORLD, fault))
            return otherwise
        return cast("T", answer)

    def admit(self, world: World, settings: Settings, *, ours: bool) -> Agent:
        """Let an agent into a world, as `World.admit`. Each observer may do so in place of `World.join`.

        Raises:
            RequestError: As `World.admit`; RESOURCE_EXHAUSTED where the default world would be one too many.
        """
        joined: list[Agent] = []
        was_free, had_room = not world.has_players, self.has_room

        def note(join: Callable[[Settings], Agent], settings: Settings) -> Agent:
            joined.append(join(settings))
            return joined[-1]

        join = partial(note, world.join)
        # The first of the sequence ends up outermost, and so is asked first.
        for observer in reversed(self._observers):
            join = partial(note, partial(self._join_by, observer, world, join))
        try:
            agent = world.admit(settings, join, ours=ours)
            # A world that a client made has its place since then. Who only watches takes none.
            if world.name == DEFAULT_WORLD and was_free and not had_room and world.has_players:
                raise self._refuse_another()
            return agent
        except BaseException:
            # An agent that has joined would keep its place although its client is refused: by an observer, which may be
            # a user's own, or for a setting that is read only then. The outermost leaves first.
            for agent in reversed(joined):
                agent.leave()
            raise

    def keep(self, world: World, agent: Agent) -> bool:
        """Return whether an observer keeps the agent of a client that is gone; else it is to leave its world."""
        return any(self._ask(observer, "keep", world, agent, otherwise=False) for observer in self._observers)

    async def find_world(self, name: str) -> World:
        """Return a world; the default one is made when it is first asked for (D-4)."""
        if name == DEFAULT_WORLD:
            return await self._find_default()
        return self._find(name).world

    async def _find_default(self) -> World:
        # Again and again: the one that made it may have failed, and a third may make it now.
        while self._default is not None:  # another connection has it made
            await self._default
        self.check_open()
        entry = self._entries.get(DEFAULT_WORLD)
        # One that ended by itself, such as an isolated one whose process died, is made anew below.
        if entry is not None and entry.world.alive:
            return entry.world
        # Before it is made: there may be but one robot, which a client has in another world.
        if not self.has_room:
            raise self._refuse_another()
        with self._awaited() as self._default:
            try:
                if entry is not None:
                    await self._end(entry.world)
                world = await self._make_world(DEFAULT_WORLD, {})
                if entry is not None:
                    # Only now that another one takes its place: until then its counts are those of a listed world.
                    self._retire(entry.world)
                self._entries[DEFAULT_WORLD] = _Entry(world, None)
                return world
            finally:
                self._default = None

    def inside(self, world: World) -> Sequence[WorldUser]:
        """Return the sessions that are in a world."""
        return self._inside.get(world, ())

    def maker(self, world: World) -> WorldUser | None:
        """Return the session that has made a world for its client alone; None: it is gone, or was made for others."""
        entry = self._entries.get(world.name)
        return entry.owner if entry is not None and entry.world is world and entry.goes_with_owner else None

    def joined(self, world: World, owner: WorldUser) -> None:
        """Record that a session is in a world; a world that its creator has joined goes with the creator."""
        self._inside.setdefault(world, []).append(owner)
        if (entry := self._entries.get(world.name)) is None:
            return
        entry.idle_since = None
        if entry.owner is owner:
            entry.goes_with_owner = True

    def left(self, world: World, owner: WorldUser | None = None) -> None:
        """Note that an agent has left. The world goes on (D-16); one that `lingers` ends if it stays empty so long."""
        others = [each for each in self._inside.pop(world, ()) if each is not owner]
        if others:
            self._inside[world] = others
        self._linger(world)

    def _linger(self, world: World) -> None:

        def close() -> None:
            entry = self._entries.get(world.name)
            # Meanwhile somebody may have joined, or the world have gone and another one have its name.
            if entry is not None and entry.world is world and not world.has_players:
                self._close_later(world.name)

        if world.lingers is not None and not world.has_players:
            self._runtime.scheduler.call_later(world.lingers, close)

    async def destroy_world(self, name: str) -> None:
        """End a world; agents that are in it get an error on their next Step (D-17)."""
        entry = self._find(name)
        self._retire(entry.world)
        # Before anything that waits: from here on nobody can join it.
        del self._entries[name]
        entry.world.resets.close()
        with self._awaited():
            try:
                await entry.world.close()
            finally:
                self._gone(entry.world)
        self.freed()

    async def reset_world(
        self,
        name: str,
        settings: Settings,
        agent: Agent | None,
        waiting: Callable[[ResetOrder], None] = lambda order: None,
    ) -> None:
        """Begin a new sequence for every agent of a world (D-15)."""
        world = await self.find_world(name)
        await world.reset(settings, agent, self._limits.reset_world_timeout, waiting)

    def reap(self, now: float) -> list[str]:
        """Destroy the worlds that no agent has been in for `idle_timeout` seconds, or `abandoned_timeout`.

        Args:
            now: Seconds that never go back. A world's time without agents counts from the first call that finds it so.

        Returns:
            The names of those that went.
        """
        limits = self._limits
        idle: list[str] = []
        for name, entry in list(self._entries.items()):
            if entry is None:
                continue
            if entry.world.has_players:
                entry.idle_since = None
            elif entry.idle_since is None:
                entry.idle_since = now
            else:
                timeout = limits.abandoned_timeout if entry.abandoned else None
                timeout = limits.idle_timeout if timeout is None else timeout
                if timeout is not None and now - entry.idle_since >= timeout:
                    idle.append(name)
                    self._close_later(name)
        return idle

    def disconnected(self, owner: WorldUser) -> None:
        """Destroy the worlds that nobody but this connection used."""
        for name, entry in list(self._entries.items()):
            if entry is None or entry.owner is not owner:
                continue
            # The time until it goes begins anew, now that another timeout counts.
            entry.owner, entry.abandoned, entry.idle_since = None, True, None
            # Others that joined it keep it, unless it has died: it could serve nobody.
            if entry.goes_with_owner and (not entry.world.has_players or not entry.world.alive):
                self._close_later(name)

    def _close_later(self, name: str) -> None:
        """Take a world away at once, and close it while the event loop goes on."""
        entry = self._entries.pop(name)
        if entry is None:
            return
        self._retire(entry.world)
        self._runtime.scheduler.start(self._end(entry.world), lambda result, error: None)

    def drain(self) -> None:
        """Make no more worlds; those that there are go on."""
        self._closed = True

    async def close(self) -> None:
        """Destroy every world and make no more."""
        self._closed = True
        for name, entry in list(self._entries.items()):
            if entry is not None:
                # Ends what waits for others' Steps: a ResetWorld would else hold its session open.
                entry.world.resets.close()
                self._close_later(name)
        # Also those that went before, by a client that left, and those that are being made.
        for pending in list(self._unfinished):
            await pending
        try:
            await self._source.close()
        except RequestError as error:
            _log.warning("the environment that was made ahead did not close: %s", error)
        self.close_observers()
        self.messages.close()

    def close_observers(self) -> None:
        """End all observers."""
        for observer in self._observers:
            try:
                observer.close()
            except (Exception, KeyboardInterrupt, SystemExit):  # a user's own: the others are closed all the same
                _log.exception("the observer %r did not close", observer)

    def properties(self) -> PropertyTree:
        """Return the tree below `server`."""
        limits = [
            Property(f"server.limits.{name}", NUMBER, name.replace("_", " "), partial(getattr, self._limits, name))
            for name in self._limits.counts()
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
                    lambda: self._unix_path or "",
                ),
                Property("server.worlds", NUMBER, "the number of worlds now", lambda: len(self.names)),
                Property(
                    "server.lanes",
                    NUMBER,
                    "the most lanes for which one world of lanes is as good as a world for each; 0: there are none",
                    # No more than there may be worlds: nobody gets more environments than they would otherwise. A
                    # user's own source may know nothing of lanes.
                    lambda: min(getattr(self._source, "lanes", 0), self._limits.max_worlds),
                ),
                Property("server.status", ENCODED, "what the server does and has done, a dict", self.status),
                Property("server.web", TEXT, "an overview of the server and its worlds, as JSON", self._write_overview),
                *limits,
                *self.messages.properties(),
                *getattr(self._source, "leaves", ()),
            ]
        )

    def _write_overview(self) -> str:
        """Return the overview of the server, as JSON."""
        return json.dumps(
            {
                "version": __version__,
                "title": self._source.title,
                "realtime": self._source.fps is not None,
                "fps": self._source.fps,
                **self._overview.server,
                **self._source.traits,
                "environments": self._source.env_ids[:_MOST_LISTED],
                "draining": self._closed,
                "worlds": [
                    self._describe(world)
                    for world in self.worlds
                    if self._overview.lists_worlds or world.name == DEFAULT_WORLD
                ],
            }
        )

    def _describe(self, world: World) -> dict[str, Any]:
        own = {
            "name": world.name,
            "title": world.title or self._source.title,
            "seats": dict(world.played),
            "players": dict(world.players),
        }
        found = {**own, **_UNKNOWN, **self._overview.world, **world.describe()}
        for observer in self._observers:
            found.update(self._ask(observer, "describe", world, otherwise={}))
        return found

    def check_open(self) -> None:
        """Raise RequestError: UNAVAILABLE once the server drains or stops."""
        if self._closed:
            raise RequestError(Code.UNAVAILABLE, "this server is stopping and takes no new worlds; use another one")

    async def _end(self, world: World) -> None:
        """Close a world where nobody waits for an answer; one that fails must not keep others open."""
        with self._awaited():
            try:
                await world.close()
            except RequestError as error:
                _log.warning("the world %r did not close: %s", world.name, error)
            except Exception:
                _log.exception("the world %r did not close", world.name)
            finally:
                self._gone(world)
        self.freed()

    def _gone(self, world: World) -> None:
        """Tell of a process that has ended with its world."""
        if (own := env_world(world)) is not None:
            self.messages.ended(own.env.home)

    def _find(self, name: str) -> _Entry:
        if (entry := self._entries.get(name)) is None:
            remedy = "create one with CreateWorld, or join the default world, whose name is empty"
            raise RequestError(Code.NOT_FOUND, f"there is no world {name!r}; {remedy}")
        return entry
