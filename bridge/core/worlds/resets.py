"""ResetWorld: each running agent gets INTERRUPTED once, and the caller waits until then (D-15).

`ResetBook` knows which agents are in a sequence. A `ResetOrder` holds the agents that have not been interrupted yet. An
agent is removed from it by its next Step, which is answered INTERRUPTED, or by leaving, dying or resetting.
"""

from __future__ import annotations

from bridge.core.worlds.scheduling import PendingResult

__all__ = ["ResetBook", "ResetOrder"]


class ResetOrder:
    """A ResetWorld that waits for agents.

    Args:
        agents: The agents that still have to be told.
        interrupts: False: the agents' sequences end by themselves, and the order only waits for that.
    """

    def __init__(self, agents: set[object], interrupts: bool = True) -> None:
        self.agents = agents
        self.interrupts = interrupts
        """False: the sequences of its agents end by themselves."""
        self.asked = len(agents)
        """The number of agents to tell at the beginning."""
        self.cancelled = False
        """True if the waiting client has gone."""
        self.finished: PendingResult[None] = PendingResult()
        """Set once all agents were told, or nobody waits any longer."""
        # Without agents to tell, it is finished at once.
        self.told()

    def told(self) -> None:
        """Finish if no agents are left."""
        if not self.agents:
            self.finished.set_result(None)

    def cancel(self) -> None:
        """End the wait, because the waiting client has gone."""
        if not self.finished.done:
            self.cancelled = True
            self.finished.set_result(None)


class ResetBook:
    """The agents of a world that are in a sequence, and the orders to end their sequences."""

    def __init__(self) -> None:
        self._running: set[object] = set()
        self.orders: list[ResetOrder] = []
        """The unfinished orders."""
        self.closed = False
        """True once the world has ended: no agent is interrupted any more."""

    def start(self, agent: object) -> None:
        """Record that an agent begins a sequence: from now on a ResetWorld interrupts it."""
        self._running.add(agent)

    def end(self, agent: object) -> None:
        """Record that an agent's sequence is over, for any reason."""
        # A ResetWorld must not wait for a Step that never comes: the agent has ended, reset, left or died.
        self._running.discard(agent)
        self._cross_off(agent)

    def is_due(self, agent: object) -> bool:
        """True if an agent's next Step must be answered INTERRUPTED."""
        return any(order.interrupts and agent in order.agents for order in self.orders)

    def take(self, agent: object) -> bool:
        """Return True if this Step of the agent must be answered INTERRUPTED, which happens once for each order."""
        # Called in each Step of each agent, usually without an order.
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
        """Order the interruption of every running agent except the caller."""
        order = ResetOrder({agent for agent in self._running if agent is not caller})
        if order.agents:
            self.orders.append(order)
        if caller is not None:
            self._cross_off(caller)  # two agents that reset the world at once must not wait for each other
        return order

    def all_ended(self) -> PendingResult[None]:
        """Return a result that is set once all agents have left their current sequences."""
        order = ResetOrder(set(self._running), interrupts=False)
        if order.agents:
            self.orders.append(order)
        return order.finished

    def withdraw(self, order: ResetOrder) -> tuple[int, bool]:
        """End the wait for an order.

        Returns:
            The number of agents that were not told, and True if the order was withdrawn because none was told (D-2).
        """
        untold = len(order.agents)
        # After one agent was told, the reset cannot be withdrawn: the others are told at their next Steps.
        withdrawn = 0 < untold == order.asked
        if withdrawn:
            order.agents.clear()
            self.orders = [other for other in self.orders if other.agents]
        return untold, withdrawn

    def close(self) -> None:
        """Drop all orders: the world has ended, and its agents get an error (D-17)."""
        self.closed = True
        for order in self.orders:
            order.agents.clear()
            order.told()
        self.orders.clear()
