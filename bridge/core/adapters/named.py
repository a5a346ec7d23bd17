"""Names for actions, given by the operator: `Web(action_names=…)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from gymnasium import spaces

from bridge.core.worlds.kinds import EnvWrapper, GymEnv, Lanes
from bridge.errors import SettingError

__all__ = ["ActionNames", "NamedActionsEnv"]

_LONGEST_NAME = 40


@dataclasses.dataclass(frozen=True)
class ActionNames:
    """The names of the actions of a Discrete space, in order."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, names: str | Sequence[str]) -> ActionNames:
        """Read the keyword `action_names`: a sequence of names, or one string with commas between them.

        Raises:
            SettingError: There are no names, or a name is empty, too long or no string.
        """
        found = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        fits = isinstance(found, Sequence) and len(found) > 0
        if not fits or not all(isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME for name in found):
            wanted = f"strings of 1 to {_LONGEST_NAME} characters, one for each action"
            raise SettingError(f"expected action_names to be {wanted}, got {names!r:.80}")
        return cls(tuple(found))

    def check(self, space: spaces.Space[Any]) -> None:
        """Raise SettingError if an action space is not Discrete, or has another number of actions."""
        count = len(self.names)
        if not isinstance(space, spaces.Discrete) or space.n != count:
            wanted = f"one for each of its {space.n} actions" if isinstance(space, spaces.Discrete) else "none"
            raise SettingError(f"action_names has {count} names; an environment with {space} takes {wanted}")

    def wrap(self, env: GymEnv) -> NamedActionsEnv:
        """Return the environment with these names for its actions.

        Raises:
            SettingError: Its action space is not Discrete, or has another number of actions.
        """
        self.check(env.action_space)
        return NamedActionsEnv(env, self.names)

    def wrap_lanes(self, env: Lanes) -> Lanes:
        """Return the lanes unchanged: people do not play them by keys."""
        return env

    def describe(self) -> dict[str, object]:
        """Return nothing, because names do not change steps."""
        return {}


class NamedActionsEnv(EnvWrapper):
    """An environment whose `get_action_meanings` returns the given names."""

    def __init__(self, env: GymEnv, names: Sequence[str]) -> None:
        super().__init__(env)
        self._names = list(names)

    def get_action_meanings(self) -> list[str]:
        """Return the names of the actions, in order."""
        return list(self._names)
