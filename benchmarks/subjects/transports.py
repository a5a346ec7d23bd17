"""One environment and many worlds of one, over each transport, beside a bare echo and the public client."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import grpc

from benchmarks.loops import async_stepping, vector_stepping
from benchmarks.registry import Measure, goal, subject
from benchmarks.serving import Script, joined, server_on
from benchmarks.subjects.cartpole import ENV_ID, LANES, make_cartpole
from bridge import RemoteEnv, make_remote

ECHO = """
import concurrent.futures, sys, grpc
def echo(requests, context):
    for request in requests:
        yield request + bytes(84)
server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
handler = grpc.stream_stream_rpc_method_handler(echo)
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Process": handler}),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(f"127.0.0.1:{port}", flush=True)
sys.stdin.read()
server.stop(0).wait()
"""
STEP_BYTES = 46
"""A CartPole Step's request; its response has 84 bytes more."""


def single_stepping(env: RemoteEnv) -> Measure:
    """Return a measure of one environment's steps per second."""
    env.reset(seed=0)

    def measure(seconds: float) -> float:
        count = 0
        start = time.perf_counter()
        end = start + seconds
        while (now := time.perf_counter()) < end:
            _, _, terminated, truncated, _ = env.step(count % 2)
            if terminated or truncated:
                env.reset()
            count += 1
        return count / (now - start)

    return measure


@subject("echo-grpc", "gRPC: a bare echo of as many bytes", group="one", kind="peer")
def bare_echo() -> Iterator[Measure]:
    with Script(ECHO) as target, grpc.insecure_channel(target) as channel:
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        answers = channel.stream_stream("/bench.Echo/Process")(iter(requests.get, None))
        request = bytes(STEP_BYTES)

        def measure(seconds: float) -> float:
            count = 0
            start = time.perf_counter()
            end = start + seconds
            while (now := time.perf_counter()) < end:
                requests.put(request)
                next(answers)
                count += 1
            return count / (now - start)

        yield measure
        requests.put(None)


def one_over(transport: str, *options: str) -> Iterator[Measure]:
    """Give a measure of one CartPole of `gymnasium-bridge serve`, with further options of the command."""
    with server_on(transport, ENV_ID, *options) as url:
        env = make_remote(url)
        try:
            yield single_stepping(env)
        finally:
            env.close()


@subject("one-grpc", "gRPC: one CartPole", group="one")
def one_over_grpc() -> Iterator[Measure]:
    yield from one_over("grpc")


@subject("one-unix", "Unix socket: one CartPole", group="one")
def one_over_unix() -> Iterator[Measure]:
    yield from one_over("unix")


@subject("dm-one", "dm-env-rpc client: one CartPole", group="one", kind="peer")
def one_by_public_client() -> Iterator[Measure]:
    from benchmarks.public_client import PublicClients

    with server_on("grpc", ENV_ID) as url, PublicClients(url, 1) as clients:
        yield clients.stepping_blocking


goal("B-5", "one-unix", against="dm-one", at_least=3.0)


@subject("async-worlds", f"in process: AsyncVectorEnv, {LANES} envs", group="worlds", kind="peer")
def async_vector() -> Iterator[Measure]:
    yield from async_stepping(make_cartpole, LANES, "gymnasium.envs.classic_control")


def worlds_over(transport: str) -> Iterator[Measure]:
    with server_on(transport, ENV_ID) as url, joined(url, num_envs=LANES) as envs:
        yield vector_stepping(envs)


@subject("worlds-64-grpc", f"gRPC: {LANES} worlds of one env each", group="worlds")
def worlds_over_grpc() -> Iterator[Measure]:
    yield from worlds_over("grpc")


@subject("worlds-64-unix", f"Unix socket: {LANES} worlds of one env each", group="worlds")
def worlds_over_unix() -> Iterator[Measure]:
    yield from worlds_over("unix")


@subject(
    "dm-ahead-64", f"dm-env-rpc client: {LANES} connections, send all, then receive all", group="worlds", kind="peer"
)
def public_client_ahead() -> Iterator[Measure]:
    from benchmarks.public_client import PublicClients

    with server_on("grpc", ENV_ID) as url, PublicClients(url, LANES) as clients:
        yield clients.stepping_ahead


goal("B-3", "worlds-64-grpc", against="dm-ahead-64", at_least=4.0)
goal("B-4", "worlds-64-unix", against="async-worlds", at_least=2.0)
