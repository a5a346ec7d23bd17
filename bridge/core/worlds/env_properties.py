"""Properties of environments that features add to the tree below `world`, beside those of the core.

The composition root provides them as `environment_properties` (`bridge.core.provided`), in the process of an isolated
world, too: nothing of a feature has to be sent there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from gymnasium import Space

from bridge.core.provided import provided

__all__ = ["EnvironmentProperty", "environment_properties"]


@dataclasses.dataclass(frozen=True)
class EnvironmentProperty:
    """A text about an environment that its code may be asked for, one for all lanes of a world."""

    name: str
    """The key below `world`."""
    description: str
    """In a sentence."""
    read: Callable[[Any], str]
    """Returns the text of a Gymnasium environment, or of a vector of them, in the thread that it belongs to. A feature
    is imported here, once somebody asks."""
    read_agent: Callable[[str, Space[Any]], str]
    """Returns the text for one of several agents, from the environment's name in its metadata and the action space."""

    @property
    def key(self) -> str:
        """The dotted path."""
        return f"world.{self.name}"


def environment_properties() -> Sequence[EnvironmentProperty]:
    """Return those of all features that are installed."""
    found: Sequence[EnvironmentProperty] = provided("environment_properties")
    return found
