"""`python -m benchmarks.fuzz`: random and garbled requests, from several clients at once in one server's worlds.

Each request must be answered by exactly one EnvironmentResponse that can be read, whatever its bytes are, and memory
must not grow. Requests are random bytes, valid ones, and valid ones with bytes changed, cut out or doubled.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence

import psutil

from benchmarks.alone import add_busy, measuring
from bridge.core.encoding.names import CALL_REQUEST_URL, PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor
from bridge.core.server.limits import CoreLimits
from bridge.core.server.registry import Registry
from bridge.core.server.session import Session
from bridge.core.worlds.sources.source import EnvSource
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from bridge.testing import CountingEnv, LocalRuntime


@dataclasses.dataclass
class Report:
    """The result of a run."""

    requests: int
    seconds: float
    answers: Counter[str]
    """How many answers of each kind."""
    grown: int
    """Bytes by which the process's memory grew after the first tenth."""


def valid_requests(names: Sequence[str]) -> list[bytes]:
    """Return requests of every kind, in good order for worlds of these names."""
    requests = [
        pb.EnvironmentRequest(create_world=pb.CreateWorldRequest()),
        pb.EnvironmentRequest(create_world=pb.CreateWorldRequest(settings={"num_envs": pack_tensor(2)})),
        pb.EnvironmentRequest(join_world=pb.JoinWorldRequest()),
        pb.EnvironmentRequest(reset=pb.ResetRequest(settings={"seed": pack_tensor(7)})),
        pb.EnvironmentRequest(step=pb.StepRequest(requested_observations=[1, 2, 3, 4, 5, 6])),
        pb.EnvironmentRequest(step=pb.StepRequest(actions={1: pack_tensor(1)}, requested_observations=[1, 2])),
        pb.EnvironmentRequest(step=pb.StepRequest(actions={1: pack_tensor([0, 1])}, requested_observations=[1])),
        pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()),
        pb.EnvironmentRequest(),
    ]
    for name in names:
        requests.append(pb.EnvironmentRequest(join_world=pb.JoinWorldRequest(world_name=name)))
        requests.append(pb.EnvironmentRequest(destroy_world=pb.DestroyWorldRequest(world_name=name)))
    for key in ("", "world", "world.name", "world.observation_space", "server.worlds"):
        body = properties_pb2.PropertyRequest(read_property=properties_pb2.ReadPropertyRequest(key=key))
        request = pb.EnvironmentRequest()
        request.extension.type_url, request.extension.value = PROPERTY_REQUEST_URL, body.SerializeToString()
        requests.append(request)
    request = pb.EnvironmentRequest()
    request.extension.type_url, request.extension.value = CALL_REQUEST_URL, b"\x0a\x06length"
    requests.append(request)
    return [request.SerializeToString() for request in requests]


def garbled(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with some of them changed, cut out or doubled."""
    if not data:
        return rng.randbytes(rng.randint(1, 8))
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(out)) if out else 0
        kind = rng.randrange(3)
        if kind == 0 and out:
            out[place] = rng.randrange(256)
        elif kind == 1:
            del out[place : place + rng.randint(1, 4)]
        else:
            out[place:place] = out[place : place + rng.randint(1, 8)]
    return bytes(out)


def run(requests: int, *, clients: int = 4, seed: int = 0) -> Report:
    """Send requests to the sessions of several clients, who come and go.

    Raises:
        AssertionError: A request was answered by something that is no EnvironmentResponse, or raised.
    """
    rng = random.Random(seed)
    runtime = LocalRuntime()
    registry = Registry(
        EnvSource(lambda: CountingEnv(5)),
        CoreLimits(max_worlds=8, max_lanes=8, reset_world_timeout=0.01),
        runtime,
    )
    sessions = [Session(registry) for _ in range(clients)]
    answers: Counter[str] = Counter()
    process = psutil.Process()
    grown_from = 0
    began = time.perf_counter()
    pool = valid_requests([])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(requests):
            if number == requests // 10:
                grown_from = process.memory_info().rss
            if number % 64 == 0:
                pool = valid_requests(registry.names)
                which = rng.randrange(clients)
                sessions[which].close()  # clients die in every state
                sessions[which] = Session(registry)
            way = rng.random()
            data = rng.choice(pool) if way < 0.6 else garbled(rng.choice(pool), rng) if way < 0.9 else rng.randbytes(24)
            parts = runtime.run(sessions[rng.randrange(clients)].handle(data))
            answer = pb.EnvironmentResponse.FromString(b"".join(parts))
            kind = answer.WhichOneof("payload")
            if kind is None:
                raise AssertionError(f"no answer to {data!r}")
            answers[f"error {answer.error.code}" if kind == "error" else kind] += 1
    seconds = time.perf_counter() - began
    grown = process.memory_info().rss - grown_from
    for session in sessions:
        session.close()
    runtime.run(registry.close())
    return Report(requests, seconds, answers, grown)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the figures; the exit code is 1 where memory grew by more than 20 MB."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description="Random requests, one answer each.")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    add_busy(parser)
    arguments = parser.parse_args(argv)
    with measuring(parser, arguments.busy):
        report = run(arguments.requests, seed=arguments.seed)
    print(
        f"{report.requests} requests in {report.seconds:.0f} s, one answer each: {dict(report.answers.most_common())}; "
        f"memory grew by {report.grown / 1e6:.1f} MB after the first tenth"
    )
    return int(report.grown > 20_000_000)


if __name__ == "__main__":
    sys.exit(main())
