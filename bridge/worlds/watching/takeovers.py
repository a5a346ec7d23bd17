"""Actions of people that stand in for those of agents, and the infos that tell so."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

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
    """When it came, in seconds of the scheduler."""


class Takeovers(dict[Any, Takeover]):
    """The people who may act in an agent's place, by the agent's id, or by the lane; 0 for a single environment."""

    def replace(self, action: Any, env: Any, lane: int, now: float) -> tuple[Any, dict[Any, str]]:
        """Return the action that is taken in place of an agent's, and who acts, by agent or lane.

        Args:
            action: What the environment is to be stepped with.
            env: The environment.
            lane: Which one of its world it is.
            now: The time, in seconds of the scheduler.
        """
        held = {key: one for key, one in self.items() if one.action is not None and now - one.at <= HOLD}
        if hasattr(env, "possible_agents"):
            held = {agent: one for agent, one in held.items() if agent in action}
            action = {**action, **{agent: one.action for agent, one in held.items()}}
        elif getattr(env, "num_envs", None) is not None:
            action = np.array(action)
            for index, one in held.items():
                action[index] = one.action
        else:
            held = {index: one for index, one in held.items() if index == lane}
            for one in held.values():
                action = one.action
        return action, {key: one.who for key, one in held.items()}


def mark(result: Any, env: Any, taken: Mapping[Any, str]) -> Any:
    """Return what `step` returned with `intervention` and `intervened_by` in the infos of those who did not act."""
    if not taken:
        return result
    parts = list(result)
    info = parts[4]
    if hasattr(env, "possible_agents"):
        parts[4] = {agent: _told(one, taken[agent]) if agent in taken else one for agent, one in info.items()}
    elif (count := getattr(env, "num_envs", None)) is not None:
        mask = np.zeros(count, np.bool_)
        mask[list(taken)] = True
        names = np.array([taken.get(lane, "") for lane in range(count)], object)
        arrays = {"intervention": mask, "intervened_by": names}
        parts[4] = {**info, **arrays, **{f"_{name}": mask.copy() for name in arrays}}
    else:
        (who,) = taken.values()
        parts[4] = _told(info, who)
    return tuple(parts)


def _told(info: Any, who: str) -> dict[str, Any]:
    return {**(info or {}), "intervention": True, "intervened_by": who}
