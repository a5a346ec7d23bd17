"""Actions of people that stand in for those of agents, and the infos that tell so."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from bridge.encoding.interventions import ACTION
from bridge.encoding.tensors import Array
from bridge.worlds.environment import EnvFacts, Result

__all__ = ["HOLD", "Takeover", "Takeovers", "mark"]

HOLD = 1.0
"""Seconds after which an action that was not repeated is given up: the person's page may be gone."""


@dataclasses.dataclass
class Takeover:
    """A person's action."""

    action: Any
    """In force; None: the agent acts."""
    who: str
    """The person's name."""
    at: float
    """When it came, or the person's page was heard last, in seconds of the scheduler."""
    pace: float | None = None
    """The most steps a second that a world in lock-step makes while the person has the seat; None: any number."""


class Takeovers(dict[Any, Takeover]):
    """The people who may act in an agent's place, by the agent's id, or by the lane; 0 for a single environment."""

    def pace(self, facts: EnvFacts, lane: int, now: float) -> float | None:
        """Return the most steps a second that the people of a lane can follow; None: nobody asked for a pace.

        Args:
            facts: Those of the environment.
            lane: Which one of its world it is.
            now: The time, in seconds of the scheduler.
        """
        all_lanes = bool(facts.agents) or facts.num_envs is not None  # one call steps all of them
        # A page that is not heard of any more slows nobody down.
        paces = [one.pace for key, one in self.items() if (all_lanes or key == lane) and now - one.at <= HOLD]
        return min((pace for pace in paces if pace is not None), default=None)

    def replace(
        self, action: Any, facts: EnvFacts, lane: int, now: float, resetting: Array | None = None
    ) -> tuple[Any, dict[Any, Takeover]]:
        """Return the action that is taken in place of an agent's, and who acts, by agent or lane.

        Args:
            action: What the environment is to be stepped with.
            facts: Those of the environment.
            lane: Which one of its world it is.
            now: The time, in seconds of the scheduler.
            resetting: Which lanes of a vector environment this step resets; None: none.
        """
        held = {key: dataclasses.replace(one) for key, one in self.items() if one.action is not None}
        held = {key: one for key, one in held.items() if now - one.at <= HOLD}
        if facts.agents:
            held = {agent: one for agent, one in held.items() if agent in action}
            action = {**action, **_actions(held)}
        elif facts.num_envs is not None:
            # A lane that resets executes no action, so nobody acted in its place.
            held = {index: one for index, one in held.items() if resetting is None or not resetting[index]}
            action = _with_lanes(facts.action_space, facts.num_envs, action, _actions(held))
        else:
            held = {index: one for index, one in held.items() if index == lane}
            action = _actions(held).get(lane, action)
        return action, held


def _actions(held: Mapping[Any, Takeover]) -> dict[Any, Any]:
    """Return the actions, copied: an environment may change what it is stepped with, and they are used again."""
    return {key: copy.deepcopy(one.action) for key, one in held.items()}


def _with_lanes(space: Space[Any], lanes: int, action: Any, held: Mapping[int, Any]) -> Any:
    """Return the lanes' action, an element of the batched space, with the actions of some lanes in place."""
    if not held:
        return action
    rows = [held.get(lane, row) for lane, row in enumerate(iterate(batch_space(space, lanes), action))]
    empty: Any = create_empty_array(space, lanes)
    return concatenate(space, rows, empty)


def mark(result: Result, facts: EnvFacts, taken: Mapping[Any, Takeover]) -> Result:
    """Return what `step` returned, and in the infos of those who did not act that, who did, and the action."""
    if not taken:
        return result
    parts = list(result)
    info = parts[4]
    marks = {key: {"intervention": True, "intervened_by": one.who, ACTION: one.action} for key, one in taken.items()}
    if facts.agents:
        parts[4] = {**info, **{agent: {**(info.get(agent) or {}), **own} for agent, own in marks.items()}}
    elif (count := facts.num_envs) is None:
        (own,) = marks.values()
        parts[4] = {**(info or {}), **own}
    elif isinstance(info, list):  # infos that do not fit into arrays
        parts[4] = [{**own, **marks.get(lane, {})} for lane, own in enumerate(info)]
    else:
        mask = np.zeros(count, np.bool_)
        mask[list(taken)] = True
        names = np.array([taken[lane].who if lane in taken else "" for lane in range(count)], object)
        actions = np.full(count, None)  # of any space; clients batch them as the space says
        for lane, one in taken.items():
            actions[lane] = one.action
        arrays = {"intervention": mask, "intervened_by": names, ACTION: actions}
        parts[4] = {**(info or {}), **arrays, **{f"_{name}": mask.copy() for name in arrays}}
    return tuple(parts)
