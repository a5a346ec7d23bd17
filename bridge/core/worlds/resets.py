"""ResetWorld: each running agent gets INTERRUPTED once, and the caller waits for that (D-15).

`ResetBook` knows which agents are in a sequence. A `ResetOrder` holds the agents that have not been interrupted yet. An
agent is removed from it by its next Step, which is answered INTERRUPTED, or by leaving, dying or resetting.
"""

from __future__ import annotations

from bridge.core.worlds.scheduling import PendingResult

__all__ = ["ResetBook", "ResetOrder"]


class ResetOrder:
    """One ResetWorld that waits for agents.

    Args:
        agents: Those that are still to be told.
        interrupts: False: their sequences end by themselves, and it waits for that alone.
    """

    def __init__(self, agents: set[object], interrupts: bool = True) -> None:
        self.agents = agents
        self.interrupts = interrupts
        """False: the sequences of its agents end by themselves."""
        self.asked = len(agents)
        """How many agents were to be told when it began."""
        self.cancelled = False
        """True if the client that waits has gone."""
        self.finished: PendingResult[None] = PendingResult()
        """Done once all were told, or nobody waits any longer."""
        # Where there is nobody to tell, it is done at once.
        self.told()

    def told(self) -> None:
        """Note that agents may have left the order."""
        if not self.agents:
            self.finished.set_result(None)

    def cancel(self) -> None:
        """Wait no longer: the client that waits has gone."""
        if not self.finished.done:
            self.cancelled = True
            self.finished.set_result(None)


class ResetBook:
    """The agents of a world that are in a sequence, and those of them that still have to be told that it ends."""

    def __init__(self) -> None:
        self._running: set[object] = set()
        self.orders: list[ResetOrder] = []
        """Those that still have to tell agents."""
        self.closed = False
        """The world has ended: nobody is told anything any more."""

    def start(self, agent: object) -> None:
        """Note that a sequence begins for an agent: from here on, a ResetWorld concerns it."""
        self._running.add(agent)

    def end(self, agent: object) -> None:
        """Note that an agent is in no sequence any more, whatever ended it."""
        # A ResetWorld must not wait for a Step that never comes: the agent has ended, reset, left or died.
        self._running.discard(agent)
        self._cross_off(agent)

    def is_due(self, agent: object) -> bool:
        """True if an agent's next Step is to be answered INTERRUPTED."""
        return any(order.interrupts and agent in order.agents for order in self.orders)

    def take(self, agent: object) -> bool:
        """True if this Step of the agent is to be answered INTERRUPTED; it is told so once."""
        # Asked in each Step of each agent, nearly always without an order.
        if not self.orders or not self.is_due(agent):
            return False
        self._cross_off(agent)
        return True

    def _cross_off(self, agent: object) -> None:
        for order in self.orders:
            if agent in order.agents:
                order.agents.remove(agent)
                order.told()
        self.orders = [order for order in self.orders if order.agents]

    def interrupt(self, caller: object = None) -> ResetOrder:
        """Order that every running agent but the caller is told."""
        order = ResetOrder({agent for agent in self._running if agent is not caller})
        if order.agents:
            self.orders.append(order)
        if caller is not None:
            self._cross_off(caller)  # two that reset the world at once do not wait for each other
        return order

    def all_ended(self) -> PendingResult[None]:
        """Return what is done once no agent is left in the sequence that it is in now."""
        order = ResetOrder(set(self._running), interrupts=False)
        if order.agents:
            self.orders.append(order)
        return order.finished

    def withdraw(self, order: ResetOrder) -> tuple[int, bool]:
        """End the wait for an order.

        Returns:
            How many agents were not told, and whether the order was withdrawn, as it is where none was (D-2).
        """
        untold = len(order.agents)
        # Once one agent was told, the reset cannot be taken back: the others are told too, at their next Steps.
        withdrawn = 0 < untold == order.asked
        if withdrawn:
            order.agents.clear()
            self.orders = [other for other in self.orders if other.agents]
        return untold, withdrawn

    def close(self) -> None:
        """Forget all orders: the world has ended, which its agents hear as an error (D-17)."""
        self.closed = True
        for order in self.orders:
            order.agents.clear()
            order.told()
        self.orders.clear()
