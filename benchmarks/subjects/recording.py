"""The cost of recording: lanes and one environment, with a server that records beside one that does not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from benchmarks.loops import vector_stepping
from benchmarks.registry import Measure, goal, subject
from benchmarks.serving import joined, server_on
from benchmarks.subjects.cartpole import ENV_ID, LANES
from benchmarks.subjects.transports import one_over


@subject("lanes-64-recorded", f"gRPC: {LANES} lanes in one world, recorded", group="cartpole")
def recorded_lanes() -> Iterator[Measure]:
    with (
        tempfile.TemporaryDirectory() as folder,
        server_on("grpc", ENV_ID, "--num-envs", str(LANES), "--record", folder) as url,
        joined(url) as envs,
    ):
        yield vector_stepping(envs)


def one_recorded(transport: str) -> Iterator[Measure]:
    with tempfile.TemporaryDirectory() as folder:
        yield from one_over(transport, "--record", folder)


@subject("one-recorded", "gRPC: one CartPole, recorded", group="one")
def one_recorded_over_grpc() -> Iterator[Measure]:
    yield from one_recorded("grpc")


@subject("one-unix-recorded", "Unix socket: one CartPole, recorded", group="one")
def one_recorded_over_unix() -> Iterator[Measure]:
    yield from one_recorded("unix")


goal("B-18", "lanes-64-recorded", against="lanes-64-grpc", at_least=0.95)
goal("B-18", "one-recorded", against="one-grpc", at_least=0.9)
goal("B-18", "one-unix-recorded", against="one-unix", at_least=0.9)
