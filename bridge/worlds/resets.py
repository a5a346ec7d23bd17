"""ResetWorld: every running agent is told once that its sequence ends, and the caller waits for that (D-15).

The book knows which agents run. An order of ResetWorld is a set of those that are still to be told; an agent goes from
it by its next Step, which is answered INTERRUPTED, or by leaving, dying or resetting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["ResetBook"]


class ResetBook:
    """Which agents of a world are in a sequence, and which of them still have to be told that it ends.

    Its methods may be called from any thread. `changed` is the condition that is notified of every change.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._running: set[Any] = set()
        self._orders: list[set[Any]] = []
        self.closed = False
        """The world has ended: nobody is told anything any more."""

    def start(self, agent: Any) -> None:
        """Note that a sequence begins for an agent: from here on, a ResetWorld concerns it."""
        with self.changed:
            self._running.add(agent)

    def end(self, agent: Any) -> None:
        """Note that an agent is in no sequence any more, whatever ended it."""
        with self.changed:
            self._running.discard(agent)
            self._cross_off(agent)

    def is_running(self, agent: Any) -> bool:
        """Whether an agent is in a sequence."""
        with self.changed:
            return agent in self._running

    def is_due(self, agent: Any) -> bool:
        """Whether an agent's next Step is to be answered INTERRUPTED."""
        with self.changed:
            return any(agent in order for order in self._orders)

    def take(self, agent: Any) -> bool:
        """Whether this Step of the agent is to be answered INTERRUPTED; it is told so once."""
        if not self._orders:  # what comes in this moment counts for the next Step
            return False
        with self.changed:
            due = any(agent in order for order in self._orders)
            if due:
                self._cross_off(agent)
            return due

    def _cross_off(self, agent: Any) -> None:
        for order in self._orders:
            order.discard(agent)
        self._orders = [order for order in self._orders if order]
        self.changed.notify_all()

    def interrupt(self, caller: Any = None) -> set[Any]:
        """Order that every running agent but the caller is told; return the set of those that are not yet."""
        with self.changed:
            order = {agent for agent in self._running if agent is not caller}
            if order:
                self._orders.append(order)
            if caller is not None:
                self._cross_off(caller)  # two that reset the world at once do not wait for each other
            self.changed.notify_all()
            return order

    def wait(self, order: set[Any], timeout: float, gone: Callable[[], bool]) -> tuple[int, bool]:
        """Wait until all of an order have been told.

        Args:
            order: What `interrupt` gave.
            timeout: Seconds to wait.
            gone: Whether the one who waits has hung up.

        Returns:
            How many were not told in time, and whether the order was withdrawn, as it is where nobody was (D-2).
        """
        deadline = time.monotonic() + timeout
        with self.changed:
            before = len(order)
            while order and not gone() and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)
            untold = len(order)
            withdrawn = untold == before and untold > 0
            if withdrawn:
                order.clear()
                self._orders = [other for other in self._orders if other]
                self.changed.notify_all()
            return untold, withdrawn

    def close(self) -> None:
        """Forget all orders: the world has ended, which its agents hear as an error (D-17)."""
        with self.changed:
            self.closed = True
            for order in self._orders:
                order.clear()
            self._orders.clear()
            self.changed.notify_all()

    def wake(self) -> None:
        """Let all who wait look again."""
        with self.changed:
            self.changed.notify_all()
