"""The cost of a slot as their number grows: `python -m benchmarks.slots` joins 64 to 4,096 of them over 32 servers.

The environments do nothing, so what is timed is what carries them. Servers are processes of this machine, and known by
a directory, as those of a cluster are.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import psutil

from benchmarks.alone import add_busy, measuring
from benchmarks.soak import Sample
from bridge import make_vec_remote
from bridge.core.client.endpoints import Endpoint
from bridge.testing import ServerProcess
from bridge.wrappers import BlockingReset

__all__ = ["Cost", "main", "measure"]

SIZES = (64, 256, 1024, 2048, 4096)
SERVERS = 32


@dataclass(frozen=True)
class Cost:
    """The time and memory of one vector environment."""

    slots: int
    connect: float
    """Seconds until all slots were joined."""
    step: float
    """Microseconds of wall-clock time a slot's step, the median over vector steps."""
    processor: float
    """Microseconds of the client's processor time a slot's step."""
    client: float
    """Kilobytes a slot that the client's process grew by."""
    server: float
    """Kilobytes a slot that the servers' processes grew by."""

    def row(self) -> str:
        return (
            f"| {self.slots:,} | {self.connect:.1f} | {self.step:.0f} | {self.processor:.0f} | {self.client:.0f} | "
            f"{self.server:.0f} |"
        )


@dataclass(frozen=True)
class Listed:
    """A directory."""

    urls: tuple[str, ...]

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(url) for url in self.urls]


def memory(pids: Sequence[int]) -> int:
    """Resident bytes of processes."""
    return sum(Sample.of(psutil.Process(pid)).memory for pid in pids)


def measure(urls: Sequence[str], pids: Sequence[int], slots: int, seconds: float) -> Cost:
    """Join so many slots, step them for so long, and leave."""
    gc.collect()
    before = memory([os.getpid()]), memory(pids)
    began = time.perf_counter()
    envs = BlockingReset(make_vec_remote(Listed(tuple(urls)), num_envs=slots, timeout=600.0))
    connect = time.perf_counter() - began
    try:
        envs.reset(seed=0)
        actions = np.zeros(slots, np.int64)
        for _ in range(3):
            envs.step(actions)
        times: list[float] = []
        began, processor = time.perf_counter(), time.process_time()
        while len(times) < 10 or time.perf_counter() - began < seconds:
            at = time.perf_counter()
            envs.step(actions)
            times.append(time.perf_counter() - at)
        processor = time.process_time() - processor
        gc.collect()
        after = memory([os.getpid()]), memory(pids)
    finally:
        envs.close()
    scale = 1e6 / slots
    grown = [(now - then) / slots / 1000 for now, then in zip(after, before, strict=True)]
    return Cost(slots, connect, statistics.median(times) * scale, processor / len(times) * scale, *grown)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each size, the servers being new for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slots", description=main.__doc__)
    parser.add_argument("slots", nargs="*", type=int, default=list(SIZES), metavar="N", help="how many slots")
    parser.add_argument("--servers", type=int, default=SERVERS, metavar="K", help=f"processes (default: {SERVERS})")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of stepping each size (default: 10)")
    parser.add_argument("--env", default="benchmarks.envs:Still-v0", metavar="ENV_ID", help="what they serve")
    parser.add_argument("--apart", action="store_true", help="a socket for each slot, as on other machines")
    add_busy(parser)
    arguments = parser.parse_args(argv)
    apart = patch("bridge.core.client.wire.connection.is_loopback", return_value=False)
    print(f"{arguments.servers} servers, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print("| slots | connect, s | step, µs a slot | of it client's processor | client, kB a slot | server, kB a slot |")
    print("|---|---|---|---|---|---|")
    with measuring(parser, arguments.busy):
        for slots in arguments.slots:
            with contextlib.ExitStack() as stack:
                most = str(max(256, slots))
                limits = ("--max-worlds", most, "--max-connections", most, "--max-requests-in-flight", most)
                servers = [
                    stack.enter_context(ServerProcess(arguments.env, *limits, timeout=300.0))
                    for _ in range(arguments.servers)
                ]
                urls = [server.url for server in servers]
                if arguments.apart:
                    stack.enter_context(apart)
                print(measure(urls, [server.pid for server in servers], slots, arguments.seconds).row(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
