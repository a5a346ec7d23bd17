"""The worlds of one server: created, found, joined and destroyed by name, from any connection."""

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
"""The most environments that the overview lists."""
_UNKNOWN: Mapping[str, Any] = {"viewers": 0, "returns": {}, "fps": None, "lanes": None, "begun": True}
"""The overview's values for every world, unless the world or an observer has others."""


@dataclasses.dataclass(frozen=True)
class Overview:
    """What the overview of a server shows, as JSON, to every client that requests it."""

    lists_worlds: bool = False
    """True if clients may see the worlds of other clients, and who is in them; False: only the default world."""
    server: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The values for a server whose source of worlds has no others in `traits`."""
    world: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The values for a world that has no others from `describe`."""


class WorldSource(Protocol):
    """Makes the worlds of a server."""

    @property
    def SETTINGS(self) -> Sequence[str]:  # noqa: N802 - a constant of its class
        """The CreateWorld settings that the source accepts."""

    @property
    def env_ids(self) -> list[str]:
        """The environment ids that a client may request."""

    @property
    def title(self) -> str:
        """The source's name, for people to read."""

    @property
    def fps(self) -> float | None:
        """Frames a second of the worlds; None: they are in lock-step."""

    @property
    def traits(self) -> Mapping[str, Any]:
        """Values that are true of all its worlds, for the overview, as JSON."""

    async def make_world(self, name: str, settings: Settings, runtime: Runtime) -> World:
        """Build the world that CreateWorld settings ask for."""

    async def prepare(self, runtime: Runtime) -> object:
        """Make the environment of the first world ahead, and return it."""

    async def close(self) -> None:
        """Close the environment that was made ahead, if no world has taken it."""


class WorldUser(Protocol):
    """A client's session, as the registry sees it: the player or creator of a world."""

    client_key: str
    """The secret that a client's sessions have in common; empty: the client sent none."""
    connection: object
    """The connection that the session is on."""

    @property
    def plays(self) -> bool:
        """True if the session takes part in a world, and does not only watch."""

    def end_placed(self) -> None:
        """End the sequence, because the environment was put into another situation; the next Step begins a sequence."""


@dataclasses.dataclass
class _Entry:
    """A world and its owner."""

    world: World
    owner: WorldUser | None
    """The session that created the world; None: it has ended."""
    goes_with_owner: bool = False
    """True if the creator joined the world, or made it for itself alone."""
    idle_since: float | None = None
    """When the world was first seen without agents, in monotonic seconds."""
    abandoned: bool = False
    """True if the creator is gone, which alone knew the world's name, unless it told others."""


_OVERVIEW = Overview()


class Registry:
    """All worlds of a server; its sessions share it.

    A world is destroyed by DestroyWorld, or with the session that created and joined it, unless other clients are in
    it. So a dead client leaves no world behind, but a world that was created for others to join stays for
    `abandoned_timeout`. Clients of this package create worlds for themselves alone: these are destroyed with them,
    joined or not.

    All methods are called by the thread that runs the event loop, except `names` and `drain`, which any thread may
    call.

    Args:
        source: Makes the worlds.
        limits: The most worlds, `idle_timeout`, `abandoned_timeout` and `reset_world_timeout`.
        runtime: Runs the calls of environments, and coroutines that wait.
        unix_path: The path of the server's Unix socket; None: there is none.
        overview: What clients see of all worlds.
        shared_control: True if clients that watch, or share a world, may also call methods and set attributes of
            environments.
        observers: Are notified of worlds, and admit agents; the first is asked first.
        messages: Further messages that sessions serve.
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
        """True if clients that watch, or share a world, may also change environments by attributes and methods."""
        self._inside: dict[World, list[WorldUser]] = {}
        """The sessions in each world."""
        self._unix_path = unix_path
        self._source = source
        self._limits = limits
        self._runtime = runtime
        self._entries: dict[str, _Entry | None] = {}
        self._default: PendingResult[None] | None = None
        """Done when the default world is made, or could not be made."""
        self._unfinished: set[PendingResult[None]] = set()
        """The worlds that are being made or closed."""
        self._closed = False
        self._began = time.monotonic()
        self._past_steps = self._past_episodes = 0
        """The counts of past worlds."""
        self.note_failure: Callable[[str, str], None] = lambda name, message: None
        """Logs an environment's exception that fails no request: the world's name, and the message."""
        self.counted: Callable[[], dict[str, float]] = dict
        """Returns the counts of the server's other parts, for `status`."""
        self.freed: Callable[[], None] = lambda: None
        """Called when a world was closed, which may have freed much memory."""

    @property
    def names(self) -> list[str]:
        """The names of the current worlds; the default world is listed only after a client joined it."""
        # A copy, because other threads ask while the event loop adds and removes worlds.
        return [name for name, entry in list(self._entries.items()) if entry is not None]

    @property
    def worlds(self) -> list[World]:
        """The current worlds."""
        return [entry.world for entry in list(self._entries.values()) if entry is not None]

    def status(self) -> dict[str, Any]:
        """Return the server's state and counters, as the property `server.status`. May be called by any thread."""
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
        """Keep the counts of a world that is destroyed."""
        counts = world.counts()
        self._past_steps += counts.steps
        self._past_episodes += counts.episodes

    @property
    def has_room(self) -> bool:
        """True if another client may have a world of its own, or be the first in the default one."""
        # With `max_worlds=0` all clients join the default world, whose number of agents is the limit.
        return not self._limits.max_worlds or self._used < self._limits.max_worlds

    @property
    def _used(self) -> int:
        """The number of worlds in use: all that clients made, and the default one while a client plays in it."""
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
        """Make a world with a new name (D-3).

        Args:
            settings: The settings of CreateWorld.
            owner: The session that sent the request.
            for_others: True: the world stays for others to join if its owner leaves without having joined it.
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
        # Not a number, because a client that knows the name of a world can join and destroy it.
        name = f"world-{secrets.token_hex(8)}"
        self._entries[name] = None  # reserves the name while the environment is made
        try:
            with self._awaited():
                world = await self._make_world(name, settings)
        except BaseException:
            self._entries.pop(name, None)
            raise
        self._entries[name] = _Entry(world, owner, goes_with_owner=not for_others)
        # No client has joined it yet: a world that `lingers` waits from here on.
        self._linger(world)
        return name

    @contextlib.contextmanager
    def _awaited(self) -> Iterator[PendingResult[None]]:
        """Make `close` wait for the code within: an environment that is being made must be closed, too."""
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
            self.check_open()  # the server may have stopped meanwhile
            for observer in self._observers:
                listener = self._listener_of(observer, world)
                if listener is not None and (own := env_world(world)) is not None:
                    own.env = ObservedEnv(own.env, listener, observer, world.report_failure)
        except BaseException:
            await self._end(world)
            raise
        return world

    def _listener_of(self, observer: Observer, world: World) -> Listener | None:
        """Notify an observer of a new world. Raises RequestError, which names the observer, if the observer fails."""
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
        """Let an observer admit an agent. Raises RequestError, which names the observer, if the observer fails."""
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
        """Return a client's error for an observer that failed to decide about it, and log the error."""
        return RequestError(Code.INTERNAL, describe_fault(observer, method, error))

    def _ask(self, observer: Observer, method: str, *args: object, otherwise: T) -> T:
        """Call a method of an observer; return `otherwise`, and log the reason, if it fails or returns another type.

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
        """Admit an agent to a world, as `World.admit`. Each observer may act in place of `World.join`.

        Raises:
            RequestError: As `World.admit`; RESOURCE_EXHAUSTED if the default world would exceed the limit of worlds.
        """
        joined: list[Agent] = []
        was_free, had_room = not world.has_players, self.has_room

        def note(join: Callable[[Settings], Agent], settings: Settings) -> Agent:
            joined.append(join(settings))
            return joined[-1]

        join = partial(note, world.join)
        # The first observer becomes the outermost wrapper, and so is asked first.
        for observer in reversed(self._observers):
            join = partial(note, partial(self._join_by, observer, world, join))
        try:
            agent = world.admit(settings, join, ours=ours)
            # A world that a client made has its place already. A client that only watches takes none.
            if world.name == DEFAULT_WORLD and was_free and not had_room and world.has_players:
                raise self._refuse_another()
            return agent
        except BaseException:
            # An agent that has joined would keep its place although its client is refused, by an observer, which may be
            # a user's, or for a setting that is read late. The outermost leaves first.
            for agent in reversed(joined):
                agent.leave()
            raise

    def keep(self, world: World, agent: Agent) -> bool:
        """Return True if an observer keeps the agent of a client that is gone; otherwise the agent leaves its world."""
        return any(self._ask(observer, "keep", world, agent, otherwise=False) for observer in self._observers)

    async def find_world(self, name: str) -> World:
        """Return a world. The default world is made when it is first requested (D-4)."""
        if name == DEFAULT_WORLD:
            return await self._find_default()
        return self._find(name).world

    async def _find_default(self) -> World:
        # In a loop: the connection that made it may have failed, and a third may be making it now.
        while self._default is not None:  # another connection is making it
            await self._default
        self.check_open()
        entry = self._entries.get(DEFAULT_WORLD)
        # A world that ended by itself, such as an isolated one whose process died, is made again below.
        if entry is not None and entry.world.alive:
            return entry.world
        # Before it is made: there may be only one robot, which a client has in another world.
        if not self.has_room:
            raise self._refuse_another()
        with self._awaited() as self._default:
            try:
                if entry is not None:
                    await self._end(entry.world)
                world = await self._make_world(DEFAULT_WORLD, {})
                if entry is not None:
                    # Only when another world takes its place: until then it is listed with its counts.
                    self._retire(entry.world)
                self._entries[DEFAULT_WORLD] = _Entry(world, None)
                return world
            finally:
                self._default = None

    def inside(self, world: World) -> Sequence[WorldUser]:
        """Return the sessions in a world."""
        return self._inside.get(world, ())

    def maker(self, world: World) -> WorldUser | None:
        """Return the session that made a world for its client alone; None: it has ended, or made it for others."""
        entry = self._entries.get(world.name)
        return entry.owner if entry is not None and entry.world is world and entry.goes_with_owner else None

    def joined(self, world: World, owner: WorldUser) -> None:
        """Record that a session is in a world. A world that its creator has joined is destroyed with the creator."""
        self._inside.setdefault(world, []).append(owner)
        if (entry := self._entries.get(world.name)) is None:
            return
        entry.idle_since = None
        if entry.owner is owner:
            entry.goes_with_owner = True

    def left(self, world: World, owner: WorldUser | None = None) -> None:
        """Note that an agent has left. The world continues (D-16); one that `lingers` ends if it stays empty."""
        others = [each for each in self._inside.pop(world, ()) if each is not owner]
        if others:
            self._inside[world] = others
        self._linger(world)

    def _linger(self, world: World) -> None:

        def close() -> None:
            entry = self._entries.get(world.name)
            # Meanwhile a client may have joined, or the world was destroyed and another one has its name.
            if entry is not None and entry.world is world and not world.has_players:
                self._close_later(world.name)

        if world.lingers is not None and not world.has_players:
            self._runtime.scheduler.call_later(world.lingers, close)

    async def destroy_world(self, name: str) -> None:
        """Destroy a world. Agents in it get an error on their next Step (D-17)."""
        entry = self._find(name)
        self._retire(entry.world)
        # Before any wait: from here on no client can join it.
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
        """Destroy the worlds without agents for `idle_timeout` seconds, or `abandoned_timeout`.

        Args:
            now: Seconds that never decrease. A world's time without agents counts from the first call that finds it so.

        Returns:
            The names of the destroyed worlds.
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
        """Destroy the worlds that only this session used."""
        for name, entry in list(self._entries.items()):
            if entry is None or entry.owner is not owner:
                continue
            # Its time without agents begins again, because another timeout applies now.
            entry.owner, entry.abandoned, entry.idle_since = None, True, None
            # Other clients in it keep it, unless it has died and could not serve them.
            if entry.goes_with_owner and (not entry.world.has_players or not entry.world.alive):
                self._close_later(name)

    def _close_later(self, name: str) -> None:
        """Remove a world at once, and close it while the event loop continues."""
        entry = self._entries.pop(name)
        if entry is None:
            return
        self._retire(entry.world)
        self._runtime.scheduler.start(self._end(entry.world), lambda result, error: None)

    def drain(self) -> None:
        """Make no more worlds; existing ones continue."""
        self._closed = True

    async def close(self) -> None:
        """Destroy all worlds and make no more."""
        self._closed = True
        for name, entry in list(self._entries.items()):
            if entry is not None:
                # Ends the wait for other agents' Steps: a ResetWorld would otherwise keep its session open.
                entry.world.resets.close()
                self._close_later(name)
        # Also worlds that were being closed, because their client left, and those that are being made.
        for pending in list(self._unfinished):
            await pending
        try:
            await self._source.close()
        except RequestError as error:
            _log.warning("the environment that was made ahead did not close: %s", error)
        self.close_observers()
        self.messages.close()

    def close_observers(self) -> None:
        """Close all observers."""
        for observer in self._observers:
            try:
                observer.close()
            except (Exception, KeyboardInterrupt, SystemExit):  # a user's: the others are closed all the same
                _log.exception("the observer %r did not close", observer)

    def properties(self) -> PropertyTree:
        """Return the tree of properties below `server`."""
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
                    # At most the limit of worlds, so that nobody gets more environments than otherwise. A user's own
                    # source may not know about lanes.
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
        """Raise RequestError: UNAVAILABLE if the server drains or stops."""
        if self._closed:
            raise RequestError(Code.UNAVAILABLE, "this server is stopping and takes no new worlds; use another one")

    async def _end(self, world: World) -> None:
        """Close a world when no client waits for an answer. If one fails to close, the others are still closed."""
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
        """Report that a process has ended with its world."""
        if (own := env_world(world)) is not None:
            self.messages.ended(own.env.home)

    def _find(self, name: str) -> _Entry:
        if (entry := self._entries.get(name)) is None:
            remedy = "create one with CreateWorld, or join the default world, whose name is empty"
            raise RequestError(Code.NOT_FOUND, f"there is no world {name!r}; {remedy}")
        return entry
