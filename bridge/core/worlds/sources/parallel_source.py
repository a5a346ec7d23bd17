"""The source of PettingZoo environments: an id, a callable, a PettingZoo module, or one environment."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import gymnasium

from bridge.core.extras import needed
from bridge.core.worlds.environment import Environment, Isolation
from bridge.core.worlds.group import check_default_action
from bridge.core.worlds.kinds import ParallelEnv, as_parallel, is_parallel
from bridge.core.worlds.multi_agent.joint_steps import AllActed, MultiAgentOptions
from bridge.core.worlds.own_worlds import OwnWorld, own_world
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.realtime.multi_agent import JointClock
from bridge.core.worlds.realtime_options import RealtimeOptions
from bridge.core.worlds.recipe import constructed
from bridge.core.worlds.scheduling import Runtime
from bridge.core.worlds.settings import Settings, read_kwargs
from bridge.core.worlds.sources.source import Source
from bridge.core.worlds.turns import Turns
from bridge.core.worlds.world import paced_by
from bridge.errors import Code, RequestError, SettingError

__all__ = ["ParallelRecipe", "ParallelSource"]


SETTINGS = ("render_mode", "kwargs")
"""The settings of CreateWorld."""


def _maker(env_id: str) -> Callable[..., object]:
    """Return an environment's function in PettingZoo's own registry, a parallel one if there is one."""
    with needed("an id of PettingZoo's registry needs PettingZoo", "pettingzoo"):
        import pettingzoo

    # A parallel environment needs no conversion.
    for kind, registry in (("parallel", "parallel_registry"), ("aec", "aec_registry")):
        if env_id in getattr(pettingzoo, registry, {}):
            return partial(pettingzoo.make, kind, env_id)
    raise SettingError(
        f"PettingZoo {pettingzoo.__version__} has no environment {env_id!r}; give an id of its registry such as "
        "'butterfly/pistonball-v6', or a callable that returns an environment"
    )


@dataclasses.dataclass(frozen=True)
class ParallelRecipe:
    """How to make PettingZoo environments. It can be pickled for another process if its parts can."""

    factory: Callable[..., object] | None
    """Returns a ParallelEnv or an AECEnv; None: there is one environment, which was made already."""
    title: str
    """The name, for people to read."""
    kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def read(self, settings: Settings) -> ParallelRecipe:
        """Read CreateWorld settings; return the recipe of the requested world.

        Raises:
            RequestError: INVALID_ARGUMENT for unknown or bad settings.
        """
        return dataclasses.replace(self, kwargs=read_kwargs(settings, SETTINGS, self.kwargs))

    def make_env(self) -> ParallelEnv:
        """Make the environment of a world.

        Raises:
            RequestError: It could not be made.
        """
        if self.factory is None:
            raise RequestError(Code.FAILED_PRECONDITION, f"{self.title} was made already")
        factory, kwargs = self.factory, self.kwargs
        return constructed(self.title, kwargs, lambda: as_parallel(factory(**kwargs)), lambda: (factory, kwargs))


class ParallelSource(Source[ParallelRecipe]):
    """Makes worlds of a PettingZoo environment.

    Args:
        env: An id of PettingZoo's registry, a callable that returns a ParallelEnv or AECEnv, a PettingZoo module
            (`pettingzoo.butterfly.pistonball_v6`), or one environment, of which there can be only one world. The
            server's thread uses the environment from then on.
        options: How the agents of a world are coordinated.
        env_kwargs: Arguments for the callable; a client's own arguments override them.
        isolation: The limits of each world's process; None: environments run in this process.
        realtime: The settings of real-time worlds, whatever `options` say; None: lock-step.
        thread_safe: Each world has a thread of its own.
        clock: Makes the pacers of real-time worlds.
        world: Makes the worlds, or their pacers, in place of `options`, see `own_world`; None: `options` apply.
        traits: Values that a page shows for all worlds.

    Raises:
        SettingError: `env` is none of these, or cannot be sent to another process.
    """

    SETTINGS = SETTINGS

    def __init__(
        self,
        env: object,
        options: MultiAgentOptions | None = None,
        env_kwargs: Mapping[str, object] | None = None,
        isolation: Isolation | None = None,
        *,
        realtime: RealtimeOptions | None = None,
        thread_safe: bool = False,
        clock: Callable[[RealtimeOptions], Pacer] = JointClock,
        world: str | OwnWorld | None = None,
        traits: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        if realtime is not None:
            check_default_action(realtime.default_action)
        self._only: list[ParallelEnv] = []
        """The environment that was made already, until its only world takes it."""
        self._env_id = env if isinstance(env, str) else ""
        factory: Any
        if isinstance(env, str):
            factory, title = _maker(env), env
        elif inspect.ismodule(env):
            factory, title = getattr(env, "parallel_env", None) or getattr(env, "env", None), env.__name__
        elif is_parallel(env):
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
        if isolation is not None and factory is None:
            raise SettingError(
                f'isolation="process" makes each environment in a process of its own, and {title} is made already; '
                "give serve_parallel a callable that makes it"
            )
        if world is not None:
            kind = own_world(world)
        elif realtime is not None:
            kind = paced_by(partial(clock, realtime))
        else:
            kind = paced_by(lambda: Turns(AllActed(options or MultiAgentOptions())))
        recipe = ParallelRecipe(factory, title, dict(env_kwargs or {}))
        super().__init__(recipe, kind, realtime, thread_safe, isolation, traits)

    @property
    def offers_one(self) -> bool:
        """False if there is one environment, which was made already, and so at most one world."""
        return self.factory is not None

    def made_by(self, settings: Settings) -> dict[str, object]:
        """Return how the environment of a world is made, for a recording; raises as `make_world`."""
        factory, env_id = self.recipe.factory, self._env_id
        if isinstance(factory, partial) and factory.func is gymnasium.make:
            spec = factory.args[0] if not isinstance(factory.args[0], str) else gymnasium.spec(factory.args[0])
            env_id, entry_point = spec.id, str(spec.entry_point)
        else:
            name = getattr(factory, "__qualname__", "")
            entry_point = f"{getattr(factory, '__module__', '')}:{name}" if name and not env_id else ""
        return {
            "env_id": env_id,
            "title": env_id or self.recipe.title,
            "entry_point": entry_point,
            "kwargs": self.recipe.read(settings).kwargs,
        }

    def read(self, settings: Settings) -> tuple[ParallelRecipe, None]:
        """Read CreateWorld settings; empty ones are for the default world. Raises RequestError."""
        recipe = self.recipe.read(settings)
        return recipe if self.offers_one else self._hand_over(settings), None

    async def _make_env(
        self, name: str, recipe: ParallelRecipe, factory: bytes | None, runtime: Runtime
    ) -> Environment:
        """Make the environment of a world, and check that it has all agents with a policy."""
        env = await super()._make_env(name, recipe, factory, runtime)
        try:
            if self._realtime is not None and self._realtime.stand_ins is not None:
                self._realtime.stand_ins.check([str(agent) for agent in env.facts.agents])
        except SettingError as error:
            await env.close()
            raise RequestError(Code.INVALID_ARGUMENT, str(error)) from error
        return env

    def _hand_over(self, settings: Settings) -> ParallelRecipe:
        """Return a recipe that passes on the environment that was made already, without keeping a reference to it."""
        if settings or not self._only:
            raise RequestError(
                Code.FAILED_PRECONDITION,
                "this server has one environment and so one world, which takes no settings; join that which exists, or "
                "give serve_parallel a callable",
            )
        taken, self._only = self._only, []
        return ParallelRecipe(_HandOver(taken, self.title), self.title)


class _HandOver:
    """Returns an environment that was made already, once.

    Args:
        taken: A list with the environment, which is removed from it.
        title: The environment's name.
    """

    def __init__(self, taken: list[ParallelEnv], title: str) -> None:
        self._taken, self._title = taken, title

    def __call__(self) -> ParallelEnv:
        if not self._taken:
            text = f"{self._title} was made already, and another one is needed; give serve_parallel a callable"
            raise RequestError(Code.FAILED_PRECONDITION, text)
        # The list must not keep it: a reference here would keep the environment from being freed in its own thread.
        return self._taken.pop()
