"""Lanes by other means: several processes with send and recv, vectorized environments, and other projects."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import gymnasium

from benchmarks.loops import sampled_actions, stepping, vector_stepping
from benchmarks.registry import Measure, goal, subject
from benchmarks.serving import Script, joined, server_on
from benchmarks.subjects.cartpole import ENV_ID, LANES
from bridge import serve_gym
from bridge.wrappers import BlockingReset

MANY = 4096


def sending(envs: BlockingReset, at_least: int) -> Measure:
    """Return a measure of env steps per second by `send` and `recv`."""
    envs.action_space.seed(0)
    actions = envs.action_space.sample()
    envs.reset(seed=0)
    envs.send(actions)

    def measure(seconds: float) -> float:
        count = 0
        start = time.perf_counter()
        end = start + seconds
        while (now := time.perf_counter()) < end:
            slots, *_ = envs.recv(at_least=at_least)
            envs.send(actions[slots], slots)
            count += len(slots)
        return count / (now - start)

    return measure


@subject("lanes-2-processes", f"gRPC: {LANES} lanes in two processes, send and recv", group="cartpole")
def lanes_in_two_processes() -> Iterator[Measure]:
    with serve_gym(ENV_ID, num_envs=LANES // 2, processes=2) as server, joined(server.urls) as envs:
        yield sending(envs, LANES // 2)


@subject("lanes-64-unix", f"Unix socket: {LANES} lanes in one world", group="cartpole")
def lanes_over_unix() -> Iterator[Measure]:
    with server_on("unix", ENV_ID, "--num-envs", str(LANES)) as url, joined(url) as envs:
        yield vector_stepping(envs)


RLMESH = """
import sys, gymnasium, rlmesh
server = rlmesh.EnvServer([gymnasium.make("CartPole-v1") for _ in range(int(sys.argv[1]))])
server.start()
print(server.address, flush=True)
sys.stdin.read()
server.shutdown()
"""


def cartpole_actions(num_envs: int) -> gymnasium.Space[Any]:
    """Return the action space of so many CartPoles."""
    return gymnasium.vector.utils.batch_space(gymnasium.make(ENV_ID).action_space, num_envs)


@subject("rlmesh-64", f"rlmesh: {LANES} lanes of one endpoint", group="cartpole", kind="peer")
def rlmesh_lanes() -> Iterator[Measure]:
    from rlmesh.numpy import RemoteVectorEnv

    with Script(RLMESH, str(LANES)) as address:
        envs = RemoteVectorEnv(address)
        actions = sampled_actions(cartpole_actions(LANES))
        envs.reset(seed=0)
        try:
            yield stepping(envs.step, actions, LANES)
        finally:
            envs.close()


goal("B-1", "lanes-64-grpc", against="rlmesh-64", at_least=5.0)
goal("B-2", "lanes-2-processes", against="sync-64", at_least=1.0)


@subject("ray-64", f"Ray: {LANES} envs in two actors", group="cartpole", kind="peer")
def ray_actors() -> Iterator[Measure]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:

        @ray.remote
        class Actor:
            def __init__(self) -> None:
                self.envs: Any = gymnasium.make_vec(ENV_ID, num_envs=LANES // 2, vectorization_mode="sync")
                self.envs.reset(seed=0)

            def step(self, actions: Any) -> Any:
                return self.envs.step(actions)

        actors = [Actor.remote() for _ in range(2)]
        actions = sampled_actions(cartpole_actions(LANES // 2))

        def step(actions: Any) -> None:
            ray.get([actor.step.remote(actions) for actor in actors])

        yield stepping(step, actions, LANES)
    finally:
        ray.shutdown()


def vectorized(num_envs: int, transport: str) -> Iterator[Measure]:
    arguments = (ENV_ID, "--num-envs", str(num_envs), "--vectorization-mode", "vector_entry_point")
    with server_on(transport, *arguments) as url, joined(url) as envs:
        yield vector_stepping(envs)


def in_process(num_envs: int) -> Iterator[Measure]:
    envs: Any = gymnasium.make_vec(ENV_ID, num_envs=num_envs, vectorization_mode="vector_entry_point")
    yield vector_stepping(envs)
    envs.close()


def by_envpool(num_envs: int) -> Iterator[Measure]:
    import envpool

    envs = envpool.make_gymnasium(ENV_ID, num_envs=num_envs)
    actions = sampled_actions(cartpole_actions(num_envs))
    envs.reset()
    yield stepping(envs.step, actions, num_envs)
    envs.close()


@subject("vector-64", "in process: CartPole's own vector env, 64", group="vectorized-64", kind="peer")
def own_vector() -> Iterator[Measure]:
    yield from in_process(64)


@subject("envpool-64", "in process: EnvPool, 64", group="vectorized-64", kind="peer")
def envpool_vector() -> Iterator[Measure]:
    yield from by_envpool(64)


@subject("vector-64-grpc", "gRPC: CartPole's own vector env, 64 lanes", group="vectorized-64")
def own_vector_over_grpc() -> Iterator[Measure]:
    yield from vectorized(64, "grpc")


@subject("vector-64-unix", "Unix socket: CartPole's own vector env, 64 lanes", group="vectorized-64")
def own_vector_over_unix() -> Iterator[Measure]:
    yield from vectorized(64, "unix")


@subject("vector-4096", f"in process: CartPole's own vector env, {MANY}", group="vectorized-4096", kind="peer")
def large_vector() -> Iterator[Measure]:
    yield from in_process(MANY)


@subject("vector-4096-grpc", f"gRPC: CartPole's own vector env, {MANY} lanes", group="vectorized-4096")
def large_vector_over_grpc() -> Iterator[Measure]:
    yield from vectorized(MANY, "grpc")


@subject("vector-4096-unix", f"Unix socket: CartPole's own vector env, {MANY} lanes", group="vectorized-4096")
def large_vector_over_unix() -> Iterator[Measure]:
    yield from vectorized(MANY, "unix")


goal("B-10", "vector-64-grpc", against="envpool-64", at_least=0.5)
goal("B-10", "vector-4096-grpc", against="vector-4096", at_least=0.5)
