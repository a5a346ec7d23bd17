"""Who plays the agents of a world that no client plays: the interface of what is handed to a world."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from gymnasium import Space

from bridge.errors import SettingError

__all__ = ["Policy", "StandIn", "StandIns", "by_name"]

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


def by_name(what: str, given: object, names: Sequence[str], of: str) -> dict[str, object]:
    """Return what is given for each name, or once for all of them, by name.

    Args:
        what: The keyword that it is given by, for the message.
        given: A mapping by name, or one thing for all; None: nothing.
        names: Those that there are.
        of: What these are, for the message.

    Raises:
        SettingError: It is given for a name that does not exist.
    """
    if not isinstance(given, Mapping):
        return {} if given is None else dict.fromkeys(names, given)
    if unknown := set(given) - set(names):
        raise SettingError(f"expected {what} for {of} of {', '.join(names)}, got {sorted(map(str, unknown))}")
    return dict(given)
