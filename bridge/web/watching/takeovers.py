"""Actions of people that replace those of agents, and the infos that report it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from bridge.core.encoding.infos import ACTION, PACE
from bridge.core.encoding.tensors import Array
from bridge.core.worlds.environment import EnvFacts, Result

__all__ = ["HOLD", "Takeover", "Takeovers", "mark"]

HOLD = 1.0
"""Seconds after which an action that was not repeated ends: the person's page may be gone."""


@dataclasses.dataclass
class Takeover:
    """The state of a person who may act for an agent."""

    action: Any
    """The current action; None: the agent acts."""
    who: str
    """The person's name."""
    at: float
    """When the action, or another message of the person's page, last arrived, in seconds of the scheduler."""
    pace: float | None = None
    """The most steps per second of a world in lock-step while the person has the seat; None: no limit."""
    pressed_at: float = 0.0
    """When the action first arrived, in seconds of the scheduler."""
    used: bool = False
    """True if a step was executed with the action."""
    released: bool = False
    """True if the action ends after the next step."""
    left: bool = False
    """True if the person's connection was lost, and the person may return."""

    @property
    def acting(self) -> bool:
        """True if the person acts."""
        return self.action is not None and not self.released

    def hold(self, action: Any, now: float) -> None:
        """Replace the agent's action."""
        # The action of a held key is sent repeatedly: only the first one counts as pressed.
        if not self.acting:
            self.pressed_at, self.used, self.released = now, False, False
        self.action, self.at = action, now

    def release(self, now: float) -> None:
        """Give control back to the agent.

        A tap may be shorter than a step at a person's pace, so it still acts in the next step, but not in later ones.
        """
        self.at = now
        self.released = self.action is not None and not self.used and now - self.pressed_at <= HOLD
        if not self.released:
            self.action = None


class Takeovers(dict[Any, Takeover]):
    """The people who may act for agents, by the agent's id, or by the lane; 0 for a single environment."""

    def pace(self, facts: EnvFacts, lane: int, now: float) -> float | None:
        """Return the most steps per second that the people in a lane can follow; None: nobody requested a pace.

        Args:
            facts: The facts about the environment.
            lane: The environment's index in its world.
            now: The current time, in seconds of the scheduler.
        """
        all_lanes = bool(facts.agents) or facts.num_envs is not None  # one call steps all of them
        # A page that sends nothing any more slows nobody down.
        paces = [one.pace for key, one in self.items() if (all_lanes or key == lane) and now - one.at <= HOLD]
        return min((pace for pace in paces if pace is not None), default=None)

    def replace(
        self, action: Any, facts: EnvFacts, lane: int, now: float, resetting: Array | None = None
    ) -> tuple[Any, dict[Any, Takeover]]:
        """Return the action after replacements, and who acts, by agent or lane; mark these people's actions as used.

        Args:
            action: The original action.
            facts: The facts about the environment.
            lane: The environment's index in its world.
            now: The current time, in seconds of the scheduler.
            resetting: The lanes of a vector environment that this step resets; None: none.
        """
        action, held = self.put_in(action, facts, lane, now, resetting)
        self.use(held)
        return action, held

    def use(self, held: Mapping[Any, Takeover]) -> None:
        """Record that the environment is stepped with people's actions, by agent or lane."""
        for key, used in held.items():
            one = self.get(key)
            if one is None or one.pressed_at != used.pressed_at:  # it has ended, or another key was pressed since
                continue
            one.used = True
            if one.released:
                one.action = None

    def put_in(
        self, action: Any, facts: EnvFacts, lane: int, now: float, resetting: Array | None = None
    ) -> tuple[Any, dict[Any, Takeover]]:
        """Return the same as `replace`, without marking actions as used."""
        # Copies: the infos report what was executed, even if it ends below, or changes during the step.
        held = {key: dataclasses.replace(one) for key, one in self.items() if one.action is not None}
        held = {key: one for key, one in held.items() if now - one.at <= HOLD}
        if facts.agents:
            # An agent that has ended, or does not act in this step, has no action to replace.
            held = {agent: one for agent, one in held.items() if agent in action}
            action = {**action, **_actions(held)}
        elif facts.num_envs is not None:
            # A lane that resets executes no action, so nobody acted for it.
            held = {index: one for index, one in held.items() if resetting is None or not resetting[index]}
            action = _with_lanes(facts.action_space, facts.num_envs, action, _actions(held))
        else:
            held = {index: one for index, one in held.items() if index == lane}
            action = _actions(held).get(lane, action)
        return action, held


def _actions(held: Mapping[Any, Takeover]) -> dict[Any, Any]:
    """Return copies of the actions: an environment may change its argument, and they are used again."""
    return {key: copy.deepcopy(one.action) for key, one in held.items()}


def _with_lanes(space: Space[Any], lanes: int, action: Any, held: Mapping[int, Any]) -> Any:
    """Return the lanes' action, an element of the batched space, with the actions of some lanes replaced."""
    if not held:
        return action
    rows = [held.get(lane, row) for lane, row in enumerate(iterate(batch_space(space, lanes), action))]
    empty: Any = create_empty_array(space, lanes)
    return concatenate(space, rows, empty)


def mark(result: Result, facts: EnvFacts, taken: Mapping[Any, Takeover], pace: float | None) -> Result:
    """Return the result of `step`, with people's actions in the infos.

    Replaced agents are told that they did not act, who did, and the action. All are told the pace, so that a trainer
    allows for longer steps.
    """
    if not taken and pace is None:
        return result
    parts = list(result)
    info = parts[4]
    paced = {} if pace is None else {PACE: pace}
    marks = {key: {"intervention": True, "intervened_by": one.who, ACTION: one.action} for key, one in taken.items()}
    if facts.agents:
        told = info if paced else marks
        parts[4] = {**info, **{agent: {**(info.get(agent) or {}), **paced, **marks.get(agent, {})} for agent in told}}
    elif (count := facts.num_envs) is None:
        own = next(iter(marks.values()), {})
        parts[4] = {**(info or {}), **paced, **own}
    elif isinstance(info, list):  # infos that cannot be batched as arrays
        parts[4] = [{**own, **paced, **marks.get(lane, {})} for lane, own in enumerate(info)]
    else:
        # The lanes step together, so the pace applies to all.
        info = {**(info or {}), **{key: np.full(count, value) for key, value in paced.items()}}
        if not taken:
            return (*parts[:4], info, *parts[5:])
        mask = np.zeros(count, np.bool_)
        mask[list(taken)] = True
        names = np.array([taken[lane].who if lane in taken else "" for lane in range(count)], object)
        actions = np.full(count, None)  # an array of objects; clients batch them by the space
        for lane, one in taken.items():
            actions[lane] = one.action
        arrays = {"intervention": mask, "intervened_by": names, ACTION: actions}
        parts[4] = {**info, **arrays, **{f"_{name}": mask.copy() for name in arrays}}
    return tuple(parts)
