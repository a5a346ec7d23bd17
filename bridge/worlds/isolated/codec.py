"""The messages in the pipe between a world and its environment's process: the same code at both ends.

Observations and actions travel as the arrays of their spaces' layouts, everything else in the values codec. Agents are
sent as indices, because their ids may be of any type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium.vector import AutoresetMode

from bridge.encoding import values
from bridge.encoding.space_json import plain_space_from_json, space_to_json
from bridge.encoding.spaces import Layout
from bridge.encoding.tensors import Array
from bridge.errors import Code, RequestError, TensorError
from bridge.worlds.environment import EnvFacts, Result, Spaces
from bridge.worlds.rewards import Rewards

__all__ = ["Codec", "codec_of", "facts_from_values", "facts_to_values"]

_NOT_STEPPED: Sequence[Mapping[object, Any]] = ({}, {}, {})
"""The rewards, terminations and truncations of a reset."""


def facts_to_values(facts: EnvFacts) -> dict[str, object]:
    """Return facts as the values codec sends them; agents' ids that are no texts or integers become texts."""
    return {
        **vars(facts),
        "spaces": _texts(facts.spaces),
        "agents": [
            [agent if isinstance(agent, (str, int)) else str(agent), _texts(pair)]
            for agent, pair in facts.agents.items()
        ],
        "reward_space": None if facts.reward_space is None else space_to_json(facts.reward_space),
        "autoreset": None if facts.autoreset is None else facts.autoreset.name,
    }


def facts_from_values(told: dict[str, Any]) -> EnvFacts:
    """Return the facts that `facts_to_values` made these of."""
    reward_space, autoreset = told["reward_space"], told["autoreset"]
    return EnvFacts(
        **{
            **told,
            "spaces": _spaces(told["spaces"]),
            "agents": {agent: _spaces(pair) for agent, pair in told["agents"]},
            "reward_space": None if reward_space is None else plain_space_from_json(reward_space),
            "autoreset": None if autoreset is None else AutoresetMode[autoreset],
        }
    )


def _texts(pair: Spaces) -> list[str]:
    return [space_to_json(space) for space in pair]


def _spaces(pair: Sequence[str]) -> Spaces:
    return plain_space_from_json(pair[0]), plain_space_from_json(pair[1])


class Codec(Protocol):
    """Packs actions and results for the pipe, and unpacks them."""

    def pack_action(self, action: Any) -> object:
        """Return an action for the pipe."""

    def unpack_action(self, packed: Any) -> object:
        """Return the action for the environment."""

    def pack(self, result: Result) -> object:
        """Return what `reset` or `step` returned, for the pipe; raises RequestError where it is not of its spaces."""

    def unpack(self, packed: Any, notes: list[str]) -> Result:
        """Return what `reset` or `step` returned; `notes` gets what clients are to be told."""


class _OneAgent:
    """Of one environment, or of the lanes that one call steps.

    Args:
        facts: Those of the environment.
    """

    def __init__(self, facts: EnvFacts) -> None:
        lanes = facts.num_envs
        self._observations = Layout(facts.observation_space, "observation", lanes)
        self._actions = Layout(facts.action_space, "action", lanes)
        self._rewards = Rewards(facts.reward_space, lanes)
        self._lanes = lanes
        self._notes = values.Notes()

    def pack_action(self, action: Any) -> object:
        return self._actions.pack(action, rounding=True)

    def unpack_action(self, packed: Any) -> object:
        return self._actions.unpack(packed)

    def pack(self, result: Result) -> object:
        observation, *told, info = result
        if told:
            reward, terminated, truncated = told
            if self._lanes is None:
                told = [self._rewards.read(reward, self._notes), bool(terminated), bool(truncated)]
            else:
                flags = [np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_)]
                told = [self._rewards.read_lanes(reward, self._notes), *flags]
        packed = _pack(self._observations, observation)
        for index in range(len(packed)):
            self._observations.note_type(index, observation, self._notes)
        form = self._observations.form(observation)
        form = values.UNCHANGED if form is None else form
        return [packed, *told, values.encode_info(info, self._notes, form)]

    def unpack(self, packed: Any, notes: list[str]) -> Result:
        observation, *told, info = packed
        read, told_of, form = values.decode_info(info)
        notes.extend(told_of)
        form = None if form is values.UNCHANGED else form
        return self._observations.unpack(observation, form=form), *told, read


class _SeveralAgents:
    """Of an environment of several agents. A part that an agent is missing in travels as None.

    Args:
        facts: Those of the environment.
    """

    def __init__(self, facts: EnvFacts) -> None:
        self._agents = list(facts.agents)
        self._numbers = {agent: number for number, agent in enumerate(self._agents)}
        self._layouts = [(Layout(pair[0], "observation"), Layout(pair[1], "action")) for pair in facts.agents.values()]
        self._notes = values.Notes()

    def pack_action(self, action: Any) -> object:
        numbered = [(self._numbers[agent], own) for agent, own in action.items()]
        return [[number, self._layouts[number][1].pack(own, rounding=True)] for number, own in numbered]

    def unpack_action(self, packed: Any) -> object:
        return {self._agents[number]: self._layouts[number][1].unpack(arrays) for number, arrays in packed}

    def pack(self, result: Result) -> object:
        observations, *told, infos, alive = result
        rewards, terminations, truncations = told or _NOT_STEPPED
        rows = []
        for number, agent in enumerate(self._agents):
            seen = _pack(self._layouts[number][0], observations[agent]) if agent in observations else None
            rows.append(
                [
                    number,
                    seen,
                    float(rewards[agent]) if agent in rewards else None,
                    bool(terminations[agent]) if agent in terminations else None,
                    bool(truncations[agent]) if agent in truncations else None,
                    values.encode_info(infos[agent], self._notes) if agent in infos else None,
                ]
            )
        return [bool(told), [self._numbers[agent] for agent in alive], rows]

    def unpack(self, packed: Any, notes: list[str]) -> Result:
        stepped, alive, rows = packed
        parts: tuple[dict[object, object], ...] = ({}, {}, {}, {}, {})
        for number, observation, *told, info in rows:
            agent = self._agents[number]
            if observation is not None:
                parts[0][agent] = self._layouts[number][0].unpack(observation)
            for part, value in zip(parts[1:4], told, strict=True):
                if value is not None:
                    part[agent] = value
            if info is not None:
                parts[4][agent], told_of, _ = values.decode_info(info)
                notes.extend(told_of)
        return *(parts if stepped else (parts[0], parts[4])), [self._agents[number] for number in alive]


def codec_of(facts: EnvFacts) -> Codec:
    """Return what packs for an environment with these facts."""
    return _SeveralAgents(facts) if facts.agents else _OneAgent(facts)


def _pack(layout: Layout, observation: object) -> list[Array]:
    try:
        return layout.pack(observation, rounding=True)
    except TensorError as error:
        raise RequestError(
            Code.INTERNAL, f"the environment's observation is not of its observation_space: {error}"
        ) from error
