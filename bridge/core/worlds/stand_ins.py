"""The interface of policies that play the agents of a world that no client plays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from gymnasium import Space

__all__ = ["Policy", "StandIn", "StandIns"]

Policy: TypeAlias = Callable[[object], object]
"""A function from an observation to an action."""


@dataclasses.dataclass(frozen=True)
class StandIn:
    """Plays an agent while no client does."""

    name: str
    """Its name for people; recordings attribute its actions to `agent:NAME`."""
    act: Policy
    """Returns the action for an observation; called in the environment's thread."""


class StandIns(Protocol):
    """Finds the policies that play the agents of a server's worlds while no client does."""

    def check(self, agents: Sequence[str]) -> None:
        """Check that all agents with a policy exist.

        Raises:
            SettingError: An agent does not exist in the environment.
        """

    def find(self, spaces: Mapping[str, Space[Any]]) -> Mapping[str, StandIn]:
        """Return the policies of a world, by agent; agents without one take the default action.

        Args:
            spaces: The action space of each agent, by name.
        """
