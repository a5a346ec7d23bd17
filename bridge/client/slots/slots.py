"""The parts behind the slots of a vector environment, and their life in a copy and in a forked process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bridge.client.slots.attributes import SlotAttributes
from bridge.client.slots.stepper import Stepper
from bridge.client.slots.turns import Turns
from bridge.client.slots.vector_pool import VectorPool
from bridge.client.world.world_request import WorldInfo, WorldRequest
from bridge.forks import forget_in_child

__all__ = ["Slots"]


class Slots:
    """The remotes of a vector environment, what steps them and calls their methods, and whose turn it is.

    In a copy, and in a forked process, the remotes have no connection: they connect in the first `reset`.

    Args:
        pool: The remotes.
    """

    stepper: Stepper
    """Steps the slots, once the worlds are joined."""

    def __init__(self, pool: VectorPool) -> None:
        self.pool = pool
        """Waits for the remotes."""
        self._begin_anew(closed=False)
        forget_in_child(self)

    def _begin_anew(self, *, closed: bool) -> None:
        """Have no call pending."""
        self.attributes = SlotAttributes(self.pool)
        """Calls methods, and reads and sets attributes."""
        self.turns = Turns(self.pool.turn, self.attributes.abandon, closed=closed)
        """Which call runs, and which is pending."""

    def join(self, connect: Callable[[], None], standing_by: Sequence[WorldRequest]) -> WorldInfo:
        """Join the worlds, and return what is known of them.

        Args:
            connect: Connects those that fill slots.
            standing_by: Spares, which are not waited for.
        """
        try:
            with self.pool.turn:
                connect()
                for world_request in standing_by:
                    self.pool.add_spare(world_request)
        except BaseException:
            self.pool.close_all(0.5)
            raise
        self.stepper = Stepper(self.pool)
        return self.pool.world_info()

    def __getstate__(self) -> dict[str, Any]:
        return {"pool": self.pool, "stepper": self.stepper, "closed": self.turns.closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pool, self.stepper = state["pool"], state["stepper"]
        self.stepper.begin_anew()
        self._begin_anew(closed=state["closed"])
        forget_in_child(self)

    def after_fork(self) -> None:
        """Leave the connections to the parent process; the next `reset` makes some for this process."""
        self.pool.after_fork()
        if "stepper" in self.__dict__:
            self.stepper.begin_anew()
        self._begin_anew(closed=self.turns.closed)
