"""Joint steps: the environment is stepped once all of its agents have acted; else as a declared policy says (D-22).

An agent is missing when nobody has joined as it, when its client left or died, when it sent Reset, or when its Step
does not come within `agent_timeout`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.core.encoding.properties import TEXT, Property
from bridge.core.worlds.group import check_default_action, default_action
from bridge.core.worlds.turn_pacer import Decision, Turn, TurnPacer
from bridge.errors import SettingError

__all__ = ["AllActed", "MissingAgent", "MultiAgentOptions"]


class MissingAgent(str, enum.Enum):
    """Says what a world does while an agent is missing."""

    WAIT = "wait"
    """Wait for it, or for another client that joins as it, up to the deadline; then the Steps of those who wait are
    refused with DEADLINE_EXCEEDED, and may be sent again. An agent that sent Reset is played by default actions."""
    DEFAULT = "default"
    """Go on with a default action in its place: at once where it is not playing, after the deadline where it is."""
    END = "end"
    """End the sequence: each other agent gets its observations once with INTERRUPTED."""


@dataclasses.dataclass(frozen=True)
class MultiAgentOptions:
    """How the agents of a world are coordinated."""

    missing_agent: MissingAgent | str = MissingAgent.WAIT
    """Says what is done while an agent is missing."""
    agent_timeout: float = 30.0
    """Seconds that a Step waits for the other agents."""
    default_action: Callable[[object, object, object], object] | None = None
    """Gives the action of a missing agent from its id, its last observation and its action space; None: the first
    allowed action, or zeros within the bounds."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "missing_agent", MissingAgent(self.missing_agent))
        except ValueError:
            known = ", ".join(policy.value for policy in MissingAgent)
            raise SettingError(f"expected missing_agent to be one of {known}, got {self.missing_agent!r}") from None
        if not isinstance(self.agent_timeout, (int, float)) or not self.agent_timeout > 0:
            raise SettingError(f"expected agent_timeout to be a positive number of seconds, got {self.agent_timeout!r}")
        check_default_action(self.default_action)


class AllActed(TurnPacer):
    """Steps once the actions of all agents are in.

    Args:
        options: What is done while one is missing.
    """

    patience_name = "agent_timeout"
    can_place = True

    def __init__(self, options: MultiAgentOptions) -> None:
        self._missing_agent = MissingAgent(options.missing_agent)
        self.patience = options.agent_timeout
        self._default_action = options.default_action or default_action

    def may_begin(self, turn: Turn) -> bool:
        """Begin once all agents have asked; with default actions, once those have that are there."""
        if self._missing_agent is not MissingAgent.DEFAULT:
            # Also agents that nobody has joined as are waited for: the environment is reset once for all.
            return super().may_begin(turn)
        # Those who wait for the next one have not to wait longer for somebody who may enter and does not.
        if turn.running and turn.playing:
            # A sequence that ends waits until each agent that plays has heard of it by its Step. A silent one must not
            # hold up the others for longer than `agent_timeout`.
            return turn.expired and turn.ending  # those that were not told yet are told all the same
        return turn.expired or len(turn.asked) == len(turn.joined)

    def decide(self, turn: Turn) -> Decision:
        """Step once nobody is missing, or, after the deadline, as the policy says."""
        actions = turn.actions
        if not actions:
            return turn.wait()
        if len(actions) == len(turn.alive) or not self._missing(turn, actions):
            return turn.step(actions)
        if turn.expired and self._missing_agent is MissingAgent.DEFAULT:
            return turn.step(actions)
        if turn.expired and self._missing_agent is MissingAgent.END:
            return turn.end()
        return turn.wait()

    def _missing(self, turn: Turn, actions: Mapping[str, object]) -> bool:
        """Return whether somebody has to be waited for."""
        if self._missing_agent is MissingAgent.WAIT:
            # Where nobody plays it, or the client that does has not entered yet, somebody may still come. One that was
            # in this sequence and has left it by Reset is not waited for: default actions play on for it.
            awaited, gone = [name for name in turn.alive if name not in actions], turn.gone
            return len(awaited) > len(gone) or not set(awaited) <= set(gone)
        return not actions.keys() >= set(turn.playing).intersection(turn.alive)

    def default_action(self, agent: Any, observation: Any, space: Any) -> Any:
        """Return the action of an agent that is missing."""
        return self._default_action(agent, observation, space)

    def dropped(self, name: str) -> bool:
        """Return whether the sequence ends for all, since an agent has left it."""
        return self._missing_agent is MissingAgent.END

    def properties(self) -> Sequence[Property]:
        """Return the policy."""
        text = "what is done where an agent is missing: wait, default or end"
        return (Property("world.missing_agent", TEXT, text, lambda: self._missing_agent.value),)
