"""Many CartPoles: in process, as lanes of one world, as worlds of their own, and by the public client."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
from gymnasium.vector import SyncVectorEnv

from benchmarks.loops import async_stepping, vector_stepping
from benchmarks.registry import Measure, goal, subject
from bridge import make_vec_remote
from bridge.testing import ServerProcess
from bridge.wrappers import BlockingReset

ENV_ID = "CartPole-v1"
LANES = 64
WORLDS = 8


def make_cartpole() -> gymnasium.Env:
    return gymnasium.make(ENV_ID)


@subject("sync-64", f"in process: SyncVectorEnv, {LANES} envs", group="cartpole", kind="peer")
def sync_vector() -> Iterator[Measure]:
    envs = SyncVectorEnv([make_cartpole] * LANES)
    try:
        yield vector_stepping(envs)
    finally:
        envs.close()


@subject("async-64", f"in process: AsyncVectorEnv, {LANES} envs", group="cartpole", kind="peer")
def async_vector() -> Iterator[Measure]:
    yield from async_stepping(make_cartpole, LANES, "gymnasium.envs.classic_control")


@subject("lanes-64-grpc", f"gRPC: {LANES} lanes in one world", group="cartpole")
def lanes_over_grpc() -> Iterator[Measure]:
    with ServerProcess(ENV_ID, "--num-envs", str(LANES)) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        try:
            yield vector_stepping(envs)
        finally:
            envs.close()


@subject("worlds-8-grpc", f"gRPC: {WORLDS} worlds of one env each", group="cartpole")
def worlds_over_grpc() -> Iterator[Measure]:
    with ServerProcess(ENV_ID) as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=WORLDS))
        try:
            yield vector_stepping(envs)
        finally:
            envs.close()


@subject(
    "dm-ahead-8", f"dm-env-rpc client: {WORLDS} connections, send all, then receive all", group="cartpole", kind="peer"
)
def public_client_ahead() -> Iterator[Measure]:
    from benchmarks.public_client import PublicClients

    with ServerProcess(ENV_ID) as server, PublicClients(server.url, WORLDS) as clients:
        yield clients.stepping_ahead


@subject(
    "dm-blocking-8", f"dm-env-rpc client: {WORLDS} connections, one after the other", group="cartpole", kind="peer"
)
def public_client_blocking() -> Iterator[Measure]:
    from benchmarks.public_client import PublicClients

    with ServerProcess(ENV_ID) as server, PublicClients(server.url, WORLDS) as clients:
        yield clients.stepping_blocking


goal("B-1", "lanes-64-grpc", against="sync-64", at_least=0.8)
goal("B-1", "lanes-64-grpc", against="async-64", at_least=5.0)
