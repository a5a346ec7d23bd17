"""A soak (B-11): `python -m benchmarks.soak` steps and resets for long, and looks at what grows.

Memory (resident bytes), threads and open descriptors of both ends, sampled after the first 1 % and to the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Sequence

import psutil

from benchmarks.alone import add_busy, measuring
from bridge import make_remote
from bridge.testing import ServerProcess

__all__ = ["Sample", "main", "soak"]


@dataclasses.dataclass(frozen=True)
class Sample:
    """The resources that one process holds."""

    memory: int
    threads: int
    descriptors: int

    @classmethod
    def of(cls, process: psutil.Process) -> Sample:
        with process.oneshot():
            descriptors = process.num_fds() if hasattr(process, "num_fds") else process.num_handles()
            return cls(process.memory_info().rss, process.num_threads(), descriptors)


def soak(url: str, server: int, steps: int, resets: int) -> list[tuple[Sample, Sample]]:
    """Step one environment; return samples of the client and the server: after 1 %, and nine more to the end."""
    processes = psutil.Process(), psutil.Process(server)
    samples: list[tuple[Sample, Sample]] = []
    marks = [steps // 100, *(steps * part // 10 for part in range(2, 11))]
    between = max(1, steps // resets)
    env = make_remote(url)
    try:
        env.reset(seed=0)
        for count in range(1, steps + 1):
            _, _, terminated, truncated, _ = env.step(count % 2)
            if terminated or truncated or count % between == 0:
                env.reset()
            if count == marks[len(samples)]:
                gc.collect()
                samples.append((Sample.of(processes[0]), Sample.of(processes[1])))
    finally:
        env.close()
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak; the exit code is 1 where something grew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--resets", type=int, default=10_000)
    parser.add_argument("--transport", choices=["grpc", "unix"], default="unix")
    parser.add_argument("--megabytes", type=float, default=2.0, help="growth of memory that still counts as none")
    add_busy(parser)
    arguments = parser.parse_args(argv)
    extra = {"grpc": [], "unix": ["--unix-path", f"/tmp/bridge-soak-{time.time_ns()}"]}
    with measuring(parser, arguments.busy), ServerProcess("CartPole-v1", *extra[arguments.transport]) as server:
        url = next(url for url in server.urls if url.startswith(arguments.transport))
        start = time.monotonic()
        samples = soak(url, server.pid, arguments.steps, arguments.resets)
    print(f"{arguments.steps} steps over {url.partition(':')[0]} in {time.monotonic() - start:.0f} s")
    grew = False
    for side, name in enumerate(("client", "server")):
        first, last = samples[0][side], samples[-1][side]
        growth = (last.memory - first.memory) / 2**20
        print(
            f"{name}: {first.memory / 2**20:.1f} MB, {growth:+.2f} MB since the first 1 %; threads {first.threads} to "
            f"{last.threads}; descriptors {first.descriptors} to {last.descriptors}"
        )
        grew |= growth > arguments.megabytes
        grew |= last.threads > first.threads or last.descriptors > first.descriptors
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
