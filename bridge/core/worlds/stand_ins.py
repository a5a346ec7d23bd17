"""Who plays the agents of a world that no client plays: the interface of what is handed to a world."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from gymnasium import Space

__all__ = ["Policy", "StandIn", "StandIns"]

Policy: TypeAlias = Callable[[object], object]
"""Observation in, action out."""


@dataclasses.dataclass(frozen=True)
class StandIn:
    """Plays an agent while no client does."""

    name: str
    """Its name for people; what it did is said to be of `agent:NAME`."""
    act: Policy
    """Returns the action for an observation; called in the environment's thread."""


class StandIns(Protocol):
    """Finds who plays the agents of each world of a server, while no client does."""

    def check(self, agents: Sequence[str]) -> None:
        """Check that all agents exist that somebody is to play.

        Raises:
            SettingError: One does not, of those of an environment.
        """

    def find(self, spaces: Mapping[str, Space[Any]]) -> Mapping[str, StandIn]:
        """Return who plays in a world, by agent; agents without an entry do the default action.

        Args:
            spaces: The action space of each agent, by name.
        """
