"""Seats that wait for those who lost their connection, or reloaded their page.

A client says by the JoinWorld setting `seat_key` that it may come back: a secret of its own. If its connection ends
without LeaveWorld, its agent stays in the world for `Limits.seat_timeout` seconds, does nothing, and is given to who
joins the world for the same seat with the same key. Nobody else gets its seat meanwhile.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping

from bridge.core.worlds.base import Agent, World
from bridge.core.worlds.scheduling import Timer
from bridge.core.worlds.settings import read_text
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["SEAT_KEY", "KeptSeats"]

SEAT_KEY = "seat_key"
"""The setting."""
_KEY = re.compile(r"[\x21-\x7e]{16,64}")
_EXPECTED = "a secret of 16 to 64 characters of ASCII without spaces"
_SEAT = ("role", "agent", "lane")
"""The settings that say which seat is asked for."""


class KeptSeats:
    """The seats of a server that have a key.

    Args:
        seconds: How long an agent without a client stays in its world.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Weak, since nobody tells this of agents that left, or whose world is gone.
        self._keys: weakref.WeakKeyDictionary[Agent, tuple[str, list[pb.Tensor | None]]] = weakref.WeakKeyDictionary()
        self._kept: dict[tuple[World, str], tuple[Agent, Timer]] = {}

    def join(
        self, world: World, settings: Mapping[str, pb.Tensor], join: Callable[[Mapping[str, pb.Tensor]], Agent]
    ) -> Agent:
        """Return the agent that waits for this key, or one that joins, by the other settings."""
        if SEAT_KEY not in settings:
            return join(settings)
        key = read_text(settings, SEAT_KEY, "JoinWorld", _KEY, _EXPECTED)
        seat = [settings.get(name) for name in _SEAT]
        if (found := self._kept.pop((world, key), None)) is not None:
            agent, timer = found
            timer.cancel()
            if self._keys[agent] == (key, seat):
                return agent
            agent.leave()  # its client wants another seat now
        agent = join({name: tensor for name, tensor in settings.items() if name != SEAT_KEY})
        self._keys[agent] = key, seat
        return agent

    def keep(self, world: World, agent: Agent) -> bool:
        """Keep the agent of a client that is gone; return False where it is to leave at once."""
        inner = agent.unwrapped
        key, _ = self._keys.get(inner, (None, None))
        # Two clients may have shown one key: where both are lost, one seat waits.
        if key is None or (world, key) in self._kept or not world.alive:
            return False
        # In lock-step others would wait for it, or the world is its own alone; spectators take no seat.
        if not agent.rest():
            return False

        def leave() -> None:
            if self._kept.pop((world, key), None) is not None:
                inner.leave()

        self._kept[world, key] = inner, world.scheduler.call_later(self._seconds, leave)
        return True
