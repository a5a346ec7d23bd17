"""Groups: the agents of a world, by the names that clients use, with their actions and results.

An agent without an action in time takes a default action that the environment allows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from bridge.core.encoding.properties import ENCODED, TEXT, Property, PropertyTree
from bridge.core.encoding.space_json import space_to_json
from bridge.core.worlds.base import failures_in
from bridge.core.worlds.environment import (
    Call,
    EnvFacts,
    Environment,
    Job,
    Result,
    Transition,
    environment_properties,
)
from bridge.core.worlds.rewards import as_typed
from bridge.core.worlds.settings import Settings, read_choice
from bridge.errors import Code, RequestError, SettingError

__all__ = [
    "DEFAULT",
    "ONE",
    "Group",
    "allowed_choices",
    "check_default_action",
    "default_action",
    "is_allowed",
    "name_of_function",
    "neutral_action",
]


class _Default:
    """The type of `DEFAULT`."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT = _Default()
"""Marks an agent without an action, for which a default action has to be found."""


def neutral_action(space: spaces.Space[object]) -> Any:
    """Return the element of a space that comes closest to doing nothing: zeros, the first choice, the shortest text."""
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return np.array(space.start, dtype=space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape, dtype=space.dtype)
    if isinstance(space, spaces.Dict):
        return {key: neutral_action(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(neutral_action(part) for part in space.spaces)
    if isinstance(space, spaces.Text):
        return space.character_list[0] * space.min_length if space.min_length else ""
    if isinstance(space, spaces.OneOf):
        return np.int64(0), neutral_action(space.spaces[0])
    # Sample from a seeded copy: the action is always the same, and the user's random generator is not advanced.
    same = copy.deepcopy(space)
    same.seed(0)
    return same.sample()


def default_action(agent: object, observation: object, space: spaces.Space[Any]) -> Any:
    """Return an action that does little: the first allowed action, or the neutral one.

    Args:
        agent: The agent's id.
        observation: Its last observation; an `action_mask` in a dict is obeyed.
        space: Its action space.
    """
    mask = allowed_choices(observation, space)
    if mask is None or not isinstance(space, spaces.Discrete):
        return neutral_action(space)
    return space.dtype.type(int(space.start) + int(np.argmax(mask)))


def check_default_action(function: object) -> None:
    """Raise SettingError if `function` is neither None nor callable."""
    if function is not None and not callable(function):
        raise SettingError(f"expected default_action to be a callable (agent, observation, space), got {function!r}")


def is_allowed(action: Any, observation: object, space: spaces.Space[Any]) -> bool:
    """Return True if the `action_mask` of an agent's last observation allows an action, or if there is no mask."""
    mask = allowed_choices(observation, space)
    return mask is None or not isinstance(space, spaces.Discrete) or bool(mask[int(action) - int(space.start)])


def allowed_choices(observation: object, space: spaces.Space[Any]) -> Any:
    """Return the `action_mask`, an array with an element for each choice; None: there is no mask, or it forbids all."""
    mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
    # A mask that forbids everything, such as for an agent that is not on turn, is ignored.
    return mask if isinstance(space, spaces.Discrete) and mask is not None and np.any(mask) else None


def name_of_function(given: object) -> str:
    """Return the name of a function that chooses actions, for people; `policy` if it has no name."""
    named = given.func if isinstance(given, partial) else given
    if not (inspect.isroutine(named) or inspect.isclass(named)):
        named = type(named)
    name = str(getattr(named, "__name__", ""))
    return name if name.isidentifier() else "policy"


ONE = "agent"
"""The name of the agent in an environment with a single agent."""
_PARTS = ("observation", "reward", "terminated", "truncated", "info")


class Group:
    """The agents of a world.

    In an environment with several agents, each has its own actions, observations and end, and one step uses the actions
    of all. Any other environment has one agent, or is shared by several players, which all see the same.

    Args:
        facts: The facts of the environment.
        players: The names of the players that share an environment with a single agent; empty: it is not shared.
    """

    def __init__(self, facts: EnvFacts, players: Sequence[str] = ()) -> None:
        self._facts = facts
        self._by_lane = facts.num_envs is not None
        self._one = facts.spaces
        self.several = bool(facts.agents)
        """True for an environment with several agents."""
        self.shared = bool(players) and not self.several
        """True if several players share one agent's actions and observations."""
        # Clients name agents by strings; PettingZoo's ids may have any type.
        self.ids: dict[str, object] = {str(agent): agent for agent in facts.agents or players or (ONE,)}
        """The environment's own id of each agent, by its name; for other environments the name."""
        self._names = {agent: name for name, agent in self.ids.items()}
        self._named = all(type(agent) is str for agent in self._names)
        self.spaces = {name: facts.agents.get(agent, facts.spaces) for name, agent in self.ids.items()}
        """The observation and action space of each agent, by its name."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the environment's order."""
        return iter(self.ids)

    async def carry_out(
        self,
        env: Environment,
        job: Job,
        seen: Callable[[str], object],
        default_action: Callable[[str], Call[object]],
        keep: Callable[[Any], Any] = lambda results: results,
        read_reward: Callable[[Any], Any] = as_typed,
    ) -> tuple[dict[str, Transition], list[str]]:
        """Reset or step the environment, or a lane.

        Args:
            env: The environment.
            job: The job: for several agents with an action or `DEFAULT` for each agent that acts; otherwise with one
                action or `DEFAULT`.
            seen: Returns an agent's last observation, for a result without one.
            default_action: Returns the action of an agent without an action.
            keep: Copies values that the environment may change later.
            read_reward: Reads a reward; `as_typed` keeps the reward of a single agent as it is, which may be an array.

        Returns:
            The transition of each agent that acted or is alive, by name, and the names of the living agents.

        Raises:
            RequestError: The environment failed.
            Exception: The result of an environment with a single agent is malformed.
        """
        if not self.several:
            names, lane = self.ids, job.lane if self._by_lane else None
            if job.kind == "reset":
                result = await env.reset(seed=job.seed, options=job.options, lane=lane)
                observation, info = result
                return dict.fromkeys(names, Transition(keep(observation), info=keep(info))), [*names]
            action = await default_action(next(iter(names))) if job.action is DEFAULT else job.action
            result = await env.step(action, lane)
            observation, reward, terminated, truncated, info = result
            reward = reward if read_reward is as_typed else read_reward(reward)
            told = Transition(keep(observation), reward, bool(terminated), bool(truncated), keep(info))
            return dict.fromkeys(names, told), [] if terminated or truncated else [*names]
        if job.kind == "reset":
            result = await env.reset(seed=job.seed, options=job.options)
        else:
            actions = {}
            for name, action in job.actions.items():
                actions[self.ids[name]] = await default_action(name) if action is DEFAULT else action
            result = await env.step(actions)
        return self.told(job, result, seen, keep, read_reward)

    def told(
        self,
        job: Job,
        result: Result,
        seen: Callable[[str], object],
        keep: Callable[[Any], Any] = lambda results: results,
        read_reward: Callable[[Any], Any] = as_typed,
    ) -> tuple[dict[str, Transition], list[str]]:
        """Return the transitions of several agents and the living agents from a result; see `carry_out`.

        Args:
            job: The job.
            result: The environment's result, with the living agents.
            seen: See `carry_out`.
            keep: Copies values.
            read_reward: Reads a reward.
        """
        with failures_in(job.kind):
            *results, alive = result
            if job.kind == "reset":
                observations, infos = results
                results = [observations, {}, {}, {}, infos]
            living = list(dict.fromkeys(map(str, alive)))  # without repetitions
            unknown = [name for name in living if name not in self.ids]
            # After a reset without living agents there would be nothing to step, and agents would wait for ever.
            if unknown or (job.kind == "reset" and not living):
                known = ", ".join(self)
                remedy = "; name all that may come in its `possible_agents`" if unknown else ""
                text = f"expected agents of {known} to be alive, got {unknown or 'none'} in its `agents`{remedy}"
                raise ValueError(text)
            all_told: dict[str, Transition] = {}
            # Agents that acted need their end; living agents may have appeared in this step.
            concerned = dict.fromkeys((*job.actions, *living))
            parts, gaps = keep(results), []
            # Fast path: usually each part of the result has exactly these agents, by name.
            if not self._named or any(part.keys() != concerned.keys() for part in parts):
                parts = [self._by_name(part) for part in parts]
                gaps = [(part, of) for part, of in zip(_PARTS, parts, strict=True) if not concerned.keys() <= of.keys()]
                if job.kind == "reset":  # a reset returns only these two
                    gaps = [(part, of) for part, of in gaps if part in ("observation", "info")]
            observations, rewards, terminations, truncations, infos = parts
            for name in concerned:
                observation = observations[name] if name in observations else self._last_seen(name, seen)
                terminated, truncated = bool(terminations.get(name, False)), bool(truncations.get(name, False))
                reward, info = read_reward(rewards.get(name, 0.0)), infos.get(name, {})
                missing = [part for part, of in gaps if name not in of] if gaps else []
                # An agent that disappears without an end is truncated.
                if not (terminated or truncated) and name not in living:
                    truncated = True
                    missing.append("end")
                all_told[name] = Transition(observation, reward, terminated, truncated, info, missing)
            return all_told, living

    def _last_seen(self, name: str, seen: Callable[[str], object]) -> object:
        """Return a substitute for a missing observation: the last one, or a neutral one."""
        last = seen(name)
        return neutral_action(self.spaces[name][0]) if last is None else last

    def _by_name(self, part: Mapping[object, Any]) -> dict[str, Any]:
        """Convert the keys of an environment's result to the agents' names."""
        return {self._names.get(agent, str(agent)): value for agent, value in part.items()}

    def read(self, settings: Settings) -> str | None:
        """Read the JoinWorld setting `agent`; None: it is not given.

        Raises:
            RequestError: INVALID_ARGUMENT: it is not the name of an agent of the world.
        """
        return read_choice(settings, "agent", list(self.ids)) if "agent" in settings else None

    def choose(self, wanted: str | None, taken: Collection[str], world: str, remedy: str) -> str:
        """Return the agent that a client plays: the wanted one, or the first free one.

        Args:
            wanted: The name; None: any.
            taken: The names of agents with a player.
            world: The world's name in the message.
            remedy: What a client can do if all agents are taken.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: the wanted agent, or all of them, are taken.
        """
        free = [name for name in self.ids if name not in taken]
        if not free:
            text = f"{world} is full: all of its {len(self.ids)} agents are taken; {remedy}"
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)
        name = free[0] if wanted is None else wanted
        if name not in free:
            text = f"the agent {name!r} is taken; there are still {', '.join(free)}"
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)
        return name

    def properties(self, name: str) -> PropertyTree:
        """Return one agent's properties, below `world`: its spaces; with several agents also its name and all names."""
        observation_space, action_space = self.spaces[name]

        def leaf(key: str, kind: str, description: str, read: Callable[[], object]) -> Property:
            return Property(f"world.{key}", kind, description, read)

        exact = "the agent's exact space, as JSON"
        spaces = [
            leaf("observation_space", TEXT, exact, lambda: space_to_json(observation_space)),
            leaf("action_space", TEXT, exact, lambda: space_to_json(action_space)),
            *(
                leaf(each.name, TEXT, each.description, partial(each.read_agent, self._facts, name, action_space))
                for each in environment_properties()
                if each.read_agent is not None
            ),
        ]
        if not self.several:
            # The environment itself has the properties of its own spaces.
            return PropertyTree(spaces if self.spaces[name] != self._one else ())
        names = [
            leaf("agent", TEXT, "the agent of this connection", lambda: name),
            leaf("agents", ENCODED, "the names of all agents", lambda: list(self.ids)),
        ]
        return PropertyTree([*names, *spaces])
