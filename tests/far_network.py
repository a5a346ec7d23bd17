"""Streams between remotes and the server's sessions in virtual time, over links like those of a country."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import RealTime
from bridge.core.client.wire.poller import Poller, PollerTimer
from bridge.core.client.world.remote import Delivery, Remote
from bridge.core.client.world.session_states import Event, Joined
from bridge.core.client.world.world_request import WorldRequest
from bridge.errors import ConnectionLostError
from bridge.testing import Conditions, Duplex, VirtualClock
from bridge.testing.runtime import LocalRuntime
from tests.realtime_tools import instead_of_calls, read
from tests.support import direct_registry, direct_session, gym_source

STEADY = Conditions(delay=0.04)
"""80 ms round trip."""
ROUGH = Conditions(delay=0.025, jitter=0.03, reorder=0.02, hold=0.2, in_order=True)
"""80 ms round trip, 30 ms more or less, and 2 % of what is sent comes 200 ms late, with all that is behind it."""


class Telling(gymnasium.Env[Any, Any]):
    """Observation `[episode, frame, action, time]`; the reward is the frame's number.

    Args:
        lengths: Of its episodes, in turn.
        now: Tells the time.
    """

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(100_000)

    def __init__(self, lengths: tuple[int, ...] = (10**6,), now: Callable[[], float] = lambda: 0.0) -> None:
        self.lengths, self.now = lengths, now
        self.episode = self.frame = 0
        self.applied: list[tuple[int, int, float]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.frame = self.episode + 1, 0
        return np.array([self.episode, 0, 0, self.now()], np.float64), {}

    def step(self, action: Any) -> Any:
        self.frame += 1
        self.applied.append((self.episode, int(action), self.now()))
        over = self.frame >= self.lengths[(self.episode - 1) % len(self.lengths)]
        observation = np.array([self.episode, self.frame, int(action), self.now()], np.float64)
        return observation, float(self.frame), over, False, {}


class _Stream:
    """A stream of requests and answers, with a session at its end."""

    server_version = "test"
    silent = False
    draining = False

    def __init__(self, net: FarNetwork, deliver: Callable[[Any], None]) -> None:
        self._net, self.deliver = net, deliver
        self.duplex: Duplex[bytes] = Duplex(net.conditions, net.generator)
        self.session = direct_session(net.registry, "test").wrapped
        self.requests: deque[bytes] = deque()
        self.arrived: dict[int, Callable[[], Any]] = {}
        self.most_waiting = 0
        self.busy = self.closed = False
        self.on_send: Callable[[], None] = lambda: None
        """Called before a request is sent."""

    def send(self, request: bytes) -> None:
        self.on_send()
        self.duplex.a.send(self._net.clock.now(), request)

    def finish(self) -> None:
        pass

    def close(self, timeout: float) -> None:
        if not self.closed:
            self.closed = True
            self.session.hang_up()
            self._net.runtime.scheduler.run()
            self.session.close()

    def cut(self) -> None:
        """Have the network end it."""
        self.close(0.0)
        self.deliver(ConnectionLostError("grpc://virtual:1", "cut"))

    def carry(self) -> None:
        """Bring what has arrived at either end."""
        now = self._net.clock.now()
        for request in self.duplex.b.receive(now):
            # As `Calls` does with those that have to wait.
            request = bytes(bytearray(request))
            if self.busy or self.requests:
                begun = self.session.arrive(request, len(self.arrived) == len(self.requests))
                self.arrived.update({} if begun is None else {id(request): begun})
            self.requests.append(request)
            self.most_waiting = max(self.most_waiting, len(self.requests))
            self._serve()
        self._serve()
        for answer in self.duplex.a.receive(now):
            if not self.closed:
                self.deliver(answer)

    def _serve(self) -> None:
        while self.requests and not self.busy and not self.closed:
            self.busy = True
            scheduler = self._net.runtime.scheduler
            request = self.requests.popleft()
            begun = self.arrived.pop(id(request), None)
            scheduler.start(self.session.handle(request) if begun is None else begun(), self._answered)
            while scheduler.ready:
                scheduler.run()

    def _answered(self, parts: Any, error: BaseException | None) -> None:
        assert error is None, error
        self.busy = False
        if not self.closed:
            self.duplex.b.send(self._net.clock.now(), self._net.rewrite(b"".join(parts)))


class FarNetwork:
    """One server with one world, and remotes whose streams take their time.

    Args:
        monkeypatch: Puts the streams in place of connections.
        env: Makes the environment; gets the function that tells the server's time.
        fps: Frames a second.
        conditions: Of each direction of each stream.
        skew: The server's clock minus the client's, seconds.
        seed: Of the network's chance.
        source: Further keywords of `gym_source`.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        env: Callable[[Callable[[], float]], Any],
        fps: float = 60.0,
        conditions: Conditions = STEADY,
        skew: float = 0.0,
        seed: int = 0,
        **source: Any,
    ) -> None:
        self.clock = VirtualClock(100.0)
        self.conditions, self.generator = conditions, np.random.default_rng(seed)
        self.server_clock = VirtualClock(100.0 + skew)
        self.clock.subscribe(lambda now: self.server_clock.advance_to(now + skew))
        self.skew = skew
        self.runtime = LocalRuntime(self.server_clock.now)
        realtime = RealTime(clock=self.server_clock)
        self.made: list[Any] = []
        """The environments, in the order in which they were made."""
        self.taking = True
        """False: what arrives at the client is left where it is."""
        self.rewrite: Callable[[bytes], bytes] = bytes
        """Changes each answer on its way."""

        def make() -> Any:
            self.made.append(env(self.server_clock.now))
            return self.made[-1]

        made = gym_source(make, fps=fps, realtime=realtime, **source)
        self.registry = direct_registry(made, runtime=self.runtime)
        self.poller: Poller[Delivery] = Poller()
        self.poller.look_every = lambda seconds: None  # type: ignore[method-assign]
        self.poller.call_later = self._call_later  # type: ignore[method-assign]
        self.streams: list[_Stream] = []
        self.answers: list[Event] = []
        self._timers: list[tuple[float, int, PollerTimer]] = []
        self._numbers = itertools.count()
        instead_of_calls(monkeypatch, self._connect)

    def _connect(self, connection: None, url: str, deliver: Callable[[Any], None]) -> Any:
        self.streams.append(_Stream(self, deliver))
        return self.streams[-1]

    def _call_later(self, delay: float, call: Callable[[], None]) -> PollerTimer:
        timer = PollerTimer(call)
        heapq.heappush(self._timers, (self.clock.now() + delay, next(self._numbers), timer))
        return timer

    @property
    def world(self) -> Any:
        return self.registry.worlds[0]

    @property
    def loop(self) -> Any:
        """What decides the frames of its clock."""
        return self.world.pacer.loop

    def remote(self, url: str = "grpc://virtual:1", **request: Any) -> Remote:
        """Join a world, and have the stream for actions joined too."""
        remote = Remote(WorldRequest.of(url, **request), self.poller)
        remote.now = self.clock.now
        remote.open()
        self.run_until(lambda: any(isinstance(answer, Joined) for answer in self.answers))
        self.run_for(0.5)
        self.answers.clear()
        return remote

    def run_for(self, seconds: float) -> None:
        """Let time pass; what arrives is taken, as by the thread that works between calls."""
        end = self.clock.now() + seconds
        self.run_until(lambda: self.clock.now() >= end, at_most=end)

    def run_until(self, done: Callable[[], bool], at_most: float = float("inf")) -> None:
        """Let time pass until something is so."""
        for _ in range(50_000):
            if done():
                return
            self._advance(min([at_most, *self._due()]))
            for stream in list(self.streams):
                stream.carry()
            while self._timers and self._timers[0][0] <= self.clock.now():
                heapq.heappop(self._timers)[2].run()
            if self.taking:
                self.take()
        raise AssertionError("this takes too long")

    def _due(self) -> list[float]:
        times = [time for stream in self.streams if (time := stream.duplex.next_arrival()) is not None]
        times += [self._timers[0][0]] if self._timers else []
        due = self.runtime.scheduler.next_due()
        frames = [world.pacer.loop.next_due() for world in self.registry.worlds]
        return times + [time - self.skew for time in (due, *frames) if time is not None]

    def _advance(self, when: float) -> None:
        assert when < float("inf"), "nothing is under way, so nothing will happen any more"
        self.clock.advance_to(max(when, self.clock.now()) + 1e-9)
        self.runtime.scheduler.run()
        while self.runtime.scheduler.ready:
            self.runtime.scheduler.run()

    def take(self) -> None:
        """Take what the streams have brought, as a call of the client does."""
        while self.poller.items:  # where there are none, `get` would look for sockets
            remote, number, what, arrived = self.poller.get(0.0)
            event = remote.receive(number, what, arrived)
            if event is not None:
                self.answers.append(event)

    def begin(self, remote: Remote, *, reset: bool = True) -> Any:
        """Begin an episode; return what is told."""
        remote.begin({}, reset=reset)
        return self._told(remote)

    def step(self, remote: Remote, action: int = 0) -> Any:
        """Step, or begin the next episode where one has ended; return what is told."""
        if remote.session.state.value == "ended":
            return self.begin(remote, reset=False)
        remote.step(action)
        return self._told(remote)

    def _told(self, remote: Remote) -> Any:
        self.take()
        self.run_until(lambda: bool(self.answers))
        answer = self.answers.pop(0)
        error = getattr(answer, "error", None)
        if error is not None:
            raise error
        return read(remote, answer)

    def close(self) -> None:
        for stream in self.streams:
            stream.close(0.0)
        self.registry.close()
