"""Where a server's environments come from: an id, a spec, a callable, or a list of ids and patterns."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from bridge.errors import Code, RequestError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.worlds.base import World, constructed, misfit
from bridge.worlds.environment import Environment
from bridge.worlds.isolated.env import IsolatedEnv, start_isolated
from bridge.worlds.isolated.world import Isolation, start_method
from bridge.worlds.kinds import EnvWrapper, GymEnv, Lanes, recognise
from bridge.worlds.lanes import VectorWorld
from bridge.worlds.local import LaneGroup, LocalEnv, adopt
from bridge.worlds.made_ahead import MadeAhead
from bridge.worlds.realtime.clocked_world import RealtimeOptions
from bridge.worlds.realtime.world import RealtimeWorld
from bridge.worlds.scheduling import Runtime, Scheduler, gather
from bridge.worlds.settings import Settings, read_kwargs, read_scalar
from bridge.worlds.single import GymWorld

__all__ = ["Adapter", "EnvLike", "EnvRecipe", "EnvSource", "WorldKind", "WorldSettings"]

EnvLike: TypeAlias = "str | EnvSpec | Callable[..., object] | Sequence[str]"
"""The types that `serve_gym` takes as its environment."""

WorldKind: TypeAlias = Callable[[str, Environment, Scheduler], World]
"""Makes a world: of its name, its environment, which it owns from then on, and what runs that it waits for."""
MODES = ("sync", "async", "vector_entry_point")


class Adapter(Protocol):
    """Stands around environments, and changes what they take or give. It can be pickled."""

    def wrap(self, env: GymEnv) -> EnvWrapper:
        """Return one environment, or one lane of several, with the change."""

    def wrap_lanes(self, env: Lanes) -> Lanes:
        """Return lanes that are stepped together with the change; raises SettingError where that cannot be."""

    def describe(self) -> Mapping[str, object]:
        """Return what a recording says of it, by keyword."""


@dataclasses.dataclass(frozen=True)
class WorldSettings:
    """The settings of a CreateWorld request, read and checked."""

    env_id: str | None
    num_envs: int
    vectorization_mode: str
    kwargs: Mapping[str, object]

    @property
    def single(self) -> bool:
        """True if the world is of one environment rather than of lanes."""
        return self.num_envs == 1 and self.vectorization_mode == "sync"


@dataclasses.dataclass(frozen=True)
class EnvRecipe:
    """How to make environments. It can be pickled for another process where its parts can."""

    factory: Callable[..., Any] | None
    """Returns an Env or a VectorEnv."""
    spec: EnvSpec | None
    """The id of the environment to make, if there is no factory."""
    patterns: tuple[str, ...] = ()
    """The ids that a client may choose from where there is neither."""
    num_envs: int = 1
    vectorization_mode: str = "sync"
    kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    max_lanes: int = 4096
    adapters: tuple[Adapter, ...] = ()
    """What stands around each environment, the innermost first."""

    @classmethod
    def of(cls, env: EnvLike, **options: Any) -> EnvRecipe:
        """Read what a user gave as the environment.

        Raises:
            SettingError: It cannot be served, such as an id that is not registered.
        """
        if isinstance(env, str):
            return cls(None, _find(env), **options)
        if isinstance(env, EnvSpec):
            return cls(None, env, **options)
        if callable(env):
            return cls(env, None, **options)
        if isinstance(env, Sequence) and env and all(isinstance(item, str) for item in env):
            missing = [pattern for pattern in env if not fnmatch.filter(gymnasium.registry, pattern)]
            if missing:
                raise SettingError(
                    f"no registered environment matches {', '.join(map(repr, missing))}; import the package that "
                    "registers it first"
                )
            return cls(None, None, tuple(env), **options)
        raise SettingError(
            "expected a Gymnasium id, an EnvSpec, a callable that returns an environment, or a list of ids; got "
            f"{env!r:.80} of type {type(env).__name__}"
        )

    @property
    def env_ids(self) -> list[str]:
        """The ids that a client may name; empty where there is but one environment, without an id."""
        if self.patterns:
            names = (name for pattern in self.patterns for name in fnmatch.filter(gymnasium.registry, pattern))
            return list(dict.fromkeys(names))
        return [self.spec.id] if self.spec else []

    @property
    def title(self) -> str:
        """Its name, as a person reads it."""
        if self.factory is not None:
            return getattr(self.factory, "__name__", type(self.factory).__name__)
        return ", ".join(self.patterns) or (self.spec.id if self.spec else "")

    def of_factory(self, factory: Callable[..., object]) -> EnvRecipe:
        """Return a recipe that calls a client's function in place of what is served."""
        return EnvRecipe(factory, None, max_lanes=self.max_lanes, adapters=self.adapters)

    def pickled(self, request: WorldSettings | None) -> bytes:
        """Pickle the recipe for another process, in which nothing is registered that was registered here."""
        recipe = self
        if request is not None and request.env_id is not None and self.factory is None:
            recipe = dataclasses.replace(self, spec=self.spec or gymnasium.spec(request.env_id), patterns=())
        data: bytes = cloudpickle.dumps((recipe, request))
        return data

    def read(self, settings: Mapping[str, pb.Tensor]) -> WorldSettings:
        """Read CreateWorld settings.

        Raises:
            RequestError: INVALID_ARGUMENT for unknown or bad settings, NOT_FOUND for an environment not served here.
        """
        kwargs = read_kwargs(settings, EnvSource.SETTINGS, self.kwargs)
        env_id = _text(settings, "env_id")
        mode = _text(settings, "vectorization_mode") or self.vectorization_mode
        num_envs = _count(settings, "num_envs", self.max_lanes) or self.num_envs
        if mode not in MODES:
            raise RequestError(
                Code.INVALID_ARGUMENT, f"expected vectorization_mode to be one of {', '.join(MODES)}, got {mode!r}"
            )
        return WorldSettings(self._resolve(env_id), num_envs, mode, kwargs)

    def _resolve(self, env_id: str | None) -> str | None:
        """Find the environment that a client names among those that are served."""
        served = self.env_ids
        if env_id is None:
            if len(served) > 1:
                raise RequestError(
                    Code.INVALID_ARGUMENT,
                    "name one of the environments, in the path of the URL or by env_id: this server has "
                    f"{_some(served)}",
                )
            return served[0] if served else None
        if env_id not in served:
            offer = (
                f"this server has {_some(served)}"
                if served
                else f"this server has one environment, {self.title}, without an id"
            )
            raise RequestError(Code.NOT_FOUND, f"the environment {env_id!r} is not served here; {offer}")
        return env_id

    def make_env(self, request: WorldSettings) -> GymEnv | Lanes:
        """Make the environment of a world.

        Raises:
            RequestError: It could not be made.
        """
        title = request.env_id or self.title
        return constructed(title, request.kwargs, lambda: self._make(request), lambda: self._misfit(request))

    def _make(self, request: WorldSettings) -> GymEnv | Lanes:
        kwargs: dict[str, Any] = dict(request.kwargs)
        if self.factory is not None:
            return self._make_by_factory(self.factory, request, kwargs)
        spec = self.spec if self.spec is not None else gymnasium.spec(str(request.env_id))
        if request.single:
            return self._adapted(gymnasium.make(spec, **kwargs))
        # Gymnasium refuses wrappers of one environment there.
        stepped_together = request.vectorization_mode == "vector_entry_point"
        vector_kwargs: dict[str, Any] = {}
        if request.vectorization_mode == "sync":
            vector_kwargs = {"copy": False}  # what it returns is sent before its next step
        elif request.vectorization_mode == "async":
            vector_kwargs = {"copy": False, "context": start_method()}
        vector: Lanes = gymnasium.make_vec(
            spec,
            num_envs=request.num_envs,
            vectorization_mode=request.vectorization_mode,
            vector_kwargs=vector_kwargs,
            wrappers=None if stepped_together else [adapter.wrap for adapter in self.adapters] or None,
            **kwargs,
        )
        return self._adapted(vector) if stepped_together else vector

    def _adapted(self, made: object) -> GymEnv | Lanes:
        """Return what a callable returned as an environment of Gymnasium, if it is one, with the adapters around it."""
        try:
            env = recognise(made)
        except SettingError as error:
            raise RequestError(Code.FAILED_PRECONDITION, f"{self.title} returned {error}") from error
        if not isinstance(env, (gymnasium.Env, VectorEnv)):
            raise RequestError(
                Code.FAILED_PRECONDITION,
                f"{self.title} returned a {type(made).__name__}, where a gymnasium.Env or VectorEnv was expected; "
                "PettingZoo environments are for serve_parallel, or for `bridge serve` with a function that says what "
                "it returns: def make() -> pettingzoo.ParallelEnv",
            )
        for adapter in self.adapters:
            env = adapter.wrap_lanes(env) if isinstance(env, VectorEnv) else adapter.wrap(env)
        return env

    def _make_by_factory(
        self, factory: Callable[..., Any], request: WorldSettings, kwargs: dict[str, object]
    ) -> GymEnv | Lanes:
        num_envs = request.num_envs
        if request.single:
            return self._adapted(factory(**kwargs))
        if request.vectorization_mode == "vector_entry_point":
            raise RequestError(
                Code.INVALID_ARGUMENT,
                f"{self.title} is a callable, which has no vector entry point; expected vectorization_mode sync or "
                "async, or a callable that returns a VectorEnv",
            )
        if request.vectorization_mode == "async":
            return AsyncVectorEnv([lambda: self._one(factory, kwargs)] * num_envs, copy=False, context=start_method())
        first = self._adapted(factory(**kwargs))
        if isinstance(first, VectorEnv):
            first.close()
            raise self.lanes_already(first.num_envs)
        made = iter([first])
        return SyncVectorEnv([lambda: next(made, None) or self._one(factory, kwargs)] * num_envs, copy=False)

    def _one(self, factory: Callable[..., object], kwargs: Mapping[str, object]) -> GymEnv:
        env = self._adapted(factory(**kwargs))
        assert not isinstance(env, VectorEnv), "the same function made one environment before"
        return env

    def lanes_already(self, count: int) -> RequestError:
        """Return how to refuse `num_envs` where the environment has lanes by itself."""
        return RequestError(
            Code.INVALID_ARGUMENT,
            f"{self.title} returns a vector environment of {count} lanes, so num_envs cannot be given",
        )

    def _misfit(self, request: WorldSettings) -> str | None:
        """Return what the environment's constructor takes, where it does not take the arguments; None: it does."""
        arguments = dict(request.kwargs)
        constructor: Any = self.factory
        if constructor is None:
            spec = self.spec or gymnasium.spec(str(request.env_id))
            constructor = spec.entry_point
            if request.vectorization_mode == "vector_entry_point" and not request.single:
                constructor, arguments["num_envs"] = spec.vector_entry_point, request.num_envs
            of_make = inspect.signature(gymnasium.make).parameters
            arguments = {**spec.kwargs, **{key: value for key, value in arguments.items() if key not in of_make}}
        try:
            if isinstance(constructor, str):
                constructor = gymnasium.envs.registration.load_env_creator(constructor)
            signature = inspect.signature(constructor)
        except (TypeError, ValueError, ImportError, AttributeError, gymnasium.error.Error):
            return None
        return misfit(signature, arguments)


class EnvSource:
    """Makes worlds of Gymnasium environments.

    Args:
        env: A Gymnasium id, an EnvSpec, a callable that returns an Env or VectorEnv, or a list of ids and patterns
            (`"ALE/*"`) of which the client names one.
        num_envs: Lanes in each world; 1 with the mode `sync`: a single environment, without lanes.
        vectorization_mode: How Gymnasium steps the lanes.
        env_kwargs: For the environment's constructor; the client's own go on top.
        max_lanes: The most lanes that a client may ask for.
        adapters: What stands around each environment, the innermost first.
        realtime: The settings of real-time worlds; None: lock-step.
        thread_safe: Each world has a thread of its own, in real time each of its lanes.
        isolation: The limits of each world's process; None: environments run in this process.
        allow_env_factories: Whether a client may send the environment's factory, which needs `isolation`.
        kind: Makes its worlds in lock-step; None: one agent steps the environment, or all lanes.
        traits: What a page shows of all its worlds.

    Raises:
        SettingError: Something of this cannot be served, such as an id that is not registered.
    """

    SETTINGS = ("env_id", "num_envs", "vectorization_mode", "render_mode", "kwargs")

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
        kind: WorldKind | None = None,
        traits: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        if kind is not None and (realtime is not None or not callable(kind)):
            raise SettingError(
                "expected world to be a callable that makes a world of its name, its environment and its scheduler, in "
                f"place of fps=, got {kind!r:.80}"
            )
        if not isinstance(num_envs, int) or not 1 <= num_envs <= max_lanes:
            raise SettingError(f"expected num_envs from 1 to max_lanes={max_lanes}, got {num_envs!r}")
        if vectorization_mode not in MODES:
            raise SettingError(
                f"expected vectorization_mode to be one of {', '.join(MODES)}, got {vectorization_mode!r}"
            )
        self._recipe = EnvRecipe.of(
            env,
            num_envs=num_envs,
            vectorization_mode=vectorization_mode,
            kwargs=dict(env_kwargs or {}),
            max_lanes=max_lanes,
            adapters=tuple(adapters),
        )
        self._realtime = realtime
        self._thread_safe = thread_safe
        self._isolation = isolation
        self._factories = allow_env_factories
        self._kind = kind
        self.traits = traits
        """What a page shows of all its worlds."""
        self._ahead: MadeAhead[WorldSettings, Environment] = MadeAhead()
        if isolation is not None:
            isolation.check(self.title, lambda: self._recipe.pickled(None))

    @property
    def fps(self) -> float | None:
        """Frames a second of its worlds; None: they are in lock-step."""
        return None if self._realtime is None else self._realtime.fps

    @property
    def env_ids(self) -> list[str]:
        """The ids that a client may name; empty where there is but one environment, without an id."""
        return self._recipe.env_ids

    @property
    def title(self) -> str:
        """Its name, as a person reads it."""
        return self._recipe.title

    @property
    def factory(self) -> Callable[..., object] | None:
        """The factory of its environments; None: they are made by their ids."""
        return self._recipe.factory

    def made_by(self, settings: Mapping[str, pb.Tensor]) -> dict[str, object]:
        """Return what the environment of a world is made of, for a recording; raises as `make_world`."""
        recipe = self._recipe if "env_factory" not in settings else self._recipe.of_factory(_factory_of_client)
        request = recipe.read({key: value for key, value in settings.items() if key != "env_factory"})
        spec = recipe.spec or (gymnasium.spec(request.env_id) if request.env_id and recipe.factory is None else None)
        entry_point = getattr(spec, "entry_point", recipe.factory)
        if callable(entry_point):
            module = getattr(entry_point, "__module__", "")
            entry_point = f"{module}:{getattr(entry_point, '__qualname__', type(entry_point).__qualname__)}"
        return {
            "env_id": request.env_id or "",
            "title": recipe.title,
            "entry_point": str(entry_point or ""),
            "num_envs": request.num_envs,
            "vectorization_mode": request.vectorization_mode,
            "kwargs": request.kwargs,
            **{name: value for adapter in recipe.adapters for name, value in adapter.describe().items()},
        }

    async def prepare(self, runtime: Runtime) -> Environment | None:
        """Make the environment of the first world ahead, where there is one to choose: what it lacks shows at once.

        Returns:
            The environment, which the first world takes; None: there are several to choose from.

        Raises:
            RequestError: It could not be made, or has a space that does not travel.
        """
        if len(self.env_ids) > 1:
            return None
        request = self._recipe.read({})
        making = self._make_env("", self._recipe, request, None, runtime)
        return await self._ahead.make(
            request, making, lambda env: zip(env.facts.spaces, ("observation", "action"), strict=True)
        )

    async def close(self) -> None:
        """Close the environment that was made ahead, where no world has taken it."""
        await self._ahead.close()

    async def make_world(self, name: str, settings: Mapping[str, pb.Tensor], runtime: Runtime) -> World:
        """Build the world that CreateWorld settings ask for; none of them: the default one.

        Raises:
            RequestError: Settings that are unknown or invalid, or an environment that could not be made.
        """
        factory = self._read_factory(settings)
        recipe = self._recipe if factory is None else self._recipe.of_factory(_factory_of_client)
        request = recipe.read({key: value for key, value in settings.items() if key != "env_factory"})
        env = await self._ahead.take(request if factory is None else None)
        if env is None:
            env = await self._make_env(name, recipe, request, factory, runtime)
        try:
            if self._realtime is not None:
                world: World = RealtimeWorld(name, env, runtime.scheduler, self._realtime)
            else:
                kind = self._kind or (GymWorld if env.facts.num_envs is None else VectorWorld)
                world = kind(name, env, runtime.scheduler)
            world.title = request.env_id
            return world
        except SettingError as error:
            await env.close()
            raise RequestError(Code.FAILED_PRECONDITION, str(error)) from error
        except BaseException:
            await env.close()
            raise

    async def _make_env(
        self, name: str, recipe: EnvRecipe, request: WorldSettings, factory: bytes | None, runtime: Runtime
    ) -> Environment:
        """Make the environment of a world, in this process or in one of its own."""
        isolation = self._isolation
        if self._realtime is not None and self._thread_safe and request.num_envs > 1:
            return await self._make_lanes(name, recipe, request, factory, runtime)
        if isolation is not None:
            return await start_isolated(name, recipe.pickled(request), factory, isolation, runtime)
        if self._thread_safe:
            thread = runtime.start_thread(f"bridge-world {name or 'default'}")
            return await adopt(partial(recipe.make_env, request), thread, own_executor=True)
        return await adopt(partial(recipe.make_env, request), runtime.executor)

    async def _make_lanes(
        self, name: str, recipe: EnvRecipe, request: WorldSettings, factory: bytes | None, runtime: Runtime
    ) -> LaneGroup:
        """Make the lanes of a real-time world one by one, each in a thread or a process of its own."""
        if request.vectorization_mode != "sync":
            raise RequestError(
                Code.FAILED_PRECONDITION,
                "a real-time world of lanes steps each environment by itself: expected vectorization_mode='sync', got "
                f"{request.vectorization_mode!r}",
            )
        single = dataclasses.replace(request, num_envs=1)
        lanes: list[LocalEnv | IsolatedEnv] = []
        try:
            for lane in range(request.num_envs):
                if self._isolation is not None:
                    data = recipe.pickled(single)
                    lanes.append(await start_isolated(f"{name} {lane}", data, factory, self._isolation, runtime))
                else:
                    thread = runtime.start_thread(f"bridge-world {name or 'default'} {lane}")
                    lanes.append(await adopt(partial(recipe.make_env, single), thread, own_executor=True))
                if (count := lanes[-1].facts.num_envs) is not None:
                    raise recipe.lanes_already(count)
        except BaseException:
            await gather(runtime.scheduler, [lane.close() for lane in lanes])
            raise
        return LaneGroup(lanes, runtime.scheduler)

    def _read_factory(self, settings: Mapping[str, pb.Tensor]) -> bytes | None:
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


def _find(env_id: str) -> EnvSpec:
    try:
        # `module:Name-v0` imports the module, which only the server's own user may ask for.
        if ":" in env_id:
            module, _, name = env_id.partition(":")
            __import__(module)
            return gymnasium.spec(name)
        return gymnasium.spec(env_id)
    except (gymnasium.error.Error, ImportError) as error:
        remedy = "Import the package that registers it first, or write MODULE:ENV_ID"
        if env_id.startswith("ALE/"):
            remedy = f"pip install 'gymnasium[atari]', and write ale_py:{env_id}"
        raise SettingError(f"cannot serve {env_id!r}: {error} {remedy}") from None


def _text(settings: Settings, name: str) -> str | None:
    value = read_scalar(settings, name, "CreateWorld")
    if value is not None and not isinstance(value, str):
        raise RequestError(Code.INVALID_ARGUMENT, f"expected the setting {name!r} to be a string, got {value!r:.80}")
    return value


def _count(settings: Settings, name: str, most: int) -> int | None:
    value = read_scalar(settings, name, "CreateWorld")
    if value is None:
        return None
    if not isinstance(value, np.integer) or not 1 <= value <= most:
        text = f"expected the setting {name!r} to be an integer from 1 to {most}, got {value!r:.80}"
        raise RequestError(Code.INVALID_ARGUMENT, text)
    return int(value)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"
