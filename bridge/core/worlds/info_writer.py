"""Writes the infos of an agent's Steps, with all that its client is to be told beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.core.encoding import values
from bridge.core.encoding.names import AttributeNames
from bridge.core.encoding.spaces import Layout
from bridge.core.worlds.rewards import HELD_BY_FLOAT64, is_held_by_float64, reward_type

__all__ = ["NO_INFO", "InfoWriter"]

NO_INFO = values.encode_info({}, values.Notes())
"""An empty info as it travels."""


class InfoWriter:
    """Writes the infos of one agent.

    Forms of observations, types of rewards and names of attributes are told when they change, and the client keeps
    them. A note is told once.

    Args:
        layout: Of the observations.
        plain_type: The type of rewards of which their tensor says all, until another type was told; None: there is
            none.
    """

    def __init__(self, layout: Layout, plain_type: type | None) -> None:
        self.notes = values.Notes()
        """What is to be told once."""
        self.beside: dict[str, Any] = {}
        """What the next info tells beside it: arguments of `encode_info`."""
        self.plain_type: object = plain_type
        """The type of rewards that need not be told, as in each step of nearly all environments; None: all are looked
        at."""
        self.has_forms = layout.has_forms
        """True if observations of the space may have several forms."""
        self._layout = layout
        self._form: object = None
        # The client gives each reward the type of the last one that it was told in an info.
        self._reward_type: object = float
        self._names: str | None = None

    def follow_names(self, names: str) -> None:
        """Tell the names of attributes from now on where they change; the client has read `names`."""
        self._names = names

    @property
    def follows_names(self) -> bool:
        """True if the client is to be told names that have changed."""
        return self._names is not None

    def take_names(self, names: str | None) -> None:
        """Tell the names of attributes with the next info, if they have changed; None: there are none."""
        if names is not None and names != self._names:
            self._names = names
            self.notes.rename(AttributeNames(names))

    def take_reward(self, reward: object) -> None:
        """Tell a reward with the next info, if its tensor does not say all of it."""
        if reward_type(reward) == self._reward_type and is_held_by_float64(reward):
            self.beside.pop("reward", None)
            self.plain_type = type(reward) if type(reward) in HELD_BY_FLOAT64 else None
        else:
            # Until it is told, each reward is looked at: the next one may have to be told in its place.
            self.beside["reward"], self.plain_type = reward, None

    def write(self, info: Any, observation: object, remarks: list[str]) -> bytes:
        """Return an info as it travels.

        Args:
            info: Of one environment a dict, of lanes as their vector environment returns it.
            observation: What it belongs to.
            remarks: Further notes, which are taken out of the list.
        """
        form = self._layout.form(observation)
        for remark in remarks:
            self.notes.add(remark, remark)
        remarks.clear()
        beside, self.beside = self.beside, {}
        if "reward" in beside:
            reward = beside["reward"]
            self._reward_type = reward_type(reward)
            self.plain_type = type(reward) if type(reward) in HELD_BY_FLOAT64 else None
        if form == self._form:
            if not (info or self.notes or beside):
                return NO_INFO
            return values.encode_info(info, self.notes, **beside)
        self._form = form
        return values.encode_info(info, self.notes, form, **beside)

    def write_apart(self, info: Mapping[str, Any]) -> object:
        """Return an info that travels elsewhere than in the observation `info`, as plain values.

        What it lacks since it does not travel, the next info tells: clients read no notes elsewhere.
        """
        found, self.notes.fresh, _ = values.decode_info(values.encode_info(info, self.notes))
        return found
