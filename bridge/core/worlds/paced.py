"""A world that has an environment, as its pacer and its agents see it."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Protocol

from bridge.core.encoding.properties import PropertyTree
from bridge.core.worlds.base import World
from bridge.core.worlds.environment import Environment
from bridge.core.worlds.scheduling import Scheduler
from bridge.errors import Code, RequestError

__all__ = ["PacedWorld", "Substitution"]


class Substitution(Protocol):
    """An observer's actions in the place of agents', for a pacer that chooses ahead of the step."""

    def substitute(self, action: Any) -> tuple[Any, Any]:
        """Return what the environment is to be stepped by in the place of an action, and a note; changes nothing."""

    def substituted(self, note: Any) -> None:
        """Take the note of the step that is under way next: it was taken."""


class PacedWorld(World):
    """A world that owns an environment, and knows whether it is over.

    Args:
        name: The world's name.
        env: The environment, owned by the world from here on.
        scheduler: Runs what the world waits for.
    """

    def __init__(self, name: str, env: Environment, scheduler: Scheduler) -> None:
        super().__init__(name, scheduler)
        self.env: Environment = env
        """The environment that is stepped; observers put themselves in its place."""
        self.substitutes: Mapping[object, str] = {}
        """Whose actions the step at hand takes in place of an agent's, by agent or lane."""
        self.substitution: Substitution | None = None
        """Which actions stand in for agents', where the pacer chooses ahead; None: none do."""
        self.episodes = 0
        """Episodes that ended, counted for each lane."""
        self.closed = False
        """True once the world was destroyed."""

    @abc.abstractmethod
    def properties(self) -> PropertyTree:
        """Return the tree below `world`."""

    @property
    def over(self) -> bool:
        """True if the world is closed, or the process of its environment has ended."""
        return self.closed or self.env.ended is not None

    @property
    def alive(self) -> bool:
        """True if the world can be joined; False once its environment's process has ended."""
        return self.env.ended is None

    def refuse_if_over(self) -> None:
        """Raise where the world is destroyed, or its environment has ended by itself."""
        if self.env.ended is not None:
            raise self.env.ended
        if self.closed:
            raise self.destroyed()

    def destroyed(self) -> RequestError:
        """Return the error of requests to a world that was destroyed."""
        text = f"the world {self.name!r} was destroyed; leave, and create or join another"
        return RequestError(Code.FAILED_PRECONDITION, text)
