"""OpenEnv: an environment a WebSocket session, messages in JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing

from benchmarks.registry import Measure, subject
from benchmarks.serving import Script

_SERVER = """
import socket, sys, threading
import gymnasium, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State
from openenv.core.env_server.http_server import create_fastapi_app

class Choice(Action):
    choice: int

class Seen(Observation):
    values: list[float]

class CartPole(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.env = gymnasium.make("CartPole-v1")

    def reset(self, seed=None, episode_id=None, **more):
        return Seen(values=self.env.reset(seed=seed)[0].tolist())

    def step(self, action, timeout_s=None, **more):
        values, reward, terminated, truncated, _ = self.env.step(action.choice)
        return Seen(values=values.tolist(), reward=reward, done=terminated or truncated)

    @property
    def state(self):
        return State()

app = create_fastapi_app(CartPole, Choice, Seen, max_concurrent_envs=128)
sock = socket.create_server(("127.0.0.1", 0))
server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws_ping_interval=None))
threading.Thread(target=lambda: (sys.stdin.read(), setattr(server, "should_exit", True)), daemon=True).start()
print(sock.getsockname()[1], flush=True)
server.run([sock])
"""


def _sessions(number: int) -> Iterator[Measure]:
    from openenv.core import GenericEnvClient

    with Script(_SERVER) as port, closing(asyncio.new_event_loop()) as loop:
        clients = [GenericEnvClient(base_url=f"ws://127.0.0.1:{port}") for _ in range(number)]

        async def every(method: str, *arguments: object) -> list[object]:
            return await asyncio.gather(*(getattr(client, method)(*arguments) for client in clients))

        async def play(client: object, steps: list[int], end: float) -> None:
            while time.perf_counter() < end:
                result = await client.step({"choice": steps[0] & 1})  # type: ignore[attr-defined]
                steps[0] += 1
                if result.done:
                    await client.reset()  # type: ignore[attr-defined]

        async def work(seconds: float) -> float:
            await every("reset")  # a session that was idle between turns may be a new one
            steps, start = [0], time.perf_counter()
            await asyncio.gather(*(play(client, steps, start + seconds) for client in clients))
            return steps[0] / (time.perf_counter() - start)

        loop.run_until_complete(every("connect"))
        try:
            yield lambda seconds: loop.run_until_complete(work(seconds))
        finally:
            loop.run_until_complete(every("close"))


@subject("openenv-one", "OpenEnv: one CartPole", group="one", kind="peer")
def openenv_one() -> Iterator[Measure]:
    yield from _sessions(1)


@subject("openenv-64", "OpenEnv: 64 sessions of one env each, none waits for another", group="worlds", kind="peer")
def openenv_many() -> Iterator[Measure]:
    yield from _sessions(64)
