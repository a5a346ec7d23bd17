"""A server and clients joined by a simulated link: loss, duplicates, delay, reordering from a seed; no socket, no wait.

simulation = Simulation(seed=1, loss=0.3, duplicate=0.3)
simulation.publish(Header("count", 0), CountWorld(agents=2, length=10))
players = [simulation.join(Header("count", 0)) for _ in range(2)]
simulation.run(60.0, until=lambda: all(player.finished for player in players))
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymnasium import spaces

from bridge.perlert.codec import Space
from bridge.perlert.guard import Address, GuardConfig
from bridge.perlert.host import Host, Instance, Send
from bridge.perlert.lobby import Outgoing
from bridge.perlert.packet import Header
from bridge.perlert.player import Player, Stepped
from bridge.perlert.worlds import Seen

__all__ = ["CountWorld", "Simulation", "Visitor"]

LOBBY_PORT = 32322
SERVER = "192.0.2.1"


class CountWorld:
    """Agents that count: an episode lasts `length` steps (agent i: i fewer), rewards are decimals from a seed.

    `applied` holds for each episode each agent's actions, `returns` its rewards.
    """

    def __init__(self, agents: int = 1, length: int = 10, seed: int = 0) -> None:
        self.agents: dict[str, str] = {f"agent{i}": "counter" for i in range(agents)}
        self.length = length
        self.applied: list[dict[str, list[int]]] = []
        self.returns: list[dict[str, list[float]]] = []
        self._random = random.Random(seed)
        self._step = 0
        self._alive: list[str] = []

    def spaces(self, key: str) -> tuple[Space, Space]:
        """Return Box (2,) and Discrete(100000)."""
        return spaces.Box(-1e6, 1e6, (2,)), spaces.Discrete(100_000)

    def reset(self, seed: int | None) -> dict[str, Any]:
        """Begin an episode."""
        self._step = 0
        self._alive = list(self.agents)
        self.applied.append({key: [] for key in self.agents})
        self.returns.append({key: [] for key in self.agents})
        return {key: [0.0, 0.0] for key in self.agents}

    def step(self, actions: Mapping[str, Any]) -> dict[str, Seen]:
        """Count on."""
        self._step += 1
        seen: dict[str, Seen] = {}
        for number, key in enumerate(self.agents):
            if key in self._alive:
                self.applied[-1][key].append(int(actions[key]))
                reward = round(self._random.uniform(-2, 2), 3)
                self.returns[-1][key].append(reward)
                over = self._step >= max(self.length - number, 1)
                seen[key] = ([float(self._step), float(actions[key])], reward, over and number % 2 == 0, over)
                if over:
                    self._alive.remove(key)
        return seen

    def alive(self) -> Sequence[str]:
        """Return who still counts."""
        return list(self._alive)

    def close(self) -> None:
        """Nothing is held."""


@dataclasses.dataclass
class Visitor:
    """A simulated client that acts with 1, 2, 3, … and goes for `runs` runs."""

    player: Player
    address: Address
    runs: int
    steps: list[list[Stepped]] = dataclasses.field(default_factory=lambda: [[]])
    acts: bool = True

    @property
    def finished(self) -> bool:
        """Whether it has seen the end of its last run."""
        return len(self.steps) > self.runs


class Simulation:
    """The link, the clock, a host and its clients.

    Args:
        seed: Of everything random.
        loss: Probability that a datagram vanishes.
        duplicate: Probability that it comes twice.
        delay: Shortest and longest transit time in seconds; what is sent later may come earlier.
        guard: Limits of the host.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        loss: float = 0.0,
        duplicate: float = 0.0,
        delay: tuple[float, float] = (0.001, 0.001),
        guard: GuardConfig | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.loss, self.duplicate, self.delay = loss, duplicate, delay
        self.now = 1000.0
        self.visitors: dict[Address, Visitor] = {}
        self.sent_bytes: dict[Address, int] = {}
        """Bytes that the host sent to each address."""
        self.drop: Callable[[bytes, Address, Address], bool] = lambda datagram, source, target: False
        """Loses further datagrams: (datagram, source, target)."""
        self._ports = itertools.count(40_000)
        self._queue: list[tuple[float, int, bytes, Address, Address]] = []
        self._order = itertools.count()
        self.host = Host(guard, open_port=lambda: next(self._ports), close_port=lambda port: None)

    def publish(self, header: Header, world: Any, **settings: Any) -> Instance:
        """Publish a world; keywords are those of `Instance`."""
        instance = Instance(
            header,
            world,
            self.host.guard,
            open_port=self.host.open_port,
            close_port=self.host.close_port,
            new_token=lambda: f"{self.random.getrandbits(48):012x}",
            epoch=1.6e9,
            **settings,
        )
        self.host.add(instance)
        return instance

    def join(self, header: Header, *, runs: int = 1, host: str | None = None, **settings: Any) -> Visitor:
        """Let a client in; keywords are those of `Player`."""
        number = len(self.visitors)
        address = (host or f"10.0.{number // 250}.{number % 250 + 1}", 5000 + number)
        settings = {"tag": f"visitor{number}", "action": "0", **settings}
        visitor = Visitor(Player(header, (SERVER, LOBBY_PORT), **settings), address, runs)
        self.visitors[address] = visitor
        return visitor

    def send(self, datagram: bytes, source: Address, target: Address) -> None:
        """Put a datagram on the link."""
        if self.drop(datagram, source, target) or self.random.random() < self.loss:
            return
        for _ in range(2 if self.random.random() < self.duplicate else 1):
            at = self.now + self.random.uniform(*self.delay)
            heapq.heappush(self._queue, (at, next(self._order), datagram, source, target))

    def _from_host(self, out: Sequence[Send]) -> None:
        for port, datagram, address in out:
            self.sent_bytes[address] = self.sent_bytes.get(address, 0) + len(datagram)
            self.send(datagram, (SERVER, port or LOBBY_PORT), address)

    def _from_player(self, visitor: Visitor, out: Sequence[Outgoing]) -> None:
        for datagram, address in out:
            self.send(datagram, visitor.address, address)
        while visitor.player.events:
            event = visitor.player.events.popleft()
            if isinstance(event, Stepped):
                visitor.steps[-1].append(event)
                if event.done:
                    visitor.steps.append([])
                    if not visitor.finished:
                        self._from_player(visitor, visitor.player.again(self.now))
                elif visitor.acts:
                    self._from_player(visitor, visitor.player.act(str(visitor.player.seq + 1), self.now))

    def deliver(self, datagram: bytes, source: Address, target: Address) -> None:
        """Hand a datagram over, now."""
        if target[0] == SERVER:
            port = None if target[1] == LOBBY_PORT else target[1]
            self._from_host(self.host.receive(port, datagram, source, self.now))
        elif (visitor := self.visitors.get(target)) is not None:
            self._from_player(visitor, visitor.player.receive(datagram, source, self.now))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; return whether `until` came true before it was over."""
        end = self.now + seconds
        while not until():
            wakes = [visitor.player.wake() for visitor in self.visitors.values() if not visitor.finished]
            at = min([self.host.wake(), *wakes, *([self._queue[0][0]] if self._queue else [])])
            if at > end:
                self.now = end
                return until()
            self.now = max(self.now, at)
            while self._queue and self._queue[0][0] <= self.now:
                _, _, datagram, source, target = heapq.heappop(self._queue)
                self.deliver(datagram, source, target)
            for visitor in self.visitors.values():
                if not visitor.finished and visitor.player.wake() <= self.now:
                    self._from_player(visitor, visitor.player.tick(self.now))
            if self.host.wake() <= self.now:
                self._from_host(self.host.tick(self.now))
        return True
