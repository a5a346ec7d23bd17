"""The messages in the pipe between a world and its environment's process; both ends use this code.

Observations and actions travel as the arrays of their spaces' layouts, all other values in the values codec. Agents are
sent as indices, because their ids may be of any type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from bridge.core.encoding import values
from bridge.core.encoding.space_json import plain_space_from_json, space_to_json
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Array
from bridge.core.worlds.environment import EnvFacts, Result, Spaces
from bridge.core.worlds.kinds import Joint
from bridge.core.worlds.rewards import Rewards
from bridge.errors import Code, RequestError, TensorError

__all__ = ["Codec", "facts_from_values", "facts_to_values"]

_NOT_STEPPED: Sequence[Joint] = ({}, {}, {})
"""The rewards, terminations and truncations of a reset."""


def facts_to_values(facts: EnvFacts) -> dict[str, object]:
    """Return facts for the values codec; agents' ids that are neither text nor integers become text."""
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
    """Return the facts from the result of `facts_to_values`."""
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


class Codec:
    """Packs actions and results for the pipe, and unpacks them.

    A result travels as one row per agent: its observation, reward, flags and info, each None if there is none. One
    environment, or the lanes that one call steps, have one row.

    Args:
        facts: The description of the environment.
    """

    def __init__(self, facts: EnvFacts) -> None:
        lanes = facts.num_envs
        self._several = bool(facts.agents)
        pairs: Mapping[object, Spaces] = facts.agents or {None: facts.spaces}
        # Both ends number the agents in the order of the facts.
        self._ids = list(pairs)
        self._numbers = {agent: number for number, agent in enumerate(pairs)}
        self._layouts = [
            (Layout(pair[0], "observation", lanes), Layout(pair[1], "action", lanes)) for pair in pairs.values()
        ]
        self._rewards, self._notes = Rewards(facts.reward_space, lanes), values.Notes()
        self._read_reward = self._rewards.typed if lanes is None else self._rewards.read
        self._read_flag: Callable[[Any], object] = bool if lanes is None else partial(np.asarray, dtype=np.bool_)

    def pack_action(self, action: Any) -> object:
        """Return an action for the pipe."""
        if not self._several:
            return self._layouts[0][1].pack(action, rounding=True)
        numbered = [(self._numbers[agent], own) for agent, own in action.items()]
        return [[number, self._layouts[number][1].pack(own, rounding=True)] for number, own in numbered]

    def unpack_action(self, packed: Any) -> object:
        """Return the action for the environment."""
        if not self._several:
            return self._layouts[0][1].unpack(packed)
        return {self._ids[number]: self._layouts[number][1].unpack(arrays) for number, arrays in packed}

    def pack(self, result: Result) -> object:
        """Return a result of `reset` or `step` for the pipe; raises RequestError if it is not in its spaces."""
        observations, *told, infos = result[:-1] if self._several else result
        if not self._several:
            observations, told, infos = {None: observations}, [{None: part} for part in told], {None: infos}
        rewards, terminations, truncations = told or _NOT_STEPPED
        rows = []
        for agent, (layout, _) in zip(self._ids, self._layouts, strict=True):
            observation = observations.get(agent)
            rows.append(
                [
                    # An agent may be missing in any part: PettingZoo has only those that were alive before the step, or
                    # entered in it.
                    self._pack_observation(layout, observation) if agent in observations else None,
                    self._read_reward(rewards[agent], self._notes) if agent in rewards else None,
                    self._read_flag(terminations[agent]) if agent in terminations else None,
                    self._read_flag(truncations[agent]) if agent in truncations else None,
                    self._pack_info(infos, agent, layout.form(observation)),
                ]
            )
        # A reset has no rewards and flags. The living agents are numbers, as in actions.
        return [bool(told), [self._numbers[agent] for agent in result[-1]], rows] if self._several else rows[0]

    def _pack_observation(self, layout: Layout, observation: object) -> list[Array]:
        try:
            packed = layout.pack(observation, rounding=True)
        except TensorError as error:
            text = f"the environment's observation is not of its observation_space: {error}"
            raise RequestError(Code.INTERNAL, text) from error
        for index in range(len(packed)):
            layout.note_type(index, observation, self._notes)
        return packed

    def _pack_info(self, infos: Joint, agent: Any, form: Any) -> bytes | None:
        # Each result has its own form, whereas clients get the form only if it changes; also a result with an agent's
        # observation but no info.
        if agent not in infos and form is None:
            return None
        missing = () if agent in infos else ("info",)
        said = values.UNCHANGED if form is None else form
        return values.encode_info(infos.get(agent, {}), self._notes, said, missing=missing)

    def unpack(self, packed: Any, notes: list[str]) -> Result:
        """Return a result of `reset` or `step`; `notes` gets the notes for clients."""
        stepped, alive, rows = packed if self._several else (packed[1] is not None, (), [packed])
        parts: tuple[dict[object, object], ...] = ({}, {}, {}, {}, {})
        for agent, (layout, _), (arrays, *told, info) in zip(self._ids, self._layouts, rows, strict=True):
            form = values.UNCHANGED
            if info is not None:
                told_of = values.decode_step_info(info)
                form = told_of.form
                notes.extend(told_of.notes)
                if "info" not in told_of.missing:
                    parts[4][agent] = told_of.info
            if arrays is not None:
                # A result without a form has the plain one.
                form = None if form is values.UNCHANGED else form
                parts[0][agent] = layout.unpack(arrays, form=form)
            for part, value in zip(parts[1:4], told, strict=True):
                if value is not None:
                    part[agent] = value
        found = parts if stepped else (parts[0], parts[4])
        if self._several:
            return *found, [self._ids[number] for number in alive]
        return tuple(part[None] for part in found)
