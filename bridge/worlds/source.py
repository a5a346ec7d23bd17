"""Where a server's environments come from: an id, a spec, a callable, or a list of ids and patterns."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fnmatch
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from bridge.errors import Code, RequestError, SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.tensors import unpack_tensor
from bridge.worlds.base import Lock, World, environment_failure, read_bytes, refuse_unknown
from bridge.worlds.gym import GymWorld
from bridge.worlds.isolated import Isolation, start_method
from bridge.worlds.isolated_env import start_isolated
from bridge.worlds.realtime import Realtime, RealtimeWorld
from bridge.worlds.timed import TimeAction
from bridge.worlds.vector import VectorWorld

__all__ = ["EnvLike", "EnvSource"]

EnvLike: TypeAlias = "str | EnvSpec | Callable[..., Any] | Sequence[str]"
"""What `serve_gym` takes as its environment."""

MODES = ("sync", "async", "vector_entry_point")


@dataclasses.dataclass(frozen=True)
class Order:
    """What a CreateWorld request asks for, read and checked."""

    env_id: str | None
    num_envs: int
    vectorization_mode: str
    kwargs: Mapping[str, Any]

    @property
    def single(self) -> bool:
        """Whether the world is of one environment rather than of lanes."""
        return self.num_envs == 1 and self.vectorization_mode == "sync"


class EnvSource:
    """Makes worlds.

    Args:
        env: A Gymnasium id, an EnvSpec, a callable that returns an Env or VectorEnv, or a list of ids and patterns
            (`"ALE/*"`) of which the client names one.
        num_envs: Lanes in each world; 1 with the mode `sync`: a single environment, without lanes.
        vectorization_mode: How Gymnasium steps the lanes.
        env_kwargs: For the environment's constructor; the client's own go on top.
        max_lanes: The most lanes that a client may ask for.
        time_action: Lets an action say how long its environment advances.
        realtime: How its worlds run on by themselves; None: in lock-step.
        thread_safe: Environments may be called at the same time, each from one thread.

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
        env_kwargs: Mapping[str, Any] | None = None,
        max_lanes: int = 4096,
        time_action: TimeAction | None = None,
        realtime: Realtime | None = None,
        thread_safe: bool = False,
    ) -> None:
        if time_action is not None and not isinstance(time_action, TimeAction):
            raise SettingError(f"expected time_action to be a bridge.TimeAction or None, got {time_action!r:.80}")
        self._time_action = time_action
        if not isinstance(num_envs, int) or not 1 <= num_envs <= max_lanes:
            raise SettingError(f"expected num_envs from 1 to max_lanes={max_lanes}, got {num_envs!r}")
        if vectorization_mode not in MODES:
            raise SettingError(
                f"expected vectorization_mode to be one of {', '.join(MODES)}, got {vectorization_mode!r}"
            )
        self._num_envs = num_envs
        self._mode = vectorization_mode
        self._kwargs = dict(env_kwargs or {})
        self._max_lanes = max_lanes
        self._isolation: Isolation | None = None
        self._factories = False
        self._realtime = realtime
        self._thread_safe = thread_safe
        self._callable: Callable[..., Any] | None = None
        self._spec: EnvSpec | None = None
        self._patterns: tuple[str, ...] = ()
        if isinstance(env, str):
            self._spec = _find(env)
        elif isinstance(env, EnvSpec):
            self._spec = env
        elif callable(env):
            self._callable = env
        elif isinstance(env, Sequence) and env and all(isinstance(item, str) for item in env):
            self._patterns = tuple(env)
            missing = [pattern for pattern in env if not fnmatch.filter(gymnasium.registry, pattern)]
            if missing:
                raise SettingError(
                    f"no registered environment matches {', '.join(map(repr, missing))}; import the package that "
                    "registers it first"
                )
        else:
            raise SettingError(
                "expected a Gymnasium id, an EnvSpec, a callable that returns an environment, or a list of ids; got "
                f"{env!r:.80} of type {type(env).__name__}"
            )

    @property
    def env_ids(self) -> list[str]:
        """The ids that a client may name; empty where there is but one environment, without an id."""
        if self._patterns:
            names = (name for pattern in self._patterns for name in fnmatch.filter(gymnasium.registry, pattern))
            return list(dict.fromkeys(names))
        return [self._spec.id] if self._spec else []

    @property
    def title(self) -> str:
        """What to call it to a person."""
        if self._callable is not None:
            return getattr(self._callable, "__name__", type(self._callable).__name__)
        return ", ".join(self._patterns) or (self._spec.id if self._spec else "")

    @property
    def apart(self) -> bool:
        """Whether its worlds are called at the same time, under locks of their own."""
        return self._isolation is not None or self._thread_safe

    def make_world(self, name: str, settings: Mapping[str, pb.Tensor], lock: Lock) -> World:
        """Build the world that CreateWorld settings ask for; none of them: the default one.

        Raises:
            RequestError: Settings that are unknown or invalid, or an environment that could not be made.
        """
        factory = self._read_factory(settings)
        source = self if factory is None else self.of_factory(_factory_of_client)
        order = source._read({key: value for key, value in settings.items() if key != "env_factory"})
        if self._isolation is not None:
            channels = 1 if self._realtime is None else self._realtime.channels(order.num_envs)
            recipe = source._recipe(order)
            isolated = start_isolated(name, recipe, factory, self._isolation, channels)
            return self._world_of(name, isolated, contextlib.nullcontext())  # its process takes one call at a time
        with lock:
            own = threading.RLock() if self._thread_safe else lock
            return self._world_of(name, source.make_env(order), own)

    def isolate(self, isolation: Isolation | None, allow_env_factories: bool) -> None:
        """Make each world's environment in a process of its own from here on.

        Args:
            isolation: What each process may use; None: environments live in this process.
            allow_env_factories: Whether a client may send the environment's factory, which needs isolation.

        Raises:
            SettingError: What is served cannot be sent to another process.
        """
        self._isolation, self._factories = isolation, allow_env_factories
        if isolation is not None:
            isolation.check(self.title, lambda: self._recipe(None))

    def _recipe(self, order: Order | None) -> bytes:
        """Pickle what another process builds a world of, where nothing that was registered here is known."""
        source = copy.copy(self)
        source._isolation = source._realtime = None
        if order is not None and order.env_id is not None and self._callable is None:
            source._spec, source._patterns = self._spec or gymnasium.spec(order.env_id), ()
        recipe: bytes = cloudpickle.dumps((source, order))
        return recipe

    def _read_factory(self, settings: Mapping[str, pb.Tensor]) -> bytes | None:
        """Return a client's factory, still pickled."""
        if "env_factory" not in settings:
            return None
        if not self._factories:
            raise RequestError(
                Code.PERMISSION_DENIED,
                "this server takes no environment factories from clients: they are code that it would execute; start "
                "it with allow_env_factories=True if its clients may do that",
            )
        if "env_id" in settings:
            raise RequestError(Code.INVALID_ARGUMENT, "expected env_id or env_factory, got both")
        tensor = settings["env_factory"]
        if tensor.WhichOneof("payload") != "uint8s":
            raise RequestError(Code.INVALID_ARGUMENT, "the setting 'env_factory' travels as uint8 bytes of a pickle")
        return tensor.uint8s.array

    def of_factory(self, factory: Callable[..., Any]) -> EnvSource:
        """Return a source that makes its environments by a function in place of what is served."""
        source = copy.copy(self)
        source._callable, source._spec, source._patterns = factory, None, ()
        source._kwargs, source._num_envs, source._mode = {}, 1, "sync"  # those were for the server's own environment
        return source

    def make_env(self, order: Order) -> Any:
        """Make the environment, in this process.

        Raises:
            RequestError: It could not be made.
        """
        try:
            return self._make(order)
        except RequestError:
            raise
        except TypeError as error:
            raise RequestError(
                Code.INVALID_ARGUMENT,
                f"{order.env_id or self.title} could not be made with the arguments {dict(order.kwargs)}: {error}. "
                f"{self._signature(order)}",
            ) from error
        except (Exception, SystemExit) as error:
            raise environment_failure("its construction", error) from error

    def _world_of(self, name: str, env: Any, lock: Lock) -> World:
        """Build the world around an environment, or around what stands for it."""
        try:
            if self._realtime is not None:
                return RealtimeWorld(name, env, lock, self._realtime)
            return VectorWorld(name, env, lock) if isinstance(env, VectorEnv) else GymWorld(name, env, lock)
        except SettingError as error:
            env.close()
            raise RequestError(Code.FAILED_PRECONDITION, str(error)) from error

    def _read(self, settings: Mapping[str, pb.Tensor]) -> Order:
        plain = {name: tensor for name, tensor in settings.items() if not name.startswith("kwargs.")}
        refuse_unknown(plain, (*self.SETTINGS, "kwargs.NAME"), "CreateWorld")
        try:
            env_id = _text(settings, "env_id")
            render_mode = _text(settings, "render_mode")
            mode = _text(settings, "vectorization_mode") or self._mode
            num_envs = _count(settings, "num_envs", self._max_lanes) or self._num_envs
            given = read_bytes(settings, "kwargs") or {}
            if not isinstance(given, dict):
                raise TensorError(f"expected kwargs to be a dict, got {given!r:.80}")
            kwargs = {**self._kwargs, **given}
            for name, tensor in settings.items():
                if name.startswith("kwargs."):
                    kwargs[name.removeprefix("kwargs.")] = _python(unpack_tensor(tensor, name))
        except TensorError as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"bad CreateWorld settings: {error}") from error
        if mode not in MODES:
            raise RequestError(
                Code.INVALID_ARGUMENT, f"expected vectorization_mode to be one of {', '.join(MODES)}, got {mode!r}"
            )
        if render_mode:
            kwargs["render_mode"] = render_mode
        return Order(self._resolve(env_id), num_envs, mode, kwargs)

    def _resolve(self, env_id: str | None) -> str | None:
        """Find the environment that a client names among those that are served."""
        served = self.env_ids
        if env_id is None:
            if len(served) > 1:
                raise RequestError(
                    Code.INVALID_ARGUMENT,
                    f"name the environment in the setting env_id; this server has {_some(served)}",
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

    def _make(self, order: Order) -> gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]:
        kwargs = dict(order.kwargs)
        if self._callable is not None:
            return self._make_from_callable(order, kwargs)
        spec = self._spec if self._spec is not None else gymnasium.spec(str(order.env_id))
        if order.single:
            env: gymnasium.Env[Any, Any] = gymnasium.make(spec, **kwargs)
            return env if self._time_action is None else self._time_action.wrap(env)
        vector_kwargs: dict[str, Any] = {}
        if order.vectorization_mode == "sync":
            vector_kwargs = {"copy": False}  # what it returns is sent before its next step
        elif order.vectorization_mode == "async":
            vector_kwargs = {"copy": False, "context": start_method()}
        vector: VectorEnv[Any, Any, Any] = gymnasium.make_vec(
            spec,
            num_envs=order.num_envs,
            vectorization_mode=order.vectorization_mode,
            vector_kwargs=vector_kwargs,
            wrappers=None if self._time_action is None else [self._time_action.wrap],
            **kwargs,
        )
        return vector

    def _make_from_callable(
        self, order: Order, kwargs: dict[str, Any]
    ) -> gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]:
        function, num_envs = self._callable, order.num_envs
        if function is None:
            raise SettingError("there is no callable to make an environment from")
        if self._time_action is not None:
            function = partial(_make_timed, function, self._time_action)
        if order.single:
            env = function(**kwargs)
        elif order.vectorization_mode == "vector_entry_point":
            raise RequestError(
                Code.INVALID_ARGUMENT,
                f"{self.title} is a callable, which has no vector entry point; expected vectorization_mode sync or "
                "async, or a callable that returns a VectorEnv",
            )
        elif order.vectorization_mode == "async":
            env = AsyncVectorEnv([lambda: function(**kwargs)] * num_envs, copy=False, context=start_method())
        else:
            first = function(**kwargs)
            if isinstance(first, VectorEnv):
                first.close()
                raise RequestError(
                    Code.INVALID_ARGUMENT,
                    f"{self.title} returns a vector environment of {first.num_envs} lanes, so num_envs cannot be given",
                )
            made = iter([first])
            env = SyncVectorEnv([lambda: next(made, None) or function(**kwargs)] * num_envs, copy=False)
        if not isinstance(env, (gymnasium.Env, VectorEnv)):
            raise RequestError(
                Code.INTERNAL,
                f"{self.title} returned a {type(env).__name__}, where a gymnasium.Env or VectorEnv was expected",
            )
        return env

    def _signature(self, order: Order) -> str:
        """Name the arguments that the environment takes, where they can be found out."""
        try:
            if self._callable is not None:
                return f"It takes {inspect.signature(self._callable)}"
            spec = self._spec or gymnasium.spec(str(order.env_id))
            point: Any = spec.entry_point
            if isinstance(point, str):
                point = gymnasium.envs.registration.load_env_creator(point)
            return f"It takes {inspect.signature(point)}" if point else ""
        except (TypeError, ValueError, ImportError, AttributeError, gymnasium.error.Error):
            return ""


def _factory_of_client(**kwargs: Any) -> Any:
    """Stand for a client's factory in the process that does not unpickle it."""
    raise SettingError("a client's factory is called in a world's process only")


def _make_timed(function: Callable[..., Any], time_action: TimeAction, **kwargs: Any) -> Any:
    env = function(**kwargs)
    if not isinstance(env, gymnasium.Env):
        raise SettingError(f"time_action needs a gymnasium.Env, got a {type(env).__name__}")
    return time_action.wrap(env)


def _find(env_id: str) -> EnvSpec:
    try:
        # `module:Name-v0` imports the module, which only the server's own user may ask for.
        if ":" in env_id:
            module, _, name = env_id.partition(":")
            __import__(module)
            return gymnasium.spec(name)
        return gymnasium.spec(env_id)
    except (gymnasium.error.Error, ImportError) as error:
        raise SettingError(
            f"cannot serve {env_id!r}: {error} Import the package that registers it first, or write MODULE:ENV_ID"
        ) from error


def _text(settings: Mapping[str, pb.Tensor], name: str) -> str | None:
    if name not in settings:
        return None
    value = unpack_tensor(settings[name], name)[()]
    if not isinstance(value, str):
        raise TensorError(f"expected the setting {name!r} to be a string, got {value!r:.80}")
    return value


def _count(settings: Mapping[str, pb.Tensor], name: str, most: int) -> int | None:
    if name not in settings:
        return None
    value = unpack_tensor(settings[name], name)[()]
    if not isinstance(value, np.integer) or not 1 <= value <= most:
        raise TensorError(f"expected the setting {name!r} to be an integer from 1 to {most}, got {value!r:.80}")
    return int(value)


def _python(array: Any) -> Any:
    """A scalar as Python's own type, so that an environment's arguments look as they do locally."""
    if array.shape == ():
        value = array[()]
        return value.item() if isinstance(value, np.generic) else value
    return array


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"
