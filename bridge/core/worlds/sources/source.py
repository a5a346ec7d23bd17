"""Makes the worlds of a server."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import cloudpickle

from bridge.core.encoding.spaces import Layout
from bridge.core.worlds.base import World
from bridge.core.worlds.environment import Environment, Isolation
from bridge.core.worlds.kinds import Known
from bridge.core.worlds.local import LaneGroup, adopt
from bridge.core.worlds.lock_step import LockStep
from bridge.core.worlds.recipe import MODES, SETTINGS, Adapter, EnvLike, EnvRecipe, LanesAlreadyError
from bridge.core.worlds.scheduling import PendingResult, Runtime, gather
from bridge.core.worlds.settings import Settings
from bridge.core.worlds.world import WorldKind, paced_by
from bridge.errors import Code, RequestError, SettingError, TensorError

if TYPE_CHECKING:
    from bridge.core.worlds.own_worlds import OwnWorld
    from bridge.core.worlds.realtime_options import RealtimeOptions

__all__ = ["EnvSource", "Recipe", "Source"]


class Recipe(Protocol):
    """How to make an environment. It can be pickled for another process if its parts can."""

    @property
    def factory(self) -> Callable[..., object] | None:
        """Returns an environment; None: an id says how it is made, or there is one, which was made already."""

    @property
    def title(self) -> str:
        """The name, for people to read."""

    def make_env(self) -> Known:
        """Make the environment; raises RequestError."""


R = TypeVar("R", bound=Recipe)


class Source(abc.ABC, Generic[R]):
    """Makes worlds, each with an environment of its own.

    The environment of the first world is made when the server starts, so that errors show at once. At most one is kept
    until a world takes it, because there may be only one robot or emulator.

    Args:
        recipe: Makes the environments.
        kind: Makes a world from an environment.
        realtime: The settings of real-time worlds; None: lock-step.
        thread_safe: Each world has a thread of its own.
        isolation: The limits of each world's process; None: environments run in this process.
        traits: Values that a page shows for all worlds.

    Raises:
        SettingError: The recipe must be sent to another process, and cannot be pickled.
    """

    SETTINGS: tuple[str, ...]
    """The settings of CreateWorld."""

    def __init__(
        self,
        recipe: R,
        kind: WorldKind,
        realtime: RealtimeOptions | None,
        thread_safe: bool,
        isolation: Isolation | None,
        traits: Mapping[str, object],
    ) -> None:
        self.recipe = recipe
        """The recipe of its environments."""
        self.title = recipe.title
        """The source's name, for people to read."""
        self.factory = recipe.factory
        """The factory of its environments; None: their ids say how they are made, or there is one, made already."""
        self.fps = None if realtime is None else realtime.fps
        """Frames a second of its worlds; None: they are in lock-step."""
        self._kind = kind
        self._realtime = realtime
        self._thread_safe = thread_safe
        self._isolation = isolation
        self.traits = traits
        """The values of the page that are the same for all its worlds."""
        self._making: PendingResult[None] | None = None
        """Done when an environment has been made ahead, or could not be."""
        self._made: tuple[R, Environment] | None = None
        """The environment that was made ahead, and its recipe."""
        if isolation is not None:
            try:
                # At the start, so that the user sees the error, and not with the first client.
                cloudpickle.dumps(recipe)
            except Exception as error:  # whatever the pickling of a user's objects raises
                raise SettingError(
                    f'isolation="process" sends {recipe.title} to other processes, and it cannot be pickled: '
                    f"{error!r}. Serve a function that makes everything the environment needs"
                ) from error

    @property
    def env_ids(self) -> list[str]:
        """The ids that a client may request."""
        return []

    @property
    def lanes(self) -> int:
        """The most lanes for which one world of lanes is as good as a world for each; 0: there are none."""
        return 0

    @property
    def offers_one(self) -> bool:
        """True if its worlds have one kind of environment, which is made on request."""
        return len(self.env_ids) <= 1

    async def prepare(self, runtime: Runtime) -> Environment | None:
        """Make the environment of the first world ahead; None: it cannot be made ahead, see `offers_one`.

        Raises:
            RequestError: It could not be made, or has a space that cannot be sent.
        """
        if not self.offers_one:
            return None
        recipe, _ = self.read({})
        done = self._making = PendingResult()
        try:
            env = await self._make_env("", recipe, None, runtime)
            # Before the check, so that `close` finds it if the check fails.
            self._made = (recipe, env)
            for name, space in env.facts.named_spaces():
                # Raises if it cannot be sent: otherwise all clients would be refused, one after the other.
                Layout(space, name)
            return env
        except TensorError as error:
            await self.close()
            text = f"this environment has a space that does not travel: {error}"
            raise RequestError(Code.FAILED_PRECONDITION, text) from error
        finally:
            self._making = None
            # Also after a failure: a client that waits for it then makes its own, or gets the error.
            done.set_result(None)

    async def close(self) -> None:
        """Close the environment that was made ahead, if no world has taken it."""
        made, self._made = self._made, None
        if made is not None:
            await made[1].close()

    async def _take(self, recipe: R) -> Environment | None:
        """Return the environment that was made ahead with this recipe, when it is made; otherwise None.

        An environment of another recipe is closed, because a second one may not be possible at the same time.
        """
        # A client may come while the environment is being made.
        if self._making is not None:
            await self._making
        if self._made is not None and _equal(self._made[0], recipe):
            (_, env), self._made = self._made, None
            return env
        await self.close()
        return None

    async def _make_env(self, name: str, recipe: R, factory: bytes | None, runtime: Runtime) -> Environment:
        """Make the environment of a world of this name, in this process or in one of its own."""
        if self._isolation is not None:
            from bridge.core.worlds.isolated.env import start_isolated  # few servers have worlds in processes

            return await start_isolated(name, cloudpickle.dumps(recipe), factory, self._isolation, runtime)
        thread = f"bridge-world {name or 'default'}"
        return await adopt(recipe.make_env, runtime.start_thread(thread) if self._thread_safe else runtime.executor)

    @abc.abstractmethod
    def read(self, settings: Settings) -> tuple[R, bytes | None]:
        """Read CreateWorld settings; empty ones are for the default world. Raises RequestError.

        Returns:
            The recipe of its environment, and a client's own factory, pickled; None: the client sent none.
        """

    async def make_world(self, name: str, settings: Settings, runtime: Runtime) -> World:
        """Make the world that CreateWorld settings request; empty ones are for the default world.

        Raises:
            RequestError: Settings are unknown or invalid, or the environment could not be made.
        """
        recipe, factory = self.read(settings)
        env = await self._take(recipe)
        if env is None:
            env = await self._make_env(name, recipe, factory, runtime)
        try:
            world = self._kind(name, env, runtime.scheduler)
        except BaseException as error:
            # The world that would own it was not made.
            await env.close()
            if isinstance(error, SettingError):
                raise RequestError(Code.FAILED_PRECONDITION, str(error)) from error
            raise
        if recipe.factory is None:  # by its id; a server's function has one title for all worlds
            world.title = recipe.title
        return world


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arguments that are arrays
        return False


class EnvSource(Source[EnvRecipe]):
    """Makes worlds of Gymnasium environments.

    Args:
        env: A Gymnasium id, an EnvSpec, a callable that returns an Env or VectorEnv, or a list of ids and patterns
            (`"ALE/*"`), one of which the client requests.
        num_envs: Lanes in each world; 1 with the mode `sync`: a single environment, without lanes.
        vectorization_mode: How Gymnasium steps the lanes.
        env_kwargs: Arguments of the environment's constructor; a client's own arguments override them.
        max_lanes: The most lanes that a client may request.
        adapters: The adapters that wrap each environment, the innermost first.
        realtime: The settings of real-time worlds; None: lock-step.
        thread_safe: Each world has a thread of its own, in real time each of its lanes.
        isolation: The limits of each world's process; None: environments run in this process.
        allow_env_factories: True if a client may send the environment's factory, which needs `isolation`.
        world: Makes the worlds, or their pacers, see `own_world`; None: one agent steps the environment, or all lanes,
            in lock-step or in real time.
        traits: Values that a page shows for all worlds.
        watched: True if single worlds are observed, by people at a page or a user's observers, which lanes would
            replace.

    Raises:
        SettingError: An argument cannot be served, such as an id that is not registered.
    """

    SETTINGS = SETTINGS

    def __init__(
        self,
        env: EnvLike,
        *,
        num_envs: int = 1,
        vectorization_mode: str = "sync",
        env_kwargs: Mapping[str, object] | None = None,
        max_lanes: int = 4096,
        adapters: Sequence[Adapter] = (),
        realtime: RealtimeOptions | None = None,
        thread_safe: bool = False,
        isolation: Isolation | None = None,
        allow_env_factories: bool = False,
        world: str | OwnWorld | None = None,
        traits: Mapping[str, object] = MappingProxyType({}),
        watched: bool = False,
    ) -> None:
        if world is not None and realtime is not None:
            raise SettingError("world= has a pacer of its own, in place of fps=: leave out either")
        kind: WorldKind | None = None
        if world is not None:
            from bridge.core.worlds.own_worlds import own_world  # most servers do not need it

            kind = own_world(world, num_envs)
        if not isinstance(num_envs, int) or not 1 <= num_envs <= max_lanes:
            raise SettingError(f"expected num_envs from 1 to max_lanes={max_lanes}, got {num_envs!r}")
        if vectorization_mode not in MODES:
            text = f"expected vectorization_mode to be one of {', '.join(MODES)}, got {vectorization_mode!r}"
            raise SettingError(text)
        recipe = EnvRecipe.of(
            env,
            num_envs=num_envs,
            vectorization_mode=vectorization_mode,
            kwargs=dict(env_kwargs or {}),
            max_lanes=max_lanes,
            adapters=tuple(adapters),
            # Otherwise it would be open in a thread that ends, or in another process.
            hands_over=not thread_safe and isolation is None,
        )
        # Lanes are stepped one after the other, by one message. So are worlds, if one thread steps them all when their
        # messages come; a world of another kind, or in real time, may do more than its lanes would.
        alike = recipe.single and kind is None and realtime is None and recipe.hands_over and not watched
        self._lanes = max_lanes if alike else 0
        if realtime is not None:
            from bridge.core.worlds.realtime.clock_pacer import ClockPacer

            kind = paced_by(partial(ClockPacer, realtime))
        super().__init__(recipe, kind or paced_by(LockStep), realtime, thread_safe, isolation, traits)
        self._factories = allow_env_factories

    @property
    def lanes(self) -> int:
        """The most lanes for which one world of lanes is as good as a world for each; 0: there are none.

        The result of a function is known from the first environment: until then it is assumed to be a single one.
        """
        return self._lanes

    @property
    def env_ids(self) -> list[str]:
        """The ids that a client may request; empty if there is only one environment, without an id."""
        return self.recipe.env_ids

    def made_by(self, settings: Settings) -> dict[str, object]:
        """Return how the environment of a world is made, for a recording; raises as `make_world`."""
        recipe, _ = self.read(settings)
        entry_point = getattr(recipe.spec, "entry_point", recipe.factory)
        if callable(entry_point):
            module = getattr(entry_point, "__module__", "")
            entry_point = f"{module}:{getattr(entry_point, '__qualname__', type(entry_point).__qualname__)}"
        return {
            "env_id": recipe.spec.id if recipe.spec else "",
            "title": recipe.title,
            "entry_point": str(entry_point or ""),
            "num_envs": recipe.num_envs,
            "vectorization_mode": recipe.vectorization_mode,
            "kwargs": recipe.kwargs,
            **{name: value for adapter in recipe.adapters for name, value in adapter.describe().items()},
        }

    def read(self, settings: Settings) -> tuple[EnvRecipe, bytes | None]:
        """Read CreateWorld settings; empty ones are for the default world. Raises RequestError."""
        factory = self._read_factory(settings)
        if factory is None:
            return self.recipe.read(settings), None
        own = {name: tensor for name, tensor in settings.items() if name != "env_factory"}
        recipe = EnvRecipe(_factory_of_client, None, max_lanes=self.recipe.max_lanes, adapters=self.recipe.adapters)
        return recipe.read(own), factory

    async def prepare(self, runtime: Runtime) -> Environment | None:
        """Make an environment ahead as `Source.prepare`; raises RequestError also if no clock can step it."""
        env = await super().prepare(runtime)
        if env is not None and self._realtime is not None:
            from bridge.core.worlds.realtime.clock_pacer import default_action_of

            try:
                default_action_of(env.facts, self._realtime)
            except SettingError as error:
                await self.close()
                raise RequestError(Code.FAILED_PRECONDITION, str(error)) from error
        return env

    async def _make_env(self, name: str, recipe: EnvRecipe, factory: bytes | None, runtime: Runtime) -> Environment:
        """Make the environment of a world; the lanes of a real-time world may have a thread or a process each."""
        if self._realtime is None or not self._thread_safe or recipe.num_envs == 1:
            try:
                env = await super()._make_env(name, recipe, factory, runtime)
            except LanesAlreadyError as error:
                self._lanes = 0
                if error.env is not None:
                    # There may be only one simulator in a process. It is kept for the world that the client then
                    # requests, like an environment that was made ahead.
                    single, made = dataclasses.replace(recipe, num_envs=1), [error.env]
                    again = lambda: made.pop() if made else single.make_env()  # noqa: E731
                    self._made = (single, await adopt(again, runtime.executor))
                raise
            if recipe.single and env.facts.num_envs is not None:
                self._lanes = 0
            return env
        if recipe.vectorization_mode != "sync":
            raise RequestError(
                Code.FAILED_PRECONDITION,
                "a real-time world steps each lane separately: expected vectorization_mode='sync', got "
                f"{recipe.vectorization_mode!r}",
            )
        single = dataclasses.replace(recipe, num_envs=1)
        lanes: list[Environment] = []
        try:
            for lane in range(recipe.num_envs):
                own = f"{name or 'default'} {lane}"
                lanes.append(await super()._make_env(own, single, factory, runtime))
                if (count := lanes[-1].facts.num_envs) is not None:
                    raise LanesAlreadyError(recipe.title, count)
        except BaseException:
            # Otherwise their threads and processes would stay.
            await gather(runtime.scheduler, [lane.close() for lane in lanes])
            raise
        return LaneGroup(lanes, runtime.scheduler)

    def _read_factory(self, settings: Settings) -> bytes | None:
        """Return a client's factory, still pickled."""
        if "env_factory" not in settings:
            return None
        if not self._factories:
            raise RequestError(
                Code.PERMISSION_DENIED,
                "this server does not accept environment factories, which are code that it would execute; start "
                "it with allow_env_factories=True if its clients may do that",
            )
        if "env_id" in settings:
            raise RequestError(Code.INVALID_ARGUMENT, "expected env_id or env_factory, got both")
        tensor = settings["env_factory"]
        if tensor.WhichOneof("payload") != "uint8s":
            raise RequestError(Code.INVALID_ARGUMENT, "expected the setting 'env_factory' as uint8 bytes of a pickle")
        return tensor.uint8s.array


def _factory_of_client(**kwargs: object) -> object:
    """A placeholder for a client's factory in the server, which does not unpickle it."""
    raise SettingError("a client's factory is called in a world's process only")
