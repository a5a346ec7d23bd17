"""Where a server's PettingZoo environments come from: an id, a callable, a PettingZoo module, or one environment."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import cloudpickle
import gymnasium

from bridge.encoding.tensors import unpack_tensor
from bridge.errors import Code, RequestError, SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.worlds.base import World, environment_failure, read_bytes, refuse_unknown
from bridge.worlds.environment import adopt
from bridge.worlds.isolated.env import start_isolated
from bridge.worlds.isolated.world import Isolation
from bridge.worlds.multi_agent.joint_steps import MultiAgentOptions
from bridge.worlds.multi_agent.world import MultiAgentWorld
from bridge.worlds.realtime.clocked_world import Realtime
from bridge.worlds.realtime.multi_agent import RealtimeMultiAgentWorld, check_default_action
from bridge.worlds.scheduling import Runtime

__all__ = ["ParallelRecipe", "ParallelSource", "SingleAgentEnv", "as_parallel"]


class SingleAgentEnv:
    """A Gymnasium environment as a parallel one of a single agent, `agent0`.

    Args:
        env: The environment, whose other attributes and methods are this one's.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env = env
        self.possible_agents = ["agent0"]
        self.agents: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._env.get_wrapper_attr(name)

    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        """Return the environment's observation space."""
        return self._env.observation_space

    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        """Return the environment's action space."""
        return self._env.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the environment; return observation and info by agent."""
        observation, info = self._env.reset(seed=seed, options=options)
        self.agents = list(self.possible_agents)
        return {"agent0": observation}, {"agent0": info}

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Step the environment; return its five results by agent."""
        results = self._env.step(actions["agent0"])
        if results[2] or results[3]:
            self.agents = []
        return tuple({"agent0": result} for result in results)

    def render(self) -> Any:
        """Return the environment's frame."""
        return self._env.render()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def as_parallel(env: Any) -> Any:
    """Return an environment as a parallel one of PettingZoo; an AEC one goes through PettingZoo's own conversion.

    A Gymnasium environment has one agent, `agent0`.

    Raises:
        SettingError: It is none of these.
    """
    if isinstance(env, gymnasium.Env):
        return SingleAgentEnv(env)
    if hasattr(env, "agent_iter"):
        from pettingzoo.utils import conversions

        if env.metadata.get("is_parallelizable", False):
            return conversions.aec_to_parallel(env)
        return conversions.turn_based_aec_to_parallel(env)
    missing = [name for name in ("possible_agents", "observation_space", "action_space") if not hasattr(env, name)]
    if missing:
        raise SettingError(
            f"expected a PettingZoo ParallelEnv or AECEnv, got {env!r:.80} of type {type(env).__name__}, which has no "
            f"{', '.join(missing)}"
        )
    return env


def _maker(env_id: str) -> Callable[..., Any]:
    """Find an environment in PettingZoo's own registry, the parallel ones first."""
    import pettingzoo

    for kind, registry in (("parallel", "parallel_registry"), ("aec", "aec_registry")):
        if env_id in getattr(pettingzoo, registry, {}):
            return partial(pettingzoo.make, kind, env_id)
    raise SettingError(
        f"PettingZoo {pettingzoo.__version__} has no environment {env_id!r}; give an id of its registry such as "
        "'butterfly/pistonball-v6', or a callable that returns an environment"
    )


@dataclasses.dataclass(frozen=True)
class ParallelRecipe:
    """How to make PettingZoo environments. It can be pickled for another process where its parts can."""

    factory: Callable[..., Any] | None
    """Returns a ParallelEnv or an AECEnv; None: there is one environment, which was made already."""
    title: str
    """What to call it to a person."""
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def pickled(self, kwargs: Mapping[str, Any] | None) -> bytes:
        """Pickle what another process makes an environment of."""
        data: bytes = cloudpickle.dumps((self, None if kwargs is None else dict(kwargs)))
        return data

    def read(self, settings: Mapping[str, pb.Tensor]) -> dict[str, Any]:
        """Read CreateWorld settings; return the keyword arguments of the environment.

        Raises:
            RequestError: INVALID_ARGUMENT for unknown or bad settings.
        """
        plain = {name: tensor for name, tensor in settings.items() if not name.startswith("kwargs.")}
        refuse_unknown(plain, (*ParallelSource.SETTINGS, "kwargs.NAME"), "CreateWorld")
        try:
            kwargs = {**self.kwargs, **(read_bytes(settings, "kwargs") or {})}
            for name, tensor in settings.items():
                array = unpack_tensor(tensor, name)
                if name.startswith("kwargs."):
                    kwargs[name.removeprefix("kwargs.")] = array.item() if array.shape == () else array
                elif name == "render_mode":
                    kwargs[name] = str(array[()])
        except (TensorError, TypeError) as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"bad CreateWorld settings: {error}") from error
        return kwargs

    def make_env(self, kwargs: Mapping[str, Any]) -> Any:
        """Make the environment of a world.

        Raises:
            RequestError: It could not be made.
        """
        if self.factory is None:
            raise RequestError(Code.FAILED_PRECONDITION, f"{self.title} was made already")
        try:
            return as_parallel(self.factory(**kwargs))
        except RequestError:
            raise
        except TypeError as error:
            raise RequestError(
                Code.INVALID_ARGUMENT, f"{self.title} could not be made with the arguments {dict(kwargs)}: {error}"
            ) from error
        except (Exception, SystemExit) as error:
            raise environment_failure("its construction", error) from error


class ParallelSource:
    """Makes worlds of a PettingZoo environment.

    Args:
        env: An id of PettingZoo's registry, a callable that returns a ParallelEnv or AECEnv, a PettingZoo module
            (`pettingzoo.butterfly.pistonball_v6`), or one environment, of which there can be but one world. The
            environment is used by the server's thread from then on.
        options: How the agents of a world are coordinated.
        env_kwargs: For the callable; the client's own go on top.
        isolation: What the process of each world may use; None: environments live in this process.
        realtime: How its worlds run on by themselves, whatever `options` say; None: in lock-step.
        thread_safe: Each world has a thread of its own.

    Raises:
        SettingError: It is none of these, or cannot be sent to another process.
    """

    SETTINGS: tuple[str, ...] = ("render_mode", "kwargs")

    def __init__(
        self,
        env: Any,
        options: MultiAgentOptions | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        isolation: Isolation | None = None,
        *,
        realtime: Realtime | None = None,
        thread_safe: bool = False,
    ) -> None:
        if realtime is not None:
            realtime.check()
            check_default_action(realtime.default_action)
        self._options = options or MultiAgentOptions()
        self._isolation = isolation
        self._realtime = realtime
        self._thread_safe = thread_safe
        self._only: list[Any] = []
        """The environment that was made already, until its one world takes it."""
        factory: Any
        if isinstance(env, str):
            factory, title = _maker(env), env
        elif inspect.ismodule(env):
            factory, title = getattr(env, "parallel_env", None) or getattr(env, "env", None), env.__name__
        elif hasattr(env, "possible_agents") and not inspect.isclass(env):
            factory, title = None, str(env)
            self._only.append(as_parallel(env))
            if env_kwargs:
                raise SettingError("env_kwargs go to a callable; the environment that was given is made already")
        else:
            factory, title = env, getattr(env, "__name__", type(env).__name__)
        if not self._only and not callable(factory):
            raise SettingError(
                "expected an id, a callable that returns a PettingZoo environment, a PettingZoo module, or an "
                f"environment; got {env!r:.80} of type {type(env).__name__}"
            )
        self._recipe = ParallelRecipe(factory, title, dict(env_kwargs or {}))
        if isolation is not None:
            if factory is None:
                raise SettingError(
                    f'isolation="process" makes each environment in a process of its own, and {title} is made '
                    "already; give serve_parallel a callable that makes it"
                )
            isolation.check(title, lambda: self._recipe.pickled(None))

    @property
    def single(self) -> bool:
        """Whether there is one environment, and so at most one world."""
        return self._recipe.factory is None

    @property
    def fps(self) -> float | None:
        """Frames a second of its worlds; None: they are in lock-step."""
        return None if self._realtime is None else self._realtime.fps

    @property
    def env_ids(self) -> list[str]:
        """No ids: there is one kind of environment."""
        return []

    @property
    def title(self) -> str:
        """What to call it to a person."""
        return self._recipe.title

    async def prepare(self, runtime: Runtime) -> None:
        """Make nothing ahead."""

    async def close(self) -> None:
        """Close nothing: every environment is a world's."""

    async def make_world(self, name: str, settings: Mapping[str, pb.Tensor], runtime: Runtime) -> World:
        """Build the world that CreateWorld settings ask for.

        Raises:
            RequestError: Settings that are unknown or invalid, or an environment that could not be made.
        """
        kwargs = self._recipe.read(settings)
        executor = runtime.executor
        if self._isolation is not None:
            env: Any = await start_isolated(name, self._recipe.pickled(kwargs), None, self._isolation, runtime)
        else:
            make = partial(self._recipe.make_env, kwargs) if not self.single else self._take(settings)
            if self._thread_safe:
                executor = runtime.start_thread(f"bridge-world {name or 'default'}")
            env = await adopt(make, executor, own_executor=self._thread_safe, parallel=True)
        try:
            if self._realtime is not None:
                return RealtimeMultiAgentWorld(name, env, runtime.scheduler, executor, self._realtime)
            return MultiAgentWorld(name, env, runtime.scheduler, executor, self._options)
        except BaseException:
            await env.close()
            raise

    def _take(self, settings: Mapping[str, pb.Tensor]) -> Callable[[], Any]:
        """Return what hands over the environment that was made already, and keeps no reference to it."""
        if settings or not self._only:
            raise RequestError(
                Code.FAILED_PRECONDITION,
                "this server has one environment and so one world, which takes no settings; join that which exists, or "
                "give serve_parallel a callable",
            )
        taken, self._only = self._only, []
        return taken.pop
