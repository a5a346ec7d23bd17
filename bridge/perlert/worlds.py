"""Environments as worlds of slots: a Gymnasium environment has one, a PettingZoo parallel environment one an agent."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import gymnasium

from bridge.errors import SettingError
from bridge.perlert.codec import Space

__all__ = ["GymWorld", "ParallelWorld", "Seen", "World", "default_name", "make_world"]

Seen: TypeAlias = tuple[Any, float, bool, bool]
"""What an agent sees of a step: observation, reward, terminated, truncated."""


class World(Protocol):
    """What an instance needs of an environment. Used by one thread."""

    agents: dict[str, str]
    """Each slot's KEY and its KIND, in order."""

    def spaces(self, key: str) -> tuple[Space, Space]:
        """Return a slot's observation and action space."""

    def reset(self, seed: int | None) -> dict[str, Any]:
        """Begin an episode; return each agent's observation."""

    def step(self, actions: Mapping[str, Any]) -> dict[str, Seen]:
        """Step with the agents' actions; return what each agent saw that was alive before. Empty: it is over."""

    def alive(self) -> Sequence[str]:
        """Return the keys of the agents that have to act."""

    def close(self) -> None:
        """Close the environment."""


def _named(agents: Sequence[tuple[str, str]], slots: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
    if slots is None:
        return dict(agents)
    if isinstance(slots, str) or len(slots) != len(agents):
        raise SettingError(f"expected slots with {len(agents)} keys, one for each agent in order, got {slots!r}")
    named = dict(slots) if isinstance(slots, Mapping) else dict(zip(slots, (kind for _, kind in agents), strict=True))
    if len(named) != len(agents):
        raise SettingError(f"expected each key once in slots, got {slots!r}")
    return named


class GymWorld:
    """One Gymnasium environment: one slot, `agent0` unless told."""

    def __init__(
        self, env: gymnasium.Env[Any, Any], kind: str, slots: Mapping[str, str] | Sequence[str] | None
    ) -> None:
        self._env = env
        self.agents = _named([("agent0", kind)], slots)
        (self._key,) = self.agents
        self._alive = False

    def spaces(self, key: str) -> tuple[Space, Space]:
        """Return the environment's spaces."""
        return self._env.observation_space, self._env.action_space

    def reset(self, seed: int | None) -> dict[str, Any]:
        """Begin an episode."""
        observation, _ = self._env.reset(seed=seed)
        self._alive = True
        return {self._key: observation}

    def step(self, actions: Mapping[str, Any]) -> dict[str, Seen]:
        """Step the environment."""
        observation, reward, terminated, truncated, _ = self._env.step(actions[self._key])
        self._alive = not (terminated or truncated)
        return {self._key: (observation, float(reward), bool(terminated), bool(truncated))}

    def alive(self) -> Sequence[str]:
        """Return the one slot's key while the episode goes on."""
        return [self._key] if self._alive else []

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


class ParallelWorld:
    """A PettingZoo parallel environment: a slot for each possible agent, of the kind that its name says."""

    def __init__(self, env: Any, slots: Mapping[str, str] | Sequence[str] | None) -> None:
        self._env = env
        names = list(env.possible_agents)
        # KIND is the name up to its trailing _N.
        self.agents = _named([(str(name), re.sub(r"_?[0-9]+\Z", "", str(name)) or "agent") for name in names], slots)
        self._names = dict(zip(self.agents, names, strict=True))
        self._keys = {name: key for key, name in self._names.items()}

    def spaces(self, key: str) -> tuple[Space, Space]:
        """Return an agent's spaces."""
        name = self._names[key]
        return self._env.observation_space(name), self._env.action_space(name)

    def reset(self, seed: int | None) -> dict[str, Any]:
        """Begin an episode."""
        observations, _ = self._env.reset(seed=seed)
        return {self._keys[name]: observation for name, observation in observations.items()}

    def step(self, actions: Mapping[str, Any]) -> dict[str, Seen]:
        """Step with the actions of the agents that are alive."""
        alive = list(self._env.agents)
        observations, rewards, terminations, truncations, _ = self._env.step(
            {name: actions[self._keys[name]] for name in alive}
        )
        return {
            self._keys[name]: (
                observations[name],
                float(rewards.get(name, 0.0)),
                bool(terminations.get(name, False)),
                bool(truncations.get(name, False)),
            )
            for name in alive
            if name in observations
        }

    def alive(self) -> Sequence[str]:
        """Return the keys of the agents that are in the episode."""
        return [self._keys[name] for name in self._env.agents]

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def default_name(env: Any) -> str:
    """Return the NAME that an environment gets unless told: `ALE/Pong-v5` is `pong`."""
    text = env if isinstance(env, str) else getattr(env, "id", None) or getattr(env, "__name__", None) or "world"
    text = re.sub(r"-v[0-9]+\Z", "", str(text).rpartition(":")[2].rpartition("/")[2])
    if text == "<lambda>":
        return "world"
    return re.sub(r"[^a-z0-9_.-]+", "_", text.lower()).strip("_")[:64] or "world"


def make_world(
    env: str | gymnasium.envs.registration.EnvSpec | Callable[..., Any],
    env_kwargs: Mapping[str, Any] | None = None,
    slots: Mapping[str, str] | Sequence[str] | None = None,
) -> World:
    """Make an environment and see how many slots it has.

    Args:
        env: A Gymnasium id or EnvSpec, or a callable that returns a `gymnasium.Env` or a PettingZoo parallel
            environment.
        env_kwargs: Keywords for its maker.
        slots: Keys (and, as a mapping, kinds) instead of the default ones, in the order of the agents.

    Raises:
        SettingError: It makes something else, or `slots` does not fit.
    """
    kwargs = dict(env_kwargs or {})
    if isinstance(env, str | gymnasium.envs.registration.EnvSpec):
        made: Any = gymnasium.make(env, **kwargs)
    elif callable(env):
        made = env(**kwargs)
    else:
        raise SettingError(
            f"expected an environment id, an EnvSpec or a callable that returns an environment, got {env!r}; "
            "pass a function such as lambda: env"
        )
    if hasattr(made, "possible_agents") and hasattr(made, "observation_space") and callable(made.observation_space):
        if hasattr(made, "agent_iter"):
            made.close()
            raise SettingError(
                f"expected a PettingZoo parallel environment, got the turn-based {made}; convert it with "
                "pettingzoo.utils.conversions.aec_to_parallel"
            )
        return ParallelWorld(made, slots)
    if isinstance(made, gymnasium.Env):
        return GymWorld(made, default_name(made.spec or env), slots)
    raise SettingError(
        f"expected a gymnasium.Env or a PettingZoo parallel environment, got {type(made).__name__} from {env!r}"
    )
