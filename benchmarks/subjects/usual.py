"""The usual call: `make_vec_remote(url, num_envs=N, blocking=True)`, and with separate worlds, which it was before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.loops import stepping, vector_stepping
from benchmarks.registry import Measure, goal, subject
from benchmarks.subjects.cartpole import ENV_ID, LANES, WORLDS
from bridge import make_vec_remote
from bridge.testing import ServerProcess


def _usual(count: int) -> Iterator[Measure]:
    with ServerProcess(ENV_ID) as server:
        envs = make_vec_remote(server.url, num_envs=count, blocking=True)
        try:
            yield vector_stepping(envs)
        finally:
            envs.close()


@subject("usual-64", f"gRPC: the usual call, {LANES} environments", group="cartpole")
def usual_64() -> Iterator[Measure]:
    yield from _usual(LANES)


@subject("usual-8", f"gRPC: the usual call, {WORLDS} environments", group="cartpole")
def usual_8() -> Iterator[Measure]:
    yield from _usual(WORLDS)


@subject("usual-sb3-64", f"gRPC: SB3VecEnv around the usual call, {LANES} environments", group="cartpole")
def usual_sb3() -> Iterator[Measure]:
    from bridge.wrappers import SB3VecEnv

    with ServerProcess(ENV_ID) as server:
        envs = SB3VecEnv(make_vec_remote(server.url, num_envs=LANES, blocking=True))
        actions = list(np.random.default_rng(0).integers(2, size=(64, LANES)))
        envs.reset()
        try:
            yield stepping(envs.step, actions, LANES)
        finally:
            envs.close()


goal("B-0", "usual-64", against="floor-64", at_least=0.65)
goal("B-0", "usual-8", against="worlds-8-grpc", at_least=1.4)
goal("B-0", "usual-sb3-64", against="floor-64", at_least=0.65)
