"""Ends of a WebSocket that answer no ping while they compute: how long that may take is said by `timeout` alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.connection import Connection

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.dial import DialListener
from bridge.errors import RemoteTimeoutError
from bridge.policies import RemotePolicy, serve_policy
from bridge.testing import CountingEnv
from tests.inside import server_signs_of_life, sign_of_life_after
from tests.policy_peers import METADATA, array

# Seconds that the busy end computes: many times what a ping is given below.
BUSY = 1.5
SCHEMA = {
    "action": {"properties": {"move": {"type": "integer", "minimum": 0, "maximum": 1}}},
    "observation": {"properties": {"count": {"type": "integer", "minimum": 0, "maximum": 9}}},
}


@pytest.fixture(autouse=True)
def _pings_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `websockets` ping every 0.1 s, and close after as long without a pong where it closes at all."""
    start = getattr(Connection, "start_keepalive", None)
    if start is None:
        pytest.skip("this version of websockets sends no pings")

    def frequent(connection: Connection) -> None:
        connection.ping_interval = 0.1
        if connection.ping_timeout is not None:
            connection.ping_timeout = 0.1
        start(connection)

    monkeypatch.setattr(Connection, "start_keepalive", frequent)


@contextlib.contextmanager
def served_by_a_loop(handler: Callable[[ServerConnection], Any]) -> Iterator[int]:
    """The port of a WebSocket server whose handlers run in its event loop; it also tells the schema of an OpenEnv."""
    ports: list[int] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()

    def answer(connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/schema":
            return None
        body = json.dumps(SCHEMA).encode()
        return Response(200, "OK", Headers({"Content-Length": str(len(body)), "Connection": "close"}), body)

    async def run() -> None:
        async with serve(
            handler, "127.0.0.1", 0, process_request=answer, ping_interval=None, close_timeout=0.2
        ) as server:
            ports.append(server.sockets[0].getsockname()[1])
            ready.set()
            with contextlib.suppress(asyncio.CancelledError):
                await server.serve_forever()

    task = loop.create_task(run())
    thread = threading.Thread(target=lambda: loop.run_until_complete(task))
    thread.start()
    try:
        assert ready.wait(20.0)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


async def busy_policy(connection: ServerConnection) -> None:
    await connection.send(METADATA)
    async for _ in connection:
        time.sleep(BUSY)  # as openpi's server, which infers in its event loop
        await connection.send(msgpack.packb({"actions": array([[7.0]])}))


async def busy_environment(connection: ServerConnection) -> None:
    count = 0
    async for message in connection:
        if json.loads(message)["type"] == "step":
            time.sleep(BUSY)
            count += 1
        data = {"observation": {"count": count}, "reward": 1.0, "done": False}
        await connection.send(json.dumps({"type": "observation", "data": data}))


def test_a_policy_that_answers_no_ping_while_it_infers_is_waited_for() -> None:
    with (
        served_by_a_loop(busy_policy) as port,
        RemotePolicy(f"ws://127.0.0.1:{port}", timeout=30.0, reconnect=0.0) as policy,
    ):
        assert [policy(np.zeros(1)).tolist() for _ in range(2)] == [[7.0], [7.0]]


def test_a_policy_that_takes_longer_than_the_timeout_is_given_up() -> None:
    with (
        served_by_a_loop(busy_policy) as port,
        RemotePolicy(f"ws://127.0.0.1:{port}", timeout=0.5, reconnect=0.0) as policy,
        pytest.raises(RemoteTimeoutError, match=r"within 0\.5 s"),
    ):
        policy(np.zeros(1))


def test_an_openenv_server_that_answers_no_ping_while_it_steps_is_waited_for() -> None:
    with served_by_a_loop(busy_environment) as port:
        env = make_remote(f"openenv://127.0.0.1:{port}", timeout=30.0)
        env.reset(seed=0)
        for count in (1, 2):
            observation, reward, terminated, truncated, info = env.step(1)
            assert (observation, reward, terminated, truncated, info) == (count, 1.0, False, False, {})
        env.close()


def test_the_slots_of_openenv_servers_that_answer_no_ping_are_waited_for() -> None:
    with served_by_a_loop(busy_environment) as port:
        envs = make_vec_remote(f"openenv://127.0.0.1:{port}", num_envs=2, timeout=30.0, blocking=True)
        envs.reset(seed=0)
        observations, _, _, truncations, infos = envs.step(np.array([1, 1]))
        assert observations.tolist() == [1, 1]
        assert not truncations.any()
        assert "error" not in infos
        envs.close()


def test_a_client_of_a_policy_that_answers_no_ping_while_it_acts_keeps_its_connection() -> None:
    async def play(url: str) -> list[Any]:
        async with connect(url, ping_interval=None) as connection:
            await connection.recv()
            answers = []
            for _ in range(2):
                await connection.send(msgpack.packb({"observation": array([1.0])}))
                answers.append(msgpack.unpackb(await connection.recv()))
                time.sleep(BUSY)  # it steps its robot in the event loop
            return answers

    with serve_policy(lambda observations: observations) as server:
        assert [set(answer) for answer in asyncio.run(play(server.url))] == [{"actions", "server_timing"}] * 2


def test_a_client_of_openenv_that_answers_no_ping_while_it_thinks_keeps_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server_signs_of_life(monkeypatch, 0.05, 0.1, 0.1)

    async def play(url: str) -> list[Any]:
        async with connect(url, ping_interval=None) as connection:
            await connection.send(json.dumps({"type": "reset", "data": {}}))
            await connection.recv()
            counts = []
            for _ in range(2):
                time.sleep(BUSY)  # it runs a model in the event loop
                await connection.send(json.dumps({"type": "step", "data": {"action": 1}}))
                counts.append(json.loads(await connection.recv())["data"]["reward"])
            return counts

    with serve_gym(CountingEnv, web=True, openenv=True) as server:
        assert asyncio.run(play(f"ws://127.0.0.1:{server.port}/ws")) == [1.0, 2.0]


@pytest.mark.parametrize("way", ["grpc", "ws", "dialed", "dialed+ws"])
def test_a_step_may_take_longer_than_our_own_server_has_for_a_ping(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    sign_of_life_after(monkeypatch, 0.4)

    class Slow(CountingEnv):
        def step(self, action: Any) -> Any:
            time.sleep(BUSY)
            return super().step(action)

    with contextlib.ExitStack() as opened:
        if way.startswith("dialed"):
            target: Any = opened.enter_context(contextlib.closing(DialListener("listen://127.0.0.1:0", timeout=30.0)))
            scheme = "ws" if way.endswith("ws") else "grpc"
            opened.enter_context(serve_gym(Slow, dial=f"{scheme}://127.0.0.1:{target.port}"))
        else:
            server = opened.enter_context(serve_gym(Slow, web=True))
            target = f"{way}://127.0.0.1:{server.port}"
        envs = make_vec_remote(target, num_envs=1, timeout=30.0, blocking=True)
        envs.reset(seed=0)
        assert envs.step(np.array([1]))[1:4] == ([1.0], [False], [False])
        envs.close()
