"""A network in virtual time between the client's `Remote` and the server's `Session`, over a `bridge.testing` link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bridge import RealTime
from bridge.core.client.wire.poller import Poller
from bridge.core.client.world.remote import Delivery, Remote
from bridge.core.client.world.session_states import Event, Joined
from bridge.core.client.world.steps import Batch
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.worlds.world import EnvWorld
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import Conditions, Duplex, VirtualClock
from tests.support import direct_registry, direct_session, gym_source, layout_of


def instead_of_calls(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
    """Have remotes get what `call` makes from no connection, a URL and where to deliver, in place of calls."""
    for name, value in (("connection_to", lambda *args, **keywords: None), ("ClientCall", call)):
        monkeypatch.setattr(f"bridge.core.client.wire.connection.{name}", value)


class Network:
    """One server, and a connection whose packets take their time. Everything happens in `run_until`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, env: Any, fps: float, conditions: Conditions, skew: float = 0.0
    ) -> None:
        self.clock = VirtualClock(100.0)
        self.skew = skew
        server_clock = VirtualClock(100.0 + skew)
        self.clock.subscribe(lambda now: server_clock.advance_to(now + skew))
        self.registry = direct_registry(gym_source(env, fps=fps, realtime=RealTime(clock=server_clock)))
        self.duplex: Duplex[bytes] = Duplex(conditions, np.random.default_rng(0))
        self.session = direct_session(self.registry, "test")
        self.poller: Poller[Delivery] = Poller()
        self.answers: list[Event] = []
        self.closings: list[float] = []
        """The seconds for which the ends of connections were waited for."""
        self._deliver: Callable[[bytes], None] = lambda what: None
        instead_of_calls(monkeypatch, self._connect)

    def _connect(self, connection: Any, url: str, deliver: Callable[[bytes], None]) -> Any:
        self._deliver = deliver
        network = self

        class Connection:
            server_version = "test"
            silent = False

            def send(self, request: bytes) -> None:
                network.duplex.a.send(network.clock.now(), request)

            def finish(self) -> None:
                pass

            def close(self, timeout: float) -> None:
                network.closings.append(timeout)

        return Connection()

    def refuse(self, remote: Remote) -> Event | None:
        """Answer the oldest request with an error; return what that means."""
        response = pb.EnvironmentResponse()
        response.error.code = int(Code.RESOURCE_EXHAUSTED)
        self._deliver(response.SerializeToString())
        return remote.receive(*self.poller.get(0.0)[1:])

    @property
    def world(self) -> EnvWorld:
        world = self.registry.find_world(self.registry.names[0]).wrapped
        assert isinstance(world, EnvWorld)
        return world

    @property
    def loop(self) -> Any:
        """What decides the frames of its clock."""
        pacer: Any = self.world.pacer
        return pacer.loop

    def remote(self) -> Remote:
        remote = Remote(WorldRequest.of("grpc://virtual:1", join_settings={"wait": "now"}), self.poller)
        remote.now = self.clock.now
        remote.open()
        self.run_until(lambda: any(isinstance(answer, Joined) for answer in self.answers))
        self.answers.clear()
        return remote

    def run_until(self, done: Callable[[], bool] | float) -> None:
        """Let time pass until a time, or until something is so."""
        for _ in range(100_000):
            if callable(done) and done():
                return
            next_arrival = self.duplex.next_arrival()
            if not callable(done) and (next_arrival is None or next_arrival > done):
                self.clock.advance_to(done)
                return
            assert next_arrival is not None, "nothing is under way, so nothing will happen any more"
            now = self.clock.advance_to(next_arrival)
            for request in self.duplex.b.receive(now):
                self.duplex.b.send(now, self.session.handle(request))
            for response in self.duplex.a.receive(now):
                self._deliver(response)
            while self.poller.items:  # where there are none, `get` would look for sockets
                remote, number, what, arrived = self.poller.get(0.0)
                answer = remote.receive(number, what, arrived)
                if answer is not None:
                    self.answers.append(answer)
        raise AssertionError("this takes too long")

    def close(self) -> None:
        self.session.close()
        self.registry.close()


def read_batch(remote: Remote, message: Any) -> tuple[list[Any], Batch, Any]:
    """The rows of an answered Step, one a lane, all that stands in columns, and the info."""
    assert remote.info is not None
    lanes, layout = remote.info.lanes or 1, layout_of(remote.info.observation_space)
    batch = Batch.empty(layout, lanes)
    info = remote.world.reader.read_into(message, batch, 0, remote.now())
    return [layout.row(batch.columns, lane) for lane in range(lanes)], batch, info


def read(remote: Remote, answer: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """Observation, reward, flags and info of an answered Step."""
    assert answer.message is not None
    (row,), batch, info = read_batch(remote, answer.message)
    return row, float(batch.rewards[0]), bool(batch.terminations[0]), bool(batch.truncations[0]), info
