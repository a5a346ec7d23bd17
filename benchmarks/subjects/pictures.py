"""Large observations: 64 lanes of Atari's frames, 16 lanes of stacked float32 frames."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium

import benchmarks.envs  # noqa: F401 - registers them
from benchmarks.loops import async_stepping, vector_stepping
from benchmarks.registry import Measure, goal, subject
from benchmarks.serving import joined, server_on

FRAMES = 64
FLOATS = 16


def make_frames() -> gymnasium.Env:

    return gymnasium.make("Frames-v0")


@subject(
    "frames-async", f"in process: AsyncVectorEnv with shared memory, {FRAMES} × 210×160×3", group="frames", kind="peer"
)
def frames_async() -> Iterator[Measure]:
    yield from async_stepping(make_frames, FRAMES, "benchmarks.envs")


def lanes(transport: str, env_id: str, count: int) -> Iterator[Measure]:
    with server_on(transport, f"benchmarks.envs:{env_id}", "--num-envs", str(count)) as url, joined(url) as envs:
        yield vector_stepping(envs)


@subject("frames-grpc", f"gRPC: {FRAMES} lanes of 210×160×3", group="frames")
def frames_over_grpc() -> Iterator[Measure]:
    yield from lanes("grpc", "Frames-v0", FRAMES)


@subject("frames-unix", f"Unix socket: {FRAMES} lanes of 210×160×3", group="frames")
def frames_over_unix() -> Iterator[Measure]:
    yield from lanes("unix", "Frames-v0", FRAMES)


goal("B-7", "frames-grpc", against="frames-async", at_least=1.3)


@subject("floats-grpc", f"gRPC: {FLOATS} lanes of 84×84×4 float32", group="floats")
def floats_over_grpc() -> Iterator[Measure]:
    yield from lanes("grpc", "Floats-v0", FLOATS)


@subject("floats-unix", f"Unix socket: {FLOATS} lanes of 84×84×4 float32", group="floats")
def floats_over_unix() -> Iterator[Measure]:
    yield from lanes("unix", "Floats-v0", FLOATS)


@subject("floats-dm", f"dm-env-rpc client: {FLOATS} connections of 84×84×4 float32", group="floats", kind="peer")
def floats_by_public_client() -> Iterator[Measure]:
    from benchmarks.public_client import PublicClients

    with server_on("grpc", "benchmarks.envs:Floats-v0") as url, PublicClients(url, FLOATS) as clients:
        yield clients.stepping_ahead


goal("B-8", "floats-grpc", against="floats-dm", at_least=20.0)
