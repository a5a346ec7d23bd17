"""Keep seats of people who lost their connection or reloaded the page.

With the JoinWorld setting `seat_key`, a secret of its own, a client says that it may return. If its connection ends
without LeaveWorld, its agent stays in the world for `Limits.seat_timeout` seconds and does nothing. A client that joins
for the same seat with the same key gets the agent. Others cannot get the seat until then, and are told when it is free.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Mapping

from bridge.core.worlds.base import Agent, World
from bridge.core.worlds.scheduling import Timer
from bridge.core.worlds.settings import read_scalar, read_text
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["SEAT_KEY", "KeptSeats"]

SEAT_KEY = "seat_key"
"""The name of the JoinWorld setting."""
_KEY = re.compile(r"[\x21-\x7e]{16,64}")
_EXPECTED = "a secret of 16 to 64 characters of ASCII without spaces"
_SEAT = ("role", "agent", "lane")
"""The settings that select a seat."""


class KeptSeats:
    """The seats of a server that are kept for a key.

    Args:
        seconds: How long an agent without a client stays in its world.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Weak references: this object is not notified of agents that left, or whose world is gone.
        self._keys: weakref.WeakKeyDictionary[Agent, tuple[str, list[pb.Tensor | None]]] = weakref.WeakKeyDictionary()
        self._kept: dict[tuple[World, str], tuple[Agent, Timer, float]] = {}
        """Agents that wait for their clients, with the time of the world's scheduler at which the seat becomes free."""

    def join(
        self, world: World, settings: Mapping[str, pb.Tensor], join: Callable[[Mapping[str, pb.Tensor]], Agent]
    ) -> Agent:
        """Return the agent that waits for the key; without one, join with the other settings.

        Raises:
            RequestError: As for `join`; for a kept seat, the message says in how many seconds it becomes free.
        """
        if SEAT_KEY not in settings:
            return self._join(world, settings, join)
        key = read_text(settings, SEAT_KEY, "JoinWorld", _KEY, _EXPECTED)
        seat = [settings.get(name) for name in _SEAT]
        if (found := self._kept.pop((world, key), None)) is not None:
            agent, timer, _ = found
            timer.cancel()
            if self._keys[agent] == (key, seat):
                return agent
            agent.leave()  # its client now wants another seat
        agent = self._join(world, {name: tensor for name, tensor in settings.items() if name != SEAT_KEY}, join)
        self._keys[agent] = key, seat
        return agent

    def _join(
        self, world: World, settings: Mapping[str, pb.Tensor], join: Callable[[Mapping[str, pb.Tensor]], Agent]
    ) -> Agent:
        """Join; if the seat is kept for another client, raise an error that says until when."""
        try:
            return join(settings)
        except RequestError as error:
            free_at = self._free_at(world, settings)
            if error.code is not Code.RESOURCE_EXHAUSTED or free_at is None:
                raise
            seconds = max(1, math.ceil(free_at - world.scheduler.now()))
            # The page parses "free in N s", counts down and tries again.
            text = (
                f"{error.message}. Who had the seat has lost the connection: free in {seconds} s, unless they come back"
            )
            raise RequestError(error.code, text) from None

    def _free_at(self, world: World, settings: Mapping[str, pb.Tensor]) -> float | None:
        """Return when the first kept seat that matches becomes free, by the scheduler's time; None: none is kept."""
        kept = [(self._keys[agent][1], at) for (where, _), (agent, _, at) in self._kept.items() if where is world]
        return min((at for seat, at in kept if _matches(settings, seat)), default=None)

    def keep(self, world: World, agent: Agent) -> bool:
        """Keep the agent of a client that has disconnected; return False if it must leave at once."""
        inner = agent.unwrapped
        key, _ = self._keys.get(inner, (None, None))
        # Two clients may use the same key: if both are lost, only one seat is kept.
        if key is None or (world, key) in self._kept or not world.alive:
            return False
        # In lock-step others would wait for it, or the world is its own; spectators occupy no seat.
        if not agent.rest():
            return False

        def leave() -> None:
            if self._kept.pop((world, key), None) is not None:
                inner.leave()

        free_at = world.scheduler.now() + self._seconds
        self._kept[world, key] = inner, world.scheduler.call_at(free_at, leave), free_at
        return True


def _matches(settings: Mapping[str, pb.Tensor], seat: list[pb.Tensor | None]) -> bool:
    """Return True if a client with these settings may get this seat; without a name, any of the same role."""
    for name, kept in zip(_SEAT, seat, strict=True):
        asked = settings.get(name)
        if name == "role":
            if _role(asked) != _role(kept):
                return False
        elif asked is not None and kept is not None and asked != kept:
            return False
    return True


def _role(tensor: pb.Tensor | None) -> object:
    return "player" if tensor is None else read_scalar({"role": tensor}, "role")
