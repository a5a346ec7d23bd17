"""A server and clients joined by a simulated link: loss, duplicates, delay, reordering from a seed; no socket, no wait.

simulation = Simulation(seed=1, loss=0.3, duplicate=0.3)
simulation.publish(Header("count", 0), CountWorld(agents=2, length=10))
players = [simulation.join(Header("count", 0)) for _ in range(2)]
simulation.run(60.0, until=lambda: all(player.finished for player in players))
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium import spaces

from bridge.core.worlds.environment import Transition
from bridge.perlert import GuardConfig, RolloutConfig
from bridge.perlert.host import Instance, InstanceHost
from bridge.perlert.perlert_server import make_world
from bridge.perlert.player import Player
from bridge.perlert.player_run import Stepped
from bridge.perlert.protocol.guard import Address, Guard, Outgoing
from bridge.perlert.protocol.packet import Header
from bridge.testing import Conditions, Link, LocalRuntime

LOBBY_PORT = 32322
SERVER = "192.0.2.1"


def guard_of(config: GuardConfig | None = None, secret: bytes | None = None) -> Guard:
    """The book of addresses that a lobby and its rollouts share."""
    return Guard(config) if secret is None else Guard(config, secret)


def result(observation: Any, reward: float, *, terminated: bool = False, truncated: bool = False) -> Transition:
    """A frame of a world as one agent sees it, for `Rollout.frame`."""
    return Transition(observation, reward, terminated=terminated, truncated=truncated)


def steps_of(player: Player) -> list[Stepped]:
    """The steps among a player's events."""
    return [event for event in player.events if isinstance(event, Stepped)]


def client_of(env: Any) -> Any:
    """The client of a `PerlertEnv`: its `port` and its `player`, for a test that sends in its name."""
    return env._client


def ports_of(instance: Instance) -> list[int]:
    """The ports of the runs of an instance."""
    return [run.port for run in instance.lobby.runs]


class CountWorld:
    """Agents that count: an episode lasts `length` steps (agent i: i fewer), rewards are decimals from a seed.

    `applied` holds for each episode each agent's actions, `returns` its rewards.
    """

    metadata: dict[str, Any] = {}  # noqa: RUF012
    render_mode = None

    def __init__(self, agents: int = 1, length: int = 10, seed: int = 0) -> None:
        self.possible_agents = [f"agent{i}" for i in range(agents)]
        self.agents: list[str] = []
        self.length = length
        self.applied: list[dict[str, list[int]]] = []
        self.returns: list[dict[str, list[float]]] = []
        self._random = random.Random(seed)
        self._step = 0

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1e6, 1e6, (2,))

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(100_000)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self._step = 0
        self.agents = list(self.possible_agents)
        self.applied.append({key: [] for key in self.agents})
        self.returns.append({key: [] for key in self.agents})
        return {key: [0.0, 0.0] for key in self.agents}, {}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        self._step += 1
        seen, rewards, ended, cut = {}, {}, {}, {}
        for number, key in enumerate(self.possible_agents):
            if key in self.agents:
                self.applied[-1][key].append(int(actions[key]))
                rewards[key] = round(self._random.uniform(-2, 2), 3)
                self.returns[-1][key].append(rewards[key])
                over = self._step >= max(self.length - number, 1)
                seen[key] = [float(self._step), float(actions[key])]
                ended[key], cut[key] = over and number % 2 == 0, over
        self.agents = [key for key in self.agents if not cut[key]]
        return seen, rewards, ended, cut, {}

    def close(self) -> None:
        pass


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
        self.now = 1000.0
        conditions = Conditions(delay=delay[0], jitter=delay[1] - delay[0], loss=loss, duplicate=duplicate)
        self.link: Link[tuple[bytes, Address, Address]] = Link(conditions, np.random.default_rng(seed))
        self.visitors: dict[Address, Visitor] = {}
        self.sent_bytes: dict[Address, int] = {}
        """Bytes that the host sent to each address."""
        self.drop: Callable[[bytes, Address, Address], bool] = lambda datagram, source, target: False
        """Loses further datagrams: (datagram, source, target)."""
        self._ports = itertools.count(40_000)
        self.runtime = LocalRuntime(lambda: self.now)
        ports = SimpleNamespace(send=self._from_host, open_port=lambda: next(self._ports), close_port=lambda port: None)
        self.host = InstanceHost(guard, self.runtime.scheduler, ports, epoch=1.6e9)

    def publish(self, header: Header, world: Any, **settings: Any) -> Instance:
        """Publish a world; keywords are those of `Instance.open`, and `rollout` is its configuration."""
        config = settings.pop("rollout", RolloutConfig())
        make = partial(make_world, lambda: world, self.runtime, str(header), fps=config.fps)
        instance = Instance(header, make, self.host, config)
        slots = dict.fromkeys(world.possible_agents, "counter")
        self.runtime.run(instance.open(slots=slots, **settings))
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
        if not self.drop(datagram, source, target):
            self.link.send(self.now, (datagram, source, target))

    def _from_host(self, port: int | None, datagram: bytes, address: Address) -> None:
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
                        self._from_player(visitor, visitor.player.set_ready(True, self.now))
                elif visitor.acts:
                    self._from_player(visitor, visitor.player.act(str(visitor.player.seq + 1), self.now))

    def deliver(self, datagram: bytes, source: Address, target: Address) -> None:
        """Hand a datagram over, now."""
        if target[0] == SERVER:
            self.host.receive(None if target[1] == LOBBY_PORT else target[1], datagram, source)
            self._turn()
        elif (visitor := self.visitors.get(target)) is not None:
            self._from_player(visitor, visitor.player.receive(datagram, source, self.now))

    def _turn(self) -> None:
        """Let the host do what is ready and due."""
        scheduler = self.runtime.scheduler
        scheduler.run()
        while scheduler.ready:
            scheduler.run()

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; return whether `until` came true before it was over."""
        end = self.now + seconds
        while not until():
            wakes = [visitor.player.wake() for visitor in self.visitors.values() if not visitor.finished]
            wakes += [at for at in (self.runtime.scheduler.next_due(), self.link.next_arrival()) if at is not None]
            at = min(wakes, default=end + 1)
            if at > end:
                self.now = end
                return until()
            self.now = max(self.now, at)
            for datagram, source, target in self.link.receive(self.now):
                self.deliver(datagram, source, target)
            for visitor in self.visitors.values():
                if not visitor.finished and visitor.player.wake() <= self.now:
                    self._from_player(visitor, visitor.player.tick(self.now))
            self._turn()
        return True
