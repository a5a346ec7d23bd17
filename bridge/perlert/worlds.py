"""Environments for instances: PettingZoo ones of either kind as they are, a Gymnasium environment as one agent's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium

from bridge.errors import SettingError
from bridge.worlds.environment import adopt
from bridge.worlds.isolated.env import start_isolated
from bridge.worlds.isolated.world import Isolation
from bridge.worlds.multi_agent.source import ParallelRecipe
from bridge.worlds.scheduling import Runtime

__all__ = ["OneAgent", "default_name", "make_world", "slots_of"]

ONE_AGENT = "agent0"


class OneAgent:
    """A Gymnasium environment as a PettingZoo parallel one, of one agent.

    Args:
        env: The environment.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env = env
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self.possible_agents = [ONE_AGENT]
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        """Return the environment's observation space."""
        return self._env.observation_space

    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        """Return the environment's action space."""
        return self._env.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin an episode."""
        observation, info = self._env.reset(seed=seed, options=options)
        self.agents = [ONE_AGENT]
        return {ONE_AGENT: observation}, {ONE_AGENT: info}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        """Step the environment."""
        result = self._env.step(actions[ONE_AGENT])
        if result[2] or result[3]:
            self.agents = []
        return tuple({ONE_AGENT: part} for part in result)

    def render(self) -> Any:
        """Render the environment."""
        return self._env.render()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _made(factory: Callable[..., Any], **kwargs: Any) -> Any:
    made = factory(**kwargs)
    return OneAgent(made) if isinstance(made, gymnasium.Env) else made


def default_name(env: Any) -> str:
    """Return the NAME that an environment gets unless told: `ALE/Pong-v5` is `pong`."""
    text = env if isinstance(env, str) else getattr(env, "id", None) or getattr(env, "__name__", None) or "world"
    text = re.sub(r"[-_]v[0-9]+\Z", "", str(text).rpartition(":")[2].rpartition("/")[2])
    if text == "<lambda>":
        return "world"
    return re.sub(r"[^a-z0-9_.-]+", "_", text.lower()).strip("_")[:64] or "world"


def slots_of(agents: Sequence[Any], name: str, slots: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
    """Return KEY and KIND of the slot of each agent, in order: the agent's name, and that up to its trailing `_N`.

    Args:
        agents: The agents of the environment.
        name: The kind of a Gymnasium environment's agent.
        slots: Keys (and, as a mapping, kinds) instead.

    Raises:
        SettingError: `slots` does not fit.
    """
    kinds = [re.sub(r"_?[0-9]+\Z", "", str(agent)) or "agent" for agent in agents]
    if list(agents) == [ONE_AGENT]:
        kinds = [name]
    if slots is None:
        return dict(zip(map(str, agents), kinds, strict=True))
    if isinstance(slots, str) or len(slots) != len(agents) or len(set(slots)) < len(slots):
        raise SettingError(f"expected slots with {len(agents)} keys, one for each agent in order, got {slots!r}")
    return dict(slots) if isinstance(slots, Mapping) else dict(zip(slots, kinds, strict=True))


async def make_world(
    env: Any, kwargs: Mapping[str, Any], runtime: Runtime, name: str, isolation: Isolation | None, thread_safe: bool
) -> Any:
    """Make an environment where it belongs, and return what is awaited of it (`bridge.worlds.environment`).

    Args:
        env: A Gymnasium id or EnvSpec, or a callable that returns a `gymnasium.Env` or a PettingZoo environment.
        kwargs: Keywords for its maker.
        runtime: Calls it.
        name: Of its process or thread.
        isolation: What its process may use; None: it lives in this one.
        thread_safe: Whether it has a thread of its own.

    Raises:
        SettingError: It is something else, or cannot be sent to another process.
        RequestError: It could not be made.
    """
    if isinstance(env, str | gymnasium.envs.registration.EnvSpec):
        factory: Callable[..., Any] = partial(gymnasium.make, env)
    elif callable(env):
        factory = env
    else:
        raise SettingError(
            f"expected an environment id, an EnvSpec or a callable that returns an environment, got {env!r:.80}; "
            "pass a function such as lambda: env"
        )
    recipe = ParallelRecipe(partial(_made, factory), default_name(env))
    if isolation is not None:
        isolation.check(recipe.title, lambda: recipe.pickled(None))
        return await start_isolated(name, recipe.pickled(kwargs), None, isolation, runtime)
    executor = runtime.start_thread(f"bridge-{name}") if thread_safe else runtime.executor
    return await adopt(partial(recipe.make_env, kwargs), executor, own_executor=thread_safe, parallel=True)
